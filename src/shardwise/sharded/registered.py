"""Operators that users write: for all sharded tensors, or for those of one kind of spec."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from shardwise.sharded.errors import ShardedTensorError
from shardwise.sharded.specs import ShardingSpec

Operator = Callable[..., Any]
Register = Callable[[Operator], Operator]

_for_all: dict[Any, Operator] = {}
_for_specs: dict[tuple[type, Any], Operator] = {}


def custom_sharded_op_impl(func: Any) -> Register:
    """Register what runs when a torch function is called with a ShardedTensor.

    It comes before everything that is built in.

    Arguments:
        func: the torch function, such as `torch.nn.functional.linear`.

    Example:
        >>> @custom_sharded_op_impl(torch.nn.functional.linear)
        ... def my_linear(types, args, kwargs, process_group): ...
    """
    return functools.partial(_register, _for_all, func)


def custom_sharding_spec_op(sharding_spec_class: type[ShardingSpec], func: Any) -> Register:
    """Register what runs when a torch function is called with a ShardedTensor of one kind of spec.

    Arguments:
        sharding_spec_class: the class of the spec of the first ShardedTensor of the call.
        func: the torch function.
    """
    if not (
        isinstance(sharding_spec_class, type) and issubclass(sharding_spec_class, ShardingSpec)
    ):
        raise ShardedTensorError(
            f"sharding_spec_class: expected a class of specs, got {sharding_spec_class!r}"
        )
    return functools.partial(_register, _for_specs, (sharding_spec_class, func))


def _register(table: dict[Any, Operator], key: Any, made: Operator) -> Operator:
    parameters = inspect.signature(made).parameters
    if len(parameters) != 4:
        raise ShardedTensorError(
            "expected a function of (types, args, kwargs, process_group), "
            f"got {getattr(made, '__name__', made)}({', '.join(parameters)})"
        )
    table[key] = made
    return made


def is_registered(func: Any) -> bool:
    """Whether a user has registered something for a function, of any spec."""
    return func in _for_all or any(func == each for _, each in _for_specs)


def registered(func: Any, spec: ShardingSpec) -> Operator | None:
    """What a user has registered for a function of tensors of this spec."""
    if not _for_all and not _for_specs:
        return None
    found = _for_all.get(func)
    if found is None:
        kinds = (_for_specs.get((kind, func)) for kind in type(spec).__mro__)
        found = next(filter(None, kinds), None)
    return found
