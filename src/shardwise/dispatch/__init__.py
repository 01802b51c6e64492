"""The hot path: from a torch function and its arguments to a cached plan, and its execution.

call -> key -> entry -> moves -> local call -> re-type. Every microsecond here is paid on every
operator.
"""

from __future__ import annotations

import re
from functools import partial
from types import MethodType
from typing import Any

import torch

import shardwise.rules  # noqa: F401 (fills the table)
from shardwise.comm import trace as _trace
from shardwise.comm.trace import is_running, running
from shardwise.copies import ViewCopy, as_ordinary, copies_in, link
from shardwise.copies import linked as _linked
from shardwise.dispatch import gradients, refused, values  # noqa: F401 (register themselves)
from shardwise.dispatch.arguments import by_position, by_torchs_names, tensor_paths
from shardwise.dispatch.entry import Entry, check_writable, get, replaced_at
from shardwise.dispatch.failing import on_meta
from shardwise.dispatch.planning import plan
from shardwise.dispatch.state import remember
from shardwise.dispatch.state import state as _state
from shardwise.errors import LayoutError, ShardwiseError
from shardwise.rules import foreach
from shardwise.rules.registry import Known, RuleError, lookup, name_of
from shardwise.tensor import DTensor, tensors_in
from shardwise.torch_internals import OpOverload, as_local, is_autograd_excluded, locally

_Tensor = torch.Tensor
_is_grad_enabled = torch.is_grad_enabled


