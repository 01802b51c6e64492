"""Errors that users meet: ours, and with all that they need to know."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shardwise.errors import ShardwiseError


@contextmanager
def refused(*parts: str) -> Iterator[None]:
    """The body raises our error, which is a ValueError and says all of `parts`."""
    with pytest.raises(ShardwiseError) as caught:
        yield
    assert isinstance(caught.value, ValueError)
    for part in parts:
        assert part in str(caught.value)
