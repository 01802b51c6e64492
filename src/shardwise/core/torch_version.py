"""Warn, at import, about a version of torch that shardwise is not tested with.

`shardwise/__init__.py` imports this module before any other, so the warning comes before shardwise
changes anything in torch, and before an internal of torch that has moved raises an error.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import warnings

import torch

from shardwise.core.errors import TorchVersionWarning

OLDEST_TESTED = (2, 13)
NEWEST_TESTED = (2, 15)
"""The minor versions that the tests run on. pyproject.toml and constraints/ say the same."""

TESTED = f"{OLDEST_TESTED[0]}.{OLDEST_TESTED[1]} to {NEWEST_TESTED[0]}.{NEWEST_TESTED[1]}"

SWITCH = "SHARDWISE_TORCH_VERSION_CHECK"
"""The environment variable that turns the check off if it is "0"."""

_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.\d+)*(?P<pre>(?:a|b|rc|\.dev)\d*)?")


def untested_because(version: str) -> str | None:
    """Return why a version of torch is not one of the tested ones, or None if it is.

    A release candidate counts as its release. A development build (`.dev`, or `a0` in builds from
    source) does not: its internals are those of some day between two releases.
    """
    found = _VERSION.match(version)
    if found is None:
        return "cannot be compared with the tested versions"
    minor = int(found[1]), int(found[2])
    if minor < OLDEST_TESTED:
        return "is older than the tested versions"
    if minor > NEWEST_TESTED:
        return "is newer than the tested versions"
    if found["pre"] and not found["pre"].startswith("rc"):
        return "is a development build"
    return None


def warn_if_untested(stacklevel: int = 2) -> None:
    """Warn about an untested version of torch, in the first process of a host only."""
    reason = untested_because(torch.__version__)
    if reason is None or os.environ.get(SWITCH) == "0" or not _is_first_process():
        return
    warnings.warn(
        f"torch {torch.__version__} {reason}: shardwise is tested with torch {TESTED}. "
        "It may fail or give wrong results; `shardwise doctor --self-test` checks it in a few "
        f"seconds. To silence this warning, set the environment variable {SWITCH}=0, or, before "
        'importing shardwise, call warnings.filterwarnings("ignore", message="torch .* shardwise '
        'is tested with")',
        TorchVersionWarning,
        stacklevel=stacklevel + 1,
    )


def _is_first_process() -> bool:
    """Return False in ranks and workers that another process of this host speaks for."""
    started_by_python = multiprocessing.parent_process() is not None
    return not started_by_python and os.environ.get("LOCAL_RANK", "0") == "0"


warn_if_untested(stacklevel=3)  # of whoever imports shardwise: not this module, nor its __init__
