"""torch.distributed.checkpoint.async_save with torch's own stagers: what is stored is the state at
the time of the call, whatever changes afterwards, and loads into any layout."""

import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.stateful import Stateful

import shardwise as sw
from shardwise import Partial, Replicate, Shard, sharded
from shardwise.fsdp import fully_shard
from shardwise.parallel import shard_module

WHOLE = torch.arange(42.0).reshape(7, 6)  # which four ranks cannot share equally
STAGERS = {
    "by default": dict,
    "blocking": lambda: {"async_stager": BlockingAsyncStager()},
    "shared memory": lambda: {
        "async_stager": DefaultStager(StagingOptions(False, True, False, False))
    },
    "in a thread": lambda: {
        "async_stager": DefaultStager(StagingOptions(False, False, True, False))
    },
}


def state_of(mesh):
    torch.manual_seed(0)
    pairs = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    fully_shard(model, mesh=mesh)
    spec = sharded.ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in range(4)])
    shards = sharded.zeros(spec, 7, 6)
    shards.fill_(5.0)
    return {
        "split": sw.distribute_tensor(WHOLE, mesh, [Shard(1)]),
        "twice": sw.distribute_tensor(WHOLE, pairs, [Shard(0), Shard(0)]),
        "empty": sw.distribute_tensor(WHOLE[:2], mesh, [Shard(0)]),
        "whole": sw.distribute_tensor(WHOLE, mesh, [Replicate()]),
        "shards": shards,
        "plain": WHOLE.clone(),
        "model": model.state_dict(),
        "step": 3,
    }


def tensors_in(state):
    flat = {**state, **{f"model.{name}": each for name, each in state["model"].items()}}
    return {name: each for name, each in flat.items() if isinstance(each, torch.Tensor)}


def full(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def stored(path, options):
    mesh = sw.init_device_mesh("cpu", (4,))
    state = state_of(mesh)
    wanted = {name: full(each) for name, each in tensors_in(state).items()}
    response = dcp.async_save(state, checkpoint_id=path, **options)
    if hasattr(response, "staging_completion"):
        response.staging_completion.result()
        response = response.upload_completion
    with torch.no_grad():
        for each in tensors_in(state).values():
            each.zero_()
    response.result()
    target = {
        **{name: torch.zeros(each.shape) for name, each in wanted.items() if "." not in name},
        "model": {
            name: sw.zeros(*each.shape, device_mesh=mesh, placements=[Replicate()])
            for name, each in state["model"].items()
        },
        "step": 0,
        "shards": sharded.zeros(state["shards"].sharding_spec(), 7, 6),
        "split": sw.zeros(7, 6, device_mesh=mesh, placements=[Shard(0)]),
    }
    dcp.load(target, checkpoint_id=path)
    assert target["step"] == 3
    for name, each in tensors_in(target).items():
        assert torch.equal(full(each), wanted[name]), name


def stored_in_threads(path):
    group = dist.new_group()  # of its own: this thread goes on to use the default one
    for name, make in STAGERS.items():
        stored(os.path.join(path, name), {**make(), "process_group": group})


def test_what_is_stored_is_the_state_at_the_time(workers4, tmp_path):
    workers4.run(stored_in_threads, str(tmp_path))


def stored_by_a_process(path):
    options = StagingOptions(False, True, False, False)
    stager = DefaultStager(options)
    by_process = {"async_checkpointer_type": AsyncCheckpointerType.PROCESS, "async_stager": stager}
    stored(path, by_process)


@pytest.mark.slow
def test_a_process_may_store_it(workers4_apart, tmp_path):
    workers4_apart.run(stored_by_a_process, str(tmp_path))


def stored_twice(path):
    """A stager that is kept copies into the memory of its last copy."""
    mesh = sw.init_device_mesh("cpu", (4,))
    group, stager = dist.new_group(), DefaultStager(StagingOptions(False, False, False, False))
    x = sw.distribute_tensor(WHOLE, mesh, [Shard(0)])
    for step in range(2):
        name = os.path.join(path, str(step))
        response = dcp.async_save(
            {"x": x}, checkpoint_id=name, async_stager=stager, process_group=group
        )
        response.result()
        x.add_(1)
    for step in range(2):
        target = {"x": torch.zeros(7, 6)}
        dcp.load(target, checkpoint_id=os.path.join(path, str(step)))
        assert torch.equal(target["x"], WHOLE + step)
    stager.close()


def test_a_stager_is_used_again(workers4, tmp_path):
    workers4.run(stored_twice, str(tmp_path))


def stored_pending(path):
    mesh = sw.init_device_mesh("cpu", (4,))
    x = sw.DTensor.from_local(WHOLE, mesh, [Partial()])
    with pytest.raises(BaseException, match="pending a reduction"):
        dcp.async_save({"x": x}, checkpoint_id=path, process_group=dist.new_group()).result()


def test_pending_sums_are_refused(workers4, tmp_path):
    workers4.run(stored_pending, str(tmp_path))


# ---- as torchtitan's checkpointer does: wrappers of the model and the optimizer, all names flat


class ModelWrapper(Stateful):
    def __init__(self, model):
        self.model = model

    def state_dict(self):
        return get_model_state_dict(self.model)

    def load_state_dict(self, state_dict):
        set_model_state_dict(self.model, state_dict, options=StateDictOptions(strict=False))


class OptimizerWrapper(Stateful):
    options = StateDictOptions(flatten_optimizer_state_dict=True)

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        return get_optimizer_state_dict(self.model, self.optimizer, options=self.options)

    def load_state_dict(self, state_dict):
        set_optimizer_state_dict(
            self.model, self.optimizer, optim_state_dict=state_dict, options=self.options
        )


def in_layout(kind, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
    if kind == "tp":
        mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        shard_module(model, mesh, {"0.*": {"tp": Shard(0)}})
    elif kind == "fsdp":
        fully_shard(model, mesh=sw.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)))
    else:
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        shard_module(model, mesh["tp"], {"0.*": {"tp": Shard(0)}})
        fully_shard(model, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def trained(model, optimizer, steps):
    for _ in range(steps):
        loss = model(torch.ones(4, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [full(each.detach()) for each in model.parameters()]


def resumed(path):
    model, optimizer = in_layout("fsdp", 0)
    trained(model, optimizer, 2)
    states = {"model": ModelWrapper(model), "optimizer": OptimizerWrapper(model, optimizer)}
    flat = {**states["model"].state_dict(), **states["optimizer"].state_dict()}
    assert all("." in name for name in flat)
    response = dcp.async_save(states, checkpoint_id=path, process_group=dist.new_group())
    wanted = trained(model, optimizer, 2)  # while it is stored
    response.result()
    for kind in ("fsdp", "fsdp and tp", "tp"):
        other, others_optimizer = in_layout(kind, 1)
        loaded = {
            "model": ModelWrapper(other),
            "optimizer": OptimizerWrapper(other, others_optimizer),
        }
        dcp.load(loaded, checkpoint_id=path)
        for found, each in zip(trained(other, others_optimizer, 2), wanted, strict=True):
            torch.testing.assert_close(found, each, msg=lambda text, kind=kind: f"{kind}: {text}")


def test_training_resumes_in_another_layout(workers4, tmp_path):
    workers4.run(resumed, str(tmp_path))
