"""simulate: what it promises about order, random numbers, errors and ends; and listen."""

from __future__ import annotations

import _thread
import inspect
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.locking_tracer import traced_threads

import shardwise as sw
from shardwise.comm.trace import user_line
from shardwise.core import world
from shardwise.core.mesh import init_device_mesh  # unlike sw's, it does not communicate
from shardwise.run import simulate

HERE = Path(__file__).name


def line() -> int:
    """The line of the caller."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


def everybody() -> sw.Communicator:
    mesh = init_device_mesh("cpu", (sw_size(),), ("x",))
    return sw.communicator(mesh)


def sw_size() -> int:
    return world.current().size


def my_rank() -> int:
    return world.current().rank


@pytest.fixture(autouse=True)
def nothing_left_running(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No thread outlives a simulation, on a busy machine either, and the next one works."""
    monkeypatch.setattr(simulate, "_GRACE_SECONDS", 30.0)
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before
    assert sw.simulate(lambda: everybody().all_gather(torch.ones(1)).numel(), 3) == [3, 3, 3]


def running_ranks() -> int:
    ranks = [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]
    return sum(thread.is_alive() for thread in ranks)


# ---- what it runs


def test_results_come_in_rank_order_and_arguments_are_passed() -> None:
    def show(first: str, *, second: str) -> str:
        return f"{first}{my_rank()}{second}"

    assert sw.simulate(show, 3, "<", second=">") == ["<0>", "<1>", "<2>"]


def test_arguments_are_shared_not_copied() -> None:
    shared = torch.zeros(3)

    def write(x: torch.Tensor) -> int:
        x[my_rank()] = 1
        return id(x)

    assert sw.simulate(write, 3, shared) == [id(shared)] * 3
    assert shared.tolist() == [1, 1, 1]


def test_the_example_of_the_docstring() -> None:
    def rank_sum() -> float:
        mesh = init_device_mesh("cpu", (4,))
        return sw.communicator(mesh).all_reduce(torch.tensor(mesh.get_rank())).item()

    assert sw.simulate(rank_sum, 4) == [6, 6, 6, 6]


def test_64_ranks_work() -> None:
    def program() -> int:
        mesh = init_device_mesh("cpu", (8, 8), ("dp", "tp"))
        total = torch.tensor([my_rank()])
        for axis in ("dp", "tp"):
            total = sw.communicator(mesh, axis).all_reduce(total)
        return int(total)

    assert sw.simulate(program, 64) == [sum(range(64))] * 64


def test_one_rank_works_and_communicates_nothing() -> None:
    events: list[sw.Event] = []

    def program() -> list[float]:
        comm = everybody()
        comm.barrier()
        return comm.all_reduce(torch.tensor([1.0, 2.0])).tolist()

    with sw.listen(events.append):
        assert sw.simulate(program, 1) == [[1, 2]]
    assert {event.bytes for event in events} == {0}


@pytest.mark.parametrize("world_size", [0, -1, 1.0, "2", None])
def test_a_bad_world_size_is_refused_by_name(world_size: Any) -> None:
    with pytest.raises(sw.LaunchError, match=r"^world_size: expected a positive int, got "):
        sw.simulate(my_rank, world_size)


def test_a_simulation_can_run_inside_a_rank_of_another() -> None:
    def inner(offset: int) -> int:
        return int(everybody().all_reduce(torch.tensor([offset + my_rank()])))

    def outer() -> tuple[list[int], int]:
        before = everybody().all_reduce(torch.tensor([1]))
        results = sw.simulate(inner, 2, 10 * my_rank())
        return results, int(everybody().all_reduce(before))

    assert sw.simulate(outer, 3) == [([1, 1], 9), ([21, 21], 9), ([41, 41], 9)]


def test_the_caller_is_no_rank_of_the_simulation_before_or_after() -> None:
    assert (my_rank(), sw_size()) == (0, 1)
    assert sw.simulate(lambda: (my_rank(), sw_size()), 2) == [(0, 2), (1, 2)]
    assert (my_rank(), sw_size()) == (0, 1)


# ---- order


