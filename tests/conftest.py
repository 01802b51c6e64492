import os
import signal
from collections import Counter
from collections.abc import Iterator
from importlib.machinery import PathFinder
from types import SimpleNamespace

import pytest
from hypothesis import settings

# ---- the same on every machine

# Jobs of clusters describe ranks that the tests are not, and some shells and CI systems set how
# text looks or what torch says.
for name in (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "GLOO_SOCKET_IFNAME"),
    *("TORCH_DISTRIBUTED_DEBUG", "TORCH_SHOW_CPP_STACKTRACES", "TORCH_LOGS"),
    *("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"),
    *("PYTHONWARNINGS", "PYTHONDEVMODE", "SHARDWISE_TORCH_VERSION_CHECK"),
):
    os.environ.pop(name, None)
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # every test is of the CPU
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # it warns on hosts that cannot resolve their own name
# Sums are rounded differently by other numbers of threads. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts what runs in its background with interrupts ignored, and so would every process
# that tests start; some of them are about Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples on every machine, in CI or not (hypothesis has a CI profile of its own).
settings.register_profile(
    "default",
    settings.get_profile("default"),
    deadline=None,
    max_examples=100,
    derandomize=True,
    print_blob=True,
)
settings.load_profile("default")

pytest_plugins = ["support.ranks"]

# ---- tests of packages that shardwise can do without

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
    """Hand what was deselected from a process of pytest-xdist to the one that reports."""
    if hasattr(session.config, "workeroutput"):
        found = [(*key, count) for key, count in session.config.stash[MISSING].items()]
        session.config.workeroutput["missing"] = found


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: pytest.Item, error: object) -> None:
    """Take it from the first of them: all collect the same tests."""
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
