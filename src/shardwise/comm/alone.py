"""The collectives of one rank alone, and the world of a process that nobody else has joined."""

from __future__ import annotations

from typing import NoReturn

import torch

from shardwise.comm.arguments import Shape
from shardwise.comm.buffers import copied
from shardwise.comm.interface import Communicator
from shardwise.comm.meeting import simulation_runs
from shardwise.comm.pending import Pending
from shardwise.comm.reduction import reduce_contributions
from shardwise.world import World


class AloneCommunicator(Communicator):
    """One rank: nothing moves, and every result is a copy of the input."""

    def _start_all_reduce(self, x: torch.Tensor, op: str) -> Pending[torch.Tensor]:
        return Pending.done(reduce_contributions([x.detach()], op))

    def _start_reduce_scatter(
        self, x: torch.Tensor, dim: int, sizes: tuple[int, ...], op: str
    ) -> Pending[torch.Tensor]:
        return self._start_all_reduce(x, op)

    def _start_all_gather(
        self, x: torch.Tensor, dim: int, sizes: tuple[int, ...]
    ) -> Pending[torch.Tensor]:
        return Pending.done(copied(x))

    def _start_all_to_all(
        self, pieces: list[torch.Tensor], shapes: list[Shape]
    ) -> Pending[list[torch.Tensor]]:
        return Pending.done([copied(piece) for piece in pieces])

    def _start_broadcast(self, x: torch.Tensor, source: int) -> Pending[torch.Tensor]:
        return Pending.done(copied(x))

    def _start_scatter(
        self, like: torch.Tensor, pieces: list[torch.Tensor] | None, source: int
    ) -> Pending[torch.Tensor]:
        assert pieces is not None, "checked: this rank is the source"
        return Pending.done(copied(pieces[0]))

    def _start_gather(
        self, x: torch.Tensor, shapes: list[Shape], destination: int
    ) -> Pending[list[torch.Tensor] | None]:
        return Pending.done([copied(x)])

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
    """A process that has not been started as one of several ranks."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=1)

    def describe(self) -> str:
        """How to get more ranks."""
        if simulation_runs():
            return "this thread is no rank of the running simulation; use the rank's own thread"
        return (
            "this process is alone: run it under torchrun, call it through sw.launch or "
            "sw.simulate, or plan without ranks on DeviceMesh.abstract"
        )

    def communicator(
        self, ranks: tuple[int, ...], axes: tuple[str, ...], channel: str = ""
    ) -> Communicator:
        """Always of this rank alone."""
        return AloneCommunicator(ranks, 0, axes)
