"""The names of files and functions in the documentation are those of the code."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "shardwise"
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8").replace("\\_", "_")
FOLDERS = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name.isidentifier()}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def defined_in(file):
    """The functions and classes of a source file, and `Class.method` for each method."""
    body = ast.parse((PACKAGE / f"{file}.py").read_text("utf-8")).body
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found = {node.name for node in body if isinstance(node, kinds)}
    for node in body:
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, kinds)}
    return found


def hops():
    """(file, function) of the rows of the walks, and of every `file: function` of the page."""
    rows = re.findall(r"^\| \d+ \| (\S+) \| (.*?) \|", PAGE, re.MULTILINE)
    in_rows = [(file, name) for file, names in rows for name in re.findall("`(.+?)`", names)]
    return sorted({*in_rows, *re.findall(r"`(\w+(?:/\w+)+): ([\w.]+)`", PAGE)})


def paths_in(text):
    """The words in backticks that look like paths of the repository."""
    for word in re.findall(r"`([^`\s]+?)(?:::\w+|: [\w.]+)?`", text):
        first = word.split("/")[0]
        if re.fullmatch(r"[\w./-]+", word) and (
            word.endswith(".py")
            or ("/" in word and first in FOLDERS | {"src", "tests", "benchmarks", "constraints"})
        ):
            yield word


def exists(word):
    starts = (ROOT / word, PACKAGE / word, PACKAGE / f"{word}.py", ROOT / "src" / word)
    return any(path.exists() for path in starts)


def test_the_walks_have_hops():
    assert len(re.findall("^## Walk", PAGE, re.MULTILINE)) == 4
    assert len(hops()) > 60
    assert ("dispatch/__init__", "dispatch") in hops()


@pytest.mark.parametrize("file", sorted({file for file, _ in hops()}))
def test_the_functions_of_the_walks_exist(file):
    named = {name for each, name in hops() if each == file}
    assert named <= defined_in(file)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_in_the_documentation_exist(page):
    assert [word for word in paths_in(page.read_text("utf-8")) if not exists(word)] == []


def test_a_path_that_is_gone_is_found():
    text = "`rules/choose`, `tests/multiprocess`, `x.py`, `core/mesh`, `comm/trace: listen`, `a/b`"
    words = list(paths_in(text))
    assert words == ["rules/choose", "tests/multiprocess", "x.py", "core/mesh", "comm/trace"]
    assert [word for word in words if not exists(word)] == words[:3]


def test_the_picture_of_the_layers_is_that_of_the_test():
    picture = PAGE.split("## Layers")[1].split("## Files")[0]
    rows = [line[4:41].split() for line in picture.splitlines() if re.match(r"    \w", line)]
    tests = ast.parse((ROOT / "tests" / "project" / "test_layers.py").read_text("utf-8")).body
    (layers,) = [
        ast.literal_eval(node.value)
        for node in tests
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "LAYERS"
    ]
    names = [{"shardwise"} if each == {"__init__"} else each for each in layers]
    assert [set(row) for row in reversed(rows)] == [each for each in names if each != {"__main__"}]
