"""launch: run a function on N local processes with real process groups.

`Workers` keeps the processes for several runs. The parent process takes part in no collective. It
only watches, so it can always say which rank failed, and end the others.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

import torch.distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from shardwise.core.errors import LaunchError, RankError
from shardwise.run import worker
from shardwise.run.worker import dumps, main_file

T = TypeVar("T")

START_TIMEOUT = "SHARDWISE_START_TIMEOUT"
"""The environment variable that sets the default of `start_timeout`."""
END_TIMEOUT = "SHARDWISE_END_TIMEOUT"
"""The same for `end_timeout`."""
_START_SECONDS = 120.0
_END_SECONDS = 2.0
_SETTLE_SECONDS = 0.5
"""How long to wait for more reports after a failure: the next one may be its cause."""
_ANSWER_SECONDS = 2.0
"""How long to wait for a rank to say where it is, or for the exit code of one that has died."""
_POLL_SECONDS = 1.0
"""How often to look for ranks that have died, but whose pipe another process holds open."""


def launch(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    backend: str = "gloo",
    timeout: float | None = None,
    start_timeout: float | None = None,
    end_timeout: float | None = None,
    **kwargs: Any,
) -> list[T]:
    """Run `fn(*args, **kwargs)` on `world_size` local processes; return their results in order.

    The processes are joined by torch's default process group, over loopback. A script must call
    this under `if __name__ == "__main__":`, because each process imports the script.

    Arguments:
        fn: the function that each rank runs. A function of a module or script is found by name; one
            made in a notebook, a lambda or a closure needs the package `cloudpickle`.
        world_size: the number of processes.
        backend: the argument of `torch.distributed.init_process_group`.
        timeout: seconds that the run may take. After that every rank is ended, and the error says
            where each of them was. None: no limit.
        start_timeout: seconds that the processes may take to start: to import the script and to
            join each other. None: the environment variable `SHARDWISE_START_TIMEOUT`, or 120.
        end_timeout: seconds that they may take to exit afterwards; then they are terminated. None:
            the environment variable `SHARDWISE_END_TIMEOUT`, or 2.

    Raises:
        RankError: a rank raised an exception, exited or was killed; the error names the rank.
        LaunchError: the ranks could not be started, or did not end in time.

    Example:
        >>> launch(train, 4, steps=100)
    """
    task = _as_task(fn, args, kwargs)  # before any process starts, as it may fail
    with Workers(
        world_size,
        backend=backend,
        timeout=timeout,
        start_timeout=start_timeout,
        end_timeout=end_timeout,
    ) as workers:
        return workers._run(task)


@dataclass
class _RankProcess:
    """The process of a rank, and the parent's ends of its two pipes."""

    process: SpawnProcess
    tasks: Connection
    control: Connection


@dataclass
class _Run:
    """The answers of the ranks so far."""

    waiting: set[int]
    results: dict[int, Any] = field(default_factory=dict)
    failures: list[worker.Failure] = field(default_factory=list)
    died: list[int] = field(default_factory=list)


