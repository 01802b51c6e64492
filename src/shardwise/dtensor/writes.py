"""Which tensors may be written to: not a detached copy that cannot be written back.

Where torch would return a view of a dim that is split, the result is a copy ("detached copy").
`view_copy` ties such copies to their originals; a write to one that is not tied would be lost.
"""

from __future__ import annotations

from typing import Any, NoReturn

from shardwise.core.errors import DispatchError
from shardwise.core.layout import Layout
from shardwise.core.tensor_state import ensure_state, state_of
from shardwise.dtensor.tensor import find_detaching_operator
from shardwise.dtensor.view_copy import format_operator, linked, mark_outdated, note_write
from shardwise.torch_internals import as_local, base_of


def check_writable(name: str, target: Any) -> None:
    """Check that a write by operator `name` reaches the tensor that the user means.

    Refuses a detached copy that cannot be written back. Marks the copies that were taken of the
    target before as out of date.
    """
    with as_local():
        detached_by = find_detaching_operator(target)
    if detached_by is not None and not note_write(target):
        raise DispatchError(
            f"{name}: this tensor is the result of {format_operator(detached_by)}, of which torch "
            "would return a view, but the dim was split and so it is a copy, or shares memory with "
            "one: writing to it would not reach the original. Write to a part taken by index of a "
            "tensor that is still there (x[i] += 1, x[i] = ...), or clone() it if it is to change "
            "alone, or take it of a tensor that is whole in that dim: "
            "x.redistribute(placements=[Replicate(), ...])"
        )
    if linked.by_memory:
        mark_outdated(target, name)


def is_split(layout: Layout) -> bool:
    """Tell whether a rank may hold only a part of a tensor with this layout."""
    sizes = layout.mesh.shape
    return any(sizes[axis] > 1 for axes in layout.shard_order for axis in axes)


def refuse_plain_target(name: str, layout: Layout) -> NoReturn:
    """Refuse to write a DTensor of this layout to a plain tensor."""
    raise DispatchError(
        f"{name}: cannot write a DTensor's values into a plain tensor in place, as each rank has "
        f"only a part of {layout!r}; use full_tensor() or to_local() of the DTensor, or write to a "
        "DTensor: x.new_empty(...), torch.empty_like(x), sw.empty(..., device_mesh=...)"
    )


def mark_detached_copy(tensor: Any, name: str, key: Any = None) -> None:
    """Note that a tensor is a copy where torch would return a view.

    Arguments:
        name: the operator that returned it.
        key: the index of the original that gives it, if there is one.
    """
    state = ensure_state(tensor)
    state.detached_by, state.key = name, key
    with as_local():
        base = base_of(tensor)
    if base is not None:  # other views of the same moved tensor are copies, too
        ensure_state(base).detached_by = name


def is_detached_copy(tensor: Any) -> bool:
    """Tell whether a tensor itself, and not its base, is a copy where torch would return a view."""
    notes = state_of(tensor)
    return notes is not None and notes.detached_by is not None
