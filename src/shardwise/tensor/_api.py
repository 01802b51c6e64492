"""`torch.distributed.tensor._api`."""

from shardwise.api.distribute import distribute_module, distribute_tensor
from shardwise.api.factories import empty, full, linspace, logspace, ones, rand, randn, zeros
from shardwise.dtensor.tensor import DTensor

from_local = DTensor.from_local

__all__ = [
    "DTensor",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "from_local",
    "full",
    "linspace",
    "logspace",
    "ones",
    "rand",
    "randn",
    "zeros",
]
