"""reshard: from any shards to any others."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sharded_tensors import (
    DTYPES,
    chunks,
    cut,
    heard,
    is_cut_of,
    numbers,
    rank_here,
    refusal,
    same,
    shard_at,
)
from support.sharded_tilings import journeys

import shardwise as sw
from shardwise.sharded import (
    ChunkShardingSpec,
    Shard,
    ShardedTensorError,
    init_from_local_shards,
    transfer,
)

# ---- reshard: random pairs of specs


def owners_of(spec, size):
    """Return the rank that holds each element."""
    held = torch.full(tuple(size), -1)
    for each in spec.build_metadata(size, None).shards_metadata:
        held[each.box.slices] = each.placement.rank()
    return held


@given(journeys(), st.sampled_from(DTYPES), st.booleans())
@settings(max_examples=200)
def test_any_spec_follows_any_other_and_no_byte_travels_in_vain(journey, dtype, large):
    ranks, size, (first, *others) = journey
    whole = numbers(size, dtype)
    events = []

    def run():
        x = first.shard(whole)
        for spec in others:
            assert x.reshard(spec) is x
            assert is_cut_of(x, whole, spec)

    with pytest.MonkeyPatch.context() as patch, sw.listen(events.append):
        patch.setattr("shardwise.sharded.transfer.is_large", lambda size: large and size > 0)
        sw.simulate(run, ranks)
    moved = [event for event in events if event.cause.operator == "ShardedTensor.reshard"]
    paths = list(zip([first, *others], others, strict=False))
    for rank in range(ranks):
        needed = sum(
            int(((owners_of(to, size) == rank) & (owners_of(of, size) != rank)).sum())
            for of, to in paths
        )
        received = sum(event.bytes for event in moved if event.rank == rank)
        assert received == needed * whole.itemsize


# ---- reshard: by hand


def test_a_cycle_of_three_ranks():
    def run():
        x = chunks(0, 0, 1, 2).shard(numbers([7, 2]))
        for ranks in ((1, 2, 0), (2, 0, 1), (0, 1, 2)):
            assert is_cut_of(x.reshard(chunks(0, *ranks)), numbers([7, 2]), chunks(0, *ranks))

    sw.simulate(run, 3)


def test_a_tensor_without_dims_moves():
    def run():
        x = cut(([], [], 0)).shard(torch.tensor(5))
        x.reshard(cut(([], [], 1)))
        assert [each.tensor.item() for each in x.local_shards()] == [5] * rank_here()
        assert x.full_tensor().item() == 5

    sw.simulate(run, 2)


def test_a_shard_that_stays_is_not_copied():
    def run():
        x = cut(([0], [2], 0), ([2], [2], 0), ([4], [2], 1)).shard(numbers([6]))
        before = [each.tensor.data_ptr() for each in x.local_shards()]
        x.reshard(cut(([0], [2], 0), ([2], [4], 1)))
        if rank_here() == 0:
            assert [each.tensor.data_ptr() for each in x.local_shards()] == before[:1]
        assert same(x.full_tensor(), numbers([6]))

    sw.simulate(run, 2)


def test_the_same_shards_by_another_spec_do_not_move():
    def run():
        x = chunks(0, 0, 1).shard(numbers([4]))
        before = x.local_tensor()
        same_shards = cut(([0], [2], 0), ([2], [2], 1))
        assert heard(lambda: x.reshard(same_shards)) == []
        assert x.local_tensor() is before
        assert x.sharding_spec() is same_shards

    sw.simulate(run, 2)


def test_a_subgroup_moves_while_the_others_do_not_take_part():
    def run():
        if rank_here() == 2:
            return
        mesh = sw.DeviceMesh("cpu", [3, 0, 1])  # in no order
        x = chunks(0, 0, 1, 3).shard(numbers([5]), process_group=mesh)
        assert is_cut_of(x.reshard(chunks(0, 3, 0, 1)), numbers([5]), chunks(0, 3, 0, 1))
        out = torch.empty(5, dtype=torch.float64) if rank_here() == 3 else None
        x.gather(3, out)
        assert out is None or same(out, numbers([5]))
        assert "global ranks (0, 1, 3), got 2" in refusal(lambda: x.gather(2))

    sw.simulate(run, 4)


def test_shards_of_any_strides_move():
    whole = numbers([4, 6])

    def run():
        columns = whole[:, 3 * rank_here() : 3 * rank_here() + 3]
        x = init_from_local_shards(
            [Shard(columns, shard_at([0, 3 * rank_here()], [4, 3], rank_here()))], 4, 6
        )
        assert is_cut_of(x.reshard(chunks(0, 1, 0)), whole, chunks(0, 1, 0))

    sw.simulate(run, 2)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("rows", "resharding_spec: expected a ShardingSpec"),
        (chunks(2, 0, 1), "dim: expected one of the 2 dims"),
        (chunks(0, 0, 5), r"expected a rank of the process group, one of \(0, 1\); got rank:5"),
        (cut(([0, 0], [4, 4], 0)), "reaches beyond|nobody holds"),
        (
            ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/meta"]),
            r"expected placements on cpu.*got rank:1/meta.*to\(device\) first",
        ),
    ],
)
def test_a_spec_that_does_not_fit_leaves_the_tensor_as_it_was(spec, message):
    def run():
        x = chunks(0, 0, 1).shard(numbers([4, 5]))
        with pytest.raises(ShardedTensorError, match=message):
            x.reshard(spec)
        assert is_cut_of(x, numbers([4, 5]), chunks(0, 0, 1))

    sw.simulate(run, 2)


# ---- reshard: the way


@pytest.mark.parametrize(
    ("spec", "kinds"),
    [
        (chunks(0, 3, 2, 1, 0), ["exchange"]),  # each rank has one peer
        (chunks(0, 2), ["exchange"]),
        (chunks(1, 0, 1, 2, 3), ["all_to_all"]),  # each rank has three
        (cut(([0, 0], [4, 8], 0), ([4, 0], [4, 3], 2), ([4, 3], [4, 5], 3)), ["exchange"]),
        (cut(*(([row, 0], [1, 8], row // 2) for row in range(8))), ["exchange"]),  # of nothing
    ],
    ids=["reversed", "to one", "columns", "boxes", "rows"],
)
def test_small_moves_are_packed_only_if_there_are_more_messages_than_ranks(spec, kinds):
    def run():
        x = chunks(0, 0, 1, 2, 3).shard(numbers([8, 8]))
        events = heard(lambda: x.reshard(spec))
        assert is_cut_of(x, numbers([8, 8]), spec)
        return [event.kind for event in events]

    assert sw.simulate(run, 4) == [kinds] * 4


def test_a_move_that_is_made_again_is_not_planned_again():
    def run():
        x = chunks(0, 0, 1).shard(numbers([5, 7]))
        x.reshard(chunks(1, 1, 0)).reshard(chunks(0, 0, 1))

    known = transfer._cached_route
    known.cache_clear()
    sw.simulate(run, 2)
    assert known.cache_info().misses == 2 * 3  # on each rank, of shard and twice reshard
    sw.simulate(run, 2)
    assert known.cache_info().misses == 2 * 3


def test_the_ways_between_many_boxes_are_not_kept():
    boxes = cut(*(([row], [1], row % 2) for row in range(transfer._MOST_CACHED)))

    def run():
        assert is_cut_of(
            boxes.shard(numbers([transfer._MOST_CACHED])), numbers([transfer._MOST_CACHED]), boxes
        )

    transfer._cached_route.cache_clear()
    sw.simulate(run, 2)
    assert transfer._cached_route.cache_info().currsize == 0


# ---- reshard: gradients


def test_a_leaf_stays_a_leaf_and_its_gradient_moves_with_it():
    spec = cut(([0], [1], 2), ([1], [4], 0), ([5], [0], 1), ([5], [2], 2))

    def run():
        x = chunks(0, 1, 2, 0).shard(numbers([7]).requires_grad_())
        for shard in x.local_shards():
            shard.tensor.grad = shard.tensor.detach() * 10
        x.reshard(spec)
        assert x.requires_grad and x.is_leaf
        assert is_cut_of(x, numbers([7]), spec)
        assert is_cut_of(x.grad, numbers([7]) * 10, spec)

    sw.simulate(run, 3)


def test_a_gradient_that_some_ranks_alone_have_moves_as_if_others_were_zero():
    def run():
        x = chunks(0, 0, 1).shard(numbers([4]).requires_grad_())
        if rank_here() == 0:
            x.local_tensor().grad = torch.ones(2, dtype=torch.float64)
        x.reshard(chunks(0, 1, 0))
        assert x.local_tensor().grad.tolist() == [float(rank_here() == 1)] * 2

    sw.simulate(run, 2)


def test_a_leaf_without_gradient_moves_without_one():
    def run():
        x = chunks(0, 0, 1).shard(numbers([4]).requires_grad_())
        with torch.no_grad():
            x.reshard(chunks(0, 1, 0))
        assert x.requires_grad and x.is_leaf and x.grad is None
        x.local_tensor().sum().backward()
        assert x.grad is not None

    sw.simulate(run, 2)


def weights(spec, size):
    """Return factors for this rank's shards, a different one for each element."""
    factors = torch.arange(2.0, 2 + numbers(size).numel(), dtype=torch.float64).reshape(size)
    described = spec.build_metadata(size, None).shards_metadata
    return [factors[each.box.slices] for each in described if each.placement.rank() == rank_here()]


