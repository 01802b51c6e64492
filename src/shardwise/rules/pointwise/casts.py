"""Casts and copies: the layout of the result is that of the input.

Pending sums flow through a cast to floating point, but not to integers: rounding each contribution
differs from rounding the sum.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from shardwise.core.layout import Layout
from shardwise.core.tensor_state import ensure_state
from shardwise.dtensor.call_args import check_plain_tensors
from shardwise.dtensor.composite import write_to_plain
from shardwise.dtensor.input_moves import move_input, plan_input_move
from shardwise.dtensor.local_shards import has_short_dims, is_globally_contiguous
from shardwise.dtensor.tensor import DTensor, find_detaching_operator
from shardwise.dtensor.writes import check_writable
from shardwise.rules.helpers.local_tensors import copied_as_elsewhere, is_summed, keeps_sums
from shardwise.rules.pointwise.elementwise import broadcast_spec
from shardwise.rules.registry import Function, composed, dispatched, handler, name_of, rule
from shardwise.rules.spec import Out, Spec, SplitContext, dims_of, takes_shards
from shardwise.torch_internals import as_local

FLOATS = ["float", "double", "half", "bfloat16", "cfloat", "cdouble", "chalf"]
INTEGERS = {
    "int": torch.int32,
    "long": torch.int64,
    "short": torch.int16,
    "char": torch.int8,
    "byte": torch.uint8,
    "bool": torch.bool,
}


@rule("clone", "cpu", "cuda", "pin_memory", *FLOATS, inplace=False)
def kept(input: Any, *args: Any, **kwargs: Any) -> Spec:
    return broadcast_spec([input], [(0,)])


@rule("contiguous", inplace=False)
def contiguous(input: Any, *args: Any, **kwargs: Any) -> Spec:
    def lower(context: SplitContext) -> Any:
        (layout,) = context.inputs
        return partial(_contiguous, layout) if has_short_dims(layout) else None

    return broadcast_spec([input], [(0,)], lower=lower, positions=())


def _contiguous(
    layout: Layout,
    local: torch.Tensor,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> torch.Tensor:
    is_view = is_globally_contiguous(local, layout, memory_format)
    result = local.contiguous(memory_format=memory_format)
    return copied_as_elsewhere(result, local, is_view, memory_format)


@rule("alias", inplace=False)
def alias(input: Any) -> Spec:
    return broadcast_spec([input], [(0,)], is_view=True)


@rule("detach", inplace=False)
def detach(input: Any) -> Spec:
    return broadcast_spec(
        [input], [(0,)], is_view=True, lower=lambda context: _detached, positions=()
    )


@takes_shards
def _detached(input: Any) -> torch.Tensor:
    result = torch.Tensor.detach(input)
    severed = find_detaching_operator(input)
    if severed is not None:  # autograd does not record what a detached tensor is an alias of
        ensure_state(result).detached_by = severed
    return result


# ---- to, type, type_as: their arguments decide whether they cast


class _Cast:
    """`Tensor.to` without tensors among its arguments.

    It is an object and not a Python function, so that dispatch passes DTensors to it unchanged: if
    torch returns its argument, the caller gets the same object.
    """

    __name__ = "to"

    def __call__(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return _to(tensor, *args, **kwargs)  # type: ignore[no-any-return]


_to: Any = torch.Tensor.to
cast = _Cast()
kept_dtype = _Cast()
"""`Tensor.to` where the dtype stays the same, so that pending sums of integers may flow too. A rule
does not see dtypes, hence the second function."""


@rule(kept_dtype)
def kept_rule(input: Any, *args: Any, **kwargs: Any) -> Spec:
    return broadcast_spec([input], [(0,)])


@rule(cast, "_to_copy", inplace=False)
def cast_rule(input: Any, *args: Any, **kwargs: Any) -> Spec:
    dtypes = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.dtype)]
    is_linear = all(map(is_summed, dtypes))
    return broadcast_spec([input], [(0,)] if is_linear else ())


@handler("to")
def to(func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    if len(args) == 2 and type(args[1]) is torch.device and not kwargs:
        if args[1] == tensor.device:
            return tensor
    elif len(args) > 1 and isinstance(args[1], torch.Tensor):
        args = (tensor, args[1].device, args[1].dtype, *args[2:])
    elif "other" in kwargs:
        kwargs = dict(kwargs)
        other = kwargs.pop("other")
        args = (tensor, other.device, other.dtype)
    if isinstance(args[-1], torch.memory_format):  # aten operators take it by position
        args, kwargs = args[:-1], {**kwargs, "memory_format": args[-1]}
    if not isinstance(tensor, DTensor):
        return tensor.to(*args[1:], **kwargs)
    stays = any(each is tensor.dtype for each in (*args[1:], *kwargs.values()))
    return dispatched(kept_dtype if stays else cast, *args, **kwargs)


@handler(*INTEGERS)
def rounded(func: Any, args: Any, kwargs: Any) -> Any:
    return to(func, (args[0], INTEGERS[name_of(func)], *args[1:]), kwargs)


@composed("type_as")
def type_as(input: torch.Tensor, other: torch.Tensor) -> Any:
    return input.to(other.device, other.dtype)


@composed("to_dense")
def to_dense(input: Any, dtype: Any = None, *, masked_grad: Any = None) -> Any:
    """Cast to the dtype, if one is given: a DTensor is always dense."""
    return input if dtype is None else input.to(dtype)


@handler("type")
def type_(func: Any, args: Any, kwargs: Any) -> Any:
    tensor, *rest = args
    wanted = rest[0] if rest else kwargs.get("dtype")
    with as_local():
        if wanted is None:
            return tensor.type()
        like = torch.empty(0, device=tensor.device).type(wanted)
    return tensor.to(like.device, like.dtype)


# ---- the same memory in another dtype

REINTERPRETED = Function("view", lambda input, dtype, last: input.view(dtype))


@rule(REINTERPRETED)
def reinterpreted(input: torch.Tensor, dtype: torch.dtype, last: int) -> Spec:
    """Return the size of the last dim changes by the ratio of the item sizes; `last` is its new
    size."""
    dims = dims_of(input)
    shape = (*input.shape[:-1], last) if dims else ()
    return Spec([(input, dims)], [Out(dims, shape)], scales=True, positions=(), is_view=True)


def viewed_as(input: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `x.view(dtype)`."""
    like = torch.empty(input.shape, dtype=input.dtype, device="meta").view(dtype)
    return REINTERPRETED.dispatched(input, dtype, like.shape[-1] if like.dim() else 1)  # type: ignore[no-any-return]


