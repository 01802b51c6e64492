"""Engines without peers: shapes only on an abstract mesh, and one rank alone."""

from __future__ import annotations

from typing import NoReturn

import torch

from shardwise.comm.buffers import Shape, contiguous_copy
from shardwise.comm.interface import Communicator
from shardwise.comm.pending import Pending
from shardwise.comm.rank_scheduler import simulation_runs
from shardwise.comm.reduction import reduce_contributions
from shardwise.core.errors import CollectiveError
from shardwise.core.world import World


class AbstractCommunicator(Communicator):
    """The collectives of a rank of an abstract mesh: the right shapes, and no values.

    It takes meta tensors only: a real tensor would silently come back without its values.
    """

    def _start_all_reduce(self, x: torch.Tensor, op: str) -> Pending[torch.Tensor]:
        return Pending.done(_empty(x, tuple(x.shape)))

    def _start_reduce_scatter(
        self, x: torch.Tensor, dim: int, sizes: tuple[int, ...], op: str
    ) -> Pending[torch.Tensor]:
        return Pending.done(_empty(x, _resized(x, dim, sizes[self.index])))

    def _start_all_gather(
        self, x: torch.Tensor, dim: int, sizes: tuple[int, ...]
    ) -> Pending[torch.Tensor]:
        return Pending.done(_empty(x, _resized(x, dim, sum(sizes))))

    def _start_all_to_all(
        self, pieces: list[torch.Tensor], shapes: list[Shape]
    ) -> Pending[list[torch.Tensor]]:
        return Pending.done([_empty(x, shape) for x, shape in zip(pieces, shapes, strict=True)])

    def _start_broadcast(self, x: torch.Tensor, source: int) -> Pending[torch.Tensor]:
        return Pending.done(_empty(x, tuple(x.shape)))

    def _start_scatter(
        self, like: torch.Tensor, pieces: list[torch.Tensor] | None, source: int
    ) -> Pending[torch.Tensor]:
        for piece in pieces or []:
            _empty(piece, ())
        return Pending.done(_empty(like, tuple(like.shape)))

    def _start_gather(
        self, x: torch.Tensor, shapes: list[Shape], destination: int
    ) -> Pending[list[torch.Tensor] | None]:
        gathered = [_empty(x, shape) for shape in shapes]
        return Pending.done(gathered if destination == self.index else None)

    def _start_exchange(
        self, sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor]
    ) -> Pending[None]:
        for x in (*sends.values(), *receives.values()):
            _empty(x, ())
        return Pending.done(None)

    def _start_send(self, x: torch.Tensor, destination: int) -> Pending[None]:
        _empty(x, ())
        return Pending.done(None)

    def _start_recv(self, like: torch.Tensor, source: int) -> Pending[torch.Tensor]:
        return Pending.done(_empty(like, tuple(like.shape)))

    def _start_barrier(self) -> Pending[None]:
        return Pending.done(None)

    def _start_gather_bytes(self, data: bytes, lengths: list[int]) -> NoReturn:
        raise CollectiveError(
            "gather_objects: an abstract mesh has no other ranks to get objects from"
        )


def _resized(x: torch.Tensor, dim: int, size: int) -> Shape:
    return (*x.shape[:dim], size, *x.shape[dim + 1 :])


def _empty(like: torch.Tensor, shape: Shape) -> torch.Tensor:
    if not like.is_meta:
        raise CollectiveError(
            f"expected a meta tensor, as an abstract mesh has no ranks to compute values; "
            f"got one on {like.device}: use x.to('meta'), or a mesh of real ranks"
        )
    return torch.empty(shape, dtype=like.dtype, device="meta")


class AloneCommunicator(Communicator):
    """The collectives of one rank: every result is a copy of the input."""

    def _start_all_reduce(self, x: torch.Tensor, op: str) -> Pending[torch.Tensor]:
        return Pending.done(reduce_contributions([x.detach()], op))

    def _start_reduce_scatter(
        self, x: torch.Tensor, dim: int, sizes: tuple[int, ...], op: str
    ) -> Pending[torch.Tensor]:
        return self._start_all_reduce(x, op)

    def _start_all_gather(
        self, x: torch.Tensor, dim: int, sizes: tuple[int, ...]
    ) -> Pending[torch.Tensor]:
        return Pending.done(contiguous_copy(x))

    def _start_all_to_all(
        self, pieces: list[torch.Tensor], shapes: list[Shape]
    ) -> Pending[list[torch.Tensor]]:
        return Pending.done([contiguous_copy(piece) for piece in pieces])

    def _start_broadcast(self, x: torch.Tensor, source: int) -> Pending[torch.Tensor]:
        return Pending.done(contiguous_copy(x))

    def _start_scatter(
        self, like: torch.Tensor, pieces: list[torch.Tensor] | None, source: int
    ) -> Pending[torch.Tensor]:
        assert pieces is not None, "checked: this rank is the source"
        return Pending.done(contiguous_copy(pieces[0]))

    def _start_gather(
        self, x: torch.Tensor, shapes: list[Shape], destination: int
    ) -> Pending[list[torch.Tensor] | None]:
        return Pending.done([contiguous_copy(x)])

    def _start_exchange(
        self, sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor]
    ) -> Pending[None]:
        return Pending.done(None)  # checked: there is no peer

    def _start_send(self, x: torch.Tensor, destination: int) -> NoReturn:
        raise AssertionError("checked: a rank alone has no peer")

    def _start_recv(self, like: torch.Tensor, source: int) -> NoReturn:
        raise AssertionError("checked: a rank alone has no peer")

    def _start_barrier(self) -> Pending[None]:
        return Pending.done(None)

    def _start_gather_bytes(self, data: bytes, lengths: list[int]) -> Pending[list[bytes]]:
        return Pending.done([data])


class AloneWorld(World):
    """The world of a process that was not started as one of several ranks."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=1)

    def describe(self) -> str:
        """Say how to get more ranks."""
        if simulation_runs():
            return "this thread is no rank of the running simulation; use the rank's own thread"
        return (
            "this process is alone: run it under torchrun, call it through sw.launch or "
            "sw.simulate, or plan without ranks on DeviceMesh.abstract"
        )

    def communicator(
        self, ranks: tuple[int, ...], axes: tuple[str, ...], channel: str = ""
    ) -> Communicator:
        """Return the communicator of this rank alone."""
        return AloneCommunicator(ranks, 0, axes)


class StandInWorld(World):
    """The world of a rank that acts as another one: collectives give shapes, and no values."""

    carries_values = False
    is_stand_in = True

    def describe(self) -> str:
        """Say what these ranks are."""
        return "this rank is outside of the mesh, and stands in for the first rank of it"

    def communicator(
        self, ranks: tuple[int, ...], axes: tuple[str, ...], channel: str = ""
    ) -> Communicator:
        """Return a communicator of meta tensors."""
        engine = AloneCommunicator if len(ranks) == 1 else AbstractCommunicator
        return engine(ranks, ranks.index(self.rank), axes)
