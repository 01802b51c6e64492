"""Calls that fail for what one rank holds, as of a batch of matrices of which one is singular, or
because it holds something: of an empty piece torch does not ask whether it knows the dtype.

They fail on every rank: else those that did not would go on, and wait for it in vain.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from shardwise.comm import carries_values, communicator
from shardwise.comm.trace import running
from shardwise.rules.spec import Here
from shardwise.tensor import DTensor, tensors_in
from shardwise.torch_internals import OpOverload, OpOverloadPacket, as_local

_LinAlgError: Any = torch.linalg.LinAlgError  # type: ignore[attr-defined]

AGREEING = "success"
"""What such a collective is about, in its cause: it moves nothing of the tensors."""


def failing_together(name: str, run: Callable[..., Any], here: Here) -> Callable[..., Any]:
    """The local call, after which ranks with other parts tell each other whether it failed.

    Costs a gather of a byte for each rank, unless all have the same.
    """
    axes = here.axes(*here.splits)
    if not axes or here.mesh.is_abstract:
        return run
    group = communicator(here.mesh, axes)

    def checked(*args: Any, **kwargs: Any) -> Any:
        given = next(tensors_in((args, kwargs)))
        if given.is_meta:
            return run(*args, **kwargs)
        result, failure = None, None
        try:
            result = run(*args, **kwargs)
        except RuntimeError as error:
            failure = error
        kind = 0 if failure is None else 1 + isinstance(failure, _LinAlgError)
        mine = torch.tensor([kind], dtype=torch.uint8, device=given.device)
        with running(f"{AGREEING} of {name}"):
            failed = group.all_gather(mine).tolist()
        if failure is not None:
            raise failure
        if any(failed):
            ranks = [rank for rank, has in zip(group.ranks, failed, strict=True) if has]
            error_type = _LinAlgError if 2 in failed else RuntimeError
            raise error_type(
                f"{name}: failed on ranks {ranks}, which hold other parts of the batch than this "
                "one; their errors say why"
            )
        return result

    return checked


# ---- dtypes


def refusing_together(func: Any, run: Callable[..., Any], here: Here) -> Callable[..., Any]:
    """The local call, before which a rank that holds nothing finds out whether torch refuses the
    dtypes, as it does where there is something. Of calls of one tensor: small ones of several need
    not fit each other, and there are functions that do not survive that.

    Arguments:
        run: the function itself, or what is run in its place. That may communicate before anything
            is refused, so then all ranks find out.
    """
    if len(here.inputs) != 1 or not carries_values(here.mesh) or not _is_of_torch(func):
        return run
    (layout,) = here.inputs
    last = [size - 1 for size in here.mesh.shape]  # where there is least
    is_empty = 0 in layout.local_shape(None if run is func else last)
    if not is_empty or 0 in layout.shape:
        return run
    accepted = {torch.float32, torch.float64}  # no function of one tensor lacks these

    def checked(*args: Any, **kwargs: Any) -> Any:
        dtype = next(tensors_in((args, kwargs))).dtype
        if dtype not in accepted:
            _check_dtype(func, args, kwargs)
            accepted.add(dtype)
        return run(*args, **kwargs)

    return checked


def _is_of_torch(func: Any) -> bool:
    """Whether a function is not the user's, who may communicate in it."""
    if isinstance(func, OpOverload | OpOverloadPacket):
        return str(func).startswith("aten.")
    return not hasattr(func, "__code__") or func.__module__.startswith("torch.")


def _check_dtype(func: Any, args: Any, kwargs: Any) -> None:
    """Raise the error that torch has for the dtype of a tensor, were it not empty."""

    def small(value: torch.Tensor) -> torch.Tensor:
        return torch.zeros((1,) * value.dim(), dtype=value.dtype, device=value.device)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _on_others(small, func, args, kwargs)
        except NotImplementedError as error:
            if " not implemented for '" in str(error):
                raise
        except Exception:
            return  # of something else, such as the small shape


# ---- torch's own errors, about global shapes


def on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a function on tensors without data, of the global shapes; for its error."""

    def meta(value: torch.Tensor) -> torch.Tensor:
        shape = value._layout.shape if isinstance(value, DTensor) else tuple(value.shape)
        return torch.empty(shape, dtype=value.dtype, device="meta")

    return _on_others(meta, func, args, kwargs)


def _on_others(
    made_for: Callable[[torch.Tensor], torch.Tensor], func: Any, args: Any, kwargs: Any
) -> Any:
    """Run a function on others in place of its tensors."""

    def other(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return made_for(value)
        if isinstance(value, list | tuple):
            parts = [other(each) for each in value]
            return parts if isinstance(value, list) else tuple(parts)
        return value

    with as_local(), torch.no_grad():
        given = [other(arg) for arg in args]
        return func(*given, **{name: other(arg) for name, arg in kwargs.items()})
