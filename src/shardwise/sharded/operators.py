"""Torch functions on sharded tensors.

In this order: what a user has registered; what is read off the description; what goes shard by
shard however the tensor is cut (`methods`); everything else as DTensors, where the shards are a
layout, by the rules of `shardwise.rules`. Where they are not: questions about values are asked of
the whole, pointwise functions go shard by shard, random numbers by way of a layout, and a few
reductions are made of the shards'. The rest says what to reshard to.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from types import MethodType
from typing import Any

import torch
from torch.nn import functional as F

from shardwise.dispatch.arguments import check_same
from shardwise.dispatch.scalars import asked
from shardwise.dispatch.state import state
from shardwise.layout import Layout
from shardwise.mesh import DeviceMesh
from shardwise.rules.calls import tensors_in
from shardwise.rules.foreach import one_by_one
from shardwise.rules.pointwise import names
from shardwise.rules.registry import lookup, name_of
from shardwise.rules.spellings import SPELLINGS
from shardwise.sharded import as_dtensors, converting, filling, lookups, pointwise, reducing
from shardwise.sharded.errors import ShardedTensorError
from shardwise.sharded.methods import OWN
from shardwise.sharded.registered import is_registered, registered
from shardwise.sharded.specs import summary
from shardwise.sharded.tensor import ShardedTensor
from shardwise.tensor import DTensor
from shardwise.torch_internals import locally, pytree


def dispatch(
    cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    """What `__torch_function__` does: run `func` on sharded tensors."""
    kwargs = kwargs or {}
    if func in _DESCRIBED and not is_registered(func):
        return locally(func, types, args, kwargs)
    tensors = [each for each in tensors_in((args, kwargs)) if isinstance(each, ShardedTensor)]
    if not tensors:
        return locally(func, types, args, kwargs)
    first = tensors[0]
    custom = registered(func, first._sharding_spec)
    if custom is not None:
        return custom(types, args, kwargs, first._process_group)
    if func in _DESCRIBED:  # registered for other specs
        return locally(func, types, args, kwargs)
    own = OWN.get(func)
    if own is not None:
        result = own(*args, **kwargs)
        if result is not NotImplemented:
            return result
    _check_groups(func, tensors)
    _check_targets(func, args, kwargs)
    if func in _LOOKUPS:
        _check_indices(func, args, kwargs, first)
    mesh = _mesh_of_dtensors(args, kwargs)
    layouts = _layouts(tensors, mesh)
    if layouts is not None:
        return as_dtensors.run(func, args, kwargs, tensors, layouts)
    if mesh is not None or len({each.dim() > 0 for each in tensors}) > 1:
        args, kwargs, are_fewer = _with_whole_scalars(func, args, kwargs)
        if are_fewer:
            return func(*args, **kwargs)
    if mesh is not None:
        result = lookups.run(func, args, kwargs)
        if result is None:
            raise _refusal_beside(func, tensors, mesh)
        return result
    return _run_on_shards(func, args, kwargs, tensors)


def _run_on_shards(func: Any, args: Any, kwargs: Any, tensors: list[ShardedTensor]) -> Any:
    """Run a function of shards that are no layout, if it is one of those that can."""
    handler: Any = getattr(lookup(func), "handler", None)
    if handler is asked:
        return func(*(_whole(each) for each in args), **kwargs)
    if handler in SPELLINGS:
        return handler(func, args, kwargs)
    if name_of(func).startswith("_foreach_"):
        results = one_by_one(func, args, kwargs)
        return args[0] if func.__name__.endswith("_") else results
    result = pointwise.run(func, args, kwargs, tensors)
    if result is None:
        result = lookups.run(func, args, kwargs)
    for kind in (filling, reducing):
        if result is None:
            result = kind.run(func, args, kwargs, tensors[0])
    if result is not None:
        return result
    args, kwargs, are_fewer = _with_whole_scalars(func, args, kwargs)
    if not are_fewer:
        raise _refusal(func, tensors)
    return func(*args, **kwargs)


def _with_whole_scalars(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, bool]:
    """The arguments with plain tensors in place of sharded ones of no dims, which are on one rank
    and no layout, but for what is written to; and whether there were any."""
    targets = list(_targets(func, args, kwargs))
    are_fewer = False

    def whole(value: Any) -> Any:
        nonlocal are_fewer
        if not isinstance(value, ShardedTensor) or value.dim() or any(x is value for x in targets):
            return value
        are_fewer = True
        return value.full_tensor()

    args, kwargs = pytree.tree_map(whole, (args, kwargs))
    return args, kwargs, are_fewer


def _mesh_of_dtensors(args: Any, kwargs: Any) -> DeviceMesh | None:
    """Where the DTensors among the arguments are, if there are any."""
    found = (each for each in tensors_in((args, kwargs)) if isinstance(each, DTensor))
    first = next(found, None)
    return None if first is None else first.device_mesh


def _layouts(tensors: list[ShardedTensor], mesh: DeviceMesh | None) -> list[Layout] | None:
    """What the shards of each are, on one mesh: this one, if there is."""
    if mesh is not None:
        given = [converting.layout_of(each, mesh) for each in tensors]
        return None if None in given else given  # type: ignore[return-value]
    layouts = [converting.layout_of(each) for each in tensors]
    meshes = {None if each is None else each.mesh: None for each in layouts}
    if None in meshes:
        return None
    for mesh in meshes:
        if len(meshes) > 1:
            layouts = [converting.layout_of(each, mesh) for each in tensors]
        if None not in layouts:
            return layouts  # type: ignore[return-value]
    return None


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, ShardedTensor) else value


def _targets(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors that a call writes to."""
    yield from tensors_in(kwargs.get("out"))
    if _writes(func):
        yield from tensors_in(args[:1])


