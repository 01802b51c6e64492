"""Dims cut in pieces: each piece is split on its own, in whole units, and nothing else changes."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise as sw
from shardwise import DeviceMesh, Layout, LayoutError, Replicate, Shard, redistribute_local
from shardwise.core import world
from shardwise.core.mesh import init_device_mesh
from shardwise.testing import Sample, check_rule, rule_check
from shardwise.testing import layouts_of as every_layout

PAIR = DeviceMesh.abstract((2,), ("tp",))
GRID = DeviceMesh.abstract((2, 2), ("dp", "tp"))
HEADS = ((24, 8), (12, 4), (12, 4))
"""Six heads of four queries, three of keys and of values: over two ranks 2 and 1 groups."""


@contextmanager
def own_events() -> Iterator[list[sw.Event]]:
    """What the calling rank communicates in here."""
    rank = world.current().rank
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


# ---- operators


def run_on(ranks: tuple[int, ...], each: Any) -> list[Any]:
    """What each simulated rank returns, given the mesh."""

    def run() -> Any:
        return each(init_device_mesh("cpu", ranks, ("dp", "tp")[-len(ranks) :]))

    return sw.simulate(run, len(list(product(*map(range, ranks)))))


def distributed(full: torch.Tensor, mesh: DeviceMesh, placement: Any) -> Any:
    """On the last axis, and whole on the others; a leaf."""
    placements = [Replicate()] * (mesh.ndim - 1) + [placement]
    return sw.distribute_tensor(full, mesh, placements).requires_grad_(full.requires_grad)


QKV = Shard(0, pieces=(24, 12, 12), unit=(8, 4, 4))


def grouped_attention(x: Any, weight: Any, bias: Any, out: Any, how: str) -> tuple[Any, Any]:
    """Six heads of queries, three of keys and values, from one projection; and what they give."""
    batch, length, _ = x.shape
    fused = F.linear(x, weight, bias)
    if how == "slices":
        q, k, v = fused[..., :24], fused[..., 24:36], fused.narrow(-1, 36, 12)
    else:
        q, k, v = fused.split([24, 12, 12], dim=-1)
    q, k, v = (each.unflatten(-1, (-1, 4)).transpose(1, 2) for each in (q, k, v))
    if how == "repeat":  # as Hugging Face does
        k, v = (
            each[:, :, None].expand(batch, 3, 2, length, 4).reshape(batch, 6, length, 4)
            for each in (k, v)
        )
    found = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=how != "repeat")
    joined = found.transpose(1, 2).reshape(batch, length, 24)
    return joined, F.linear(joined, out)


@pytest.mark.parametrize("ranks", [(2,), (3,), (2, 2)])
@pytest.mark.parametrize("how", ["split", "slices", "repeat"])
def test_fused_grouped_attention_over_uneven_heads_needs_no_communication_but_its_two_sums(
    ranks: tuple[int, ...], how: str
) -> None:
    torch.manual_seed(0)
    shapes = ((3, 5, 8), (48, 8), (48,), (8, 24))
    plain = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    _, expected = grouped_attention(*plain, how)
    expected.square().sum().backward()

    def each(mesh: DeviceMesh) -> Any:
        placements = (Replicate(), QKV, QKV, Shard(1, unit=8))
        given = [
            distributed(each.detach().requires_grad_(), mesh, how)
            for each, how in zip(plain, placements, strict=True)
        ]
        with own_events() as events:
            joined, result = grouped_attention(*given, how)
            forward = len(events)
            result.square().sum().backward()
        even = mesh.shape[-1] == 3
        assert repr(joined.mesh_layout) == ("[3, 5, 24@tp]" if even else "[3, 5, (24/8)@tp]")
        assert torch.allclose(result.full_tensor(), expected)
        for one, other in zip(given, plain, strict=True):
            assert torch.allclose(one.grad.full_tensor(), other.grad)
            assert one.grad.mesh_layout is one.mesh_layout
        return forward, [(event.kind, event.axes) for event in events]

    for forward, events in run_on(ranks, each):
        assert forward == 0
        assert events == [("all_reduce", ("tp",))] * 2  # of the result, and of the input's gradient


def test_the_third_dim_of_a_fused_result_is_one_piece() -> None:
    """`x.view(b, s, 3, heads, head_dim)`, and the reverse."""
    full = torch.arange(2.0 * 36).reshape(2, 36)

    def each(mesh: DeviceMesh) -> Any:
        x = distributed(full, mesh, Shard(1, pieces=3, unit=4))
        with own_events() as events:
            apart = x.view(2, 3, 3, 4)
            one = apart.unbind(1)[1]
            chunk = x.chunk(3, -1)[1]
            part = x.tensor_split(3, -1)[2]
            again = apart.flatten(1)
        assert not events
        assert torch.equal(one.full_tensor(), full.view(2, 3, 3, 4)[:, 1])
        assert torch.equal(chunk.full_tensor(), full.chunk(3, -1)[1])
        assert torch.equal(part.full_tensor(), full.chunk(3, -1)[2])
        assert again.mesh_layout is x.mesh_layout
        assert torch.equal(again.full_tensor(), full)
        return [repr(each.mesh_layout) for each in (apart, one, chunk)]

    assert run_on((2,), each)[0] == ["[2, 3, 3@tp, 4]", "[2, 3@tp, 4]", "[2, (12/4)@tp]"]


def test_parts_that_tear_a_piece_are_right_too() -> None:
    full = torch.arange(2.0 * 24).reshape(2, 24)

    def each(mesh: DeviceMesh) -> None:
        x = distributed(full, mesh, Shard(1, pieces=2, unit=3))
        for run in (
            lambda x: x[:, 2:20],
            lambda x: x[:, ::5],
            lambda x: x[:, 13],
            lambda x: x.narrow(1, 5, 9),
            lambda x: x.split(7, 1)[1],
            lambda x: x.view(2, 4, 6),
            lambda x: x.flip(1),
            lambda x: x.cumsum(1),
            lambda x: torch.cat([x, x], 1),
            lambda x: x.argmax(1),
            lambda x: x.index_select(1, torch.tensor([3, 14, 20])),
            lambda x: x[:, torch.tensor([3, 14, 20])],
            lambda x: x.sort(1, descending=True)[0],
            lambda x: x.tril(),
        ):
            assert torch.equal(run(x).full_tensor(), run(full))

    run_on((2,), each)


def test_a_view_of_a_piece_is_written_through() -> None:
    def each(mesh: DeviceMesh) -> None:
        x = distributed(torch.zeros(12), mesh, Shard(0, pieces=3))
        x.chunk(3)[1].fill_(1)
        x[8:].fill_(2)
        x[0:4] = 3.0
        x[5] = 7.0
        assert x.full_tensor().tolist() == [3, 3, 3, 3, 1, 7, 1, 1, 2, 2, 2, 2]

    run_on((2,), each)


def test_operators_that_do_not_look_at_positions_keep_the_pieces_where_they_are() -> None:
    torch.manual_seed(0)
    full = torch.randn(6, 12)

    def each(mesh: DeviceMesh) -> None:
        x = distributed(full, mesh, Shard(1, pieces=(8, 4), unit=(4, 2)))
        weight = distributed(full[0], mesh, Shard(0, pieces=(8, 4), unit=(4, 2)))
        for run in (
            lambda x, w: x * 2 + w,
            lambda x, w: F.gelu(x.t()),
            lambda x, w: x.to(torch.float64).detach().unsqueeze(0),
            lambda x, w: torch.cat([x, x], 0),
            lambda x, w: torch.stack([x, x]),
            lambda x, w: x.view(2, 3, 12),
            lambda x, w: x.expand(2, 6, 12).permute(2, 0, 1),
            lambda x, w: torch.einsum("ab,b->ab", x, w),
            lambda x, w: x.sum(1),
            lambda x, w: x.clone().mul_(w).clamp_(0),
        ):
            with own_events() as events:
                found = run(x, weight)
            assert not events
            assert torch.allclose(found.full_tensor(), run(full, full[0]), atol=1e-6)
        for some in (  # which send small values only
            lambda x, w: x.softmax(1),
            lambda x, w: F.rms_norm(x, (12,), w),
            lambda x, w: F.layer_norm(x, (12,), w, w),
            lambda x, w: x.norm(dim=1),
            lambda x, w: x.mean(),
            lambda x, w: x.amax(1),
        ):
            with own_events() as events:
                found = some(x, weight)
            assert {event.kind for event in events} <= {"all_reduce"}
            assert sum(event.bytes for event in events) <= 2 * 6 * 8
            assert torch.allclose(found.full_tensor(), some(full, full[0]), atol=1e-6)

    run_on((2,), each)


def test_random_values_do_not_depend_on_the_pieces() -> None:
    def each(mesh: DeviceMesh) -> None:
        found = []
        for placement in (Replicate(), Shard(0), QKV):
            torch.manual_seed(3)
            x = distributed(torch.empty(48, 6), mesh, placement)
            torch.nn.init.normal_(x)
            torch.nn.init.kaiming_uniform_(x)
            y = F.dropout(x + torch.randn_like(x), 0.5)
            found.append(y.full_tensor())
        assert all(torch.equal(each, found[0]) for each in found)

    run_on((2,), each)


# ---- modules


class Conv1D(torch.nn.Module):
    """The projection of GPT-2, as Hugging Face has it: the weight is [inputs, outputs]."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(inputs, outputs) * 0.3)
        self.bias = torch.nn.Parameter(torch.randn(outputs))

    def forward(self, x: Any) -> Any:
        flat = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return flat.view(*x.size()[:-1], self.weight.shape[1])


