"""The engine for torch's threaded process group: each thread of a test is a rank.

`torch.testing._internal.distributed.multi_threaded_pg` gives every thread a world of its own, whose
collectives copy within the memory of the process. Programs start it by `MultiThreadedTestCase` or
`spawn_threads_and_init_comms`. Its groups lack messages, and several other collectives for uneven
or unusual tensors. All of them follow from the one it has for tensors of any shapes, the all-to-all
of lists: here, every collective is one of these.
"""

from __future__ import annotations

from typing import NoReturn

import torch

from shardwise.comm.buffers import Shape
from shardwise.comm.c10d import C10dCommunicator
from shardwise.comm.engine import Engine
from shardwise.comm.pending import Pending
from shardwise.comm.reduction import reduce_contributions
from shardwise.core.errors import CollectiveError


class ThreadedCommunicator(C10dCommunicator):
    """Collectives on a threaded process group. A rank waits where it starts one."""

    def _start_all_to_all(
        self, pieces: list[torch.Tensor], shapes: list[Shape]
    ) -> Pending[list[torch.Tensor]]:
        sent = [piece.detach() for piece in pieces]
        received = [sent[0].new_empty(shape) for shape in shapes]
        work = self._group.alltoall(received, sent)
        return self._pending("all_to_all", work, lambda: received)

    def _start_gathered(
        self, x: torch.Tensor, shapes: list[Shape] | None = None
    ) -> Pending[list[torch.Tensor]]:
        return self._start_all_to_all([x] * self.size, shapes or [tuple(x.shape)] * self.size)

    def _start_all_reduce(self, x: torch.Tensor, op: str) -> Pending[torch.Tensor]:
        return self._start_gathered(x).then(lambda pieces: reduce_contributions(pieces, op))

    def _start_all_reduce_in_place(self, x: torch.Tensor, op: str) -> Pending[torch.Tensor]:
        return Engine._start_all_reduce_in_place(self, x, op)

    def _start_reduce_scatter(
        self, x: torch.Tensor, dim: int, sizes: tuple[int, ...], op: str
    ) -> Pending[torch.Tensor]:
        pieces = list(x.detach().split_with_sizes(sizes, dim))
        received = self._start_all_to_all(pieces, [tuple(pieces[self.index].shape)] * self.size)
        return received.then(lambda contributions: reduce_contributions(contributions, op))

    def _start_all_gather_into(
        self, x: torch.Tensor, rows: torch.Tensor, skip_own: bool
    ) -> Pending[torch.Tensor]:
        return Engine._start_all_gather_into(self, x, rows, skip_own)

    def _start_broadcast(self, x: torch.Tensor, source: int) -> Pending[torch.Tensor]:
        nothing = x.new_empty(0)
        sent = [x if self.index == source else nothing] * self.size
        shapes: list[Shape] = [(0,)] * self.size
        shapes[source] = tuple(x.shape)
        return self._start_all_to_all(sent, shapes).then(lambda received: received[source])

    def _start_exchange(
        self, sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor]
    ) -> Pending[None]:
        nothing = torch.empty(0)
        sent = [sends.get(peer, nothing).detach() for peer in range(self.size)]
        received = [receives.get(peer, nothing).detach() for peer in range(self.size)]
        work = self._group.alltoall(received, sent)
        return self._pending("exchange", work, lambda: None)

    def _start_send(self, x: torch.Tensor, destination: int) -> NoReturn:
        self._refuse_message("send")

    def _start_recv(self, like: torch.Tensor, source: int) -> NoReturn:
        self._refuse_message("recv")

    def _refuse_message(self, kind: str) -> NoReturn:
        raise CollectiveError(
            f"{kind}: torch's threaded process group has no messages between two ranks; use "
            "exchange, which all ranks call, or sw.simulate, whose ranks are threads too"
        )

    def _start_barrier(self) -> Pending[None]:
        return self._start_gathered(torch.empty(0)).then(lambda _: None)

    def _start_gather_bytes(self, data: bytes, lengths: list[int]) -> Pending[list[bytes]]:
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return self._start_gathered(mine, [(length,) for length in lengths]).then(
            lambda pieces: [piece.numpy().tobytes() for piece in pieces]
        )
