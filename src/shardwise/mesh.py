"""DeviceMesh: the ranks of a program, arranged in a grid with named axes.

A mesh is a value: immutable, interned (equal meshes are one object) and free to make. Nothing is
communicated by making one; process groups appear when a collective first needs them. Only the
questions "which rank am I?", "which process group is this?" and "what was this cut from?" look at
the calling rank's world.
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

from shardwise import lineage, mesh_text, world
from shardwise.checks import as_device_type, as_int, as_mesh_shape, as_ranks, check_names
from shardwise.errors import MeshError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

Axis = int | str
"""An axis of a mesh, by position or by name."""

_interned: WeakValueDictionary[tuple[Any, ...], DeviceMesh] = WeakValueDictionary()
_interning = threading.Lock()


class DeviceMesh:
    """Ranks in a grid.

    Arguments:
        device_type: what the ranks compute on, such as `"cpu"` or `"cuda"`.
        mesh: the global ranks: a tensor, array or nested list with one dimension per axis.
        mesh_dim_names: one name per axis.
        preserve_rank_order: of torch 2.15, and without effect: ranks always stand in the process
            group of an axis in the order of the mesh, which torch sorts by default.

    Example:
        >>> mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        >>> mesh["tp"].size()
        2
    """

    __slots__ = (
        "__weakref__",
        "_coordinates",
        "_counts_from",
        "_ranks",
        "device_type",
        "is_abstract",
        "mesh_dim_names",
        "shape",
    )

    device_type: str
    mesh_dim_names: tuple[str, ...] | None
    shape: tuple[int, ...]
    is_abstract: bool
    _ranks: NDArray[np.int64]
    _counts_from: int | None
    """The first rank, if all the others follow it one by one."""
    _coordinates: dict[int, tuple[int, ...] | None]

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
        return _made(_intern(device_type, ranks, mesh_dim_names))

    @staticmethod
    def abstract(
        shape: Sequence[int], names: Sequence[str] | None = None, device_type: str = "cpu"
    ) -> DeviceMesh:
        """A mesh with no ranks behind it: enough to lay out, plan, cost and dry-run.

        Asked for "its" rank, it answers 0; `shardwise.communicator(mesh, axes, rank=r)` looks at
        it with the eyes of another.
        """
        sizes = as_mesh_shape(shape, "shape")
        ranks = np.arange(math.prod(sizes), dtype=np.int64).reshape(sizes)
        return _intern(device_type, ranks, names, is_abstract=True)

    # ---- what it is

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def mesh(self) -> torch.Tensor:
        """The global ranks as an int32 tensor with one dimension per axis."""
        return torch.from_numpy(self._ranks.astype(np.int32))

    @property
    def root(self) -> DeviceMesh:
        """The mesh that the calling rank cut this one from, or itself."""
        return lineage.root_of(self)

    def size(self, mesh_dim: Axis | None = None) -> int:
        """The number of ranks, of the whole mesh or along one axis."""
        return math.prod(self.shape) if mesh_dim is None else self.shape[self.axis(mesh_dim)]

    def axis(self, axis: Axis) -> int:
        """The position of an axis given by name or position."""
        if isinstance(axis, str):
            if self.mesh_dim_names is not None and axis in self.mesh_dim_names:
                return self.mesh_dim_names.index(axis)
        elif (position := as_int(axis)) is not None and -self.ndim <= position < self.ndim:
            return position % self.ndim
        raise MeshError(f"axis: expected one of {self.axes_shown()}, got {axis!r}")

    def axis_name(self, axis: int) -> str:
        """The name of an axis; its position in digits if the mesh has no names."""
        return str(axis) if self.mesh_dim_names is None else self.mesh_dim_names[axis]

    def has(self, coordinate: Sequence[int]) -> bool:
        """Whether this is a coordinate of the mesh: one position per axis, counted from 0."""
        # Planners ask this for each peer, so it is a loop and tries the quick test, tuple, first.
        if not isinstance(coordinate, tuple | Sequence) or len(coordinate) != len(self.shape):
            return False
        for place, size in zip(coordinate, self.shape, strict=True):
            index = as_int(place)
            if index is None or not 0 <= index < size:
                return False
        return True

    def coordinate_of(self, rank: int) -> tuple[int, ...] | None:
        """Where a global rank stands in the mesh, or None if it is not in it."""
        if self._counts_from is not None:
            index = rank - self._counts_from
            inside = 0 <= index < self._ranks.size
            return tuple(map(int, np.unravel_index(index, self.shape))) if inside else None
        found = np.argwhere(self._ranks == rank)
        return tuple(map(int, found[0])) if len(found) else None

    def rank_at(self, coordinate: Sequence[int]) -> int:
        """The global rank that stands at a coordinate."""
        self._check(coordinate)
        return int(self._ranks[tuple(coordinate)])

    def ranks_along(
        self, axes: Sequence[Axis], coordinate: Sequence[int] | None = None
    ) -> tuple[int, ...]:
        """The ranks that differ from `coordinate` (default: this rank) only along `axes`.

        They are ordered with the first of `axes` varying slowest.
        """
        positions = [self.axis(axis) for axis in axes]
        if len(set(positions)) != len(positions):
            raise MeshError(f"axes: expected each axis once, got {tuple(axes)}")
        if coordinate is None:
            coordinate = self._own_coordinate()
        else:
            self._check(coordinate)
        index = tuple(
            slice(None) if axis in positions else place for axis, place in enumerate(coordinate)
        )
        block = self._ranks[index]
        ascending = sorted(positions)
        order = [ascending.index(axis) for axis in positions]
        return tuple(map(int, block.transpose(order).flat))

    def axes_shown(self) -> str:
        """The names and sizes of the axes, for messages: `(dp=2, tp=4)`."""
        names = self.mesh_dim_names or range(self.ndim)
        pairs = zip(names, self.shape, strict=True)
        return f"({', '.join(f'{name}={size}' for name, size in pairs)})"

    # ---- the calling rank

    def get_rank(self) -> int:
        """The global rank of the caller (0 on an abstract mesh)."""
        return 0 if self.is_abstract else world.current().rank

    def get_coordinate(self) -> tuple[int, ...] | None:
        """Where the caller stands, or None if it is not in the mesh."""
        rank = self.get_rank()
        if rank not in self._coordinates:
            self._coordinates[rank] = self.coordinate_of(rank)
        return self._coordinates[rank]

    def get_local_rank(self, mesh_dim: Axis | None = None) -> int:
        """The caller's position along one axis (which a 1-d mesh need not name)."""
        return self._own_coordinate()[self._one_axis(mesh_dim, "get_local_rank")]

    def get_group(self, mesh_dim: Axis | None = None) -> ProcessGroup:
        """The torch process group of the caller along one axis (which a 1-d mesh need not name).

        Made on demand by its members only; all of them must ask.
        """
        axis = self._one_axis(mesh_dim, "get_group")
        return self._group((axis,))

    def get_all_groups(self) -> list[ProcessGroup]:
        """The torch process groups of the caller, one per axis."""
        return [self._group((axis,)) for axis in range(self.ndim)]

    def abort(self) -> None:
        """End all communication over the mesh and the meshes cut from it; a root mesh only.

        Ranks that wait for this one, and this rank's collectives under way, fail rather than wait
        (with gloo these fail only when their peer does, or at their timeout). The process groups of
        all axes and channels are removed from torch.distributed; the default group is one of them
        if an axis spans all ranks, and `init_process_group` must then be called again. Whoever
        uses the mesh afterwards is told so, until its ranks all make it again.
        """
        self._check_real("process group to abort")
        if self.root is not self:
            raise MeshError(
                f"abort: expected a mesh that was not cut from another, got {self!r}; call "
                f"mesh.root.abort(), which ends {self.root!r} with all that was cut from it"
            )
        world.current(start=False).abort(lineage.cut_from(self))

    # ---- other meshes from this one

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """The sub-mesh along the named axes that contains the caller.

        Names given to `flatten` earlier are understood too, alone and among others.
        """
        wanted = tuple(names) if isinstance(names, tuple | list) else (names,)
        if self.mesh_dim_names is None:
            raise MeshError(f"mesh[{wanted}]: this mesh has no mesh_dim_names; give it names first")
        if wanted == self.mesh_dim_names:
            return self
        mesh, merged = lineage.understand(self, wanted)
        axes = tuple(chain.from_iterable(merged))
        if not axes or len(set(axes)) != len(axes):
            raise MeshError(f"mesh[{wanted}]: expected each axis name once, got {axes}")
        ranks = np.array(mesh.ranks_along(axes), dtype=np.int64)
        sizes = [math.prod(map(mesh.size, each)) for each in merged]
        return mesh._derive(ranks.reshape(sizes), wanted)

    def along(self, axes: Sequence[int], coordinate: Sequence[int]) -> DeviceMesh:
        """The sub-mesh along axes, given by position, that contains a coordinate."""
        ranks = np.array(self.ranks_along(axes, coordinate), dtype=np.int64)
        named = self.mesh_dim_names is not None
        names = [self.axis_name(axis) for axis in axes] if named else None
        sizes = [self.shape[axis] for axis in axes]
        return _intern(self.device_type, ranks.reshape(sizes), names, self.is_abstract)

    def flatten(self, *axes: Axis, name: str | None = None) -> DeviceMesh:
        """Merge several adjacent axes (default: all) into one, the first varying slowest.

        Arguments:
            axes: which to merge, in the order of the mesh.
            name: the merged axis (default: their names joined by `_`). `root[name]` finds it again.
        """
        merged = [self.axis(axis) for axis in axes] or list(range(self.ndim))
        if any(after != before + 1 for before, after in pairwise(merged)):
            shown = ", ".join(map(repr, axes))
            raise MeshError(
                f"flatten({shown}): expected adjacent axes in mesh order, of {self.axes_shown()};"
                " bring them together first, with mesh[names]"
            )
        first, end = merged[0], merged[-1] + 1
        shape = (*self.shape[:first], math.prod(self.shape[first:end]), *self.shape[end:])
        names = self.mesh_dim_names
        if names is None:
            if name is not None:
                raise MeshError(f"flatten(name={name!r}): this mesh has no mesh_dim_names")
            return self._derive(self._ranks.reshape(shape), None)
        name = name or "_".join(names[first:end])
        flat = self._derive(self._ranks.reshape(shape), (*names[:first], name, *names[end:]))
        lineage.remember(self, name, names[first:end], flat)
        return flat

    def unflatten(
        self, axis: Axis, sizes: Sequence[int], names: Sequence[str] | None = None
    ) -> DeviceMesh:
        """Cut one axis into several of the given sizes, the first varying slowest."""
        position = self.axis(axis)
        sizes = as_mesh_shape(sizes, "unflatten(sizes)")
        if math.prod(sizes) != self.shape[position]:
            raise MeshError(
                f"unflatten(sizes): expected a product of {self.shape[position]}, the size of axis "
                f"{axis!r}; got {sizes}"
            )
        if (names is None) != (self.mesh_dim_names is None):
            raise MeshError("unflatten(names): expected names exactly if the mesh has names")
        shape = (*self.shape[:position], *sizes, *self.shape[position + 1 :])
        if self.mesh_dim_names is None or names is None:
            return self._derive(self._ranks.reshape(shape), None)
        old = self.mesh_dim_names
        return self._derive(
            self._ranks.reshape(shape), (*old[:position], *names, *old[position + 1 :])
        )

    def _flatten(self, mesh_dim_name: str | None = None) -> DeviceMesh:
        """torch's name for `flatten` of all axes."""
        return self.flatten(name=mesh_dim_name)

    def _unflatten(
        self, dim: Axis, mesh_sizes: Sequence[int], mesh_dim_names: Sequence[str]
    ) -> DeviceMesh:
        """torch's name for `unflatten`."""
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
        """A mesh over process groups that exist already, one group per axis; all members call it.

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
        """The same mesh as a shardwise value, over the process groups that torch made for it.

        All its members call it, so that all of them use those groups.
        """
        groups = mesh.get_all_groups() if mesh.get_coordinate() is not None else []
        result = DeviceMesh(mesh.device_type, mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)
        for group in groups:
            world.current().adopt(group)
        return result

    def to_torch(self) -> TorchMesh:
        """The same mesh as torch's, over the same process groups; every member must call it."""
        self._check_real("torch DeviceMesh")
        result: TorchMesh = world.current().torch_mesh(self)
        return result

    # ---- as a value

    def __repr__(self) -> str:
        return mesh_text.shown(self)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name}: a DeviceMesh cannot be changed; make another")

    def __reduce__(self) -> tuple[Any, ...]:
        # of nothing but lists and numbers, which torch.load(weights_only=True) allows
        ranks = self._ranks.tolist()
        return unpickled, (self.device_type, ranks, self.mesh_dim_names, self.is_abstract)

    def __copy__(self) -> DeviceMesh:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceMesh:
        return self

    # ---- inside

    def _derive(self, ranks: NDArray[np.int64], names: Sequence[str] | None) -> DeviceMesh:
        """A mesh cut from this one."""
        result = _intern(self.device_type, ranks, names, self.is_abstract)
        lineage.record(result, self)
        return result

    def _check(self, coordinate: Sequence[int]) -> None:
        if not self.has(coordinate):
            raise MeshError(f"coordinate: expected one within {self.shape}, got {coordinate!r}")

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

    def _group(self, axes: tuple[int, ...]) -> ProcessGroup:
        self._check_real("process group")
        lineage.check_not_aborted(self)
        group: ProcessGroup = world.current().process_group(self.ranks_along(axes))
        return group


