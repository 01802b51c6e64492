"""Dims cut in pieces: each piece is split on its own, in whole units, and nothing else changes."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise as sw
from shardwise import DeviceMesh, Layout, LayoutError, Shard, redistribute_local
from shardwise.mesh import init_device_mesh

PAIR = DeviceMesh.abstract((2,), ("tp",))
GRID = DeviceMesh.abstract((2, 2), ("dp", "tp"))
HEADS = ((24, 8), (12, 4), (12, 4))
"""Six heads of four queries, three of keys and of values: over two ranks 2 and 1 groups."""


@contextmanager
def own_events() -> Iterator[list[sw.Event]]:
    """What the calling rank communicates in here."""
    rank = sw.world.current().rank
    heard: list[sw.Event] = []
    with sw.listen(lambda event: heard.append(event) if event.rank == rank else None):
        yield heard


def shard(full: torch.Tensor, layout: Layout, place: Sequence[int]) -> torch.Tensor:
    """A rank's piece by torch.chunk alone, of rows that are the units of each piece."""
    for dim, (axes, cut) in enumerate(zip(layout.shard_order, layout.cuts, strict=True)):
        pieces = cut or ((full.shape[dim], 1),)
        parts = []
        for part, (length, unit) in zip(
            full.split([length for length, _ in pieces], dim), pieces, strict=True
        ):
            rows = part.unflatten(dim, (length // unit, unit))
            for axis in axes:
                count = layout.mesh.shape[axis]
                step = -(-rows.shape[dim] // count)
                first = min(place[axis] * step, rows.shape[dim])
                rows = rows.narrow(dim, first, min(step, rows.shape[dim] - first))
            parts.append(rows.flatten(dim, dim + 1))
        full = torch.cat(parts, dim)
    return full


# ---- values


@st.composite
def cut_layouts(draw: st.DrawFn) -> Layout:
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    mesh = DeviceMesh.abstract(shape, tuple("xyz"[: len(shape)]))
    ndim = draw(st.integers(1, 2))
    order: list[list[int]] = [[] for _ in range(ndim)]
    for axis in draw(st.permutations(range(mesh.ndim))):
        dim = draw(st.integers(-1, ndim - 1))
        if dim >= 0:
            order[dim].append(axis)
    cuts = []
    for _ in range(ndim):
        units = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
        cuts.append(tuple((draw(st.integers(0, 5)) * unit, unit) for unit in units))
    sizes = [sum(length for length, _ in cut) for cut in cuts]
    return Layout(mesh, sizes, order, cuts=cuts)


@settings(max_examples=150, deadline=None)
@given(cut_layouts())
def test_boxes_of_all_ranks_tile_the_tensor_and_hold_whole_units(layout: Layout) -> None:
    full = torch.arange(float(layout.numel)).reshape(layout.shape)
    seen = torch.zeros(layout.shape)
    split = {axis for axes in layout.shard_order for axis in axes}
    for place in product(*map(range, layout.mesh.shape)):
        expected = shard(full, layout, place)
        assert layout.local_shape(place) == tuple(expected.shape)
        local = torch.full(expected.shape, -1.0)
        for there, here in layout.boxes(place):
            local[here.slices] = full[there.slices]
            if all(place[axis] == 0 for axis in range(layout.mesh.ndim) if axis not in split):
                seen[there.slices] += 1
        assert torch.equal(local, expected)
    assert bool((seen == 1).all())


@settings(max_examples=100, deadline=None)
@given(cut_layouts())
def test_a_cut_layout_is_one_value_by_repr_placements_and_pickle(layout: Layout) -> None:
    assert Layout.parse(repr(layout), layout.mesh) is layout
    assert pickle.loads(pickle.dumps(layout)) is layout
    again = Layout.from_placements(layout.mesh, layout.shape, layout.placements, layout.shard_order)
    assert again is layout
    assert [eval(repr(each), vars(sw)) for each in layout.placements] == list(layout.placements)


def test_a_cut_with_the_boundaries_of_an_ordinary_dim_is_an_ordinary_layout() -> None:
    ordinary = Layout(PAIR, (24, 3), {0: ["tp"]})
    assert Layout.from_placements(PAIR, (24, 3), [Shard(0, unit=4)]) is ordinary
    assert Layout.from_placements(PAIR, (24, 3), [Shard(0, pieces=1)]) is ordinary
    assert Layout(PAIR, (24, 3), cuts={0: ((12, 1), (12, 1))}) is Layout(PAIR, (24, 3))
    assert not ordinary.is_cut
    assert Layout.from_placements(PAIR, (24, 3), [Shard(0, unit=8)]).is_cut


def test_cuts_with_the_same_boundaries_are_the_same_layout() -> None:
    one = Layout.from_placements(PAIR, (48,), [Shard(0, pieces=3, unit=4)])
    assert one is Layout.from_placements(PAIR, (48,), [Shard(0, pieces=(16, 16, 16))])
    assert one.placements == (Shard(0, pieces=3),)


def test_a_cut_layout_reads_as_its_pieces() -> None:
    layout = Layout.from_placements(PAIR, (48, 32), [Shard(0, pieces=(24, 12, 12), unit=(8, 4, 4))])
    assert repr(layout) == "[(24/8+12/4+12/4)@tp, 32]"
    assert layout.cuts == (HEADS, None)
    assert layout.local_shape((0,)) == (32, 32)
    assert [there.start[0] for there, _ in layout.boxes((1,))] == [16, 32, 44]
    assert repr(Shard(0, 3)) == "Shard(0, pieces=3)"
    assert repr(Shard(-1, unit=4)) == "Shard(-1, unit=4)"


def test_relaid_keeps_the_cut_of_a_dim_whose_axes_stay() -> None:
    layout = Layout(GRID, (8, 6), {0: ["tp"]}, {"dp": "sum"}, {0: ((4, 1), (4, 1))})
    assert layout.relaid(partial={}).cuts == layout.cuts
    assert layout.relaid([(1,), (0,)], {}).cuts == layout.cuts
    assert not layout.relaid([(0,), ()], {}).is_cut
    assert not layout.relaid([(), ()], {}).is_cut


def test_a_box_of_several_ranges_is_refused_and_says_why() -> None:
    layout = Layout.from_placements(PAIR, (8,), [Shard(0, pieces=2)])
    with pytest.raises(LayoutError, match=r"dim 0 of \[\(4\+4\)@tp\].*several ranges of it"):
        layout.box((1,))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Shard(0, pieces=0), r"Shard\(pieces\): expected a number"),
        (lambda: Shard(0, pieces="3"), r"Shard\(pieces\): expected a number"),
        (lambda: Shard(0, unit=0), r"Shard\(unit\): expected a length"),
        (lambda: Shard(0, pieces=3, unit=(4, 4)), r"Shard\(unit\): expected 3 lengths"),
        (lambda: _laid((10,), Shard(0, pieces=3)), r"that 3 pieces divide, got size 10"),
        (lambda: _laid((10,), Shard(0, pieces=(4, 4))), r"make up dim 0, of size 10.*4\+4 = 8"),
        (lambda: _laid((10,), Shard(0, unit=4)), r"a piece of 10 of units of 4"),
        (lambda: Layout(PAIR, (8,), [["tp"]], cuts=[((4, 1),)]), r"cuts\[0\]: expected lengths"),
        (lambda: Layout(PAIR, (8,), [["tp"]], cuts=[((8, 3),)]), r"cuts\[0\]: expected pieces"),
    ],
)
def test_pieces_that_do_not_fit_are_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make()


