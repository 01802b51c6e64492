"""A model cut into stages, one for each rank, with two schedules."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

WIDTH, LAYERS, BATCH, MICRO_BATCHES, STEPS = 10, 4, 16, 4, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({str(index): Block() for index in range(LAYERS)})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


def make_model():
    torch.manual_seed(2)
    return Model()


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, BATCH, WIDTH, generator=generator).unbind()


def run(folder):
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("pp",))
    pp_mesh = mesh["pp"]
    index = pp_mesh.get_local_rank()
    results = {}
    for kind in (ScheduleGPipe, Schedule1F1B):
        model = make_model()
        for name in list(model.layers):
            if int(name) * size // LAYERS != index:
                del model.layers[name]
        stage = PipelineStage(model, index, size, torch.device("cpu"), group=pp_mesh.get_group())
        schedule = kind(stage, n_microbatches=MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        means = []
        for step in range(STEPS):
            inputs, targets = batch(step)
            losses = []
            arguments = (inputs,) if stage.is_first else ()
            wanted = {"target": targets, "losses": losses} if stage.is_last else {}
            schedule.step(*arguments, **wanted)
            optimizer.step()
            optimizer.zero_grad()
            mean = torch.stack(losses).mean() if stage.is_last else torch.zeros(())
            dist.broadcast(mean, src=size - 1, group=pp_mesh.get_group())
            means.append(mean)
        states = [None] * size
        dist.all_gather_object(states, {n: p.detach() for n, p in model.named_parameters()})
        results[f"{kind.__name__} losses"] = torch.stack(means)
        for state in states:
            results |= {f"{kind.__name__} {name}": value for name, value in state.items()}
    return results


def alone():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(STEPS):
        inputs, targets = batch(step)
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    results = {"losses": torch.stack(losses)} | dict(model.named_parameters())
    return {
        f"{kind} {name}": value
        for kind in ("ScheduleGPipe", "Schedule1F1B")
        for name, value in results.items()
    }


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(run(None))
    dist.destroy_process_group()
