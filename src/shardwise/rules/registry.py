"""The table of rules, by torch function; and what registers them: rules, handlers, compositions.

A torch function, its Tensor method, its in-place form and its aten overloads share one rule.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from shardwise.core.errors import ShardwiseError
from shardwise.dtensor.composite import copy_into
from shardwise.dtensor.state import state
from shardwise.dtensor.tensor import DTensor, tensors_in
from shardwise.rules.pattern import Names, PatternError, factors_of, parse_pattern, sizes_of
from shardwise.rules.spec import Out, Spec
from shardwise.torch_internals import (
    OpOverload,
    OpOverloadPacket,
    nn_builtins,
    overload_name,
    overload_of_custom_operator,
)

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
        namespace = str(packet).partition(".")[0]
        if namespace in _namespaces:
            known = _namespaces[namespace]
        elif namespace == "aten" and not is_out:
            known = _aten.get(packet.__name__)
            if known is not None:
                _table[function] = known
    return known


def add_op_info(function: Any, known: OpInfo) -> None:
    """Add a function to the table."""
    if isinstance(function, Aten):
        _aten[function.name] = known
    elif isinstance(function, Namespace):
        _namespaces[function.name] = known
    else:
        _table[function] = known


@dataclass(frozen=True, slots=True)
class Aten:
    """The aten operator of a name with its overloads, except those that write to `out`.

    Stored by name: torch creates an operator when it is first looked up, and looking up all of them
    would take longer than everything else that is imported here.
    """

    name: str


@dataclass(frozen=True, slots=True)
class Namespace:
    """All operators of a namespace: `torch.ops.<name>.*`."""

    name: str


_OPERATORS = (OpOverload, OpOverloadPacket)
_aten: dict[str, OpInfo] = {}
_namespaces: dict[str, OpInfo] = {}


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
    if isinstance(name, Aten | Namespace):
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


# ---- the first operand of a call

_INPUT = ("input", "self", "x", "A")


def input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return the first operand of a call, given by position or by any of its names."""
    found: torch.Tensor = (
        args[0] if args else next(kwargs[each] for each in _INPUT if each in kwargs)
    )
    return found


