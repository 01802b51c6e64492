"""`placements` say all: with the mesh and the shards they give the DTensor again, in any order."""

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rules import ranks, values
from torch import nn
from torch.distributed.tensor import _dtensor_spec, placement_types

import shardwise as sw
from shardwise import (
    DeviceMesh,
    DTensor,
    Layout,
    LayoutError,
    Partial,
    Replicate,
    Shard,
    _StridedShard,
)
from shardwise.interop import _torch_placements
from shardwise.parallel.plan_spec import apply_spec

FSDP_TP = DeviceMesh.abstract((2, 2), ("dp", "tp"))


@st.composite
def layouts(draw: st.DrawFn, sizes: int = 1, ranks: int = 64, cut: bool = True) -> Layout:
    """Any mesh of up to four axes, some of size 1; axes split dims in any order, in pieces or not.

    Arguments:
        sizes: the lengths of dims are multiples of it, up to 13 times it.
        ranks: the most ranks.
        cut: whether dims may be made of pieces and units.
    """
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    while torch.Size(shape).numel() > ranks:
        shape.pop()
    mesh = DeviceMesh.abstract(shape)
    ndim = draw(st.integers(1, 2))
    order: list[list[int]] = [[] for _ in range(ndim)]
    partial = {}
    for axis in draw(st.permutations(range(mesh.ndim))):
        use = draw(st.sampled_from([*range(ndim), 0, 0, None, "sum"]))
        if isinstance(use, int):
            order[use].append(axis)
        elif use is not None:
            partial[axis] = use
    cuts: list[Any] = [None] * ndim
    lengths = []
    for dim in range(ndim):
        if cut and draw(st.booleans()):
            units = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
            cuts[dim] = tuple((draw(st.integers(0, 4)) * unit, unit) for unit in units)
            lengths.append(sum(length for length, _ in cuts[dim]))
        else:
            lengths.append(sizes * draw(st.integers(0, 13)))
    return Layout(mesh, lengths, order, partial, cuts)


def coordinates(layout: Layout) -> Any:
    return product(*map(range, layout.mesh.shape))


# ---- layouts and placements


@settings(max_examples=400, deadline=None)
@given(layouts())
def test_placements_give_the_layout_again(layout: Layout) -> None:
    again = Layout.from_placements(layout.mesh, layout.shape, layout.placements)
    assert again is layout
    assert again.placements == layout.placements
    # The order may be given beside them, too.
    assert (
        Layout.from_placements(layout.mesh, layout.shape, layout.placements, layout.shard_order)
        is layout
    )
    assert [eval(repr(each), vars(sw)) for each in layout.placements] == list(layout.placements)


@settings(max_examples=200, deadline=None)
@given(layouts(), st.data())
def test_axes_of_size_1_have_one_place_in_the_order(layout: Layout, data: st.DataObject) -> None:
    """They split nothing, so that all orders that differ only in them are one layout, or at least
    have the same shards."""
    order = [data.draw(st.permutations(axes)) for axes in layout.shard_order]
    other = layout.relaid(order)
    large = [axis for axis, size in enumerate(layout.mesh.shape) if size > 1]
    same = all(
        [axis for axis in one if axis in large] == [axis for axis in two if axis in large]
        for one, two in zip(layout.shard_order, other.shard_order, strict=True)
    )
    if same and not layout.is_cut:
        for place in coordinates(layout):
            assert layout.boxes(place) == other.boxes(place)
    assert (other.placements == layout.placements) == (other is layout)


def test_fsdp_over_tp_reads_as_in_torch() -> None:
    layout = Layout(FSDP_TP, (8, 4), {0: ["tp", "dp"]})
    assert layout.placements == (_StridedShard(0, split_factor=2), Shard(0))
    assert repr(layout.placements) == "(_StridedShard(dim=0, sf=2), Shard(0))"
    assert layout.placements[0] == placement_types._StridedShard(0, split_factor=2)
    assert Layout(FSDP_TP, (8, 4), {0: ["dp", "tp"]}).placements == (Shard(0), Shard(0))
    narrow = DeviceMesh.abstract((4, 1), ("dp", "tp"))
    assert Layout(narrow, (8, 4), {0: ["tp", "dp"]}).placements == (Shard(0), Shard(0))


def torchs_shard(layout: Layout, placements: Any, dim: int, place: Any) -> list[int]:
    """Return the indices of one dim that a rank has by torch's placements."""
    indices = torch.arange(layout.shape[dim])
    for axis, each in enumerate(placements):
        is_split = isinstance(each, placement_types._StridedShard | placement_types.Shard)
        if is_split and each.dim == dim:
            one = type(each)(0, **_factor(each))
            count = layout.mesh.shape[axis]
            indices = one._split_tensor(indices, count, with_padding=False)[0][place[axis]]
    return indices.tolist()


def _factor(placement: Any) -> dict[str, int]:
    is_strided = isinstance(placement, placement_types._StridedShard)
    return {"split_factor": placement.split_factor} if is_strided else {}