@lru_cache(maxsize=1024)
def _writes(func: Any) -> bool:
    """Whether a function writes to its input."""
    name = getattr(func, "__name__", "")
    is_marked = name.endswith("_") and not name.endswith("__")
    return is_marked or pointwise.is_in_place(func) or func is torch.Tensor.__setitem__


def _check_targets(func: Any, args: Any, kwargs: Any) -> None:
    """Refuse to write to a plain tensor, which a rank could not do with the shards it has."""
    if _name(func).startswith("_foreach_"):
        return  # of several tensors each is beside others of its own
    for each in _targets(func, args, kwargs):
        if not isinstance(each, ShardedTensor | DTensor):
            raise ShardedTensorError(
                f"{_name(func)}: cannot write to a plain tensor what is made of sharded ones; make "
                "a new one, and plain.copy_(result) takes it, or take them whole: x.full_tensor()"
            )


def _check_groups(func: Any, tensors: list[ShardedTensor]) -> None:
    ranks = tensors[0]._group.ranks
    for each in tensors:
        if each._group.ranks != ranks:
            raise ShardedTensorError(
                f"{_name(func)}: expected sharded tensors of one process group, got one of "
                f"ranks {ranks} and one of {each._group.ranks}"
            )


_LOOKUPS = {F.embedding, F.embedding_bag, torch.embedding, torch.embedding_bag}


def _check_indices(func: Any, args: Any, kwargs: Any, weight: ShardedTensor) -> None:
    """Refuse plain indices that are not the same on every rank.

    Elsewhere in torch each rank looks up indices of its own in a sharded table; here a plain tensor
    is the same on every rank, and one that is not would silently give wrong rows.
    """
    if state.plain_tensors != "assume":
        return  # looked at by the dispatch of DTensors
    for each in tensors_in((args, kwargs)):
        if type(each) is torch.Tensor and not each.is_floating_point():
            check_same(_name(func), each, weight._group.mesh(weight.device.type))


def _name(func: Any) -> str:
    owner: Any = getattr(func, "__self__", None)  # of the getter of a property, such as `T`
    return str(owner.__name__) if hasattr(owner, "__objclass__") else name_of(func)


def _refusal(func: Any, tensors: list[ShardedTensor]) -> ShardedTensorError:
    odd = next((each for each in tensors if converting.layout_of(each) is None), None)
    if odd is not None:
        return ShardedTensorError(
            f"{_name(func)}: needs shards that are a layout of a DTensor, and those of "
            f"{summary(odd._sharding_spec)} are not: only pointwise functions work shard by shard, "
            f"on tensors with the same shards; {converting.suggested(odd)}"
        )
    specs = " and ".join({summary(each._sharding_spec): None for each in tensors})
    way = converting.suggested(tensors[0]).removesuffix(" makes them so")
    return ShardedTensorError(
        f"{_name(func)}: got sharded tensors whose shards lie on different ranks, of {specs}; "
        f"reshard all of them alike, as by {way}"
    )


def _refusal_beside(
    func: Any, tensors: list[ShardedTensor], mesh: DeviceMesh
) -> ShardedTensorError:
    odd = next(each for each in tensors if converting.layout_of(each, mesh) is None)
    way = converting.suggested(odd, mesh)
    if mesh.ndim > 1:  # such chunks may be no layout there
        way += ", and x.to_dtensor().redistribute(mesh, placements) takes it there"
    return ShardedTensorError(
        f"{_name(func)}: got a DTensor on {mesh!r}, and a sharded tensor whose shards are no "
        f"layout there: {summary(odd._sharding_spec)}; {way}"
    )


# ---- what is read off the description

_Tensor: Any = torch.Tensor
_DESCRIBED: set[Any] = {
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

# Bound once, as for DTensors.
ShardedTensor.__torch_function__ = MethodType(dispatch, ShardedTensor)  # type: ignore[method-assign]
