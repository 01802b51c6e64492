"""Pending: the result of a collective that was started and not yet waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
S = TypeVar("S")

_UNSET: Any = object()


class Pending(Generic[T]):
    """A result to come. `wait()` returns it, as often as it is called.

    Until then the tensors that were passed in belong to the collective: do not write to them.
    """

    __slots__ = ("_finish", "_result")

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish
        self._result: T = _UNSET

    @staticmethod
    def done(result: S) -> Pending[S]:
        """Return a `Pending` of a result that exists already."""
        pending: Pending[S] = Pending.__new__(Pending)
        pending._finish = None
        pending._result = result
        return pending

    def wait(self) -> T:
        """Wait for the result and return it."""
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None  # also releases the inputs
        return self._result

    def then(self, change: Callable[[T], S]) -> Pending[S]:
        """Return a `Pending` that applies `change` to the result when it is waited for."""
        return Pending(lambda: change(self.wait()))

    def __repr__(self) -> str:
        return "Pending(under way)" if self._result is _UNSET else f"Pending({self._result!r})"
