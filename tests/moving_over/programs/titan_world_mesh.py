"""Parallel dimensions as several views of one flat mesh of the world; a decoder with tensor,
sequence and loss parallelism on one view and full sharding on another."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

WIDTH, VOCABULARY, LENGTH, BATCH, STEPS = 16, 24, 8, 8, 3
CASES = {
    2: {"fsdp": {"dp_shard": 2}, "tp": {"tp": 2}},
    4: {
        "hsdp": {"dp_replicate": 2, "dp_shard": 2},
        "fsdp+tp": {"dp_shard": 2, "tp": 2},
        "ddp+tp": {"dp_replicate": 2, "tp": 2},
    },
}


class ParallelDims:
    """Meshes by name. Each is cut from the mesh of the whole world when it is needed."""

    def __init__(self, *, dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1):
        self.dp_replicate, self.dp_shard, self.cp = dp_replicate, dp_shard, cp
        self.tp, self.pp = tp, pp
        self.world_size = dp_replicate * dp_shard * cp * tp * pp
        assert self.world_size == dist.get_world_size()
        self.meshes: dict[str, DeviceMesh] = {}
        self.build()

    def build(self):
        fsdp = self.dp_shard * self.cp
        self.world = init_device_mesh("cpu", (self.world_size,), mesh_dim_names=("world",))
        views = {
            "data": {
                "pp": self.pp,
                "batch": self.dp_replicate * self.dp_shard,
                "cp": self.cp,
                "tp": self.tp,
            },
            "dense": {
                "pp": self.pp,
                "dp_replicate": self.dp_replicate,
                "fsdp": fsdp,
                "tp": self.tp,
            },
        }
        self.views = {}
        for view, sizes in views.items():
            # Axes of one rank need no group of processes.
            unused = {name: "fake" for name, size in sizes.items() if size == 1}
            self.views[view] = self.world._unflatten(
                0, tuple(sizes.values()), tuple(sizes), backend_override=unused
            )
        data, dense = self.views.values()
        self.meshes = {name: data[name] for name in ("pp", "batch", "cp", "tp")}
        self.meshes |= {name: dense[name] for name in ("dp_replicate", "fsdp")}
        self.meshes["loss"] = data["batch", "cp"]._flatten("loss_mesh")

    def get_mesh(self, *names):
        """Return a mesh of several axes, or None if all of them have one rank."""
        if all(self.meshes[name].size() == 1 for name in names):
            return None
        if len(names) == 1:
            return self.meshes[names[0]]
        for view in self.views.values():
            if set(names) <= set(view.mesh_dim_names):
                return view[names]
        raise KeyError(names)


class Mixer(nn.Module):
    """Each token becomes the mean of those before it."""

    def __init__(self):
        super().__init__()
        self.wv = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        values = self.wv(x)
        counts = torch.arange(1, x.shape[1] + 1)[:, None]
        return self.wo(values.cumsum(1) / counts)


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixer, self.feed_forward = Mixer(), FeedForward()
        self.norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x):
        x = x + self.mixer(self.norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(index): Block() for index in range(2)})
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x))


def parallelize(model, dims):
    tp_mesh = dims.get_mesh("tp")
    if tp_mesh is not None:
        parallelize_module(
            model,
            tp_mesh,
            {
                "tok_embeddings": RowwiseParallel(
                    input_layouts=Replicate(), output_layouts=Shard(1)
                ),
                "norm": SequenceParallel(),
                "output": ColwiseParallel(
                    input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
                ),
            },
        )
        gather = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
        for block in model.layers.values():
            plan = {
                "norm": SequenceParallel(),
                "mixer": PrepareModuleInput(**gather),
                "mixer.wv": ColwiseParallel(),
                "mixer.wo": RowwiseParallel(output_layouts=Shard(1)),
                "ffn_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(**gather),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            }
            parallelize_module(block, tp_mesh, plan)
    names = ("dp_replicate", "fsdp") if dims.dp_replicate > 1 else ("fsdp",)
    mesh = dims.get_mesh(*names)
    if mesh is not None:
        for block in model.layers.values():
            fully_shard(block, mesh=mesh)
        fully_shard([model.norm, model.output], mesh=mesh, reshard_after_forward=False)
        fully_shard(model, mesh=mesh)


def make_model():
    torch.manual_seed(11)
    return Model()


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)


def loss_of(model, tokens):
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def clip_grad_norm_(parameters, max_norm):
    """Clip by the norm over all parameters, which may be on several meshes."""
    by_mesh = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        by_mesh.setdefault(mesh, []).append(parameter)
    norms = []
    for group in by_mesh.values():
        grads = [parameter.grad for parameter in group]
        norm = nn.utils.get_total_norm(grads, 2.0, error_if_nonfinite=True, foreach=True)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.stack(norms).norm()
    for group in by_mesh.values():
        nn.utils.clip_grads_with_norm_(group, max_norm, total, foreach=True)
    return total


def train(model, part, mean, context=nullcontext):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        with context():
            loss = loss_of(model, part(batch(step)))
            loss.backward()
        norms.append(clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        losses.append(mean(loss.detach()))
    results = {"losses": torch.stack(losses), "norms": torch.stack(norms)}
    for name, parameter in model.named_parameters():
        is_split = isinstance(parameter, DTensor)
        results[name] = parameter.full_tensor() if is_split else parameter.detach()
    return results


def train_on(dims):
    model = make_model()
    parallelize(model, dims)
    batch_mesh, loss_mesh = dims.get_mesh("batch"), dims.get_mesh("loss")

    def part(tokens):
        if batch_mesh is None:
            return tokens
        return tokens.chunk(batch_mesh.size())[batch_mesh.get_local_rank()]

    def mean(loss):
        if isinstance(loss, DTensor):
            loss = loss.full_tensor()
        if loss_mesh is None:
            return loss
        return all_reduce(loss, "sum", loss_mesh) / loss_mesh.size()

    return train(model, part, mean, loss_parallel if dims.tp > 1 else nullcontext)


def run(folder):
    results = {}
    for case, sizes in CASES[dist.get_world_size()].items():
        found = train_on(ParallelDims(**sizes))
        results |= {f"{case}: {name}": value for name, value in found.items()}
    return results


def alone(size):
    found = train(make_model(), lambda tokens: tokens, lambda loss: loss)
    return {f"{case}: {name}": value for case in CASES[size] for name, value in found.items()}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for name, value in run(None).items():
        if name.endswith("losses"):
            print(name, value.tolist())
    dist.destroy_process_group()
