"""Rules that users register: sizes found without data, and calls that do not fit the pattern."""

import pytest
import torch
from support.rules import full, heard, ranks, split

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.rules.registry import add_op_info, lookup


@torch.library.custom_op("shardwise_tests::doubled_rows", mutates_args=())
def doubled_rows(x: torch.Tensor, parts: list[int]) -> torch.Tensor:
    """Each row twice, one behind the other; the sum of `parts` is the number of columns."""
    assert sum(parts) == x.shape[1]
    return torch.cat([x, x], 1)


@doubled_rows.register_fake
def _(x: torch.Tensor, parts: list[int]) -> torch.Tensor:
    return x.new_empty(x.shape[0], 2 * x.shape[1])


def test_the_size_of_a_dim_without_a_factor_is_found_by_running_without_data() -> None:
    sw.register_rule(doubled_rows, "m _ -> m _")
    expected = doubled_rows(full(5, 3), [1, 2])

    def run(mesh: sw.DeviceMesh) -> None:
        found = doubled_rows(split(full(5, 3), mesh, Shard(0)), [1, 2])
        assert found.placements == (Shard(0),) and found.shape == (5, 6)
        assert torch.equal(found.full_tensor(), expected)

    ranks(run)


def test_tensors_that_do_not_fit_the_pattern_are_refused_with_both() -> None:
    sw.register_rule(doubled_rows, "m -> m")

    def run(mesh: sw.DeviceMesh) -> None:
        with pytest.raises(
            sw.RuleError, match=r"doubled_rows.*'m -> m': it does not fit the 2 dims"
        ):
            doubled_rows(split(full(5, 3), mesh, Shard(0)), [1, 2])

    ranks(run)
    sw.register_rule(doubled_rows, "m k, k n -> m n")

    def run_again(mesh: sw.DeviceMesh) -> None:
        with pytest.raises(sw.RuleError, match="expected 2 tensors, got 1"):
            doubled_rows(split(full(5, 3), mesh, Replicate()), [1, 2])

    ranks(run_again)


def test_a_rule_of_a_function_of_torch_replaces_ours() -> None:
    """Rows only: a matrix that is split by columns must move, which ours leaves as it is."""
    function, kinds = torch.special.i0e, []

    def run(mesh: sw.DeviceMesh) -> None:
        events, found = heard(mesh, lambda: function(split(full(4, 2), mesh, Shard(1))))
        kinds.append([event.kind for event in events])
        assert torch.equal(found.full_tensor(), function(full(4, 2)))

    ours = lookup(function)
    assert ours is not None
    ranks(run)
    sw.register_rule(function, "m _ -> m _")
    try:
        ranks(run)
    finally:
        add_op_info(function, ours)
    assert kinds[:2] == [[], []] and all(kinds[2:])