@pytest.mark.parametrize(
    "spec",
    [
        chunks(1, 2, 0, 1),
        cut(([0, 0], [1, 4], 1), ([1, 0], [4, 2], 0), ([1, 2], [4, 2], 2), ([5, 0], [0, 4], 1)),
        cut(([0, 0], [5, 4], 2), ([0, 0], [0, 4], 0), ([0, 0], [0, 4], 1)),
    ],
    ids=["chunks", "boxes", "all to one"],
)
def test_gradients_of_what_was_computed_move_back(spec):
    size = [5, 4]
    factors = torch.arange(2.0, 22.0, dtype=torch.float64).reshape(size)

    def run():
        x = chunks(0, 0, 1).shard(numbers(size).requires_grad_())  # nothing on rank 2
        y = x * x
        y.reshard(spec)
        assert y.requires_grad and is_cut_of(y, numbers(size) ** 2, spec)
        pairs = zip(y.local_shards(), weights(spec, size), strict=True)
        sum((shard.tensor * factor).sum() for shard, factor in pairs).backward()
        for shard in x.local_shards():
            expected = (2 * numbers(size) * factors)[shard.metadata.box.slices]
            assert torch.equal(shard.tensor.grad, expected)

    sw.simulate(run, 3)


def test_a_move_can_be_differentiated_twice():
    def run():
        x = chunks(0, 0, 1).shard(numbers([4]).requires_grad_())
        y = x * x * x
        y.reshard(chunks(0, 1, 0))
        (first,) = torch.autograd.grad(y.local_tensor().sum(), x.local_tensor(), create_graph=True)
        assert torch.equal(first, 3 * x.local_tensor() ** 2)
        (second,) = torch.autograd.grad((first * 1).sum(), x.local_tensor())
        assert torch.equal(second, 6 * x.local_tensor())

    sw.simulate(run, 2)


