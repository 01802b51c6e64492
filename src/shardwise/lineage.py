"""What a mesh was cut from, and the names that flattened axes were given.

torch finds a flattened axis by its name on the mesh it was cut from (`root["dp_cp"]`). Meshes are
values and remember nothing, so the calling rank's world does.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from shardwise import world
from shardwise.errors import MeshError

if TYPE_CHECKING:
    from shardwise.mesh import DeviceMesh

Axes = tuple[str, ...]


def root_of(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that it was cut from in the end, or itself."""
    *_, root = _lineage(mesh)
    return root


def record(mesh: DeviceMesh, source: DeviceMesh) -> None:
    """Note what a mesh was cut from. Roots have no root, so there is never a cycle of them."""
    root = root_of(source)
    if mesh is not root:
        world.current(start=False).roots[mesh] = root


def cut_from(mesh: DeviceMesh) -> list[DeviceMesh]:
    """A root mesh, followed by all that the calling rank cut from it and still has."""
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


def understand(mesh: DeviceMesh, wanted: Axes) -> tuple[DeviceMesh, list[Axes]]:
    """A mesh that knows all these names, and the axes of it that each stands for.

    It is `mesh` or one it was cut from, of which only the flattened names count.
    """
    own = mesh.mesh_dim_names or ()
    flattened: list[str] = []
    for source in _lineage(mesh):
        known = {
            name: axes
            for name, axes in _names(source).items()
            if (_stands_for(mesh, name, source, axes) if name in own else axes != (name,))
        }
        if all(isinstance(name, str) and name in known for name in wanted):
            return source, [known[name] for name in wanted]
        flattened += [name for name in known if name not in own]
    unknown = next((name for name in wanted if name not in (*own, *flattened)), wanted)
    also = f" or the flattened {', '.join(flattened)}" if flattened else ""
    raise MeshError(f"axis: expected one of {mesh.axes_shown()}{also}, got {unknown!r}")


def remember(mesh: DeviceMesh, name: str, merged: Axes, flat: DeviceMesh) -> None:
    """Let `root[name]` find an axis of `flat` that axes of `mesh` were merged into."""
    root = root_of(mesh)
    known = _names(root)
    if flat.get_coordinate() is None or not known.keys() >= {*merged}:
        return
    axes = tuple(chain.from_iterable(known[each] for each in merged))
    if len({*axes}) < len(axes) or not _stands_for(flat, name, root, axes):
        return
    if known.setdefault(name, axes) != axes:
        raise MeshError(
            f"flatten(name): {name!r} already stands for {known[name]} of {root!r}, got {axes}"
        )
    if axes != (name,):
        world.current(start=False).flattened.setdefault(root, {})[name] = axes


def _lineage(mesh: DeviceMesh) -> Iterator[DeviceMesh]:
    """The mesh, the one it was cut from, and so on up to the root."""
    roots = world.current(start=False).roots
    found: DeviceMesh | None = mesh
    while found is not None:
        yield found
        found = roots.get(found)


def _names(mesh: DeviceMesh) -> dict[str, Axes]:
    """The axes behind each name: the axes themselves, and what was flattened."""
    axes = {name: (name,) for name in mesh.mesh_dim_names or ()}
    return axes | world.current(start=False).flattened.get(mesh, {})


def _stands_for(mesh: DeviceMesh, axis: str, root: DeviceMesh, axes: Axes) -> bool:
    """Whether an axis is these ones of a mesh it was cut from.

    Names do not tell: `unflatten` may give the name of an axis of the root to another.
    """
    return mesh.ranks_along([axis]) == root.ranks_along(axes)
