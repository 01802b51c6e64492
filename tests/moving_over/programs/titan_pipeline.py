"""A decoder cut into stages, each of them fully sharded or tensor-parallel: modules of other stages
are None, and one plan fits all stages."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B, get_schedule_class
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

WIDTH, VOCABULARY, LENGTH, BATCH, LAYERS, STEPS = 16, 24, 8, 16, 4, 3
CASES = {
    2: {"1F1B": (2, 1, 1), "GPipe": (2, 1, 1), "Interleaved1F1B": (2, 1, 1)},
    4: {"1F1B": (2, 2, 1), "GPipe": (2, 1, 2), "Interleaved1F1B": (2, 2, 1)},
}
"""The sizes of the axes pp, dp and tp, by schedule and number of ranks."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.mixer = Mixer()

    def forward(self, x):
        return x + self.mixer(self.norm(x))


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.wv = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.wo = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        counts = torch.arange(1, x.shape[1] + 1)[:, None]
        return self.wo(F.silu(self.wv(x).cumsum(1) / counts))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(index): Block() for index in range(LAYERS)})
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x):
        x = self.tok_embeddings(x) if self.tok_embeddings else x
        for layer in self.layers.values():
            x = layer(x)
        x = self.norm(x) if self.norm else x
        return self.output(x) if self.output else x


def make_model():
    torch.manual_seed(4)
    return Decoder()


def make_stage(index, count):
    model = make_model()
    if index > 0:
        model.tok_embeddings = None
    if index < count - 1:
        model.norm = model.output = None
    for name in list(model.layers):
        if int(name) * count // LAYERS != index:
            del model.layers[name]
    return model


def apply_tp(model, mesh):
    sequence = Shard(1)  # what travels between blocks and stages is split
    plan = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=sequence),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=sequence, output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)  # modules that are None are skipped
    for block in model.layers.values():
        plan = {
            "norm": SequenceParallel(),
            "mixer": PrepareModuleInput(
                input_layouts=(sequence,), desired_input_layouts=(Replicate(),)
            ),
            "mixer.wv": ColwiseParallel(),
            "mixer.wo": RowwiseParallel(output_layouts=sequence),
        }
        parallelize_module(block, mesh, plan)


def apply_fsdp(model, mesh):
    policy = MixedPrecisionPolicy()
    # Under pipelines parameters stay gathered between micro-batches.
    for block in model.layers.values():
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def clip_grad_norm_(parameters, max_norm, pp_mesh):
    """Clip by the norm over the parameters of all stages."""
    parameters = list(parameters)
    total = nn.utils.get_total_norm([p.grad for p in parameters], 2.0)
    if isinstance(total, DTensor):
        total = total.full_tensor()
    if pp_mesh is not None:
        total = total**2
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=pp_mesh.get_group())
        total = total**0.5
    nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)


def loss_fn(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=3e-3)


def train_on(name, sizes):
    pp, dp, tp = sizes
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp", "tp"))
    pp_mesh, dp_mesh, tp_mesh = mesh["pp"], mesh["dp"], mesh["tp"]
    kind = get_schedule_class(name)
    several = issubclass(kind, ScheduleInterleaved1F1B)
    count = pp * (2 if several else 1)
    indices = range(pp_mesh.get_local_rank(), count, pp)
    stages = []
    for index in indices:
        model = make_stage(index, count)
        if tp > 1:
            apply_tp(model, tp_mesh)
        if dp > 1:
            apply_fsdp(model, dp_mesh)
        stages.append(
            PipelineStage(model, index, count, torch.device("cpu"), group=pp_mesh.get_group("pp"))
        )
    schedule = kind(stages if several else stages[0], n_microbatches=4, loss_fn=loss_fn)
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = adam(parameters)
    means, norms = [], []
    for step in range(STEPS):
        mine = batch(step).chunk(dp)[dp_mesh.get_local_rank()]
        inputs, labels = mine[:, :-1], mine[:, 1:]
        losses = []
        has_first = any(stage.is_first for stage in stages)
        has_last = any(stage.is_last for stage in stages)
        wanted = {"target": labels, "losses": losses} if has_last else {}
        schedule.step(*((inputs,) if has_first else ()), **wanted)
        norms.append(clip_grad_norm_(parameters, 0.5, pp_mesh))
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.stack(losses).mean().detach() if has_last else torch.zeros(())
        dist.all_reduce(mean, group=dp_mesh.get_group())
        dist.all_reduce(mean, group=pp_mesh.get_group())  # the other stages have zero
        means.append(mean / dp)
    state = {}
    for stage in stages:
        for key, parameter in stage.submod.named_parameters():
            is_split = isinstance(parameter, DTensor)
            state[key] = parameter.full_tensor() if is_split else parameter
    states = [None] * pp
    mine = {key: value.detach() for key, value in state.items()}
    dist.all_gather_object(states, mine, group=pp_mesh.get_group())
    results = {"losses": torch.stack(means), "norms": torch.stack(norms)}
    for state in states:
        results |= state
    return results


def run(folder):
    results = {}
    for name, sizes in CASES[dist.get_world_size()].items():
        found = train_on(name, sizes)
        results |= {f"{name}: {key}": value for key, value in found.items()}
    return results


def alone(size):
    model = make_model()
    optimizer = adam(model.parameters())
    losses, norms = [], []
    for step in range(STEPS):
        tokens = batch(step)
        loss = loss_fn(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        norms.append(clip_grad_norm_(model.parameters(), 0.5, None))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    found = {"losses": torch.stack(losses), "norms": torch.stack(norms)}
    found |= dict(model.named_parameters())
    return {f"{name}: {key}": value for name in CASES[size] for key, value in found.items()}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(run(None).keys())
    dist.destroy_process_group()
