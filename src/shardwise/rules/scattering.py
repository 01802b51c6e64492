"""Writes along a dim: scatter, index_add, index_copy and their kin; and masked_scatter.

Along dims that an operator does not touch, operands that are equally long share a factor. The dim
of the `rows` is where indices point to. If it is split, each rank's piece gets one more row, which
takes all that belongs to other ranks and is cut off again. The dim of the `picks`, along the
indices, is pending a sum for what adds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.layout import Layout
from shardwise.rules.calls import composed
from shardwise.rules.dims import Inputs, replaced, unsplit
from shardwise.rules.gathering import boxes_of, cut
from shardwise.rules.indexing import located
from shardwise.rules.keys import mesh_of, static, whole
from shardwise.rules.padding import padded
from shardwise.rules.pointwise import tensors_among
from shardwise.rules.registry import rule
from shardwise.rules.spec import Dims, Here, Out, Spec, dims_of, normalized


@rule("scatter")
def scatter(
    input: torch.Tensor, dim: int, index: torch.Tensor, src: Any = None, *args: Any, **kwargs: Any
) -> Spec:
    """Elements or a number, to where the indices say."""
    tensors = tensors_among(input, index, src, kwargs.get("value"))
    is_linear = len(tensors) == 3 and not (args or kwargs.get("reduce"))
    return _scatter(torch.scatter, tensors, dim, linear=is_linear)


@rule("scatter_add")
def scatter_add(input: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor) -> Spec:
    """The same, added to what is there."""
    return _scatter(torch.scatter_add, [input, index, src], dim, linear=True, adds=True)


@rule("scatter_reduce")
def scatter_reduce(
    input: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    src: torch.Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Spec:
    """The same, reduced with what is there."""
    # A mean of integers is rounded, which a mean of contributions must not be.
    return _scatter(torch.scatter_reduce, [input, index, src], dim, linear=reduce == "sum")


def _scatter(
    run: Callable[..., Any],
    tensors: Sequence[torch.Tensor],
    dim: int,
    *,
    linear: bool,
    adds: bool = False,
) -> Spec:
    """A write to the first tensor, at the indices of the second, of the third (if any).

    Arguments:
        linear: whether it is linear in the first and third together.
        adds: whether what is written is added to what is there.
    """
    input, index, *values = tensors
    if any(each.dim() != input.dim() for each in tensors) or input.dim() == 0:
        return unsplit(tensors, input.shape, linear=[(0, 2)] if linear else ())
    at = normalized(dim, input.dim())
    names = dims_of(input)
    held = replaced(names, at, "rows")
    picks: Dims = tuple(
        ("picks" if adds else None)
        if each == at
        else name
        if index.size(each) == input.size(each)
        else None
        for each, name in enumerate(names)
    )
    inputs: Inputs = [(input, held), (index, picks)]
    for value in values:
        same = tuple(value.size(each) == index.size(each) for each in range(value.dim()))
        inputs.append((value, tuple(n if ok else None for n, ok in zip(picks, same, strict=True))))

    def lower(here: Here) -> Callable[..., Any] | None:
        leading = here.inputs[0]
        boxes = [boxes_of(dims, held, leading, but=at) for _, dims in inputs]
        if values and inputs[2][1][at] is None and here.inputs[1].shard_order[at]:
            box = here.inputs[1].box()
            boxes[2][at] = box.start[at], box.stop[at]
        axes = here.axes("rows")
        if not axes and not any(boxes):
            return None

        def local(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            parts = _Arguments(args, kwargs)
            index, *values = parts.tensors
            index = cut(index, boxes[1], broadcasts=False)
            values = [
                cut(value, boxes[2], broadcasts=False) if value.dim() else value for value in values
            ]
            if not axes:
                given, keywords = parts.filled([index, *values])
                return run(input, *given, **keywords)  # type: ignore[no-any-return]
            return _spilled(run, input, at, index, values, parts, leading)

        return local

    return Spec(
        inputs,
        [Out(held, tuple(input.shape))],
        reduces={"picks": "sum"} if adds else {},
        linear=[(0, 2)] if linear else (),
        additive=(0,) if adds else (),
        lower=lower,
    )


@rule("index_add")
def index_add(
    input: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, alpha: Any = 1
) -> Spec:
    """Rows, added to what is there."""
    return _index_write(torch.index_add, [input, index, source], dim, adds=True)


@rule("index_copy")
def index_copy(input: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> Spec:
    """Rows."""
    return _index_write(torch.index_copy, [input, index, source], dim)


@rule("index_fill")
def index_fill(input: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> Spec:
    """A number, to rows."""
    return _index_write(torch.index_fill, tensors_among(input, index, value), dim)


@rule("index_reduce")
def index_reduce(
    input: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: torch.Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Spec:
    """Rows, reduced with what is there."""
    return _index_write(torch.index_reduce, [input, index, source], dim, linear=False)


def _index_write(
    run: Callable[..., Any],
    tensors: Sequence[torch.Tensor],
    dim: int,
    *,
    adds: bool = False,
    linear: bool = True,
) -> Spec:
    """A write of rows to the first tensor, at the indices of the second, of the third (if any).

    The flags are those of `_scatter`.
    """
    input, index, *values = tensors
    flows = [(0, 2)] if values and linear else []
    if input.dim() == 0 or any(value.dim() not in (0, input.dim()) for value in values):
        return unsplit(tensors, input.shape, linear=flows)
    at = normalized(dim, input.dim())
    names = dims_of(input)
    held = replaced(names, at, "rows")
    written = replaced(names, at, "picks" if adds and index.dim() else None)
    inputs: Inputs = [(input, held), (index, (written[at],) * index.dim())]
    inputs += [(value, written if value.dim() else ()) for value in values]

    def lower(here: Here) -> Callable[..., Any] | None:
        if not here.axes("rows"):
            return None

        def local(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            parts = _Arguments(args, kwargs)
            index, *values = parts.tensors
            return _spilled(run, input, at, index, values, parts, here.inputs[0])

        return local

    return Spec(
        inputs,
        [Out(held, tuple(input.shape))],
        reduces={"picks": "sum"} if adds else {},
        linear=flows,
        additive=(0,) if adds else (),
        lower=lower,
    )


class _Arguments:
    """The arguments of a call after the first, whose tensors can be exchanged."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        self.tensors = tensors_among(*args, *kwargs.values())

    def filled(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """They, with these tensors."""
        rest = iter(tensors)

        def fill(value: Any) -> Any:
            return next(rest) if isinstance(value, torch.Tensor) else value

        return [fill(each) for each in self.args], {
            name: fill(each) for name, each in self.kwargs.items()
        }


def _spilled(
    run: Callable[..., Any],
    input: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    values: Sequence[torch.Tensor],
    parts: _Arguments,
    layout: Layout,
) -> torch.Tensor:
    """Write to a piece of a split dim; what belongs to others goes to a row that is cut off."""
    size = input.size(dim)
    found, inside = located(index, layout, dim, wraps=run is torch.index_fill)
    found = torch.where(inside, found, size)
    args, kwargs = parts.filled([found, *values])
    result = run(padded(input, {dim: (0, 1)}), *args, **kwargs)
    return result.narrow(dim, 0, size)  # type: ignore[no-any-return]


# ---- by a mask


@composed("masked_scatter")
def masked_scatter(input: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Where the mask is true, the next element of the source: how many came before, only the whole
    mask tells."""
    mesh = mesh_of(input, mask, source)
    given = whole(mask, "masked_scatter")
    shape = torch.broadcast_shapes(tuple(input.shape), tuple(given.shape))  # type: ignore[no-untyped-call]
    given = given.expand(shape).clone()
    count = given.flatten().cumsum(0).reshape(shape)
    values = whole(source, "masked_scatter").flatten()
    if int(given.sum()) > values.numel():
        raise RuntimeError(
            "masked_scatter: expected self and source to have same dtypes and source to have at "
            f"least {int(given.sum())} elements, got {values.numel()}"
        )
    if values.dtype != input.dtype:
        raise RuntimeError("masked_scatter: expected self and source to have same dtypes")
    picked = values[(count - 1).clamp(min=0)] if values.numel() else values.new_zeros(shape)
    return torch.where(static(given, mesh), static(picked, mesh), input)
