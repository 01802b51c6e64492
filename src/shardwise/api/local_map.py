"""`local_map`: functions of local tensors that run on DTensors."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

from shardwise.api.local_types import LocalTypes
from shardwise.core.errors import LayoutError
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh, as_mesh
from shardwise.core.placement import Partial, Placement, Replicate
from shardwise.dtensor.tensor import DTensor
from shardwise.torch_internals import pytree

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: Any = None,
    in_placements: Any = None,
    in_grad_placements: Any = None,
    device_mesh: DeviceMesh | TorchMesh | None = None,
    *,
    redistribute_inputs: bool = False,
    spmd_types: bool = False,
) -> Any:
    """Turn a function of local tensors into a function of DTensors.

    Arguments:
        func: gets local shards and returns local shards. Without it, a decorator is returned.
        out_placements: the placements of the result; a tuple with one entry per result if there
            are several, None for a result that is no tensor.
        in_placements: the placements that inputs must have, one entry per flattened positional
            argument; None for an argument that is no tensor. By default any placements.
        in_grad_placements: the placements of the gradients that `func` gives for its inputs. By
            default those of the inputs, but `Partial()` on an axis where an input is replicated
            and another is not: there each rank's gradient is a contribution.
        device_mesh: the mesh of the results; by default that of the first DTensor.
        redistribute_inputs: whether to move inputs with other placements, rather than refuse them.
        spmd_types: whether the package `spmd_types` checks `func`: that it never takes a
            contribution for a value, and that the results fit `out_placements`. Replicated inputs
            then have gradients `Partial()`, unless `in_grad_placements` says `Replicate()`. See
            `shardwise.api.local_types`.
    """
    if func is None:
        return functools.partial(
            local_map,
            out_placements=out_placements,
            in_placements=in_placements,
            in_grad_placements=in_grad_placements,
            device_mesh=device_mesh,
            redistribute_inputs=redistribute_inputs,
            spmd_types=spmd_types,
        )

    return _LocalMap(
        func,
        out_placements=out_placements,
        in_placements=in_placements,
        in_grad_placements=in_grad_placements,
        device_mesh=device_mesh,
        redistribute_inputs=redistribute_inputs,
        spmd_types=spmd_types,
    )


class _LocalMap:
    """A function of local tensors as a function of DTensors: an object, so that it can be pickled.

    Arguments:
        options: those of `local_map`.
    """

    def __init__(self, func: Callable[..., Any], **options: Any) -> None:
        self._func, self._options = func, options
        functools.update_wrapper(self, func)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        func, options = self._func, self._options
        for name, value in kwargs.items():
            if any(isinstance(each, DTensor) for each in pytree.tree_leaves(value)):
                raise LayoutError(
                    f"local_map: expected DTensors as positional arguments, which become local "
                    f"tensors; got one as {name}=. Pass it by position, or {name}=x.to_local()"
                )
        flat, structure = pytree.tree_flatten(args)
        found = [arg for arg in flat if isinstance(arg, DTensor)]
        if not found:
            return func(*args, **kwargs)
        mesh = options["device_mesh"]
        mesh = found[0]._layout.mesh if mesh is None else as_mesh(mesh)
        in_placements, out_placements = options["in_placements"], options["out_placements"]
        flat = _move_inputs(flat, in_placements, options["redistribute_inputs"])
        if not options["spmd_types"]:
            local = _local_inputs(flat, options["in_grad_placements"])
            result = func(*pytree.tree_unflatten(local, structure), **kwargs)
            return _global_outputs(result, out_placements, mesh)
        types = LocalTypes(mesh)
        local = _typed_inputs(flat, in_placements, options["in_grad_placements"], types)
        with types.checking():
            result = func(*pytree.tree_unflatten(local, structure), **kwargs)
        return _global_outputs(result, out_placements, mesh, types)

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return self if owner is None else MethodType(self, owner)

    def __reduce__(self) -> str | tuple[Any, ...]:
        # `func` has the name of what it decorates: then this object is what the name stands for.
        name = getattr(self._func, "__qualname__", "")
        found: Any = sys.modules.get(getattr(self._func, "__module__", None) or "")
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is self:
            return name
        return functools.partial(local_map, **self._options), (self._func,)


def _per_argument(given: Any, count: int, argument: str) -> list[Any]:
    if not isinstance(given, list | tuple) or len(given) != count:
        raise LayoutError(
            f"{argument}: expected {count} entries, one per flattened argument (None for one that "
            f"is no tensor); got {given!r}"
        )
    return list(given)


def _move_inputs(flat: list[Any], in_placements: Any, redistribute_inputs: bool) -> list[Any]:
    if in_placements is None:
        return flat
    result = []
    for at, (arg, wanted) in enumerate(
        zip(flat, _per_argument(in_placements, len(flat), "in_placements"), strict=True)
    ):
        if isinstance(arg, DTensor):
            if wanted is None:
                raise LayoutError(f"in_placements[{at}]: expected placements, as it is a DTensor")
            layout = Layout.from_placements(arg._layout.mesh, arg.shape, wanted)
            if arg._layout is not layout:
                if not redistribute_inputs:
                    raise LayoutError(
                        f"in_placements[{at}]: expected an input of layout {layout!r}, got "
                        f"{arg._layout!r}; pass redistribute_inputs=True, or move it before"
                    )
                arg = arg.redistribute(placements=wanted)
        elif wanted is not None and not isinstance(arg, torch.Tensor):
            raise LayoutError(f"in_placements[{at}]: expected None, as the argument is {arg!r}")
        result.append(arg)
    return result


def _local_inputs(flat: list[Any], in_grad_placements: Any) -> list[Any]:
    if in_grad_placements is not None:
        given = _per_argument(in_grad_placements, len(flat), "in_grad_placements")
        return [
            arg.to_local(grad_placements=how) if isinstance(arg, DTensor) else arg
            for arg, how in zip(flat, given, strict=True)
        ]
    layouts = [arg._layout for arg in flat if isinstance(arg, DTensor)]
    along = _ranks_along if len({layout.mesh for layout in layouts}) > 1 else _axis_alone
    split = {
        along(layout.mesh, axis)
        for layout in layouts
        for axis, placement in enumerate(layout.placements)
        if not placement.is_replicate()
    }
    result = []
    for at, arg in enumerate(flat):
        if isinstance(arg, DTensor):
            mesh = arg._layout.mesh
            grads: list[Placement] = []
            for axis, placement in enumerate(arg.placements):
                if placement.is_replicate() and along(mesh, axis) in split:
                    grads.append(Partial())
                else:
                    grads.append(placement if placement.is_shard() else Replicate())
            if along is _ranks_along and arg.requires_grad:
                _check_groups(arg, grads, split, at)
            arg = arg.to_local(grad_placements=grads)
        result.append(arg)
    return result


def _axis_alone(mesh: DeviceMesh, axis: int) -> frozenset[int]:
    return frozenset((axis,))


def _ranks_along(mesh: DeviceMesh, axis: int) -> frozenset[int]:
    return frozenset(mesh.ranks_along([axis]))


def _check_groups(
    arg: DTensor, grads: Sequence[Placement], split: set[frozenset[int]], at: int
) -> None:
    """Refuse an input that is whole over ranks of which only some hold parts of another input.

    Its gradient is a contribution over those, which no placement on its own mesh can say.

    Arguments:
        split: the groups of ranks over which some input is not whole.
        at: the position of the input, for the error.
    """
    mesh = arg._layout.mesh
    for axis, placements in enumerate(zip(arg.placements, grads, strict=True)):
        own = _ranks_along(mesh, axis)
        is_whole = all(placement.is_replicate() for placement in placements)
        for other in split:
            if is_whole and len(own & other) > 1:
                raise LayoutError(
                    f"local_map: input {at} is whole over ranks {sorted(own)}, axis "
                    f"{mesh.axis_name(axis)} of {mesh!r}, and another input, on another mesh, is "
                    f"not whole over ranks {sorted(other)}: say in_grad_placements, or move the "
                    "inputs to one mesh"
                )


def _typed_inputs(
    flat: list[Any], in_placements: Any, in_grad_placements: Any, types: LocalTypes
) -> list[Any]:
    """Return the local tensors of the inputs, typed by their placements and their gradients'."""
    count = len(flat)
    nothing = [None] * count
    wanted = nothing if in_placements is None else list(in_placements)
    grads = nothing
    if in_grad_placements is not None:
        grads = _per_argument(in_grad_placements, count, "in_grad_placements")
    result = []
    for at, (arg, placements, gradients) in enumerate(zip(flat, wanted, grads, strict=True)):
        argument = f"in_placements[{at}]"
        if isinstance(arg, DTensor):
            if arg._layout.mesh is not types.mesh:
                raise LayoutError(
                    f"{argument}: expected a DTensor on {types.mesh!r}, as spmd_types=True checks "
                    f"one mesh; got one on {arg._layout.mesh!r}"
                )
            placements = arg.placements
        if placements is not None and isinstance(arg, torch.Tensor):
            if gradients is None:
                gradients = types.input_gradients(argument, placements)
            if isinstance(arg, DTensor):
                arg = arg.to_local(grad_placements=gradients)
            types.annotate(argument, arg, placements, gradients)
        result.append(arg)
    return result


