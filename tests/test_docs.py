"""The code blocks of docs/parallel.md run, one after the other, on simulated ranks."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.examples.llama import Config, Llama

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "parallel.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Layer(), Layer())

    def forward(self, x):
        return self.layers(x)


class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.ModuleDict({"qkv": nn.Linear(24, 48), "out": nn.Linear(24, 24)})


def block(start):
    """The block that has this in it."""
    (found,) = [each for each in BLOCKS if start in each]
    return found


def on_ranks(run):
    return sw.simulate(lambda: run(sw.init_device_mesh("cpu", (2, 2), ("dp", "tp"))), 4)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_the_first_plan_lays_out_a_model_and_it_trains_on_rows_of_the_data_axis(tmp_path):
    alone, data = Net(), torch.randn(6, 4)
    weights = alone.state_dict()

    def run(mesh):
        model = Net()
        names = {"model": model, "mesh": mesh}
        exec(block("PLAN = {"), names)
        model.load_state_dict(weights)  # whole plain tensors
        mine = data.chunk(2)[mesh.get_local_rank("dp")]
        names |= {"inputs": mine, "labels": mine, "torch": torch, "path": tmp_path / "whole.pt"}
        names |= {"DTensor": sw.DTensor}
        exec(block("inputs = DTensor.from_local"), names)
        loss = (model(names["inputs"]) - names["labels"]).square().mean()
        loss.backward()
        exec(block("torch.save"), names)
        return loss.item()

    expected = (alone(data) - data).square().mean().item()
    assert on_ranks(run) == pytest.approx([expected] * 4, abs=1e-6)
    saved = torch.load(tmp_path / "whole.pt")
    assert all(torch.equal(saved[name], weights[name]) for name in weights)


def test_the_blocks_on_fused_projections_and_ready_plans():
    def run(mesh):
        names = {"Shard": Shard}
        exec(block("FUSED = {"), names)
        fused = sw.parallel.shard_module(Fused(), mesh, names["FUSED"])
        assert fused.attention["qkv"].weight.to_local().shape[0] in (32, 16)
        names = {"mesh": mesh, "model": Llama(Config()), "shard_module": sw.parallel.shard_module}
        exec(block("plans.llama("), names)
        assert names["model"].output.weight.placements[1] == Shard(0)

    on_ranks(run)


def test_the_blocks_on_styles():
    def run(mesh):
        names = {"mesh": mesh, "model": Net()}
        exec(block('plan = {"layers.*"'), names)
        assert names["model"](torch.ones(2, 4)).shape == (2, 4)

    on_ranks(run)
    names = {"Replicate": Replicate, "Shard": Shard, "Activations": sw.parallel.Activations}
    exec(block("SEQUENCE_PARALLEL = {"), names)


def test_every_block_of_the_page_is_python():
    for each in BLOCKS:
        compile(each, "docs/parallel.md", "exec")
