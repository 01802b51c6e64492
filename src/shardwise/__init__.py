"""shardwise: distributed tensors for PyTorch in which the tensor *is* the local shard."""

import importlib

from shardwise.core import torch_version  # noqa: F401  (warns before anything of torch is changed)

# isort: split
from shardwise.api.distribute import distribute_module, distribute_tensor
from shardwise.api.factories import (
    arange,
    empty,
    eye,
    full,
    linspace,
    logspace,
    ones,
    rand,
    randint,
    randn,
    randperm,
    zeros,
)
from shardwise.api.flops import FlopCount, FlopTotals, flops
from shardwise.api.local_map import local_map
from shardwise.api.optimizers import OptimizerError
from shardwise.comm import Cause, Communicator, Event, Pending, communicator, listen
from shardwise.core.box import Box
from shardwise.core.errors import (
    CollectiveError,
    DispatchError,
    LaunchError,
    LayoutError,
    MeshError,
    MismatchError,
    PolicyError,
    RankError,
    ShardwiseError,
    TorchVersionWarning,
)
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh, init_device_mesh
from shardwise.core.placement import Partial, Placement, Replicate, Shard, _StridedShard  # noqa: F401
from shardwise.dispatch.fallback import FallbackWarning
from shardwise.dtensor.dcp import CheckpointStager
from shardwise.dtensor.shard_sizes import piece_sizes
from shardwise.dtensor.state import (
    CacheInfo,
    cache_clear,
    cache_info,
    explicit,
    fallback,
    fallback_counts,
    plain_tensors,
)
from shardwise.dtensor.tensor import DTensor
from shardwise.random.seed_check import RandomStateError, check_random_state, seed
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
from shardwise.redistribute.accumulate import accumulate
from shardwise.rules.registry import RuleError, register_rule
from shardwise.run.launch import Workers, launch
from shardwise.run.simulate import simulate
from shardwise.torch_patches import install as _install

_install()

__version__ = "0.1.0"

__all__ = [
    "AxisCost",
    "Box",
    "CacheInfo",
    "Cause",
    "CheckpointStager",
    "CollectiveError",
    "Communicator",
    "Costs",
    "CostsError",
    "DTensor",
    "DeviceMesh",
    "DispatchError",
    "Event",
    "FallbackWarning",
    "FlopCount",
    "FlopTotals",
    "LaunchError",
    "Layout",
    "LayoutError",
    "MemoryCapError",
    "MeshError",
    "MismatchError",
    "OptimizerError",
    "Partial",
    "Pending",
    "Placement",
    "Plan",
    "PlanStep",
    "PolicyError",
    "RandomStateError",
    "RankError",
    "Replicate",
    "RuleError",
    "Shard",
    "ShardwiseError",
    "TorchVersionWarning",
    "Workers",
    "accumulate",
    "arange",
    "cache_clear",
    "cache_info",
    "calibrate",
    "check_random_state",
    "communicator",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "explicit",
    "export",
    "eye",
    "fallback",
    "fallback_counts",
    "flops",
    "fsdp",
    "full",
    "init_device_mesh",
    "interop",
    "launch",
    "linspace",
    "listen",
    "local_map",
    "logspace",
    "ones",
    "parallel",
    "piece_sizes",
    "plain_tensors",
    "plan_redistribute",
    "rand",
    "randint",
    "randn",
    "randperm",
    "redistribute_local",
    "register_rule",
    "seed",
    "sharded",
    "simulate",
    "testing",
    "zeros",
]


_SUBMODULES = {
    *("device_mesh", "export", "fsdp", "interop", "parallel", "sharded", "tensor", "testing"),
}


def __getattr__(name: str) -> object:
    """Submodules that few programs need, and that take long to import."""
    if name in _SUBMODULES:
        return importlib.import_module(f"shardwise.{name}")
    raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
