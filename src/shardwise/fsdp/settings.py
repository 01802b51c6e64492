"""What users may change about a group at any time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.fsdp.custom import AllGather, ReduceScatter


@dataclass(frozen=True)
class Settings:
    """How a group's parameters and gradients travel; the setters of `FSDPModule` explain it."""

    reshard_after_forward: bool | int | None = None
    """None: unless backward begins with it; a number: to so many ranks."""
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    keep_unsharded_storage: bool = False
    """Whether the memory of gathered parameters stays allocated when they are given back."""
    gradient_sync: bool = True
    all_reduce: bool = True
    divide_factor: float | None = None
    """None: the number of data-parallel ranks."""
    fill_unused: bool = False
    """Whether parameters that no rank has used get zeros, and not None, as their gradients."""
    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None
    all_reduce_hook: Callable[[torch.Tensor], Any] | None = None

    @property
    def schedule(self) -> tuple[bool | int | None, ...]:
        """What decides on when something is gathered or reduced."""
        return (
            self.reshard_after_forward,
            self.reshard_after_backward,
            self.unshard_in_backward,
            self.gradient_sync,
            self.all_reduce,
            self.travels_alone,
        )

    @property
    def travels_alone(self) -> bool:
        """Whether its collectives must not be joined with those of other groups."""
        return (
            self.all_gather is not None
            or self.reduce_scatter is not None
            or self.all_reduce_hook is not None
        )
