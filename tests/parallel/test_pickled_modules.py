"""Modules with our hooks are pickled, saved and copied, and compute the same afterwards."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.state_dicts import spread, train
from torch import nn

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard
from shardwise.fsdp import FSDPError, fully_shard
from shardwise.parallel import (
    Activations,
    ColwiseParallel,
    PlanError,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
    shard_module,
)


class Net(nn.Module):
    """Two projections around a norm, and a module that returns several tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 9)
        self.norm = nn.LayerNorm(9)
        self.down = nn.Linear(9, 6)
        self.pair = Pair()
        self.named = Named()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(self.norm(self.up(x)).relu())
        first, _ = self.pair(x, scale=x)
        return self.named(first)["y"]


class Pair(nn.Module):
    def forward(self, x: torch.Tensor, scale: Any = None) -> Any:
        return x * scale, x


class Named(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return {"y": x + 1}


REPLICATE = {"tp": Replicate()}
X = torch.arange(24.0).reshape(4, 6) / 10


def _activations(model: nn.Module, mesh: sw.DeviceMesh) -> None:
    plan = {
        "up.*": {"tp": Shard(0)},
        "down.weight": {"tp": Shard(1)},
        "": Activations(inputs=REPLICATE, outputs=REPLICATE),
        "norm": Activations(inputs={"input": REPLICATE}),
        "pair": Activations(
            inputs={0: {"tp": Shard(0)}, "scale": {"tp": Shard(0)}}, outputs=[REPLICATE, None]
        ),
        "named": Activations(outputs={"y": REPLICATE}),
    }
    shard_module(model, mesh, plan)


def _styles(model: nn.Module, mesh: sw.DeviceMesh) -> None:
    parallelize_module(
        model,
        mesh,
        {
            "up": ColwiseParallel(output_layouts=Shard(0)),
            "norm": SequenceParallel(sequence_dim=0),
            "down": RowwiseParallel(input_layouts=Shard(0)),
            "pair": PrepareModuleInputOutput(
                input_layouts=(Replicate(),),
                desired_input_layouts=(Shard(0),),
                input_kwarg_layouts={"scale": Replicate()},
                desired_input_kwarg_layouts={"scale": Shard(0)},
                output_layouts=(Shard(0), None),
                desired_output_layouts=(Replicate(), None),
            ),
            "named": PrepareModuleOutput(
                output_layouts={"y": Replicate()}, desired_output_layouts={"y": Replicate()}
            ),
        },
    )


def _prepared(model: nn.Module, mesh: sw.DeviceMesh) -> None:
    prepare = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    parallelize_module(model, mesh, {"named": prepare})


def enter(module: nn.Module, inputs: Any, mesh: sw.DeviceMesh) -> Any:
    return tuple(sw.distribute_tensor(each, mesh, [Shard(0)]) for each in inputs)


def leave(module: nn.Module, output: Any, mesh: sw.DeviceMesh) -> Any:
    return output.full_tensor()


def _distributed(model: nn.Module, mesh: sw.DeviceMesh) -> None:
    sw.distribute_module(model, mesh, input_fn=enter, output_fn=leave)


SPREAD = {
    "Activations": _activations,
    "styles": _styles,
    "PrepareModuleInput": _prepared,
    "distribute_module": _distributed,
}


def through_torch_save(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": through_torch_save,
    "deepcopy": copy.deepcopy,
}


def whole(x: Any) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", SPREAD)
def test_a_copy_computes_and_trains_like_the_original(kind: str, way: str) -> None:
    torch.manual_seed(0)
    alone = Net()
    expected = alone(X)
    expected.square().sum().backward()

    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2,), ("tp",))
        torch.manual_seed(0)
        model = Net()
        SPREAD[kind](model, mesh)
        for _ in range(2):  # before and after a forward, which fills the caches of the hooks
            made = WAYS[way](model)
            result = whole(made(X))
            torch.testing.assert_close(result, expected)
            result.square().sum().backward()
            for name, parameter in made.named_parameters():
                gradient = whole(parameter.grad)
                torch.testing.assert_close(gradient, alone.get_parameter(name).grad)
            assert all(each.grad is None for each in model.parameters())
            with torch.no_grad():
                torch.testing.assert_close(whole(model(X)), expected)

    sw.simulate(run, 2)


@pytest.mark.parametrize("way", WAYS)
def test_a_model_and_its_optimizer_go_on_training_from_one_file(way: str) -> None:
    def run() -> None:
        model, optimizer = spread("tp")
        train(model, optimizer, 1)
        again = WAYS[way]((model, optimizer))
        for each in ((model, optimizer), again):
            train(*each)
        for mine, theirs in zip(model.parameters(), again[0].parameters(), strict=True):
            assert torch.equal(mine.full_tensor(), theirs.full_tensor())

    sw.simulate(run, 2)


def test_a_copy_of_a_styled_module_is_known_as_styled() -> None:
    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2,), ("tp",))
        model = nn.Linear(4, 4)
        parallelize_module(model, mesh, ColwiseParallel())
        for way in WAYS.values():
            with pytest.raises(PlanError, match="parallelize a module once"):
                parallelize_module(way(model), mesh, ColwiseParallel())

    sw.simulate(run, 2)


def sum_of_rows(x: torch.Tensor) -> torch.Tensor:
    return x.sum(0)


mapped_elsewhere = sw.local_map(sum_of_rows, out_placements=[Partial()])


@sw.local_map(out_placements=[Shard(0)])
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


class Mapped:
    @sw.local_map(out_placements=[Shard(0)])
    def tripled(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * x


def test_functions_of_local_tensors_are_pickled_and_are_methods_too() -> None:
    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2,), ("tp",))
        x = sw.distribute_tensor(X, mesh, [Shard(0)])
        assert pickle.loads(pickle.dumps(doubled)) is doubled is copy.deepcopy(doubled)
        assert torch.equal(doubled(x).full_tensor(), 2 * X)
        again = pickle.loads(pickle.dumps(mapped_elsewhere))
        torch.testing.assert_close(again(x).full_tensor(), X.sum(0))
        assert torch.equal(Mapped().tripled(x).full_tensor(), 3 * X)
        assert doubled.__name__ == "doubled"

    sw.simulate(run, 2)


def test_a_fully_sharded_module_is_not_pickled_and_says_what_to_save() -> None:
    def run() -> None:
        model = nn.Linear(4, 4)
        fully_shard(model, mesh=sw.init_device_mesh("cpu", (2,)))
        with pytest.raises(FSDPError, match="get_model_state_dict"):
            pickle.dumps(model)

    sw.simulate(run, 2)
