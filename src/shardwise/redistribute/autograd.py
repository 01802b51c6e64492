"""Differentiable moves: a redistribution, and the move that carries its gradient back.

The gradient of a tensor has the layout of the tensor, with pending sums made whole
(`gradient_layout`). So

| forward                                 | backward                                    |
|-----------------------------------------|---------------------------------------------|
| Partial -> Replicate                    | nothing                                     |
| Partial -> Shard                        | all-gather                                  |
| Shard -> Replicate                      | slice                                       |
| Shard -> Replicate, used beside a shard | reduce-scatter                              |
| Replicate -> Shard                      | all-gather                                  |
| Replicate or Shard -> Partial           | nothing, slice                              |
| Shard -> Shard                          | the transposed exchange                     |
| Replicate, used beside a shard          | all-reduce                                  |
| the same, of a gathered tensor          | reduce-scatter (`apply_gathered_use`)       |

"Used beside a shard" means that an operator combines the whole tensor with a shard of another, so
each rank's gradient is only a contribution: it is pending a sum on those axes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import ref

import torch

from shardwise.comm import Cause, Pending, communicator, trace
from shardwise.comm.trace import current_cause, trace_scope
from shardwise.core import world
from shardwise.core.errors import LayoutError
from shardwise.core.layout import Layout
from shardwise.core.mesh import Axis
from shardwise.core.tensor_state import ATTRIBUTE, TensorState, ensure_state
from shardwise.redistribute.accumulate import current
from shardwise.redistribute.cost import Costs
from shardwise.redistribute.execute import check_local, execute
from shardwise.redistribute.plan import (
    Plan,
    check_arguments,
    gradient_layout,
    plan_redistribute,
    planning_costs,
)
from shardwise.torch_internals import (
    TensorBase,
    backward_hooks_of,
    backward_node,
    is_torch_function_enabled,
    version_of,
)

_is_leaf = TensorBase.is_leaf.__get__
_NO_CAUSE = Cause()


@dataclass(frozen=True)
class Move:
    """A linear map of a distributed tensor: from one layout to another, times a factor."""

    source: Layout
    target: Layout
    factor: float = 1.0
    dtype: torch.dtype | None = None
    """The dtype that travels and comes out; None for that of the input."""
    costs: Costs | None = None
    peak_bytes: int | None = None
    _plans: dict[Any, Plan] = field(default_factory=dict, init=False, compare=False)
    _group: list[Any] = field(default_factory=lambda: [None] * 3, init=False, compare=False)
    """If it is one all-reduce: the world and the dtype it last ran in, and the communicator. Weak
    references, as a cached move may outlive its ranks."""

    @cached_property
    def is_nothing(self) -> bool:
        """Whether the tensor stays as it is."""
        return self.source is self.target and self.factor == 1 and self.dtype is None

    def run(self, local: torch.Tensor) -> torch.Tensor:
        """Run it on this rank's piece, and wait."""
        last_world, dtype, last_group = self._group
        # Only for the dtype of the plan: ranks with listeners follow the plan, and must do the
        # same.
        if dtype is local.dtype and not trace.listeners and last_world() is world.current():
            group = last_group()
            if group is not None and group.is_usable:
                return group.all_reduce(local)  # type: ignore[no-any-return]
        result = self.start(local).wait()
        plan = self._plans.get(local.dtype)
        if plan is not None and self.dtype is None and self.factor == 1 and _is_sum(plan):
            (step,) = plan.moves
            group = communicator(step.source.mesh, step.axes)
            self._group[:] = ref(world.current()), local.dtype, ref(group)
        return result

    def start(self, local: torch.Tensor, starts_all: bool = False) -> Pending[torch.Tensor]:
        """Start it on this rank's piece. For `starts_all` see `execute`."""
        wire = local if self.dtype is None else local.to(self.dtype)
        pending = execute(self._plan(wire.dtype), wire, starts_all)
        return pending if self.factor == 1 else pending.then(lambda x: x * self.factor)

    def communicates(self, local: torch.Tensor) -> bool:
        """Return whether ranks exchange anything to run it on pieces of this dtype."""
        if self.source is self.target:
            return False
        plan = self._plan(local.dtype if self.dtype is None else self.dtype)
        return any(step.communicates for step in plan.moves)

    def _plan(self, dtype: torch.dtype) -> Plan:
        key: Any = dtype
        if self.source.is_cut or self.target.is_cut:
            # The plan is for a rank's own share, and simulated ranks may share a move.
            key = dtype, self.source.mesh.get_coordinate()
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = plan_redistribute(
                self.source, self.target, dtype, peak_bytes=self.peak_bytes, costs=self.costs
            )
        return plan


