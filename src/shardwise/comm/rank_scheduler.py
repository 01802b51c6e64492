"""The scheduler of simulated ranks: threads of one process that take turns and meet in collectives.

One rank runs at a time, until it has to wait in a collective; then the lowest rank that can go on
runs. So a run is deterministic, prints come in rank order, and a debugger stops in one rank. Each
rank has its own state of what is global to a process, such as torch's random state: it is swapped
with the turn. With `parallel` all ranks run at once, and share that state.

One lock guards everything; each rank sleeps on a condition of its own.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from shardwise.comm.agreement import Group, difference
from shardwise.comm.buffers import format_list
from shardwise.comm.process_state import ProcessState, current_state, own_copy, set_state
from shardwise.comm.trace import Cause, current_cause
from shardwise.core.errors import CollectiveError, MismatchError
from shardwise.core.world import Link
from shardwise.torch_internals import version_of


class Stopped(BaseException):
    """Ends a rank because another one failed. Not an Exception: user code must not catch it."""


@dataclass(frozen=True, slots=True)
class SimulatedGroup:
    """Ranks that meet on one channel, since they last aborted their mesh."""

    ranks: tuple[int, ...]
    channel: str
    generation: int
    """How often the calling rank has left these ranks before."""


MeetingKey = tuple[SimulatedGroup, tuple[int, int] | None]
"""Who meets: all ranks of a group, or (by their indices) a sender and a receiver of it."""


@dataclass(slots=True)
class CollectiveCall:
    """The call of a collective by one rank."""

    rank: int
    kind: str
    axes: tuple[str, ...]
    agreed: dict[str, Any]
    """Arguments that must be equal on all ranks."""
    tensors: Sequence[torch.Tensor]
    """The inputs, which must not change until the collective is complete."""
    payload: Any
    site: str
    facts: dict[Group, str] = field(default_factory=dict)
    """What this rank has stated before, by the group that compares it; see `agreement`."""
    cause: Cause = field(default_factory=current_cause)
    versions: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.versions = _versions(self.tensors)

    def __str__(self) -> str:
        over = f" over {'.'.join(self.axes)}" if self.axes else ""
        details = ", ".join(f"{name}={value}" for name, value in self.agreed.items())
        reason = f" for {self.cause.operator}" if self.cause.operator else ""
        if reason and self.cause.module:
            reason += f" of {self.cause.module}"
        return f"{self.kind}({details}){over}{reason} at {self.site}"


class Meeting:
    """One collective of some ranks: their calls, and the results once all have joined."""

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members = members
        self.calls: dict[int, CollectiveCall] = {}
        self.results: dict[int, Any] | None = None
        self.error: Exception | None = None
        """What went wrong while the results were computed."""
        self.error_trace: TracebackType | None = None

    @property
    def is_complete(self) -> bool:
        """Whether there are results, or an error in their place."""
        return self.results is not None or self.error is not None

    @property
    def absent(self) -> list[int]:
        """The ranks that have not joined."""
        return [rank for rank in self.members if rank not in self.calls]

    def result(self, rank: int) -> Any:
        """Return the result of a rank in a complete meeting."""
        if self.error is not None:  # every member raises it, each from its own line
            raise self.error.with_traceback(self.error_trace)
        assert self.results is not None, "complete"
        return self.results[rank]


@dataclass(slots=True)
class _Rank:
    wake: threading.Condition
    state: ProcessState
    thread: threading.Thread | None = None
    waits_in: Meeting | None = None
    """The meeting that it waits for; None while it can run."""
    sleeps: bool = False
    """Whether it sleeps on its condition: when it wakes, it looks whether it must stop."""
    ending: bool = False
    """Whether it has met the failure of the simulation: it must not be interrupted any more."""
    finished: bool = False


Combine = Callable[[list[Any]], list[Any]]

_running: set[RankScheduler] = set()


def simulation_runs() -> bool:
    """Return whether a simulation is running in this process."""
    return bool(_running)


class RankScheduler:
    """The meetings and the turns of the ranks of one simulation."""

    def __init__(self, size: int, parallel: bool) -> None:
        self.lock = threading.Lock()
        self.parallel = parallel
        self.failure: BaseException | None = None
        self.over = threading.Event()
        """Set when all ranks have finished, or one has failed."""
        self._ranks = [
            _Rank(threading.Condition(self.lock), own_copy(current_state())) for _ in range(size)
        ]
        self._turn = 0
        self._present: int | None = None
        """The rank whose state the process has now."""
        self._meetings: dict[tuple[MeetingKey, int], Meeting] = {}
        self._counts: dict[tuple[int, MeetingKey], int] = {}
        self._generations: Counter[tuple[int, Link]] = Counter()
        """How often a rank has left a group of ranks."""
        self._values: dict[Any, tuple[tuple[int, int], int]] = {}
        """Values that all ranks bring, by key: who was first, its value, how many have come."""
        self._first_crossing = ""
        """The first meeting that ranks joined from different lines: legal, but seldom meant."""
        _running.add(self)

    # ---- the life of a rank, called on its own thread

    def enter(self, rank: int) -> None:
        """Start a rank: wait for its first turn."""
        with self.lock:
            self._ranks[rank].thread = threading.current_thread()
            self._sleep(rank)

    def leave(self, rank: int) -> None:
        """End a rank: pass the turn on for good."""
        with self.lock:
            self._ranks[rank].finished = True
            self._hand_over(rank)

    def fail(self, error: BaseException) -> None:
        """Stop all ranks; the first error is the one the caller sees."""
        with self.lock:
            self._fail(error)
            self._mark_ending()

    def interrupt(self, *, anywhere: bool = False) -> None:
        """End the ranks that compute, after a failure, at their next Python step.

        A rank that is ended in Python code that takes a lock, such as an import, may never release
        it: such a rank is passed over.

        Arguments:
            anywhere: end it all the same.
        """
        with self.lock:
            for state in self._ranks if self.failure is not None else ():
                thread = state.thread
                if thread is None or state.sleeps or state.ending or state.finished:
                    continue
                if anywhere or _holds_no_lock(thread):
                    state.ending = True
                    _raise_stopped(thread)

    # ---- collectives

    def join(
        self, place: MeetingKey, members: tuple[int, ...], call: CollectiveCall, combine: Combine
    ) -> Meeting:
        """Join the next meeting of `members` at `place`, without waiting.

        The last rank to join computes all results, so that no input is read after its rank goes on.
        """
        with self.lock:
            self._check_running()
            self._check_nobody_left(place[0], call)
            turn = self._counts.get((call.rank, place), 0)
            self._counts[call.rank, place] = turn + 1
            meeting = self._meetings.setdefault((place, turn), Meeting(members))
            for group, facts in call.facts.items():
                others = (
                    each.facts[group] for each in meeting.calls.values() if group in each.facts
                )
                if problem := difference(next(others, facts), facts):
                    self._stop_with(problem)
            meeting.calls[call.rank] = call
            first = meeting.calls[next(iter(meeting.calls))]
            if (call.kind, call.agreed) != (first.kind, first.agreed):
                self._stop_with(
                    "ranks met in different collectives:\n"
                    f"  rank {first.rank}: {first}\n  rank {call.rank}: {call}\n"
                    "All ranks of a group must call the same collectives in the same order"
                    f"{self._first_crossing}"
                )
            if call.site != first.site and not self._first_crossing:
                self._first_crossing = (
                    f"\nBefore that, ranks met in one {call.kind} from different lines, "
                    f"which may be where they parted:\n  rank {first.rank}: at {first.site}\n"
                    f"  rank {call.rank}: at {call.site}"
                )
            if not meeting.absent:
                del self._meetings[place, turn]
                self._complete(meeting, combine)
            return meeting

    def wait(self, rank: int, meeting: Meeting) -> Any:
        """Return this rank's result of a meeting; other ranks run until it is complete."""
        with self.lock:
            self._check_stopped()
            if not (self.over.is_set() and meeting.is_complete):
                self._check_running()
                if not meeting.is_complete:
                    self._ranks[rank].waits_in = meeting
                self._hand_over(rank)
                self._sleep(rank)
            return meeting.result(rank)

    def generation(self, rank: int, way: Link) -> int:
        """Return how often a rank has left a group of ranks."""
        return self._generations[rank, way] if self._generations else 0

    def leave_groups(self, rank: int, links: Set[Link]) -> None:
        """Fail the incomplete meetings of these ranks, and those that other ranks still join."""
        with self.lock:
            self._check_running()
            for way in links:
                left = SimulatedGroup(*way, self._generations[rank, way])
                self._generations[rank, way] += 1
                for (place, turn), meeting in list(self._meetings.items()):
                    if place[0] == left:
                        del self._meetings[place, turn]
                        meeting.error = self._abortion(rank, *meeting.calls.values())
                        self._wake_members(meeting)

    def first_value(self, key: Any, size: int, rank: int, value: int) -> tuple[int, int]:
        """Return the first of `size` ranks that brought a value for this key, and its value."""
        with self.lock:
            first, taken = self._values.pop(key, ((rank, value), 0))
            if taken + 1 < size:
                self._values[key] = first, taken + 1
            return first

    def unmet(self) -> str:
        """Describe the collectives that were started and never completed; empty if there are
        none."""
        return "\n".join(
            f"  rank {call.rank}: {call}, not joined by {_format_ranks(meeting.absent)}"
            for meeting in self._meetings.values()
            for call in meeting.calls.values()
        )

    # ---- inside; the lock is held

    def _complete(self, meeting: Meeting, combine: Combine) -> None:
        calls = [meeting.calls[rank] for rank in meeting.members]
        for call in calls:
            if _versions(call.tensors) != call.versions:
                self._stop_with(
                    f"rank {call.rank} wrote to an input of a collective under way: {call}; "
                    "call wait() first"
                )
        try:
            results = combine([call.payload for call in calls])
        except MismatchError as error:
            met = "\n".join(f"  rank {call.rank}: {call}" for call in calls)
            self._stop_with(f"{error}\n{met}")
        except Exception as error:
            meeting.error, meeting.error_trace = error, error.__traceback__
        else:
            meeting.results = dict(zip(meeting.members, results, strict=True))
        self._wake_members(meeting)

    def _check_nobody_left(self, group: SimulatedGroup, call: CollectiveCall) -> None:
        way = group.ranks, group.channel
        for rank in group.ranks if self._generations else ():
            if self._generations[rank, way] > group.generation:
                raise self._abortion(rank, call)

    def _abortion(self, rank: int, *calls: CollectiveCall) -> CollectiveError:
        waiting = "\n".join(f"  rank {call.rank}: {call}" for call in calls)
        return CollectiveError(
            f"rank {rank} has aborted the mesh, so this cannot complete:\n{waiting}\nAbort it on "
            "all of its ranks, and make it again"
        )

    def _wake_members(self, meeting: Meeting) -> None:
        for rank in meeting.members:
            if self._ranks[rank].waits_in is meeting:
                self._ranks[rank].waits_in = None
                if self.parallel:
                    self._ranks[rank].wake.notify()

    def _hand_over(self, rank: int) -> None:
        """Give the turn to the lowest rank that can run; fail if none can."""
        if self.failure is not None:
            return
        able = [
            other
            for other, state in enumerate(self._ranks)
            if not state.finished and state.waits_in is None
        ]
        if not able:
            if all(state.finished for state in self._ranks):
                self._end()
            else:
                self._fail(MismatchError(self._describe_stall()))
            return
        if not self.parallel and able[0] != rank:
            self._ranks[rank].state = current_state()
            self._turn = able[0]
            self._ranks[able[0]].wake.notify()

    def _sleep(self, rank: int) -> None:
        """Wait until this rank has the turn and can go on."""
        state = self._ranks[rank]
        while self.failure is None and (
            state.waits_in is not None or (not self.parallel and self._turn != rank)
        ):
            state.sleeps = True
            state.wake.wait()
            state.sleeps = False
        self._check_running()
        if not self.parallel and self._present != rank:
            self._present = rank
            set_state(state.state)

    def _check_running(self) -> None:
        self._check_stopped()
        if self.over.is_set():
            raise CollectiveError("the simulation these ranks belong to has ended")

    def _check_stopped(self) -> None:
        if self.failure is not None and self._mark_ending():
            raise Stopped

    def _mark_ending(self) -> bool:
        """Mark the calling thread's rank as ending; return whether it is the thread of a rank."""
        here = threading.current_thread()
        for state in self._ranks:
            if state.thread is here:
                state.ending = True
                return True
        return False

    def _end(self) -> None:
        self.over.set()
        _running.discard(self)

    def _stop_with(self, message: str) -> None:
        self._fail(MismatchError(message))
        self._mark_ending()
        raise Stopped

    def _fail(self, error: BaseException) -> None:
        if self.failure is not None:
            return
        self.failure = error
        self._end()
        for state in self._ranks:
            state.wake.notify()

    def _describe_stall(self) -> str:
        lines = []
        for rank, state in enumerate(self._ranks):
            if state.waits_in is not None:
                absent = _format_ranks(state.waits_in.absent)
                lines.append(f"  rank {rank} waits in {state.waits_in.calls[rank]} for {absent}")
        returned = [rank for rank, state in enumerate(self._ranks) if state.finished]
        if returned:
            lines.append(f"  {_format_ranks(returned)} returned")
        return "no rank can go on:\n" + "\n".join(lines) + self._first_crossing


def _raise_stopped(thread: threading.Thread) -> None:
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(Stopped)
        )


def _holds_no_lock(thread: threading.Thread) -> bool:
    """Return whether a thread is outside of Python code that may be about to take a lock.

    That is the standard library (imports, logging, conditions), and a debugger or a measurement of
    coverage, which follow each thread.
    """
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return False
    tracer = getattr(threading.gettrace(), "__module__", None) or ""
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package not in sys.stdlib_module_names and package != tracer.partition(".")[0]


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [-1 if tensor.is_inference() else version_of(tensor) for tensor in tensors]


def _format_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {format_list(ranks)}"