class Gpt2Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = Conv1D(36, 12), Conv1D(12, 12)

    def forward(self, x: Any) -> Any:
        q, k, v = self.c_attn(x).split(12, dim=2)
        q, k, v = (each.view(*each.shape[:-1], -1, 4).transpose(1, 2) for each in (q, k, v))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.c_proj(found.reshape(*found.shape[:-2], -1).contiguous())


class SwiGlu(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = torch.nn.Linear(12, 20), torch.nn.Linear(10, 12)

    def forward(self, x: Any) -> Any:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class SelfAttention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.MultiheadAttention(12, 3)

    def forward(self, x: Any) -> Any:
        return self.inner(x, x, x, need_weights=False)[0]


HEADS_OF_4 = Shard(0, pieces=3, unit=4)


@pytest.mark.parametrize("ranks", [(2,), (2, 2)])
@pytest.mark.parametrize(
    ("make", "plan"),
    [
        (
            Gpt2Attention,
            {
                "c_attn.weight": Shard(1, pieces=3, unit=4),
                "c_attn.bias": HEADS_OF_4,
                "c_proj.weight": Shard(0, unit=4),
            },
        ),
        (
            SwiGlu,
            {
                "gate_up.weight": Shard(0, pieces=2),
                "gate_up.bias": Shard(0, pieces=2),
                "down.weight": Shard(1),
            },
        ),
        (
            SelfAttention,
            {
                "inner.in_proj_weight": HEADS_OF_4,
                "inner.in_proj_bias": HEADS_OF_4,
                "inner.out_proj.weight": Shard(1, unit=4),
            },
        ),
    ],
)
def test_a_module_with_fused_weights_trains_as_in_one_process_with_one_sum_each_way(
    make: Any, plan: dict[str, Shard], ranks: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    plain, full = make().double(), torch.randn(4, 5, 12, dtype=torch.float64)
    start = {name: value.clone() for name, value in plain.state_dict().items()}
    _train(plain, full.clone())

    def each(mesh: DeviceMesh) -> Any:
        module = make()
        for name, value in start.items():
            owner, _, key = name.rpartition(".")
            made = distributed(value, mesh, plan.get(name, Replicate()))
            module.get_submodule(owner).register_parameter(key, torch.nn.Parameter(made))
        data = [Shard(0), Replicate()][-mesh.ndim :]
        x = sw.distribute_tensor(full, mesh, data)
        with own_events() as events:
            _train(module, x)
        for name, value in plain.state_dict().items():
            assert torch.allclose(module.state_dict()[name].full_tensor(), value), name
        return [event for event in events if "tp" in event.axes and event.bytes > 64]

    for events in run_on(ranks, each):
        assert [event.kind for event in events] == ["all_reduce"] * 3 * 2  # three steps


def _train(module: Any, x: Any) -> None:
    # Gradients that are nothing but rounding, as of the keys' bias, must not be made large.
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, eps=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        x = x.detach().requires_grad_()
        module(x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()


# ---- as an object


def test_from_local_finds_the_global_shape_of_pieces_and_refuses_others() -> None:
    full = torch.arange(48.0 * 2).reshape(48, 2)

    def each(mesh: DeviceMesh) -> None:
        x = distributed(full, mesh, QKV)
        again = sw.DTensor.from_local(x.to_local(), mesh, [QKV])
        assert again.mesh_layout is x.mesh_layout
        known = sw.DTensor.from_local(x.to_local(), mesh, [QKV], shape=(48, 2))
        assert torch.equal(known.full_tensor(), full)
        with pytest.raises(LayoutError, match="no legal sharding"):
            sw.DTensor.from_local(torch.ones(24, 2), mesh, [QKV])

    run_on((2,), each)


def test_a_cut_tensor_is_copied_pickled_and_moved(tmp_path: Any) -> None:
    full = torch.arange(48.0 * 2).reshape(48, 2)

    def each(mesh: DeviceMesh) -> None:
        x = distributed(full.requires_grad_(), mesh, QKV)
        assert copy.deepcopy(x).mesh_layout is x.mesh_layout
        assert torch.equal(pickle.loads(pickle.dumps(x)).full_tensor(), full)
        path = tmp_path / f"{mesh.get_rank()}.pt"
        torch.save(x, path)
        loaded = torch.load(path, weights_only=True)
        assert loaded.mesh_layout is x.mesh_layout
        ordinary = x.redistribute(placements=[Shard(0)])
        assert not ordinary.mesh_layout.is_cut
        back = ordinary.redistribute(placements=[QKV])
        assert torch.equal(back.to_local(), x.to_local())
        (back * 2).sum().backward()
        assert x.grad.mesh_layout is x.mesh_layout
        x.data = torch.zeros_like(x)
        assert not bool(x.any())
        other = distributed(full.detach(), mesh, Shard(1))
        with torch.no_grad():
            x.copy_(other)
        assert torch.equal(x.full_tensor(), full)
        with pytest.raises(LayoutError, match=r"cut in pieces.*redistribute"):
            sw.interop.to_torch(x)

    run_on((2,), each)


def test_a_checkpoint_stores_each_box(tmp_path: Any) -> None:
    full = torch.arange(48.0 * 2).reshape(48, 2)

    def each(mesh: DeviceMesh) -> Any:
        x = distributed(full, mesh, QKV)
        items = x.__create_write_items__("w", x)
        for item in items:
            box = item.tensor_data.chunk
            rows = slice(box.offsets[0], box.offsets[0] + box.sizes[0])
            assert torch.equal(x.__get_tensor_shard__(item.index), full[rows])
        return [
            (item.tensor_data.chunk.offsets[0], item.tensor_data.chunk.sizes[0]) for item in items
        ]

    assert run_on((2,), each) == [[(0, 16), (24, 8), (36, 8)], [(16, 8), (32, 4), (44, 4)]]


def test_ranks_with_other_shares_do_not_share_the_plans_of_moves() -> None:
    torch.manual_seed(0)
    full, data = torch.randn(48, 6), torch.randn(8, 6)
    plain = full.clone().requires_grad_()
    (data @ plain.t()).square().sum().backward()

    def each(mesh: DeviceMesh) -> None:
        split = sw.distribute_tensor(full, mesh, [Shard(1), QKV]).requires_grad_()
        weight = split.redistribute(placements=[Replicate(), QKV])  # gathered, as FSDP does
        x = sw.distribute_tensor(data, mesh, [Shard(0), Replicate()])
        F.linear(x, weight).square().sum().backward()
        assert torch.allclose(split.grad.full_tensor(), plain.grad, atol=1e-4)

    run_on((2, 2), each)


# ---- every rule


def _cut_where_split(tensor: torch.Tensor, mesh: DeviceMesh) -> list[Layout]:
    """The layouts that `check_rule` tries, with split dims cut in pieces and units."""
    found = []
    for number, layout in enumerate(every_layout(tensor, mesh)):
        cuts: list[Any] = []
        for dim, (size, axes) in enumerate(zip(layout.shape, layout.shard_order, strict=True)):
            half = size // 2
            kinds: list[Any] = [
                ((half, 1), (size - half, 1)),
                ((size - size % 2, 2), (size % 2, 1)),
                ((half, max(half, 1)), (size - half, 1)),
            ]
            cuts.append(kinds[(number + dim) % 3] if axes else None)
        found.append(layout.relaid(None, None, tuple(cuts)))
    return found


def _values(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(math.prod(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (F.linear, (_values(3, 4), _values(6, 4), _values(6))),
        (torch.addmm, (_values(6), _values(3, 4), _values(4, 6))),
        (torch.add, (_values(5, 6), _values(6))),
        (torch.Tensor.view, (_values(4, 6), 4, 3, 2)),
        (torch.Tensor.view, (_values(5, 2, 3), 10, 3)),
        (torch.flatten, (_values(2, 3, 4),)),
        (torch.split, (_values(5, 6), 3, 1)),
        (torch.narrow, (_values(5, 6), 1, 3, 3)),
        (torch.Tensor.select, (_values(5, 6), 1, 4)),
        (torch.Tensor.squeeze, (_values(5, 1, 6),)),
        (torch.cat, ([_values(5, 6), _values(4, 6)],)),
        (torch.softmax, (_values(5, 6), 1)),
        (F.layer_norm, (_values(5, 6), (6,), _values(6), _values(6))),
        (F.rms_norm, (_values(5, 6), (6,), _values(6))),
        (torch.mean, (_values(5, 6), 1)),
        (torch.cumsum, (_values(5, 6), 1)),
        (torch.cummax, (_values(5, 6), 1)),
        (torch.diff, (_values(5, 6), 0, 1)),
        (torch.gradient, (_values(5, 6),)),
        (torch.fft.fft2, (_values(5, 6),)),
        (torch.histc, (_values(5, 6).detach(), 4)),
        (torch.as_strided, (_values(4, 6), (4, 2, 3), (6, 1, 2))),
        (torch.repeat_interleave, (_values(5, 6), torch.tensor([1, 0, 2, 1, 3, 1]), 1)),
        (F.batch_norm, (_values(5, 6, 2), None, None, _values(6), None, True)),
        (F.ctc_loss, (_values(5, 6, 3), torch.tensor([1, 2, 1, 1, 2, 2, 1, 2]), (5,) * 6,
                      (1, 2, 1, 0, 2, 2))),
        (torch.argmax, (_values(5, 6).detach(), 1)),
        (torch.tril, (_values(5, 6),)),
        (torch.diagonal, (_values(5, 6),)),
        (F.mse_loss, (_values(5, 6), _values(5, 6))),
        (F.cross_entropy, (_values(5, 6), torch.tensor([1, 0, 5, 2, 3]))),
        (F.embedding, (torch.tensor([1, 0, 5, 2, 3]), _values(6, 4))),
        (torch.index_select, (_values(5, 6), 1, torch.tensor([4, 0, 2]))),
        (F.scaled_dot_product_attention, (_values(1, 4, 3, 2), _values(1, 4, 3, 2),
                                          _values(1, 4, 3, 2), None, 0.0, True)),
    ],
)  # fmt: skip
def test_a_rule_holds_on_dims_that_are_cut(
    function: Any, arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rule_check, "layouts_of", _cut_where_split)
    check_rule(function, [Sample(*arguments)], most=10, allow_missing=True)
