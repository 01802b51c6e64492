"""A tracer of threads that takes a lock at each line, as a measurement of coverage may."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_lock = threading.Lock()


@contextmanager
def traced_threads() -> Iterator[threading.Lock]:
    """Trace the threads that are started in the body; give the lock that their tracer takes."""
    before = threading.gettrace()
    threading.settrace(_trace)
    try:
        yield _lock
    finally:
        threading.settrace(before)  # type: ignore[arg-type]


def _trace(frame: FrameType, event: str, arg: Any) -> Any:
    _acquire()
    _lock.release()
    return _trace


def _acquire() -> None:
    _lock.acquire()  # an exception from here on would leave it taken
