"""Operators that join several tensors, or broadcast them against each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.dtensor.tensor import DTensor
from shardwise.rules.helpers.dims import Inputs, unsplit_spec
from shardwise.rules.helpers.index_key import as_replicated, mesh_of
from shardwise.rules.helpers.local_tensors import join
from shardwise.rules.helpers.row_exchange import plan_row_exchange
from shardwise.rules.linalg.matmul import VF
from shardwise.rules.registry import Aten, composed, rule
from shardwise.rules.spec import Out, Spec, SplitContext, normalize_dim


def join_spec(
    name: str,
    tensors: Sequence[torch.Tensor],
    places: Sequence[tuple[int, ...]],
    ndim: int,
    dim: int,
    local: Callable[[Any], torch.Tensor],
) -> Spec:
    """Return the spec of tensors joined along a dim.

    Arguments:
        places: for each tensor the dims of the result that its dims become; other dims have size 1.
        ndim: the number of dims of the result.
        dim: the dim along which the tensors are joined; if it is split, rows move between ranks.
        local: joins the local tensors.
    """
    # A dim that some tensor lacks must be whole.
    names = [f"d{at}" if all(at in place for place in places) else None for at in range(ndim)]
    shape = [1] * ndim
    lengths = []
    inputs: Inputs = []
    for tensor, place in zip(tensors, places, strict=True):
        sizes = dict(zip(place, tensor.shape, strict=True))
        lengths.append(sizes.get(dim, 1))
        if inputs and any(sizes.get(at, 1) != shape[at] for at in range(ndim) if at != dim):
            raise RuntimeError(f"{name}: sizes must match except in dim {dim}")
        shape = [sizes.get(at, 1) for at in range(ndim)]
        inputs.append((tensor, tuple(names[at] for at in place)))
    shape[dim] = sum(lengths)

    def lower(context: SplitContext) -> Callable[..., Any] | None:
        axes = context.axes(names[dim])
        if not axes:
            return None
        rows = range(shape[dim])
        move = plan_row_exchange(name, context.mesh, axes, dim, lengths, [shape[dim]], rows)
        return lambda tensors, *args, **kwargs: move(local(tensors))

    return Spec(
        inputs,
        [Out(tuple(names), tuple(shape))],
        linear=[tuple(range(len(inputs)))],
        lower=lower,
        positions=[f"d{dim}"],
    )


@rule("cat", "concat", "concatenate", inplace=False)
def cat(tensors: Any, dim: int = 0, **kwargs: Any) -> Spec | None:
    if not tensors or kwargs.keys() - {"axis"} or isinstance(dim, str):
        return None
    # torch ignores empty tensors of one dim.
    kept = [tensor for tensor in tensors if tuple(tensor.shape) != (0,)] or list(tensors)
    ndim = kept[0].dim()
    at = normalize_dim(kwargs.get("axis", dim), ndim)
    if any(tensor.dim() != ndim or ndim == 0 for tensor in kept):
        raise RuntimeError("cat: expected tensors of the same number of dims, at least 1")
    spec = join_spec("cat", kept, [tuple(range(ndim))] * len(kept), ndim, at, _cat_along(at))
    if len(kept) == len(tensors):
        return spec
    found = iter(spec.inputs)
    inputs = [(each, (None,)) if tuple(each.shape) == (0,) else next(found) for each in tensors]
    return replace(spec, inputs=inputs, linear=[tuple(range(len(inputs)))])


def _cat_along(dim: int) -> Callable[[Any], torch.Tensor]:
    return lambda tensors: join(tensors, dim)


@rule("stack", inplace=False)
def stack(tensors: Any, dim: int = 0, **kwargs: Any) -> Spec | None:
    if not tensors or kwargs:
        return None
    ndim = tensors[0].dim() + 1
    at = normalize_dim(dim, ndim)
    if any(tensor.shape != tensors[0].shape for tensor in tensors):
        raise RuntimeError("stack expects each tensor to be equal size")
    place = tuple(each for each in range(ndim) if each != at)
    return join_spec("stack", tensors, [place] * len(tensors), ndim, at, torch.stack)


def _stacked(name: str, dim: Callable[[int], int], place: Callable[[int], tuple[int, ...]]) -> None:
    """Register the rule of a function that adds dims to its tensors and joins them.

    Arguments:
        dim: maps the largest number of dims of a tensor to the dim along which they are joined.
        place: maps the number of dims of a tensor to the dims of the result that they become.
    """
    function = getattr(torch, name)

    @rule(name, inplace=False)
    def stacked(tensors: Any, **kwargs: Any) -> Spec | None:
        if not tensors or kwargs:
            return None
        places = [place(tensor.dim()) for tensor in tensors]
        at = dim(max(tensor.dim() for tensor in tensors))
        ndim = max(at + 1, *(max(each, default=-1) + 1 for each in places))
        local = _cat_along(0) if ndim == 1 else lambda each: function(tuple(each))
        return join_spec(name, tensors, places, ndim, at, local)


def _as_is(ndim: int) -> tuple[int, ...]:
    return tuple(range(ndim))


_stacked("hstack", lambda ndim: 1 if ndim > 1 else 0, _as_is)
for _name in ("vstack", "row_stack"):
    _stacked(_name, lambda ndim: 0, lambda ndim: (1,) if ndim == 1 else _as_is(ndim))
_stacked("dstack", lambda ndim: 2, lambda ndim: (1,) if ndim == 1 else _as_is(ndim))
_stacked("column_stack", lambda ndim: 1, _as_is)


@rule(VF.block_diag, Aten("block_diag"), inplace=False)
def block_diag(tensors: Any) -> Spec:
    shapes = [(1,) * (2 - tensor.dim()) + tuple(tensor.shape) for tensor in tensors]
    shape = tuple(map(sum, zip(*shapes, strict=True)))
    return unsplit_spec(tensors, shape, linear=[tuple(range(len(shapes)))])


# ---- broadcast: each tensor on its own, a view without communication


@composed(VF.broadcast_tensors, Aten("broadcast_tensors"))
def broadcast_tensors(tensors: Any) -> tuple[DTensor, ...]:
    """Expand each tensor to the common shape."""
    mesh = mesh_of(tensors)
    shape = torch.broadcast_shapes(*(tuple(each.shape) for each in tensors))  # type: ignore[no-untyped-call]
    return tuple(as_replicated(each.expand(shape), mesh) for each in tensors)


@composed(torch.meshgrid, VF.meshgrid, Aten("meshgrid"))
def meshgrid(*tensors: Any, indexing: str | None = "ij") -> tuple[DTensor, ...]:
    """Expand each tensor along a dim of its own."""
    given = _listed(tensors)
    mesh = mesh_of(given)
    like = [torch.empty(each.shape, device="meta") for each in given]
    shape = torch.meshgrid(*like, indexing=indexing)[0].shape
    order = list(range(len(given)))
    if indexing == "xy":
        order[:2] = order[1::-1]
    return tuple(
        as_replicated(
            each.reshape([-1 if dim == at else 1 for dim in range(len(given))]).expand(shape), mesh
        )
        for each, at in zip(given, order, strict=True)
    )


def _listed(tensors: Sequence[Any]) -> Sequence[torch.Tensor]:
    """Return the tensors of `f(a, b)` or `f([a, b])`."""
    return tensors if isinstance(tensors[0], torch.Tensor) else tensors[0]


# ---- functions composed of these


@composed(torch.cartesian_prod, VF.cartesian_prod, Aten("cartesian_prod"))
def cartesian_prod(*tensors: Any) -> torch.Tensor:
    """Return a row for each choice of one element per tensor."""
    given = _listed(tensors)
    if len(given) == 1:
        return given[0]
    grids = torch.meshgrid(*given, indexing="ij")
    return torch.stack([each.flatten() for each in grids], 1)


@composed("combinations")
def combinations(input: DTensor, r: int = 2, with_replacement: bool = False) -> torch.Tensor:
    """Return a row for each choice of `r` elements."""
    if input.dim() != 1:
        raise RuntimeError(f"combinations: expected a vector, got shape {tuple(input.shape)}")
    places = torch.arange(len(input), device=input.device)
    chosen = torch.combinations(places, r, with_replacement)
    return input[as_replicated(chosen, input._layout.mesh)]


@composed("_chunk_cat")
def chunk_cat(tensors: Any, dim: int, num_chunks: int) -> torch.Tensor:
    """Chunk each tensor along a dim, pad the last chunk with zeros, and join chunk by chunk."""
    at = normalize_dim(dim, tensors[0].dim())
    parts = []
    for tensor in tensors:
        *outer, size = tensor.shape[: at + 1]
        inner = tensor.dim() - at - 1
        filled = F.pad(tensor, [0, 0] * inner + [0, -size % num_chunks])
        parts.append(filled.reshape(*outer, num_chunks, -1))
    return torch.cat(parts, at + 1)
