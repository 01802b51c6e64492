"""The global size of a split dim, from the local shards: `DTensor.from_local` without a shape.

A plain tensor that is a rank's shard does not say how large the shards of other ranks are. If it
was computed from the shard of a DTensor by operators that keep the shape, as residuals are between
modules, autograd's graph leads back to that DTensor, and its layout tells the sizes of all ranks.
Otherwise the ranks ask each other. All ranks of a program that computes the same on each of them
find the same; ranks that part are told so at their next collective (`comm.agreement`).
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch

from shardwise.comm import communicator
from shardwise.core.errors import LayoutError
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Placement, Shard, as_placement
from shardwise.dtensor.local_shards import check_shard, state_value
from shardwise.dtensor.state import Policy

_MOST_DIMS = 32


class _Setting(threading.local):
    """The policy of one thread; simulated ranks are threads."""

    piece_sizes = "known"


_setting = _Setting()


def piece_sizes(policy: str) -> Policy:
    """Set, on this thread, how ranks find the global size of a split dim from their shards.

    `DTensor.from_local` without `shape` needs that size. So do styles whose plain inputs are split
    along a dim whose size the module does not know, such as a sequence.

    Arguments:
        policy: `"known"` takes the size from the DTensor that the plain tensor was computed from,
            if autograd has recorded how, and asks otherwise (the default); `"ask"` makes the ranks
            exchange their sizes each time, in one small collective; `"even"` assumes shards of
            equal size, as torch does: no communication, but uneven shards give wrong shapes, or a
            deadlock.

    Example:
        >>> with sw.piece_sizes("even"):
        ...     model(x)
    """
    return Policy(_setting, "piece_sizes", policy, ("known", "ask", "even"))


def _as_placements(given: Sequence[Placement]) -> tuple[Placement, ...]:
    return tuple(as_placement(each, f"placements[{i}]") for i, each in enumerate(given))


@lru_cache(1024)
def _probe(mesh: DeviceMesh, shape: torch.Size, placements: tuple[Placement, ...]) -> Layout:
    """Return a layout with the axes that split each dim, and the shape of a shard."""
    ordinary = [Shard(each.dim) if isinstance(each, Shard) else each for each in placements]
    return Layout.from_placements(mesh, shape, ordinary)


def guess_layout(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int] | None = None,
) -> Layout:
    """Return the layout of shards without asking other ranks.

    If the global shape is not given, all shards are taken to be like this one.
    """
    if shape is not None:
        return Layout.from_placements(mesh, shape, placements)
    placements = _as_placements(placements)
    probe = _probe(mesh, local.shape, placements)
    shape = [
        size * math.prod(mesh.shape[axis] for axis in axes)
        for size, axes in zip(probe.shape, probe.shard_order, strict=True)
    ]
    return Layout.from_placements(mesh, shape, placements)


def infer_layout(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Layout:
    """Return the layout of shards whose global shape was not given.

    The ranks exchange their sizes, unless these are known (`piece_sizes`); all of them call this.
    """
    placements = _as_placements(placements)
    probe = _probe(mesh, local.shape, placements)
    if not any(probe.shard_order) or mesh.is_abstract or _setting.piece_sizes == "even":
        return guess_layout(local, mesh, placements)
    if _setting.piece_sizes == "known":
        known = _known_layout(local, probe, placements)
        if known is not None:
            state_value("sizes of shards are known", known, known, mesh)
            _check_known(local, known)
            return known
    state_value("sizes of shards are exchanged", (probe.shape, placements), placements, mesh)
    sizes = _all_sizes(local, mesh)
    shape = []
    for dim, axes in enumerate(probe.shard_order):
        first = [0] * mesh.ndim
        total = 0
        for number in range(math.prod(mesh.shape[axis] for axis in axes)):
            for axis in reversed(axes):
                number, first[axis] = divmod(number, mesh.shape[axis])
            total += sizes[tuple(first)][dim]
        shape.append(total if axes else sizes[tuple(first)][dim])
    layout = Layout.from_placements(mesh, shape, placements)
    for place, found in sizes.items():
        if found != layout.local_shape(place):
            raise LayoutError(
                f"local_tensor: the pieces are no legal sharding {tuple(placements)} of one "
                f"tensor: rank {mesh.rank_at(place)} has {found}, and would have "
                f"{layout.local_shape(place)} of {layout!r}, as torch.chunk cuts it; "
                "redistribute the rows, or gather them and use distribute_tensor"
            )
    note_origin(local, layout)
    return layout


# ---- sizes that are known from where a plain tensor came from

_ORIGIN = "shardwise: origin"
"""The key of a note in the metadata of a node of the graph, with the number of its output."""

_SAME_SHAPE = "shardwise: same shape"
"""The key of a note that a node's result has the shape of its input."""

_MOST_NODES = 64
"""The most nodes of a graph that are searched for a note."""

_MOST_KNOWN = 1024
"""The most layouts that are kept."""

_KEEP_SHAPE = frozenset(
    f"{name}Backward{number}"
    for number, names in {
        0: "Abs Add Addcdiv Addcmul Clamp ClampMax ClampMin Clone Div Elu Erf Exp Gelu Hardsigmoid "
        "Hardswish Hardtanh LeakyRelu Lerp Log LogSigmoid MaskedFill Maximum Minimum Mish Mul "
        "NanToNum NativeDropout NativeLayerNorm Neg Pow Reciprocal Relu Rsqrt Rsub Sigmoid Silu "
        "Softmax Softplus Sqrt Sub Tanh ToCopy Where",
        1: "Clamp Lerp MaskedFill Pow Rsub",
    }.items()
    for name in names.split()
)
"""Nodes of operators whose result has the broadcast shape of their inputs.

The operators that a program calls must decide whether a rank finds a note, never the sizes that a
rank happens to have. So views are not among these: a slice that covers all of a shard is an alias
on that rank, and a slice on others.
"""

