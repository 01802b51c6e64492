"""The engine without peers: collectives of meta tensors that only produce shapes."""

from __future__ import annotations

from typing import NoReturn

import torch

from shardwise.comm.arguments import Shape
from shardwise.comm.interface import Communicator
from shardwise.comm.pending import Pending
from shardwise.errors import CollectiveError


class AbstractCommunicator(Communicator):
    """What a rank of an abstract mesh sees: the right shapes, and no values.

    Takes meta tensors only: a real tensor would come back without its values, silently.
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
