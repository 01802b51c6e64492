"""The notation of plans: patterns that name modules and tensors, and specs that place one tensor.

A pattern is a dotted name with wildcards, such as `layers.*.w[qkv].weight`. A spec is a list with
one placement per axis of the mesh, or a dict from axes to placements, such as `{"tp": Shard(0)}`.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from shardwise.core.errors import ShardwiseError, also
from shardwise.core.layout import Layout
from shardwise.core.mesh import Axis, DeviceMesh
from shardwise.core.placement import (
    Placement,
    Replicate,
    Shard,
    _StridedShard,
    as_placement,
)
from shardwise.torch_internals import own_buffers, own_modules, own_parameters

_MAX_SUGGESTIONS = 5

_STRICT_AXIS_REMEDY = "Make the mesh with that axis, or pass strict=False to leave such axes out"
"""How to correct an axis that the mesh does not have, where `strict` is an argument."""


NO_MATCH_REMEDY = "Correct it, or pass strict=False to leave it out"
"""How to correct a pattern that matches nothing, where `strict` is an argument."""


class PlanError(ShardwiseError, ValueError):
    """A plan that does not fit its module."""


def check_plan(plan: object) -> None:
    """Raise PlanError for a plan that is not a dict."""
    if not isinstance(plan, Mapping):
        raise also(PlanError, TypeError)(
            f"plan: expected a dict of patterns, got {type(plan).__name__}"
        )


# ---- patterns


def matches(pattern: str, name: str) -> bool:
    """Check whether a dotted name matches a pattern such as `layers.*.w[qkv]`, part by part.

    A name always matches itself, also if it contains wildcard characters: `experts.a[0]`.
    """
    if not name or pattern == name:  # only the empty pattern matches the root module
        return pattern == name
    wanted, parts = pattern.split("."), name.split(".")
    return len(wanted) == len(parts) and all(map(fnmatchcase, parts, wanted))


def check_pattern(argument: str, pattern: object) -> None:
    """Raise PlanError for a key of a plan that is not a string."""
    if not isinstance(pattern, str):
        raise also(PlanError, TypeError)(
            f"{argument}: expected names, or patterns for names, as keys; got {pattern!r}"
        )


def all_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield every submodule under every name it has: a shared module is yielded several times."""
    yield prefix, module
    for name, child in own_modules(module).items():
        if child is not None:
            yield from all_modules(child, join_names(prefix, name))


def names_nothing_on_purpose(module: nn.Module, pattern: str) -> bool:
    """Check whether a pattern names what a module has set to None, or the items of an empty list.

    The stages of a pipeline set the modules to None that other stages have, and a projection
    without a bias has None in its place.
    """
    part, _, rest = pattern.partition(".")
    children = own_modules(module)
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and not children:
        return True
    own: dict[str, Any] = {**own_parameters(module), **own_buffers(module), **children}
    found = [child for name, child in own.items() if name == part or fnmatchcase(name, part)]
    if any(child is None for child in found) or vars(module).get(part, module) is None:
        return True
    return bool(rest) and any(
        names_nothing_on_purpose(child, rest) for child in found if isinstance(child, nn.Module)
    )


def warn_of_no_match(error: PlanError, stacklevel: int) -> None:
    """Warn, with the message of an error, of a pattern that matches nothing."""
    message = str(error.args[0]).replace(NO_MATCH_REMEDY, "It is left out")
    warnings.warn(message, stacklevel=stacklevel + 1)


def join_names(prefix: str, name: str) -> str:
    """Join two parts of a dotted name, either of which may be empty."""
    return f"{prefix}.{name}" if prefix and name else prefix or name


def no_match_error(
    argument: str,
    pattern: str,
    names: Iterable[str],
    kinds: str,
    others: Iterable[str] = (),
    meant: str = "",
    remedy: str = NO_MATCH_REMEDY,
) -> PlanError:
    """Return the error for a pattern that matches nothing, with suggestions.

    Arguments:
        argument: the argument of the user's call that has the pattern.
        names: the names that the pattern could match.
        kinds: what these names belong to, such as "modules".
        others: names of another kind, which the user may have meant.
        meant: what to write instead if the pattern matches one of `others`.
        remedy: what to do if it matches nothing at all.
    """
    asked = f"{argument}[{pattern!r}]: expected the name, or a pattern for names, of {kinds}; it"
    other = next((name for name in others if matches(pattern, name)), None)
    if other is not None:
        return PlanError(f"{asked} matches {other or 'the module itself'}, {meant}")
    known = [name for name in dict.fromkeys(names) if name]
    similar = _similar_names(pattern, known)
    hint = f"; near it are {', '.join(similar)}" if similar else ""
    return PlanError(f"{asked} matches nothing{hint}. {remedy}")


