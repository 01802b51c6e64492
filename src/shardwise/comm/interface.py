"""Communicator: the collectives, the same for every engine.

The public methods check arguments, tell the trace and call a `_start_...` method, which each engine
(`engine`) implements. Every collective has two forms. `name_async` returns a `Pending` without
waiting, except that `gather_objects_async` waits for the lengths of all objects; `name` waits for
that result.

Results are new contiguous tensors that own their memory, but the pieces of an `all_to_all` may
share one buffer. Inputs are written to only where that is asked for. Peers are given by their
*index* in the communicator, not by global rank. No collective is differentiable:
`shardwise.redistribute` is.
"""

from __future__ import annotations

import functools
import inspect
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from shardwise.comm import trace
from shardwise.comm.buffers import (
    Shape,
    as_dim,
    as_messages,
    as_peer,
    as_piece_lists,
    as_pieces,
    as_shapes,
    as_sizes,
    as_tensors,
    check_tensor,
    format_dtype_and_shape,
    format_tuple,
    row_in_bytes,
    size_in_bytes,
)
from shardwise.comm.engine import Engine
from shardwise.comm.pending import Pending
from shardwise.comm.reduction import as_reduction
from shardwise.core.errors import CollectiveError
from shardwise.core.placement import ReduceOp

P = ParamSpec("P")
T = TypeVar("T")


def _waiting(start: Callable[P, Pending[T]]) -> Callable[P, T]:
    """Return the form of an asynchronous collective that waits for its result."""

    @functools.wraps(start)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return start(*args, **kwargs).wait()

    run.__name__ = start.__name__.removesuffix("_async")
    run.__qualname__ = start.__qualname__.removesuffix("_async")
    signature = inspect.signature(start)
    result = signature.return_annotation.removeprefix("Pending[").removesuffix("]")
    run.__signature__ = signature.replace(return_annotation=result)  # type: ignore[attr-defined]
    run.__annotations__ = {**start.__annotations__, "return": result}
    return run


