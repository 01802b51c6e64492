"""Errors of calls: refused operators, errors raised on every rank, torch's own for global shapes.

An operator may fail on one rank only: because of the values in its shard (one matrix of a batch is
singular), or because its shard is not empty (torch does not check the dtype of an empty one). Then
it must fail on every rank. Otherwise the other ranks go on, and deadlock in their next collective.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from shardwise.comm import carries_values, communicator
from shardwise.comm.trace import operator_scope
from shardwise.core.errors import DispatchError, ShardwiseError
from shardwise.dtensor.call_args import Args, Kwargs, argument_at, tensor_paths
from shardwise.dtensor.tensor import DTensor, tensors_in
from shardwise.rules.registry import handler, name_of
from shardwise.rules.spec import SplitContext
from shardwise.torch_internals import OpOverload, OpOverloadPacket, as_local

_LinAlgError: Any = torch.linalg.LinAlgError  # type: ignore[attr-defined]


# ---- operators that have no meaning on a DTensor

_RESIZING = {
    "resize_": "take x.view(...), x.reshape(...) or a part of it, x[...]",
    "resize_as_": "take x.view_as(other), or make a new tensor with torch.empty_like(other)",
}
_SPARSE = (
    "to_sparse",
    "to_sparse_csr",
    "to_sparse_csc",
    "to_sparse_bsr",
    "to_sparse_bsc",
    "to_mkldnn",
    "sparse_mask",
)


@handler(*_RESIZING)
def refuse_resizing(func: Any, args: Args, kwargs: Kwargs) -> NoReturn:
    """Refuse to change the shape or the memory of a DTensor in place."""
    name = name_of(func)
    raise DispatchError(
        f"{name}: the shape and the memory of a DTensor are those of its layout "
        f"({_format_layouts(args)}) and cannot be changed in place; {_RESIZING[name]}"
    )


@handler(*_SPARSE)
def refuse_sparse(func: Any, args: Args, kwargs: Kwargs) -> NoReturn:
    """Refuse to make a DTensor sparse."""
    name = name_of(func)
    raise DispatchError(
        f"{name}: a DTensor ({_format_layouts(args)}) is dense on every rank; make the whole "
        f"tensor sparse, x.full_tensor().{name}(...), or this rank's piece, "
        f"x.to_local().{name}(...)"
    )


@handler("_make_dual")
def refuse_forward_mode(func: Any, args: Args, kwargs: Kwargs) -> NoReturn:
    """Refuse to give a DTensor a tangent."""
    raise DispatchError(
        "forward-mode AD (torch.func.jvp, forward_ad.make_dual): got a DTensor "
        f"({_format_layouts(args)}). Use torch.autograd.functional.jvp, or local tensors within "
        "sw.local_map"
    )


def _format_layouts(args: Args) -> str:
    return ", ".join(repr(each._layout) for each in args if isinstance(each, DTensor))


# ---- errors of one rank, raised on all

SUCCESS_CHECK = "success"
"""The operator in the cause of the collective that compares the outcomes is "success of ...": it
moves nothing of the tensors."""


def fail_on_all_ranks(
    name: str, run: Callable[..., Any], context: SplitContext
) -> Callable[..., Any]:
    """Return a local call that fails on every rank if it fails on one.

    Costs an all_gather of one byte per rank, unless all ranks run it on the same values.
    """
    axes = context.axes(*context.splits)
    if not axes or context.mesh.is_abstract:
        return run
    group = communicator(context.mesh, axes)

    def checked(*args: Any, **kwargs: Any) -> Any:
        given = next(tensors_in((args, kwargs)))
        if given.is_meta:
            return run(*args, **kwargs)
        result, failure = None, None
        try:
            result = run(*args, **kwargs)
        except RuntimeError as error:
            failure = error
        outcome = 0 if failure is None else 1 + isinstance(failure, _LinAlgError)
        mine = torch.tensor([outcome], dtype=torch.uint8, device=given.device)
        with operator_scope(f"{SUCCESS_CHECK} of {name}"):
            outcomes = group.all_gather(mine).tolist()
        if failure is not None:
            raise failure
        if any(outcomes):
            ranks = [rank for rank, failed in zip(group.ranks, outcomes, strict=True) if failed]
            error_type = _LinAlgError if 2 in outcomes else RuntimeError
            raise error_type(
                f"{name}: failed on ranks {ranks}, which hold other parts of the batch than this "
                "one; their errors say why"
            )
        return result

    return checked


def check_dtype_on_empty_shards(
    func: Any, run: Callable[..., Any], context: SplitContext
) -> Callable[..., Any]:
    """Return a local call that refuses a dtype on an empty shard, too, if torch refuses it.

    Only for calls with one tensor: the check runs on small substitutes, and substitutes for several
    tensors may not fit each other, on which some functions crash.

    Arguments:
        run: `func`, or the lowering that runs in its place. A lowering may communicate before torch
            refuses anything, so all ranks check then.
    """
    if len(context.inputs) != 1 or not carries_values(context.mesh) or not _is_of_torch(func):
        return run
    (layout,) = context.inputs
    last_place = [size - 1 for size in context.mesh.shape]  # its shard is the smallest
    is_empty = 0 in layout.local_shape(None if run is func else last_place)
    if not is_empty or 0 in layout.shape:
        return run
    accepted = {torch.float32, torch.float64}  # no function of one tensor lacks these

    def checked(*args: Any, **kwargs: Any) -> Any:
        dtype = next(tensors_in((args, kwargs))).dtype
        if dtype not in accepted:
            _check_dtype(func, args, kwargs)
            accepted.add(dtype)
        return run(*args, **kwargs)

    return checked


def _is_of_torch(func: Any) -> bool:
    """Tell whether a function is torch's; one of the user's may communicate."""
    if isinstance(func, OpOverload | OpOverloadPacket):
        return str(func).startswith("aten.")
    return not hasattr(func, "__code__") or func.__module__.startswith("torch.")


def _check_dtype(func: Any, args: Args, kwargs: Kwargs) -> None:
    """Raise the error that torch raises for the dtype of a tensor that is not empty."""

    def small(value: torch.Tensor) -> torch.Tensor:
        return torch.zeros((1,) * value.dim(), dtype=value.dtype, device=value.device)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _run_on_substitutes(small, func, args, kwargs)
        except NotImplementedError as error:
            if " not implemented for '" in str(error):
                raise
        except Exception:
            return  # about something else, such as the small shape


# ---- torch's own errors, for the global shapes


def clearer_error(error: Exception, func: Any, args: Args, kwargs: Kwargs) -> Exception:
    """Return the error that torch raises for the global shapes, if any, with a note of the call."""
    if isinstance(error, ShardwiseError):
        return error
    error = error_on_global_shapes(error, type(error), func, args, kwargs)
    if not getattr(error, "__notes__", None):  # the innermost call has noted itself
        error.add_note(_format_call(func, args, kwargs))
    return error


def error_on_global_shapes(
    error: Exception, kind: type[Exception], func: Any, args: Args, kwargs: Kwargs
) -> Exception:
    """Return torch's error for the global shapes if it is of this kind; else `error`."""
    try:
        _run_on_substitutes(_as_meta, func, args, kwargs)
    except (RuntimeError, IndexError, TypeError, ValueError) as found:
        is_about_meta = isinstance(found, NotImplementedError) or re.search(r"\bmeta\b", str(found))
        if isinstance(found, kind) and not is_about_meta:
            return found.with_traceback(None)
    except Exception:
        return error
    return error


