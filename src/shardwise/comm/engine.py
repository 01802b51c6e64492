"""Engine: the part of a communicator that each kind of rank implements.

An engine knows some ranks and how to start each operation among them. The public methods of
`Communicator` check arguments and end in one of the `_start_...` methods here, through `_traced`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from shardwise.comm import agreement, trace
from shardwise.comm.buffers import Shape, format_tuple
from shardwise.comm.pending import Pending
from shardwise.comm.reduction import is_summed_in_place, reduce_into

T = TypeVar("T")
Messages = tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]
"""What to send and what to receive, by the index of the peer."""


_BETWEEN_TWO = ("send", "recv")


class Engine(ABC):
    """Base of `Communicator`: the ranks, the trace, and the methods that an engine implements.

    Arguments:
        ranks: the global ranks, in order.
        index: the position of the calling rank among them.
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
        among = f"{self.ranks[self.index]} of {format_tuple(self.ranks)}"
        return f"{type(self).__name__}(rank {among}{over})"

    @property
    def is_usable(self) -> bool:
        """Whether its process group still exists and its mesh was not aborted."""
        return not self.has_ended

    # ---- the trace

    def _traced(
        self, kind: str, x: torch.Tensor | None, received: int, start: Callable[[], Pending[T]]
    ) -> Pending[T]:
        if kind not in _BETWEEN_TWO:
            self._begin()
        if not trace.listeners:
            return start()
        return trace.end_with(self._tell(kind, x, received), start())

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

    # ---- facts that all ranks must state alike

    def _begin(self) -> None:
        """Begin a collective of all ranks: compare the facts that each has stated before it."""
        if agreement.stated.facts:
            for group, facts in agreement.take(self.ranks).items():
                self._compare_facts(group, agreement.as_text(self.ranks[self.index], facts))

    def _compare_facts(self, group: agreement.Group, facts: str) -> None:  # noqa: B027 - engines without peers do nothing
        """Compare the facts of this rank with those of the group, without waiting for them."""

    # ---- what every engine implements

    @abstractmethod
    def _start_all_reduce(self, x: torch.Tensor, op: str) -> Pending[torch.Tensor]: ...

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

    # ---- what an engine may implement without the copies made here

    def _start_all_reduce_in_place(self, x: torch.Tensor, op: str) -> Pending[torch.Tensor]:
        def put(total: torch.Tensor) -> torch.Tensor:
            x.detach().copy_(total)
            return x

        return self._start_all_reduce(x, op).then(put)

    def _start_all_gather_into(
        self, x: torch.Tensor, rows: torch.Tensor, skip_own: bool
    ) -> Pending[torch.Tensor]:
        gathered = self._start_all_gather(x.reshape(1, -1), 0, (1,) * self.size)
        return gathered.then(rows.copy_)

    # ---- collectives made of messages

    def _others(self) -> list[int]:
        return [peer for peer in range(self.size) if peer != self.index]

    def _start_sums(
        self,
        sent: Sequence[Sequence[torch.Tensor]],
        outs: Sequence[torch.Tensor],
        op: str,
        others: list[int],
    ) -> Pending[None]:
        messages: list[Messages] = []
        contributions = []
        for pieces, out in zip(sent, outs, strict=True):
            # One contribution may arrive where the sum will be, if the sum is made in place.
            direct = others[0] if others and is_summed_in_place(op, out.dtype) else None
            each = [
                x.detach() if peer == self.index else out if peer == direct else torch.empty_like(x)
                for peer, x in enumerate([pieces[self.index]] * self.size)
            ]
            contributions.append(each)
            given = {peer: pieces[peer] for peer in others}
            messages.append((given, {peer: each[peer] for peer in others}))

        def reduce(_: None) -> None:
            for each, out in zip(contributions, outs, strict=True):
                reduce_into(out, each, op)

        return self._start_exchanges(messages).then(reduce)

    def _start_exchanges(self, messages: Sequence[Messages]) -> Pending[None]:
        started = [self._start_exchange(sends, receives) for sends, receives in messages]

        def finish() -> None:
            for each in started:
                each.wait()

        return Pending(finish)
