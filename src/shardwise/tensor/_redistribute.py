"""`torch.distributed.tensor._redistribute`."""

from shardwise.api.torch_specs import (
    disable_redistribute_transform_optimization,
    redistribute_local_tensor,
    use_min_cost_redistribution_plan,
)

__all__ = [
    "disable_redistribute_transform_optimization",
    "redistribute_local_tensor",
    "use_min_cost_redistribution_plan",
]
