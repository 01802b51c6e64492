"""torch's module paths: `torch.distributed.tensor` with its submodules is `shardwise.tensor` here.

Nothing is defined in this package. Each module re-exports what torch's module of the same name has
and shardwise has too, so that a program moves over by a change of its imports
(docs/moving-over.md).
"""

import importlib

from shardwise.api.distribute import distribute_module, distribute_tensor
from shardwise.api.factories import empty, full, linspace, logspace, ones, rand, randn, zeros
from shardwise.core.mesh import DeviceMesh, init_device_mesh
from shardwise.core.placement import Partial, Placement, Replicate, Shard, _StridedShard
from shardwise.dtensor.tensor import DTensor

__all__ = [
    "DTensor",
    "DeviceMesh",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "_StridedShard",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "full",
    "init_device_mesh",
    "linspace",
    "logspace",
    "ones",
    "rand",
    "randn",
    "zeros",
]

_SUBMODULES = {
    *("_api", "_dtensor_spec", "_random", "_redistribute", "_utils", "debug", "device_mesh"),
    *("experimental", "parallel", "placement_types"),
}


def __getattr__(name: str) -> object:
    """Import submodules when they are used, as `torch.distributed.tensor._random` is there."""
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
