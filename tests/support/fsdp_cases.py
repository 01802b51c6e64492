"""Small models for FSDP, simulated ranks that train them, and one process to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.core.mesh import init_device_mesh  # unlike sw's, it does not communicate
from shardwise.fsdp import FSDPModule, fully_shard, replicate
from support.rules import heard

WIDTH = 5  # divides nothing


class Block(nn.Module):
    """A layer with a norm and a residual connection."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    """Several blocks and a head."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def made(kind: Callable[[], nn.Module] = Net) -> Any:
    """Return a model in double precision, with the same values at every call."""
    torch.manual_seed(0)
    return kind().double()


def batch(rows: int = 8, width: int = WIDTH, seed: int = 1) -> torch.Tensor:
    """Return the whole batch, the same at every call."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator, dtype=torch.float64)


def on_ranks(run: Callable[[sw.DeviceMesh], Any], count: int = 2) -> list[Any]:
    """Run `run(mesh)` on simulated ranks along one axis; return the results by rank."""
    return sw.simulate(lambda: run(init_device_mesh("cpu", (count,), ("dp",))), count)


def mine(x: torch.Tensor, mesh: sw.DeviceMesh) -> torch.Tensor:
    """Return this rank's rows of a batch."""
    return x.chunk(mesh.size())[mesh.get_rank()]


def shard_all(model: Any, mesh: sw.DeviceMesh, **options: Any) -> Any:
    """Shard each of `model.layers` and then the model; backward gathers all of them again.

    By default, small groups would stay gathered, because backward begins with them.
    """
    options.setdefault("reshard_after_forward", True)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def mean_square(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def train(
    model: Any,
    x: torch.Tensor,
    steps: int = 3,
    loss: Callable[[Any, torch.Tensor], torch.Tensor] = mean_square,
) -> Any:
    """Train on one batch for some steps; return the model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model, x).backward()
        optimizer.step()
    return model


def full(tensor: Any) -> torch.Tensor:
    """Return the whole of a DTensor. Every rank must call it."""
    found = tensor.detach()
    return found.full_tensor() if isinstance(found, sw.DTensor) else found


def assert_same(ours: Any, theirs: Any) -> None:
    """Check that both modules have the same parameters and gradients. Every rank must call it."""
    names = [name for name, _ in theirs.named_parameters()]
    assert [name for name, _ in ours.named_parameters()] == names
    for (name, mine), wanted in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert_close(full(mine), wanted.detach(), name)
        assert (mine.grad is None) == (wanted.grad is None), name
        if mine.grad is not None:
            assert_close(full(mine.grad), wanted.grad, f"gradient of {name}")


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, name: str = "") -> None:
    torch.testing.assert_close(
        ours, theirs, rtol=1e-10, atol=1e-12, msg=lambda text: f"{name}: {text}"
    )


def assert_at_rest(model: nn.Module) -> None:
    """Check that nothing is gathered or in flight and that all modules hold their shards."""
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            for unit in module._fsdp_group.units:
                assert unit.gathered_bytes == 0 and unit.gather is None, name
    for name, parameter in model.named_parameters():
        assert type(parameter) is sw.DTensor, name


def check_trains_as_one(
    kind: Callable[[], nn.Module],
    shard: Callable[[Any, sw.DeviceMesh], Any],
    *,
    x: torch.Tensor | None = None,
    loss: Callable[[Any, torch.Tensor], torch.Tensor] = mean_square,
    count: int = 2,
    steps: int = 3,
    also: Sequence[Callable[[Any], Any]] = (),
) -> None:
    """Check that ranks with a part of the batch each train as one process on the whole batch.

    Arguments:
        kind: makes the model.
        shard: shards it over a mesh.
        also: further checks of the trained model, run on every rank.
    """
    inputs = batch() if x is None else x
    plain = train(made(kind), inputs, steps, loss)

    def run(mesh: sw.DeviceMesh) -> None:
        model = made(kind)
        shard(model, mesh)
        keys = list(model.state_dict())
        assert keys == list(plain.state_dict())
        train(model, mine(inputs, mesh), steps, loss)
        assert_same(model, plain)
        assert_at_rest(model)
        assert list(model.state_dict()) == keys
        for check in also:
            check(model)

    on_ranks(run, count)


def apart(model: Any) -> Any:
    """Let each group communicate alone, so that its collectives can be counted."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(lambda gradients: None)
    return model


def sharded(mesh: sw.DeviceMesh, **options: Any) -> Any:
    """Return a model of four groups that communicate alone and know their order."""
    model = apart(shard_all(made(), mesh, **options))
    mean_square(model, mine(batch(), mesh)).backward()
    model.zero_grad()
    return model


def kinds(mesh: sw.DeviceMesh, call: Callable[[], Any]) -> list[str]:
    """Return the kinds of the collectives of a call."""
    events, _ = heard(mesh, call)
    return [event.kind for event in events]


def by_layer(model: Any, mesh: sw.DeviceMesh) -> Any:
    return shard_all(model, mesh)


def by_layer_apart(model: Any, mesh: sw.DeviceMesh) -> Any:
    """Shard by layer, each unit with collectives of its own."""
    shard_all(model, mesh)
    for each in (model, *model.layers):
        each.set_all_reduce_hook(lambda gradients: None)
    return model


def in_one(model: Any, mesh: sw.DeviceMesh, **options: Any) -> Any:
    return fully_shard(model, mesh=mesh, **options)


def replicated(model: Any, mesh: sw.DeviceMesh, **options: Any) -> Any:
    return replicate(model, mesh=mesh, **options)


def hybrid(model: Any, mesh: sw.DeviceMesh, **options: Any) -> Any:
    both = init_device_mesh("cpu", (2, mesh.size() // 2), ("replicate", "shard"))
    return shard_all(model, both, **options)