def order_of_a_program() -> list[tuple[int, str]]:
    log: list[tuple[int, str]] = []

    def program() -> None:
        comm = everybody()
        log.append((comm.index, "start"))
        pending = comm.all_reduce_async(torch.ones(2))
        log.append((comm.index, "under way"))
        pending.wait()
        log.append((comm.index, "reduced"))
        if comm.index > 0:
            comm.recv(torch.ones(1), comm.index - 1)
        log.append((comm.index, "received"))
        if comm.index < comm.size - 1:
            comm.send(torch.ones(1), comm.index + 1)
            log.append((comm.index, "sent"))
        comm.barrier()
        log.append((comm.index, "end"))

    sw.simulate(program, 3)
    return log


def test_a_rank_runs_until_it_waits_and_then_the_lowest_that_can_goes_on() -> None:
    expected = [
        *[(0, "start"), (0, "under way"), (1, "start"), (1, "under way")],
        *[(2, "start"), (2, "under way")],  # the last to come
        *[(0, "reduced"), (0, "received")],  # and cannot send before 1 comes
        *[(1, "reduced"), (0, "sent"), (1, "received")],  # 0 waits in the barrier
        *[(2, "reduced"), (1, "sent"), (2, "received")],
        *[(0, "end"), (1, "end"), (2, "end")],
    ]
    assert order_of_a_program() == expected


def test_two_runs_are_alike() -> None:
    assert order_of_a_program() == order_of_a_program()


def test_prints_come_in_rank_order(capsys: pytest.CaptureFixture[str]) -> None:
    def program() -> None:
        for step in range(2):
            print(step, my_rank())
            everybody().barrier()

    sw.simulate(program, 3)
    assert capsys.readouterr().out.splitlines() == ["0 0", "0 1", "0 2", "1 0", "1 1", "1 2"]


# ---- random numbers


def draws(rank: int, collective: Callable[[torch.Tensor], Any]) -> list[torch.Tensor]:
    torch.manual_seed(rank)
    drawn = []
    for _ in range(4):
        drawn.append(torch.rand(3))
        collective(drawn[-1])
        drawn.append(torch.nn.functional.dropout(torch.ones(20)))
    return drawn


def test_each_rank_draws_as_a_process_of_its_own() -> None:
    simulated = sw.simulate(lambda: draws(my_rank(), everybody().all_reduce), 4)
    for rank, drawn in enumerate(simulated):
        alone = draws(rank, lambda x: None)
        assert all(torch.equal(one, other) for one, other in zip(drawn, alone, strict=True))


def test_ranks_start_with_the_callers_random_state_and_leave_it_untouched() -> None:
    def program() -> list[float]:
        first = torch.rand(2)
        everybody().barrier()
        return torch.cat([first, torch.rand(2)]).tolist()

    torch.manual_seed(7)
    expected = torch.rand(4).tolist()
    torch.manual_seed(7)
    assert sw.simulate(program, 3) == [expected] * 3
    assert torch.rand(4).tolist() == expected


@pytest.mark.parametrize("parallel", [False, True])
def test_the_callers_random_state_is_untouched_by_a_rank_that_raises(parallel: bool) -> None:
    def program() -> None:
        torch.rand(5)
        everybody().barrier()
        raise ValueError("no")

    torch.manual_seed(7)
    expected = torch.get_rng_state()
    with pytest.raises(sw.RankError):
        sw.simulate(program, 3, parallel=parallel)
    assert torch.equal(torch.get_rng_state(), expected)


# ---- a rank that raises


def simulation_raises(
    kind: type[Exception], *args: Any, **kwargs: Any
) -> pytest.ExceptionInfo[Any]:
    """The error; every rank has stopped, so that none is noted as left running."""
    with pytest.raises(kind) as caught:
        sw.simulate(*args, **kwargs)
    assert not hasattr(caught.value, "__notes__")
    return caught


def fail_here() -> None:
    raise KeyError("lost")


def test_a_rank_that_raises_is_named_with_its_traceback() -> None:
    def program() -> None:
        if my_rank() == 2:
            fail_here()

    error = simulation_raises(sw.RankError, program, 4).value
    assert error.rank == 2
    assert str(error).startswith("rank 2 raised KeyError: 'lost'\n")
    assert f'{HERE}", line ' in str(error) and "in fail_here" in str(error)
    assert type(error.__cause__) is KeyError and error.__cause__.args == ("lost",)
    assert traceback.extract_tb(error.__cause__.__traceback__)[-1].name == "fail_here"


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("failing", [0, 1, 2, 3])
def test_ranks_blocked_in_a_collective_stop_when_another_raises(
    failing: int, parallel: bool
) -> None:
    went_on = []

    def program() -> None:
        comm = everybody()
        if comm.index == failing:
            time.sleep(0.02)
            fail_here()
        comm.all_reduce(torch.ones(1))
        went_on.append(comm.index)

    error = simulation_raises(sw.RankError, program, 4, parallel=parallel).value
    assert error.rank == failing
    assert went_on == []


