"""A patch of torch: what it changes, why, and how the change is taken back."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
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


def when_imported(name: str, change: Callable[[ModuleType], Undo]) -> Undo:
    """Change a module that takes long to import when the program imports it: now, later or never.

    Arguments:
        name: the dotted name of the module.
        change: gets the module, after it has run; returns the function that takes the change back.
    """
    undos: list[Undo] = []
    if name in sys.modules:
        return change(sys.modules[name])

    finder = _Finder(name, lambda module: undos.append(change(module)))
    sys.meta_path.insert(0, finder)

    def undo() -> None:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
        undo_all(undos)()

    return undo


class _Finder:
    """Finds one module as Python does, and calls a function after the module has run."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's spec; None for all other modules."""
        if name != self._name:
            return None
        # Those after this one, among them other changes of the same module.
        others: list[Any] = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (each.find_spec(name, path, target) for each in others)
        spec = next((each for each in specs if each is not None), None)
        if spec is not None and spec.loader is not None:
            run = functools.partial(self._run, spec.loader.exec_module)
            spec.loader.exec_module = run
        return spec

    def _run(self, run: Callable[[ModuleType], None], module: ModuleType) -> None:
        run(module)
        sys.meta_path.remove(self)
        self._then(module)
