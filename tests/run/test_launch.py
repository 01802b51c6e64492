"""`launch` and `Workers`: real processes, and everything that can go wrong with them."""

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import shardwise as sw

PATIENCE = 120.0
"""Seconds that a script may take on a busy machine."""


@pytest.fixture(scope="module")
def workers() -> Iterator[sw.Workers]:
    """Two ranks for the tests that do not end them."""
    with sw.Workers(2) as two:
        yield two


def rank() -> int:
    return int(os.environ["RANK"])


def note_pid(folder: Path) -> None:
    (folder / f"{rank()}.pid").write_text(str(os.getpid()))


def noted_pids(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in sorted(folder.glob("*.pid"))]


def state_of(pid: int) -> str:
    """The letter that ps shows: Z of an orphan whose new parent has not looked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"


def is_running(pid: int) -> bool:
    return state_of(pid) not in ("Z", "gone")


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def assert_gone(pids: list[int], count: int, seconds: float = 0.0) -> None:
    """`pids` are `count` processes, none of which runs after some seconds."""
    assert len(pids) == count
    assert wait_until(lambda: not any(map(is_running, pids)), seconds), pids


# ---- results


def greet(greeting: str, *, mark: str) -> str:
    time.sleep(0.2 * (1 - rank()))  # the last rank answers first
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return f"{greeting} {[os.environ[name] for name in names]}{mark}"


def test_launch_returns_the_results_in_rank_order() -> None:
    assert sw.launch(greet, 2, "rank", mark="!") == [
        f"rank {[str(place), str(place), '2', '2']}!" for place in range(2)
    ]


DTYPES = sorted(
    {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str
)
# Those that no tensor is made of without a scale, or that torch only lists.
UNUSUAL = re.compile(r"torch\.(q\w+|quint\w+|u?int[1-7]|bits\w+)$")
USUAL = [dtype for dtype in DTYPES if not UNUSUAL.match(str(dtype))]


def tensor_of(dtype: torch.dtype) -> torch.Tensor:
    """Eight elements with different bytes; bools stay 0 and 1."""
    size = 8 * dtype.itemsize
    source = torch.arange(size, dtype=torch.uint8)
    return (source % 2 if dtype is torch.bool else source).view(dtype)


def echo(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return tensors


def test_tensors_of_every_dtype_go_there_and_back(workers: sw.Workers) -> None:
    assert len(USUAL) >= 20
    sent = [tensor_of(dtype) for dtype in USUAL]
    for received in workers.run(echo, sent):
        for before, after in zip(sent, received, strict=True):
            assert after.dtype == before.dtype
            assert torch.equal(after.view(torch.uint8), before.view(torch.uint8))


_kept: list[Any] = []


def keep_communicator() -> int:
    mesh = sw.init_device_mesh("cpu", (2,), ("dp",))
    _kept.append(sw.communicator(mesh, "dp"))
    return os.getpid()


def use_kept_communicator(factor: int) -> tuple[int, int]:
    (communicator,) = _kept
    return os.getpid(), communicator.all_reduce(torch.tensor(factor * (rank() + 1))).item()


def test_workers_keep_their_processes_and_groups(workers: sw.Workers) -> None:
    pids = workers.run(keep_communicator)
    assert len({os.getpid(), *pids}) == 3
    assert workers.run(use_kept_communicator, 10) == [(pids[0], 30), (pids[1], 30)]
    assert workers.run(use_kept_communicator, 2) == [(pids[0], 6), (pids[1], 6)]


def load_with_processes() -> list[int]:
    loader = DataLoader(torch.arange(6), batch_size=2, num_workers=2)
    return [batch.sum().item() for batch in loader]


@pytest.mark.slow
def test_a_rank_may_have_processes_of_its_own(workers: sw.Workers) -> None:
    assert workers.run(load_with_processes) == [[1, 5, 9]] * 2


LOOPBACK = "0100007F"  # 127.0.0.1 as /proc/net/tcp shows it


def listening() -> list[str]:
    """The addresses and ports that this process listens on, in hexadecimal."""
    own = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            own.add(os.readlink(link))
        except FileNotFoundError:  # the listing itself
            continue
    tables = [Path(f"/proc/self/net/{table}") for table in ("tcp", "tcp6")]
    lines = [
        line.split()
        for table in tables
        if table.exists()  # the second does not on a host without IPv6
        for line in table.read_text().splitlines()[1:]
    ]
    return [fields[1] for fields in lines if fields[3] == "0A" and f"socket:[{fields[9]}]" in own]


def test_nothing_listens_but_on_loopback(workers: sw.Workers) -> None:
    assert all(name.startswith("lo") for name in workers.run(os.getenv, "GLOO_SOCKET_IFNAME"))
    assert f"{LOOPBACK}:{workers._store.port:04X}" in listening()
    for found in [listening(), *workers.run(listening)]:
        assert {address.partition(":")[0] for address in found} == {LOOPBACK}


@pytest.mark.slow
def test_two_launches_at_once_do_not_meet() -> None:
    with ThreadPoolExecutor() as pool:
        first, second = (pool.submit(sw.launch, summed, 2, start) for start in (10, 200))
        assert first.result(PATIENCE) == [21, 21]
        assert second.result(PATIENCE) == [401, 401]


def summed(start: int) -> int:
    mesh = sw.init_device_mesh("cpu", (2,))
    return sw.communicator(mesh).all_reduce(torch.tensor(start + rank())).item()


# ---- what can be sent


@pytest.mark.needs("cloudpickle")
def test_lambdas_and_closures_are_sent_by_value(workers: sw.Workers) -> None:
    factor = 7

    def multiplied() -> int:
        return factor * (rank() + 1)

    assert workers.run(multiplied) == [7, 14]
    assert workers.run(lambda shift: rank() + shift, 1) == [1, 2]


def test_lambdas_need_cloudpickle(workers: sw.Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(sw.LaunchError, match=r"<lambda>.* cannot be sent .*\[pickle\]"):
        workers.run(lambda: 1)
    assert workers.run(rank) == [0, 1]  # nothing was sent, so nothing ended


def test_an_argument_that_cannot_be_sent_is_refused(workers: sw.Workers) -> None:
    with pytest.raises(sw.LaunchError, match=r"'echo' cannot be sent .* cannot pickle '_thread"):
        workers.run(echo, threading.Lock())
    assert workers.run(rank) == [0, 1]


class Unreadable:
    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("not a number",)


def unsendable() -> object:
    return threading.Lock()


@pytest.mark.parametrize(
    "fn, message",
    [
        (unsendable, r"the result of rank 0, lock, cannot be sent .* cannot pickle '_thread"),
        (Unreadable, r"the result of rank 0 cannot be read: ValueError: invalid literal"),
    ],
)
def test_a_result_that_cannot_be_sent_names_its_rank(fn: Any, message: str) -> None:
    with pytest.raises(sw.RankError, match=message) as caught:
        sw.launch(fn, 1)
    assert caught.value.rank == 0


# ---- ranks that fail


class MisfortuneError(Exception):
    pass


class NeedsTwoError(Exception):
    """Can be pickled, but not unpickled."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


