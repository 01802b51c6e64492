"""testing.check_rule finds wrong rules and says what is wrong with them."""

import pytest
import torch
from support.rules import leaf

import shardwise as sw
from shardwise.testing import Sample, check_rule
from shardwise.testing.reference import Tolerance, difference
from shardwise.testing.rule_check import Report

SAMPLES = [Sample(leaf(4, 3))]


def local_only(function):
    """A function of DTensors that computes each shard by itself, whatever that gives."""

    def run(x):
        if not isinstance(x, sw.DTensor):
            return function(x)
        local = function(x.to_local())
        return sw.DTensor.from_local(local, x.device_mesh, x.placements, run_check=False)

    return run


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x - x.mean(), r"wrong: .*result 0"),
        (lambda x: x[:, : x.numel() // x.numel()], "wrong"),
    ],
)
def test_values_of_shards_that_are_not_those_of_the_whole_are_found(function, message):
    with pytest.raises(sw.RuleError, match=message):
        check_rule(local_only(function), SAMPLES, mesh_shapes=((2,),), most=6)


def test_a_function_that_fails_on_dtensors_only_is_named_with_its_error():
    def fails(x):
        if isinstance(x, sw.DTensor):
            raise KeyError("lost")
        return x + 1

    with pytest.raises(sw.RuleError, match=r"raised KeyError: 'lost' .*test_check_rule\.py"):
        check_rule(fails, SAMPLES, mesh_shapes=((2,),), most=2, allow_missing=True)


def test_a_gradient_that_is_missing_is_found():
    def loses(x):
        return x.detach() * 2 + 0 * x if isinstance(x, sw.DTensor) else x * 2

    with pytest.raises(sw.RuleError, match="gradient of input 0"):
        check_rule(loses, SAMPLES, mesh_shapes=((2,),), most=2)

    def has_none(x):
        return x.detach() * 2 if isinstance(x, sw.DTensor) else x * 2

    with pytest.raises((sw.RuleError, sw.RankError)):
        check_rule(has_none, SAMPLES, mesh_shapes=((2,),), most=2)


def test_a_function_without_a_rule_is_reported_as_falling_back():
    with pytest.raises(sw.RuleError, match="falls back"):
        check_rule(lambda x: torch.ops.aten._linalg_eigh(x)[0], [Sample(leaf(3, 3))], most=4)


def test_a_report_shows_some_of_many_problems():
    text = str(Report(20, wrong=[f"case {at}" for at in range(15)]))
    assert text.startswith("20 cases, 15 wrong")
    assert "case 11" in text and "case 12" not in text and "... and 3 more" in text


def test_results_of_another_number_shape_dtype_or_layout_are_described():
    one = torch.ones(2)
    tolerance = Tolerance(0.0, 0.0)
    assert "2 tensors in the result, expected 1" in difference(
        [one, one], [one], "result", tolerance
    )
    assert "expected torch.float64[2]" in difference([one], [one.double()], "result", tolerance)
    assert "expected torch.sparse_coo" in difference([one], [one.to_sparse()], "result", tolerance)
    assert difference([one], [one], "result", tolerance) == ""