def _laid(shape: tuple[int, ...], placement: Shard) -> Layout:
    return Layout.from_placements(PAIR, shape, [placement])


# ---- moves


def _of_cut(mesh: DeviceMesh, shape: tuple[int, int]) -> list[Layout]:
    """Ordinary layouts, cut ones, and such with pending sums."""
    rows = {4: ((2, 1), (2, 1)), 7: ((4, 2), (1, 1), (2, 1)), 12: ((8, 4), (4, 2))}[shape[0]]
    columns = ((shape[1], shape[1] // 3),)
    last = mesh.ndim - 1
    found = [
        Layout(mesh, shape),
        Layout(mesh, shape, {0: [last]}),
        Layout(mesh, shape, {1: [last]}),
        Layout(mesh, shape, (), {last: "sum"}),
        Layout(mesh, shape, {0: [last]}, None, {0: rows}),
        Layout(mesh, shape, {1: [last]}, None, {1: columns}),
    ]
    if mesh.ndim == 2:
        found += [
            Layout(mesh, shape, {0: [1]}, {0: "sum"}, {0: rows}),
            Layout(mesh, shape, {0: [1]}, {0: "avg"}, {0: rows}),
            Layout(mesh, shape, {0: [1], 1: [0]}, None, {0: rows}),
            Layout(mesh, shape, {0: [1], 1: [0]}, None, {0: rows, 1: columns}),
            Layout(mesh, shape, {0: [1, 0]}, None, {0: rows}),
            Layout(mesh, shape, {0: [0, 1]}, None, {0: rows}),
            Layout(mesh, shape, {1: [0]}, {1: "sum"}),
        ]
    return found


def _piece(full: torch.Tensor, layout: Layout) -> torch.Tensor:
    """This rank's piece; contributions that differ and add up where a reduction is pending."""
    place = layout.mesh.get_coordinate()
    assert place is not None
    local = shard(full, layout, place).clone()
    for axis, op in layout.partial:
        size = layout.mesh.shape[axis]
        weight = torch.arange(1.0, size + 1)[place[axis]] / (size * (size + 1) / 2)
        local = local * weight * (size if op == "avg" else 1)
    return local


@pytest.mark.parametrize("ranks", [(2,), (3,), (2, 2)])
@pytest.mark.parametrize("shape", [(12, 6), (7, 6), (4, 3)])
def test_moves_between_cut_ordinary_and_pending_keep_values_and_gradients(
    ranks: tuple[int, ...], shape: tuple[int, int]
) -> None:
    full = torch.arange(1.0, 1 + shape[0] * shape[1], dtype=torch.float64).reshape(shape)

    def each() -> None:
        mesh = init_device_mesh("cpu", ranks, ("dp", "tp")[-len(ranks) :])
        whole = Layout(mesh, shape)
        for source, target in product(_of_cut(mesh, shape), repeat=2):
            local = _piece(full, source).requires_grad_()
            moved = redistribute_local(local, source, target)
            back = redistribute_local(moved, target, whole)
            assert torch.allclose(back, full), f"{source} -> {target}"
            (back * full).sum().backward()
            dual = source.relaid(partial={})
            scale = 1.0
            for axis, op in source.partial:
                scale /= mesh.shape[axis] if op == "avg" else 1
            expected = _piece(full, dual) * scale
            assert torch.allclose(local.grad, expected), f"{source} -> {target}"

    sw.simulate(each, len(list(product(*map(range, ranks)))))


def test_a_pending_sum_of_a_cut_tensor_is_one_all_reduce_of_the_local_bytes() -> None:
    def each() -> list[Any]:
        mesh = init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        source = Layout(mesh, (48, 2), {0: ["tp"]}, {"dp": "sum"}, {0: HEADS})
        with own_events() as events:
            redistribute_local(torch.ones(source.local_shape()), source, source.relaid(partial={}))
        return [(event.kind, event.axes, event.bytes) for event in events]

    found = sw.simulate(each, 4)
    assert found[0] == [("all_reduce", ("dp",), 32 * 2 * 4)]
    assert found[1] == [("all_reduce", ("dp",), 16 * 2 * 4)]


def test_the_gradient_of_a_cut_tensor_used_on_another_axis_is_one_all_reduce_there() -> None:
    def each() -> list[Any]:
        mesh = init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        layout = Layout(mesh, (48, 2), {0: ["tp"]}, None, {0: HEADS})
        local = torch.ones(layout.local_shape(), requires_grad=True)
        used = redistribute_local(local, layout, layout, used_on="dp")
        with own_events() as events:
            used.sum().backward()
        assert torch.equal(local.grad, torch.full_like(local, 2.0))
        return [(event.kind, event.axes) for event in events]

    assert sw.simulate(each, 4) == [[("all_reduce", ("dp",))]] * 4


def test_a_plan_says_what_happens_to_pieces() -> None:
    cut = Layout(GRID, (48, 2), {0: ["tp"]}, None, {0: HEADS})
    plan = sw.plan_redistribute(cut, Layout(GRID, (48, 2), {0: ["dp"]}))
    assert [step.kind for step in plan.steps] == ["all_gather", "slice"]
    assert plan.bytes_received == (48 - 16) * 2 * 4
    assert "[(24/8+12/4+12/4)@tp, 2] -> [48@dp, 2]" in plan.explain()
    back = sw.plan_redistribute(Layout(GRID, (48, 2)), cut)
    assert "no communication" in back.explain()
    assert sw.plan_redistribute(cut, cut).explain().endswith("nothing to do")
