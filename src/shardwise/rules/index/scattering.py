"""Writes along a dim (scatter, index_add, index_copy, ...), and masked_scatter.

Along dims that an operator does not touch, operands of equal size share a factor. The factor `rows`
is the dim that indices point into. If it is split, each rank's shard gets one more row that
receives all writes for other ranks and is dropped afterwards. The factor `picks` runs along the
indices; if it is split, an operator that adds leaves a pending sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.core.layout import Layout
from shardwise.dtensor.call_args import check_plain_tensors
from shardwise.dtensor.composite import write_to_plain
from shardwise.dtensor.tensor import DTensor, wrap
from shardwise.dtensor.writes import is_split
from shardwise.rules.helpers.dims import Inputs, replace_dim, unsplit_spec
from shardwise.rules.helpers.index_key import as_replicated, gather_whole, mesh_of
from shardwise.rules.helpers.local_tensors import crop, pad
from shardwise.rules.index.gathering import narrow_to, ranges_to_narrow
from shardwise.rules.index.indexing import locate
from shardwise.rules.pointwise.elementwise import tensors_among
from shardwise.rules.registry import composed, rule
from shardwise.rules.spec import Dims, Out, Spec, SplitContext, dims_of, normalize_dim
from shardwise.torch_internals import base_of


@rule("scatter")
def scatter(
    input: torch.Tensor, dim: int, index: torch.Tensor, src: Any = None, *args: Any, **kwargs: Any
) -> Spec:
    """Write elements or a number at the indices."""
    tensors = tensors_among(input, index, src, kwargs.get("value"))
    is_linear = len(tensors) == 3 and not (args or kwargs.get("reduce"))
    return _scatter(torch.scatter, tensors, dim, linear=is_linear)


@rule("scatter_add")
def scatter_add(input: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor) -> Spec:
    """Add elements at the indices."""
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
    """Reduce elements with those at the indices."""
    # Only a sum is linear: a mean of integers is rounded.
    return _scatter(torch.scatter_reduce, [input, index, src], dim, linear=reduce == "sum")


def _scatter(
    run: Callable[..., Any],
    tensors: Sequence[torch.Tensor],
    dim: int,
    *,
    linear: bool,
    adds: bool = False,
) -> Spec:
    """Return the spec of a write of the third tensor (if any) to the first, at the second's
    indices.

    Arguments:
        linear: whether the operator is jointly linear in the first and third tensor.
        adds: whether the operator adds to the first tensor.
    """
    input, index, *values = tensors
    if any(each.dim() != input.dim() for each in tensors) or input.dim() == 0:
        return unsplit_spec(tensors, input.shape, linear=[(0, 2)] if linear else ())
    at = normalize_dim(dim, input.dim())
    names = dims_of(input)
    held = replace_dim(names, at, "rows")
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

    def lower(context: SplitContext) -> Callable[..., Any] | None:
        leading = context.inputs[0]
        boxes = [ranges_to_narrow(dims, held, leading, but=at) for _, dims in inputs]
        if values and inputs[2][1][at] is None and context.inputs[1].shard_order[at]:
            box = context.inputs[1].box()
            boxes[2][at] = box.start[at], box.stop[at]
        axes = context.axes("rows")
        if not axes and not any(boxes):
            return None

        def local(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            parts = _Arguments(args, kwargs)
            index, *values = parts.tensors
            index = narrow_to(index, boxes[1], broadcasts=False)
            values = [
                narrow_to(value, boxes[2], broadcasts=False) if value.dim() else value
                for value in values
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
    """Add rows at the indices."""
    return _index_write(torch.index_add, [input, index, source], dim, adds=True)


@rule("index_copy")
def index_copy(input: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> Spec:
    """Write rows at the indices."""
    return _index_write(torch.index_copy, [input, index, source], dim)


def adopt_layout(name: str, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `index_copy_` on a plain tensor.

    If the rows to write are split along other dims, the plain tensor becomes a DTensor that is
    split as they are, and each rank keeps its part. So a cache that a library has allocated with
    the global shape, as the static key-value cache of transformers, costs each rank its share.
    """
    target = args[0]
    dim, _, source = (*args[1:], *kwargs.values())
    if not isinstance(source, DTensor) or not is_split(source._layout) or not _is_alone(target):
        return write_to_plain(name, func, *args, **kwargs)
    given = source._layout
    at = normalize_dim(dim, target.dim())
    order = {each: axes for each, axes in enumerate(given.shard_order) if axes and each != at}
    layout = Layout(given.mesh, tuple(target.shape), order)
    if not order or not is_split(layout):
        return write_to_plain(name, func, *args, **kwargs)
    check_plain_tensors(name, [target], layout.mesh)
    target.data = layout.piece_of(target, layout.mesh.get_coordinate()).clone()
    return func(wrap(target, layout), *args[1:], **kwargs)


