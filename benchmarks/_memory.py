"""Measure the peak memory of a step, in bytes of CPU tensors.

Torch's profiler records every allocation and release of its CPU allocator, in every thread: those
of gloo's workers, of DDP's buckets in C++, of resized storages. The model is created under the
profiler too, so parameters and lasting buffers count. Memory outside of torch's allocator, such as
socket buffers, does not count.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

PAUSE = 0.003
"""Seconds to wait after each collective."""
_MEASURED = "the step that is measured"


class Peak(NamedTuple):
    """The result of a measurement."""

    nbytes: int
    """The most bytes that were allocated at any moment of the step."""
    lost: int
    """Bytes whose release was not seen: `nbytes` is too high by at most this much."""


def peak_of(make: Callable[[], Callable[[], object]]) -> Peak:
    """Return the peak of the memory that is allocated at any moment of a step.

    Arguments:
        make: creates the model and the step, warms the step up, and returns it.
    """
    gc.collect()
    with _pausing(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step = make()
        with record_function(_MEASURED):
            step()
        del step
        gc.collect()
    events = list(_within(profiler.profiler.kineto_results.experimental_event_tree()))
    operations = (event for event in events if event.tag.name == "TorchOp")
    (measured,) = (event for event in operations if event.name == _MEASURED)
    allocations = [event for event in events if event.tag.name == "Allocation"]
    live: dict[int, int] = {}
    total = peak = lost = 0
    for event in sorted(allocations, key=lambda event: event.start_time_ns):
        address, size = event.extra_fields.ptr, event.extra_fields.alloc_size
        before = live.pop(address, 0)
        total -= before
        if size > 0:
            lost += before
            live[address] = size
            total += size
        if event.start_time_ns < measured.start_time_ns:
            peak = total
        elif event.start_time_ns < measured.end_time_ns:
            peak = max(peak, total)
    return Peak(peak, lost + total)


@contextmanager
def _pausing() -> Iterator[None]:
    """Give gloo's workers time to release the tensors that they have sent and received.

    The profiler does not see their releases. If a worker were the last to release a tensor, the
    tensor would seem to stay allocated.
    """
    wait = dist.Work.wait

    def patient(self: dist.Work, *args: Any) -> bool:
        done = wait(self, *args)
        time.sleep(PAUSE)
        return done

    dist.Work.wait = patient
    try:
        yield
    finally:
        dist.Work.wait = wait


def _within(events: Any) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _within(event.children)


def check_measure() -> None:
    """Measure steps whose peak is known."""
    kept = torch.empty(1 << 16)

    def make() -> Callable[[], None]:
        lasting = torch.empty(1 << 18)  # 1 MiB, allocated during the whole step
        resized = torch.empty(1 << 19)
        resized.untyped_storage().resize_(0)

        def step() -> None:
            resized.untyped_storage().resize_(1 << 21)
            torch.empty(1 << 20).zero_()  # the peak: 1 + 2 + 4 MiB
            resized.untyped_storage().resize_(0)
            (lasting + 1).sum()
            kept.add_(1)  # in place: allocates nothing

        return step

    found, expected = peak_of(make).nbytes, 7 << 20
    if not expected <= found <= expected + 1024:
        raise AssertionError(f"the peak is {expected} bytes, and {found} were measured")
