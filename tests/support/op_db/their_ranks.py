"""Ranks of torch's DTensor: threads of this process that take turns.

torch's own tests run DTensor on threads, over a process group that copies between them; that group
is used here. Theirs run freely, wait for ever for a rank that does not come, and race in state that
DTensor keeps for the process. So here one rank runs at a time, until it waits in a collective; and
when none can go on, the run fails. Nothing hangs, and every run is the same.
"""

from __future__ import annotations

import ctypes
import logging
import math
import queue
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed import multi_threaded_pg

logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # it advises on speed

_START_SECONDS = 60.0
_GRACE_SECONDS = 2.0
_SLOWEST = 20.0
"""How much longer a run may take by the clock than by the time of this process."""

Task = Callable[[int, DeviceMesh], Any]
"""What a rank runs: with its number and its mesh."""


class DisagreementError(RuntimeError):
    """The ranks do not call the same collectives: real ranks would hang."""


class TooLongError(RuntimeError):
    """A run exceeded its time."""


class _Stopped(BaseException):
    """Ends a rank because another failed. Not an Exception, so that DTensor cannot catch it."""


class _Meeting:
    """One collective of a group; `join` is what torch's group calls."""

    def __init__(self, ranks: Ranks, size: int, collective: Any) -> None:
        self.ranks = ranks
        self.collective = collective
        self.parts: list[Any] = [None] * size
        self.come: list[int] = []

    def join(self, place: int, part: Any) -> Any:
        me = self.ranks.me()
        self.parts[place] = part
        self.come.append(me)
        if len(self.come) < len(self.parts):
            self.ranks.wait(me)
        else:
            self.collective.work(self.parts)
            self.ranks.go_on(self.come)
        return multi_threaded_pg.ret_work(part)  # type: ignore[no-untyped-call]


