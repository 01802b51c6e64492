"""docs/moving-over.md has a row for every public name of torch, and each row is true.

`python tests/moving_over/test_torch_names.py --write` (with PYTHONPATH=src:tests) renews the
table. The judgements are in src/shardwise/cli/torch_names.py.
"""

import inspect
import re
import sys
from pathlib import Path

import pytest
from support.torch_names import CLASSES, Row, difference, public_names, resolve, rows

from shardwise.cli.counterparts import MODULES
from shardwise.cli.torch_names import BETTER, DIFFERENT, INSTEAD, SINCE

PAGE = Path(__file__).resolve().parents[2] / "docs" / "moving-over.md"
START = "<!-- The table: written by tests/moving_over/test_torch_names.py -->\n"
ROWS = rows()
PRESENT = [row for row in ROWS if row.verdict in ("same", "better", "different")]


def test_every_public_name_has_a_counterpart_or_a_row_that_says_what_to_write_instead():
    missing = [row.name for row in PRESENT if not row.ours or not _exists(row.ours)]
    assert not missing, f"name them in src/shardwise/cli/torch_names.py: {missing}"


def _exists(path: str) -> bool:
    try:
        resolve(path)
    except AttributeError:
        return False
    return True


def test_calls_that_are_valid_for_torch_are_valid_for_ours():
    found = {
        row.name: text
        for row in PRESENT
        if _exists(row.name) and row.ours and _exists(row.ours)
        if (text := difference(resolve(row.name), resolve(row.ours)))
        and row.name not in OTHER_ARGUMENTS
    }
    assert not found


OTHER_ARGUMENTS = {
    "torch.distributed.tensor._dtensor_spec.DTensorSpec": "the last argument is a private switch",
}


def test_members_are_of_the_same_kind():
    """A property is none of those that must be called, and the other way round."""
    wrong = [
        row.name
        for row in PRESENT
        if row.parent in CLASSES and _exists(row.name)
        if callable(resolve(row.name)) != callable(resolve(row.ours))
    ]
    assert not wrong


def test_what_is_called_absent_is_absent():
    there = [each for name in INSTEAD for each in _names_in(name) if _is_ours(each)]
    assert not there


def _names_in(name: str) -> list[str]:
    """Return a name, or those in a module; ours may have one of that name by chance."""
    found = resolve(name)
    return [f"{name}.{each}" for each in public_names(found)] if inspect.ismodule(found) else [name]


def _is_ours(name: str) -> bool:
    """Tell whether shardwise has the name, in the module of the same path."""
    module = max((each for each in MODULES if name.startswith(f"{each}.")), key=len, default=None)
    return module is not None and _exists(MODULES[module] + name.removeprefix(module))


@pytest.mark.parametrize(
    "table", [INSTEAD, DIFFERENT, BETTER], ids=["absent", "different", "better"]
)
def test_judgements_are_about_names_that_torch_has(table):
    unknown = [name for name in table if name not in SINCE and not _exists(name)]
    assert not unknown


def test_no_name_is_judged_twice():
    assert not INSTEAD.keys() & DIFFERENT.keys()
    assert not INSTEAD.keys() & BETTER.keys()
    assert not DIFFERENT.keys() & BETTER.keys()


def test_newer_names_are_new():
    for name, version in SINCE.items():
        assert re.fullmatch(r"2\.\d+", version) and name.startswith("torch.distributed.")


def test_the_page_has_a_row_for_every_name():
    _, _, table = PAGE.read_text("utf-8").partition(START)
    written = _parsed(table)
    found = {row.name: row.verdict for row in ROWS}
    assert {name: written.get(name) for name in found} == found, (
        "PYTHONPATH=src:tests python tests/moving_over/test_torch_names.py --write"
    )


def test_the_page_is_as_it_is_written():
    """The words are those of the tables; names of other versions of torch may be there, too."""
    text = PAGE.read_text("utf-8")
    for each in {*INSTEAD.values(), *DIFFERENT.values(), *BETTER.values()}:
        assert _cell(each) in text or not any(row.note == each for row in ROWS)


def _parsed(table: str) -> dict[str, str]:
    """Return the verdict of every name in a table."""
    found, parent = {}, ""
    for line in table.splitlines():
        if line.startswith("### "):
            parent = line.removeprefix("### ").split("`")[1]
        elif line.startswith("| `"):
            names, verdict = line.strip("|").split(" | ")[:2]
            for name in re.findall(r"`([^`]+)`", names):
                found[f"{parent}.{name}"] = verdict.strip()
    return found


# ---- writing


def table() -> str:
    """Return the part of the page that is generated."""
    by_parent: dict[str, list[Row]] = {}
    for row in ROWS:
        by_parent.setdefault(row.parent, []).append(row)
    parts = []
    for parent, group in by_parent.items():
        ours = next((row.ours.rpartition(".")[0] for row in group if row.ours), "")
        arrow = f" → `{ours}`" if ours and ours != parent else ""
        lines = [f"### `{parent}`{arrow}", "", "| name | | |", "|---|---|---|"]
        grouped: dict[tuple[str, str], list[str]] = {}
        for row in group:
            name = row.name.rpartition(".")[2]
            grouped.setdefault((row.verdict, row.note), []).append(name)
        for (verdict, note), names in sorted(grouped.items(), key=_order):
            shown = ", ".join(
                f"`{name}`" + (f" ({since})" if (since := SINCE.get(f"{parent}.{name}")) else "")
                for name in names
            )
            lines.append(f"| {shown} | {verdict} | {_cell(note)} |")
        parts.append("\n".join(lines) + "\n")
    return START + "\n" + "\n".join(parts)


def _order(item: tuple[tuple[str, str], list[str]]) -> tuple[int, str]:
    (verdict, _), names = item
    return ["same", "torch's", "better", "different", "absent"].index(verdict), names[0]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def test_the_checks_notice_what_they_are_for():
    def theirs(a, b=1, *, c=2): ...

    def longer(a, b=1, d=3, *, c=2, e=4): ...

    def renamed(a, x=1, *, c=2): ...

    def other_default(a, b=1, *, c=3): ...

    def stricter(a, b, *, c=2): ...

    def more_required(a, b=1, *, c=2, d): ...

    def fewer(a, b=1): ...

    assert not difference(theirs, longer)
    assert "position 1 is x, not b" in difference(theirs, renamed)
    assert "c is 3 by default, not 2" in difference(theirs, other_default)
    assert "b has no default" in difference(theirs, stricter)
    assert "d is required" in difference(theirs, more_required)
    assert "c= is not taken" in difference(theirs, fewer)
    assert inspect.signature(theirs)


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    before, _, _ = PAGE.read_text("utf-8").partition(START)
    PAGE.write_text(before + table(), "utf-8")
    print(f"written: {PAGE}")
