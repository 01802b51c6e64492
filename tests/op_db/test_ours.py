"""The harness of the sweep: what is wrong with a rule is seen, whatever it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.op_db import ours, page
from support.op_db.cases import How, cases, shown, single_splits, ways
from support.op_db.entries import Call, entries
from support.op_db.expected import SOME_VERSIONS, check
from support.op_db.outcomes import PART, Effort, Row, row_of
from support.op_db.page import PAGE, listed, outcome_of, written
from support.op_db.reference import difference, leaves, memory, on_plain, reference, unambiguous
from support.torch_versions import since

from shardwise.comm import communicator
from shardwise.core.errors import DispatchError
from shardwise.core.placement import Partial, Replicate, Shard
from shardwise.dtensor.tensor import DTensor
from shardwise.rules import registry
from shardwise.rules.helpers.row_exchange import mark_copy
from shardwise.rules.registry import OpInfo
from shardwise.rules.spec import Out, Spec, SplitContext, dims_of
from shardwise.testing import Sample


@pytest.fixture
def with_rule(monkeypatch) -> Callable[..., Row]:
    """What comes of an operator whose rule is replaced, or taken away."""

    def row(name: str, rule: Any, effort: Effort = PART) -> Row:
        for function in registry.functions_named(name):
            table = registry._aten if isinstance(function, registry.Aten) else registry._table
            key = function.name if isinstance(function, registry.Aten) else function
            monkeypatch.setitem(
                table, key, rule if isinstance(rule, OpInfo) else OpInfo(name, rule)
            )
        return row_of(name, effort)

    return row


def unary(
    lower: Callable[[SplitContext], Any] | None = None, **options: Any
) -> Callable[..., Spec]:
    """The rule of an operator of one tensor, element by element."""

    def rule(input: torch.Tensor, **_: Any) -> Spec:
        dims = dims_of(input)
        out = Out(dims, tuple(input.shape))
        return Spec([(input, dims)], [out], lower=lower, **options)

    return rule


def test_a_right_rule_passes(with_rule):
    assert with_rule("exp", unary()).outcome == "rule"


def test_no_rule_is_a_fallback(with_rule):
    assert with_rule("exp", None).outcome == "fallback"


def test_a_missing_reduction_is_seen(with_rule):
    def rule(input: torch.Tensor) -> Spec:
        dims = dims_of(input)
        return Spec([(input, dims)], [Out((), ())], dict.fromkeys(dims, "whole"))

    row = with_rule("trace", rule)
    assert row.outcome == "wrong"
    assert "wrong value" in row.texts[0]


def test_pending_sums_through_what_is_not_linear_are_seen(with_rule):
    row = with_rule("exp", unary(linear=[[0]]))
    assert row.outcome == "wrong"
    assert " P" in row.texts[0] and "wrong value" in row.texts[0]


class _Twice(torch.autograd.Function):
    """The right values; twice the gradient."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        result = x.exp()
        context.save_for_backward(result)
        return result

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        (result,) = context.saved_tensors
        return 2 * gradient * result


@pytest.mark.parametrize("lowered", [_Twice.apply, lambda x: x.detach().exp()])
def test_a_wrong_gradient_is_seen(with_rule, lowered):
    row = with_rule("exp", unary(lambda here: lambda x, **_: lowered(x)))
    assert row.outcome == "wrong"
    assert "wrong gradient" in row.texts[0]


def test_a_stale_shape_is_seen(with_rule):
    def rule(input: torch.Tensor) -> Spec:
        dims = dims_of(input)
        return Spec([(input, dims)], [Out(dims, tuple(input.shape))], is_view=True)

    row = with_rule("t", rule)
    assert row.outcome == "wrong"
    assert "shape" in row.texts[0]


def test_a_wrong_dtype_is_seen(with_rule):
    row = with_rule("exp", unary(lambda here: lambda x, **_: x.exp().float()))
    assert row.outcome == "wrong"
    assert "wrong dtype" in row.texts[0]


def test_a_result_that_shares_memory_is_seen(with_rule):
    row = with_rule("clone", unary(lambda here: lambda x, **_: x.view_as(x)))
    assert row.outcome == "wrong"
    assert "shares memory" in row.texts[0]


def test_a_copy_in_place_of_a_view_is_seen_unless_it_says_so(with_rule):
    def transposed(copy: Callable[[torch.Tensor], torch.Tensor]) -> Row:
        def rule(input: torch.Tensor) -> Spec:
            dims = dims_of(input)
            out = Out(dims[::-1], tuple(input.shape)[::-1])
            return Spec([(input, dims)], [out], lower=lambda here: lambda x: copy(x.t()))

        return with_rule("t", rule)

    row = transposed(torch.clone)
    assert row.outcome == "wrong"
    assert "unmarked" in row.texts[0]
    assert transposed(lambda x: mark_copy(x.clone(), "t")).outcome == "rule"


