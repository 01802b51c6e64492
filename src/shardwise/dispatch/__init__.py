"""Dispatch of torch functions on DTensors: the hot path.

call -> key -> cached call -> moves of inputs -> local call -> re-type. Every operator call runs
this code, so each microsecond counts.
"""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import torch

import shardwise.rules  # noqa: F401 (registers all rules)
from shardwise.comm import trace as _trace
from shardwise.comm.trace import is_current_function, operator_scope, run_watched
from shardwise.core.errors import LayoutError, ShardwiseError
from shardwise.core.tensor_state import ATTRIBUTE
from shardwise.dispatch import (  # noqa: F401 (register their handlers)
    autograd,
    collectives,
    outside,
    scalars,
)
from shardwise.dispatch.cached_call import (
    NEW_RESULT,
    ON_SHARDS,
    ONLY_GRADS_MOVE,
    REUSES_SUMS,
    CachedCall,
)
from shardwise.dispatch.errors import clearer_error, error_on_global_shapes
from shardwise.dispatch.planner import by_position, by_torchs_names, plan
from shardwise.dtensor.call_args import Args, Kwargs, argument_at, tensor_paths, with_argument_at
from shardwise.dtensor.state import add_to_cache
from shardwise.dtensor.state import state as _state
from shardwise.dtensor.tensor import DTensor, tensors_in
from shardwise.dtensor.view_copy import ViewCopy, call_with_copies, link, view_copies_in
from shardwise.dtensor.view_copy import linked as _linked
from shardwise.dtensor.writes import check_writable
from shardwise.rules.pointwise import foreach
from shardwise.rules.registry import OpInfo, RuleError, lookup, name_of
from shardwise.torch_internals import (
    OpOverload,
    OpOverloadPacket,
    as_local,
    is_autograd_excluded,
    locally,
)

_Tensor = torch.Tensor
_is_grad_enabled = torch.is_grad_enabled
_OPERATORS = (OpOverload, OpOverloadPacket)


