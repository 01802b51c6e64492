"""Deselect tests marked `needs(package)` if it is not installed, and name them in the report."""

from collections import Counter
from collections.abc import Iterator
from importlib.machinery import PathFinder
from types import SimpleNamespace

import pytest

Missing = Counter[tuple[str, str]]
"""How many tests were deselected, by the package that is missing and the name of the test."""

MISSING = pytest.StashKey[Missing]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[MISSING] = Counter()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests marked `needs(package)` whose package is not installed."""
    missing = [item for item in items if _missing(item) is not None]
    if missing:
        config.hook.pytest_deselected(items=missing)
        items[:] = [item for item in items if item not in set(missing)]
    config.stash[MISSING].update(
        (str(_missing(item)), item.nodeid.partition("[")[0]) for item in missing
    )


def _missing(item: pytest.Item) -> str | None:
    for mark in item.iter_markers("needs"):
        # Not importlib.util.find_spec: setuptools has a finder of its own, which warns.
        if PathFinder.find_spec(mark.args[0]) is None:
            return str(mark.args[0])
    return None


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the deselected tests from a pytest-xdist process to the one that reports."""
    if hasattr(session.config, "workeroutput"):
        found = [(*key, count) for key, count in session.config.stash[MISSING].items()]
        session.config.workeroutput["missing"] = found


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: pytest.Item, error: object) -> None:
    """Take the deselected tests of the first process: all collect the same tests."""
    found = getattr(node, "workeroutput", {}).get("missing", [])
    known = node.config.stash[MISSING]
    if found and not known:
        known.update({(package, name): count for package, name, count in found})
        # To be counted in the last line. Of what they are, reports only ask for attributes.
        items = [SimpleNamespace(nodeid=name) for _, name in known.elements()]
        node.config.hook.pytest_deselected(items=items)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for line in _summary(config.stash[MISSING]):
        terminalreporter.write_line(line)


def _summary(missing: Missing) -> Iterator[str]:
    for package in sorted({package for package, _ in missing}):
        counts = {name: count for (owner, name), count in missing.items() if owner == package}
        yield f"DESELECTED [{sum(counts.values())}] {package} is not installed:"
        yield from (f"  [{count}] {name}" for name, count in sorted(counts.items()))