def test_a_rank_that_computes_stops_when_another_raises_in_parallel() -> None:
    counts = [0, 0, 0]

    def program() -> None:
        if my_rank() == 1:
            while not (counts[0] and counts[2]):
                time.sleep(0.001)
            fail_here()
        while True:
            counts[my_rank()] += 1

    error = simulation_raises(sw.RankError, program, 3, parallel=True).value
    assert error.rank == 1
    stopped_at = list(counts)
    time.sleep(0.05)
    assert counts == stopped_at


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_all_ranks_may_raise_at_once_in_parallel() -> None:
    def program() -> None:
        everybody().barrier()
        fail_here()

    for _ in range(20):
        with pytest.raises(sw.RankError, match="raised KeyError: 'lost'"):
            sw.simulate(program, 8, parallel=True)


def raise_together() -> None:
    everybody().barrier()
    fail_here()


def compute_until_stopped() -> None:
    everybody().barrier()
    if my_rank() == 1:
        fail_here()
    while True:
        my_rank()


@pytest.mark.parametrize(("program", "ranks"), [(raise_together, 8), (compute_until_stopped, 2)])
def test_stopped_ranks_leave_no_lock_taken(program: Callable[[], None], ranks: int) -> None:
    """Ranks that compute are ended by an exception that can be raised anywhere: not while they take
    the lock of the scheduler, or one of a tracer."""
    with traced_threads() as lock:
        for _ in range(10):
            simulation_raises(sw.RankError, program, ranks, parallel=True)
    assert lock.acquire(timeout=1)
    lock.release()


def test_user_code_that_catches_exceptions_does_not_swallow_the_stop() -> None:
    went_on = []

    def program() -> None:
        comm = everybody()
        if comm.index == 3:
            fail_here()
        for _ in range(3):
            try:
                comm.barrier()
            except Exception:
                went_on.append(comm.index)
        went_on.append(comm.index)

    assert simulation_raises(sw.RankError, program, 4).value.rank == 3
    assert went_on == []


def test_user_code_that_catches_everything_is_stopped_again() -> None:
    def program() -> None:
        comm = everybody()
        if comm.index == 1:
            fail_here()
        try:
            comm.barrier()
        finally:
            comm.barrier()  # a clean-up that communicates

    assert simulation_raises(sw.RankError, program, 2).value.rank == 1


def test_an_error_of_shardwise_itself_names_its_rank() -> None:
    def program() -> None:
        if my_rank() == 1:
            everybody().broadcast(torch.ones(1), 9)

    error = simulation_raises(sw.RankError, program, 2).value
    assert isinstance(error.__cause__, sw.CollectiveError)
    assert "rank 1 raised CollectiveError: broadcast(source)" in str(error)


@pytest.mark.parametrize("ending", [SystemExit, KeyboardInterrupt])
def test_a_rank_that_exits_is_an_error_too(ending: type[BaseException]) -> None:
    def program() -> None:
        if my_rank() == 1:
            raise ending
        everybody().barrier()

    error = simulation_raises(sw.RankError, program, 2).value
    assert error.rank == 1 and isinstance(error.__cause__, ending)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("blocked", [False, True])
def test_an_interrupt_of_the_caller_ends_all_ranks(blocked: bool, parallel: bool) -> None:
    # No Event: a rank that is stopped just as it takes its lock would keep it from the others.
    begun: set[int] = set()

    def program() -> None:
        while True:
            begun.add(my_rank())
            if blocked:
                everybody().all_reduce(torch.ones(1))

    def interrupt() -> None:
        while not begun or running_ranks() < 3:
            time.sleep(0.001)
        _thread.interrupt_main()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        sw.simulate(program, 3, parallel=parallel)
    thread.join()


