"""simulate: run a function on N ranks that are threads of this process."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from shardwise.comm.process_state import current_state, set_state
from shardwise.comm.rank_scheduler import RankScheduler, Stopped
from shardwise.comm.simulated import SimulatedWorld
from shardwise.core import world
from shardwise.core.checks import as_int
from shardwise.core.errors import LaunchError, MismatchError, RankError

T = TypeVar("T")

_GRACE_SECONDS = 1.0
"""How long to wait for ranks to stop after one has failed."""
_CAUTIOUS_SECONDS = 0.5
"""How long to look for a moment at which ranks that compute can be ended safely."""


def simulate(
    fn: Callable[..., T], world_size: int, *args: Any, parallel: bool = False, **kwargs: Any
) -> list[T]:
    """Run `fn(*args, **kwargs)` on `world_size` simulated ranks; return their results in order.

    The ranks are threads that take turns: one runs until it waits in a collective, then the lowest
    rank that can go on runs. A run is deterministic, and a debugger stops in one rank. Each rank
    starts with the caller's state of torch's default generator, default dtype, deterministic
    algorithms, anomaly detection and filters of warnings, and then has its own, as a process would;
    the caller's state is untouched. State that torch keeps for each thread (grad mode, autocast)
    starts as in a new process. The arguments are shared by all ranks, not copied.

    Arguments:
        fn: the function that each rank runs.
        world_size: the number of ranks.
        parallel: let the ranks run at the same time. This is faster where they compute much, but
            they share that state, and their order is not deterministic.

    Raises:
        RankError: a rank raised an exception; the error names the rank, and the exception is its
            cause.
        MismatchError: the ranks do not call the same collectives.

    Example:
        >>> def rank_sum():
        ...     mesh = init_device_mesh("cpu", (4,))
        ...     return communicator(mesh).all_reduce(torch.tensor(mesh.get_rank())).item()
        >>> simulate(rank_sum, 4)
        [6, 6, 6, 6]
    """
    size = as_int(world_size)
    if size is None or size < 1:
        raise LaunchError(f"world_size: expected a positive int, got {world_size!r}")
    world_size = size
    place = RankScheduler(world_size, parallel)
    results: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        try:
            with world.use(SimulatedWorld(place, rank, world_size)):
                place.enter(rank)
                results[rank] = fn(*args, **kwargs)
                place.leave(rank)
        except Stopped:
            raise
        except BaseException as error:
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
            place.fail(_rank_error(rank, error))

    def run_until_stopped(rank: int) -> None:
        with suppress(Stopped):  # raised even while the rank reports an error of its own
            run(rank)

    callers_state = current_state()
    threads = [
        threading.Thread(target=run_until_stopped, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(world_size)
    ]
    try:
        for thread in threads:
            thread.start()
        # Not Thread.join: after an interrupt, it would report a running thread as ended.
        while not place.over.wait(0.1):
            pass
    except BaseException as interruption:  # Ctrl-C: no rank may outlive the call
        place.fail(interruption)
        raise
    finally:
        _wait_until_ended(threads, place)
        set_state(callers_state)
    if place.failure is not None:
        _note_left_running(place.failure, threads)
        raise place.failure
    if unmet := place.unmet():
        raise MismatchError(f"all ranks returned, but some collectives were not met:\n{unmet}")
    return results


def _wait_until_ended(threads: list[threading.Thread], place: RankScheduler) -> None:
    """Wait for the ranks, for a while; after a failure, end those that compute."""
    started = time.monotonic()
    while running := [thread for thread in threads if thread.is_alive()]:
        passed = time.monotonic() - started
        place.interrupt(anywhere=passed > _CAUTIOUS_SECONDS)
        if passed > _GRACE_SECONDS:
            break
        running[0].join(0.002)


def _note_left_running(error: BaseException, threads: list[threading.Thread]) -> None:
    """Add a note on ranks that still run: a blocking call outside Python, such as a sleep, cannot
    be interrupted."""
    names = [thread.name for thread in threads if thread.is_alive()]
    if names:
        error.add_note(f"still in a blocking call, and stopped after it: {', '.join(names)}")


def _rank_error(rank: int, error: BaseException) -> RankError:
    """Return the error of a rank, with its traceback."""
    trace = "".join(traceback.format_exception(error))
    wrapped = RankError(f"rank {rank} raised {type(error).__name__}: {error}\n\n{trace}", rank)
    wrapped.__cause__ = error
    return wrapped
