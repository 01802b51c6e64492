"""Patches of constructors that take tensors as data, for which torch has no hook.

C++ reads their arguments below `__torch_function__`, where a DTensor is only its shard. Here they
give the result for the global tensor, or are refused. Each patch looks at the types of the
arguments, which takes about 0.3 us, and calls torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import BuiltinMethodType
from typing import Any

import torch
import torch.utils.dlpack
from torch.overrides import handle_torch_function

from shardwise.dtensor.properties import check_whole
from shardwise.dtensor.tensor import DTensor, tensors_in, unwrap
from shardwise.rules.registry import add_op_info, lookup
from shardwise.torch_internals import (
    device_constructors,
    is_torch_function_enabled,
    is_torch_function_mode_enabled,
    override_tables,
    register_scripted,
)
from shardwise.torch_patches.patch import Patch, Undo, replace, undo_all

Instead = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Runs in place of torch's function, given it and its arguments, of which one is a DTensor."""


_watching: dict[tuple[Any, str], Any] = {}
"""What replaces each function: always the same, as tables of functions hold it."""


def _replace_functions(owner: Any, names: str, instead: Instead, watch: Any = None) -> Undo:
    """Let `instead` run where a function of torch is called with DTensors among its arguments."""
    undos: list[Undo] = [_renew_tables]
    for name in names.split():
        function = getattr(owner, name)
        if (owner, name) not in _watching:
            _watching[owner, name] = (watch or _watched)(function, instead, owner is torch)
        watched = _watching[owner, name]
        is_method = owner is torch.Tensor  # a pickle of a function holds its names
        watched.__qualname__ = f"Tensor.{name}" if is_method else name
        watched.__module__ = "torch" if is_method else owner.__name__
        known = lookup(function)
        if known is not None:  # torch looks methods up by name, and hands ours to dispatch
            add_op_info(watched, known)
        if owner is torch:
            register_scripted(watched, f"aten::{name}")
        is_static = isinstance(function, BuiltinMethodType) and is_method
        undos.append(replace(owner, name, staticmethod(watched) if is_static else watched))
    _renew_tables()
    return undo_all(undos)


def _renew_tables() -> None:
    """Let torch make its tables of functions again, of what the names stand for now."""
    for table in (device_constructors, *override_tables):
        table.cache_clear()


def _watched(function: Any, instead: Instead, is_shown: bool) -> Any:
    """Return a function that runs `instead` if an argument is a DTensor.

    Arguments:
        is_shown: hand it to the modes that are active. C++ would hand them torch's own function,
            which is no longer the one that the name stands for.
    """

    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if is_shown and is_torch_function_mode_enabled():
            return handle_torch_function(watched, (), *args, **kwargs)
        for arg in args:
            if isinstance(arg, DTensor) and is_torch_function_enabled():
                return instead(function, args, kwargs)
        if kwargs:
            for arg in kwargs.values():
                if isinstance(arg, DTensor) and is_torch_function_enabled():
                    return instead(function, args, kwargs)
        return function(*args, **kwargs)

    return watched


def watched_with_lists(function: Any, instead: Instead, is_shown: bool = False) -> Any:
    """Return a function that runs `instead` if it gets DTensors, also within lists and dicts."""

    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if is_torch_function_enabled():
            for each in tensors_in((args, kwargs)):
                if isinstance(each, DTensor):
                    return instead(function, args, kwargs)
        return function(*args, **kwargs)

    return watched


# ---- what runs instead


