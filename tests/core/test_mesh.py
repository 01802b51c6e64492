"""Meshes are interned values: ranks in a grid with named axes, and each rank knows its place."""

import copy
import doctest
import pickle
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.refusals import refused

import shardwise as sw
import shardwise.core.mesh
from shardwise import (
    DeviceMesh,
    Layout,
    MeshError,
    Partial,
    RankError,
    Replicate,
    Shard,
    communicator,
    init_device_mesh,
    simulate,
)
from shardwise.comm.offline import AloneWorld
from shardwise.core import world

T = TypeVar("T")

ABSTRACT = DeviceMesh.abstract((2, 3), ("dp", "tp"))
"""[[0, 1, 2],
    [3, 4, 5]]"""


@pytest.fixture(autouse=True)
def a_world_of_its_own() -> Iterator[None]:
    """What one test cuts and flattens is unknown to the next."""
    with world.use(AloneWorld()):
        yield


def on_six(question: Callable[[DeviceMesh], T]) -> list[T]:
    """What each of six ranks answers about the mesh of all, 2 x 3 as above."""
    return simulate(lambda: question(init_device_mesh("cpu", (2, 3), ("dp", "tp"))), 6)


def on_eight(question: Callable[[DeviceMesh], T]) -> list[T]:
    """What each of eight ranks answers about [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]."""
    return simulate(lambda: question(init_device_mesh("cpu", (2, 2, 2), ("dp", "cp", "tp"))), 8)


# ---- what a mesh is


def test_a_mesh_of_all_ranks_counts_them_in_order() -> None:
    def facts(mesh: DeviceMesh) -> tuple[Any, ...]:
        return mesh.shape, mesh.ndim, mesh.mesh_dim_names, mesh.device_type, mesh.mesh.tolist()

    expected = (2, 3), 2, ("dp", "tp"), "cpu", [[0, 1, 2], [3, 4, 5]]
    assert on_six(facts) == [expected] * 6


def test_sizes_are_of_the_whole_or_of_one_axis() -> None:
    assert ABSTRACT.size() == 6
    assert [ABSTRACT.size(axis) for axis in (0, 1, -1, "dp", "tp")] == [2, 3, 3, 2, 3]


def test_an_axis_is_known_by_name_and_by_position() -> None:
    assert [ABSTRACT.axis(axis) for axis in ("dp", "tp", 0, 1, -1, -2)] == [0, 1, 0, 1, 1, 0]
    assert [ABSTRACT.axis_name(axis) for axis in (0, 1)] == ["dp", "tp"]
    assert DeviceMesh.abstract((2, 3)).axis_name(1) == "1"


def test_a_mesh_may_be_any_grid_of_some_ranks() -> None:
    def grid() -> list[Any]:
        return DeviceMesh("cpu", [[5, 1], [0, 3]]).mesh.tolist()

    assert simulate(grid, 6) == [[[5, 1], [0, 3]]] * 6


def test_names_are_optional() -> None:
    mesh = DeviceMesh.abstract((2, 3))
    assert mesh.mesh_dim_names is None and mesh.size(1) == 3


def test_the_tensor_of_ranks_is_a_copy() -> None:
    ABSTRACT.mesh.fill_(9)
    assert ABSTRACT.mesh.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_the_tensor_of_ranks_has_the_dtype_of_torchs() -> None:
    assert ABSTRACT.mesh.dtype is ABSTRACT["dp"].mesh.dtype is torch.int32


def test_ints_of_any_type_are_stored_as_plain_ones() -> None:
    two, three = np.int64(2), torch.tensor(3)
    mesh = DeviceMesh.abstract((two, three), ("dp", "tp"))
    assert mesh is ABSTRACT and set(map(type, mesh.shape)) == {int}
    cut = DeviceMesh.abstract((6,)).unflatten(np.uint8(0), [two, three])
    assert set(map(type, cut.shape)) == {int}
    assert type(mesh.axis(np.int32(-1))) is int and mesh.axis(np.int32(-1)) == 1
    assert mesh.has((np.int64(1), two)) and mesh.rank_at((np.int64(1), two)) == 5
    assert mesh.ranks_along([np.int64(1)], [np.int64(1), two]) == (3, 4, 5)
    assert mesh.coordinate_of(np.int64(4)) == (1, 1)
    assert {type(each) for each in mesh.coordinate_of(np.int64(4)) or ()} == {int}


# ---- where a rank stands


def test_each_rank_knows_its_place() -> None:
    assert on_six(lambda mesh: mesh.get_rank()) == [0, 1, 2, 3, 4, 5]
    places = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert on_six(lambda mesh: mesh.get_coordinate()) == places
    assert on_six(lambda mesh: mesh.get_local_rank("dp")) == [0, 0, 0, 1, 1, 1]
    assert on_six(lambda mesh: mesh.get_local_rank(1)) == [0, 1, 2, 0, 1, 2]


def test_in_a_sub_mesh_the_rank_stays_global_and_the_place_is_local() -> None:
    assert on_six(lambda mesh: mesh["tp"].get_rank()) == [0, 1, 2, 3, 4, 5]
    assert on_six(lambda mesh: mesh["tp"].get_coordinate()) == [(0,), (1,), (2,)] * 2
    assert on_six(lambda mesh: mesh["dp"].get_local_rank()) == [0, 0, 0, 1, 1, 1]


