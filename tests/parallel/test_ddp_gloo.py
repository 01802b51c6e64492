"""Data parallelism beside torch's styles: DistributedDataParallel over the other axis."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardwise as sw
from shardwise import Shard
from shardwise.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

STYLES = {
    "0": SequenceParallel(),
    "1": ColwiseParallel(input_layouts=Shard(1)),
    "3": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
}


def trained(model, inputs, forward):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        forward(inputs).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return norm.item()


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 4))
    return model, torch.randn(4, 6, 4)


def with_ddp():
    mesh = sw.init_device_mesh("cpu", (2, 2), ("dp", "tp"))
    model, inputs = build()
    parallelize_module(model, mesh["tp"], STYLES)
    replicas = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    rows = inputs.chunk(2)[mesh.get_local_rank("dp")]  # each row of the mesh has its own data
    positions = rows.chunk(2, 1)[mesh.get_local_rank("tp")]
    norm = trained(model, positions, replicas)
    return norm, [each.full_tensor().detach() for each in model.parameters()]


def test_ddp_over_the_data_axis_trains_a_model_with_styles_as_one_process_does(workers4):
    model, inputs = build()
    expected = trained(model, inputs, model)
    for norm, parameters in workers4.run(with_ddp):
        assert abs(norm - expected) < 1e-5
        for got, wanted in zip(parameters, model.parameters(), strict=True):
            torch.testing.assert_close(got, wanted.detach(), atol=1e-5, rtol=1e-5)
