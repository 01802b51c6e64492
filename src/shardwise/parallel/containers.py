"""What modules are called with and return: the tensors in it, by position or name."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree


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


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str]) -> int | str:
    """Where the first tensor among the arguments is: its position, or its keyword.

    Keywords count in the order of the forward's own parameters, however the caller ordered them.
    """
    for at, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            return at
    known = [name for name in names if name in kwargs]
    for name in known + [name for name in kwargs if name not in known]:
        if isinstance(kwargs[name], torch.Tensor):
            return name
    return -1


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


def changed_fields(record: Any, changes: Mapping[str, Callable[[Any], Any]]) -> Any:
    """A record of the same type with some fields replaced; the record itself is left alone."""
    result = copy.copy(record)
    for name, change in changes.items():
        if isinstance(record, Mapping):
            result[name] = change(record[name])
        else:
            # frozen dataclasses too: this is the copy's making, not a change
            object.__setattr__(result, name, change(getattr(record, name)))
    return result


def changed_items(many: Any, changes: Mapping[int, Callable[[Any], Any]]) -> Any:
    """A tuple, named tuple or list with some items replaced, of the same type."""
    items = [changes[at](each) if at in changes else each for at, each in enumerate(many)]
    if isinstance(many, list):
        return items
    return type(many)(*items) if hasattr(many, "_fields") else type(many)(items)
