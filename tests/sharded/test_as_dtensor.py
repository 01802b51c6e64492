"""Conversion between shards and layouts: no copies, the same elements, gradients both ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.sharded_operators import (
    all_specs,
    boxes,
    chunks,
    followed,
    gradient,
    layouts,
    odd,
    on_ranks,
    values,
)

import shardwise as sw
import shardwise.sharded as sh
from shardwise import Partial, Replicate, Shard
from shardwise.core import world

X = values(5, 4, grad=False)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_shards_that_are_a_layout_become_the_same_dtensor_and_return(count: int) -> None:
    def run() -> None:
        for name, spec in layouts(count).items():
            tensor = spec.shard(X)
            made = tensor.to_dtensor()
            torch.testing.assert_close(made.full_tensor(), X, msg=name)
            assert made.shape == tensor.shape
            back = sh.from_dtensor(made)
            torch.testing.assert_close(back.full_tensor(), X, msg=name)
            assert back.local_tensor().data_ptr() == made.to_local().data_ptr()

    on_ranks(run, count)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_one_shard_per_rank_shares_its_memory(count: int) -> None:
    def run() -> None:
        for name in ("rows", "columns", "backwards"):
            tensor = layouts(count)[name].shard(X)
            local = tensor.local_tensor()
            assert tensor.to_dtensor().to_local().data_ptr() == local.data_ptr(), name

    on_ranks(run, count)


def test_shards_that_are_no_layout_say_a_spec_that_is() -> None:
    def run() -> None:
        for spec in odd(3).values():
            tensor = spec.shard(X)
            with pytest.raises(sh.ShardedTensorError, match="no layout of a DTensor") as caught:
                tensor.to_dtensor()
            again = followed(str(caught.value), tensor)
            torch.testing.assert_close(again.to_dtensor().full_tensor(), X)

    on_ranks(run, 3)


def test_ranks_in_any_order_are_the_order_of_the_mesh() -> None:
    def run() -> Any:
        made = chunks(1, 2, 0, 1).shard(X).to_dtensor()
        return made.device_mesh.mesh.tolist(), made.placements

    assert on_ranks(run, 3) == [([2, 0, 1], (Shard(1),))] * 3


def test_a_grid_is_a_layout_on_a_mesh_of_two_axes() -> None:
    def run() -> Any:
        made = layouts(4)["grid"].shard(X).to_dtensor()
        return made.device_mesh.mesh.tolist(), made.placements

    assert on_ranks(run, 4) == [([[2, 0], [1, 3]], (Shard(0), Shard(1)))] * 4


def test_shards_lie_on_a_mesh_that_is_given_if_they_can() -> None:
    def run() -> None:
        mesh = sw.DeviceMesh("cpu", [[0, 1], [2, 3]])
        tensor = chunks(0, 0, 1, 2, 3).shard(torch.arange(8.0))
        made = tensor.to_dtensor(mesh)
        assert made.placements == (Shard(0), Shard(0))
        assert made.device_mesh is mesh
        torch.testing.assert_close(made.full_tensor(), torch.arange(8.0))
        backwards = chunks(0, 3, 2, 1, 0).shard(torch.arange(8.0))
        with pytest.raises(sh.ShardedTensorError, match="no layout of a DTensor on "):
            backwards.to_dtensor(mesh)
        with pytest.raises(sh.ShardedTensorError, match="no layout of a DTensor on "):
            tensor.to_dtensor(sw.DeviceMesh("cpu", [1, 0, 3, 2]))

    on_ranks(run, 4)


def test_ranks_that_hold_nothing_or_an_empty_shard_take_part() -> None:
    specs = {
        "no shard": boxes((1, [0, 0], [1, 3]), (0, [1, 0], [1, 3])),
        "empty shards elsewhere": boxes(
            (1, [0, 0], [1, 3]), (0, [1, 0], [1, 3]), (2, [0, 3], [2, 0]), (3, [2, 0], [0, 3])
        ),
        "empty chunks": chunks(0, 3, 1, 0, 2),
    }
    data = values(2, 3)

    def run() -> None:
        for name, spec in specs.items():
            tensor = spec.shard(data)
            made = tensor.to_dtensor()
            torch.testing.assert_close(made.full_tensor(), data, msg=name)
            (made * data).sum().backward()
            torch.testing.assert_close(gradient(tensor), data.detach(), msg=name)

    on_ranks(run, 4)


@pytest.mark.parametrize(
    ("mesh_shape", "placements", "shards"),
    [
        ((4,), [Shard(0)], 1),
        ((4,), [Shard(1)], 1),
        ((2, 2), [Shard(0), Shard(1)], 1),
        ((2, 2), [Shard(1), Shard(0)], 1),
        ((2, 2), [Shard(0), Shard(0)], 1),
        ((1, 4), [Replicate(), Shard(0)], 1),
        ((4, 1), [Shard(1), Partial()], 1),
    ],
    ids=str,
)
def test_a_split_dtensor_becomes_shards_that_share_memory_and_returns(
    mesh_shape: Any, placements: Any, shards: int
) -> None:
    def run() -> None:
        mesh = sw.init_device_mesh("cpu", mesh_shape)
        made = sw.distribute_tensor(X, mesh, [Shard(0), Shard(0)][: mesh.ndim])
        made = made.redistribute(placements=placements)
        tensor = sh.from_dtensor(made)
        assert tensor.local_tensor().data_ptr() == made.to_local().data_ptr()
        torch.testing.assert_close(tensor.full_tensor(), X)
        torch.testing.assert_close(tensor.to_dtensor().full_tensor(), X)
        assert {each.shard_sizes == [0, 0] for each in tensor.metadata().shards_metadata} == {False}

    on_ranks(run, 4)


def test_a_dtensor_that_is_cut_in_pieces_becomes_several_shards() -> None:
    data = values(10, 2)

    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        layout = sw.Layout(mesh, (10, 2), {0: [0]}, cuts={0: ((6, 1), (4, 1))})
        local = torch.cat([part.chunk(2)[mesh.get_rank()] for part in data.detach().split([6, 4])])
        local.requires_grad_()
        made = sw.DTensor.from_local(local, mesh, layout.placements, shape=(10, 2))
        assert made.mesh_layout is layout
        tensor = sh.from_dtensor(made)
        assert len(tensor.local_shards()) == 2
        torch.testing.assert_close(tensor.full_tensor(), data.detach())
        (tensor * data.detach()).backward(torch.ones(10, 2, dtype=torch.float64))
        expected = [part.chunk(2)[mesh.get_rank()] for part in data.detach().split([6, 4])]
        torch.testing.assert_close(local.grad, torch.cat(expected))

    on_ranks(run, 2)


@pytest.mark.parametrize("placement", [Replicate(), Partial()], ids=str)
def test_a_dtensor_that_is_not_split_is_refused(placement: Any) -> None:
    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        made = sw.DTensor.from_local(torch.ones(2, 2), mesh, [placement, Shard(0)], shape=(4, 2))
        with pytest.raises(sh.ShardedTensorError, match="not split over axis dp"):
            sh.from_dtensor(made)
        with pytest.raises(sh.ShardedTensorError, match="tensor: expected a DTensor"):
            sh.from_dtensor(torch.ones(2))  # type: ignore[arg-type]

    on_ranks(run, 4)


def test_the_group_of_the_shards_must_be_the_ranks_of_the_mesh() -> None:
    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        made = sw.distribute_tensor(X, mesh, [Shard(0)])
        assert sh.from_dtensor(made, mesh)._group.ranks == (0, 1)
        with pytest.raises(sh.ShardedTensorError, match="process_group: expected the ranks"):
            sh.from_dtensor(made, sw.DeviceMesh("cpu", [mesh.get_rank()]))

    on_ranks(run, 2)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_gradients_go_through_both_conversions(count: int) -> None:
    data = values(5, 4)
    weights = values(5, 4, seed=1, grad=False)

    def run() -> None:
        for name, spec in layouts(count).items():
            tensor = spec.shard(data)
            back = sh.from_dtensor(tensor.to_dtensor() * weights)
            assert back.requires_grad
            (back.to_dtensor() ** 2).sum().backward()
            expected = 2 * data.detach() * weights**2
            torch.testing.assert_close(gradient(tensor), expected, msg=name)

    on_ranks(run, count)


def test_a_result_has_the_shards_of_what_it_was_made_of() -> None:
    def run() -> None:
        for name, spec in all_specs(3).items():
            tensor = spec.shard(X)
            result = tensor * 2
            assert result.sharding_spec() == spec, name
            assert result.metadata().shards_metadata == tensor.metadata().shards_metadata, name

    on_ranks(run, 3)


def test_metadata_is_each_tensor_s_own() -> None:
    def run() -> None:
        dtensor = chunks(0, 0, 1, 2).shard(X).to_dtensor()
        sh.from_dtensor(dtensor).metadata().shards_metadata[0].placement = None
        sh.from_dtensor(dtensor).metadata().shards_metadata.reverse()
        tensor = sh.from_dtensor(dtensor)
        assert tensor.metadata().shards_metadata[0].placement is not None
        assert (
            tensor.local_shards()[0].metadata
            == tensor.metadata().shards_metadata[world.current().rank]
        )

    on_ranks(run, 3)
