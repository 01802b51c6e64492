"""Replace tensors in the arguments and results of modules, by position, by name, or all of them."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.parallel.plan_spec import PlanError
from shardwise.torch_internals import pytree


class ForwardArguments(NamedTuple):
    """The names of the arguments of a module's forward."""

    positional: list[str]
    """The arguments that have a position, in order."""
    named: list[str]
    """The arguments that may be given by keyword, in order."""
    takes_any: bool
    """Whether it takes any other keyword too (`**kwargs`)."""


def forward_arguments(module: nn.Module) -> ForwardArguments:
    """Return the names of the arguments of a module's forward."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):  # a forward that is not written in Python
        return ForwardArguments([], [], True)
    with_position = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    with_name = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return ForwardArguments(
        [each.name for each in parameters if each.kind in with_position],
        [each.name for each in parameters if each.kind in with_name],
        any(each.kind is Parameter.VAR_KEYWORD for each in parameters),
    )


# ---- arguments of a call


def replace_first_argument(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    names: list[str],
    change: Callable[[Any], Any],
    what: str,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with `change` applied to the first tensor.

    Arguments:
        names: the keywords of the forward in order, which decides what is first; the order of the
            keywords in the call does not.
        what: whose arguments these are, for the error if there is no tensor.
    """
    for at, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            return (*args[:at], change(value), *args[at + 1 :]), kwargs
    known = [name for name in names if name in kwargs]
    for name in known + [name for name in kwargs if name not in known]:
        if isinstance(kwargs[name], torch.Tensor):
            return args, {**kwargs, name: change(kwargs[name])}
    raise PlanError(f"{what}: expected a tensor among the arguments, got none")


def replace_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], changes: Mapping[int | str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with some replaced, by position or keyword."""
    positional, keywords = list(args), dict(kwargs)
    for where, value in changes.items():
        if isinstance(where, int):
            positional[where] = value
        else:
            keywords[where] = value
    return tuple(positional), keywords


# ---- results, and anything that contains tensors


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a value with `change` applied to each tensor in it."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if is_record(value):
        return replace_fields(
            value,
            {name: lambda each: map_tensors(each, change) for name in field_names(value)},
        )
    return pytree.tree_map_only(torch.Tensor, change, value)


def is_record(value: Any) -> bool:
    """Check whether a value is a dict or a dataclass: something with named fields."""
    return isinstance(value, Mapping) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    )


def field_names(record: Any) -> list[str]:
    """Return the names of the fields of a dict or dataclass, in order."""
    if isinstance(record, Mapping):
        return list(record)
    return [field.name for field in dataclasses.fields(record)]


def check_fields(value: Any, names: Iterable[str], what: str) -> None:
    """Raise PlanError unless a value is a dict or dataclass with all of these fields."""
    found = field_names(value) if is_record(value) else []
    missing = [name for name in names if name not in found]
    if missing:
        raise PlanError(
            f"{what}: expected a dict or dataclass with {', '.join(names)}, "
            f"got {type(value).__name__} without {', '.join(missing)}"
        )


def _get_field(record: Any, name: str) -> Any:
    return record[name] if isinstance(record, Mapping) else getattr(record, name)


def replace_fields(record: Any, changes: Mapping[str, Callable[[Any], Any]]) -> Any:
    """Return a copy of a dict or dataclass with changes applied to some fields."""
    result = copy.copy(record)
    for name, change in changes.items():
        value = change(_get_field(record, name))
        if isinstance(record, Mapping):
            result[name] = value
        else:
            # Also for frozen dataclasses: nobody else has seen the copy yet.
            object.__setattr__(result, name, value)
    return result


def replace_items(items: Any, changes: Mapping[int, Callable[[Any], Any]]) -> Any:
    """Return a tuple, named tuple or list, of the same type, with changes applied to some items."""
    result = [changes[at](each) if at in changes else each for at, each in enumerate(items)]
    if isinstance(items, list):
        return result
    return type(items)(*result) if hasattr(items, "_fields") else type(items)(result)


def replace_first_result(results: Any, change: Callable[[Any], Any], what: str) -> Any:
    """Return the results of a module with `change` applied to the first tensor among them."""
    if isinstance(results, torch.Tensor):
        return change(results)
    if isinstance(results, tuple | list):
        for at, each in enumerate(results):
            if isinstance(each, torch.Tensor):
                return replace_items(results, {at: change})
    elif is_record(results):
        for name in field_names(results):
            if isinstance(_get_field(results, name), torch.Tensor):
                return replace_fields(results, {name: change})
    raise PlanError(f"{what}: expected a tensor, or several; got {type(results).__name__}")
