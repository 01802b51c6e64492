"""Four real ranks over gloo, started once for all tests of a process that use them."""

from collections.abc import Iterator

import pytest

import shardwise as sw

TIMEOUT = 180.0  # seconds, on a busy machine


class Pool:
    """Some ranks, started when first needed; again after a failure, which ends them."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self.workers: sw.Workers | None = None

    def get(self) -> sw.Workers:
        if self.workers is None or not self.workers.is_alive:
            self.workers = sw.Workers(self.size, timeout=TIMEOUT)
        return self.workers

    def close(self) -> None:
        if self.workers is not None:
            self.workers.close()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    shared = Pool()
    yield shared
    shared.close()


@pytest.fixture
def workers4(pool: Pool) -> sw.Workers:
    """Four real ranks over gloo, shared by all tests that leave their default group alone."""
    return pool.get()


@pytest.fixture(scope="session")
def pool_apart() -> Iterator[Pool]:
    shared = Pool()
    yield shared
    shared.close()


@pytest.fixture
def workers4_apart(pool_apart: Pool) -> sw.Workers:
    """Four others, for tests that destroy their default group. They must start with a new one."""
    return pool_apart.get()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files whose tests share the ranks first.

    pytest-xdist hands out tests in order, so that one of its processes runs all of these and the
    ranks are started once, not once in each process.
    """
    sharing = {item.path for item in items if {"pool", "pool_apart"} & set(_fixtures(item))}
    items.sort(key=lambda item: item.path not in sharing)


def _fixtures(item: pytest.Item) -> list[str]:
    return getattr(item, "fixturenames", [])
