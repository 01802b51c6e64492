"""Getting the inputs of a call to where its plan wants them; one move for several uses."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.comm import Pending
from shardwise.dispatch.reduced import remember_reduced
from shardwise.dispatch.state import state
from shardwise.errors import LayoutError
from shardwise.layout import Layout
from shardwise.policy import PolicyError
from shardwise.redistribute.autograd import Pair, apply_pair, apply_use, gather_of, make_pair
from shardwise.redistribute.plan import dual, plan_redistribute
from shardwise.tensor import DTensor, unwrap, wrap
from shardwise.torch_internals import TensorBase, backward_hooks_of, version_of

_requires_grad = TensorBase.requires_grad.__get__
_is_grad_enabled = torch.is_grad_enabled
_is_leaf = TensorBase.is_leaf.__get__
_hooks_of = backward_hooks_of
_is_inference = TensorBase.is_inference


@dataclass(frozen=True, slots=True)
class InputMove:
    """How an input gets from how it lies to how a call needs it."""

    source: Layout
    target: Layout
    used_on: tuple[int, ...]
    """Axes on which its gradient is a contribution."""
    pair: Pair
    slices: tuple[slice, ...] | None
    """What to keep of the local tensor, if that is all there is to do on this rank."""
    is_slice: bool
    """Whether every rank has what it needs; on one that needs nothing, and where a dim is cut in
    pieces, `slices` is None."""
    is_linear: bool
    """Whether it has a gradient."""
    stages: tuple[InputMove, InputMove] | None
    """The same in two: the sum, which other uses can share, and what gradients need."""
    contributes: bool | None
    """Of a whole tensor that becomes pending: whether this rank gives it, and not zeros."""
    is_enter: bool
    """Whether it stays as it lies, and only its gradient moves."""
    is_kept: bool
    """Whether what it was moved to is kept for other uses, also without gradients."""
    keys: tuple[Any, Any]
    """What it is kept under: without gradients, and with them."""


def input_move(source: Layout, target: Layout, used_on: tuple[int, ...]) -> InputMove:
    """The move between two layouts, on this rank."""
    is_linear = all(op in ("sum", "avg") for _, op in source.partial + target.partial)
    pair = make_pair(source, target, used_on)
    by_slicing = is_slice(source, target)
    slices = _slices(source, target) if by_slicing else None
    stages = None
    if used_on and source.partial and target is source.relaid(partial={}):
        stages = input_move(source, target, ()), input_move(target, target, used_on)
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
    """Whether every rank has what it needs to go from one layout to another."""
    within = all(
        before == after[: len(before)] and (not before or source.cuts[dim] == target.cuts[dim])
        for dim, (before, after) in enumerate(
            zip(source.shard_order, target.shard_order, strict=True)
        )
    )
    return within and not source.partial and not target.partial and source.mesh is target.mesh


def _contributes(source: Layout, target: Layout) -> bool | None:
    pending = dict(target.partial)
    is_fill = source.mesh is target.mesh and source is dual(target)
    if not is_fill or set(pending.values()) != {"sum"}:
        return None
    place = source.mesh.get_coordinate()
    return None if place is None else all(place[axis] == 0 for axis in pending)


def _slices(source: Layout, target: Layout) -> tuple[slice, ...] | None:
    if source.mesh.get_coordinate() is None or target.is_cut:
        return None
    before, after = source.box(), target.box()
    return None if after.is_empty else after.within(before).slices


def moved(tensor: torch.Tensor, how: InputMove, operator: str) -> torch.Tensor:
    """The local tensor that a call needs, of an input that lies otherwise or needs an enter.

    Forward: the move. Backward: gradients of all uses are summed, then one move back.
    Runs within `as_local()`.
    """
    if state.heard is not None:
        state.heard.append((tensor, how))
    needs_grad = _is_grad_enabled() and _requires_grad(tensor)
    if how.is_enter and not needs_grad:
        return tensor  # the gradient alone would have moved
    if how.stages is not None:
        reduced, entered = how.stages
        return moved(moved(tensor, reduced, operator), entered, operator)
    # All ranks must agree on what is shared, as the moves back of its gradients are collectives.
    is_shared = (
        type(tensor) is DTensor
        and (how.is_kept or (how.is_slice if needs_grad else state.keeps_gathers))
        and not _is_inference(tensor)  # it has no version that would tell of changes
    )
    # A leaf must not hold what leads back to it: see below.
    makes_sums = how.source.partial and not how.target.partial and not how.used_on
    remembers = is_shared and makes_sums and not (needs_grad and _is_leaf(tensor))
    if is_shared:
        found = _shared(tensor, how, needs_grad)
        if found is not None:
            if remembers:
                remember_reduced(tensor, found, needs_grad)  # type: ignore[arg-type]
            return found
    if state.explicit:
        _refuse_communication(how, tensor.dtype, operator)
    if needs_grad:
        if not how.is_linear:
            raise LayoutError(
                f"{operator}: a pending reduction of {how.source!r} has no gradient, as it is not "
                "linear; detach() the tensor first"
            )
        gather = _gather_to_pass(tensor) if how.is_enter else None
        if gather is None:
            result = apply_pair(tensor, how.pair, _own_part(tensor, how))
        else:
            result = apply_use(tensor, gather, how.used_on)
    elif how.slices is not None:
        return tensor[how.slices]
    elif how.contributes is not None:
        return tensor if how.contributes else torch.zeros_like(tensor)
    else:
        result = _run(tensor, how)
    if is_shared:
        if makes_sums:
            result = wrap(result, how.target)  # so that it can remember moves of its own
        _share(tensor, how, needs_grad, result)
    if remembers:
        remember_reduced(tensor, result, needs_grad)  # type: ignore[arg-type]
    return result


def _gather_to_pass(tensor: torch.Tensor) -> Any:
    """The gather that a tensor is the result of, unless somebody looks at the tensor's gradient."""
    if _hooks_of(tensor) or tensor.retains_grad:
        return None
    return gather_of(tensor)