def _is_sum(plan: Plan) -> bool:
    """Return whether a plan is one all-reduce that this rank takes part in."""
    if len(plan.moves) != 1 or (plan.moves[0].kind, plan.moves[0].op) != ("all_reduce", "sum"):
        return False
    mesh = plan.source.mesh
    return not mesh.is_abstract and mesh.get_coordinate() is not None


@dataclass(frozen=True)
class MovePair:
    """A move and its transpose, which carries the gradient. The transpose of the transpose is the
    move itself."""

    forward: Move
    backward: Move

    def transposed(self) -> MovePair:
        """Return the pair of the gradient: its move, and the move of its own gradient."""
        return MovePair(self.backward, self.forward)

    @cached_property
    def is_gather(self) -> bool:
        """Whether it only gathers, so that the backward is a slice."""
        source, target = self.forward.source, self.forward.target
        return (
            source is not target
            and source.mesh is target.mesh
            and not (source.partial or target.partial or self.backward.source.partial)
            and (self.forward.factor, self.forward.dtype, self.forward.peak_bytes)
            == (1, None, None)
            and all(
                after == before[: len(after)]
                for before, after in zip(source.shard_order, target.shard_order, strict=True)
            )
        )


def apply_move(
    local: torch.Tensor, pair: MovePair, started: Pending[torch.Tensor] | None = None
) -> torch.Tensor:
    """Run a move and record it for autograd.

    Forward: `pair.forward`. Backward: `pair.backward`.

    Arguments:
        started: the result of the forward, if it was started already.
    """
    if type(local) is not torch.Tensor and is_torch_function_enabled():
        result = _Redistribute.apply(local, pair, started)  # type: ignore[no-untyped-call]
    else:
        result = _apply(local, pair, started)
    accumulation = current.accumulation
    if accumulation is not None and hasattr(local, "_layout") and _is_leaf(local):
        # Only of a DTensor, whose `.grad` is completed when it is read.
        result.grad_fn.put_off = functools.partial(accumulation.put_off, local, pair.backward)
    if pair.is_gather:
        # For `apply_gathered_use`. Held by the result, not by its node: the node would keep the
        # pieces of every gather in a checkpointed region until the backward.
        ensure_state(result).gathered_from = local
    return result  # type: ignore[no-any-return]


def find_gather(tensor: torch.Tensor) -> Any:
    """Return the autograd node of the gather that made a (local) tensor, or None."""
    notes = tensor.__dict__.get(ATTRIBUTE)  # `state_of`, without its frame
    if type(notes) is not TensorState or notes.gathered_from is None:
        return None
    node = tensor.grad_fn
    # Changed in place, or put into another graph, it is no longer what was gathered.
    return node if isinstance(node, _NODE) and node.pair.is_gather else None


def find_move(node: Any) -> MovePair | None:
    """Return the move that an autograd node stands for, or None."""
    return node.pair if isinstance(node, _NODE) else None


