"""Pickles of sharded tensors: each rank loads the shards that it saved."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import sharded
from shardwise.core import world
from shardwise.sharded import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata

WORLDS = pytest.mark.parametrize("size", [2, 3, 4])


def by_pickle(value):
    return pickle.loads(pickle.dumps(value))


def by_torch(value, **options):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


def by_torch_unchecked(value):
    return by_torch(value, weights_only=False)


WAYS = pytest.mark.parametrize("way", [by_pickle, by_torch, by_torch_unchecked])


def on_rank(rank):
    return f"rank:{rank}/cpu"


def chunks(size, dim=0):
    return ChunkShardingSpec(dim, [on_rank(rank) for rank in reversed(range(size))])


def boxes():
    """Two shards on rank 0, one on rank 1, none on other ranks."""
    return EnumerableShardingSpec(
        [
            ShardMetadata([0, 0], [2, 6], on_rank(0)),
            ShardMetadata([2, 0], [3, 4], on_rank(1)),
            ShardMetadata([2, 4], [3, 2], on_rank(0)),
        ]
    )


def whole(dtype=torch.float32):
    return torch.arange(30).reshape(5, 6).to(dtype)


def sharded_whole(spec, dtype=torch.float32, requires_grad=False, **options):
    return spec.shard(whole(dtype).requires_grad_(requires_grad), **options)


@WORLDS
@WAYS
def test_a_rank_gets_back_what_it_saved(size, way):
    def check():
        for spec in (chunks(size), chunks(size, 1), boxes()):
            for dtype in (torch.float64, torch.int64, torch.bfloat16):
                x = sharded_whole(spec, dtype)
                y = way(x)
                assert type(y) is sharded.ShardedTensor
                assert (y.dtype, y.shape, y.requires_grad) == (dtype, (5, 6), False)
                assert y.sharding_spec() == spec and y.metadata() == x.metadata()
                for mine, saved in zip(y.local_shards(), x.local_shards(), strict=True):
                    assert mine.metadata == saved.metadata
                    assert torch.equal(mine.tensor, saved.tensor)
                assert torch.equal(y.full_tensor(), whole(dtype))

    sw.simulate(check, size)


@WAYS
def test_parameters_and_requires_grad_are_kept(way):
    def check():
        for requires_grad in (True, False):
            weight = nn.Parameter(sharded_whole(boxes()), requires_grad)
            loaded = way(weight)
            assert isinstance(loaded, nn.Parameter) and loaded.requires_grad == requires_grad
            assert all(each.tensor.requires_grad == requires_grad for each in loaded.local_shards())
            plain = way(sharded_whole(boxes(), requires_grad=requires_grad))
            assert not isinstance(plain, nn.Parameter) and plain.requires_grad == requires_grad
            assert loaded.metadata().tensor_properties.requires_grad == requires_grad

    sw.simulate(check, 3)


@WAYS
def test_what_was_computed_comes_back_as_a_leaf_as_a_plain_tensor_does(way):
    def check():
        x = sharded_whole(chunks(2), requires_grad=True) * 2
        y = way(x)
        assert not x.is_leaf and y.is_leaf and y.requires_grad
        assert torch.equal(y.full_tensor(), whole() * 2)

    sw.simulate(check, 2)


def test_a_shard_in_larger_memory_is_saved_alone():
    def check():
        memory = torch.zeros(1000, 1000)
        rank = world.current().rank
        shard = sharded.Shard.from_tensor_and_offsets(memory[:3, :4], [3 * rank, 0], rank)
        x = sharded.init_from_local_shards([shard], 6, 4)
        assert len(pickle.dumps(x)) < 10_000
        assert x.local_tensor().data_ptr() == memory.data_ptr()  # what is saved stays as it is
        file = io.BytesIO()
        torch.save(x, file)
        assert file.tell() < 10_000

    sw.simulate(check, 2)


def test_the_state_is_that_of_torch():
    def check():
        mesh = sw.DeviceMesh("cpu", [2, 1])
        if world.current().rank == 0:
            return
        spec = ChunkShardingSpec(0, [on_rank(1), on_rank(2)])
        x = sharded_whole(spec, process_group=mesh)
        shards, metadata, state, given, init_rrefs = x.__getstate__()
        assert [each.metadata for each in shards] == [each.metadata for each in x.local_shards()]
        assert metadata == x.metadata() and given == spec and init_rrefs is False
        assert isinstance(state, sharded.ShardedTensor.ProcessGroupState)
        rank = world.current().rank
        expected = {"local_rank": {1: 0, 2: 1}[rank], "global_rank": rank}
        assert vars(state) == {**expected, "local_world_size": 2, "global_world_size": 3}

    sw.simulate(check, 3)


@pytest.mark.parametrize("way", [by_pickle, by_torch])
def test_a_tensor_of_some_ranks_is_loaded_with_their_group(way):
    def check():
        mesh = sw.DeviceMesh("cpu", [1, 3])
        if world.current().rank in (0, 2):
            return
        spec = ChunkShardingSpec(0, [on_rank(3), on_rank(1)])
        x = sharded_whole(spec, process_group=mesh)
        with sharded.load_with_process_group(mesh) as given:
            y = way(x)
        assert given is mesh
        assert torch.equal(y.full_tensor(), whole())
        with pytest.raises(sharded.ShardedStateError, match="load_with_process_group"):
            way(x)

    sw.simulate(check, 4)


def test_contexts_do_not_nest_and_end_with_an_error():
    def check():
        mesh = sw.DeviceMesh("cpu", [0, 1])
        with (
            sharded.load_with_process_group(mesh),
            pytest.raises(sharded.ShardedStateError, match=r"inside one of ranks \(0, 1\)"),
            sharded.load_with_process_group(None),
        ):
            pass
        with pytest.raises(KeyError), sharded.load_with_process_group(None):
            raise KeyError
        with sharded.load_with_process_group(mesh):
            pass

    sw.simulate(check, 2)


def test_ranks_outside_the_group_save_and_load_their_tensor_without_shards():
    def check():
        mesh = sw.DeviceMesh("cpu", [0, 1])
        made = sharded.ones(
            ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]), 5, 3, process_group=mesh
        )
        data = pickle.dumps(made)
        with sharded.load_with_process_group(mesh):
            loaded = pickle.loads(data)
        assert loaded.metadata() == made.metadata()
        assert len(loaded.local_shards()) == (world.current().rank < 2)

    sw.simulate(check, 3)


def saved_by_each(size):
    return sw.simulate(lambda: pickle.dumps(sharded_whole(boxes())), size)


def test_another_rank_is_refused_with_both():
    data = saved_by_each(2)

    def check():
        with pytest.raises(sharded.ShardedStateError, match=r"local_rank: it was (\d) .*is (\d)"):
            pickle.loads(data[1 - world.current().rank])

    sw.simulate(check, 2)


def test_another_number_of_ranks_is_refused_with_both():
    data = saved_by_each(2)
    message = "local_world_size: it was 2 when the tensor was saved, and is 3"

    def check():
        rank = world.current().rank
        if rank == 2:
            return
        with pytest.raises(sharded.ShardedStateError, match=message):
            pickle.loads(data[rank])
        message_of_all = "global_world_size: it was 2 when the tensor was saved, and is 3"
        mesh = sw.DeviceMesh("cpu", [0, 1])
        with (
            pytest.raises(sharded.ShardedStateError, match=message_of_all),
            sharded.load_with_process_group(mesh),
        ):
            pickle.loads(data[rank])

    sw.simulate(check, 3)
    with pytest.raises(RuntimeError, match=r"local_world_size: it was 2 .* is 1"):
        pickle.loads(data[0])


def test_another_global_rank_is_refused_with_both():
    def save():
        mesh = sw.DeviceMesh("cpu", [0, 1])
        if world.current().rank < 2:
            return pickle.dumps(sharded_whole(boxes(), process_group=mesh))
        return b""

    data = sw.simulate(save, 4)

    def check():
        rank = world.current().rank
        mesh = sw.DeviceMesh("cpu", [2, 3])
        if rank < 2:
            return
        with (
            pytest.raises(sharded.ShardedStateError, match=f"global_rank: it was {rank - 2} .*is"),
            sharded.load_with_process_group(mesh),
        ):
            pickle.loads(data[rank - 2])

    sw.simulate(check, 4)


def test_a_state_is_set_on_a_tensor_of_its_size_only():
    def check():
        x, y = sharded_whole(boxes()), sharded.empty(chunks(2), 5, 6)
        y.__setstate__(x.__getstate__())
        assert torch.equal(y.full_tensor(), whole()) and y.sharding_spec() == boxes()
        z = sharded.empty(chunks(2), 6, 6)
        with pytest.raises(sharded.ShardedStateError, match=r"size \(6, 6\).*got one of size \(5"):
            z.__setstate__(x.__getstate__())
        shards, *rest = x.__getstate__()
        with pytest.raises(sharded.ShardedStateError, match="local shards"):
            y.__setstate__((shards[:-1], *rest))

    sw.simulate(check, 2)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_state_brings_its_requires_grad_to_a_tensor_that_has_another(requires_grad):
    def check():
        x = sharded_whole(chunks(2), requires_grad=requires_grad)
        y = sharded_whole(chunks(2), requires_grad=not requires_grad)
        y.__setstate__(x.__getstate__())
        assert y.requires_grad == requires_grad
        assert all(each.tensor.requires_grad == requires_grad for each in y.local_shards())

    sw.simulate(check, 2)


def test_a_map_location_moves_the_placements_of_all_ranks_along():
    def check():
        y = by_torch(sharded_whole(boxes()), map_location="meta")
        assert y.device.type == "meta"  # also on rank 2, which holds nothing
        assert all(each.tensor.is_meta for each in y.local_shards())
        placements = [str(each.placement) for each in y.metadata().shards_metadata]
        assert placements == ["rank:0/meta", "rank:1/meta", "rank:0/meta"]
        assert y.sharding_spec().shards == y.metadata().shards_metadata

    sw.simulate(check, 3)


class Table(nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.weight = nn.Parameter(sharded_whole(spec))
        self.register_buffer("scale", sharded_whole(spec))
        self.bias = nn.Parameter(torch.ones(2))


@WORLDS
def test_a_module_is_copied_and_its_state_dict_saved_and_loaded(size):
    def check():
        table = Table(chunks(size))
        copied, pickled = copy.deepcopy(table), by_pickle(table)
        loaded = by_torch(table.state_dict())
        with torch.no_grad():
            for each in table.weight.local_shards():
                each.tensor.zero_()
        for other in (copied, pickled):
            assert isinstance(other.weight, nn.Parameter) and other.weight.requires_grad
            assert torch.equal(other.weight.full_tensor(), whole())
            assert torch.equal(other.scale.full_tensor(), whole())
        assert list(loaded) == ["weight", "bias", "scale"] and not loaded["weight"].requires_grad
        table.load_state_dict(loaded)
        assert isinstance(table.weight, nn.Parameter)
        assert torch.equal(table.weight.full_tensor(), whole())
        table.load_state_dict({**loaded, "weight": sharded_whole(chunks(size, 1)) + 1})
        assert torch.equal(table.weight.full_tensor(), whole() + 1)
        assert table.weight.sharding_spec() == chunks(size)

    sw.simulate(check, size)


def test_a_shallow_copy_shares_memory_as_of_a_plain_tensor():
    def check():
        memory = torch.zeros(10, 10)
        rank = world.current().rank
        shard = sharded.Shard.from_tensor_and_offsets(memory[:3, :4], [3 * rank, 0], rank)
        x = nn.Parameter(sharded.init_from_local_shards([shard], 6, 4))
        y = copy.copy(x)
        assert y is not x and isinstance(y, nn.Parameter) and y.requires_grad and y.is_leaf
        assert y.local_tensor().data_ptr() == memory.data_ptr()

    sw.simulate(check, 2)


def test_one_tensor_pickled_twice_is_one_tensor():
    def check():
        x = sharded_whole(chunks(2))
        one, two = by_torch([x, x])
        assert one is two

    sw.simulate(check, 2)


def test_who_asks_for_memory_to_store_aside_is_told_what_does():
    def check():
        x = sharded_whole(chunks(2))
        with pytest.raises(sw.ShardwiseError, match=r"async_stager=.*\.CheckpointStager\(\)"):
            x.data_ptr()
        with pytest.raises(sw.ShardwiseError, match=r"async_stager=.*\.CheckpointStager\(\)"):
            x.to_dtensor().set_(torch.zeros(3).untyped_storage())

    sw.simulate(check, 2)
