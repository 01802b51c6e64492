"""Every ordered pair of layouts on small meshes: values, gradients, bytes. For `make sweep`."""

from __future__ import annotations

import pytest
import torch
from support.redistributions import (
    BYTES_ONLY,
    Pair,
    check_everywhere,
    moved,
    numbered,
    pairs,
    places,
)

import shardwise as sw
from shardwise import DeviceMesh

MESHES = [(4,), (2, 2), (2, 3), (2, 4), (2, 2, 2)]
SHAPES = [(8,), (5,), (4, 6), (5, 3), (2, 4, 6), (3, 2, 5)]
AT_ONCE = 500


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return sw.init_device_mesh("cpu", shape, tuple("xyz"[: len(shape)]))


def batches(shape: tuple[int, ...], tensor: tuple[int, ...]) -> list[list[Pair]]:
    size = torch.Size(shape).numel()
    mesh = sw.simulate(lambda: mesh_of(shape), size)[0]
    found = pairs(mesh, tensor)
    return [found[start : start + AT_ONCE] for start in range(0, len(found), AT_ONCE)]


@pytest.mark.parametrize("costs", [None, BYTES_ONLY], ids=["default costs", "bytes only"])
@pytest.mark.parametrize("tensor", SHAPES, ids=str)
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_values(shape, tensor, costs):
    full = numbered(tensor)
    for batch in batches(shape, tensor):
        mesh = batch[0][0].mesh

        def run(batch=batch):
            return [moved(pair, full, costs) for pair in batch]

        results = sw.simulate(run, mesh.size())
        ranks = [mesh.rank_at(place) for place in places(mesh)]
        for number, pair in enumerate(batch):
            check_everywhere(pair, full, [results[rank][number] for rank in ranks])


@pytest.mark.parametrize("tensor", SHAPES, ids=str)
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_gradients(shape, tensor):
    """Of sum(weights * y): the weights, wherever a piece or a contribution of x lies."""
    weights = numbered(tensor)
    for batch in batches(shape, tensor):

        def run(batch=batch):
            for src, dst in batch:
                x = torch.ones(src.local_shape(), dtype=torch.float64, requires_grad=True)
                y = sw.redistribute_local(x, src, dst)
                y.backward(weights[dst.box().slices])
                assert torch.equal(x.grad, weights[src.box().slices]), f"{src} -> {dst}"

        sw.simulate(run, batch[0][0].mesh.size())


@pytest.mark.parametrize("tensor", SHAPES, ids=str)
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_bytes(shape, tensor):
    for batch in batches(shape, tensor):
        for src, dst in batch:
            if not src.partial and not dst.partial:
                plan = sw.plan_redistribute(src, dst, costs=BYTES_ONLY)
                assert plan.bytes_received == plan.lower_bound, plan.explain()
