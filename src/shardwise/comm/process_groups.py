"""torch process groups: the world of a real rank, and its groups, made on demand."""

from __future__ import annotations

import atexit
import hashlib
import os
import threading
from collections import Counter
from collections.abc import Sequence, Set
from typing import Any, NoReturn
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh as TorchMesh

from shardwise.comm.buffers import format_tuple
from shardwise.comm.c10d import C10dCommunicator, living_group
from shardwise.comm.interface import Communicator
from shardwise.comm.offline import AloneCommunicator, AloneWorld
from shardwise.comm.threaded import ThreadedCommunicator
from shardwise.core.errors import CollectiveError, MeshError
from shardwise.core.mesh import DeviceMesh
from shardwise.core.world import Backend, Link, World
from shardwise.torch_internals import (
    default_group,
    end_coalescing,
    forget_group,
    new_process_group,
    root_of_torch_mesh,
    set_default_group,
    start_coalescing,
    timeout_in,
    timeout_of,
    world_of_torch,
)

_GroupKey = tuple[tuple[int, ...], str, Backend]
"""The ranks of a group, its channel, and how it was made."""


class C10dWorld(World):
    """The ranks of torch's default process group.

    Groups are held by weak references: torch owns them, so `destroy_process_group` frees them.
    """

    _engine = C10dCommunicator

    def __init__(self, default: dist.ProcessGroup) -> None:
        super().__init__(default.rank(), default.size())
        self._groups: dict[_GroupKey, ReferenceType[dist.ProcessGroup]] = {
            (tuple(range(self.size)), "", Backend()): ref(default)
        }
        self._made: Counter[tuple[tuple[int, ...], str]] = Counter()

    def describe(self) -> str:
        """Say what kind of ranks these are."""
        return f"torch.distributed was started with {self.size} ranks"

    def communicator(
        self, ranks: tuple[int, ...], axes: tuple[str, ...], channel: str = ""
    ) -> Communicator:
        """Return the communicator of these ranks. All of them must call this: it makes their
        group."""
        if len(ranks) == 1:
            return AloneCommunicator(ranks, 0, axes)
        backend = self.backends.get((ranks, axes[0]), Backend()) if len(axes) == 1 else Backend()
        if backend.name is not None and "fake" in backend.name:
            backend = Backend()  # a fake group carries nothing; its axis may still have to
        group = self._group(ranks, channel, backend)
        return self._engine(group, ranks, ranks.index(self.rank), axes)

    def set_backend(self, ranks: tuple[int, ...], axis: str, backend: Backend) -> None:
        """Set how the group of an axis is made; refuse an unknown backend."""
        known = dist.Backend.backend_list
        for part in () if backend.name is None else backend.name.split(","):
            if part.rpartition(":")[2] not in known:
                raise MeshError(
                    f"backend_override: expected one of {', '.join(known)}, or a list such as "
                    f"'cpu:gloo,cuda:nccl'; got {backend.name!r}"
                )
        super().set_backend(ranks, axis, backend)

    def process_group(self, ranks: tuple[int, ...], axis: str | None = None) -> dist.ProcessGroup:
        """Return the group of exactly these ranks, in this order; its members make it on demand."""
        backend = Backend() if axis is None else self.backends.get((ranks, axis), Backend())
        return self._group(ranks, "", backend)

    def _group(self, ranks: tuple[int, ...], channel: str, backend: Backend) -> dist.ProcessGroup:
        key = ranks, channel, backend
        with self.lock:
            group = self._known(key)
            if group is None:
                self._made[ranks, channel] += 1
                turn = f"{channel}{self._made[ranks, channel]}"
                group = _new_group(ranks, self.rank, turn, backend)
                self._groups[key] = ref(group)
            return group

    def adopt(self, group: Any) -> tuple[int, ...]:
        """Use a group that the user made; return its global ranks."""
        if not isinstance(group, dist.ProcessGroup):
            raise MeshError(f"group: expected a ProcessGroup this rank is in, got {group!r}")
        ranks = tuple(dist.get_process_group_ranks(group))
        backend = Backend()
        if _is_fake(group) and not _is_fake(default_group()):
            backend = Backend("fake")  # never for collectives, as if backend_override said so
        with self.lock:
            if self._known((ranks, "", backend)) is None:
                self._groups[ranks, "", backend] = ref(group)
        return ranks

    def root_of_torch_mesh(self, mesh: TorchMesh) -> TorchMesh:
        """Return the torch DeviceMesh that one of torch was cut from, or itself."""
        root: TorchMesh = root_of_torch_mesh(mesh)
        return root

    def torch_mesh(self, mesh: DeviceMesh) -> TorchMesh:
        """Return the torch DeviceMesh of the same ranks, over the same process groups."""
        names = mesh.mesh_dim_names
        if names is None and mesh.ndim > 1:
            raise MeshError(
                f"to_torch: expected a mesh with mesh_dim_names, which torch needs for {mesh.ndim} "
                f"axes; got {mesh!r}"
            )
        groups = mesh.get_all_groups()
        if len(groups) == 1:
            return TorchMesh.from_group(groups[0], mesh.device_type, mesh_dim_names=names)
        return TorchMesh.from_group(groups, mesh.device_type, mesh=mesh.mesh, mesh_dim_names=names)

    def _end(self, links: Set[Link], along_one_axis: Set[Link]) -> None:
        """Abort the groups and remove them from torch.

        The default group is left alone if it only carried collectives over several axes: the
        program needs it for other things, and torch spares it too.
        """
        whole = tuple(range(self.size)), ""
        ended = links if whole in along_one_axis else links - {whole}
        keys = [key for key in list(self._groups) if key[:2] in ended]
        groups = [group for key in keys if (group := self._known(key)) is not None]
        _abort(groups)
        if world_of_torch().default_pg in groups:
            _note_left(self)
        _release(groups)

    def _known(self, key: _GroupKey) -> dist.ProcessGroup | None:
        reference = self._groups.get(key)
        return None if reference is None else living_group(reference)


