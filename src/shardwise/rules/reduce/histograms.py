"""Histograms: every rank counts its own elements, and the counts are summed.

If the bins depend on the data, the ranks first exchange the smallest and largest values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch

from shardwise.dtensor.tensor import DTensor
from shardwise.rules.helpers.dims import Inputs, present_inputs
from shardwise.rules.helpers.row_exchange import mark_copy
from shardwise.rules.reduce.reduction import ReducedDims, reduced_dims, reduces_as
from shardwise.rules.registry import input_of, rule, with_synonyms
from shardwise.rules.spec import Dims, Out, Spec, SplitContext, dims_of


def _ends(columns: torch.Tensor, over: ReducedDims) -> list[float]:
    """Return the smallest and largest element over all ranks of each column, interleaved."""
    worst = columns.new_full((1, columns.shape[1]), torch.inf, dtype=torch.float64)
    lows = torch.cat([columns.double(), worst]).amin(0)
    highs = torch.cat([-columns.double(), worst]).amin(0)
    found = over.extreme(torch.stack([lows, highs], 1), "min")
    ends: list[float] = (found * found.new_tensor([1, -1])).flatten().tolist()
    return ends


@rule("histc")
@with_synonyms
def histc(input: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Spec:
    names = dims_of(input)

    def lower(context: SplitContext) -> Callable[..., Any] | None:
        over = reduced_dims(context, names, tuple(range(input.dim())), False)
        if not over.axes:
            return None

        def run(*args: Any, **kwargs: Any) -> torch.Tensor:
            local = input_of(args, kwargs).detach()
            ends = [min, max]
            if min == max and over.layout.numel:
                ends = _ends(local.reshape(-1, 1), over)
            return torch.histc(local, bins, *ends)

        return run

    ways = reduces_as(names, range(input.dim()), "sum")
    return Spec([(input, names)], [Out((None,), (bins,))], ways, lower=lower, positions=())


# ---- with their bins


def _density(counts: torch.Tensor, edges: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the counts divided by their total and by the volumes of the bins."""
    widths = [each.diff() for each in edges]
    volumes = reduce(lambda one, other: one.unsqueeze(-1) * other, widths)
    return counts / counts.sum() / volumes


def _histogram(
    input: torch.Tensor,
    dims: Dims,
    bins: Sequence[Any],
    weight: torch.Tensor | None,
    run: Callable[[ReducedDims], Callable[..., Any]],
) -> Spec:
    """Return the spec of a histogram, with a number of bins or given edges along each dim.

    Arguments:
        dims: the factors of the input; dims that have one are counted over.
        run: returns the function that computes the results if some of these dims are split.
    """
    edges = [each for each in bins if isinstance(each, torch.Tensor)]
    counts = tuple(len(each) - 1 if isinstance(each, torch.Tensor) else each for each in bins)
    counted = tuple(at for at, name in enumerate(dims) if name is not None)
    inputs: Inputs = present_inputs((input, dims), (weight, tuple(dims[at] for at in counted)))
    inputs += [(each, (None,)) for each in edges]

    def lower(context: SplitContext) -> Callable[..., Any] | None:
        over = reduced_dims(context, dims, counted, False)
        return with_synonyms(run(over)) if over.axes or any(map(_moves, edges)) else None

    outs = [Out((None,) * len(counts), counts), *(Out((None,), (each + 1,)) for each in counts)]
    return Spec(inputs, outs, reduces_as(dims, counted, "whole"), lower=lower, positions=())


def _moves(edges: Any) -> bool:
    """Return whether given edges must be gathered, so that the result cannot alias them."""
    return isinstance(edges, DTensor) and not edges._layout.is_replicated


def _counts(
    columns: torch.Tensor, bins: Any, range: Any, weight: Any, density: bool, over: ReducedDims
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return the counts of all ranks, and the edges of the bins."""
    columns = columns.detach()
    if range is None and over.layout.numel and not any(isinstance(b, torch.Tensor) for b in bins):
        range = _ends(columns, over)
    flat = None if weight is None else weight.detach().flatten()
    counts, edges = torch.histogramdd(columns, bins, range=range, weight=flat)
    counts = over.total(counts)
    return (_density(counts, edges) if density else counts), edges


@rule("histogram")
@with_synonyms
def histogram(
    input: torch.Tensor, bins: Any, *, range: Any = None, weight: Any = None, density: bool = False
) -> Spec:
    def run(over: ReducedDims) -> Callable[..., Any]:
        def local(input: torch.Tensor, bins: Any, *, weight: Any = None, **_: Any) -> Any:
            column = input.reshape(-1, 1)
            counts, edges = _counts(column, [bins], range, weight, density, over)
            # torch returns a copy of given edges here, but the edges themselves in histogramdd.
            return torch.return_types.histogram((counts, edges[0].clone()))

        return local

    return _histogram(input, dims_of(input), [bins], weight, run)


@rule("histogramdd")
@with_synonyms
def histogramdd(
    input: torch.Tensor, bins: Any, range: Any = None, weight: Any = None, density: bool = False
) -> Spec:
    size = input.shape[-1]
    each = [*bins] if isinstance(bins, list | tuple) else [bins] * size
    if len(each) != size:
        raise RuntimeError(f"histogramdd: expected bins for {size} dims, got {len(each)}")
    moves = [
        *map(_moves, each)
    ]  # plain bools: a reference to the edges would keep them alive with the plan

    def run(over: ReducedDims) -> Callable[..., Any]:
        def local(
            input: torch.Tensor,
            bins: Any,
            _range: Any = None,
            weight: Any = None,
            *_: Any,
            **__: Any,
        ) -> Any:
            given = [*bins] if isinstance(bins, list | tuple) else [bins] * size
            counts, edges = _counts(input.reshape(-1, size), given, range, weight, density, over)
            edges = tuple(
                mark_copy(mine.clone(), "histogramdd") if is_moved else mine
                for mine, is_moved in zip(edges, moves, strict=True)
            )
            return torch.return_types.histogramdd((counts, edges))

        return local

    return _histogram(input, (*dims_of(input)[:-1], None), each, weight, run)