def _copied(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `torch.tensor(data, ...)`: a copy without history."""
    return _copy(*args, **kwargs)


def _copy(
    data: DTensor,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    requires_grad: bool = False,
    pin_memory: bool = False,
) -> Any:
    result = data.detach().to(device=device, dtype=dtype, copy=True)
    if pin_memory:
        result = result.pin_memory()
    return result.requires_grad_(requires_grad)


def _converted(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `torch.as_tensor(data, ...)`: the tensor itself, or a conversion with its history."""
    return _convert(*args, **kwargs)


def _convert(data: DTensor, dtype: torch.dtype | None = None, device: Any = None) -> Any:
    return data.to(device=device, dtype=dtype)


def _as_array(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `torch.asarray(obj, ...)`: the tensor itself or a copy, with or without history."""
    return _array(*args, **kwargs)


def _array(
    obj: DTensor,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    copy: bool | None = None,
    requires_grad: bool | None = None,
) -> Any:
    result = obj.to(device=device, dtype=dtype, copy=bool(copy))
    if copy is False and result is not obj:
        raise ValueError("can't alias tensor with another dtype or on another device")
    if requires_grad is None:
        return result
    return result.requires_grad_() if requires_grad else result.detach()


def _new_like_model(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `plain.new_tensor(data, ...)`: a copy with the dtype and device of the plain tensor."""
    model, *rest = args
    if isinstance(model, DTensor):
        return function(*args, **kwargs)  # dispatched
    options = {"dtype": model.dtype, "device": model.device, **kwargs}
    return _copy(*rest, **options)


def _with_numbers(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the function with numbers in place of 0-d DTensors."""
    return function(*map(_number, args), **{name: _number(each) for name, each in kwargs.items()})


def _new_with_numbers(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the method with numbers in place of 0-d DTensors; those of a DTensor are its own."""
    return _with_numbers(functools.partial(function, args[0]), args[1:], kwargs)


def _number(arg: Any) -> Any:
    is_number = isinstance(arg, DTensor) and not arg.dim() and not arg.requires_grad
    return arg.item() if is_number else arg


def _from_shards(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the function with plain tensors for whole DTensors; refuse others."""
    return call_on_whole(function.__name__, function, args, kwargs)


def _set_plain(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run methods of a plain tensor that take another's memory; those of a DTensor are its own."""
    target, *rest = args
    name = function.__name__
    if isinstance(target, DTensor):
        return target.set_(*rest, **kwargs) if name == "set_" else function(*args, **kwargs)
    return call_on_whole(name, function, args, kwargs)


def _new_tensor(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return call_on_whole("torch.Tensor", function, args, kwargs)


def call_on_whole(name: str, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a function with plain tensors for the DTensors among its arguments.

    Refuses a DTensor that is not whole on every rank.
    """
    given = [_whole_shard(name, arg) for arg in args]
    return function(*given, **{key: _whole_shard(name, each) for key, each in kwargs.items()})


def _whole_shard(name: str, arg: Any) -> Any:
    if isinstance(arg, DTensor):
        check_whole(name, arg)
        return unwrap(arg)
    if isinstance(arg, list | tuple) and type(arg) in (list, tuple):
        return type(arg)(_whole_shard(name, each) for each in arg)
    if type(arg) is dict:
        return {key: _whole_shard(name, each) for key, each in arg.items()}
    return arg


def _gathered(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the function with the global tensors, as `x.numpy()` does."""
    return function(*(arg.full_tensor() if isinstance(arg, DTensor) else arg for arg in args))


PATCHES: tuple[Patch, ...] = (
    Patch(
        "torch.tensor",
        "A copy of a DTensor would be one of this rank's shard.",
        lambda: _replace_functions(torch, "tensor", _copied),
    ),
    Patch(
        "torch.as_tensor",
        "With another dtype or device it would convert this rank's shard.",
        lambda: _replace_functions(torch, "as_tensor", _converted),
    ),
    Patch(
        "torch.asarray",
        "A copy or conversion of a DTensor would be one of this rank's shard.",
        lambda: _replace_functions(torch, "asarray", _as_array),
    ),
    Patch(
        "torch.Tensor.new_tensor",
        "A plain tensor's new_tensor would copy this rank's shard.",
        lambda: _replace_functions(torch.Tensor, "new_tensor", _new_like_model),
    ),
    Patch(
        "torch.full, arange and scalar_tensor",
        "C++ reads a number from this rank's contribution to a pending sum: they get the sum.",
        lambda: _replace_functions(torch, "full arange scalar_tensor", _with_numbers),
    ),
    Patch(
        "torch.Tensor.new_full",
        "The same for new_full of a plain tensor: it gets the sum.",
        lambda: _replace_functions(torch.Tensor, "new_full", _new_with_numbers),
    ),
    Patch(
        "torch.sparse_coo_tensor and those of the other sparse layouts",
        "Their indices and values would be this rank's shard: refused.",
        lambda: _replace_functions(
            torch,
            "sparse_coo_tensor sparse_csr_tensor sparse_csc_tensor sparse_bsr_tensor "
            "sparse_bsc_tensor sparse_compressed_tensor",
            _from_shards,
        ),
    ),
    Patch(
        "torch.nested.nested_tensor and as_nested_tensor",
        "A nested tensor of DTensors would be one of this rank's shards: refused.",
        lambda: _replace_functions(
            torch.nested, "nested_tensor as_nested_tensor", _from_shards, watched_with_lists
        ),
    ),
    Patch(
        "torch.Tensor.__new__",
        "torch.Tensor(x) of a DTensor would be an alias of this rank's shard: refused.",
        lambda: _replace_functions(torch.Tensor, "__new__", _new_tensor),
    ),
    Patch(
        "torch.Tensor._make_subclass",
        "Gives this rank's shard another class: refused.",
        lambda: _replace_functions(torch.Tensor, "_make_subclass", _from_shards),
    ),
    Patch(
        "torch.Tensor.set_ and new",
        "A plain tensor would take the memory of this rank's shard: refused.",
        lambda: _replace_functions(torch.Tensor, "set_ new", _set_plain),
    ),
    Patch(
        "torch.utils.dlpack.to_dlpack and torch.to_dlpack",
        "They export this rank's shard; x.__dlpack__() exports the global tensor.",
        lambda: undo_all(
            [
                _replace_functions(owner, "to_dlpack", _gathered)
                for owner in (torch.utils.dlpack, torch)
            ]
        ),
    ),
)
