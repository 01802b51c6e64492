"""Programs that torch 2.13's ShardedTensor gets wrong, for either library.

Each takes `lib`: the names of `torch.distributed._shard`, and `lib.group(ranks)`. All ranks of a
world of four run them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.core import world

RANKS = 4


def shardwise(group: Any) -> SimpleNamespace:
    """Return shardwise's names, and a function that makes groups of ranks."""
    from shardwise import sharded

    def shard(tensor: torch.Tensor, spec: Any, process_group: Any) -> Any:
        return spec.shard(tensor, process_group=process_group)

    names = {name: getattr(sharded, name) for name in _NAMES}
    return SimpleNamespace(**names, shard=shard, group=group)


def torch_own() -> SimpleNamespace:
    """Return torch's names."""
    from torch.distributed._shard import _shard_tensor, sharded_tensor, sharding_spec

    def shard(tensor: torch.Tensor, spec: Any, process_group: Any) -> Any:
        return _shard_tensor(tensor, spec, process_group=process_group)

    found = {**vars(sharded_tensor), **vars(sharding_spec)}
    names = {name: found[name] for name in _NAMES}
    return SimpleNamespace(**names, shard=shard, group=dist.new_group)


_NAMES = [
    "ChunkShardingSpec",
    "EnumerableShardingSpec",
    "Shard",
    "ShardMetadata",
    "init_from_local_shards",
    "rand",
    "zeros",
]


def here() -> int:
    """Return the global rank of the caller."""
    return world.current().rank


def chunks(lib: Any, dim: int, *ranks: int) -> Any:
    """Return the spec of a dim in chunks, held by these ranks."""
    return lib.ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in ranks])


def boxes(lib: Any, *shards: tuple[list[int], list[int], int]) -> Any:
    """Return the spec of boxes, given by offsets, sizes and ranks."""
    return lib.EnumerableShardingSpec(
        [lib.ShardMetadata(offsets, sizes, f"rank:{rank}/cpu") for offsets, sizes, rank in shards]
    )


def cut(lib: Any, spec: Any, tensor: torch.Tensor, process_group: Any = None) -> Any:
    """Shard a tensor that every rank has."""
    return lib.shard(tensor, spec, process_group)


def gathered(x: Any, like: torch.Tensor, dst: int = 0) -> torch.Tensor | None:
    """Return the whole tensor on one rank."""
    out = torch.empty_like(like) if here() == dst else None
    x.gather(dst, out)
    return out


def gather_keeps_every_bit_of_float64(lib):
    whole = 1 + torch.arange(8, dtype=torch.float64) * 2**-52
    out = gathered(cut(lib, chunks(lib, 0, *range(RANKS)), whole), whole)
    assert out is None or torch.equal(out, whole)


def gather_keeps_every_bit_of_int64(lib):
    whole = 2**60 + torch.arange(8)
    out = gathered(cut(lib, chunks(lib, 0, *range(RANKS)), whole), whole)
    assert out is None or torch.equal(out, whole)


def gather_in_a_subgroup(lib):
    group = lib.group([1, 3])
    if here() not in (1, 3):
        return
    piece = torch.full((2,), float(here()))
    place = lib.ShardMetadata([here() - 1], [2], f"rank:{here()}/cpu")
    x = lib.init_from_local_shards([lib.Shard(piece, place)], 4, process_group=group)
    out = gathered(x, torch.zeros(4), dst=3)
    assert out is None or out.tolist() == [1, 1, 3, 3]


def gather_with_an_out_on_another_rank(lib):
    x = cut(lib, chunks(lib, 0, *range(RANKS)), torch.arange(8.0))
    out = torch.zeros(8)
    if here() == 0:
        x.gather(0, out)
        assert torch.equal(out, torch.arange(8.0))
    else:
        with pytest.raises(ValueError, match="out"):
            x.gather(0, out)


def gather_of_no_elements(lib):
    whole = torch.zeros(0, 3)
    out = gathered(cut(lib, chunks(lib, 0, *range(RANKS)), whole), whole)
    assert out is None or out.shape == (0, 3)


def reshard_in_a_cycle_of_three(lib):
    whole = torch.arange(14.0).reshape(7, 2)
    x = cut(lib, chunks(lib, 0, 0, 1, 2, 3), whole)
    x.reshard(chunks(lib, 0, 1, 2, 0, 3))
    start = 2 * (1, 2, 0, 3).index(here())
    assert torch.equal(x.local_tensor(), whole[start : start + 2])


