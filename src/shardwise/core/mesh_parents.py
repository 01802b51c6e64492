"""The parent of each sub-mesh, and the names of flattened axes.

As in torch, `root["dp_cp"]` finds an axis that was flattened on a sub-mesh of `root`. Meshes are
immutable values, so the calling rank's `World` records parents and flattened names.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from shardwise.core import world
from shardwise.core.errors import MeshError

if TYPE_CHECKING:
    from shardwise.core.mesh import DeviceMesh

Axes = tuple[str, ...]


def root_of(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh at the end of the chain of parents; a mesh without a parent is its own
    root."""
    *_, root = _parents(mesh)
    return root


def record_root(mesh: DeviceMesh, source: DeviceMesh) -> None:
    """Record the root of a sub-mesh. A root has no parent, so there are no cycles."""
    root = root_of(source)
    if mesh is not root:
        world.current(start=False).roots[mesh] = root


def sub_meshes_of(mesh: DeviceMesh) -> list[DeviceMesh]:
    """Return a root mesh, followed by its sub-meshes that the calling rank made and still holds."""
    derived = list(world.current(start=False).roots)
    return [mesh, *(each for each in derived if each is not mesh and root_of(each) is mesh)]


def check_not_aborted(mesh: DeviceMesh) -> None:
    """Refuse a mesh whose process groups this rank has aborted."""
    aborted = world.current(start=False).aborted
    if aborted and (root := root_of(mesh)) in aborted:
        raise MeshError(
            f"{mesh!r} was aborted, and its process groups are gone: call sw.init_device_mesh, or "
            f"DeviceMesh, for {root!r} again, on all of its ranks"
        )


def resolve_names(mesh: DeviceMesh, wanted: Axes) -> tuple[DeviceMesh, list[Axes]]:
    """Find the mesh that knows all the wanted names, and the axes behind each name.

    The mesh found is `mesh` itself or one of its parents. In a parent, only names of flattened axes
    are looked up.
    """
    own = mesh.mesh_dim_names or ()
    flattened: list[str] = []
    for source in _parents(mesh):
        known = {
            name: axes
            for name, axes in _names(source).items()
            if (_has_ranks_of(mesh, name, source, axes) if name in own else axes != (name,))
        }
        if all(isinstance(name, str) and name in known for name in wanted):
            return source, [known[name] for name in wanted]
        flattened += [name for name in known if name not in own]
    unknown = next((name for name in wanted if name not in (*own, *flattened)), wanted)
    also = f" or the flattened {', '.join(flattened)}" if flattened else ""
    raise MeshError(f"axis: expected one of {mesh.axes_shown()}{also}, got {unknown!r}")


def record_flattened(mesh: DeviceMesh, name: str, merged: Axes, flat: DeviceMesh) -> None:
    """Record the name of a flattened axis, so that `root[name]` finds it.

    Arguments:
        mesh: the mesh whose axes were flattened.
        name: the name of the flattened axis.
        merged: the axes of `mesh` that it is made of.
        flat: the mesh that has the flattened axis.
    """
    root = root_of(mesh)
    known = _names(root)
    if flat.get_coordinate() is None or not known.keys() >= {*merged}:
        return
    axes = tuple(chain.from_iterable(known[each] for each in merged))
    if len({*axes}) < len(axes) or not _has_ranks_of(flat, name, root, axes):
        return
    if known.setdefault(name, axes) != axes:
        raise MeshError(
            f"flatten(name): {name!r} already stands for {known[name]} of {root!r}, got {axes}"
        )
    if axes != (name,):
        world.current(start=False).flattened.setdefault(root, {})[name] = axes


def _parents(mesh: DeviceMesh) -> Iterator[DeviceMesh]:
    """Yield the mesh, its parent, and so on up to the root."""
    roots = world.current(start=False).roots
    found: DeviceMesh | None = mesh
    while found is not None:
        yield found
        found = roots.get(found)


def _names(mesh: DeviceMesh) -> dict[str, Axes]:
    """Return the axes behind each name: one for an axis of the mesh, several for a flattened
    one."""
    axes = {name: (name,) for name in mesh.mesh_dim_names or ()}
    return axes | world.current(start=False).flattened.get(mesh, {})


def _has_ranks_of(mesh: DeviceMesh, axis: str, root: DeviceMesh, axes: Axes) -> bool:
    """Return whether an axis of a sub-mesh has the same ranks as these axes of a parent.

    Names alone do not tell: `unflatten` may give a new axis the name of an axis of the root.
    """
    return mesh.ranks_along([axis]) == root.ranks_along(axes)
