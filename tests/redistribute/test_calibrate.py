"""Measuring what communication costs."""

import math

import shardwise as sw


def measured() -> sw.Costs:
    mesh = sw.init_device_mesh("cpu", (2, 3, 1), ("dp", "tp", "pp"))
    return sw.calibrate(mesh, repeats=3)


def test_every_rank_gets_the_same_costs_for_every_axis_with_more_than_one_rank():
    first, *others = sw.simulate(measured, 6)
    assert all(other == first for other in others)
    assert set(first.axes) == {"dp", "tp"}
    for cost in first.axes.values():
        assert 0 < cost.alpha < math.inf and 0 <= cost.beta < math.inf
    assert first.start > 0


def test_measured_costs_are_what_a_plan_reads_from_a_file(tmp_path):
    path = tmp_path / "costs.json"
    costs = sw.simulate(measured, 6)[0]
    costs.save(path)
    mesh = sw.DeviceMesh.abstract((2, 3, 1), ("dp", "tp", "pp"))
    source, target = (sw.Layout.parse(text, mesh) for text in ("[64@dp, 64]", "[64, 64@tp]"))
    plan = sw.plan_redistribute(source, target, costs=path)
    assert plan.costs == costs
    assert plan.seconds == sw.plan_redistribute(source, target, costs=costs).seconds
