"""The world of a rank: its number, the number of ranks, how to reach them, what it made of meshes.

Values such as a mesh must know on which rank they are used, but not how ranks communicate. So this
module only defines the interface; an engine of `shardwise.comm` implements it. A *simulated* rank
is a thread with a world of its own; otherwise the world belongs to the process.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from shardwise.core import errors

if TYPE_CHECKING:
    from shardwise.comm.interface import Communicator
    from shardwise.core.mesh import DeviceMesh
    from shardwise.core.rank_grid import Strides


Link = tuple[tuple[int, ...], str]
"""A connection of ranks: their global numbers in order, and the name of the channel."""


class Backend(NamedTuple):
    """How a process group is made."""

    name: str | None = None
    """The backend, such as "gloo"; by default that of the default process group."""
    options: Any = None
    """Options of that backend, of torch's type."""


class FlattenedAxis(NamedTuple):
    """An axis of a mesh that `flatten` made of others."""

    strides: Strides
    """How the axis steps through the ranks of the mesh."""
    times_made: int
    """How often the mesh had been made."""


class World(ABC):
    """The ranks of a program, seen by one of them. Engines derive from it."""

    is_simulated = False
    """Whether the ranks are threads of one process."""
    has_process_groups = True
    """Whether torch.distributed knows these ranks."""
    is_stand_in = False
    """Whether this is a rank outside of a mesh that acts as one of the mesh."""
    carries_values = True
    """Whether tensors have values and collectives are run."""
    shares_random_state = False
    """Whether all ranks draw from one default generator."""
    draws_whole = False
    """Whether ranks draw whole random tensors by torch's operators and keep their shards."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.lock = threading.RLock()
        """Held while communicators and process groups are made, so that threads agree."""
        self.sources: WeakKeyDictionary[DeviceMesh, dict[DeviceMesh, None]] = WeakKeyDictionary()
        """All meshes that this rank cut each mesh from, the latest last. `lineage` uses it."""
        self.flattened: WeakKeyDictionary[DeviceMesh, dict[str, FlattenedAxis]] = (
            WeakKeyDictionary()
        )
        """The flattened axes of each mesh, by name. `lineage` uses it."""
        self.times_made: WeakKeyDictionary[DeviceMesh, int] = WeakKeyDictionary()
        """How often this rank made each mesh that is not cut from another."""
        self.backends: dict[tuple[tuple[int, ...], str], Backend] = {}
        """How the process group of an axis is made, by the ranks and the name of the axis; without
        an entry, as the default process group."""
        self.communicators: dict[tuple[DeviceMesh, tuple[int, ...], str], Communicator] = {}
        """The communicators made so far, by mesh, axes and channel."""
        self.aborted: WeakSet[DeviceMesh] = WeakSet()
        """Meshes that this rank aborted and has not made again."""
        self.facts: dict[Any, dict[Any, int]] = {}
        """How often this rank has stated each fact that others must state alike, by the mesh or
        group of ranks that state it."""
        self.stand_ins: dict[int, World] = {}
        """The worlds in which this rank acts as a rank of a mesh that it is not in."""
        self.unfinished: list[Any] = []
        """Redistributions of several collectives that are under way, in the order of their
        start."""

    @abstractmethod
    def describe(self) -> str:
        """Return a few words on the kind of these ranks and how to start others."""

    @abstractmethod
    def communicator(
        self, ranks: tuple[int, ...], axes: tuple[str, ...], channel: str = ""
    ) -> Communicator:
        """Return the communicator of these ranks; `axes` names the mesh axes they lie along."""

    def first_value(
        self, ranks: tuple[int, ...], name: Any, number: int, value: int
    ) -> tuple[int, int] | None:
        """Return which of these ranks was the first to bring a value, and that value.

        Each of them brings one for this name and number. None where the answer would need
        communication.
        """
        return None

    def set_backend(self, ranks: tuple[int, ...], axis: str, backend: Backend) -> None:
        """Set how the process group of an axis is made that has these ranks and this name."""
        if backend == Backend():
            self.backends.pop((ranks, axis), None)
        else:
            self.backends[ranks, axis] = backend

    def process_group(self, ranks: tuple[int, ...], axis: str | None = None) -> Any:
        """Return the torch process group of exactly these ranks; its members make it on demand.

        Arguments:
            axis: the axis that the ranks lie along, whose backend counts.
        """
        raise self._refusal("process group")

    def adopt(self, group: Any) -> tuple[int, ...]:
        """Use a torch process group that the user made; return its global ranks."""
        raise self._refusal("process group")

    def root_of_torch_mesh(self, mesh: Any) -> Any:
        """Return the torch DeviceMesh that one of torch was cut from, or itself."""
        return mesh

    def torch_mesh(self, mesh: DeviceMesh) -> Any:
        """Return the torch DeviceMesh of the same ranks and process groups."""
        raise self._refusal("DeviceMesh")

    def abort(self, meshes: Sequence[DeviceMesh]) -> None:
        """End the communication over a root mesh, the first of `meshes`, and its sub-meshes."""
        links = {
            (mesh.ranks_along([axis]), "")
            for mesh in meshes
            if mesh.get_coordinate() is not None
            for axis in range(mesh.ndim)
        }
        along_one_axis = frozenset(links)
        # No lock: another thread may hold it while it waits for a rank that is gone.
        for key, found in list(self.communicators.items()):
            if key[0] in meshes:
                found.has_ended = True
                links.add((found.ranks, key[2]))
                self.communicators.pop(key, None)
        self.aborted.update(meshes)
        self._end(links, along_one_axis)

    def _end(self, links: Set[Link], along_one_axis: Set[Link]) -> None:  # noqa: B027 - see below
        """Make all collectives over these links fail; engines without real ranks do nothing.

        Arguments:
            links: the connections to end.
            along_one_axis: the links that belong to one axis of a mesh.
        """

    def _refusal(self, what: str) -> errors.MeshError:
        return errors.MeshError(
            f"there is no torch {what} here: {self.describe()}. "
            "sw.communicator(mesh, axes) talks on every kind of ranks"
        )


class _ThreadWorld(threading.local):
    world: World | None = None


_here = _ThreadWorld()


def _no_engine(start: bool) -> World:
    raise AssertionError("shardwise.comm provides the world of a process")


_process_world: Callable[[bool], World] = _no_engine


def current(start: bool = True) -> World:
    """Return the world of the calling rank; with `start`, join the world that torchrun set up."""
    return _here.world or _process_world(start)


def provide(process_world: Callable[[bool], World]) -> None:
    """Set the function that finds the world of a process; its argument is `start`."""
    global _process_world
    _process_world = process_world


@contextmanager
def use(world: World) -> Iterator[None]:
    """Make `world` the world of the calling thread."""
    before, _here.world = _here.world, world
    try:
        yield
    finally:
        _here.world = before


def _whereabouts() -> str:
    here = current(start=False)
    return f"rank {here.rank} of {here.size}" if here.size > 1 else ""


errors.whereabouts = _whereabouts
