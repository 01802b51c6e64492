"""Sharding specs: the shards that they give, and the specs that are refused."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.sharded_tensors import chunks, cut, is_cut_of, numbers, refusal, shard_at
from torch.distributed.remote_device import _remote_device

import shardwise as sw
from shardwise.sharded import (
    ChunkShardingSpec,
    DevicePlacementSpec,
    EnumerableShardingSpec,
    PlacementSpec,
    ShardedTensor,
    ShardedTensorError,
    ShardedTensorMetadata,
    ShardingSpec,
    ShardMetadata,
    TensorProperties,
    get_chunked_dim_size,
    get_split_size,
    narrow_tensor,
    validate_non_overlapping_shards_metadata,
)
from shardwise.sharded.specs import infer_spec

PLAIN = TensorProperties(torch.float32)


def shards_of(spec, *size):
    return spec.build_metadata(torch.Size(size), PLAIN).shards_metadata


# ---- chunks


@given(size=st.integers(0, 40), count=st.integers(1, 12))
def test_chunks_have_the_sizes_of_torch_chunk_and_then_nothing(size, count):
    found = [each.shard_sizes[0] for each in shards_of(chunks(0, *range(count)), size)]
    expected = [len(part) for part in torch.empty(size).chunk(count)]
    # Of an empty tensor torch makes as many empty chunks as it is asked for.
    assert found == expected + [0] * (count - len(expected))
    step = get_split_size(size, count)
    assert found == [get_chunked_dim_size(size, step, index) for index in range(count)]


def test_chunks_lie_one_after_the_other_along_their_dim():
    first, second, third, last = shards_of(chunks(1, 3, 0, 2, 1), 2, 5)
    assert first == shard_at([0, 0], [2, 2], 3)
    assert second == shard_at([0, 2], [2, 2], 0)
    assert third == shard_at([0, 4], [2, 1], 2)
    assert last == shard_at([0, 5], [2, 0], 1)


@pytest.mark.parametrize("dim", [-1, -2, -3])
def test_a_negative_dim_counts_from_the_end(dim):
    assert shards_of(chunks(dim, 1, 0), 4, 5, 6) == shards_of(chunks(dim + 3, 1, 0), 4, 5, 6)


def test_a_rank_may_hold_several_chunks_or_none():
    assert [each.placement.rank() for each in shards_of(chunks(0, 2, 0, 2), 6)] == [2, 0, 2]


@pytest.mark.parametrize("dim", [2, -3])
def test_a_dim_that_the_tensor_does_not_have_is_refused(dim):
    with pytest.raises(ShardedTensorError, match=rf"dim: expected one of the 2 dims.*got {dim}"):
        shards_of(chunks(dim, 0, 1), 4, 4)


def test_a_tensor_without_dims_has_no_chunks():
    with pytest.raises(ShardedTensorError, match="0 dims"):
        shards_of(chunks(0, 0))


@pytest.mark.parametrize("dim", ["rows", None, 1.0, True])
def test_a_dim_that_is_no_number_is_refused(dim):
    with pytest.raises(ShardedTensorError, match="dim: expected the number of a dim, got"):
        ChunkShardingSpec(dim, ["rank:0/cpu"])


@pytest.mark.parametrize("placements", [[], (), "rank:0/cpu", None, iter(["rank:0/cpu"])])
def test_placements_that_are_no_list_are_refused(placements):
    with pytest.raises(ShardedTensorError, match="placements: expected one for each chunk"):
        ChunkShardingSpec(0, placements)


@pytest.mark.parametrize("placement", ["rank:x/cpu", "rank:0/toaster", "a/b/c", 7])
def test_a_placement_that_names_nothing_is_refused_by_its_position(placement):
    with pytest.raises(ShardedTensorError, match=r"placements\[1\]: expected a placement such as"):
        ChunkShardingSpec(0, ["rank:0/cpu", placement])


@pytest.mark.parametrize("size", [[2, -1], [2.0], "ab", 5, None])
def test_a_size_that_is_none_is_refused(size):
    with pytest.raises(ShardedTensorError, match="tensor_sizes: expected numbers from 0 on"):
        chunks(0, 0).build_metadata(size, PLAIN)


# ---- boxes


def test_a_shard_narrows_a_whole_tensor_to_a_view_of_its_part():
    whole = numbers((4, 6))
    part = narrow_tensor(whole, ShardMetadata([1, 2], [3, 1]))
    assert torch.equal(part, whole[1:4, 2:3]) and part._base is whole
    with pytest.raises(RuntimeError):
        narrow_tensor(whole, ShardMetadata([3, 0], [2, 6]))


def test_shards_of_which_two_overlap_are_refused_before_there_is_a_spec():
    apart = [shard_at([0, 0], [2, 3], 0), shard_at([2, 0], [2, 3], 1)]
    validate_non_overlapping_shards_metadata([])
    validate_non_overlapping_shards_metadata(apart)
    with pytest.raises(ValueError, match=r"shard 1 .* and shard 2 .* overlap"):
        validate_non_overlapping_shards_metadata([*apart, shard_at([3, 2], [1, 1], 0)])


def test_boxes_may_be_given_in_any_order():
    spec = cut(([2, 0], [2, 4], 1), ([0, 2], [2, 2], 0), ([0, 0], [2, 2], 2))
    assert shards_of(spec, 4, 4) == spec.shards


def test_metadata_of_a_spec_does_not_change_with_it():
    spec = cut(([0], [4], 1))
    described = spec.build_metadata([4], PLAIN)
    spec.shards[0].shard_offsets[0] = 3
    assert described.shards_metadata == [shard_at([0], [4], 1)]


def test_two_boxes_that_overlap_are_refused_by_name():
    message = refusal(lambda: cut(([0, 0], [2, 3], 0), ([2, 0], [2, 4], 1), ([1, 2], [1, 2], 2)))
    assert "shard 0 (Box[0:2, 0:3] on rank:0/cpu)" in message
    assert "shard 2 (Box[1:2, 2:4] on rank:2/cpu)" in message
    assert "overlap in Box[1:2, 2:3]" in message


def test_the_same_box_twice_is_an_overlap():
    assert "overlap" in refusal(lambda: cut(([0], [2], 0), ([0], [2], 1)))


def test_a_gap_is_refused_with_the_boxes_beside_it():
    spec = cut(([0, 0], [2, 4], 0), ([3, 0], [1, 4], 1))
    message = refusal(lambda: spec.build_metadata([4, 4], PLAIN))
    assert "they hold 12 of the 16 elements" in message
    assert "nobody holds Box[2:3, 0:4]" in message
    assert "shard 0 (Box[0:2, 0:4]" in message and "shard 1 (Box[3:4, 0:4]" in message


def test_a_box_that_reaches_outside_is_refused_by_name():
    spec = cut(([0, 0], [2, 4], 0), ([2, 0], [3, 4], 1))
    message = refusal(lambda: spec.build_metadata([4, 4], PLAIN))
    assert "shard 1 (Box[2:5, 0:4] on rank:1/cpu) reaches beyond" in message and "(4, 4)" in message


def test_boxes_outside_by_as_much_as_they_leave_free_inside_are_refused():
    spec = cut(([0], [2], 0), ([4], [2], 1))  # four elements, as the tensor has
    assert "reaches beyond" in refusal(lambda: spec.build_metadata([4], PLAIN))


def test_an_empty_box_outside_is_refused_too():
    spec = cut(([0], [4], 0), ([5], [0], 1))
    assert "reaches beyond" in refusal(lambda: spec.build_metadata([4], PLAIN))


def test_empty_boxes_overlap_nothing():
    spec = cut(([0], [4], 0), ([2], [0], 1), ([2], [0], 2))
    assert [each.shard_sizes for each in shards_of(spec, 4)] == [[4], [0], [0]]


def test_boxes_of_different_numbers_of_dims_are_refused_by_name():
    message = refusal(lambda: cut(([0, 0], [2, 2], 0), ([0], [2], 1)))
    assert "shard 0 (Box[0:2, 0:2] on rank:0/cpu) has 2" in message
    assert "shard 1 (Box[0:2] on rank:1/cpu) has 1" in message


def test_boxes_for_another_number_of_dims_than_the_tensor_has_are_refused():
    message = refusal(lambda: cut(([0, 0], [2, 2], 0)).build_metadata([4], PLAIN))
    assert "expected boxes of 1 dims" in message


def test_a_tensor_without_dims_is_one_box():
    assert shards_of(cut(([], [], 1))) == [shard_at([], [], 1)]
    assert "overlap" in refusal(lambda: cut(([], [], 0), ([], [], 1)))


def test_a_tensor_with_an_empty_dim_is_any_number_of_empty_boxes():
    assert len(shards_of(cut(([0, 0], [0, 3], 0), ([0, 3], [0, 1], 1)), 0, 4)) == 2


@pytest.mark.parametrize("shards", [[], ()])
def test_no_shards_are_no_spec(shards):
    with pytest.raises(ShardedTensorError, match="shards: expected at least one"):
        EnumerableShardingSpec(shards)


def test_what_is_no_shard_is_refused_by_its_position():
    with pytest.raises(ShardedTensorError, match=r"shards\[1\]: expected ShardMetadata, got dict"):
        EnumerableShardingSpec([shard_at([0], [2]), {}])


def grid(rows, columns):
    """A tensor of 200 by 200 in many boxes, in random order."""
    high, wide = 200 // rows, 200 // columns
    places = [(row * high, column * wide) for row in range(rows) for column in range(columns)]
    shuffled = [places[at] for at in torch.randperm(len(places)).tolist()]
    return [shard_at(place, [high, wide], at % 2) for at, place in enumerate(shuffled)]


def test_two_thousand_shards_are_checked_sent_out_and_moved():
    torch.manual_seed(0)
    boxes = grid(50, 40), grid(40, 50)
    whole = numbers([200, 200])

    def run():
        specs = [EnumerableShardingSpec(each) for each in boxes]
        x = specs[0].shard(whole)
        x.reshard(specs[1])
        assert is_cut_of(x, whole, specs[1])

    sw.simulate(run, 2)


def test_a_gap_or_an_overlap_among_two_thousand_is_found():
    torch.manual_seed(0)
    boxes = grid(50, 40)
    lost = boxes.pop(1234)
    message = refusal(lambda: shards_of(EnumerableShardingSpec(boxes), 200, 200))
    assert f"nobody holds {lost.box}" in message
    assert "overlap" in refusal(lambda: EnumerableShardingSpec([*boxes, boxes[77]]))


# ---- shard metadata


def test_shard_metadata_are_values():
    one, two = (ShardMetadata([0, 1], torch.Size([2, 3]), "rank:1/cpu") for _ in range(2))
    assert one == two and hash(one) == hash(two) and {one: "found"}[two] == "found"
    assert one != ShardMetadata([0, 1], [2, 3], "rank:0/cpu")
    assert pickle.loads(pickle.dumps(one)) == one
    assert eval(repr(one)) == one


def test_specs_are_values_that_can_be_pasted():
    for spec in (chunks(-1, 1, 0), cut(([0], [2], 0), ([2], [1], 1))):
        assert eval(repr(spec)) == spec and pickle.loads(pickle.dumps(spec)) == spec


def test_placements_are_those_of_torch():
    placement = _remote_device("rank:1/cuda:0")
    assert ShardMetadata([0], [1], placement).placement is placement
    assert DevicePlacementSpec("rank:1/cuda:0").device == placement
    assert isinstance(DevicePlacementSpec("trainer/cpu"), PlacementSpec)


@pytest.mark.parametrize(
    ("offsets", "sizes", "message"),
    [
        ([-1], [2], "shard_offsets: expected numbers from 0 on"),
        ([0], [-2], "shard_sizes: expected numbers from 0 on"),
        ([0.5], [2], "shard_offsets: expected numbers from 0 on"),
        ([0, 0], [2], "as many of each"),
    ],
)
def test_offsets_and_sizes_that_are_no_box_are_refused(offsets, sizes, message):
    with pytest.raises(ShardedTensorError, match=message):
        shard_at(offsets, sizes)


def test_tensor_properties_are_pickled_with_their_memory_format():
    for memory_format in (torch.contiguous_format, torch.channels_last, torch.preserve_format):
        properties = TensorProperties(torch.int8, memory_format=memory_format, pin_memory=True)
        assert pickle.loads(pickle.dumps(properties)) == properties


def test_tensor_properties_have_the_default_dtype_of_their_time():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert TensorProperties().dtype == torch.float64
    finally:
        torch.set_default_dtype(before)


# ---- which spec describes some shards


@given(size=st.integers(0, 9), count=st.integers(1, 5), dim=st.integers(0, 1), data=st.data())
def test_shards_that_are_chunks_are_recognised_in_any_order(size, count, dim, data):
    ranks = data.draw(st.permutations(range(count)))
    shape = [3, 3]
    shape[dim] = size
    shards = shards_of(chunks(dim, *ranks), *shape)
    mixed = [shards[at] for at in data.draw(st.permutations(range(count)))]
    found = infer_spec(mixed, shape)
    assert isinstance(found, ChunkShardingSpec)
    assert {each for each in shards_of(found, *shape) if not each.box.is_empty} == {
        each for each in shards if not each.box.is_empty
    }


def test_where_an_empty_shard_begins_does_not_matter():
    shards = [shard_at([0], [0], 2), shard_at([2], [2], 1), shard_at([0], [2], 0)]
    assert infer_spec(shards, [4]) == chunks(0, 0, 1, 2)


def test_shards_of_other_sizes_are_enumerated():
    spec = cut(([0], [1], 0), ([1], [3], 1))
    assert infer_spec(spec.shards, [4]) == spec


# ---- a spec of the user's own


class Halves(ShardingSpec):
    """A spec of two halves without `==`: two of them are never equal."""

    def build_metadata(self, tensor_sizes, tensor_properties):
        return chunks(0, 1, 0).build_metadata(tensor_sizes, tensor_properties)


def test_a_spec_of_the_users_own_shards_and_reshards():
    whole = numbers([5, 2])

    def run():
        x = Halves().shard(whole)
        assert is_cut_of(x, whole)
        assert is_cut_of(x.reshard(chunks(1, 0, 1)), whole)
        assert is_cut_of(x.reshard(Halves()), whole)

    sw.simulate(run, 2)


@pytest.mark.parametrize(
    ("shards", "size", "message"),
    [
        ([shard_at([0, 0], [2, 2])], [5, 2], "nobody holds"),
        ([shard_at([0, 0], [4, 2])], [4, 2], "of size (5, 2)"),
        ([], [5, 2], "of size (5, 2)"),
    ],
)
def test_a_spec_of_the_users_own_that_does_not_make_up_the_tensor_is_refused(shards, size, message):
    class Wrong(ShardingSpec):
        def build_metadata(self, tensor_sizes, tensor_properties):
            return ShardedTensorMetadata(shards, torch.Size(size), tensor_properties)

    def run():
        x = chunks(0, 0, 1).shard(numbers([5, 2]))
        for call in (
            lambda: ShardedTensor(Wrong(), 5, 2),
            lambda: Wrong().shard(numbers([5, 2])),
            lambda: x.reshard(Wrong()),
        ):
            told = refusal(call)
            assert "Wrong.build_metadata" in told and message in told

    sw.simulate(run, 2)
