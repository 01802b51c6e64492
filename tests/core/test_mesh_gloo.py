"""Meshes of real ranks beside torch's own: the same shapes, ranks, places and process groups."""

import datetime
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch.distributed import device_mesh as torch_meshes

import shardwise as sw
from shardwise import DeviceMesh, MeshError, Replicate, Shard

TIMEOUT = datetime.timedelta(seconds=77)


def newest_trainer(api: Any) -> dict[str, Any]:
    """One mesh of all ranks, unflattened for each purpose."""
    world = api.init_device_mesh("cpu", (4,), mesh_dim_names=("world",))

    def cut(names: tuple[str, ...], sizes: tuple[int, ...]) -> Any:
        fake = {name: "fake" for name, size in zip(names, sizes, strict=True) if size == 1}
        return world._unflatten(0, sizes, names, backend_override=fake)

    data = cut(("pp", "batch", "cp", "tp"), (1, 2, 1, 2))
    loss = data["batch", "cp"]._flatten("loss_mesh")
    dense = cut(("pp", "dp_replicate", "fsdp", "tp"), (1, 1, 2, 2))
    sparse = cut(("pp", "dp_replicate", "efsdp", "ep", "etp"), (1, 1, 1, 4, 1))
    return {
        "world": world,
        "data": data,
        "dense": dense,
        "sparse": sparse,
        "loss": loss,
        "loss again": data["batch", "cp"]._flatten("loss_mesh"),
        "loss by name": world["loss_mesh"],
        "fsdp": dense["fsdp"],
        "tp": dense["tp"],
        "ep": sparse["ep"],
        "efsdp": sparse["efsdp"],
        "hybrid": dense["dp_replicate", "fsdp"],
        "fsdp and tp": api.DeviceMesh._concatenate([dense["fsdp"], dense["tp"]]),
        "efsdp and ep": api.DeviceMesh._concatenate([sparse["efsdp"], sparse["ep"]]),
        "batch and tp": api.DeviceMesh._concatenate([data["batch"], dense["tp"]]),
    }


def older_trainer(api: Any) -> dict[str, Any]:
    """One mesh with all axes, some of which are flattened."""
    names = "pp", "dp_replicate", "dp_shard", "cp", "tp"
    world = api.init_device_mesh("cpu", (1, 2, 1, 2, 1), mesh_dim_names=names)
    return {
        "world": world,
        "dp": world["dp_replicate", "dp_shard"]._flatten(mesh_dim_name="dp"),
        "dp_shard_cp": world["dp_shard", "cp"]._flatten(mesh_dim_name="dp_shard_cp"),
        "dp_cp": world["dp_replicate", "dp_shard", "cp"]._flatten(mesh_dim_name="dp_cp"),
        "joined": world["dp_shard", "cp"]._flatten(),
        "hybrid": world["dp_replicate", "dp_shard_cp"],
        "list": world[["dp_replicate", "tp"]],
        "itself": world["dp_cp"]._flatten("dp_cp"),
        "named": world[names],
    }


def by_hand(api: Any) -> dict[str, Any]:
    grid = api.DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("a", "b"))
    plain = api.DeviceMesh("cpu", torch.arange(4).reshape(2, 2))
    return {
        "grid": grid,
        "a": grid["a"],
        "b": grid["b"],
        "plain": plain,
        "finer": grid._unflatten("b", (2, 1), ("c", "d")),
        "group": api.DeviceMesh.from_group(dist.group.WORLD, "cpu"),
    }


def overrides(api: Any) -> dict[str, Any]:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = TIMEOUT
    make = api.init_device_mesh
    return {
        "name": make("cpu", (2, 2), mesh_dim_names=("e", "f"), backend_override={"e": "fake"}),
        "position": make("cpu", (2, 2), mesh_dim_names=("g", "h"), backend_override={1: "fake"}),
        "options": make("cpu", (4,), mesh_dim_names=("i",), backend_override={"i": options}),
        "both": make(
            "cpu", (2, 2), mesh_dim_names=("j", "k"), backend_override={0: ("gloo", options)}
        ),
        "constructor": api.DeviceMesh(
            "cpu", [0, 1, 2, 3], mesh_dim_names=("l",), backend_override=(("fake", None),)
        ),
        "unflatten": make("cpu", (4,), mesh_dim_names=("m",))._unflatten(
            "m", (2, 2), ("n", "o"), backend_override={"o": "fake"}
        ),
        "flatten": make("cpu", (2, 2), mesh_dim_names=("p", "q"))._flatten(
            "pq", backend_override="fake"
        ),
    }


