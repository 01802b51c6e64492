"""Reshapes, and other operators that scale the size of a dim and keep the order of elements.

A split dim stays split without communication if the scaled boundaries of its chunks are integers;
the new dim may then be cut in pieces or units. Otherwise the dim is made whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.core import cut as cuts_of
from shardwise.core.cut import Cut
from shardwise.core.layout import Layout
from shardwise.dtensor.local_shards import has_short_dims, is_globally_viewable
from shardwise.dtensor.tensor import DTensor, wrap
from shardwise.rules.helpers.dims import as_sizes, replace_dim
from shardwise.rules.helpers.local_tensors import copied_as_elsewhere
from shardwise.rules.pointwise.casts import viewed_as
from shardwise.rules.registry import Aten, Function, composed, handler, rule
from shardwise.rules.spec import Dims, Out, Spec, SplitContext, dims_of, normalize_dim, takes_shards
from shardwise.torch_internals import variable_functions

_MOST_PIECES = 256
"""If an inner dim stays split when it is merged with an outer one, the merged dim has as many
pieces as the outer dim is long. This is the largest number of pieces."""


@dataclass(frozen=True, slots=True)
class Joined:
    """The place of a factor among merged dims: the product of the dims outside it, and its size."""

    outer: int
    size: int

    def flat(self, cut: Cut, length: int, counts: tuple[int, ...]) -> Cut | None:
        """Return the cut of the merged dims, given the cut of this one; None if there is none."""
        inside = cuts_of.rescale_cut(cut, length // self.outer, counts)
        return None if inside is None else inside * self.outer

    def of_flat(self, cut: Cut, counts: tuple[int, ...]) -> Cut | None:
        """Return the cut of this dim, given the cut of the merged dims; None if there is none."""
        inside = cuts_of.repeating_part(cut, self.outer)
        return None if inside is None else cuts_of.rescale_cut(inside, self.size, counts)


@dataclass(frozen=True, slots=True)
class DimGroup:
    """A smallest group of adjacent dims whose sizes have the same product before and after."""

    before: list[int]
    after: list[int]


def _groups(shape: Sequence[int], target: Sequence[int]) -> Iterator[DimGroup]:
    left = right = 0
    while left < len(shape) and right < len(target):
        if shape[left] == target[right]:
            yield DimGroup([left], [right])
            left, right = left + 1, right + 1
        elif shape[left] == 1:
            left += 1
        elif target[right] == 1:
            right += 1
        else:
            group = DimGroup([left], [right])
            old, new = shape[left], target[right]
            left, right = left + 1, right + 1
            while old != new:
                if old < new:
                    group.before.append(left)
                    old, left = old * shape[left], left + 1
                else:
                    group.after.append(right)
                    new, right = new * target[right], right + 1
            yield group


@dataclass(frozen=True, slots=True)
class Match:
    """The factors of a reshape, and the cuts of factors whose dim changes."""

    before: Dims
    after: Dims
    joined: dict[str, tuple[Joined, Joined, int]]
    """For each such factor its place before and after, and the length of its group."""

    def recut(self, factor: str, number: int, cut: Cut, counts: tuple[int, ...]) -> Cut | None:
        """Return the cut of the result's dim."""
        if factor not in self.joined:
            return cut
        old, new, length = self.joined[factor]
        flat = old.flat(cut, length, counts)
        return None if flat is None else new.of_flat(flat, counts)