def test_a_recorded_move_does_not_share_memory_with_what_it_came_from():
    def run():
        x = cut(([0], [2], 0), ([2], [2], 1), ([4], [2], 1)).shard(numbers([6]).requires_grad_())
        y = x * 1
        before = y.local_shards()[0].tensor
        y.reshard(cut(([0], [2], 0), ([2], [4], 1)))
        assert rank_here() == 1 or y.local_tensor().data_ptr() != before.data_ptr()

    sw.simulate(run, 2)


def test_without_gradients_what_was_computed_moves_and_forgets():
    def run():
        x = chunks(0, 0, 1).shard(numbers([4]).requires_grad_())
        y = x * 2
        with torch.no_grad():
            y.reshard(chunks(0, 1, 0))
        assert not y.requires_grad and not y.local_tensor().requires_grad

    sw.simulate(run, 2)


@pytest.mark.parametrize("others", [(0,), (0, 1)])
def test_a_recorded_move_that_leaves_a_rank_nothing_is_refused_on_all_ranks(others):
    # Also a rank that had nothing before: it would not take part in the backward move either.
    def run():
        x = chunks(0, 0, 1).shard(numbers([4, 4]).requires_grad_())
        y = x * 2
        message = refusal(lambda: y.reshard(chunks(1, *others)))
        assert f"ranks {[rank for rank in range(3) if rank not in others]} hold no" in message
        assert "empty shard" in message and "detach()" in message
        assert is_cut_of(y.detach().reshard(chunks(1, *others)), 2 * numbers([4, 4]))

    sw.simulate(run, 3)


def test_the_metadata_lists_shards_in_the_order_of_the_ranks_as_torchs_does():
    def run():
        x = chunks(0, 2, 0, 1).shard(numbers((5, 4)))

        def owners():
            return [each.placement.rank() for each in x.metadata().shards_metadata]

        assert owners() == [2, 0, 1]
        x.reshard(chunks(0, 2, 0, 1))  # nothing changes
        assert owners() == [2, 0, 1]
        for spec in (chunks(1, 1, 2, 0), chunks(1, 2, 1, 0), chunks(0, 2, 0, 1)):
            x.reshard(spec)
            assert owners() == [0, 1, 2]
            assert x.sharding_spec() == spec
            x.reshard(spec)
            assert owners() == [0, 1, 2]
            assert is_cut_of(x, numbers((5, 4)))

    sw.simulate(run, 3)
