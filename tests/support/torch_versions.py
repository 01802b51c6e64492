"""What tests expect of the installed torch, where its versions differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from packaging.version import Version

INSTALLED = Version(torch.__version__).release


def since(version: str) -> bool:
    """Whether the installed torch is of this version, or later; of 2.14's if it is 2.14.1."""
    return Version(version).release <= INSTALLED


def torch_bug(reason: str, *, fixed_in: str | None = None) -> pytest.MarkDecorator:
    """Mark a test that torch fails, strictly, before the version that mends it; then it passes.

    Arguments:
        reason: what of torch is wrong.
        fixed_in: the first version without the bug, as "2.14"; None while there is none.
    """
    is_fixed = fixed_in is not None and since(fixed_in)
    known = f"torch before {fixed_in}" if fixed_in else "every torch so far"
    return pytest.mark.xfail(not is_fixed, reason=f"{known}: {reason}", strict=True)


def torch_bugs(
    reason: str, programs: Iterable[Callable[..., Any]], fixed_in: Mapping[Any, str]
) -> list[Any]:
    """Programs that torch gets wrong, as parameters of a test, each up to the version in which it
    is mended."""
    return [
        pytest.param(each, id=each.__name__, marks=torch_bug(reason, fixed_in=fixed_in.get(each)))
        for each in programs
    ]
