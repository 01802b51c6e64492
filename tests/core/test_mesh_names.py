"""Torch's names on a mesh: `with mesh:`, loops, private methods that other packages call."""

from enum import Enum
from typing import Any

import pytest
import torch
from support.refusals import refused
from torch import nn

import shardwise as sw
from shardwise import (
    DeviceMesh,
    DTensor,
    MeshError,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
    simulate,
)
from shardwise.parallel import ColwiseParallel, parallelize_module

MESH = DeviceMesh.abstract((2, 3), ("dp", "tp"))


# ---- with mesh


FACTORIES: dict[str, Any] = {
    "empty": lambda: sw.empty(4, 4),
    "zeros": lambda: sw.zeros(4, placements=[Shard(0)]),
    "ones": lambda: sw.ones((4,)),
    "full": lambda: sw.full((4,), 2.0),
    "rand": lambda: sw.rand(4),
    "randn": lambda: sw.randn(4),
    "arange": lambda: sw.arange(4),
    "eye": lambda: sw.eye(4),
    "distribute_tensor": lambda: distribute_tensor(torch.ones(4), placements=[Shard(0)]),
    "from_local": lambda: DTensor.from_local(torch.ones(2), placements=[Shard(0)]),
    "distribute_module": lambda: distribute_module(nn.Linear(2, 2)).weight,
    "parallelize_module": lambda: (
        parallelize_module(nn.Linear(2, 2), parallelize_plan=ColwiseParallel()).weight
    ),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_a_function_without_a_mesh_takes_that_of_the_with_statement(name: str) -> None:
    def run() -> None:
        make = FACTORIES[name]
        with pytest.raises(MeshError, match="device_mesh: expected a DeviceMesh, or a call within"):
            make()
        mesh = init_device_mesh("cpu", (2,), ("tp",))
        with mesh as entered:
            assert entered is mesh
            assert make().device_mesh is mesh
            other = DeviceMesh("cpu", [1, 0], mesh_dim_names=("tp",))
            with other:
                assert make().device_mesh is other
            assert make().device_mesh is mesh
        with pytest.raises(MeshError), other, mesh:
            raise MeshError("an error leaves both")
        with pytest.raises(MeshError, match="within `with mesh:`"):
            make()

    simulate(run, 2)


def test_a_mesh_that_is_given_goes_before_that_of_the_with_statement() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (2,), ("tp",))
        other = DeviceMesh("cpu", [1, 0])
        with mesh:
            assert sw.zeros(4, device_mesh=other).device_mesh is other
            x = distribute_tensor(torch.ones(4), other, [Shard(0)])
            assert x.redistribute(placements=[Replicate()]).device_mesh is other
            assert (x + 1).device_mesh is other

    simulate(run, 2)


# ---- loops


def test_a_mesh_is_no_sequence_and_says_what_to_loop_over() -> None:
    for use in (
        lambda: list(MESH),
        lambda: "dp" in MESH,
        lambda: MESH[0],
        lambda: MESH[:1],
        lambda: MESH[0, "dp"],
        lambda: MESH[None],
    ):
        with pytest.raises(TypeError) as caught:
            use()
        assert isinstance(caught.value, MeshError)
        assert "mesh.mesh_dim_names" in str(caught.value)
    with pytest.raises(TypeError):
        len(MESH)  # type: ignore[arg-type]
    assert MESH
    assert [MESH[name].size() for name in MESH.mesh_dim_names or ()] == [2, 3]


# ---- names of axes


def test_a_list_of_names_works_as_a_tuple() -> None:
    assert MESH[["dp", "tp"]] is MESH and MESH[["tp"]] is MESH["tp"]


class Axes(str, Enum):  # noqa: UP042 - its str() is not the name
    DP = "dp"
    TP = "tp"


def test_names_may_be_members_of_an_enum_of_texts() -> None:
    mesh = DeviceMesh.abstract((2, 3), (Axes.DP, Axes.TP))
    assert mesh is MESH and [type(name) for name in mesh.mesh_dim_names or ()] == [str, str]
    assert mesh[Axes.TP] is MESH["tp"] and mesh.size(Axes.TP) == 3


