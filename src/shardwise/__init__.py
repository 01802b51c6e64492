"""shardwise: distributed tensors for PyTorch in which the tensor *is* the local shard."""

from shardwise.box import Box
from shardwise.comm import Communicator, Event, Pending, communicator, listen
from shardwise.errors import (
    CollectiveError,
    LaunchError,
    LayoutError,
    MeshError,
    MismatchError,
    RankError,
    ShardwiseError,
)
from shardwise.launch import Workers, launch
from shardwise.layout import Layout
from shardwise.mesh import DeviceMesh, init_device_mesh
from shardwise.placement import Partial, Placement, Replicate, Shard
from shardwise.redistribute import (
    AxisCost,
    Costs,
    CostsError,
    MemoryCapError,
    Plan,
    PlanStep,
    calibrate,
    plan_redistribute,
    redistribute_local,
)
from shardwise.sim import simulate

__version__ = "0.1.0"

__all__ = [
    "AxisCost",
    "Box",
    "CollectiveError",
    "Communicator",
    "Costs",
    "CostsError",
    "DeviceMesh",
    "Event",
    "LaunchError",
    "Layout",
    "LayoutError",
    "MemoryCapError",
    "MeshError",
    "MismatchError",
    "Partial",
    "Pending",
    "Placement",
    "Plan",
    "PlanStep",
    "RankError",
    "Replicate",
    "Shard",
    "ShardwiseError",
    "Workers",
    "calibrate",
    "communicator",
    "init_device_mesh",
    "launch",
    "listen",
    "plan_redistribute",
    "redistribute_local",
    "simulate",
]
