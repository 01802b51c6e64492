"""A model with experts, and the meshes of a trainer that unflattens one mesh of all ranks several
times: for the data, for dense layers and for experts."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from shardwise import DeviceMesh, DTensor, Shard, distribute_tensor, init_device_mesh
from shardwise.fsdp import fully_shard
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH, EXPERTS, BATCH = 6, 4, 8


class Experts(nn.Module):
    """Every token passes through all experts."""

    mesh: DeviceMesh | None = None

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 3)

    def forward(self, x):
        if self.mesh is None:
            return torch.einsum("ti,eio->to", x, self.weight)
        tokens = DTensor.from_local(x, self.mesh, [Shard(0)])
        mixed = torch.einsum("ti,eio->to", tokens, self.weight)
        return mixed.redistribute(placements=[Shard(0)]).to_local()


class Model(nn.Module):
    tp: DeviceMesh | None = None

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)
        self.experts = Experts()

    def forward(self, x):
        x = x + self.down(F.relu(self.up(x)))
        if self.tp is None:
            return x + self.experts(x)
        split = DTensor.from_local(x, self.tp).redistribute(placements=[Shard(0)])
        mixed = DTensor.from_local(self.experts(split.to_local()), self.tp, [Shard(0)])
        return x + mixed.full_tensor()


@dataclass
class Meshes:
    """The meshes of a trainer, each by its axes."""

    dense: DeviceMesh
    sparse: DeviceMesh
    loss: DeviceMesh

    @staticmethod
    def of(replicate: int, shard: int, tp: int, ep: int) -> "Meshes":
        size = replicate * shard * tp
        world = init_device_mesh("cpu", (size,), mesh_dim_names=("world",))

        def cut(names: tuple[str, ...], sizes: tuple[int, ...]) -> DeviceMesh:
            fake = {name: "fake" for name, size in zip(names, sizes, strict=True) if size == 1}
            return world._unflatten(0, sizes, names, backend_override=fake)

        data = cut(("pp", "batch", "cp", "tp"), (1, replicate * shard, 1, tp))
        loss = data["batch", "cp"]._flatten("loss_mesh")
        dense = cut(("pp", "dp_replicate", "fsdp", "tp"), (1, replicate, shard, tp))
        sizes = 1, replicate, shard * tp // ep, ep, 1
        sparse = cut(("pp", "dp_replicate", "efsdp", "ep", "etp"), sizes)
        return Meshes(dense, sparse, loss)


def shard(model: Model, meshes: Meshes) -> None:
    """Lay out the dense layers on tp, the experts on ep, and both on their data-parallel axes."""
    tp, ep = meshes.dense["tp"], meshes.sparse["ep"]
    if tp.size() > 1:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, tp, plan)
        model.tp = tp
    whole = model.experts.weight
    model.experts.weight = nn.Parameter(distribute_tensor(whole.detach(), ep, [Shard(0)]))
    model.experts.mesh = ep
    is_hybrid = meshes.dense["dp_replicate"].size() > 1
    if is_hybrid:
        fully_shard(model.experts, mesh=meshes.sparse["dp_replicate", "efsdp"])
        fully_shard(model, mesh=meshes.dense["dp_replicate", "fsdp"])
    else:
        fully_shard(model.experts, mesh=meshes.sparse["efsdp"])
        fully_shard(model, mesh=meshes.dense["fsdp"])
    model.experts.set_gradient_divide_factor(meshes.loss.size())


def model_and_data() -> tuple[Model, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    model = Model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return model, torch.randn(BATCH, WIDTH, generator=generator)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()
