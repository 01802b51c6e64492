"""Getting the inputs of a call to where its plan wants them; one move for several uses."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.dispatch.state import PolicyError, state
from shardwise.errors import LayoutError
from shardwise.layout import Layout
from shardwise.redistribute.execute import execute
from shardwise.redistribute.moves import Pair, apply_pair, make_pair
from shardwise.redistribute.plan import plan_redistribute
from shardwise.tensor import DTensor

_version = torch._C.TensorBase._version.__get__
_requires_grad = torch._C.TensorBase.requires_grad.__get__


@dataclass(frozen=True, slots=True)
class Transfer:
    """How an input gets from how it lies to how a call needs it."""

    source: Layout
    target: Layout
    used_on: tuple[int, ...]
    """Axes on which its gradient is a contribution."""
    pair: Pair
    cut: tuple[slice, ...] | None
    """What to keep of the local tensor, if that is all there is to do on this rank."""
    is_cut: bool
    """Whether every rank has what it needs; on one that needs nothing, `cut` is None."""
    is_linear: bool
    """Whether it has a gradient."""


def transfer(source: Layout, target: Layout, used_on: tuple[int, ...]) -> Transfer:
    """The transfer between two layouts, on this rank."""
    is_linear = all(op in ("sum", "avg") for _, op in source.partial + target.partial)
    pair = make_pair(source, target, used_on)
    is_cut = _is_cut(source, target)
    cut = _cut(source, target) if is_cut else None
    return Transfer(source, target, used_on, pair, cut, is_cut, is_linear)


def _is_cut(source: Layout, target: Layout) -> bool:
    within = all(
        before == after[: len(before)]
        for before, after in zip(source.shard_order, target.shard_order, strict=True)
    )
    return within and not source.partial and not target.partial and source.mesh is target.mesh


def _cut(source: Layout, target: Layout) -> tuple[slice, ...] | None:
    if source.mesh.get_coordinate() is None:
        return None
    before, after = source.box(), target.box()
    return None if after.is_empty else after.within(before).slices


def moved(tensor: torch.Tensor, how: Transfer, operator: str) -> torch.Tensor:
    """The local tensor that a call needs, of an input that lies otherwise or needs an enter.

    Forward: the move. Backward: gradients of all uses are summed, then one move back.
    Runs within `as_local()`.
    """
    needs_grad = torch.is_grad_enabled() and _requires_grad(tensor)
    if how.source is how.target and not needs_grad:
        return tensor  # the gradient alone would have moved
    # All ranks must agree on what is shared, as the moves back of its gradients are collectives.
    is_shared = type(tensor) is DTensor and (
        how.source is how.target or how.source.partial or (needs_grad and how.is_cut)
    )
    if is_shared:
        found = _shared(tensor, how, needs_grad)
        if found is not None:
            return found
    if state.explicit:
        _refuse_communication(how, tensor.dtype, operator)
    if needs_grad:
        if not how.is_linear:
            raise LayoutError(
                f"{operator}: a pending reduction of {how.source!r} has no gradient, as it is not "
                "linear; detach() the tensor first"
            )
        result = apply_pair(tensor, how.pair)
        if is_shared and how.source is not how.target:
            # A communicator may hold what it gave, and longer on one rank than on another, so
            # whether that is still alive must not be what decides about a collective.
            result = result.view_as(result)
    elif how.cut is not None:
        return tensor[how.cut]
    else:
        result = _run(tensor, how)
    if is_shared:
        _share(tensor, how, needs_grad, result)
    return result


def _run(tensor: torch.Tensor, how: Transfer) -> torch.Tensor:
    with torch.no_grad():
        local = torch._C.TensorBase.as_subclass(tensor, torch.Tensor)
        plan = plan_redistribute(how.source, how.target, local.dtype)
        return execute(plan, local).wait()


# A tensor remembers what it was moved to. What holds its own leaf's graph it holds weakly: the
# leaf would never be freed, as the cycle leads through C++.


def _shared(tensor: Any, how: Transfer, needs_grad: bool) -> torch.Tensor | None:
    kept = tensor.__dict__.get("_moved")
    if kept is None:
        return None
    found = kept.get((how.target, how.used_on, needs_grad))
    if found is None:
        return None
    get, version = found
    return get() if version == _version(tensor) else None  # type: ignore[no-any-return]


def _share(tensor: Any, how: Transfer, needs_grad: bool, result: torch.Tensor) -> None:
    is_leaf = needs_grad and torch._C.TensorBase.is_leaf.__get__(tensor)
    get: Callable[[], Any] = weakref.ref(result) if is_leaf else lambda: result
    kept = tensor.__dict__.setdefault("_moved", {})
    kept[how.target, how.used_on, needs_grad] = get, _version(tensor)


def _refuse_communication(how: Transfer, dtype: torch.dtype, operator: str) -> None:
    plan = plan_redistribute(how.source, how.target, dtype)
    if not any(step.communicates for step in plan.moves):
        return
    wanted = ", ".join(map(repr, how.target.placements))
    raise PolicyError(
        f"{operator}: within explicit(), but an input must move to fit:\n{plan.explain()}\n"
        f"Say so: x.redistribute(placements=[{wanted}])"
    )
