"""The engine of real ranks: collectives on torch.distributed process groups.

Moves carry bytes, so every dtype goes through as it is. Reductions are computed by the backend
where it does so exactly, and on the ranks otherwise. Facts about gloo, measured with torch 2.13,
that shape this file:

- its reduce-scatter is an all-reduce inside (6.0 bytes on the wire per byte of input on 4 ranks,
  where 3.0 are enough); an all-to-all and a local sum move half of that and take less time;
- its all-gather and scatter refuse pieces of unequal size, its all-to-all takes them;
- it sums bf16 and fp16 with a rounding at every step; here they are summed in float32;
- its max and min of floats lose NaN; here floats are mapped to integers of the same order.

Every call of the backend is made when the collective starts, so that the order of calls is the
order of the program on every rank, however the results are waited for. Only `gather_objects` makes
two, of which it waits for the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeVar
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from shardwise.comm.agreement import Group, difference
from shardwise.comm.buffers import (
    Shape,
    as_bytes,
    empty_like,
    format_tuple,
    is_large,
    pack,
    unpack,
    with_own_storage,
)
from shardwise.comm.interface import Communicator
from shardwise.comm.pending import Pending
from shardwise.comm.reduction import BOOL_OPS, UNSIGNED, reduce_contributions
from shardwise.core.errors import CollectiveError, MismatchError
from shardwise.torch_internals import (
    device_for_objects,
    start_all_gather,
    start_reduce_scatter,
    world_of_torch,
)

T = TypeVar("T")

_MOST_LEFT_IN_STORE = 64
"""The most keys with facts of ranks that a rank leaves in a store."""


@dataclass(slots=True)
class _Progress:
    """Where a process group is; the same on all of its ranks."""

    generation: int
    """How many groups of this name there were: they may share a store, as after another
    `init_process_group` under torchrun."""
    collectives: int = 0
    """How many collectives of all its ranks have begun."""


_progress: WeakKeyDictionary[dist.ProcessGroup, _Progress] = WeakKeyDictionary()
_generations: Counter[tuple[str, int]] = Counter()
"""How many process groups of each name there were, on each rank: ranks may be threads."""

_REDUCE_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # and a division, as not every backend has AVG
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}
# The dtypes that gloo reduces without loss in their place: int16 sums wrap alike in int32.
_WIDER = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.int16: torch.int32,
    **UNSIGNED,
}
_SUMMED_AS_IT_IS = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})
_SAME_SIZE = {torch.float32: torch.int32, torch.float64: torch.int64}


class C10dCommunicator(Communicator):
    """Collectives on one torch process group."""

    def __init__(
        self, group: dist.ProcessGroup, ranks: tuple[int, ...], index: int, axes: tuple[str, ...]
    ) -> None:
        super().__init__(ranks, index, axes)
        # Weak, so that destroy_process_group frees the group.
        self._group_reference = ref(group)
        if group not in _progress:
            name = group.group_name, ranks[index]
            _generations[name] += 1
            _progress[group] = _Progress(_generations[name])
        self._progress = _progress[group]
        self._left_in_store: list[str] = []
        self._exchanges = 0
        self._messages: dict[int, tuple[list[Any], tuple[torch.Tensor, ...]]] = {}
        """Messages that were started. A backend drops a message that nobody references, even before
        it is sent; gloo does not tell when it was sent, so one that is never waited for stays."""

    @property
    def is_usable(self) -> bool:
        """Whether its process group still exists, and its mesh was not aborted."""
        return not self.has_ended and living_group(self._group_reference) is not None

    @property
    def _group(self) -> dist.ProcessGroup:
        group = living_group(self._group_reference)
        if self.has_ended:
            raise CollectiveError(
                f"the mesh that ranks {format_tuple(self.ranks)} talked over was aborted; make it "
                "again, on all of its ranks, and ask sw.communicator for a new one"
            )
        if group is None:
            raise CollectiveError(
                f"the process group of ranks {format_tuple(self.ranks)} was destroyed; if the "
                "default group still exists or does so again, ask sw.communicator for a new one"
            )
        return group

    # ---- facts that all ranks must state alike

    def _begin(self) -> None:
        self._progress.collectives += 1
        super()._begin()

    def _compare_facts(self, group: Group, facts: str) -> None:
        _, store = world_of_torch().pg_map.get(self._group, (None, None))
        if store is None:
            return
        ranks = blake2b(repr(sorted(group)).encode(), digest_size=8).hexdigest()
        number = f"{self._progress.generation}/{self._progress.collectives}"
        key = f"shardwise facts/{self._group.group_name}/{number}/{ranks}"
        try:
            first = store.compare_set(key, "", facts).decode()
            if first == facts:  # this rank came first, and cleans up
                self._left_in_store.append(key)
                if len(self._left_in_store) > _MOST_LEFT_IN_STORE:
                    store.delete_key(self._left_in_store.pop(0))
        except (RuntimeError, TypeError):  # a store that cannot compare, or is gone
            return
        if problem := difference(first, facts):
            self._progress.collectives -= 1  # this one does not begin
            raise MismatchError(problem)

    # ---- reductions

    def _start_all_reduce(self, x: torch.Tensor, op: str) -> Pending[torch.Tensor]:
        if op == "sum" and x.dtype in _SUMMED_AS_IT_IS:
            total = x.detach().clone(memory_format=torch.contiguous_format)
            work = self._group.allreduce([total], _ALLREDUCE_OPTIONS["sum"])
            return self._pending("all_reduce", work, lambda: total, x)
        if x.is_complex() and op == "product":
            return self._start_gathered(x).then(lambda pieces: reduce_contributions(pieces, op))
        total, backend_op = _reducible(x, op)
        wide = total.dtype
        ordered = op in ("max", "min") and x.device.type == "cpu" and wide in _SAME_SIZE
        if ordered:
            total = _ordered(total, op)
        work = self._group.allreduce([total], _ALLREDUCE_OPTIONS[backend_op])

        def finish() -> torch.Tensor:
            result = total / self.size if op == "avg" else total
            if ordered:
                result = _negatives_reversed(result).view(wide)
            if x.is_complex():
                return torch.view_as_complex(result).to(x.dtype)
            return result.view(torch.bool) if x.dtype is torch.bool else result.to(x.dtype)

        return self._pending("all_reduce", work, finish, x)

    def _start_all_reduce_in_place(self, x: torch.Tensor, op: str) -> Pending[torch.Tensor]:
        is_plain = x.is_contiguous() and not x.is_neg()
        if op == "sum" and x.dtype in _SUMMED_AS_IT_IS and is_plain:
            work = self._group.allreduce([x.detach()], _ALLREDUCE_OPTIONS["sum"])
            return self._pending("all_reduce", work, lambda: x)
        return super()._start_all_reduce_in_place(x, op)

    def _start_reduce_scatter(
        self, x: torch.Tensor, dim: int, sizes: tuple[int, ...], op: str
    ) -> Pending[torch.Tensor]:
        pieces = list(x.detach().split_with_sizes(sizes, dim))
        native = not x.is_complex() and x.dtype not in UNSIGNED
        if x.device.type != "cpu" and len(set(sizes)) == 1 and native:
            return self._start_native_reduce_scatter(pieces, op)
        own = pieces[self.index]
        if not is_large(x.numel() * x.itemsize):
            received = self._start_all_to_all(pieces, [tuple(own.shape)] * self.size)
            return received.then(lambda contributions: reduce_contributions(contributions, op))
        contributions = [
            own if peer == self.index else empty_like(own) for peer in range(self.size)
        ]
        started = self._start_exchange_with_all(pieces, contributions)
        return started.then(lambda _: reduce_contributions(contributions, op))

    def _start_native_reduce_scatter(
        self, pieces: list[torch.Tensor], op: str
    ) -> Pending[torch.Tensor]:
        """Start the reduce-scatter of a backend that has an efficient one, such as NCCL."""
        packed = pack(pieces)
        result = empty_like(pieces[self.index])
        out = result.view(-1)
        options = dist.ReduceScatterOptions()
        options.reduceOp = _REDUCE_OPS[op]
        if result.dtype is torch.bool:
            packed, out = as_bytes(packed), as_bytes(out)
            options.reduceOp = _REDUCE_OPS[BOOL_OPS[op]]
        work = start_reduce_scatter(self._group, out, packed, options)
        return self._pending(
            "reduce_scatter", work, lambda: result / self.size if op == "avg" else result, packed
        )

    # ---- moves

    def _start_all_gather(
        self, x: torch.Tensor, dim: int, sizes: tuple[int, ...]
    ) -> Pending[torch.Tensor]:
        shapes = [(*x.shape[:dim], size, *x.shape[dim + 1 :]) for size in sizes]
        joined_outside = all(size == 1 for size in x.shape[:dim])

        def join(pieces: list[torch.Tensor]) -> torch.Tensor:
            if joined_outside:  # the buffer is the result
                whole = (*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :])
                return pack(pieces).view(whole)
            return torch.cat(pieces, dim)

        return self._start_gathered(x, shapes).then(join)

    def _start_all_gather_into(
        self, x: torch.Tensor, rows: torch.Tensor, skip_own: bool
    ) -> Pending[torch.Tensor]:
        own = pack([x])
        if x.device.type == "cpu" and is_large(rows.numel() * rows.itemsize):
            if not skip_own:
                rows[self.index].copy_(own)
            started = self._start_exchange_with_all([own] * self.size, list(rows.detach()))
            return started.then(lambda _: rows)
        work = start_all_gather(self._group, as_bytes(rows.detach()), as_bytes(own))
        return self._pending("all_gather", work, lambda: rows, own)

    def _start_gathered(
        self, x: torch.Tensor, shapes: list[Shape] | None = None
    ) -> Pending[list[torch.Tensor]]:
        """Gather all ranks' `x` as consecutive pieces of one new buffer."""
        shapes = shapes or [tuple(x.shape)] * self.size
        whole = sum(torch.Size(shape).numel() for shape in shapes) * x.itemsize
        if x.device.type == "cpu" and is_large(whole):
            return self._start_all_to_all_of_large([x.detach()] * self.size, shapes)
        if len(set(shapes)) > 1:
            return self._start_all_to_all([x.detach()] * self.size, shapes)
        mine = pack([x])
        received = mine.new_empty(mine.numel() * self.size)
        work = start_all_gather(self._group, as_bytes(received), as_bytes(mine))
        return self._pending("all_gather", work, lambda: unpack(received, shapes), mine)

    def _start_all_to_all(
        self, pieces: list[torch.Tensor], shapes: list[Shape]
    ) -> Pending[list[torch.Tensor]]:
        packed = pack(pieces)
        sent = [piece.numel() * piece.itemsize for piece in pieces]
        counts = [torch.Size(shape).numel() for shape in shapes]
        received = packed.new_empty(sum(counts))
        work = self._group.alltoall_base(
            as_bytes(received),
            as_bytes(packed),
            [count * packed.itemsize for count in counts],
            sent,
        )
        return self._pending("all_to_all", work, lambda: unpack(received, shapes), packed)

    def _start_all_to_all_of_large(
        self, pieces: list[torch.Tensor], shapes: list[Shape]
    ) -> Pending[list[torch.Tensor]]:
        """Start an all-to-all by messages, without packing. All ranks must do so, or none."""
        buffer = pieces[0].new_empty(sum(torch.Size(shape).numel() for shape in shapes))
        received = unpack(buffer, shapes)
        received[self.index].copy_(pieces[self.index].detach())
        return self._start_exchange_with_all(pieces, received).then(lambda _: received)

    def _start_exchange_with_all(
        self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]
    ) -> Pending[None]:
        """Start an exchange with every other rank; the entries of this rank are not touched."""
        others = [peer for peer in range(self.size) if peer != self.index]
        return self._start_exchange(
            {peer: sent[peer] for peer in others}, {peer: received[peer] for peer in others}
        )

    def _start_broadcast(self, x: torch.Tensor, source: int) -> Pending[torch.Tensor]:
        own = source == self.index
        result = empty_like(x)
        if own:
            result.copy_(x.detach())
        options = dist.BroadcastOptions()
        options.rootRank = source
        work = self._group.broadcast([as_bytes(result)], options)
        return self._pending("broadcast", work, lambda: result)

    def _start_scatter(
        self, like: torch.Tensor, pieces: list[torch.Tensor] | None, source: int
    ) -> Pending[torch.Tensor]:
        nothing: Shape = (0,)
        shapes = [tuple(like.shape) if peer == source else nothing for peer in range(self.size)]
        sent = pieces or [like.new_empty(nothing)] * self.size
        return self._start_all_to_all(sent, shapes).then(lambda received: received[source])

    def _start_gather(
        self, x: torch.Tensor, shapes: list[Shape], destination: int
    ) -> Pending[list[torch.Tensor] | None]:
        nothing = x.new_empty(0)
        sent = [x if peer == destination else nothing for peer in range(self.size)]
        if destination == self.index:
            return self._start_all_to_all(sent, shapes).then(
                lambda got: list(map(with_own_storage, got))
            )
        return self._start_all_to_all(sent, [(0,)] * self.size).then(lambda received: None)

    def _start_exchange(
        self, sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor]
    ) -> Pending[None]:
        self._exchanges += 1  # the same on all ranks: keeps the messages of two exchanges apart
        unpacked: list[tuple[torch.Tensor, torch.Tensor]] = []
        calls: list[tuple[bool, torch.Tensor, int]] = []
        """Whether to receive (or send), the data, and the peer."""
        for shift in range(1, self.size):  # so that each rank starts with another peer
            source, destination = (self.index - shift) % self.size, (self.index + shift) % self.size
            if source in receives and receives[source].numel():
                out = receives[source].detach()
                buffer = out if out.is_contiguous() else empty_like(out)
                if buffer is not out:
                    unpacked.append((out, buffer))
                calls.append((True, as_bytes(buffer), source))
            if destination in sends and sends[destination].numel():
                packed = pack([sends[destination]])
                calls.append((False, as_bytes(packed), destination))

        def finish() -> None:
            for out, buffer in unpacked:
                out.copy_(buffer)

        buffers = [buffer for _, buffer, _ in calls]
        return self._pending_message("exchange", self._messages_of(calls), finish, *buffers)

    def _messages_of(self, calls: list[tuple[bool, torch.Tensor, int]]) -> list[Any]:
        """Start all sends and receives at once."""
        group, tag = self._group, self._exchanges
        if all(data.device.type == "cpu" for _, data, _ in calls):
            return [
                group.recv([data], peer, tag) if receives else group.send([data], peer, tag)
                for receives, data, peer in calls
            ]
        operations = [
            dist.P2POp(dist.irecv if receives else dist.isend, data, self.ranks[peer], group, tag)
            for receives, data, peer in calls
        ]
        return dist.batch_isend_irecv(operations) if operations else []

    def _start_send(self, x: torch.Tensor, destination: int) -> Pending[None]:
        if x.numel() == 0:  # the receiver knows it too
            return Pending.done(None)
        packed = pack([x])
        work = self._group.send([as_bytes(packed)], destination, 0)
        return self._pending_message("send", [work], lambda: None, packed)

    def _start_recv(self, like: torch.Tensor, source: int) -> Pending[torch.Tensor]:
        result = empty_like(like)
        if result.numel() == 0:
            return Pending.done(result)
        work = self._group.recv([as_bytes(result)], source, 0)
        return self._pending_message("recv", [work], lambda: result, result)

    # ---- without tensors

    def _start_barrier(self) -> Pending[None]:
        work = dist.barrier(self._group, async_op=True)
        return self._pending("barrier", work, lambda: None)

    def _start_gather_bytes(self, data: bytes, lengths: list[int]) -> Pending[list[bytes]]:
        device = torch.device(device_for_objects(self._group))
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
        return self._start_gathered(mine, [(length,) for length in lengths]).then(
            lambda pieces: [piece.cpu().numpy().tobytes() for piece in pieces]
        )

    # ---- inside

    def _pending(
        self, kind: str, work: Any, finish: Callable[[], T], *kept: torch.Tensor
    ) -> Pending[T]:
        """Return the result of `finish`, called once `work` (one or several) is done. `kept` stay
        alive until then."""
        works = work if isinstance(work, list) else [work]

        def wait(kept: tuple[torch.Tensor, ...] = kept) -> T:
            try:
                for each in works:
                    each.wait()
            except RuntimeError as error:
                over = f" over {'.'.join(self.axes)}" if self.axes else ""
                raise CollectiveError(
                    f"{kind}{over} of ranks {format_tuple(self.ranks)} failed: {error}\n"
                    "A peer has probably ended or waits elsewhere: look at the output of the others"
                ) from error
            return finish()

        return Pending(wait)

    def _pending_message(
        self, kind: str, works: list[Any], finish: Callable[[], T], *buffers: torch.Tensor
    ) -> Pending[T]:
        """Do the same for messages, whose buffers stay alive even if the caller drops the
        result."""
        for key, (others, _) in list(self._messages.items()):
            if all(work.is_completed() for work in others):
                self._messages.pop(key, None)
        self._messages[id(works)] = works, buffers

        def finish_and_let_go() -> T:
            self._messages.pop(id(works), None)
            return finish()

        return self._pending(kind, works, finish_and_let_go, *buffers)


