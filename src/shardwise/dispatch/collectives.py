"""Torch's own collectives that get DTensors: right, or refused.

`torch.distributed` sends and writes the memory of a tensor, and the memory of a DTensor is this
rank's shard. A tensor that is whole on every rank may be read: its shard is the tensor. It may be
written if all of its replicas get the same values. A shard is refused, except where the call treats
it as one part of the same call on the global tensor: an all-reduce or a broadcast over ranks that
hold the same shard of other tensors (data parallelism beside tensor parallelism).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version

from shardwise.core.errors import DispatchError
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh
from shardwise.core.tensor_state import forget_moves, state_of
from shardwise.dtensor.call_args import Args, Kwargs
from shardwise.dtensor.composite import decompose
from shardwise.dtensor.kinds import WaitingDTensor
from shardwise.dtensor.tensor import DTensor, tensors_in, unwrap
from shardwise.dtensor.writes import check_writable
from shardwise.rules.registry import Namespace, handler
from shardwise.torch_internals import as_local, base_of, operator_name, schema_of

# ---- calls of a process group


def check_read(name: str, tensor: DTensor) -> None:
    """Refuse to send a DTensor that is not whole on this rank."""
    tensor._renew()
    check_inside(name, tensor._layout)
    if not tensor._layout.is_whole:
        _refuse_shard(name, tensor._layout)


def check_inside(name: str, layout: Layout) -> None:
    """Refuse a tensor on a rank outside of its mesh, which has no data."""
    if layout.mesh.get_coordinate() is None:
        raise DispatchError(
            f"{name}: got a DTensor {layout!r} on {layout.mesh!r}, which this rank is not in: it "
            "has no data. Call it on the ranks of the mesh only: if mesh.get_coordinate() is not "
            "None"
        )


def check_written(
    name: str, tensor: DTensor, ranks: tuple[int, ...] | None, is_elementwise: bool
) -> None:
    """Refuse to write to a DTensor if that would make it wrong on this rank or on another.

    Arguments:
        ranks: the ranks that take part and get the same values; None if they get different values.
        is_elementwise: whether each value depends on the same element of every rank alone.
    """
    if type(tensor) is WaitingDTensor:
        tensor.wait()
    layout = tensor._layout
    check_inside(name, layout)
    fits = ranks is not None and _fits(layout.mesh, ranks)
    if not layout.is_whole:
        if not (
            fits and is_elementwise and not layout.partial and is_only_member(layout.mesh, ranks)
        ):
            _refuse_shard(name, layout)
    elif layout.mesh.size() > 1 and not fits:
        got = "each rank other values" if ranks is None else f"only ranks {list(ranks)} new values"
        raise DispatchError(
            f"{name}: would write to a DTensor {layout!r}, which is to be the same on every rank "
            f"of its mesh, and give {got}; use a plain tensor, such as x.to_local().clone()"
        )
    if type(tensor) is not DTensor:
        raise DispatchError(
            f"{name}: would write to a part of a DTensor {layout!r} that is a copy, as the dim was "
            "split; clone() it, and assign the result: x[i] = y"
        )
    check_writable(name, tensor)


def note_written(tensor: torch.Tensor) -> None:
    """Forget what was moved of a tensor that a collective writes to without changing its version.

    A plain tensor's version stays as it is, since autograd checks it, unless it is an alias of a
    DTensor: `x.to_local()`.
    """
    with as_local():
        is_ours = isinstance(tensor, DTensor) or isinstance(base_of(tensor), DTensor)
        if is_ours and not tensor.is_inference():
            increment_version(tensor)
    if state_of(tensor) is not None:
        forget_moves(tensor)


@lru_cache(maxsize=1024)
def _fits(mesh: DeviceMesh, ranks: tuple[int, ...] | None) -> bool:
    """Tell whether all replicas on a mesh get the same values if each rank calls with such ranks.

    They do if the ranks are all of the mesh, those along some of its axes, or if this rank is the
    only one of the mesh among them.
    """
    if ranks is None:
        return False
    if set(ranks) >= set(mesh.mesh.flatten().tolist()) or is_only_member(mesh, ranks):
        return True
    names = range(mesh.ndim)
    along = (axes for count in names for axes in combinations(names, count + 1))
    return any(set(mesh.ranks_along(axes)) == set(ranks) for axes in along)


def is_only_member(mesh: DeviceMesh, ranks: Sequence[int] | None) -> bool:
    """Tell whether this rank is the only one of a mesh among some ranks.

    Ranks of other meshes then hold the same parts of tensors of their own.
    """
    return set(ranks or ()) & set(mesh.mesh.flatten().tolist()) == {mesh.get_rank()}


def _refuse_shard(name: str, layout: Layout) -> NoReturn:
    pending = (
        "; x.redistribute(placements=[Replicate(), ...]) computes the pending reduction"
        if layout.partial
        else ""
    )
    raise DispatchError(
        f"{name}: got a DTensor {layout!r}, of which this rank holds a part, and would take the "
        "part for the tensor. Use x.full_tensor(), the whole tensor on every rank, or "
        f"x.to_local() to act on the shards on purpose{pending}"
    )


_FUNCTIONS = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "gather_single",  # since torch 2.15
    "irecv",
    "isend",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)
"""The functions of torch.distributed that call `__torch_function__`, some in some versions."""


@handler(*(getattr(dist, name) for name in _FUNCTIONS if hasattr(dist, name)))
def run_as_torch_does(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run a function of torch.distributed as for plain tensors: its process group checks them."""
    run: Any = decompose(inspect.unwrap(func))
    return run(*args, **kwargs)


# ---- operators: torch.distributed._functional_collectives, torch.ops.c10d


@handler(
    Namespace("_c10d_functional"),
    Namespace("_c10d_functional_autograd"),
    Namespace("c10d_functional"),
)
def run_functional(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run a functional collective on DTensors that are whole; its results are plain tensors."""
    name = f"torch.distributed._functional_collectives.{operator_name(func) or func.__name__}"
    if name.endswith(".wait_tensor"):
        return args[0]  # a DTensor never waits
    overloads = [func] if hasattr(func, "overloadpacket") else _overloads(func)
    if any(schema_of(each).is_mutable for each in overloads):
        _refuse_any(name, args, kwargs)
    return on_local_tensors(name, func, args, kwargs)


@handler(Namespace("c10d"), Namespace("symm_mem"))
def refuse_operator(func: Any, args: Args, kwargs: Kwargs) -> NoReturn:
    """Refuse an operator below torch.distributed, which does not say what it writes to."""
    _refuse_any(str(func), args, kwargs)


def on_local_tensors(name: str, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Call a collective that returns new tensors with the local tensors of whole DTensors."""

    def local(value: Any) -> Any:
        if isinstance(value, DTensor):
            check_read(name, value)
            return unwrap(value)
        return [local(each) for each in value] if isinstance(value, list | tuple) else value

    return func(*map(local, args), **{key: local(value) for key, value in kwargs.items()})


def _overloads(packet: Any) -> list[Any]:
    return [getattr(packet, each) for each in packet.overloads()]


def _refuse_any(name: str, args: Args, kwargs: Kwargs) -> NoReturn:
    found = next(each for each in tensors_in((args, kwargs)) if isinstance(each, DTensor))
    layout = found._layout
    if not layout.is_whole:
        _refuse_shard(name, layout)
    raise DispatchError(
        f"{name}: got a DTensor {layout!r}; call it with x.to_local(), this rank's plain tensor"
    )