def test_a_rank_that_is_not_in_the_mesh_has_no_place_and_is_told_so() -> None:
    def place() -> tuple[int, ...] | None:
        mesh = DeviceMesh("cpu", [2, 0])
        if mesh.get_rank() == 1:
            with refused("rank 1 is not part of DeviceMesh('cpu', [2, 0])", "[rank 1 of 3]"):
                mesh.get_local_rank()
            with refused("rank 1 is not part of"):
                mesh.ranks_along([0])
        return mesh.get_coordinate()

    assert simulate(place, 3) == [(1,), None, (0,)]


def test_any_rank_can_be_located() -> None:
    assert ABSTRACT.coordinate_of(4) == (1, 1)
    assert ABSTRACT.coordinate_of(6) is None and ABSTRACT.coordinate_of(-1) is None
    assert [ABSTRACT.rank_at(place) for place in ((0, 0), [0, 2], (1, 1))] == [0, 2, 4]


def test_ranks_that_count_up_are_located_without_a_look_at_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(np, "argwhere", None)

    def locate(*ranks: int) -> list[tuple[int, ...] | None]:
        mesh = DeviceMesh("cpu", [[2, 3], [4, 5]])
        return [mesh.coordinate_of(rank) for rank in ranks]

    assert simulate(locate, 6, 1, 2, 5, 6)[0] == [None, (0, 0), (1, 1), None]


def test_ranks_along_axes_vary_the_first_slowest() -> None:
    assert ABSTRACT.ranks_along(["tp"], (1, 0)) == (3, 4, 5)
    assert ABSTRACT.ranks_along([0], (1, 2)) == (2, 5)
    assert ABSTRACT.ranks_along(["dp", "tp"], (1, 2)) == (0, 1, 2, 3, 4, 5)
    assert ABSTRACT.ranks_along(["tp", "dp"], (1, 2)) == (0, 3, 1, 4, 2, 5)
    assert ABSTRACT.ranks_along([], (1, 2)) == (5,)
    assert on_six(lambda mesh: mesh.ranks_along(["dp"])) == [(0, 3), (1, 4), (2, 5)] * 2


@st.composite
def grids(draw: st.DrawFn) -> tuple[int, np.ndarray]:
    """A number of ranks, and some of them in any order in a grid."""
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    count = int(np.prod(shape))
    world_size = count + draw(st.integers(0, 2))
    ranks = draw(st.permutations(range(world_size)))[:count]
    return world_size, np.array(ranks).reshape(shape)


@settings(max_examples=60)
@given(grids())
def test_coordinates_are_the_inverse_of_the_grid(case: tuple[int, np.ndarray]) -> None:
    world_size, grid = case
    expected = {int(rank): place for place, rank in np.ndenumerate(grid)}

    def check() -> tuple[int, ...] | None:
        mesh = DeviceMesh("cpu", grid)
        for rank in range(-1, world_size + 1):
            assert mesh.coordinate_of(rank) == expected.get(rank)
        for place, rank in np.ndenumerate(grid):
            assert mesh.mesh[place].item() == mesh.rank_at(place) == rank
        return mesh.get_coordinate()

    assert simulate(check, world_size) == [expected.get(rank) for rank in range(world_size)]


def naive_ranks_along(
    grid: np.ndarray, axes: Sequence[int], place: tuple[int, ...]
) -> tuple[int, ...]:
    found = []
    for steps in product(*(range(grid.shape[axis]) for axis in axes)):
        moved = list(place)
        for axis, step in zip(axes, steps, strict=True):
            moved[axis] = step
        found.append(int(grid[tuple(moved)]))
    return tuple(found)


@settings(max_examples=60)
@given(grids(), st.permutations(range(3)), st.integers(0, 3))
def test_ranks_along_axes_are_those_of_nested_loops(
    case: tuple[int, np.ndarray], order: list[int], count: int
) -> None:
    world_size, grid = case
    axes = [axis for axis in order if axis < grid.ndim][:count]

    def check() -> None:
        mesh = DeviceMesh("cpu", grid)
        for place, _ in np.ndenumerate(grid):
            assert mesh.ranks_along(axes, place) == naive_ranks_along(grid, axes, place)
        if (own := mesh.get_coordinate()) is not None:
            assert mesh.ranks_along(axes) == naive_ranks_along(grid, axes, own)

    simulate(check, world_size)


# ---- sub-meshes


def test_a_name_gives_the_sub_mesh_of_the_caller() -> None:
    rows = on_six(lambda mesh: mesh["tp"].mesh.tolist())
    assert rows == [[0, 1, 2]] * 3 + [[3, 4, 5]] * 3
    columns = on_six(lambda mesh: mesh["dp"].mesh.tolist())
    assert columns == [[0, 3], [1, 4], [2, 5]] * 2
    assert on_six(lambda mesh: mesh["tp"].mesh_dim_names) == [("tp",)] * 6


def test_all_names_in_order_give_the_mesh_itself() -> None:
    assert all(on_six(lambda mesh: mesh["dp", "tp"] is mesh))


def test_names_in_another_order_transpose() -> None:
    def facts(mesh: DeviceMesh) -> tuple[Any, ...]:
        turned = mesh["tp", "dp"]
        return turned.shape, turned.mesh_dim_names, turned.mesh.tolist()

    assert on_six(facts) == [((3, 2), ("tp", "dp"), [[0, 3], [1, 4], [2, 5]])] * 6


def test_two_of_three_axes() -> None:
    planes = on_eight(lambda mesh: mesh["dp", "tp"].mesh.tolist())
    assert planes[0] == planes[1] == planes[4] == planes[5] == [[0, 1], [4, 5]]
    assert planes[2] == planes[3] == planes[6] == planes[7] == [[2, 3], [6, 7]]


