"""Sending functions and results to other processes.

Plain pickle sends a function by its name. Where the other side cannot import it, as in a notebook,
`cloudpickle` sends it by value, if it is installed.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

from shardwise.errors import LaunchError


def main_file() -> str | None:
    """The file of the main script, if there is one that another process can import."""
    main = sys.modules["__main__"]
    name = getattr(main, "__file__", None)
    if name is None or not Path(name).is_file():
        return None
    # multiprocessing does not import a __main__.py, of `python -m package` or `python folder`.
    runs_as_main = getattr(main.__spec__, "name", "").rpartition(".")[2] == "__main__"
    return None if runs_as_main else name


def dumps(value: Any, what: str) -> bytes:
    """`value` as bytes that `pickle.loads` takes; `what` names it in an error."""
    try:
        data = pickle.dumps(value)
    except Exception as error:  # pickle raises whatever the objects do
        reason = f"{type(error).__name__}: {error}"
    else:
        if main_file() is not None or b"__main__" not in data:
            return data
        reason = "it is defined in a notebook or an interactive session, which has no file"
    try:
        import cloudpickle  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise LaunchError(
            f"{what} cannot be sent to another process: {reason}. Move it to a module or to the "
            "top level of a script, or install cloudpickle"
        ) from None
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise LaunchError(
            f"{what} cannot be sent to another process: {type(error).__name__}: {error}"
        ) from error