def test_an_interrupt_while_the_ranks_start_ends_those_that_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def program() -> None:
        while True:
            pass

    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if thread.name == "rank 1":
            raise KeyboardInterrupt
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sw.simulate(program, 3)


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="needs alarms")
def test_any_error_of_a_signal_handler_ends_all_ranks() -> None:
    def too_long(*_: object) -> None:
        raise TimeoutError("too long")

    def program() -> None:
        while True:
            pass

    before = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(TimeoutError, match="too long"):
            sw.simulate(program, 2)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_simulation_inside_a_rank_ends_with_it() -> None:
    def forever() -> None:
        while True:
            pass

    def program() -> None:
        if my_rank() == 1:
            time.sleep(0.05)
            fail_here()
        sw.simulate(forever, 2)

    with pytest.raises(sw.RankError, match="rank 1 raised KeyError"):
        sw.simulate(program, 2, parallel=True)


# ---- ranks that do not meet


def mismatch(program: Callable[[], Any], world_size: int, parallel: bool = False) -> str:
    return str(simulation_raises(sw.MismatchError, program, world_size, parallel=parallel).value)


@pytest.mark.parametrize("parallel", [False, True])
def test_different_collectives_are_named_with_both_source_lines(parallel: bool) -> None:
    lines: dict[int, int] = {}

    def program() -> None:
        comm = everybody()
        if comm.index == 0:
            lines[0] = line() + 1
            comm.all_reduce(torch.ones(2, 3))
        else:
            lines[1] = line() + 1
            comm.all_gather(torch.ones(2, 3))

    message = mismatch(program, 2, parallel)
    assert "met in different collectives" in message
    zero, one = (next(row for row in message.splitlines() if f"rank {r}: " in row) for r in (0, 1))
    assert "all_reduce(shape=(2, 3), dtype=torch.float32, op=sum) over x at" in zero
    assert "all_gather(whole=(4, 3), dtype=torch.float32, dim=0, sizes=(2, 2)) over x at" in one
    assert f"{HERE}:{lines[0]} in program" in zero
    assert f"{HERE}:{lines[1]} in program" in one


DIFFERENCES: dict[str, tuple[Callable[[sw.Communicator], Any], list[str]]] = {
    "shape": (
        lambda c: c.all_reduce(torch.ones(2 + c.index)),
        ["rank 0: all_reduce(shape=(2,)", "rank 1: all_reduce(shape=(3,)"],
    ),
    "dtype": (
        lambda c: c.all_reduce(torch.ones(2, dtype=[torch.float32, torch.int64][c.index])),
        ["rank 0: all_reduce", "dtype=torch.float32", "rank 1: all_reduce", "dtype=torch.int64"],
    ),
    "op": (
        lambda c: c.all_reduce(torch.ones(2), ["sum", "max"][c.index]),
        ["op=sum", "op=max"],
    ),
    "dim": (lambda c: c.all_gather(torch.ones(2, 2), c.index), ["dim=0", "dim=1"]),
    "sizes": (
        lambda c: c.reduce_scatter(torch.ones(3), sizes=[[1, 2], [2, 1]][c.index]),
        ["sizes=(1, 2)", "sizes=(2, 1)"],
    ),
    "source": (lambda c: c.broadcast(torch.ones(2), c.index), ["source=0", "source=1"]),
    "destination": (
        lambda c: c.gather(torch.ones(2), destination=c.index),
        ["destination=0", "destination=1"],
    ),
    "shapes of all_gather": (
        lambda c: c.all_gather(torch.ones(2, 3 + c.index)),
        ["rank 0: all_gather(whole=(4, 3)", "rank 1: all_gather(whole=(4, 4)"],
    ),
    "shapes of all_to_all": (
        lambda c: c.all_to_all([torch.ones(1 + c.index)] * 2),
        ["rank 0 sends a piece of shape (1,) to rank 1, which expects (2,)", "rank 1: all_to_all"],
    ),
    "shapes of scatter": (
        lambda c: c.scatter(torch.ones(1 + c.index), [torch.ones(1)] * 2),
        ["rank 0 sends a piece of shape (1,) to rank 1, which expects (2,)", "rank 1: scatter"],
    ),
    "shapes of a message": (
        lambda c: c.recv(torch.ones(3), 0) if c.index else c.send(torch.ones(2), 1),
        ["rank 0: send/recv(from=0, to=1, shape=(2,)", "rank 1: send/recv", "shape=(3,)"],
    ),
    "barrier": (
        lambda c: c.gather_objects(1) if c.index else c.barrier(),
        ["rank 0: barrier()", "rank 1: gather_objects()"],
    ),
}


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("what", DIFFERENCES)
def test_a_difference_is_shown_with_both_values(what: str, parallel: bool) -> None:
    call, parts = DIFFERENCES[what]

    def program() -> None:
        comm = everybody()
        while comm.index == 1 and not world.current()._scheduler._counts:
            time.sleep(0.001)  # comes second, so that the order of the message is known
        call(comm)

    message = mismatch(program, 2, parallel)
    assert message.count(f"{HERE}:") == 2
    places = [message.index(part) for part in parts]
    assert places == sorted(places)


