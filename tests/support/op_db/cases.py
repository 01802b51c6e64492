"""The layouts that are tried for the tensors of a sample: each layout of each tensor, and a fixed
sample of the combinations.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import torch

from shardwise.core.placement import Partial, Placement, Replicate, Shard

MESHES = ((2,), (3,), (2, 2))

_NOT_ADDED = (torch.bool, torch.uint16, torch.uint32, torch.uint64)
"""Dtypes that torch does not add up, besides floats of 8 bits."""

How = tuple[Placement, ...]
"""How one tensor lies: a placement for each axis."""
Case = tuple[How | None, ...]
"""How each tensor of a sample lies; None for a plain tensor."""


def ways(tensor: torch.Tensor, axes: int) -> list[How]:
    """Return every layout of a tensor on a mesh of `axes` axes."""
    per_axis: list[Placement] = [Replicate(), *map(Shard, range(tensor.dim()))]
    if tensor.dtype not in _NOT_ADDED and not (tensor.is_floating_point() and tensor.itemsize == 1):
        per_axis.append(Partial())
    return list(itertools.product(per_axis, repeat=axes))


def cases(tensors: Sequence[torch.Tensor], axes: int, most: int, seed: str) -> list[Case]:
    """Return at most `most` cases.

    As far as that goes, every tensor has each of its layouts once, with any layouts of the others.
    """
    generator = random.Random(seed)
    choices = [ways(each, axes) for each in tensors]
    found: dict[Case, None] = {}
    turns = [(at, how) for at, options in enumerate(choices) for how in options]
    generator.shuffle(turns)
    for at, how in turns:
        if len(found) == most:
            break
        case = [generator.choice(options) for options in choices]
        case[at] = how
        found[tuple(case)] = None
    return list(found)


def with_plain(case: Case, most: int, seed: str) -> list[Case]:
    """Return cases in which some of the tensors are plain, but not all: at most `most`."""
    picks = [each for each in itertools.product((True, False), repeat=len(case)) if any(each)]
    picks.remove((True,) * len(case))
    random.Random(seed).shuffle(picks)
    return [
        tuple(how if keeps else None for how, keeps in zip(case, pick, strict=True))
        for pick in picks[:most]
    ]


def single_splits(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int, Case]]:
    """Return the cases on a mesh of one axis in which one dim of one tensor is split."""
    whole: list[How] = [(Replicate(),)] * len(tensors)
    return [
        (at, dim, (*whole[:at], (Shard(dim),), *whole[at + 1 :]))
        for at, tensor in enumerate(tensors)
        for dim in range(tensor.dim())
        if tensor.shape[dim] > 1
    ]


def shown(case: Case) -> str:
    """Format a case for a message: `S(0) R, P S(1)`."""

    def short(placement: Placement) -> str:
        if isinstance(placement, Shard):
            return f"S({placement.dim})"
        return "P" if placement.is_partial() else "R"

    return ", ".join("plain" if how is None else " ".join(map(short, how)) for how in case)
