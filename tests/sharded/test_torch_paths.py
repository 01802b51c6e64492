"""`shardwise.sharded` has the modules of torch.distributed._shard, and the names in them."""

import importlib
import inspect
import pkgutil
import warnings

import pytest
import torch
import torch.distributed._shard as torch_shard
from support.sharded_tensors import chunks, numbers, rank_here
from torch.distributed._shard.sharding_spec import ShardMetadata as TorchShardMetadata
from torch.distributed._shard.sharding_spec import _internals as torch_internals

import shardwise as sw
from shardwise.comm import communicator
from shardwise.sharded import Shard, ShardMetadata, ones
from shardwise.sharded.api import _get_current_process_group, load_with_process_group
from shardwise.sharded.sharded_tensor.reshard import (
    build_reshard_metadata,
    get_idx_from_placements,
    reshard_local_shard,
    reshuffle_local_shard,
)
from shardwise.sharded.sharded_tensor.utils import (
    _parse_and_validate_remote_device,
    build_global_metadata,
    build_metadata_from_local_shards,
    recalc_global_sharded_tensor_metadata,
)
from shardwise.sharded.sharding_spec import _infer_sharding_spec_from_shards_metadata
from shardwise.sharded.sharding_spec._internals import (
    _check_shard_metadata_pair_overlap,
    check_tensor,
    get_chunk_sharding_params,
)

INTERNAL = {
    # How torch registers and runs its own operators, and builds its own tensors.
    *("_dispatch_custom_op", "_has_custom_op", "_decorator_func", "_register_remote_shards"),
    *("sharded_embedding", "sharded_embedding_bag", "allclose", "equal"),
    *("constant_", "kaiming_uniform_", "normal_", "uniform_"),
    *("_flatten_tensor_size", "_validate_output_tensor_for_gather", "_raise_if_mismatch"),
    *("_create_tensor_from_params", "_find_nd_overlapping_shards", "_find_1d_overlapping_shards"),
}
"""Names of torch that only torch itself uses."""


TABLES = {"common_op_utils", "op_registry_utils"}
"""Modules with which torch fills its tables of operators; ours is `custom_sharded_op_impl`."""

FOLDERS = ("", ".sharded_tensor", ".sharding_spec", ".sharding_plan", ".sharded_optim")
MODULES = [
    f"{torch_shard.__name__}{folder}{inner and '.'}{inner}"
    for folder in FOLDERS
    for inner in (
        "",
        *(
            each.name
            for each in pkgutil.iter_modules(
                [f"{torch_shard.__path__[0]}{folder.replace('.', '/')}"]
            )
            if not each.ispkg and "logg" not in each.name and each.name not in TABLES
        ),
    )
]


@pytest.mark.parametrize("name", MODULES)
def test_each_module_has_the_names_that_torch_defines_in_it(name):
    ours = importlib.import_module(name.replace("torch.distributed._shard", "shardwise.sharded"))
    theirs = importlib.import_module(name)
    defined = {
        each
        for each, value in vars(theirs).items()
        if getattr(value, "__module__", "") == name and not inspect.ismodule(value)
    }
    assert {each for each in defined - INTERNAL if not hasattr(ours, each)} == set()


def test_the_checkpoint_module_is_torchs_checkpoint_package():
    from shardwise.sharded import checkpoint

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert checkpoint.save is torch.distributed.checkpoint.save


# ---- the functions


def boxes(*shards):
    return [ShardMetadata(offsets, sizes, "rank:0/cpu") for offsets, sizes in shards]


TILINGS = {
    "tiles": ([((0, 0), (2, 3)), ((2, 0), (3, 3))], (5, 3)),
    "leaves a gap": ([((0, 0), (2, 3)), ((3, 0), (2, 3))], (5, 3)),
    "reaches beyond": ([((0, 0), (2, 3)), ((2, 0), (4, 3))], (5, 3)),
    "has another number of dims": ([((0, 0), (2, 3))], (6,)),
}


@pytest.mark.parametrize("case", TILINGS)
def test_check_tensor_refuses_what_torch_refuses(case):
    shards, size = TILINGS[case]

    def is_refused(check, kind):
        try:
            check([kind(list(start), list(sizes), "rank:0/cpu") for start, sizes in shards], size)
        except ValueError:
            return True
        return False

    theirs = is_refused(torch_internals.check_tensor, TorchShardMetadata)
    assert is_refused(check_tensor, ShardMetadata) == theirs == (case != "tiles")