# ---- in place


@handler("requires_grad_", "detach_", "share_memory_")
def itself(func: Any, args: Any, kwargs: Any) -> Any:
    with as_local():
        func(*args, **kwargs)
    return args[0]


@handler("copy_")
def copy_(func: Any, args: Any, kwargs: Any) -> Any:
    """Copy into the target, which keeps its layout.

    The source may have another layout, broadcast, or be a plain tensor that is the same on every
    rank.
    """
    target, source, *rest = _bound(args, kwargs)
    if not isinstance(target, DTensor):
        return write_to_plain("copy_", func, *args, **kwargs)
    check_writable("copy_", target)
    check_plain_tensors("copy_", [source], target._layout.mesh)
    if source.shape != target.shape:
        source = source.expand(target.shape)
    if not isinstance(source, DTensor):
        given = Layout(target._layout.mesh, target._layout.shape)
    else:
        given = source._layout
    with as_local():
        torch.Tensor.copy_(target, _moved(source, given, target), *rest)
    return target


def _bound(args: Any, kwargs: Any) -> tuple[Any, ...]:
    names = ("self", "src", "non_blocking")
    return (*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs))


def _moved(source: torch.Tensor, given: Layout, target: DTensor) -> torch.Tensor:
    """Redistribute the source to the layout of the target; return this rank's shard."""
    wanted = target._layout
    if given.partial and wanted.partial and not keeps_sums(target.dtype):
        # Each contribution would be rounded on its own.
        whole = given.relaid(partial={})
        source, given = move_input(source, plan_input_move(given, whole, ()), "copy_"), whole
    if given is wanted:
        return source
    return move_input(source, plan_input_move(given, wanted, ()), "copy_")
