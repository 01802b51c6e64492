"""Embeddings (lookups of rows of a weight) and one_hot.

Indices and features are free. If the vocabulary is split, each rank looks up the rows that it holds
and zeros for the rest, and the result is pending a sum. If the same axis also splits the indices,
ranks fetch rows from each other (`row_exchange: RowTable`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.core.layout import Layout
from shardwise.dtensor.tensor import DTensor, unwrap
from shardwise.rules.helpers.collectives import all_reduce_extreme
from shardwise.rules.helpers.dims import present_inputs
from shardwise.rules.helpers.index_key import gather_whole
from shardwise.rules.helpers.local_tensors import pad_to_one_row
from shardwise.rules.helpers.row_exchange import FetchedRows, RowTable, refuse_if_explicit, rows_of
from shardwise.rules.index.indexing import locate
from shardwise.rules.pointwise.elementwise import tensors_among
from shardwise.rules.registry import Aten, Function, composed, rule
from shardwise.rules.spec import Dims, Out, Spec, SplitContext, dims_of
from shardwise.torch_internals import as_local


@rule(F.embedding)
def embedding_function(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Spec | None:
    """Return the spec of `F.embedding`."""
    if max_norm is not None or not _fits(padding_idx, weight):
        return None  # decompose it: renormalize first, or raise torch's error
    padding = -1 if padding_idx is None else padding_idx % max(weight.size(0), 1)

    def call(lookup: Callable[..., Any]) -> Callable[..., Any]:
        return lambda input, weight, *args, **kwargs: lookup(weight, input)

    return _embedding(weight, input, padding, scale_grad_by_freq, sparse, call, weight_at=1)


def _fits(padding_idx: int | None, weight: torch.Tensor) -> bool:
    return padding_idx is None or -weight.size(0) <= padding_idx < weight.size(0)


@rule(torch.embedding, Aten("embedding"))
def embedding(
    weight: torch.Tensor,
    indices: torch.Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Spec:
    """Return the spec of `torch.embedding`, whose arguments have the other order."""

    def call(lookup: Callable[..., Any]) -> Callable[..., Any]:
        return lambda weight, indices, *args, **kwargs: lookup(weight, indices)

    return _embedding(weight, indices, padding_idx, scale_grad_by_freq, sparse, call)


def _embedding(
    weight: torch.Tensor,
    indices: torch.Tensor,
    padding: int,
    by_frequency: bool,
    sparse: bool,
    call: Callable[..., Any],
    weight_at: int = 0,
) -> Spec:
    """Return the spec for either order of the arguments."""
    picks: Dims = dims_of(indices)
    rows: Dims = ("vocabulary", "features")
    if by_frequency:
        # The gradient counts how often an index occurs, so it needs all indices.
        picks, rows = (None,) * len(picks), (None, "features")
    if sparse:
        picks = (None,) * len(picks)  # sparse gradients cannot be summed over ranks

    def lower(context: SplitContext) -> Callable[..., Any]:
        layout = context.inputs[weight_at]
        find = _row_finder(context, layout, picks, padding)
        refuses = sparse and bool(context.splits)

        def lookup(weight: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
            if refuses and weight.requires_grad and torch.is_grad_enabled():
                raise RuntimeError(
                    f"embedding: a sparse gradient cannot lie as the weight does, {layout!r}; "
                    "use sparse=False, or a weight that is whole on every rank"
                )
            if find is None:
                if by_frequency or sparse:
                    return torch.embedding(weight, indices, padding, by_frequency, sparse)
                return rows_of(weight, indices, padding)
            weight, found, inside, padding_here = find(weight, indices)
            result = rows_of(weight, found, padding_here)
            return result if inside is None else result.masked_fill(~inside.unsqueeze(-1), 0)

        return call(lookup)  # type: ignore[no-any-return]

    inputs = [(weight, rows), (indices, picks)]
    shape = (*indices.shape, weight.size(1))
    return Spec(
        inputs[::-1] if weight_at else inputs,
        [Out((*picks, rows[1]), shape)],
        reduces={"vocabulary": "sum"},
        co_split=_co_split(picks),
        comm_cost=lambda context: _lookup_cost(
            context, picks, context.inputs[1 - weight_at], context.inputs[weight_at]
        ),
        linear=[(weight_at,)],
        lower=lower,
        positions=("vocabulary",),
    )


def _co_split(picks: Dims) -> list[tuple[str, str]]:
    """Return the pairs of factors that one axis may split both: vocabulary and indices."""
    return [(each, "vocabulary") for each in picks if each is not None]


def _fetching_axes(context: SplitContext, picks: Dims) -> tuple[int, ...]:
    """Return the axes that split both vocabulary and indices: ranks along them fetch rows."""
    return tuple(axis for axis in context.axes("vocabulary") if axis in context.axes(*picks))


def _lookup_cost(
    context: SplitContext, picks: Dims, indices: Layout, weight: Layout
) -> tuple[int, float]:
    """Return the collectives and elements that fetching rows moves: numbers, indices, rows."""

    def count(axes: Iterable[int]) -> int:
        return math.prod(context.mesh.shape[axis] for axis in axes)

    axes = _fetching_axes(context, picks)
    if not axes:
        return 0, 0.0
    rows = indices.numel / count(context.axes(*picks))
    rows *= count(axes) / count(
        context.axes("vocabulary")
    )  # the share of rows that other ranks hold
    features = weight.shape[1] / count(weight.shard_order[1])
    return 3, rows * (1 - 1 / count(axes)) * (1 + features)


def _row_finder(
    context: SplitContext, layout: Layout, picks: Dims, padding: int = -1
) -> Callable[[torch.Tensor, torch.Tensor], FetchedRows] | None:
    """Return a function that finds rows of a weight; None if its rows are not split.

    Arguments:
        padding: a row that gets no gradient.
    """
    if not context.axes("vocabulary"):
        return None
    axes = _fetching_axes(context, picks)
    if axes:
        table = RowTable.of(layout, axes, padding)

        def ask(weight: torch.Tensor, indices: torch.Tensor) -> FetchedRows:
            _check_indices(indices)
            refuse_if_explicit("embedding", context.mesh, axes)
            return table.ask(weight, indices)

        return ask
    start, stop = layout.range(0)
    padding = padding - start if start <= padding < stop else -1

    def locate_rows(weight: torch.Tensor, indices: torch.Tensor) -> FetchedRows:
        _check_indices(indices)
        found, inside = locate(indices, layout, 0, wraps=False)
        return FetchedRows(pad_to_one_row(weight, 0), found, inside, padding)

    return locate_rows


def _check_indices(indices: torch.Tensor) -> None:
    if indices.dtype not in (torch.long, torch.int):
        raise RuntimeError(
            f"embedding: expected indices of torch.int64 or torch.int32, got {indices.dtype}"
        )


@composed("embedding_renorm_")
def embedding_renorm_(
    weight: torch.Tensor, indices: torch.Tensor, max_norm: float, norm_type: float
) -> torch.Tensor:
    """Scale down the looked-up rows that are longer than `max_norm`.

    It is composed of operators with rules and reads all rows, while torch reads only those looked
    up.
    """
    with torch.no_grad():
        norms = torch.linalg.vector_norm(weight, norm_type, dim=1, keepdim=True)
        used = torch.zeros_like(norms).index_fill(0, indices.flatten(), 1)
        long = (norms > max_norm) & (used > 0)
        weight.mul_(torch.where(long, max_norm / (norms + 1e-7), 1.0))
    return weight


# ---- bags


@rule(F.embedding_bag)
def embedding_bag(
    input: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Spec | None:
    """Return the spec of sums, means or maxima of the rows of each bag of indices."""
    if max_norm is not None or sparse or not _fits(padding_idx, weight):
        return None
    # A mean divides the sum by the size of the bag, so bags must be whole.
    adds = mode in ("sum", "mean") and not scale_grad_by_freq
    picks: Dims = (None,)
    bags = 0
    if input.dim() == 2 and offsets is None:
        picks = (
            None if scale_grad_by_freq else "bags",
            "picks" if mode == "sum" and adds else None,
        )
        bags = input.size(0)
    elif input.dim() == 1 and offsets is not None:
        bags = offsets.size(0) - int(include_last_offset)
    else:
        return None  # torch refuses it
    rows: Dims = ("vocabulary" if adds else None, "features")
    inputs = present_inputs(
        (input, picks), (weight, rows), (offsets, (None,)), (per_sample_weights, picks)
    )
    padding = None if padding_idx is None else padding_idx % max(weight.size(0), 1)

    def lower(context: SplitContext) -> Callable[..., Any] | None:
        if not context.axes("vocabulary", "picks"):
            return None
        find = _row_finder(context, context.inputs[1], picks)

        def run(
            input: torch.Tensor,
            weight: torch.Tensor,
            offsets: torch.Tensor | None = None,
            *args: Any,
            per_sample_weights: torch.Tensor | None = None,
            **kwargs: Any,
        ) -> torch.Tensor:
            # Each rank adds its own rows only: the weight of a row of another rank is 0.
            scale = next(iter(tensors_among(*args)), per_sample_weights)
            found, inside = input, None
            if find is not None:
                weight, found, inside, _ = find(weight, input)
            if inside is None:
                inside = torch.ones_like(input, dtype=torch.bool)
            if padding is not None:
                inside = inside & (input != padding)
            scale = inside.to(weight.dtype) if scale is None else scale.masked_fill(~inside, 0)
            if mode == "mean":
                kept = torch.ones_like(inside) if padding is None else input != padding
                sizes = _bag_sizes(kept, offsets, bags)
            if offsets is None:
                found, scale = pad_to_one_row(found, 1), pad_to_one_row(scale, 1)
            result = F.embedding_bag(
                found,
                weight,
                offsets,
                mode="sum",
                per_sample_weights=scale,
                include_last_offset=include_last_offset,
            )
            return result / sizes if mode == "mean" else result

        return run

    out = Out((picks[0] if len(picks) == 2 else None, "features"), (bags, weight.size(1)))
    reduces = {"vocabulary": "sum", "picks": "sum"} if adds else {}
    return Spec(
        inputs,
        [out],
        reduces=reduces,
        co_split=_co_split(picks[:1]) if adds else (),
        comm_cost=lambda context: _lookup_cost(
            context, picks, context.inputs[0], context.inputs[1]
        ),
        linear=[(1,)] if mode != "max" else (),
        lower=lower,
        positions=("vocabulary",),
    )


def _bag_sizes(kept: torch.Tensor, offsets: torch.Tensor | None, bags: int) -> torch.Tensor:
    """Return the number of kept indices of each bag, as a column; 1 for an empty bag."""
    if offsets is None:
        counts = kept.sum(1)
    else:
        before = F.pad(kept.cumsum(0), (1, 0))  # the number of kept indices before each place
        ends = torch.cat([offsets[1:], offsets.new_tensor([len(kept)])])[:bags]
        counts = before[ends] - before[offsets[:bags]]
    return counts.clamp(min=1).unsqueeze(1)


# ---- one_hot

ONE_HOT = Function("one_hot", F.one_hot)


@rule(ONE_HOT)
def one_hot(tensor: torch.Tensor, num_classes: int) -> Spec:
    """Return the spec of one_hot with a known number of classes."""
    dims = dims_of(tensor)
    shape = (*tensor.shape, num_classes)
    return Spec([(tensor, dims)], [Out((*dims, None), shape)])


@composed("one_hot")
def one_hot_of_any(tensor: DTensor, num_classes: int = -1) -> Any:
    """Run one_hot; the number of classes may have to be found in the data."""
    if num_classes == -1:
        num_classes = _largest(tensor) + 1
    return ONE_HOT.dispatched(tensor, num_classes)


def _largest(tensor: DTensor) -> int:
    layout = tensor._layout
    if layout.numel == 0:
        raise RuntimeError("Can not infer total number of classes from empty tensor.")
    local = gather_whole(tensor, "one_hot") if layout.partial else unwrap(tensor)
    with as_local(), torch.no_grad():
        lowest = local.new_full((1,), torch.iinfo(local.dtype).min)
        largest = torch.cat([local.flatten(), lowest]).max()
        axes = [axis for axis, each in enumerate(layout.placements) if each.is_shard()]
        return int(all_reduce_extreme(largest, layout.mesh, [] if layout.partial else axes, "max"))