def dispatch(
    cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    """What `__torch_function__` does: run `func` on DTensors."""
    if type(func) is OpOverload and _is_below_autograd():
        with as_local():  # as a TorchDispatchMode hands on what autograd saved: it is local
            return func(*args, **(kwargs or {}))
    if _trace.listeners and not is_running(func):
        with running(name_of(func), func):
            return dispatch(cls, func, types, args, kwargs)
    # Most calls are of tensors, or of a tensor and numbers: their keys are made here.
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
                    key = (func, first._layout, kind)  # of functions that ignore numbers only
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
    entry = _state.entries.get(key)
    if entry is None:
        if len(types) > 1 and any(hasattr(each, "makes_dtensors") for each in types):
            return NotImplemented  # it calls again, with DTensors in place of its own kind
        if ViewCopy in types or (not types and _linked.by_memory):
            copies = copies_in(args, kwargs)
            if copies:
                known = lookup(func)
                if known is not None and known.handler is foreach.inplace:
                    return foreach.inplace_one_by_one(func, args, kwargs or {})
                return as_ordinary(copies, partial(dispatch, cls, func, types, args, kwargs))
        known = lookup(func)
        if kwargs and (not args or type(func) is OpOverload):
            args, kwargs = by_position(func, known, args, kwargs)
        if known is not None and known.handler is not None:
            return known.handler(func, args, kwargs or {})
        entry = _found(func, known, args, kwargs or {})
    else:
        entry.hits += 1
    try:
        if entry.flowing:
            result = entry.with_sums_made(args, kwargs or {})
            if result is not None:
                return result
        if entry.simple:
            run = entry.run
            result = locally(run, types, args, kwargs) if kwargs else locally(run, types, args)
            if type(result) is _Tensor:
                result.__class__ = DTensor
                result._layout = entry.single  # type: ignore[attr-defined]
                return result
            with as_local():
                return entry.retyped(result, (args, kwargs or {}))
        if not (entry.direct or (entry.direct_without_grad and not _is_grad_enabled())):
            result = entry(args, kwargs or {})
            if entry.views:
                _link(result, func, args, kwargs or {}, entry)
            return result
        if entry.inplace:
            check_writable(entry.name, args[0])
        with as_local():
            result = entry.run(*args, **kwargs) if kwargs else entry.run(*args)
        if type(result) is _Tensor and entry.fresh:
            result.__class__ = DTensor
            result._layout = entry.single  # type: ignore[attr-defined]
            return result
        if args and result is args[0]:  # in place, or with nothing to do
            return result
        with as_local():
            return entry.retyped(result, (args, kwargs or {}))
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        raise _clearer(error, func, args, kwargs or {}) from None


def _link(result: Any, func: Any, args: Any, kwargs: Any, entry: Entry) -> None:
    """Tie those results that are copies to the tensor that torch would return views of."""
    if not any("_severed" in each.__dict__ for each in tensors_in(result)):
        return
    path = entry.tensors[0]
    without = replaced_at(args, kwargs, path, None)

    def again(base: DTensor) -> Any:
        given, keywords = replaced_at(*without, path, base)
        return dispatch(DTensor, func, (), given, keywords)

    link(result, get(args, kwargs, path), again, entry.keys)


def _is_below_autograd() -> bool:
    return is_autograd_excluded() and not torch.is_inference_mode_enabled()


def _found(func: Any, known: Known | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
    """The entry of a call, by its full key; planned if it is new."""
    ignores_numbers = known is not None and known.ignores_numbers
    parts: list[Any] = [func]
    for arg in args:
        kind = type(arg)
        if kind is DTensor:
            parts.append(arg._layout)
        elif kind is float or kind is int:
            parts.append(kind if ignores_numbers else arg)
        else:
            parts.append(None if arg is None else _part(arg, ignores_numbers))
    for name, arg in kwargs.items():
        parts.append(name)
        parts.append(_part(arg, ignores_numbers))
    if known is not None and known.by_dtype:
        parts += [get(args, kwargs, path).dtype for path in tensor_paths(args, kwargs)]
    key = tuple(parts)
    try:
        entry: Entry | None = _state.entries.get(key)
    except TypeError:  # an argument that cannot be a key
        entry, key = None, ()
    if entry is None:
        return _planned(func, known, args, kwargs, key)
    entry.hits += 1
    return entry


class _Plain:
    """Marks a plain tensor in a key."""


class _True:
    """Marks True in a key, where 1 would be its equal."""


class _False:
    """Marks False in a key, where 0 would be its equal."""


def _part(arg: Any, ignores_numbers: bool) -> Any:
    """What an argument contributes to the key of a call."""
    kind = type(arg)
    if kind is DTensor:
        return arg._layout
    if kind is bool:
        return _True if arg else _False
    if kind is int or kind is float or kind is complex:
        return kind if ignores_numbers else (kind, arg)
    if kind is tuple or kind is list or isinstance(arg, list | tuple):
        return kind, *[_part(each, ignores_numbers) for each in arg]
    if arg is None:
        return None
    if isinstance(arg, DTensor):
        return arg._layout
    if isinstance(arg, _Tensor):
        return _Plain, tuple(arg.shape), arg.layout
    if kind is slice:
        return slice, arg.start, arg.stop, arg.step
    return arg


def _planned(func: Any, known: Known | None, args: Any, kwargs: Any, key: Any) -> Entry:
    _state.misses += 1
    try:
        entry = plan(func, known, args, kwargs)
    except Exception as error:
        # What a rule did not expect, and stumbles over, torch may refuse in its own words.
        if not isinstance(error, ShardwiseError) or isinstance(error, LayoutError | RuleError):
            error = _theirs(error, Exception, func, args, kwargs)
        raise _clearer(error, func, args, kwargs) from None
    # Values that are to be compared on every call are compared where calls are planned.
    if key and not (_state.plain_tensors == "check" and _has_plain(args, kwargs)):
        remember(key, entry)
    return entry


def _has_plain(args: Any, kwargs: Any) -> bool:
    tensors = (get(args, kwargs, path) for path in tensor_paths(args, kwargs))
    return any(type(each) is not DTensor for each in tensors)


def _clearer(error: Exception, func: Any, args: Any, kwargs: Any) -> Exception:
    """The error that torch itself has for the global shapes, if it has one, and for what call."""
    if isinstance(error, ShardwiseError):
        return error
    error = _theirs(error, type(error), func, args, kwargs)
    if not getattr(error, "__notes__", None):  # the innermost call says it
        error.add_note(_call_shown(func, args, kwargs))
    return error


def _call_shown(func: Any, args: Any, kwargs: Any) -> str:
    tensors = [get(args, kwargs, path) for path in tensor_paths(args, kwargs)]
    shown = [
        repr(each._layout) if isinstance(each, DTensor) else f"a plain {tuple(each.shape)}"
        for each in tensors
    ]
    text = f"[in {name_of(func)} of {', '.join(shown)}"
    plain_sizes = {size for each in tensors if type(each) is not DTensor for size in each.shape}
    sizes_of_pieces = {
        here
        for each in tensors
        if type(each) is DTensor
        for here, whole in zip(each.to_local().shape, each.shape, strict=True)
        if here != whole
    }
    if plain_sizes & sizes_of_pieces:
        text += (
            "; shapes are global, and a plain tensor is taken for a whole one: if it is this "
            "rank's piece, say DTensor.from_local(piece, mesh, placements)"
        )
    return text + "]"


def _theirs(
    error: Exception, kind: type[Exception], func: Any, args: Any, kwargs: Any
) -> Exception:
    """The error of this kind that torch has for the global shapes; else the one that there is."""
    try:
        on_meta(func, args, kwargs)
    except (RuntimeError, IndexError, TypeError, ValueError) as theirs:
        of_meta = isinstance(theirs, NotImplementedError) or re.search(r"\bmeta\b", str(theirs))
        if isinstance(theirs, kind) and not of_meta:
            return theirs.with_traceback(None)
    except Exception:
        return error
    return error


# Bound once: a classmethod would be bound anew whenever torch looks at a tensor of a list.
DTensor.__torch_function__ = MethodType(dispatch, DTensor)  # type: ignore[method-assign]
