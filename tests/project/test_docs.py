"""The code blocks of the guides run on simulated ranks.

Those of docs/export.md need real ones (tests/export/test_export_docs_gloo.py), those of
docs/hugging-face.md transformers (tests/models/test_transformers.py). tests/project/test_readme.py
runs whole programs, which have their output below them.
"""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
import shardwise.fsdp
from shardwise import Replicate, Shard
from shardwise.examples.llama import Config, Llama
from shardwise.fsdp import build

DOCS = Path(__file__).resolve().parents[2] / "docs"


def blocks(page):
    """The blocks of a page, without its program."""
    found = re.findall(
        r"```python\n(.*?)```(\n+```text)?", (DOCS / page).read_text("utf-8"), re.DOTALL
    )
    return [block for block, is_program in found if not is_program]


TRIED_ELSEWHERE = {"export.md", "hugging-face.md"}
TRIED_HERE = {"dtensor.md", "fsdp.md", "moving-over.md", "parallel.md", "sharded.md"}
BLOCKS = blocks("parallel.md")


def test_there_is_no_page_whose_code_nobody_runs():
    with_code = {page.name for page in DOCS.glob("*.md") if blocks(page.name)}
    assert with_code == TRIED_HERE | TRIED_ELSEWHERE


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
        names |= {"model": Net(), "replicate": sw.fsdp.replicate}
        exec(block("replicate(model, mesh="), names)
        names["model"](torch.ones(2, 4) * mesh.get_local_rank("dp")).sum().backward()
        assert all(each.grad is not None for each in names["model"].parameters())

    on_ranks(run)
    names = {"Replicate": Replicate, "Shard": Shard, "Activations": sw.parallel.Activations}
    exec(block("SEQUENCE_PARALLEL = {"), names)


def test_every_block_of_the_page_is_python():
    for each in BLOCKS:
        compile(each, "docs/parallel.md", "exec")


# ---- docs/dtensor.md: a tensor, one whose dim is made of pieces, an operator of the user's


@torch.library.custom_op("mine::matmul", mutates_args=())
def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


def test_the_guide_to_dtensors_runs():
    first, meshes, pieces, own = blocks("dtensor.md")
    whole, weight, x = torch.randn(4, 6), torch.randn(48, 32), torch.randn(5, 32)
    names = {"sw": sw, "DTensor": sw.DTensor, "Shard": Shard, "Replicate": Replicate}

    def run(mesh):
        piece = whole.chunk(2)[mesh.get_local_rank("dp")]
        known = names | {"mesh": mesh, "full": whole, "piece": piece}
        exec(first, known)
        assert torch.equal(known["x"].full_tensor(), whole)
        exec(meshes, known)
        assert known["x"].device_mesh is known["dense"] and known["experts"]["ep"].size() == 4
        known |= {"mesh": mesh["tp"], "weight": weight, "x": x, "F": nn.functional}
        exec(pieces, known)
        assert f"qkv.mesh_layout  # {known['qkv'].mesh_layout}\n" in pieces
        torch.testing.assert_close(known["q"].full_tensor(), x @ weight[:24].T)
        assert str(known["q"].unflatten(-1, (6, 4)).mesh_layout).endswith("(6/2)@tp, 4]")

    on_ranks(run)
    exec(own, {"sw": sw, "torch": torch})


# ---- docs/moving-over.md: a program whose imports were changed


def test_the_program_that_moved_over_runs():
    (program,) = blocks("moving-over.md")
    sw.simulate(lambda: exec(program, {"torch": torch}), 2)


# ---- docs/fsdp.md: its blocks are one program


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


TOKENS = torch.arange(24).view(2, 12) * 7 % 10
MODELS = ("model", "replica", "hybrid", "large", "mixed", "average", "huge")


def parts(rank, count):
    """Of each batch the part of a rank: tokens, and what should follow."""
    return [(each, (each + 1) % 10) for each in TOKENS.view(2, count, -1)[:, rank]]


def run_the_page(path):
    torch.manual_seed(0)
    names = {"make_model": Stack, "batches": parts, "loss_of": nn.functional.cross_entropy}
    names |= {"microbatches": parts(0, 4), "path": path, "print": lambda *shown: None}
    losses = []
    for each in blocks("fsdp.md"):
        exec(compile(each, "docs/fsdp.md", "exec"), names)
        if "shown" in names and not losses:
            losses.append(names["shown"])
    layout = str(names["large"].layers[0].up.weight.mesh_layout)
    assert f"print(large.layers[0].up.weight.mesh_layout)  # {layout}" in (
        DOCS / "fsdp.md"
    ).read_text("utf-8")
    inputs, labels = parts(0, 4)[0]
    for name in MODELS:
        model = names[name]
        loss = nn.functional.cross_entropy(model(inputs).float(), labels)
        losses.append(loss.full_tensor().item() if isinstance(loss, sw.DTensor) else loss.item())
    names["update"](names["average"], names["model"])
    backward = [e for e in names["events"] if e.rank == 0 and e.cause.direction == "backward"]
    gathered = [e.cause.module for e in backward if e.cause.operator == "unshard"]
    assert gathered == ["layers.0"], "what a checkpoint computes anew is not gathered again"
    return losses


def test_the_example_of_context_parallelism_attends_to_the_whole_sequence():
    def run():
        mesh = sw.init_device_mesh("cpu", (2, 2), ("dp", "cp"))
        exec(block("context_parallel_unshard"), {"torch": torch, "mesh": mesh})

    sw.simulate(run, 4)


def test_the_page_on_data_parallelism_is_a_program_that_trains_as_one_process_does(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(build, "BUCKET_BYTES", 0)  # each group travels by itself, as large ones do
    torch.manual_seed(0)
    alone = Stack()
    optimizer = torch.optim.AdamW(alone.parameters())
    for tokens in TOKENS:
        loss = nn.functional.cross_entropy(alone(tokens), (tokens + 1) % 10)
        loss.backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for shown, *others in sw.simulate(run_the_page, 4, tmp_path / "whole.pt"):
        assert shown == pytest.approx(loss.item(), abs=1e-5)
        assert len(others) == len(MODELS) and all(1 < each < 4 for each in others)


# ---- docs/sharded.md: its blocks are one program


def test_the_guide_to_sharded_tensors_runs() -> None:
    def run():
        torch.manual_seed(0)
        names = {"rank": sw.communicator(sw.init_device_mesh("cpu", (4,))).index}
        for each in blocks("sharded.md"):
            exec(compile(each, "docs/sharded.md", "exec"), names)
        whole, table, stacked = names["whole"], names["table"], names["stacked"]
        assert torch.equal(table.full_tensor(), whole)
        assert stacked.shape == (8, 6) and torch.equal(stacked, names["joined"])
        assert torch.equal(names["vectors"], whole[names["tokens"]])
        means = [whole[bag].mean(0) for bag in names["bags"]]
        torch.testing.assert_close(names["means"].to_local(), torch.stack(means))

    sw.simulate(run, 4)
