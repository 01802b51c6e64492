"""Checks of the errors that users see."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shardwise.core.errors import ShardwiseError


@contextmanager
def refused(*parts: str) -> Iterator[None]:
    """Check that the body raises a ShardwiseError and ValueError that contains all of `parts`."""
    with pytest.raises(ShardwiseError) as caught:
        yield
    assert isinstance(caught.value, ValueError)
    for part in parts:
        assert part in str(caught.value)