def test_pairs_overlap_as_torch_says():
    pairs = [((0, 0), (2, 3)), ((1, 1), (2, 3)), ((2, 0), (3, 3)), ((0, 3), (1, 1))]
    for one in pairs:
        for other in pairs:
            ours = _check_shard_metadata_pair_overlap(*boxes(one, other))
            theirs = torch_internals._check_shard_metadata_pair_overlap(
                *(TorchShardMetadata(list(a), list(b)) for a, b in (one, other))
            )
            assert ours == theirs


@pytest.mark.parametrize("length", [0, 1, 5, 6, 8])
def test_the_chunk_of_a_rank_is_as_torch_says(length):
    spec = chunks(0, 2, 0, 1)
    for rank in range(3):
        ours = get_chunk_sharding_params(length, 3, spec, rank)
        theirs = torch_internals.get_chunk_sharding_params(length, 3, spec, rank)
        assert ours == theirs
        assert get_idx_from_placements(spec.placements, rank) == (rank + 1) % 3


def test_specs_are_inferred_from_shards():
    spec = chunks(1, 1, 0)
    metadata = ones_metadata(spec)
    assert _infer_sharding_spec_from_shards_metadata(metadata.shards_metadata) == spec


def ones_metadata(spec):
    return sw.simulate(lambda: ones(spec, 5, 3).metadata(), 2)[0]


def test_metadata_that_ranks_gather_by_hand_is_that_of_the_tensor():
    def run():
        whole = numbers((5, 3))
        spec = chunks(0, 1, 0)
        x = ones(spec, 5, 3, dtype=whole.dtype)
        mesh = sw.init_device_mesh("cpu", (2,))
        own = build_metadata_from_local_shards(x.local_shards(), x.shape, rank_here(), None)
        gathered = communicator(mesh).gather_objects(own)
        found = build_global_metadata(gathered)
        assert set(found.shards_metadata) == set(x.metadata().shards_metadata)
        assert found.size == x.shape
        stacked = build_global_metadata(gathered, recalc_metadata=True)
        assert [each.shard_offsets for each in stacked.shards_metadata] == [[0, 0], [2, 0]]
        recalc_global_sharded_tensor_metadata(found, 1)
        assert found.size == (2, 6)
        assert _parse_and_validate_remote_device(None, spec.placements[0]) == (
            1,
            torch.device("cpu"),
        )

    sw.simulate(run, 2)


def test_wrong_metadata_is_refused():
    def run():
        x = ones(chunks(0, 0, 1), 4)
        with pytest.raises(ValueError, match="at least one"):
            build_metadata_from_local_shards([], x.shape, rank_here(), None)
        with pytest.raises(ValueError, match="expected rank"):
            build_metadata_from_local_shards(x.local_shards(), x.shape, 1 - rank_here(), None)
        own = build_metadata_from_local_shards(x.local_shards(), x.shape, rank_here(), None)
        with pytest.raises(ValueError, match="nobody holds"):
            build_global_metadata([own, None])
        with pytest.raises(ValueError, match="got none"):
            build_global_metadata([None, None])
        with pytest.raises(ValueError, match="got None"):
            _parse_and_validate_remote_device(None, None)
        with pytest.raises(ValueError, match="one of"):
            _parse_and_validate_remote_device(None, chunks(0, 7).placements[0])

    sw.simulate(run, 2)


@pytest.mark.parametrize("before, after", [((0, (0, 1, 2)), (1, (2, 0, 1))),
                                           ((0, (1, 2, 0)), (0, (0, 2, 1)))])  # fmt: skip
def test_a_shard_is_moved_by_hand_and_its_gradient_moves_back(before, after):
    (old_dim, old_ranks), (new_dim, new_ranks) = before, after

    def run():
        whole = numbers((5, 6))
        old, new = chunks(old_dim, *old_ranks), chunks(new_dim, *new_ranks)
        piece = whole.chunk(3, old_dim)[old_ranks.index(rank_here())].clone().requires_grad_()
        move = reshuffle_local_shard if old_dim == new_dim else reshard_local_shard
        (shard,), metadata = move(piece, whole.shape, old, new, None)
        assert isinstance(shard, Shard)
        expected = whole.chunk(3, new_dim)[new_ranks.index(rank_here())]
        assert torch.equal(shard.tensor, expected)
        assert [each.placement.rank() for each in metadata] == [0, 1, 2]
        assert (metadata, list(new_ranks)) == build_reshard_metadata(whole.shape, new, 3)
        (shard.tensor * expected).sum().backward()
        assert torch.equal(piece.grad, piece.detach())

    sw.simulate(run, 3)


def test_the_group_that_tensors_are_loaded_with_can_be_asked_for():
    def run():
        mesh = sw.DeviceMesh("cpu", [0, 1])
        with load_with_process_group(mesh):
            assert _get_current_process_group() is mesh

    sw.simulate(run, 2)