def test_a_plain_tensor_is_seen(with_rule):
    known = OpInfo("exp", handler=lambda func, args, kwargs: args[0].full_tensor().exp())
    row = with_rule("exp", known)
    assert row.outcome == "wrong"
    assert "a plain tensor" in row.texts[0]


def test_an_error_is_seen(with_rule):
    def raises(*_: Any, **__: Any) -> torch.Tensor:
        raise ValueError("not this")

    row = with_rule("exp", unary(lambda here: raises))
    assert row.outcome == "wrong"
    assert "raised ValueError: not this" in row.texts[0] and "part" not in row.texts[0]


def test_a_rule_that_does_not_fit_is_wrong_and_no_refusal(with_rule):
    row = with_rule("exp", lambda input, **_: Spec([], [Out((), ())]))
    assert row.outcome == "wrong"
    assert "RuleError" in row.texts[0]


def test_ranks_that_part_are_seen(with_rule):
    def lower(context: SplitContext) -> Any:
        def run(x: torch.Tensor, **_: Any) -> torch.Tensor:
            if context.mesh.get_rank() == 0:
                communicator(context.mesh, 0).all_reduce(torch.ones(1))
            return x.exp()

        return run

    row = with_rule("exp", unary(lower))
    assert row.outcome == "wrong"
    assert "ranks part" in row.texts[0]
    assert sum(row.counts.values()) == sum(with_rule("exp", unary()).counts.values())


def test_numbers_that_depend_on_the_layout_are_seen(with_rule):
    rule = unary(lambda here: lambda x, **_: torch.randn(x.shape).to(x))
    row = with_rule("randn_like", rule, PART._replace(samples=6))
    assert row.outcome == "wrong"
    assert "wrong value" in row.texts[0]


def test_memory_as_it_is_may_hold_anything(with_rule):
    row = with_rule("empty_like", unary(lambda here: lambda x, **_: torch.ones_like(x)))
    assert row.outcome == "rule"


def test_every_form_is_tried(with_rule):
    row = with_rule("exp", unary(), Effort(1, 1, 2, 1, 1, splits=False))
    assert row.forms == ["function", "method", "in place", "out"]


# ---- one case


def call(
    *tensors: torch.Tensor,
    graded: Any = lambda made: made,
    name: str = "sin",
    fn: Any = torch.sin,
) -> Call:
    return Call(entries()[name], torch.float64, 0, Sample(*tensors), graded, False, fn)


def case(of: Call, how: list[How], fn: Any, plain: Any = None) -> ours.Outcome:
    """What comes of a function on two ranks, where it should be `plain`."""
    expected = reference(replace(of, fn=plain or fn))
    assert expected is not None
    (found,) = ours.outcomes(replace(of, fn=fn), (2,), [tuple(how)], expected)
    return found


ROWS: How = (Shard(0),)


def numbers(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float64, requires_grad=True)


def on_ranks(ranks: set[int], act: Callable[[DTensor], Any]) -> Callable[..., Any]:
    """A function that is right, but on some ranks."""

    def function(x: torch.Tensor) -> Any:
        is_one = isinstance(x, DTensor) and x.mesh_layout.mesh.get_rank() in ranks
        return act(x) if is_one else x.exp()

    return function


def test_a_refusal_is_one_if_all_ranks_refuse():
    def refuse(x: DTensor) -> None:
        raise DispatchError("exp: not today")

    whole = call(numbers(4)), [(Replicate(),)]
    every = case(*whole, on_ranks({0, 1}, refuse))
    assert every.kind == "refused" and "not today" in every.text
    some = case(*whole, on_ranks({1}, refuse))
    assert some.kind == "wrong" and "only some ranks refuse" in some.text


def test_what_is_wrong_on_one_rank_is_wrong():
    assert case(call(numbers(4)), [(Replicate(),)], on_ranks({1}, torch.sin)).kind == "wrong"


