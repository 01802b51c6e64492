"""How private names of torch are found, noted and checked."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.core.torch_version import TESTED


@dataclass(frozen=True, slots=True)
class Internal:
    """One private name of torch."""

    path: str
    purpose: str
    problem: str | None = None
    """Why it cannot be used in the installed version; None if it looks as expected."""


_internals: list[Internal] = []


def report() -> list[Internal]:
    """List the private names of torch that shardwise uses, with what is wrong with each."""
    return list(_internals)


def take(path: str, purpose: str, parameters: str = "") -> Any:
    """Find a private name of torch and note it.

    Arguments:
        path: the dotted path, module first.
        parameters: the names of the arguments that we pass or receive, with spaces between them; a
            Python function must have all of them.
    """
    value, problem = _find(path)
    if problem is None and parameters:
        known = inspect.signature(value).parameters
        unknown = [each for each in parameters.split() if each not in known]
        if unknown:
            problem = (
                f"has no parameter {', '.join(unknown)}: its parameters are {', '.join(known)}"
            )
    _internals.append(Internal(path, purpose, problem))
    return value


def getter(path: str, purpose: str) -> Any:
    """Find a property of a class of C; return the function that reads it, with no dispatch."""
    return getattr(take(path, purpose), "__get__", None)


def _find(path: str) -> tuple[Any, str | None]:
    parts = path.split(".")
    value: Any = torch
    for at, part in enumerate(parts[1:], 2):
        try:
            if inspect.isclass(value) and part in vars(value) and not part.startswith("__"):
                value = inspect.getattr_static(value, part)  # a descriptor, as it is
            else:
                value = getattr(value, part)
        except AttributeError:
            name = ".".join(parts[:at])
            try:
                value = importlib.import_module(name)
            except ImportError:
                return None, f"{name} does not exist"
    return value, None


def check_internals() -> None:
    """Raise one ImportError about all names that are not as expected."""
    problems = [f"  {each.path}: {each.problem}" for each in _internals if each.problem]
    if problems:
        raise ImportError(
            f"shardwise: torch {torch.__version__} is not supported: these internals are missing "
            "or look different\n"
            + "\n".join(problems)
            + f"\nInstall a torch that shardwise was tested with, {TESTED} "
            "(pip install 'torch>=2.13,<2.16'), or a newer shardwise. Nothing was changed in torch"
        )
