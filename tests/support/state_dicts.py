"""A model with everything that a state dict may hold, and its ways to be spread over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn, optim

import shardwise as sw
from shardwise import Shard
from shardwise.fsdp import fully_shard, replicate
from shardwise.parallel import shard_module


class Model(nn.Module):
    """Uneven sizes, tied weights, buffers, extra state, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(33, 6)
        self.norm = nn.BatchNorm1d(6)
        self.fused = nn.Linear(6, 9)
        self.out = nn.Linear(9, 6, bias=False)
        self.head = nn.Linear(6, 33, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.norm(self.embed(tokens)) * self.scale
        return self.head(self.out(self.fused(x).relu()))


TP = {
    "embed.weight": {"tp": Shard(0)},
    "fused.*": {"tp": Shard(0, pieces=3)},
    "out.weight": {"tp": Shard(1)},
}


def _tp(model: nn.Module, ranks: int) -> None:
    shard_module(model, sw.init_device_mesh("cpu", (ranks,), ("tp",)), TP)


def _fsdp(model: Any, ranks: int) -> None:
    mesh = sw.init_device_mesh("cpu", (ranks,), ("dp",))
    fully_shard(model.fused, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _replicate(model: nn.Module, ranks: int) -> None:
    replicate(model, mesh=sw.init_device_mesh("cpu", (ranks,), ("dp",)))


def _fsdp_over_tp(model: nn.Module, ranks: int) -> None:
    mesh = sw.init_device_mesh("cpu", (ranks // 2, 2), ("dp", "tp"))
    shard_module(model, mesh["tp"], TP)
    fully_shard(model, mesh=mesh["dp"])


SPREAD: dict[str, tuple[int, Callable[[Any, int], None]]] = {
    "tp": (2, _tp),
    "fsdp": (2, _fsdp),
    "replicate": (2, _replicate),
    "fsdp over tp": (4, _fsdp_over_tp),
}
"""For each kind: the number of ranks, and how the model is spread over them."""

TOKENS = torch.arange(12) * 5 % 33


def made(seed: int = 0, device: str = "cpu") -> Model:
    torch.manual_seed(seed)
    with torch.device(device):
        return Model()


def optimizer_of(model: nn.Module) -> optim.Optimizer:
    trained = [each for each in model.parameters() if each.requires_grad]
    return optim.AdamW(
        [
            {"params": trained[:2], "lr": 0.01},
            {"params": trained[2:], "lr": 0.02, "weight_decay": 0.1},
        ]
    )


def train(model: nn.Module, optimizer: optim.Optimizer, steps: int = 2) -> None:
    """Train on the same batch on every rank."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(TOKENS), TOKENS.flip(0))
        loss.backward()
        optimizer.step()


def spread(kind: str, seed: int = 0, ranks: int | None = None) -> tuple[Model, optim.Optimizer]:
    """Make the model and its optimizer on this rank."""
    model = made(seed)
    count, spread_over = SPREAD[kind]
    spread_over(model, ranks or count)
    return model, optimizer_of(model)


def assert_same(got: Any, expected: Any, at: str = "") -> None:
    """Compare nested state dicts: names in order, types of values, numbers."""
    if isinstance(expected, dict):
        assert list(got) == list(expected), at
        for key in expected:
            assert_same(got[key], expected[key], f"{at}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected), at
        for index, pair in enumerate(zip(got, expected, strict=True)):
            assert_same(*pair, f"{at}.{index}")
    elif isinstance(expected, torch.Tensor):
        assert type(got) is torch.Tensor and not got.requires_grad, (at, type(got))
        torch.testing.assert_close(got, expected.detach(), msg=lambda text: f"{at}: {text}")
    else:
        assert got == expected, at
