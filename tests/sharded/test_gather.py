"""gather and full_tensor: all shards on one rank, or on all."""

import pytest
import torch
from hypothesis import given, settings
from support.sharded_tensors import (
    DTYPES,
    chunks,
    cut,
    heard,
    numbers,
    rank_here,
    refusal,
    same,
)
from support.sharded_tilings import journeys

import shardwise as sw
from shardwise.sharded import (
    ShardedTensorError,
    zeros,
)


@given(journeys())
@settings(max_examples=60)
def test_all_ranks_and_any_one_can_have_the_whole(journey):
    ranks, size, (spec, *_) = journey
    whole = numbers(size)

    def run():
        x = spec.shard(whole)
        assert same(x.full_tensor(), whole)
        for dst in range(ranks):
            out = torch.empty_like(whole) if rank_here() == dst else None
            assert x.gather(dst, out) is None
            assert out is None or same(out, whole)

    sw.simulate(run, ranks)


# ---- gather


@pytest.mark.parametrize(
    "whole",
    [
        2.0**53 - torch.arange(6, dtype=torch.float64) + 0.5,
        1.0 + torch.arange(6, dtype=torch.float64) * 2**-52,
        2**60 + torch.arange(6),
        -(2**62) - 3 * torch.arange(6),
    ],
    ids=["large float64", "close float64", "int64 near 2^60", "int64 near -2^62"],
)
def test_every_bit_arrives(whole):
    def run():
        x = chunks(0, 2, 0, 1).shard(whole)
        out = torch.zeros_like(whole) if rank_here() == 1 else None
        x.gather(1, out)
        assert out is None or same(out, whole)
        assert same(x.full_tensor(), whole)

    sw.simulate(run, 3)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint64, torch.float8_e5m2, torch.int8], ids=str)
def test_every_dtype_arrives(dtype):
    whole = numbers([5, 2], dtype)

    def run():
        x = chunks(0, 1, 0).shard(whole)
        out = torch.empty_like(whole) if rank_here() == 0 else None
        x.gather(0, out)
        assert out is None or same(out, whole)
        assert same(x.full_tensor(), whole)

    sw.simulate(run, 2)


def test_nothing_is_padded():
    def run():
        x = cut(([0], [7], 1), ([7], [1], 2)).shard(numbers([8]))
        out = torch.empty(8, dtype=torch.float64) if rank_here() == 0 else None
        (event,) = heard(lambda: x.gather(0, out))
        assert event.bytes == (64 if rank_here() == 0 else 0)

    sw.simulate(run, 3)


def test_an_out_of_any_strides_is_written_to():
    def run():
        x = chunks(0, 0, 1).shard(numbers([4, 3]))
        memory = torch.zeros(3, 8, dtype=torch.float64)
        out = memory.t()[::2] if rank_here() == 0 else None
        x.gather(0, out)
        if out is not None:
            assert torch.equal(out, numbers([4, 3])) and memory[:, 1::2].sum() == 0

    sw.simulate(run, 2)


def test_a_parameter_is_gathered_without_its_history():
    def run():
        x = chunks(0, 0, 1).shard(numbers([4]).requires_grad_())
        out = torch.empty(4, dtype=torch.float64, requires_grad=True) if rank_here() == 0 else None
        x.gather(0, out)
        assert out is None or (out.is_leaf and same(out, numbers([4])))

    sw.simulate(run, 2)


@pytest.mark.parametrize(
    ("out", "options", "message"),
    [
        (None, {}, r"out: expected a tensor of size \(4,\) on the rank that gathers, got None"),
        (torch.zeros(5), {}, r"out: expected a tensor of size \(4,\), got \(5,\)"),
        (torch.zeros(4, 1), {}, r"out: expected a tensor of size \(4,\), got \(4, 1\)"),
        (torch.zeros(4, dtype=torch.bfloat16), {}, r"say gather\(dtype=torch.bfloat16\)"),
        (torch.zeros(4, dtype=torch.int64), {}, "expected torch.float32, or what holds it"),
        (torch.zeros(4, dtype=torch.bool), {}, "without loss; got torch.bool"),
        (torch.zeros(4).double(), {"enforce_dtype": True}, "as enforce_dtype says; got torch.fl"),
        (torch.zeros(4), {"dtype": torch.float64}, "expected torch.float64, or what holds it"),
        (torch.zeros(4, dtype=torch.float8_e4m3fn), {}, "without loss; got torch.float8_e4m3fn"),
    ],
)
def test_an_out_that_does_not_fit_is_refused_where_it_is_and_nobody_waits(out, options, message):
    def run():
        x = chunks(0, 0, 1, 2).shard(torch.arange(4.0))
        if rank_here() == 1:
            with pytest.raises(ShardedTensorError, match=message):
                x.gather(1, out, **options)
        else:
            assert x.gather(1, **options) is None
        assert x.full_tensor().tolist() == [0, 1, 2, 3]  # they are still in step

    sw.simulate(run, 3)