_layouts: dict[Any, Layout | None] = {}


def note_origin(local: torch.Tensor, layout: Layout) -> None:
    """Note in the graph that a plain tensor is the local shard of a DTensor with this layout.

    Tensors that are computed from it have shards of the same sizes on all ranks, which is then
    known without communication. A tensor outside of a graph gets no note.
    """
    node: Any = local.grad_fn
    if node is not None and any(layout.shard_order):
        node.metadata[_ORIGIN, local.output_nr] = layout


def note_same_shape(view: torch.Tensor) -> None:
    """Note in the graph that a view, which the library made, has the shape of its base."""
    node: Any = view.grad_fn
    if node is not None:
        node.metadata[_SAME_SHAPE] = True


def _known_layout(
    local: torch.Tensor, probe: Layout, placements: tuple[Placement, ...]
) -> Layout | None:
    """Return the layout of a shard that was computed, by operators that keep the shape, from the
    shard of a DTensor that is split alike; None if there is no such DTensor."""
    sizes = tuple(
        -1 if axes else size for size, axes in zip(local.shape, probe.shard_order, strict=True)
    )
    for origin in _origins(local):
        if origin.mesh is not probe.mesh:
            continue
        key = origin, sizes, placements
        if key in _layouts:
            known = _layouts[key]
        else:
            if len(_layouts) >= _MOST_KNOWN:
                _layouts.clear()
            known = _layouts[key] = _derive_layout(origin, sizes, probe, placements)
        if known is not None:
            return known
    return None


def _origins(local: torch.Tensor) -> Iterator[Layout]:
    """Yield the layouts noted in the graph of a tensor, the nearest first."""
    if local.grad_fn is None:
        return
    pending: list[tuple[Any, int]] = [(local.grad_fn, local.output_nr)]
    for position in range(_MOST_NODES):
        if position >= len(pending):
            return
        node, number = pending[position]
        notes = node.metadata
        found = notes.get((_ORIGIN, number))
        if found is not None:
            yield found
        elif node.name() in _KEEP_SHAPE or _SAME_SHAPE in notes:
            pending += [edge for edge in node.next_functions if edge[0] is not None]


def _derive_layout(
    origin: Layout, sizes: tuple[int, ...], probe: Layout, placements: tuple[Placement, ...]
) -> Layout | None:
    """Return the layout of shards that were computed from those of a DTensor on the same mesh; None
    if it is split otherwise.

    Arguments:
        sizes: the shape of a shard; -1 for a dim whose size is to be found.
    """
    mesh = probe.mesh
    offset = len(sizes) - len(origin.shape)  # dims are aligned at the end, as in broadcasting
    shape = list(sizes)
    split = [dim for dim, size in enumerate(sizes) if size < 0]
    whole = [dim for dim, size in enumerate(sizes) if size >= 0 and dim >= offset]
    if any(origin.shard_order[dim - offset] for dim in whole):
        return None  # the ranks have parts of what is now said to be whole
    for dim in split:
        found = dim - offset
        if found < 0 or origin.shard_order[found] != probe.shard_order[dim]:
            return None
        shape[dim] = origin.shape[found]
    layout = Layout.from_placements(mesh, shape, placements)
    for place in itertools.product(*map(range, mesh.shape)):
        before, after = origin.local_shape(place), layout.local_shape(place)
        if any(before[dim - offset] != after[dim] for dim in split):  # in pieces or units
            return None
    return layout


def _check_known(local: torch.Tensor, layout: Layout) -> None:
    try:
        check_shard(local, layout)
    except LayoutError as error:
        raise LayoutError(
            f"{error.args[0]}. It was computed from the piece of a DTensor, and a split dim was "
            "expanded on the way. Give from_local the shape, or use sw.piece_sizes('ask')"
        ) from None


def _all_sizes(local: torch.Tensor, mesh: DeviceMesh) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Gather the shape of every rank's shard, by the rank's coordinate on the mesh."""
    if local.dim() > _MOST_DIMS:
        raise LayoutError(f"local_tensor: expected at most {_MOST_DIMS} dims, got {local.dim()}")
    device = local.device
    if local.is_meta:  # it has no data to send, but its sizes are known
        device = torch.device("cpu" if mesh.device_type == "meta" else mesh.device_type)
    mine = torch.full((1, 1 + _MOST_DIMS), -1, dtype=torch.int64, device=device)
    mine[0, : 1 + local.dim()] = torch.tensor([local.dim(), *local.shape])
    rows = communicator(mesh).all_gather(mine).tolist()
    ranks = mesh.mesh.flatten().tolist()
    found = {}
    for rank, (ndim, *sizes) in zip(ranks, rows, strict=True):
        place = mesh.coordinate_of(rank)
        assert place is not None, "it is of the mesh"
        found[place] = tuple(sizes[:ndim])
        if ndim != local.dim():
            raise LayoutError(
                f"local_tensor: expected pieces of as many dims on every rank; this one has "
                f"{tuple(local.shape)}, rank {rank} has {found[place]}"
            )
    return found
