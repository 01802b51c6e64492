"""Pickle functions, arguments and results for other processes.

Plain pickle sends a function by its name. If the other process cannot import that name, as with a
function of a notebook, `cloudpickle` sends the function by value, if it is installed.
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

from shardwise.core.errors import LaunchError
from shardwise.torch_internals import dtypes_without_typed_storage


def main_file() -> str | None:
    """Return the file of the main script, or None if another process cannot import it."""
    main = sys.modules["__main__"]
    name = getattr(main, "__file__", None)
    if name is None or not Path(name).is_file():
        return None
    # multiprocessing does not import the __main__.py of `python -m package` or `python folder`.
    module = getattr(getattr(main, "__spec__", None), "name", "")
    return None if module.rpartition(".")[2] == "__main__" else name


def dumps(value: Any, what: str) -> bytes:
    """Return `value` as bytes for `pickle.loads`.

    Arguments:
        value: any object; functions may be lambdas or closures if cloudpickle is installed.
        what: the name of `value` in an error message.

    Raises:
        LaunchError: if `value` cannot be pickled.
    """
    try:
        data = _dumps(pickle.Pickler, copyreg.dispatch_table, value)
    except Exception as error:  # the objects' own methods may raise anything
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
            'top level of a script, or install cloudpickle: pip install "shardwise[pickle]"'
        ) from None
    try:
        return _dumps(cloudpickle.Pickler, cloudpickle.Pickler.dispatch_table, value)
    except Exception as error:
        raise LaunchError(
            f"{what} cannot be sent to another process: {type(error).__name__}: {error}"
        ) from error


def _dumps(pickler: type[pickle.Pickler], known: Any, value: Any) -> bytes:
    """Return `value` as bytes, written by a `pickler` that uses `_reduce_tensor` for tensors.

    `known` is the pickler's own table of reduction functions, for all other types.
    """
    table = ChainMap({torch.Tensor: _reduce_tensor}, known)
    file = io.BytesIO()
    type("Pickler", (pickler,), {"dispatch_table": table})(file).dump(value)
    return file.getvalue()


def _reduce_tensor(x: torch.Tensor) -> Any:
    """Reduce a tensor for pickle, with two cures for torch 2.13.

    torch pickles the whole storage of a view: a view is copied first, so that only its own elements
    are sent. And torch cannot unpickle the tensors of its newer dtypes (float8, uint16...) that it
    pickled: their bits are sent as integers.
    """
    strided = x.layout is torch.strided
    if strided and x.is_leaf and x.untyped_storage().nbytes() > x.numel() * x.itemsize:
        x = x.detach().clone().requires_grad_(x.requires_grad)
    if not strided or x.dtype not in dtypes_without_typed_storage():
        return x.__reduce_ex__(pickle.DEFAULT_PROTOCOL)  # type: ignore[no-untyped-call]
    return _rebuild_tensor, (x.detach().view(_BITS[x.dtype.itemsize]), x.dtype, x.requires_grad)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _rebuild_tensor(bits: torch.Tensor, dtype: torch.dtype, requires_grad: bool) -> torch.Tensor:
    """Undo `_reduce_tensor` for a tensor that was sent as integers."""
    return bits.view(dtype).requires_grad_(requires_grad)