def _similar_names(pattern: str, known: list[str]) -> list[str]:
    # Names that differ only in numbers count as one: a single layer is suggested, not all of them.
    examples: dict[str, str] = {}
    for name in known:
        examples.setdefault(_without_numbers(name), name)
    found = difflib.get_close_matches(
        _without_numbers(pattern), examples, n=_MAX_SUGGESTIONS, cutoff=0.5
    )
    if not found:
        last = pattern.rsplit(".", 1)[-1]
        found = [each for each in examples if last and last in each][:_MAX_SUGGESTIONS]
    return [examples[each] for each in found]


def _without_numbers(name: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


# ---- specs


def is_spec(value: Any) -> bool:
    """Check whether a value is a spec: placements of one tensor, in a list or by axis."""
    if isinstance(value, Mapping):
        return bool(value) and all(_is_placement(each) for each in value.values())
    return _is_sequence(value) and bool(value) and all(map(_is_placement, value))


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_placement(value: Any) -> bool:
    kind = type(value)
    return isinstance(value, Placement) or kind.__module__.startswith("torch.distributed.tensor")


def as_placements(
    spec: Any, mesh: DeviceMesh, argument: str, remedy: str = _STRICT_AXIS_REMEDY
) -> list[Placement]:
    """Return the placements of a spec, one per axis: `Replicate()` on axes that it does not name.

    Arguments:
        argument: the name of the spec in errors.
        remedy: what an error proposes if the spec names an axis that the mesh does not have.
    """
    if isinstance(spec, Mapping):
        result: list[Placement] = [Replicate()] * mesh.ndim
        for axis, placement in _placements_by_axis(spec, mesh, argument, remedy).items():
            result[axis] = placement
        return result
    if isinstance(spec, Placement):
        spec = [spec]
    if not _is_sequence(spec) or len(spec) != mesh.ndim:
        raise PlanError(
            f"{argument}: expected {mesh.ndim} placements, one per axis of {mesh!r}, or such as "
            f"{{{mesh.axis_name(0)!r}: Shard(0)}}; got {spec!r}"
        )
    return [as_placement(each, f"{argument}[{at}]") for at, each in enumerate(spec)]


def _placements_by_axis(
    spec: Mapping[Axis, Placement],
    mesh: DeviceMesh,
    argument: str,
    remedy: str = _STRICT_AXIS_REMEDY,
) -> dict[int, Placement]:
    """Replace the axes of a spec by their positions in the mesh."""
    result: dict[int, Placement] = {}
    for axis, placement in spec.items():
        if not has_axis(mesh, axis):
            raise PlanError(
                f"{argument}: expected axes of the mesh, {mesh.axes_shown()}; got {axis!r}. "
                f"{remedy}"
            )
        position = mesh.axis(axis)
        if position in result:
            raise PlanError(
                f"{argument}: expected each axis once, got {mesh.axis_name(position)} twice: "
                f"{spec!r}"
            )
        result[position] = as_placement(placement, f"{argument}[{axis!r}]")
    return result


def has_axis(mesh: DeviceMesh, axis: Any) -> bool:
    """Check whether a value is the name or the position of an axis of the mesh."""
    if isinstance(axis, str):
        return axis in (mesh.mesh_dim_names or ())
    return isinstance(axis, int) and -mesh.ndim <= axis < mesh.ndim


def drop_unknown_axes(spec: Any, mesh: DeviceMesh) -> Any:
    """Return a spec without the axes that the mesh does not have."""
    if isinstance(spec, Mapping) and is_spec(spec):
        return {axis: each for axis, each in spec.items() if has_axis(mesh, axis)}
    return spec


def apply_spec(layout: Layout, spec: Any, argument: str) -> Layout:
    """Return the layout with the placements of a spec; axes that a dict spec does not name keep
    theirs."""
    mesh = layout.mesh
    if not isinstance(spec, Mapping):
        return Layout.from_placements(mesh, layout.shape, as_placements(spec, mesh, argument))
    changes = _placements_by_axis(spec, mesh, argument)
    placements = [changes.get(axis, each) for axis, each in enumerate(layout.placements)]
    if any(isinstance(each, _StridedShard) for each in changes.values()):
        return Layout.from_placements(mesh, layout.shape, placements)
    placements = [each.without_order() if isinstance(each, Shard) else each for each in placements]
    plain = Layout.from_placements(mesh, layout.shape, placements)
    # Axes that stay keep their order; those that are new on a dim come after them.
    order = []
    for before, after in zip(layout.shard_order, plain.shard_order, strict=True):
        stay = [axis for axis in before if axis in after and axis not in changes]
        order.append((*stay, *(axis for axis in after if axis not in stay)))
    return Layout.from_placements(mesh, layout.shape, placements, order)
