"""Specs of many kinds, and one process to compare with, for operators on sharded tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import shardwise as sw
import shardwise.sharded as sh
from support.sharded_tensors import chunks, cut

on_ranks = sw.simulate


def boxes(*shards: tuple[int, list[int], list[int]]) -> sh.EnumerableShardingSpec:
    """Return a spec of shards by rank, offsets and sizes."""
    return cut(*((offsets, sizes, rank) for rank, offsets, sizes in shards))


def layouts(count: int) -> dict[str, sh.ShardingSpec]:
    """Return specs of a (5, 4) tensor that are layouts, on this many ranks."""
    found: dict[str, sh.ShardingSpec] = {
        "rows": chunks(0, *range(count)),
        "columns": chunks(-1, *range(count)),
        "backwards": chunks(0, *reversed(range(count))),
        # Several shards of one rank that make up one box.
        "pieces": boxes(
            (0, [0, 0], [1, 4]),
            *((0, [1, 0], [2, 3]), (0, [1, 3], [2, 1]))
            if count == 2
            else ((0, [1, 0], [1, 3]), (0, [1, 3], [1, 1])),
            # Of the rows that remain, the last ranks hold none.
            *[(1, [3, 0], [2, 4])] if count == 2 else [(1, [2, 0], [2, 4]), (2, [4, 0], [1, 4])],
        ),
    }
    if count == 4:
        found["grid"] = boxes(
            (2, [0, 0], [3, 2]), (0, [0, 2], [3, 2]), (1, [3, 0], [2, 2]), (3, [3, 2], [2, 2])
        )
    return found


def odd(count: int) -> dict[str, sh.ShardingSpec]:
    """Return specs of a (5, 4) tensor that are no layouts."""
    last = count - 1
    return {
        "bricks": boxes(
            (0, [0, 0], [1, 4]), (last, [1, 0], [4, 1]), (0, [1, 1], [2, 3]), (1, [3, 1], [2, 3])
        ),
        "one rank": boxes((last, [0, 0], [5, 4])),
        "rows in turns": boxes(*((row % count, [row, 0], [1, 4]) for row in range(5))),
    }


def all_specs(count: int) -> dict[str, sh.ShardingSpec]:
    """Return the specs of `layouts` and of `odd`."""
    return {**layouts(count), **odd(count)}


def values(*shape: int, seed: int = 0, grad: bool = True) -> torch.Tensor:
    """Return a leaf of normal numbers that depend on the arguments only: each rank can make it."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(grad)


def whole(value: Any) -> Any:
    """Return a result as one process has it."""
    if isinstance(value, sh.ShardedTensor | sw.DTensor):
        return value.full_tensor().detach()
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, list | tuple):
        return [whole(each) for each in value]
    return value


def gradient(tensor: sh.ShardedTensor) -> torch.Tensor:
    """Return the whole gradient of a leaf; zero if it has none."""
    pieces = [
        torch.zeros_like(each.tensor) if each.tensor.grad is None else each.tensor.grad
        for each in tensor.local_shards()
    ]
    return tensor.detach()._with_tensors(pieces, requires_grad=False).full_tensor()


def followed(message: str, tensor: sh.ShardedTensor) -> sh.ShardedTensor:
    """Apply the remedy that an error message names."""
    start = message.index("x.reshard(")
    advice = message[start : message.index(" makes them so", start)]
    return eval(advice, {"x": tensor, "ChunkShardingSpec": sh.ChunkShardingSpec})  # type: ignore[no-any-return]


def backward(result: Any) -> None:
    """Run backward from every element of a result, each with another gradient."""
    results = result if isinstance(result, list | tuple) else [result]
    started = [each for each in results if isinstance(each, torch.Tensor) and each.requires_grad]
    seeds = [
        torch.arange(1.0, each.numel() + 1, dtype=each.dtype).reshape(each.shape).cos()
        for each in started
    ]
    torch.autograd.backward(started, seeds)


def check(
    function: Callable[..., Any],
    specs: list[sh.ShardingSpec],
    inputs: list[torch.Tensor],
    count: int,
    differentiable: bool = True,
) -> None:
    """Compare a function of sharded tensors, and its gradients, with those of the whole tensors.

    Arguments:
        specs: the spec of each input.
    """
    alone = [each.detach().clone().requires_grad_(each.requires_grad) for each in inputs]
    expected = function(*alone)
    if differentiable:
        backward(expected)

    def run() -> Any:
        given = [
            spec.shard(each.detach().clone().requires_grad_(each.requires_grad))
            for spec, each in zip(specs, inputs, strict=True)
        ]
        result = function(*given)
        if differentiable:
            backward(result)
        return whole(result), [gradient(each) for each in given]

    for result, gradients in on_ranks(run, count):
        torch.testing.assert_close(result, whole(expected))
        for mine, each in zip(gradients, alone, strict=True):
            if each.grad is not None:
                torch.testing.assert_close(mine, each.grad)
