"""The names of torch.distributed._shard.checkpoint: those of torch.distributed.checkpoint."""

from torch.distributed.checkpoint import *  # noqa: F403 - as torch's own module does
