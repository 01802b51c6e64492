"""Values are compared by one function, of any dtype; what torch does not reproduce is named."""

import itertools
import warnings
from dataclasses import replace

import pytest
import torch
from support.op_db import ours
from support.op_db.entries import Call, entries
from support.op_db.expected import check
from support.op_db.outcomes import Row
from support.op_db.reference import difference, reference

from shardwise import DeviceMesh, RuleError, Shard
from shardwise.testing import (
    Sample,
    UnstableWarning,
    check_rule,
    layouts_of,
    missing_splits,
    value_difference,
    widened,
)

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

NAN, INF = torch.nan, torch.inf
FLOAT8 = [
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
FLOATS = [*FLOAT8, torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]


# ---- one function


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, *UNSIGNED, *COMPLEX], ids=str)
def test_equal_numbers_of_every_dtype_are_equal_and_others_are_not(dtype):
    ones = torch.ones(4).to(dtype)
    other = torch.tensor([1.0, 1.0, 4.0, 1.0]).to(dtype)
    if dtype == torch.bool:
        other = torch.tensor([True, True, False, True])
    assert not value_difference(ones, ones.clone())
    assert value_difference(other, ones) in ("1 of 4 differ", "off by up to 3")
    assert value_difference(ones, other)


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX], ids=str)
def test_nan_equals_nan_and_nothing_else(dtype):
    with_nan = torch.tensor([1.0, NAN]).to(dtype)
    without = torch.tensor([1.0, 2.0]).to(dtype)
    assert not value_difference(with_nan, with_nan.clone())
    for pair in itertools.permutations((with_nan, without)):
        assert value_difference(*pair) == "1 of 2 are NaN or infinite in one alone"
        assert value_difference(*pair, rtol=1e9, atol=1e9)


def test_infinities_are_equal_if_their_signs_are():
    have, expected = torch.tensor([INF, -INF, INF, 1.0]), torch.tensor([INF, -INF, -INF, 5.0])
    assert not value_difference(have, have.clone())
    text = "off by up to 4, 1 of 4 are NaN or infinite in one alone"
    assert value_difference(have, expected) == text


def test_floats_may_be_off_as_far_as_is_said_and_integers_may_not():
    ones = torch.ones(2, dtype=torch.float64)
    assert not value_difference(ones + 1e-8, ones, rtol=1e-7)
    assert not value_difference(ones + 1e-8, ones, atol=1e-7)
    assert value_difference(ones + 1e-6, ones, rtol=1e-7, atol=1e-7) == "off by up to 1e-06"
    assert value_difference(torch.tensor([2]), torch.tensor([1]), rtol=9.0, atol=9.0)


def test_large_unsigned_numbers_are_told_apart():
    top = torch.tensor([2**64 - 1], dtype=torch.uint64)
    assert not value_difference(top, top.clone())
    assert value_difference(top, torch.tensor([2**64 - 2], dtype=torch.uint64)) == "1 of 1 differ"


def test_packed_sparse_and_quantized_numbers_are_compared_by_what_they_hold():
    packed, other = (
        torch.tensor([each], dtype=torch.uint8).view(torch.float4_e2m1fn_x2) for each in (18, 19)
    )
    assert not value_difference(packed, packed.clone())
    assert value_difference(packed, other) == "1 of 1 differ"
    assert not value_difference(torch.eye(2).to_sparse(), torch.eye(2).to_sparse())
    assert value_difference(torch.eye(2).to_sparse(), torch.zeros(2, 2).to_sparse())


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_every_float8_is_as_wide_as_it_was(dtype):
    every = torch.arange(256, dtype=torch.uint8).view(dtype)
    assert torch.equal(widened(every).nan_to_num(), every.to(torch.float32).nan_to_num())
    assert not value_difference(every, every.clone())
    assert value_difference(every, every.view(torch.uint8).flip(0).view(dtype))


# ---- a rule is checked


def to_float8(x):
    """Numbers that no float8 holds: NaN on one CPU, 448 on another."""
    return torch.where(x > 2, NAN, x).to(torch.float8_e4m3fn)


