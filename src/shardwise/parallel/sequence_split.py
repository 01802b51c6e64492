"""Which positions of a sequence each rank has, and the settings of context parallelism."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch

from shardwise.core.box import chunk
from shardwise.core.errors import LayoutError, also
from shardwise.core.mesh import DeviceMesh
from shardwise.parallel.plan_spec import PlanError

# ---- options


class RotateMethod(Enum):
    """How keys and values travel, in torch's terms."""

    ALL_TO_ALL = auto()
    ALL_GATHER = auto()


@dataclass
class ContextParallelOptions:
    """The settings of context parallelism, with torch's names."""

    convert_to_f32: bool = True
    """Without effect: attention is one call, so that no partial results are accumulated."""
    enable_load_balance: bool = True
    """Whether `context_parallel` gives each rank a chunk from the start and one from the end."""
    rotate_method: RotateMethod = RotateMethod.ALL_GATHER


options = ContextParallelOptions()


def set_rotate_method(rotate_method: str) -> None:
    """Set how keys and values travel: "allgather" or "alltoall".

    The results are the same. shardwise gathers them in either case, and warns about "alltoall".
    """
    if rotate_method not in ("allgather", "alltoall"):
        raise also(LayoutError, NotImplementedError)(
            f"rotate_method: expected 'allgather' or 'alltoall', got {rotate_method!r}"
        )
    if rotate_method == "alltoall":
        warnings.warn(
            "set_rotate_method('alltoall'): shardwise gathers all keys and values instead of "
            "passing them around, which gives the same results and takes more memory",
            stacklevel=2,
        )
        options.rotate_method = RotateMethod.ALL_TO_ALL
    else:
        options.rotate_method = RotateMethod.ALL_GATHER


# ---- which positions each rank has


class LoadBalancer(ABC):
    """The order in which positions of a sequence are handed out to the ranks."""

    @abstractmethod
    def _generate_indices(self, restore: bool = False) -> torch.Tensor | None:
        """Return the positions in that order, `(1, length)`; with `restore`, the inverse."""


class HeadTailLoadBalancer(LoadBalancer):
    """Each rank gets a chunk from the start of the sequence and one from its end.

    Arguments:
        seq_length: the length of the sequence, a multiple of twice the number of ranks.
        world_size: the number of ranks.
        device: the device of the indices.
    """

    def __init__(self, seq_length: int, world_size: int, device: str | torch.device) -> None:
        self.seq_length = seq_length
        self.world_size = world_size
        self.device = device

    def _generate_indices(self, restore: bool = False) -> torch.Tensor:
        check_balanced(self.seq_length, self.world_size)
        positions = torch.arange(self.seq_length, dtype=torch.int, device=self.device)
        chunks = positions.chunk(2 * self.world_size)
        pairs = zip(chunks[: self.world_size], reversed(chunks), strict=False)
        indices = torch.cat([each for pair in pairs for each in pair])
        return (indices.argsort() if restore else indices)[None]


class _FlexBalancer(LoadBalancer):
    """A balancer of torch for flex_attention, which shardwise does not make parallel."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise flex_refusal(type(self).__name__)

    def _generate_indices(self, restore: bool = False) -> torch.Tensor | None:
        return None


class PerDocumentHeadTailLoadBalancer(_FlexBalancer):
    """Refused: it is for flex_attention."""


class PTRRLoadBalancer(_FlexBalancer):
    """Refused: it is for flex_attention."""


@dataclass(frozen=True)
class SequenceSplit:
    """A sequence of one length, split over the ranks of a mesh."""

    mesh: DeviceMesh
    length: int
    is_balanced: bool

    def ranges(self, index: int) -> list[tuple[int, int]]:
        """Return the positions of a rank, as ranges in the order in which it has them."""
        ranks = self.mesh.size()
        if not self.is_balanced:
            return [chunk(0, self.length, ranks, index)]
        size = self.length // (2 * ranks)
        return [(at * size, (at + 1) * size) for at in (index, 2 * ranks - 1 - index)]

    @property
    def own_ranges(self) -> list[tuple[int, int]]:
        """The positions of the calling rank."""
        return self.ranges(self.mesh.get_local_rank())

    @property
    def local_length(self) -> int:
        """The number of positions of the calling rank."""
        return sum(stop - start for start, stop in self.own_ranges)

    def shard(self, buffer: torch.Tensor, dim: int) -> torch.Tensor:
        """Return a copy of this rank's part of a buffer."""
        parts = [buffer.narrow(dim, start, stop - start) for start, stop in self.own_ranges]
        return torch.cat(parts, dim)

    def in_order(self, gathered: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the parts of all ranks, one after the other, in the order of the sequence."""
        if not self.is_balanced:
            return gathered
        parts = gathered.chunk(2 * self.mesh.size(), dim)
        return torch.cat([*parts[::2], *reversed(parts[1::2])], dim)


def check_balanced(length: int, ranks: int) -> None:
    """Refuse a length that does not divide into twice as many chunks as there are ranks."""
    if length % (2 * ranks):
        raise also(LayoutError, AssertionError)(
            f"seq_length: expected a multiple of {2 * ranks}, twice the number of ranks, to give "
            f"each rank a chunk from the start and one from the end; got {length}"
        )


def flex_refusal(what: str) -> PlanError:
    """Return the error for something that belongs to flex_attention."""
    kind: type[PlanError] = also(PlanError, NotImplementedError)
    return kind(
        f"{what}: context parallelism of flex_attention is not built; use "
        "F.scaled_dot_product_attention(..., is_causal=True) with a HeadTailLoadBalancer, or "
        "gather keys and values with DTensors: x.redistribute(placements=[Replicate()])"
    )
