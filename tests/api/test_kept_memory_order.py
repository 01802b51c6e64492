"""distribute_tensor keeps the order of the dims in memory, such as torch.channels_last."""

import pytest
import torch
from support.rules import full, ranks

import shardwise as sw
from shardwise import Partial, Replicate, Shard

WHOLE = {
    "channels_last": full(4, 6, 3, 5).to(memory_format=torch.channels_last),
    "channels_last_3d": full(2, 6, 3, 5, 2).to(memory_format=torch.channels_last_3d),
    "transposed": full(6, 5).t(),
    "permuted": full(4, 6, 3).permute(1, 2, 0),
    "contiguous": full(4, 6),
}
PLACEMENTS = [Shard(0), Shard(1), Replicate(), Partial()]


@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("source", [0, 1, None])
def test_strides_are_those_of_the_whole_tensor(kind, placement, source):
    whole = WHOLE[kind]

    def run(mesh):
        x = sw.distribute_tensor(whole, mesh, [placement], src_data_rank=source)
        assert torch.equal(x.full_tensor(), whole)
        assert x.stride() == whole.stride() and x._spec.stride == whole.stride()
        return x.to_local().untyped_storage().nbytes() == x.to_local().nbytes

    assert all(ranks(run, 2))


@pytest.mark.parametrize("count", [3, 4])
def test_uneven_and_empty_shards_keep_the_order_of_dims(count):
    whole = full(2, 6, 3, 5).to(memory_format=torch.channels_last)

    def run(mesh):
        x = sw.distribute_tensor(whole, mesh, [Shard(0)])
        assert torch.equal(x.full_tensor(), whole)
        if x.to_local().numel():
            assert x.to_local().is_contiguous(memory_format=torch.channels_last)
            assert x.is_contiguous(memory_format=torch.channels_last)

    ranks(run, count)


def test_gaps_and_overlaps_give_contiguous_shards():
    def run(mesh):
        for whole in (full(4, 6)[:, ::2], full(4, 1).expand(4, 3)):
            x = sw.distribute_tensor(whole, mesh, [Shard(0)])
            assert torch.equal(x.full_tensor(), whole) and x.to_local().is_contiguous()

    ranks(run)


def test_a_convolution_keeps_channels_last():
    whole = WHOLE["channels_last"]

    def run(mesh):
        x = sw.distribute_tensor(whole, mesh, [Shard(0)])
        weight = sw.distribute_tensor(full(2, 6, 3, 3), mesh)
        y = torch.nn.functional.conv2d(x, weight, padding=1)
        torch.testing.assert_close(
            y.full_tensor(), torch.nn.functional.conv2d(whole, full(2, 6, 3, 3), padding=1)
        )
        return y.is_contiguous(memory_format=torch.channels_last)

    assert all(ranks(run))