def test_a_gradient_that_is_missing_is_zero():
    def with_zeros(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.exp() + 0 * y

    def without(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.exp()

    two = call(numbers(4), numbers(4))
    assert case(two, [ROWS, ROWS], without, with_zeros).kind == "rule"
    assert case(two, [ROWS, ROWS], with_zeros, without).kind == "rule"


def test_only_what_has_a_gradient_by_op_db_is_differentiated():
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.exp(), x.sin() if isinstance(x, DTensor) else 2 * x.sin() - x.sin().detach()

    assert "wrong gradient" in case(call(numbers(4)), [ROWS], function).text
    first = call(numbers(4), graded=lambda made: made[0])
    assert case(first, [ROWS], function).kind == "rule"


def test_empty_pieces_share_no_memory():
    assert case(call(numbers(1)), [ROWS], torch.exp).kind == "rule"
    known = reference(call(numbers(0), fn=torch.exp))
    assert known is not None and known.views == [[]]


def test_a_rank_hears_its_own_collectives_alone():
    found = case(call(numbers(4)), [ROWS], lambda x: torch.softmax(x, 0))
    assert [kind for kind, _ in found.collectives] == ["all_reduce", "all_reduce"]


# ---- what a call gives in one process


def test_random_is_what_differs_between_seeds_or_sets_one_itself():
    def is_random(of: Call, fn: Any) -> bool:
        known = reference(replace(of, fn=fn))
        assert known is not None
        return known.is_random

    assert is_random(call(numbers(4)), torch.rand_like)
    assert not is_random(call(numbers(4)), torch.sin)
    assert not is_random(call(numbers(4), name="empty_like"), torch.empty_like)
    dropout = entries()["nn.functional.dropout"]
    (sample,) = dropout.samples(torch.float64, 1)
    assert is_random(sample, dropout.info.op)
    assert case(call(numbers(4)), [ROWS], torch.rand_like).kind == "rule"
    once, again = (on_plain(call(numbers(4), fn=torch.rand_like), 1) for _ in range(2))
    assert torch.equal(once[0][0], again[0][0])


def test_random_numbers_of_another_shape_are_no_reference():
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.rand_like(x[1:] if isinstance(x, DTensor) else x)

    with pytest.raises(AssertionError, match="wrong shape"):
        reference(call(numbers(4), fn=function))


def test_what_torch_refuses_has_no_reference():
    assert reference(call(numbers(4), fn=torch.linalg.inv)) is None


def test_indices_of_topk_may_be_any_of_equals():
    of = call(numbers(4), name="topk")
    for picked in (0, 3):
        made = torch.ones(1), torch.tensor([picked])
        _, found = unambiguous(of, of.sample.tensors(), made)
        assert found.tolist() == [1.0]


@pytest.mark.parametrize(
    ("have", "expected", "problem"),
    [
        ([torch.ones(2)], [], "1 results, expected 0"),
        ([2.0], [torch.ones(())], "wrong type: float, expected a tensor"),
        ([torch.ones(2)], [torch.ones(1)], "wrong shape: [2], expected [1]"),
        ([torch.ones(2)], [torch.ones(2).double()], "wrong dtype"),
        ([torch.ones(2)], [torch.tensor([1.0, 2])], "wrong value: off by up to 1"),
        ([1, torch.tensor([1, 2])], [1, torch.tensor([1, 3])], "result 1: wrong value: 1 of 2"),
        ([True], [False], "wrong value: True, expected False"),
        ([2.0], [1.0], "wrong value: 2.0, expected 1.0"),
        ([torch.ones(1).double() + 1e-6], [torch.ones(1).double()], "wrong value: off by up to"),
        ([torch.nan, 1.0], [torch.nan, 1.0 + 1e-9], ""),
        ([torch.tensor([torch.nan])], [torch.tensor([torch.nan])], ""),
        ([torch.tensor([1e6, 1.0])], [torch.tensor([1e6, 1.001])], ""),
        ([torch.eye(2).to_sparse()], [torch.eye(2).to_sparse()], ""),
    ],
)
def test_results_are_compared_as_far_as_their_dtype_goes(have, expected, problem):
    assert difference(have, expected).startswith(problem)
    assert bool(difference(have, expected)) == bool(problem)


def test_values_are_passed_over_where_any_will_do():
    assert not difference([torch.ones(2), 1.0], [torch.zeros(2), 2.0], values=False)


def test_a_result_is_taken_apart_but_for_sizes():
    size = torch.Size([2, 3])
    assert list(leaves((1, [size, "a"]))) == [1, size, "a"]
    assert memory(torch.eye(2).to_sparse()) == 0


# ---- layouts and samples


def test_every_tensor_lies_in_each_of_its_ways():
    tensors = [torch.zeros(3, 4), torch.zeros(2, dtype=torch.bool)]
    assert ways(tensors[0], 1) == [(Replicate(),), (Shard(0),), (Shard(1),), (Partial(),)]
    assert ways(tensors[1], 1) == [(Replicate(),), (Shard(0),)]
    assert ways(torch.zeros(2, dtype=torch.float8_e4m3fn), 1) == ways(tensors[1], 1)
    assert len(ways(tensors[0], 2)) == 16
    found = cases(tensors, 1, most=100, seed="any")
    assert {first for first, _ in found} == set(ways(tensors[0], 1))
    assert {second for _, second in found} == set(ways(tensors[1], 1))
    assert cases(tensors, 1, most=100, seed="any") == found
    assert len(cases(tensors, 2, most=5, seed="any")) == 5
    assert len({cases(tensors, 1, most=1, seed=str(at))[0][0] for at in range(20)}) == 4
    assert shown(((Shard(0), Partial()), (Replicate(), Shard(1)))) == "S(0) P, R S(1)"


def test_a_single_split_is_of_one_dim_that_can_be_split():
    whole, rows = (Replicate(),), (Shard(0),)
    found = single_splits([torch.zeros(3, 1), torch.zeros(2)])
    assert found == [(0, 0, (rows, whole)), (1, 0, (whole, rows))]


def test_samples_are_the_same_every_time():
    entry = entries()["mul"]
    once, again = (entry.samples(torch.float64, 4) for _ in range(2))
    assert [each.number for each in once] == [each.number for each in again]
    for first, second in zip(once, again, strict=True):
        assert all(map(torch.equal, first.sample.tensors(), second.sample.tensors()))


def test_the_page_says_all_that_was_found():
    rows = [
        Row(
            "add", {"rule": 3}, [], ["[4] of 32 B: 0"], theirs={"pass": 3}, theirs_when_even="pass"
        ),
        Row("b|c", {"rule": 3, "fallback": 1}, theirs={"pass": 1, "wrong value": 2, "x": 1}),
        Row("arange"),
    ]
    text = written(rows)
    assert "| by rule: right, and computed on the shards | 1 |" in text
    assert "| fallback in some case: right, but every rank computes everything | 1 |" in text
    assert "| wrong | 0 |" in text
    assert "passes all cases of 1 of 2\noperators, and 4 of 7 cases" in text
    assert "it passes\n1 of 1 operators" in text
    assert "| `add` | rule | [4] of 32 B: 0 | all |" in text
    assert "| `b\\|c` | fallback |  | 1 of 4; wrong value |" in text
    assert "| `arange` | nothing to split |  |  |" in text


def test_the_page_keeps_what_it_says_of_operators_of_other_versions(monkeypatch):
    versions = {"old": (None, "2.14"), "new": ("2.14", None), "both": ("2.14", "2.15")}
    monkeypatch.setattr(page, "SOME_VERSIONS", versions)
    before = written([Row("add", {"rule": 1}), Row("old", {"rule": 2}, splits=["[2] of 8 B: 0"])])
    assert "| `old` | rule | [2] of 8 B: 0 |  | before 2.14 |" in before
    text = written([Row("add", {"fallback": 1}), Row("new", {"rule": 1}), Row("both")], before)
    assert {name: outcome_of(line) for name, line in listed(text).items()} == {
        "add": "fallback",
        "new": "rule",
        "both": "nothing to split",
        "old": "rule",
    }
    assert "| `new` | rule |  |  | since 2.14 |" in text
    assert "since 2.14 before 2.15 |" in text


def test_the_page_names_what_torch_does_not_reproduce():
    row = Row("add", {"rule": 1}, unstable=["result 0 of (function) (float64[4])"])
    text = written([row])
    assert "| add | result 0 of (function) (float64[4]) |" in text
    assert listed(text).keys() == {"add"}


def test_operators_that_only_some_versions_have_are_known():
    for name, (first, end) in SOME_VERSIONS.items():
        is_there = (first is None or since(first)) and not (end is not None and since(end))
        assert (name in entries()) == is_there, name


def test_the_page_in_docs_has_every_operator_and_nothing_wrong():
    found = {name: outcome_of(line) for name, line in listed(PAGE.read_text("utf-8")).items()}
    assert found.keys() == entries().keys() | SOME_VERSIONS.keys()
    outcomes = Counter(found.values())
    assert outcomes["wrong"] == 0
    assert outcomes["refused"] <= 10
    assert outcomes["rule"] >= 0.75 * len(found)


def test_an_operator_of_which_nothing_was_tried_is_complained_of():
    check(Row("arange"))
    check(Row("squeeze", {"refused": 1}, refused=["in place"]))
    for row, complaint in [
        (Row("add"), "nothing was tried"),
        (Row("squeeze", {"refused": 1}, refused=["function"]), "refused as"),
        (Row("add", {"refused": 1}), "no known reason"),
        (Row("sort", {"fallback": 1}), "must not fall back"),
        (Row("add", {"wrong": 1}), "wrong"),
    ]:
        with pytest.raises(AssertionError, match=complaint):
            check(row)