def facts(mesh: Any) -> dict[str, Any]:
    """What a program can ask a mesh of torch."""
    groups = mesh.get_all_groups()
    place = mesh.get_coordinate()
    return {
        "shape": tuple(mesh.shape),
        "ndim": mesh.ndim,
        "names": mesh.mesh_dim_names,
        "device": mesh.device_type,
        "ranks": mesh.mesh.tolist(),
        "dtype": mesh.mesh.dtype,
        "size": mesh.size(),
        "sizes": [mesh.size(axis) for axis in range(mesh.ndim)],
        "rank": mesh.get_rank(),
        "place": place,
        "local": [mesh.get_local_rank(axis) for axis in mesh.mesh_dim_names or range(mesh.ndim)],
        "groups": [tuple(dist.get_process_group_ranks(group)) for group in groups],
        "backends": [dist.get_backend(group) for group in groups],
        "by name": [
            dist.get_process_group_ranks(mesh.get_group(name)) for name in mesh.mesh_dim_names or ()
        ],
        "overridden": [
            dist.get_backend(group) == "gloo" and timeout(group) == TIMEOUT for group in groups
        ],
    }


def beside_torch(build: Callable[[Any], dict[str, Any]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will deprecate flattened names on the root
        theirs = {name: facts(mesh) for name, mesh in build(torch_meshes).items()}
    ours = {name: facts(mesh) for name, mesh in build(sw).items()}
    for name, expected in theirs.items():
        assert ours[name] == expected, (name, ours[name], expected)


@pytest.mark.parametrize("build", [newest_trainer, older_trainer, by_hand, overrides])
def test_a_mesh_is_what_torchs_mesh_is(workers4: sw.Workers, build: Any) -> None:
    workers4.run(beside_torch, build)


def groups_of_one_axis() -> None:
    """An override is of one axis; other axes of the same ranks have groups as ever."""
    world = sw.init_device_mesh("cpu", (4,), ("world",))
    data = world._unflatten(0, (2, 2), ("batch", "tp"), backend_override={"batch": "fake"})
    dense = world._unflatten(0, (2, 2), ("fsdp", "tp"))
    assert dist.get_backend(data.get_group("batch")) == "fake"
    assert dist.get_backend(dense.get_group("fsdp")) == "gloo"
    assert data.get_group("batch") is data["batch"].get_group()
    assert data.get_group("tp") is dense.get_group("tp")
    # the collectives of shardwise never run on a fake group
    for mesh in (data["batch"], dense["fsdp"]):
        x = sw.distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        assert x.full_tensor().tolist() == [0, 1, 2, 3]
        assert x.redistribute(placements=[Replicate()]).sum().item() == 6
    options = dist.ProcessGroupGloo._Options()
    options._timeout = TIMEOUT
    slow = sw.init_device_mesh("cpu", (2, 2), ("r", "s"), backend_override={"s": options})
    assert sw.communicator(slow, "s").all_reduce(torch.ones(1)).item() == 2
    assert timeout(slow.get_group("s")) == options._timeout != timeout(slow.get_group("r"))
    with pytest.raises(MeshError, match=r"expected one of undefined, gloo, .* got 'glue'"):
        sw.init_device_mesh("cpu", (4,), ("t",), backend_override={"t": "glue"})
    again = sw.init_device_mesh("cpu", (2, 2), ("r", "s"))  # without an override, as ever
    assert again is slow and timeout(again.get_group("s")) == timeout(again.get_group("r"))


def a_fake_group_of_torch() -> None:
    """Torch's mesh may have fake groups; the collectives of shardwise do not run on them either."""
    world = torch_meshes.init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
    theirs = world._unflatten(0, (2, 2), ("u", "v"), backend_override={"u": "fake"})
    group = theirs.get_group("u")
    for mesh in (DeviceMesh.from_torch(theirs["u"]), DeviceMesh.from_group(group, "cpu")):
        x = sw.distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        assert x.full_tensor().tolist() == [0, 1, 2, 3]


def test_a_fake_group_of_torch_carries_nothing_here(workers4: sw.Workers) -> None:
    workers4.run(a_fake_group_of_torch)


def timeout(group: Any) -> datetime.timedelta:
    found: datetime.timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return found


def test_an_override_decides_for_its_own_axis_only(workers4: sw.Workers) -> None:
    workers4.run(groups_of_one_axis)


def flattened_groups() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 1, 2), ("dp", "cp", "tp"))
    flat = mesh["dp", "cp"]._flatten("dp_cp")
    assert mesh.get_group("dp_cp") is flat.get_group() is mesh["tp"].get_group("dp_cp")
    assert mesh.get_local_rank("dp_cp") == mesh.get_local_rank("dp")
    with pytest.raises(KeyError, match="or the flattened dp_cp, got 'pp'"):
        mesh.get_group("pp")


def test_a_flattened_name_has_a_group_and_a_place(workers4: sw.Workers) -> None:
    workers4.run(flattened_groups)


def unpickled_meshes(mesh: DeviceMesh) -> None:
    assert mesh is sw.init_device_mesh("cpu", (4,), ("world",))


def test_a_mesh_that_comes_in_a_pickle_is_the_mesh_of_the_ranks(workers4: sw.Workers) -> None:
    mesh = workers4.run(make_world)[0]
    workers4.run(unpickled_meshes, mesh)


def make_world() -> DeviceMesh:
    return sw.init_device_mesh("cpu", (4,), ("world",))
