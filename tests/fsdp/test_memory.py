"""Whole parameters live only while they are needed: counted."""

import pytest
from support.fsdp_memory import BLOCK, LAYERS, Counted, live_bytes

import shardwise as sw

RANKS = 2


def on_ranks(run):
    return sw.simulate(lambda: run(sw.init_device_mesh("cpu", (RANKS,), ("dp",))), RANKS)


@pytest.mark.sampled(every=2)
@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("reshard", [True, False])
def test_after_every_step_nothing_is_alive_but_shards_and_a_few_buffers(reshard):
    before = live_bytes()

    def run(mesh):
        counted = Counted(mesh, reshard)
        for _ in range(3):
            counted.step()
            sw.communicator(mesh).barrier()  # all ranks are of this process
            if mesh.get_rank() == 0:
                assert counted.beside_shards(before, RANKS) < 0.01
            sw.communicator(mesh).barrier()
        assert counted.unit_set.pool.nbytes < 4 * BLOCK

    on_ranks(run)


def test_the_count_finds_whole_parameters():
    before = live_bytes()

    def run(mesh):
        counted = Counted(mesh)
        counted.step()
        for block in counted.model.blocks:
            block.unshard()
        sw.communicator(mesh).barrier()
        found = counted.beside_shards(before, RANKS) if mesh.get_rank() == 0 else RANKS
        sw.communicator(mesh).barrier()
        return found

    assert min(on_ranks(run)) > 0.9 * RANKS


@pytest.mark.parametrize(("reshard", "blocks"), [(True, 2), (False, LAYERS)])
def test_no_more_is_gathered_at_once_than_a_block_and_the_next(reshard, blocks):
    def run(mesh):
        counted = Counted(mesh, reshard)
        for _ in range(2):
            counted.step()
        return counted.peak / BLOCK

    for peak in on_ranks(run):
        assert blocks - 1 < peak < blocks + 0.2  # norms and biases, and what is not in a block
