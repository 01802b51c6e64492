"""The same trainings over real processes."""

import pytest
import torch
from support.trained_models import compare, train

import shardwise as sw


def trained(name, plan):
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return train(name, torch.float64, 5, mesh, plan)


@pytest.mark.parametrize("name, plan", [("gpt", "columns"), ("residual", "two dims")])
def test_training_over_gloo_is_that_of_one_process(workers4, name, plan):
    plain = train(name, torch.float64)
    for ours in workers4.run(trained, name, plan):
        compare(ours, plain, torch.float64)
