"""What a sharded model takes, counted in two ways: by its own books, and by looking at every tensor
that Python knows."""

import gc
from contextlib import suppress

import torch
from fsdp_models import Net

from shardwise.fsdp import fully_shard
from shardwise.tensor import as_local

WIDTH, HIDDEN, LAYERS = 32, 2560, 6
BLOCK = (2 * WIDTH * HIDDEN) * 8
"""The bytes of a block, nearly; it is too large to travel with its neighbours."""


def live_bytes():
    """The memory of all tensors."""
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
    """A model that is trained, and what it takes on the way."""

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
        """What is alive in this process, where so many ranks run, beyond what was before, shards
        and the buffers that are kept for the next step; as a part of all parameters."""
        buffers = {id(unit.flat): unit.flat for unit in self.unit_set.units}
        shards = sum(flat.nbytes for flat in buffers.values())
        kept = shards + self.unit_set.pool.nbytes
        return (live_bytes() - before - ranks * kept) / self.whole
