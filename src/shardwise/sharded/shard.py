"""A shard: a tensor, and what it is of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise.sharded.errors import ShardedTensorError
from shardwise.sharded.metadata import ShardMetadata


@dataclass(slots=True, eq=False)
class Shard:
    """A piece of a sharded tensor that this rank holds.

    Arguments:
        tensor: the elements.
        metadata: which of the whole tensor's they are.
    """

    tensor: torch.Tensor
    metadata: ShardMetadata

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Refuse a tensor that is not of the size or on the device that the metadata says."""
        if not isinstance(self.tensor, torch.Tensor):
            raise ShardedTensorError(f"tensor: expected a tensor, got {self.tensor!r}")
        if list(self.tensor.shape) != self.metadata.shard_sizes:
            raise ShardedTensorError(
                f"tensor: expected the metadata's shard_sizes {self.metadata.shard_sizes}, "
                f"got a tensor of shape {list(self.tensor.shape)}"
            )
        placement = self.metadata.placement
        if placement is not None and not is_on(self.tensor, placement.device()):
            raise ShardedTensorError(
                f"tensor: expected one on the device of its placement {placement}, "
                f"got one on {self.tensor.device}"
            )

    @classmethod
    def from_tensor_and_offsets(
        cls, tensor: torch.Tensor, shard_offsets: Sequence[int], rank: int
    ) -> Shard:
        """The shard that begins at these offsets and is held by a global rank."""
        placement = f"rank:{rank}/{tensor.device}"
        return cls(tensor, ShardMetadata(shard_offsets, tensor.shape, placement))


def narrow_tensor(tensor: torch.Tensor, metadata: ShardMetadata) -> torch.Tensor:
    """The part of a whole tensor that a shard is: a view."""
    return narrow_tensor_by_index(tensor, metadata.shard_offsets, metadata.shard_sizes)


def narrow_tensor_by_index(
    tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]
) -> torch.Tensor:
    """The part of a tensor that begins at these offsets and has these sizes: a view."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor is on a device; one without an index is that rank's current one."""
    if device.index is None:
        return tensor.device.type == device.type
    return tensor.device == device
