"""Views by strides: as_strided, as_strided_scatter.

Strides and offset are those of the global tensor. For a replicated tensor they refer to its memory,
as in torch; for any other tensor they refer to a contiguous one that starts with the first element.
The strides of such a view are translated to dims: each dim of the result runs along one dim of the
input. A dim that the result keeps unchanged may be split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.core.errors import DispatchError, LayoutError
from shardwise.core.layout import Layout
from shardwise.dtensor.tensor import DTensor, wrap
from shardwise.dtensor.writes import is_detached_copy
from shardwise.rules.helpers.collectives import all_reduce_extreme
from shardwise.rules.helpers.index_key import as_replicated, gather_whole, mesh_of
from shardwise.rules.registry import Function, composed, handler, rule
from shardwise.rules.spec import Dims, Out, Spec, SplitContext
from shardwise.torch_internals import as_local, base_of

Sizes = tuple[int, ...]

# ---- strides, by dims


def _contiguous(shape: Sequence[int]) -> Sizes:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


class _Places:
    """The positions of the elements of a strided view in a contiguous tensor, dim by dim."""

    def __init__(self, shape: Sizes, size: Sizes, stride: Sizes, offset: int) -> None:
        self.shape = shape
        strides = _contiguous(shape)
        self.starts = [offset // step % count for step, count in zip(strides, shape, strict=True)]
        """For each dim of the tensor, the index of the first element."""
        self.steps: list[tuple[int, int] | None] = []
        """For each dim of the view, the dim of the tensor that it runs along and its step; None for
        a dim with stride 0."""
        for count, step in zip(size, stride, strict=True):
            along = (dim for dim, each in enumerate(strides) if shape[dim] > 1 and step % each == 0)
            dim = next(along) if count > 1 and step else None
            self.steps.append(None if dim is None else (dim, step // strides[dim]))
        last = list(self.starts)
        for count, way in zip(size, self.steps, strict=True):
            if way is not None:
                last[way[0]] += (count - 1) * way[1]
        self.is_known = all(at < count for at, count in zip(last, shape, strict=True))
        """Whether each dim of the view stays within the dim that it runs along."""

    def factors(self, size: Sizes) -> tuple[Dims, Dims]:
        """Return the factors of the tensor and of the view: of the dims that the view keeps."""
        before: list[str | None] = [None] * len(self.shape)
        after: list[str | None] = [None] * len(size)
        for dim, count in enumerate(self.shape):
            ways = [at for at, way in enumerate(self.steps) if way is not None and way[0] == dim]
            if len(ways) == 1 and size[ways[0]] == count:
                before[dim] = after[ways[0]] = f"d{dim}"
        return tuple(before), tuple(after)

    def local(self, x: torch.Tensor) -> tuple[Sizes, int]:
        """Return strides and offset in this rank's shard, whose memory may have another order."""
        stride = tuple(0 if way is None else way[1] * x.stride(way[0]) for way in self.steps)
        offset = sum(at * step for at, step in zip(self.starts, x.stride(), strict=True) if at)
        return stride, int(x.storage_offset()) + offset


def _places(input: torch.Tensor, size: Sizes, stride: Sizes, offset: int) -> _Places | None:
    if 0 in input.shape or 0 in size:
        return None
    places = _Places(tuple(input.shape), size, stride, offset)
    return places if places.is_known else None


def _factors(input: torch.Tensor, size: Sizes, places: _Places | None) -> tuple[Dims, Dims]:
    if places is None:
        return (None,) * input.dim(), (None,) * len(size)
    return places.factors(size)


def _local(
    x: torch.Tensor, places: _Places | None, stride: Sizes, offset: int
) -> tuple[torch.Tensor, Sizes, int]:
    """Return the local tensor to take the view of, the strides and the offset."""
    if places is None:
        x = x.contiguous()
        return x, stride, int(x.storage_offset()) + offset
    return x, *places.local(x)


STRIDED = Function("as_strided", lambda input, size, stride, offset: None)


@rule(STRIDED)
def strided(input: torch.Tensor, size: Sizes, stride: Sizes, offset: int) -> Spec:
    """Return the spec of a strided view of a contiguous tensor."""
    places = _places(input, size, stride, offset)
    before, after = _factors(input, size, places)

    def lower(context: SplitContext) -> Callable[..., Any]:
        sizes = context.outputs[0].local_shape()

        def run(x: torch.Tensor, *args: Any) -> torch.Tensor:
            x, steps, first = _local(x, places, stride, offset)
            return x.as_strided(sizes, steps, first)

        return run

    out = Out(after, size)
    return Spec([(input, before)], [out], linear=[(0,)], lower=lower, positions=(), is_view=True)


SCATTER = Function("as_strided_scatter", lambda input, src, size, stride, offset: None)


