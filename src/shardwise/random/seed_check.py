"""Checks that torch's default generators are in the same state on all ranks.

Otherwise the shards of a random tensor do not fit together. The states are compared when a mesh is
made (`watch`), and when the user calls `check_random_state`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from shardwise.core import world
from shardwise.core.errors import ShardwiseError
from shardwise.core.mesh import DeviceMesh, as_mesh
from shardwise.core.mesh import init_device_mesh as mesh_of_all_ranks
from shardwise.dtensor.local_shards import differing_ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh


class RandomStateError(ShardwiseError, RuntimeError):
    """torch's default generators are in different states on ranks that must agree."""


_suspects: WeakKeyDictionary[world.World, WeakKeyDictionary[DeviceMesh, bool]]
_suspects = WeakKeyDictionary()
"""For each world its meshes: True if the states of their ranks differed when last compared."""


def init_device_mesh(
    device_type: str, mesh_shape: Sequence[int], mesh_dim_names: Sequence[str] | None = None
) -> DeviceMesh:
    """Make a mesh of all ranks of the world, in order; all of them call this.

    Under torchrun this starts the process group if the program has not. The random states of the
    ranks are compared: if they differ, and still do when a random operator runs on the mesh, that
    operator fails.

    Arguments:
        device_type: the device that the ranks compute on, such as `"cpu"` or `"cuda"`.
        mesh_shape: the size of each axis; the product must be the number of ranks.
        mesh_dim_names: one name per axis.

    Example:
        >>> mesh = init_device_mesh("cpu", (2, 4), ("dp", "tp"))
    """
    return watch(mesh_of_all_ranks(device_type, mesh_shape, mesh_dim_names))


def check_random_state(device_mesh: DeviceMesh | TorchMesh) -> None:
    """Check that torch's default generator is in the same state on all ranks of a mesh.

    Costs an all_gather of 8 bytes per rank; all ranks of the mesh must call it.

    Raises:
        RandomStateError: the states of some ranks differ; it names them.
    """
    mesh = as_mesh(device_mesh)
    problem = _divergence(mesh)
    if problem:
        raise RandomStateError(problem)


def watch(mesh: DeviceMesh) -> DeviceMesh:
    """Compare the generators of a new mesh's ranks, all of which call this; return the mesh.

    A difference is no error yet: torch seeds every process differently, and the program may seed
    all of them alike later, or draw nothing. Every rank then knows that the first random operator
    on the mesh must compare again, and fail.
    """
    if mesh.is_abstract or mesh.get_coordinate() is None:
        return mesh
    if _divergence(mesh):
        _suspects.setdefault(world.current(), WeakKeyDictionary())[mesh] = True
    elif (known := _suspects.get(world.current())) is not None:
        known[mesh] = False
    return mesh


def check_if_suspect(mesh: DeviceMesh) -> None:
    """Compare again, if the ranks of this mesh (or of its root mesh) differed before.

    All ranks know that they did, so all of them take part.
    """
    known = _suspects.get(world.current()) if _suspects else None
    if known is None or mesh.is_abstract:
        return
    if known.get(mesh, known.get(mesh.root, False)):
        check_random_state(mesh)
        known[mesh] = False


def _divergence(mesh: DeviceMesh) -> str:
    """Return a message about the ranks that differ; empty if they agree."""
    others, same = differing_ranks(mesh, torch.get_rng_state().numpy())
    if not others:
        return ""
    return (
        f"random state: torch's default generator on ranks {others} of {mesh!r} is in another "
        f"state than on ranks {same}, so random tensors would not fit together; call "
        "torch.manual_seed with the same seed on every rank, and draw plain random tensors on all "
        "ranks alike (or with a torch.Generator of their own)"
    )
