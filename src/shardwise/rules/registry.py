"""The table of rules: which rule speaks for which torch function.

A torch function, its Tensor method, its in-place form and its aten overloads share one rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.errors import ShardwiseError
from shardwise.rules.spec import Spec

Rule = Callable[..., Spec | None]


class RuleError(ShardwiseError, ValueError):
    """A rule that cannot be registered, or does not fit its operator."""


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of one torch function."""

    name: str
    rule: Rule | None = None
    """Says how a call splits; None from it means that it does not know this call."""
    handler: Callable[..., Any] | None = None
    """Runs in place of everything: it gets the function, its arguments and its keywords."""
    outplace: Callable[..., Any] | None = None
    """Of an in-place function: the one that returns a new tensor."""
    ignores_numbers: bool = False
    """Whether Python numbers among the arguments have no influence on how a call splits."""


_table: dict[Any, Known] = {}

_MODULES: tuple[Any, ...] = (
    torch,
    torch.Tensor,
    F,
    torch._C._nn,
    torch.special,
    torch.linalg,
    torch.fft,
)


def lookup(function: Any) -> Known | None:
    """What is known of a torch function."""
    return _table.get(function)


def enter(function: Any, known: Known) -> None:
    """Put a function into the table."""
    _table[function] = known


def functions(name: str) -> Iterator[Any]:
    """Every callable that torch offers under a name: function, method, aten overloads."""
    seen = set()
    for module in _MODULES:
        found = getattr(module, name, None)
        if callable(found) and id(found) not in seen and not isinstance(found, ModuleType):
            seen.add(id(found))
            yield found
    yield from aten(name)


def aten(name: str) -> Iterator[Any]:
    """The aten operator of a name and its overloads, but for those that write to `out`."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return
    yield packet
    for overload in packet.overloads():
        if not overload.endswith("out"):
            yield getattr(packet, overload)


def rule(
    *names: Any, ignores_numbers: bool = False, inplace: bool = True
) -> Callable[[Rule], Rule]:
    """Register a rule for functions, given by name or themselves.

    The rule is called with the arguments of the function, and names its parameters as torch does.
    It returns a `Spec`, or None for a call that it does not know.

    Arguments:
        ignores_numbers: Python numbers among the arguments have no influence on the split.
        inplace: register the in-place form of each name (`add_` of `add`) too.
    """

    def register(made: Rule) -> Rule:
        for name in names:
            given = [name] if callable(name) else list(functions(name))
            if not given:
                raise RuleError(f"rule: torch has no function named {name!r}")
            text = name if isinstance(name, str) else getattr(name, "__name__", str(name))
            for function in given:
                _table[function] = Known(text, made, ignores_numbers=ignores_numbers)
            if inplace and isinstance(name, str):
                _register_inplace(name, made, ignores_numbers)
        return made

    return register


def _register_inplace(name: str, made: Rule, ignores_numbers: bool) -> None:
    found = (getattr(module, name, None) for module in (torch.Tensor, torch, F))
    outplace: Any = next(filter(None, found), None)
    if outplace is None:
        return
    for function in functions(name + "_"):
        _table[function] = Known(
            name + "_", made, outplace=outplace, ignores_numbers=ignores_numbers
        )


def handler(*names: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what runs in place of functions, given by name or themselves.

    It is called with the function, the tuple of its arguments and the dict of its keywords.
    """

    def register(made: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            given = [name] if callable(name) else list(functions(name))
            if not given:
                raise RuleError(f"handler: torch has no function named {name!r}")
            text = name if isinstance(name, str) else getattr(name, "__name__", str(name))
            for function in given:
                _table[function] = Known(text, handler=made)
        return made

    return register


def name_of(function: Any) -> str:
    """How a message calls a torch function."""
    known = _table.get(function)
    if known is not None:
        return known.name
    owner = getattr(function, "__self__", None)
    if owner is not None and getattr(function, "__name__", "") in ("__get__", "__set__"):
        return str(getattr(owner, "__name__", owner))
    return str(getattr(function, "__name__", function))
