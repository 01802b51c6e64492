"""A checkpointer: parts of a model, optimizers with flat states, a scheduler, the state of the
trainer; saved while training goes on, and loaded by another number of ranks."""

import enum
import os
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

WIDTH, CLASSES, BATCH, STEPS = 12, 5, 8, 6


class AsyncMode(enum.Enum):
    DISABLED = "disabled"
    ASYNC = "async"


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({str(index): Layer() for index in range(2)})
        self.output = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return self.output(x) * self.scale


class ModelWrapper(Stateful):
    """The state dicts of all parts of a model as one."""

    def __init__(self, parts):
        self.parts = parts
        self.cached = self._state_dict()

    def _state_dict(self):
        return {k: v for part in self.parts for k, v in get_model_state_dict(part).items()}

    def state_dict(self):
        return self.cached

    def load_state_dict(self, state_dict):
        load = partial(
            set_model_state_dict,
            model_state_dict=state_dict,
            options=StateDictOptions(strict=False),
        )
        for part in self.parts:
            load(part)
        self.cached = self._state_dict()


class Optimizers(Stateful):
    """One optimizer for each part of a model; their states by names of parameters."""

    def __init__(self, parts):
        self.parts = parts
        self.optimizers = [torch.optim.AdamW(part.parameters(), lr=2e-2) for part in parts]

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def state_dict(self):
        get = partial(
            get_optimizer_state_dict,
            options=StateDictOptions(flatten_optimizer_state_dict=True),
        )
        pairs = zip(self.parts, self.optimizers, strict=True)
        return {k: v for part, each in pairs for k, v in get(part, each).items()}

    def load_state_dict(self, state_dict):
        load = partial(
            set_optimizer_state_dict,
            optim_state_dict=state_dict,
            options=StateDictOptions(flatten_optimizer_state_dict=True),
        )
        for part, optimizer in zip(self.parts, self.optimizers, strict=True):
            load(part, optimizer)


class Schedulers(Stateful):
    def __init__(self, optimizers):
        self.schedulers = [
            torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1 / (1 + step / 4))
            for each in optimizers.optimizers
        ]

    def step(self):
        for scheduler in self.schedulers:
            scheduler.step()

    def state_dict(self):
        return self.schedulers[0].state_dict()

    def load_state_dict(self, state_dict):
        for scheduler in self.schedulers:
            scheduler.load_state_dict(state_dict)


class Checkpointer:
    def __init__(self, folder, states, mode):
        self.folder, self.states, self.mode = folder, states, mode
        self.group = dist.new_group(backend="gloo")
        self.saving = None

    def path(self, step):
        return os.path.join(self.folder, f"step-{step}")

    def save(self, step):
        self.wait()
        if self.mode is AsyncMode.ASYNC:
            self.saving = dcp.async_save(
                self.states, checkpoint_id=self.path(step), process_group=self.group
            )
        else:
            dcp.save(self.states, checkpoint_id=self.path(step))

    def wait(self):
        if self.saving is not None:
            self.saving.result()
            self.saving = None

    def load(self):
        steps = [int(name[5:]) for name in os.listdir(self.folder) if name.startswith("step-")]
        if not steps:
            return False
        dcp.load(self.states, checkpoint_id=self.path(max(steps)))
        return True


class Trainer(Stateful):
    def __init__(self, folder, part, parts, mode=AsyncMode.ASYNC):
        self.step, self.losses, self.part = 0, [], part
        self.model_parts = parts
        self.optimizers = Optimizers(parts)
        self.schedulers = Schedulers(self.optimizers)
        if folder is not None:
            states = {
                "model": ModelWrapper(parts),
                "optimizer": self.optimizers,
                "lr_scheduler": self.schedulers,
                "train_state": self,
            }
            self.checkpointer = Checkpointer(folder, states, mode)

    def state_dict(self):
        return {"step": torch.tensor(self.step, dtype=torch.int32)}

    def load_state_dict(self, state_dict):
        self.step = int(state_dict["step"])

    def train(self, until):
        while self.step < until:
            inputs, labels = batch(self.step)
            x = self.part(inputs)
            for each in self.model_parts:
                x = each(x)
            loss = F.cross_entropy(x, self.part(labels))
            loss.backward()
            self.optimizers.step()
            self.schedulers.step()
            self.optimizers.zero_grad()
            self.losses.append(loss.detach())
            self.step += 1


def make_model(seed=6):
    torch.manual_seed(seed)
    return Model()


def batch(step):
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, WIDTH, generator=generator)
    return inputs, torch.randint(CLASSES, (BATCH,), generator=generator)


def parallelize(model, mesh):
    if mesh["tp"].size() > 1:
        for layer in model.layers.values():
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(layer, mesh["tp"], plan)
        parallelize_module(
            model,
            mesh["tp"],
            {"output": ColwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())},
        )
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def run(folder):
    """Train half of the steps and save them; the next run, on other ranks, goes on from there."""
    size = dist.get_world_size()
    tp = size // 2  # two ranks are data-parallel, four also tensor-parallel
    mesh = init_device_mesh("cpu", (2, tp), mesh_dim_names=("dp", "tp"))
    dp_mesh = mesh["dp"]

    def part(x):
        return x.chunk(2)[dp_mesh.get_local_rank()]

    folder = os.path.join(folder, "checkpoints")
    os.makedirs(folder, exist_ok=True)
    is_first = not os.listdir(folder)
    dist.barrier()
    model = parallelize(make_model(6 if is_first else 60), mesh)
    assert Shard(0) in model.layers["0"].up.weight.placements
    trainer = Trainer(folder, part, [model])
    assert trainer.checkpointer.load() is not is_first
    if is_first:
        trainer.train(STEPS // 2)
        found = _results(trainer, dp_mesh)
        trainer.checkpointer.save(trainer.step)
        trainer.train(STEPS // 2 + 1)  # what is saved does not change any more
        trainer.checkpointer.wait()
    else:
        assert trainer.step == STEPS // 2
        trainer.train(STEPS)
        trainer.checkpointer.mode = AsyncMode.DISABLED
        trainer.checkpointer.save(trainer.step)
        found = _results(trainer, dp_mesh)
    dist.barrier()
    return found


def _results(trainer, dp_mesh):
    losses = torch.stack(trainer.losses)
    dist.all_reduce(losses, group=dp_mesh.get_group())
    state = {name: p.full_tensor() for name, p in trainer.model_parts[0].named_parameters()}
    rate = trainer.schedulers.schedulers[0].get_last_lr()[0]
    return {"losses": losses / dp_mesh.size(), "rate": torch.tensor(rate)} | state


def alone():
    model = make_model()
    trainer = Trainer(None, lambda x: x, [model])
    runs = []
    for until in (STEPS // 2, STEPS):
        trainer.losses = []
        trainer.train(until)
        rate = trainer.schedulers.schedulers[0].get_last_lr()[0]
        state = {name: p.detach().clone() for name, p in model.named_parameters()}
        runs.append({"losses": torch.stack(trainer.losses), "rate": torch.tensor(rate)} | state)
    return runs


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(run(os.environ.get("TMPDIR", "."))["losses"])
    dist.destroy_process_group()
