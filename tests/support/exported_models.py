"""Models to export, with plans that lay them out on a mesh."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from shardwise import Shard
from shardwise.examples.llama import Config, Llama
from shardwise.examples.train_llama import TENSOR_PARALLEL

ROWS, COLUMNS = {"tp": Shard(0)}, {"tp": Shard(1)}


# ---- blocks


class MLP(nn.Module):
    def __init__(self, width=8, hidden=16, bias=True):
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x):
        return self.down(self.up(x).relu())


MLP_PLAN = {"up.*": ROWS, "down.weight": COLUMNS}


class Attention(nn.Module):
    """Attention with a causal mask, written by hand or with torch's function."""

    def __init__(self, width=16, heads=4, fused=False):
        super().__init__()
        self.heads, self.fused = heads, fused
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (
            each(x).view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-1, -2) / math.sqrt(width // self.heads)
            hidden = torch.triu(torch.ones(length, length, dtype=torch.bool, device=x.device), 1)
            mixed = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
        return self.o(mixed.transpose(1, 2).reshape(batch, length, width))


ATTENTION_PLAN = {"[qkv].*": ROWS, "o.weight": COLUMNS}


class FusedQKV(nn.Module):
    def __init__(self, width=16, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in self.qkv(x).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class MultiheadAttention(nn.Module):
    """torch's module, with or without a mask of the user."""

    def __init__(self, need_weights=False):
        super().__init__()
        self.need_weights = need_weights
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x, mask=None):
        mixed, weights = self.attention(
            x, x, x, attn_mask=mask, need_weights=self.need_weights, average_attn_weights=False
        )
        return (mixed, weights) if self.need_weights else mixed


HEADS = {"tp": Shard(0, pieces=3, unit=4)}
MULTIHEAD_PLAN = {
    "attention.in_proj_*": HEADS,
    "attention.out_proj.weight": {"tp": Shard(1, unit=4)},
}


class Encoder(nn.Module):
    """Two of torch's encoder layers, without dropout."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


ENCODER_PLAN = {
    "layers.*.self_attn.in_proj_*": HEADS,
    "layers.*.self_attn.out_proj.weight": {"tp": Shard(1, unit=4)},
    "layers.*.linear1.*": ROWS,
    "layers.*.linear2.weight": COLUMNS,
}


class Tied(nn.Module):
    """An embedding that is also the output layer, and a block between."""

    def __init__(self, count=21):
        super().__init__()
        self.embedding = nn.Embedding(count, 8)
        self.norm, self.block = nn.LayerNorm(8), MLP()
        self.head = nn.Linear(8, count, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(x + self.block(self.norm(x)))


class Image(nn.Module):
    """Convolutions and norms over split channels."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3)
        self.batch, self.group = nn.BatchNorm2d(8), nn.GroupNorm(4, 8)

    def forward(self, x):
        return self.down(self.group(self.batch(self.up(x)).relu())).mean((2, 3))


IMAGE_PLAN = {
    "up.*": ROWS,
    "batch.weight": ROWS,
    "batch.bias": ROWS,
    "batch.running_*": ROWS,
    "group.*": ROWS,
    "down.weight": COLUMNS,
}


# ---- state


class Cache(nn.Module):
    """Attention with a cache of keys and values: positions of a split buffer are written."""

    def __init__(self, by_index=True, heads=4, longest=8):
        super().__init__()
        self.by_index, self.heads = by_index, heads
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.register_buffer("keys", torch.zeros(2, heads, longest, 4))
        self.register_buffer("values", torch.zeros(2, heads, longest, 4), persistent=False)

    def forward(self, x, position):
        q, k, v = (
            each(x).unflatten(-1, (self.heads, 4)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        if self.by_index:
            self.keys.index_copy_(2, position, k)
            self.values.index_copy_(2, position, v)
        else:
            self.keys[:, :, 2:5] = k
            self.values[:, :, 2:5] = v
        mixed = F.scaled_dot_product_attention(q, self.keys, self.values)
        return self.o(mixed.transpose(1, 2).flatten(2))


CACHE_PLAN = {**ATTENTION_PLAN, "keys": COLUMNS, "values": COLUMNS}


class Written(nn.Module):
    """Buffers, constants and inputs of all kinds, some of which are written."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(4, 4)
        self.register_buffer("rows", torch.zeros(2, 8, 4))
        self.register_buffer("offsets", torch.arange(4.0), persistent=False)
        self.register_buffer("calls", torch.tensor(0))
        self.ones = torch.ones(4)

    def forward(self, x, *, scale):
        with torch.no_grad():
            double = x * 2
        self.calls += 1
        more = torch.tensor([1.0, 2.0, 3.0, 4.0])
        self.rows[:, 2:5] = self.project(x) + self.offsets + more + self.ones
        self.rows.mul_(scale)
        return {"rows": self.rows.sum(1), "given": x, "twice": (double, double), "at": self.calls}


class WritesInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = MLP()

    def forward(self, x, total):
        y = self.block(x)
        total.add_(y)
        return y * 2


class Outputs(nn.Module):
    """Results of all kinds: None, numbers, nested, one twice, a view, an input, a parameter."""

    def __init__(self):
        super().__init__()
        self.block = MLP()

    def forward(self, x, flags, times, nothing=None):
        if flags[1]:
            x = x * times
        y = self.block.up(x)
        z = self.block.down(y.relu())
        return [z, (z, None, 3, {"y": y, "view": y.view(-1)}), x, self.block.up.weight]


class Kept(nn.Module):
    """Dropout with probability 0, and integer and boolean tensors."""

    def __init__(self):
        super().__init__()
        self.block, self.drop = MLP(), nn.Dropout(0.5)

    def forward(self, x, tokens, mask):
        y = self.drop(self.block(x)).masked_fill(mask.unsqueeze(-1), 0.0)
        return y, tokens.cumsum(0), mask.logical_not(), y.argmax(-1)


class Autocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = MLP()

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = self.block(x)
        with torch.no_grad():
            y = y + self.block(x)
        return y


# ---- cases


@dataclass(frozen=True)
class Case:
    """A model, its arguments and a plan."""

    model: Callable[[], nn.Module]
    args: Callable[[], tuple[Any, ...]]
    plan: dict[str, Any]
    kwargs: Callable[[], dict[str, Any]] = dict
    dynamic: Any = None
    others: tuple[Callable[[], tuple[Any, ...]], ...] = ()
    """Arguments of other sizes, for programs whose sizes are dynamic."""
    collectives: dict[str, int] = field(default_factory=lambda: {"all_reduce": 1})
    """How many of each are in the program."""
    decomposed: dict[str, int] | None = None
    """The same of the decomposed program, where these are others."""
    batch: str | None = None
    """Which input has the batch as dim 0, so that another axis may split it."""
    train: bool = False
    tolerance: float = 1e-5

    def made(self) -> nn.Module:
        torch.manual_seed(1)
        model = self.model().train(self.train)
        for parameter in model.parameters():  # norms and biases too are to tell apart
            nn.init.normal_(parameter, std=0.5)
        return model

    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        torch.manual_seed(2)
        return self.args(), self.kwargs()

    def all_inputs(self) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return the example inputs twice, and inputs of other sizes."""
        first = self.inputs()
        return [first, first, *((other(), first[1]) for other in self.others)]

    def exported(self, model: nn.Module) -> torch.export.ExportedProgram:
        args, kwargs = self.inputs()
        return torch.export.export(model, args, kwargs, dynamic_shapes=self.dynamic)


def tensor(*shape: int) -> Callable[[], tuple[torch.Tensor]]:
    return lambda: (torch.randn(shape),)


def tokens(*shape: int) -> Callable[[], tuple[torch.Tensor]]:
    return lambda: (torch.randint(0, 21, shape),)


BATCH, LENGTH = Dim("batch", min=2, max=64), Dim("length", min=2, max=64)
LLAMA = Config(
    vocabulary=21, width=32, layers=2, heads=4, kv_heads=4, hidden=22, longest=16, tied=True
)
WEIGHTS = {name: each for name, each in TENSOR_PARALLEL.items() if name.endswith("weight")}
SIZES = [(3, 4), (5, 9), (2, 2)]

CASES: dict[str, Case] = {
    "mlp, 2-d": Case(MLP, tensor(6, 8), MLP_PLAN, batch="x"),
    "mlp, 3-d": Case(MLP, tensor(2, 3, 8), MLP_PLAN, batch="x"),
    "mlp, uneven": Case(lambda: MLP(hidden=13), tensor(2, 3, 8), MLP_PLAN),
    "mlp, fewer features than ranks": Case(lambda: MLP(hidden=3), tensor(2, 3, 8), MLP_PLAN),
    "mlp, dynamic": Case(
        MLP,
        tensor(4, 3, 8),
        MLP_PLAN,
        dynamic=({0: BATCH, 1: LENGTH},),
        others=tuple(tensor(*size, 8) for size in SIZES),
    ),
    "attention by hand": Case(Attention, tensor(2, 5, 16), ATTENTION_PLAN, batch="x"),
    "attention by hand, dynamic": Case(
        Attention,
        tensor(2, 5, 16),
        ATTENTION_PLAN,
        dynamic=({0: BATCH, 1: LENGTH},),
        others=tuple(tensor(*size, 16) for size in SIZES),
    ),
    "sdpa": Case(lambda: Attention(fused=True), tensor(2, 5, 16), ATTENTION_PLAN, batch="x"),
    "sdpa, dynamic": Case(
        lambda: Attention(fused=True),
        tensor(2, 5, 16),
        ATTENTION_PLAN,
        dynamic=({0: BATCH, 1: LENGTH},),
        others=tuple(tensor(*size, 16) for size in SIZES),
    ),
    "sdpa, uneven heads": Case(
        lambda: Attention(width=12, heads=3, fused=True),
        tensor(2, 5, 12),
        {"[qkv].*": {"tp": Shard(0, unit=4)}, "o.weight": {"tp": Shard(1, unit=4)}},
    ),
    "fused qkv": Case(
        FusedQKV, tensor(2, 5, 16), {"qkv.*": HEADS, "o.weight": {"tp": Shard(1, unit=4)}}
    ),
    "multihead": Case(MultiheadAttention, tensor(2, 5, 16), MULTIHEAD_PLAN, batch="x"),
    "multihead, mask and weights": Case(
        lambda: MultiheadAttention(need_weights=True),
        lambda: (torch.randn(2, 5, 16), torch.randn(5, 5)),
        MULTIHEAD_PLAN,
        collectives={"all_reduce": 1, "all_gather_into_tensor": 1},
    ),
    "encoder": Case(
        Encoder, tensor(2, 5, 16), ENCODER_PLAN, collectives={"all_reduce": 4}, train=True
    ),
    "llama": Case(
        lambda: Llama(replace(LLAMA, layers=1)),
        tokens(2, 6),
        WEIGHTS,
        dynamic=({0: BATCH, 1: Dim("length", min=2, max=16)},),
        others=tuple(tokens(*size) for size in SIZES),
        collectives={"all_reduce": 3, "all_gather_into_tensor": 1},
    ),
    "llama, fixed": Case(
        lambda: Llama(LLAMA),
        tokens(2, 6),
        WEIGHTS,
        collectives={"all_reduce": 5, "all_gather_into_tensor": 1},
        batch="tokens",
    ),
    "tied": Case(
        Tied,
        tokens(2, 5),
        {"embedding.weight": ROWS, "block.up.*": ROWS, "block.down.weight": COLUMNS},
        collectives={"all_reduce": 2, "all_gather_into_tensor": 1},
        batch="tokens",
    ),
    "a part": Case(Tied, tokens(2, 5), {"block.up.*": ROWS, "block.down.weight": COLUMNS}),
    "image": Case(Image, tensor(4, 3, 6, 6), IMAGE_PLAN, batch="x"),
    "image, training": Case(Image, tensor(4, 3, 6, 6), IMAGE_PLAN, train=True),
    "cache by index": Case(
        Cache, lambda: (torch.randn(2, 3, 16), torch.tensor([1, 4, 6])), CACHE_PLAN
    ),
    "cache by slice": Case(
        lambda: Cache(by_index=False), lambda: (torch.randn(2, 3, 16), None), CACHE_PLAN
    ),
    "written": Case(
        Written,
        tensor(2, 3, 4),
        {"rows": {"tp": Shard(2)}, "project.*": ROWS},
        kwargs=lambda: {"scale": torch.tensor(2.0)},
        collectives={"all_gather_into_tensor": 1},
    ),
    "writes an input": Case(
        WritesInput,
        lambda: (torch.randn(2, 8), torch.zeros(2, 8)),
        {"block.up.*": ROWS, "block.down.weight": COLUMNS},
        decomposed={"all_reduce": 2},  # `total + y` is a pending sum, as is `y`
    ),
    "outputs": Case(
        Outputs,
        lambda: (torch.randn(2, 8), (False, True), 3),
        {"block.up.*": ROWS, "block.down.weight": COLUMNS},
        kwargs=lambda: {"nothing": None},
        collectives={"all_reduce": 1, "all_gather_into_tensor": 3},
    ),
    "integers and booleans": Case(
        Kept,
        lambda: (torch.randn(2, 3, 8), torch.arange(5), torch.tensor([[True, False, False]] * 2)),
        {"block.up.*": ROWS, "block.down.weight": COLUMNS},
    ),
    "autocast": Case(
        Autocast,
        tensor(2, 8),
        {"block.up.*": ROWS, "block.down.weight": COLUMNS},
        tolerance=0.05,
    ),
}


@functools.cache
def program(name: str, decomposed: bool = False) -> torch.export.ExportedProgram:
    """Return the exported program of a case. It is cached: do not change it."""
    if decomposed:
        with warnings.catch_warnings():
            # torch itself erases a node twice for a buffer that is written and returned, since
            # 2.14; the program is right.
            warnings.filterwarnings(
                "ignore", r"erase_node\(\w+\) on an already erased", UserWarning
            )
            return program(name).run_decompositions()
    return CASES[name].exported(CASES[name].made())


def runs(model: Callable[..., Any], inputs: list[tuple[Any, Any]]) -> list[Any]:
    """Return the results of a model for each of several inputs, and the inputs afterwards."""
    results = []
    for each in inputs:
        args, kwargs = copy.deepcopy(each)
        with torch.no_grad():
            result = model(*args, **kwargs)
        # Copies: what is written to next time may be returned.
        results.append(pytree.tree_map_only(torch.Tensor, torch.clone, (result, args, kwargs)))
    return results
