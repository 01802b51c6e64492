"""The ranks that hold a sharded tensor: how they communicate, and how they fail together.

An error that one rank finds in its own arguments is sent to the others and raised on all ranks of
the group. Otherwise the other ranks would wait forever in the next collective.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any, TypeAlias

from torch.distributed import GroupMember, ProcessGroup
from torch.distributed.device_mesh import DeviceMesh as TorchMesh

from shardwise.comm import Communicator, agreement, communicator
from shardwise.core import errors, world
from shardwise.core.box import Box
from shardwise.core.errors import ShardedStateError, ShardedTensorError, ShardwiseError
from shardwise.core.mesh import DeviceMesh, as_mesh
from shardwise.sharded.metadata import ShardedTensorMetadata, ShardMetadata
from shardwise.torch_internals import RemoteDevice, current_rpc_agent, is_rpc_running

GroupLike: TypeAlias = "ProcessGroup | DeviceMesh | TorchMesh | RankGroup | None"
"""The types of an argument `process_group`. Simulated ranks have meshes, but no process groups."""


class RankGroup:
    """Some ranks of the world, in ascending order as in torch's process groups.

    Two groups of the same ranks are the same group, whatever the order of the ranks in a mesh.

    Arguments:
        given: a process group, or a mesh, which stands for its ranks; all ranks by default.
    """

    def __init__(self, given: ProcessGroup | DeviceMesh | TorchMesh | None = None) -> None:
        current = world.current()
        if given is None:
            ranks = tuple(range(current.size))
        elif isinstance(given, ProcessGroup):
            ranks = current.adopt(given)
        elif isinstance(given, int) and given == GroupMember.NON_GROUP_MEMBER:
            ranks = ()
        elif isinstance(given, DeviceMesh | TorchMesh):
            ranks = tuple(as_mesh(given).mesh.flatten().tolist())
        else:
            raise ShardedTensorError(
                f"process_group: expected a ProcessGroup, a DeviceMesh or None, got {given!r}"
            )
        self.given = given
        self.ranks = tuple(sorted(ranks))
        """Empty if they are not known: on ranks outside, torch gives a process group no ranks."""
        self.rank = current.rank
        """The global rank of the caller."""
        self.is_outside = current.rank not in ranks
        """Whether the caller is not one of the ranks: its tensors have no shards, and it takes no
        part in what the others do with theirs."""

    def mesh(self, device_type: str = "cpu") -> DeviceMesh:
        """Return the ranks as a mesh of one axis."""
        self.check_inside()
        return DeviceMesh(device_type, self.ranks)

    def check_inside(self) -> None:
        """Refuse a caller that is not one of the ranks."""
        if self.is_outside:
            raise ShardedStateError(
                "this rank is outside the process group of the sharded tensor"
                f"{f' (ranks {self.ranks})' if self.ranks else ''}: it holds none of its shards, "
                "and takes no part in its communication; call this on the ranks of the group alone"
            )

    @property
    def communicator(self) -> Communicator:
        """The communicator of these ranks."""
        return communicator(self._mesh, (0,))

    @cached_property
    def _mesh(self) -> DeviceMesh:
        return self.mesh()

    @property
    def handle(self) -> Any:
        """The object that a user's operator communicates with: a process group if there is one,
        else a mesh."""
        current = world.current()
        if self.given is None and current.has_process_groups and current.size > 1:
            return current.process_group(self.ranks)
        return self.mesh() if self.given is None else self.given

    def check_member(self, rank: int, argument: str) -> None:
        """Refuse a global rank that is not in the group."""
        self.check_inside()
        if rank not in self.ranks:
            raise ShardedTensorError(
                f"{argument}: expected one of the process group's global ranks {self.ranks}, "
                f"got {rank!r}"
            )

    def owner(self, placement: RemoteDevice | None, argument: str) -> int:
        """Return the global rank that a placement names."""
        if placement is None:
            raise ShardedTensorError(f"{argument}: expected a placement 'rank:N/device', got None")
        rank = placement.rank()
        if rank is None:
            rank = _rank_of_worker(placement, argument)
        if rank not in self.ranks and not self.is_outside:
            is_alone = self.given is None and len(self.ranks) == 1
            hint = ". This process is alone: sw.simulate, sw.launch and torchrun start ranks"
            raise ShardedTensorError(
                f"{argument}: expected a rank of the process group, one of {self.ranks}; "
                f"got {placement}{hint if is_alone else ''}"
            )
        return rank

    def owners(self, shards: Sequence[ShardMetadata]) -> list[int]:
        """Return the global rank that holds each shard."""
        ranks = [each.placement and each.placement.rank() for each in shards]
        if all(rank in self.ranks for rank in ranks):  # None stands for the name of a worker
            return ranks  # type: ignore[return-value]
        return [self.owner(shard.placement, f"shard {shard.box}: placement") for shard in shards]


def as_rank_group(process_group: GroupLike) -> RankGroup:
    """Return the ranks that an argument `process_group` stands for."""
    return process_group if isinstance(process_group, RankGroup) else RankGroup(process_group)


_MOST_SHOWN = 300
"""The most characters about shards in a message."""

# ---- who holds which boxes. Transfers between ranks follow from this alone


@dataclass(frozen=True, slots=True)
class ShardOwnership:
    """The boxes of all shards of a tensor, and the global rank that holds each."""

    boxes: tuple[Box, ...]
    owners: tuple[int, ...]

    @staticmethod
    def of(shards: Sequence[ShardMetadata], group: RankGroup) -> ShardOwnership:
        """Read boxes and owners off the metadata of shards."""
        return ShardOwnership(tuple(each.box for each in shards), tuple(group.owners(shards)))

    @staticmethod
    def whole(size: Sequence[int], rank: int) -> ShardOwnership:
        """Return the ownership of a tensor that one rank holds whole."""
        return ShardOwnership((Box((0,) * len(size), tuple(size)),), (rank,))

    def state(self, call: str, group: RankGroup) -> None:
        """State what a call makes of a tensor: the next collective of the group compares it."""
        if (
            len(group.ranks) > 1
            and not group.is_outside
            and agreement.is_due((call, self), group.ranks)
        ):
            shards = ", ".join(
                f"rank {owner}: {list(zip(box.start, box.stop, strict=True))}"
                for box, owner in zip(self.boxes, self.owners, strict=True)
            )
            digest = blake2b(shards.encode(), digest_size=8).hexdigest()
            shown = shards if len(shards) <= _MOST_SHOWN else f"{shards[:_MOST_SHOWN]}... {digest}"
            agreement.state(f"{call} to shards {shown}", [group.ranks])

    @property
    def empty_box(self) -> Box:
        """A box without elements (with one element, if the tensor has no dims)."""
        corner = (0,) * len(self.boxes[0].start)
        return Box(corner, corner)

    def boxes_of(self, rank: int) -> list[Box]:
        """Return the boxes that a rank holds, in order."""
        return [box for box, owner in zip(self.boxes, self.owners, strict=True) if owner == rank]

    def element_counts(self, group: RankGroup) -> list[int]:
        """Return the number of elements that each rank of a group holds."""
        counts = dict.fromkeys(group.ranks, 0)
        for box, owner in zip(self.boxes, self.owners, strict=True):
            counts[owner] += math.prod(box.shape)
        return list(counts.values())


def local_metadata(
    metadata: ShardedTensorMetadata, ownership: ShardOwnership, group: RankGroup
) -> list[ShardMetadata]:
    """Return the metadata of the shards that this rank holds."""
    pairs = zip(metadata.shards_metadata, ownership.owners, strict=True)
    return [each for each, owner in pairs if owner == group.rank]


def in_rank_order(
    metadata: ShardedTensorMetadata, ownership: ShardOwnership
) -> tuple[ShardedTensorMetadata, ShardOwnership]:
    """Return metadata whose shards are in the order of the ranks, and its ownership.

    The shards of one rank keep their order.
    """
    order = sorted(range(len(ownership.owners)), key=ownership.owners.__getitem__)
    shards = [metadata.shards_metadata[at] for at in order]
    return replace(metadata, shards_metadata=shards), ShardOwnership(
        tuple(ownership.boxes[at] for at in order), tuple(ownership.owners[at] for at in order)
    )


# ---- RPC workers, which placements can name instead of ranks


def rpc_ranks_by_name(reason: str) -> dict[str, int]:
    """Return the rank of each RPC worker, by the worker's name.

    Arguments:
        reason: the start of the error message if RPC is not running.
    """
    if running_rpc() is None:
        raise ShardedStateError(f"{reason}, and RPC is not running; {rpc_start_hint()}")
    return {each.name: each.id for each in current_rpc_agent().get_worker_infos()}


def rpc_start_hint() -> str:
    """Return the part of an error message that says how to start RPC."""
    if world.current().is_simulated:
        return "simulated ranks are threads and have none: start processes, as sw.launch does"
    return (
        "call torch.distributed.rpc.init_rpc(name, rank=..., world_size=...) on every rank first, "
        "with the ranks of the processes"
    )


def running_rpc() -> Any:
    """Return the module torch.distributed.rpc if it is running for this rank, else None."""
    from torch.distributed import rpc  # only where RPC is used

    api: Any = rpc
    if world.current().is_simulated or not rpc.is_available():
        return None
    return api if is_rpc_running() else None


def _rank_of_worker(placement: RemoteDevice, argument: str) -> int:
    name = placement.worker_name()
    if name is None:
        raise ShardedTensorError(
            f"{argument}: expected a rank or a worker, as in 'rank:0/{placement}'; "
            f"got {str(placement)!r}"
        )
    ranks = rpc_ranks_by_name(f"{argument}: {str(placement)!r} names an RPC worker")
    if name not in ranks:
        raise ShardedTensorError(
            f"{argument}: expected one of the RPC workers {', '.join(sorted(ranks))}; "
            f"got {str(placement)!r}"
        )
    return ranks[name]


# ---- errors that all ranks raise


@dataclass(frozen=True)
class RankProblem:
    """An error that one rank found, in a form that the other ranks can raise too."""

    kind: type[ShardwiseError]
    text: str

    @staticmethod
    def of(error: Exception) -> RankProblem:
        """Describe an error, without the rank that its message ends with.

        Exceptions of other libraries become a ShardedTensorError or a ShardedStateError.
        """
        if isinstance(error, ShardwiseError):
            return RankProblem(type(error), str(error).removesuffix(f" [{errors.whereabouts()}]"))
        kind = ShardedTensorError if isinstance(error, ValueError) else ShardedStateError
        return RankProblem(kind, f"{type(error).__name__}: {error}")


def raise_problems(group: RankGroup, problems: list[RankProblem | None]) -> None:
    """Raise the first problem of the ranks of a group, if there is one.

    Arguments:
        problems: one entry per rank, the same list on all ranks.
    """
    for rank, problem in zip(group.ranks, problems, strict=True):
        if problem is not None:
            is_common = all(each == problem for each in problems)
            raise problem.kind(problem.text if is_common else f"rank {rank}: {problem.text}")


def check_agreement(group: RankGroup, facts: list[dict[str, Any]]) -> None:
    """Refuse arguments that are not the same on all ranks.

    Arguments:
        facts: for each rank, the values of its arguments by name.
    """
    for rank, theirs in zip(group.ranks, facts, strict=True):
        for name, first in facts[0].items():
            if theirs.get(name, first) != first:
                raise ShardedTensorError(
                    f"{name}: expected the same on every rank; rank {group.ranks[0]} has "
                    f"{first}, rank {rank} has {theirs[name]}"
                )


@contextmanager
def raise_on_all_ranks(*groups: RankGroup) -> Iterator[None]:
    """Raise an error of the block on all ranks of the groups; all ranks enter it."""
    try:
        yield
    except Exception as error:
        _share_problem(groups, RankProblem.of(error))
        raise
    _share_problem(groups, None)


def _share_problem(groups: Sequence[RankGroup], problem: RankProblem | None) -> None:
    gathered = [(group, group.communicator.gather_objects(problem)) for group in groups]
    for group, problems in gathered:
        raise_problems(group, problems)
