"""The command `shardwise`."""

import io
import re
import sys

import pytest

import shardwise as sw
from shardwise import cli


@pytest.mark.slow
def test_calibrate_measures_local_processes_and_writes_the_file(tmp_path, capsys):
    path = tmp_path / "costs.json"
    arguments = ["calibrate", "--mesh", "2x1", "--names", "dp,tp", "--output", str(path)]
    assert cli.main(arguments) == 0
    assert set(sw.Costs.load(path).axes) == {"dp"}
    assert re.search(r"^dp: [\d.]+ us a message, [\d.]+ GB/s$", capsys.readouterr().out, re.M)


def test_what_is_wrong_is_said_in_a_line_and_by_the_exit_code(capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["calibrate", "--mesh", "2xtwo"])
    assert exit.value.code == 2
    assert "expected sizes such as 2x4, got '2xtwo'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main([])
    assert cli.main(["calibrate", "--mesh", "2", "--names", "dp,tp"]) == 1
    assert "mesh_dim_names: expected 1 names" in capsys.readouterr().err


def test_the_version_is_the_packages(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"shardwise {sw.__version__}\n"


def test_characters_that_the_terminal_lacks_are_replaced(monkeypatch, tmp_path):
    import shardwise.demo

    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
    monkeypatch.setattr(shardwise.demo, "run", lambda options: print("bar: ██", flush=True) is None)
    assert cli.main(["demo", "--output", str(tmp_path)]) == 0
    assert written.getvalue() == b"bar: ??\n"
