"""Torch's threaded process group: each thread of a test is a rank, with shardwise too."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.testing._internal.common_distributed import (
    MultiThreadedTestCase,
    spawn_threads_and_init_comms,
)

import shardwise as sw
from shardwise import Partial, Replicate, Shard, sharded
from shardwise.fsdp import fully_shard
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own, of its own names


def on_threads(check, size=4):
    """Run a function as every rank of torch's threaded process group."""
    results = [None] * size

    def run(_):
        results[dist.get_rank()] = check()

    spawn_threads_and_init_comms(run, world_size=size)(None)
    return results


def test_each_thread_is_a_rank_of_its_own_world():
    def check():
        mesh = sw.init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        return mesh.get_rank(), mesh.get_local_rank("tp"), mesh["dp"].mesh.tolist()

    assert on_threads(check) == [(0, 0, [0, 2]), (1, 1, [1, 3]), (2, 0, [0, 2]), (3, 1, [1, 3])]


def test_the_process_is_alone_before_and_after():
    def world_size():
        return sw.DeviceMesh("cpu", [0]).size(), sw.core.world.current().size

    before = world_size()
    on_threads(lambda: sw.init_device_mesh("cpu", (4,)))
    assert world_size() == before == (1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_collectives_give_what_simulated_ranks_get(dtype):
    def check():
        group = sw.communicator(sw.init_device_mesh("cpu", (4,)))
        rank = group.index
        x = (torch.arange(12).reshape(6, 2) * (rank + 1) % 5).to(dtype)
        sizes = [0, 1, 2, 3]
        received = torch.zeros(2, dtype=dtype)
        group.exchange({(rank + 1) % 4: x[1]}, {(rank - 1) % 4: received})
        large = torch.full((1 << 19,), rank).to(dtype)  # travels by messages elsewhere
        group.barrier()
        return [
            *(group.all_reduce(x, op) for op in ("sum", "max", "min", "product")),
            group.all_reduce(x.clone(), in_place=True),
            group.all_gather(x[:rank], 0, sizes),
            group.all_gather(x[:, :1], 1),
            group.reduce_scatter(x, 0, sizes),
            *group.all_to_all(list(x.split(sizes)), [(rank, 2)] * 4),
            group.broadcast(x, 2),
            group.scatter(x[:rank], list(x.split(sizes)) if rank == 1 else None, 1),
            *(group.gather(x[:rank], [(size, 2) for size in sizes], 3) or []),
            group.all_gather_into(x.reshape(-1), torch.empty(4, 12, dtype=dtype)),
            received,
            group.all_reduce(large),
            group.gather_objects({"rank": rank}),
        ]

    for ours, expected in zip(on_threads(check), sw.simulate(check, 4), strict=True):
        for one, other in zip(ours, expected, strict=True):
            is_same = torch.equal if isinstance(one, torch.Tensor) else (lambda a, b: a == b)
            assert is_same(one, other)


def test_messages_between_two_ranks_are_refused():
    def check():
        group = sw.communicator(sw.init_device_mesh("cpu", (2,)))
        with pytest.raises(sw.ShardwiseError, match="no messages"):
            group.send(torch.ones(1), 1 - group.index)
        with pytest.raises(sw.ShardwiseError, match="processes"):
            sw.init_device_mesh("cpu", (2,)).abort()

    on_threads(check, 2)


@pytest.mark.parametrize(
    "placements",
    [
        [Shard(0), Shard(1)],
        [Shard(0), Shard(0)],
        [Replicate(), Shard(1)],
        [Partial(), Shard(0)],
    ],
)
def test_dtensors_compute_as_one_process(placements):
    full = torch.arange(35.0).reshape(5, 7) / 10

    def check():
        mesh = sw.init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        x = sw.distribute_tensor(full, mesh, placements).requires_grad_()
        y = (x @ x.T).softmax(0).square().sum()
        y.backward()
        return y.full_tensor().detach(), x.grad.full_tensor()

    x = full.clone().requires_grad_()
    expected = (x @ x.T).softmax(0).square().sum()
    expected.backward()
    for value, grad in on_threads(check):
        torch.testing.assert_close(value, expected.detach())
        torch.testing.assert_close(grad, x.grad)


def test_random_tensors_fit_together():
    def check():
        mesh = sw.init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        drawn = [sw.rand(5, 7, device_mesh=mesh, placements=[Shard(0), Shard(1)]) for _ in range(3)]
        return torch.stack([each.full_tensor() for each in drawn])

    first, *others = on_threads(check)
    assert all(torch.equal(each, first) for each in others)
    assert not torch.equal(first[0], first[1])


def model():
    made = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))
    with torch.no_grad():
        for parameter in made.parameters():
            count = torch.arange(parameter.numel()).reshape(parameter.shape)
            parameter.copy_(count / 50 - 0.3)
    return made


