"""`torch.distributed.tensor._utils`."""

from shardwise.api.torch_specs import (
    compute_global_tensor_info,
    compute_global_tensor_shape,
    compute_local_shape_and_global_offset,
    compute_local_stride,
    compute_local_tensor_info,
    normalize_to_torch_size,
    try_find_mesh_from_args,
)
from shardwise.dtensor.state import ExplicitRedistributionContext

__all__ = [
    "ExplicitRedistributionContext",
    "compute_global_tensor_info",
    "compute_global_tensor_shape",
    "compute_local_shape_and_global_offset",
    "compute_local_stride",
    "compute_local_tensor_info",
    "normalize_to_torch_size",
    "try_find_mesh_from_args",
]
