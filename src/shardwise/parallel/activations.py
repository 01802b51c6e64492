"""Activations: the layouts of tensors that enter and leave a module, and the hooks that move them.

The values of activations change in every step, their layouts do not: a `Redistributor` plans the
move between two layouts once and keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.core.errors import LayoutError
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Placement, Shard
from shardwise.core.tensor_state import ensure_state
from shardwise.dtensor.call_args import check_same_on_ranks
from shardwise.dtensor.local_shards import check_shard, waited
from shardwise.dtensor.shard_sizes import infer_layout
from shardwise.dtensor.state import state
from shardwise.dtensor.tensor import DTensor, wrap
from shardwise.parallel.containers import (
    check_fields,
    forward_arguments,
    replace_arguments,
    replace_fields,
    replace_first_argument,
    replace_first_result,
    replace_items,
)
from shardwise.parallel.plan_spec import (
    PlanError,
    apply_spec,
    as_placements,
    drop_unknown_axes,
    is_spec,
)
from shardwise.redistribute.autograd import MovePair, apply_move, check_linear, make_move_pair
from shardwise.torch_internals import TensorBase, as_local

_requires_grad = TensorBase.requires_grad.__get__

_MAX_CACHED_LAYOUTS = 1024
"""Bound on the layouts that one cache here keeps; shapes may change with every step."""


@dataclass(frozen=True)
class Activations:
    """The layouts of the tensors that a module is called with, and of those that it returns.

    A spec has one placement per axis of the mesh, or some by axis, as in `{"tp": Shard(1)}`: on
    axes that it does not name the tensor keeps its placement. A DTensor is redistributed. A plain
    tensor is assumed to be the same on every rank, and each rank takes its shard without
    communication.

    Arguments:
        inputs: a spec for the first tensor among the arguments, or specs by the name or position of
            the argument: `{"x": {"tp": Replicate()}, "mask": [Replicate(), Shard(2)]}`.
        outputs: a spec for the result, or for the first tensor of several; or one spec, or None,
            for each item of a tuple; or specs by the names of the fields of a dict or dataclass.

    Example:
        >>> Activations(inputs={"tp": Replicate()}, outputs={"tp": Shard(1)})
    """

    inputs: Any = None
    outputs: Any = None

    def __post_init__(self) -> None:
        _check_specs("inputs", self.inputs, (int, str))
        _check_specs("outputs", self.outputs, (str,))

    def hooks(
        self, path: str, module: nn.Module, mesh: DeviceMesh, strict: bool
    ) -> Callable[[], None]:
        """Check the specs against a module, and return a function that registers the hooks.

        `shard_module` calls it only after everything else in the plan was checked too.
        """
        name = path or "the module"
        enter = leave = None
        if self.inputs is not None:
            enter = _make_input_hook(self.inputs, f"inputs of {name}", module, mesh, strict)
        if self.outputs is not None:
            leave = _make_output_hook(self.outputs, f"outputs of {name}", mesh, strict)

        def attach() -> None:
            if enter is not None:
                module.register_forward_pre_hook(enter, with_kwargs=True)
            if leave is not None:
                module.register_forward_hook(leave)

        return attach


def _check_specs(argument: str, given: Any, keys: tuple[type, ...]) -> None:
    if given is None or is_spec(given):
        return
    if isinstance(given, Mapping):
        wrong = [
            key for key, each in given.items() if not (isinstance(key, keys) and is_spec(each))
        ]
        if given and not wrong:
            return
    elif argument == "outputs" and isinstance(given, tuple | list):
        wrong = [each for each in given if not (each is None or is_spec(each))]
        if given and not wrong:
            return
    raise PlanError(
        f"{argument}: expected placements, such as {{'tp': Shard(0)}} or one per axis, or several "
        f"of them by name or position; got {given!r}"
    )


# ---- hooks: objects rather than closures, so that modules can be pickled


@dataclass(frozen=True, eq=False, slots=True)
class _Mover:
    """Makes one value a DTensor with the layout that a spec asks for."""

    what: str
    mesh: DeviceMesh
    redistribute: Redistributor

    def __call__(self, value: Any) -> Any:
        if value is None:
            return None
        if not isinstance(value, torch.Tensor):
            raise PlanError(f"{self.what}: expected a tensor, got {type(value).__name__}")
        if isinstance(value, DTensor):
            check_on_mesh(value, self.mesh, self.what)
        else:
            value = wrap_shared(value, Layout(self.mesh, value.shape), self.what)
        return self.redistribute(value)


def _make_mover(spec: Any, what: str, mesh: DeviceMesh, strict: bool) -> _Mover:
    if not strict:
        spec = drop_unknown_axes(spec, mesh)
    as_placements(spec, mesh, what)  # a wrong axis is an error now, not in the first forward
    return _Mover(what, mesh, Redistributor(what, partial(apply_spec, spec=spec, argument=what)))


@dataclass(frozen=True, eq=False, slots=True)
class MoveFirstArgument:
    """A forward pre-hook that moves the first tensor argument.

    Arguments:
        names: the keywords of the module's forward.
        what: the argument's name in errors.
    """

    names: list[str]
    move: Callable[[Any], Any]
    what: str

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return replace_first_argument(args, kwargs, self.names, self.move, self.what)


@dataclass(frozen=True, eq=False, slots=True)
class _MoveArguments:
    """A forward pre-hook that moves the arguments that `Activations.inputs` names.

    Arguments:
        names: the positional arguments of the module's forward.
        movers: by name or position.
    """

    names: list[str]
    movers: dict[int | str, _Mover]

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        names = self.names
        changes: dict[int | str, Any] = {}
        done: dict[Any, Any] = {}  # self-attention gets one tensor as query, key and value

        def moved_once(move: _Mover, value: Any) -> Any:
            if (id(value), move) not in done:
                done[id(value), move] = move(value)
            return done[id(value), move]

        for key, move in self.movers.items():
            at = names.index(key) if isinstance(key, str) and key in names else key
            if isinstance(at, int) and at < len(args):
                changes[at] = moved_once(move, args[at])
                continue
            name = names[at] if isinstance(at, int) and at < len(names) else str(at)
            if name in kwargs:
                changes[name] = moved_once(move, kwargs[name])
        return replace_arguments(args, kwargs, changes)


def _make_input_hook(
    given: Any, what: str, module: nn.Module, mesh: DeviceMesh, strict: bool
) -> Any:
    """Return a forward pre-hook that moves the arguments that `Activations.inputs` names."""
    names, named, takes_any = forward_arguments(module)
    if is_spec(given):
        return MoveFirstArgument(named, _make_mover(given, what, mesh, strict), what)
    movers: dict[int | str, _Mover] = {}
    for key, spec in given.items():
        if isinstance(key, str) and not takes_any and key not in {*names, *named}:
            raise PlanError(
                f"{what}: expected names of its forward's arguments, "
                f"{', '.join(dict.fromkeys(names + named))}; got {key!r}"
            )
        alike = [
            movers[other] for other, before in given.items() if before == spec and other in movers
        ]
        movers[key] = alike[0] if alike else _make_mover(spec, f"{what}[{key!r}]", mesh, strict)
    return _MoveArguments(names, movers)


def _make_output_hook(given: Any, what: str, mesh: DeviceMesh, strict: bool) -> Any:
    """Return a forward hook that moves the results that `Activations.outputs` names."""
    if is_spec(given):
        return partial(_move_first_result, _make_mover(given, what, mesh, strict), what)
    if isinstance(given, Mapping):
        by_name = {
            name: _make_mover(spec, f"{what}[{name!r}]", mesh, strict)
            for name, spec in given.items()
        }
        return partial(_move_fields, by_name, what)
    by_position = {
        at: _make_mover(spec, f"{what}[{at}]", mesh, strict)
        for at, spec in enumerate(given)
        if spec is not None
    }
    return partial(_move_items, by_position, len(given), what)


def _move_first_result(move: _Mover, what: str, module: nn.Module, args: Any, outputs: Any) -> Any:
    return replace_first_result(outputs, move, what)


def _move_fields(
    movers: dict[str, _Mover], what: str, module: nn.Module, args: Any, outputs: Any
) -> Any:
    check_fields(outputs, movers, what)
    return replace_fields(outputs, movers)


def _move_items(
    movers: dict[int, _Mover], count: int, what: str, module: nn.Module, args: Any, outputs: Any
) -> Any:
    if not isinstance(outputs, tuple | list) or len(outputs) != count:
        found = len(outputs) if isinstance(outputs, tuple | list) else type(outputs).__name__
        raise PlanError(f"{what}: expected {count} results, as the plan has, got {found}")
    return replace_items(outputs, movers)


# ---- moving one tensor; styles use this too


class Redistributor:
    """Redistributes DTensors to the layout that `target` returns for their own; keeps the plans.

    Forward: redistribute from the tensor's layout to the target. Backward: redistribute the
    gradient by the transposed move, from the target's dual layout to that of the input.

    Arguments:
        what: the tensor's name in errors.
        target: maps the current layout to the target.
    """

    def __init__(self, what: str, target: Callable[[Layout], Layout]) -> None:
        self._what, self._target = what, target
        self._cache: dict[Layout, tuple[Layout, MovePair | None]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Redistributor, (self._what, self._target)

    def __call__(self, tensor: DTensor) -> DTensor:
        """Return the tensor in the target layout: itself if it has it already."""
        layout = tensor._layout
        found = self._cache.get(layout)
        if found is None:
            found = self._plan(layout)
        target, pair = found
        if pair is None:
            return tensor
        with as_local():
            if _requires_grad(tensor) and torch.is_grad_enabled():
                if layout.partial or target.partial:
                    check_linear(layout)
                    check_linear(target)
                moved = apply_move(tensor, pair)
            else:
                moved = pair.forward.run(tensor._as_subclass(torch.Tensor).detach())
        return wrap(moved, target)

    def _plan(self, layout: Layout) -> tuple[Layout, MovePair | None]:
        if len(self._cache) >= _MAX_CACHED_LAYOUTS:
            self._cache.clear()
        try:
            target = self._target(layout)
        except LayoutError as error:
            raise PlanError(f"{self._what}: {error.args[0]}") from None
        pair = None if target is layout else make_move_pair(layout, target)
        self._cache[layout] = target, pair
        return target, pair


def wrap_shared(local: torch.Tensor, layout: Layout, what: str) -> DTensor:
    """Wrap a plain tensor as the local shard of a DTensor; all wraps of one tensor share moves.

    So modules that are called with the same plain tensor, such as the projections to queries, keys
    and values, share the sum of its gradients: one all-reduce in place of three.

    Forward: nothing. Backward: nothing; the operator that uses the tensor beside shards makes the
        sum.
    """
    local = waited(local)
    if state.plain_tensors == "check" and layout.is_replicated:
        check_same_on_ranks(what, local, layout.mesh)
    result = wrap(local.view_as(local), layout)
    ensure_state(result).alias_of = local
    return result


def check_on_mesh(tensor: DTensor, mesh: DeviceMesh, what: str) -> None:
    """Raise PlanError for a DTensor on another mesh."""
    if tensor._layout.mesh is not mesh:
        raise PlanError(
            f"{what}: expected a tensor on {mesh!r}, got one with the layout {tensor._layout!r} on "
            f"{tensor._layout.mesh!r}; parallelize all modules on one mesh, or hand over "
            "x.to_local() if the module should work on local tensors"
        )


class ShardLayouts:
    """The layouts of DTensors whose local shards are given as plain tensors, cached by local shape.

    Arguments:
        mesh: a mesh of one axis.
        placement: the placement of these tensors on that axis.
        features: the global size of the last dim, if the module knows it.
    """

    def __init__(self, mesh: DeviceMesh, placement: Placement, features: int | None = None) -> None:
        self._mesh, self._placement, self._features = mesh, placement, features
        self._cache: dict[torch.Size, Layout] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardLayouts, (self._mesh, self._placement, self._features)

    def layout_of(self, local: torch.Tensor) -> Layout:
        """Return the layout of the DTensor whose local shard this is.

        If the global size of the split dim is not known, `infer_layout` finds it, in each call: a
        layout kept here would be wrong if another rank's size has changed meanwhile.
        """
        found = self._cache.get(local.shape)
        if found is not None:
            return found
        shape = list(local.shape)
        if isinstance(self._placement, Shard):
            is_last = self._placement.dim in (-1, local.dim() - 1)
            if self._features is None or not is_last:
                return infer_layout(local, self._mesh, [self._placement])
            shape[-1] = self._features
        layout = Layout.from_placements(self._mesh, shape, [self._placement])
        check_shard(local, layout)
        if len(self._cache) >= _MAX_CACHED_LAYOUTS:
            self._cache.clear()
        self._cache[local.shape] = layout
        return layout
