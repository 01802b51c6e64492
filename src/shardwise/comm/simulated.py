"""The engine of `simulate`: ranks are threads, and the last one to join computes a collective."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import torch

from shardwise.comm.agreement import Group
from shardwise.comm.buffers import Shape, contiguous_copy, format_dtype_and_shape
from shardwise.comm.interface import Communicator
from shardwise.comm.offline import AloneCommunicator
from shardwise.comm.pending import Pending
from shardwise.comm.rank_scheduler import (
    CollectiveCall,
    Combine,
    RankScheduler,
    SimulatedGroup,
)
from shardwise.comm.reduction import reduce_contributions
from shardwise.comm.trace import user_line
from shardwise.core.errors import MismatchError
from shardwise.core.world import Link, World


class SimulatedCommunicator(Communicator):
    """Collectives between threads that take turns under a `RankScheduler`."""

    def __init__(
        self,
        scheduler: RankScheduler,
        ranks: tuple[int, ...],
        index: int,
        axes: tuple[str, ...],
        channel: str = "",
    ) -> None:
        super().__init__(ranks, index, axes)
        self._scheduler = scheduler
        self._facts: dict[Group, str] = {}
        """The facts that this rank states in its next collective, by the group that compares."""
        self._group = SimulatedGroup(
            ranks, channel, scheduler.generation(ranks[index], (ranks, channel))
        )

    @property
    def is_usable(self) -> bool:
        """Whether this rank did not abort its mesh, or another mesh of the same ranks."""
        way = self._group.ranks, self._group.channel
        now = self._scheduler.generation(self._rank, way)
        return not self.has_ended and self._group.generation == now

    def _start_all_reduce(self, x: torch.Tensor, op: str) -> Pending[torch.Tensor]:
        def combine(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            return _copies(reduce_contributions(inputs, op), self.size)

        agreed = {"shape": tuple(x.shape), "dtype": x.dtype, "op": op}
        return self._meet("all_reduce", agreed, [x], x.detach(), combine)

    def _start_reduce_scatter(
        self, x: torch.Tensor, dim: int, sizes: tuple[int, ...], op: str
    ) -> Pending[torch.Tensor]:
        def combine(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            total = reduce_contributions(inputs, op)
            return [contiguous_copy(piece) for piece in total.split_with_sizes(sizes, dim)]

        agreed = {"shape": tuple(x.shape), "dtype": x.dtype, "dim": dim, "sizes": sizes, "op": op}
        return self._meet("reduce_scatter", agreed, [x], x.detach(), combine)

    def _start_all_gather(
        self, x: torch.Tensor, dim: int, sizes: tuple[int, ...]
    ) -> Pending[torch.Tensor]:
        def combine(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            return _copies(torch.cat([x.contiguous() for x in inputs], dim), self.size)

        whole = (*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :])
        agreed = {"whole": whole, "dtype": x.dtype, "dim": dim, "sizes": sizes}
        return self._meet("all_gather", agreed, [x], x.detach(), combine)

    def _start_all_to_all(
        self, pieces: list[torch.Tensor], shapes: list[Shape]
    ) -> Pending[list[torch.Tensor]]:
        def combine(
            inputs: list[tuple[list[torch.Tensor], list[Shape]]],
        ) -> list[list[torch.Tensor]]:
            for sender, (sent, _) in enumerate(inputs):
                for receiver, (_, expected) in enumerate(inputs):
                    if tuple(sent[receiver].shape) != expected[sender]:
                        raise MismatchError(
                            f"all_to_all: rank {self.ranks[sender]} sends a piece of shape "
                            f"{tuple(sent[receiver].shape)} to rank {self.ranks[receiver]}, "
                            f"which expects {expected[sender]}"
                        )
            columns = zip(*(sent for sent, _ in inputs), strict=True)
            return [[contiguous_copy(piece) for piece in column] for column in columns]

        payload = ([piece.detach() for piece in pieces], shapes)
        return self._meet("all_to_all", {"dtype": pieces[0].dtype}, pieces, payload, combine)

    def _start_broadcast(self, x: torch.Tensor, source: int) -> Pending[torch.Tensor]:
        def combine(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            return [contiguous_copy(inputs[source]) for _ in inputs]

        agreed = {"shape": tuple(x.shape), "dtype": x.dtype, "source": source}
        return self._meet("broadcast", agreed, [x], x.detach(), combine)

    def _start_scatter(
        self, like: torch.Tensor, pieces: list[torch.Tensor] | None, source: int
    ) -> Pending[torch.Tensor]:
        def combine(
            inputs: list[tuple[Shape, list[torch.Tensor] | None]],
        ) -> list[torch.Tensor]:
            sent = inputs[source][1]
            assert sent is not None, "checked on the source rank"
            for receiver, (shape, _) in enumerate(inputs):
                if tuple(sent[receiver].shape) != shape:
                    raise MismatchError(
                        f"scatter: rank {self.ranks[source]} sends a piece of shape "
                        f"{tuple(sent[receiver].shape)} to rank {self.ranks[receiver]}, "
                        f"which expects {shape}"
                    )
            return [contiguous_copy(piece) for piece in sent]

        agreed = {"dtype": like.dtype, "source": source}
        payload = (tuple(like.shape), pieces)
        return self._meet("scatter", agreed, pieces or [], payload, combine)

    def _start_gather(
        self, x: torch.Tensor, shapes: list[Shape], destination: int
    ) -> Pending[list[torch.Tensor] | None]:
        def combine(inputs: list[torch.Tensor]) -> list[list[torch.Tensor] | None]:
            results: list[list[torch.Tensor] | None] = [None] * self.size
            results[destination] = [contiguous_copy(x) for x in inputs]
            return results

        agreed = {"dtype": x.dtype, "shapes": shapes, "destination": destination}
        return self._meet("gather", agreed, [x], x.detach(), combine)

    def _start_exchange(
        self, sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor]
    ) -> Pending[None]:
        def combine(
            inputs: list[tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]],
        ) -> list[None]:
            sent = {(i, j): x for i, (given, _) in enumerate(inputs) for j, x in given.items()}
            taken = {(i, j): x for j, (_, wanted) in enumerate(inputs) for i, x in wanted.items()}
            for pair in sorted(sent.keys() | taken.keys()):
                here, there = _described(sent.get(pair)), _described(taken.get(pair))
                if here != there:
                    source, destination = (self.ranks[index] for index in pair)
                    raise MismatchError(
                        f"exchange: rank {source} sends {here} to rank {destination}, "
                        f"which expects {there}"
                    )
            for pair, x in taken.items():
                x.detach().copy_(sent[pair].detach())
            return [None for _ in inputs]

        return self._meet("exchange", {}, list(sends.values()), (sends, receives), combine)

    def _start_send(self, x: torch.Tensor, destination: int) -> Pending[None]:
        return self._meet_peer(self.index, destination, x, [x], x.detach())

    def _start_recv(self, like: torch.Tensor, source: int) -> Pending[torch.Tensor]:
        return self._meet_peer(source, self.index, like, [], None)

    def _start_barrier(self) -> Pending[None]:
        return self._meet("barrier", {}, [], None, lambda inputs: [None for _ in inputs])

    def _start_gather_bytes(self, data: bytes, lengths: list[int]) -> Pending[list[bytes]]:
        return self._meet("gather_objects", {}, [], data, lambda inputs: [inputs for _ in inputs])

    # ---- inside

    def _compare_facts(self, group: Group, facts: str) -> None:
        self._facts[group] = facts

    @property
    def _rank(self) -> int:
        return self.ranks[self.index]

    def _meet(
        self,
        kind: str,
        agreed: dict[str, Any],
        tensors: Sequence[torch.Tensor],
        payload: Any,
        combine: Combine,
    ) -> Pending[Any]:
        call = CollectiveCall(
            self._rank, kind, self.axes, agreed, tensors, payload, user_line(), self._facts
        )
        self._facts = {}
        meeting = self._scheduler.join((self._group, None), self.ranks, call, combine)
        return Pending(lambda: self._scheduler.wait(self._rank, meeting))

    def _meet_peer(
        self,
        source: int,
        destination: int,
        x: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        payload: torch.Tensor | None,
    ) -> Pending[Any]:
        """Start a send or a receive. As on gloo, the sender waits until the receiver comes."""
        members = (self.ranks[source], self.ranks[destination])
        agreed = {"from": members[0], "to": members[1], "shape": tuple(x.shape), "dtype": x.dtype}
        call = CollectiveCall(
            self._rank, "send/recv", self.axes, agreed, tensors, payload, user_line()
        )
        place = self._group, (source, destination)
        meeting = self._scheduler.join(
            place, members, call, lambda given: [None, contiguous_copy(given[0])]
        )
        return Pending(lambda: self._scheduler.wait(self._rank, meeting))


class SimulatedWorld(World):
    """The world of one simulated rank."""

    is_simulated = True
    has_process_groups = False

    def __init__(self, scheduler: RankScheduler, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._scheduler = scheduler
        self.shares_random_state = scheduler.parallel

    def describe(self) -> str:
        """Say what kind of ranks these are."""
        return f"sw.simulate runs {self.size} ranks here, as threads"

    def communicator(
        self, ranks: tuple[int, ...], axes: tuple[str, ...], channel: str = ""
    ) -> Communicator:
        """Return the communicator of these ranks."""
        if len(ranks) == 1:
            return AloneCommunicator(ranks, 0, axes)
        index = ranks.index(self.rank)
        return SimulatedCommunicator(self._scheduler, ranks, index, axes, channel)

    def first_value(
        self, ranks: tuple[int, ...], name: Any, number: int, value: int
    ) -> tuple[int, int]:
        """Return the first of the ranks that came, and its value, without waiting."""
        key = name, number, self._scheduler.generation(self.rank, (ranks, ""))
        return self._scheduler.first_value(key, len(ranks), self.rank, value)

    def _end(self, links: Set[Link], along_one_axis: Set[Link]) -> None:
        """Fail all meetings of these ranks, now and later."""
        self._scheduler.leave_groups(self.rank, links)


def _described(x: torch.Tensor | None) -> str:
    return "nothing" if x is None else format_dtype_and_shape(x)


def _copies(x: torch.Tensor, count: int) -> list[torch.Tensor]:
    return [x, *(x.clone() for _ in range(count - 1))]
