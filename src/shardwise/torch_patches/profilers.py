"""Patches of torch's profiler and of its counter of floating point operations."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from torch.utils.flop_counter import FlopCounterMode

from shardwise.core import world
from shardwise.core.errors import LaunchError
from shardwise.torch_internals import Profiler, as_local, prepare_profiler
from shardwise.torch_patches.patch import Undo, replace, undo_all


class _Holder(NamedTuple):
    """The thread that profiles."""

    thread: threading.Thread
    is_rank: bool


def count_local_flops() -> Undo:
    """Count the operators of a backward by the shapes of shards, as those of a forward are."""
    count: Any = FlopCounterMode._count_flops

    def count_locally(self: Any, *args: Any) -> Any:
        with as_local():
            return count(self, *args)

    return replace(FlopCounterMode, "_count_flops", count_locally)


def profile_once_in_a_process() -> Undo:
    """Refuse a second profiler while one runs, if a simulated rank starts either of them."""
    prepare, leave = prepare_profiler, Profiler.__exit__
    holder: _Holder | None = None

    def prepare_alone(self: Any) -> None:
        nonlocal holder
        here = _Holder(threading.current_thread(), world.current(start=False).is_simulated)
        other = holder
        runs = other is not None and other.thread is not here.thread and other.thread.is_alive()
        if other is not None and runs and (here.is_rank or other.is_rank):
            raise LaunchError(
                f"torch.profiler: {other.thread.name} profiles already, and torch has one "
                "profiler in a process, of which simulated ranks are threads: another one would "
                "crash it. Profile one rank (`if mesh.get_rank() == 0`), or use sw.launch, whose "
                "ranks are processes"
            )
        prepare(self)
        holder = here

    def leave_alone(self: Any, *exception: Any) -> Any:
        nonlocal holder
        if holder is not None and holder.thread is threading.current_thread():
            holder = None
        return leave(self, *exception)

    return undo_all(
        [
            replace(Profiler, "_prepare_trace", prepare_alone),
            replace(Profiler, "__exit__", leave_alone),
        ]
    )
