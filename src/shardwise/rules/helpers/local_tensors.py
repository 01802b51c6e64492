"""Local tensors in lowerings: padding and cropping, constants, rows by number, dtypes.

Padding serves operators that refuse empty shards or need one more row. All functions are
differentiable on all ranks, empty shards included, so that every rank runs the same backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.core.box import Range
from shardwise.rules.registry import with_synonyms
from shardwise.rules.spec import SplitContext


def pad(tensor: torch.Tensor, sides: Mapping[int, Range], value: float | int = 0) -> torch.Tensor:
    """Pad dims by (before, after) elements; negative numbers remove elements."""
    if not any(any(each) for each in sides.values()):
        return tensor
    flat = [amount for dim in reversed(range(tensor.dim())) for amount in sides.get(dim, (0, 0))]
    return F.pad(tensor, flat, value=value)


def pad_to_one_row(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Add a row of zeros if the tensor is empty along `dim`, so that index 0 exists."""
    return pad(tensor, {dim: (0, 1)}) if tensor.size(dim) == 0 else tensor


def pad_empty_dims(tensor: torch.Tensor, amounts: Sequence[int] = ()) -> torch.Tensor:
    """Pad empty dims with zeros: by `amounts[dim]` elements, or by one.

    `crop` removes the results that come from the zeros.
    """
    sides = {
        dim: (0, amounts[dim] if dim < len(amounts) else 1)
        for dim, size in enumerate(tensor.shape)
        if not size
    }
    return pad(tensor, sides)


def crop(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Narrow each dim of a tensor to its first elements, so that it has this shape."""
    for dim, (have, want) in enumerate(zip(tensor.shape, shape, strict=True)):
        if have != want:
            tensor = tensor.narrow(dim, 0, want)
    return tensor


def join(tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Concatenate tensors along a dim.

    As torch.cat does, which ignores empty vectors: their gradients would have no gradients.
    """
    if any(each.dim() != 1 for each in tensors):
        return torch.cat(tuple(tensors), dim)
    return torch.cat([each.unsqueeze(1) for each in tensors]).squeeze(1)


def lower_with_padding(
    function: Callable[..., Any],
) -> Callable[[SplitContext], Callable[..., Any] | None]:
    """Return the lowering of a function that does not handle empty shards.

    It may refuse them, or return a result of another shape, or one whose gradients have gradients
    where those of other ranks have none. Where the first result is empty, the function runs on
    padded inputs, and the results are cropped to nothing.
    """

    def non_empty(value: Any) -> Any:
        return pad_empty_dims(value) if isinstance(value, torch.Tensor) else value

    def lower(context: SplitContext) -> Callable[..., Any] | None:
        shapes = [each.local_shape() for each in context.outputs]

        @with_synonyms
        def run(*args: Any, **kwargs: Any) -> Any:
            keywords = {name: non_empty(value) for name, value in kwargs.items()}
            made = function(*map(non_empty, args), **keywords)
            if isinstance(made, torch.Tensor):
                return crop(made, shapes[0])
            return type(made)(map(crop, made, shapes))

        return run if is_empty(shapes[0]) else None

    return lower


def copied_as_elsewhere(
    result: torch.Tensor,
    local: torch.Tensor,
    is_view: bool,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> torch.Tensor:
    """Return the result of an operator that copies only if it must, copied on all ranks or on none.

    Arguments:
        result: what the operator returned for `local`: a view where this rank's shard allows one,
            which a shard of one row may although the global tensor does not.
        is_view: whether the operator returns a view of the global tensor.
        memory_format: of the copy.
    """
    if is_view or result.untyped_storage().data_ptr() != local.untyped_storage().data_ptr():
        return result
    return result.clone(memory_format=memory_format)


def is_empty(shape: Sequence[int]) -> bool:
    """Return whether a tensor of this shape has no elements."""
    return math.prod(shape) == 0


# ---- constants and rows
# A recorded program runs on meta tensors, which have no data: constants stay on the CPU.


def vector_of(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """Return a vector of numbers with the dtype and device of `like`."""
    if not like.is_meta:
        return torch.tensor(values, dtype=like.dtype, device=like.device)
    made = [torch.full((), each, dtype=like.dtype, device=like.device) for each in values]
    return torch.stack(made)


def take_rows(x: torch.Tensor, dim: int, rows: Any) -> torch.Tensor:
    """Take rows of a dim by number, in the given order."""
    index = torch.as_tensor(rows, dtype=torch.int64, device="cpu")
    if x.is_meta:
        key: Any = (*[slice(None)] * dim, index)
        return x[key]
    return x.index_select(dim, index.to(x.device))


# ---- dtypes in which torch computes
# A lowering that replaces one kernel of torch by several steps must round to a half type only once.


_HALF = (torch.float16, torch.bfloat16)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which torch accumulates: float32 for the half types, else the same."""
    return torch.float32 if dtype in _HALF else dtype


def widen(tensor: torch.Tensor) -> torch.Tensor:
    """Cast a tensor to the dtype in which torch's kernels would accumulate it."""
    return tensor.to(wide_dtype(tensor.dtype))


def keeps_sums(dtype: torch.dtype | None) -> bool:
    """Return whether a cast to this dtype is linear; contributions must not become integers."""
    return dtype is None or dtype.is_floating_point or dtype.is_complex


def is_summed(dtype: torch.dtype) -> bool:
    """Return whether contributions of this dtype can be summed: not integers, not 8-bit floats."""
    return keeps_sums(dtype) and dtype.itemsize > 1


# ---- within autocast


def autocast(tensor: torch.Tensor) -> torch.Tensor:
    """Cast an operand of a matrix product as autocast does."""
    device = tensor.device.type
    if _is_enabled(device) and tensor.dtype != torch.float64:
        return tensor.to(torch.get_autocast_dtype(device))
    return tensor


def autocast_wide_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """Return the dtype of losses and sums of these tensors, under autocast the wider one."""
    dtype = tensors[0].dtype
    for each in tensors[1:]:
        dtype = torch.promote_types(dtype, each.dtype)
    return wide_dtype(dtype) if _is_enabled(tensors[0].device.type) else dtype


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """Turn autocast off within the returned context, so that operators keep their dtypes."""
    return torch.autocast(device, enabled=False) if _is_enabled(device) else nullcontext()


def _is_enabled(device: str) -> bool:
    # torch raises an error if it is asked for autocast on the meta device.
    return device != "meta" and torch.is_autocast_enabled(device)
