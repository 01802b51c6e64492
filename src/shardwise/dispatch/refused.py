"""What has no meaning on a DTensor: to change its shape or its memory in place."""

from __future__ import annotations

from typing import Any, NoReturn

from shardwise.dispatch.entry import DispatchError
from shardwise.rules.registry import handler, name_of
from shardwise.tensor import DTensor

_REMEDIES = {
    "resize_": "take x.view(...), x.reshape(...) or a part of it, x[...]",
    "resize_as_": "take x.view_as(other), or make a new tensor with torch.empty_like(other)",
}


@handler(*_REMEDIES)
def refused(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    """Say what to do instead."""
    name = name_of(func)
    layouts = ", ".join(repr(each._layout) for each in args if isinstance(each, DTensor))
    raise DispatchError(
        f"{name}: the shape and the memory of a DTensor are those of its layout ({layouts}) and "
        f"cannot be changed in place; {_REMEDIES[name]}"
    )