def init_device_mesh(
    device_type: str, mesh_shape: Sequence[int], mesh_dim_names: Sequence[str] | None = None
) -> DeviceMesh:
    """A mesh of all ranks of the world, in order.

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
    return _made(_intern(device_type, ranks, mesh_dim_names))


def as_mesh(mesh: DeviceMesh | TorchMesh) -> DeviceMesh:
    """What every function that takes a mesh calls first: torch's meshes are welcome too."""
    if isinstance(mesh, DeviceMesh):
        return mesh
    if type(mesh).__name__ == "DeviceMesh" and type(mesh).__module__.startswith("torch."):
        return DeviceMesh.from_torch(mesh)
    raise MeshError(f"mesh: expected a DeviceMesh, got {mesh!r} ({type(mesh).__name__})")


def _made(mesh: DeviceMesh) -> DeviceMesh:
    """A mesh that the calling rank makes; one that it had aborted gets new process groups."""
    world.current().aborted.discard(mesh)
    return mesh


def unpickled(
    device_type: str, ranks: Any, names: tuple[str, ...] | None, is_abstract: bool
) -> DeviceMesh:
    """A mesh from its pickle."""
    return _intern(device_type, np.array(ranks, dtype=np.int64), names, is_abstract)


def _intern(
    device_type: str,
    ranks: NDArray[np.int64],
    names: Sequence[str] | None,
    is_abstract: bool = False,
) -> DeviceMesh:
    """The one mesh with these properties. Checks all that does not depend on the world."""
    if isinstance(names, str):
        raise MeshError(f"mesh_dim_names: expected a tuple such as ('dp', 'tp'), got {names!r}")
    named = None if names is None else tuple(names)
    key = (as_device_type(device_type), ranks.shape, ranks.tobytes(), named, is_abstract)
    with _interning:
        found = _interned.get(key)
        if found is None:
            check_names(named, ranks.ndim)
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
