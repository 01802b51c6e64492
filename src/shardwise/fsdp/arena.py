"""The flat buffers that shards live in: rows of units, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.fsdp.unit import Unit
from shardwise.torch_internals import TensorBase, as_local


class Arena:
    """The rows of units that may travel together. Parameters are views of it, so what is sent is
    there already, and nothing is copied in.

    Arguments:
        units: in the order in which they are probably used.
        pinned: whether to keep it in page-locked memory.
    """

    def __init__(self, units: Sequence[Unit], pinned: bool) -> None:
        first = units[0].held[0].sharded
        total = sum(unit.length for unit in units)
        with torch.no_grad(), as_local():
            self.flat = torch.zeros(
                total, dtype=first.dtype, device=first.device, pin_memory=pinned
            )
            start = 0
            for unit in units:
                unit.arena, unit.offset = self, start
                self.flat[start : start + 2] = torch.tensor(digits(unit.number))
                row = self.flat[start : start + unit.length]
                for each in unit.held:
                    own = each.division.own(row, each.offset)
                    own.copy_(each.sharded)
                    TensorBase.data.__set__(each.sharded, own)
                start += unit.length


def digits(number: int) -> list[int]:
    """What a row begins with: a number in digits that every dtype can tell."""
    return [number % 128, number // 128 % 128]


def is_in(unit: Unit) -> bool:
    """Whether all shards of a unit are where they were put. Within `as_local()`."""
    flat = unit.arena.flat
    start = flat.data_ptr() + unit.offset * flat.itemsize
    itemsize = flat.itemsize
    for each in unit.held:
        address = each.sharded.data_ptr()  # 0 if it is empty
        if address and address != start + each.offset * itemsize:
            return False
    return True
