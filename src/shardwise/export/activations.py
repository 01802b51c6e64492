"""Activations in the plan of a program: how tensors lie that enter and leave its modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shardwise.export.boundaries import Boundary
from shardwise.export.errors import ExportError
from shardwise.export.plan import NO_NAME
from shardwise.parallel.activations import Activations
from shardwise.parallel.names import check_pattern, matches, unmatched
from shardwise.parallel.specs import is_spec


def apart(
    plan: Mapping[str, Any], modules: Iterable[str]
) -> tuple[dict[str, Any], dict[str, Boundary]]:
    """What a plan says of tensors, by pattern, and of modules, by path."""
    tensors: dict[str, Any] = {}
    boundaries: dict[str, Boundary] = {}
    for pattern, wanted in plan.items():
        check_pattern("plan", pattern)
        if not isinstance(wanted, Activations):
            tensors[pattern] = wanted
            continue
        fitting = [path for path in modules if matches(pattern, path)]
        if not fitting:
            raise unmatched("plan", pattern, modules, "modules", remedy=NO_NAME)
        boundaries |= dict.fromkeys(fitting, _boundary(pattern, wanted))
    return tensors, boundaries


def _boundary(pattern: str, wanted: Activations) -> Boundary:
    entering, named = wanted.inputs, {}
    if entering is not None and not is_spec(entering):
        entering, named = None, dict(wanted.inputs)
    positions = [key for key in named if not isinstance(key, str)]
    if positions or not (wanted.outputs is None or is_spec(wanted.outputs)):
        what = f"inputs by position {positions}" if positions else f"outputs {wanted.outputs}"
        raise ExportError(
            f"plan[{pattern!r}]: a program does not say which argument or result of a module is "
            f"which, so Activations have one spec there, or names for inputs of the program; got "
            f"{what}. Use the modules in it, input_placements or output_placements"
        )
    return Boundary(entering, wanted.outputs, named)
