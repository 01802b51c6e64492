"""`torch.distributed.tensor.placement_types`."""

from shardwise.core.placement import Partial, Placement, Replicate, Shard, _StridedShard

_Partial = Partial

__all__ = ["Partial", "Placement", "Replicate", "Shard", "_Partial", "_StridedShard"]