def test_fsdp_over_tensor_parallelism_trains_as_one_process():
    inputs = torch.arange(48.0).reshape(8, 6) / 10

    def trained(made, mean_of=1, mine=slice(None)):
        optimizer = torch.optim.AdamW(made.parameters(), lr=0.1)
        for _ in range(3):
            (made(inputs[mine]).square().sum() / mean_of).backward()
            optimizer.step()
            optimizer.zero_grad()
        return made

    def check():
        mesh = sw.init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        made = model()
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(made, mesh["tp"], plan)
        fully_shard(made[0], mesh=mesh["dp"])
        fully_shard(made, mesh=mesh["dp"])
        at = 4 * mesh.get_local_rank("dp")
        trained(made, mine=slice(at, at + 4))
        return [each.full_tensor().detach() for each in made.parameters()]

    expected = trained(copy.deepcopy(model()), mean_of=2)
    for parameters in on_threads(check):
        for one, other in zip(parameters, expected.parameters(), strict=True):
            torch.testing.assert_close(one, other.detach())


def test_sharded_tensors_move():
    whole = torch.arange(30.0).reshape(10, 3)

    def check():
        spec = sharded.ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in (2, 0, 1, 3)])
        x = spec.shard(whole)
        x.reshard(sharded.ChunkShardingSpec(1, ["rank:0/cpu", "rank:1/cpu"]))
        return x.full_tensor()

    assert all(torch.equal(each, whole) for each in on_threads(check))


def test_torchs_own_collectives_take_our_groups_and_refuse_shards():
    def check():
        mesh = sw.init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        mine = torch.tensor([float(mesh.get_rank())])
        dist.all_reduce(mine, group=mesh.get_group("tp"))
        with pytest.raises(sw.DispatchError, match="to_local"):
            dist.all_reduce(sw.distribute_tensor(torch.ones(4), mesh["tp"], [Shard(0)]))
        return mine.item(), functional.all_reduce(mine, "sum", mesh["dp"]).item()

    assert on_threads(check) == [(1, 6), (1, 6), (5, 6), (5, 6)]


def test_a_rank_that_fails_ends_the_others():
    def check():
        group = sw.communicator(sw.init_device_mesh("cpu", (4,)))
        if group.index == 2:
            raise ValueError("rank 2 fails")
        group.all_reduce(torch.ones(3))

    with pytest.raises(RuntimeError, match="rank 2 fails"):
        on_threads(check)


def test_worlds_follow_each_other():
    def check():
        mesh = sw.init_device_mesh("cpu", (3,))
        x = sw.distribute_tensor(torch.arange(7.0), mesh, [Shard(0)])
        return x.sum().item()

    for _ in range(3):
        assert on_threads(check, 3) == [21.0] * 3


class TestCase(MultiThreadedTestCase):
    """A test as torch's own are written."""

    world_size = 3

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def test_a_dtensor_is_gathered(self):
        mesh = sw.init_device_mesh("cpu", (self.world_size,))
        x = sw.distribute_tensor(torch.arange(7.0), mesh, [Shard(0)])
        assert x.to_local().shape == ((3,), (3,), (1,))[self.rank]
        assert torch.equal(x.full_tensor(), torch.arange(7.0))
