"""Simulated ranks behave like processes where Python and torch keep state for a whole process."""

import cProfile
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

import shardwise as sw


def everybody() -> sw.Communicator:
    return sw.communicator(sw.init_device_mesh("cpu", (3,)))


def my_rank() -> int:
    return sw.init_device_mesh("cpu", (3,)).get_rank()


@contextmanager
def default_dtype(number: int) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype((torch.float32, torch.float64, torch.bfloat16)[number])
    yield
    torch.set_default_dtype(before)


@contextmanager
def deterministic(number: int) -> Any:
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode(number)
    yield
    torch.set_deterministic_debug_mode(before)


@contextmanager
def anomaly(number: int) -> Any:
    with torch.autograd.set_detect_anomaly(number > 0, check_nan=number > 1):
        yield


@contextmanager
def filters(number: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter(("error", "ignore", "always")[number])
        yield


@contextmanager
def added_filter(number: int) -> Any:
    warnings.filterwarnings("ignore", message=f"rank {number}")
    yield


@contextmanager
def recording(number: int) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn(f"rank {number}", stacklevel=1)
        everybody().barrier()
        warnings.warn(f"rank {number}", stacklevel=1)
        everybody().barrier()
        assert [str(each.message) for each in caught] == [f"rank {number}"] * 2
        yield


STATES: dict[str, tuple[Callable[[int], AbstractContextManager[Any]], Callable[[], Any]]] = {
    "default dtype": (default_dtype, torch.get_default_dtype),
    "deterministic": (deterministic, torch.get_deterministic_debug_mode),
    "anomaly": (
        anomaly,
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
    ),
    "filters": (filters, lambda: list(warnings.filters)),
    "added filter": (added_filter, lambda: list(warnings.filters)),
    "recorded": (recording, lambda: warnings.showwarning),
    "no_grad": (lambda n: torch.set_grad_enabled(n > 0), torch.is_grad_enabled),
    "inference": (lambda n: torch.inference_mode(n > 0), torch.is_inference_mode_enabled),
    "autocast": (
        lambda n: torch.autocast("cpu", enabled=n > 0),
        lambda: torch.is_autocast_enabled("cpu"),
    ),
    "device": (lambda n: torch.device(("cpu", "meta", "cpu")[n]), torch.get_default_device),
}


@pytest.mark.parametrize("name", STATES)
def test_what_a_rank_sets_stays_its_own_until_it_restores_it(name: str) -> None:
    within, now = STATES[name]
    before = now()

    def program() -> Any:
        rank, outside = my_rank(), now()
        with within(rank):
            mine = now()
            for _ in range(3):
                everybody().barrier()
                assert now() == mine
        everybody().barrier()
        if within is not added_filter:
            assert now() == outside
        return mine

    kept = sw.simulate(program, 3)
    assert now() == before
    assert any(kept[0] != each for each in kept[1:]) or name in ("recorded",)


def test_the_callers_settings_hold_on_the_ranks_and_survive_an_error() -> None:
    def program() -> None:
        assert torch.get_default_dtype() == torch.float64
        torch.set_default_dtype(torch.bfloat16)
        everybody().barrier()
        warnings.simplefilter("ignore")
        raise ValueError("no")

    before = list(warnings.filters)
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(sw.RankError):
            sw.simulate(program, 3)
        assert torch.get_default_dtype() == torch.float64
        assert list(warnings.filters) == before
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_warning_that_one_rank_turns_into_an_error_is_raised_there_only() -> None:
    def program() -> int:
        raised = 0
        with warnings.catch_warnings():
            warnings.simplefilter("error" if my_rank() == 1 else "ignore")
            for _ in range(2):
                everybody().barrier()
                try:
                    warnings.warn("from one line on all ranks", stacklevel=1)
                except UserWarning:
                    raised += 1
        return raised

    assert sw.simulate(program, 3) == [0, 2, 0]


def test_global_hooks_of_a_rank_see_its_own_modules_and_optimizers_only() -> None:
    def program() -> tuple[int, int]:
        modules: list[nn.Module] = []
        steps: list[torch.optim.Optimizer] = []
        handles = [
            register_module_forward_hook(lambda module, *_: modules.append(module)),
            register_optimizer_step_post_hook(lambda optimizer, *_: steps.append(optimizer)),
        ]
        everybody().barrier()
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            model(torch.ones(2)).sum().backward()
            everybody().barrier()
            optimizer.step()
        for handle in handles:
            handle.remove()
        everybody().barrier()
        model(torch.ones(2))
        assert modules == [model] * 2
        return len(modules), len(steps)

    seen: list[Any] = []
    with register_module_forward_hook(lambda module, *_: seen.append(module)):
        assert sw.simulate(program, 3) == [(2, 2)] * 3
        assert len(seen) == 9  # the caller's hook holds on every rank
        nn.Linear(2, 2)(torch.ones(2))
    assert len(seen) == 10
    nn.Linear(2, 2)(torch.ones(2))
    assert len(seen) == 10


# ---- profilers


def profiler() -> torch.profiler.profile:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


KINDS: dict[str, Callable[[], Any]] = {
    "torch.profiler": profiler,
    "torch.autograd.profiler": torch.autograd.profiler.profile,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_rank_that_profiles_gets_an_error(kind: str) -> None:
    def program() -> None:
        with KINDS[kind]():
            everybody().all_reduce(torch.ones(3))

    with pytest.raises(
        sw.RankError, match=r"rank 1 raised LaunchError: torch.profiler: rank 0 prof"
    ):
        sw.simulate(program, 3)
    with KINDS[kind]() as profile:  # nothing is left behind
        torch.ones(3) + 1
    assert profile.key_averages()


def test_one_rank_may_profile_and_ranks_may_profile_one_after_the_other() -> None:
    def one() -> int:
        if my_rank() != 1:
            everybody().all_reduce(torch.ones(3))
            return 0
        with profiler() as profile:
            everybody().all_reduce(torch.ones(3))
        return len(profile.key_averages())

    def each() -> int:
        with profiler() as profile:
            torch.ones(3) + 1
        everybody().barrier()
        return len(profile.key_averages())

    first, second, third = sw.simulate(one, 3)
    assert (first, third) == (0, 0) and second
    assert all(sw.simulate(each, 3))


def test_a_rank_may_not_profile_within_the_profile_of_the_caller() -> None:
    def program() -> None:
        with profiler():
            pass

    with profiler(), pytest.raises(sw.RankError, match="MainThread profiles already"):
        sw.simulate(program, 1)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="one profiler of Python in a process")
def test_every_rank_may_use_pythons_profiler() -> None:
    def program() -> bool:
        with cProfile.Profile() as profile:
            everybody().barrier()
            sum([1, 2])
        return any("barrier" in str(entry.code) for entry in profile.getstats())

    assert sw.simulate(program, 3) == [True] * 3


def test_a_rank_cannot_set_a_signal_handler() -> None:
    def program() -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    with pytest.raises(sw.RankError, match="signal only works in main thread"):
        sw.simulate(program, 2)
