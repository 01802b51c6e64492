"""Collectives: one interface (`interface`), and an engine for each kind of rank.

`c10d` serves real ranks (torch.distributed), `simulated` the threads of `sw.simulate`, `offline`
abstract meshes and groups of one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardwise.comm.buffers import is_large
from shardwise.comm.interface import Communicator
from shardwise.comm.offline import AbstractCommunicator, AloneCommunicator, StandInWorld
from shardwise.comm.pending import Pending
from shardwise.comm.process_groups import process_world
from shardwise.comm.trace import Cause, Event, listen
from shardwise.core import world
from shardwise.core.checks import as_int
from shardwise.core.errors import MeshError
from shardwise.core.lineage import check_not_aborted
from shardwise.core.mesh import Axis, DeviceMesh, as_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

__all__ = [
    "Cause",
    "Communicator",
    "Event",
    "Pending",
    "carries_values",
    "communicator",
    "is_large",
    "listen",
    "standing_in",
]

world.provide(process_world)


def communicator(
    mesh: DeviceMesh | TorchMesh,
    axes: Axis | Sequence[Axis] | None = None,
    *,
    rank: int | None = None,
    channel: str = "",
) -> Communicator:
    """Return the collectives of the calling rank along one axis of a mesh, or several merged.

    The first call on real ranks makes their process group, so all of its members must call it.

    Arguments:
        mesh: the mesh of the ranks.
        axes: by name or position, the first varying slowest; all by default.
        rank: on an abstract mesh, the rank to act as (default 0).
        channel: any name. Collectives on different channels are independent of each other: the
            ranks of a group must call the same ones in the same order only within a channel.

    Example:
        >>> communicator(mesh, "tp").all_reduce(x)
        >>> communicator(mesh, ("dp", "tp")).all_gather(x, dim=1)
    """
    if type(axes) is tuple and type(mesh) is DeviceMesh and rank is None and not mesh.is_abstract:
        # a quick answer, as every move asks for it
        found = world.current().communicators.get((mesh, axes, channel))
        if found is not None and found.is_usable:
            return found
    mesh = as_mesh(mesh)
    if axes is None:
        axes = range(mesh.ndim)
    elif isinstance(axes, int | str):
        axes = (axes,)
    elif not isinstance(axes, Sequence):
        raise MeshError(f"axes: expected names or positions of axes, got {axes!r}")
    positions = tuple(map(mesh.axis, axes))
    if mesh.is_abstract:
        return _abstract(mesh, positions, 0 if rank is None else rank)
    if rank is not None:
        raise MeshError(f"rank: expected None, as {mesh!r} has real ranks; got {rank!r}")
    own_world = world.current()
    key = mesh, positions, channel
    found = own_world.communicators.get(key)
    if found is None or not found.is_usable:
        with own_world.lock:
            found = own_world.communicators.get(key)
            if found is None or not found.is_usable:
                found = _made(own_world, mesh, positions, channel)
                own_world.communicators[key] = found
    return found


def carries_values(mesh: DeviceMesh) -> bool:
    """Return whether tensors on a mesh have values, so that code may read them to decide what to
    send.

    They have none on an abstract mesh, and where collectives are only recorded.
    """
    return not mesh.is_abstract and mesh.device_type != "meta" and world.current().carries_values


@contextmanager
def standing_in(mesh: DeviceMesh) -> Iterator[None]:
    """Act as the first rank of a mesh that this rank is not in, on meta tensors.

    So operators find the shapes, dtypes and layouts that the ranks of the mesh find.
    """
    here = world.current()
    first = int(mesh.mesh.flatten()[0])
    with world.use(here.stand_ins.setdefault(first, StandInWorld(first, here.size))):
        yield


def _made(
    own_world: world.World, mesh: DeviceMesh, positions: tuple[int, ...], channel: str
) -> Communicator:
    check_not_aborted(mesh)
    ranks = mesh.ranks_along(positions)
    if max(ranks) >= own_world.size:  # the mesh was made in another world
        raise MeshError(
            f"mesh: expected ranks 0 to {own_world.size - 1}, got {mesh!r}; {own_world.describe()}"
        )
    return own_world.communicator(ranks, tuple(map(mesh.axis_name, positions)), channel)


def _abstract(mesh: DeviceMesh, positions: tuple[int, ...], rank: int) -> Communicator:
    number = as_int(rank)
    coordinate = None if number is None else mesh.coordinate_of(number)
    if coordinate is None:
        raise MeshError(f"rank: expected one of {mesh!r}, got {rank!r}")
    ranks = mesh.ranks_along(positions, coordinate)
    names = tuple(map(mesh.axis_name, positions))
    engine = AloneCommunicator if len(ranks) == 1 else AbstractCommunicator
    return engine(ranks, ranks.index(rank), names)