def test_ranks_that_wait_over_different_axes_are_all_named() -> None:
    def program() -> None:
        mesh = init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        axis = "dp" if my_rank() in (0, 1) else "tp"
        sw.communicator(mesh, axis).all_reduce(torch.ones(1))

    message = mismatch(program, 4)
    assert "no rank can go on" in message
    assert "rank 0 waits in all_reduce(shape=(1,), dtype=torch.float32, op=sum) over dp" in message
    assert f"{HERE}:" in message
    assert "for rank 2" in message and "for rank 3" in message
    # Ranks 2 and 3 have met each other; they went on and returned.
    assert "ranks 2, 3 returned" in message


def test_the_same_ranks_in_another_order_of_axes_do_not_meet() -> None:
    def program() -> None:
        mesh = init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        axes = ("dp", "tp") if my_rank() == 0 else ("tp", "dp")
        sw.communicator(mesh, axes).all_reduce(torch.ones(1))

    message = mismatch(program, 4)
    assert "over dp.tp" in message and "over tp.dp" in message


@pytest.mark.parametrize("parallel", [False, True])
def test_a_rank_that_returns_while_others_wait_is_named(parallel: bool) -> None:
    def program() -> None:
        if my_rank() != 1:
            everybody().barrier()

    message = mismatch(program, 3, parallel)
    assert "rank 0 waits in barrier() over x" in message and "for rank 1" in message
    assert "rank 2 waits in barrier() over x" in message
    assert "rank 1 returned" in message


def test_an_asynchronous_collective_that_others_never_join_is_an_error() -> None:
    def program() -> None:
        if my_rank() == 1:
            everybody().all_reduce_async(torch.ones(1))

    message = mismatch(program, 3)
    assert "all ranks returned" in message
    assert "rank 1: all_reduce" in message and "not joined by ranks 0, 2" in message
    assert f"{HERE}:" in message


def test_an_asynchronous_collective_that_all_join_and_nobody_awaits_is_none() -> None:
    assert sw.simulate(lambda: everybody().barrier_async() and None, 3) == [None] * 3


def test_a_message_that_is_never_received_is_an_error() -> None:
    def program() -> None:
        if my_rank() == 0:
            everybody().send(torch.ones(1), 1)

    message = mismatch(program, 2)
    assert "no rank can go on" in message and "rank 1 returned" in message
    assert "rank 0 waits in send/recv(from=0, to=1" in message and "for rank 1" in message


def test_a_message_that_is_never_received_nor_waited_for_is_an_error() -> None:
    def program() -> None:
        if my_rank() == 0:
            everybody().send_async(torch.ones(1), 1)

    message = mismatch(program, 2)
    assert "all ranks returned" in message
    assert "rank 0: send/recv(from=0, to=1" in message and "not joined by rank 1" in message


@pytest.mark.parametrize("parallel", [False, True])
def test_ranks_that_send_to_each_other_and_receive_afterwards_cannot_go_on(parallel: bool) -> None:
    def program() -> None:
        comm = everybody()
        comm.send(torch.ones(1), 1 - comm.index)
        comm.recv(torch.ones(1), 1 - comm.index)

    message = mismatch(program, 2, parallel)
    assert "no rank can go on" in message
    assert "rank 0 waits in send/recv(from=0, to=1" in message and "for rank 1" in message
    assert "rank 1 waits in send/recv(from=1, to=0" in message and "for rank 0" in message