def match_dims(input: torch.Tensor, target: Sequence[int]) -> Match:
    """Return the factors of a reshape.

    Dims are grouped into smallest groups of equal size. By default the first dim of a group becomes
    the first dim of the result's group, as its chunks are contiguous. If another dim is split, that
    one is kept, and the result is cut in pieces: one for each index of the dims outside it.
    """
    shape = tuple(input.shape)
    before: list[str | None] = [None] * len(shape)
    after: list[str | None] = [None] * len(target)
    joined: dict[str, tuple[Joined, Joined, int]] = {}
    if math.prod(shape) == 0:  # products tell nothing: equal dims from the left are kept
        for at, (old, new) in enumerate(zip(shape, target, strict=False)):
            if old != new:
                break
            before[at] = after[at] = f"d{at}"
        return Match(tuple(before), tuple(after), joined)
    for group in _groups(shape, target):
        left, right = _carried(group, getattr(input, "_layout", None), target)
        before[left] = after[right] = name = f"d{left}"
        if shape[left] != target[right] or len(group.before) > 1 or len(group.after) > 1:
            outer = math.prod(shape[dim] for dim in group.before if dim < left)
            first = math.prod(target[dim] for dim in group.after if dim < right)
            length = math.prod(shape[dim] for dim in group.before)
            places = Joined(outer, shape[left]), Joined(first, target[right])
            joined[name] = *places, length
    # Match remaining dims of size 1 with dims of size 1 elsewhere.
    lone = [dim for dim, size in enumerate(shape) if size == 1 and before[dim] is None]
    free = [dim for dim, size in enumerate(target) if size == 1 and after[dim] is None]
    for old, new in zip(lone, free, strict=False):
        before[old] = after[new] = f"d{old}"
    return Match(tuple(before), tuple(after), joined)


