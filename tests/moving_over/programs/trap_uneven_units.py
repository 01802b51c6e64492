"""Tensor parallelism of eleven units, which two or four ranks cannot divide evenly."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 11), nn.ReLU(), nn.Linear(11, 5))


def train(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(2):
        inputs = torch.rand(8, 6, generator=torch.Generator().manual_seed(step))
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def run(folder):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(make_model(), mesh, plan)
    losses = train(model)
    return {"losses": losses} | {n: p.full_tensor() for n, p in model.named_parameters()}


def alone():
    model = make_model()
    losses = train(model)
    return {"losses": losses} | dict(model.named_parameters())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(run(None)["losses"])
    dist.destroy_process_group()
