"""The table of rules: which rule speaks for which torch function.

A torch function, its Tensor method, its in-place form and its aten overloads share one rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from shardwise.errors import ShardwiseError
from shardwise.rules.spec import Spec
from shardwise.torch_internals import OpOverload, OpOverloadPacket, nn_builtins, overload_name

Rule = Callable[..., Spec | Callable[..., Any] | None]
RuleType = TypeVar("RuleType", bound=Rule)


class RuleError(ShardwiseError, ValueError):
    """A rule that cannot be registered, or does not fit its operator."""


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of one torch function."""

    name: str
    rule: Rule | None = None
    """Says how a call splits; None from it means that it does not know this call, and a function
    that the call is made of others: it is run with the call's arguments."""
    handler: Callable[..., Any] | None = None
    """Runs in place of everything: it gets the function, its arguments and its keywords."""
    outplace: Callable[..., Any] | None = None
    """Of an in-place function: the one that returns a new tensor."""
    ignores_numbers: bool = False
    """Whether Python numbers among the arguments have no influence on how a call splits."""
    by_dtype: bool = False
    """Whether the dtypes of its tensors have an influence."""


_table: dict[Any, Known] = {}

_SHARED: tuple[Any, ...] = (torch, torch.Tensor, F, nn_builtins)
"""Where torch spells one operator by one name: as a function, as a method, with defaults."""

_NAMESPACES: dict[str, Any] = {
    "special": torch.special,
    "linalg": torch.linalg,
    "fft": torch.fft,
}
"""Modules whose names are their own. torch.linalg.polar is not torch.polar, and nothing in torch
says which pairs are the same: their functions are known by qualified name alone."""


def lookup(function: Any) -> Known | None:
    """What is known of a torch function."""
    known = _table.get(function)
    if known is None and isinstance(function, _OPERATORS):
        packet = getattr(function, "overloadpacket", function)
        is_out = overload_name(function).endswith("out")
        if str(packet).startswith("aten.") and not is_out:
            known = _aten.get(packet.__name__)
            if known is not None:
                _table[function] = known
    return known


def enter(function: Any, known: Known) -> None:
    """Put a function into the table."""
    if isinstance(function, Aten):
        _aten[function.name] = known
    else:
        _table[function] = known


@dataclass(frozen=True, slots=True)
class Aten:
    """The aten operator of a name and its overloads, but for those that write to `out`.

    Known by name alone: torch makes its operators when they are first asked for, and to ask for
    all of them would take longer than everything else that is imported here.
    """

    name: str


_OPERATORS = (OpOverload, OpOverloadPacket)
_aten: dict[str, Known] = {}


def functions(name: str) -> list[Any]:
    """Every callable that torch offers under a name: function, method, aten overloads.

    Arguments:
        name: "exp" for torch's functions, methods and those of torch.nn.functional; "linalg.qr",
            "special.expit" or "fft.fft" for those of such a module. Neither stands for the other.
    """
    namespace, is_qualified, short = name.rpartition(".")
    if is_qualified:
        function = getattr(_NAMESPACES.get(namespace), short, None)
        return [] if function is None else [function, Aten(f"{namespace}_{short}")]
    found: dict[int, Any] = {}
    for module in _SHARED:
        function = getattr(module, name, None)
        if callable(function) and not isinstance(function, ModuleType):
            found[id(function)] = function
    if found or hasattr(torch.ops.aten, name):
        return [*found.values(), Aten(name)]
    return []


def _given(name: Any, what: str) -> tuple[str, list[Any]]:
    """The functions meant by a name, or by a function itself, and what to call them."""
    if isinstance(name, Aten):
        return name.name, [name]
    if callable(name):
        return getattr(name, "__name__", str(name)), [name]
    found = functions(name)
    if not found:
        raise RuleError(f"{what}: torch has no function named {name!r}")
    return name.replace(".", "_"), found  # as torch calls it, and aten


def rule(
    *names: Any, ignores_numbers: bool = False, by_dtype: bool = False, inplace: bool = True
) -> Callable[[RuleType], RuleType]:
    """Register a rule for functions, given by name or themselves.

    The rule is called with the arguments of the function, and names its parameters as torch does.
    It returns a `Spec`, or None for a call that it does not know, or what to run in its place for
    one that is made of others (as where the value of a tensor decides).

    Arguments:
        ignores_numbers: Python numbers among the arguments have no influence on the split.
        by_dtype: the rule looks at the dtypes of tensors; what is planned is kept for each.
        inplace: register the in-place form of each name (`add_` of `add`) too.
    """

    def register(made: RuleType) -> RuleType:
        for name in names:
            text, given = _given(name, "rule")
            for function in given:
                known = Known(text, made, ignores_numbers=ignores_numbers, by_dtype=by_dtype)
                enter(function, known)
            if inplace and isinstance(name, str) and "." not in name:
                _register_inplace(name, known)
        return made

    return register


def _register_inplace(name: str, known: Known) -> None:
    found = (getattr(module, name, None) for module in (torch.Tensor, torch, F))
    outplace: Any = next(filter(None, found), None)
    if outplace is None:
        return
    for function in functions(name + "_"):
        enter(function, replace(known, name=name + "_", outplace=outplace))


def handler(*names: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what runs in place of functions, given by name or themselves.

    It is called with the function, the tuple of its arguments and the dict of its keywords.
    """

    def register(made: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            text, given = _given(name, "handler")
            for function in given:
                enter(function, Known(text, handler=made))
        return made

    return register


def name_of(function: Any) -> str:
    """How a message calls a torch function."""
    known = lookup(function)
    if known is not None:
        return known.name
    owner = getattr(function, "__self__", None)
    if owner is not None and getattr(function, "__name__", "") in ("__get__", "__set__"):
        return str(getattr(owner, "__name__", owner))
    return str(getattr(function, "__name__", function))