def _global_outputs(
    result: Any, out_placements: Any, mesh: DeviceMesh, types: LocalTypes | None = None
) -> Any:
    flat, structure = pytree.tree_flatten(result)
    several = isinstance(out_placements, tuple)
    wanted = list(out_placements) if several else [out_placements]
    if several and len(flat) == 1 and wanted and isinstance(wanted[0], Placement):
        wanted = [out_placements]  # one result, whose placements came as a tuple
    if len(wanted) != len(flat):
        raise LayoutError(
            f"out_placements: expected {len(flat)}, a tuple with one entry per result; "
            f"got {out_placements!r}"
        )
    made = []
    for at, (value, placements) in enumerate(zip(flat, wanted, strict=True)):
        if not isinstance(value, torch.Tensor):
            if placements is not None:
                raise LayoutError(f"out_placements[{at}]: expected None, as the result is {value}")
        elif isinstance(value, DTensor):
            raise LayoutError(f"func: expected a local tensor as result {at}, got a DTensor")
        else:
            back = None
            if types is not None:
                placements = placements or [Replicate()] * mesh.ndim
                back = types.output_gradients(f"out_placements[{at}]", value, placements)
            value = DTensor.from_local(value, mesh, placements, grad_placements=back)
        made.append(value)
    return pytree.tree_unflatten(made, structure)
