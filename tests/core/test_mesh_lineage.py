"""Which meshes belong together follows from ranks: concatenate, flattened names, later cuts."""

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.refusals import refused

from shardwise import DeviceMesh, MeshError, init_device_mesh, simulate
from shardwise.comm.offline import AloneWorld
from shardwise.core import world
from shardwise.core.rank_grid import form_a_grid, grid_around, strides_of


@pytest.fixture(autouse=True)
def a_world_of_its_own() -> Iterator[None]:
    """What one test cuts and flattens is unknown to the next."""
    with world.use(AloneWorld()):
        yield


# ---- how an axis steps through a list of ranks


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ([5], ()),
        ([0, 1, 2, 3], ((4, 1),)),
        ([3, 5, 7], ((3, 2),)),
        ([0, 1, 4, 5], ((2, 4), (2, 1))),
        ([0, 4, 1, 5], ((2, 1), (2, 4))),
        ([2, 3, 6, 7, 18, 19, 22, 23], ((2, 16), (2, 4), (2, 1))),
        ([0, 1, 3], None),
        ([0, 2, 3, 4], None),
        ([1, 0], None),
        ([0, 1, 4, 6], None),
    ],
)
def test_the_steps_of_an_axis_are_found_from_its_positions(positions: Any, expected: Any) -> None:
    assert strides_of(np.array(positions)) == expected


@settings(max_examples=100)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.randoms())
def test_any_axes_of_a_grid_give_their_ranks_back(sizes: list[int], random: Any) -> None:
    grid = np.arange(np.prod(sizes)).reshape(sizes)
    chosen = random.sample(range(len(sizes)), random.randint(1, len(sizes)))
    place = [random.randrange(size) for size in sizes]
    index = tuple(slice(None) if axis in chosen else place[axis] for axis in range(len(sizes)))
    ascending = sorted(chosen)
    block = grid[index].transpose([ascending.index(axis) for axis in chosen])
    axes = [
        strides_of(grid[tuple(slice(None) if i == axis else place[i] for i in range(len(sizes)))])
        for axis in chosen
    ]
    assert None not in axes and form_a_grid(axes, grid.size)
    assert (grid_around(int(grid[tuple(place)]), axes) == block).all()
    merged = strides_of(block.reshape(-1))
    assert merged is not None
    assert (grid_around(int(grid[tuple(place)]), [merged]) == block.reshape(-1)).all()


@pytest.mark.parametrize(
    ("axes", "count", "expected"),
    [
        ([((2, 4),), ((4, 1),)], 8, True),
        ([((2, 4),), ((2, 1),)], 8, True),
        ([((2, 2),), ((4, 1),)], 8, False),  # 0, 2 and 0, 1, 2, 3 overlap
        ([((2, 6),), ((4, 1),)], 12, False),  # on rank 0 they do not overlap, on rank 4 they do
        ([((3, 4),), ((2, 2),)], 12, True),
        ([((2, 4),)], 12, False),
        ([(), ((2, 1),), ()], 2, True),
    ],
)
def test_axes_form_a_grid_if_they_do_on_every_rank(axes: Any, count: int, expected: bool) -> None:
    assert form_a_grid(axes, count) is expected


# ---- concatenate


def test_concatenate_gives_the_mesh_with_all_axes() -> None:
    def check() -> list[Any]:
        mesh = init_device_mesh("cpu", (2, 2, 2), ("pp", "dp", "tp"))
        assert DeviceMesh._concatenate([mesh["dp"], mesh["tp"]]) is mesh["dp", "tp"]
        assert DeviceMesh.concatenate([mesh["pp", "dp"], mesh["tp"]]) is mesh
        assert DeviceMesh.concatenate([mesh["tp"]]) is mesh["tp"]
        assert DeviceMesh.concatenate([mesh["tp"], mesh["dp"]]) is mesh["tp", "dp"]
        assert DeviceMesh.concatenate([mesh["dp"], mesh["tp"]]).root is mesh
        return DeviceMesh.concatenate([mesh["tp"], mesh["pp"]]).mesh.tolist()

    found = simulate(check, 8)
    assert found[0] == found[5] == [[0, 4], [1, 5]] and found[2] == found[7] == [[2, 6], [3, 7]]


