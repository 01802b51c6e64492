"""Which meshes belong together: what a mesh was cut from, flattened axes, and joint meshes.

Meshes are values: equal cuts of different meshes are one object, which cannot name one parent. So
the world of the calling rank records all meshes that it cut a mesh from, in which a later cut
changes nothing that an earlier one has said. Questions are answered from ranks: an axis is known in
another mesh by how its ranks step through the list of that mesh's ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardwise.core.errors import MeshError, also
from shardwise.core.rank_grid import Strides, form_a_grid, grid_around, strides_of
from shardwise.core.world import FlattenedAxis, current

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from shardwise.core.mesh import DeviceMesh


# ---- what a mesh was cut from


def record_cut(mesh: DeviceMesh, source: DeviceMesh) -> None:
    """Record that the calling rank cut a mesh from another."""
    here = current(start=False)
    if mesh in sources_of(source):
        return  # a mesh that is put together again; a cycle would keep both alive
    known = here.sources.setdefault(mesh, {})
    known.pop(source, None)
    known[source] = None
    if source in here.aborted:
        here.aborted.add(mesh)
    else:
        here.aborted.discard(mesh)


def record_made(mesh: DeviceMesh) -> None:
    """Record that the calling rank made a mesh: after an abort it gets new process groups."""
    here = current()
    here.times_made[mesh] = here.times_made.get(mesh, 0) + 1
    if here.aborted:
        here.aborted.difference_update(sub_meshes_of(mesh))


def sources_of(mesh: DeviceMesh) -> list[DeviceMesh]:
    """Return the mesh and all that it was cut from, directly or not: near ones first, of these the
    latest."""
    sources = current(start=False).sources
    found = [mesh]
    for each in found:
        found += [source for source in reversed(sources.get(each, ())) if source not in found]
    return found


def root_of(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that the latest cut began with; a mesh that was not cut is its own root."""
    sources = current(start=False).sources
    while mesh in sources:
        mesh = next(reversed(sources[mesh]))
    return mesh


def sub_meshes_of(mesh: DeviceMesh) -> list[DeviceMesh]:
    """Return a mesh, followed by all that the calling rank cut from it and still holds."""
    cut = list(current(start=False).sources)
    return [mesh, *(each for each in cut if each is not mesh and mesh in sources_of(each))]


def check_not_aborted(mesh: DeviceMesh) -> None:
    """Refuse a mesh whose process groups this rank has aborted."""
    if mesh in current(start=False).aborted:
        raise MeshError(
            f"{mesh!r} was aborted, and its process groups are gone: call sw.init_device_mesh, or "
            f"DeviceMesh, for {root_of(mesh)!r} again, on all of its ranks"
        )


# ---- names of flattened axes
#
# As in torch, `root["dp_cp"]` finds an axis that was flattened on a sub-mesh of `root`.


def record_flattened(mesh: DeviceMesh, name: str, ranks: Sequence[int]) -> None:
    """Record an axis that was flattened, so that `source[name]` finds it in all sources of `mesh`.

    Arguments:
        mesh: the mesh whose axes were flattened.
        name: the name of the flattened axis.
        ranks: its ranks, on the calling rank.
    """
    root = root_of(mesh)
    for source in (root, *sources_of(mesh)):  # the root first: it may refuse the name
        strides = _strides_in(source, ranks)
        before = _named_strides(source, name)
        if strides is None:
            continue
        if before is None:
            times_made = current(start=False).times_made.get(source, 0)
            axes = current(start=False).flattened.setdefault(source, {})
            axes[name] = FlattenedAxis(strides, times_made)
        elif before != strides and source is root:
            there = tuple(source.mesh.flatten()[_grid(source, [before]).reshape(-1)].tolist())
            raise MeshError(
                f"flatten(name): {name!r} already stands for the ranks {there} of {root!r}, got "
                f"the ranks {tuple(ranks)}; choose another name"
            )


def resolve_names(
    mesh: DeviceMesh, wanted: tuple[str, ...]
) -> tuple[DeviceMesh, NDArray[np.int64]]:
    """Find axes of a mesh, and axes that were flattened on the meshes it was cut from.

    Returns:
        The mesh that has all of them, and the positions in its list of ranks.
    """
    own = mesh.mesh_dim_names or ()
    flattened: list[str] = []
    for source in sources_of(mesh):
        known = current(start=False).flattened.get(source, {})
        flattened += [name for name in known if name not in (*own, *flattened)]
        axes: list[Strides] = []
        for name in wanted:
            axis = known[name].strides if name in known else None
            if name in own:
                axis = _strides_in(source, mesh.ranks_along([name]))
            if axis is None:
                break
            axes.append(axis)
        else:
            if not form_a_grid(axes, source.size()):
                raise MeshError(f"mesh[{wanted}]: expected different axes, got some that overlap")
            return source, _grid(source, axes)
    unknown = next((name for name in wanted if name not in (*own, *flattened)), wanted)
    more = f" or the flattened {', '.join(flattened)}" if flattened else ""
    raise also(MeshError, KeyError)(
        f"axis: expected one of {mesh.axes_shown()}{more}, got {unknown!r}"
    )