class HoldsLockError(Exception):
    """Cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text, threading.Lock())


def stumble(folder: Path) -> None:
    note_pid(folder)
    dist.barrier()  # every pid is noted
    if rank() == 2:
        raise MisfortuneError("boom", 42)
    dist.barrier()


def test_an_exception_names_its_rank_and_ends_the_others(tmp_path: Path) -> None:
    with pytest.raises(sw.RankError) as caught:
        sw.launch(stumble, 3, tmp_path)
    error = caught.value
    assert error.rank == 2
    assert type(error.__cause__) is MisfortuneError
    assert error.__cause__.args == ("boom", 42)
    first, *_ = str(error).splitlines()
    assert first == "rank 2 raised MisfortuneError: ('boom', 42)"
    assert re.search(r'File ".*test_launch\.py", line \d+, in stumble\n +raise Mis', str(error))
    assert_gone(noted_pids(tmp_path), 3)


def needs_two() -> NoReturn:
    raise NeedsTwoError("here", "there")


def holds_lock() -> NoReturn:
    raise HoldsLockError("locked")


@pytest.mark.parametrize("fn, text", [(needs_two, "here and there"), (holds_lock, "locked")])
def test_an_exception_that_cannot_be_sent_arrives_as_text(fn: Any, text: str) -> None:
    with sw.Workers(1) as workers:
        with pytest.raises(sw.RankError, match=f"rank 0 raised .*{text}") as caught:
            workers.run(fn)
        assert f"in {fn.__name__}\n    raise " in str(caught.value)
        assert caught.value.__cause__ is None
        with pytest.raises(
            sw.LaunchError,
            match=f"have ended, because rank 0 raised .*{text}.*; start new ones",
        ):
            workers.run(rank)


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def be_killed_with_a_child(noted: Path) -> None:
    """The child holds the pipes of the rank open."""
    child = os.fork()
    if child == 0:
        time.sleep(2 * PATIENCE)
        os._exit(0)
    noted.write_text(str(child))
    be_killed()


def exit_at_once() -> None:
    os._exit(7)


def exit_politely() -> None:
    sys.exit(3)


def die_in_mid_sentence() -> None:
    """Ends after a part of an answer."""
    for pipe in [found for found in gc.get_objects() if isinstance(found, Connection)]:
        os.write(pipe.fileno(), b"\0\0\1\0half")
    be_killed()


def leave(folder: Path, how: Callable[[], None]) -> None:
    note_pid(folder)
    dist.barrier()
    if rank() == 1:
        how()
    dist.barrier()


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(
    "how, message",
    [
        (be_killed, r"rank 1 \(process \d+\) was killed by SIGKILL"),
        (die_in_mid_sentence, r"rank 1 \(process \d+\) was killed by SIGKILL"),
        (exit_at_once, r"rank 1 \(process \d+\) ended with exit code 7 and no result"),
        (exit_politely, r"rank 1 raised SystemExit: 3"),
    ],
)
def test_a_rank_that_ends_is_reported_and_ends_the_others(
    how: Callable[[], None], message: str, tmp_path: Path
) -> None:
    with pytest.raises(sw.RankError, match=message) as caught:
        sw.launch(leave, 2, tmp_path, how)
    assert caught.value.rank == 1
    assert_gone(noted_pids(tmp_path), 2)


@pytest.mark.slow
def test_the_end_of_a_rank_is_seen_while_a_process_of_its_own_goes_on(tmp_path: Path) -> None:
    noted = tmp_path / "child"
    with pytest.raises(sw.RankError, match=r"rank 1 \(process \d+\) was killed by SIGKILL"):
        sw.launch(leave, 2, tmp_path, partial(be_killed_with_a_child, noted))
    child = int(noted.read_text())
    assert is_running(child)
    os.kill(child, signal.SIGKILL)
    assert_gone(noted_pids(tmp_path), 2)


# ---- ranks that hang


def wait_in_vain() -> None:
    dist.barrier()


def _run() -> None:
    """Has the name of a function of the worker, below which a stack is shown."""
    time.sleep(2 * PATIENCE)


def hang(folder: Path) -> None:
    note_pid(folder)
    dist.barrier()
    if rank() == 1:
        wait_in_vain()
    elif rank() == 2:
        _run()


@pytest.mark.slow
def test_a_timeout_says_where_each_rank_was(tmp_path: Path) -> None:
    with sw.Workers(3) as workers:
        workers.run(rank)  # they have imported this file
        workers.timeout = 3
        with pytest.raises(sw.LaunchError) as caught:
            workers.run(hang, tmp_path)
    error = str(caught.value)
    assert error.startswith("timeout: the ranks did not end within 3 s\nrank 1 was here:\n")
    _, one, two = re.split(r"rank \d was here:\n", error)
    for text, function in ((one, "wait_in_vain"), (two, "_run")):
        first, *_ = text.splitlines()
        assert re.match(r'  File ".*test_launch\.py", line \d+, in hang', first)
        assert re.search(rf'File ".*test_launch\.py", line \d+, in {function}\n', text)
    assert error.endswith("returned: ranks [0]")
    assert_gone(noted_pids(tmp_path), 3)


# ---- misuse


@pytest.mark.parametrize("world_size", [0, -1, "2", 2.0, None])
def test_a_bad_world_size_is_refused(world_size: Any) -> None:
    with pytest.raises(
        sw.LaunchError, match=f"world_size: expected a positive int, got {world_size!r}"
    ):
        sw.launch(rank, world_size)


@pytest.mark.parametrize("name", ["timeout", "start_timeout", "end_timeout"])
@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "soon"])
def test_a_bad_timeout_is_refused(name: str, timeout: Any) -> None:
    with pytest.raises(sw.LaunchError, match=f"^{name}: expected a positive .* got {timeout!r}"):
        sw.launch(rank, 2, **{name: timeout})


@pytest.mark.parametrize("text", ["0", "-1", "nan", "soon"])
def test_a_bad_timeout_of_the_environment_is_refused(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SHARDWISE_START_TIMEOUT", "SHARDWISE_END_TIMEOUT"):
        monkeypatch.setenv(name, text)
        with pytest.raises(sw.LaunchError, match=f"^{name}: expected a .*number of seconds, got"):
            sw.launch(rank, 2)
        monkeypatch.delenv(name)


@pytest.mark.slow
@pytest.mark.parametrize("is_argument", [True, False])
def test_ranks_that_start_too_slowly_are_told_what_to_raise(
    is_argument: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWISE_START_TIMEOUT", "100" if is_argument else "0.01")
    start_timeout = 0.01 if is_argument else None
    expected = (
        r"start_timeout: the ranks did not start within 0.01 s; .* raise start_timeout, or the "
        r"environment variable SHARDWISE_START_TIMEOUT \(timeout limits the run"
    )
    for start in (
        lambda: sw.launch(rank, 1, timeout=50, start_timeout=start_timeout),
        lambda: sw.Workers(1, timeout=50, start_timeout=start_timeout),
    ):
        with pytest.raises(sw.LaunchError, match=expected):
            start()


@pytest.mark.slow
def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(sw.RankError, match=r"rank 0 raised .*: Unknown backend type nosuch"):
        sw.launch(rank, 1, backend="nosuch")


def test_workers_that_were_closed_say_so() -> None:
    with sw.Workers(1) as workers:
        (pid,) = workers.run(os.getpid)
    assert_gone([pid], 1)
    workers.close()
    with pytest.raises(sw.LaunchError, match="have ended, because they were closed; start new"):
        workers.run(rank)


# ---- scripts

SCRIPT = """
import os
from dataclasses import dataclass
import shardwise as sw