def test_axes_of_different_cuts_of_one_mesh_are_put_together() -> None:
    def check() -> tuple[Any, ...]:
        whole = init_device_mesh("cpu", (8,), ("world",))
        dense = whole._unflatten(0, (4, 2), ("fsdp", "tp"))
        sparse = whole._unflatten(0, (2, 2, 2), ("efsdp", "ep", "etp"))
        both = DeviceMesh._concatenate([sparse["efsdp"], dense["tp"]])
        assert both.mesh_dim_names == ("efsdp", "tp") and both.root is whole
        assert DeviceMesh._concatenate([sparse["efsdp", "ep"], dense["tp"]]).shape == (2, 2, 2)
        with refused("no mesh has both", "their ranks overlap"):
            DeviceMesh._concatenate([sparse["ep"], dense["fsdp"]])
        return tuple(both.mesh.flatten().tolist())

    assert simulate(check, 8) == [(0, 1, 4, 5), (0, 1, 4, 5), (2, 3, 6, 7), (2, 3, 6, 7)] * 2


def test_axes_of_size_one_go_with_everything() -> None:
    def check() -> None:
        whole = init_device_mesh("cpu", (4,), ("world",))
        one = whole._unflatten(0, (1, 4, 1), ("a", "b", "c"))
        two = whole._unflatten(0, (2, 1, 2), ("d", "e", "f"))
        assert DeviceMesh.concatenate([one["a"], one["c"]]).shape == (1, 1)
        assert DeviceMesh.concatenate([one["a"], two["f"], one["c"]]).shape == (1, 2, 1)
        assert DeviceMesh.concatenate([two["e"], one["b"]]).mesh.tolist() == [[0, 1, 2, 3]]
        assert one["a"].flatten().get_local_rank() == 0
        assert one["a", "b"]._flatten("ab").size() == 4 and one["a", "c"]._flatten("ac").size() == 1

    simulate(check, 4)


@pytest.mark.parametrize(
    ("meshes", "parts"),
    [
        ([], ["meshes: expected a list of meshes, got []"]),
        ("dp", ["meshes: expected a list of meshes, got 'dp'"]),
        ([DeviceMesh.abstract((2, 2))], ["expected meshes with mesh_dim_names"]),
        ([DeviceMesh.abstract((2,), ("a",))] * 2, ["no mesh has both", "overlap"]),
    ],
)
def test_what_cannot_be_concatenated_is_refused(meshes: Any, parts: list[str]) -> None:
    with refused(*parts):
        DeviceMesh.concatenate(meshes)


def test_meshes_that_were_not_cut_from_one_are_refused() -> None:
    def check() -> None:
        one = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"))
        other = DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("c", "d"))
        with refused("no mesh has both", "expected parts of one mesh", "different ranks"):
            DeviceMesh.concatenate([one["a"], other["d"]])

    simulate(check, 4)


def test_two_grids_with_the_same_axes_here_and_others_elsewhere_are_told_apart_or_refused() -> None:
    """Rank 0 has the same a and b in both; which rank is across from it follows from the cuts."""

    def check() -> None:
        one = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"))
        other = DeviceMesh("cpu", [[0, 1], [2, 4]], mesh_dim_names=("a", "b"))
        if one.get_rank() == 0:
            a, b = one["a"], one["b"]
            assert DeviceMesh.concatenate([a, b]) is one
            assert other["a"] is a
            assert DeviceMesh.concatenate([a, b]) is one  # b was not cut from the other
            assert other["b"] is b
            with refused("several meshes have both", "with different ranks"):
                DeviceMesh.concatenate([a, b])

    simulate(check, 5)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[list[int], list[tuple[tuple[int, ...], int]]]:
    """Ranks in any order, and two ways to divide them, each with an axis to take."""
    size = draw(st.sampled_from([4, 6, 8, 12]))
    ranks = draw(st.one_of(st.just(list(range(size))), st.permutations(range(size))))
    ways = []
    for _ in range(2):
        sizes: list[int] = []
        rest = size
        while rest > 1:
            part = draw(st.sampled_from([n for n in range(2, rest + 1) if rest % n == 0]))
            sizes.append(part)
            rest //= part
        ways.append((tuple(sizes), draw(st.integers(0, len(sizes) - 1))))
    return ranks, ways


@settings(max_examples=80, deadline=None)
@given(cuts())
def test_all_ranks_find_the_same_joint_grids_or_none_does(case: Any) -> None:
    ranks, ways = case

    def joint() -> Any:
        whole = DeviceMesh("cpu", ranks, mesh_dim_names=("world",))
        parts = []
        for letter, (sizes, axis) in zip("ab", ways, strict=True):
            names = [f"{letter}{index}" for index in range(len(sizes))]
            parts.append(whole.unflatten(0, sizes, names)[names[axis]])
        try:
            found = DeviceMesh.concatenate(parts)
        except MeshError:
            return None
        assert found.along([0], found.get_coordinate()) is parts[0]
        assert found.along([1], found.get_coordinate()) is parts[1]
        return found

    found = simulate(joint, len(ranks))
    assert all(each is None for each in found) or None not in found
    for rank, each in enumerate(found):
        assert each is None or each.coordinate_of(rank) is not None
    for one, other in combinations(set(found) - {None}, 2):
        assert not {*one.mesh.flatten().tolist()} & {*other.mesh.flatten().tolist()}