def test_a_sub_mesh_of_a_sub_mesh_has_the_first_mesh_as_root() -> None:
    def roots(mesh: DeviceMesh) -> bool:
        plane = mesh["dp", "cp"]
        return plane.root is mesh and plane["dp"].root is mesh and mesh.root is mesh

    assert all(on_eight(roots))
    lines = on_eight(lambda mesh: mesh["dp", "cp"]["dp"].mesh.tolist())
    assert lines == [[0, 4], [1, 5], [2, 6], [3, 7]] * 2


def test_ranks_of_one_sub_mesh_share_the_object() -> None:
    rows = on_six(lambda mesh: mesh["tp"])
    assert rows[0] is rows[1] is rows[2] and rows[3] is rows[4] is rows[5]
    assert rows[0] is not rows[3]


def test_a_sub_mesh_is_the_mesh_of_the_same_ranks_and_names() -> None:
    def check(mesh: DeviceMesh) -> None:
        row = mesh["tp"]
        made = DeviceMesh("cpu", row.mesh, mesh_dim_names=("tp",))
        assert made is row and made.root is mesh
        assert Layout(made, (6,), {0: ["tp"]}) is Layout(row, (6,), {0: ["tp"]})
        assert mesh.flatten(name="all") is init_device_mesh("cpu", (6,), ("all",))

    on_six(check)
    assert ABSTRACT.flatten(name="all") is DeviceMesh.abstract((6,), ("all",))


def test_a_rank_knows_only_the_roots_of_what_it_cut_itself() -> None:
    rows = on_six(lambda mesh: mesh["tp"])
    assert rows[3].root is rows[3]


def test_the_root_is_the_mesh_it_was_cut_from_last() -> None:
    first = DeviceMesh.abstract((2, 3, 4), ("x", "dp", "tp"))
    second = DeviceMesh.abstract((3, 4, 2), ("dp", "tp", "y"))
    plane = first["dp", "tp"]
    assert plane["tp"].root is plane.root is first
    line = DeviceMesh.abstract((24,), ("all",))
    assert line.unflatten("all", (2, 3, 4), ("x", "dp", "tp")) is first
    assert first.root is plane.root is line  # the root of a root
    assert second["tp"].root is second and plane.root is line


def test_no_mesh_becomes_the_root_of_its_own_root() -> None:
    mesh = DeviceMesh.abstract((2, 5), ("dp", "tp"))
    flat = mesh.flatten(name="all")
    assert flat.unflatten("all", (2, 5), ("dp", "tp")) is mesh
    assert mesh.root is mesh and flat.root is mesh
    turned = flat.unflatten("all", (5, 2), ("a", "b"))
    assert turned.flatten(name="all") is flat
    assert turned.root is flat.root is mesh.root is mesh


def test_a_sub_mesh_that_nobody_holds_is_freed() -> None:
    cube = DeviceMesh.abstract((2, 3, 7), ("dp", "cp", "tp"))
    gone = [weakref.ref(cube), weakref.ref(cube["cp"]), weakref.ref(cube.flatten("dp", "cp"))]
    assert [each() for each in gone] == [cube, None, None]
    del cube
    assert gone[0]() is None


# ---- flatten and unflatten


def test_flatten_merges_all_axes_and_the_root_finds_the_result() -> None:
    def facts(mesh: DeviceMesh) -> tuple[Any, ...]:
        flat = mesh.flatten()
        return flat.mesh_dim_names, flat.mesh.tolist(), mesh["dp_tp"] is flat, flat.root is mesh

    assert on_six(facts) == [(("dp_tp",), [0, 1, 2, 3, 4, 5], True, True)] * 6


def test_torchs_name_for_flatten_works_too() -> None:
    def same(mesh: DeviceMesh) -> bool:
        flat = mesh._flatten("everyone")
        return flat is mesh["everyone"] is mesh.flatten(name="everyone")

    assert all(on_six(same))


def test_a_flattened_sub_mesh_is_found_by_name() -> None:
    def groups(mesh: DeviceMesh) -> tuple[Any, ...]:
        flat = mesh["dp", "cp"]._flatten("dp_cp")
        assert mesh["dp_cp"] is flat
        return tuple(flat.mesh.tolist())

    assert on_eight(groups) == [(0, 2, 4, 6), (1, 3, 5, 7)] * 4


def test_adjacent_axes_can_be_merged_alone() -> None:
    cube = DeviceMesh.abstract((2, 3, 4), ("dp", "cp", "tp"))
    flat = cube.flatten("dp", "cp")
    assert (flat.shape, flat.mesh_dim_names) == ((6, 4), ("dp_cp", "tp"))
    assert cube.flatten(1, 2, name="inner").mesh_dim_names == ("dp", "inner")
    assert torch.equal(flat.mesh, cube.mesh.reshape(6, 4))


def abstract_cube() -> DeviceMesh:
    return DeviceMesh.abstract((2, 2, 2), ("dp", "cp", "tp"))


def test_flattened_names_mix_with_axes_in_any_order() -> None:
    def check(mesh: DeviceMesh) -> None:
        flat = mesh["dp", "cp"].flatten()
        mixed = mesh["dp_cp", "tp"]
        assert mixed is mesh.flatten("dp", "cp") and mixed.root is mesh
        assert mesh["tp", "dp_cp"].mesh.tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
        assert mesh["tp", "dp_cp"]["dp_cp"] is flat
        assert mesh["tp", "dp_cp"] is mesh["tp", "dp", "cp"].flatten("dp", "cp")
        mesh["tp", "cp"].flatten(name="inner")
        assert mesh["inner", "dp"].mesh.tolist() == [[0, 4], [2, 6], [1, 5], [3, 7]]

    on_eight(check)
    check(abstract_cube())