def _is_alone(tensor: torch.Tensor) -> bool:
    """Return whether a plain tensor is a whole buffer: no parameter, and no view of another."""
    return not tensor.requires_grad and tensor.grad_fn is None and base_of(tensor) is None


@rule("index_fill")
def index_fill(input: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> Spec:
    """Write a number to the rows at the indices."""
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
    """Reduce rows with those at the indices."""
    return _index_write(torch.index_reduce, [input, index, source], dim, linear=False)


def _index_write(
    run: Callable[..., Any],
    tensors: Sequence[torch.Tensor],
    dim: int,
    *,
    adds: bool = False,
    linear: bool = True,
) -> Spec:
    """Return the spec of an operator that writes rows of the first tensor (`index_add`, ...).

    `_scatter` does the same for operators that write elements, and explains `adds` and `linear`.
    """
    input, index, *values = tensors
    flows = [(0, 2)] if values and linear else []
    if input.dim() == 0 or any(value.dim() not in (0, input.dim()) for value in values):
        return unsplit_spec(tensors, input.shape, linear=flows)
    at = normalize_dim(dim, input.dim())
    names = dims_of(input)
    held = replace_dim(names, at, "rows")
    written = replace_dim(names, at, "picks" if adds and index.dim() else None)
    inputs: Inputs = [(input, held), (index, (written[at],) * index.dim())]
    inputs += [(value, written if value.dim() else ()) for value in values]

    def lower(context: SplitContext) -> Callable[..., Any] | None:
        if not context.axes("rows"):
            return None

        def local(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            parts = _Arguments(args, kwargs)
            index, *values = parts.tensors
            return _spilled(run, input, at, index, values, parts, context.inputs[0])

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
    """The arguments of a call after the first, of which the tensors can be replaced."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        self.tensors = tensors_among(*args, *kwargs.values())

    def filled(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments with these tensors."""
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
    """Write to a shard of a split dim; writes for other ranks go to a row that is dropped."""
    size = input.size(dim)
    found, inside = locate(index, layout, dim, wraps=run is torch.index_fill)
    found = torch.where(inside, found, size)
    if run is torch.index_reduce or run is torch.scatter_reduce:
        values = [_ones_outside(value, inside, dim) for value in values]
    args, kwargs = parts.filled([found, *values])
    result = run(pad(input, {dim: (0, 1)}), *args, **kwargs)
    return result.narrow(dim, 0, size)  # type: ignore[no-any-return]


def _ones_outside(value: torch.Tensor, inside: torch.Tensor, dim: int) -> torch.Tensor:
    """Replace the values that are dropped by ones: torch has no second gradient of a product with
    several zeros."""
    if inside.dim() < value.dim():  # one index for a row
        inside = inside.view([-1 if each == dim else 1 for each in range(value.dim())])
    else:
        value = crop(value, inside.shape)
    return value.masked_fill(~inside, 1)


# ---- by a mask


@composed("masked_scatter")
def masked_scatter(input: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Write the next element of the source wherever the mask is true; the mask is gathered to count
    the elements before each place."""
    mesh = mesh_of(input, mask, source)
    given = gather_whole(mask, "masked_scatter")
    shape = torch.broadcast_shapes(tuple(input.shape), tuple(given.shape))  # type: ignore[no-untyped-call]
    given = given.expand(shape).clone()
    count = given.flatten().cumsum(0).reshape(shape)
    values = gather_whole(source, "masked_scatter").flatten()
    if int(given.sum()) > values.numel():
        raise RuntimeError(
            "masked_scatter: expected self and source to have same dtypes and source to have at "
            f"least {int(given.sum())} elements, got {values.numel()}"
        )
    if values.dtype != input.dtype:
        raise RuntimeError("masked_scatter: expected self and source to have same dtypes")
    picked = values[(count - 1).clamp(min=0)] if values.numel() else values.new_zeros(shape)
    return torch.where(as_replicated(given, mesh), as_replicated(picked, mesh), input)
