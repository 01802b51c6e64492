"""References to the shards of other ranks, over the RPC of real processes."""

import copy
import gc
import pickle
import time
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from support.rpc import group_of, started, stopped
from support.sharded_tensors import chunks, cut
from torch.distributed import rpc

import shardwise as sw
from shardwise import sharded
from shardwise.sharded import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata, remote

WHOLE = torch.arange(42.0).reshape(7, 6)


class Running:
    """Four ranks with RPC, started at the first use, and again after a failure."""

    def __init__(self, paths) -> None:
        self.paths = paths
        self.workers: sw.Workers | None = None

    def get(self) -> sw.Workers:
        if self.workers is None or not self.workers.is_alive:
            self.workers = sw.Workers(4, timeout=60)
            self.workers.run(started, str(self.paths.mktemp("rpc") / "store"))
        return self.workers


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[Running]:
    shared = Running(tmp_path_factory)
    yield shared
    if shared.workers is not None and shared.workers.is_alive:
        shared.workers.run(stopped)
        shared.workers.close()


@pytest.fixture
def workers(running: Running) -> sw.Workers:
    return running.get()


# ---- on each rank


def boxes(first, second):
    """Two shards on the first rank, one on the second."""
    return cut(
        ([0, 0], [3, 6], first),
        ([3, 0], [4, 2], second),
        ([3, 2], [4, 4], first),
    )


def filled(spec, group=None, **options):
    made = sharded.ShardedTensor(spec, 7, 6, process_group=group, init_rrefs=True, **options)
    with torch.no_grad():
        return made.copy_(WHOLE)


def eventually(holds):
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        gc.collect()
        time.sleep(0.01)


def add(reference, number):
    with torch.no_grad():
        reference.local_value().tensor.add_(number)


def check_references(x, expected):
    """Check that `x.remote_shards()` gives the shards of all other ranks; all ranks call it."""
    meet(x)  # all have written what is read here
    found = x.remote_shards()
    here = dist.get_rank()
    by_rank = {rank: len(x._ownership.boxes_of(rank)) for rank in x._group.ranks if rank != here}
    assert {rank: len(each) for rank, each in found.items()} == {
        rank: count for rank, count in by_rank.items() if count
    }
    for rank, references in found.items():
        boxes = x._ownership.boxes_of(rank)
        for reference, box in zip(references, boxes, strict=True):
            assert reference.owner().id == rank and not reference.is_owner()
            shard = reference.to_here()
            assert isinstance(shard, sharded.Shard) and shard.metadata.box == box
            assert torch.equal(shard.tensor, expected[box.slices])
    meet(x)  # all have read it


def meet(x):
    x._group.communicator.gather_objects(None)


# ---- tests


def read_and_updated(ranks):
    group = group_of(ranks)
    if group is None:
        return
    for spec in (chunks(0, *ranks), chunks(1, *ranks[::-1]), boxes(ranks[-1], ranks[0])):
        x = filled(spec, group)
        check_references(x, WHOLE)
        for references in x.remote_shards().values():
            for reference in references:
                rpc.rpc_sync(reference.owner(), add, (reference, 1))
                rpc.remote(reference.owner(), add, (reference, 1)).to_here()
        meet(x)
        # Each shard was updated by all ranks but its owner.
        assert torch.equal(x.full_tensor(), WHOLE + 2 * (len(ranks) - 1))
        check_references(x, WHOLE + 2 * (len(ranks) - 1))


@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [1, 2], [3, 0, 2]])
def test_every_rank_reads_and_updates_the_shards_of_the_others(workers, ranks):
    workers.run(read_and_updated, ranks)


def called_by_proxy():
    x = filled(chunks(0, *range(4)))
    (reference,) = x.remote_shards()[(dist.get_rank() + 1) % 4]
    made = reference.rpc_sync().from_tensor_and_offsets(torch.zeros(2), [0], 3)
    assert made.metadata == ShardMetadata([0], [2], "rank:3/cpu")
    meet(x)


def test_a_method_of_a_remote_shard_is_called_through_its_reference(workers):
    workers.run(called_by_proxy)