def test_two_flattened_names_can_be_mixed() -> None:
    mesh = DeviceMesh.abstract((2, 2, 2, 2), ("a", "b", "c", "d"))
    mesh.flatten("a", "b")
    mesh.flatten("c", "d")
    both = mesh["c_d", "a_b"]
    assert torch.equal(both.mesh, mesh.mesh.reshape(4, 4).T)


def test_a_partial_flatten_is_found_by_name() -> None:
    def check(mesh: DeviceMesh) -> None:
        flat = mesh.flatten("dp", "cp")
        assert mesh["dp_cp"] is flat["dp_cp"]
        everyone = flat.flatten(name="everyone")  # of an axis that was flattened itself
        assert mesh["everyone"] is everyone is mesh.flatten(name="everyone")

    on_eight(check)
    check(abstract_cube())


def test_a_sub_mesh_knows_the_flattened_names_but_not_the_axes_of_its_root() -> None:
    mesh = DeviceMesh.abstract((2, 2, 2, 3), ("pp", "dp", "cp", "tp"))
    plane = mesh["dp", "cp", "tp"]
    flat = plane.flatten("dp", "cp")
    assert plane["dp_cp", "tp"] is mesh["dp_cp", "tp"] is flat
    with refused("axis: expected one of (dp=2, cp=2, tp=3) or the flattened dp_cp, got 'pp'"):
        plane["pp"]


def test_a_mesh_that_becomes_a_sub_mesh_keeps_its_flattened_names() -> None:
    mesh = DeviceMesh.abstract((2, 3), ("dp", "tp"), "cuda")
    flat = mesh.flatten(name="both")
    assert DeviceMesh.abstract((1, 2, 3), ("pp", "dp", "tp"), "cuda")["dp", "tp"] is mesh
    assert mesh["both"] is flat


def test_an_axis_that_only_has_the_name_of_one_of_the_root_is_not_taken_for_it() -> None:
    mesh = abstract_cube()
    flat = mesh["dp", "cp"].flatten(name="x")
    other = flat.unflatten("x", (2, 2), ("cp", "dp"))  # the other way round
    assert other.flatten(name="y") is not mesh["cp", "dp"].flatten(name="z")
    assert mesh["y"].mesh.tolist() == [0, 2, 4, 6]  # the ranks of y, not of the axes cp and dp
    assert mesh["z"].mesh.tolist() == [0, 4, 2, 6]
    cut = mesh.unflatten("tp", (2, 1), ("ep", "tp"))
    assert cut["x", "tp"].mesh.tolist() == [[0], [2], [4], [6]]  # the tp of cut


def test_a_rank_outside_the_mesh_can_flatten_it() -> None:
    def ranks() -> list[int]:
        mesh = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp", "tp"))
        return mesh.flatten().mesh.tolist()

    assert simulate(ranks, 3) == [[0, 1]] * 3


def test_a_rank_outside_the_mesh_can_cut_it_where_there_is_only_one_way() -> None:
    def ranks() -> list[int]:
        mesh = DeviceMesh("cpu", [[0, 2]], mesh_dim_names=("dp", "tp"))
        if mesh.get_rank() == 1:
            with refused("rank 1 is not part of"):
                mesh["dp"]
        return mesh["tp"].mesh.tolist()

    assert simulate(ranks, 3) == [[0, 2]] * 3


def test_a_transposed_mesh_flattens_in_its_own_order() -> None:
    ranks = on_six(lambda mesh: mesh["tp", "dp"].flatten().mesh.tolist())
    assert ranks == [[0, 3, 1, 4, 2, 5]] * 6


def test_a_flattened_name_is_known_only_where_it_was_given() -> None:
    on_six(lambda mesh: mesh.flatten(name="novel"))
    with pytest.raises(RankError, match="got 'novel'"):
        on_six(lambda mesh: mesh["novel"])


def test_unflatten_cuts_an_axis() -> None:
    mesh = DeviceMesh.abstract((2, 6), ("dp", "tp"))
    cut = mesh.unflatten("tp", (3, 2), ("outer", "inner"))
    assert (cut.shape, cut.mesh_dim_names) == ((2, 3, 2), ("dp", "outer", "inner"))
    assert cut.mesh.tolist() == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [10, 11]]]
    assert mesh._unflatten(1, (3, 2), ("outer", "inner")) is cut
    assert DeviceMesh.abstract((6,)).unflatten(0, (2, 3)).shape == (2, 3)


def test_flatten_undoes_unflatten() -> None:
    def ranks() -> list[int]:
        mesh = DeviceMesh("cpu", [3, 1, 0, 2], mesh_dim_names=("all",))
        cut = mesh.unflatten("all", (2, 2), ("dp", "tp"))
        assert cut.mesh.tolist() == [[3, 1], [0, 2]]
        return cut.flatten().mesh.tolist()

    assert simulate(ranks, 4) == [[3, 1, 0, 2]] * 4


# ---- one object per mesh


