"""Expectations that depend on the installed version of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from packaging.version import Version

INSTALLED = Version(torch.__version__).release


def since(version: str) -> bool:
    """Return whether the installed torch is of this version or newer; 2.14.1 counts as 2.14."""
    return Version(version).release <= INSTALLED


def torch_bug(reason: str, *, fixed_in: str | None = None) -> pytest.MarkDecorator:
    """Mark a test as a strict expected failure of torch, before the version that fixes it.

    Arguments:
        reason: what is wrong in torch.
        fixed_in: the first version without the bug, as "2.14"; None while there is none.
    """
    is_fixed = fixed_in is not None and since(fixed_in)
    known = f"torch before {fixed_in}" if fixed_in else "every torch so far"
    return pytest.mark.xfail(not is_fixed, reason=f"{known}: {reason}", strict=True)


def torch_bugs(
    reason: str, programs: Iterable[Callable[..., Any]], fixed_in: Mapping[Any, str]
) -> list[Any]:
    """Return parameters of a test: programs that torch gets wrong before their version."""
    return [
        pytest.param(each, id=each.__name__, marks=torch_bug(reason, fixed_in=fixed_in.get(each)))
        for each in programs
    ]
