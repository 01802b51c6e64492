"""Meshes as text, which can be pasted back where that makes the same mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise import world

if TYPE_CHECKING:
    from shardwise.mesh import DeviceMesh

_MOST_RANKS = 64


def shown(mesh: DeviceMesh) -> str:
    """The call that gives the mesh, here; `<...>` if none does."""
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