@dataclass
class Answer:
    rank: int

def answer(question):
    return Answer(int(os.environ["RANK"])), question

class Question:
    pass

if __name__ == "__main__":
    [(answer, question)] = sw.launch(answer, 1, Question())
    assert answer == Answer(0) and type(question) is Question, (answer, question)
    print("answered")
"""


def run_python(
    *arguments: str, text: str | None = None, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        input=text,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        "script",
        *(
            pytest.param(way, marks=pytest.mark.needs("cloudpickle"))
            for way in ("package", "command", "stdin")
        ),
    ],
)
def test_functions_and_classes_of_the_main_script_work(way: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(SCRIPT)
    arguments = {
        "script": ["script.py"],
        "package": ["-m", "package"],
        "command": ["-c", SCRIPT],
        "stdin": ["-"],
    }
    done = run_python(*arguments[way], text=SCRIPT, folder=tmp_path)
    assert (done.stdout, done.stderr, done.returncode) == ("answered\n", "", 0)


@pytest.mark.slow
def test_an_interactive_session_needs_cloudpickle() -> None:
    done = run_python("-c", f"import sys\nsys.modules['cloudpickle'] = None\n{SCRIPT}")
    assert done.returncode == 1
    assert "cloudpickle" in done.stderr.splitlines()[-1]
    assert re.search(
        r"LaunchError: launch: 'answer' cannot be sent to another process: it is defined in a "
        r"notebook, .* install cloudpickle: pip install .shardwise\[pickle\]",
        done.stderr,
    )


@pytest.mark.slow
def test_a_script_without_the_main_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, shardwise as sw\nsw.launch(os.getpid, 2)\n")
    done = run_python(str(script))
    assert done.returncode == 1
    assert "LaunchError: launch was called while a rank was importing the main" in done.stderr
    last = done.stderr.rpartition("RankError: ")[2]
    assert re.match(r"rank \d \(process \d+\) ended with exit code 1 and no result", last)
    assert last.endswith('A script must call launch under `if __name__ == "__main__":`\n')


@pytest.mark.slow
def test_a_slow_start_is_no_timeout_of_the_run(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, os, time\n"
        "if multiprocessing.current_process().name.endswith('rank 1'): time.sleep(4)\n"
        "import shardwise as sw\n"
        "if __name__ == '__main__': print(len(sw.launch(os.getpid, 2, timeout=3)))\n"
    )
    done = run_python(str(script))
    assert (done.stdout, done.stderr) == ("2\n", "")


@pytest.mark.slow
def test_ranks_that_exit_slowly_may_be_given_more_time(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import atexit, sys, time, shardwise as sw\n"
        "def finish():\n"
        "    time.sleep(3)\n"
        "    open(sys.argv[1], 'w').close()\n"
        "def register(): atexit.register(finish)\n"
        "if __name__ == '__main__': sw.launch(register, 1, end_timeout=60)\n"
    )
    done = run_python(str(script), str(tmp_path / "finished"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "finished").exists()


@pytest.mark.slow
def test_workers_that_are_never_closed_end_with_the_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    # TemporaryDirectory has a finalizer, which settles when the other finalizers run at exit.
    script.write_text(
        "import tempfile\n"
        "folder = tempfile.TemporaryDirectory()\n"
        "import os, shardwise as sw\n"
        "if __name__ == '__main__':\n"
        "    workers = sw.Workers(1)\n"
        "    print(*workers.run(os.getpid))\n"
    )
    done = run_python(str(script))
    assert (done.stderr, done.returncode) == ("", 0)
    assert_gone([int(done.stdout)], 1)


# ---- the parent ends

SLEEPERS = """
import os, time
import shardwise as sw

