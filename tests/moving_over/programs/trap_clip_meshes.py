"""Gradients of two meshes, clipped in one call."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def batch():
    return torch.rand(8, 6, generator=torch.Generator().manual_seed(1))


def run(folder):
    size = dist.get_world_size()
    flat = init_device_mesh("cpu", (size,), mesh_dim_names=("all",))
    hybrid = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    model = make_model()
    fully_shard(model[2], mesh=hybrid)
    fully_shard(model, mesh=flat)
    model(batch().chunk(size)[dist.get_rank()]).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return {"norm": norm} | {n: p.grad.full_tensor() for n, p in model.named_parameters()}


def alone():
    model = make_model()
    model(batch()).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    return {"norm": norm} | {n: p.grad for n, p in model.named_parameters()}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(run(None)["norm"])
    dist.destroy_process_group()
