"""Dispatch of torch functions on sharded tensors.

`dispatch` tries, in this order: operators that users have registered; properties that the
description tells; functions that run however the tensor is cut (`methods`); all functions of
DTensors, if the shards form a layout, by the rules of `shardwise.rules`. If they form none:
questions about values are answered by the whole tensor, pointwise functions run shard by shard,
random numbers are drawn for a layout, and a few reductions combine the shards (`per_shard_ops`).
Other functions are refused, with a spec to reshard to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import lru_cache
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from shardwise.core.errors import ShardedTensorError
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Shard
from shardwise.core.tensor_state import ensure_state
from shardwise.dispatch.scalars import run_on_whole
from shardwise.dtensor.call_args import check_same_on_ranks
from shardwise.dtensor.state import state
from shardwise.dtensor.tensor import DTensor, tensors_in, unwrap
from shardwise.dtensor.writes import check_writable
from shardwise.rules.pointwise.elementwise import ALIASES, names
from shardwise.rules.pointwise.foreach import one_by_one
from shardwise.rules.registry import lookup, name_of
from shardwise.sharded import as_dtensor, embedding, per_shard_ops
from shardwise.sharded.methods import METHODS, find_custom_op, has_custom_op
from shardwise.sharded.specs import format_spec
from shardwise.sharded.tensor import ShardedTensor, as_full_tensor
from shardwise.torch_internals import base_of, locally, pytree, version_of


def dispatch(
    cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    """Run a torch function on sharded tensors: the `__torch_function__` of the class."""
    kwargs = kwargs or {}
    if func in _PROPERTIES and not has_custom_op(func):
        return locally(func, types, args, kwargs)
    tensors = [each for each in tensors_in((args, kwargs)) if isinstance(each, ShardedTensor)]
    if not tensors:
        return locally(func, types, args, kwargs)
    first = tensors[0]
    custom = find_custom_op(func, first._sharding_spec)
    if custom is not None:
        return custom(types, args, kwargs, first._process_group)
    if func in _PROPERTIES:  # registered for other specs
        return locally(func, types, args, kwargs)
    method = METHODS.get(func)
    if method is not None:
        result = method(*args, **kwargs)
        if result is not NotImplemented:
            return result
    _check_groups(func, tensors)
    _check_targets(func, args, kwargs)
    if func in _EMBEDDINGS:
        _check_indices(func, args, kwargs, first)
    mesh = _mesh_of_dtensors(args, kwargs)
    layouts = _common_layouts(tensors, mesh)
    if layouts is not None:
        return _run_on_dtensors(func, args, kwargs, tensors, layouts)
    if mesh is not None or len({each.dim() > 0 for each in tensors}) > 1:
        args, kwargs, found_any = _gather_scalars(func, args, kwargs)
        if found_any:
            return func(*args, **kwargs)
    if mesh is not None:
        result = embedding.run(func, args, kwargs)
        if result is None:
            raise _refusal_beside(func, tensors, mesh)
        return result
    return _run_on_shards(func, args, kwargs, tensors)


def _run_on_shards(func: Any, args: Any, kwargs: Any, tensors: list[ShardedTensor]) -> Any:
    """Run a function on shards that form no layout, or refuse it."""
    handler: Any = getattr(lookup(func), "handler", None)
    if handler is run_on_whole:
        return func(*(as_full_tensor(each) for each in args), **kwargs)
    if handler in ALIASES:
        return handler(func, args, kwargs)
    if name_of(func).startswith("_foreach_"):
        results = one_by_one(func, args, kwargs)
        return args[0] if func.__name__.endswith("_") else results
    result = per_shard_ops.run_pointwise(func, args, kwargs, tensors)
    if result is None:
        result = embedding.run(func, args, kwargs)
    if result is None:
        result = per_shard_ops.run_filling(func, args, kwargs, tensors[0])
    if result is None:
        result = per_shard_ops.run_reduction(func, args, kwargs, tensors[0])
    if result is not None:
        return result
    args, kwargs, found_any = _gather_scalars(func, args, kwargs)
    if not found_any:
        tensors[0]._group.check_inside()
        raise _refusal(func, tensors)
    return func(*args, **kwargs)


def _gather_scalars(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, bool]:
    """Replace sharded tensors without dims, which one rank holds and which form no layout, by plain
    tensors, except those that the call writes to. Return whether there were any."""
    targets = list(_targets(func, args, kwargs))
    found_any = False

    def gather(value: Any) -> Any:
        nonlocal found_any
        if not isinstance(value, ShardedTensor) or value.dim() or any(x is value for x in targets):
            return value
        found_any = True
        return value.full_tensor()

    args, kwargs = pytree.tree_map(gather, (args, kwargs))
    return args, kwargs, found_any


def _mesh_of_dtensors(args: Any, kwargs: Any) -> DeviceMesh | None:
    """Return the mesh of the DTensors among the arguments; None if there are none."""
    found = (each for each in tensors_in((args, kwargs)) if isinstance(each, DTensor))
    first = next(found, None)
    return None if first is None else first.device_mesh


def _common_layouts(tensors: list[ShardedTensor], mesh: DeviceMesh | None) -> list[Layout] | None:
    """Return the layouts of all tensors on one mesh, the given one if there is; None if there are
    none."""
    if mesh is not None:
        given = [as_dtensor.find_layout(each, mesh) for each in tensors]
        return None if None in given else given  # type: ignore[return-value]
    layouts = [as_dtensor.find_layout(each) for each in tensors]
    meshes = {None if each is None else each.mesh: None for each in layouts}
    if None in meshes:
        return None
    for mesh in meshes:  # try to place all tensors on the mesh of one of them
        if len(meshes) > 1:
            layouts = [as_dtensor.find_layout(each, mesh) for each in tensors]
        if None not in layouts:
            return layouts  # type: ignore[return-value]
    return None


# ---- functions that run on DTensors in place of sharded tensors

_CONTAINERS = list, tuple, dict


def _run_on_dtensors(
    func: Any, args: Any, kwargs: Any, tensors: Sequence[ShardedTensor], layouts: list[Layout]
) -> Any:
    """Run a function on DTensors in place of the sharded tensors among its arguments.

    A result that is split is returned as a sharded tensor, and a result that is replicated or
    pending a reduction as a plain tensor. In a call that also has DTensors, results stay DTensors.

    Arguments:
        layouts: the layout that the shards of each of `tensors` form; all on one mesh.
    """
    by_id: dict[int, _StandIn] = {}
    for tensor, layout in zip(tensors, layouts, strict=True):
        if id(tensor) not in by_id:
            by_id[id(tensor)] = _StandIn.of(tensor, layout)
    keeps_dtensors = False

    def stand_in(value: Any) -> Any:
        nonlocal keeps_dtensors
        if isinstance(value, ShardedTensor):
            return by_id[id(value)].dtensor
        if isinstance(value, _CONTAINERS):
            return pytree.tree_map(stand_in, value)
        keeps_dtensors |= isinstance(value, DTensor)
        return value

    def as_result(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        for each in by_id.values():
            if each.dtensor is value:  # written to in place, or returned unchanged
                return each.tensor
        return value if keeps_dtensors else _as_sharded(value, tensors[0], layouts[0])

    given = [stand_in(each) for each in args]
    named = {name: stand_in(each) for name, each in kwargs.items()} if kwargs else kwargs
    result = func(*given, **named)
    for each in by_id.values():
        each.finish(func)
    return as_result(result) if type(result) is DTensor else pytree.tree_map(as_result, result)


class _StandIn(NamedTuple):
    """A DTensor in place of a sharded tensor."""

    tensor: ShardedTensor
    layout: Layout
    dtensor: DTensor
    copy: _JoinedCopy | None
    """The memory of the DTensor, if it is not the memory of the shard."""

    @staticmethod
    def of(tensor: ShardedTensor, layout: Layout) -> _StandIn:
        if as_dtensor.shares_memory(tensor):
            return _StandIn(tensor, layout, as_dtensor.wrap_as_dtensor(tensor, layout), None)
        # Tensors made in inference mode have no base and no version, by which writes are found.
        outside = (
            torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
        )
        with outside, torch.set_grad_enabled(torch.is_grad_enabled()):
            dtensor = as_dtensor.wrap_as_dtensor(tensor, layout)
            memory = locally(base_of, (), (dtensor,))
            copy = _JoinedCopy(memory, version_of(memory), memory.grad_fn)
        return _StandIn(tensor, layout, dtensor, copy)

    def finish(self, func: Any) -> None:
        """Copy in-place changes of the DTensor, and its `requires_grad`, to the sharded tensor.

        Called after `func` has run on the DTensor.
        """
        if self.copy is not None:
            memory, version, history = self.copy
            if version_of(memory) != version:
                for each in self.tensor._tensors_or_placeholder():
                    check_writable(name_of(func), each)
                was_recorded = memory.grad_fn is not history
                with torch.set_grad_enabled(was_recorded and torch.is_grad_enabled()):
                    as_dtensor.write_back(self.tensor, self.layout, memory)
            # Writes to views of this memory would be lost from now on: dispatch refuses them.
            ensure_state(memory).detached_by = name_of(func)
        if not self.tensor.requires_grad and self.dtensor.requires_grad:
            self.tensor._set_requires_grad_flag(True)


class _JoinedCopy(NamedTuple):
    """The memory that several shards were copied to, and its version and autograd node at that
    time, by which later writes are found."""

    memory: torch.Tensor
    version: int
    history: Any


def _as_sharded(result: DTensor, model: ShardedTensor, layout: Layout) -> torch.Tensor:
    """Return a split result as a sharded tensor, and any other result as a plain tensor.

    If the result has the layout of `model`, it is cut into the same shards.
    """
    if result.requires_grad and result.is_leaf:  # such as torch.rand_like(x, requires_grad=True)
        detached: Any = result.detach()
        return _as_sharded(detached, model, layout).requires_grad_()
    if result._layout is layout:
        return as_dtensor.from_local_piece(model, layout, unwrap(result))
    layout = result._layout
    if not any(layout.shard_order):
        return result.full_tensor()
    if any(not each.is_shard() for each in layout.placements):
        # The longest dim is split further, over the axes that do not split the tensor yet.
        dim = max(range(layout.ndim), key=lambda dim: layout.shape[dim])
        result = result.redistribute(
            placements=[
                each.without_order() if isinstance(each, Shard) else Shard(dim)
                for each in layout.placements
            ]
        )
    return as_dtensor.from_dtensor(type(model), result, model._group)


# ---- tensors that a call writes to, and refused calls


def _targets(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that a call writes to."""
    yield from tensors_in(kwargs.get("out"))
    if _writes(func):
        yield from tensors_in(args[:1])


