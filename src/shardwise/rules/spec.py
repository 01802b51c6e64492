"""What a rule says of one call: the factors of its operands and results.

A factor is a name for a dim that several operands and results share, as a letter of an einsum.
Splitting a factor over an axis of the mesh splits every dim that carries it. Everything else
follows (`shardwise.rules.choose`): the legal splits, the results' layouts, which gradients are
contributions, what a choice costs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.cut import Cut
from shardwise.layout import Layout
from shardwise.mesh import DeviceMesh

Dims = tuple[str | None, ...]
"""The factor of each dim; None for one that must be whole."""


@dataclass(frozen=True, slots=True)
class Out:
    """A result: the factor of each dim, and its global shape."""

    dims: Dims
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Spec:
    """One call of an operator, in factors. A rule returns it.

    A rule may look at shapes and layouts and at arguments that are no tensors, and at nothing else:
    what it says is remembered for calls that agree in these. (At dtypes if it is registered so.)
    """

    inputs: Sequence[tuple[torch.Tensor, Dims]]
    """The tensors among the arguments, in their order, each with its factors."""
    outputs: Sequence[Out]
    """The tensors of the result, in their order."""
    reduces: Mapping[str, str] = field(default_factory=dict)
    """Factors that no result has: the reduction of the results of ranks that split it ("sum",
    "max", ...), or "whole" where the lowering makes the results whole itself."""
    together: Sequence[tuple[str, str]] = ()
    """Pairs of factors, one of a result and one of `reduces`, that an axis may split both: the
    lowering then gets from other ranks what belongs together, and nothing is pending. What it sends
    may depend on values, so this is only considered where there are any."""
    moves: Callable[[Here], tuple[int, float]] | None = None
    """Given how the call is split: in how many collectives the lowering moves how many elements to
    each rank, roughly. Nothing by default; 0 of each where it is split so that nothing moves."""
    linear: Sequence[Sequence[int]] = ()
    """Sets of inputs in which the operator is (jointly) linear: pending sums flow through."""
    additive: Sequence[int] = ()
    """Inputs that are added to the result: pending sums too, when a reduced factor is split."""
    lower: Callable[[Here], Callable[..., Any] | None] | None = None
    """Given how the call is split: what to run on the local tensors in place of the operator,
    with the operator's own arguments. None to run the operator."""
    allows: Callable[[Mapping[str, tuple[int, ...]], DeviceMesh], bool] | None = None
    """Whether these splits (axes by factor) are possible; any are by default."""
    positions: Collection[str] | None = None
    """Factors along which the lowering must know which indices a rank holds: these are never cut
    in pieces (`shardwise.cut`). None: all, if there is a lowering or a say in what splits are
    possible, and else none."""
    scales: bool = False
    """Whether dims of one factor may differ in size: they are split at the same places, up to
    scale, and not at all where these are between indices."""
    recut: Callable[[str, int, Cut, tuple[int, ...]], Cut | None] | None = None
    """Given a factor, the number of a result, how the inputs' dim is cut, and into how many chunks
    the axes split it: how the result's dim is cut; None where it cannot be. By default as the
    inputs' dim. A dim that is in one piece has units of 1."""
    is_view: bool = False
    """Whether torch returns a view of the first input."""
    keys: Sequence[Any] = ()
    """Of views that an index of the input gives, those indices. Without, a lowering may say so."""
    writes: bool = False
    """Whether the lowering of an in-place operator writes to its first input itself; otherwise the
    result of the operator that returns a new tensor is made, and copied."""
    may_fail: bool = False
    """Whether torch may raise an error for what a part of a batch holds: it then does on all ranks.
    Costs a small collective."""
    needs_plain: bool = False
    """Whether what runs looks at shapes in Python, and so must not be handed DTensors."""


@dataclass(frozen=True, slots=True)
class Here:
    """How one call is split: what a lowering is told."""

    mesh: DeviceMesh
    splits: Mapping[str, tuple[int, ...]]
    """The axes over which each factor is split, outer to inner; only those that are."""
    inputs: tuple[Layout, ...]
    """How the inputs lie when the local function is called."""
    outputs: tuple[Layout, ...]
    """How its results lie."""

    def axes(self, *factors: str | None) -> tuple[int, ...]:
        """The axes that split these factors; those of one rank split nothing."""
        return tuple(
            axis
            for each in factors
            if each
            for axis in self.splits.get(each, ())
            if self.mesh.shape[axis] > 1
        )


def takes_shards(lowering: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a lowering that only hands its tensors on to torch, and asks them nothing.

    It may be given DTensors, which saves their plain aliases.
    """
    lowering.takes_shards = True  # type: ignore[attr-defined]
    return lowering


def dims_of(tensor: torch.Tensor, prefix: str = "d") -> Dims:
    """A factor of its own for each dim: d0, d1, ..."""
    return tuple(f"{prefix}{dim}" for dim in range(tensor.dim()))


def normalized(dim: int, ndim: int) -> int:
    """A dim counted from the front."""
    limit = max(ndim, 1)
    if not -limit <= dim < limit:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-limit}, {limit - 1}], "
            f"but got {dim})"
        )
    return dim % limit


def parsed(pattern: str, tensors: Sequence[torch.Tensor]) -> tuple[list[Dims], list[Dims]]:
    """The factors in a pattern such as "m k, k n -> m n"; `...` stands for any leading dims.

    A `_` is a dim that must be whole.
    """
    left, _, right = pattern.partition("->")
    inputs = [part.split() for part in left.split(",")]
    extra = 0
    for names, tensor in zip(inputs, tensors, strict=False):
        if "..." in names:
            extra = max(extra, tensor.dim() - (len(names) - 1))

    def expanded(names: list[str], ndim: int | None) -> Dims:
        count = extra if ndim is None else ndim - (len(names) - 1)
        result: list[str | None] = []
        for name in names:
            if name == "...":
                result += [f"...{each}" for each in range(extra - count, extra)]
            else:
                result.append(None if name == "_" else name)
        return tuple(result)

    found = [expanded(names, tensor.dim()) for names, tensor in zip(inputs, tensors, strict=False)]
    return found, [expanded(part.split(), None) for part in right.split(",")]