@rule(SCATTER)
def scatter(
    input: torch.Tensor, src: torch.Tensor, size: Sizes, stride: Sizes, offset: int
) -> Spec:
    """Return the spec of a copy of a contiguous tensor in which a strided view is overwritten."""
    places = _places(input, size, stride, offset)
    before, after = _factors(input, size, places)

    def lower(context: SplitContext) -> Callable[..., Any]:
        sizes = context.inputs[1].local_shape()

        def run(x: torch.Tensor, src: torch.Tensor, *args: Any) -> torch.Tensor:
            # torch's gradient assumes that the memory begins with the tensor.
            x = x.contiguous()
            x = x.clone() if x.storage_offset() else x
            x, steps, first = _local(x, places, stride, offset)
            return x.as_strided_scatter(src, sizes, steps, first)

        return run

    return Spec(
        [(input, before), (src, after)],
        [Out(before, tuple(input.shape))],
        linear=[(0, 1)],
        lower=lower,
        positions=(),
    )


# ---- the functions of torch


@composed("as_strided")
def as_strided(
    input: DTensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> DTensor:
    """Return a view by strides."""
    layout = input._layout
    if layout.is_replicated:
        with as_local():
            result = torch.as_strided(input, size, stride, storage_offset)
            return wrap(result.as_subclass(torch.Tensor), Layout(layout.mesh, tuple(result.shape)))
    return STRIDED.dispatched(  # type: ignore[no-any-return]
        input, *_of_contiguous("as_strided", input, size, stride, storage_offset)
    )


@handler("as_strided_")
def as_strided_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Turn a tensor into a strided view of itself: another layout, the same memory."""
    target = args[0]
    view = as_strided(target.detach(), *args[1:], **kwargs)
    if is_detached_copy(view):
        raise LayoutError(
            f"as_strided_: it would have to move {target._layout!r}, and so cannot be done in "
            "place; use x = x.as_strided(...)"
        )
    with as_local():
        func(target, view.size(), view.stride(), view.storage_offset())
    target._layout = view._layout
    return target


@composed("as_strided_scatter")
def as_strided_scatter(
    input: torch.Tensor,
    src: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> DTensor:
    """Return a copy in which a strided view is overwritten."""
    name = "as_strided_scatter"
    mesh = mesh_of(input, src)
    target = as_replicated(input, mesh)
    if target._layout.is_replicated:
        values = gather_whole(src, name)
        with as_local():
            result = torch.as_strided_scatter(target, values, size, stride, storage_offset)
            return wrap(result.as_subclass(torch.Tensor), Layout(mesh, tuple(result.shape)))
    given = _of_contiguous(name, target, size, stride, storage_offset)
    check_source(src, given[0])
    return SCATTER.dispatched(target, src, *given)  # type: ignore[no-any-return]


def check_source(src: torch.Tensor, shape: Sequence[int]) -> None:
    """Refuse to overwrite a view of this shape with a tensor of another."""
    if tuple(src.shape) != tuple(shape):
        raise RuntimeError(
            "expected src to have a size equal to the slice of self. "
            f"src size = {list(src.shape)}, slice size = {list(shape)}"
        )


def _some_rank(input: DTensor, is_refused: bool) -> bool:
    """Return whether the condition holds on any rank.

    Ranks communicate only if their shards differ in shape: a shard of one row or column may be
    contiguous while others are not.
    """
    layout = input._layout
    sizes, split = layout.mesh.shape, [axis for axes in layout.shard_order for axis in axes]
    is_even = layout.numel == 0 or all(
        cut is None and size % math.prod(sizes[axis] for axis in axes) == 0
        for size, axes, cut in zip(layout.shape, layout.shard_order, layout.cuts, strict=True)
    )
    if is_even or layout.mesh.is_abstract or input.is_meta:
        return is_refused
    flag = torch.tensor(is_refused, device=input.device)
    return bool(all_reduce_extreme(flag, layout.mesh, split, "max"))


def _of_contiguous(
    name: str, input: DTensor, size: Sequence[int], stride: Sequence[int], offset: int | None
) -> tuple[Sizes, Sizes, int]:
    """Return the arguments as for a contiguous tensor, for a tensor whose memory the ranks
    share."""
    with as_local():
        is_contiguous = input.is_contiguous()
        base: Any = base_of(input)
    is_part = isinstance(base, DTensor) and base._layout.numel != input._layout.numel
    if _some_rank(input, not is_contiguous or (is_part and offset is not None)):
        raise DispatchError(
            f"{name}: ranks share {input._layout!r}, so expected a contiguous tensor, and no "
            "storage_offset for a part of another one; take it of x.contiguous(), or of that"
        )
    sizes, strides, first = tuple(size), tuple(stride), offset or 0
    if len(sizes) != len(strides) or first < 0 or min((*sizes, *strides), default=0) < 0:
        raise RuntimeError(
            f"{name}: expected as many sizes as strides, and none below 0, got {sizes}, {strides} "
            f"and the offset {first}"
        )
    last = first + sum((count - 1) * step for count, step in zip(sizes, strides, strict=True))
    if 0 not in sizes and last >= input._layout.numel:
        raise RuntimeError(
            f"{name}: sizes {list(sizes)}, strides {list(strides)}, storage offset {first} are out "
            f"of bounds for a tensor of {input._layout.numel} elements"
        )
    return sizes, strides, first
