"""Which gradients `fully_shard(dp_mesh_dims=)` sums after the backward."""

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.fsdp import DataParallelMeshDims, fully_shard


class Repeated(nn.Module):
    """Uses its weight after an even number of sign changes."""

    def __init__(self, weight, times):
        super().__init__()
        self.weight, self.times = nn.Parameter(weight), times

    def forward(self, x):
        weight = self.weight
        for _ in range(self.times):
            weight = weight.neg()
        return x * weight


def gradient(times):
    mesh = sw.init_device_mesh("cpu", (2, 1), ("dp", "tp"))
    weight = sw.distribute_tensor(torch.ones(4), mesh, [Replicate(), Replicate()])
    model = Repeated(weight, times)
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    x = sw.distribute_tensor(torch.arange(8.0).view(2, 4), mesh, [Shard(0), Replicate()])
    model(x).sum().backward()
    return model.weight.grad.full_tensor().tolist()


@pytest.mark.parametrize("times", [0, 2, 100])
def test_what_is_computed_from_parameters_is_summed_once(times):
    mean = [2.0, 3.0, 4.0, 5.0]  # over the data-parallel ranks
    assert sw.simulate(lambda: gradient(times), 2) == [mean] * 2


def test_a_history_that_is_too_long_to_search_is_refused():
    def run():
        with pytest.raises(sw.DispatchError, match="too long"):
            gradient(600)

    sw.simulate(run, 2)