def dispatch(
    cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    """Run a torch function on DTensors, as their `__torch_function__`."""
    if type(func) is OpOverload and _is_below_autograd():
        with as_local():  # a TorchDispatchMode hands on tensors that autograd saved: they are local
            return func(*args, **(kwargs or {}))
    if _trace.listeners and not is_current_function(func):
        with operator_scope(name_of(func), func):
            run = partial(dispatch, cls, func, types, args, kwargs)
            return run_watched(func, args, kwargs, run)
    # Most calls take tensors, or a tensor and numbers: their keys are made here.
    key: Any = None
    if not kwargs:
        count = len(args)
        if count == 2:
            first, second = args
            if type(first) is DTensor:
                kind = type(second)
                if kind is DTensor:
                    key = (func, first._layout, second._layout)
                elif kind is float or kind is int:
                    key = (func, first._layout, kind)  # only if the rule ignores numbers
                    if key not in _state.entries:
                        key = (func, first._layout, second)
        elif count == 1:
            (first,) = args
            if type(first) is DTensor:
                key = (func, first._layout)
        else:
            parts = [func]
            for arg in args:
                kind = type(arg)
                if kind is DTensor:
                    parts.append(arg._layout)
                elif arg is None or kind is int:
                    parts.append(arg)
                else:
                    break
            else:
                key = tuple(parts)
    elif "axis" in kwargs or "keepdims" in kwargs:
        kwargs = by_torchs_names(func, kwargs)
    call: Any = _state.entries.get(key)
    if call is None:
        if len(types) > 1 and any(hasattr(each, "makes_dtensors") for each in types):
            return NotImplemented  # that class calls again, with DTensors in place of its own kind
        if ViewCopy in types or (not types and _linked.by_memory):
            copies = view_copies_in(args, kwargs)
            if copies:
                known = lookup(func)
                if known is not None and known.handler is foreach.inplace:
                    return foreach.inplace_one_by_one(func, args, kwargs or {})
                again = partial(dispatch, cls, func, types, args, kwargs)
                return call_with_copies(copies, again, (func, args, kwargs or {}))
        known = lookup(func)
        if kwargs and (not args or type(func) in _OPERATORS):
            args, kwargs = by_position(func, known, args, kwargs)
        if known is not None and known.handler is not None:
            return known.handler(func, args, kwargs or {})
        call = _find_or_plan(func, known, args, kwargs or {})
    else:
        call.hits += 1
    try:
        mode = call.mode
        if mode is REUSES_SUMS:
            result = call.with_reduced_inputs(args, kwargs or {})
            if result is not None:
                return result
            mode = call.mode_without_sums
        if mode is NEW_RESULT:
            run = call.run
            result = locally(run, types, args, kwargs) if kwargs else locally(run, types, args)
            if type(result) is _Tensor:
                result.__class__ = DTensor
                result._layout = call.single  # type: ignore[attr-defined]
                return result
            with as_local():
                return call.retyped(result, (args, kwargs or {}))
        if mode is not ON_SHARDS and (mode is not ONLY_GRADS_MOVE or _is_grad_enabled()):
            result = call(args, kwargs or {})
            if call.returns_views:
                _link_copies(result, func, args, kwargs or {}, call)
            return result
        if call.is_inplace:
            check_writable(call.name, args[0])
        with as_local():
            result = call.run(*args, **kwargs) if kwargs else call.run(*args)
        if type(result) is _Tensor and call.takes_only_dtensors:
            result.__class__ = DTensor
            result._layout = call.single  # type: ignore[attr-defined]
            return result
        if args and result is args[0]:  # in place, or with nothing to do
            return result
        with as_local():
            return call.retyped(result, (args, kwargs or {}))
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        raise clearer_error(error, func, args, kwargs or {}) from None


def _link_copies(result: Any, func: Any, args: Args, kwargs: Kwargs, call: CachedCall) -> None:
    """Link the results that are detached copies to the tensor that torch would return views of."""
    if not any(ATTRIBUTE in each.__dict__ for each in tensors_in(result)):
        return
    path = call.tensors[0]
    without = with_argument_at(args, kwargs, path, None)

    def retake(base: DTensor) -> Any:
        given, keywords = with_argument_at(*without, path, base)
        return dispatch(DTensor, func, (), given, keywords)

    link(result, argument_at(args, kwargs, path), retake, call.keys)


def _is_below_autograd() -> bool:
    return is_autograd_excluded() and not torch.is_inference_mode_enabled()


def _find_or_plan(func: Any, known: OpInfo | None, args: Args, kwargs: Kwargs) -> CachedCall:
    """Find a call in the cache by its full key, or plan it."""
    ignores_numbers = known is not None and known.ignores_numbers
    parts: list[Any] = [func]
    for arg in args:
        kind = type(arg)
        if kind is DTensor:
            parts.append(arg._layout)
        elif kind is float or kind is int:
            parts.append(kind if ignores_numbers else arg)
        else:
            parts.append(None if arg is None else _key_part(arg, ignores_numbers))
    for name, arg in kwargs.items():
        parts.append(name)
        parts.append(_key_part(arg, ignores_numbers))
    if known is not None and known.by_dtype:
        parts += [argument_at(args, kwargs, path).dtype for path in tensor_paths(args, kwargs)]
    key = tuple(parts)
    try:
        call: CachedCall | None = _state.entries.get(key)
    except TypeError:  # an argument cannot be hashed
        call, key = None, ()
    if call is None:
        return _plan(func, known, args, kwargs, key)
    call.hits += 1
    return call


class _Plain:
    """Marks a plain tensor in a key."""


class _True:
    """Marks True in a key, where 1 would be its equal."""


class _False:
    """Marks False in a key, where 0 would be its equal."""


def _key_part(arg: Any, ignores_numbers: bool) -> Any:
    """Return the part of a call's key that stands for an argument."""
    kind = type(arg)
    if kind is DTensor:
        return arg._layout
    if kind is bool:
        return _True if arg else _False
    if kind is int or kind is float or kind is complex:
        return kind if ignores_numbers else (kind, arg)
    if kind is tuple or kind is list or isinstance(arg, list | tuple):
        return kind, *[_key_part(each, ignores_numbers) for each in arg]
    if arg is None:
        return None
    if isinstance(arg, DTensor):
        return arg._layout
    if isinstance(arg, _Tensor):
        return _Plain, kind, tuple(arg.shape), arg.layout
    if kind is slice:
        return slice, arg.start, arg.stop, arg.step
    return arg


def _plan(func: Any, known: OpInfo | None, args: Args, kwargs: Kwargs, key: Any) -> CachedCall:
    """Plan a new call and put it into the cache."""
    _state.misses += 1
    try:
        call = plan(func, known, args, kwargs)
    except Exception as error:
        # Where a rule fails on arguments that it did not expect, torch may have a clear error.
        if not isinstance(error, ShardwiseError) or isinstance(error, LayoutError | RuleError):
            error = error_on_global_shapes(error, Exception, func, args, kwargs)
        raise clearer_error(error, func, args, kwargs) from None
    # The check of plain tensors is part of planning: to check every call, plan every call.
    if key and not (_state.plain_tensors == "check" and _has_plain(args, kwargs)):
        add_to_cache(key, call)
    return call


def _has_plain(args: Args, kwargs: Kwargs) -> bool:
    tensors = (argument_at(args, kwargs, path) for path in tensor_paths(args, kwargs))
    return any(type(each) is not DTensor for each in tensors)


# DTensor lies below rules and dispatch, so dispatch gives it this method. It is bound once: torch
# would bind a classmethod anew for each tensor of a list that it looks at.
DTensor.__torch_function__ = MethodType(dispatch, DTensor)  # type: ignore[method-assign]