def _named_strides(mesh: DeviceMesh, name: str) -> Strides | None:
    """Return how a named axis of a mesh steps, own or flattened.

    A flattened name counts only until the mesh is made again: it may then stand for other axes, as
    on a new mesh of torch.
    """
    if name in (mesh.mesh_dim_names or ()):
        return _strides_in(mesh, mesh.ranks_along([name]))
    here = current(start=False)
    found = here.flattened.get(mesh, {}).get(name)
    is_current = found is not None and found.times_made == here.times_made.get(mesh, 0)
    return found.strides if found is not None and is_current else None


# ---- joint meshes


def joint_ranks(meshes: Sequence[DeviceMesh]) -> tuple[NDArray[np.int64], list[DeviceMesh]]:
    """Return the ranks of the grid that has the axes of all given meshes, and contains this rank.

    The meshes must have been cut from one mesh, or from meshes that list the same ranks in the same
    order, such as `world.unflatten(...)` twice. The axes must divide that list into grids that do
    not overlap. Both are the same on all ranks, which therefore find the same grids.

    Returns:
        The ranks, and the meshes that they were found in.
    """
    kinds = {(each.device_type, each.is_abstract) for each in meshes}
    orders = set.intersection(*({_order(source) for source in sources_of(m)} for m in meshes))
    common = [source for source in sources_of(meshes[0]) if _order(source) in orders]
    if len(kinds) > 1 or not common:
        raise MeshError(
            f"no mesh has both {_joined(meshes)}: expected parts of one mesh, such as mesh['dp'] "
            "and mesh['tp']; they were cut from meshes of different ranks"
        )
    grids: dict[bytes, NDArray[np.int64]] = {}
    found = []
    for source in common:
        grid = _joint_grid(source, meshes)
        if grid is not None:
            grids[grid.tobytes()] = grid
            found.append(source)
    if not grids:
        raise MeshError(
            f"no mesh has both {_joined(meshes)}: their ranks overlap, or divide {common[-1]!r} "
            "differently; expected parts of one mesh that have no axis in common, such as "
            "mesh['dp'] and mesh['tp']"
        )
    if len(grids) > 1:
        raise MeshError(
            f"several meshes have both {_joined(meshes)}, with different ranks: {found}; give the "
            "axes of one of them other names"
        )
    (grid,) = grids.values()
    return grid, found


def _joint_grid(source: DeviceMesh, meshes: Sequence[DeviceMesh]) -> NDArray[np.int64] | None:
    """Return the ranks of the joint grid within one mesh; None if there they do not form one."""
    axes: list[Strides] = []
    for mesh in meshes:
        for axis in range(mesh.ndim):
            strides = _strides_in(source, mesh.ranks_along([axis]))
            if strides is None:
                return None
            axes.append(strides)
    if not form_a_grid(axes, source.size()):
        return None
    ranks = source._ranks.reshape(-1)[_grid(source, axes)]
    place = [each for mesh in meshes for each in mesh.get_coordinate() or ()]
    first = 0
    for mesh in meshes:  # a mesh may be another grid of its ranks than the axes of `source` give
        index: list[Any] = list(place)
        index[first : first + mesh.ndim] = [slice(None)] * mesh.ndim
        if (ranks[tuple(index)] != mesh._ranks).any():
            return None
        first += mesh.ndim
    return ranks


def _order(mesh: DeviceMesh) -> object:
    """Return a value that is equal for meshes with the same ranks in the same order."""
    counts = mesh._counts_from
    return mesh._ranks.tobytes() if counts is None else (counts, mesh.size())


def _strides_in(mesh: DeviceMesh, ranks: Sequence[int]) -> Strides | None:
    """Return how ranks step through those of a mesh; None if they do not, or are elsewhere."""
    positions = mesh._positions_of(ranks)
    return None if positions is None else strides_of(positions)


def _grid(mesh: DeviceMesh, axes: Sequence[Strides]) -> NDArray[np.int64]:
    """Return the positions in a mesh of the grid of these axes that contains the calling rank."""
    position = mesh._positions_of([mesh.get_rank()])
    assert position is not None, "this rank is in its mesh"
    return grid_around(int(position[0]), axes)


def _joined(meshes: Sequence[DeviceMesh]) -> str:
    return " and ".join(map(repr, meshes))