@lru_cache(maxsize=1024)
def _writes(func: Any) -> bool:
    """Return whether a function writes to its input."""
    name = getattr(func, "__name__", "")
    is_marked = name.endswith("_") and not name.endswith("__")
    return is_marked or per_shard_ops.is_in_place(func) or func is torch.Tensor.__setitem__


def _check_targets(func: Any, args: Any, kwargs: Any) -> None:
    """Refuse to write to a plain tensor, which would need elements of other ranks."""
    if _name(func).startswith("_foreach_"):
        return  # it takes lists, and each tensor is combined with others of its kind
    for each in _targets(func, args, kwargs):
        if not isinstance(each, ShardedTensor | DTensor):
            raise ShardedTensorError(
                f"{_name(func)}: cannot write the result of sharded tensors to a plain tensor; "
                "copy it there with plain.copy_(result), or gather the inputs with x.full_tensor()"
            )


def _check_groups(func: Any, tensors: list[ShardedTensor]) -> None:
    ranks = tensors[0]._group.ranks
    for each in tensors:
        if each._group.ranks != ranks:
            raise ShardedTensorError(
                f"{_name(func)}: expected sharded tensors of one process group, got one of "
                f"ranks {ranks} and one of {each._group.ranks}"
            )


_EMBEDDINGS = {F.embedding, F.embedding_bag, torch.embedding, torch.embedding_bag}


