"""A training loop: micro-batches whose gradients are reduced once, tokens that do not count, frozen
parameters, activation checkpointing, gradients clipped over all ranks."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper as ptd_checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

WIDTH, VOCABULARY, LENGTH, BATCH, MICRO_BATCHES, STEPS = 16, 24, 6, 16, 2, 3
IGNORED = -100


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x).cumsum(1))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(index): Block() for index in range(3)})
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x))


def make_model():
    torch.manual_seed(8)
    model = Decoder()
    model.layers["0"].requires_grad_(False)
    return model


def batch(step):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[:: step + 2, : LENGTH // 2] = IGNORED  # other numbers of tokens on other ranks
    return tokens[:, :-1], labels


def loss_sum(logits, labels):
    return F.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), reduction="sum", ignore_index=IGNORED
    )


def adam(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)


def parallelize(model, mesh, offload):
    for name, block in model.layers.named_children():
        wrapped = ptd_checkpoint_wrapper(block, preserve_rng_state=False)
        model.layers.register_module(name, wrapped)
    settings = {"mesh": mesh}
    if offload:
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for block in model.layers.values():
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    # Each rank's loss is already divided by the tokens of all ranks.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale
    return model


def train_on(mesh, offload, is_reduced_once):
    size, rank = mesh.size(), mesh.get_local_rank()
    model = parallelize(make_model(), mesh, offload)
    optimizer = adam(model)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, labels = (each.chunk(size)[rank] for each in batch(step))
        count = funcol.all_reduce((labels != IGNORED).sum(), "sum", mesh.get_group())
        total = torch.zeros(())
        pairs = list(zip(inputs.chunk(MICRO_BATCHES), labels.chunk(MICRO_BATCHES), strict=True))
        for number, (tokens, targets) in enumerate(pairs):
            is_last = number == len(pairs) - 1
            if is_reduced_once:
                model.set_requires_gradient_sync(is_last)
                model.set_is_last_backward(is_last)
            loss = loss_sum(model(tokens), targets) / count
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5, foreach=True)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        optimizer.step()
        losses.append(funcol.all_reduce(total, "sum", (mesh, 0)))
    results = {"losses": torch.stack(losses), "norms": torch.stack(norms)}
    for name, parameter in model.named_parameters():
        results[name.replace("_checkpoint_wrapped_module.", "")] = parameter.full_tensor()
    return results


def run(folder):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    results = {}
    for offload, is_reduced_once in ((False, True), (False, False), (True, True)):
        case = f"{'offload' if offload else 'plain'} {'once' if is_reduced_once else 'each'}"
        found = train_on(mesh, offload, is_reduced_once)
        results |= {f"{case}: {name}": value for name, value in found.items()}
    return results


def alone():
    model = make_model()
    optimizer = adam(model)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, labels = batch(step)
        loss = loss_sum(model(inputs), labels) / (labels != IGNORED).sum()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5))
        optimizer.step()
        losses.append(loss.detach())
    found = {"losses": torch.stack(losses), "norms": torch.stack(norms)}
    found |= dict(model.named_parameters())
    cases = ("plain once", "plain each", "offload once")
    return {f"{case}: {name}": value for case in cases for name, value in found.items()}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(run(None)["plain once: losses"])
    dist.destroy_process_group()