class Workers:
    """Local processes that wait for functions to run: `launch`, for several runs.

    Starting a process takes seconds: in a notebook or a test suite, use this to start them once.
    After a failure the processes are ended, because they may wait in a collective. The arguments
    are those of `launch`; `timeout` limits each run.

    Example:
        >>> with Workers(4) as workers:
        ...     workers.run(first)
        ...     workers.run(second, 42)
    """

    def __init__(
        self,
        world_size: int,
        *,
        backend: str = "gloo",
        timeout: float | None = None,
        start_timeout: float | None = None,
        end_timeout: float | None = None,
    ) -> None:
        if not isinstance(world_size, int) or world_size < 1:
            raise LaunchError(f"world_size: expected a positive int, got {world_size!r}")
        _check_seconds("timeout", timeout)
        if torch.distributed.is_torchelastic_launched():
            raise LaunchError(
                f"torchrun started this process as rank {os.environ['RANK']} of "
                f"{os.environ['WORLD_SIZE']}: call the function itself, without launch"
            )
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise LaunchError(
                "launch was called while a rank was importing the main script; "
                'call it under `if __name__ == "__main__":`'
            )
        self.world_size = world_size
        self.timeout = timeout
        self.start_timeout = _limit("start_timeout", start_timeout, START_TIMEOUT, _START_SECONDS)
        self.end_timeout = _limit("end_timeout", end_timeout, END_TIMEOUT, _END_SECONDS)
        self._ended_because = ""
        self._store = _loopback_store()
        self._ranks: list[_RankProcess] = []
        # At exit multiprocessing waits for its processes, which only end when told to. This runs
        # before that; weakref.finalize may run after.
        self._end = multiprocessing.util.Finalize(
            self, _end, (self._ranks, self.end_timeout), exitpriority=0
        )
        self._one_run = threading.Lock()
        # The parent's time limit must come first: only the parent can say where all ranks are.
        patience = None if timeout is None else max(timeout, self.start_timeout)
        try:
            with _importable_main(), _without_interrupts():
                for rank in range(world_size):
                    setup = worker.RankSetup(
                        rank, world_size, self._store.port, backend, self.start_timeout, patience
                    )
                    self._ranks.append(_start(setup))
            self._collect(time.monotonic() + self.start_timeout, starting=True)
        except BaseException:
            self.close()
            raise

    def run(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> list[T]:
        """Run `fn(*args, **kwargs)` on every rank; return their results in order."""
        return self._run(_as_task(fn, args, kwargs))

    @property
    def is_alive(self) -> bool:
        """Whether the workers can run a function: they are not closed, and none has failed."""
        return bool(self._end.still_active())

    def close(self) -> None:
        """End the processes. This also happens when the interpreter exits."""
        self._end()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---- running a task

    def _run(self, task: bytes) -> list[Any]:
        with self._one_run:  # other threads wait for their turn
            return self._run_now(task)

    def _run_now(self, task: bytes) -> list[Any]:
        if not self.is_alive:
            reason = self._ended_because or "they were closed"
            raise LaunchError(f"these workers have ended, because {reason}; start new ones")
        deadline = None if self.timeout is None else time.monotonic() + self.timeout
        try:
            for rank in self._ranks:
                with suppress(OSError):  # the rank has died, which `_collect` reports
                    rank.tasks.send_bytes(task)
            return self._collect(deadline)
        except BaseException as error:
            self._ended_because = str(error).partition("\n")[0] or type(error).__name__
            self.close()
            raise

    def _collect(self, deadline: float | None, starting: bool = False) -> list[Any]:
        """Return the answers of all ranks; raise as soon as it is clear which rank failed."""
        run = _Run(set(range(self.world_size)))
        try:
            while run.waiting:
                if not self._listen(run, deadline):
                    raise self._overdue(run, starting)
                if run.failures or run.died:
                    settled = time.monotonic() + _SETTLE_SECONDS
                    while run.waiting and self._listen(run, settled):
                        pass
                    raise self._failure(run, starting)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and not starting:
                with suppress(KeyboardInterrupt):  # on a second Ctrl-C, end them without asking
                    error.add_note(self._whereabouts(run))
            for rank in run.waiting:  # they are busy and would not read a goodbye
                self._ranks[rank].process.terminate()
            raise
        return [run.results[rank] for rank in range(self.world_size)]

    def _listen(self, run: _Run, deadline: float | None) -> bool:
        """Store the next answers of ranks; return False if none arrives before the deadline."""
        pipes = {self._ranks[rank].tasks: rank for rank in run.waiting}
        left = _POLL_SECONDS
        while left > 0:
            if deadline is not None:
                left = min(left, max(0.0, deadline - time.monotonic()))
            multiprocessing.connection.wait(list(pipes), left)
            ready = [rank for pipe, rank in pipes.items() if pipe.poll() or self._is_dead(rank)]
            for rank in ready:
                self._take(run, rank)
            if ready:
                return True
        return False

    def _is_dead(self, rank: int) -> bool:
        return self._ranks[rank].process.exitcode is not None

    def _take(self, run: _Run, rank: int) -> None:
        """Store the answer of a rank, or record that its process died."""
        run.waiting.discard(rank)
        pipe = self._ranks[rank].tasks
        try:
            data = pipe.recv_bytes() if pipe.poll() else None
        except (EOFError, OSError):
            data = None
        if data is None:
            run.died.append(rank)
            return
        try:
            answer = pickle.loads(data)
        except Exception as error:  # pickle raises whatever the objects do
            reason = f"{type(error).__name__}: {error}"
            raise RankError(f"the result of rank {rank} cannot be read: {reason}", rank) from error
        if isinstance(answer, worker.Failure):
            run.failures.append(answer)
        else:
            run.results[rank] = answer.result

    def _failure(self, run: _Run, starting: bool) -> RankError:
        """Return the error of the rank that failed first. A process that died takes precedence over
        exceptions of other ranks, which are probably caused by its death."""
        if run.died:
            rank = run.died[0]
            how = _how_it_died(self._ranks[rank].process)
            hint = ""
            if starting:
                hint = (
                    "\nIt ended while it started; see its output above. A script must call launch "
                    'under `if __name__ == "__main__":`'
                )
            return RankError(f"rank {rank} {how}{_also(run, rank)}{hint}", rank)
        first = min(run.failures, key=lambda failure: failure.moment)
        error = RankError(
            f"rank {first.rank} raised {first.summary}{_also(run, first.rank)}\n\n{first.trace}",
            first.rank,
        )
        error.__cause__ = first.error
        return error

    def _overdue(self, run: _Run, starting: bool) -> LaunchError:
        """Return the error for ranks that did not answer in time."""
        if starting:
            problem = (
                f"start_timeout: the ranks did not start within {self.start_timeout:g} s; if their "
                "imports are slow, raise start_timeout, or the environment variable "
                f"{START_TIMEOUT} (timeout limits the run, not the start)"
            )
        else:
            problem = f"timeout: the ranks did not end within {self.timeout:g} s"
        return LaunchError(f"{problem}\n{self._whereabouts(run)}")

    def _whereabouts(self, run: _Run) -> str:
        """Return the stacks of all ranks that have not answered."""
        stacks = [
            f"rank {rank} was here:\n{_stack_of(self._ranks[rank])}" for rank in sorted(run.waiting)
        ]
        returned = [f"returned: ranks {sorted(run.results)}"] if run.results else []
        return "\n".join(stacks + returned)


def _check_seconds(argument: str, seconds: float | None) -> None:
    if seconds is not None and not (isinstance(seconds, int | float) and seconds > 0):
        raise LaunchError(f"{argument}: expected a positive number of seconds, got {seconds!r}")


def _limit(argument: str, given: float | None, variable: str, default: float) -> float:
    """Return a time limit: the argument, else the environment variable, else the default."""
    _check_seconds(argument, given)
    if given is not None:
        return given
    text = os.environ.get(variable, "")
    try:
        seconds = float(text) if text else default
    except ValueError:
        raise LaunchError(f"{variable}: expected a number of seconds, got {text!r}") from None
    _check_seconds(variable, seconds)
    return seconds


def _as_task(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    return dumps((fn, args, kwargs), f"launch: {getattr(fn, '__qualname__', fn)!r}")


def _start(setup: worker.RankSetup) -> _RankProcess:
    context = multiprocessing.get_context("spawn")
    tasks, tasks_child = context.Pipe()
    control, control_child = context.Pipe()
    process = context.Process(
        target=worker.work,
        args=(setup, tasks_child, control_child),
        name=f"shardwise rank {setup.rank}",
    )
    process.start()
    # Now the child alone holds the other ends, so that its death closes them.
    tasks_child.close()
    control_child.close()
    return _RankProcess(process, tasks, control)


def _end(ranks: list[_RankProcess], timeout: float) -> None:
    """End the processes: tell them to exit, terminate those that did not, then kill the rest."""
    try:
        for rank in ranks:
            with suppress(OSError):
                rank.tasks.send_bytes(worker.GOODBYE)
        _join(ranks, timeout)
        for rank in ranks:
            rank.process.terminate()
        _join(ranks, timeout)
    finally:  # also if another Ctrl-C interrupts the wait
        for rank in ranks:
            rank.process.kill()
        _join(ranks, timeout)
        for rank in ranks:
            rank.tasks.close()
            rank.control.close()


def _join(ranks: list[_RankProcess], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    for rank in ranks:
        if rank.process.is_alive():
            rank.process.join(max(0.0, deadline - time.monotonic()))


def _how_it_died(process: SpawnProcess) -> str:
    process.join(_ANSWER_SECONDS)
    code = process.exitcode
    who = f"(process {process.pid})"
    if code is None:
        return f"{who} closed its pipe but still ran"
    if code < 0:
        return f"{who} was killed by {signal.Signals(-code).name}"
    return f"{who} ended with exit code {code} and no result"


def _also(run: _Run, rank: int) -> str:
    """Return the part of a message that names the other ranks that failed."""
    others = sorted({*run.died, *(failure.rank for failure in run.failures)} - {rank})
    return f" (then also failed: {', '.join(map(str, others))})" if others else ""


def _stack_of(rank: _RankProcess) -> str:
    with suppress(EOFError, OSError):
        rank.control.send_bytes(worker.WHERE)
        if rank.control.poll(_ANSWER_SECONDS):
            return rank.control.recv_bytes().decode()
    return "  (no answer)"


@contextmanager
def _importable_main() -> Iterator[None]:
    """Keep multiprocessing from importing a main script that is not a file, such as `<stdin>`."""
    main = sys.modules["__main__"]
    with _main_changing:  # another thread may be starting ranks too
        yield from _without_file(main)


_main_changing = threading.Lock()


def _without_file(main: Any) -> Iterator[None]:
    """Remove the `__file__` of the main module for a while, if it is not a file."""
    name = getattr(main, "__file__", None)
    if name is None or main_file() is not None:
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = name


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Block Ctrl-C within. Processes that are started here inherit the block, which holds until
    they ignore Ctrl-C themselves."""
    multiprocessing.resource_tracker.ensure_running()  # starting it would let Ctrl-C through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _loopback_store() -> Any:
    """Make the TCP store by which the ranks find each other, on a free port of the loopback
    interface."""
    with socket.create_server((worker.LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
        return TCPStore(
            worker.LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=os.dup(server.fileno()),
        )
