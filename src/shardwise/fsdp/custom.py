"""Communication that users bring along, in place of the communicator's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from shardwise.errors import MeshError
from shardwise.fsdp.mesh_info import DataParallelMeshInfo


class Comm(ABC):
    """A collective that also says where its result lies."""

    @abstractmethod
    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Memory for the result."""


class AllGather(Comm):
    """Gathers parameters."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        async_op: bool = False,
    ) -> Any:
        """Fill `output_tensor` with all ranks' inputs, one after the other.

        Arguments:
            group: torch's process group; on simulated ranks the communicator.
            async_op: whether to return at once something that has a `wait()`.
        """


class ReduceScatter(Comm):
    """Reduces gradients."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Fill `output_tensor` with the sum of this rank's pieces of all ranks' inputs.

        Arguments:
            group: torch's process group; on simulated ranks the communicator.
            op: always `ReduceOp.SUM`: what is to be divided is divided afterwards.
            async_op: whether to return at once something that has a `wait()`.
        """


def process_group(info: DataParallelMeshInfo) -> Any:
    """What a custom collective talks through."""
    try:
        return info.shard_process_group
    except MeshError:
        return info.shard_communicator("")
