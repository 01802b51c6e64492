"""Tensors in arguments and results of modules are found and replaced in whatever contains them."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.parallel import PlanError
from shardwise.parallel.containers import (
    check_fields,
    forward_arguments,
    map_tensors,
    replace_first_argument,
    replace_first_result,
)

Pair = namedtuple("Pair", ["left", "right"])
ONE, TWO = torch.ones(1), torch.full((1,), 2.0)


@dataclass(frozen=True)
class Output:
    note: str
    value: torch.Tensor


def doubled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        (ONE, TWO),
        ((None, ONE, ONE), (None, TWO, ONE)),
        (["a", ONE], ["a", TWO]),
        (Pair("a", ONE), Pair("a", TWO)),
        ({"note": "a", "value": ONE, "other": ONE}, {"note": "a", "value": TWO, "other": ONE}),
        (Output("a", ONE), Output("a", TWO)),
    ],
)
def test_the_first_tensor_among_results_is_replaced(results: Any, expected: Any) -> None:
    found = replace_first_result(results, doubled, "it")
    assert type(found) is type(expected) and found == expected


@pytest.mark.parametrize("results", [None, 3, (), ("a",), {"note": "a"}, Output("a", None)])  # type: ignore[arg-type]
def test_results_without_a_tensor_are_refused(results: Any) -> None:
    with pytest.raises(PlanError, match=f"it: expected a tensor.*{type(results).__name__}"):
        replace_first_result(results, doubled, "it")


def test_the_first_tensor_of_a_call_is_found_by_position_and_then_by_the_order_of_the_forward():
    assert replace_first_argument((1, ONE), {}, ["x"], doubled, "it") == ((1, TWO), {})
    keywords = {"other": ONE, "x": ONE}
    args, kwargs = replace_first_argument((1,), keywords, ["x", "other"], doubled, "it")
    assert args == (1,) and kwargs == {"other": ONE, "x": TWO}
    with pytest.raises(PlanError, match="it: expected a tensor among the arguments, got none"):
        replace_first_argument((1,), {"x": "a"}, ["x"], doubled, "it")


def test_every_tensor_is_replaced_also_in_what_is_nested():
    found = map_tensors({"a": [ONE, Output("b", ONE)], "c": Pair(ONE, 3)}, doubled)
    assert found["a"][0] == TWO and found["c"] == Pair(TWO, 3)
    assert map_tensors(Output("a", {"b": ONE}), doubled).value == {"b": TWO}  # type: ignore[arg-type]


def test_fields_that_a_result_lacks_are_named():
    check_fields(Output("a", ONE), ["value"], "it")
    with pytest.raises(PlanError, match="expected a dict or dataclass with value, got tuple"):
        check_fields((ONE,), ["value"], "it")


def test_a_forward_that_is_not_python_may_take_anything():
    class Builtin(nn.Module):
        forward = dict.update  # type: ignore[assignment]

    class Python(nn.Module):
        def forward(self, x: Any, /, y: Any, *, z: Any = None) -> Any: ...

    assert forward_arguments(Builtin()) == ([], [], True)
    assert forward_arguments(Python()) == (["x", "y"], ["y", "z"], False)
