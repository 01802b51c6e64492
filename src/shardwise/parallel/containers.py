"""What modules are called with and return: the tensors in it, by position or name."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.parallel.names import PlanError
from shardwise.torch_internals import pytree


class Arguments(NamedTuple):
    """What the arguments of a module's forward are called."""

    positional: list[str]
    """Those that have a position, in their order."""
    named: list[str]
    """Those that may be given by keyword, in their order."""
    takes_any: bool
    """Whether it takes other keywords too."""


def arguments_of(module: nn.Module) -> Arguments:
    """What the arguments of a module's forward are called."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):  # a forward that is no Python
        return Arguments([], [], True)
    with_position = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    with_name = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return Arguments(
        [each.name for each in parameters if each.kind in with_position],
        [each.name for each in parameters if each.kind in with_name],
        any(each.kind is Parameter.VAR_KEYWORD for each in parameters),
    )


def changed_first_argument(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    names: list[str],
    change: Callable[[Any], Any],
    what: str,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with the first tensor among them replaced.

    Arguments:
        names: the keywords of the forward, in the order in which they count, however the caller
            ordered them.
        what: the arguments of what, in the error if there is no tensor.
    """
    for at, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            return (*args[:at], change(value), *args[at + 1 :]), kwargs
    known = [name for name in names if name in kwargs]
    for name in known + [name for name in kwargs if name not in known]:
        if isinstance(kwargs[name], torch.Tensor):
            return args, {**kwargs, name: change(kwargs[name])}
    raise PlanError(f"{what}: expected a tensor among the arguments, got none")


def changed_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], changes: Mapping[int | str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with some of them replaced."""
    given, keywords = list(args), dict(kwargs)
    for where, value in changes.items():
        if isinstance(where, int):
            given[where] = value
        else:
            keywords[where] = value
    return tuple(given), keywords


def on_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A value with each tensor in it replaced."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if is_record(value):
        return changed_fields(
            value, {key: lambda it: on_tensors(it, change) for key in fields(value)}
        )
    return pytree.tree_map_only(torch.Tensor, change, value)


def is_record(value: Any) -> bool:
    """Whether this is a dict or a dataclass: something with named fields."""
    return isinstance(value, Mapping) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    )


def fields(value: Any) -> list[str]:
    """The names of the fields of a record, in their order."""
    if isinstance(value, Mapping):
        return list(value)
    return [field.name for field in dataclasses.fields(value)]


def check_fields(value: Any, names: Iterable[str], what: str) -> None:
    """Refuse what is no record, or lacks one of these fields."""
    found = fields(value) if is_record(value) else []
    missing = [name for name in names if name not in found]
    if missing:
        raise PlanError(
            f"{what}: expected a dict or dataclass with {', '.join(names)}, "
            f"got {type(value).__name__} without {', '.join(missing)}"
        )


def _field(record: Any, name: str) -> Any:
    return record[name] if isinstance(record, Mapping) else getattr(record, name)


def changed_fields(record: Any, changes: Mapping[str, Callable[[Any], Any]]) -> Any:
    """A record of the same type with some fields replaced; the record itself is left alone."""
    result = copy.copy(record)
    for name, change in changes.items():
        value = change(_field(record, name))
        if isinstance(record, Mapping):
            result[name] = value
        else:
            # frozen dataclasses too: this is the copy's making, not a change
            object.__setattr__(result, name, value)
    return result


def changed_items(many: Any, changes: Mapping[int, Callable[[Any], Any]]) -> Any:
    """A tuple, named tuple or list with some items replaced, of the same type."""
    items = [changes[at](each) if at in changes else each for at, each in enumerate(many)]
    if isinstance(many, list):
        return items
    return type(many)(*items) if hasattr(many, "_fields") else type(many)(items)


def changed_first_result(results: Any, change: Callable[[Any], Any], what: str) -> Any:
    """Results, in whatever holds them, with the first tensor among them replaced."""
    if isinstance(results, torch.Tensor):
        return change(results)
    if isinstance(results, tuple | list):
        for at, each in enumerate(results):
            if isinstance(each, torch.Tensor):
                return changed_items(results, {at: change})
    elif is_record(results):
        for name in fields(results):
            if isinstance(_field(results, name), torch.Tensor):
                return changed_fields(results, {name: change})
    raise PlanError(f"{what}: expected a tensor, or several; got {type(results).__name__}")
