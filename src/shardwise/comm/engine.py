"""What an engine is to the collectives: some ranks, and a way to start each operation among them.

The public methods of `Communicator` check arguments and end in one of the `_start_...` here, which
an engine writes. All of them pass `_traced`, where whoever listens is told.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

import torch

from shardwise.comm import trace
from shardwise.comm.arguments import Shape, shown
from shardwise.comm.pending import Pending

T = TypeVar("T")


class Engine(ABC):
    """What `Communicator` derives from, and every engine writes.

    Arguments:
        ranks: the global ranks, in order.
        index: where the calling rank stands among them.
        axes: the names of the mesh axes they lie along, for messages and traces.
    """

    def __init__(self, ranks: tuple[int, ...], index: int, axes: tuple[str, ...] = ()) -> None:
        self.ranks = ranks
        self.index = index
        self.axes = axes
        self.size = len(ranks)
        self.has_ended = False
        """Whether this rank has aborted the mesh it was made for."""

    def __repr__(self) -> str:
        over = f" over {'.'.join(self.axes)}" if self.axes else ""
        among = f"{self.ranks[self.index]} of {shown(self.ranks)}"
        return f"{type(self).__name__}(rank {among}{over})"

    @property
    def is_usable(self) -> bool:
        """False once what it talks through has been destroyed, or its mesh aborted."""
        return not self.has_ended

    # ---- telling the trace

    def _traced(
        self,
        kind: str,
        x: torch.Tensor | None,
        received: int,
        start: Callable[[], Pending[T]],
    ) -> Pending[T]:
        if not trace.listeners:
            return start()
        return trace.ending(self._tell(kind, x, received), start())

    def _tell(self, kind: str, x: torch.Tensor | None, received: int) -> trace.Event | None:
        if not trace.listeners:
            return None
        event = trace.Event(
            rank=self.ranks[self.index],
            kind=kind,
            axes=self.axes,
            ranks=self.ranks,
            shape=() if x is None else tuple(x.shape),
            dtype=None if x is None else x.dtype,
            bytes=received,
        )
        trace.tell(event)
        return event

    # ---- what an engine does

    @abstractmethod
    def _start_all_reduce(self, x: torch.Tensor, op: str) -> Pending[torch.Tensor]: ...

    def _start_all_reduce_in_place(self, x: torch.Tensor, op: str) -> Pending[torch.Tensor]:
        """An engine that can do without the copy does."""

        def put(total: torch.Tensor) -> torch.Tensor:
            x.detach().copy_(total)
            return x

        return self._start_all_reduce(x, op).then(put)

    @abstractmethod
    def _start_reduce_scatter(
        self, x: torch.Tensor, dim: int, sizes: tuple[int, ...], op: str
    ) -> Pending[torch.Tensor]: ...

    @abstractmethod
    def _start_all_gather(
        self, x: torch.Tensor, dim: int, sizes: tuple[int, ...]
    ) -> Pending[torch.Tensor]: ...

    @abstractmethod
    def _start_all_to_all(
        self, pieces: list[torch.Tensor], shapes: list[Shape]
    ) -> Pending[list[torch.Tensor]]: ...

    @abstractmethod
    def _start_broadcast(self, x: torch.Tensor, source: int) -> Pending[torch.Tensor]: ...

    @abstractmethod
    def _start_scatter(
        self, like: torch.Tensor, pieces: list[torch.Tensor] | None, source: int
    ) -> Pending[torch.Tensor]: ...

    @abstractmethod
    def _start_gather(
        self, x: torch.Tensor, shapes: list[Shape], destination: int
    ) -> Pending[list[torch.Tensor] | None]: ...

    @abstractmethod
    def _start_exchange(
        self, sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor]
    ) -> Pending[None]: ...

    @abstractmethod
    def _start_send(self, x: torch.Tensor, destination: int) -> Pending[None]: ...

    @abstractmethod
    def _start_recv(self, like: torch.Tensor, source: int) -> Pending[torch.Tensor]: ...

    @abstractmethod
    def _start_barrier(self) -> Pending[None]: ...

    @abstractmethod
    def _start_gather_bytes(self, data: bytes, lengths: list[int]) -> Pending[list[bytes]]: ...
