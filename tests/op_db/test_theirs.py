"""The harness of torch's DTensor: it tells right from wrong, and nothing hangs it."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.op_db import theirs
from support.op_db.entries import Call, entries
from support.op_db.reference import reference

from shardwise import Partial, Replicate, Shard, init_device_mesh, simulate
from shardwise.testing import Sample


def call(fn: Any = torch.sin) -> Call:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(5, 4, generator=generator, dtype=torch.float64).requires_grad_()
    return Call(entries()["sin"], torch.float64, 0, Sample(numbers), lambda made: made, False, fn)


def outcome(fn: Any, *how: Any, plain: Any = None, **options: Any) -> str:
    expected = reference(call(plain or fn))
    assert expected is not None
    shape = (2,) * len(how)
    return theirs.outcomes(call(fn), shape, [(how,)], expected, **options)[0]


@pytest.mark.parametrize(
    "how",
    [
        [Shard(0)],
        [Partial()],
        [Shard(0), Partial()],
        [Shard(1), Shard(0)],
        [Shard(0), Shard(0)],
    ],
)
def test_an_operator_of_theirs_passes_from_uneven_nested_and_partial_layouts(how: Any) -> None:
    assert outcome(lambda x: x.exp().sum(0), *how) == "pass"


def test_what_is_wrong_is_named() -> None:
    def found(plain: Any) -> str:
        return outcome(torch.sin, Replicate(), plain=plain)

    assert found(torch.cos).startswith("wrong value")
    assert found(torch.sum).startswith("wrong shape")
    assert found(lambda x: x.sin().float()).startswith("wrong dtype")
    assert found(lambda x: x.sin().max(0)) == "1 results, expected 2"
    assert found(lambda x: 2 * x.sin() - x.sin().detach()).startswith("backward: wrong value")


def test_an_operator_they_do_not_know_has_no_strategy() -> None:
    assert outcome(lambda x: torch.cdist(x, x), Shard(0)) == "no strategy"


def test_an_error_of_one_rank_ends_the_others_at_once() -> None:
    def fails_on_one(x: Any) -> torch.Tensor:
        if dist.get_rank() == 1:
            raise ValueError("only here\nand more")
        return x.full_tensor()

    start = time.monotonic()
    assert outcome(fails_on_one, Shard(0), plain=torch.sin) == "raises ValueError: only here"
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("other", [lambda x: x.to_local(), lambda x: x.sum().full_tensor()])
def test_ranks_that_do_not_meet_are_an_error(other: Any) -> None:
    def apart(x: Any) -> Any:
        return other(x) if dist.get_rank() == 1 else x.full_tensor()

    found = outcome(apart, Shard(0), plain=torch.sin)
    assert found.startswith("raises DisagreementError")


def test_what_does_not_end_is_stopped_and_the_next_case_runs() -> None:
    def endless(x: torch.Tensor) -> torch.Tensor:
        while True:
            pass

    assert outcome(endless, Replicate(), plain=torch.sin, seconds=0.2) == "takes too long"
    assert outcome(torch.sin, Shard(0)) == "pass"


def test_simulated_ranks_of_ours_run_before_and_after_in_the_same_process() -> None:
    def size() -> int:
        return init_device_mesh("cpu", (3,)).size()

    assert simulate(size, 3) == [3, 3, 3]
    assert outcome(torch.sin, Shard(0)) == "pass"
    assert not dist.is_initialized()
    assert simulate(size, 3) == [3, 3, 3]


def test_what_torchs_own_tests_ask_for_is_the_values_of_even_cases() -> None:
    tensors = call().sample.tensors()
    assert theirs.is_even(tensors, (2,), ((Shard(1),),))
    assert theirs.is_even(tensors, (2,), ((Replicate(),),))
    assert not theirs.is_even(tensors, (2,), ((Shard(0),),))
    assert not theirs.is_even(tensors, (2,), ((Partial(),),))
    assert not theirs.is_even(tensors, (2, 2), ((Replicate(), Replicate()),))
    assert theirs.of_value("backward: wrong value") == "pass"
    assert theirs.of_value("wrong shape: [2]") == "wrong shape: [2]"
