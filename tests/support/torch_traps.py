"""Programs that run with either import, shardwise or torch: for what torch gets wrong."""

import torch

import shardwise as sw

RANKS = 4


def library(name):
    """What a program imports: `lib.DTensor`, `lib.Shard`, ... of either."""
    if name == "shardwise":
        return sw
    import torch.distributed.tensor

    return torch.distributed.tensor


def made(lib, shape=(RANKS,)):
    return lib.init_device_mesh("cpu", shape)


def split(lib, tensor, mesh, *placements):
    return lib.distribute_tensor(tensor, mesh, list(placements))


def values(*shape):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator)


def outcome(trap, name):
    """Whether a program is right on this rank; every rank takes part in the verdict."""
    try:
        trap(library(name))
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return ""