def apply_gathered_use(tensor: Any, gather: Any, used_on: tuple[int, ...]) -> torch.Tensor:
    """Mark the result of a gather as used beside shards on these axes.

    Forward: nothing. Backward: reduce-scatter of the contributions directly into the shards that
    were gathered. The gradient of the gathered tensor itself, an all-reduce and a slice, is never
    made.
    """
    gather.is_passed = True
    move = gather.pair.forward
    pair = cached_pair(move.source, move.target, used_on, costs=move.costs)
    shard = ensure_state(tensor).gathered_from
    assert shard is not None, "`find_gather` has found it"
    return apply_move(shard, pair, Pending.done(tensor.detach()))


class _Redistribute(torch.autograd.Function):
    """Forward: `pair.forward`. Backward: `pair.backward`, by this same function, so that it can be
    differentiated again."""

    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, pair: MovePair, pending: Pending[torch.Tensor] | None
    ) -> torch.Tensor:
        ctx.pair, ctx.dtype = pair, local.dtype
        ctx.put_off = None
        ctx.cause = current_cause() if trace.listeners else _NO_CAUSE
        if pair.forward.is_nothing:
            # An alias that autograd does not see as a view: its node stays valid when an optimizer
            # changes the tensor in place, as the gradient does not depend on the value.
            return local.detach()
        return pair.forward.run(local.detach()) if pending is None else pending.wait()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        if not trace.listeners:
            return _moved_back(ctx, *gradients), None, None
        with trace_scope(ctx.cause.backward):
            return _moved_back(ctx, *gradients), None, None


# Skips what `torch.autograd.Function.apply` does in Python first: it binds default arguments, of
# which there are none, and asks for torch.func's transforms, which no move can be part of.
_apply: Any = super(torch.autograd.Function, _Redistribute).apply

_NODE: Any = backward_node(_Redistribute)


def _moved_back(ctx: Any, gradient: torch.Tensor) -> torch.Tensor | None:
    if ctx.put_off is not None and ctx.put_off(gradient):
        return None
    if torch.is_grad_enabled():  # it will be differentiated again
        result = apply_move(gradient.contiguous(), ctx.pair.transposed())
    elif ctx.pair.backward.is_nothing:
        result = gradient
    else:
        result = ctx.pair.backward.run(gradient.contiguous())
    return result if result.dtype is ctx.dtype else result.to(ctx.dtype)


def redistribute_local(
    local: torch.Tensor,
    src: Layout,
    dst: Layout,
    *,
    used_on: Axis | Sequence[Axis] = (),
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: bool = False,
    peak_bytes: int | None = None,
    costs: Costs | str | Path | None = None,
) -> Any:
    """Move this rank's piece of a tensor from one layout to another; differentiable.

    Every rank of the mesh calls it. Between two meshes every rank of both does: one outside `src`'s
    mesh passes an empty tensor of the same dtype (that requires grad where the others' do), and one
    outside `dst`'s mesh gets an empty tensor (and calls backward on it where the others do).

    Arguments:
        local: this rank's piece in `src`.
        src: the current layout.
        dst: the target layout.
        used_on: axes on which `dst` is whole and will be used beside shards, so that gradients
            come back as contributions: they are summed on the way back (an all-gather then has a
            reduce-scatter as its backward, and no move an all-reduce).
        forward_dtype: convert to this dtype before anything travels; the result has it.
        backward_dtype: the same for the gradient, which is converted back in the end.
        async_op: return a `Pending` at once. Its `wait()` gives the differentiable result. The
            first collective of the plan is started at once, the others in `wait()`.
        peak_bytes: the most memory a rank may hold at once for it, in either direction.
        costs: as `plan_redistribute` takes them.

    Returns:
        This rank's piece in `dst`, as a new tensor; `local` itself if there was nothing to do.
    """
    check_arguments(src, dst, forward_dtype, backward_dtype)
    if not isinstance(local, torch.Tensor):
        raise LayoutError(f"local: expected a tensor, got {local!r} ({type(local).__name__})")
    axes = (used_on,) if isinstance(used_on, int | str) else tuple(used_on)
    if src is dst:
        check_local(local, src)  # otherwise its execution does
        if not (axes or forward_dtype or backward_dtype or peak_bytes or costs):
            return Pending.done(local) if async_op else local
    model = planning_costs(costs, src, dst)
    if peak_bytes is None:
        pair = cached_pair(src, dst, axes, forward_dtype, backward_dtype, model)
    else:  # perhaps no number, which planning refuses
        pair = make_move_pair(src, dst, axes, forward_dtype, backward_dtype, model, peak_bytes)
    if not (torch.is_grad_enabled() and local.requires_grad):
        pending = pair.forward.start(local.detach())
        return pending if async_op else pending.wait()
    check_linear(src)
    check_linear(dst)
    if not async_op:
        return apply_move(local, pair)
    started = pair.forward.start(local.detach())

    def finish() -> torch.Tensor:
        with torch.enable_grad():  # as when it was started
            return apply_move(local, pair, started)

    return Pending(finish)