def _check_indices(func: Any, args: Any, kwargs: Any, weight: ShardedTensor) -> None:
    """Refuse plain indices that are not the same on every rank.

    In torch each rank looks up indices of its own in a sharded table. Here a plain tensor is the
    same on every rank, and one that is not would silently give wrong rows.
    """
    if state.plain_tensors != "assume":
        return  # the dispatch of DTensors checks them
    for each in tensors_in((args, kwargs)):
        if type(each) is torch.Tensor and not each.is_floating_point():
            check_same_on_ranks(_name(func), each, weight._group.mesh(weight.device.type))


def _name(func: Any) -> str:
    owner: Any = getattr(func, "__self__", None)  # a property, if func is its getter
    return str(owner.__name__) if hasattr(owner, "__objclass__") else name_of(func)


def _refusal(func: Any, tensors: list[ShardedTensor]) -> ShardedTensorError:
    """Return the error for a function that cannot run on these shards."""
    odd = next((each for each in tensors if as_dtensor.find_layout(each) is None), None)
    if odd is not None:
        return ShardedTensorError(
            f"{_name(func)}: needs shards that are a layout of a DTensor, and those of "
            f"{format_spec(odd._sharding_spec)} are not: only pointwise functions work shard by "
            f"shard, on tensors with the same shards; {as_dtensor.suggest_reshard(odd)}"
        )
    specs = " and ".join({format_spec(each._sharding_spec): None for each in tensors})
    way = as_dtensor.suggest_reshard(tensors[0]).removesuffix(" makes them so")
    return ShardedTensorError(
        f"{_name(func)}: got sharded tensors whose shards are on different ranks: {specs}; "
        f"reshard all of them in the same way, such as {way}"
    )


