"""Two layers, split by columns and by rows: all ranks compute the same batch together."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._tensor.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

STEPS = 4


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_proj = nn.Linear(10, 32)
        self.relu = nn.ReLU()
        self.out_proj = nn.Linear(32, 5)

    def forward(self, x):
        return self.out_proj(self.relu(self.in_proj(x)))


def train(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)  # tensor parallelism needs the same batch on all ranks
        loss = model(torch.rand(20, 10)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def run(folder):
    mesh = init_device_mesh(device_type="cpu", mesh_shape=(dist.get_world_size(),))
    torch.manual_seed(7)
    model = parallelize_module(
        module=TwoLayers(),
        device_mesh=mesh,
        parallelize_plan={"in_proj": ColwiseParallel(), "out_proj": RowwiseParallel()},
    )
    losses = train(model)
    return {"losses": losses} | {n: p.full_tensor() for n, p in model.named_parameters()}


def alone():
    torch.manual_seed(7)
    model = TwoLayers()
    losses = train(model)
    return {"losses": losses} | dict(model.named_parameters())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(run(None)["losses"])
    dist.destroy_process_group()
