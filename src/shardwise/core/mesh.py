"""DeviceMesh: the ranks of a program in a grid with named axes.

A mesh is a value: immutable, interned (equal meshes are one object) and cheap to make. Making one
communicates nothing; process groups are made when a collective first needs them. Only the methods
that depend on the calling rank, its process groups or the origin of a mesh use the rank's world.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeGuard
from weakref import WeakValueDictionary

import numpy as np
import torch

from shardwise.core import lineage, world
from shardwise.core.checks import (
    as_backend,
    as_backends,
    as_device_type,
    as_mesh_shape,
    as_names,
    as_ranks,
)
from shardwise.core.errors import MeshError, also, format_value
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
        backend_override: how the process groups of the axes are made: for each axis a tuple of the
            backend's name and its options, or a dict as for `init_device_mesh`.
        preserve_rank_order: accepted as in torch 2.15, without effect: the process group of an axis
            always has its ranks in the order of the mesh (torch sorts them by default).

    Within `with mesh:` the mesh is the default of functions that take a `device_mesh`.

    Example:
        >>> mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        >>> mesh["tp"].size()
        2
    """

    __slots__ = ("__weakref__",)

    def __new__(
        cls,
        device_type: str,
        mesh: torch.Tensor | Sequence[Any] | NDArray[Any],
        *,
        mesh_dim_names: Sequence[str] | None = None,
        backend_override: Sequence[Any] | Mapping[Any, Any] | None = None,
        preserve_rank_order: bool = False,
    ) -> DeviceMesh:
        ranks = as_ranks(mesh)
        here = world.current()
        if ranks.max() >= here.size or ranks.min() < 0:
            raise MeshError(
                f"mesh: expected ranks 0 to {here.size - 1}, "
                f"got {int(ranks.min())} to {int(ranks.max())}; {here.describe()}"
            )
        return _made(_intern(device_type, ranks, mesh_dim_names), backend_override)

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
    def root(self) -> DeviceMesh:
        """The mesh that the calling rank took this sub-mesh from, or the mesh itself.

        Equal cuts of several meshes are one mesh; its root is then that of the latest cut.
        """
        return lineage.root_of(self)

    # ---- the calling rank

    def get_local_rank(self, mesh_dim: Axis | None = None) -> int:
        """Return the caller's position along one axis, own or flattened; optional for a 1-d
        mesh."""
        if self._is_flattened(mesh_dim):
            return self[mesh_dim].get_local_rank()
        return self._own_coordinate()[self._one_axis(mesh_dim, "get_local_rank")]

    def get_group(self, mesh_dim: Axis | None = None) -> ProcessGroup:
        """Return the caller's torch process group along one axis, own or flattened; optional for a
        1-d mesh.

        The group is made on demand: all its members must call this, and no other rank.
        """
        if self._is_flattened(mesh_dim):
            return self[mesh_dim].get_group()
        axis = self._one_axis(mesh_dim, "get_group")
        self._check_real("process group")
        lineage.check_not_aborted(self)
        ranks, name = self.ranks_along([axis]), self.axis_name(axis)
        group: ProcessGroup = world.current().process_group(ranks, name)
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
        here = world.current(start=False)
        if self.root is not self and self not in here.times_made:
            raise MeshError(
                f"abort: expected a mesh that was not cut from another, got {self!r}; call "
                f"mesh.root.abort(), which ends {self.root!r} with all that was cut from it"
            )
        here.abort(lineage.sub_meshes_of(self))

    # ---- other meshes from this one

    def __getitem__(self, names: str | Sequence[str]) -> DeviceMesh:
        """Return the sub-mesh along the named axes that contains the caller.

        Names that `flatten` gave to merged axes work too.
        """
        wanted = tuple(names) if isinstance(names, tuple | list) else (names,)
        if not all(isinstance(name, str) for name in wanted):
            raise also(MeshError, TypeError)(
                f"axis: expected one of {self.axes_shown()}, by name; got {format_value(names)}. "
                "Loops are over mesh.mesh_dim_names, the axes, or mesh.mesh.flatten(), the ranks"
            )
        own = self.mesh_dim_names
        if own is None:
            raise MeshError(f"mesh[{wanted}]: this mesh has no mesh_dim_names; give it names first")
        if wanted == own:
            return self
        if not wanted or len(set(wanted)) != len(wanted):
            raise MeshError(f"mesh[{wanted}]: expected each axis name once, got {wanted}")
        if all(name in own for name in wanted):
            sizes = [self.size(name) for name in wanted]
            # a rank outside of the mesh knows which sub-mesh is meant if there is only one
            outside = self.get_coordinate() is None and math.prod(sizes) == self.size()
            ranks = self.ranks_along(wanted, (0,) * self.ndim if outside else None)
            return self._derive(np.array(ranks, dtype=np.int64).reshape(sizes), wanted)
        self._own_coordinate()
        source, positions = lineage.resolve_names(self, wanted)
        return source._derive(source._ranks.reshape(-1)[positions], wanted)

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
        if flat is not self and flat.get_coordinate() is not None:
            lineage.record_flattened(self, name, flat.ranks_along([name]))
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

    @staticmethod
    def concatenate(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
        """Return the mesh with the axes of several sub-meshes of one mesh that contains the caller.

        Example:
            >>> mesh = DeviceMesh.abstract((2, 2, 4), ("pp", "dp", "tp"))
            >>> DeviceMesh.concatenate([mesh["tp"], mesh["pp"]]).shape
            (4, 2)
        """
        if not isinstance(meshes, list | tuple) or not meshes:
            raise MeshError(f"meshes: expected a list of meshes, got {format_value(meshes)}")
        given = [as_mesh(each) for each in meshes]
        names: list[str] = []
        for each in given:
            if each.mesh_dim_names is None:
                raise MeshError(f"meshes: expected meshes with mesh_dim_names, got {each!r}")
            names += each.mesh_dim_names
        ranks, sources = lineage.joint_ranks(given)
        result = _intern(given[0].device_type, ranks, names, given[0].is_abstract)
        for source in sources:
            lineage.record_cut(result, source)
        return result

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
        root = world.current().root_of_torch_mesh(mesh)
        if root is not mesh:
            ranks = as_ranks(root.mesh)
            lineage.record_cut(
                result, _intern(mesh.device_type, ranks, root.mesh_dim_names, is_abstract=False)
            )
        return result

    def to_torch(self) -> TorchMesh:
        """Return torch's mesh of the same ranks and process groups; all members must call this."""
        self._check_real("torch DeviceMesh")
        result: TorchMesh = world.current().torch_mesh(self)
        return result

    # ---- torch's names for parts of the above, which other packages call

    def _flatten(
        self, mesh_dim_name: str | None = None, backend_override: Any = None
    ) -> DeviceMesh:
        """Merge all axes into one.

        Arguments:
            backend_override: how the process group of the new axis is made: a backend's name, its
                options, or a tuple of both.
        """
        if self.mesh_dim_names is None:
            raise MeshError("_flatten: this mesh has no mesh_dim_names; give it names first")
        backend = world.Backend()
        if backend_override is not None:
            backend = as_backend(backend_override, "backend_override")
        flat = self.flatten(name=mesh_dim_name or None)
        if flat is not self:
            flat._set_backends([backend])
        return flat

    def _unflatten(
        self,
        dim: Axis,
        mesh_sizes: Sequence[int],
        mesh_dim_names: Sequence[str],
        backend_override: Mapping[Any, Any] | None = None,
    ) -> DeviceMesh:
        """Split one axis into several.

        Arguments:
            backend_override: how the process groups of the new axes are made, as for
                `init_device_mesh`; positions count from the first new axis.
        """
        names = as_names(mesh_dim_names, len(as_mesh_shape(mesh_sizes, "mesh_sizes")))
        backends = as_backends(backend_override, names, len(mesh_sizes))
        result = self.unflatten(dim, mesh_sizes, mesh_dim_names)
        result._set_backends(backends, self.axis(dim))
        return result

    @staticmethod
    def _concatenate(device_mesh_list: Sequence[DeviceMesh]) -> DeviceMesh:
        return DeviceMesh.concatenate(device_mesh_list)

    def _get_root_mesh(self) -> DeviceMesh:
        return self.root

    def _get_all_submeshes(self, mesh_dim_name: str) -> list[DeviceMesh]:
        """Return all sub-meshes along an axis, also those that the caller is not in."""
        axis = self.axis(mesh_dim_name)
        rows = np.moveaxis(self._ranks, axis, -1).reshape(-1, self.shape[axis])
        name = [self.axis_name(axis)]
        return [_intern(self.device_type, row.copy(), name, self.is_abstract) for row in rows]

    # ---- as a value

    def __repr__(self) -> str:
        return _format_mesh(self)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name}: a DeviceMesh cannot be changed; make another")

    def __reduce__(self) -> tuple[Any, ...]:
        # Only lists, numbers and strings: torch.load(weights_only=True) allows these.
        ranks = self._ranks.tolist()
        return unpickled, (self.device_type, ranks, self.mesh_dim_names, self.is_abstract)

    def __enter__(self) -> DeviceMesh:
        _mesh_resources.mesh_stack.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _mesh_resources.mesh_stack.pop()

    def __copy__(self) -> DeviceMesh:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceMesh:
        return self

    # ---- helpers

    def _derive(self, ranks: NDArray[np.int64], names: Sequence[str] | None) -> DeviceMesh:
        """Return a mesh that is cut from this one, and record that."""
        result = _intern(self.device_type, ranks, names, self.is_abstract)
        lineage.record_cut(result, self)
        return result

    def _is_flattened(self, axis: Axis | None) -> TypeGuard[str]:
        """Return whether an axis is none of this mesh, but may be one that was flattened."""
        own = self.mesh_dim_names
        return isinstance(axis, str) and own is not None and axis not in own


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    mesh_dim_names: Sequence[str] | None = None,
    *,
    backend_override: Mapping[Any, Any] | None = None,
) -> DeviceMesh:
    """Return a mesh of all ranks of the world, in order.

    Under torchrun this joins the ranks if nothing has done so before.

    Arguments:
        device_type: what the ranks compute on, such as `"cpu"` or `"cuda"`.
        mesh_shape: the size of each axis; the product must be the number of ranks.
        mesh_dim_names: one name per axis.
        backend_override: how the process groups of some axes are made, when they are first needed:
            a dict from axes, by name or position, to a backend's name, its options, or a tuple of
            both. With `"fake"`, `get_group` returns a group that does nothing; shardwise's own
            collectives do not use it.

    Example:
        >>> mesh = init_device_mesh("cpu", (2, 4), ("dp", "tp"))
    """
    sizes = as_mesh_shape(mesh_shape, "mesh_shape")
    size = math.prod(sizes)
    here = world.current()
    if size != here.size:
        raise MeshError(
            f"mesh_shape: expected a product of {here.size}, the number of ranks; "
            f"got {sizes} = {size}; {here.describe()}. DeviceMesh(...) takes some of them"
        )
    ranks = np.arange(size, dtype=np.int64).reshape(sizes)
    return _made(_intern(device_type, ranks, mesh_dim_names), backend_override)