def _as_meta(value: torch.Tensor) -> torch.Tensor:
    shape = value._layout.shape if isinstance(value, DTensor) else tuple(value.shape)
    return torch.empty(shape, dtype=value.dtype, device="meta")


def _run_on_substitutes(
    substitute: Callable[[torch.Tensor], torch.Tensor], func: Any, args: Args, kwargs: Kwargs
) -> None:
    """Run a function, for its error, with substitutes for its tensors."""

    def substituted(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return substitute(value)
        if isinstance(value, list | tuple):
            parts = [substituted(each) for each in value]
            return parts if isinstance(value, list) else tuple(parts)
        return value

    with as_local(), torch.no_grad():
        given = [substituted(arg) for arg in args]
        func(*given, **{name: substituted(arg) for name, arg in kwargs.items()})


def _format_call(func: Any, args: Args, kwargs: Kwargs) -> str:
    tensors = [argument_at(args, kwargs, path) for path in tensor_paths(args, kwargs)]
    operands = [
        repr(each._layout) if isinstance(each, DTensor) else f"a plain {tuple(each.shape)}"
        for each in tensors
    ]
    text = f"[in {name_of(func)} of {', '.join(operands)}"
    plain_sizes = {size for each in tensors if type(each) is not DTensor for size in each.shape}
    local_sizes = {
        local_size
        for each in tensors
        if type(each) is DTensor
        for local_size, size in zip(each.to_local().shape, each.shape, strict=True)
        if local_size != size
    }
    if plain_sizes & local_sizes:
        text += (
            "; shapes are global, and a plain tensor is taken for a whole one: if it is this "
            "rank's piece, say DTensor.from_local(piece, mesh, placements)"
        )
    return text + "]"
