"""The mesh axes over which a module is data-parallel: sharded, replicated, or both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.comm import Communicator, communicator
from shardwise.core import world
from shardwise.core.checks import as_int
from shardwise.core.errors import MeshError, also
from shardwise.core.mesh import DeviceMesh, as_mesh
from shardwise.core.placement import Placement
from shardwise.fsdp.errors import FSDPError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh


@dataclass(frozen=True)
class DataParallelMeshInfo:
    """The data-parallel ranks of a module; base class of the three kinds below.

    Arguments:
        mesh: the data-parallel ranks, with one axis or two.
        shard_mesh_dim: the index of the axis that parameters are sharded over, if any.
        replicate_mesh_dim: the index of the axis that parameters are replicated along, if any.
        dp_mesh_dims: the names of these axes in `spmd_mesh`.
        spmd_mesh: the mesh that parameters are laid out on before they are sharded, if it has the
            data-parallel axes too; modules then compute with DTensors on it.
    """

    mesh: DeviceMesh
    shard_mesh_dim: int | None = None
    replicate_mesh_dim: int | None = None
    dp_mesh_dims: DataParallelMeshDims | None = None
    spmd_mesh: DeviceMesh | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", as_mesh(self.mesh))
        if self.spmd_mesh is not None:
            object.__setattr__(self, "spmd_mesh", as_mesh(self.spmd_mesh))
        needed = [
            *(["shard_mesh_dim"] if isinstance(self, FSDPMeshInfo) else []),
            *(["replicate_mesh_dim"] if isinstance(self, DDPMeshInfo) else []),
        ]
        for name in needed:
            if getattr(self, name) is None:
                raise also(FSDPError, AssertionError)(
                    f"{type(self).__name__}({name}): expected the index of an axis of "
                    f"{self.mesh!r}, got None"
                )
        if self.shard_mesh_dim is None and self.replicate_mesh_dim is None:
            raise also(FSDPError, AssertionError)(
                f"{type(self).__name__}: expected shard_mesh_dim, replicate_mesh_dim or both; got "
                "neither"
            )
        for name in ("shard_mesh_dim", "replicate_mesh_dim"):
            axis = getattr(self, name)
            if axis is not None and as_int(axis) not in range(self.mesh.ndim):
                raise also(FSDPError, AssertionError)(
                    f"{type(self).__name__}({name}): expected the index of an axis of "
                    f"{self.mesh!r}, got {axis!r}"
                )

    @property
    def is_spmd_mesh(self) -> bool:
        """Whether `dp_mesh_dims` names the data-parallel axes of a larger mesh."""
        return self.dp_mesh_dims is not None

    @property
    def spmd_axes(self) -> tuple[int, ...]:
        """The data-parallel axes of `spmd_mesh`: those that shard, then those that replicate."""
        assert self.spmd_mesh is not None and self.dp_mesh_dims is not None, "it has such a mesh"
        names = (*self.dp_mesh_dims.shard_names, *self.dp_mesh_dims.replicate_names)
        return tuple(map(self.spmd_mesh.axis, names))

    @property
    def shard_mesh_size(self) -> int:
        """The number of ranks that parameters are sharded over."""
        return 1 if self.shard_mesh_dim is None else self.mesh.shape[self.shard_mesh_dim]

    @property
    def shard_mesh_rank(self) -> int:
        """The index of the shard that this rank holds."""
        return 0 if self.shard_mesh_dim is None else self.mesh.get_local_rank(self.shard_mesh_dim)

    @property
    def shard_ranks(self) -> tuple[int, ...]:
        """The global ranks along the shard axis, in order."""
        return self._ranks(self.shard_mesh_dim)

    @property
    def shard_process_group(self) -> ProcessGroup:
        """The torch process group of the shard axis; all its ranks must ask for it."""
        return self.mesh.get_group(self._axis(self.shard_mesh_dim, "shard"))

    @property
    def replicate_mesh_size(self) -> int:
        """The number of ranks that hold the same shard."""
        return 1 if self.replicate_mesh_dim is None else self.mesh.shape[self.replicate_mesh_dim]

    @property
    def replicate_mesh_rank(self) -> int:
        """The index of this rank along the replicate axis."""
        axis = self.replicate_mesh_dim
        return 0 if axis is None else self.mesh.get_local_rank(axis)

    @property
    def replicate_ranks(self) -> tuple[int, ...]:
        """The global ranks that hold the same shard as this one, in order."""
        return self._ranks(self.replicate_mesh_dim)

    @property
    def replicate_process_group(self) -> ProcessGroup:
        """The torch process group of the replicate axis; all its ranks must ask for it."""
        return self.mesh.get_group(self._axis(self.replicate_mesh_dim, "replicate"))

    @property
    def size(self) -> int:
        """The number of data-parallel ranks."""
        return self.mesh.size()

    def shard_communicator(self, channel: str) -> Communicator:
        """Return the communicator along the shard axis."""
        return communicator(self.mesh, (self._axis(self.shard_mesh_dim, "shard"),), channel=channel)

    def replicate_communicator(self, channel: str) -> Communicator:
        """Return the communicator along the replicate axis."""
        axis = self._axis(self.replicate_mesh_dim, "replicate")
        return communicator(self.mesh, (axis,), channel=channel)

    def communicators(self) -> list[Communicator]:
        """Return one communicator for each axis."""
        return [communicator(self.mesh, (axis,), channel="") for axis in range(self.mesh.ndim)]

    def _ranks(self, axis: int | None) -> tuple[int, ...]:
        return (self.mesh.get_rank(),) if axis is None else self.mesh.ranks_along([axis])

    def _axis(self, axis: int | None, what: str) -> int:
        if axis is None:
            raise FSDPError(f"{type(self).__name__}: expected an axis to {what} along, has none")
        return axis


class FSDPMeshInfo(DataParallelMeshInfo):
    """Parameters are sharded over one axis."""


class DDPMeshInfo(DataParallelMeshInfo):
    """Parameters are replicated along one axis."""


class HSDPMeshInfo(FSDPMeshInfo, DDPMeshInfo):
    """Parameters are sharded over one axis and replicated along the other."""


@dataclass(frozen=True)
class DataParallelMeshDims:
    """The names of the data-parallel axes of a larger mesh.

    Arguments:
        shard: the axis, or several axes to merge into one, that parameters are sharded over.
        replicate: the axis, or several axes to merge, that parameters are replicated along.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise FSDPError("DataParallelMeshDims: expected shard, replicate or both; got neither")
        for field, names in (("shard", self.shard), ("replicate", self.replicate)):
            several = names if isinstance(names, tuple) else (names,)
            is_valid = bool(several) and all(isinstance(name, str) for name in several)
            if names is not None and not is_valid:
                raise FSDPError(
                    f"DataParallelMeshDims({field}): expected the name of an axis or a tuple of "
                    f"names, got {names!r}"
                )

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The names of the axes that parameters are sharded over."""
        return _as_names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The names of the axes that parameters are replicated along."""
        return _as_names(self.replicate)


