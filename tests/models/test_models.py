"""Programs written for plain tensors give the same losses, gradients and parameters on shards."""

import functools

import pytest
import torch
from support.trained_models import MODELS, PLANS, compare, train

import shardwise as sw


@functools.cache
def alone(name, dtype):
    return train(name, dtype)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_training_is_that_of_one_process(name, plan):
    plain = alone(name, torch.float64)

    def run():
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with sw.fallback("error"):
            compare(train(name, torch.float64, 5, mesh, plan), plain, torch.float64)

    sw.simulate(run, 4)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_training_in_float32_is_that_of_one_process(name, plan):
    plain = alone(name, torch.float32)

    def run():
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        compare(train(name, torch.float32, 5, mesh, plan), plain, torch.float32)

    sw.simulate(run, 4)