def test_a_message_that_is_never_sent_is_an_error() -> None:
    def program() -> None:
        if my_rank() == 0:
            everybody().recv(torch.ones(1), 1)

    assert "rank 0 waits in send/recv(from=1, to=0" in mismatch(program, 2)


WRITES: dict[str, Callable[[sw.Communicator, torch.Tensor], sw.Pending[Any]]] = {
    "all_reduce": lambda c, x: c.all_reduce_async(x),
    "all_gather": lambda c, x: c.all_gather_async(x),
    "reduce_scatter": lambda c, x: c.reduce_scatter_async(x),
    "all_to_all": lambda c, x: c.all_to_all_async([x[:1], x[1:]]),
    "broadcast": lambda c, x: c.broadcast_async(x),
    "scatter": lambda c, x: c.scatter_async(x, [x, x]),
    "gather": lambda c, x: c.gather_async(x),
    "send": lambda c, x: c.recv_async(x, 0) if c.index else c.send_async(x, 1),
}


@pytest.mark.parametrize("kind", WRITES)
def test_writing_to_an_input_of_a_collective_under_way_is_found(kind: str) -> None:
    def program() -> None:
        comm = everybody()
        x = torch.ones(2)
        pending = WRITES[kind](comm, x)
        if comm.index == 0:
            x.add_(1)
        pending.wait()

    message = mismatch(program, 2)
    assert "rank 0 wrote to an input of a collective under way" in message
    assert kind in message and "wait()" in message and f"{HERE}:" in message


def test_writing_to_an_input_afterwards_is_fine() -> None:
    def program() -> list[float]:
        comm = everybody()
        x = torch.ones(2)
        total = comm.all_reduce_async(x).wait()
        x.zero_()
        return total.tolist()

    assert sw.simulate(program, 2) == [[2, 2], [2, 2]]


def test_a_sent_tensor_may_be_written_to_afterwards() -> None:
    def program() -> list[float]:
        comm = everybody()
        if comm.index == 1:
            return comm.recv(torch.empty(2), 0).tolist()
        x = torch.ones(2)
        comm.send(x, 1)
        return x.zero_().tolist()

    assert sw.simulate(program, 2) == [[0, 0], [1, 1]]


# ---- errors while a result is computed


@pytest.mark.parametrize("parallel", [False, True])
def test_an_error_of_a_collective_comes_from_wait_on_every_member(parallel: bool) -> None:
    def program() -> str:
        comm = everybody()
        out = torch.zeros(1).expand(2)  # cannot be written to
        pending = comm.exchange_async({1 - comm.index: torch.ones(2)}, {1 - comm.index: out})
        with pytest.raises(RuntimeError, match="single memory location") as caught:
            pending.wait()
        assert comm.all_gather(torch.ones(1)).numel() == 2  # and it can go on
        return "".join(traceback.format_tb(caught.value.__traceback__))

    for trace in sw.simulate(program, 2, parallel=parallel):
        assert trace.count("in program") == 1  # of this rank, not of the others
        assert "in combine" in trace


def test_gather_objects_waits_for_everybody_to_tell_its_length() -> None:
    log: list[tuple[int, str]] = []

    def program() -> None:
        comm = everybody()
        log.append((comm.index, "start"))
        pending = comm.gather_objects_async(comm.index)
        log.append((comm.index, "under way"))
        assert pending.wait() == [0, 1]

    sw.simulate(program, 2)
    assert log == [(0, "start"), (1, "start"), (0, "under way"), (1, "under way")]


def test_the_line_shown_is_outside_of_the_package_wherever_it_was_loaded_from() -> None:
    inside: dict[str, Any] = {"__name__": "shardwise.comm.simulated", "user_line": user_line}
    exec(compile("def call(): return user_line()", "/a/symlink/threads.py", "exec"), inside)
    assert inside["call"]().startswith(f"{__file__}:{line()} in test_the_line_shown")


def test_the_line_shown_is_outside_of_torch_where_that_called_the_package() -> None:
    def program() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.distribute_tensor(torch.ones(4, requires_grad=True), mesh, [sw.Shard(0)])
        if mesh.get_rank() == 0:
            torch.nn.functional.normalize(x, dim=0)
        else:
            everybody().barrier()

    with pytest.raises(sw.MismatchError) as caught:
        sw.simulate(program, 2)
    assert str(caught.value).count(f"at {__file__}:") == 2


