"""Distributed checkpoints of a model and its optimizer: written by some ranks, read by others."""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS = 6
"""Half of them before the checkpoint."""


class AppState(Stateful):
    """The model and the optimizer, in a form that does not depend on how they are sharded."""

    def __init__(self, model, optimizer=None):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state_dict):
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=2e-2)


def batch(step):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))


def train(model, optimizer, steps, part=lambda x: x):
    losses = []
    for step in steps:
        loss = model(part(batch(step))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def run(folder):
    """Train and save; or, if a run before has saved something, load that and go on."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    model = make_model(seed=rank)  # fully_shard keeps the values of each rank's own part
    model.load_state_dict(make_model().state_dict())
    fully_shard(model, mesh=mesh)
    optimizer = adam(model)

    def part(x):
        return x.chunk(size)[rank]

    first, second = os.path.join(folder, "first"), os.path.join(folder, "second")
    if os.path.exists(second):
        dist.barrier()
        for parameter in model.parameters():
            nn.init.constant_(parameter, 9.0)
        state = {"app": AppState(model, optimizer)}
        dcp.load(state, checkpoint_id=second)
        steps = range(STEPS // 2, STEPS)
    else:
        dist.barrier()
        steps = range(STEPS // 2)
    losses = train(model, optimizer, steps, part)
    if steps.start == 0:
        dcp.save({"app": AppState(model, optimizer)}, checkpoint_id=first)
        state = {"app": AppState(model, optimizer)}
        group = dist.new_group(backend="gloo")
        saving = dcp.async_save(state, checkpoint_id=second, process_group=group)
        saved = {name: p.full_tensor() for name, p in model.named_parameters()}
        train(model, optimizer, range(50, 52), part)  # training goes on while it is written
        saving.result()
        # A checkpoint is read in place, into the tensors of a plain state dict too.
        weights = {"app": {"model": model.state_dict()}}
        dcp.load(weights, checkpoint_id=first)
        for name, value in weights["app"]["model"].items():
            torch.testing.assert_close(value.full_tensor(), saved[name], rtol=0, atol=0)
        results = saved
    else:
        results = {name: p.full_tensor() for name, p in model.named_parameters()}
    dist.all_reduce(losses)
    return {"losses": losses / size} | results


def alone():
    model = make_model()
    optimizer = adam(model)
    first = train(model, optimizer, range(STEPS // 2))
    half = {name: p.detach().clone() for name, p in model.named_parameters()}
    second = train(model, optimizer, range(STEPS // 2, STEPS))
    return [{"losses": first} | half, {"losses": second} | dict(model.named_parameters())]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(run(os.environ.get("TMPDIR", "."))["losses"])
    dist.destroy_process_group()
