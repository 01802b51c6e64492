"""`distribute_tensor`, `distribute_module` and `local_map`: DTensors of plain tensors and modules,
and functions of local tensors that run on DTensors."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.api.local_types import LocalTypes
from shardwise.api.optimizers import note_replaced
from shardwise.api.wrappers import check_unwrapped
from shardwise.comm import communicator
from shardwise.core.checks import as_int
from shardwise.core.errors import LayoutError
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh, as_mesh, mesh_or_current
from shardwise.core.placement import Partial, Placement, Replicate
from shardwise.dtensor.local_shards import check_supported, shard_stride, waited
from shardwise.dtensor.tensor import DTensor, wrap
from shardwise.redistribute.autograd import redistribute_local
from shardwise.torch_internals import own_buffers, own_parameters, pytree

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

Placements = Sequence[Placement]


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | TorchMesh | None = None,
    placements: Placements | None = None,
    *,
    src_data_rank: int | None = 0,
    shard_order: Any = None,
) -> DTensor:
    """Make a DTensor of a tensor that one rank, or every rank, has whole.

    Arguments:
        tensor: a leaf. On ranks other than the source only its shape, its dtype and the order of
            its dims in memory (such as `torch.channels_last`) count.
        device_mesh: the mesh of the result; by default that of `with mesh:`. On a rank outside of
            it the result has no data, and operators on it do nothing.
        placements: one per axis of the mesh; all `Replicate()` by default.
        src_data_rank: the position, along every axis, of the rank whose data is distributed; None
            lets each rank take its shard of its own tensor, without communication.
        shard_order: for each dim that several axes split, those axes outer to inner.
    """
    mesh = mesh_or_current(device_mesh)
    if not isinstance(tensor, torch.Tensor):
        raise LayoutError(f"tensor: expected a tensor, got {type(tensor).__name__}")
    tensor = waited(tensor)
    check_supported("tensor", tensor)
    placements = [Replicate()] * mesh.ndim if placements is None else placements
    layout = Layout.from_placements(mesh, tensor.shape, placements, shard_order)
    if isinstance(tensor, DTensor):
        if tensor._layout is layout:
            return tensor
        raise LayoutError(
            f"tensor: it is a DTensor {tensor._layout!r} already; "
            "move it with tensor.redistribute(mesh, placements)"
        )
    if not tensor.is_leaf:
        raise LayoutError(
            "tensor: expected a leaf, got a tensor with a history; detach() it, or use "
            "DTensor.from_local(tensor, mesh).redistribute(...), which is differentiable"
        )
    source = None if src_data_rank is None else _as_source(src_data_rank, mesh)
    if mesh.get_coordinate() is None:
        return DTensor._outside(layout, tensor.detach(), requires_grad=tensor.requires_grad)
    with torch.no_grad():
        whole = tensor.detach()
        if mesh.is_abstract or whole.is_meta:
            local = whole.new_empty(layout.local_shape())
        elif source is None:
            return own_shard(tensor, layout)
        else:
            local = _scatter_shard(whole, layout, source)
        result = wrap(_in_order_of(whole, local, layout), layout)
    result.requires_grad = tensor.requires_grad
    return result


def _in_order_of(whole: torch.Tensor, local: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return a shard with its dims in memory in the order of the whole tensor: such as
    `torch.channels_last`. A tensor with gaps or overlaps gives a contiguous shard."""
    if whole.is_contiguous():
        return local
    strides = shard_stride(layout, whole.stride())
    if strides is None or strides == local.stride():
        return local
    return local.new_empty_strided(local.shape, strides).copy_(local)


def own_shard(tensor: torch.Tensor, layout: Layout) -> DTensor:
    """Make a DTensor of a tensor that every rank has whole: each takes its shard, as a copy."""
    if layout.mesh.get_coordinate() is None:
        return DTensor._outside(layout, tensor.detach(), requires_grad=tensor.requires_grad)
    with torch.no_grad():
        whole = tensor.detach()
        local: torch.Tensor = redistribute_local(whole, Layout(layout.mesh, layout.shape), layout)
        shares = local.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        local = _in_order_of(whole, local.clone() if shares else local, layout)
        result = wrap(local, layout)
    result.requires_grad = tensor.requires_grad
    return result


def _as_source(src_data_rank: int, mesh: DeviceMesh) -> int:
    source = as_int(src_data_rank)
    if source is None or not 0 <= source < min(mesh.shape):
        raise LayoutError(
            f"src_data_rank: expected a position on every axis of {mesh!r}, or None; "
            f"got {src_data_rank!r}"
        )
    return source


