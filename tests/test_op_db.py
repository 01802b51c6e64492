"""The harness of the sweep: what is wrong with a rule is seen, whatever it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_db.cases import cases, shown, ways
from op_db.entries import entries
from op_db.outcomes import PART, Effort, Row, row_of
from op_db.page import PAGE, written

from shardwise.comm import communicator
from shardwise.dispatch.entry import DispatchError
from shardwise.placement import Partial, Replicate, Shard
from shardwise.rules import registry
from shardwise.rules.registry import Known
from shardwise.rules.spec import Here, Out, Spec, dims_of


@pytest.fixture
def with_rule(monkeypatch) -> Callable[..., Row]:
    """What comes of an operator whose rule is replaced, or taken away."""

    def row(name: str, rule: Callable[..., Spec] | None, effort: Effort = PART) -> Row:
        for function in registry.functions(name):
            table = registry._aten if isinstance(function, registry.Aten) else registry._table
            key = function.name if isinstance(function, registry.Aten) else function
            monkeypatch.setitem(table, key, Known(name, rule))
        return row_of(name, effort)

    return row


def unary(lower: Callable[[Here], Any] | None = None, **options: Any) -> Callable[..., Spec]:
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


def test_a_copy_in_place_of_a_view_is_seen(with_rule):
    def rule(input: torch.Tensor) -> Spec:
        dims = dims_of(input)
        out = Out(dims[::-1], tuple(input.shape)[::-1])
        return Spec([(input, dims)], [out], lower=lambda here: lambda x: x.t().clone())

    row = with_rule("t", rule)
    assert row.outcome == "wrong"
    assert "unmarked" in row.texts[0]


def test_ranks_that_part_are_seen(with_rule):
    def lower(here: Here) -> Any:
        def run(x: torch.Tensor, **_: Any) -> torch.Tensor:
            if here.mesh.get_rank() == 0:
                communicator(here.mesh, 0).all_reduce(torch.ones(1))
            return x.exp()

        return run

    row = with_rule("exp", unary(lower))
    assert row.outcome == "wrong"
    assert "ranks part" in row.texts[0]


def refusing(ranks: Callable[[int], bool]) -> Callable[[Here], Any]:
    def lower(here: Here) -> Any:
        def run(x: torch.Tensor, **_: Any) -> torch.Tensor:
            if ranks(here.mesh.get_rank()):
                raise DispatchError("exp: not today")
            return x.exp()

        return run

    return lower


def test_a_refusal_is_one_if_all_ranks_refuse(with_rule):
    row = with_rule("exp", unary(refusing(lambda rank: True)))
    assert row.outcome == "refused"
    assert "not today" in row.texts[0]


def test_a_refusal_of_some_ranks_is_wrong(with_rule):
    row = with_rule("exp", unary(refusing(lambda rank: rank == 1)))
    assert row.outcome == "wrong"
    assert any("only some ranks" in text or "ranks part" in text for text in row.texts)


def test_numbers_that_depend_on_the_layout_are_seen(with_rule):
    rule = unary(lambda here: lambda x, **_: torch.randn(x.shape).to(x))
    row = with_rule("randn_like", rule, PART._replace(samples=6))
    assert row.outcome == "wrong"
    assert "wrong value" in row.texts[0]


def test_every_tensor_lies_in_each_of_its_ways():
    tensors = [torch.zeros(3, 4), torch.zeros(2, dtype=torch.bool)]
    assert ways(tensors[0], 1) == [(Replicate(),), (Shard(0),), (Shard(1),), (Partial(),)]
    assert ways(tensors[1], 1) == [(Replicate(),), (Shard(0),)]
    assert len(ways(tensors[0], 2)) == 16
    found = cases(tensors, 1, most=100, seed="any")
    assert {first for first, _ in found} == set(ways(tensors[0], 1))
    assert {second for _, second in found} == set(ways(tensors[1], 1))
    assert cases(tensors, 1, most=100, seed="any") == found
    assert len(cases(tensors, 2, most=5, seed="any")) == 5
    assert shown(((Shard(0), Partial()), (Replicate(), Shard(1)))) == "S(0) P, R S(1)"


def test_samples_are_the_same_every_time():
    entry = entries()["mul"]
    once, again = (entry.samples(torch.float64, 4) for _ in range(2))
    assert [each.number for each in once] == [each.number for each in again]
    for first, second in zip(once, again, strict=True):
        assert all(map(torch.equal, first.sample.tensors(), second.sample.tensors()))


def test_the_page_says_all_that_was_found():
    rows = [
        Row("add", {"rule": 3}, [], ["[4] of 32 B: 0"], ["function"], {"pass": 3}, "pass"),
        Row("b|c", {"rule": 3, "fallback": 1}, theirs={"pass": 1, "wrong value": 2, "x": 1}),
        Row("arange"),
    ]
    text = written(rows)
    assert "| by rule | 1 |" in text
    assert "| fall back in some case: right, but every rank computes all | 1 |" in text
    assert "| wrong | 0 |" in text
    assert "it passes all cases of 1 of 2\noperators, and 4 of 7 cases" in text
    assert "it passes 1 of 1\noperators" in text
    assert "| `add` | rule | [4] of 32 B: 0 | all |" in text
    assert "| `b\\|c` | fallback |  | 1 of 4; wrong value |" in text
    assert "| `arange` | nothing to split |  |  |" in text


def test_the_page_in_docs_has_every_operator_and_nothing_wrong():
    text = PAGE.read_text()
    listed = {
        line.split("`")[1]: line.split(" | ")[1]
        for line in text.splitlines()[20:]
        if " | " in line and line.startswith("| `")
    }
    outcomes = Counter(listed[name] for name in entries())
    assert outcomes["wrong"] == 0
    assert outcomes["refused"] <= 10
    assert outcomes["rule"] >= 0.75 * len(entries())