def check_gradient(tensor: DTensor, what: str) -> None:
    """Refuse to show the gradient of a gathered tensor that parts of it go past.

    Runs within `as_local()`.
    """
    if getattr(gather_of(tensor), "is_passed", False):
        raise LayoutError(
            f"{what}: this tensor was gathered, and then used beside shards: its gradient is "
            "never made, as it goes to the pieces in one reduce-scatter. Take that of the tensor "
            "that was gathered, or of tensor.view_as(tensor) which is used instead; hooks and "
            "retain_grad() before the first use are fine"
        )


def _own_part(tensor: torch.Tensor, how: InputMove) -> Pending[torch.Tensor] | None:
    """What a slice keeps, or what is contributed, if that is all there is to do.

    An alias, but no view of autograd's: as it may be kept for other uses, it must show what is
    written to the tensor unseen, as through `data`.
    """
    if how.contributes is not None:
        return Pending.done(tensor.detach() if how.contributes else torch.zeros_like(tensor))
    if how.slices is None or how.is_enter:
        return None
    return Pending.done(tensor.detach()[how.slices].detach())


def _run(tensor: torch.Tensor, how: InputMove) -> torch.Tensor:
    with torch.no_grad():
        return how.pair.forward.run(unwrap(tensor) if type(tensor) is DTensor else tensor)


# A tensor remembers what it was moved to, as long as it is not changed; what plain tensors are
# wrapped as (`_alias_of`) does so in their place, so that it is shared too. A leaf cannot hold what
# leads back to it: the cycle goes through C++ and would never be freed. What leaves were moved to
# is held here until a backward has passed through it, and no more than so many: each holds its
# leaf, and unlike parameters a program may make new inputs forever that no gradient is asked of.
# Whether something is alive must not decide, as ranks could differ and each move back is a
# collective.

_MOST_OF_PARAMETERS = 4096
_MOST_OF_INPUTS = 64


class _Moves(dict[Any, Any]):
    """What a tensor was moved to. A plain tensor that has it is stored and copied without."""

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()  # which torch.load takes


def _shared(tensor: Any, how: InputMove, needs_grad: bool) -> torch.Tensor | None:
    key = how.keys[needs_grad]
    owner = tensor.__dict__.get("_alias_of", tensor)
    if needs_grad and _is_leaf(owner):
        found = _kept(owner).get((id(owner), *key))
    else:
        kept = owner.__dict__.get("_moved")
        found = None if kept is None else kept.get(key)
    if found is None or found[1] != version_of(tensor):
        return None
    return found[0]  # type: ignore[no-any-return]


def _share(tensor: Any, how: InputMove, needs_grad: bool, result: torch.Tensor) -> None:
    key = how.keys[needs_grad]
    owner = tensor.__dict__.get("_alias_of", tensor)
    if not (needs_grad and _is_leaf(owner)):
        owner.__dict__.setdefault("_moved", _Moves())[key] = result, version_of(tensor)
        return
    kept, place = _kept(owner), (id(owner), *key)  # the graph of the result holds the leaf
    most = _MOST_OF_PARAMETERS if kept is state.moved_parameters else _MOST_OF_INPUTS
    if len(kept) >= most and place not in kept:
        del kept[next(iter(kept))]
    kept[place] = result, version_of(tensor)
    node = result.grad_fn
    assert node is not None, "it was made of a tensor that requires grad"
    node.register_prehook(lambda gradients: kept.pop(place, None) and None)


def _kept(leaf: torch.Tensor) -> dict[Any, Any]:
    is_parameter = isinstance(leaf, torch.nn.Parameter)
    return state.moved_parameters if is_parameter else state.moved_inputs


def forget(tensor: DTensor) -> None:
    """Drop what a tensor was moved to: its data change, which its version does not tell."""
    tensor.__dict__.pop("_moved", None)
    tensor.__dict__.pop("_reduced", None)
    mine = id(tensor)
    for kept in (state.moved_parameters, state.moved_inputs):
        for place in [each for each in kept if each[0] == mine]:
            del kept[place]


DTensor._forget_moves = forget  # type: ignore[assignment,method-assign]


def _refuse_communication(how: InputMove, dtype: torch.dtype, operator: str) -> None:
    plan = plan_redistribute(how.source, how.target, dtype)
    if not any(step.communicates for step in plan.moves):
        return
    wanted = ", ".join(map(repr, how.target.placements))
    raise PolicyError(
        f"{operator}: within explicit(), but an input must move to fit:\n{plan.explain()}\n"
        f"Say so: x.redistribute(placements=[{wanted}])"
    )