def numbers(*shape):
    return torch.linspace(-2, 3, torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


def test_results_of_float8_with_nans_are_compared():
    report = check_rule(to_float8, [Sample(numbers(4, 3))], mesh_shapes=[(2,)])
    assert report.cases and not report.unstable


def test_a_wrong_result_of_float8_is_described():
    def wrong(x):
        return to_float8(x if type(x) is torch.Tensor else -x)

    with pytest.raises(RuleError, match=r"result 0 is wrong: off by up to 4, \d+ of 12 are NaN"):
        check_rule(wrong, [Sample(numbers(4, 3))], mesh_shapes=[(2,)], allow_missing=True)


def test_float8_is_split_and_never_a_pending_sum():
    x = torch.ones(4, 3).to(torch.float8_e4m3fn)
    found = layouts_of(x, DeviceMesh.abstract((2,), ("dp",)))
    assert len(found) == 3 and not any(each.partial for each in found)
    assert not missing_splits(torch.clone, Sample(x))


class Unstable:
    """A function that gives something else every time, as of memory that nobody wrote to."""

    __name__ = "unstable"

    def __init__(self, also=None):
        self.calls = itertools.count()
        self.also = also

    def __call__(self, x):
        made = x.detach() + next(self.calls)
        return (made, self.also(x)) if self.also else made


def test_what_torch_does_not_reproduce_is_named_and_the_rest_compared():
    with pytest.warns(UnstableWarning, match=r"check_rule\(unstable\).*float64\[4\]\): result 0$"):
        report = check_rule(
            Unstable(torch.exp), [Sample(numbers(4))], mesh_shapes=[(2,)], allow_missing=True
        )
    assert report.unstable == ["(float64[4]): result 0"]
    assert "not compared, as torch does not reproduce it: (float64[4]): result 0" in str(report)

    def wrong(x):
        return x.exp() if type(x) is torch.Tensor else x.sin()

    with pytest.raises(RuleError, match="result 1 is wrong"):
        check_rule(Unstable(wrong), [Sample(numbers(4))], mesh_shapes=[(2,)], allow_missing=True)


def test_shapes_and_dtypes_of_what_torch_does_not_reproduce_are_compared():
    class Shorter(Unstable):
        def __call__(self, x):
            made = super().__call__(x)
            return made if type(x) is torch.Tensor else made.float()

    with pytest.raises(RuleError, match=r"result 0 is torch.float32\[4\], expected torch.float64"):
        check_rule(Shorter(), [Sample(numbers(4))], mesh_shapes=[(2,)], allow_missing=True)


def test_a_gradient_that_torch_does_not_reproduce_is_named():
    calls = itertools.count()

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.clone()

        @staticmethod
        def backward(context, gradient):
            return gradient * next(calls)

    def function(x):
        return Scaled.apply(x) if type(x) is torch.Tensor else x.clone()

    with pytest.warns(UnstableWarning, match="gradient of input 0"):
        check_rule(function, [Sample(numbers(4).requires_grad_())], mesh_shapes=[(2,)])


def test_nothing_is_said_where_all_is_reproduced():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_rule(torch.exp, [Sample(numbers(4))], mesh_shapes=[(2,)])


# ---- the sweep


def call(fn, *tensors):
    return Call(entries()["sin"], torch.float64, 0, Sample(*tensors), lambda made: made, False, fn)


def outcome(fn, known):
    (found,) = ours.outcomes(call(fn, numbers(4)), (2,), [((Shard(0),),)], known)
    return found.kind, found.text


def test_the_sweep_passes_over_what_torch_does_not_reproduce_and_nothing_else():
    known = reference(call(Unstable(torch.exp), numbers(4)))
    assert known is not None and not known.is_random
    assert known.unstable_names() == ["result 0"]
    assert outcome(Unstable(torch.exp), known) == ("rule", "")
    kind, text = outcome(Unstable(torch.sin), known)
    assert kind == "wrong" and "result 1: wrong value" in text
    kind, text = outcome(lambda x: (x.exp().float(), x.exp()), known)
    assert kind == "wrong" and "result 0: wrong dtype" in text
    kind, text = outcome(lambda x: (x[1:], x.exp()), known)
    assert kind == "wrong" and "result 0: wrong shape" in text
    assert outcome(Unstable(torch.exp), replace(known, unstable=frozenset()))[0] == "wrong"


RANDOM = ["nn.functional.dropout", "nn.functional.rrelu", "nn.functional.alpha_dropout"]


@pytest.mark.parametrize("name", RANDOM)
def test_results_and_gradients_of_random_operators_are_compared(name):
    """Drawn anew they differ, and with the same seed they do not."""
    calls = entries()[name].samples(torch.float64, 3)
    known = [reference(each) for each in calls]
    assert any(each.is_random and each.gradients for each in known)
    assert not [each.unstable_names() for each in known if each.unstable_names()]


def test_a_wrong_gradient_of_a_random_operator_is_seen():
    def function(x):
        made = x * torch.rand_like(x)
        return made if type(x) is torch.Tensor else 2 * made - made.detach()

    x = numbers(4).requires_grad_()
    right = reference(call(lambda x: x * torch.rand_like(x), x))
    assert right is not None and right.is_random and not right.unstable_names()
    (found,) = ours.outcomes(call(function, x), (2,), [((Shard(0),),)], right)
    assert found.kind == "wrong" and "wrong gradient of input 0" in found.text


def test_an_operator_of_which_values_were_not_compared_is_named():
    row = Row("sin", {"rule": 1}, unstable=["result 0 of (function) (float64[4])"])
    with pytest.warns(UnstableWarning, match=r"^sin: torch itself .*result 0 of \(function\)"):
        check(row)


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_the_sweep_describes_differences_of_float8(dtype):
    have, expected = (torch.tensor([1.0, 2.0, each]).to(dtype) for each in (4.0, NAN))
    assert not difference([expected], [expected.clone()])
    text = "wrong value: 1 of 3 are NaN or infinite in one alone"
    assert difference([have], [expected]) == text
    ones = torch.ones(3).to(dtype)
    assert difference([have], [ones]) == "wrong value: off by up to 3"


def test_the_sweep_compares_layouts_of_memory():
    assert difference([torch.eye(2).to_sparse()], [torch.eye(2)]).startswith("wrong layout")
