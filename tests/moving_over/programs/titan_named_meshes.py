"""Parallel dimensions as one mesh with named axes, some of them flattened into others; a decoder
with tensor, sequence and loss parallelism, fully sharded or hybrid sharded."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn
from torch.distributed._composable.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

WIDTH, HEADS, VOCABULARY, LENGTH, BATCH, STEPS = 16, 4, 24, 8, 8, 3


@dataclass
class ParallelDims:
    """How many ranks each kind of parallelism has."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1

    def build_mesh(self) -> DeviceMesh:
        degrees = {
            "pp": self.pp,
            "dp_replicate": self.dp_replicate,
            "dp_shard": self.dp_shard,
            "cp": self.cp,
            "tp": self.tp,
        }
        used = {name: degree for name, degree in degrees.items() if degree > 1}
        used = used or {"dp_shard": 1}
        mesh = init_device_mesh("cpu", tuple(used.values()), mesh_dim_names=tuple(used))
        groups = {
            "dp": ("dp_replicate", "dp_shard"),  # who loads other data
            "dp_shard_cp": ("dp_shard", "cp"),  # who holds other parts of a parameter
            "dp_cp": ("dp_replicate", "dp_shard", "cp"),  # who has another loss
        }
        for name, axes in groups.items():
            present = tuple(axis for axis in axes if axis in used)
            if present:
                mesh[present]._flatten(mesh_dim_name=name)
        return mesh


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wv = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, freqs):
        shape = (*x.shape[:2], -1, WIDTH // HEADS)  # the local heads
        q, k, v = (w(x).view(shape) for w in (self.wq, self.wk, self.wv))
        q, k = (part * freqs[: x.shape[1], None, :] for part in (q, k))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(*x.shape[:2], -1))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, 2 * WIDTH, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x, freqs):
        x = x + self.attention(self.attention_norm(x), freqs)
        return x + self.feed_forward(self.ffn_norm(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        frequencies = torch.linspace(0.5, 1.5, LENGTH * WIDTH // HEADS)
        self.register_buffer("freqs", frequencies.view(LENGTH, -1), persistent=False)
        self.layers = nn.ModuleDict({str(index): Block() for index in range(2)})
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x, self.freqs)
        return self.output(self.norm(x))


def apply_tp(model, tp_mesh):
    parallelize_module(
        model,
        tp_mesh,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
            ),
        },
    )
    for block in model.layers.values():
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
            ),
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            "feed_forward.w3": ColwiseParallel(),
        }
        parallelize_module(module=block, device_mesh=tp_mesh, parallelize_plan=plan)


def apply_fsdp(model, dp_mesh, reshard_after_forward=True):
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    settings = {"mesh": dp_mesh, "mp_policy": policy}
    for index, block in enumerate(model.layers.values()):
        is_last = index == len(model.layers) - 1
        reshard = reshard_after_forward and not is_last
        fully_shard(block, **settings, reshard_after_forward=reshard)
    fully_shard(model, **settings, reshard_after_forward=reshard_after_forward)


def clip_grad_norm_(parameters, max_norm):
    parameters = list(parameters)
    grads = [p.grad for p in parameters if p.grad is not None]
    total = nn.utils.get_total_norm(grads, 2.0, error_if_nonfinite=True, foreach=True)
    if isinstance(total, DTensor):
        total = total.full_tensor()
    nn.utils.clip_grads_with_norm_(parameters, max_norm, total, foreach=True)
    return total


def make_model():
    torch.manual_seed(11)
    return Decoder()


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)


def loss_of(model, tokens):
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def train_on(dims):
    mesh = dims.build_mesh()
    names = mesh.mesh_dim_names
    model = make_model()
    if dims.tp > 1:
        assert mesh["tp"].size() == dims.tp
        apply_tp(model, mesh["tp"])
    is_data_parallel = dims.dp_replicate * dims.dp_shard > 1
    if is_data_parallel:
        if "dp_replicate" in names and "dp_shard" in names:
            apply_fsdp(model, mesh["dp_replicate", "dp_shard_cp"])
        elif "dp_replicate" in names:
            from torch.distributed._composable.replicate import replicate

            replicate(model, device_mesh=mesh["dp_replicate"], bucket_cap_mb=100)
        else:
            apply_fsdp(model, mesh["dp_shard_cp",])
    dp_mesh = mesh["dp"] if is_data_parallel else None
    dp_rank = dp_mesh.get_local_rank() if dp_mesh is not None else 0
    dp_size = dp_mesh.size() if dp_mesh is not None else 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=False, foreach=True)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        mine = batch(step).chunk(dp_size)[dp_rank]
        if dims.tp > 1:
            with loss_parallel():
                loss = loss_of(model, mine)
                loss.backward()
        else:
            loss = loss_of(model, mine)
            loss.backward()
        norms.append(clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        value = loss.detach()
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if is_data_parallel:
            value = funcol.all_reduce(value, "sum", mesh["dp_cp"]) / dp_size
        losses.append(value + 0)
    results = {"losses": torch.stack(losses), "norms": torch.stack(norms)}
    for name, parameter in model.named_parameters():
        is_split = isinstance(parameter, DTensor)
        results[name] = parameter.full_tensor() if is_split else parameter.detach()
    return results


def run(folder):
    size = dist.get_world_size()
    cases = {
        "fsdp": ParallelDims(dp_shard=size),
        "tp": ParallelDims(tp=size),
        "ddp": ParallelDims(dp_replicate=size),
    }
    if size == 4:
        cases |= {
            "hsdp": ParallelDims(dp_replicate=2, dp_shard=2),
            "fsdp+tp": ParallelDims(dp_shard=2, tp=2),
        }
    results = {}
    for case, dims in cases.items():
        found = train_on(dims)
        if not results:
            results = found
        for name, value in found.items():
            torch.testing.assert_close(
                value,
                results[name],
                rtol=1e-4,
                atol=1e-5,
                msg=lambda m, c=case, n=name: f"{c} {n}: {m}",
            )
    return results


def alone():
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=True)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, batch(step))
        loss.backward()
        norms.append(clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        losses.append(loss.detach())
    results = {"losses": torch.stack(losses), "norms": torch.stack(norms)}
    return results | dict(model.named_parameters())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(run(None)["losses"])
    dist.destroy_process_group()
