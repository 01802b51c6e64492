"""Over which axes of a mesh a module is data-parallel: sharded, replicated, or both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.comm import Communicator, communicator
from shardwise.fsdp.errors import FSDPError
from shardwise.mesh import DeviceMesh, as_mesh

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh


@dataclass(frozen=True)
class DataParallelMeshInfo:
    """The data-parallel ranks of a module. One of the three kinds below.

    Arguments:
        mesh: these ranks, with one axis or two.
        shard_mesh_dim: the position of the axis that parameters are split over, if any.
        replicate_mesh_dim: the position of the axis that parameters are the same along, if any.
    """

    mesh: DeviceMesh
    shard_mesh_dim: int | None = None
    replicate_mesh_dim: int | None = None

    @property
    def shard_mesh_size(self) -> int:
        """Over how many ranks parameters are split."""
        return 1 if self.shard_mesh_dim is None else self.mesh.shape[self.shard_mesh_dim]

    @property
    def shard_mesh_rank(self) -> int:
        """Which piece this rank holds."""
        return 0 if self.shard_mesh_dim is None else self.mesh.get_local_rank(self.shard_mesh_dim)

    @property
    def shard_ranks(self) -> tuple[int, ...]:
        """The global ranks that hold the pieces, in order."""
        return self._ranks(self.shard_mesh_dim)

    @property
    def shard_process_group(self) -> ProcessGroup:
        """The torch process group of those ranks; all of them must ask."""
        return self.mesh.get_group(self._axis(self.shard_mesh_dim, "shard"))

    @property
    def replicate_mesh_size(self) -> int:
        """How many ranks hold the same piece."""
        return 1 if self.replicate_mesh_dim is None else self.mesh.shape[self.replicate_mesh_dim]

    @property
    def replicate_mesh_rank(self) -> int:
        """Where this rank stands among those."""
        axis = self.replicate_mesh_dim
        return 0 if axis is None else self.mesh.get_local_rank(axis)

    @property
    def replicate_ranks(self) -> tuple[int, ...]:
        """The global ranks that hold the same piece as this one, in order."""
        return self._ranks(self.replicate_mesh_dim)

    @property
    def replicate_process_group(self) -> ProcessGroup:
        """The torch process group of those ranks; all of them must ask."""
        return self.mesh.get_group(self._axis(self.replicate_mesh_dim, "replicate"))

    @property
    def size(self) -> int:
        """The number of data-parallel ranks."""
        return self.mesh.size()

    def shard_communicator(self, channel: str) -> Communicator:
        """How the ranks that hold the pieces talk."""
        return communicator(self.mesh, (self._axis(self.shard_mesh_dim, "shard"),), channel=channel)

    def replicate_communicator(self, channel: str) -> Communicator:
        """How the ranks that hold the same piece talk."""
        axis = self._axis(self.replicate_mesh_dim, "replicate")
        return communicator(self.mesh, (axis,), channel=channel)

    def communicators(self) -> list[Communicator]:
        """How all of them talk, along one axis after the other."""
        return [communicator(self.mesh, (axis,), channel="") for axis in range(self.mesh.ndim)]

    def _ranks(self, axis: int | None) -> tuple[int, ...]:
        return (self.mesh.get_rank(),) if axis is None else self.mesh.ranks_along([axis])

    def _axis(self, axis: int | None, what: str) -> int:
        if axis is None:
            raise FSDPError(f"{type(self).__name__}: expected an axis to {what} along, has none")
        return axis


class FSDPMeshInfo(DataParallelMeshInfo):
    """Parameters are split over one axis."""


class DDPMeshInfo(DataParallelMeshInfo):
    """Parameters are the same on all ranks of one axis."""


class HSDPMeshInfo(DataParallelMeshInfo):
    """Parameters are split over one axis and the same along the other."""


@dataclass(frozen=True)
class DataParallelMeshDims:
    """The names of the data-parallel axes of a larger mesh.

    Arguments:
        shard: the axis, or axes to be merged, that parameters are split over.
        replicate: the axis, or axes to be merged, that they are the same along.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise FSDPError("DataParallelMeshDims: expected shard, replicate or both; got neither")
        for field, names in (("shard", self.shard), ("replicate", self.replicate)):
            several = names if isinstance(names, tuple) else (names,)
            if names is not None and not (several and all(isinstance(it, str) for it in several)):
                raise FSDPError(
                    f"DataParallelMeshDims({field}): expected the name of an axis or a tuple of "
                    f"names, got {names!r}"
                )


