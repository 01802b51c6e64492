"""A gradient divided by a factor of the program's own, where one rank holds each shard."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FACTOR = 3.0


def make_model():
    torch.manual_seed(0)
    return nn.Linear(6, 4)


def batch():
    return torch.rand(8, 6, generator=torch.Generator().manual_seed(1))


def run(folder):
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(make_model(), mesh=mesh)
    model.set_gradient_divide_factor(FACTOR)
    model.set_force_sum_reduction_for_comms(True)
    model(batch().chunk(size)[dist.get_rank()]).square().sum().backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def alone():
    model = make_model()
    (model(batch()).square().sum() / FACTOR).backward()
    return {name: p.grad for name, p in model.named_parameters()}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(run(None)["bias"])
    dist.destroy_process_group()