def test_an_unknown_name_is_a_key_error_with_a_readable_message() -> None:
    for use in (lambda: MESH["pp"], lambda: MESH["dp", "pp"], lambda: MESH.axis("pp")):
        with pytest.raises(KeyError) as caught:
            use()
        assert isinstance(caught.value, MeshError)
        assert str(caught.value).startswith("axis: expected one of (dp=2, tp=3)")


# ---- private names that other packages call


def test_the_private_names_of_torch_answer() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        assert mesh["tp"]._get_root_mesh() is mesh and mesh._get_root_mesh() is mesh
        assert mesh._get_mesh_dim_by_name("tp") == 1
        assert mesh._is_current_rank_part_of_mesh()
        assert (mesh._sym_get_coordinate(0), mesh._sym_get_coordinate(1)) == mesh.get_coordinate()
        rows, columns = mesh._get_all_submeshes("tp"), mesh._get_all_submeshes("dp")
        assert [each.mesh.tolist() for each in rows] == [[0, 1], [2, 3]]
        assert [each.mesh.tolist() for each in columns] == [[0, 2], [1, 3]]
        assert mesh["tp"] in rows and all(each.mesh_dim_names == ("tp",) for each in rows)
        only = DeviceMesh("cpu", [0, 1])
        assert only._is_current_rank_part_of_mesh() == (mesh.get_rank() < 2)

    simulate(run, 4)


# ---- backends


def test_overrides_of_backends_are_accepted_in_all_forms_of_torch() -> None:
    options = torch.distributed.ProcessGroupGloo._Options()

    def run() -> None:
        for given in ({"tp": "gloo"}, {1: "gloo"}, {"tp": options}, {0: ("gloo", options)}, {}):
            before = dict(given)
            mesh = init_device_mesh("cpu", (1, 2), ("dp", "tp"), backend_override=given)
            assert given == before  # torch empties it
            assert mesh["tp"]._flatten("x", backend_override="gloo").size() == 2
            mesh._unflatten("tp", (1, 2), ("a", "b"), backend_override={"b": options, 0: "gloo"})
        DeviceMesh("cpu", [0, 1], backend_override=(("gloo", None),))
        DeviceMesh("cpu", [0, 1], backend_override=((None, None),))
        DeviceMesh("cpu", [0, 1], backend_override={0: "gloo"})

    simulate(run, 2)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ({"pp": "gloo"}, ["expected axes among ('dp', 'tp') or 0 to 1, got 'pp'"]),
        ({2: "gloo"}, ["expected axes among ('dp', 'tp') or 0 to 1, got 2"]),
        ({-1: "gloo"}, ["or 0 to 1, got -1"]),
        ({"dp": "gloo", 0: "gloo"}, ["expected each axis once, got axis 0 and its name"]),
        ({"dp": 3}, ["backend_override['dp']: expected a backend such as 'gloo'", "got 3"]),
        ({"dp": None}, ["backend_override['dp']: expected a backend", "got None"]),
        ({"dp": ""}, ["expected a backend", "got ''"]),
        ({"dp": ("gloo", 3)}, ["expected a backend", "got ('gloo', 3)"]),
        ({"dp": ("gloo", None, 1)}, ["expected a backend", "got ('gloo', None, 1)"]),
        ("gloo", ["backend_override: expected a dict from axes to backends", "got 'gloo'"]),
        ((("gloo", None),), ["or a tuple of 2, one per axis; got (('gloo', None),)"]),
    ],
)
def test_overrides_of_what_is_not_there_are_refused(override: Any, parts: list[str]) -> None:
    with refused(*parts):
        init_device_mesh("cpu", (1, 1), ("dp", "tp"), backend_override=override)
    mesh = init_device_mesh("cpu", (1,), ("world",))
    with refused(*parts):
        mesh._unflatten(0, (1, 1), ("dp", "tp"), backend_override=override)
