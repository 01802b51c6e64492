"""The table of rules, by torch function.

A torch function, its Tensor method, its in-place form and its aten overloads share one rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from shardwise.core.errors import ShardwiseError
from shardwise.rules.spec import Spec
from shardwise.torch_internals import OpOverload, OpOverloadPacket, nn_builtins, overload_name

Rule = Callable[..., Spec | Callable[..., Any] | None]
RuleType = TypeVar("RuleType", bound=Rule)


class RuleError(ShardwiseError, ValueError):
    """A rule that cannot be registered, or does not fit its operator."""


@dataclass(frozen=True, slots=True)
class OpInfo:
    """How one torch function is run on DTensors."""

    name: str
    rule: Rule | None = None
    """Returns the `Spec` of a call; None if it does not know this call; or, for a call that is made
    of other calls, the function to run with its arguments."""
    handler: Callable[..., Any] | None = None
    """Runs in place of dispatch, with the function, its arguments and its keywords."""
    outplace: Callable[..., Any] | None = None
    """For an in-place function, the one that returns a new tensor."""
    ignores_numbers: bool = False
    """Whether Python numbers among the arguments have no influence on the split."""
    by_dtype: bool = False
    """Whether the dtypes of its tensors have an influence on the split."""


_table: dict[Any, OpInfo] = {}

_SHARED: tuple[Any, ...] = (torch, torch.Tensor, F, nn_builtins)
"""Modules in which equal names mean the same operator: as a function, a method, with defaults."""

_NAMESPACES: dict[str, Any] = {
    "special": torch.special,
    "linalg": torch.linalg,
    "fft": torch.fft,
}
"""Modules whose names are independent. torch.linalg.polar is not torch.polar, and nothing in torch
tells which pairs are the same, so their functions are registered by qualified name only."""


def lookup(function: Any) -> OpInfo | None:
    """Return the entry of a torch function, or None."""
    known = _table.get(function)
    if known is None and isinstance(function, _OPERATORS):
        packet = getattr(function, "overloadpacket", function)
        is_out = overload_name(function).endswith("out")
        if str(packet).startswith("aten.") and not is_out:
            known = _aten.get(packet.__name__)
            if known is not None:
                _table[function] = known
    return known


def add_op_info(function: Any, known: OpInfo) -> None:
    """Add a function to the table."""
    if isinstance(function, Aten):
        _aten[function.name] = known
    else:
        _table[function] = known


@dataclass(frozen=True, slots=True)
class Aten:
    """The aten operator of a name with its overloads, except those that write to `out`.

    Stored by name: torch creates an operator when it is first looked up, and looking up all of them
    would take longer than everything else that is imported here.
    """

    name: str


_OPERATORS = (OpOverload, OpOverloadPacket)
_aten: dict[str, OpInfo] = {}


def functions_named(name: str) -> list[Any]:
    """Return every callable that torch has under a name: function, method, aten overloads.

    Arguments:
        name: "exp" for torch's functions, methods and those of torch.nn.functional; "linalg.qr",
            "special.expit" or "fft.fft" for those of such a module. One does not imply the other.
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


def _find_functions(name: Any, what: str) -> tuple[str, list[Any]]:
    """Return the display name and the functions for a name, or for a function itself."""
    if isinstance(name, Aten):
        return name.name, [name]
    if callable(name):
        return getattr(name, "__name__", str(name)), [name]
    found = functions_named(name)
    if not found:
        raise RuleError(f"{what}: torch has no function named {name!r}")
    return name.replace(".", "_"), found  # as torch calls it, and aten


def rule(
    *names: Any, ignores_numbers: bool = False, by_dtype: bool = False, inplace: bool = True
) -> Callable[[RuleType], RuleType]:
    """Register a rule for functions, given by name or as objects.

    The rule is called with the arguments of the function, and names its parameters as torch does.
    It returns a `Spec`; or None for a call that it does not know; or a function to run in its
    place, for a call that is made of others (as where the value of a tensor decides).

    Arguments:
        ignores_numbers: Python numbers among the arguments have no influence on the split.
        by_dtype: the rule looks at the dtypes of tensors; planned calls are cached for each.
        inplace: register the in-place form of each name (`add_` of `add`) too.
    """

    def register(made: RuleType) -> RuleType:
        for name in names:
            text, given = _find_functions(name, "rule")
            for function in given:
                known = OpInfo(text, made, ignores_numbers=ignores_numbers, by_dtype=by_dtype)
                add_op_info(function, known)
            if inplace and isinstance(name, str) and "." not in name:
                _register_inplace(name, known)
        return made

    return register


def _register_inplace(name: str, known: OpInfo) -> None:
    found = (getattr(module, name, None) for module in (torch.Tensor, torch, F))
    outplace: Any = next(filter(None, found), None)
    if outplace is None:
        return
    for function in functions_named(name + "_"):
        add_op_info(function, replace(known, name=name + "_", outplace=outplace))


def handler(*names: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function that runs in place of functions, given by name or as objects.

    It is called with the function, the tuple of its arguments and the dict of its keywords.
    """

    def register(made: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            text, given = _find_functions(name, "handler")
            for function in given:
                add_op_info(function, OpInfo(text, handler=made))
        return made

    return register


def name_of(function: Any) -> str:
    """Return the name of a torch function for messages."""
    known = lookup(function)
    if known is not None:
        return known.name
    owner = getattr(function, "__self__", None)
    if owner is not None and getattr(function, "__name__", "") in ("__get__", "__set__"):
        return str(getattr(owner, "__name__", owner))
    return str(getattr(function, "__name__", function))
