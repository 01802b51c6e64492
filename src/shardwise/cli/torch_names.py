"""Names of torch without a counterpart, and what to write instead."""

INSTEAD: dict[str, str] = {
    "torch.distributed.fsdp.FullyShardedDataParallel": "call fully_shard(module) of shardwise.fsdp",
    "torch.distributed.fsdp.wrap": "call fully_shard on each layer, then on the model",
}

DIFFERENT: dict[str, str] = {}
