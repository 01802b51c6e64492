"""DeviceMesh: the ranks of a program in a grid with named axes.

A mesh is a value: immutable, interned (equal meshes are one object) and cheap to make. Making one
communicates nothing; process groups are made when a collective first needs them. Only the methods
that depend on the calling rank, its process groups or the parents of a mesh use the rank's world.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from shardwise.core import world
from shardwise.core.checks import as_device_type, as_mesh_shape, as_names, as_ranks
from shardwise.core.errors import MeshError, format_value
from shardwise.core.rank_grid import Axis as Axis
from shardwise.core.rank_grid import RankGrid

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

_interned: WeakValueDictionary[tuple[Any, ...], DeviceMesh] = WeakValueDictionary()
_interning = threading.Lock()


class DeviceMesh(RankGrid):
    """Ranks in a grid.

    Arguments:
        device_type: what the ranks compute on, such as `"cpu"` or `"cuda"`.
        mesh: the global ranks: a tensor, array or nested list with one dimension per axis.
        mesh_dim_names: one name per axis.
        preserve_rank_order: accepted as in torch 2.15, without effect: the process group of an axis
            always has its ranks in the order of the mesh (torch sorts them by default).

    Example:
        >>> mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        >>> mesh["tp"].size()
        2
    """

    __slots__ = (
        "__weakref__",
        "_coordinates",
        "device_type",
        "is_abstract",
    )

    device_type: str
    is_abstract: bool
    _coordinates: dict[int, tuple[int, ...] | None]
    """The coordinates of the ranks that asked: threads of a simulation share the mesh."""

    def __new__(
        cls,
        device_type: str,
        mesh: torch.Tensor | Sequence[Any] | NDArray[Any],
        *,
        mesh_dim_names: Sequence[str] | None = None,
        preserve_rank_order: bool = False,
    ) -> DeviceMesh:
        ranks = as_ranks(mesh)
        here = world.current()
        if ranks.max() >= here.size or ranks.min() < 0:
            raise MeshError(
                f"mesh: expected ranks 0 to {here.size - 1}, "
                f"got {int(ranks.min())} to {int(ranks.max())}; {here.describe()}"
            )
        return _mark_made(_intern(device_type, ranks, mesh_dim_names))

    @staticmethod
    def abstract(
        shape: Sequence[int], names: Sequence[str] | None = None, device_type: str = "cpu"
    ) -> DeviceMesh:
        """Return a mesh without ranks: enough to lay out, plan, estimate costs and dry-run.

        `get_rank()` of it is 0; `shardwise.communicator(mesh, axes, rank=r)` takes the view of
        another rank.
        """
        sizes = as_mesh_shape(shape, "shape")
        ranks = np.arange(math.prod(sizes), dtype=np.int64).reshape(sizes)
        return _intern(device_type, ranks, names, is_abstract=True)

    # ---- properties

    @property
    def mesh(self) -> torch.Tensor:
        """The global ranks as an int32 tensor with one dimension per axis."""
        return torch.from_numpy(self._ranks.astype(np.int32))

    @property
    def root(self) -> DeviceMesh:
        """The mesh that the calling rank took this sub-mesh from, or the mesh itself."""
        return world.root_of(self)

    # ---- the calling rank

    def ranks_along(
        self, axes: Sequence[Axis], coordinate: Sequence[int] | None = None
    ) -> tuple[int, ...]:
        """Return the ranks that differ from `coordinate` (default: this rank) only along `axes`.

        The position along the first of `axes` varies slowest.
        """
        return self._ranks_from(axes, self._own_coordinate() if coordinate is None else coordinate)

    def get_rank(self) -> int:
        """Return the global rank of the caller (0 on an abstract mesh)."""
        return 0 if self.is_abstract else world.current().rank

    def get_coordinate(self) -> tuple[int, ...] | None:
        """Return the coordinate of the caller, or None if it is not in the mesh."""
        rank = self.get_rank()
        if rank not in self._coordinates:
            self._coordinates[rank] = self.coordinate_of(rank)
        return self._coordinates[rank]

    def get_local_rank(self, mesh_dim: Axis | None = None) -> int:
        """Return the caller's position along one axis; optional for a 1-d mesh."""
        return self._own_coordinate()[self._one_axis(mesh_dim, "get_local_rank")]

    def get_group(self, mesh_dim: Axis | None = None) -> ProcessGroup:
        """Return the caller's torch process group along one axis; optional for a 1-d mesh.

        The group is made on demand: all its members must call this, and no other rank.
        """
        axis = self._one_axis(mesh_dim, "get_group")
        self._check_real("process group")
        world.check_not_aborted(self)
        group: ProcessGroup = world.current().process_group(self.ranks_along([axis]))
        return group

    def get_all_groups(self) -> list[ProcessGroup]:
        """Return the torch process groups of the caller, one per axis."""
        return [self.get_group(axis) for axis in range(self.ndim)]

    def abort(self) -> None:
        """End all communication over a root mesh and its sub-meshes.

        Collectives of this rank that are under way fail, and so do ranks that wait for this one
        (with gloo, only when their peer is gone or at their timeout). The process groups of all
        axes and channels are removed from torch.distributed. If an axis spans all ranks, the
        default group is removed too, and `init_process_group` must be called again. Later use of
        the mesh is an error until all its ranks make the mesh again.
        """
        self._check_real("process group to abort")
        if self.root is not self:
            raise MeshError(
                f"abort: expected a mesh that was not cut from another, got {self!r}; call "
                f"mesh.root.abort(), which ends {self.root!r} with all that was cut from it"
            )
        world.current(start=False).abort(world.sub_meshes_of(self))

    # ---- other meshes from this one

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """Return the sub-mesh along the named axes that contains the caller.

        Names that `flatten` gave to merged axes work too.
        """
        wanted = tuple(names) if isinstance(names, tuple | list) else (names,)
        if not all(isinstance(name, str) for name in wanted):
            raise MeshError(
                f"axis: expected one of {self.axes_shown()}, by name; got {format_value(names)}"
            )
        if self.mesh_dim_names is None:
            raise MeshError(f"mesh[{wanted}]: this mesh has no mesh_dim_names; give it names first")
        if wanted == self.mesh_dim_names:
            return self
        mesh, merged = world.resolve_names(self, wanted)
        axes = tuple(chain.from_iterable(merged))
        if not axes or len(set(axes)) != len(axes):
            raise MeshError(f"mesh[{wanted}]: expected each axis name once, got {axes}")
        ranks = np.array(mesh.ranks_along(axes), dtype=np.int64)
        sizes = [math.prod(map(mesh.size, each)) for each in merged]
        return mesh._derive(ranks.reshape(sizes), wanted)

    def along(self, axes: Sequence[int], coordinate: Sequence[int]) -> DeviceMesh:
        """Return the sub-mesh along axes, given by position, that contains a coordinate."""
        ranks = np.array(self.ranks_along(axes, coordinate), dtype=np.int64)
        named = self.mesh_dim_names is not None
        names = [self.axis_name(axis) for axis in axes] if named else None
        sizes = [self.shape[axis] for axis in axes]
        return _intern(self.device_type, ranks.reshape(sizes), names, self.is_abstract)

    def flatten(self, *axes: Axis, name: str | None = None) -> DeviceMesh:
        """Merge several adjacent axes (default: all) into one, the first varying slowest.

        Arguments:
            axes: the axes to merge, in the order of the mesh.
            name: the name of the merged axis (default: the names joined by `_`); `root[name]`
                finds it again.
        """
        merged = [self.axis(axis) for axis in axes] or list(range(self.ndim))
        if any(after != before + 1 for before, after in pairwise(merged)):
            shown = ", ".join(map(format_value, axes))
            raise MeshError(
                f"flatten({shown}): expected adjacent axes in mesh order, of {self.axes_shown()};"
                " bring them together first, with mesh[names]"
            )
        first, end = merged[0], merged[-1] + 1
        shape = (*self.shape[:first], math.prod(self.shape[first:end]), *self.shape[end:])
        names = self.mesh_dim_names
        if names is None:
            if name is not None:
                shown = format_value(name)
                raise MeshError(f"flatten(name={shown}): this mesh has no mesh_dim_names")
            return self._derive(self._ranks.reshape(shape), None)
        name = "_".join(names[first:end]) if name is None else name
        flat = self._derive(self._ranks.reshape(shape), (*names[:first], name, *names[end:]))
        world.record_flattened(self, name, names[first:end], flat)
        return flat

    def unflatten(
        self, axis: Axis, sizes: Sequence[int], names: Sequence[str] | None = None
    ) -> DeviceMesh:
        """Split one axis into several of the given sizes, the first varying slowest."""
        position = self.axis(axis)
        sizes = as_mesh_shape(sizes, "unflatten(sizes)")
        if math.prod(sizes) != self.shape[position]:
            raise MeshError(
                f"unflatten(sizes): expected a product of {self.shape[position]}, the size of axis "
                f"{axis!r}; got {sizes}"
            )
        old = self.mesh_dim_names
        if (names is None) != (old is None):
            raise MeshError("unflatten(names): expected names exactly if the mesh has names")
        shape = (*self.shape[:position], *sizes, *self.shape[position + 1 :])
        named = (*old[:position], *names, *old[position + 1 :]) if old and names else None
        return self._derive(self._ranks.reshape(shape), named)

    def _flatten(self, mesh_dim_name: str | None = None) -> DeviceMesh:
        """Merge all axes into one; torch's private name for `flatten()`."""
        return self.flatten(name=mesh_dim_name)

    def _unflatten(
        self, dim: Axis, mesh_sizes: Sequence[int], mesh_dim_names: Sequence[str]
    ) -> DeviceMesh:
        """Split one axis into several; torch's private name for `unflatten`."""
        return self.unflatten(dim, mesh_sizes, mesh_dim_names)

    # ---- torch's meshes and groups

    @staticmethod
    def from_group(
        group: ProcessGroup | Sequence[ProcessGroup],
        device_type: str,
        mesh: torch.Tensor | Sequence[Any] | None = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> DeviceMesh:
        """Return a mesh over existing process groups, one per axis; all members must call this.

        Arguments:
            mesh: the global ranks; needed for more than one group.
        """
        groups = list(group) if isinstance(group, Sequence) else [group]
        here = world.current()
        members = [here.adopt(each) for each in groups]
        if mesh is None:
            if len(groups) != 1:
                raise MeshError(
                    f"mesh: expected the ranks' grid, as there are {len(groups)} groups"
                )
            mesh = list(members[0])
        result = DeviceMesh(device_type, mesh, mesh_dim_names=mesh_dim_names)
        if result.ndim != len(groups):
            raise MeshError(
                f"group: expected one per axis, {result.ndim}; got {len(groups)} groups"
            )
        for axis, ranks in enumerate(members):
            if result.ranks_along([axis]) != ranks:
                raise MeshError(
                    f"group: expected ranks {result.ranks_along([axis])} along axis "
                    f"{result.axis_name(axis)}, got a group of ranks {ranks}"
                )
        return result

    @staticmethod
    def from_torch(mesh: TorchMesh) -> DeviceMesh:
        """Return the shardwise mesh for a mesh of torch, over torch's process groups.

        All members must call this, so that all of them use these groups.
        """
        groups = mesh.get_all_groups() if mesh.get_coordinate() is not None else []
        result = DeviceMesh(mesh.device_type, mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)
        for group in groups:
            world.current().adopt(group)
        return result

    def to_torch(self) -> TorchMesh:
        """Return torch's mesh of the same ranks and process groups; all members must call this."""
        self._check_real("torch DeviceMesh")
        result: TorchMesh = world.current().torch_mesh(self)
        return result

    # ---- as a value

    def __repr__(self) -> str:
        return _format_mesh(self)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name}: a DeviceMesh cannot be changed; make another")

    def __reduce__(self) -> tuple[Any, ...]:
        # Only lists, numbers and strings: torch.load(weights_only=True) allows these.
        ranks = self._ranks.tolist()
        return unpickled, (self.device_type, ranks, self.mesh_dim_names, self.is_abstract)

    def __copy__(self) -> DeviceMesh:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceMesh:
        return self

    # ---- helpers

    def _derive(self, ranks: NDArray[np.int64], names: Sequence[str] | None) -> DeviceMesh:
        """Return a sub-mesh and record its parent."""
        result = _intern(self.device_type, ranks, names, self.is_abstract)
        world.record_root(result, self)
        return result

    def _own_coordinate(self) -> tuple[int, ...]:
        coordinate = self.get_coordinate()
        if coordinate is None:
            raise MeshError(f"rank {self.get_rank()} is not part of {self!r}")
        return coordinate

    def _check_real(self, what: str) -> None:
        if self.is_abstract:
            raise MeshError(f"no {what}: {self!r} is abstract, it has no ranks behind it")

    def _one_axis(self, axis: Axis | None, method: str) -> int:
        if axis is not None:
            return self.axis(axis)
        if self.ndim != 1:
            raise MeshError(f"{method}(mesh_dim): expected one of {self.axes_shown()}, got None")
        return 0


