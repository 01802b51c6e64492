"""Memory of a sharded model, counted in two ways: by its own counters, and over all tensors that
Python knows.
"""

import gc
from contextlib import suppress

import torch

from shardwise.dtensor.tensor import as_local
from shardwise.fsdp import fully_shard
from support.fsdp_models import Net

WIDTH, HIDDEN, LAYERS = 32, 2560, 6
BLOCK = (2 * WIDTH * HIDDEN) * 8
"""The bytes of a block, nearly; it is too large to travel with its neighbours."""


def live_bytes():
    """Return the memory of all tensors."""
    gc.collect()
    found = {}
    with as_local():
        for each in gc.get_objects():
            if issubclass(type(each), torch.Tensor):
                with suppress(NotImplementedError):  # a sparse one, that other tests keep
                    storage = each.untyped_storage()
                    if storage.device.type != "meta":  # as of those that torch keeps of programs
                        found[storage._cdata] = storage.nbytes()
    return sum(found.values())


class Counted:
    """A model in training, and the memory it takes at each point."""

    def __init__(self, mesh, reshard=True):
        torch.manual_seed(0)
        self.mesh = mesh
        self.model = Net(7, WIDTH, HIDDEN, layers=LAYERS).double()
        self.whole = sum(each.nbytes for each in self.model.parameters())
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
            block.up.register_forward_hook(self.count)
            block.norm.register_full_backward_hook(self.count)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.peak = 0

    @property
    def unit_set(self):
        return self.model._fsdp_group.schedule.unit_set

    @property
    def gathered(self):
        return sum(unit.gathered_bytes for unit in self.unit_set.units)

    def count(self, *ignored):
        self.peak = max(self.peak, self.gathered)

    def step(self):
        tokens = torch.randint(7, (4, 5))
        self.model(tokens).square().mean().backward()
        assert self.gathered == 0
        self.optimizer.step()
        self.optimizer.zero_grad()
        assert self.gathered == 0

    def beside_shards(self, before, ranks):
        """Return the memory beyond the start, the shards and the buffers kept for the next step.

        It is a fraction of all parameters, for a process that runs `ranks` ranks.
        """
        shards = sum(row.nbytes for group in self.unit_set.groups for row in group.rows)
        kept = shards + self.unit_set.pool.nbytes
        return (live_bytes() - before - ranks * kept) / self.whole
