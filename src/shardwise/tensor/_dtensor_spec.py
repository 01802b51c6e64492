"""`torch.distributed.tensor._dtensor_spec`."""

from shardwise.dtensor.dtensor_spec import DTensorSpec, ShardOrder, ShardOrderEntry, TensorMeta

__all__ = ["DTensorSpec", "ShardOrder", "ShardOrderEntry", "TensorMeta"]
