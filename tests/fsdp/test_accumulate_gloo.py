"""sw.accumulate() on real ranks; beside it torch's FSDP2 with `set_requires_gradient_sync`."""

import pytest
import torch
import torch.distributed.fsdp as theirs
from support.fsdp_cases import Net, batch, mean_square
from support.rules import heard
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise import fsdp as ours
from shardwise.parallel import shard_module

PARTS = 3


def made():
    torch.manual_seed(0)
    return Net().double()


def parts(rank=None):
    found = [batch(seed=seed) for seed in range(PARTS)]
    return found if rank is None else [each.chunk(4)[rank] for each in found]


def gradients(model):
    return [
        each.grad.full_tensor() if hasattr(each.grad, "full_tensor") else each.grad
        for each in model.parameters()
    ]


def in_one_process():
    model = made()
    for x in parts():
        mean_square(model, x).backward()
    return gradients(model)


def by_layer(library, mesh):
    model = made()
    for layer in model.layers:
        library.fully_shard(layer, mesh=mesh)
    return library.fully_shard(model, mesh=mesh)


def fully_sharded(shape):
    rank = torch.distributed.get_rank()
    names = ("dp",) if len(shape) == 1 else ("replicate", "shard")
    model = by_layer(ours, sw.init_device_mesh("cpu", shape, mesh_dim_names=names))
    with sw.accumulate():
        for x in parts(rank):
            mean_square(model, x).backward()
    other = by_layer(theirs, init_device_mesh("cpu", shape, mesh_dim_names=names))
    for index, x in enumerate(parts(rank)):
        other.set_requires_gradient_sync(index == PARTS - 1)
        mean_square(other, x).backward()
    return gradients(model), gradients(other)


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_gradients_are_those_of_torchs_fsdp_and_of_one_process(workers4, shape):
    for mine, torchs in workers4.run(fully_sharded, shape):
        for each in (torchs, in_one_process()):
            torch.testing.assert_close(mine, each)


def planned():
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"layers.*.linear.*": {"tp": Shard(0)}, "head.*": {"dp": Shard(0)}}
    model = shard_module(made(), mesh, plan)

    def step():
        with sw.accumulate():
            for x in parts():
                split = sw.distribute_tensor(x, mesh, [Shard(0), Replicate()])
                mean_square(model, split).backward()

    events, _ = heard(mesh, step)
    put_off = [each for each in events if each.cause.operator == "accumulate"]
    return gradients(model), len(put_off)


def test_gradients_of_planned_models_are_those_of_one_process(workers4):
    for mine, count in workers4.run(planned):
        torch.testing.assert_close(mine, in_one_process())
        assert count