def reshard_of_uneven_rows_to_columns(lib):
    group = lib.group([0, 1, 2])
    if here() == 3:
        return
    whole = torch.arange(35.0).reshape(7, 5)
    x = cut(lib, chunks(lib, 0, 0, 1, 2), whole, process_group=group)
    x.reshard(chunks(lib, 1, 0, 1, 2))
    assert torch.equal(x.local_tensor(), whole.chunk(3, 1)[here()])


def reshard_of_several_shards_on_a_rank(lib):
    whole = torch.arange(8.0)
    x = cut(lib, chunks(lib, 0, *range(RANKS)), whole)
    x.reshard(boxes(lib, ([0], [1], 3), ([1], [4], 0), ([5], [3], 3)))
    found = [each.tensor.tolist() for each in x.local_shards()]
    assert found == {0: [[1, 2, 3, 4]], 3: [[0], [5, 6, 7]]}.get(here(), [])


def a_spec_of_boxes_cuts_a_tensor(lib):
    whole = torch.arange(8.0)
    spec = boxes(lib, *([[2 * rank], [2], rank] for rank in range(RANKS)))
    x = cut(lib, spec, whole)
    assert torch.equal(x.local_tensor(), whole[2 * here() : 2 * here() + 2])


def equal_without_an_accelerator(lib):
    x, y = (cut(lib, chunks(lib, 0, *range(RANKS)), torch.arange(8.0)) for _ in range(2))
    assert torch.equal(x, y)


def allclose_without_an_accelerator(lib):
    x, y = (cut(lib, chunks(lib, 0, *range(RANKS)), torch.arange(8.0)) for _ in range(2))
    assert torch.allclose(x, y)


def a_formatted_string(lib):
    assert "ShardedTensor" in f"{lib.zeros(chunks(lib, 0, *range(RANKS)), 8)}"


def zeros_like_keeps_the_dtype(lib):
    x = lib.zeros(chunks(lib, 0, *range(RANKS)), 8, dtype=torch.float64)
    assert torch.zeros_like(x).dtype == torch.float64
    assert torch.zeros_like(x).local_shards()[0].tensor.dtype == torch.float64


def zeros_like_keeps_the_group(lib):
    group = lib.group([1, 3])
    if here() in (1, 3):
        x = torch.zeros_like(lib.zeros(chunks(lib, 0, 1, 3), 8, process_group=group))
        out = gathered(x, torch.empty(8), dst=1)
        assert out is None or out.tolist() == [0] * 8


def arithmetic(lib):
    x = cut(lib, chunks(lib, 0, *range(RANKS)), torch.arange(8.0))
    y = x + x * 2
    assert torch.equal(y.local_tensor(), 3 * torch.arange(8.0)[2 * here() : 2 * here() + 2])


def a_linear_layer(lib):
    weight = torch.arange(24.0).reshape(8, 3)
    x = nn.functional.linear(torch.ones(2, 3), cut(lib, chunks(lib, 0, *range(RANKS)), weight))
    expected = nn.functional.linear(torch.ones(2, 3), weight)
    assert torch.equal(x.local_tensor(), expected.chunk(RANKS, 1)[here()])


def xavier_initialisation(lib):
    x = nn.init.xavier_uniform_(lib.zeros(chunks(lib, 0, *range(RANKS)), 8, 8))
    bound = (6 / 16) ** 0.5
    assert 0 < x.local_tensor().abs().max() <= bound


def random_values_differ_between_shards(lib):
    torch.manual_seed(0)
    x = lib.rand(chunks(lib, 0, *range(RANKS)), RANKS, 16)
    rows = gathered(x, torch.empty(RANKS, 16))
    assert rows is None or not torch.equal(rows[0], rows[1])


TRAPS = [
    gather_keeps_every_bit_of_float64,
    gather_keeps_every_bit_of_int64,
    gather_in_a_subgroup,
    gather_with_an_out_on_another_rank,
    gather_of_no_elements,
    reshard_in_a_cycle_of_three,
    reshard_of_uneven_rows_to_columns,
    reshard_of_several_shards_on_a_rank,
    a_spec_of_boxes_cuts_a_tensor,
    equal_without_an_accelerator,
    allclose_without_an_accelerator,
    a_formatted_string,
    zeros_like_keeps_the_dtype,
    zeros_like_keeps_the_group,
    arithmetic,
    a_linear_layer,
    xavier_initialisation,
    random_values_differ_between_shards,
]