def with_synonyms(made: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that the first operand may have any of torch's names for it."""
    own = inspect.signature(made).parameters
    synonyms = {name: "input" for name in _INPUT if name not in own}

    @functools.wraps(made)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("out", None)  # the caller copies the result there
        return made(*args, **{synonyms.get(name, name): each for name, each in kwargs.items()})

    return renamed


# ---- functions composed of other functions


def composed(*names: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a replacement of torch functions, composed of other functions on DTensors.

    The replacement takes the same arguments as the functions.
    """

    def register(made: Callable[..., Any]) -> Callable[..., Any]:
        run = with_synonyms(made)

        def handle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if kwargs.get("out") is None:
                return run(*args, **kwargs)
            copy_into(name_of(func), run(*args, **kwargs), kwargs["out"])
            return kwargs["out"]

        handler(*names)(handle)
        return made

    return register


def dispatched(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Dispatch a function of torch or of shardwise on DTensors."""
    return DTensor.__torch_function__(function, (), args, kwargs)  # type: ignore[no-untyped-call]


class Function:
    """A function of shardwise that dispatch plans and runs like a function of torch."""

    def __init__(self, name: str, run: Callable[..., Any]) -> None:
        self.__name__ = name
        self._run = run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function on local tensors."""
        return self._run(*args, **kwargs)

    def dispatched(self, *args: Any, **kwargs: Any) -> Any:
        """Dispatch the function on DTensors."""
        return dispatched(self, *args, **kwargs)


# ---- rules for operators of users


def register_rule(
    op: Any,
    pattern: str,
    *,
    reduces: str | Mapping[str, str] = "sum",
    linear: Sequence[Sequence[int]] = (),
    additive: Sequence[int] = (),
) -> None:
    """Declare how an operator relates the dims of its tensors, so that it runs on shards.

    `shardwise.testing.check_rule` checks the declaration.

    Arguments:
        op: an operator: `torch.ops.mine.op`, what `torch.library.custom_op` returned, or a torch
            function.
        pattern: the factors of its tensor arguments and results, as an einsum: "m k, k n -> m n".
            `...` stands for any leading dims, `_` for a dim that must be whole. A factor of a
            result may be split; a factor of arguments only is reduced; for the size of a `_` in a
            result the operator is run on tensors without data (`register_fake`).
        reduces: how to combine the results of ranks that split a reduced factor: "sum", "max",
            "min" or "product", or one of these for each reduced factor; a factor that is not named
            must be whole.
        linear: the sets of (positions of) tensors in which the operator is linear, so that pending
            sums pass through it: [(0,), (1,)] for a product, [(0, 1)] for a sum.
        additive: the tensors that are added to the result, such as a bias.

    Example:
        >>> sw.register_rule(torch.ops.mine.matmul, "m k, k n -> m n", linear=[(0,), (1,)])
    """
    functions = operator_functions(op)
    name = str(functions[0])
    left, arrow, _ = pattern.partition("->")
    if not arrow:
        raise RuleError(f"pattern: expected such as 'm k, k n -> m n', got {pattern!r}")
    count = len(left.split(","))
    for position in (*additive, *(each for group in linear for each in group)):
        if not 0 <= position < count:
            raise RuleError(f"linear/additive: expected positions below {count}, got {position}")

    def rule(*args: Any, **kwargs: Any) -> Spec:
        tensors = list(tensors_in((args, kwargs)))
        try:
            names, results = parse_pattern(pattern, [each.dim() for each in tensors])
            sizes = sizes_of(tensors, names, lambda name: False)
        except PatternError as error:
            raise RuleError(f"{name}: {pattern!r}: {error}") from None
        summed = [each for each in sizes if not any(each in dims for dims in results)]
        shapes = _shapes(functions[0], args, kwargs, results, sizes)
        return Spec(
            [
                (tensor, factors_of(tensor, each, sizes))
                for tensor, each in zip(tensors, names, strict=True)
            ],
            [
                Out(tuple(None if each == "_" else each for each in dims), shape)
                for dims, shape in zip(results, shapes, strict=True)
            ],
            reduces=dict.fromkeys(summed, reduces) if isinstance(reduces, str) else dict(reduces),
            linear=linear,
            additive=additive,
        )

    add_user_rule(functions, OpInfo(name, rule))


def add_user_rule(functions: Sequence[Any], known: OpInfo) -> None:
    """Add functions to the table, in place of what is known of them, also in calls planned before.

    Those of other threads are not planned anew: register rules before ranks start.
    """
    for function in functions:
        add_op_info(function, known)
    state.entries.clear()


def operator_functions(op: Any) -> list[Any]:
    """Return the functions to register for an operator: its overloads and their packet."""
    op = overload_of_custom_operator(op)  # if it is from torch.library.custom_op
    if isinstance(op, OpOverload):
        return [op, op.overloadpacket]
    if isinstance(op, OpOverloadPacket):
        return [op, *(getattr(op, each) for each in op.overloads())]  # type: ignore[no-untyped-call]
    module = getattr(op, "__module__", None)  # builtins such as torch.add have none
    if callable(op) and (module is None or module.partition(".")[0] == "torch"):
        return [op]
    raise RuleError(
        f"op: expected an operator such as torch.ops.mine.op, got {op!r}; make a Python function "
        "an operator with torch.library.custom_op, or run it on shards with sw.local_map"
    )


def _shapes(
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    results: Sequence[Names],
    sizes: Mapping[str, int],
) -> list[tuple[int, ...]]:
    """Return the shapes of the results: from the factors, or by running on meta tensors."""
    if all(each != "_" and each in sizes for dims in results for each in dims):
        return [tuple(sizes[each] for each in dims) for dims in results]
    return [tuple(each.shape) for each in tensors_in(meta_result(function, args, kwargs))]


def meta_result(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on tensors of global shape without data (`register_fake`)."""

    def meta(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty(tuple(value.shape), dtype=value.dtype, device="meta")
        if isinstance(value, list | tuple):
            return type(value)(meta(each) for each in value)
        return value

    return function(*map(meta, args), **{name: meta(arg) for name, arg in kwargs.items()})