def init_device_mesh(
    device_type: str, mesh_shape: Sequence[int], mesh_dim_names: Sequence[str] | None = None
) -> DeviceMesh:
    """Return a mesh of all ranks of the world, in order.

    Under torchrun this joins the ranks if nothing has done so before.

    Arguments:
        device_type: what the ranks compute on, such as `"cpu"` or `"cuda"`.
        mesh_shape: the size of each axis; the product must be the number of ranks.
        mesh_dim_names: one name per axis.

    Example:
        >>> mesh = init_device_mesh("cpu", (2, 4), ("dp", "tp"))
    """
    sizes = as_mesh_shape(mesh_shape, "mesh_shape")
    size = math.prod(sizes)
    here = world.current()
    if size != here.size:
        raise MeshError(
            f"mesh_shape: expected a product of {here.size}, the number of ranks; "
            f"got {sizes} = {size}; {here.describe()}"
        )
    ranks = np.arange(size, dtype=np.int64).reshape(sizes)
    return _mark_made(_intern(device_type, ranks, mesh_dim_names))


def as_mesh(mesh: DeviceMesh | TorchMesh) -> DeviceMesh:
    """Return the shardwise mesh for a mesh of shardwise or torch; refuse anything else."""
    if isinstance(mesh, DeviceMesh):
        return mesh
    if type(mesh).__name__ == "DeviceMesh" and type(mesh).__module__.startswith("torch."):
        return DeviceMesh.from_torch(mesh)
    raise MeshError(
        f"mesh: expected a DeviceMesh, got {format_value(mesh)} ({type(mesh).__name__})"
    )


