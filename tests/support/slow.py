"""What `make test` leaves out: tests marked `slow`, and of those marked `sampled` the most."""

from collections import Counter

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked `sampled(every=3)` leave each third set of parameters quick.

    The others are slow. An `every` that has no factor in common with the number of values of a
    parameter lets the quick ones have each of them.
    """
    seen: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is None:
            continue
        test = item.nodeid.partition("[")[0]
        if seen[test] % mark.kwargs["every"]:
            item.add_marker(pytest.mark.slow)
        seen[test] += 1
