"""What has no meaning on a DTensor: to change its shape or its memory in place, to be sparse, to
carry a tangent."""

from __future__ import annotations

from typing import Any, NoReturn

from shardwise.errors import DispatchError
from shardwise.rules.registry import handler, name_of
from shardwise.tensor import DTensor

_RESHAPED = {
    "resize_": "take x.view(...), x.reshape(...) or a part of it, x[...]",
    "resize_as_": "take x.view_as(other), or make a new tensor with torch.empty_like(other)",
}
_SPARSE = (
    "to_sparse",
    "to_sparse_csr",
    "to_sparse_csc",
    "to_sparse_bsr",
    "to_sparse_bsc",
    "to_mkldnn",
    "sparse_mask",
)


@handler(*_RESHAPED)
def reshaped(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    """Say what to do instead."""
    name = name_of(func)
    raise DispatchError(
        f"{name}: the shape and the memory of a DTensor are those of its layout "
        f"({_layouts(args)}) and cannot be changed in place; {_RESHAPED[name]}"
    )


@handler(*_SPARSE)
def sparse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    """Say what to do instead."""
    name = name_of(func)
    raise DispatchError(
        f"{name}: a DTensor ({_layouts(args)}) is dense on every rank; make the whole tensor "
        f"sparse, x.full_tensor().{name}(...), or this rank's piece, x.to_local().{name}(...)"
    )


@handler("_make_dual")
def dual(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    """Say what to do instead."""
    raise DispatchError(
        "forward-mode AD (torch.func.jvp, forward_ad.make_dual): got a DTensor "
        f"({_layouts(args)}). Use torch.autograd.functional.jvp, or local tensors within "
        "sw.local_map"
    )


def _layouts(args: tuple[Any, ...]) -> str:
    return ", ".join(repr(each._layout) for each in args if isinstance(each, DTensor))