def _scatter_shard(whole: torch.Tensor, layout: Layout, source: int) -> torch.Tensor:
    """Scatter from the source over the axes that split the tensor; then broadcast over the others.

    In a pending sum, the source contributes its data and the other ranks zeros.
    """
    mesh = layout.mesh
    place = mesh.get_coordinate()
    assert place is not None, "a rank outside takes no part"
    split = tuple(axis for axis, each in enumerate(layout.placements) if each.is_shard())
    others = tuple(axis for axis in range(mesh.ndim) if axis not in split)
    bare = layout.relaid(partial={})
    piece = whole.new_empty(bare.local_shape())
    if split and all(place[axis] == source for axis in others):
        group = communicator(mesh, split)
        root = group.ranks.index(
            mesh.rank_at([source if axis in split else place[axis] for axis in range(mesh.ndim)])
        )
        pieces = None
        if group.ranks[root] == mesh.get_rank():
            places = map(mesh.coordinate_of, group.ranks)
            pieces = [bare.piece_of(whole, place).contiguous() for place in places]
        piece = group.scatter(piece, pieces, root)
    elif not split:
        piece = whole.contiguous()
    if others:
        group = communicator(mesh, others)
        first = [source if axis in others else place[axis] for axis in range(mesh.ndim)]
        piece = group.broadcast(piece, group.ranks.index(mesh.rank_at(first)))
    elif not split:
        piece = piece.clone()
    return redistribute_local(piece, bare, layout)  # type: ignore[no-any-return]


def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | TorchMesh | None = None,
    partition_fn: Callable[[str, nn.Module, DeviceMesh], None] | None = None,
    input_fn: Callable[[nn.Module, Any, DeviceMesh], Any] | None = None,
    output_fn: Callable[[nn.Module, Any, DeviceMesh], Any] | None = None,
) -> nn.Module:
    """Make the parameters and buffers of a module DTensors, in place.

    Arguments:
        device_mesh: the mesh of the parameters; by default that of `with mesh:`.
        partition_fn: called with each submodule's name, the submodule and the mesh; it makes its
            parameters DTensors. Parameters that it leaves plain are replicated; tied parameters
            stay tied.
        input_fn: called with the module, the tuple of its inputs and the mesh before each forward.
        output_fn: called with the module, its outputs and the mesh after each forward.
    """
    mesh = mesh_or_current(device_mesh)
    check_unwrapped("distribute_module", module)
    slots = [
        (parameter, submodule, key)
        for submodule in module.modules()
        for key, parameter in own_parameters(submodule).items()
        if parameter is not None
    ]
    if partition_fn is not None:
        for name, submodule in module.named_modules():
            partition_fn(name, submodule, mesh)
    made: dict[nn.Parameter, nn.Parameter] = {}
    for parameter, submodule, key in slots:
        now = own_parameters(submodule).get(key)
        if isinstance(now, DTensor):
            made[parameter] = now
            if now is not parameter:
                note_replaced(parameter, key)
    for submodule in module.modules():
        _replicate(submodule, mesh, made)
    if input_fn is not None:
        module.register_forward_pre_hook(functools.partial(_enter, input_fn, mesh))
    if output_fn is not None:
        module.register_forward_hook(functools.partial(_leave, output_fn, mesh))
    return module


# Hooks are no closures, so that modules can be pickled.


def _enter(input_fn: Any, mesh: DeviceMesh, module: nn.Module, inputs: Any) -> Any:
    return input_fn(module, inputs, mesh)


def _leave(output_fn: Any, mesh: DeviceMesh, module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return output_fn(module, outputs, mesh)


def _replicate(module: nn.Module, mesh: DeviceMesh, made: dict[nn.Parameter, nn.Parameter]) -> None:
    """Replicate a module's own parameters and buffers that are still plain; not of submodules.

    Arguments:
        made: maps each plain parameter to the DTensor that replaces it; new ones are added. So a
            parameter that modules share is replaced once.
    """
    for name, parameter in list(own_parameters(module).items()):
        if parameter is not None and not isinstance(parameter, DTensor):
            if parameter not in made:
                whole = distribute_tensor(parameter.detach(), mesh)
                made[parameter] = nn.Parameter(whole, parameter.requires_grad)
                note_replaced(parameter, name)
            module.register_parameter(name, made[parameter])
    for name, buffer in list(own_buffers(module).items()):
        if buffer is not None and not isinstance(buffer, DTensor):
            own_buffers(module)[name] = distribute_tensor(buffer, mesh)


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
