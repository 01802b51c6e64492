"""Models with tensor-parallel styles for `tensor_parallel_transformation`, ours and torch's."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim, ExportedProgram

from shardwise import Replicate, Shard
from shardwise.examples.llama import Config, Llama
from shardwise.parallel import ColwiseParallel, RowwiseParallel
from support.exported_models import MLP, Attention, Tied


class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (4, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Multihead(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Image(nn.Module):
    """Convolutions, and a norm with running statistics."""

    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.down = nn.Conv2d(8, 4, 3)

    def forward(self, x):
        return self.down(self.norm(self.up(x)).relu()).mean((2, 3))


class Cache(nn.Module):
    """A key cache: a buffer that is written at positions given by the user."""

    def __init__(self):
        super().__init__()
        self.k, self.o = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("keys", torch.zeros(2, 8, 16))

    def forward(self, x, *, position):
        self.keys.index_copy_(1, position, self.k(x))
        return self.o(self.keys)


class Extras(nn.Module):
    """A buffer that is not saved, constants, and several results: one twice, one an alias."""

    def __init__(self):
        super().__init__()
        self.block = MLP()
        self.register_buffer("offsets", torch.arange(8.0), persistent=False)
        self.ones = torch.ones(8)

    def forward(self, x):
        y = self.block(x + self.offsets + self.ones) + torch.tensor([0.5] * 8)
        return {"y": y, "twice": (y, y.view(-1)), "x": x}


@dataclass(frozen=True)
class Case:
    """A model, its arguments and the styles of its modules."""

    model: Callable[[], nn.Module]
    styles: dict[str, Any]
    args: Callable[[], tuple[Any, ...]]
    kwargs: dict[str, Any] | None = None
    dynamic: Any = None
    train: bool = False
    collectives: tuple[str, ...] = ("all_reduce",)
    """Those of our program."""
    theirs: dict[str, Any] | None = None
    """What to tell torch instead: it has no fused projections, and one name for what is tied."""

    def made(self) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        torch.manual_seed(1)
        return self.model().train(self.train), self.args(), self.kwargs or {}

    def exported(self) -> ExportedProgram:
        model, args, kwargs = self.made()
        return torch.export.export(model, args, kwargs, dynamic_shapes=self.dynamic)

    def expected(self, times: int = 2) -> list[Any]:
        """Return the results of several calls of the model."""
        model, args, kwargs = self.made()
        return called(model, args, kwargs, times)


def called(model: Callable[..., Any], args: Any, kwargs: Any, times: int = 2) -> list[Any]:
    with torch.no_grad():
        return [copy.deepcopy(model(*args, **kwargs)) for _ in range(times)]


def x(*shape: int) -> Callable[[], tuple[torch.Tensor]]:
    return lambda: (torch.randn(shape),)


def tokens(*shape: int) -> Callable[[], tuple[torch.Tensor]]:
    return lambda: (torch.randint(0, 20, shape),)


PAIR = {"up": ColwiseParallel, "down": RowwiseParallel}
INSTANCES = {"up": ColwiseParallel(), "down": RowwiseParallel()}
HEADS = {"[qkv]": ColwiseParallel, "o": RowwiseParallel}
BLOCK = {"block.up": ColwiseParallel, "block.down": RowwiseParallel}
BATCH_AND_LENGTH = ({0: Dim("batch", max=64), 1: Dim("length", max=16)},)
LLAMA = {
    "tok_embeddings": RowwiseParallel,
    "layers.*.attention.w[qkv]": ColwiseParallel,
    "layers.*.attention.wo": RowwiseParallel,
    "layers.*.feed_forward.w[13]": ColwiseParallel,
    "layers.*.feed_forward.w2": RowwiseParallel,
    "output": ColwiseParallel,
}
LLAMA_UNTIED = {name: style for name, style in LLAMA.items() if name != "output"}
LLAMA_COLLECTIVES = (*("all_reduce",) * 5, "all_gather_into_tensor")


def llama() -> Llama:
    return Llama(Config(20, 32, 2, 4, 4, 24, 16, tied=True))


CASES: dict[str, Case] = {
    "MLP of 2-d inputs": Case(MLP, PAIR, x(6, 8)),
    "the same, styles as instances": Case(MLP, INSTANCES, x(6, 8)),
    "MLP of 3-d inputs": Case(MLP, PAIR, x(2, 3, 8)),
    "a size that does not divide": Case(lambda: MLP(hidden=13), PAIR, x(2, 3, 8)),
    "dynamic batch and sequence": Case(MLP, PAIR, x(4, 3, 8), dynamic=BATCH_AND_LENGTH),
    "attention by hand": Case(Attention, HEADS, x(2, 5, 16)),
    "scaled_dot_product_attention": Case(lambda: Attention(fused=True), HEADS, x(2, 5, 16)),
    "the same, dynamic": Case(
        lambda: Attention(fused=True), HEADS, x(2, 5, 16), dynamic=BATCH_AND_LENGTH
    ),
    "fused queries, keys, values": Case(
        Fused, {"qkv": ColwiseParallel(pieces=3, unit=4), "o": RowwiseParallel}, x(2, 5, 16)
    ),
    "nn.MultiheadAttention": Case(
        Multihead,
        {"attention": "colwise", "attention.out_proj": "rowwise"},
        x(2, 5, 16),
        theirs={"attention.out_proj": "rowwise"},
    ),
    "Llama, 2 layers, tied embeddings": Case(
        llama, LLAMA, tokens(2, 6), collectives=LLAMA_COLLECTIVES, theirs=LLAMA_UNTIED
    ),
    "the same Llama, dynamic": Case(
        llama,
        LLAMA,
        tokens(2, 6),
        dynamic=BATCH_AND_LENGTH,
        collectives=LLAMA_COLLECTIVES,
        theirs=LLAMA_UNTIED,
    ),
    "a plan for a part": Case(lambda: Tied(20), BLOCK, tokens(2, 5)),
    "an embedding, tied": Case(
        lambda: Tied(20),
        {"embedding": RowwiseParallel, "head": ColwiseParallel, **BLOCK},
        tokens(2, 5),
        collectives=("all_reduce", "all_reduce", "all_gather_into_tensor"),
        theirs={"embedding": RowwiseParallel, **BLOCK},
    ),
    "a norm on split sequences": Case(
        lambda: Tied(20),
        {
            "norm": "sequence",
            "block.up": ColwiseParallel(input_layouts=Shard(1)),
            "block.down": RowwiseParallel(output_layouts=Replicate()),
        },
        tokens(2, 6),
        collectives=("all_gather_into_tensor", "all_reduce"),
    ),
    "convolutions, batch norm in training": Case(
        Image,
        {"up": "colwise", "norm": "colwise", "down": "rowwise"},
        x(4, 3, 6, 6),
        train=True,
    ),
    "a cache that is written to, keywords": Case(
        Cache,
        {"k": "colwise", "o": "rowwise"},
        x(2, 3, 16),
        {"position": torch.tensor([1, 4, 6])},
        collectives=("all_gather_into_tensor", "all_reduce"),
    ),
    "unsaved buffers, constants, aliases": Case(Extras, BLOCK, x(2, 8)),
}


def collectives(program: ExportedProgram) -> Counter[str]:
    """Count the collectives of a program, by kind."""
    return Counter(
        node.target._opname
        for node in program.graph.nodes
        if getattr(node.target, "namespace", "") == "_c10d_functional"
        and node.target._opname != "wait_tensor"
    )