def test_an_operator_on_one_rank_only_is_found_where_the_ranks_parted() -> None:
    def mistake() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.distribute_tensor(torch.ones(4), mesh, [sw.Shard(0)])
        if mesh.get_rank() == 0:
            x.sum().item()
        x.mean().item()

    with pytest.raises(sw.MismatchError) as caught:
        sw.simulate(mistake, 2)
    first, second = mistake.__code__.co_firstlineno + 4, mistake.__code__.co_firstlineno + 5
    message = str(caught.value)
    assert "from different lines" in message
    assert f"rank 0: at {__file__}:{first}" in message
    assert f"rank 1: at {__file__}:{second}" in message


def test_ranks_may_meet_from_different_lines() -> None:
    def program() -> float:
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.distribute_tensor(torch.full((5, 2), 5.5), mesh, [sw.Shard(0)])
        if mesh.get_rank() == 0:
            return x.sum().item()
        return x.sum().item()

    assert sw.simulate(program, 2) == [55.0, 55.0]


# ---- after the end


def test_a_result_that_was_there_can_be_waited_for_after_the_end() -> None:
    pendings = sw.simulate(lambda: everybody().all_reduce_async(torch.ones(2)), 3)
    assert [pending.wait().tolist() for pending in reversed(pendings)] == [[3, 3]] * 3


ENDED = "^the simulation these ranks belong to has ended$"


def test_a_collective_cannot_be_started_after_the_end() -> None:
    comms = sw.simulate(everybody, 3)
    for comm in comms:
        with pytest.raises(sw.CollectiveError, match=ENDED):
            comm.all_reduce(torch.ones(1))
        with pytest.raises(sw.CollectiveError, match=ENDED):
            comm.send_async(torch.ones(1), (comm.index + 1) % 3)


@pytest.mark.parametrize("raises", [False, True])
def test_a_result_that_was_never_there_is_not_waited_for_after_the_end(raises: bool) -> None:
    kept: list[sw.Pending[torch.Tensor]] = []
    comms: list[sw.Communicator] = []

    def program() -> None:
        if my_rank() == 0:
            comms.append(everybody())
            kept.append(comms[0].all_reduce_async(torch.ones(1)))
            if raises:
                fail_here()

    simulation_raises(sw.RankError if raises else sw.MismatchError, program, 2)
    with pytest.raises(sw.CollectiveError, match=ENDED):
        kept[0].wait()
    with pytest.raises(sw.CollectiveError, match=ENDED):
        comms[0].barrier()


def test_a_thread_that_is_no_rank_is_told_so_while_a_simulation_runs() -> None:
    def refused() -> str:
        with pytest.raises(sw.MeshError) as caught:
            init_device_mesh("cpu", (2,))
        return str(caught.value)

    def program() -> str:
        if my_rank() == 1:
            return ""
        said: list[str] = []
        thread = threading.Thread(target=lambda: said.append(refused()))
        thread.start()
        thread.join()
        return said[0]

    during, _ = sw.simulate(program, 2)
    assert "this thread is no rank of the running simulation; use the rank's own thread" in during
    assert "this process is alone" in refused()


# ---- parallel


def test_parallel_ranks_give_the_same_results() -> None:
    def program() -> list[int]:
        mesh = init_device_mesh("cpu", (2, 4), ("dp", "tp"))
        x = torch.arange(8) + my_rank()
        for step in range(20):
            x = sw.communicator(mesh, ("dp", "tp")[step % 2]).all_reduce(x, "max") + my_rank() % 3
        return x.tolist()

    assert sw.simulate(program, 8, parallel=True) == sw.simulate(program, 8)


def test_parallel_ranks_run_at_the_same_time() -> None:
    meeting = threading.Barrier(4, timeout=5)
    sw.simulate(meeting.wait, 4, parallel=True)  # would never meet by turns


# ---- listen


