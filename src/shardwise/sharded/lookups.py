"""Lookups in tables that are cut in any way: `embedding` and `embedding_bag`, by sums or means.

Each rank looks up what its shards have of the rows, and zeros for the rest; their sum is the
result. Where each rank has indices of its own, and each row is on one rank, `embedding` asks that
rank for it. Indices travel, and rows that were looked up, but never the table.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.nn import functional as F

from shardwise.comm import carries_values
from shardwise.layout import Layout
from shardwise.placement import Partial, Replicate, Shard
from shardwise.rules.asking import Range, Table, rows_of
from shardwise.rules.indexing import check_bounds
from shardwise.sharded.errors import ShardedTensorError
from shardwise.sharded.tensor import ShardedTensor
from shardwise.tensor import DTensor


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """The rows of all indices, or their bags; None for other functions and options.

    Of plain indices, which are the same on every rank, the result is so too. Of a DTensor's it is
    a DTensor on the same mesh, split where they are.
    """
    lookup = _LOOKUPS.get(func)
    return None if lookup is None else lookup(*args, **kwargs)


def _embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if max_norm is not None or scale_grad_by_freq or not _fits(input, weight):
        return None
    _check_dense("embedding", sparse, weight)
    padding = _row(padding_idx, weight)
    if _are_own(input) and all(box.shape[1] == weight.size(1) for box in weight._held.boxes):
        return _asked(input, weight, -1 if padding is None else padding)
    indices = _checked(input, weight)
    flat = indices.reshape(-1)
    here = _started(weight, len(flat))
    for rows, columns, shard in _shards(weight):
        at = _found(flat, rows)
        looked_up = F.embedding(flat[at] - rows.start, shard)
        if padding is not None:  # which learns nothing
            looked_up = torch.where((flat[at] == padding)[:, None], looked_up.detach(), looked_up)
        here[:, columns].index_add_(0, at, looked_up)
    return _summed(here.view(*indices.shape, weight.size(1)), input, weight)


def _check_dense(name: str, sparse: bool, weight: ShardedTensor) -> None:
    if sparse and weight.requires_grad and torch.is_grad_enabled():
        raise ShardedTensorError(
            f"{name}: a sparse gradient cannot be cut as the table is; use sparse=False"
        )


def _are_own(indices: Any) -> bool:
    """Whether each rank has indices that no other rank has."""
    if not isinstance(indices, DTensor) or not carries_values(indices.device_mesh):
        return False
    layout, placements = indices._layout, indices.placements
    is_split = all(each.is_shard() for each in placements)
    return is_split and Layout.from_placements(layout.mesh, layout.shape, placements) is layout


def _asked(indices: DTensor, weight: ShardedTensor, padding: int) -> DTensor:
    """The rows of each rank's own indices, from those who have them."""
    group = weight._group.communicator
    ranges, placed = [], Counter[int]()
    for box, rank in zip(weight._held.boxes, weight._held.owners, strict=True):
        start, stop = box.start[0], box.stop[0]
        ranges.append(Range(start, stop, group.ranks.index(rank), placed[rank]))
        placed[rank] += stop - start
    shards = [shard.tensor for shard in weight._local_shards]
    local = torch.cat(shards) if shards else weight._empty((0, weight.size(1)))
    table = Table(group, ranges, weight.size(0), padding)
    answer = table.ask(local, indices.to_local())
    rows = rows_of(answer.rows, answer.found)
    shape = (*indices.shape, weight.size(1))
    return DTensor.from_local(rows, indices.device_mesh, indices.placements, shape=shape)