def shard_info(
    mesh: DeviceMesh | TorchMesh | None, dims: DataParallelMeshDims | None, device_type: str
) -> DataParallelMeshInfo:
    """How `fully_shard` lies on a mesh: one axis splits; of two the first replicates.

    Arguments:
        mesh: by default all ranks.
        dims: which axes of it are data-parallel; by default all.
        device_type: of the default mesh.
    """
    mesh = _checked(mesh, device_type, "fully_shard")
    _check_dims(dims)
    if dims is not None:
        return _named_info(mesh, dims)
    if mesh.ndim == 1:
        return FSDPMeshInfo(mesh, shard_mesh_dim=0)
    if mesh.ndim == 2:
        return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    raise FSDPError(
        f"mesh: expected 1 axis (FSDP) or 2 (HSDP: replicate, shard), got {mesh!r}; pass the "
        "data-parallel axes only, such as mesh['dp'] or mesh['replicate', 'shard']"
    )


def replicate_info(
    mesh: DeviceMesh | TorchMesh | None, dims: DataParallelMeshDims | None, device_type: str
) -> DataParallelMeshInfo:
    """How `replicate` lies on a mesh of one axis, by default all ranks; or on axes with names."""
    mesh = _checked(mesh, device_type, "replicate")
    _check_dims(dims)
    if dims is not None:
        if dims.shard is not None:
            raise FSDPError(
                f"dp_mesh_dims: expected DataParallelMeshDims(replicate=...) without shard, got "
                f"{dims!r}; fully_shard splits parameters"
            )
        return _named_info(mesh, dims)
    if mesh.ndim != 1:
        raise FSDPError(
            f"mesh: expected 1 axis, got {mesh!r}; pass the data-parallel axis, such as mesh['dp']"
        )
    return DDPMeshInfo(mesh, replicate_mesh_dim=0)


def _check_dims(dims: DataParallelMeshDims | None) -> None:
    if dims is not None and not isinstance(dims, DataParallelMeshDims):
        raise FSDPError(f"dp_mesh_dims: expected DataParallelMeshDims(...), got {dims!r}")


def _named_info(mesh: DeviceMesh, dims: DataParallelMeshDims) -> DataParallelMeshInfo:
    shard, replicate = _merged(mesh, dims.shard), _merged(mesh, dims.replicate)
    if replicate is None:
        assert shard is not None, "one of the two is there"
        return FSDPMeshInfo(mesh[shard], shard_mesh_dim=0)
    if shard is None:
        return DDPMeshInfo(mesh[replicate], replicate_mesh_dim=0)
    return HSDPMeshInfo(mesh[replicate, shard], shard_mesh_dim=1, replicate_mesh_dim=0)


def _merged(mesh: DeviceMesh, names: str | tuple[str, ...] | None) -> str | None:
    """The name of one axis that stands for these."""
    if names is None or isinstance(names, str):
        return names
    if len(names) == 1:
        return names[0]
    name = "_".join(names)
    mesh[names].flatten(name=name)
    return name


def _checked(mesh: DeviceMesh | TorchMesh | None, device_type: str, function: str) -> DeviceMesh:
    if mesh is None:
        from shardwise import world

        return DeviceMesh(device_type, range(world.current().size), mesh_dim_names=("dp",))
    mesh = as_mesh(mesh)
    if not mesh.is_abstract and mesh.get_coordinate() is None:
        raise FSDPError(
            f"mesh: expected one that rank {mesh.get_rank()} is in, got {mesh!r}; each rank calls "
            f"{function} with the mesh of its own data-parallel peers"
        )
    return mesh
