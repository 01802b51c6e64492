"""Torch's placements beside ours: equal in both directions."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from shardwise.core.placement import Partial, Replicate, Shard, _StridedShard
from shardwise.torch_internals import TORCHS_PLACEMENTS
from shardwise.torch_patches.patch import Patch, Undo, replace, undo_all, when_imported

_OURS = frozenset((Shard, _StridedShard, Replicate, Partial))


def _compare_with_ours(module: ModuleType) -> Undo:
    return undo_all(
        [
            replace(kind, "__eq__", _extended(kind.__eq__))
            for kind in (getattr(module, each.__name__) for each in _OURS)
        ]
    )


def _extended(compare: Any) -> Any:
    def equals(self: Any, other: Any) -> Any:
        kind: Any = type(other)
        return kind.__eq__(other, self) is True if kind in _OURS else compare(self, other)

    return equals


PATCHES: tuple[Patch, ...] = (
    Patch(
        "torch.distributed.tensor.placement_types: __eq__ of the placements",
        "They call ours different, where ours call them equal: `spec.placements == (Shard(0),)` "
        "would depend on the order. Once the program imports that module.",
        functools.partial(when_imported, TORCHS_PLACEMENTS, _compare_with_ours),
    ),
)
"""The change to torch's placements."""
