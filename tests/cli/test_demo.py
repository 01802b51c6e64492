"""The demo trains on real processes, prints what happened, and ends after errors and signals."""

import dataclasses
import io
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import safetensors.torch
import torch
from rich.console import Console

from shardwise import cli
from shardwise.core.box import Box
from shardwise.demo import main as demo
from shardwise.demo.display import collective_rows, draw_box, format_box, save_plot
from shardwise.demo.options import Options, UsageError, check_options
from shardwise.demo.training import alone, load_weights, on_each_rank

PATIENCE = 120.0
"""Seconds that processes may take to end on a busy machine."""


def run(options):
    console = Console(file=io.StringIO(), width=140)
    return demo.run(options, console), console.file.getvalue()


@dataclasses.dataclass
class Finished:
    """A run, what it said, and what its ranks told."""

    options: Options
    is_right: bool
    printed: str
    outcomes: list
    single: object


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    options = check_options(model="tiny", steps=4, output=tmp_path_factory.mktemp("demo"))
    kept = []
    with pytest.MonkeyPatch.context() as patch:
        train = demo._train
        patch.setattr(demo, "_train", lambda *args: kept.append(train(*args)) or kept[-1])
        is_right, printed = run(options)
    return Finished(options, is_right, printed, *kept[0])


def test_the_mesh_and_one_process_learn_the_same(finished):
    assert finished.is_right
    ours, alone = finished.outcomes[0].losses, finished.single.losses
    assert len(ours) == len(alone) == 4
    assert max(abs(a - b) for a, b in zip(ours, alone, strict=True)) <= 1e-4
    assert ours[-1] < ours[0] - 0.2
    assert all(each.losses == ours for each in finished.outcomes)
    assert "The losses agree" in finished.printed


def test_both_runs_are_shown_as_they_go_in_plain_lines_without_a_terminal(finished):
    for who in ("4 processes (2x2)", "one process"):
        lines = re.findall(rf"^{re.escape(who)}: step (\d) of 4, loss .* tokens/s$",
                           finished.printed, re.M)  # fmt: skip
        assert lines == ["1", "2", "3", "4"]
    assert "\x1b" not in finished.printed


def test_the_picture_shows_who_holds_what_uneven_parts_too(finished):
    line = re.search(r"feed_forward.w1 .*", finished.printed)[0]
    assert "rows 0:86" in line and "rows 86:171" in line
    assert "tp=0: ranks 0, 2" in finished.printed and "tp=1: ranks 1, 3" in finished.printed
    assert format_box((171, 64), Box((86, 0), (171, 64))) == "rows 86:171"
    assert format_box((4,), Box((0,), (4,))) == "all"
    assert format_box((4, 2), Box((4, 0), (4, 2))) == "nothing"
    assert draw_box((8, 8), Box((0, 4), (4, 8))) == "····████\n········"
    assert draw_box((3, 8), Box((2, 0), (3, 8))) == "········\n▄▄▄▄▄▄▄▄"


def test_the_table_says_what_was_communicated_and_why(finished):
    size = finished.options.size
    found = {row.why: row for row in collective_rows(finished.outcomes[0].events)}
    heads = found["layers.*.attention: sum over the heads"]
    assert (heads.direction, heads.kind, heads.axes, heads.count) == (
        "forward", "all-reduce", ("tp",), size.model.layers,
    )  # fmt: skip
    assert heads.bytes == size.model.layers * size.tokens // 2 * size.model.width * 4
    into = found["layers.*.attention.wq: gradient of what came in, sum over the heads"]
    assert (into.direction, into.count, into.bytes) == ("backward", heads.count, heads.bytes)
    weights = found["layers.*.attention.{wk,wo,wq,wv}: weights' gradients, sum over the batch"]
    assert (weights.direction, weights.axes, weights.count) == ("backward", ("dp",), 4 * 2)
    assert all(why.split(": ")[0] for why in found)
    for why in found:
        assert why.split(": ")[0] in finished.printed


def test_the_weights_are_whole_and_a_plain_model_loads_them(finished):
    path = finished.options.output / "model.safetensors"
    model = load_weights(path)
    saved = safetensors.torch.load_file(path)
    assert {name: each.shape for name, each in saved.items()} == {
        name: each.shape for name, each in model.named_parameters()
    }
    assert all(torch.equal(saved[name], each) for name, each in model.named_parameters())
    assert "loaded by one process, they give the loss of the mesh" in finished.printed


@pytest.mark.needs("matplotlib")
def test_a_plot_is_saved(finished):
    assert (finished.options.output / "losses.png").read_bytes().startswith(b"\x89PNG")


def again(finished, monkeypatch, **changes):
    """The run's story, told of other outcomes."""
    ours = dataclasses.replace(finished.outcomes[0], **changes)
    told = [ours, *finished.outcomes[1:]], finished.single
    monkeypatch.setattr(demo, "_train", lambda *args: told)
    return run(finished.options)


def test_losses_that_differ_are_said_so(finished, monkeypatch):
    losses = [*finished.outcomes[0].losses[:-1], finished.single.losses[-1] + 2e-4]
    is_right, printed = again(finished, monkeypatch, losses=losses)
    assert not is_right
    assert "The losses differ by 2.0e-04" in printed


