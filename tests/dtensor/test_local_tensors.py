"""Local tensors of every kind: a DTensor is made of them, or refused where it would be made."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.rules import ranks
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import shardwise as sw
from shardwise import DeviceMesh, DTensor, LayoutError, Replicate, Shard, ShardwiseError
from shardwise.sharded import Shard as TensorShard
from shardwise.sharded import ShardMetadata

# ---- classes with operators of their own


def two() -> torch.Tensor:
    return TwoTensor(torch.arange(4.0), torch.arange(4.0) + 1)


def plain(mesh: DeviceMesh) -> DTensor:
    return sw.distribute_tensor(torch.arange(4.0), mesh, [Replicate()], src_data_rank=None)


def assign(name: str) -> Callable[[DeviceMesh, torch.Tensor], None]:
    return lambda mesh, x: setattr(plain(mesh).requires_grad_(), name, x)


def shard_module(mesh: DeviceMesh, x: torch.Tensor) -> None:
    linear = nn.Linear(4, 4, bias=False)
    linear.weight = nn.Parameter(TwoTensor(torch.ones(4, 4), torch.ones(4, 4)))
    sw.parallel.shard_module(linear, mesh, {"weight": [Shard(0)]})


WAYS: dict[str, Callable[[DeviceMesh, torch.Tensor], Any]] = {
    "from_local": lambda mesh, x: DTensor.from_local(x, mesh, [Shard(0)]),
    "from_local, whole": lambda mesh, x: DTensor.from_local(x, mesh, [Replicate()]),
    "from_local, shape": lambda mesh, x: DTensor.from_local(x, mesh, [Shard(0)], shape=(8,)),
    "distribute_tensor": lambda mesh, x: sw.distribute_tensor(x, mesh, [Shard(0)]),
    "distribute_tensor, own": lambda mesh, x: sw.distribute_tensor(
        x, mesh, [Shard(0)], src_data_rank=None
    ),
    "local_map": lambda mesh, x: sw.local_map(lambda _: x, out_placements=[Replicate()])(
        plain(mesh)
    ),
    "x + other": lambda mesh, x: plain(mesh) + x,
    "other + x": lambda mesh, x: x + plain(mesh),
    "cat": lambda mesh, x: torch.cat([plain(mesh), x]),
    "where": lambda mesh, x: torch.where(plain(mesh) > 1, plain(mesh), other=x),
    "x.grad =": assign("grad"),
    "x.data =": assign("data"),
    "shard_module": shard_module,
    "sharded.Shard": lambda mesh, x: TensorShard(x, ShardMetadata([0], [4], "rank:0/cpu")),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [two, lambda: nn.Parameter(two())], ids=["tensor", "parameter"])
def test_a_class_with_operators_of_its_own_is_refused_where_a_dtensor_would_be_made(
    kind: Callable[[], torch.Tensor], way: str
) -> None:
    def run(mesh: DeviceMesh) -> None:
        with pytest.raises(ShardwiseError, match=r"got TwoTensor, which has operators of its own"):
            WAYS[way](mesh, kind())

    ranks(run)


def test_a_refused_class_does_not_use_the_plan_of_a_plain_tensor() -> None:
    def run(mesh: DeviceMesh) -> None:
        x = plain(mesh)
        for _ in range(2):
            assert torch.equal((x * torch.ones(4)).full_tensor(), torch.arange(4.0))
            with pytest.raises(LayoutError, match="mul: expected a plain tensor, got TwoTensor"):
                x * two()

    ranks(run)


class Named(torch.Tensor):
    """A class without operators of its own: its memory is that of a plain tensor."""


class Special(nn.Parameter):
    pass


@pytest.mark.parametrize("kind", [Named, Special, nn.Parameter, nn.Buffer])
def test_other_classes_become_dtensors(kind: Any) -> None:
    def run(mesh: DeviceMesh) -> None:
        values = torch.arange(4.0)
        x = values.as_subclass(kind) if kind is Named else kind(values.clone())
        made = DTensor.from_local(x, mesh, [Shard(0)])
        assert type(made) is DTensor and made.shape == (8,)
        assert torch.equal(made.detach().full_tensor(), torch.cat([values, values]))
        assert type(made.to_local()) is torch.Tensor and type(x) is not DTensor
        assert torch.equal(sw.distribute_tensor(x, mesh, [Shard(0)]).detach().full_tensor(), values)

    ranks(run)


@pytest.mark.parametrize("kind", [nn.UninitializedParameter, nn.UninitializedBuffer])
def test_a_tensor_without_a_shape_is_refused(kind: Any) -> None:
    def run(mesh: DeviceMesh) -> None:
        for way in ("from_local", "from_local, shape", "distribute_tensor"):
            with pytest.raises(LayoutError, match=r"got Uninitialized\w+; materialize"):
                WAYS[way](mesh, kind())

    ranks(run)


# ---- tensors without data


@pytest.mark.parametrize("sizes", [(2, 2), (3, 2), (1, 0)])
def test_shards_on_the_meta_device_have_a_global_shape(sizes: tuple[int, int]) -> None:
    def run(mesh: DeviceMesh) -> None:
        local = torch.empty(sizes[mesh.get_rank()], 3, device="meta")
        x = DTensor.from_local(local, mesh, [Shard(0)], run_check=True)
        assert x.is_meta and x.shape == (sum(sizes), 3)
        assert (x * 2).to_local().shape == local.shape
        assert x.full_tensor().shape == (sum(sizes), 3)

    ranks(run)


def test_shards_on_the_meta_device_must_fit_together() -> None:
    def run(mesh: DeviceMesh) -> None:
        local = torch.empty(1 + 3 * mesh.get_rank(), device="meta")
        with pytest.raises(LayoutError, match="no legal sharding"):
            DTensor.from_local(local, mesh, [Shard(0)])

    ranks(run)


def test_data_on_some_ranks_only_is_refused_by_the_check() -> None:
    def run(mesh: DeviceMesh) -> None:
        local = torch.zeros(2, device="meta" if mesh.get_rank() else "cpu")
        with pytest.raises(LayoutError, match="is_meta on every rank"):
            DTensor.from_local(local, mesh, [Replicate()], run_check=True)

    ranks(run)


# ---- local_map


def test_local_map_refuses_a_dtensor_by_keyword() -> None:
    """It would stay a DTensor in a function of local tensors."""

    def run() -> None:
        x = plain(sw.init_device_mesh("cpu", (2,)))
        mapped = sw.local_map(lambda *given, **named: torch.ones(2), out_placements=[Shard(0)])
        for given in ((), (x,)):
            with pytest.raises(LayoutError, match="got one as b="):
                mapped(*given, b=[x])

    sw.simulate(run, 2)


# ---- local_map with inputs on several meshes


def on_two_meshes(run: Callable[[DeviceMesh], None], names: Any = ("dp", "tp")) -> None:
    sw.simulate(lambda: run(sw.init_device_mesh("cpu", (2, 2), names)), 4)


def test_local_map_takes_inputs_on_a_mesh_and_on_a_part_of_it() -> None:
    """The weight is whole over tp, on a mesh of one axis; the rows are split over dp and tp."""
    rows = torch.arange(16.0).reshape(8, 2)

    def run(mesh: DeviceMesh) -> None:
        x = sw.distribute_tensor(rows, mesh, [Shard(0), Shard(0)])
        weight = sw.distribute_tensor(torch.ones(2), mesh["tp"], [Replicate()]).requires_grad_()
        scaled = sw.local_map(lambda a, b: a * b, out_placements=[Shard(0), Shard(0)])
        y = scaled(x, weight)
        assert y.device_mesh is mesh and torch.equal(y.detach().full_tensor(), rows)
        y.sum().backward()
        # The ranks of one tp group hold one weight; each dp rank has its own.
        dp = mesh.get_local_rank("dp")
        assert torch.equal(weight.grad.full_tensor(), rows[4 * dp : 4 * dp + 4].sum(0))
        swapped = sw.local_map(lambda b, a: a * b, [Shard(0), Shard(0)], device_mesh=mesh)
        assert torch.equal(swapped(weight, x).detach().full_tensor(), rows)

    on_two_meshes(run)


def test_local_map_refuses_a_gradient_that_no_placement_describes() -> None:
    def run(mesh: DeviceMesh) -> None:
        flat = mesh.flatten()
        weight = sw.distribute_tensor(torch.ones(2), flat, [Replicate()])
        x = sw.distribute_tensor(torch.ones(4, 2), mesh, [Replicate(), Shard(0)])
        scaled = sw.local_map(lambda a, b: a * b, out_placements=[Replicate(), Shard(0)])
        assert scaled(x, weight).shape == (4, 2)  # nothing needs a gradient
        weight.requires_grad_()
        with pytest.raises(
            LayoutError, match=r"input 1 is whole over ranks \[0, 1, 2, 3\].*in_grad"
        ):
            scaled(x, weight)
        told = sw.local_map(
            lambda a, b: a * b,
            out_placements=[Replicate(), Shard(0)],
            in_grad_placements=([Replicate(), Shard(0)], [Replicate()]),
        )
        assert told(x, weight).requires_grad

    on_two_meshes(run)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=str)
def test_local_map_takes_inputs_of_any_two_meshes_without_gradients(placement: Any) -> None:
    def run(mesh: DeviceMesh) -> None:
        for one in (mesh, mesh["dp"], mesh["tp"], mesh.flatten()):
            for other in (mesh, mesh["dp"], mesh["tp"], mesh.flatten()):
                x = sw.zeros(8, device_mesh=one, placements=[placement] * one.ndim)
                y = sw.zeros(8, device_mesh=other, placements=[Replicate()] * other.ndim)
                local = sw.local_map(lambda a, b: a + b[:1], [placement] * one.ndim)
                assert local(x, y).shape == (8,)

    on_two_meshes(run)
