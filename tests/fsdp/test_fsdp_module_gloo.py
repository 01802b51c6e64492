"""Sharded modules on real ranks: communication of the user's; modules that a rank leaves out."""

import os
from datetime import timedelta
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.fsdp import AllGather, GatherError, ReduceScatter, fully_shard

WIDTH = 8


class Net(nn.Module):
    """Layers of different sizes, of which a call may leave one out."""

    def __init__(self):
        super().__init__()
        sizes = [WIDTH, 2 * WIDTH, 3 * WIDTH, WIDTH]
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(sizes))
        self.adapter = nn.Linear(2 * WIDTH, 2 * WIDTH)

    def forward(self, x, skips=False):
        first, second, third = self.layers
        x = torch.tanh(first(x))
        if not skips:
            x = x + self.adapter(x)
        return third(torch.tanh(second(x)))


def made():
    torch.manual_seed(0)
    return Net().double()


def train(model, x):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [each.detach() for each in model.parameters()]


def whole_batch():
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Gathers(AllGather):
    calls = 0

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        Gathers.calls += 1
        return dist.all_gather_single(output_tensor, input_tensor, group, async_op)


class Reduces(ReduceScatter):
    calls = 0

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        Reduces.calls += 1
        return dist.reduce_scatter_single(output_tensor, input_tensor, op, group, async_op)


def with_custom_communication():
    mesh = sw.init_device_mesh("cpu", (2, 2), ("replicate", "shard"))
    model = made()
    for module in (*model.layers, model.adapter, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
        module.set_custom_all_gather(Gathers())
        module.set_custom_reduce_scatter(Reduces())
    info = model._fsdp_group.info
    row, column = divmod(mesh.get_rank(), 2)
    assert dist.get_process_group_ranks(info.shard_process_group) == [2 * row, 2 * row + 1]
    assert dist.get_process_group_ranks(info.replicate_process_group) == [column, column + 2]
    found = train(model, whole_batch().chunk(4)[mesh.get_rank()])
    # of four groups; one more as the order of the first forward was guessed wrong
    assert (Gathers.calls, Reduces.calls) == (25, 12)
    return [each.full_tensor() for each in found]


def test_torchs_own_collectives_may_be_used(workers4):
    expected = train(made(), whole_batch())
    for found in workers4.run(with_custom_communication):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def start_again(store, seconds):
    """Ranks that do not wait long."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), 4),
        rank=int(os.environ["RANK"]),
        world_size=4,
        timeout=timedelta(seconds=seconds),
    )


def leaves_one_out(store, seconds):
    """What the ranks are told."""
    start_again(store, seconds)
    mesh = sw.init_device_mesh("cpu", (4,), ("dp",))
    model = made()
    for module in (*model.layers, model.adapter, model):
        fully_shard(module, mesh=mesh)
        module.set_all_reduce_hook(lambda gradients: None)  # each travels alone
    model(whole_batch()).sum().backward()  # all connections are there
    dist.barrier()
    try:
        output = model(whole_batch(), skips=mesh.get_rank() == 2)
        output.square().mean().backward()
    except GatherError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return ""


def test_a_module_that_one_rank_leaves_out_is_named_in_time(workers4_apart, tmp_path):
    for text in workers4_apart.run(leaves_one_out, tmp_path / "store", 5.0):
        assert any(name in text for name in ("adapter", "layers."))
        assert "multiplies its output by 0" in text


def one_rank_evaluates(store, seconds):
    start_again(store, seconds)
    mesh = sw.init_device_mesh("cpu", (4,), ("dp",))
    model = fully_shard(made(), mesh=mesh)
    try:
        if mesh.get_rank() == 0:
            with torch.no_grad():
                model(whole_batch())
    except GatherError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return ""


@pytest.mark.slow
def test_a_rank_that_evaluates_alone_is_told_so_even_the_first_time(workers4_apart, tmp_path):
    first, *others = workers4_apart.run(one_rank_evaluates, tmp_path / "store", 4.0)
    assert first.startswith("the parameters of FSDPNet could not be gathered")
    assert "could not make a process group" in first and "Every rank of the mesh" in first
    assert others == ["", "", ""]
