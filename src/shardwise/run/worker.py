"""The process of a rank of `launch`: join the others, then run the tasks that the parent sends."""

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

from shardwise.core.errors import LaunchError
from shardwise.run.pickling import dumps

LOOPBACK = "127.0.0.1"
GOODBYE = b"goodbye"
WHERE = b"where"
"""The messages of the parent: end the process, send the stack of the main thread."""


@dataclass(frozen=True)
class RankSetup:
    """The settings by which a process joins the other ranks."""

    rank: int
    size: int
    port: int
    backend: str
    timeout: float | None


@dataclass(frozen=True)
class Success:
    """The result of a rank's function."""

    result: Any


@dataclass(frozen=True)
class Failure:
    """The exception that a rank's function raised."""

    rank: int
    summary: str
    trace: str
    error: BaseException | None
    """The exception itself, if it can be sent."""
    moment: float
    """The time on the clock that all processes of a host share."""


def work(setup: RankSetup, tasks: Connection, control: Connection) -> None:
    """Run a rank from start to end; the target of its process."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # the parent gets Ctrl-C too, and ends this process
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    main_thread = threading.get_ident()
    threading.Thread(target=_answer_parent, args=(control, main_thread), daemon=True).start()
    try:
        _join(setup)
    except BaseException as error:
        tasks.send_bytes(_report(setup.rank, error))
        return
    tasks.send_bytes(pickle.dumps(Success(None)))
    while (task := tasks.recv_bytes()) != GOODBYE:
        tasks.send_bytes(_run(setup.rank, task))
    if dist.is_initialized():
        dist.destroy_process_group()


def _join(setup: RankSetup) -> None:
    """Join the default process group."""
    local = {"RANK": setup.rank, "WORLD_SIZE": setup.size}
    local |= {f"LOCAL_{name}": value for name, value in local.items()}
    os.environ.update({name: str(value) for name, value in local.items()})
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback_interface())
    if "OMP_NUM_THREADS" not in os.environ:  # otherwise the user has chosen
        torch.set_num_threads(max(1, usable_cores() // setup.size))
    if torch.cuda.is_available():
        torch.cuda.set_device(setup.rank % torch.cuda.device_count())
    dist.init_process_group(
        setup.backend,
        store=TCPStore(LOOPBACK, setup.port, is_master=False),
        rank=setup.rank,
        world_size=setup.size,
        timeout=None if setup.timeout is None else timedelta(seconds=setup.timeout),
    )


def _run(rank: int, task: bytes) -> bytes:
    """Run a task, and return the answer as bytes."""
    try:
        fn, args, kwargs = pickle.loads(task)
        result = fn(*args, **kwargs)
        return dumps(Success(result), f"the result of rank {rank}, {type(result).__name__},")
    except BaseException as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # not this frame
        return _report(rank, error)


def _report(rank: int, error: BaseException) -> bytes:
    """Return an exception as bytes for the parent."""
    moment = time.monotonic()
    summary = f"{type(error).__name__}: {error}"
    trace = "".join(traceback.format_exception(error))
    try:
        sent = dumps(error, "")
        pickle.loads(sent)  # some exceptions can be pickled but not unpickled
        return dumps(Failure(rank, summary, trace, error, moment), "")
    except Exception:
        return pickle.dumps(Failure(rank, summary, trace, None, moment))


def _answer_parent(control: Connection, main_thread: int) -> None:
    """Send the stack of the main thread when the parent asks, and end when the parent ends."""
    try:
        while control.recv_bytes() == WHERE:
            stack = traceback.extract_stack(sys._current_frames()[main_thread])
            # Leave out the frames of this module that called the user's function.
            calls = [at for at, frame in enumerate(stack) if frame.name == _run.__name__]
            shown = stack[calls[0] + 1 :] if calls else stack
            control.send_bytes("".join(traceback.format_list(shown)).encode())
    except (EOFError, OSError):
        os._exit(1)


def usable_cores() -> int:
    """Return the number of cores that this process may use: in a container or a job, often not
    all."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _loopback_interface() -> str:
    names = [name for _, name in socket.if_nameindex()]
    found = [name for name in names if name.startswith("lo")]
    if not found:
        raise LaunchError(f"no loopback interface among {', '.join(names)}")
    return found[0]