def made_of_pieces():
    rank = dist.get_rank()
    shard = sharded.Shard.from_tensor_and_offsets(WHOLE[rank : rank + 1].clone(), [rank, 0], rank)
    x = sharded.init_from_local_shards([shard], 4, 6, init_rrefs=True)
    check_references(x, WHOLE[:4])
    tensor = WHOLE[rank : rank + 1].clone().requires_grad_()
    y = sharded.init_from_local_tensor(tensor, chunks(0, *range(4)), 4, 6, init_rrefs=True)
    check_references(y, WHOLE[:4])
    z = sharded.init_from_local_shards_and_global_metadata(
        y.local_shards(), y.metadata(), init_rrefs=True
    )
    check_references(z, WHOLE[:4])
    torch.manual_seed(0)
    for make in (sharded.ones, sharded.randn):
        made = make(chunks(0, *range(4)), 7, 6, init_rrefs=True)
        check_references(made, made.full_tensor())


def test_every_way_to_make_a_tensor_gives_references(workers):
    workers.run(made_of_pieces)


def filled_late():
    """Rank 1 fills its shard late, and no rank sees the elements from before."""
    if dist.get_rank() == 1:
        fill = torch.Tensor.fill_

        def slowly(tensor, value):
            time.sleep(0.3)
            return fill(tensor, value)

        torch.Tensor.fill_ = slowly
    try:
        x = sharded.ones(chunks(0, *range(4)), 7, 6, init_rrefs=True)
    finally:
        if dist.get_rank() == 1:
            torch.Tensor.fill_ = fill
    for references in x.remote_shards().values():
        assert all(bool((each.to_here().tensor == 1).all()) for each in references)
    meet(x)


def test_what_a_factory_makes_is_filled_before_others_can_read_it(workers):
    workers.run(filled_late)


def numbered_apart():
    rank = dist.get_rank()
    alone = sw.DeviceMesh("cpu", [rank])
    kept = [filled(chunks(0, rank), alone) for _ in range(rank)]
    assert all(each.remote_shards() == {} for each in kept)
    x, y = filled(chunks(0, *range(4))), filled(chunks(1, *range(4)))
    check_references(x, WHOLE)
    check_references(y, WHOLE)


def test_ranks_may_have_made_different_numbers_of_tensors(workers):
    workers.run(numbered_apart)


def let_go():
    eventually(lambda: not remote._delivered)
    x = filled(boxes(2, 1))
    shards = [weakref.ref(each.tensor) for each in x.local_shards()]
    references = x.remote_shards()
    assert len(remote._delivered) == 1
    meet(x)
    group = x._group
    del x
    eventually(lambda: not remote._delivered)
    group.communicator.gather_objects(None)
    # As long as another rank has references, the owner's shards stay.
    held = [shard() is not None for shard in shards]
    group.communicator.gather_objects(None)
    del references
    eventually(lambda: all(shard() is None for shard in shards))
    return held


def test_with_the_last_reference_the_owner_lets_go_of_its_shard(workers):
    assert workers.run(let_go) == [[], [True], [True, True], []]


def refused_half_way():
    rank = dist.get_rank()
    good = sharded.zeros(chunks(0, *range(4)), 7, 6)
    shards = good.local_shards() if rank != 2 else []
    with pytest.raises(ValueError, match="rank 2: local_shards: expected 1, as many") as caught:
        sharded.init_from_local_shards_and_global_metadata(shards, good.metadata(), init_rrefs=True)
    assert str(caught.value).endswith(f"got 0 [rank {rank} of 4]")
    tensor = good.local_tensor() if rank != 1 else torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"tensor: expected .* \[2, 6\], got a tensor .* \[3, 3\]"):
        sharded.init_from_local_tensor(tensor, chunks(0, *range(4)), 7, 6, init_rrefs=True)
    del caught
    eventually(lambda: not remote._delivered)
    check_references(filled(chunks(0, *range(4))), WHOLE)


def test_what_one_rank_refuses_all_refuse_and_nothing_stays_behind(workers):
    workers.run(refused_half_way)


class Forgetful(dict):
    def __setitem__(self, key, value):
        pass


def undeliverable():
    before = remote._delivered
    if dist.get_rank() == 3:
        remote._delivered = Forgetful()
    try:
        with pytest.raises(RuntimeError, match="rank 0 could not deliver references to its shards"):
            filled(chunks(0, *range(4)))
    finally:
        remote._delivered = before


def test_a_delivery_that_fails_is_told_to_all(workers):
    workers.run(undeliverable)


