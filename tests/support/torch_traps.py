"""Run a program with either import, shardwise or torch: for what torch gets wrong."""

import torch

import shardwise as sw

RANKS = 4


def library(name):
    """Return the module that a program imports, with `DTensor`, `Shard`, ..."""
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
    """Run a program on this rank; return its error, or an empty text."""
    try:
        trap(library(name))
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return ""
