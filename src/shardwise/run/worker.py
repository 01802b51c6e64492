"""The process of a rank of `launch`: join the others, then run the tasks that the parent sends."""

from __future__ import annotations

import copyreg
import io
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections import ChainMap
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from shardwise.core.errors import LaunchError
from shardwise.torch_internals import dtypes_without_typed_storage

LOOPBACK = "127.0.0.1"
_STORE_SECONDS = 300.0
"""How long a rank waits, at least, for others that join a process group: torch's default."""
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
    start_timeout: float
    """Seconds to wait for the other ranks to join."""
    timeout: float | None
    """Seconds to wait in a collective; None for the default of the backend."""


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
        store=TCPStore(
            LOOPBACK,
            setup.port,
            is_master=False,
            timeout=timedelta(seconds=max(setup.start_timeout, _STORE_SECONDS)),
        ),
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


# ---- pickles of functions, arguments and results
#
# Plain pickle sends a function by its name. If the other process cannot import that name, as with a
# function of a notebook, `cloudpickle` sends the function by value, if it is installed.


def main_file() -> str | None:
    """Return the file of the main script, or None if another process cannot import it."""
    main = sys.modules["__main__"]
    name = getattr(main, "__file__", None)
    if name is None or not Path(name).is_file():
        return None
    # multiprocessing does not import the __main__.py of `python -m package` or `python folder`.
    module = getattr(getattr(main, "__spec__", None), "name", "")
    return None if module.rpartition(".")[2] == "__main__" else name


def dumps(value: Any, what: str) -> bytes:
    """Return `value` as bytes for `pickle.loads`.

    Arguments:
        value: any object; functions may be lambdas or closures if cloudpickle is installed.
        what: the name of `value` in an error message.

    Raises:
        LaunchError: if `value` cannot be pickled.
    """
    try:
        data = _dumps(pickle.Pickler, copyreg.dispatch_table, value)
    except Exception as error:  # the objects' own methods may raise anything
        reason = f"{type(error).__name__}: {error}"
    else:
        if main_file() is not None or b"__main__" not in data:
            return data
        reason = "it is defined in a notebook, a session or a package's __main__.py"
    try:
        import cloudpickle  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise LaunchError(
            f"{what} cannot be sent to another process: {reason}. Move it to a module or to the "
            'top level of a script, or install cloudpickle: pip install "shardwise[pickle]"'
        ) from None
    try:
        return _dumps(cloudpickle.Pickler, cloudpickle.Pickler.dispatch_table, value)
    except Exception as error:
        raise LaunchError(
            f"{what} cannot be sent to another process: {type(error).__name__}: {error}"
        ) from error


def _dumps(pickler: type[pickle.Pickler], known: Any, value: Any) -> bytes:
    """Return `value` as bytes, written by a `pickler` that uses `_reduce_tensor` for tensors.

    `known` is the pickler's own table of reduction functions, for all other types.
    """
    table = ChainMap({torch.Tensor: _reduce_tensor}, known)
    file = io.BytesIO()
    type("Pickler", (pickler,), {"dispatch_table": table})(file).dump(value)
    return file.getvalue()


def _reduce_tensor(x: torch.Tensor) -> Any:
    """Reduce a tensor for pickle, with two cures for torch 2.13.

    torch pickles the whole storage of a view: a view is copied first, so that only its own elements
    are sent. And torch cannot unpickle the tensors of its newer dtypes (float8, uint16...) that it
    pickled: their bits are sent as integers.
    """
    strided = x.layout is torch.strided
    if strided and x.is_leaf and x.untyped_storage().nbytes() > x.numel() * x.itemsize:
        x = x.detach().clone().requires_grad_(x.requires_grad)
    if not strided or x.dtype not in dtypes_without_typed_storage():
        return x.__reduce_ex__(pickle.DEFAULT_PROTOCOL)  # type: ignore[no-untyped-call]
    return _rebuild_tensor, (x.detach().view(_BITS[x.dtype.itemsize]), x.dtype, x.requires_grad)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _rebuild_tensor(bits: torch.Tensor, dtype: torch.dtype, requires_grad: bool) -> torch.Tensor:
    """Undo `_reduce_tensor` for a tensor that was sent as integers."""
    return bits.view(dtype).requires_grad_(requires_grad)