def our_shard(layout: Layout, dim: int, place: Any) -> list[int]:
    return [index for start, stop in layout.ranges(dim, place) for index in range(start, stop)]


@settings(max_examples=200, deadline=None)
@given(layouts(sizes=64 * 27, ranks=30, cut=False))
def test_torchs_placements_mean_the_same_shards_where_axes_divide_a_dim(layout: Layout) -> None:
    placements = _torch_placements(layout)
    assert placements == tuple(
        placement_types.Partial(each.reduce_op)
        if isinstance(each, Partial)
        else placement_types.Replicate()
        if isinstance(each, Replicate)
        else placement_types._StridedShard(each.dim, split_factor=each.split_factor)
        if isinstance(each, _StridedShard)
        else placement_types.Shard(each.dim)
        for each in layout.placements
    )
    assert Layout.from_placements(layout.mesh, layout.shape, placements) is layout
    for place in coordinates(layout):
        for dim in range(layout.ndim):
            assert torchs_shard(layout, placements, dim, place) == our_shard(layout, dim, place)


@settings(max_examples=300, deadline=None)
@given(layouts(ranks=30))
def test_a_layout_goes_to_torch_exactly_if_torch_has_placements_for_it(layout: Layout) -> None:
    try:
        placements = _torch_placements(layout)
    except LayoutError:
        assert layout.is_cut or any(isinstance(p, _StridedShard) for p in layout.placements)
        return
    for place in coordinates(layout):
        for dim in range(layout.ndim):
            assert torchs_shard(layout, placements, dim, place) == our_shard(layout, dim, place)


def test_an_uneven_dim_of_which_torch_would_make_other_shards_is_refused() -> None:
    mesh = DeviceMesh.abstract((4, 2), ("dp", "tp"))
    layout = Layout(mesh, (9,), {0: ["tp", "dp"]})
    theirs = [placement_types._StridedShard(0, split_factor=2), placement_types.Shard(0)]
    assert torchs_shard(layout, theirs, 0, (3, 0)) == [8] and our_shard(layout, 0, (3, 0)) == []
    with pytest.raises(LayoutError, match=r"dim 0 of \[9@tp\.dp\].*redistribute"):
        _torch_placements(layout)


@settings(max_examples=100, deadline=None)
@given(st.permutations(range(4)), st.lists(st.integers(2, 3), min_size=4, max_size=4))
def test_torch_reads_the_same_order_from_our_split_factors(order: list[int], sizes: Any) -> None:
    layout = Layout(DeviceMesh.abstract(sizes), (81 * 16,), [order])

    class Mesh:
        ndim = 4
        shape = tuple(sizes)

        def size(self, axis: int) -> int:
            return sizes[axis]

    spec = _dtensor_spec.DTensorSpec
    _, found = spec._normalize_placements_into_shard_order(_torch_placements(layout), Mesh(), True)
    assert found is not None
    (entry,) = found
    assert tuple(entry.mesh_dims) == layout.shard_order[0]


def test_a_split_factor_on_a_dim_of_one_axis_means_pieces_as_in_torch() -> None:
    mesh = DeviceMesh.abstract((2,), ("tp",))
    for size in (0, 1, 5, 8, 10, 12):
        layout = Layout.from_placements(mesh, (size,), [_StridedShard(0, split_factor=4)])
        theirs = [placement_types._StridedShard(0, split_factor=4)]
        for place in range(2):
            assert our_shard(layout, 0, (place,)) == torchs_shard(layout, theirs, 0, (place,))
    even = Layout.from_placements(mesh, (12,), [_StridedShard(0, split_factor=4)])
    assert even is Layout.from_placements(mesh, (12,), [Shard(0, pieces=4)])
    assert _torch_placements(even) == (placement_types._StridedShard(0, split_factor=4),)


# ---- DTensors


def example(layout: Layout, mesh: DeviceMesh) -> tuple[torch.Tensor, DTensor, Layout]:
    whole = torch.arange(1.0, layout.numel + 1).reshape(layout.shape)
    here = Layout(mesh, layout.shape, layout.shard_order, dict(layout.partial), layout.cuts)
    x = sw.distribute_tensor(whole, mesh, here.placements, src_data_rank=None)
    return whole, x, here


@settings(max_examples=60, deadline=None)
@given(layouts(ranks=8))
def test_shards_and_placements_are_the_tensor_again(layout: Layout) -> None:
    def run(mesh: DeviceMesh) -> None:
        whole, x, here = example(layout, mesh)
        assert x.mesh_layout is here
        assert torch.equal(x.full_tensor(), whole)
        for shape in (whole.shape, None):
            again = DTensor.from_local(x.to_local(), x.device_mesh, x.placements, shape=shape)
            assert again.mesh_layout is here
            assert torch.equal(again.full_tensor(), whole)
        scattered = sw.distribute_tensor(whole, mesh, x.placements)
        assert scattered.mesh_layout is here and torch.equal(scattered.to_local(), x.to_local())
        replicated = sw.distribute_tensor(whole, mesh, None, src_data_rank=None)
        moved = replicated.redistribute(placements=x.placements)
        assert moved.mesh_layout is here and torch.equal(moved.full_tensor(), whole)
        if not here.partial:
            assert torch.equal(moved.to_local(), x.to_local())
        made = sw.zeros(*whole.shape, device_mesh=mesh, placements=x.placements)
        assert made.mesh_layout is here

    ranks(run, layout.mesh.size(), layout.mesh.shape)