# ---- flattened names


def test_a_name_that_was_flattened_below_an_unflattened_mesh_is_found_from_every_source() -> None:
    def check() -> None:
        whole = init_device_mesh("cpu", (8,), ("world",))
        data = whole._unflatten(0, (1, 2, 2, 2), ("pp", "batch", "cp", "tp"))
        flat = data["batch", "cp"]._flatten("loss")
        assert whole["loss"] is data["loss"] is data["batch", "cp"]["loss"] is flat
        assert data["batch", "cp"]._flatten("loss") is flat  # the same again
        assert data["loss", "tp"].mesh.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert whole.get_local_rank("loss") == data.get_local_rank("loss") == flat.get_local_rank()
        dense = whole._unflatten(0, (4, 2), ("fsdp", "tp"))
        assert dense["loss"] is flat
        assert dense["fsdp"]._flatten("loss") is flat  # another way to the same ranks
        with refused("flatten(name): 'loss' already stands for the ranks", "choose another name"):
            data["cp", "tp"]._flatten("loss")
        assert data["tp"]._flatten("tp") is data["tp"] is data["tp"]._flatten()

    simulate(check, 8)


def test_a_mesh_that_is_made_again_may_give_its_flattened_names_to_other_axes() -> None:
    def check() -> None:
        for sizes, expected in (((4, 1), [0, 1, 2, 3]), ((2, 2), [0, 2])):
            whole = init_device_mesh("cpu", (4,), ("world",))
            data = whole._unflatten(0, sizes, ("batch", "tp"))
            flat = data["batch"]._flatten("loss")
            assert whole["loss"] is flat
            if whole.get_rank() == 0:
                assert flat.mesh.tolist() == expected

    simulate(check, 4)


def test_a_later_cut_hides_no_flattened_name() -> None:
    mesh = DeviceMesh.abstract((2, 2, 2), ("dp", "cp", "tp"))
    flat = mesh["dp", "cp"].flatten(name="dp_cp")
    other = DeviceMesh.abstract((2, 1, 2, 2), ("dp", "x", "cp", "tp"))
    assert other["dp", "cp"] is mesh["dp", "cp"]
    plane = other["dp", "cp", "tp"]
    assert plane is mesh and mesh["dp_cp"] is flat


def test_a_cut_that_leads_back_keeps_no_mesh_alive() -> None:
    import weakref

    mesh = DeviceMesh.abstract((3, 5), ("dp", "tp"))
    flat = mesh.flatten(name="all")
    assert flat.unflatten("all", (3, 5), ("dp", "tp")) is mesh
    both = DeviceMesh.concatenate([mesh["tp"], mesh["dp"]])
    gone = [weakref.ref(each) for each in (mesh, flat, both)]
    del mesh, flat, both
    assert [each() for each in gone] == [None] * 3


def test_a_name_flattened_onto_itself_is_not_recorded() -> None:
    def check() -> None:
        whole = init_device_mesh("cpu", (4,), ("world",))
        for sizes in ((2, 2), (1, 4)):
            cut = whole._unflatten(0, sizes, ("dp", "tp"))
            assert cut["tp"]._flatten() is cut["tp"]
        with pytest.raises(KeyError):
            whole["tp"]

    simulate(check, 4)


def test_a_mesh_that_was_made_may_be_aborted_though_it_was_cut_too() -> None:
    def check() -> None:
        mesh = init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        other = init_device_mesh("cpu", (4,), ("world",))
        assert other._unflatten(0, (2, 2), ("dp", "tp")) is mesh
        mesh.abort()
        assert mesh in world.current().aborted and other not in world.current().aborted

    simulate(check, 4)


def test_an_aborted_mesh_leaves_others_of_the_same_ranks_once_they_are_cut_again() -> None:
    def check() -> None:
        one = init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        other = init_device_mesh("cpu", (2, 1, 2), ("x", "y", "tp"))
        tp = one["tp"]
        assert other["tp"] is tp
        one.abort()
        aborted = world.current().aborted
        assert tp in aborted and other not in aborted
        assert one["tp"] in aborted
        assert other["tp"] is tp and tp not in aborted

    simulate(check, 4)
