"""What the collectives of data parallelism are for: for those who listen, and for the errors of
simulated ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from shardwise import world
from shardwise.comm import trace
from shardwise.comm.trace import Cause, acting

if TYPE_CHECKING:
    from shardwise.fsdp.unit import Unit

_nobody_listens = nullcontext()


def gathering(units: Sequence[Unit]) -> AbstractContextManager[None]:
    """Within, collectives gather the parameters of these units."""
    if not _is_wanted():
        return _nobody_listens
    context = units[0].groups[0].context
    is_backward = context is not None and context.in_backward
    return _acting("unshard", units, "backward" if is_backward else "forward")


def reducing(units: Sequence[Unit]) -> AbstractContextManager[None]:
    """Within, collectives reduce the gradients of these units."""
    if not _is_wanted():
        return _nobody_listens
    return _acting("reduce_gradients", units, "backward")


def _is_wanted() -> bool:
    return bool(trace.listeners) or world.current().is_simulated


def _acting(operator: str, units: Sequence[Unit], direction: str) -> acting:
    names = dict.fromkeys(group.name for unit in units for group in unit.groups)
    return acting(Cause(operator, ", ".join(names), direction))