def as_mesh(mesh: DeviceMesh | TorchMesh) -> DeviceMesh:
    """Return the shardwise mesh for a mesh of shardwise or torch; refuse anything else."""
    if isinstance(mesh, DeviceMesh):
        return mesh
    if type(mesh).__name__ == "DeviceMesh" and type(mesh).__module__.startswith("torch."):
        return DeviceMesh.from_torch(mesh)
    raise MeshError(
        f"mesh: expected a DeviceMesh, got {format_value(mesh)} ({type(mesh).__name__})"
    )


class _MeshStack(threading.local):
    """The meshes of the `with` statements that the calling thread is in, as torch's
    `_mesh_resources`."""

    def __init__(self) -> None:
        self.mesh_stack: list[DeviceMesh] = []

    def get_current_mesh(self) -> DeviceMesh:
        """Return the mesh of the innermost `with mesh:`."""
        if not self.mesh_stack:
            raise MeshError(
                "device_mesh: expected a DeviceMesh, or a call within `with mesh:`; got None"
            )
        return self.mesh_stack[-1]

    def get_root_mesh(self, device_mesh: DeviceMesh) -> DeviceMesh:
        """Return `device_mesh.root`."""
        return device_mesh.root


_mesh_resources = _MeshStack()


def mesh_or_current(mesh: DeviceMesh | TorchMesh | None) -> DeviceMesh:
    """Return the given mesh, or that of the innermost `with mesh:`."""
    return _mesh_resources.get_current_mesh() if mesh is None else as_mesh(mesh)


def _made(mesh: DeviceMesh, backend_override: Any) -> DeviceMesh:
    """Record that the calling rank made a mesh, and how its process groups are to be made."""
    backends = as_backends(backend_override, mesh.mesh_dim_names, mesh.ndim)
    lineage.record_made(mesh)
    mesh._set_backends(backends)
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
