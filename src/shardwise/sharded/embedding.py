"""Lookups in tables that are cut in any way: `embedding`, and `embedding_bag` with sums or means.

Each rank looks up the rows that its shards have, and zeros for the others; the sum over the ranks
is the result. If each rank has its own indices, and each row is on one rank, `embedding` fetches
rows from that rank. Indices and rows travel, but never the table.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.nn import functional as F

from shardwise.comm import carries_values
from shardwise.core.errors import ShardedTensorError
from shardwise.core.placement import Partial, Replicate, Shard
from shardwise.dtensor.tensor import DTensor
from shardwise.rules.helpers.row_exchange import RowRange, RowTable, rows_of
from shardwise.rules.index.indexing import check_bounds
from shardwise.sharded.tensor import ShardedTensor, as_full_tensor
from shardwise.sharded.transfer import sum_grads_over_ranks


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Look up the rows of all indices, or sum them in bags; return None for other functions and
    options.

    For plain indices, which are the same on every rank, so is the result. For the indices of a
    DTensor the result is a DTensor on the same mesh, split as they are.
    """
    lookup = _SUPPORTED.get(func)
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
    if max_norm is not None or scale_grad_by_freq or not _is_supported(input, weight):
        return None
    _check_dense("embedding", sparse, weight)
    padding = _padding_row(padding_idx, weight)
    has_whole_rows = all(box.shape[1] == weight.size(1) for box in weight._ownership.boxes)
    if has_whole_rows and _has_own_indices(input):
        return _fetch_rows(input, weight, -1 if padding is None else padding)
    indices = _gather_indices(input, weight)
    flat = indices.reshape(-1)
    result = _zero_rows(weight, len(flat))
    for rows, columns, shard in _local_tables(weight):
        at = _positions_in(flat, rows)
        looked_up = F.embedding(flat[at] - rows.start, shard)
        if padding is not None:  # the padding row gets no gradient
            looked_up = torch.where((flat[at] == padding)[:, None], looked_up.detach(), looked_up)
        result[:, columns].index_add_(0, at, looked_up)
    return _sum_over_ranks(result.view(*indices.shape, weight.size(1)), input, weight)


def _check_dense(name: str, sparse: bool, weight: ShardedTensor) -> None:
    if sparse and weight.requires_grad and torch.is_grad_enabled():
        raise ShardedTensorError(
            f"{name}: a sparse gradient cannot be cut as the table is; use sparse=False"
        )


def _has_own_indices(indices: Any) -> bool:
    """Return whether each rank has its own part of the indices, and no part is on two ranks."""
    if not isinstance(indices, DTensor) or not carries_values(indices.device_mesh):
        return False
    return all(each.is_shard() for each in indices.placements)


def _fetch_rows(indices: DTensor, weight: ShardedTensor, padding: int) -> DTensor:
    """Fetch the rows of each rank's own indices from the ranks that hold them."""
    group = weight._group.communicator
    ranges, placed = [], Counter[int]()
    for box, rank in zip(weight._ownership.boxes, weight._ownership.owners, strict=True):
        start, stop = box.start[0], box.stop[0]
        ranges.append(RowRange(start, stop, group.ranks.index(rank), placed[rank]))
        placed[rank] += stop - start
    shards = weight._local_tensors()
    local = torch.cat(shards) if shards else weight._get_placeholder((0, weight.size(1)))
    table = RowTable(group, ranges, weight.size(0), padding)
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
    has_refused_options = max_norm is not None or scale_grad_by_freq
    is_weighted = per_sample_weights is not None
    is_supported = _is_supported(input, weight) and input.dim() == (2 if offsets is None else 1)
    has_refused_mode = mode not in ("sum", "mean") or (is_weighted and mode == "mean")
    if has_refused_options or has_refused_mode or not is_supported:
        return None
    _check_dense("embedding_bag", sparse, weight)
    indices = _gather_indices(input, weight)
    flat = indices.reshape(-1)
    if offsets is None:
        count = len(indices)
        bags = torch.arange(count, device=flat.device).repeat_interleave(indices.size(1))
    else:
        starts = as_full_tensor(offsets)
        count = len(starts) - int(include_last_offset)
        positions = torch.arange(len(flat), device=flat.device)
        bags = torch.searchsorted(starts[:count].long(), positions, right=True) - 1
    padding = _padding_row(padding_idx, weight)
    kept = torch.ones_like(flat, dtype=torch.bool) if padding is None else flat != padding
    if is_weighted:
        weights = as_full_tensor(per_sample_weights)
        weights = sum_grads_over_ranks(weights, weight._group).reshape(-1)
    result = _zero_rows(weight, count)
    for rows, columns, shard in _local_tables(weight):
        at = _positions_in(flat, rows, kept)
        looked_up = F.embedding(flat[at] - rows.start, shard)
        if is_weighted:
            looked_up = looked_up * weights[at][:, None]
        result[:, columns].index_add_(0, bags[at], looked_up)
    if mode == "mean":
        sizes = torch.bincount(bags[kept], minlength=count).clamp(min=1)
        result = result / sizes[:, None]
    return _sum_over_ranks(result, input, weight)


