"""Who this rank is, and who else is there.

Values such as a mesh need to know the rank they are asked on, but must not know how ranks talk. So
this module only holds the answer; an engine (`shardwise.comm`) fills it in. A *simulated* rank is a
thread and has a world of its own; everywhere else the world belongs to the process.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from shardwise import errors

if TYPE_CHECKING:
    from shardwise.comm.interface import Communicator
    from shardwise.mesh import DeviceMesh


Way = tuple[tuple[int, ...], str]
"""How some ranks talk: their global ranks in order, and the name of the channel."""


class World(ABC):
    """The ranks of a program, seen by one of them. Engines derive from it."""

    is_simulated = False
    """Whether the ranks are threads of one process."""
    carries_values = True
    """Whether tensors have values, and collectives are run."""
    draws_whole = False
    """Whether ranks draw random tensors whole, by torch's operators, and take their pieces."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.lock = threading.RLock()
        """Held while communicators and process groups are made, so that threads agree."""
        self.roots: WeakKeyDictionary[DeviceMesh, DeviceMesh] = WeakKeyDictionary()
        """The mesh that a mesh was last cut from, for those that this rank derived."""
        self.flattened: WeakKeyDictionary[DeviceMesh, dict[str, tuple[str, ...]]] = (
            WeakKeyDictionary()
        )
        """The axes behind the names that `DeviceMesh.flatten` gave, by root mesh."""
        self.communicators: dict[tuple[DeviceMesh, tuple[int, ...], str], Communicator] = {}
        """Those made so far, by mesh, axes and channel."""
        self.aborted: WeakSet[DeviceMesh] = WeakSet()
        """Root meshes that this rank aborted and has not made again."""
        self.unfinished: list[Any] = []
        """Moves of several collectives that are under way, in the order they were started."""

    @abstractmethod
    def describe(self) -> str:
        """A few words on what kind of ranks these are and how to get others."""

    @abstractmethod
    def communicator(
        self, ranks: tuple[int, ...], axes: tuple[str, ...], channel: str = ""
    ) -> Communicator:
        """The way these ranks talk; `axes` are the names of the mesh axes they lie along."""

    def process_group(self, ranks: tuple[int, ...]) -> Any:
        """The torch process group of exactly these ranks, made on demand by its members."""
        raise self._refusal("process group")

    def adopt(self, group: Any) -> tuple[int, ...]:
        """Use a torch process group the user made; returns its global ranks."""
        raise self._refusal("process group")

    def torch_mesh(self, mesh: DeviceMesh) -> Any:
        """The torch DeviceMesh of the same ranks, over the same process groups."""
        raise self._refusal("DeviceMesh")

    def abort(self, meshes: Sequence[DeviceMesh]) -> None:
        """End the communication over a root mesh, which comes first, and all meshes cut from it."""
        root, *_ = meshes
        ways = {
            (mesh.ranks_along([axis]), "")
            for mesh in meshes
            if mesh.get_coordinate() is not None
            for axis in range(mesh.ndim)
        }
        along_one_axis = frozenset(ways)
        # Without the lock: another thread may hold it while it waits for a rank that is gone.
        for key, found in list(self.communicators.items()):
            if key[0] in meshes:
                found.has_ended = True
                ways.add((found.ranks, key[2]))
                self.communicators.pop(key, None)
        self.aborted.add(root)
        self._end(ways, along_one_axis)

    def _end(self, ways: Set[Way], along_one_axis: Set[Way]) -> None:  # noqa: B027 - see below
        """Fail the collectives of all ranks that talk in these ways; without ranks, do nothing.

        Arguments:
            along_one_axis: those of `ways` that an axis of a mesh stands for.
        """

    def _refusal(self, what: str) -> errors.MeshError:
        return errors.MeshError(
            f"there is no torch {what} here: {self.describe()}. "
            "sw.communicator(mesh, axes) talks on every kind of ranks"
        )


class _Here(threading.local):
    world: World | None = None


_here = _Here()


def _no_engine(start: bool) -> World:
    raise AssertionError("shardwise.comm provides the world of a process")


_process_world: Callable[[bool], World] = _no_engine


def current(start: bool = True) -> World:
    """The world of the calling rank; joins the one that torchrun describes if it may `start`."""
    return _here.world or _process_world(start)


def provide(process_world: Callable[[bool], World]) -> None:
    """Set how the world of a process is found; its argument says whether one may be started."""
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
