"""Sharded tensors on four real gloo ranks; and torch's own beside them, where it is wrong.

torch's column is expected to fail, strictly: if it stops failing, the trap is gone there.
"""

import warnings
from itertools import permutations

import pytest
import torch
import torch.distributed as dist
from support import sharded_traps as cases
from support.sharded_tensors import chunks, cut
from support.torch_versions import torch_bugs

from shardwise.sharded import (
    Shard,
    ShardedStateError,
    ShardedTensorError,
    ShardMetadata,
    init_from_local_shards,
)

RANKS = cases.RANKS


def outcome(trap, name):
    """Return whether a program is right on all ranks."""
    lib = cases.shardwise(dist.new_group) if name == "shardwise" else cases.torch_own()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch would have DTensors used
            trap(lib)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return ""


@pytest.mark.parametrize("trap", cases.TRAPS, ids=lambda trap: trap.__name__)
def test_shardwise_is_right(workers4, trap):
    assert workers4.run(outcome, trap, "shardwise") == [""] * RANKS


NOT_ENDING = {
    cases.reshard_in_a_cycle_of_three,  # aborts the processes
    # Some ranks wait for another that has raised, or that was not meant to take part.
    cases.gather_in_a_subgroup,
    cases.gather_with_an_out_on_another_rank,
    cases.reshard_of_uneven_rows_to_columns,
    cases.zeros_like_keeps_the_group,
}
NO_LONGER_WRONG = {cases.gather_of_no_elements}
ENDING = [trap for trap in cases.TRAPS if trap not in NOT_ENDING | NO_LONGER_WRONG]


FIXED_IN: dict = {}  # none of them, up to torch 2.15


@pytest.mark.parametrize("trap", torch_bugs("ShardedTensor", ENDING, FIXED_IN))
def test_torch_is_right(workers4, trap):
    assert workers4.run(outcome, trap, "torch") == [""] * RANKS


# ---- moves


def through_all_orders():
    whole = torch.arange(27).reshape(9, 3) + 2**60
    x = chunks(0, 0, 1, 2, 3).shard(whole)
    for ranks in permutations(range(RANKS)):
        x.reshard(chunks(0, *ranks))
        for shard in x.local_shards():
            assert torch.equal(shard.tensor, whole[shard.metadata.box.slices])
    return x.local_shards()[0].metadata.shard_offsets


def test_rows_go_through_every_order_of_the_ranks(workers4):
    assert workers4.run(through_all_orders) == [[9, 0], [6, 0], [3, 0], [0, 0]]


def between_boxes():
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float64, torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex64):
        whole = torch.randn(6, 7, generator=generator).to(dtype)
        x = chunks(1, 3, 1).shard(whole, src_rank=2)
        for _ in range(3):
            # A cross of four boxes, each on any rank.
            row, column = torch.randint(0, 6, (2,), generator=generator).tolist()
            owners = torch.randint(0, RANKS, (4,), generator=generator).tolist()
            corners = [
                ([0, 0], [row, column]),
                ([0, column], [row, 7 - column]),
                ([row, 0], [6 - row, column]),
                ([row, column], [6 - row, 7 - column]),
            ]
            x.reshard(cut(*((*each, on) for each, on in zip(corners, owners, strict=True))))
            for shard in x.local_shards():
                expected = whole[shard.metadata.box.slices]
                assert torch.equal(shard.tensor.float(), expected.float())
        full = x.full_tensor()
        assert full.dtype == dtype and torch.equal(full.float(), whole.float())


def test_boxes_of_any_dtype_move(workers4):
    workers4.run(between_boxes)


def in_subgroups():
    rank = dist.get_rank()
    members = [rank % 2, rank % 2 + 2]
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]  # both at a time
    group = groups[rank % 2]
    whole = torch.arange(10.0) + 100 * (rank % 2)
    x = chunks(0, *members).shard(whole, src_rank=1, process_group=group)
    x.reshard(chunks(0, *reversed(members)))
    assert torch.equal(x.full_tensor(), whole)
    out = torch.empty(10) if rank == members[1] else None
    x.gather(members[1], out)
    assert out is None or torch.equal(out, whole)
    y = x + x
    assert torch.equal(y.full_tensor(), 2 * whole)
    with pytest.raises(ShardedStateError, match="outside the process group"):
        chunks(0, 0).shard(whole, process_group=groups[1 - rank % 2])


def test_two_groups_work_at_the_same_time(workers4):
    workers4.run(in_subgroups)


def gradients_back():
    rank = dist.get_rank()
    whole = torch.arange(12.0, dtype=torch.float64).reshape(4, 3)
    x = chunks(0, 0, 1, 2, 3).shard(whole.requires_grad_())
    y = x**2
    y.reshard(chunks(1, 3, 0, 1, 2))  # three columns: the last rank has an empty shard
    (y.local_tensor() ** 2).sum().backward()
    assert torch.equal(x.local_tensor().grad, (4 * whole.detach() ** 3)[rank : rank + 1])
    full = x.full_tensor()
    (full**2).sum().backward()
    expected = (4 * whole.detach() ** 3 + 2 * whole.detach())[rank : rank + 1]
    assert torch.equal(x.local_tensor().grad, expected)


def test_gradients_move_back(workers4):
    workers4.run(gradients_back)


def disagreeing():
    rank = dist.get_rank()
    tensor = torch.zeros(2, dtype=torch.float64 if rank == 2 else torch.float32)
    shard = Shard(tensor, ShardMetadata([2 * rank], [2], f"rank:{rank}/cpu"))
    messages = []
    for build in (
        lambda: init_from_local_shards([shard], 8),
        lambda: chunks(0, 0, 1).shard(None if rank == 1 else torch.zeros(4)),
    ):
        try:
            build()
        except ShardedTensorError as error:
            messages.append(str(error).rsplit(" [", 1)[0])
    return messages


def test_what_one_rank_has_wrong_all_are_told(workers4):
    (first, second), *others = workers4.run(disagreeing)
    assert "same dtype" in first and "of rank 0 has" in first and "of rank 2 has" in first
    assert second == "rank 1: tensor: expected a dense tensor, got None"
    assert others == [[first, second]] * 3
