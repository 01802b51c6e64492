"""The names of torch.distributed._shard._utils."""

from shardwise.sharded.metadata import ShardMetadata, narrow_tensor, narrow_tensor_by_index

__all__ = ["ShardMetadata", "narrow_tensor", "narrow_tensor_by_index"]