def registered_again():
    x = filled(chunks(0, *range(4)))
    old = [weakref.ref(each.tensor) for each in x.local_shards()]
    assert x.reshard(boxes(3, 0)) is x
    check_references(x, WHOLE)
    eventually(lambda: all(each() is None for each in old))
    y = x.to(torch.float64)
    check_references(y, WHOLE.double())
    z = copy.deepcopy(y)
    check_references(z, WHOLE.double())
    for references in z.remote_shards().values():
        for reference in references:
            rpc.rpc_sync(reference.owner(), add, (reference, 1))
    meet(x)
    assert torch.equal(z.full_tensor(), WHOLE.double() + 3)
    assert torch.equal(y.full_tensor(), WHOLE.double())
    with pytest.raises(RuntimeError, match="init_rrefs=False"):
        y.clone().remote_shards()
    with pytest.raises(ValueError, match="resharding_spec"):  # of one rank, refused on all
        x.reshard("no spec" if dist.get_rank() == 1 else chunks(0, *range(4)))
    check_references(x, WHOLE)


def test_what_is_resharded_converted_or_copied_has_references_of_its_own(workers):
    workers.run(registered_again)


def shared_by_a_parameter():
    x = torch.nn.Parameter(filled(boxes(1, 2)))
    check_references(x, WHOLE)
    for references in x.remote_shards().values():
        for reference in references:
            rpc.rpc_sync(reference.owner(), add, (reference, 1))
    meet(x)
    assert torch.equal(x.full_tensor(), WHOLE + 3) and x.requires_grad  # 3 other ranks


def test_a_parameter_has_the_references_of_what_it_is_made_of(workers):
    workers.run(shared_by_a_parameter)


def pickled():
    data = pickle.dumps(filled(boxes(1, 2), requires_grad=True))
    y = pickle.loads(data)
    check_references(y, WHOLE)
    for references in y.remote_shards().values():
        assert all(each.to_here().tensor.requires_grad for each in references)
    meet(y)
    everywhere = y._group.communicator.gather_objects(data)
    wrong = data if dist.get_rank() else everywhere[1]  # rank 0 loads what rank 1 saved
    with pytest.raises(RuntimeError, match=r"local_rank: it was 1 when .* and is 0 here"):
        pickle.loads(wrong)


def test_a_pickle_is_loaded_with_references_by_all_ranks_or_none(workers):
    workers.run(pickled)


def placed_by_name():
    rank = dist.get_rank()
    spec = ChunkShardingSpec(0, [f"trainer{each}/cpu" for each in (2, 0, 3, 1)])
    x = filled(spec)
    assert x.local_tensor().shape[0] == [2, 1, 2, 2][rank]
    check_references(x, WHOLE)
    (reference,) = x.remote_shards()[rank - 1 if rank else 3]
    assert reference.to_here().metadata.placement.worker_name() == reference.owner_name()
    out = torch.empty(7, 6) if rank == 3 else None
    x.gather(3, out)
    assert rank != 3 or torch.equal(out, WHOLE)
    assert torch.equal(x.full_tensor(), WHOLE)
    assert torch.equal((x + 1).full_tensor(), WHOLE + 1)
    named = EnumerableShardingSpec(
        [
            ShardMetadata([0, 0], [7, 2], "trainer1/cpu"),
            ShardMetadata([0, 2], [7, 4], "trainer3"),
        ]
    )
    for after in (named, chunks(0, *range(4)), spec):
        x.reshard(after)
        assert torch.equal(x.full_tensor(), WHOLE) and x.sharding_spec() == after
    assert torch.equal(named.shard(WHOLE, 2).full_tensor(), WHOLE)
    shard = sharded.Shard(WHOLE[rank, None], ShardMetadata([rank, 0], [1, 6], f"trainer{rank}/cpu"))
    assert torch.equal(sharded.init_from_local_shards([shard], 4, 6).full_tensor(), WHOLE[:4])
    assert torch.equal(pickle.loads(pickle.dumps(x)).full_tensor(), WHOLE)
    with pytest.raises(ValueError, match="one of the RPC workers trainer0, trainer1, trainer2, tr"):
        sharded.empty(ChunkShardingSpec(0, ["tester/cpu"]), 3)


@pytest.mark.slow
def test_shards_are_placed_by_the_names_of_workers(workers):
    workers.run(placed_by_name)
