"""Differences of adjacent elements, and integrals: diff, gradient, trapezoid.

Along a split dim each rank receives the few rows beyond its own that its results need.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from shardwise.core.box import Range
from shardwise.dtensor.tensor import DTensor, tensors_in
from shardwise.rules.helpers.dims import Inputs, as_dims, clip, drop_dims, replace_dim
from shardwise.rules.helpers.halo_exchange import Window, plan_exchange
from shardwise.rules.helpers.local_tensors import crop, pad_empty_dims
from shardwise.rules.registry import Function, composed, input_of, rule, with_synonyms
from shardwise.rules.spec import Out, Spec, SplitContext, dims_of, normalize_dim

# ---- diff

_diff = Function("diff", torch.diff)


@composed("diff")
def diff(
    input: torch.Tensor,
    n: int = 1,
    dim: int = -1,
    prepend: torch.Tensor | None = None,
    append: torch.Tensor | None = None,
) -> Any:
    given = [each for each in (prepend, input, append) if each is not None]
    if n and len(given) > 1:
        input = torch.cat(given, dim)
    return _diff.dispatched(input, n, dim)


@rule(_diff)
def diff_of_one(input: torch.Tensor, n: int, dim: int) -> Spec:
    (along,) = as_dims(dim, input.dim())
    names, size = dims_of(input), input.shape[along]
    count = max(0, size - n)

    def lower(context: SplitContext) -> Callable[..., torch.Tensor] | None:
        if not context.axes(names[along]):
            return None
        needs = Window(size, n + 1).needs
        get = plan_exchange(context, f"d{along}", along, (size, count), needs)
        return lambda local, *_: torch.diff(get(local), n, along)

    out = Out(names, replace_dim(input.shape, along, count))
    return Spec([(input, names)], [out], linear=[(0,)], lower=lower, positions=[f"d{along}"])


# ---- gradient


@dataclass(frozen=True, slots=True)
class _Slope:
    """The gradient along one dim."""

    dim: int
    size: int
    edge_order: int
    """The number of rows next to the first and last one that enter their gradients."""

    def needs(self, results: Range) -> Range:
        """Return the inputs that results read: their neighbours, and more rows at both ends."""
        start, stop = results
        if start >= stop:
            return 0, 0
        first = min(start - 1, self.size - 1 - self.edge_order) if stop == self.size else start - 1
        last = max(stop + 1, 1 + self.edge_order) if start == 0 else stop + 1
        return clip((first, last), self.size)

    def lower(self, context: SplitContext) -> Callable[[torch.Tensor, Any], torch.Tensor]:
        """Return a function that computes this rank's results from its shard and the spacing."""
        least = self.edge_order + 1
        mine, shape = context.outputs[0].range(self.dim), context.outputs[0].local_shape()
        start, stop = self.needs(mine) if mine[0] < mine[1] else (mine[0], mine[0] + least)
        get = plan_exchange(context, f"d{self.dim}", self.dim, (self.size, self.size), self.needs)

        def run(local: torch.Tensor, spacing: Any) -> torch.Tensor:
            if isinstance(spacing, torch.Tensor) and spacing.dim():
                spacing = spacing.narrow(0, min(start, self.size - stop + start), stop - start)
            window = pad_empty_dims(get(local), [least] * local.dim())
            (made,) = torch.gradient(
                window, spacing=_listed(spacing), dim=self.dim, edge_order=self.edge_order
            )
            return crop(made.narrow(self.dim, mine[0] - start, mine[1] - mine[0]), shape)

        return run


def _listed(spacing: Any) -> Any:
    """Return the spacing as torch takes it: coordinates in a list."""
    return [spacing] if isinstance(spacing, torch.Tensor) and spacing.dim() else spacing


def _spacings(spacing: Any, count: int) -> list[Any]:
    """Return the spacing of each dim."""
    return [*spacing] if isinstance(spacing, list | tuple) else [spacing] * count