def _embedding_bag(
    input: Any,
    weight: Any,
    offsets: Any = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    refused = max_norm is not None or scale_grad_by_freq
    weighted = per_sample_weights is not None
    fits = _fits(input, weight) and input.dim() == (2 if offsets is None else 1)
    if refused or not fits or mode not in ("sum", "mean") or (weighted and mode == "mean"):
        return None
    _check_dense("embedding_bag", sparse, weight)
    indices = _checked(input, weight)
    flat = indices.reshape(-1)
    if offsets is None:
        count = len(indices)
        bags = torch.arange(count, device=flat.device).repeat_interleave(indices.size(1))
    else:
        starts = _whole(offsets)
        count = len(starts) - int(include_last_offset)
        places = torch.arange(len(flat), device=flat.device)
        bags = torch.searchsorted(starts[:count].long(), places, right=True) - 1
    padding = _row(padding_idx, weight)
    kept = torch.ones_like(flat, dtype=torch.bool) if padding is None else flat != padding
    scale = None if not weighted else _shared(per_sample_weights, weight).reshape(-1)
    here = _started(weight, count)
    for rows, columns, shard in _shards(weight):
        at = _found(flat, rows, kept)
        looked_up = F.embedding(flat[at] - rows.start, shard)
        if scale is not None:
            looked_up = looked_up * scale[at][:, None]
        here[:, columns].index_add_(0, bags[at], looked_up)
    if mode == "mean":
        sizes = torch.bincount(bags[kept], minlength=count).clamp(min=1)
        here = here / sizes[:, None]
    return _summed(here, input, weight)


_LOOKUPS: dict[Any, Any] = {F.embedding: _embedding, F.embedding_bag: _embedding_bag}


def _fits(indices: Any, weight: Any) -> bool:
    """Whether it is a sharded table, and indices that all of its ranks can have."""
    if not isinstance(weight, ShardedTensor) or isinstance(indices, ShardedTensor):
        return False
    if not isinstance(indices, DTensor):
        return weight.dim() == 2
    ranks = indices.device_mesh.mesh.flatten().tolist()
    return weight.dim() == 2 and set(ranks) == set(weight._group.ranks)


def _checked(indices: Any, weight: ShardedTensor) -> torch.Tensor:
    """All indices, on every rank."""
    found: torch.Tensor = _whole(indices)
    check_bounds(found, 0, weight.size(0))
    return found


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _shared(scale: Any, weight: ShardedTensor) -> torch.Tensor:
    """Weights of samples on every rank, of whose gradient each rank makes a part."""
    mesh = weight._group.mesh(weight.device.type)
    plain = DTensor.from_local(_whole(scale), mesh, [Replicate()])
    return plain.to_local(grad_placements=[Partial()])


def _row(padding_idx: int | None, weight: ShardedTensor) -> int | None:
    return None if padding_idx is None else padding_idx % max(weight.size(0), 1)


def _started(weight: ShardedTensor, count: int) -> torch.Tensor:
    """Zeros for so many rows; on every rank a part of the graph, also without shards."""
    zeros = torch.zeros(count, weight.size(1), dtype=weight.dtype, device=weight.device)
    return zeros if weight._local_shards else zeros + weight._empty().sum(dtype=weight.dtype)


def _shards(weight: ShardedTensor) -> list[tuple[slice, slice, torch.Tensor]]:
    """The rows and columns of each of this rank's shards, and its elements."""
    found = []
    for shard in weight._local_shards:
        rows, columns = shard.metadata.box.slices
        found.append((rows, columns, shard.tensor))
    return found


def _found(flat: torch.Tensor, rows: slice, kept: torch.Tensor | None = None) -> torch.Tensor:
    """Which of the indices are of these rows."""
    inside: torch.Tensor = (flat >= rows.start) & (flat < rows.stop)
    if kept is not None:
        inside &= kept
    return inside.nonzero().squeeze(1)


def _summed(here: torch.Tensor, indices: Any, weight: ShardedTensor) -> Any:
    """The sum of what all ranks have found: plain, or laid out as the indices are."""
    if not isinstance(indices, DTensor):
        mesh = weight._group.mesh(weight.device.type)
        return DTensor.from_local(here, mesh, [Partial()]).full_tensor()
    mesh = indices.device_mesh
    split = [
        each if isinstance(each, Shard) and each.dim < here.dim() - 1 else Replicate()
        for each in indices.placements
    ]
    return DTensor.from_local(here, mesh, [Partial()] * mesh.ndim).redistribute(placements=split)