def test_every_way_to_say_a_mesh_gives_one_object() -> None:
    def same(mesh: DeviceMesh) -> bool:
        names = ["dp", "tp"]
        ranks = [[0, 1, 2], [3, 4, 5]]
        return all(
            other is mesh
            for other in (
                init_device_mesh("cpu", [2, 3], mesh_dim_names=names),
                init_device_mesh("cpu", torch.Size([2, 3]), names),
                DeviceMesh("cpu", ranks, mesh_dim_names=names),
                DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=names),
                DeviceMesh("cpu", torch.tensor(ranks, dtype=torch.int32), mesh_dim_names=names),
                DeviceMesh("cpu", np.array(ranks), mesh_dim_names=names),
                DeviceMesh("cpu", np.array(ranks).T.copy().T, mesh_dim_names=names),
            )
        )

    assert all(on_six(same))


def test_different_meshes_are_different_objects() -> None:
    different = {
        ABSTRACT,
        DeviceMesh.abstract((3, 2), ("dp", "tp")),
        DeviceMesh.abstract((2, 3), ("tp", "dp")),
        DeviceMesh.abstract((2, 3)),
        DeviceMesh.abstract((2, 3), ("dp", "tp"), device_type="cuda"),
        *on_six(lambda mesh: mesh),
    }
    assert len(different) == 6


def test_copies_and_pickles_are_the_mesh_itself() -> None:
    def check(mesh: DeviceMesh) -> None:
        for each in (mesh, mesh["tp"], mesh["tp", "dp"], mesh.flatten(), ABSTRACT, ABSTRACT["dp"]):
            assert copy.copy(each) is each
            assert copy.deepcopy([each])[0] is each
            assert pickle.loads(pickle.dumps(each)) is each

    on_six(check)


def test_the_grid_that_was_given_may_change_later() -> None:
    def ranks() -> list[int]:
        grid = torch.tensor([1, 0])
        mesh = DeviceMesh("cpu", grid)
        grid.fill_(0)
        return mesh.mesh.tolist()

    assert simulate(ranks, 2) == [[1, 0]] * 2


@pytest.mark.parametrize("field", ["shape", "mesh_dim_names", "device_type", "_ranks", "novel"])
def test_a_mesh_cannot_be_changed(field: str) -> None:
    with pytest.raises(AttributeError, match=field):
        setattr(ABSTRACT, field, ())
    assert repr(ABSTRACT) == "DeviceMesh.abstract((2, 3), ('dp', 'tp'))"


def pasted(mesh: DeviceMesh) -> DeviceMesh:
    names = {"DeviceMesh": DeviceMesh, "init_device_mesh": init_device_mesh}
    result: DeviceMesh = eval(repr(mesh), names)
    return result


@pytest.mark.parametrize(
    "mesh",
    [
        ABSTRACT,
        DeviceMesh.abstract((4,)),
        DeviceMesh.abstract((4,), ("x",)),
        DeviceMesh.abstract((4,), ("x",), "cuda"),
        DeviceMesh.abstract((4,), device_type="cuda"),
        DeviceMesh.abstract((1000, 100), ("dp", "tp")),
    ],
    ids=repr,
)
def test_the_repr_of_an_abstract_mesh_can_be_pasted_back(mesh: DeviceMesh) -> None:
    assert pasted(mesh) is mesh


def test_the_repr_of_a_mesh_of_ranks_can_be_pasted_back() -> None:
    def check(mesh: DeviceMesh) -> str:
        for other in (
            mesh,
            mesh["tp"],
            mesh["tp", "dp"],
            mesh.flatten(),
            mesh["tp", "dp"].flatten(),
            init_device_mesh("cpu", (6,)),
            init_device_mesh("meta", (6,), ("x",)),
            DeviceMesh("cpu", [0, 1]),
            DeviceMesh("cpu", [[5, 1], [0, 3]], mesh_dim_names=("dp", "tp")),
        ):
            assert pasted(other) is other
        return repr(mesh)

    assert on_six(check) == ["init_device_mesh('cpu', (2, 3), ('dp', 'tp'))"] * 6


def test_the_repr_of_a_sub_mesh_gives_its_ranks_and_names() -> None:
    shown = on_six(lambda mesh: repr(mesh["tp"]))
    assert shown[3] == "DeviceMesh('cpu', [3, 4, 5], mesh_dim_names=('tp',))"


def test_the_repr_of_an_abstract_sub_mesh_says_how_it_was_cut() -> None:
    column, turned = ABSTRACT["dp"], ABSTRACT["tp", "dp"]
    assert repr(column) == "DeviceMesh.abstract((2, 3), ('dp', 'tp'))['dp']"
    assert repr(turned) == "DeviceMesh.abstract((2, 3), ('dp', 'tp'))['tp', 'dp']"
    assert repr(ABSTRACT["tp"]) == "DeviceMesh.abstract((3,), ('tp',))"  # ranks 0 to 2 indeed
    for mesh in (column, turned, ABSTRACT["tp"]):
        assert pasted(mesh) is mesh


def test_the_repr_of_an_abstract_mesh_that_cannot_say_how_it_was_cut_names_its_ranks() -> None:
    line = ABSTRACT["tp", "dp"].flatten()
    expected = "<abstract DeviceMesh('cpu', [0, 3, 1, 4, 2, 5], mesh_dim_names=('tp_dp',))>"
    assert repr(line) == expected
    column = ABSTRACT["dp"]
    elsewhere = simulate(lambda: repr(column), 1)  # a rank that did not cut it
    assert elsewhere == ["<abstract DeviceMesh('cpu', [0, 3], mesh_dim_names=('dp',))>"]


def test_the_repr_of_a_large_irregular_mesh_is_short() -> None:
    def shown() -> str:
        return repr(DeviceMesh("cpu", list(reversed(range(65)))))

    assert simulate(shown, 65)[0] == "DeviceMesh('cpu', ...)"