@rule("gradient", inplace=False)
@with_synonyms
def gradient(
    input: torch.Tensor, *, spacing: Any = 1, dim: Any = None, edge_order: int = 1
) -> Spec:
    given = range(input.dim()) if dim is None else (dim,) if isinstance(dim, int) else dim
    dims = [normalize_dim(each, input.dim()) for each in given]
    names = dims_of(input)
    if len(set(dims)) < len(dims) or len(_spacings(spacing, len(dims))) != len(dims):
        raise RuntimeError(
            f"torch.gradient: expected dims that differ, and a spacing for each, got dim={dim} and "
            f"spacing={spacing}"
        )

    def lower(context: SplitContext) -> Callable[..., Any] | None:
        if not context.axes(*(names[each] for each in dims)):
            return None
        makes = [
            _Slope(each, input.shape[each], edge_order).lower(context)
            if context.axes(names[each])
            else partial(_unsplit_slope, each, edge_order)
            for each in dims
        ]

        def run(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
            local = input_of(args, kwargs)
            each = _spacings(kwargs.get("spacing", 1), len(dims))
            return tuple(make(local, step) for make, step in zip(makes, each, strict=True))

        return run

    others: Inputs = [(each, (None,) * each.dim()) for each in tensors_in(spacing)]
    outs = [Out(names, tuple(input.shape))] * len(dims)
    if any(input.shape[each] <= edge_order for each in dims):
        raise RuntimeError(
            "torch.gradient expected each dimension size to be at least edge_order+1"
        )
    positions = [f"d{each}" for each in dims]
    linear = [(0,)]
    return Spec([(input, names), *others], outs, linear=linear, lower=lower, positions=positions)


def _unsplit_slope(dim: int, edge_order: int, local: torch.Tensor, spacing: Any) -> torch.Tensor:
    (made,) = torch.gradient(local, spacing=_listed(spacing), dim=dim, edge_order=edge_order)
    return made


# ---- integrals


def _areas(y: torch.Tensor, x: Any, dx: Any, along: int) -> torch.Tensor:
    """Return the areas of the trapezoids between neighbouring points along a dim."""
    count = y.shape[along] - 1
    width = 1 if dx is None else dx
    if x is not None:
        if x.dim() == 1 and x.shape[0] != y.shape[along]:
            raise RuntimeError("trapezoid: There must be one `x` value for each sample point")
        if x.dim() == 1:
            x = x.view([-1] + [1] * (y.dim() - 1 - along))
        width = x.diff(dim=along - y.dim())
    total: torch.Tensor = y.narrow(along, 0, count) + y.narrow(along, 1, count)
    return total * width / 2


def _is_split(tensor: Any, dim: int) -> bool:
    return isinstance(tensor, DTensor) and bool(tensor._layout.shard_order[dim])


def _integral(
    name: str,
    shrinks: Callable[[int], tuple[int, ...]],
    added: Callable[[torch.Tensor, int], torch.Tensor],
) -> None:
    """Register an integral along a dim.

    Arguments:
        shrinks: maps the size of the dim to its new size, if the result keeps the dim.
        added: the function that combines the areas.
    """
    whole = Function(name, getattr(torch, name))

    @composed(name)
    def integral(y: torch.Tensor, x: Any = None, *, dx: Any = None, dim: int = -1) -> Any:
        along = normalize_dim(dim, y.dim())
        broadcasts = x is not None and x.dim() != 1 and x.shape != y.shape
        if y.numel() and (broadcasts or _is_split(y, along)):
            return added(_areas(y, x, dx, along), along)
        keywords = {} if dx is None else {"dx": dx}
        return whole.dispatched(y, *([] if x is None else [x]), dim=dim, **keywords)

    @rule(whole)
    def along_whole(y: torch.Tensor, x: Any = None, *, dx: Any = None, dim: int = -1) -> Spec:
        (along,) = as_dims(dim, y.dim()) or (0,)
        dims = replace_dim(dims_of(y), along, None)
        inputs: Inputs = [(y, dims)]
        if x is not None:
            inputs.append((x, (None,) if x.dim() == 1 else dims))
        sizes = shrinks(y.shape[along])
        shape = (*y.shape[:along], *sizes, *y.shape[along + 1 :])
        out = Out(dims if sizes else drop_dims(dims, (along,)), shape)
        return Spec(inputs, [out], linear=[(0,)])


_integral("trapezoid", lambda size: (), lambda areas, dim: areas.sum(dim))
_integral("trapz", lambda size: (), lambda areas, dim: areas.sum(dim))
_integral(
    "cumulative_trapezoid",
    lambda size: (max(0, size - 1),),
    lambda areas, dim: areas.cumsum(dim),
)