def living_group(reference: ReferenceType[dist.ProcessGroup]) -> dist.ProcessGroup | None:
    """Return the group, or None if it was destroyed: it may still be referenced, but not used."""
    group = reference()
    return group if group in world_of_torch().pg_map else None


def _reducible(x: torch.Tensor, op: str) -> tuple[torch.Tensor, str]:
    """Return a copy of `x` that the backend reduces in place without loss, and the op for it."""
    x = x.detach()
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    if x.dtype is torch.bool:
        x, op = x.view(torch.uint8), BOOL_OPS[op]
    wider = (_WIDER if x.device.type == "cpu" else UNSIGNED).get(x.dtype, x.dtype)
    return x.to(wider, copy=True, memory_format=torch.contiguous_format), op


def _ordered(x: torch.Tensor, op: str) -> torch.Tensor:
    """Map floats to integers of the same order, with NaN where neither max nor min can lose it."""
    keys = _negatives_reversed(x.view(_SAME_SIZE[x.dtype]))
    ends = torch.iinfo(keys.dtype)  # both are bits of a NaN
    return keys.masked_fill_(x.isnan(), ends.max if op == "max" else ends.min)


def _negatives_reversed(bits: torch.Tensor) -> torch.Tensor:
    """Map the bits of floats, whose negatives count backwards, to ordered integers, or back."""
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)


def _allreduce_options(op: Any) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return options


_ALLREDUCE_OPTIONS = {name: _allreduce_options(op) for name, op in _REDUCE_OPS.items()}
