"""A world in which collectives are not run but recorded, as torch's functional collectives.

The rank of this world need not exist: programs for every rank of a mesh can be made anywhere.
Programs refer to process groups by name; the second half of this file has these names and makes the
groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.distributed import ProcessGroup
from torch.export import ExportedProgram

from shardwise.comm import trace
from shardwise.comm.buffers import Shape
from shardwise.comm.interface import Communicator
from shardwise.comm.offline import AloneCommunicator
from shardwise.comm.pending import Pending
from shardwise.core import world
from shardwise.core.errors import ExportError
from shardwise.core.mesh import DeviceMesh
from shardwise.core.world import World
from shardwise.export.annotations import annotate_collective
from shardwise.export.operators import is_collective
from shardwise.torch_internals import functional_collectives, register_group, resolve_group

_functional: Any = functional_collectives

GroupNaming = Callable[[tuple[int, ...]], str]
"""Maps ranks to the name that torch has for their process group where the program will run."""


class RecordingWorld(World):
    """One rank of a program that is being made.

    Arguments:
        rank: the rank that the program is for.
        size: the number of ranks.
        name_group: the names of process groups; `group_name` by default.
    """

    carries_values = False
    draws_whole = True

    def __init__(self, rank: int, size: int, name_group: GroupNaming | None = None) -> None:
        super().__init__(rank, size)
        self._name_group = name_group or (lambda ranks: group_name(ranks, size))

    def describe(self) -> str:
        """Return the kind of ranks, for errors."""
        return f"a program for {self.size} ranks is being made"

    def communicator(
        self, ranks: tuple[int, ...], axes: tuple[str, ...], channel: str = ""
    ) -> Communicator:
        """Return the communicator that records collectives among some ranks."""
        if len(ranks) == 1:
            return AloneCommunicator(ranks, 0, axes)
        return RecordingCommunicator(ranks, ranks.index(self.rank), axes, self._name_group(ranks))

    def abort(self, meshes: Sequence[DeviceMesh]) -> NoReturn:
        """Raise ExportError: no operator of a program would abort a mesh."""
        raise ExportError(
            f"abort: a program for {meshes[0]!r} is being made; abort the mesh where it is run"
        )


def as_recorded(mesh: DeviceMesh) -> tuple[DeviceMesh, RecordingWorld]:
    """Return a mesh like this one in the world of a recording, and that world.

    The world is that of the calling rank; for an abstract mesh, that of its first rank.
    """
    current = world.current()
    if mesh.is_abstract:
        recording = RecordingWorld(0, mesh.size())
    else:
        if mesh.get_coordinate() is None:
            raise ExportError(f"mesh: expected one that this rank is in, got {mesh!r}")
        naming = None if current.is_simulated else lambda ranks: register_ranks(ranks, current)
        recording = RecordingWorld(current.rank, current.size, naming)
    with world.use(recording):
        names = mesh.mesh_dim_names
        return DeviceMesh(mesh.device_type, mesh.mesh, mesh_dim_names=names), recording


class RecordingCommunicator(Communicator):
    """Records collectives as calls of torch's functional ones.

    These need equal shards along dim 0: uneven ones are padded before, and cut afterwards.
    """

    def __init__(
        self, ranks: tuple[int, ...], index: int, axes: tuple[str, ...], group_name: str
    ) -> None:
        super().__init__(ranks, index, axes)
        self.group_name = group_name
        self._event: trace.Event | None = None

    def _start_all_reduce(self, x: torch.Tensor, op: str) -> Pending[torch.Tensor]:
        return self._pending(_functional.all_reduce(x, op, self.group_name))

    def _start_reduce_scatter(
        self, x: torch.Tensor, dim: int, sizes: tuple[int, ...], op: str
    ) -> Pending[torch.Tensor]:
        longest = max(sizes)
        rows = x
        if dim or min(sizes) != longest:
            pieces = x.split_with_sizes(sizes, dim)
            rows = torch.cat([_pad(each, dim, longest) for each in pieces])
        started = _functional.reduce_scatter_tensor(
            rows.contiguous(), op, self.size, self.group_name
        )
        own = sizes[self.index]
        return self._pending(started).then(
            lambda piece: piece if own == longest else piece.narrow(dim, 0, own).contiguous()
        )

    def _start_all_gather(
        self, x: torch.Tensor, dim: int, sizes: tuple[int, ...]
    ) -> Pending[torch.Tensor]:
        longest = max(sizes)
        rows = _pad(x, dim, longest).contiguous()
        started = _functional.all_gather_into_tensor(rows, self.size, self.group_name)

        def join(gathered: torch.Tensor) -> torch.Tensor:
            if not dim and min(sizes) == longest:
                return gathered
            # Not by chunk, which tests whether a dynamic size is divisible.
            by_rank = gathered.view(self.size, *rows.shape).unbind()
            pieces = [
                piece if size == longest else piece.narrow(dim, 0, size)
                for piece, size in zip(by_rank, sizes, strict=True)
            ]
            return torch.cat(pieces, dim)

        return self._pending(started).then(join)

    def _start_all_to_all(
        self, pieces: list[torch.Tensor], shapes: list[Shape]
    ) -> Pending[list[torch.Tensor]]:
        sent = [piece.numel() for piece in pieces]
        received = [math.prod(shape) for shape in shapes]
        flat = torch.cat([piece.reshape(-1) for piece in pieces])
        started = _functional.all_to_all_single(flat, received, sent, self.group_name)

        def split(result: torch.Tensor) -> list[torch.Tensor]:
            parts = result.split_with_sizes(received)
            return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

        return self._pending(started).then(split)

    def _start_broadcast(self, x: torch.Tensor, source: int) -> Pending[torch.Tensor]:
        return self._pending(_functional.broadcast(x, source, self.group_name))

    def _start_exchange(
        self, sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor]
    ) -> Pending[None]:
        like = next(iter((*sends.values(), *receives.values())), None)
        if like is None:
            raise self._not_functional("exchange of nothing")
        nothing = like.new_empty(0)
        pieces = [sends.get(peer, nothing) for peer in range(self.size)]
        shapes = [tuple(receives.get(peer, nothing).shape) for peer in range(self.size)]

        def fill(received: list[torch.Tensor]) -> None:
            for peer, target in receives.items():
                target.copy_(received[peer])

        return self._start_all_to_all(pieces, shapes).then(fill)

    def _start_scatter(
        self, like: torch.Tensor, pieces: list[torch.Tensor] | None, source: int
    ) -> NoReturn:
        raise self._not_functional("scatter")

    def _start_gather(self, x: torch.Tensor, shapes: list[Shape], destination: int) -> NoReturn:
        raise self._not_functional("gather")

    def _start_send(self, x: torch.Tensor, destination: int) -> NoReturn:
        raise self._not_functional("send")

    def _start_recv(self, like: torch.Tensor, source: int) -> NoReturn:
        raise self._not_functional("recv")

    def _start_barrier(self) -> NoReturn:
        raise self._not_functional("barrier")

    def _start_gather_bytes(self, data: bytes, lengths: list[int]) -> NoReturn:
        raise self._not_functional("gather_objects")

    def _tell(self, kind: str, x: torch.Tensor | None, received: int) -> trace.Event | None:
        self._event = super()._tell(kind, x, received)
        return self._event

    def _pending(self, started: torch.Tensor) -> Pending[torch.Tensor]:
        annotate_collective(started, self._event)
        return Pending(lambda: _functional.wait_tensor(started))

    def _not_functional(self, what: str) -> ExportError:
        return ExportError(
            f"{what}: torch has no functional collective for it, so a program cannot contain it"
        )


def _pad(x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """Pad a dim with zeros to a length."""
    missing = length - x.shape[dim]
    if not missing:
        return x
    return torch.cat([x, x.new_zeros((*x.shape[:dim], missing, *x.shape[dim + 1 :]))], dim)


# ---- process groups: all ranks are torch's default group, which exists once torch.distributed was
# started; others are named by their ranks, `ranks_0_2`, and must be made and registered by that
# name.

_DEFAULT_GROUP = "0"  # torch's name for its default group
_PREFIX = "ranks_"


def group_name(ranks: tuple[int, ...], size: int) -> str:
    """Return the name of a process group in a program for `size` ranks."""
    if ranks == tuple(range(size)):
        return _DEFAULT_GROUP
    return _PREFIX + "_".join(map(str, ranks))


def register_ranks(ranks: tuple[int, ...], process_world: Any) -> str:
    """Register the process group of some ranks with torch, and return its name in programs.

    All of these ranks must call this.

    Arguments:
        process_world: the world of this process, which makes the group.
    """
    name = group_name(ranks, process_world.size)
    group = process_world.process_group(ranks)
    if name != group.group_name and not _is_registered(name):
        register_group(name, group)
    return name


def make_groups(program: ExportedProgram) -> dict[str, ProcessGroup]:
    """Make the process groups that a program refers to.

    Call it once in each process that loads a program, unless all collectives of the program are
    among all ranks. All ranks must call it, each with its program. Without shardwise, make and
    register the groups by torch:

    ```py
    for ranks in ([0, 1], [2, 3]):  # every rank takes part in making every group
        group = torch.distributed.new_group(ranks)
        if torch.distributed.get_rank() in ranks:
            name = "ranks_" + "_".join(map(str, ranks))
            torch._C._distributed_c10d._register_process_group(name, group)
    ```

    Returns:
        The groups by name.
    """
    current: Any = world.current()
    if current.is_simulated or not torch.distributed.is_initialized():
        raise ExportError(
            "make_groups: expected torch.distributed to be started, with one process for each rank;"
            f" {current.describe()}"
        )
    collectives = filter(is_collective, program.graph.nodes)
    found: dict[str, ProcessGroup] = {}
    # In the order of first use, which is the same on all ranks of a group.
    for name in dict.fromkeys(str(node.args[-1]) for node in collectives):
        if name.startswith(_PREFIX):
            register_ranks(tuple(map(int, name.removeprefix(_PREFIX).split("_"))), current)
        found[name] = resolve_group(name)
    return found


def _is_registered(name: str) -> bool:
    try:
        resolve_group(name)
    except RuntimeError:
        return False
    return True