class ThreadedWorld(C10dWorld):
    """The ranks of torch's threaded process group, each a thread of this process."""

    is_simulated = True
    shares_random_state = True
    _engine = ThreadedCommunicator

    def describe(self) -> str:
        """Say what kind of ranks these are."""
        return f"torch's threaded process group runs {self.size} ranks here, as threads"

    def first_value(
        self, ranks: tuple[int, ...], name: Any, number: int, value: int
    ) -> tuple[int, int]:
        """Return the first of the ranks that came, and its value, without waiting."""
        _, store = world_of_torch().pg_map[default_group()]
        key = f"shardwise first/{ranks}/{name!r}/{number}"
        first = store.compare_set(key, "", f"{self.rank} {value}").decode()
        if store.add(f"{key}/taken", 1) == len(ranks):
            store.delete_key(key)
            store.delete_key(f"{key}/taken")
        rank, taken = map(int, first.split())
        return rank, taken

    def _end(self, links: Set[Link], along_one_axis: Set[Link]) -> NoReturn:
        raise MeshError(f"abort: expected ranks that are processes; {self.describe()}")


class LeftWorld(World):
    """The ranks of a default process group that this rank has aborted."""

    def describe(self) -> str:
        """Say what to do."""
        return (
            "this rank has aborted the default process group, with a mesh of which an axis spans "
            "all ranks; call torch.distributed.init_process_group again, then make the mesh again"
        )

    def communicator(
        self, ranks: tuple[int, ...], axes: tuple[str, ...], channel: str = ""
    ) -> NoReturn:
        """Raise: there is no communicator."""
        raise MeshError(f"ranks {format_tuple(ranks)} cannot talk: {self.describe()}")


_IS_AVAILABLE = dist.is_available()
_worlds: WeakKeyDictionary[dist.ProcessGroup, C10dWorld] = WeakKeyDictionary()
_alone = AloneWorld()
_making = threading.Lock()
_latest: tuple[Any, Any] = (lambda: None, lambda: None)
"""Weak references to the default group that was last seen, and to its world."""
_left: LeftWorld | None = None
"""The world in place of a default group that was aborted, until there is another."""


