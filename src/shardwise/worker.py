"""What a process of `launch` does: join the others, then run what the parent sends."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from shardwise.errors import LaunchError
from shardwise.pickling import dumps

LOOPBACK = "127.0.0.1"
GOODBYE = b"goodbye"
WHERE = b"where"


@dataclass(frozen=True)
class Place:
    """Where a process stands among the ranks."""

    rank: int
    size: int
    port: int
    backend: str
    timeout: float | None


@dataclass(frozen=True)
class Success:
    """What a rank's function returned."""

    result: Any


@dataclass(frozen=True)
class Failure:
    """What a rank's function raised."""

    rank: int
    summary: str
    trace: str
    error: BaseException | None
    """The exception itself, where it can be sent."""
    moment: float
    """On the clock that all processes of a host share."""


def work(place: Place, tasks: Connection, control: Connection) -> None:
    """The life of a rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends us
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    main_thread = threading.get_ident()
    threading.Thread(target=_answer_parent, args=(control, main_thread), daemon=True).start()
    try:
        _join(place)
    except BaseException as error:
        tasks.send_bytes(_report(place.rank, error))
        return
    tasks.send_bytes(pickle.dumps(Success(None)))
    while (task := tasks.recv_bytes()) != GOODBYE:
        tasks.send_bytes(_run(place.rank, task))
    if dist.is_initialized():
        dist.destroy_process_group()


def _join(place: Place) -> None:
    local = {"RANK": place.rank, "WORLD_SIZE": place.size}
    local |= {f"LOCAL_{name}": value for name, value in local.items()}
    os.environ.update({name: str(value) for name, value in local.items()})
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback_interface())
    if "OMP_NUM_THREADS" not in os.environ:  # else the user has chosen
        torch.set_num_threads(max(1, usable_cores() // place.size))
    if torch.cuda.is_available():
        torch.cuda.set_device(place.rank % torch.cuda.device_count())
    dist.init_process_group(
        place.backend,
        store=TCPStore(LOOPBACK, place.port, is_master=False),
        rank=place.rank,
        world_size=place.size,
        timeout=None if place.timeout is None else timedelta(seconds=place.timeout),
    )


def _run(rank: int, task: bytes) -> bytes:
    """A rank's answer to a task, as bytes."""
    try:
        fn, args, kwargs = pickle.loads(task)
        result = fn(*args, **kwargs)
        return dumps(Success(result), f"the result of rank {rank}, {type(result).__name__},")
    except BaseException as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # not this frame
        return _report(rank, error)


def _report(rank: int, error: BaseException) -> bytes:
    moment = time.monotonic()
    summary = f"{type(error).__name__}: {error}"
    trace = "".join(traceback.format_exception(error))
    try:
        sent = dumps(error, "")
        pickle.loads(sent)  # some exceptions can be written and not read
        return dumps(Failure(rank, summary, trace, error, moment), "")
    except Exception:
        return pickle.dumps(Failure(rank, summary, trace, None, moment))


def _answer_parent(control: Connection, main_thread: int) -> None:
    """Tell the parent where we are when it asks, and end when it does."""
    try:
        while control.recv_bytes() == WHERE:
            stack = traceback.extract_stack(sys._current_frames()[main_thread])
            # What lies below the user's function is of no interest.
            calls = [at for at, frame in enumerate(stack) if frame.name == _run.__name__]
            shown = stack[calls[0] + 1 :] if calls else stack
            control.send_bytes("".join(traceback.format_list(shown)).encode())
    except (EOFError, OSError):
        os._exit(1)


def usable_cores() -> int:
    """Return how many cores this process may use: in a container or a job, often not all."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _loopback_interface() -> str:
    names = [name for _, name in socket.if_nameindex()]
    found = [name for name in names if name.startswith("lo")]
    if not found:
        raise LaunchError(f"no loopback interface among {', '.join(names)}")
    return found[0]
