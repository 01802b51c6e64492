"""`torch.distributed.tensor._random`."""

from shardwise.random.seed_check import is_rng_supported_mesh, manual_seed

__all__ = ["is_rng_supported_mesh", "manual_seed"]
