"""Fully sharded layers: mixed precision, explicit prefetching, a checkpoint of whole tensors."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

WIDTH, BATCH, STEPS = 12, 8, 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make_model():
    torch.manual_seed(5)
    return Stack()


def prefetch(model, ahead=2):
    layers = list(model.layers)
    for index, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 1 + ahead])
        layer.set_modules_to_backward_prefetch(layers[max(0, index - ahead) : index][::-1])


def shard(model, policy=None):
    settings = {} if policy is None else {"mp_policy": policy}
    for layer in model.layers:
        fully_shard(layer, **settings)
    fully_shard(model, **settings)
    assert isinstance(model, FSDPModule)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor) and parameter.placements == (Shard(0),)
    prefetch(model)
    return model


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, WIDTH, generator=generator)


def steps(model, optimizer, which, part=lambda x: x):
    losses = []
    for step in which:
        loss = model(part(batch(step))).float().square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def mean_over_ranks(losses):
    total = torch.stack(losses)
    dist.all_reduce(total)
    return total / dist.get_world_size()


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def run(folder):
    rank, size = dist.get_rank(), dist.get_world_size()

    def part(x):
        return x.chunk(size)[rank]

    model = shard(make_model())
    optimizer = adam(model)
    model.unshard(async_op=True)
    losses = steps(model, optimizer, range(STEPS // 2), part)

    # A checkpoint of whole tensors on the CPU of rank 0, which a new model on all ranks loads.
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    path = os.path.join(folder, "full.pt")
    state = {
        "model": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    if rank == 0:
        torch.save(state, path)
    dist.barrier()

    with torch.device("meta"):
        model = Stack()
    model = shard(model)
    model.to_empty(device="cpu")
    optimizer = adam(model)
    state = torch.load(path, mmap=True, weights_only=True) if rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state.get("model", {}), options=options)
    set_optimizer_state_dict(model, optimizer, state.get("optimizer", {}), options=options)
    losses += steps(model, optimizer, range(STEPS // 2, STEPS), part)
    trained = {name: p.full_tensor() for name, p in model.named_parameters()}

    # The same by hand: each rank takes its part of the whole tensors.
    sharded = {
        name: nn.Parameter(distribute_tensor(trained[name].detach(), p.device_mesh, p.placements))
        for name, p in model.named_parameters()
    }
    with torch.device("meta"):
        again = Stack()
    shard(again)
    again.load_state_dict(sharded, assign=True)
    output = again(batch(99)).detach()

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mixed = shard(make_model(), policy)
    optimizer = adam(mixed)
    kinds = []
    mixed.layers[0].up.register_forward_pre_hook(lambda m, a: kinds.append(a[0].dtype))
    mixed_losses = steps(mixed, optimizer, range(2), part)
    assert kinds == [torch.bfloat16] * 2
    assert all(p.dtype == torch.float32 for p in mixed.parameters())
    return {
        "losses": mean_over_ranks(losses),
        "output": output,
        "rough mixed": mean_over_ranks(mixed_losses),
        **trained,
    }


def alone():
    model = make_model()
    optimizer = adam(model)
    losses = steps(model, optimizer, range(STEPS))
    plain = make_model()
    mixed = steps(plain, adam(plain), range(2))
    return {
        "losses": torch.stack(losses),
        "output": model(batch(99)),
        "rough mixed": torch.stack(mixed),
        **dict(model.named_parameters()),
    }


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(run(os.environ.get("TMPDIR", "."))["losses"])
    dist.destroy_process_group()