_SUPPORTED: dict[Any, Any] = {F.embedding: _embedding, F.embedding_bag: _embedding_bag}


def _is_supported(indices: Any, weight: Any) -> bool:
    """Return whether the weight is a sharded table, and all of its ranks can have the indices."""
    if not isinstance(weight, ShardedTensor) or isinstance(indices, ShardedTensor):
        return False
    if not isinstance(indices, DTensor):
        return weight.dim() == 2
    ranks = indices.device_mesh.mesh.flatten().tolist()
    return weight.dim() == 2 and set(ranks) == set(weight._group.ranks)


def _gather_indices(indices: Any, weight: ShardedTensor) -> torch.Tensor:
    """Return all indices, on every rank; refuse those out of bounds."""
    found: torch.Tensor = as_full_tensor(indices)
    check_bounds(found, 0, weight.size(0))
    return found


def _padding_row(padding_idx: int | None, weight: ShardedTensor) -> int | None:
    """Return the padding index from 0 on, or None."""
    return None if padding_idx is None else padding_idx % max(weight.size(0), 1)


def _zero_rows(weight: ShardedTensor, count: int) -> torch.Tensor:
    """Return zeros for `count` rows. They depend on the placeholder on a rank without shards, so
    that this rank takes part in the backward pass."""
    zeros = torch.zeros(count, weight.size(1), dtype=weight.dtype, device=weight.device)
    return (
        zeros if weight._local_shards else zeros + weight._get_placeholder().sum(dtype=weight.dtype)
    )


def _local_tables(weight: ShardedTensor) -> list[tuple[slice, slice, torch.Tensor]]:
    """Return the rows, the columns and the elements of each of this rank's shards."""
    found = []
    for shard in weight._local_shards:
        rows, columns = shard.metadata.box.slices
        found.append((rows, columns, shard.tensor))
    return found


def _positions_in(
    flat: torch.Tensor, rows: slice, kept: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the positions of the indices that are within these rows."""
    inside: torch.Tensor = (flat >= rows.start) & (flat < rows.stop)
    if kept is not None:
        inside &= kept
    return inside.nonzero().squeeze(1)


def _sum_over_ranks(local: torch.Tensor, indices: Any, weight: ShardedTensor) -> Any:
    """Return the sum of the results of all ranks: plain, or split as the indices are."""
    if not isinstance(indices, DTensor):
        mesh = weight._group.mesh(weight.device.type)
        return DTensor.from_local(local, mesh, [Partial()]).full_tensor()
    mesh = indices.device_mesh
    split = [
        each if isinstance(each, Shard) and each.dim < local.dim() - 1 else Replicate()
        for each in indices.placements
    ]
    return DTensor.from_local(local, mesh, [Partial()] * mesh.ndim).redistribute(placements=split)
