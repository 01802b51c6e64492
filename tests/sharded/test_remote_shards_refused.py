"""References to remote shards are refused on all ranks if RPC is not set up correctly."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from support.rpc import group_of, started, stopped
from support.sharded_tensors import chunks

import shardwise as sw
from shardwise import sharded
from shardwise.sharded import ChunkShardingSpec


@pytest.fixture(scope="module")
def workers3() -> Iterator[sw.Workers]:
    """Three ranks, of which only some are RPC workers. A process keeps its number as a worker."""
    with sw.Workers(3, timeout=60) as shared:
        yield shared


def not_running(missing):
    rank = dist.get_rank()
    spec, tensor = chunks(0, *range(3)), torch.zeros(1, 6)
    shard = sharded.Shard.from_tensor_and_offsets(tensor, [rank, 0], rank)
    x = sharded.ShardedTensor(spec, 3, 6)
    makes = [
        lambda: sharded.ShardedTensor(spec, 7, 6, init_rrefs=True),
        lambda: sharded.init_from_local_tensor(tensor, spec, 3, 6, init_rrefs=True),
        lambda: sharded.init_from_local_shards([shard], 3, 6, init_rrefs=True),
        lambda: sharded.init_from_local_shards_and_global_metadata(
            x.local_shards(), x.metadata(), init_rrefs=True
        ),
    ]
    for make in makes:
        wanted = rf"RPC to run on every rank.*not on ranks \[{missing}\]; call .*init_rpc\(name"
        with pytest.raises(RuntimeError, match=wanted):
            make()
    with pytest.raises(RuntimeError, match=r"init_rpc.* and make it with init_rrefs=True"):
        x.remote_shards()


@pytest.mark.slow
def test_without_rpc_an_error_says_how_to_start_it(workers3):
    workers3.run(not_running, "0, 1, 2")


def some_are_workers(path):
    started(path, [1, 0, None])
    not_running("2")
    group = group_of([0, 1])
    if group is not None:
        with pytest.raises(ValueError, match="rank 0 of the processes is 1 among the workers"):
            sharded.ShardedTensor(chunks(0, 0, 1), 7, 6, process_group=group, init_rrefs=True)
    dist.barrier()
    stopped()


@pytest.mark.slow
def test_missing_workers_and_other_numbers_are_refused_on_all_ranks(workers3, tmp_path):
    workers3.run(some_are_workers, str(tmp_path / "store"))


def test_simulated_ranks_are_told_that_they_have_no_rpc():
    def check():
        with pytest.raises(RuntimeError, match="simulated ranks are threads and have none: start"):
            sharded.ShardedTensor(chunks(0, *range(2)), 7, 6, init_rrefs=True)
        with pytest.raises(RuntimeError, match="names an RPC worker, and RPC is not running; simu"):
            sharded.empty(ChunkShardingSpec(0, ["trainer0/cpu"]), 3)

    sw.simulate(check, 2)
