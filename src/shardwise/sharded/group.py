"""The ranks that hold a sharded tensor, and how they talk."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, TypeAlias

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh as TorchMesh

from shardwise import world
from shardwise.comm import Communicator, communicator
from shardwise.mesh import DeviceMesh, as_mesh
from shardwise.sharded import workers
from shardwise.sharded.errors import ShardedTensorError
from shardwise.sharded.metadata import ShardMetadata
from shardwise.torch_internals import RemoteDevice

GroupLike: TypeAlias = "ProcessGroup | DeviceMesh | TorchMesh | Group | None"
"""What may be given as `process_group`. Simulated ranks have no process groups, but meshes."""


class Group:
    """Some ranks of the world, in ascending order, as in torch's groups: two of the same ranks are
    the same, however a mesh has them.

    Arguments:
        given: a process group, or a mesh whose ranks are meant; all ranks by default.
    """

    def __init__(self, given: ProcessGroup | DeviceMesh | TorchMesh | None = None) -> None:
        here = world.current()
        if given is None:
            ranks = tuple(range(here.size))
        elif isinstance(given, ProcessGroup):
            ranks = here.adopt(given)
        elif isinstance(given, DeviceMesh | TorchMesh):
            ranks = tuple(as_mesh(given).mesh.flatten().tolist())
        else:
            raise ShardedTensorError(
                "process_group: expected a ProcessGroup that this rank is in, a DeviceMesh or "
                f"None, got {given!r}"
            )
        if here.rank not in ranks:
            raise ShardedTensorError(
                f"process_group: expected one that this rank is in, got one of ranks {ranks}"
            )
        self.given = given
        self.ranks = tuple(sorted(ranks))
        self.rank = here.rank
        """The global rank of the caller."""

    def mesh(self, device_type: str = "cpu") -> DeviceMesh:
        """Its ranks as a mesh of one axis."""
        return DeviceMesh(device_type, self.ranks)

    @property
    def communicator(self) -> Communicator:
        """How its ranks talk."""
        return communicator(self._mesh, (0,))

    @cached_property
    def _mesh(self) -> DeviceMesh:
        return self.mesh()

    @property
    def handle(self) -> Any:
        """What a user's operator is given to communicate with: a process group where there are."""
        here = world.current()
        if self.given is None and not here.is_simulated and here.size > 1:
            return here.process_group(self.ranks)
        return self.mesh() if self.given is None else self.given

    def check_member(self, rank: int, argument: str) -> None:
        """Refuse a global rank that is not in it."""
        if rank not in self.ranks:
            raise ShardedTensorError(
                f"{argument}: expected one of the process group's global ranks {self.ranks}, "
                f"got {rank!r}"
            )

    def owner(self, placement: RemoteDevice | None, argument: str) -> int:
        """The global rank that a placement means."""
        if placement is None:
            raise ShardedTensorError(f"{argument}: expected a placement 'rank:N/device', got None")
        rank = placement.rank()
        if rank is None:
            rank = _rank_of_worker(placement, argument)
        if rank not in self.ranks:
            is_alone = self.given is None and len(self.ranks) == 1
            hint = ". This process is alone: sw.simulate, sw.launch and torchrun start ranks"
            raise ShardedTensorError(
                f"{argument}: expected a rank of the process group, one of {self.ranks}; "
                f"got {placement}{hint if is_alone else ''}"
            )
        return rank

    def owners(self, shards: Sequence[ShardMetadata]) -> list[int]:
        """The global rank of each shard."""
        ranks = [each.placement and each.placement.rank() for each in shards]
        if all(rank in self.ranks for rank in ranks):  # None, of a worker's name, is not
            return ranks  # type: ignore[return-value]
        return [self.owner(shard.placement, f"shard {shard.box}: placement") for shard in shards]


def as_group(process_group: GroupLike) -> Group:
    """The ranks that are meant by what was given as `process_group`."""
    return process_group if isinstance(process_group, Group) else Group(process_group)


def _rank_of_worker(placement: RemoteDevice, argument: str) -> int:
    name = placement.worker_name()
    if name is None:
        raise ShardedTensorError(
            f"{argument}: expected a rank or a worker, as in 'rank:0/{placement}'; "
            f"got {str(placement)!r}"
        )
    ranks = workers.ranks_by_name(f"{argument}: {str(placement)!r} names an RPC worker")
    if name not in ranks:
        raise ShardedTensorError(
            f"{argument}: expected one of the RPC workers {', '.join(sorted(ranks))}; "
            f"got {str(placement)!r}"
        )
    return ranks[name]
