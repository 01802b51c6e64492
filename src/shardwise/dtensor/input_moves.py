"""Moves of the inputs of a call to the layouts that its plan needs; several uses share one move.

A tensor keeps its moved versions (`TensorState.moves`) until its version changes. A DTensor that
wraps a plain tensor (`TensorState.alias_of`) keeps them on that tensor, so that all its wrappers
share them. The versions of a leaf are kept apart (`leaf_moves`).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.comm import Pending
from shardwise.core.errors import LayoutError
from shardwise.core.layout import Layout
from shardwise.core.tensor_state import ATTRIBUTE, TensorState, ensure_state, leaf_moves, state_of
from shardwise.dtensor.later_sums import data_axes, find_later_sums
from shardwise.dtensor.state import ExplicitRedistributionContext, state
from shardwise.dtensor.tensor import DTensor, unwrap, wrap
from shardwise.redistribute.autograd import (
    MovePair,
    apply_gathered_use,
    apply_move,
    apply_to_relabelled,
    find_gather,
    is_passed,
    make_move_pair,
    wants_contributions,
)
from shardwise.redistribute.plan import gradient_layout, plan_redistribute
from shardwise.torch_internals import (
    TensorBase,
    backward_hooks_of,
    locally,
    top_saved_tensors_hooks,
    version_of,
)

_requires_grad = TensorBase.requires_grad.__get__
_is_grad_enabled = torch.is_grad_enabled
_is_leaf = TensorBase.is_leaf.__get__
_hooks_of = backward_hooks_of
_is_inference = TensorBase.is_inference


@dataclass(frozen=True, slots=True)
class InputMove:
    """The move of an input from its layout to the one that a call needs."""

    source: Layout
    target: Layout
    used_on: tuple[int, ...]
    """Axes on which the gradient of the moved input is a contribution, to be summed."""
    pair: MovePair
    slices: tuple[slice, ...] | None
    """The part of the local tensor to keep, if slicing is all that this rank has to do."""
    is_slice: bool
    """Whether slicing is all that every rank has to do. `slices` is None nevertheless on a rank
    that needs nothing, and where a dim is cut."""
    is_linear: bool
    """Whether the move has a gradient: no maximum or product is pending."""
    stages: tuple[InputMove, InputMove] | None
    """The same move in two: the reduction, which other uses can share, then the enter."""
    contributes: bool | None
    """For a replicated tensor that becomes a pending sum: whether this rank contributes the
    tensor (True) or zeros (False). None for other moves."""
    is_enter: bool
    """Whether the layout stays and only the gradient moves."""
    is_kept: bool
    """Whether the moved input is kept for other uses, also without gradients."""
    keys: tuple[Any, Any]
    """The keys in the cache of moves: without gradients, and with them."""


def plan_input_move(source: Layout, target: Layout, used_on: tuple[int, ...]) -> InputMove:
    """Plan the move of an input between two layouts, on this rank.

    Arguments:
        used_on: axes on which the gradient of the moved input is a contribution.
    """
    is_linear = all(op in ("sum", "avg") for _, op in source.partial + target.partial)
    pair = make_move_pair(source, target, used_on)
    by_slicing = is_slice(source, target)
    slices = _slices(source, target) if by_slicing else None
    stages = None
    if used_on and source.partial and target is source.relaid(partial={}):
        stages = plan_input_move(source, target, ()), plan_input_move(target, target, used_on)
    is_enter = source is target
    keys = (source, target, used_on, False), (source, target, used_on, True)
    return InputMove(
        source,
        target,
        used_on,
        pair,
        slices,
        by_slicing,
        is_linear,
        stages,
        _contributes(source, target),
        is_enter,
        is_kept=is_enter or bool(source.partial),
        keys=keys,
    )


def is_slice(source: Layout, target: Layout) -> bool:
    """Tell whether every rank can go from one layout to the other by slicing its shard."""
    within = all(
        before == after[: len(before)] and (not before or source.cuts[dim] == target.cuts[dim])
        for dim, (before, after) in enumerate(
            zip(source.shard_order, target.shard_order, strict=True)
        )
    )
    return within and not source.partial and not target.partial and source.mesh is target.mesh


def _contributes(source: Layout, target: Layout) -> bool | None:
    """Return `InputMove.contributes`."""
    pending = dict(target.partial)
    is_fill = source.mesh is target.mesh and source is gradient_layout(target)
    if not is_fill or set(pending.values()) != {"sum"}:
        return None
    place = source.mesh.get_coordinate()
    return None if place is None else all(place[axis] == 0 for axis in pending)


def _slices(source: Layout, target: Layout) -> tuple[slice, ...] | None:
    """Return `InputMove.slices`, for a move that is a slice."""
    if source.mesh.get_coordinate() is None or target.is_cut:
        return None
    before, after = source.box(), target.box()
    return None if after.is_empty else after.within(before).slices


def move_input(tensor: torch.Tensor, move: InputMove, operator: str) -> torch.Tensor:
    """Move an input of a call; return the local tensor that the call needs.

    Forward: the move. Backward: the gradients of all uses are summed, then moved back once.
    Runs within `as_local()`.

    Arguments:
        operator: the name of the called operator, for messages.
    """
    if state.move_log is not None:
        state.move_log.append((tensor, move))
    needs_grad = _is_grad_enabled() and _requires_grad(tensor)
    if move.is_enter and not needs_grad:
        return tensor  # only a gradient would move
    if move.stages is not None and not (needs_grad and wants_contributions(tensor)):
        reduction, enter = move.stages
        return move_input(move_input(tensor, reduction, operator), enter, operator)
    later: tuple[int, ...] = ()
    if needs_grad and move.used_on and move.source.mesh in data_axes:
        later = find_later_sums(tensor, move.used_on, data_axes[move.source.mesh], operator)
        move = _with_later_sums(move, later) if later else move
    # All ranks must agree on what is shared: moving its gradients back is a collective.
    is_shared = (
        type(tensor) is DTensor
        and (move.is_kept or (move.is_slice if needs_grad else state.keeps_gathers))
        and not _is_inference(tensor)  # it has no version that would reveal changes
    )
    # A leaf must not hold a tensor whose graph leads back to it (see `leaf_moves`).
    reduces = move.source.partial and not move.target.partial and not move.used_on
    keeps_reduced = is_shared and reduces and not (needs_grad and _is_leaf(tensor))
    if is_shared:
        found = _shared(tensor, move, needs_grad)
        if found is not None:
            if keeps_reduced:
                remember_reduced(tensor, found, needs_grad)  # type: ignore[arg-type]
            return found
    if state.explicit is not None:
        _refuse_implicit_move(state.explicit, move, tensor.dtype, operator)
    if needs_grad:
        if not move.is_linear:
            raise LayoutError(
                f"{operator}: a pending reduction of {move.source!r} has no gradient, as it is not "
                "linear; detach() the tensor first"
            )
        gather = _skippable_gather(tensor) if move.is_enter and not later else None
        if gather is not None:
            result = apply_gathered_use(tensor, gather, move.used_on)
        else:
            own_part = _own_part(tensor, move)
            passed = apply_to_relabelled(tensor, move.pair, own_part)
            result = apply_move(tensor, move.pair, own_part) if passed is None else passed
    elif move.slices is not None:
        return tensor[move.slices]
    elif move.contributes is not None:
        return tensor if move.contributes else torch.zeros_like(tensor)
    else:
        result = _run(tensor, move)
    if is_shared:
        if reduces:
            result = wrap(result, move.target)  # so that it can keep moves of its own
        _share(tensor, move, needs_grad, result)
    if keeps_reduced:
        remember_reduced(tensor, result, needs_grad)  # type: ignore[arg-type]
    return result


def _with_later_sums(move: InputMove, axes: tuple[int, ...]) -> InputMove:
    """Return a move whose gradient stays a contribution on some axes."""
    back = move.pair.backward
    target = back.target.relaid(partial=dict.fromkeys(axes, "sum"))
    pair = MovePair(move.pair.forward, replace(back, target=target))
    return replace(move, pair=pair)


def _skippable_gather(tensor: torch.Tensor) -> Any:
    """Return the gather that made a tensor, if the gradient of the tensor may be skipped.

    It may not be skipped if a hook or `retain_grad` looks at it.
    """
    if _hooks_of(tensor) or tensor.retains_grad:
        return None
    return find_gather(tensor)


def check_gradient(tensor: DTensor, what: str) -> None:
    """Refuse to show the gradient of a tensor if that gradient is never complete.

    Uses beside shards reduce-scatter their gradients directly into the shards that were gathered,
    and give them as contributions to a local tensor that wants these. Runs within `as_local()`.

    Arguments:
        what: the function that asks, for the message.
    """
    if is_passed(tensor):
        raise LayoutError(
            f"{what}: this tensor was gathered, or made by from_local(grad_placements=), and then "
            "used beside shards: its gradient is never complete, because it goes directly to the "
            "shards that were gathered, or to the local tensor. Take the gradient of those, or use "
            "tensor.view_as(tensor) instead and take its gradient; hooks and retain_grad() before "
            "the first use are fine"
        )


def _own_part(tensor: torch.Tensor, move: InputMove) -> Pending[torch.Tensor] | None:
    """Return the result of a move that needs no communication: a slice, or a contribution.

    It is an alias of the tensor but no view to autograd: it may be kept for other uses, and must
    then show writes that the version of the tensor does not reveal, such as those through `data`.
    """
    if move.contributes is not None:
        return Pending.done(tensor.detach() if move.contributes else torch.zeros_like(tensor))
    if move.slices is None or move.is_enter:
        return None
    return Pending.done(tensor.detach()[move.slices].detach())


def _run(tensor: torch.Tensor, move: InputMove) -> torch.Tensor:
    with torch.no_grad():
        return move.pair.forward.run(unwrap(tensor) if type(tensor) is DTensor else tensor)


_MOST_OF_PARAMETERS = 4096
_MOST_OF_INPUTS = 64


def _shared(tensor: Any, move: InputMove, needs_grad: bool) -> torch.Tensor | None:
    """Return the moved version of a tensor that an earlier use made, if it is still valid."""
    key = move.keys[needs_grad]
    owner, notes = tensor, tensor.__dict__.get(ATTRIBUTE)  # `state_of`, without its frame
    if type(notes) is TensorState and notes.alias_of is not None:
        owner = notes.alias_of
        notes = owner.__dict__.get(ATTRIBUTE)
    if needs_grad and _is_leaf(owner):
        found = _moves_of_leaf(owner).get((id(owner), *key))
    else:
        has_moves = type(notes) is TensorState and notes.moves is not None
        found = notes.moves.get(key) if has_moves else None
    if found is None or found[1] != version_of(tensor):
        return None
    return found[0]  # type: ignore[no-any-return]


def _share(tensor: Any, move: InputMove, needs_grad: bool, result: torch.Tensor) -> None:
    """Keep the moved version of a tensor for later uses."""
    key = move.keys[needs_grad]
    notes = state_of(tensor)
    owner = tensor if notes is None or notes.alias_of is None else notes.alias_of
    if not (needs_grad and _is_leaf(owner)):
        notes = ensure_state(owner)
        if notes.moves is None:
            notes.moves = {}
        notes.moves[key] = result, version_of(tensor)
        return
    moves, place = _moves_of_leaf(owner), (id(owner), *key)
    most = _MOST_OF_PARAMETERS if moves is leaf_moves.of_parameters else _MOST_OF_INPUTS
    if len(moves) >= most and place not in moves:
        del moves[next(iter(moves))]
    moves[place] = result, version_of(tensor)
    node = result.grad_fn
    assert node is not None, "it was made of a tensor that requires grad"
    node.register_prehook(lambda gradients: moves.pop(place, None) and None)


def _moves_of_leaf(leaf: torch.Tensor) -> dict[Any, Any]:
    is_parameter = isinstance(leaf, torch.nn.Parameter)
    return leaf_moves.of_parameters if is_parameter else leaf_moves.of_inputs


def _refuse_implicit_move(
    explicit: ExplicitRedistributionContext, move: InputMove, dtype: torch.dtype, operator: str
) -> None:
    """Refuse a move that communicates, within `sw.explicit()`; if that is strict, any move."""
    plan = plan_redistribute(move.source, move.target, dtype)
    if not any(step.communicates for step in plan.moves) and not (explicit.strict and plan.moves):
        return
    wanted = ", ".join(map(repr, move.target.placements))
    explicit.refuse(
        f"{operator}: within explicit(), but an input must move to fit:\n{plan.explain()}\n"
        f"Say so: x.redistribute(placements=[{wanted}])"
    )


# ---- the value of a tensor without its pending reductions, kept for later calls
#
# This value decides how a later call is split. A checkpointed region runs twice, and the tensors
# that its second run saves go into the graph of the first run, so both runs must decide alike.
# Therefore only a value that was made in the same run of the region counts within it. The hooks for
# saved tensors, which a region sets, tell the runs apart.


def remember_reduced(tensor: Any, result: DTensor, has_grad: bool) -> None:
    """Keep the value of a tensor without its pending reductions, which a call has asked for."""
    hooks = top_saved_tensors_hooks(True)
    # A weak reference: the hooks of a region lead to its inputs, and so back to the tensor.
    region = None if hooks is None else weakref.ref(hooks[0])
    notes = tensor.__dict__.get(ATTRIBUTE)  # `ensure_state`, mostly without its frame
    if type(notes) is not TensorState:
        notes = ensure_state(tensor)
    notes.reduced = result, has_grad, version_of(tensor), region


def find_reduced(tensor: Any) -> DTensor | None:
    """Return the value of a tensor without its pending reductions, if an earlier call made it.

    The answer is the same on every rank: it does not depend on whether the value is still alive.
    """
    notes = tensor.__dict__.get(ATTRIBUTE)  # `state_of`, without its frame
    if type(notes) is not TensorState or notes.reduced is None:
        return None
    result, has_grad, version, region = notes.reduced
    if version != locally(version_of, (), (tensor,)):
        return None
    if not has_grad and torch.is_grad_enabled() and locally(_requires_grad, (), (tensor,)):
        return None
    hooks = top_saved_tensors_hooks(True)
    is_same_run = region is None if hooks is None else region is not None and region() is hooks[0]
    return result if is_same_run else None