def sleep():
    os.write(1, f"{os.getpid()}\\n".encode())  # in one piece, as the ranks share it
    time.sleep(1000)

if __name__ == "__main__":
    print("starting", flush=True)
    sw.launch(sleep, 2)
"""


@pytest.fixture
def sleepers(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A script whose ranks print their pids and sleep, in a process group of its own."""
    script = tmp_path / "sleepers.py"
    script.write_text(SLEEPERS)
    process = subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "starting\n"
    try:
        yield process
    finally:
        with process:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def printed_pids(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    return [int(process.stdout.readline()) for _ in range(2)]


def assert_interrupted(process: subprocess.Popen[str]) -> str:
    """The script ends as one that Ctrl-C ended, with the traceback of the parent alone, which may
    say where the ranks were; returns that."""
    _, errors = process.communicate(timeout=PATIENCE)
    parents, _, ranks = errors.partition("\nKeyboardInterrupt\n")
    assert process.returncode == -signal.SIGINT
    assert "sleepers.py" in parents and "in sleep\n" not in parents
    assert not ranks or ranks.startswith("rank 0 was here:\n")
    assert "spawn_main" not in errors, "a rank shows a traceback"
    return ranks


@pytest.mark.slow
def test_no_rank_outlives_a_killed_parent(sleepers: subprocess.Popen[str]) -> None:
    pids = printed_pids(sleepers)
    assert all(map(is_running, pids))
    sleepers.kill()
    assert_gone(pids, 2, seconds=PATIENCE)


@pytest.mark.slow
def test_ctrl_c_twice_ends_the_ranks(sleepers: subprocess.Popen[str]) -> None:
    pids = printed_pids(sleepers)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)  # they do not hear that they should end
    assert wait_until(lambda: {state_of(pid) for pid in pids} == {"T"}, PATIENCE)
    os.killpg(sleepers.pid, signal.SIGINT)
    time.sleep(0.5)
    assert sleepers.poll() is None
    os.killpg(sleepers.pid, signal.SIGINT)
    assert_interrupted(sleepers)
    assert_gone(pids, 2)


