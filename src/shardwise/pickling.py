"""Sending functions and results to other processes.

Plain pickle sends a function by its name. Where the other side cannot import it, as in a notebook,
`cloudpickle` sends it by value, if it is installed.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
from collections import ChainMap
from pathlib import Path
from typing import Any

import torch

from shardwise.errors import LaunchError
from shardwise.torch_internals import dtypes_without_typed_storage


def main_file() -> str | None:
    """The file of the main script, if there is one that another process can import."""
    main = sys.modules["__main__"]
    name = getattr(main, "__file__", None)
    if name is None or not Path(name).is_file():
        return None
    # multiprocessing does not import a __main__.py, of `python -m package` or `python folder`.
    module = getattr(getattr(main, "__spec__", None), "name", "")
    return None if module.rpartition(".")[2] == "__main__" else name


def dumps(value: Any, what: str) -> bytes:
    """`value` as bytes that `pickle.loads` takes; `what` names it in an error."""
    try:
        data = _dumps(pickle.Pickler, copyreg.dispatch_table, value)
    except Exception as error:  # pickle raises whatever the objects do
        reason = f"{type(error).__name__}: {error}"
    else:
        if main_file() is not None or b"__main__" not in data:
            return data
        reason = "it is defined in a notebook, a session or a package's __main__.py"
    try:
        import cloudpickle  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise LaunchError(
            f"{what} cannot be sent to another process: {reason}. Move it to a module or to the "
            "top level of a script, or install cloudpickle"
        ) from None
    try:
        return _dumps(cloudpickle.Pickler, cloudpickle.Pickler.dispatch_table, value)
    except Exception as error:
        raise LaunchError(
            f"{what} cannot be sent to another process: {type(error).__name__}: {error}"
        ) from error


def _dumps(pickler: type[pickle.Pickler], known: Any, value: Any) -> bytes:
    """`value` written by a pickler that also knows `_reduce_tensor`, next to what it knew."""
    table = ChainMap({torch.Tensor: _reduce_tensor}, known)
    file = io.BytesIO()
    type("Pickler", (pickler,), {"dispatch_table": table})(file).dump(value)
    return file.getvalue()


def _reduce_tensor(x: torch.Tensor) -> Any:
    """Two things torch 2.13 does not do: send of a view only what it shows, and read tensors of
    its newer dtypes (float8, uint16...), which it writes."""
    strided = x.layout is torch.strided
    if strided and x.is_leaf and x.untyped_storage().nbytes() > x.numel() * x.itemsize:
        x = x.detach().clone().requires_grad_(x.requires_grad)
    if not strided or x.dtype not in dtypes_without_typed_storage():
        return x.__reduce_ex__(pickle.DEFAULT_PROTOCOL)  # type: ignore[no-untyped-call]
    return _rebuild_tensor, (x.detach().view(_BITS[x.dtype.itemsize]), x.dtype, x.requires_grad)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _rebuild_tensor(bits: torch.Tensor, dtype: torch.dtype, requires_grad: bool) -> torch.Tensor:
    return bits.view(dtype).requires_grad_(requires_grad)
