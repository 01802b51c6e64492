"""Collectives that are not run but written down: torch's functional ones, on tensors without data.

The world of a rank that need not exist: programs can be made for every rank of a mesh anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from shardwise import world
from shardwise.comm import trace
from shardwise.comm.buffers import Shape
from shardwise.comm.interface import Communicator
from shardwise.comm.offline import AloneCommunicator
from shardwise.comm.pending import Pending
from shardwise.export.errors import ExportError
from shardwise.export.groups import group_name, registered
from shardwise.export.notes import note_collective
from shardwise.mesh import DeviceMesh
from shardwise.torch_internals import functional_collectives
from shardwise.world import World

_functional: Any = functional_collectives

GroupName = Callable[[tuple[int, ...]], str]
"""What torch calls the process group of some ranks, where the program will run."""


class RecordingWorld(World):
    """One rank of a program that is being made."""

    carries_values = False
    draws_whole = True

    def __init__(self, rank: int, size: int, name_of: GroupName | None = None) -> None:
        super().__init__(rank, size)
        self._name_of = name_of or (lambda ranks: group_name(ranks, size))

    def describe(self) -> str:
        """What kind of ranks these are."""
        return f"a program for {self.size} ranks is being made"

    def communicator(
        self, ranks: tuple[int, ...], axes: tuple[str, ...], channel: str = ""
    ) -> Communicator:
        """The way these ranks will talk."""
        if len(ranks) == 1:
            return AloneCommunicator(ranks, 0, axes)
        return RecordingCommunicator(ranks, ranks.index(self.rank), axes, self._name_of(ranks))

    def abort(self, meshes: Sequence[DeviceMesh]) -> NoReturn:
        """Refuse: a program has no call that would do it."""
        raise ExportError(
            f"abort: a program for {meshes[0]!r} is being made; abort the mesh where it is run"
        )


def as_recorded(mesh: DeviceMesh) -> tuple[DeviceMesh, RecordingWorld]:
    """A mesh as a program knows it, and the calling rank; of an abstract mesh, the first."""
    here = world.current()
    if mesh.is_abstract:
        recording = RecordingWorld(0, mesh.size())
    else:
        if mesh.get_coordinate() is None:
            raise ExportError(f"mesh: expected one that this rank is in, got {mesh!r}")
        name_of = None if here.is_simulated else lambda ranks: registered(ranks, here)
        recording = RecordingWorld(here.rank, here.size, name_of)
    with world.use(recording):
        names = mesh.mesh_dim_names
        return DeviceMesh(mesh.device_type, mesh.mesh, mesh_dim_names=names), recording


class RecordingCommunicator(Communicator):
    """Collectives as calls of torch's functional ones.

    Those want equal pieces, along dim 0: what is uneven is padded, and cut afterwards.
    """

    def __init__(
        self, ranks: tuple[int, ...], index: int, axes: tuple[str, ...], group_name: str
    ) -> None:
        super().__init__(ranks, index, axes)
        self.group_name = group_name
        self._event: trace.Event | None = None

    def _start_all_reduce(self, x: torch.Tensor, op: str) -> Pending[torch.Tensor]:
        return self._under_way(_functional.all_reduce(x, op, self.group_name))

    def _start_reduce_scatter(
        self, x: torch.Tensor, dim: int, sizes: tuple[int, ...], op: str
    ) -> Pending[torch.Tensor]:
        longest = max(sizes)
        rows = x
        if dim or min(sizes) != longest:
            pieces = x.split_with_sizes(sizes, dim)
            rows = torch.cat([_padded(each, dim, longest) for each in pieces])
        started = _functional.reduce_scatter_tensor(
            rows.contiguous(), op, self.size, self.group_name
        )
        own = sizes[self.index]
        return self._under_way(started).then(
            lambda piece: piece if own == longest else piece.narrow(dim, 0, own).contiguous()
        )

    def _start_all_gather(
        self, x: torch.Tensor, dim: int, sizes: tuple[int, ...]
    ) -> Pending[torch.Tensor]:
        longest = max(sizes)
        rows = _padded(x, dim, longest).contiguous()
        started = _functional.all_gather_into_tensor(rows, self.size, self.group_name)

        def joined(gathered: torch.Tensor) -> torch.Tensor:
            if not dim and min(sizes) == longest:
                return gathered
            # Not by chunk: it asks whether a dynamic size divides.
            apart = gathered.view(self.size, *rows.shape).unbind()
            pieces = [
                piece if size == longest else piece.narrow(dim, 0, size)
                for piece, size in zip(apart, sizes, strict=True)
            ]
            return torch.cat(pieces, dim)

        return self._under_way(started).then(joined)

    def _start_all_to_all(
        self, pieces: list[torch.Tensor], shapes: list[Shape]
    ) -> Pending[list[torch.Tensor]]:
        given = [piece.numel() for piece in pieces]
        taken = [math.prod(shape) for shape in shapes]
        flat = torch.cat([piece.reshape(-1) for piece in pieces])
        started = _functional.all_to_all_single(flat, taken, given, self.group_name)

        def apart(received: torch.Tensor) -> list[torch.Tensor]:
            parts = received.split_with_sizes(taken)
            return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

        return self._under_way(started).then(apart)

    def _start_broadcast(self, x: torch.Tensor, source: int) -> Pending[torch.Tensor]:
        return self._under_way(_functional.broadcast(x, source, self.group_name))

    def _start_exchange(
        self, sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor]
    ) -> Pending[None]:
        like = next(iter((*sends.values(), *receives.values())), None)
        if like is None:
            raise self._impossible("exchange of nothing")
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
        raise self._impossible("scatter")

    def _start_gather(self, x: torch.Tensor, shapes: list[Shape], destination: int) -> NoReturn:
        raise self._impossible("gather")

    def _start_send(self, x: torch.Tensor, destination: int) -> NoReturn:
        raise self._impossible("send")

    def _start_recv(self, like: torch.Tensor, source: int) -> NoReturn:
        raise self._impossible("recv")

    def _start_barrier(self) -> NoReturn:
        raise self._impossible("barrier")

    def _start_gather_bytes(self, data: bytes, lengths: list[int]) -> NoReturn:
        raise self._impossible("gather_objects")

    def _tell(self, kind: str, x: torch.Tensor | None, received: int) -> trace.Event | None:
        self._event = super()._tell(kind, x, received)
        return self._event

    def _under_way(self, started: torch.Tensor) -> Pending[torch.Tensor]:
        note_collective(started, self._event)
        return Pending(lambda: _functional.wait_tensor(started))

    def _impossible(self, what: str) -> ExportError:
        return ExportError(
            f"{what}: torch has no functional collective for it, so a program cannot contain it"
        )


def _padded(x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    missing = length - x.shape[dim]
    if not missing:
        return x
    return torch.cat([x, x.new_zeros((*x.shape[:dim], missing, *x.shape[dim + 1 :]))], dim)
