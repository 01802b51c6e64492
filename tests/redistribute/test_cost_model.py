"""One cost model: plans and the strategies of operators follow dtypes and the costs of a mesh."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.rules import ranks

import shardwise as sw
from shardwise import AxisCost, Costs, DeviceMesh, Layout, Partial, Replicate, Shard
from shardwise.redistribute.cost import (
    DEFAULT,
    LOOPBACK,
    communicates,
    costs_of,
    estimate,
    prices,
    set_costs,
)

ROWS, INNER, COLUMNS = 128, 800, 2
SLOW_START = Costs(start=1.0)
"""The fewest collectives win, whatever they move."""
SLOW_BYTES = Costs(default=AxisCost(alpha=0.0, beta=1.0), start=1e-9)
"""The fewest bytes win, in however many collectives."""


def product(mesh: DeviceMesh, dtype: torch.dtype) -> list[str]:
    """The collectives of x @ w: either x is gathered (one collective), or w is exchanged and the
    result, of few bytes, is pending a sum."""
    x = sw.zeros(ROWS, INNER, dtype=dtype, device_mesh=mesh, placements=[Shard(1)])
    w = sw.zeros(INNER, COLUMNS, dtype=dtype, device_mesh=mesh, placements=[Shard(1)])
    heard: list[str] = []
    mine = mesh.get_rank()
    with sw.listen(lambda event: heard.append(event.kind) if event.rank == mine else None):
        result = x @ w
    assert result.placements == ((Partial("sum"),) if "all_to_all" in heard else (Shard(1),))
    return heard


def on_two_ranks(run: Callable[[DeviceMesh], Any]) -> Any:
    first, second = sw.simulate(lambda: run(sw.init_device_mesh("cpu", (2,), ("tp",))), 2)
    assert first == second
    return first


FEW_COLLECTIVES, FEW_BYTES = ["all_gather"], ["all_to_all"]


@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)],
    ids=["float32 first", "bfloat16 first"],
)
def test_a_strategy_depends_on_the_bytes_of_an_element_and_is_cached_for_each_dtype(dtypes):
    def run(mesh: DeviceMesh) -> list[list[str]]:
        return [product(mesh, dtype) for dtype in (*dtypes, *dtypes)]

    expected = {torch.float32: FEW_BYTES, torch.bfloat16: FEW_COLLECTIVES}
    assert on_two_ranks(run) == [expected[dtype] for dtype in (*dtypes, *dtypes)]


def test_costs_of_a_mesh_change_a_strategy_that_was_planned_before():
    def run(mesh: DeviceMesh) -> list[list[str]]:
        found = []
        for costs in (None, SLOW_START, SLOW_BYTES, None):
            set_costs(mesh, costs)
            found.append([product(mesh, dtype) for dtype in (torch.float32, torch.bfloat16)])
        return found

    default = [FEW_BYTES, FEW_COLLECTIVES]
    assert on_two_ranks(run) == [default, [FEW_COLLECTIVES] * 2, [FEW_BYTES] * 2, default]


def test_a_call_with_one_free_strategy_is_not_looked_at_by_dtype():
    def run(mesh: DeviceMesh) -> int:
        sw.cache_clear()
        for dtype in (torch.float32, torch.bfloat16):
            x = sw.ones(8, 4, dtype=dtype, device_mesh=mesh, placements=[Shard(0)])
            before = sw.cache_info().misses
            x.add(x)
        return sw.cache_info().misses - before

    assert on_two_ranks(run) == 0


def test_calibrated_costs_are_those_of_the_mesh_and_of_no_other():
    def run() -> tuple[Any, ...]:
        mesh = sw.init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        before = costs_of(mesh)
        costs = sw.calibrate(mesh, repeats=1)
        source, target = (Layout.parse(text, mesh) for text in ("[64@dp, 64]", "[64, 64@tp]"))
        assert sw.plan_redistribute(source, target).costs == costs == costs_of(mesh)
        other = Layout(mesh["tp"], (64, 64))
        # Ranks of the other mesh may not know the costs of this one.
        assert sw.plan_redistribute(source, other).costs == costs_of(mesh["tp"]) == before
        return before, costs

    first, *others = sw.simulate(run, 4)
    assert first[0] == LOOPBACK
    assert all(other == first for other in others)
    assert (
        sw.simulate(lambda: costs_of(sw.init_device_mesh("cpu", (2, 2), ("dp", "tp"))), 4)
        == [LOOPBACK] * 4
    )


def test_a_redistribution_follows_the_costs_of_its_mesh():
    def run(mesh: DeviceMesh) -> list[Costs]:
        x = sw.ones(8, 4, device_mesh=mesh, placements=[Shard(0)])
        found = []
        for costs in (SLOW_START, SLOW_BYTES):
            set_costs(mesh, costs)
            found.append(sw.plan_redistribute(x.mesh_layout, Layout(mesh, (8, 4))).costs)
            assert x.redistribute(placements=[Replicate()]).to_local().shape == (8, 4)
        return found

    assert on_two_ranks(run) == [SLOW_START, SLOW_BYTES]


ONE_AXIS = [Replicate(), Shard(0), Shard(1), Partial("sum")]


@pytest.mark.parametrize(
    "costs",
    [DEFAULT, LOOPBACK, Costs({"y": AxisCost(3e-6, 7e-9)})],
    ids=["default", "loopback", "measured"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.complex128], ids=str)
def test_the_estimate_of_a_move_over_one_axis_is_the_time_of_its_plan(dtype, costs):
    mesh = DeviceMesh.abstract((4,), ("y",))
    for before in ONE_AXIS:
        for after in ONE_AXIS:
            if before.is_shard() and after.is_partial():
                continue  # nothing is sent now, but more later, which the estimate counts
            source, target = (
                Layout.from_placements(mesh, (64, 32), [each]) for each in (before, after)
            )
            guess = estimate(source, target, prices(mesh, costs))
            plan = sw.plan_redistribute(source, target, dtype, costs=costs)
            assert communicates(source, target) == any(step.communicates for step in plan.moves)
            assert guess.before + dtype.itemsize * guess.per_byte == pytest.approx(plan.seconds)


def test_a_step_over_several_axes_costs_what_the_dearest_of_them_does() -> None:
    costs = Costs({"fast": AxisCost(1.0, 8.0), "slow": AxisCost(4.0, 2.0)}, start=0.5)
    assert costs.seconds(["fast", "slow"], peers=3, bytes=10) == 0.5 + 3 * 4.0 + 10 * 8.0


def test_costs_that_are_none_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(sw.CostsError, match="axes: expected such as"):
        sw.Costs({"tp": 3.0})  # type: ignore[dict-item]
    with pytest.raises(sw.CostsError, match="costs: cannot write"):
        sw.Costs().save(tmp_path / "no such folder" / "costs.json")

    def run(mesh: DeviceMesh) -> None:
        with pytest.raises(sw.CostsError, match="repeats: expected at least 1, got 0"):
            sw.calibrate(mesh, repeats=0)

    ranks(run)


def test_a_step_says_what_it_does_over_which_axes() -> None:
    mesh = sw.DeviceMesh.abstract((2,), ("tp",))
    rows, whole = sw.Layout(mesh, (4,), {0: (0,)}), sw.Layout(mesh, (4,))
    (step,) = sw.plan_redistribute(rows, whole).moves
    assert repr(step) == f"all_gather over tp: {rows!r} -> {whole!r}"
