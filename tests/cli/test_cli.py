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
    with pytest.raises(SystemExit) as exit:
        cli.main(["calibrate"])
    assert exit.value.code == 2
    assert "the following arguments are required: --mesh" in capsys.readouterr().err
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


@pytest.mark.parametrize("package", ["rich", "safetensors"])
def test_the_demo_names_the_package_that_it_lacks(package, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)  # importing it raises
    for name in [each for each in sys.modules if each.startswith("shardwise.demo")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(sw, "demo", raising=False)
    for name in [each for each in sys.modules if each.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    assert cli.main(["demo"]) == 1
    error = capsys.readouterr().err
    assert f"the demo needs the package {package}" in error
    assert 'pip install "shardwise[demo]"' in error


def test_calibrate_refuses_a_folder_that_it_cannot_write_to_before_it_measures(capsys):
    assert cli.main(["calibrate", "--mesh", "2", "--output", "/no such folder/costs.json"]) == 1
    assert "--output: cannot write '/no such folder/costs.json'" in capsys.readouterr().err


def test_calibrate_measures_the_ranks_that_are_there(tmp_path, capsys):
    path = tmp_path / "costs.json"
    sw.simulate(lambda: cli.main(["calibrate", "--mesh", "2", "--output", str(path)]), 2)
    assert set(sw.Costs.load(path).axes) == {"0"}
    assert capsys.readouterr().out.count("written to") == 1  # the first rank's only
