"""A patch of torch: what it changes, why, and how the change is taken back."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Undo = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Patch:
    """One change to torch."""

    name: str
    """The name in torch that is changed."""
    reason: str
    apply: Callable[[], Undo]
    """Make the change; return the function that takes it back."""


def replace(owner: Any, attribute: str, replacement: Any) -> Undo:
    """Replace an attribute of a class or module, which may be inherited."""
    is_own = attribute in vars(owner)
    before = inspect.getattr_static(owner, attribute)
    setattr(owner, attribute, replacement)

    def undo() -> None:
        if inspect.getattr_static(owner, attribute) is not replacement:
            return  # somebody has wrapped ours since: theirs stays
        if is_own:
            setattr(owner, attribute, before)
        else:
            delattr(owner, attribute)

    return undo


def undo_all(undos: list[Undo]) -> Undo:
    """Return a function that takes several changes back, the last first."""

    def undo() -> None:
        for each in reversed(undos):
            each()

    return undo
