"""Spec: the description of one call by its rule, in factors.

A factor is a name for a dim that several operands and results share, like a letter of an einsum.
Splitting a factor over an axis of the mesh splits every dim that has it. The rest follows from that
(`shardwise.rules.strategy`): the legal splits, the results' layouts, which gradients are
contributions, and what a strategy costs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.core.cut import Cut
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Placement

Dims = tuple[str | None, ...]
"""The factor of each dim; None for a dim that must be whole."""
Listed = tuple[tuple[Placement, ...], tuple[Placement, ...]]
"""The placements of the results, and those of the tensors among the arguments, on one axis."""


@dataclass(frozen=True, slots=True)
class Out:
    """A result: the factor of each dim, and its global shape."""

    dims: Dims
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Spec:
    """One call of an operator, in factors. A rule returns it.

    A rule may depend only on shapes, on layouts and on arguments that are no tensors: its answer is
    cached for calls that agree in these. (Also on dtypes, if it is registered with `by_dtype`.)
    """

    inputs: Sequence[tuple[torch.Tensor, Dims]]
    """The tensors among the arguments, in their order, each with its factors."""
    outputs: Sequence[Out]
    """The tensors of the result, in their order."""
    reduces: Mapping[str, str] = field(default_factory=dict)
    """For each factor that no result has, how to combine the results of ranks that split it ("sum",
    "max", ...), or "whole" where the lowering makes the results whole itself."""
    co_split: Sequence[tuple[str, str]] = ()
    """Pairs of factors, one of a result and one of `reduces`, that one axis may split at once: the
    lowering then fetches what it needs from other ranks, and nothing is pending. What it sends may
    depend on values, so this is tried only where tensors have values."""
    comm_cost: Callable[[SplitContext], tuple[int, float]] | None = None
    """Given how the call is split, return roughly the number of collectives of the lowering and of
    the elements that each rank receives in them; (0, 0.0) for a split that moves nothing. By
    default a lowering counts as free."""
    linear: Sequence[Sequence[int]] = ()
    """Sets of inputs in which the operator is (jointly) linear: pending sums pass through it."""
    additive: Sequence[int] = ()
    """Inputs that are added to the result: they become pending sums where a reduced factor is
    split."""
    lower: Callable[[SplitContext], Callable[..., Any] | None] | None = None
    """Given how the call is split, return the function to run on the local tensors in place of the
    operator, with the operator's own arguments; None to run the operator."""
    allows: Callable[[Mapping[str, tuple[int, ...]], DeviceMesh], bool] | None = None
    """Return whether these splits (axes by factor) are possible; by default all are."""
    positions: Collection[str] | None = None
    """Factors along which the lowering must know which indices a rank holds: their dims are never
    cut (`shardwise.core.cut`). None stands for all factors if there is `lower` or `allows`,
    and for no factor otherwise."""
    scales: bool = False
    """Whether dims of one factor may differ in size: they are split at the same places up to scale,
    and not at all if such a place is between indices."""
    recut: Callable[[str, int, Cut, tuple[int, ...]], Cut | None] | None = None
    """Given a factor, the number of a result, the pieces of the inputs' dim, and the number of
    chunks
    for each axis that splits it, return the pieces of the result's dim; None if there are none. By
    default those of the inputs' dim. A dim in one piece has units of 1."""
    is_view: bool = False
    """Whether torch returns a view of the first input."""
    keys: Sequence[Any] = ()
    """For results that are views given by an index of the input, these indices; a lowering may also
    set them."""
    writes: bool = False
    """Whether the lowering of an in-place operator writes to its first input itself; otherwise the
    out-of-place operator runs, and its result is copied."""
    may_fail: bool = False
    """Whether torch may raise an error for the values of some shards: the error is then raised on
    all ranks. Costs a small collective."""
    acceptable: Sequence[Listed] | None = None
    """What one axis of the mesh may do, in placements, for an operator that is described by these
    and not by factors (`shardwise.rules.acceptable`)."""
    needs_plain: bool = False
    """Whether the function that runs looks at shapes in Python, and so must not get DTensors."""


@dataclass(frozen=True, slots=True)
class SplitContext:
    """How one call is split: the argument of a lowering."""

    mesh: DeviceMesh
    splits: Mapping[str, tuple[int, ...]]
    """The axes over which each factor is split, outer to inner; only factors that are split."""
    inputs: tuple[Layout, ...]
    """The layouts of the inputs when the local function is called."""
    outputs: tuple[Layout, ...]
    """The layouts of its results."""

    def axes(self, *factors: str | None) -> tuple[int, ...]:
        """Return the axes of more than one rank that split these factors."""
        return tuple(
            axis
            for each in factors
            if each
            for axis in self.splits.get(each, ())
            if self.mesh.shape[axis] > 1
        )


def takes_shards(lowering: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a lowering that only passes its tensors on to torch, and looks at nothing of them.

    It may get DTensors, which saves making plain aliases.
    """
    lowering.takes_shards = True  # type: ignore[attr-defined]
    return lowering


def dims_of(tensor: torch.Tensor, prefix: str = "d") -> Dims:
    """Return a different factor for each dim: d0, d1, ..."""
    return tuple(f"{prefix}{dim}" for dim in range(tensor.dim()))


def normalize_dim(dim: int, ndim: int) -> int:
    """Return a dim counted from the front."""
    limit = max(ndim, 1)
    if not -limit <= dim < limit:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-limit}, {limit - 1}], "
            f"but got {dim})"
        )
    return dim % limit