def started_ranks(parent: int) -> list[int]:
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [pid for pid in map(int, children) if b"spawn_main" in read_command(pid)]


def read_command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.slow
def test_ctrl_c_is_for_the_parent_alone_which_ends_the_ranks(
    sleepers: subprocess.Popen[str],
) -> None:
    assert wait_until(lambda: len(started_ranks(sleepers.pid)) == 2, PATIENCE)
    pids = started_ranks(sleepers.pid)
    for pid in pids:
        os.kill(pid, signal.SIGINT)  # they have only started to import torch
    assert sorted(printed_pids(sleepers)) == sorted(pids)
    for pid in pids:
        os.kill(pid, signal.SIGINT)  # they sleep
    time.sleep(0.5)
    assert all(map(is_running, pids))
    os.killpg(sleepers.pid, signal.SIGINT)
    assert "in sleep\n" in assert_interrupted(sleepers)
    assert_gone(pids, 2)


@pytest.mark.slow
def test_ctrl_c_while_the_ranks_start_ends_them(sleepers: subprocess.Popen[str]) -> None:
    assert wait_until(lambda: len(started_ranks(sleepers.pid)) == 2, PATIENCE)
    pids = started_ranks(sleepers.pid)
    os.killpg(sleepers.pid, signal.SIGINT)
    assert_interrupted(sleepers)
    assert_gone(pids, 2)


def sparse_and_dense():
    return torch.eye(3).to_sparse(), torch.arange(1000.0)[:2]


def test_sparse_tensors_come_back_and_views_travel_without_their_base(workers4):
    for sparse, view in workers4.run(sparse_and_dense):
        assert torch.equal(sparse.to_dense(), torch.eye(3))
        assert torch.equal(view, torch.tensor([0.0, 1.0]))
        assert view.untyped_storage().nbytes() == 8


def slowly(number):
    time.sleep(0.2)
    return number


def test_runs_from_several_threads_take_turns_and_get_their_own_results(workers4):
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda number: workers4.run(slowly, number), range(4)))
    assert results == [[number] * 4 for number in range(4)]
