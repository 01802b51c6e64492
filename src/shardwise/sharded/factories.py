"""Sharded tensors of one value, or of random numbers that do not depend on how they are cut.

All take the size, as numbers or one sequence of them, and the keywords of `ShardedTensor`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import init

from shardwise.sharded import remote
from shardwise.sharded.group import GroupLike, as_group
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

    def fill(made: ShardedTensor) -> None:
        with torch.no_grad():
            for shard in made.local_shards():
                shard.tensor.fill_(fill_value)

    sizes = size if isinstance(size, Sequence) else (size,)
    return _filled(fill, sharding_spec, sizes, **options)


def rand(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> ShardedTensor:
    """Random numbers, uniform in [0, 1)."""
    return _filled(init.uniform_, sharding_spec, size, **options)


def randn(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> ShardedTensor:
    """Random numbers, normally distributed."""
    return _filled(init.normal_, sharding_spec, size, **options)


def _filled(
    fill: Callable[[ShardedTensor], Any],
    spec: ShardingSpec,
    size: Sequence[Any],
    process_group: GroupLike = None,
    init_rrefs: bool = False,
    **options: Any,
) -> ShardedTensor:
    """Shards are filled before other ranks get references to them, and could read them."""
    group = as_group(process_group)
    with remote.together(group, init_rrefs):
        made = ShardedTensor(spec, *size, process_group=group, **options)
    fill(made)
    return made._become(group, made._held, made._local_shards, init_rrefs)
