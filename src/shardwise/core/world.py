"""The world of a rank: its number, the number of ranks, and how to reach them.

Values such as a mesh must know on which rank they are used, but not how ranks communicate. So this
module only defines the interface; an engine of `shardwise.comm` implements it. A *simulated* rank
is a thread with a world of its own; otherwise the world belongs to the process.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from shardwise.core import errors

if TYPE_CHECKING:
    from shardwise.comm.interface import Communicator
    from shardwise.core.mesh import DeviceMesh


Link = tuple[tuple[int, ...], str]
"""A connection of ranks: their global numbers in order, and the name of the channel."""


class World(ABC):
    """The ranks of a program, seen by one of them. Engines derive from it."""

    is_simulated = False
    """Whether the ranks are threads of one process."""
    carries_values = True
    """Whether tensors have values and collectives are run."""
    draws_whole = False
    """Whether ranks draw whole random tensors by torch's operators and keep their shards."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.lock = threading.RLock()
        """Held while communicators and process groups are made, so that threads agree."""
        self.roots: WeakKeyDictionary[DeviceMesh, DeviceMesh] = WeakKeyDictionary()
        """The root of each sub-mesh that this rank made."""
        self.flattened: WeakKeyDictionary[DeviceMesh, dict[str, tuple[str, ...]]] = (
            WeakKeyDictionary()
        )
        """The axes behind the names of flattened axes, by root mesh."""
        self.communicators: dict[tuple[DeviceMesh, tuple[int, ...], str], Communicator] = {}
        """The communicators made so far, by mesh, axes and channel."""
        self.aborted: WeakSet[DeviceMesh] = WeakSet()
        """Root meshes that this rank aborted and has not made again."""
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

    def process_group(self, ranks: tuple[int, ...]) -> Any:
        """Return the torch process group of exactly these ranks; its members make it on demand."""
        raise self._refusal("process group")

    def adopt(self, group: Any) -> tuple[int, ...]:
        """Use a torch process group that the user made; return its global ranks."""
        raise self._refusal("process group")

    def torch_mesh(self, mesh: DeviceMesh) -> Any:
        """Return the torch DeviceMesh of the same ranks and process groups."""
        raise self._refusal("DeviceMesh")

    def abort(self, meshes: Sequence[DeviceMesh]) -> None:
        """End the communication over a root mesh, the first of `meshes`, and its sub-meshes."""
        root, *_ = meshes
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
        self.aborted.add(root)
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
