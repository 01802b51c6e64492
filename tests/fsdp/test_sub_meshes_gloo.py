"""The meshes of a trainer on real ranks: experts beside dense layers, and their checkpoints."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.sub_meshes import Meshes, loss_of, model_and_data, shard
from torch.distributed import device_mesh as torch_meshes
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import shardwise as sw
import shardwise.fsdp
import shardwise.parallel


def trained_and_saved(sizes: tuple[int, ...], path: str) -> None:
    reference, x = model_and_data()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    loss_of(reference, x).backward()
    torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    optimizer.step()

    meshes = Meshes.of(*sizes)
    model, _ = model_and_data()
    shard(model, meshes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    count, index = meshes.loss.size(), meshes.loss.get_local_rank()
    loss_of(model, x.chunk(count)[index]).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    dcp.save(get_model_state_dict(model), checkpoint_id=path)

    other, _ = model_and_data()
    shard(other, Meshes.of(*sizes))
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(other, state)
    for name, wanted in reference.named_parameters():
        found = other.get_parameter(name)
        torch.testing.assert_close(found.full_tensor(), wanted.detach(), msg=name)
    dist.barrier()


@pytest.mark.parametrize(
    "sizes", [pytest.param((1, 4, 1, 2), marks=pytest.mark.slow), (1, 2, 2, 4)]
)
def test_experts_and_dense_layers_are_trained_clipped_saved_and_loaded(
    workers4: sw.Workers, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    workers4.run(trained_and_saved, sizes, str(tmp_path))


def torchs_meshes() -> None:
    """Sub-meshes of torch's own, one unflattened and one flattened, beside each other."""
    world = torch_meshes.init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
    dense = world._unflatten(0, (1, 2, 2), ("cp", "dp", "tp"))
    data = dense["cp", "dp"]._flatten("data")
    model = torch.nn.Linear(6, 6)
    reference = copy.deepcopy(model)
    sw.parallel.parallelize_module(model, dense["tp"], sw.parallel.ColwiseParallel())
    sw.fsdp.fully_shard(model, mesh=data)
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    model(x.chunk(2)[data.get_local_rank()]).square().sum().backward()
    with torch.no_grad():
        reference.load_state_dict({n: p.full_tensor() for n, p in model.named_parameters()})
    reference(x).square().sum().div(2).backward()
    for name, wanted in reference.named_parameters():
        found = model.get_parameter(name)
        assert found.device_mesh.mesh_dim_names == ("data", "tp")
        torch.testing.assert_close(found.grad.full_tensor(), wanted.grad, msg=name)


def test_sub_meshes_of_torch_go_together(workers4: sw.Workers) -> None:
    workers4.run(torchs_meshes)