def _refusal_beside(
    func: Any, tensors: list[ShardedTensor], mesh: DeviceMesh
) -> ShardedTensorError:
    """Return the error for a call with DTensors on a mesh where the shards form no layout."""
    odd = next(each for each in tensors if as_dtensor.find_layout(each, mesh) is None)
    way = as_dtensor.suggest_reshard(odd, mesh)
    if mesh.ndim > 1:  # there these chunks may form no layout
        way += ", and x.to_dtensor().redistribute(mesh, placements) takes it there"
    return ShardedTensorError(
        f"{_name(func)}: got a DTensor on {mesh!r}, and a sharded tensor whose shards are no "
        f"layout there: {format_spec(odd._sharding_spec)}; {way}"
    )


# ---- properties that the description tells

_Tensor: Any = torch.Tensor
_PROPERTIES: set[Any] = {
    *(getattr(_Tensor, name).__get__ for name in names("""
        shape dtype layout ndim itemsize nbytes requires_grad output_nr _version _base
        is_sparse is_sparse_csr is_quantized is_meta is_nested is_mkldnn is_cuda is_cpu is_xpu
        is_mps is_ipu is_maia is_mtia is_vulkan is_xla
    """)),
    *(getattr(_Tensor, name) for name in names("""
        size dim ndimension numel nelement element_size is_floating_point is_complex is_signed
        is_contiguous stride storage_offset is_inference is_conj is_neg dim_order
        is_coalesced get_device _is_view __len__ __dir__
    """)),
    *(getattr(torch, name) for name in names("""
        numel is_floating_point is_complex is_inference is_signed is_conj is_neg
    """)),
    _Tensor.requires_grad.__set__,
}  # fmt: skip

# Bound once, as for DTensors: faster than a classmethod.
ShardedTensor.__torch_function__ = MethodType(dispatch, ShardedTensor)  # type: ignore[method-assign]
