"""The demo runs on real processes, and what it prints is true."""

import dataclasses
import io

from rich.console import Console

from shardwise import cli, demo


def test_the_demo_shows_who_holds_what_and_that_it_is_right(capsys):
    assert cli.main(["demo"]) == 0
    printed = capsys.readouterr().out
    for rank, where in enumerate(
        ["rows 0:3, columns 0:3", "rows 0:3, columns 3:6", "rows 3:5, columns 0:3"]
    ):
        assert f"rank {rank}" in printed and where in printed
    assert "All of it is bit for bit what one process computes." in printed
    assert "WRONG" not in printed


def test_the_demo_says_so_if_a_rank_computed_something_wrong(monkeypatch):
    right = demo.launch(demo.on_each_rank, 4)
    wrong = [*right[:3], dataclasses.replace(right[3], row_sums=right[3].row_sums + 1)]
    monkeypatch.setattr(demo, "launch", lambda function, size: wrong)
    console = Console(file=io.StringIO(), width=120)
    assert not demo.run(console)
    printed = console.file.getvalue()
    assert "Some of it differs" in printed
    assert printed.count("WRONG") == 1
