"""A call that torch refuses for a shard is refused on ranks with empty shards, too."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise import DTensor, Shard, distribute_tensor, init_device_mesh, simulate

REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], torch.dtype]] = {
    "mode": (lambda x: torch.mode(x, 1), torch.complex64),
    "cummax": (lambda x: x.cummax(1), torch.complex64),
    "amax": (lambda x: x.amax(1), torch.complex64),
    "softmax": (lambda x: x.softmax(1), torch.int64),
    "of what is split": (lambda x: F.log_softmax(x, 0), torch.int64),
}


def rows(tensor: torch.Tensor) -> DTensor:
    """Two rows on three ranks: the last has none."""
    return distribute_tensor(tensor, init_device_mesh("cpu", (3,)), [Shard(0)])


@pytest.mark.parametrize("name", REFUSED)
def test_dtypes_without_kernels_are_refused_on_every_rank(name: str) -> None:
    call, dtype = REFUSED[name]
    plain = torch.ones(2, 2, dtype=dtype)
    with pytest.raises(RuntimeError) as wanted:
        call(plain)

    def main() -> None:
        with pytest.raises(wanted.type, match=re.escape(str(wanted.value))):
            call(rows(plain.clone()))
        assert rows(plain).sum().item() == 4  # no rank is left waiting

    simulate(main, 3)


def test_an_empty_tensor_is_not_refused() -> None:
    empty = torch.ones(2, 0, dtype=torch.int64)
    simulate(lambda: rows(empty).softmax(1), 3)
    assert empty.softmax(1).shape == (2, 0)
