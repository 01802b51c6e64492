"""Sharded tensors of one value, or of random numbers that do not depend on how they are cut.

All take the size, as numbers or one sequence of them, and the keywords of `ShardedTensor`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import init

from shardwise.sharded.specs import ShardingSpec
from shardwise.sharded.tensor import ShardedTensor


def empty(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> ShardedTensor:
    """Memory as it was found."""
    return ShardedTensor(sharding_spec, *size, **options)


def zeros(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> ShardedTensor:
    """Zeros."""
    return full(sharding_spec, size, 0, **options)


def ones(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> ShardedTensor:
    """Ones."""
    return full(sharding_spec, size, 1, **options)


def full(sharding_spec: ShardingSpec, size: Any, fill_value: Any, **options: Any) -> ShardedTensor:
    """One value everywhere.

    Arguments:
        size: a number or a sequence of them.
        fill_value: the value. Unlike in torch.full, it does not decide the dtype.
    """
    made = ShardedTensor(
        sharding_spec, *(size if isinstance(size, Sequence) else (size,)), **options
    )
    with torch.no_grad():
        for shard in made.local_shards():
            shard.tensor.fill_(fill_value)
    return made


def rand(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> ShardedTensor:
    """Random numbers, uniform in [0, 1)."""
    made = ShardedTensor(sharding_spec, *size, **options)
    init.uniform_(made)
    return made


def randn(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> ShardedTensor:
    """Random numbers, normally distributed."""
    made = ShardedTensor(sharding_spec, *size, **options)
    init.normal_(made)
    return made
