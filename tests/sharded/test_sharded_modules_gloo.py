"""A module with sharded parameters trains on real ranks, all or some of them, as in one process."""

import torch
import torch.distributed as dist
from support.sharded_tensors import chunks
from torch import nn, optim

from shardwise.sharded import (
    ShardedOptimizer,
    ShardingPlan,
    load_with_process_group,
    named_params_with_sharded_tensor,
    shard_module,
)

TOKENS = torch.tensor([[0, 3, 6], [2, 2, 5]])


def built():
    torch.manual_seed(0)
    return nn.Sequential(nn.EmbeddingBag(7, 4, mode="sum"), nn.Tanh(), nn.Linear(4, 3))


def train(model, optimizer, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        model(TOKENS).square().sum().backward()
        optimizer.step()


def trained_by_pairs(path):
    expected = built()
    train(expected, optim.Adam(expected.parameters(), lr=0.1))
    for pair in ([0, 1], [2, 3]):
        group = dist.new_group(pair)
        if dist.get_rank() not in pair:
            continue
        rows = chunks(0, *reversed(pair))
        model = built()
        with torch.no_grad():  # only the source's parameters count
            model[2].weight.mul_(1 if dist.get_rank() == pair[1] else 0)
        plan = ShardingPlan({"0.weight": rows, "2.weight": rows})
        shard_module(model, plan, src_rank=1, process_group=group)
        named = dict(named_params_with_sharded_tensor(model))
        optimizer = ShardedOptimizer(named, optim.Adam, lr=0.1)
        train(model, optimizer, 2)
        file = f"{path}/state.{dist.get_rank()}"
        torch.save(optimizer.state_dict(), file)
        resumed = ShardedOptimizer(named, optim.Adam, lr=0.3)
        resumed.load_state_dict(_loaded(file, group))
        train(model, resumed, 1)
        for name in ("0.weight", "2.weight"):
            found = model.get_parameter(name).detach().full_tensor()
            torch.testing.assert_close(found, expected.get_parameter(name).detach())


def _loaded(file, group):
    with load_with_process_group(group):
        return torch.load(file, weights_only=False)


def test_pairs_of_ranks_train_and_resume(workers4, tmp_path):
    workers4.run(trained_by_pairs, str(tmp_path))