def test_weights_that_are_not_those_of_the_mesh_are_said_so(finished, monkeypatch):
    is_right, printed = again(finished, monkeypatch, last_loss=1.0)
    assert not is_right
    assert "are wrong" in printed


def test_without_matplotlib_it_says_how_to_get_it(finished, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not save_plot(tmp_path / "plot.png", [1.0], [1.0], "mesh")
    is_right, printed = again(finished, monkeypatch)
    assert is_right
    assert "There is no plot, as matplotlib is not installed: pip install" in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--mesh", "2x2", "--ranks", "3"], "--mesh: 2x2 has 4 ranks, but --ranks is 3"),
        (
            ["--mesh", "8"],
            "--mesh: expected two sizes, dp x tp, such as 2x2, for --mode dp+tp; got 8",
        ),
        (["--mode", "fsdp", "--mesh", "2x2"], "--mesh: expected one size, dp, such as 4"),
        (["--mode", "all"], "--mode: expected one of dp+tp, fsdp, hsdp, tp, fsdp+tp; got 'all'"),
        (["--mesh", "2x2x2"], "--mesh: expected two sizes"),
        (["--ranks", "0"], "--ranks: expected 1 or more, got 0"),
        (["--steps", "0"], "--steps: expected 1 or more, got 0"),
        (["--model", "huge"], "--model: expected one of tiny, small, medium; got 'huge'"),
        (["--seed", "-1"], "--seed: expected a number from 0"),
        (["--output", "/dev/null/here"], "--output: cannot write to '/dev/null/here': Not a dir"),
        (["--mesh", "2xtwo"], "argument --mesh: expected sizes such as 2x4, got '2xtwo'"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(arguments, said, capfd, monkeypatch):
    monkeypatch.setattr(demo, "_train", lambda *args: pytest.fail("it started"))
    try:
        code = cli.main(["demo", *arguments])
    except SystemExit as exit:  # argparse found it
        code = exit.code
    assert code == 2
    captured = capfd.readouterr()
    assert said in captured.err
    assert captured.err.startswith("shardwise demo: ") and captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_mesh_is_made_of_the_ranks_alone(tmp_path):
    for ranks, mesh in ((1, (1, 1)), (2, (2, 1)), (4, (2, 2)), (6, (3, 2)), (7, (7, 1))):
        assert check_options(ranks=ranks, output=tmp_path).mesh == mesh
    assert check_options(mesh=(1, 3), output=tmp_path).ranks == 3
    with pytest.raises(UsageError):
        check_options(ranks=5, mesh=(2, 2), output=tmp_path)


def test_the_exit_code_says_whether_the_runs_agree(monkeypatch, tmp_path):
    import shardwise.demo

    for agree, code in ((True, 0), (False, 1)):
        monkeypatch.setattr(shardwise.demo, "run", lambda options, agree=agree: agree)
        assert cli.main(["demo", "--output", str(tmp_path)]) == code


def processes_of(session):
    """The processes of a session that still run."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/stat") as file:
                state, _, _, its_session = file.read().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(its_session) == session and state != "Z":
            found.append(int(entry))
    return found


def training(folder):
    """Whether a run with this folder for temporary files has done a step on its mesh."""
    return any(path.stat().st_size for path in folder.glob("*/losses"))


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks for processes in /proc")
def test_ctrl_c_ends_every_process_without_a_traceback(tmp_path):
    """To all processes, as a terminal does, or to the first one alone."""
    command = [sys.executable, "-u", "-m", "shardwise", "demo", "--mesh", "1x2", "--model", "tiny"]
    command += ["--steps", "20000", "--output", str(tmp_path)]
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
    started = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=os.environ | {"TMPDIR": str(folder)},
        )
        for folder in folders
    ]
    try:
        for process in started:
            assert "language model" in process.stdout.readline()
        patience = time.monotonic() + PATIENCE
        while not all(map(training, folders)):
            assert all(process.poll() is None for process in started)
            assert time.monotonic() < patience, "they never begin to train"
            time.sleep(0.05)
        os.killpg(started[0].pid, signal.SIGINT)
        os.kill(started[1].pid, signal.SIGINT)
        for process in started:
            rest, _ = process.communicate(timeout=PATIENCE)
            assert process.returncode == 128 + signal.SIGINT
            assert rest.endswith("shardwise: interrupted\n")
            assert "Traceback" not in rest
            # multiprocessing's own helper notices a little later.
            deadline = time.monotonic() + PATIENCE
            while processes_of(process.pid) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert processes_of(process.pid) == []
    finally:
        for process in started:
            for each in processes_of(process.pid):
                os.kill(each, signal.SIGKILL)
            process.stdout.close()
            process.wait()


@pytest.mark.parametrize("mode", ["fsdp", "hsdp", "fsdp+tp"])
def test_a_mode_of_data_parallelism_learns_the_same_on_processes(mode, workers4, tmp_path):
    options = check_options(mode=mode, model="tiny", steps=2, output=tmp_path)
    single = alone(options, lambda loss: None)
    for outcome in workers4.run(on_each_rank, options, tmp_path / "losses"):
        assert outcome.losses == pytest.approx(single.losses, abs=1e-5)
        assert {row.kind for row in collective_rows(outcome.events)} >= {
            "all-gather",
            "reduce-scatter",
        }