# ---- abstract meshes, and a process on its own


def test_an_abstract_mesh_needs_no_ranks() -> None:
    assert ABSTRACT.is_abstract and ABSTRACT.device_type == "cpu"
    assert DeviceMesh.abstract((512, 8, 16)).size() == 65_536
    assert DeviceMesh.abstract((2,), device_type="cuda").device_type == "cuda"


def test_an_abstract_mesh_is_seen_by_rank_0_wherever_it_is_asked() -> None:
    def place() -> tuple[Any, ...]:
        return ABSTRACT.get_rank(), ABSTRACT.get_coordinate(), ABSTRACT["dp"].mesh.tolist()

    assert place() == (0, (0, 0), [0, 3])
    assert simulate(place, 2) == [(0, (0, 0), [0, 3])] * 2


def test_another_rank_of_an_abstract_mesh_can_be_looked_with() -> None:
    assert communicator(ABSTRACT, "tp", rank=4).ranks == (3, 4, 5)
    with refused("rank: expected one of DeviceMesh.abstract((2, 3)", "got 6"):
        communicator(ABSTRACT, "tp", rank=6)


def test_a_process_on_its_own_is_a_world_of_one() -> None:
    mesh = init_device_mesh("cpu", (1,), ("dp",))
    assert (mesh.get_rank(), mesh.get_coordinate(), mesh.get_local_rank()) == (0, (0,), 0)
    assert mesh["dp"] is mesh
    assert pasted(mesh) is mesh


def test_a_process_on_its_own_is_told_how_to_get_more_ranks() -> None:
    with refused(
        "mesh_shape: expected a product of 1, the number of ranks",
        "got (2,) = 2",
        "torchrun",
        "launch",
        "simulate",
        "DeviceMesh.abstract",
    ):
        init_device_mesh("cpu", (2,))
    with refused("mesh: expected ranks 0 to 0", "got 0 to 1", "torchrun"):
        DeviceMesh("cpu", [0, 1])


def test_simulated_ranks_have_no_process_groups_and_say_what_they_have() -> None:
    def check(mesh: DeviceMesh) -> None:
        parts = ["there is no torch process group here", "sw.simulate", "sw.communicator"]
        with refused(*parts):
            mesh.get_group("tp")
        with refused(*parts):
            mesh.get_all_groups()
        with refused(*parts):
            DeviceMesh.from_group(object(), "cpu")
        with refused("there is no torch DeviceMesh here", "sw.simulate"):
            mesh.to_torch()

    on_six(check)


# ---- what cannot be


