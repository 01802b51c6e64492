"""Two layers whose inputs and outputs are split along the sequence."""

from collections import OrderedDict

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as tp
from torch import nn
from torch.distributed.tensor import Shard

STEPS = 3
TOKENS = 16


def make_model():
    torch.manual_seed(3)
    layers = [("in_proj", nn.Linear(6, 12)), ("relu", nn.ReLU()), ("out_proj", nn.Linear(12, 5))]
    return nn.Sequential(OrderedDict(layers))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.rand(TOKENS, 6, generator=generator)


def run(folder):
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    rank, size = dist.get_rank(), dist.get_world_size()
    model = tp.parallelize_module(
        make_model(),
        mesh,
        {
            "in_proj": tp.ColwiseParallel(input_layouts=Shard(0)),
            "out_proj": tp.RowwiseParallel(output_layouts=Shard(0)),
        },
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True)
    losses = []
    for step in range(STEPS):
        mine = batch(step).chunk(size)[rank]  # each rank has a part of the sequence
        output = model(mine)
        assert output.shape == (TOKENS // size, 5)
        loss = output.square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total)
    results = {name: p.full_tensor() for name, p in model.named_parameters()}
    return {"losses": torch.stack(losses)} | results


def alone():
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True)
    losses = []
    for step in range(STEPS):
        loss = model(batch(step)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses)} | dict(model.named_parameters())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(run(None)["losses"])
    dist.destroy_process_group()
