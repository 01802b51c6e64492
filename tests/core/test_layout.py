"""Layouts are interned values whose arithmetic is that of nested `torch.chunk`."""

import copy
import doctest
import pickle
import weakref
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.refusals import refused
from torch.distributed.tensor import placement_types as theirs

import shardwise.core.layout
from shardwise import (
    Box,
    DeviceMesh,
    Layout,
    LayoutError,
    Partial,
    RankError,
    Replicate,
    Shard,
    _StridedShard,
    init_device_mesh,
    simulate,
)

MESH = DeviceMesh.abstract((2, 3), ("dp", "tp"))
REDUCE_OPS = ["sum", "avg", "max", "min", "product"]


@st.composite
def meshes(draw: st.DrawFn) -> DeviceMesh:
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    names = draw(st.permutations(["dp", "tp", "x_1", "_"])) if draw(st.booleans()) else None
    return DeviceMesh.abstract(shape, names and names[: len(shape)])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any mesh, any shape; each axis, in any order, splits a dim, is partial or does nothing."""
    mesh = draw(meshes())
    shape = draw(st.lists(st.integers(0, 13), max_size=3))
    order: list[list[int]] = [[] for _ in shape]
    partial: dict[int | str, str] = {}
    for axis in draw(st.permutations(range(mesh.ndim))):
        use = draw(st.sampled_from([*range(len(shape)), "partial", None]))
        if use == "partial":
            partial[axis] = draw(st.sampled_from(REDUCE_OPS))
        elif isinstance(use, int):
            order[use].append(axis)
    return Layout(mesh, shape, order, partial)


def coordinates(mesh: DeviceMesh) -> Iterator[tuple[int, ...]]:
    return product(*map(range, mesh.shape))


# ---- what a rank holds


def test_one_axis_splits_a_dim_into_chunks() -> None:
    layout = Layout(MESH, (8, 5), {1: ["tp"]})
    assert [layout.box((0, tp)) for tp in range(3)] == [
        Box((0, 0), (8, 2)),
        Box((0, 2), (8, 4)),
        Box((0, 4), (8, 5)),
    ]
    assert [layout.local_shape((1, tp)) for tp in range(3)] == [(8, 2), (8, 2), (8, 1)]


def test_a_rank_beyond_the_end_holds_an_empty_piece() -> None:
    layout = Layout(DeviceMesh.abstract((4,)), (5,), {0: [0]})
    assert [layout.local_shape((place,)) for place in range(4)] == [(2,), (2,), (1,), (0,)]


def test_the_first_of_two_axes_is_the_outer_one() -> None:
    def starts(*axes: str) -> list[list[int]]:
        layout = Layout(MESH, (6,), {0: axes})
        return [[layout.box((dp, tp)).start[0] for tp in range(3)] for dp in range(2)]

    assert starts("dp", "tp") == [[0, 1, 2], [3, 4, 5]]
    assert starts("tp", "dp") == [[0, 2, 4], [1, 3, 5]]


def test_nested_splits_of_an_uneven_dim_depend_on_the_order() -> None:
    def lengths(*axes: str) -> list[list[int]]:
        layout = Layout(MESH, (7,), {0: axes})
        return [[layout.local_shape((dp, tp))[0] for tp in range(3)] for dp in range(2)]

    assert lengths("dp", "tp") == [[2, 2, 0], [1, 1, 1]]  # 7 = 4 + 3
    assert lengths("tp", "dp") == [[2, 2, 1], [1, 1, 0]]  # 7 = 3 + 3 + 1


def test_replicated_and_partial_axes_do_not_cut() -> None:
    layout = Layout(MESH, (4, 4), partial={"tp": "sum"})
    assert {layout.box(place) for place in coordinates(MESH)} == {Box((0, 0), (4, 4))}


def test_a_tensor_without_dims_is_held_by_all() -> None:
    layout = Layout(MESH, (), partial={"dp": "max"})
    assert layout.box((1, 2)) == Box((), ()) and layout.local_shape((1, 2)) == ()


def test_the_default_coordinate_is_that_of_the_calling_rank() -> None:
    def held() -> tuple[int, int]:
        mesh = init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        (start,), (stop,) = Layout(mesh, (7,), {0: ["tp", "dp"]}).box()
        return start, stop

    assert simulate(held, 4) == [(0, 2), (4, 6), (2, 4), (6, 7)]


def test_a_rank_outside_the_mesh_holds_nothing_and_is_told_so() -> None:
    def held() -> Box | None:
        mesh = DeviceMesh("cpu", [0, 2])
        layout = Layout(mesh, (4,), {0: [0]})
        if mesh.get_coordinate() is None:
            with refused("coordinate", "rank 1 is not in DeviceMesh('cpu', [0, 2])"):
                layout.box()
            return None
        return layout.box()

    assert simulate(held, 3) == [Box((0,), (2,)), None, Box((2,), (4,))]


def nested_chunk(x: torch.Tensor, layout: Layout, place: tuple[int, ...]) -> torch.Tensor:
    """The piece at a coordinate, cut by torch. It makes no chunks that would be empty."""
    for dim, axes in enumerate(layout.shard_order):
        for axis in axes:
            pieces = x.chunk(layout.mesh.shape[axis], dim)
            beyond = x.narrow(dim, x.size(dim), 0)
            x = pieces[place[axis]] if place[axis] < len(pieces) else beyond
    return x


@settings(max_examples=500)
@given(layouts())
def test_pieces_are_those_of_nested_torch_chunk(layout: Layout) -> None:
    x = torch.arange(layout.numel).reshape(layout.shape)
    for place in coordinates(layout.mesh):
        piece = nested_chunk(x, layout, place)
        assert torch.equal(x[layout.box(place).slices], piece)
        assert layout.local_shape(place) == layout.box(place).shape == tuple(piece.shape)


@settings(max_examples=500)
@given(layouts())
def test_the_shard_axes_tile_the_tensor_once_for_each_place_on_the_others(layout: Layout) -> None:
    sharding = {axis for axes in layout.shard_order for axis in axes}
    held: dict[tuple[int, ...], torch.Tensor] = {}
    for place in coordinates(layout.mesh):
        others = tuple(p for axis, p in enumerate(place) if axis not in sharding)
        times = held.setdefault(others, torch.zeros(layout.shape, dtype=torch.int))
        times[layout.box(place).slices] += 1
    for times in held.values():
        assert torch.equal(times, torch.ones_like(times))


def test_a_hundred_thousand_ranks_are_only_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = DeviceMesh.abstract((100, 50, 20), ("dp", "tp", "ep"))
    assert mesh.size() == 100_000

    def untouchable(self: DeviceMesh) -> Any:
        raise AssertionError("a layout looked at the ranks of its mesh")

    monkeypatch.setattr(DeviceMesh, "_ranks", property(untouchable))
    layout = Layout(mesh, (1_000_003, 4096), {0: ["dp", "ep"], 1: ["tp"]})
    # dp: 99 chunks of 10,001 and one of 9,904; ep cuts these by 501 and by 496; tp cuts by 82.
    assert layout.box((0, 0, 0)) == Box((0, 0), (501, 82))
    assert layout.box((0, 0, 19)) == Box((9_519, 0), (10_001, 82))
    assert layout.box((50, 25, 10)) == Box((505_060, 2050), (505_561, 2132))
    assert layout.box((99, 49, 19)) == Box((999_523, 4018), (1_000_003, 4096))
    assert layout.local_shape((0, 0, 19)) == (482, 82)
    assert layout.local_shape((99, 49, 19)) == (480, 78)
    with pytest.raises(AssertionError, match="looked at the ranks"):
        _ = mesh.mesh  # the guard guards


# ---- one object per layout


def test_every_way_to_say_a_layout_gives_one_object() -> None:
    layout = Layout(MESH, (8, 6), shard_order=((1,), ()), partial={0: "max"})
    assert Layout(MESH, [8, 6], {0: ["tp"]}, {"dp": "max"}) is layout
    assert Layout(MESH, torch.Size([8, 6]), {-2: [-1]}, {-2: "max"}) is layout
    assert Layout(MESH, (8, 6), [["tp"], []], {"dp": "max"}) is layout
    assert Layout.from_placements(MESH, (8, 6), [Partial("max"), Shard(0)]) is layout
    assert Layout.from_placements(MESH, (8, 6), (Partial("max"), Shard(-2))) is layout
    assert Layout.from_placements(MESH, (8, 6), (theirs.Partial("max"), theirs.Shard(0))) is layout
    assert Layout.from_placements(MESH, (8, 6), (Partial("max"), theirs.Shard(-2))) is layout
    assert Layout.parse("[8@tp, 6] +max@dp", MESH) is layout
    assert Layout.parse("[8@1, 6] +max@0", MESH) is layout


def test_ints_of_any_type_are_stored_as_plain_ones() -> None:
    zero, one, two = map(np.int64, range(3))
    layout = Layout(MESH, (np.int64(8), torch.tensor(6)), {zero: [one]}, {zero: "max"})
    assert layout is Layout(MESH, (8, 6), {0: ["tp"]}, {"dp": "max"})
    assert set(map(type, layout.shape)) == {int}
    for box in (layout.box((one, two)), Layout(MESH, (8, 6), {two - 1: [0]}).box([one, two])):
        assert set(map(type, (*box.start, *box.stop))) == {int}


def test_different_layouts_are_different_objects() -> None:
    other_mesh = DeviceMesh.abstract((2, 3), ("tp", "dp"))
    different = {
        Layout(MESH, (6,)),
        Layout(MESH, (7,)),
        Layout(MESH, (6, 1)),
        Layout(other_mesh, (6,)),
        Layout(MESH, (6,), {0: ["dp"]}),
        Layout(MESH, (6,), {0: ["dp", "tp"]}),
        Layout(MESH, (6,), {0: ["tp", "dp"]}),
        Layout(MESH, (6,), partial={"tp": "sum"}),
        Layout(MESH, (6,), partial={"tp": "avg"}),
        Layout(MESH, (6,), partial={"dp": "sum"}),
    }
    assert len(different) == 10


@given(layouts())
def test_copies_and_pickles_are_the_layout_itself(layout: Layout) -> None:
    assert copy.copy(layout) is layout
    assert copy.deepcopy([layout])[0] is layout
    assert pickle.loads(pickle.dumps(layout)) is layout


@given(layouts())
def test_placements_and_shard_order_say_all(layout: Layout) -> None:
    mesh, shape = layout.mesh, layout.shape
    again = Layout.from_placements(mesh, shape, layout.placements, layout.shard_order)
    assert again is layout
    assert Layout(mesh, shape, layout.shard_order, dict(layout.partial)) is layout


@given(layouts())
def test_the_default_order_is_that_of_the_mesh(layout: Layout) -> None:
    shards = [Shard(p.dim) if isinstance(p, Shard) else p for p in layout.placements]
    plain = Layout.from_placements(layout.mesh, layout.shape, shards)
    assert plain.shard_order == tuple(tuple(sorted(axes)) for axes in layout.shard_order)


def test_ranks_of_a_process_share_their_layouts() -> None:
    def layout() -> Layout:
        return Layout(init_device_mesh("cpu", (4,)), (8,), {0: [0]})

    assert len(set(map(id, simulate(layout, 4)))) == 1


def test_a_layout_that_nobody_holds_is_freed() -> None:
    gone = weakref.ref(Layout(MESH, (123456, 7)))
    assert gone() is None


@pytest.mark.parametrize(
    "field", ["mesh", "shape", "shard_order", "partial", "placements", "novel"]
)
def test_a_layout_cannot_be_changed(field: str) -> None:
    layout = Layout(MESH, (8,), {0: ["dp"]})
    with pytest.raises(AttributeError, match=field):
        setattr(layout, field, ())
    assert repr(layout) == "[8@dp]" and layout.mesh is MESH


# ---- the view per axis


def test_placements_are_the_view_per_axis() -> None:
    layout = Layout(DeviceMesh.abstract((2, 2, 2, 2)), (8, 8), {1: [3, 0]}, {2: "min"})
    first = _StridedShard(1, split_factor=2)
    assert layout.placements == (first, Replicate(), Partial("min"), Shard(1))
    assert layout.shard_order == ((), (3, 0))
    assert layout.partial == ((2, "min"),)


def test_shard_order_may_name_only_the_dims_whose_order_matters() -> None:
    mesh = DeviceMesh.abstract((2, 2, 2), ("dp", "tp", "ep"))
    placements = [Shard(0), Shard(0), Shard(1)]
    layout = Layout.from_placements(mesh, (8, 8), placements, {0: ["tp", "dp"]})
    assert repr(layout) == "[8@tp.dp, 8@ep]"


def test_small_questions() -> None:
    layout = Layout(MESH, (4, 0, 3))
    assert (layout.ndim, layout.numel, layout.is_replicated) == (3, 0, True)
    assert Layout(MESH, ()).numel == 1
    assert not Layout(MESH, (4,), {0: ["dp"]}).is_replicated
    assert not Layout(MESH, (4,), partial={"dp": "sum"}).is_replicated


# ---- as text


def test_repr_shows_sizes_axes_and_pending_reductions() -> None:
    mesh = DeviceMesh.abstract((2, 2, 2, 2), ("dp", "tp", "ep", "pp"))
    assert repr(Layout(mesh, ())) == "[]"
    assert repr(Layout(mesh, (8, 4), {0: ["dp"]})) == "[8@dp, 4]"
    assert repr(Layout(mesh, (8,), {0: ["tp", "dp"]}, {"ep": "sum"})) == "[8@tp.dp] +sum@ep"
    several = Layout(mesh, (8,), partial={"pp": "sum", "dp": "max", "tp": "sum"})
    assert repr(several) == "[8] +max@dp +sum@tp.pp"
    assert repr(Layout(DeviceMesh.abstract((2, 2)), (8,), {0: [1, 0]})) == "[8@1.0]"


def test_parse_reads_the_example_of_the_design() -> None:
    mesh = DeviceMesh.abstract((2, 4, 2, 3), ("dp", "tp", "ep", "pp"))
    layout = Layout.parse("f32[8@dp, 4096@tp.ep, 128] +sum@pp", mesh)
    assert layout is Layout(mesh, (8, 4096, 128), {0: ["dp"], 1: ["tp", "ep"]}, {"pp": "sum"})
    assert layout.local_shape((0, 0, 0, 0)) == (4, 512, 128)


def test_parse_forgives_spaces_and_a_trailing_comma() -> None:
    layout = Layout(MESH, (8, 4), {0: ["dp"]}, {"tp": "sum"})
    for text in ("  [8@dp, 4] +sum@tp\n", "[ 8@dp ,4, ]+sum@tp", "[8@dp,4]  +sum@tp"):
        assert Layout.parse(text, MESH) is layout


@given(layouts())
def test_parse_is_the_inverse_of_repr(layout: Layout) -> None:
    assert Layout.parse(repr(layout), layout.mesh) is layout
    assert Layout.parse("bf16" + repr(layout), layout.mesh) is layout


NAMES = [
    "0_shard",
    "0",
    "12",
    "a b",
    "t.p",
    "a,b",
    "[x]",
    "(",
    "'",
    '"',
    "\\",
    "größe",
    "+sum@x",
    "\n",
    "@",
    " ",
]


@pytest.mark.parametrize("name", NAMES)
def test_any_name_of_an_axis_can_be_written_and_read(name: str) -> None:
    mesh = DeviceMesh.abstract((2, 2, 3), ("dp", name, "tp"))
    for layout in (
        Layout(mesh, (8, 6), {0: [name, "dp"], 1: ["tp"]}),
        Layout(mesh, (8, 6), {1: ["tp", name]}, {"dp": "max"}),
        Layout(mesh, (8,), {0: ["tp"]}, {"dp": "sum", name: "sum"}),
        Layout(mesh, (8,), {0: [name]}, cuts={0: ((6, 2), (2, 1))}),
    ):
        assert Layout.parse(repr(layout), mesh) is layout
        assert Layout.parse(f"f32{layout!r}", mesh) is layout
    assert eval(repr(mesh), {"DeviceMesh": DeviceMesh}) is mesh
    assert mesh.axis(name) == 1 and mesh[name].size() == 2
    assert pickle.loads(pickle.dumps(layout)) is layout


def test_names_that_are_identifiers_are_not_quoted() -> None:
    mesh = DeviceMesh.abstract((2, 2, 2), ("dp", "0_shard", "7"))
    assert repr(Layout(mesh, (8,), {0: ["dp", "0_shard", "7"]})) == "[8@dp.'0_shard'.'7']"
    # A position is not a name: 1 is the axis "0_shard", and only '7' is the last one.
    assert Layout.parse("[8@1]", mesh) is Layout.parse("[8@'0_shard']", mesh)
    assert Layout.parse("[8@0_shard]", mesh) is Layout.parse("[8@1]", mesh)
    assert Layout.parse("[8@2]", mesh) is Layout.parse('[8@"7"]', mesh)
    with refused("axis: expected one of", "got 7"):
        Layout.parse("[8@7]", mesh)


@given(st.lists(st.text(min_size=1), min_size=2, max_size=3, unique=True), st.data())
def test_texts_of_any_characters_are_names(names: list[str], data: st.DataObject) -> None:
    mesh = DeviceMesh.abstract((2,) * len(names), names)
    order = data.draw(st.permutations(names))
    layout = Layout(mesh, (8, 4), {0: order[:1]}, dict.fromkeys(order[1:], "sum"))
    assert Layout.parse(repr(layout), mesh) is layout


@pytest.mark.parametrize(
    "text",
    ["", "8", "[8@]", "[8@dp.]", "[8@.dp]", "[8@dp", "8@dp]", "[-1]", "[8.5]", "[8 8]", "[,]",
     "[a]", "[@dp]", "[8@dp] +sum", "[8@dp] sum@tp", "[8@dp] +@tp", "[8@dp] tail", "[8][8]"],
    ids=repr,
)  # fmt: skip
def test_a_text_that_is_no_layout_is_refused(text: str) -> None:
    with refused("text: expected such as '[8@dp, 4096@tp.ep] +sum@pp'", f"got {text!r}"):
        Layout.parse(text, MESH)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[8@pp]", ["axis: expected one of (dp=2, tp=3)", "got 'pp'"]),
        ("[8@2]", ["axis: expected one of (dp=2, tp=3)", "got 2"]),
        ("[8@²]", ["axis: expected one of (dp=2, tp=3)", "got '²'"]),
        ("[8@dp.dp]", ["axis dp", "one use"]),
        ("[8@dp, 4@dp]", ["axis dp", "got both Shard(0) and Shard(1)"]),
        ("[8@dp] +sum@dp", ["axis dp", "got both Shard(0) and Partial()"]),
        ("[8] +sum@tp +max@tp", ["axis tp is pending twice"]),
        ("[8] +sum@tp.1", ["axis 1 is pending twice"]),
        ("[8] +mean@tp", ["expected one of sum, avg, max, min, product", "got 'mean'"]),
    ],
)
def test_a_text_that_does_not_fit_the_mesh_is_refused(text: str, parts: list[str]) -> None:
    with refused(*parts):
        Layout.parse(text, MESH)


# ---- what cannot be


BAD: dict[str, tuple[Callable[[], object], list[str]]] = {
    "no mesh": (
        lambda: Layout("cpu", (8,)),
        ["mesh: expected a DeviceMesh", "got 'cpu' (str)"],
    ),
    "negative size": (
        lambda: Layout(MESH, (8, -1)),
        ["shape: expected sizes of at least 0", "got (8, -1)"],
    ),
    "size that is no int": (
        lambda: Layout(MESH, (8.0,)),
        ["shape: expected sizes", "got (8.0,)"],
    ),
    "size that is a bool": (
        lambda: Layout(MESH, (8, True)),
        ["shape: expected sizes", "got (8, True)"],
    ),
    "shape that is no sequence": (
        lambda: Layout(MESH, 8),
        ["shape: expected sizes", "got 8"],
    ),
    "Shard(5) of a 2-d tensor": (
        lambda: Layout.from_placements(MESH, (8, 8), [Replicate(), Shard(5)]),
        ["placements[1] = Shard(5)", "expected a dim of a 2-d tensor", "got 5"],
    ),
    "Shard(-3) of a 2-d tensor": (
        lambda: Layout.from_placements(MESH, (8, 8), [Shard(-3), Replicate()]),
        ["placements[0] = Shard(-3)", "expected a dim of a 2-d tensor", "got -3"],
    ),
    "Shard(0) of a 0-d tensor": (
        lambda: Layout.from_placements(MESH, (), [Shard(0), Replicate()]),
        ["placements[0] = Shard(0)", "expected a dim of a 0-d tensor"],
    ),
    "too few placements": (
        lambda: Layout.from_placements(MESH, (8,), [Shard(0)]),
        [
            "placements: expected a list of 2, one per axis",
            "(2, 3), ('dp', 'tp')",
            "got [Shard(0)]",
        ],
    ),
    "too many placements": (
        lambda: Layout.from_placements(MESH, (8,), [Replicate()] * 3),
        [
            "placements: expected a list of 2, one per axis",
            "got [Replicate(), Replicate(), Replicate()]",
        ],
    ),
    "a bare placement": (
        lambda: Layout.from_placements(MESH, (8,), Shard(0)),
        ["placements: expected a list of 2, one per axis", "got Shard(0)"],
    ),
    "no placements": (
        lambda: Layout.from_placements(MESH, (8,), None),
        ["placements: expected a list of 2, one per axis", "got None"],
    ),
    "a non-placement": (
        lambda: Layout.from_placements(MESH, (8,), [Shard(0), "tp"]),
        ["placements[1]: expected Shard, Replicate or Partial", "got 'tp' (str)"],
    ),
    "a placement that only torch has": (
        lambda: Layout.from_placements(
            MESH,
            (8,),
            [Replicate(), theirs._MaskPartial(offset_shape=torch.Size([2]), offset_dim=0)],
        ),
        ["placements[1]: expected Shard, Replicate or Partial", "_MaskPartial"],
    ),
    "a split factor of no order": (
        lambda: Layout.from_placements(MESH, (8,), [_StridedShard(0, sf=2), Shard(0)]),
        ["dim 0", "dp=2, tp=3", "_StridedShard(dim=0, sf=2)", "shard_order=", "pieces=n"],
    ),
    "a split factor against the order": (
        lambda: Layout.from_placements(
            MESH, (8,), [_StridedShard(0, sf=3), Shard(0)], {0: ["dp", "tp"]}
        ),
        ["shard_order[0]", "(tp, dp); got (dp, tp)"],
    ),
    "a split factor and pieces of one axis": (
        lambda: Layout.from_placements(MESH, (8,), [_StridedShard(0, sf=2, pieces=2), Replicate()]),
        ["placements[0]", "expected pieces or a split factor", "got both"],
    ),
    "torch's Shard(5) of a 2-d tensor": (
        lambda: Layout.from_placements(MESH, (8, 8), [Replicate(), theirs.Shard(5)]),
        ["placements[1] = Shard(5)", "expected a dim of a 2-d tensor", "got 5"],
    ),
    "a class instead of a placement": (
        lambda: Layout.from_placements(MESH, (8,), [Shard(0), Replicate]),
        ["placements[1]: expected Shard, Replicate or Partial", "Replicate", "(type)"],
    ),
    "one axis splits two dims": (
        lambda: Layout(MESH, (8, 8), {0: ["tp"], 1: ["tp"]}),
        ["axis tp: expected one use", "got both Shard(0) and Shard(1)"],
    ),
    "one axis splits a dim twice": (
        lambda: Layout(MESH, (8,), {0: ["tp", 1]}),
        ["axis tp: expected one use", "got both Shard(0) and Shard(0)"],
    ),
    "one axis splits and is partial": (
        lambda: Layout(MESH, (8,), {0: ["tp"]}, {"tp": "max"}),
        ["axis tp: expected one use", "got both Shard(0) and Partial('max')"],
    ),
    "one axis is partial twice": (
        lambda: Layout(MESH, (8,), partial={"tp": "max", 1: "sum"}),
        ["axis tp: expected one use", "Partial()", "Partial('max')"],
    ),
    "an unknown axis": (
        lambda: Layout(MESH, (8,), {0: ["pp"]}),
        ["axis: expected one of (dp=2, tp=3)", "got 'pp'"],
    ),
    "an axis that is not there": (
        lambda: Layout(MESH, (8,), {0: [2]}),
        ["axis: expected one of (dp=2, tp=3)", "got 2"],
    ),
    "an axis that is no axis": (
        lambda: Layout(MESH, (8,), {0: [1.0]}),
        ["axis: expected one of (dp=2, tp=3)", "got 1.0"],
    ),
    "an unknown partial axis": (
        lambda: Layout(MESH, (8,), partial={"pp": "sum"}),
        ["axis: expected one of (dp=2, tp=3)", "got 'pp'"],
    ),
    "an unknown reduction": (
        lambda: Layout(MESH, (8,), partial={"tp": "mean"}),
        ["expected one of sum, avg, max, min, product", "got 'mean' (str)"],
    ),
    "an order of a dim that is not there": (
        lambda: Layout(MESH, (8,), {1: ["tp"]}),
        ["shard_order: expected a dim of a 1-d tensor", "got 1"],
    ),
    "an order of no dim": (
        lambda: Layout(MESH, (8,), {"tp": [0]}),
        ["shard_order: expected a dim of a 1-d tensor", "got 'tp'"],
    ),
    "an order of a dim that is a bool": (
        lambda: Layout(MESH, (8, 8), {True: [0]}),
        ["shard_order: expected a dim of a 2-d tensor", "got True"],
    ),
    "an order that names a dim twice": (
        lambda: Layout(MESH, (8,), {0: ["dp"], -1: ["tp"]}),
        ["shard_order: expected each dim once", "got [0, -1]"],
    ),
    "an order that names a dim twice, once for nothing": (
        lambda: Layout(MESH, (8, 8), {0: [], -2: ["tp"]}),
        ["shard_order: expected each dim once", "got [0, -2]"],
    ),
    "an order with too few dims": (
        lambda: Layout(MESH, (8, 8), [["tp"]]),
        ["shard_order: expected 2 entries, one per dim", "got [['tp']]"],
    ),
    "an order with a bare axis": (
        lambda: Layout(MESH, (8,), {0: "tp"}),
        ["shard_order[0]: expected a list of axes", "got 'tp'"],
    ),
    "an order that lacks an axis": (
        lambda: Layout.from_placements(MESH, (8,), [Shard(0), Shard(0)], {0: ["tp"]}),
        ["shard_order[0]: expected the axes", "(Shard(0), Shard(0))", "(dp, tp)", "got (tp)"],
    ),
    "an order of another dim": (
        lambda: Layout.from_placements(MESH, (8, 8), [Shard(0), Replicate()], {1: ["dp"]}),
        ["shard_order[1]: expected the axes", "(Shard(0), Replicate())", "()", "got (dp)"],
    ),
    "an order that repeats an axis": (
        lambda: Layout.from_placements(MESH, (8,), [Shard(0), Shard(0)], {0: ["tp", "tp"]}),
        ["shard_order[0]: expected the axes", "(dp, tp)", "got (tp, tp)"],
    ),
    "a coordinate too short": (
        lambda: Layout(MESH, (8,)).box((0,)),
        ["coordinate: expected one within (2, 3)", "got (0,)"],
    ),
    "a coordinate too long": (
        lambda: Layout(MESH, (8,)).box((0, 0, 0)),
        ["coordinate: expected one within (2, 3)", "got (0, 0, 0)"],
    ),
    "a coordinate beyond the mesh": (
        lambda: Layout(MESH, (8,)).local_shape((0, 3)),
        ["coordinate: expected one within (2, 3)", "got (0, 3)"],
    ),
    "a negative coordinate": (
        lambda: Layout(MESH, (8,)).box((-1, 0)),
        ["coordinate: expected one within (2, 3)", "got (-1, 0)"],
    ),
    "a coordinate with a bool": (
        lambda: Layout(MESH, (8,)).box((True, 0)),
        ["coordinate: expected one within (2, 3)", "got (True, 0)"],
    ),
    "a fractional coordinate": (
        lambda: Layout(MESH, (8,), {0: ["dp"]}).box((0.5, 0)),
        ["coordinate: expected one within (2, 3)", "got (0.5, 0)"],
    ),
    "a coordinate that is a rank": (
        lambda: Layout(MESH, (8,)).box(3),
        ["coordinate: expected one within (2, 3)", "got 3"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_refused_with_the_reason(case: str) -> None:
    make, parts = BAD[case]
    with refused(*parts):
        make()


def test_a_refused_layout_leaves_no_trace() -> None:
    for _ in range(2):  # the second time must not find a half-made first one
        with refused("axis tp: expected one use"):
            Layout(MESH, (8,), {0: ["tp"]}, {"tp": "sum"})


def test_on_a_rank_the_message_says_which() -> None:
    def bad() -> None:
        mesh = init_device_mesh("cpu", (2,))
        if mesh.get_rank() == 1:
            Layout(mesh, (-8,))

    with pytest.raises(RankError) as caught:
        simulate(bad, 2)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, LayoutError)
    assert str(caught.value.__cause__).endswith("got (-8,) [rank 1 of 2]")


def test_the_examples_in_the_docstrings_are_true() -> None:
    result = doctest.testmod(shardwise.core.layout)
    assert result.attempted >= 4 and result.failed == 0