ORDERS = [(0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1), (0, 2, 1), (1, 0, 2)]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_gradients_of_local_functions_have_the_order_of_their_tensor(order: Any) -> None:
    whole = values(9, 2)
    scale = torch.arange(1.0, 10.0, dtype=torch.float64)[:, None]

    def run(mesh: DeviceMesh) -> None:
        layout = Layout(mesh, whole.shape, [order, ()])
        x = sw.distribute_tensor(whole.detach(), mesh, layout.placements).requires_grad_()
        scales = sw.distribute_tensor(scale, mesh, layout.placements)
        squared = sw.local_map(lambda one, two: one * one * two, out_placements=layout.placements)
        y = squared(x, scales)
        assert y.mesh_layout is layout
        y.sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), 2 * whole.detach() * scale)
        y = x.to_local(grad_placements=x.placements) * scales.to_local()
        x.grad = None
        DTensor.from_local(y, mesh, layout.placements, shape=whole.shape).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), scale.expand(9, 2))

    ranks(run, 8, (2, 2, 2))


@pytest.mark.parametrize("rows", [8, 9, 3, 1])
def test_a_parameter_of_fsdp_over_tp_is_described_by_its_placements(rows: int) -> None:
    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        linear = nn.Linear(4, rows)
        with torch.no_grad():
            linear.weight.copy_(torch.arange(4.0 * rows).reshape(rows, 4))
        whole = linear.weight.detach().clone()
        sw.parallel.shard_module(linear, mesh["tp"], {"*": {"tp": Shard(0)}})
        sw.fsdp.fully_shard(linear, mesh=mesh["dp"])
        weight = linear.weight
        assert weight.placements == (_StridedShard(0, split_factor=2), Shard(0))
        for shape in (weight.shape, None):
            again = DTensor.from_local(
                weight.to_local(), weight.device_mesh, weight.placements, shape=shape
            )
            assert torch.equal(again.full_tensor(), whole)
        copied = sw.distribute_tensor(whole, weight.device_mesh, weight.placements)
        assert torch.equal(copied.to_local(), weight.to_local())

    sw.simulate(run, 4)


# ---- code that changes some of the placements


def test_a_spec_by_axis_keeps_the_order_of_the_other_axes() -> None:
    mesh = DeviceMesh.abstract((2, 2, 3), ("dp", "tp", "ep"))
    layout = Layout(mesh, (24, 12), {0: ["ep", "tp", "dp"]})
    assert repr(apply_spec(layout, {"tp": Replicate()}, "x")) == "[24@ep.dp, 12]"
    assert repr(apply_spec(layout, {"ep": Replicate()}, "x")) == "[24@tp.dp, 12]"
    assert repr(apply_spec(layout, {"ep": Shard(1)}, "x")) == "[24@tp.dp, 12@ep]"
    assert repr(apply_spec(layout, {"dp": Shard(1)}, "x")) == "[24@ep.tp, 12@dp]"
    plain = Layout(mesh, (24, 12), {0: ["tp"]})
    assert repr(apply_spec(plain, {"dp": Shard(0)}, "x")) == "[24@tp.dp, 12]"
    strided = {"dp": _StridedShard(0, split_factor=2)}
    assert repr(apply_spec(plain, strided, "x")) == "[24@tp.dp, 12]"
    assert repr(apply_spec(plain, {"dp": _StridedShard(0)}, "x")) == "[24@dp.tp, 12]"


def test_replicating_the_outer_axis_leaves_strided_pieces_as_in_torch() -> None:
    whole = torch.arange(8.0)

    def run(mesh: DeviceMesh) -> list[float]:
        x = sw.distribute_tensor(whole, mesh, [_StridedShard(0, split_factor=2), Shard(0)])
        y = x.redistribute(placements=[x.placements[0], Replicate()])
        assert torch.equal(y.full_tensor(), whole)
        return y.to_local().tolist()

    layout = Layout(DeviceMesh.abstract((2, 2)), (8,))
    theirs = [placement_types._StridedShard(0, split_factor=2), placement_types.Replicate()]
    for rank, found in enumerate(ranks(run, 4, (2, 2))):
        assert found == torchs_shard(layout, theirs, 0, divmod(rank, 2))


def test_operators_keep_the_order_of_a_tensor() -> None:
    whole = values(9, 4)

    def run(mesh: DeviceMesh) -> None:
        x = sw.distribute_tensor(whole, mesh, [_StridedShard(0, split_factor=2), Shard(0)])
        y = x.relu() * 2
        assert y.placements == x.placements
        torch.testing.assert_close(y.full_tensor(), whole.relu() * 2)
        assert sw.Layout.parse(repr(x.mesh_layout), mesh).placements == x.placements

    ranks(run, 4, (2, 2))
