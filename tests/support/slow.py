"""Choose the tests that `make test` leaves out: those marked `slow`, and most of `sampled` ones."""

from collections import Counter

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave one in `every` sets of parameters of a test marked `sampled(every=...)` quick.

    The others are slow. Choose an `every` without a common factor with the number of values of a
    parameter: the quick sets then cover all its values.
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