def test_an_out_on_another_rank_is_refused_there_and_nobody_waits():
    def run():
        x = chunks(0, 0, 1).shard(torch.arange(4.0))
        out = torch.zeros(4)
        if rank_here() == 0:
            assert "out: expected None on this rank, as rank 1 gathers" in refusal(
                lambda: x.gather(1, out)
            )
        else:
            x.gather(1, out)
        assert out.tolist() == ([0, 1, 2, 3] if rank_here() == 1 else [0] * 4)

    sw.simulate(run, 2)


@pytest.mark.parametrize("dst", [2, -1, "0", None])
def test_a_destination_that_is_no_rank_is_refused_on_all(dst):
    def run():
        x = chunks(0, 0, 1).shard(torch.arange(4.0))
        assert f"got {dst!r}" in refusal(lambda: x.gather(dst))

    sw.simulate(run, 2)


@pytest.mark.parametrize(
    ("dtype", "out"),
    [
        (torch.float32, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.complex64),
        (torch.bool, torch.uint8),
        (torch.bool, torch.float16),
        (torch.int8, torch.int64),
        (torch.uint8, torch.int16),
    ],
    ids=str,
)
def test_an_out_that_holds_more_is_written_to(dtype, out):
    def run():
        x = chunks(0, 0, 1).shard(numbers([4], dtype))
        place = torch.zeros(4, dtype=out) if rank_here() == 0 else None
        x.gather(0, place)
        assert place is None or same(place, numbers([4], dtype).to(out))

    sw.simulate(run, 2)


def test_elements_are_converted_before_they_travel_if_that_is_asked_for():
    def run():
        x = chunks(0, 0, 1).shard(numbers([4]))
        out = torch.zeros(4, dtype=torch.float16) if rank_here() == 0 else None
        (event,) = heard(lambda: x.gather(0, out, dtype=torch.float16))
        assert out is None or out.tolist() == [1, 2, 3, 4]
        assert event.bytes == (4 if rank_here() == 0 else 0)
        again = torch.zeros(4, dtype=torch.float16) if rank_here() == 0 else None
        x.gather(0, again, dtype=torch.float16, enforce_dtype=True)
        assert again is None or same(again, out)

    sw.simulate(run, 2)


# ---- full_tensor


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_gradient_of_the_whole_is_the_shards_part_of_it(ranks):
    def run():
        x = chunks(0, ranks - 1, 0).shard(numbers([5]).requires_grad_())
        whole = x.full_tensor()
        # Also where there are no shards: all ranks run the same program.
        assert whole.requires_grad
        (whole**2).sum().backward()
        for shard in x.local_shards():
            assert torch.equal(shard.tensor.grad, 2 * shard.tensor)

    sw.simulate(run, ranks)


def test_the_whole_requires_no_gradient_where_nothing_is_recorded():
    def run():
        x = chunks(0, 0).shard(numbers([5]).requires_grad_())
        with torch.no_grad():
            assert not x.full_tensor().requires_grad
        assert not x.detach().full_tensor().requires_grad
        assert not zeros(chunks(0, 0), 3).full_tensor().requires_grad

    sw.simulate(run, 2)


def test_the_whole_does_not_share_memory_with_the_shards():
    def run():
        x = chunks(0, 0).shard(numbers([5]))
        x.full_tensor().zero_()
        assert same(x.full_tensor(), numbers([5]))

    sw.simulate(run, 1)