def redistribute_later(
    local: torch.Tensor,
    src: Layout,
    dst: Layout,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, Pending[torch.Tensor]]:
    """Start a move whose result is waited for later, or never; differentiable.

    All collectives have started when this returns. For the arguments see `redistribute_local`.

    Returns:
        A tensor with the shape and history of the result, and one element of memory; and what
        its data will be.
    """
    check_arguments(src, dst, forward_dtype, backward_dtype)
    costs = planning_costs(None, src, dst)
    pair = cached_pair(src, dst, (), forward_dtype, backward_dtype, costs)
    needs_grad = torch.is_grad_enabled() and local.requires_grad
    if needs_grad:
        check_linear(src)
        check_linear(dst)
    started = _unless_written(local, pair.forward.start(local.detach(), starts_all=True))
    shape = dst.local_shape()
    result = local.detach().new_empty_strided(shape, (0,) * len(shape), dtype=forward_dtype)
    if result.numel() and (result.is_floating_point() or result.is_complex()):
        result.as_strided((), ()).fill_(math.nan)  # a read that did not wait shows
    if needs_grad:
        result = apply_move(local, pair, Pending.done(result))
    return result, started


def _unless_written(local: torch.Tensor, started: Pending[torch.Tensor]) -> Pending[torch.Tensor]:
    """Refuse the result of a move if its input was written to while the move was under way."""
    if local.is_inference():  # it has no version
        return started
    version = version_of(local)

    def check(result: torch.Tensor) -> torch.Tensor:
        if version_of(local) != version:
            raise LayoutError(
                "redistribute(async_op=True): the tensor was written to while it was sent, so the "
                "result is undefined; use the result, or wait() for it, before writing"
            )
        return result

    return started.then(check)


def with_grad_layout(
    local: torch.Tensor, given: Layout, wanted: Layout, *, is_exact: bool = False
) -> torch.Tensor:
    """Return an alias of `local` whose gradient arrives in one layout and continues in another.

    Forward: nothing. Backward: the move from `given` to `wanted`.

    Arguments:
        is_exact: let one rank contribute all of a whole gradient that is wanted as contributions,
            rather than each an equal part, which a half type would round.
    """
    if given is wanted or not (local.requires_grad and torch.is_grad_enabled()):
        return local.view_as(local)
    move = Move(given, wanted) if is_exact else _gradient_move(given, wanted)
    result: torch.Tensor = _Relabel.apply(local, move)  # type: ignore[no-untyped-call]
    if wanted.partial and not is_exact:
        ensure_state(result).relabelled = local, wanted
    return result


def _gradient_move(given: Layout, wanted: Layout) -> Move:
    """Return the move of a gradient to the layout in which the user wants it.

    Where it is whole and wanted as contributions, each rank gets an equal part of it, as in torch.
    """
    whole = {axis for axis, each in enumerate(given.placements) if each.is_replicate()}
    shared = {axis for axis, op in wanted.partial if op == "sum" and axis in whole}
    pending = {axis: op for axis, op in wanted.partial if axis not in shared}
    count = math.prod(wanted.mesh.shape[axis] for axis in shared)
    return Move(given, wanted.relaid(partial=pending), 1 / count)


