"""Wrappers of modules that know nothing of DTensors: right, or refused before they change anything.

`DistributedDataParallel` broadcasts parameters and averages gradients in C++, where a DTensor is
this rank's shard. Torch's own fully sharded and distributed modules would shard a shard. Where each
would be wrong, its constructor says what to do in its place.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import convert_parameters

from shardwise.api.wrappers import (
    check_manager,
    check_whole,
    refuse_dtensors,
    refuse_module,
    wrapped,
)
from shardwise.dispatch.collectives import check_read
from shardwise.dtensor.tensor import DTensor, redistribute_to, tensors_in
from shardwise.torch_internals import (
    DEVICE_COPIES,
    REPLICATE_STATE,
    TORCHS_DTENSOR,
    TORCHS_FSDP1,
    TORCHS_FSDP2,
    TORCHS_LOCAL_SGD,
    TORCHS_PLACEMENTS,
    TORCHS_REPLICATE,
    TORCHS_ZERO,
    torch_c,
    world_of_torch,
)
from shardwise.torch_patches.patch import Patch, Undo, replace, undo_all, when_imported

_REMEDY_FSDP = (
    "shard it with shardwise.fsdp.fully_shard, which knows its layout: "
    "fully_shard(module, mesh=mesh['dp'])"
)
_REMEDY = (
    "torch's DTensor would be made of this rank's shard; use x.redistribute(...) and shardwise's "
    "functions of the same name, or convert it: shardwise.interop.to_torch(x)"
)


def _guard(kind: Any, check: Callable[..., None]) -> Undo:
    """Check the arguments of a constructor before it runs."""
    construct = kind.__init__

    @functools.wraps(construct)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        check(*args, **kwargs)
        construct(self, *args, **kwargs)

    return replace(kind, "__init__", checked)


def _guard_data_parallel() -> Undo:
    construct = DistributedDataParallel.__init__
    signature = inspect.signature(construct)

    @functools.wraps(construct)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        module = given["module"]
        if isinstance(module, nn.Module):
            check_manager("DistributedDataParallel", module)
            check_whole("DistributedDataParallel", module, functools.partial(_ranks, given))
        construct(self, *args, **kwargs)
        wrapped.update(module.modules())

    def check(module: Any, *args: Any, **kwargs: Any) -> None:
        remedy = (
            "it would copy this rank's part to several devices of one process; start a process for "
            "each device, on a mesh with a data axis"
        )
        refuse_module("DataParallel", module, remedy)

    return undo_all(
        [replace(DistributedDataParallel, "__init__", checked), _guard(DataParallel, check)]
    )


def _ranks(given: dict[str, Any]) -> list[int]:
    """Return the ranks that a DistributedDataParallel is made for, from its arguments."""
    group, mesh = given.get("process_group"), given.get("device_mesh")
    if group is None and mesh is not None:
        group = mesh.get_group(mesh_dim=0)
    return sorted(world_of_torch().pg_group_ranks.get(group) or range(dist.get_world_size()))


def _guard_copies_to_devices() -> Undo:
    """Guard the functions of C below torch.cuda.comm, which a build without CUDA does not have."""

    def guarded(name: str) -> Any:
        copy = getattr(torch_c, name)

        @functools.wraps(copy)
        def checked(*args: Any, **kwargs: Any) -> Any:
            for tensor in tensors_in((args, kwargs)):
                if isinstance(tensor, DTensor):
                    check_read(f"torch.cuda.comm ({name})", tensor)
            return copy(*args, **kwargs)

        return checked

    names = [name for name in DEVICE_COPIES if hasattr(torch_c, name)]
    return undo_all([replace(torch_c, name, guarded(name)) for name in names])


# ---- torch's own sharded modules and tensors, changed when the program imports them


def _guard_torchs_fsdp() -> Undo:
    def change_first(module: ModuleType) -> Undo:
        def check(module: Any, *args: Any, **kwargs: Any) -> None:
            refuse_module("FullyShardedDataParallel", module, _REMEDY_FSDP)

        return _guard(module.FullyShardedDataParallel, check)

    def change_second(module: ModuleType) -> Undo:
        def check(param: Any, *args: Any, **kwargs: Any) -> None:
            refuse_dtensors("torch's fully_shard", [("a parameter", param)], _REMEDY_FSDP)

        return _guard(module.FSDPParam, check)

    def change_replicate(module: ModuleType) -> Undo:
        state: Any = getattr(module, REPLICATE_STATE)
        start = state.init

        @functools.wraps(start)
        def checked(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
            check_manager("torch's replicate", module)
            start(self, module, *args, **kwargs)

        return replace(state, "init", checked)

    return undo_all(
        [
            when_imported(TORCHS_FSDP1, change_first),
            when_imported(TORCHS_FSDP2, change_second),
            when_imported(TORCHS_REPLICATE, change_replicate),
        ]
    )


def _guard_torchs_dtensor() -> Undo:
    def guarded(owner: Any, name: str, function: str) -> Undo:
        method = inspect.getattr_static(owner, name)
        run = method.__func__  # a static or a class method

        @functools.wraps(run)
        def checked(*args: Any, **kwargs: Any) -> Any:
            refuse_dtensors(function, [("", each) for each in tensors_in((args, kwargs))], _REMEDY)
            return run(*args, **kwargs)

        return replace(owner, name, type(method)(checked))

    def change_placements(module: ModuleType) -> Undo:
        function = "torch's distribute_tensor"
        return undo_all(
            [
                guarded(module.Shard, "_make_shard_tensor", function),
                guarded(module.Replicate, "_make_replicate_tensor", function),
            ]
        )

    def change_dtensor(module: ModuleType) -> Undo:
        return guarded(module.DTensor, "from_local", "torch's DTensor.from_local")

    return undo_all(
        [
            when_imported(TORCHS_PLACEMENTS, change_placements),
            when_imported(TORCHS_DTENSOR, change_dtensor),
        ]
    )


# ---- optimizers that exchange parameters, and vectors of parameters


def _guard_exchanging_optimizers() -> Undo:
    def check(name: str, params: Any) -> None:
        split = [each for each in tensors_in(params) if isinstance(each, DTensor)]
        remedy = (
            "it would exchange this rank's part as if it were the parameter; any other optimizer "
            "updates the parts where they are, and keeps its state split as they are"
        )
        refuse_dtensors(name, [("a parameter", x) for x in split if not x._layout.is_whole], remedy)

    def change_zero(module: ModuleType) -> Undo:
        construct = module.ZeroRedundancyOptimizer.__init__

        @functools.wraps(construct)
        def checked(self: Any, params: Any, *args: Any, **kwargs: Any) -> None:
            params = params if isinstance(params, torch.Tensor) else list(params)
            check("ZeroRedundancyOptimizer", params)
            construct(self, params, *args, **kwargs)

        return replace(module.ZeroRedundancyOptimizer, "__init__", checked)

    def change_local_sgd(module: ModuleType) -> Undo:
        def check_groups(optim: Any, *args: Any, **kwargs: Any) -> None:
            check("PostLocalSGDOptimizer", optim.param_groups)

        return _guard(module.PostLocalSGDOptimizer, check_groups)

    return undo_all(
        [when_imported(TORCHS_ZERO, change_zero), when_imported(TORCHS_LOCAL_SGD, change_local_sgd)]
    )


def _keep_layouts_in_vectors() -> Undo:
    fill = convert_parameters.vector_to_parameters

    @functools.wraps(fill)
    def fill_in_layout(vec: torch.Tensor, parameters: Iterable[torch.Tensor]) -> None:
        parameters = list(parameters)
        ours = [(each, each._layout) for each in parameters if isinstance(each, DTensor)]
        fill(vec, parameters)
        for parameter, layout in ours:
            if parameter._layout is not layout:
                parameter.data = redistribute_to(parameter.data, layout)

    places = (convert_parameters, nn.utils)
    return undo_all([replace(each, "vector_to_parameters", fill_in_layout) for each in places])


PATCHES: tuple[Patch, ...] = (
    Patch(
        "torch.nn.parallel.DistributedDataParallel.__init__ and DataParallel.__init__",
        "Its broadcast would overwrite the shards of a sharded module, and its averages of "
        "gradients mix them: refused, except over ranks that hold the same shards. Torch has no "
        "hook there.",
        _guard_data_parallel,
    ),
    Patch(
        "the functions of torch._C below torch.cuda.comm",
        "They copy the memory of a tensor, which is a DTensor's shard, to other devices.",
        _guard_copies_to_devices,
    ),
    Patch(
        "torch's FullyShardedDataParallel.__init__ and FSDPParam.__init__ (of its fully_shard)",
        "They would shard this rank's shard of a DTensor: refused, with the function to use.",
        _guard_torchs_fsdp,
    ),
    Patch(
        "torch's Shard._make_shard_tensor, Replicate._make_replicate_tensor, DTensor.from_local",
        "distribute_tensor, distribute_module and parallelize_module of torch would make torch's "
        "DTensor of this rank's shard: refused. Class methods, so that functions that were "
        "imported before are covered.",
        _guard_torchs_dtensor,
    ),
    Patch(
        "the constructors of torch's ZeroRedundancyOptimizer and PostLocalSGDOptimizer",
        "They would broadcast or average this rank's shards of parameters: refused, as their first "
        "step would be only after some parameters have changed.",
        _guard_exchanging_optimizers,
    ),
    Patch(
        "torch.nn.utils.vector_to_parameters",
        "It assigns parts of a vector as the data of parameters, which take their layouts over: "
        "each parameter keeps its own.",
        _keep_layouts_in_vectors,
    ),
)
"""The changes to wrappers of modules."""
