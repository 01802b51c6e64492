"""DTensors and ShardedTensors describe their pieces by the protocol of torch's checkpoints."""

import pickle
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import planner_helpers

import shardwise as sw
from shardwise import DeviceMesh, LayoutError, Partial, Replicate, Shard
from shardwise.sharded import (
    ChunkShardingSpec,
    ShardedTensor,
    ShardedTensorBase,
    ShardedTensorError,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
    init_from_local_shards,
    shard_tensor,
)
from shardwise.sharded import Shard as LocalShard

PROTOCOL: Any = getattr(dcp, "CheckpointableTensor", None)
"""torch has it from 2.14 on; the fields are there with all versions."""
WHOLE = torch.arange(21.0).reshape(7, 3)
FIELDS = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


def pieces_of(x: Any) -> list[torch.Tensor]:
    """Return the parts of this rank's tensor that the fields describe."""
    local = x.local_shards() if hasattr(x, "local_shards") else None
    found = []
    for at, (start, size) in enumerate(zip(x.local_offsets, x.local_sizes, strict=True)):
        held = x.to_local() if local is None else local[at].tensor
        found.append(held[tuple(slice(a, a + b) for a, b in zip(start, size, strict=True))])
    return found


def check_fields(x: torch.Tensor) -> None:
    assert x.global_shape == tuple(x.shape)  # type: ignore[attr-defined]
    starts, sizes = x.global_offsets, x.local_sizes  # type: ignore[attr-defined]
    for piece, start, size in zip(pieces_of(x), starts, sizes, strict=True):
        expected = WHOLE[tuple(slice(a, a + b) for a, b in zip(start, size, strict=True))]
        assert piece.numel() > 0 and torch.equal(piece, expected)
    chunks = x.__create_chunk_list__()  # type: ignore[attr-defined]
    assert [(tuple(each.offsets), tuple(each.sizes)) for each in chunks] == list(
        zip(starts, sizes, strict=True)
    )
    if PROTOCOL is not None:
        assert isinstance(x, PROTOCOL)
        plan = planner_helpers._create_default_metadata_only_plan({"x": x})
        assert [each.tensor_data.chunk for each in plan.items] == chunks
        assert all(each.tensor_data.size == WHOLE.shape for each in plan.items)


PLACEMENTS = [
    [Shard(0), Replicate()],
    [Shard(0), Shard(0)],
    [Shard(1), Shard(0)],
    [Replicate(), Shard(0, pieces=(4, 2, 1), unit=(2, 1, 1))],
]


@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
def test_a_dtensor_has_the_fields_of_torchs_protocol(placements: list[sw.Placement]) -> None:
    def run() -> int:
        mesh = sw.init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        x = sw.distribute_tensor(WHOLE, mesh, placements)
        check_fields(x)
        return sum(piece.numel() for piece in pieces_of(x))

    copies = 2 if Replicate() in placements else 1
    assert sum(sw.simulate(run, 4)) == copies * WHOLE.numel()


@pytest.mark.parametrize("dim", [0, 1])
def test_a_sharded_tensor_has_the_fields_of_torchs_protocol(dim: int) -> None:
    def run() -> int:
        spec = ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in (1, 0, 1)])
        x = shard_tensor(WHOLE, spec)
        check_fields(x)
        return len(x.global_offsets)

    assert sw.simulate(run, 2) == [1, 2]


def test_the_fields_follow_from_the_layout() -> None:
    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.distribute_tensor(WHOLE, mesh, [Shard(0)])
        for name in FIELDS:
            setattr(x, name, getattr(x, name))  # as torch does to a copy with memory
            with pytest.raises(LayoutError, match=f"{name}: expected .* the tensor.s layout"):
                setattr(x, name, ((9, 9),))
        check_fields(x)
        x = x.redistribute(placements=[Shard(1)])
        check_fields(x)

    sw.simulate(run, 2)


def test_a_pending_sum_has_no_pieces_and_a_rank_outside_none() -> None:
    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.zeros(4, device_mesh=mesh, placements=[Partial()])
        with pytest.raises(LayoutError, match="is pending a reduction, and a checkpoint stores"):
            _ = x.global_offsets
        assert not hasattr(x, "local_sizes")
        elsewhere = sw.distribute_tensor(torch.ones(4), DeviceMesh("cpu", [0]))
        assert len(elsewhere.global_offsets) == (mesh.get_rank() == 0)

    sw.simulate(run, 2)


# ---- strides


def test_tensor_properties_know_the_strides() -> None:
    x = torch.empty(4, 3).t()
    assert TensorProperties.create_from_tensor(x).strides == (1, 3)
    assert TensorProperties().strides is None
    properties = TensorProperties(torch.int8, strides=(1, 3))
    assert pickle.loads(pickle.dumps(properties)) == properties != TensorProperties(torch.int8)
    older = TensorProperties()
    older.__setstate__((torch.int8, torch.strided, True, 0, False))  # without strides
    assert older.strides is None and older.requires_grad


def test_a_sharded_tensor_has_the_strides_of_its_metadata() -> None:
    def run() -> None:
        rank = sw.init_device_mesh("cpu", (2,)).get_rank()
        shards = [ShardMetadata([0, 2 * at], [3, 2], f"rank:{at}/cpu") for at in range(2)]
        properties = TensorProperties(strides=(1, 3))
        metadata = ShardedTensorMetadata(shards, torch.Size([3, 4]), properties)
        local = [LocalShard(torch.full((3, 2), 1.0 + rank), shards[rank])]
        x = ShardedTensor._init_from_local_shards_and_global_metadata(local, metadata)
        assert x.stride() == (1, 3) and x.metadata().tensor_properties.strides == (1, 3)
        again = pickle.loads(pickle.dumps(x.metadata()))
        assert again == x.metadata() and (x * 2).stride() == (1, 3)
        # of shards alone nobody knows how the whole was stored
        built = init_from_local_shards(local, 3, 4)
        assert built.metadata().tensor_properties.strides is None and built.stride() == (4, 1)
        metadata.tensor_properties.strides = (1,)
        with pytest.raises(ShardedTensorError, match=r"strides: expected 2 numbers, .* got \(1,\)"):
            ShardedTensor._init_from_local_shards_and_global_metadata(local, metadata)
        spec = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
        assert ShardedTensorBase(spec, 3, 4, strides=(1, 3)).stride() == (1, 3)

    sw.simulate(run, 2)
