"""The harness of torch's DTensor: it tells right from wrong, and nothing hangs it."""

import time
from typing import Any

import pytest
import theirs
import torch
import torch.distributed as dist

from shardwise import init_device_mesh, simulate
from shardwise.testing import Sample, Tolerance, _reference


def sample() -> Sample:
    generator = torch.Generator().manual_seed(0)
    return Sample(torch.randn(5, 4, generator=generator, dtype=torch.float64).requires_grad_())


def outcome(fn: Any, places: Any, plain: Any = None, **options: Any) -> str:
    shape = (2,) if len(places) == 1 else (2, 2)
    expected = _reference(plain or fn, sample(), gradients=True)
    options = {"tolerance": Tolerance(1e-7, 1e-9), **options}
    return theirs.outcome(fn, sample(), shape, [places], expected, **options)


@pytest.mark.parametrize("places", [["P"], [("S", 0)], [("S", 0), "P"], [("S", 1), ("S", 0)]])
def test_an_operator_of_theirs_passes_from_uneven_nested_and_partial_layouts(places: Any) -> None:
    assert outcome(lambda x: torch.softmax(x @ x.T, 0), places) == "pass"


def test_what_is_wrong_is_named() -> None:
    assert outcome(torch.sin, ["R"], plain=torch.cos) == "wrong value"
    assert outcome(torch.sin, ["R"], plain=torch.cos, random=True) == "pass"
    assert outcome(torch.sum, ["P"], plain=torch.sin) == "wrong shape"
    assert outcome(torch.sin, ["R"], plain=lambda x: x.sin().float()) == "wrong dtype"
    assert outcome(torch.max, ["R"], plain=lambda x: x.max(0)) == "wrong number of results"
    assert outcome(lambda x: x, ["R"], plain=lambda x: 2 * x - x.detach()) == (
        "gradient: wrong gradient"
    )


def test_an_operator_they_do_not_know_has_no_strategy() -> None:
    assert outcome(lambda x: torch.cdist(x, x), [("S", 0)]) == "no strategy"


def test_what_draws_random_numbers_is_found_also_if_it_is_seeded() -> None:
    def seeded(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return torch.nn.functional.dropout(x)

    assert theirs.draws(seeded, sample())
    assert not theirs.draws(torch.sin, sample())


def test_an_error_of_one_rank_ends_the_others_at_once() -> None:
    def fails_on_one(x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            raise ValueError("only here\nand more")
        return x.full_tensor()  # type: ignore[attr-defined,no-any-return]

    start = time.monotonic()
    found = outcome(fails_on_one, [("S", 0)], plain=torch.sin)
    assert found == "raises ValueError: only here"
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("other", [lambda x: x.to_local(), lambda x: x.sum().full_tensor()])
def test_ranks_that_do_not_meet_are_an_error(other: Any) -> None:
    def apart(x: torch.Tensor) -> Any:
        return other(x) if dist.get_rank() == 1 else x.full_tensor()  # type: ignore[attr-defined]

    with torch.no_grad():
        assert outcome(apart, [("S", 0)], plain=torch.sin).startswith("raises DisagreementError")


def test_what_does_not_end_is_stopped_and_the_next_case_runs() -> None:
    def endless(x: torch.Tensor) -> torch.Tensor:
        while True:
            pass

    assert outcome(endless, ["R"], plain=torch.sin, seconds=0.2) == "takes too long"
    assert outcome(torch.sin, [("S", 0)]) == "pass"


def test_simulated_ranks_of_ours_run_before_and_after_in_the_same_process() -> None:
    def size() -> int:
        return init_device_mesh("cpu", (3,)).size()

    assert simulate(size, 3) == [3, 3, 3]
    assert outcome(torch.sin, [("S", 0)]) == "pass"
    assert not dist.is_initialized()
    assert simulate(size, 3) == [3, 3, 3]
