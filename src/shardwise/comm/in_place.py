"""Collectives whose results go to memory that is there.

`Communicator` has them beside those that make their results. What they are made of, messages and
gathers, is an engine's; one that can do without a copy does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.comm.arguments import as_piece_lists, as_tensors, check_tensor, dtype_and_shape
from shardwise.comm.buffers import size_in_bytes
from shardwise.comm.engine import Engine
from shardwise.comm.pending import Pending
from shardwise.comm.reduction import as_reduction, is_summed_in_place, reduce_into
from shardwise.errors import CollectiveError
from shardwise.placement import ReduceOp


class InPlace(Engine):
    """What `Communicator` derives from, and explains."""

    def all_gather_into(
        self, x: torch.Tensor, rows: torch.Tensor, *, skip_own: bool = False
    ) -> torch.Tensor:
        """Every rank gets all ranks' `x`, in memory that it has: rank i's becomes `rows[i]`.

        Arguments:
            x: of the same size on every rank.
            rows: of one row per rank, contiguous; it is written to and returned.
            skip_own: the caller does not need its own row, which may then stay as it is.
        """
        return self.all_gather_into_async(x, rows, skip_own=skip_own).wait()

    def all_gather_into_async(
        self, x: torch.Tensor, rows: torch.Tensor, *, skip_own: bool = False
    ) -> Pending[torch.Tensor]:
        """`all_gather_into`, under way."""
        check_tensor("all_gather_into(x)", x)
        check_tensor("all_gather_into(rows)", rows)
        wanted = (self.size, x.numel())
        is_like_x = rows.dtype == x.dtype and rows.device == x.device
        if tuple(rows.shape) != wanted or not is_like_x or not rows.is_contiguous():
            raise CollectiveError(
                f"all_gather_into(rows): expected {x.dtype} {wanted} on {x.device}, contiguous; "
                f"got {dtype_and_shape(rows)} on {rows.device}"
                f"{'' if rows.is_contiguous() else ', not contiguous'}"
            )
        return self._traced(
            "all_gather",
            x,
            size_in_bytes(x) * (self.size - 1),
            lambda: self._start_all_gather_into(x, rows, skip_own),
        )

    def all_gather_in_place(
        self, xs: Sequence[torch.Tensor], outs: Sequence[Sequence[torch.Tensor]]
    ) -> None:
        """Every rank gets several tensors of all ranks, each where it belongs: rank i's `xs[j]`
        becomes `outs[j][i]`, of the same shape. A rank's own stay as they are.

        For large tensors: each travels as a message, and nothing is copied.
        """
        self.all_gather_in_place_async(xs, outs).wait()

    def all_gather_in_place_async(
        self, xs: Sequence[torch.Tensor], outs: Sequence[Sequence[torch.Tensor]]
    ) -> Pending[None]:
        """`all_gather_in_place`, under way."""
        sent = as_tensors("all_gather_in_place(xs)", xs)
        places = as_piece_lists("all_gather_in_place(outs)", outs, sent, self.index, self.size)
        others = [peer for peer in range(self.size) if peer != self.index]
        received = sum(size_in_bytes(each[peer]) for each in places for peer in others)
        messages = [
            (dict.fromkeys(others, x), {peer: each[peer] for peer in others})
            for x, each in zip(sent, places, strict=True)
        ]
        return self._traced(
            "all_gather", sent[0], received, lambda: self._start_exchanges(messages)
        )

    def reduce_scatter_in_place(
        self,
        xs: Sequence[Sequence[torch.Tensor]],
        outs: Sequence[torch.Tensor],
        op: ReduceOp = "sum",
    ) -> None:
        """Each rank gets the reductions of several tensors, each where it belongs: that of all
        ranks' `xs[j][i]` becomes rank i's `outs[j]`, of the same shape.

        For large tensors: each travels as a message, and none is packed.
        """
        self.reduce_scatter_in_place_async(xs, outs, op).wait()

    def reduce_scatter_in_place_async(
        self,
        xs: Sequence[Sequence[torch.Tensor]],
        outs: Sequence[torch.Tensor],
        op: ReduceOp = "sum",
    ) -> Pending[None]:
        """`reduce_scatter_in_place`, under way; until it is over nobody may look at `outs`."""
        places = as_tensors("reduce_scatter_in_place(outs)", outs)
        sent = as_piece_lists("reduce_scatter_in_place(xs)", xs, places, self.index, self.size)
        name = as_reduction(op, places[0].dtype)
        others = [peer for peer in range(self.size) if peer != self.index]
        received = sum(map(size_in_bytes, places)) * len(others)
        return self._traced(
            "reduce_scatter",
            sent[0][0],
            received,
            lambda: self._start_sums(sent, places, name, others),
        )

    def _start_sums(
        self,
        sent: Sequence[Sequence[torch.Tensor]],
        outs: Sequence[torch.Tensor],
        op: str,
        others: list[int],
    ) -> Pending[None]:
        messages, contributions = [], []
        for pieces, out in zip(sent, outs, strict=True):
            # One may come to where the sum will be, if that is made of them alone.
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

    def _start_exchanges(
        self,
        messages: Sequence[tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]],
    ) -> Pending[None]:
        started = [self._start_exchange(sends, receives) for sends, receives in messages]

        def finish() -> None:
            for each in started:
                each.wait()

        return Pending(finish)

    def _start_all_gather_into(
        self, x: torch.Tensor, rows: torch.Tensor, skip_own: bool
    ) -> Pending[torch.Tensor]:
        """An engine that can do without the copy does."""
        gathered = self._start_all_gather(x.reshape(1, -1), 0, (1,) * self.size)
        return gathered.then(rows.copy_)
