"""`fully_shard` over gloo: behaviour that simulated ranks cannot show."""

import torch
from support.fsdp_cases import batch, full, made, mine, shard_all, train
from support.fsdp_extensions import quantise, same_as_quantised
from torch import nn

import shardwise as sw
from shardwise.fsdp import fully_shard

WIDTH = 520  # more than 1 MB: a rank's own row is not copied among those that are gathered


def output():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    x = torch.randn(2, WIDTH)
    expected = model(x)
    for layer in model:
        fully_shard(layer, mesh=sw.init_device_mesh("cpu", (4,)))
    fully_shard(model, mesh=sw.init_device_mesh("cpu", (4,)))
    return (model(x) - expected).abs().max().item()


def test_large_layers_are_gathered_one_after_the_other(workers4):
    assert max(workers4.run(output)) < 1e-5


def quantised_training():
    """With shards of different sizes, and bytes that travel beside numbers."""
    mesh = sw.init_device_mesh("cpu", (4,), ("dp",))
    model = shard_all(quantise(made()), mesh)
    train(model, mine(batch(), mesh))
    return {name: full(each) for name, each in model.named_parameters()}


def test_extensions_of_parameters(workers4):
    for found in workers4.run(quantised_training):
        same_as_quantised(found)