class _Relabel(torch.autograd.Function):
    """Forward: nothing. Backward: a move of the gradient to the layout in which it is wanted."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, move: Move) -> torch.Tensor:
        ctx.move = move
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        move: Move = ctx.move
        moved = redistribute_local(gradients[0].contiguous(), move.source, move.target)
        return moved if move.factor == 1 else moved * move.factor, None


_RELABEL: Any = backward_node(_Relabel)


def apply_to_relabelled(
    tensor: torch.Tensor, pair: MovePair, started: Pending[torch.Tensor] | None
) -> torch.Tensor | None:
    """Apply a move to a tensor whose gradient is wanted as contributions (`with_grad_layout`).

    Forward: `pair.forward`. Backward: the gradient goes directly to the layout in which it is
    wanted; the sum that `pair.backward` would compute is never made.

    Returns None for any other tensor.
    """
    if not wants_contributions(tensor):
        return None
    node: Any = tensor.grad_fn
    node.is_passed = True
    local, wanted = ensure_state(tensor).relabelled  # type: ignore[misc]
    back = pair.backward
    move = _gradient_move(back.source, wanted)
    move = replace(move, factor=move.factor * back.factor)
    return apply_move(local, MovePair(pair.forward, move), started)


def wants_contributions(tensor: torch.Tensor) -> bool:
    """Tell whether the gradient of a tensor is wanted as contributions (`with_grad_layout`), and no
    hook or `retain_grad` looks at the sum of them."""
    notes = tensor.__dict__.get(ATTRIBUTE)  # `state_of`, without its frame
    if type(notes) is not TensorState or notes.relabelled is None:
        return False
    # Changed in place, it has another history.
    is_own = isinstance(tensor.grad_fn, _RELABEL)
    return is_own and not backward_hooks_of(tensor) and not tensor.retains_grad


def is_passed(tensor: torch.Tensor) -> bool:
    """Tell whether uses of a (local) tensor have sent gradients past it, so that its own gradient
    is never complete."""
    node = tensor.grad_fn
    return isinstance(node, (_NODE, _RELABEL)) and getattr(node, "is_passed", False)


def make_move_pair(
    src: Layout,
    dst: Layout,
    used_on: tuple[Axis, ...] = (),
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    costs: Costs | None = None,
    peak_bytes: int | None = None,
) -> MovePair:
    """Return a move and its transpose; the arguments are those of `redistribute_local`."""
    back = gradient_layout(dst)
    if used_on:
        for axis in map(dst.mesh.axis, used_on):
            if not dst.placements[axis].is_replicate():
                raise LayoutError(
                    f"used_on: expected axes on which {dst!r} is whole, "
                    f"got {dst.mesh.axis_name(axis)}: {dst.placements[axis]}"
                )
        back = dst.relaid(partial=dict.fromkeys(map(dst.mesh.axis, used_on), "sum"))
    factor = _average_divisor(dst) / _average_divisor(src)
    return MovePair(
        Move(src, dst, 1.0, forward_dtype, costs, peak_bytes),
        Move(back, gradient_layout(src), factor, backward_dtype, costs, peak_bytes),
    )


cached_pair = functools.lru_cache(4096)(make_move_pair)
"""`make_move_pair`, with costs that tell decisions of different costs apart."""


def _average_divisor(layout: Layout) -> int:
    """Return the divisor of the pending averages of a layout."""
    return math.prod(layout.mesh.shape[axis] for axis, op in layout.partial if op == "avg")


def check_linear(layout: Layout) -> None:
    """Check that the pending reductions of a layout have gradients."""
    for axis, op in layout.partial:
        if op not in ("sum", "avg"):
            raise LayoutError(
                f"a pending {op} on axis {layout.mesh.axis_name(axis)} of {layout!r} has no "
                "gradient, as it is not linear; detach() the tensor first"
            )