class Ranks:
    """The ranks of a mesh, which run one task after another."""

    def __init__(self, mesh_shape: tuple[int, ...]) -> None:
        self.size = math.prod(mesh_shape)
        self.lock = threading.Condition()
        self.turn = -1
        """The rank that runs; -1 while none does."""
        self.ready: set[int] = set()
        self.unfinished: set[int] = set()
        self.failed = False
        """Whether all ranks are to stop."""
        self.meetings: dict[Any, _Meeting] = {}
        self.tasks: list[queue.SimpleQueue[Task | None]] = [
            queue.SimpleQueue() for _ in range(self.size)
        ]
        self.results: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()
        self.threads = [
            threading.Thread(target=self._live, args=(rank, mesh_shape, store), daemon=True)
            for store in [dist.HashStore()]  # type: ignore[attr-defined]
            for rank in range(self.size)
        ]
        with _groups_of_threads():
            for thread in self.threads:
                thread.start()
            for _ in self.threads:
                _, _, error = self.results.get(timeout=_START_SECONDS)
                if error is not None:
                    raise error

    def run(self, task: Task, seconds: float) -> list[Any]:
        """Run a task; return the result of each rank, or raise the error of the first that fails.

        Arguments:
            seconds: how long it may take, in CPU time of this process: the machine may be busy.

        After a `TooLongError` these ranks may be stuck: make new ones.
        """
        self.meetings.clear()
        self.ready, self.unfinished = set(range(self.size)), set(range(self.size))
        self.turn, self.failed = 0, False
        with _groups_of_threads(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for tasks in self.tasks:
                tasks.put(task)
            ended = self._ends(seconds)
        for _, _, error in ended:
            if error is not None and not isinstance(error, _Stopped):
                raise error
        if self.failed:
            raise DisagreementError("some ranks wait for others that do not come")
        return [result for _, result, _ in sorted(ended, key=lambda each: each[0])]

    def _ends(self, seconds: float) -> list[tuple[int, Any, BaseException | None]]:
        """Yield how the ranks end, in that order."""
        start, ended = time.process_time(), []
        latest = time.monotonic() + _SLOWEST * seconds
        while len(ended) < self.size:
            try:
                ended.append(self.results.get(timeout=0.2))
            except queue.Empty:
                if time.process_time() - start > seconds or time.monotonic() > latest:
                    self._abandon()
                    raise TooLongError(f"more than {seconds} seconds") from None
        return ended

    # ---- called on the threads of the ranks

    def me(self) -> int:
        """Return the rank of the calling thread."""
        return self.threads.index(threading.current_thread())

    def meeting(self, collective: Any, group: Any) -> _Meeting:
        """Return the collective that a rank of this group joins next."""
        key = (group.pg_name, tuple(dist.get_process_group_ranks(group)))
        found = self.meetings.get(key)
        if found is None:
            found = self.meetings[key] = _Meeting(self, group.size(), collective)
        elif type(found.collective) is not type(collective):
            names = type(found.collective).__name__, type(collective).__name__
            raise DisagreementError(f"one rank is in {names[0]}, another in {names[1]}")
        if len(found.come) == len(found.parts) - 1:
            del self.meetings[key]  # the last to come
        return found

    def wait(self, me: int) -> None:
        """Let other ranks run until this rank can go on."""
        with self.lock:
            self._pass_on(me)
            self._sleep(me)

    def go_on(self, ranks: list[int]) -> None:
        """Let these ranks go on, one after the other."""
        with self.lock:
            self.ready.update(ranks)

    def _live(self, me: int, mesh_shape: tuple[int, ...], store: Any) -> None:
        try:
            dist.init_process_group("threaded", rank=me, world_size=self.size, store=store)
            mesh = init_device_mesh("cpu", mesh_shape)
        except BaseException as error:
            self.results.put((me, None, error))
            return
        _of_thread.ranks = self
        self.results.put((me, None, None))
        while (task := self.tasks[me].get()) is not None:
            result, problem = None, None
            try:
                with self.lock:
                    self._sleep(me)
                result = task(me, mesh)
            except BaseException as error:
                problem = error
            with self.lock:
                self.failed = self.failed or problem is not None
                self.unfinished.discard(me)
                self._pass_on(me)
            self.results.put((me, result, problem))

    def _sleep(self, me: int) -> None:
        self.lock.wait_for(lambda: self.turn == me or self.failed)
        if self.failed:
            raise _Stopped

    def _pass_on(self, me: int) -> None:
        self.ready.discard(me)
        self.turn = min(self.ready, default=-1)
        self.failed = self.failed or (self.turn < 0 and bool(self.unfinished))
        self.lock.notify_all()

    def _abandon(self) -> None:
        """Stop what can be stopped: Python code, but not a loop in C++."""
        with self.lock:
            stuck = self.threads[self.turn]
            self.failed = True
            self.lock.notify_all()
        for tasks in self.tasks:
            tasks.put(None)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(stuck.ident or 0), ctypes.py_object(_Stopped)
        )
        stuck.join(_GRACE_SECONDS)


# ---- torch's state for the process, changed only while ranks start or run

_of_thread = threading.local()
_worlds = multi_threaded_pg.ThreadLocalWorld()


def _meeting(collective: Any, group: Any) -> _Meeting:
    ranks: Ranks = _of_thread.ranks
    return ranks.meeting(collective, group)


@contextmanager
def _groups_of_threads() -> Iterator[None]:
    """Each thread has groups of its own, as if it were a process, and meets others in turns.

    Afterwards all is as before: nothing else in this process finds a group that is not its own.
    """
    group = multi_threaded_pg.ProcessLocalGroup
    with (
        patch.object(c10d, "_world", _worlds),
        patch.object(sys, "excepthook", sys.excepthook),  # which the start of a group replaces
        patch.object(group, "_start_coll", _meeting),
        patch.object(group, "_end_coll", lambda coll, of: None),
    ):
        torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            torch._C._distributed_c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]
