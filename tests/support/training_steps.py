"""Training steps of one process, for the tests of shard_step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from shardwise import Shard
from shardwise.examples.llama import Config, Llama


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    """A block: a norm with a buffer, attention, and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 16))

    def forward(self, x):
        batch, length, width = x.shape
        heads = [
            each(self.norm(x) * self.scale).view(batch, length, 4, 4).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        ]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return x + self.o(mixed.transpose(1, 2).reshape(batch, length, width))


def squares(model, params, batch):
    return (functional_call(model, params, (batch["x"],)) - batch["y"]).pow(2).mean()


def next_tokens(model, params, batch):
    logits = functional_call(model, params, (batch["x"],))
    return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())


LLAMA = Config(vocabulary=32, width=16, layers=2, heads=4, kv_heads=4, hidden=24, longest=8)

_TP = {"tp": Shard(0)}
_TP_IN = {"tp": Shard(1)}
MODELS: dict[str, Any] = {
    "mlp": (MLP, squares, {"params.up.*": _TP, "params.down.weight": _TP_IN}),
    "attention": (
        Attention,
        squares,
        {"params.[qkv].*": _TP, "params.o.weight": _TP_IN},
    ),
    "llama": (
        lambda: Llama(LLAMA),
        next_tokens,
        {
            "params.tok_embeddings.weight": _TP,
            "params.output.weight": _TP,
            "params.layers.*.attention.w[qkv].weight": _TP,
            "params.layers.*.attention.wo.weight": _TP_IN,
            "params.layers.*.feed_forward.w[13].weight": _TP,
            "params.layers.*.feed_forward.w2.weight": _TP_IN,
        },
    ),
}


def batches(name: str, count: int) -> list[dict[str, torch.Tensor]]:
    made = []
    for seed in range(count):
        random = torch.Generator().manual_seed(seed)
        if name == "llama":
            tokens = torch.randint(0, LLAMA.vocabulary, (4, 7), generator=random)
            made.append({"x": tokens[:, :-1], "y": tokens[:, 1:]})
        else:
            shape = (4, 3, 8 if name == "mlp" else 16)
            x = torch.randn(shape, generator=random, dtype=torch.float64)
            made.append({"x": x, "y": x.flip(-1)})
    return made


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    made = MODELS[name][0]()
    return made.double()


def start(model: nn.Module, optimizer: str) -> dict[str, Any]:
    """Return the state before the first step."""
    params = {name: each.detach().clone() for name, each in model.named_parameters()}
    if optimizer == "sgd":
        return {"params": params}
    zeros = {name: torch.zeros_like(each) for name, each in params.items()}
    again = {name: torch.zeros_like(each) for name, each in params.items()}
    return {"params": params, "adam": {"mean": zeros, "square": again}, "count": torch.zeros(())}


def training_step(name: str, optimizer: str, model: nn.Module | None = None) -> Any:
    """Return a step of the model: fn(state, batch) -> (new_state, outputs)."""
    model = model_of(name) if model is None else model
    loss_of = MODELS[name][1]

    def fn(state, batch):
        params = {key: each.detach().requires_grad_() for key, each in state["params"].items()}
        loss = loss_of(model, params, batch)
        gradients = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
        update = sgd if optimizer == "sgd" else adam
        with torch.no_grad():
            return update(state, gradients), {"loss": loss.detach(), "kind": optimizer}

    return fn


def sgd(state, gradients):
    return {"params": {key: each - 0.1 * gradients[key] for key, each in state["params"].items()}}


def adam(state, gradients):
    count = state["count"] + 1
    means, squared = state["adam"]["mean"], state["adam"]["square"]
    means = {key: 0.9 * each + 0.1 * gradients[key] for key, each in means.items()}
    squared = {key: 0.99 * each + 0.01 * gradients[key] ** 2 for key, each in squared.items()}
    rate = 0.01 / (1 - 0.9**count)
    params = {
        key: each - rate * means[key] / ((squared[key] / (1 - 0.99**count)).sqrt() + 1e-8)
        for key, each in state["params"].items()
    }
    return {"params": params, "adam": {"mean": means, "square": squared}, "count": count}


def trained_alone(name: str, optimizer: str, steps: int) -> tuple[Any, list[float]]:
    model = model_of(name)
    fn, state = training_step(name, optimizer, model), start(model, optimizer)
    losses = []
    for batch in batches(name, steps):
        state, outputs = fn(state, batch)
        losses.append(outputs["loss"].item())
    return pytree.tree_map(lambda each: each.clone(), state), losses