def _as_names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)


@dataclass(frozen=True)
class ShardPlacementResult:
    """What `shard_placement_fn` may return: the placement of a parameter, and its own ranks.

    Arguments:
        placement: as `shard_placement_fn` returns it otherwise; None for `Shard(0)`.
        mesh_info: the data-parallel ranks of this parameter.
    """

    placement: Placement | None
    mesh_info: FSDPMeshInfo


def resolve_shard_placement(
    result: Placement | ShardPlacementResult | None, default_mesh_info: FSDPMeshInfo
) -> ShardPlacementResult:
    """Return what `shard_placement_fn` has returned as a `ShardPlacementResult`."""
    if isinstance(result, ShardPlacementResult):
        return result
    if result is not None and not isinstance(result, Placement):
        raise FSDPError(
            f"result: expected Shard(dim), a ShardPlacementResult or None, got {result!r}"
        )
    return ShardPlacementResult(result, default_mesh_info)


def mesh_info_of(
    mesh: DeviceMesh | TorchMesh, dp_mesh_dims: DataParallelMeshDims | None = None
) -> DataParallelMeshInfo:
    """Return the data-parallel axes of a mesh, as `fully_shard` takes them. It is torch's
    `_get_mesh_info`."""
    return shard_info(mesh, dp_mesh_dims, as_mesh(mesh).device_type)


def shard_info(
    mesh: DeviceMesh | TorchMesh | None, dims: DataParallelMeshDims | None, device_type: str
) -> DataParallelMeshInfo:
    """Return the data-parallel axes of `fully_shard`: one axis shards; of two the first replicates.

    Arguments:
        mesh: by default all ranks.
        dims: the data-parallel axes of the mesh; by default all.
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
    """Return the data-parallel axis of `replicate`; arguments as in `shard_info`."""
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


def process_group_or_communicator(info: DataParallelMeshInfo) -> Any:
    """Return the process group for a custom collective, or the communicator on simulated ranks,
    which have no process group."""
    try:
        return info.shard_process_group
    except MeshError:
        return info.shard_communicator("")


def _check_dims(dims: DataParallelMeshDims | None) -> None:
    if dims is not None and not isinstance(dims, DataParallelMeshDims):
        raise FSDPError(f"dp_mesh_dims: expected DataParallelMeshDims(...), got {dims!r}")


def _named_info(mesh: DeviceMesh, dims: DataParallelMeshDims) -> DataParallelMeshInfo:
    for name in (*dims.shard_names, *dims.replicate_names):
        if name not in (mesh.mesh_dim_names or ()):
            raise FSDPError(f"dp_mesh_dims: expected names of axes of {mesh!r}, got {name!r}")
    shard, replicate = _merged(mesh, dims.shard), _merged(mesh, dims.replicate)
    if replicate is None:
        assert shard is not None, "DataParallelMeshDims has checked that one is given"
        return FSDPMeshInfo(mesh[shard], 0, None, dims, mesh)
    if shard is None:
        return DDPMeshInfo(mesh[replicate], None, 0, dims, mesh)
    return HSDPMeshInfo(mesh[replicate, shard], 1, 0, dims, mesh)


def _merged(mesh: DeviceMesh, names: str | tuple[str, ...] | None) -> str | None:
    """Return the name of the axis that the named axes are merged into; None without names."""
    if names is None or isinstance(names, str):
        return names
    if len(names) == 1:
        return names[0]
    name = "_".join(names)
    mesh[names].flatten(name=name)
    return name


def _checked(mesh: DeviceMesh | TorchMesh | None, device_type: str, function: str) -> DeviceMesh:
    if mesh is None:
        return DeviceMesh(device_type, range(world.current().size), mesh_dim_names=("dp",))
    mesh = as_mesh(mesh)
    if not mesh.is_abstract and mesh.get_coordinate() is None:
        raise FSDPError(
            f"mesh: expected one that rank {mesh.get_rank()} is in, got {mesh!r}; each rank calls "
            f"{function} with the mesh of its own data-parallel peers"
        )
    return mesh