class Communicator(Engine):
    """Collectives among some ranks, seen by one of them; `shardwise.communicator` returns it."""

    # ---- reductions

    def all_reduce_async(
        self, x: torch.Tensor, op: ReduceOp = "sum", *, in_place: bool = False
    ) -> Pending[torch.Tensor]:
        """Reduce all ranks' `x`, of equal shapes; every rank gets the result.

        `op` is sum, avg, max, min or product, or torch's `ReduceOp` of that name. On bool, sum
        means any and product means all.

        Arguments:
            in_place: write the result over `x`, and return `x`.
        """
        check_tensor("all_reduce(x)", x)
        name = as_reduction(op, x.dtype)
        start = self._start_all_reduce_in_place if in_place else self._start_all_reduce
        if not trace.listeners:
            self._begin()
            return start(x, name)
        received = 2 * size_in_bytes(x) * (self.size - 1) // self.size
        return self._traced("all_reduce", x, received, lambda: start(x, name))

    def reduce_scatter_async(
        self,
        x: torch.Tensor,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        op: ReduceOp = "sum",
    ) -> Pending[torch.Tensor]:
        """Reduce all ranks' `x`; each rank gets its piece of the result along `dim`.

        Arguments:
            sizes: the length of each rank's piece along `dim`; equal lengths by default.
        """
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
                f"of {tuple(x.shape)}; got {format_tuple(lengths)}"
            )
        received = row_in_bytes(x, dim) * lengths[self.index] * (self.size - 1)
        return self._traced(
            "reduce_scatter",
            x,
            received,
            lambda: self._start_reduce_scatter(x, dim, lengths, name),
        )

    def reduce_scatter_in_place_async(
        self,
        xs: Sequence[Sequence[torch.Tensor]],
        outs: Sequence[torch.Tensor],
        op: ReduceOp = "sum",
    ) -> Pending[None]:
        """Reduce and scatter several tensors into given memory.

        Rank i's `outs[j]` gets the reduction of all ranks' `xs[j][i]`, of the same shape.

        For large tensors: each travels as a message, and none is packed. Until the result is waited
        for, do not read `outs`.
        """
        places = as_tensors("reduce_scatter_in_place(outs)", outs)
        sent = as_piece_lists("reduce_scatter_in_place(xs)", xs, places, self.index, self.size)
        name = as_reduction(op, places[0].dtype)
        others = self._others()
        received = sum(map(size_in_bytes, places)) * len(others)
        return self._traced(
            "reduce_scatter",
            sent[0][0],
            received,
            lambda: self._start_sums(sent, places, name, others),
        )

    # ---- moves

    def all_gather_async(
        self, x: torch.Tensor, dim: int = 0, sizes: Sequence[int] | None = None
    ) -> Pending[torch.Tensor]:
        """Concatenate all ranks' `x` along `dim`, in rank order; every rank gets the result.

        Arguments:
            sizes: the length of each rank's piece along `dim`; all equal to `x`'s by default.
        """
        check_tensor("all_gather(x)", x)
        dim = as_dim(x, dim)
        if sizes is None:
            sizes = [x.shape[dim]] * self.size
        lengths = as_sizes("all_gather(sizes)", sizes, self.size)
        if lengths[self.index] != x.shape[dim]:
            raise CollectiveError(
                f"all_gather(sizes): expected sizes[{self.index}] to be {x.shape[dim]}, the length "
                f"of dim {dim} of this rank's {tuple(x.shape)}; got {format_tuple(lengths)}"
            )
        received = row_in_bytes(x, dim) * (sum(lengths) - x.shape[dim])
        return self._traced(
            "all_gather", x, received, lambda: self._start_all_gather(x, dim, lengths)
        )

    def all_gather_into_async(
        self, x: torch.Tensor, rows: torch.Tensor, *, skip_own: bool = False
    ) -> Pending[torch.Tensor]:
        """Gather all ranks' `x` on every rank, into given memory: `rows[i]` gets rank i's `x`.

        Arguments:
            x: of the same size on every rank.
            rows: one row per rank, contiguous; it is written to and returned.
            skip_own: whether the caller's own row, which it does not need, may stay unwritten.
        """
        check_tensor("all_gather_into(x)", x)
        check_tensor("all_gather_into(rows)", rows)
        wanted = (self.size, x.numel())
        is_like_x = rows.dtype == x.dtype and rows.device == x.device
        if tuple(rows.shape) != wanted or not is_like_x or not rows.is_contiguous():
            raise CollectiveError(
                f"all_gather_into(rows): expected {x.dtype} {wanted} on {x.device}, contiguous; "
                f"got {format_dtype_and_shape(rows)} on {rows.device}"
                f"{'' if rows.is_contiguous() else ', not contiguous'}"
            )
        received = size_in_bytes(x) * (self.size - 1)
        return self._traced(
            "all_gather", x, received, lambda: self._start_all_gather_into(x, rows, skip_own)
        )

    def all_gather_in_place_async(
        self, xs: Sequence[torch.Tensor], outs: Sequence[Sequence[torch.Tensor]]
    ) -> Pending[None]:
        """Gather several tensors of all ranks on every rank, into given memory.

        `outs[j][i]` gets rank i's `xs[j]`, of the same shape. A rank's own entries are not written.

        For large tensors: each travels as a message, and nothing is copied.
        """
        sent = as_tensors("all_gather_in_place(xs)", xs)
        places = as_piece_lists("all_gather_in_place(outs)", outs, sent, self.index, self.size)
        others = self._others()
        received = sum(size_in_bytes(each[peer]) for each in places for peer in others)
        messages = [
            (dict.fromkeys(others, x), {peer: each[peer] for peer in others})
            for x, each in zip(sent, places, strict=True)
        ]
        return self._traced(
            "all_gather", sent[0], received, lambda: self._start_exchanges(messages)
        )

    def all_to_all_async(
        self, pieces: Sequence[torch.Tensor], shapes: Sequence[Shape] | None = None
    ) -> Pending[list[torch.Tensor]]:
        """Send `pieces[i]` to rank i; return the list of the pieces received, in rank order.

        The tensors of the list may share one new buffer: keeping any of them keeps all of it.

        Arguments:
            pieces: one tensor for each rank; all of one dtype, of any shapes.
            shapes: the shapes of the tensors to receive; by default those of `pieces`.
        """
        sent = as_pieces("all_to_all(pieces)", pieces, self.size)
        if shapes is None:
            shapes = [tuple(piece.shape) for piece in sent]
        expected = as_shapes("all_to_all(shapes)", shapes, self.size)
        own = sent[self.index]
        if expected[self.index] != tuple(own.shape):
            raise CollectiveError(
                f"all_to_all(shapes): expected shapes[{self.index}] to be {tuple(own.shape)}, "
                f"what this rank sends itself; got {expected[self.index]}"
            )
        others = sum(torch.Size(shape).numel() for shape in expected) - own.numel()
        return self._traced(
            "all_to_all",
            sent[0],
            others * own.itemsize,
            lambda: self._start_all_to_all(sent, expected),
        )

    def broadcast_async(self, x: torch.Tensor, source: int = 0) -> Pending[torch.Tensor]:
        """Send `x` of rank `source` to every rank; elsewhere `x` only gives shape and dtype."""
        check_tensor("broadcast(x)", x)
        source = as_peer("broadcast(source)", source, self.size)
        received = 0 if source == self.index else size_in_bytes(x)
        return self._traced("broadcast", x, received, lambda: self._start_broadcast(x, source))

    def scatter_async(
        self, like: torch.Tensor, pieces: Sequence[torch.Tensor] | None, source: int = 0
    ) -> Pending[torch.Tensor]:
        """Send `pieces[i]` of rank `source` to rank i, for every rank.

        Arguments:
            like: a tensor of the shape and dtype that this rank is to get.
            pieces: one tensor for each rank, of any shapes; used only on rank `source`.
        """
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
                    f"scatter(like): expected {format_dtype_and_shape(mine)}, the piece for this "
                    f"rank; got {format_dtype_and_shape(like)}"
                )
        received = 0 if source == self.index else size_in_bytes(like)
        return self._traced(
            "scatter", like, received, lambda: self._start_scatter(like, sent, source)
        )

    def gather_async(
        self, x: torch.Tensor, shapes: Sequence[Shape] | None = None, destination: int = 0
    ) -> Pending[list[torch.Tensor] | None]:
        """Send all ranks' `x` to rank `destination`, which gets them as a list; others get None.

        Arguments:
            shapes: the shape of each rank's `x`; by default all equal to this rank's.
        """
        check_tensor("gather(x)", x)
        destination = as_peer("gather(destination)", destination, self.size)
        if shapes is None:
            shapes = [tuple(x.shape)] * self.size
        expected = as_shapes("gather(shapes)", shapes, self.size)
        if expected[self.index] != tuple(x.shape):
            raise CollectiveError(
                f"gather(shapes): expected {self.size}, one per rank, with {tuple(x.shape)} "
                f"at {self.index}; got {format_tuple(expected)}"
            )
        total = sum(torch.Size(shape).numel() for shape in expected) - x.numel()
        received = total * x.itemsize if destination == self.index else 0
        return self._traced(
            "gather", x, received, lambda: self._start_gather(x, expected, destination)
        )

    def exchange_async(
        self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]
    ) -> Pending[None]:
        """Send a tensor to each of some peers, and fill a tensor from each of some peers.

        Every rank calls it, also with nothing to send or receive. Contiguous tensors travel without
        a copy; others are copied once. For large tensors, or few messages; otherwise `all_to_all`
        starts faster.

        Arguments:
            sends: by the index of the peer.
            receives: by the index of the peer, tensors to write to. Each has the shape and dtype
                of what that peer sends.
        """
        given = as_messages("exchange(sends)", sends, self.size, self.index)
        taken = as_messages("exchange(receives)", receives, self.size, self.index)
        return self._traced(
            "exchange",
            next(iter(given.values()), None),
            sum(map(size_in_bytes, taken.values())),
            lambda: self._start_exchange(given, taken),
        )

    def send_async(self, x: torch.Tensor, destination: int) -> Pending[None]:
        """Send `x` to one rank, which must `recv` it; `send` waits until it does."""
        check_tensor("send(x)", x)
        destination = as_peer("send(destination)", destination, self.size, self.index)
        return self._traced("send", x, 0, lambda: self._start_send(x, destination))

    def recv_async(self, like: torch.Tensor, source: int) -> Pending[torch.Tensor]:
        """Receive a tensor that rank `source` sends; `like` gives its shape and dtype."""
        check_tensor("recv(like)", like)
        source = as_peer("recv(source)", source, self.size, self.index)
        return self._traced(
            "recv", like, size_in_bytes(like), lambda: self._start_recv(like, source)
        )

    # ---- without tensors

    def barrier_async(self) -> Pending[None]:
        """Wait until every rank has called this."""
        return self._traced("barrier", None, 0, self._start_barrier)

    def gather_objects_async(self, value: Any) -> Pending[list[Any]]:
        """Gather all ranks' `value`, any picklable object, as a list on every rank."""
        data = pickle.dumps(value)
        self._begin()
        event = self._tell("gather_objects", None, 0)
        sent = self._start_gather_bytes(len(data).to_bytes(8, "little"), [8] * self.size).wait()
        lengths = [int.from_bytes(each, "little") for each in sent]
        if event is not None:
            event.bytes = sum(lengths) - len(data)
        gathered = self._start_gather_bytes(data, lengths)
        return trace.end_with(event, gathered.then(lambda each: list(map(pickle.loads, each))))

    all_reduce = _waiting(all_reduce_async)
    reduce_scatter = _waiting(reduce_scatter_async)
    reduce_scatter_in_place = _waiting(reduce_scatter_in_place_async)
    all_gather = _waiting(all_gather_async)
    all_gather_into = _waiting(all_gather_into_async)
    all_gather_in_place = _waiting(all_gather_in_place_async)
    all_to_all = _waiting(all_to_all_async)
    broadcast = _waiting(broadcast_async)
    scatter = _waiting(scatter_async)
    gather = _waiting(gather_async)
    exchange = _waiting(exchange_async)
    send = _waiting(send_async)
    recv = _waiting(recv_async)
    barrier = _waiting(barrier_async)
    gather_objects = _waiting(gather_objects_async)
