"""Reductions: sum, mean, prod, all, any and their like, over any dims.

A reduced dim that is split leaves a pending sum where the operator is linear; elsewhere the small
local results are reduced at once, and the result is whole.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from shardwise.layout import Layout
from shardwise.mesh import DeviceMesh
from shardwise.redistribute.moves import redistribute_local
from shardwise.rules.collectives import extreme, total
from shardwise.rules.pointwise import broadcast
from shardwise.rules.registry import handler, rule
from shardwise.rules.spec import Dims, Here, Out, Spec, dims_of, normalized

WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
"""What to compute in where local results are combined: torch rounds to half types only once."""


@dataclass(frozen=True)
class Over:
    """The dims that a call reduces, some of them split: what its lowering needs to know."""

    layout: Layout
    """How the input lies."""
    axes: tuple[int, ...]
    """The axes that split the reduced dims."""
    dims: tuple[int, ...]
    keepdim: bool

    @property
    def mesh(self) -> DeviceMesh:
        """Where the input lies."""
        return self.layout.mesh

    @functools.cached_property
    def start(self) -> tuple[int, ...]:
        """Where this rank's piece of the input begins."""
        return self.layout.box().start

    @functools.cached_property
    def count(self) -> int:
        """How many elements of the global tensor become one."""
        return math.prod(self.layout.shape[dim] for dim in self.dims)

    @functools.cached_property
    def counts(self) -> list[int]:
        """How many of these each of the ranks has, in the order of `stacked`."""
        return [
            math.prod(shape[dim] for dim in self.dims) for shape in pieces(self.layout, self.axes)
        ]

    def total(self, local: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, whole; differentiable."""
        return total(local, self.mesh, self.axes)

    def extreme(self, local: torch.Tensor, op: str) -> torch.Tensor:
        """The largest or smallest over the ranks, whole; no gradient."""
        return extreme(local.contiguous(), self.mesh, self.axes, op)

    def stacked(self, local: torch.Tensor) -> torch.Tensor:
        """What each of the ranks has, along a new first dim, whole; differentiable."""
        return stacked(local, self.mesh, self.axes)

    def kept(self, result: torch.Tensor) -> torch.Tensor:
        """A result that has the reduced dims still, as the call wants it."""
        return result if self.keepdim else result.squeeze(self.dims)


Body = Callable[[torch.Tensor, Over], Any]
"""What to run on the local tensor when a reduced dim is split."""


def stacked(
    local: torch.Tensor, mesh: DeviceMesh, axes: Sequence[int], *, used: bool = False
) -> torch.Tensor:
    """The tensors of the ranks along these axes, in their order, along a new first dim.

    Forward: all-gather. Backward: slice; if it is `used` beside shards, reduce-scatter.
    """
    ranks = math.prod(mesh.shape[axis] for axis in axes)
    whole = Layout(mesh, (ranks, *local.shape))
    apart = whole.relaid([tuple(axes), *[()] * local.dim()])
    found: torch.Tensor = redistribute_local(
        local.unsqueeze(0).contiguous(), apart, whole, used_on=tuple(axes) if used else ()
    )
    return found


def pieces(layout: Layout, axes: Sequence[int]) -> list[tuple[int, ...]]:
    """The shapes of the pieces of the ranks along these axes, in the order of `stacked`."""
    place = layout.mesh.get_coordinate()
    assert place is not None, "this rank is on the mesh"
    found = []
    for along in product(*(range(layout.mesh.shape[axis]) for axis in axes)):
        there = dict(enumerate(place)) | dict(zip(axes, along, strict=True))
        found.append(layout.local_shape([there[axis] for axis in range(layout.mesh.ndim)]))
    return found


def position(mesh: DeviceMesh, axes: Sequence[int]) -> int:
    """This rank's place in the order that `stacked` has."""
    place = mesh.get_coordinate()
    assert place is not None, "this rank is on the mesh"
    at = 0
    for axis in axes:
        at = at * mesh.shape[axis] + place[axis]
    return at


_INPUT = ("input", "self", "x", "A")
_SYNONYMS = dict.fromkeys(_INPUT, "input") | {"axis": "dim", "keepdims": "keepdim"}


def with_synonyms(made: Callable[..., Any]) -> Callable[..., Any]:
    """A rule that is called with torch's names, where the caller used aten's or numpy's."""

    @functools.wraps(made)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        kwargs = {_SYNONYMS.get(name, name): value for name, value in kwargs.items()}
        if kwargs.pop("out", None) is not None:
            return None
        return made(*args, **kwargs)

    return renamed


def composed(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what stands for an operator, made of other operators on DTensors."""

    def register(made: Callable[..., Any]) -> Callable[..., Any]:
        run = with_synonyms(made)
        handler(*names)(lambda function, args, kwargs: run(*args, **kwargs))
        return made

    return register


def as_dims(dim: Any, ndim: int) -> tuple[int, ...]:
    """The dims that an argument means, counted from the front; None and () mean all."""
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return tuple(range(ndim))
    given = [normalized(each, ndim) for each in ([dim] if isinstance(dim, int) else dim)]
    for each in given:
        if given.count(each) > 1:
            raise RuntimeError(f"dim {each} appears multiple times in the list of dims")
    return tuple(sorted(given)) if ndim else ()


def without(
    values: Sequence[Any], dims: Sequence[int], keepdim: bool, kept: Any
) -> tuple[Any, ...]:
    """Values for each dim, but for those that are reduced."""
    if keepdim:
        return tuple(kept if at in dims else each for at, each in enumerate(values))
    return tuple(each for at, each in enumerate(values) if at not in dims)


def reduced(
    input: torch.Tensor,
    dim: Any,
    keepdim: bool,
    how: str,
    body: Body | None = None,
    *,
    outputs: int = 1,
    linear: bool = False,
    warns: bool = False,
) -> Spec:
    """The spec of a reduction over some dims.

    Arguments:
        how: what is pending on the results when a reduced dim is split; "whole" for nothing.
        body: what runs then, in place of the operator.
        outputs: how many results there are, all of one shape.
        linear: whether pending sums flow through.
        warns: whether torch complains of a piece without elements; the body runs on it then.
    """
    dims = as_dims(dim, input.dim())
    names, shape = dims_of(input), tuple(input.shape)
    out = Out(without(names, dims, keepdim, None), without(shape, dims, keepdim, 1))

    def lower(here: Here) -> Callable[..., Any] | None:
        over = over_dims(here, names, dims, keepdim)
        is_empty = 0 in here.inputs[0].local_shape()
        if body is None or not (over.axes or (warns and is_empty)):
            return None
        return lambda *args, **kwargs: body(first(args, kwargs), over)

    return Spec(
        [(input, names)],
        [out] * outputs,
        reduces=split_as(names, dims, how),
        linear=[(0,)] if linear else (),
        lower=lower,
    )


def split_as(names: Dims, dims: Sequence[int], how: str) -> dict[str, str]:
    """What is pending when one of these dims is split."""
    return {name: how for each in dims if (name := names[each]) is not None}


def over_dims(here: Here, names: Dims, dims: tuple[int, ...], keepdim: bool) -> Over:
    """The reduction of some dims of a call's first input."""
    axes = here.axes(*(names[each] for each in dims))
    return Over(here.inputs[0], axes, dims, keepdim)


def first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The input of a call, by position or by any of its names."""
    found: torch.Tensor = (
        args[0] if args else next(kwargs[each] for each in _INPUT if each in kwargs)
    )
    return found


def whole_along(input: torch.Tensor, dims: Sequence[int], outputs: Sequence[Out]) -> Spec:
    """The spec of an operator that needs some dims whole; the others are free."""
    return Spec([(input, without(dims_of(input), dims, True, None))], outputs)


def keeps_sums(dtype: torch.dtype | None) -> bool:
    """Whether converting to this dtype first is linear: contributions must not be truncated."""
    return dtype is None or dtype.is_floating_point or dtype.is_complex


# ---- the rules


@rule("sum")
@with_synonyms
def sum_(input: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Spec:
    return reduced(input, dim, keepdim, "sum", linear=keeps_sums(dtype))


@rule("nansum")
@with_synonyms
def nansum(
    input: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Spec:
    return reduced(input, dim, keepdim, "sum")


@rule("count_nonzero")
@with_synonyms
def count_nonzero(input: torch.Tensor, dim: Any = None) -> Spec:
    return reduced(input, dim, False, "sum")


@rule("mean")
@with_synonyms
def mean(input: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Spec:
    def body(local: torch.Tensor, over: Over) -> torch.Tensor:
        kind = dtype or local.dtype
        if not keeps_sums(kind):
            return torch.mean(local, over.dims, dtype=dtype)  # torch says why not
        summed = torch.sum(local, over.dims, over.keepdim, dtype=WIDER.get(kind, kind))
        return (summed / over.count).to(kind)

    return reduced(input, dim, keepdim, "sum", body, linear=keeps_sums(dtype))


@rule("nanmean")
@with_synonyms
def nanmean(
    input: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Spec:
    def body(local: torch.Tensor, over: Over) -> torch.Tensor:
        kind = dtype or local.dtype
        if not keeps_sums(kind):
            return torch.nanmean(local, over.dims, dtype=dtype)
        counted = over.total(local.isnan().logical_not_().sum(over.dims, over.keepdim))
        summed = torch.nansum(local, over.dims, over.keepdim, dtype=WIDER.get(kind, kind))
        return (summed / counted).to(kind)

    return reduced(input, dim, keepdim, "sum", body)


@rule("prod")
@with_synonyms
def prod(input: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Spec:
    # The product of the ranks' products: torch's gradient of either is right where there are
    # zeros, which a pending product's would not be.
    def body(local: torch.Tensor, over: Over) -> torch.Tensor:
        given = () if dim is None else (dim, keepdim)
        return over.stacked(torch.prod(local, *given, dtype=dtype)).prod(0, dtype=dtype)

    return reduced(input, dim, keepdim, "whole", body)


def _verdict(function: Callable[..., torch.Tensor], op: str) -> Callable[..., Any]:
    def made(input: torch.Tensor, dim: Any = None, keepdim: bool = False) -> Spec:
        def body(local: torch.Tensor, over: Over) -> torch.Tensor:
            return over.extreme(function(local, over.dims, over.keepdim), op)

        if isinstance(dim, list | tuple) and not dim:
            return broadcast([input])  # these alone do not take () for all dims
        return reduced(input, dim, keepdim, "whole", body)

    return with_synonyms(made)


rule("all")(_verdict(torch.all, "min"))
rule("any")(_verdict(torch.any, "max"))


@rule("trace")
@with_synonyms
def trace(input: torch.Tensor) -> Spec:
    def body(local: torch.Tensor, over: Over) -> torch.Tensor:
        row, column = over.start
        if torch.is_autocast_enabled(local.device.type):  # torch's trace is in float32 then
            local = local.to(WIDER.get(local.dtype, local.dtype))
        return local.diagonal(row - column).sum()

    if input.dim() != 2:
        raise RuntimeError(f"trace: expected a matrix, but got tensor with dim {input.dim()}")
    return reduced(input, None, False, "sum", body, linear=True)


@composed("sum_to_size")
def sum_to_size(input: torch.Tensor, *sizes: Any, size: Any = None) -> torch.Tensor:
    given = size if size is not None else sizes[0] if len(sizes) == 1 else sizes
    size = (given,) if isinstance(given, int) else tuple(given)
    if not size:
        return input.sum()
    extra = input.dim() - len(size)
    if extra < 0 or any(
        wanted not in (1, have) for wanted, have in zip(size, input.shape[extra:], strict=True)
    ):
        raise RuntimeError(
            f"size {{{list(size)}}} is not expandable to size {{{list(input.shape)}}}."
        )
    kept = [extra + at for at, wanted in enumerate(size) if wanted != input.shape[extra + at]]
    result: torch.Tensor = input.sum(kept, keepdim=True) if kept else input
    return result.sum(tuple(range(extra))) if extra else result