def _mark_made(mesh: DeviceMesh) -> DeviceMesh:
    """Mark a mesh as made by the calling rank: after an abort it gets new process groups."""
    world.current().aborted.discard(mesh)
    return mesh


def unpickled(
    device_type: str, ranks: Any, names: tuple[str, ...] | None, is_abstract: bool
) -> DeviceMesh:
    """Return a mesh from its pickled fields."""
    if not isinstance(is_abstract, bool):
        raise MeshError(f"is_abstract: expected a bool, got {format_value(is_abstract)}")
    grid = as_ranks(ranks)
    if grid.min() < 0:
        raise MeshError(f"mesh: expected ranks from 0, got {grid.tolist()}")
    return _intern(device_type, grid, names, is_abstract)


def _intern(
    device_type: str,
    ranks: NDArray[np.int64],
    names: Sequence[str] | None,
    is_abstract: bool = False,
) -> DeviceMesh:
    """Return the interned mesh with these properties; check what does not depend on the world."""
    named = as_names(names, ranks.ndim)
    key = (as_device_type(device_type), ranks.shape, ranks.tobytes(), named, is_abstract)
    with _interning:
        found = _interned.get(key)
        if found is None:
            found = object.__new__(DeviceMesh)
            counts = bool((np.diff(ranks.reshape(-1)) == 1).all())
            fields: dict[str, Any] = {
                "device_type": key[0],
                "mesh_dim_names": named,
                "shape": ranks.shape,
                "is_abstract": is_abstract,
                "_ranks": ranks,
                "_counts_from": int(ranks.flat[0]) if counts else None,
                "_coordinates": {},
            }
            for field, value in fields.items():
                object.__setattr__(found, field, value)
            _interned[key] = found
    return found


_MOST_RANKS = 64


def _format_mesh(mesh: DeviceMesh) -> str:
    """Return the call that makes the mesh on this rank, or a text in `<...>` if there is none."""
    device, names = mesh.device_type, mesh.mesh_dim_names
    third = "" if names is None else f", {names}"
    named = "" if names is None else f", mesh_dim_names={names}"
    ranks = mesh.mesh.tolist() if mesh.size() <= _MOST_RANKS else "..."
    counts = mesh._counts_from == 0
    if not mesh.is_abstract:
        if counts and mesh.size() == world.current(start=False).size:
            return f"init_device_mesh({device!r}, {mesh.shape}{third})"
        return f"DeviceMesh({device!r}, {ranks}{named})"
    if counts:
        typed = "" if device == "cpu" else f", device_type={device!r}"
        return f"DeviceMesh.abstract({mesh.shape}{third}{typed})"
    root, own = mesh.root, names or ()
    axes = root.mesh_dim_names or ()
    if root is not mesh and all(name in axes for name in own) and root[own] is mesh:
        return f"{root!r}[{', '.join(map(repr, own))}]"
    return f"<abstract DeviceMesh({device!r}, {ranks}{named})>"
