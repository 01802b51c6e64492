"""Every pointwise function, on shards that form no layout and on random tilings."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from support.sharded_operators import check, odd, on_ranks, values, whole
from support.sharded_tilings import tilings

from shardwise.rules.pointwise import elementwise
from shardwise.rules.registry import functions_named
from shardwise.sharded import ShardingSpec

DATA = values(5, 4, grad=False)
NUMBERS: dict[str, tuple[Any, ...]] = {
    "mvlgamma": (2,),
    "threshold": (0.1, 0.5),
    "multigammaln": (2,),
    "hardtanh": (-1.0, 1.0),
}
INTEGERS = {
    *elementwise.names("""
        bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift bitwise_not
        __and__ __or__ __xor__ __lshift__ __rshift__ __invert__ gcd lcm
    """)
}
NAMES = sorted(
    {*elementwise.UNARY, *elementwise.ACTIVATIONS, *elementwise.BINARY, *elementwise.SPECIAL}
)


def _calls(name: str) -> list[tuple[Any, tuple[Any, ...], tuple[Any, ...]]]:
    """Yield the functions of a name with their further arguments, where torch accepts them."""
    data = (DATA * 3).to(torch.int64).abs() if name in INTEGERS else DATA.abs() / 4 + 0.1
    other = data.flip(0) if name not in INTEGERS else data.flip(0) % 5
    found = []
    for function in functions_named(name):
        if not callable(function):
            continue
        for rest in (NUMBERS.get(name, ()), (other,), (other[0],), (2,)):
            given = (2, data) if name.endswith("polygamma") else (data, *rest)
            try:
                expected = function(*map(deepcopy, given))  # some are told to work in place
            except (TypeError, RuntimeError, ValueError, NotImplementedError):
                continue
            if isinstance(expected, torch.Tensor) and expected.shape == data.shape:
                found.append((function, given, whole(expected)))
    return found


def test_functions_work_shard_by_shard() -> None:
    calls = {name: _calls(name) for name in NAMES}
    assert not [name for name, found in calls.items() if not found]
    specs = {how: spec for how, spec in odd(2).items() if how != "rows in turns"}

    def run() -> Any:
        made: dict[Any, Any] = {}

        def sharded(how: str, value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.shape != DATA.shape:
                return value
            if (how, id(value)) not in made:
                made[how, id(value)] = specs[how].shard(value)
            return made[how, id(value)].clone()

        for name, found in calls.items():
            for function, arguments, expected in found:
                for how, spec in specs.items():
                    result = function(*(sharded(how, each) for each in arguments))
                    assert result.sharding_spec() == spec, name
                    assert result.dtype == expected.dtype, name
                    for shard in result.local_shards():
                        torch.testing.assert_close(
                            shard.tensor,
                            expected[shard.metadata.box.slices],
                            equal_nan=True,
                            msg=f"{name} {how}",
                        )

    on_ranks(run, 2)


@pytest.mark.parametrize(
    "function", [F.relu, F.elu, F.leaky_relu, F.silu, F.hardtanh, F.relu6, F.mish, F.celu]
)
def test_activations_in_place(function: Any) -> None:
    expected = function(DATA.clone(), inplace=True)

    def run() -> None:
        for spec in odd(2).values():
            tensor = spec.shard(DATA)
            assert function(tensor, inplace=True) is tensor
            torch.testing.assert_close(tensor.full_tensor(), expected)

    on_ranks(run, 2)


# ---- random tilings


def _mixed(x: Any, y: Any) -> Any:
    row = torch.linspace(-1, 1, 4, dtype=torch.float64)
    result = torch.where(x > y, x * row, y.exp()) / (1 + x**2)
    result += x
    return F.gelu(result).clamp(max=2), result > 0


@settings(max_examples=15)
@given(spec=tilings((5, 4), 3))
def test_pointwise_programs_on_random_tilings(spec: ShardingSpec) -> None:
    check(_mixed, [spec, spec], [values(5, 4), values(5, 4, seed=1)], 3)


@settings(max_examples=15)
@given(one=tilings((5, 4), 3), two=tilings((5, 4), 3))
def test_copies_comparisons_and_writes_between_random_tilings(
    one: ShardingSpec, two: ShardingSpec
) -> None:
    data = values(5, 4, grad=False)

    def run() -> None:
        x, y = one.shard(data), two.shard(torch.zeros(5, 4, dtype=torch.float64))
        y.copy_(x)
        assert torch.equal(x, y)
        y[1:3, 2] = 5.0
        assert not torch.equal(x, y)
        expected = data.clone()
        expected[1:3, 2] = 5.0
        torch.testing.assert_close(y.full_tensor(), expected)

    on_ranks(run, 3)