BAD: dict[str, tuple[Callable[[], object], list[str]]] = {
    "duplicate names": (
        lambda: DeviceMesh.abstract((2, 3), ("tp", "tp")),
        ["mesh_dim_names: expected different names", "got ('tp', 'tp')"],
    ),
    "too few names": (
        lambda: DeviceMesh.abstract((2, 3), ("tp",)),
        ["mesh_dim_names: expected 2 names, one per axis", "got ('tp',)"],
    ),
    "too many names": (
        lambda: init_device_mesh("cpu", (1,), ("dp", "tp")),
        ["mesh_dim_names: expected 1 names, one per axis", "got ('dp', 'tp')"],
    ),
    "an empty name": (
        lambda: DeviceMesh.abstract((2, 3), ("dp", "")),
        ["mesh_dim_names: expected texts such as 'tp'", "got ('dp', '')"],
    ),
    "a name that is a number": (
        lambda: DeviceMesh.abstract((2, 3), ("dp", 1)),
        ["mesh_dim_names: expected texts such as 'tp'", "got ('dp', 1)"],
    ),
    "an empty shape": (
        lambda: init_device_mesh("cpu", ()),
        ["mesh_shape: expected positive sizes, one per axis", "got ()"],
    ),
    "a size of 0": (
        lambda: DeviceMesh.abstract((2, 0)),
        ["shape: expected positive sizes", "got (2, 0)"],
    ),
    "a negative size": (
        lambda: init_device_mesh("cpu", (-1,)),
        ["mesh_shape: expected positive sizes", "got (-1,)"],
    ),
    "two negative sizes": (
        lambda: init_device_mesh("cpu", (-1, -1)),
        ["mesh_shape: expected positive sizes", "got (-1, -1)"],
    ),
    "a fractional size": (
        lambda: init_device_mesh("cpu", (1.0,)),
        ["mesh_shape: expected positive sizes", "got (1.0,)"],
    ),
    "a size that is a bool": (
        lambda: DeviceMesh.abstract((2, True)),
        ["shape: expected positive sizes", "got (2, True)"],
    ),
    "a bare size": (
        lambda: init_device_mesh("cpu", 1),
        ["mesh_shape: expected positive sizes, one per axis", "got 1"],
    ),
    "an unknown device type": (
        lambda: init_device_mesh("tpu", (1,)),
        ["device_type: expected 'cpu', 'cuda' or alike", "tpu"],
    ),
    "a device with an index": (
        lambda: init_device_mesh("cuda:1", (1,)),
        ["device_type: expected no device index", "got 'cuda:1'"],
    ),
    "no device type": (
        lambda: init_device_mesh(None, (1,)),
        ["device_type: expected 'cpu', 'cuda' or alike"],
    ),
    "duplicate ranks": (
        lambda: DeviceMesh("cpu", [[0, 1], [1, 2]]),
        ["mesh: expected each rank once", "got [[0, 1], [1, 2]]"],
    ),
    "a negative rank": (
        lambda: DeviceMesh("cpu", [-1]),
        ["mesh: expected ranks 0 to 0", "got -1 to -1"],
    ),
    "no ranks": (
        lambda: DeviceMesh("cpu", []),
        ["mesh: expected a grid of ranks", "got []"],
    ),
    "a bare rank": (
        lambda: DeviceMesh("cpu", 0),
        ["mesh: expected a grid of ranks", "got 0"],
    ),
    "fractional ranks": (
        lambda: DeviceMesh("cpu", [0.0]),
        ["mesh: expected a grid of ranks", "got [0.0]"],
    ),
    "a ragged grid": (
        lambda: DeviceMesh("cpu", [[0], [1, 2]]),
        ["mesh: expected a grid of ranks", "got [[0], [1, 2]]"],
    ),
    "an unknown axis": (
        lambda: ABSTRACT["pp"],
        ["axis: expected one of (dp=2, tp=3)", "got 'pp'"],
    ),
    "an unknown axis among others": (
        lambda: ABSTRACT["dp", "pp"],
        ["axis: expected one of (dp=2, tp=3)", "got 'pp'"],
    ),
    "an axis beyond the last": (
        lambda: ABSTRACT.size(2),
        ["axis: expected one of (dp=2, tp=3)", "got 2"],
    ),
    "an axis that is no axis": (
        lambda: ABSTRACT.axis(1.0),
        ["axis: expected one of (dp=2, tp=3)", "got 1.0"],
    ),
    "an axis that is a bool": (
        lambda: ABSTRACT.axis(True),
        ["axis: expected one of (dp=2, tp=3)", "got True"],
    ),
    "an axis of an unnamed mesh": (
        lambda: DeviceMesh.abstract((2, 3)).size("tp"),
        ["axis: expected one of (0=2, 1=3)", "got 'tp'"],
    ),
    "one axis twice": (
        lambda: ABSTRACT["tp", "tp"],
        ["mesh[('tp', 'tp')]", "expected each axis name once", "got ('tp', 'tp')"],
    ),
    "one axis twice, once flattened": (
        lambda: (cube := abstract_cube(), cube.flatten("dp", "cp"), cube["dp_cp", "dp"]),
        ["mesh[('dp_cp', 'dp')]", "expected different axes, got some that overlap"],
    ),
    "an unknown axis beside flattened ones": (
        lambda: (cube := abstract_cube(), cube.flatten(), cube.flatten(0, 1), cube["dp_cp", "x"]),
        ["one of (dp=2, cp=2, tp=2) or the flattened dp_cp_tp, dp_cp, got 'x'"],
    ),
    "no axes": (
        lambda: ABSTRACT[()],
        ["mesh[()]", "expected each axis name once"],
    ),
    "a sub-mesh by position": (
        lambda: ABSTRACT[0],
        ["axis: expected one of (dp=2, tp=3)", "got 0"],
    ),
    "a sub-mesh by slice": (
        lambda: ABSTRACT[:1],
        ["axis: expected one of (dp=2, tp=3)", "got slice(None, 1, None)"],
    ),
    "a sub-mesh of an unnamed mesh": (
        lambda: DeviceMesh.abstract((2, 3))["tp"],
        ["mesh[('tp',)]", "no mesh_dim_names"],
    ),
    "ranks along one axis twice": (
        lambda: ABSTRACT.ranks_along(["tp", 1]),
        ["axes: expected each axis once", "got ('tp', 1)"],
    ),
    "ranks along from a coordinate too short": (
        lambda: ABSTRACT.ranks_along(["tp"], (1,)),
        ["coordinate: expected one within (2, 3)", "got (1,)"],
    ),
    "ranks along from a coordinate beyond the mesh": (
        lambda: ABSTRACT.ranks_along(["tp"], (2, 0)),
        ["coordinate: expected one within (2, 3)", "got (2, 0)"],
    ),
    "ranks along from a negative coordinate": (
        lambda: ABSTRACT.ranks_along(["tp"], (-1, 0)),
        ["coordinate: expected one within (2, 3)", "got (-1, 0)"],
    ),
    "the rank at a coordinate beyond the mesh": (
        lambda: ABSTRACT.rank_at((0, 3)),
        ["coordinate: expected one within (2, 3)", "got (0, 3)"],
    ),
    "the rank at a negative coordinate": (
        lambda: ABSTRACT.rank_at((0, -1)),
        ["coordinate: expected one within (2, 3)", "got (0, -1)"],
    ),
    "the rank at a coordinate too short": (
        lambda: ABSTRACT.rank_at((0,)),
        ["coordinate: expected one within (2, 3)", "got (0,)"],
    ),
    "the rank at a coordinate with a bool": (
        lambda: ABSTRACT.rank_at((0, True)),
        ["coordinate: expected one within (2, 3)", "got (0, True)"],
    ),
    "a local rank on no axis": (
        ABSTRACT.get_local_rank,
        ["get_local_rank(mesh_dim): expected one of (dp=2, tp=3)", "got None"],
    ),
    "a group on no axis": (
        ABSTRACT.get_group,
        ["get_group(mesh_dim): expected one of (dp=2, tp=3)", "got None"],
    ),
    "flatten of axes apart": (
        lambda: DeviceMesh.abstract((2, 2, 2), ("dp", "cp", "tp")).flatten("dp", "tp"),
        ["flatten('dp', 'tp')", "expected adjacent axes", "(dp=2, cp=2, tp=2)", "mesh[names]"],
    ),
    "flatten of axes turned round": (
        lambda: ABSTRACT.flatten("tp", "dp"),
        ["flatten('tp', 'dp')", "expected adjacent axes in mesh order"],
    ),
    "flatten to a name that is there": (
        lambda: DeviceMesh.abstract((2, 2, 2), ("dp", "cp", "tp")).flatten("dp", "cp", name="tp"),
        ["mesh_dim_names: expected different names", "got ('tp', 'tp')"],
    ),
    "flatten of an unnamed mesh to a name": (
        lambda: DeviceMesh.abstract((2, 3)).flatten(name="all"),
        ["flatten(name='all')", "no mesh_dim_names"],
    ),
    "unflatten to another size": (
        lambda: ABSTRACT.unflatten("tp", (2, 2), ("a", "b")),
        ["unflatten(sizes): expected a product of 3, the size of axis 'tp'", "got (2, 2)"],
    ),
    "unflatten to negative sizes": (
        lambda: ABSTRACT.unflatten("tp", (-1, -3), ("a", "b")),
        ["unflatten(sizes): expected positive sizes", "got (-1, -3)"],
    ),
    "unflatten without names": (
        lambda: ABSTRACT.unflatten("tp", (3, 1)),
        ["unflatten(names): expected names exactly if the mesh has names"],
    ),
    "unflatten to a name that is there": (
        lambda: ABSTRACT.unflatten("tp", (3, 1), ("dp", "b")),
        ["mesh_dim_names: expected different names", "got ('dp', 'dp', 'b')"],
    ),
    "unflatten to too few names": (
        lambda: ABSTRACT.unflatten("tp", (3, 1), ("a",)),
        ["mesh_dim_names: expected 3 names", "got ('dp', 'a')"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_refused_with_the_reason(case: str) -> None:
    make, parts = BAD[case]
    with refused(*parts):
        make()


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (
            lambda: init_device_mesh("cpu", (3,)),
            ["mesh_shape: expected a product of 4, the number of ranks", "got (3,) = 3", "4 ranks"],
        ),
        (
            lambda: init_device_mesh("cpu", (2, 3)),
            ["mesh_shape: expected a product of 4, the number of ranks", "got (2, 3) = 6"],
        ),
        (
            lambda: DeviceMesh("cpu", [0, 1, 2, 4]),
            ["mesh: expected ranks 0 to 3", "got 0 to 4", "4 ranks"],
        ),
        (
            lambda: DeviceMesh("cpu", [-1, 0]),
            ["mesh: expected ranks 0 to 3", "got -1 to 0"],
        ),
    ],
    ids=["too small", "too large", "rank beyond the world", "negative rank"],
)
def test_a_mesh_that_does_not_fit_the_world_is_refused(
    make: Callable[[], object], parts: list[str]
) -> None:
    with pytest.raises(RankError) as caught:
        simulate(make, 4)
    cause = caught.value.__cause__
    assert isinstance(cause, MeshError) and isinstance(cause, ValueError)
    for part in [*parts, f"[rank {caught.value.rank} of 4]"]:
        assert part in str(cause) and part in str(caught.value)


def test_flatten_does_not_take_a_name_that_stands_for_something_else() -> None:
    def check(mesh: DeviceMesh) -> None:
        with refused("flatten(name): 'tp' already stands for the ranks", "got the ranks"):
            mesh["dp", "cp"].flatten(name="tp")
        mesh["dp", "cp"].flatten(name="novel")
        mesh["dp", "cp"].flatten(name="novel")  # the same again is fine
        with refused("flatten(name): 'novel' already stands for the ranks", "choose another"):
            mesh["cp", "tp"].flatten(name="novel")
        with refused("flatten(name): 'novel' already stands for the ranks", "choose another"):
            mesh.flatten("cp", "tp", name="novel")

    on_eight(check)
    check(abstract_cube())


def test_the_examples_in_the_docstrings_are_true() -> None:
    def run(mesh: DeviceMesh) -> doctest.TestResults | None:
        return doctest.testmod(shardwise.core.mesh) if mesh.get_rank() == 0 else None

    result = on_eight(run)[0]
    assert result is not None and result.attempted >= 3 and result.failed == 0


def test_a_string_of_names_is_refused_rather_than_taken_apart():
    with pytest.raises(MeshError, match=r"mesh_dim_names: expected a tuple .* got 'dp'"):
        DeviceMesh.abstract((2, 2), "dp")


def test_an_abstract_mesh_has_no_groups_even_where_there_are_ranks():
    mesh = DeviceMesh.abstract((2,), ("tp",))
    for ask in (mesh.get_group, mesh.get_all_groups, mesh.to_torch):
        with pytest.raises(MeshError, match="is abstract, it has no ranks behind it"):
            ask()


# ---- names of axes


def test_axes_named_as_by_distributed_shampoo_work_with_every_kind_of_parallelism() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (2, 2), ("0_replicate", "0_shard"))
        x = sw.distribute_tensor(torch.arange(8.0), mesh, [Replicate(), Shard(0)])
        assert repr(x.mesh_layout) == "[8@'0_shard']"
        assert x.redistribute(mesh, [Shard(0), Partial()]).sum().item() == 28
        merged = mesh.flatten(name="all of them")
        assert mesh["all of them"] is merged
        linear = torch.nn.Linear(4, 4)
        sw.fsdp.fully_shard(linear, mesh=mesh)
        linear(torch.ones(2, 4)).sum().backward()
        assert linear.weight.grad is not None
        assert linear.weight.grad.placements == (Replicate(), Shard(0))

    simulate(run, 4)