def _carried(group: DimGroup, layout: Layout | None, target: Sequence[int]) -> tuple[int, int]:
    """Return the dims before and after the reshape between which a split is kept."""
    first = group.before[0], group.after[0]
    if layout is None or len(group.before) == len(group.after) == 1:
        return first
    split = [dim for dim in group.before if layout.shard_order[dim]]
    if not split:
        return first
    left = split[0]
    cut, size = layout.cuts[left], layout.shape[left]
    if left == group.before[0] and cut is None:
        return first
    counts = tuple(layout.mesh.shape[axis] for axis in layout.shard_order[left])
    outer = math.prod(layout.shape[dim] for dim in group.before if dim < left)
    length = math.prod(layout.shape[dim] for dim in group.before)
    flat = Joined(outer, size).flat(cut or ((size, 1),), length, counts)
    if flat is None or len(flat) > _MOST_PIECES:
        return first
    inner = 1
    for right in reversed(group.after):  # inner dims first: fewest pieces
        inner *= target[right]
        if Joined(length // inner, target[right]).of_flat(flat, counts) is not None:
            return left, right
    return first


def reshape_spec(
    input: torch.Tensor, target: Sequence[int], local: Any = None, **extra: Any
) -> Spec:
    """Return the spec of a reshape.

    Arguments:
        target: the global shape of the result.
        local: the sizes that the call gives; if they are right for the local tensor too, the call
            runs unchanged.
    """
    match = match_dims(input, target)

    def lower(context: SplitContext) -> Callable[..., Any] | None:
        shape = context.outputs[0].local_shape()
        if local is not None and _means(local, shape):
            return None
        return takes_shards(lambda x, *args, **kwargs: x.view(shape))

    return Spec(
        [(input, match.before)],
        [Out(match.after, tuple(target))],
        **{
            "linear": [(0,)],
            "lower": lower,
            "positions": (),
            "scales": True,
            "recut": match.recut,
            "is_view": True,
            **extra,
        },
    )


def _means(sizes: Sequence[int], shape: tuple[int, ...]) -> bool:
    """Return whether sizes, of which one may be -1, stand for this local shape."""
    if -1 in sizes and 0 in shape:
        return False
    return all(size in (-1, found) for size, found in zip(sizes, shape, strict=True))


def infer_sizes(numel: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return sizes with -1 replaced by the size that it stands for."""
    known = math.prod(size for size in sizes if size != -1)
    if -1 in sizes and known and numel % known == 0:
        return tuple(numel // known if size == -1 else size for size in sizes)
    if -1 in sizes or known != numel:
        raise RuntimeError(f"shape '{list(sizes)}' is invalid for input of size {numel}")
    return tuple(sizes)


# ---- the rules


@rule("view", Aten("_unsafe_view"), inplace=False)
def view(
    input: torch.Tensor, *sizes: Any, size: Any = (), dtype: Any = None
) -> Spec | Callable[..., Any] | None:
    sizes = as_sizes(sizes or (size,))
    if dtype is not None or any(isinstance(each, torch.dtype) for each in sizes):
        return viewed_as
    if not all(isinstance(each, int) for each in sizes):
        return None
    return reshape_spec(input, infer_sizes(input.numel(), sizes), sizes)


@rule("reshape", inplace=False)
def reshape(input: torch.Tensor, *sizes: Any, shape: Any = ()) -> Spec | None:
    sizes = as_sizes(sizes or (shape,))
    if not all(isinstance(each, int) for each in sizes):
        return None  # a size is a tensor, and only its value tells the shape
    return _by_reshape(input, infer_sizes(input.numel(), sizes), sizes)


def _by_reshape(input: torch.Tensor, target: Sequence[int], local: Any = None) -> Spec:
    """Return the spec of a reshape that copies if it must; `local` as in `reshape_spec`."""

    def lower(context: SplitContext) -> Callable[..., Any] | None:
        # A split dim of size 1 may become another dim of the result, so all sizes are given.
        shape = context.outputs[0].local_shape()
        (layout,) = context.inputs
        if has_short_dims(layout):
            return lambda x, *args, **kwargs: copied_as_elsewhere(
                x.reshape(shape), x, is_globally_viewable(x, layout, target)
            )
        if local is not None and _means(local, shape):
            return None
        return takes_shards(lambda x, *args, **kwargs: x.reshape(shape))

    return reshape_spec(input, target, lower=lower)


@handler("view_as", "reshape_as", "expand_as")
def to_shape_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Only the global shape of the other tensor matters.
    input, other = (*args, *kwargs.values())
    return getattr(input, func.__name__.split(".")[0].removesuffix("_as"))(other.shape)


@rule("flatten", inplace=False)
def flatten(input: torch.Tensor, start_dim: int = 0, end_dim: int = -1) -> Spec:
    first, last = (normalize_dim(dim, input.dim()) for dim in (start_dim, end_dim))
    shape = tuple(input.shape)
    if first > last:
        raise RuntimeError("flatten() has invalid args: start_dim cannot come after end_dim")
    target = (*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :])
    return _by_reshape(input, target)


@rule("ravel", inplace=False)
def ravel(input: torch.Tensor) -> Spec:
    return _by_reshape(input, (input.numel(),))


@rule("unflatten", inplace=False)
def unflatten(input: torch.Tensor, dim: int, sizes: Any) -> Spec | None:
    if isinstance(dim, str) or not all(isinstance(size, int) for size in sizes):
        return None
    at = normalize_dim(dim, input.dim())
    shape = tuple(input.shape)
    return reshape_spec(input, (*shape[:at], *infer_sizes(shape[at], sizes), *shape[at + 1 :]))


_AT_LEAST: dict[str, Callable[[list[int]], list[int]]] = {
    "atleast_1d": lambda shape: shape or [1],
    "atleast_2d": lambda shape: [1] * (2 - len(shape)) + shape,
    "atleast_3d": lambda shape: [1] * (len(shape) < 2) + (shape or [1]) + [1] * (len(shape) < 3),
}


@handler(*_AT_LEAST, *(getattr(variable_functions, name) for name in _AT_LEAST))
def at_least(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Each tensor on its own: they share no factors. Adding dims is always a view.
    shape_of = _AT_LEAST[func.__name__.partition(".")[0]]
    if len(args) == 1 and isinstance(args[0], torch.Tensor):
        return args[0].reshape(shape_of(list(args[0].shape)))
    tensors = args if len(args) > 1 else args[0]
    return tuple(each.reshape(shape_of(list(each.shape))) for each in tensors)


# ---- dims that become longer or shorter


def scale_spec(input: torch.Tensor, before: Dims, after: Dims, target: Sequence[int]) -> Spec:
    """Return the spec of an operator that scales some dims and keeps the order of elements."""

    def lower(context: SplitContext) -> Callable[..., Any] | None:
        shape = context.outputs[0].local_shape()
        if 0 not in shape:
            return None
        # torch refuses some empty tensors, or does not scale them
        return lambda x, *args, **kwargs: x.reshape(shape)

    return Spec(
        [(input, before)],
        [Out(after, tuple(target))],
        linear=[(0,)],
        lower=lower,
        positions=(),
        scales=True,
    )


_repeated = Function("repeat_interleave", torch.repeat_interleave)


@composed("repeat_interleave")
def repeat_interleave(
    input: Any = None,
    repeats: Any = None,
    dim: int | None = None,
    *,
    output_size: int | None = None,
) -> Any:
    """Repeat each row; with a number per row, rows are selected, and all ranks need all numbers."""
    if input is None:
        input, repeats = repeats, None
    if isinstance(repeats, int):
        result = _repeated.dispatched(input, repeats, dim)
        if output_size not in (None, result.shape[dim or 0]):
            raise RuntimeError("allocated size does not match required size")
        return result
    if repeats is None:
        return _rows(input, output_size)
    if dim is None:
        input, dim = input.flatten(), 0
    size = input.shape[normalize_dim(dim, input.dim())]
    if repeats.dim() == 0 or (repeats.shape[0] == 1 and size != 1):
        repeats = repeats.expand(size)
    if repeats.shape != (size,):
        raise RuntimeError("repeats must have the same size as input along dim")
    return torch.index_select(input, dim, _rows(repeats, output_size))


def _rows(repeats: torch.Tensor, output_size: int | None) -> torch.Tensor:
    """Return each index, repeated as often as `repeats` says."""
    if not isinstance(repeats, DTensor):
        return torch.repeat_interleave(repeats, output_size=output_size)
    rows = torch.repeat_interleave(repeats.full_tensor(), output_size=output_size)
    return wrap(rows, Layout(repeats._layout.mesh, rows.shape))


@rule(_repeated)
def repeated_alike(input: torch.Tensor, repeats: int, dim: int | None) -> Spec:
    if dim is None:
        # only the first dim that is longer than 1 can stay split
        first = next((at for at, size in enumerate(input.shape) if size != 1), 0)
        before = tuple(f"d{at}" if at == first else None for at in range(input.dim()))
        after: Dims = (f"d{first}",) if input.numel() and input.dim() else (None,)
        target: tuple[int, ...] = (input.numel() * repeats,)
    else:
        at = normalize_dim(dim, input.dim())
        before = after = dims_of(input)
        target = replace_dim(input.shape, at, input.shape[at] * repeats)
    return Spec([(input, before)], [Out(after, target)], linear=[(0,)], scales=True)


@rule("pixel_shuffle", inplace=False)
def pixel_shuffle(input: torch.Tensor, upscale_factor: int) -> Spec:
    *batch, channels, height, width = input.shape
    if channels % upscale_factor**2:
        raise RuntimeError(
            "pixel_shuffle expects its input's channels to be divisible by the factor"
        )
    target = (
        *batch,
        channels // upscale_factor**2,
        height * upscale_factor,
        width * upscale_factor,
    )
    return scale_spec(input, dims_of(input), dims_of(input), target)


@rule("pixel_unshuffle", inplace=False)
def pixel_unshuffle(input: torch.Tensor, downscale_factor: int) -> Spec:
    *batch, channels, height, width = input.shape
    if height % downscale_factor or width % downscale_factor:
        raise RuntimeError("pixel_unshuffle expects height and width to be divisible by the factor")
    small = (height // downscale_factor, width // downscale_factor)
    target = (*batch, channels * downscale_factor**2, *small)
    return scale_spec(input, dims_of(input), dims_of(input), target)


@rule("channel_shuffle", "native_channel_shuffle", inplace=False)
def channel_shuffle(input: torch.Tensor, groups: int) -> Spec:
    dims = replace_dim(dims_of(input), 1, None)
    return Spec([(input, dims)], [Out(dims, tuple(input.shape))], linear=[(0,)])
