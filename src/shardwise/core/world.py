"""The world of a rank: its number, the number of ranks, how to reach them, the parents of meshes.

Values such as a mesh must know on which rank they are used, but not how ranks communicate. So this
module only defines the interface; an engine of `shardwise.comm` implements it. A *simulated* rank
is a thread with a world of its own; otherwise the world belongs to the process.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from itertools import chain
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
    has_process_groups = True
    """Whether torch.distributed knows these ranks."""
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
        self.facts: dict[Any, dict[Any, int]] = {}
        """How often this rank has stated each fact that others must state alike, by the mesh or
        group of ranks that state it."""
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


# ---- the parents of sub-meshes, and the names of flattened axes
#
# As in torch, `root["dp_cp"]` finds an axis that was flattened on a sub-mesh of `root`. Meshes are
# immutable values, so the world of the calling rank records both.

AxisNames = tuple[str, ...]


def root_of(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh at the end of the chain of parents; a mesh without a parent is its own
    root."""
    *_, root = _parents(mesh)
    return root


def record_root(mesh: DeviceMesh, source: DeviceMesh) -> None:
    """Record the root of a sub-mesh. A root has no parent, so there are no cycles."""
    root = root_of(source)
    if mesh is not root:
        current(start=False).roots[mesh] = root


def sub_meshes_of(mesh: DeviceMesh) -> list[DeviceMesh]:
    """Return a root mesh, followed by its sub-meshes that the calling rank made and still holds."""
    derived = list(current(start=False).roots)
    return [mesh, *(each for each in derived if each is not mesh and root_of(each) is mesh)]


def check_not_aborted(mesh: DeviceMesh) -> None:
    """Refuse a mesh whose process groups this rank has aborted."""
    aborted = current(start=False).aborted
    if aborted and (root := root_of(mesh)) in aborted:
        raise errors.MeshError(
            f"{mesh!r} was aborted, and its process groups are gone: call sw.init_device_mesh, or "
            f"DeviceMesh, for {root!r} again, on all of its ranks"
        )


def resolve_names(mesh: DeviceMesh, wanted: AxisNames) -> tuple[DeviceMesh, list[AxisNames]]:
    """Find the mesh that knows all the wanted names, and the axes behind each name.

    The mesh found is `mesh` itself or one of its parents. In a parent, only names of flattened axes
    are looked up.
    """
    own = mesh.mesh_dim_names or ()
    flattened: list[str] = []
    for source in _parents(mesh):
        known = {
            name: axes
            for name, axes in _names(source).items()
            if (_has_ranks_of(mesh, name, source, axes) if name in own else axes != (name,))
        }
        if all(isinstance(name, str) and name in known for name in wanted):
            return source, [known[name] for name in wanted]
        flattened += [name for name in known if name not in own]
    unknown = next((name for name in wanted if name not in (*own, *flattened)), wanted)
    also = f" or the flattened {', '.join(flattened)}" if flattened else ""
    raise errors.MeshError(f"axis: expected one of {mesh.axes_shown()}{also}, got {unknown!r}")


def record_flattened(mesh: DeviceMesh, name: str, merged: AxisNames, flat: DeviceMesh) -> None:
    """Record the name of a flattened axis, so that `root[name]` finds it.

    Arguments:
        mesh: the mesh whose axes were flattened.
        name: the name of the flattened axis.
        merged: the axes of `mesh` that it is made of.
        flat: the mesh that has the flattened axis.
    """
    root = root_of(mesh)
    known = _names(root)
    if flat.get_coordinate() is None or not known.keys() >= {*merged}:
        return
    axes = tuple(chain.from_iterable(known[each] for each in merged))
    if len({*axes}) < len(axes) or not _has_ranks_of(flat, name, root, axes):
        return
    if known.setdefault(name, axes) != axes:
        raise errors.MeshError(
            f"flatten(name): {name!r} already stands for {known[name]} of {root!r}, got {axes}"
        )
    if axes != (name,):
        current(start=False).flattened.setdefault(root, {})[name] = axes


def _parents(mesh: DeviceMesh) -> Iterator[DeviceMesh]:
    """Yield the mesh, its parent, and so on up to the root."""
    roots = current(start=False).roots
    found: DeviceMesh | None = mesh
    while found is not None:
        yield found
        found = roots.get(found)


def _names(mesh: DeviceMesh) -> dict[str, AxisNames]:
    """Return the axes behind each name: one for an axis of the mesh, several for a flattened
    one."""
    axes = {name: (name,) for name in mesh.mesh_dim_names or ()}
    return axes | current(start=False).flattened.get(mesh, {})


def _has_ranks_of(mesh: DeviceMesh, axis: str, root: DeviceMesh, axes: AxisNames) -> bool:
    """Return whether an axis of a sub-mesh has the same ranks as these axes of a parent.

    Names alone do not tell: `unflatten` may give a new axis the name of an axis of the root.
    """
    return mesh.ranks_along([axis]) == root.ranks_along(axes)
