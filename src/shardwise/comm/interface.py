"""Communicator: the collectives, as every engine offers them.

The public methods are here, once: they check arguments, tell the trace and hand over to the
engine's `_start_...`. Every collective has two forms, `name` and `name_async`; the second returns a
`Pending` and waits for nobody, except that `gather_objects_async` waits for the lengths of all
objects. Results are new contiguous tensors that own their memory, but the pieces of an `all_to_all`
may share one new buffer; inputs are never written to, unless that is asked for. Peers are given by
their *index* in the communicator, not by global rank.

None of these is differentiable: gradients are the business of `shardwise.redistribute`.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.comm import trace
from shardwise.comm.arguments import (
    Shape,
    as_dim,
    as_messages,
    as_peer,
    as_pieces,
    as_shapes,
    as_sizes,
    check_tensor,
    dtype_and_shape,
    shown,
)
from shardwise.comm.buffers import row_in_bytes, size_in_bytes
from shardwise.comm.in_place import InPlace
from shardwise.comm.pending import Pending
from shardwise.comm.reduction import as_reduction
from shardwise.errors import CollectiveError
from shardwise.placement import ReduceOp


class Communicator(InPlace):
    """A way for some ranks to talk, seen by one of them; `shardwise.communicator` gives it."""

    # ---- reductions

    def all_reduce(
        self, x: torch.Tensor, op: ReduceOp = "sum", *, in_place: bool = False
    ) -> torch.Tensor:
        """Every rank gets the reduction of all ranks' `x` (equal shapes).

        `op` is sum, avg, max, min or product, or torch's `ReduceOp` of that name. On bool, sum
        means any and product means all.

        Arguments:
            in_place: write the result over `x`, and return that.
        """
        return self.all_reduce_async(x, op, in_place=in_place).wait()

    def all_reduce_async(
        self, x: torch.Tensor, op: ReduceOp = "sum", *, in_place: bool = False
    ) -> Pending[torch.Tensor]:
        """`all_reduce`, under way."""
        check_tensor("all_reduce(x)", x)
        name = as_reduction(op, x.dtype)
        start = self._start_all_reduce_in_place if in_place else self._start_all_reduce
        if not trace.listeners:
            return start(x, name)
        received = 2 * size_in_bytes(x) * (self.size - 1) // self.size
        return self._traced("all_reduce", x, received, lambda: start(x, name))

    def reduce_scatter(
        self,
        x: torch.Tensor,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        op: ReduceOp = "sum",
    ) -> torch.Tensor:
        """Each rank gets its piece, along `dim`, of the reduction of all ranks' `x`.

        Arguments:
            sizes: the length of each rank's piece along `dim`; equal ones by default.
        """
        return self.reduce_scatter_async(x, dim, sizes, op).wait()

    def reduce_scatter_async(
        self,
        x: torch.Tensor,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        op: ReduceOp = "sum",
    ) -> Pending[torch.Tensor]:
        """`reduce_scatter`, under way."""
        check_tensor("reduce_scatter(x)", x)
        name = as_reduction(op, x.dtype)
        dim = as_dim(x, dim)
        if sizes is None:
            if x.shape[dim] % self.size:
                raise CollectiveError(
                    f"reduce_scatter(sizes): expected the lengths of the {self.size} pieces, as "
                    f"dim {dim} of {tuple(x.shape)} does not divide evenly; got None"
                )
            sizes = [x.shape[dim] // self.size] * self.size
        lengths = as_sizes("reduce_scatter(sizes)", sizes, self.size)
        if sum(lengths) != x.shape[dim]:
            raise CollectiveError(
                f"reduce_scatter(sizes): expected a sum of {x.shape[dim]}, the length of dim {dim} "
                f"of {tuple(x.shape)}; got {shown(lengths)}"
            )
        own = row_in_bytes(x, dim) * lengths[self.index]
        return self._traced(
            "reduce_scatter",
            x,
            own * (self.size - 1),
            lambda: self._start_reduce_scatter(x, dim, lengths, name),
        )

    # ---- moves

    def all_gather(
        self, x: torch.Tensor, dim: int = 0, sizes: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Every rank gets all ranks' `x`, joined along `dim` in order.

        Arguments:
            sizes: the length of each rank's piece along `dim`; all equal to `x`'s by default.
        """
        return self.all_gather_async(x, dim, sizes).wait()

    def all_gather_async(
        self, x: torch.Tensor, dim: int = 0, sizes: Sequence[int] | None = None
    ) -> Pending[torch.Tensor]:
        """`all_gather`, under way."""
        check_tensor("all_gather(x)", x)
        dim = as_dim(x, dim)
        if sizes is None:
            sizes = [x.shape[dim]] * self.size
        lengths = as_sizes("all_gather(sizes)", sizes, self.size)
        if lengths[self.index] != x.shape[dim]:
            raise CollectiveError(
                f"all_gather(sizes): expected sizes[{self.index}] to be {x.shape[dim]}, the length "
                f"of dim {dim} of this rank's {tuple(x.shape)}; got {shown(lengths)}"
            )
        row = row_in_bytes(x, dim)
        return self._traced(
            "all_gather",
            x,
            row * (sum(lengths) - x.shape[dim]),
            lambda: self._start_all_gather(x, dim, lengths),
        )

    def all_to_all(
        self, pieces: Sequence[torch.Tensor], shapes: Sequence[Shape] | None = None
    ) -> list[torch.Tensor]:
        """Rank i gets `pieces[i]` of every rank, as a list in rank order.

        The tensors of the list may share one new buffer: to hold one is to hold all.

        Arguments:
            pieces: one tensor for each rank; all of one dtype, of any shapes.
            shapes: the shapes of the tensors to come; by default those of `pieces`.
        """
        return self.all_to_all_async(pieces, shapes).wait()

    def all_to_all_async(
        self, pieces: Sequence[torch.Tensor], shapes: Sequence[Shape] | None = None
    ) -> Pending[list[torch.Tensor]]:
        """`all_to_all`, under way."""
        sent = as_pieces("all_to_all(pieces)", pieces, self.size)
        if shapes is None:
            shapes = [tuple(piece.shape) for piece in sent]
        expected = as_shapes("all_to_all(shapes)", shapes, self.size)
        if expected[self.index] != tuple(sent[self.index].shape):
            raise CollectiveError(
                f"all_to_all(shapes): expected shapes[{self.index}] to be "
                f"{tuple(sent[self.index].shape)}, what this rank sends itself; "
                f"got {expected[self.index]}"
            )
        others = sum(torch.Size(shape).numel() for shape in expected)
        others -= sent[self.index].numel()
        return self._traced(
            "all_to_all",
            sent[0],
            others * sent[0].itemsize,
            lambda: self._start_all_to_all(sent, expected),
        )

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Every rank gets `x` of rank `source`. Elsewhere `x` only tells shape and dtype."""
        return self.broadcast_async(x, source).wait()

    def broadcast_async(self, x: torch.Tensor, source: int = 0) -> Pending[torch.Tensor]:
        """`broadcast`, under way."""
        check_tensor("broadcast(x)", x)
        source = as_peer("broadcast(source)", source, self.size)
        received = 0 if source == self.index else size_in_bytes(x)
        return self._traced("broadcast", x, received, lambda: self._start_broadcast(x, source))

    def scatter(
        self, like: torch.Tensor, pieces: Sequence[torch.Tensor] | None, source: int = 0
    ) -> torch.Tensor:
        """Rank i gets `pieces[i]` of rank `source`.

        Arguments:
            like: a tensor of the shape and dtype that this rank is to get.
            pieces: one tensor for each rank, of any shapes; looked at only on rank `source`.
        """
        return self.scatter_async(like, pieces, source).wait()

    def scatter_async(
        self, like: torch.Tensor, pieces: Sequence[torch.Tensor] | None, source: int = 0
    ) -> Pending[torch.Tensor]:
        """`scatter`, under way."""
        check_tensor("scatter(like)", like)
        source = as_peer("scatter(source)", source, self.size)
        sent = None
        if source == self.index:
            if pieces is None:
                raise CollectiveError(
                    "scatter(pieces): expected tensors on the source rank, got None"
                )
            sent = as_pieces("scatter(pieces)", pieces, self.size)
            mine = sent[self.index]
            if mine.shape != like.shape or mine.dtype != like.dtype:
                raise CollectiveError(
                    f"scatter(like): expected {dtype_and_shape(mine)}, the piece for this rank; "
                    f"got {dtype_and_shape(like)}"
                )
        received = 0 if source == self.index else size_in_bytes(like)
        return self._traced(
            "scatter", like, received, lambda: self._start_scatter(like, sent, source)
        )

    def gather(
        self, x: torch.Tensor, shapes: Sequence[Shape] | None = None, destination: int = 0
    ) -> list[torch.Tensor] | None:
        """Rank `destination` gets the list of all ranks' `x`; the others get None.

        Arguments:
            shapes: the shape of each rank's `x`; by default all equal to this rank's.
        """
        return self.gather_async(x, shapes, destination).wait()

    def gather_async(
        self, x: torch.Tensor, shapes: Sequence[Shape] | None = None, destination: int = 0
    ) -> Pending[list[torch.Tensor] | None]:
        """`gather`, under way."""
        check_tensor("gather(x)", x)
        destination = as_peer("gather(destination)", destination, self.size)
        if shapes is None:
            shapes = [tuple(x.shape)] * self.size
        expected = as_shapes("gather(shapes)", shapes, self.size)
        if expected[self.index] != tuple(x.shape):
            raise CollectiveError(
                f"gather(shapes): expected {self.size}, one per rank, with {tuple(x.shape)} "
                f"at {self.index}; got {shown(expected)}"
            )
        total = sum(torch.Size(shape).numel() for shape in expected) - x.numel()
        received = total * x.itemsize if destination == self.index else 0
        return self._traced(
            "gather", x, received, lambda: self._start_gather(x, expected, destination)
        )

    def exchange(
        self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]
    ) -> None:
        """Send a tensor to each of some peers, and fill a tensor from each of some peers.

        Every rank calls it, also with nothing to do. Contiguous tensors travel from and to where
        they lie; others are copied once. For large tensors, or few messages; else `all_to_all`
        starts faster.

        Arguments:
            sends: by the index of the peer.
            receives: by the index of the peer, tensors to write to. Each has the shape and dtype
                of what that peer sends.
        """
        self.exchange_async(sends, receives).wait()

    def exchange_async(
        self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]
    ) -> Pending[None]:
        """`exchange`, under way."""
        given = as_messages("exchange(sends)", sends, self.size, self.index)
        taken = as_messages("exchange(receives)", receives, self.size, self.index)
        return self._traced(
            "exchange",
            next(iter(given.values()), None),
            sum(map(size_in_bytes, taken.values())),
            lambda: self._start_exchange(given, taken),
        )

    def send(self, x: torch.Tensor, destination: int) -> None:
        """Send `x` to one rank, which must `recv` it; waits until it does."""
        self.send_async(x, destination).wait()

    def send_async(self, x: torch.Tensor, destination: int) -> Pending[None]:
        """`send`, under way."""
        check_tensor("send(x)", x)
        destination = as_peer("send(destination)", destination, self.size, self.index)
        return self._traced("send", x, 0, lambda: self._start_send(x, destination))

    def recv(self, like: torch.Tensor, source: int) -> torch.Tensor:
        """A tensor that rank `source` sends; `like` tells its shape and dtype."""
        return self.recv_async(like, source).wait()

    def recv_async(self, like: torch.Tensor, source: int) -> Pending[torch.Tensor]:
        """`recv`, under way."""
        check_tensor("recv(like)", like)
        source = as_peer("recv(source)", source, self.size, self.index)
        return self._traced(
            "recv", like, size_in_bytes(like), lambda: self._start_recv(like, source)
        )

    # ---- without tensors

    def barrier(self) -> None:
        """Return when every rank has come here."""
        self.barrier_async().wait()

    def barrier_async(self) -> Pending[None]:
        """`barrier`, under way."""
        return self._traced("barrier", None, 0, self._start_barrier)

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank gets the list of all ranks' `value`, which must be picklable."""
        return self.gather_objects_async(value).wait()

    def gather_objects_async(self, value: Any) -> Pending[list[Any]]:
        """`gather_objects`, under way once this rank has waited for the lengths of all objects."""
        data = pickle.dumps(value)
        event = self._tell("gather_objects", None, 0)
        sent = self._start_gather_bytes(len(data).to_bytes(8, "little"), [8] * self.size).wait()
        lengths = [int.from_bytes(each, "little") for each in sent]
        if event is not None:
            event.bytes = sum(lengths) - len(data)
        gathered = self._start_gather_bytes(data, lengths)
        return trace.ending(event, gathered.then(lambda each: list(map(pickle.loads, each))))