def process_world(start: bool) -> World:
    """Return the world of this process; with `start`, join the ranks that torchrun started."""
    global _latest, _left
    if not _IS_AVAILABLE:
        return _alone
    default = world_of_torch().default_pg
    # A quick answer, as this is called several times per collective.
    last_default, last_world = _latest
    if default is not None and last_default() is default:
        return last_world()  # type: ignore[no-any-return]
    if not dist.is_initialized():
        if _left is not None:
            return _left
        if not (
            start and {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
        ):
            return _alone
        with _making:
            if not dist.is_initialized():
                _join()
    default = default_group()
    found = _worlds.get(default)
    if found is None:
        with _making:
            kind = ThreadedWorld if _is_threaded(default) else C10dWorld
            found = _worlds.setdefault(default, kind(default))
        _left = None
    _latest = ref(default), ref(found)
    return found


def _is_threaded(default: dist.ProcessGroup) -> bool:
    """Tell whether the ranks are threads, each with process groups of its own."""
    backend, _ = world_of_torch().pg_map[default]
    return bool(backend == "threaded")


def _join() -> None:
    """Start the default process group as torchrun describes it, and end it with the process."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group()
    atexit.register(_leave, ref(default_group()))


def _leave(joined: ReferenceType[dist.ProcessGroup]) -> None:
    if dist.is_initialized() and default_group() is joined():
        dist.destroy_process_group()


def _is_fake(group: dist.ProcessGroup) -> bool:
    return "fake" in dist.get_backend(group)


def _new_group(ranks: tuple[int, ...], rank: int, turn: str, wanted: Backend) -> dist.ProcessGroup:
    """Make a group with the help of its members only.

    torch's `new_group(use_local_synchronization=True)` names a group by its ranks and by how many
    groups *this* rank has made so far. Ranks that belong to different numbers of groups then wait
    for each other under different names, forever. So the name here is made of the ranks, and of the
    number of groups of exactly these ranks on this channel so far, which all members know.
    """
    if rank not in ranks:
        raise MeshError(f"group: expected ranks that include this one, got {format_tuple(ranks)}")
    default = default_group()
    backend, store = world_of_torch().pg_map[default]
    options = wanted.options
    digest = hashlib.sha1(repr(ranks).encode(), usedforsecurity=False).hexdigest()
    bound, default.bound_device_id = default.bound_device_id, None
    try:  # with a bound device torch would split the default group, which takes all of its ranks
        group, _ = new_process_group(
            len(ranks),
            ranks.index(rank),
            list(ranks),
            backend if wanted.name is None else dist.Backend(wanted.name),
            store,
            c10d.GroupName(f"shardwise_{digest}_{turn}"),
            backend_options=options,
            timeout=timeout_of(default) if options is None else timeout_in(options),
            group_desc=f"shardwise ranks {ranks}",
        )
    except (RuntimeError, AssertionError) as error:
        cause = "A peer has probably ended or waits elsewhere: look at the output of the others"
        if isinstance(error, AssertionError):
            cause = f"backend_override asks for {wanted.name!r}: import what registers this backend"
        raise CollectiveError(
            f"the ranks {format_tuple(ranks)} could not make a process group: {error}\n{cause}"
        ) from error
    finally:
        default.bound_device_id = bound
    world_of_torch().pg_group_ranks[group] = {other: index for index, other in enumerate(ranks)}
    assert isinstance(group, dist.ProcessGroup), "this rank is a member"
    return group


def _abort(groups: Sequence[dist.ProcessGroup]) -> None:
    """Abort groups, together where the backend can, and remove them from torch."""
    if not groups:
        return
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    try:  # NCCL: communicators that are aborted one by one may wait for each other
        start_coalescing(groups[0], device)
        together = True
    except RuntimeError:
        together = False
    for group in groups:
        group.abort()
    if together:
        end_coalescing(groups[0], device)
    for group in groups:
        forget_group(group)
        for tagged in world_of_torch().tags_to_pg.values():  # torch keeps those of new_group twice
            if group in tagged:
                tagged.remove(group)


def _release(groups: list[dist.ProcessGroup]) -> None:
    """Empty a list of aborted groups on another thread, which then holds the last references.

    gloo closes its connections, which the peers notice, when the last reference to a group goes. It
    first waits for collectives that this rank has started. The caller must not wait for them, so
    another thread does.
    """
    kept = list(groups)
    groups.clear()
    threading.Thread(target=kept.clear, name="shardwise abort", daemon=True).start()


def _note_left(here: C10dWorld) -> None:
    """Let torch start a new default group, and remember that this rank has none."""
    global _left
    _left = LeftWorld(here.rank, here.size)
    set_default_group(None)