def test_events_say_who_what_where_and_how_many_bytes() -> None:
    events: list[sw.Event] = []

    def program() -> None:
        mesh = init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        x = torch.ones(4, 3)  # 48 bytes
        tp, both = sw.communicator(mesh, "tp"), sw.communicator(mesh, ("tp", "dp"))
        sizes = [1, 0, 2, 1]
        both.all_reduce(x)
        both.all_gather(x, 1)
        both.all_gather(torch.ones(sizes[both.index], 3), 0, sizes)
        both.reduce_scatter(x, 0, sizes)
        tp.all_to_all([torch.ones(tp.index, 2)] * 2, [(0, 2), (1, 2)])
        tp.broadcast(x, 1)
        tp.scatter(x, [x, x], 1)
        tp.gather(x, destination=1)
        if tp.index == 0:
            tp.send(x.to(torch.bfloat16), 1)
        else:
            tp.recv(x.to(torch.bfloat16), 0)
        both.barrier()
        both.gather_objects("x")

    start = time.perf_counter()
    with sw.listen(events.append):
        sw.simulate(program, 4)
    end = time.perf_counter()

    def told(rank: int) -> list[tuple[Any, ...]]:
        return [
            (e.kind, ".".join(e.axes), e.ranks, e.shape, e.dtype, e.bytes)
            for e in events
            if e.rank == rank
        ]

    f32, all_ranks, own = torch.float32, (0, 2, 1, 3), (2, 3)
    # Rank 3 is index 3 of tp.dp, with one row of the uneven four; and index 1 of tp.
    assert told(3) == [
        ("all_reduce", "tp.dp", all_ranks, (4, 3), f32, 72),  # 2 * 48 * 3/4
        ("all_gather", "tp.dp", all_ranks, (4, 3), f32, 144),  # 3 others of 48
        ("all_gather", "tp.dp", all_ranks, (1, 3), f32, 36),  # 3 rows of 12
        ("reduce_scatter", "tp.dp", all_ranks, (4, 3), f32, 36),  # 3 others' row of 12
        ("all_to_all", "tp", own, (1, 2), f32, 0),  # the other sends nothing
        ("broadcast", "tp", own, (4, 3), f32, 0),  # this rank has it
        ("scatter", "tp", own, (4, 3), f32, 0),
        ("gather", "tp", own, (4, 3), f32, 48),
        ("recv", "tp", own, (4, 3), torch.bfloat16, 24),
        ("barrier", "tp.dp", all_ranks, (), None, 0),
        ("gather_objects", "tp.dp", all_ranks, (), None, 3 * len(pickle.dumps("x"))),
    ]
    # Rank 2 is index 1 of tp.dp, which has no row; and index 0 of tp.
    assert [(kind, received) for kind, *_, received in told(2)] == [
        ("all_reduce", 72),
        ("all_gather", 144),
        ("all_gather", 48),
        ("reduce_scatter", 0),
        ("all_to_all", 8),
        ("broadcast", 48),
        ("scatter", 48),
        ("gather", 0),
        ("send", 0),
        ("barrier", 0),
        ("gather_objects", 3 * len(pickle.dumps("x"))),
    ]
    assert len(events) == 4 * 11
    for event in events:
        assert event.ended is not None
        assert start <= event.started <= event.ended <= end


def test_an_event_ends_when_its_result_is_waited_for() -> None:
    def program() -> None:
        events: list[sw.Event] = []
        with sw.listen(events.append):
            pending = everybody().all_reduce_async(torch.ones(1))
        (event,) = (each for each in events if each.rank == my_rank())
        assert event.ended is None
        pending.wait()
        assert event.ended is not None and event.ended >= event.started

    sw.simulate(program, 2)


def test_nobody_hears_events_outside_of_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[sw.Event] = []
    with sw.listen(events.append):
        pass
    monkeypatch.setattr("shardwise.comm.trace.Event", None)  # nothing may even be built
    sw.simulate(lambda: everybody().all_reduce(torch.ones(1)), 2)
    assert events == []


def test_listeners_nest_and_each_hears_its_own_time() -> None:
    outer: list[sw.Event] = []
    inner: list[sw.Event] = []
    comm = sw.communicator(init_device_mesh("cpu", (1,)))
    with sw.listen(outer.append):
        comm.barrier()
        with sw.listen(inner.append):
            comm.all_reduce(torch.ones(1))
        comm.gather_objects(1)
    assert [event.kind for event in outer] == ["barrier", "all_reduce", "gather_objects"]
    assert [event.kind for event in inner] == ["all_reduce"]


def test_a_listener_is_gone_after_an_error() -> None:
    events: list[sw.Event] = []
    comm = sw.communicator(init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match="stop"), sw.listen(events.append):
        raise ValueError("stop")
    comm.barrier()
    assert events == []
