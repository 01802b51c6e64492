"""Redistribution: plan (pure), then execute, with gradients."""

from shardwise.redistribute.autograd import redistribute_local
from shardwise.redistribute.cost import AxisCost, Costs, CostsError, calibrate
from shardwise.redistribute.plan import MemoryCapError, Plan, PlanStep, plan_redistribute

__all__ = [
    "AxisCost",
    "Costs",
    "CostsError",
    "MemoryCapError",
    "Plan",
    "PlanStep",
    "calibrate",
    "plan_redistribute",
    "redistribute_local",
]
