"""Private names of torch: process groups, their collectives, and RPC."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.rpc

from shardwise.torch_internals.lookup import take as _take

# ---- process groups

_c10d = "torch.distributed.distributed_c10d"
_take(f"{_c10d}._world", "the process groups by what they are")
default_group: Any = _take(f"{_c10d}._get_default_group", "all ranks; an error before the start")
new_process_group: Any = _take(
    f"{_c10d}._new_process_group_helper",
    "makes a group under a name of ours, by its members only",
    "group_size group_rank global_ranks_in_group backend store group_name backend_options timeout "
    "group_desc",
)
root_of_torch_mesh: Any = _take(
    "torch.distributed.device_mesh.DeviceMesh._get_root_mesh", "what a mesh of torch was cut from"
)
device_for_objects: Any = _take(
    f"{_c10d}._get_object_coll_device", "the device on which a group sends bytes", "group"
)
forget_group: Any = _take(
    f"{_c10d}._cleanup_process_group_global_state", "removes a group that was aborted"
)
set_default_group: Any = _take(
    f"{_c10d}._update_default_pg", "set to None after all ranks were aborted"
)
register_group: Any = _take(
    "torch._C._distributed_c10d._register_process_group",
    "makes a group known by its name, for programs",
)
resolve_group: Any = _take(
    "torch._C._distributed_c10d._resolve_process_group", "the group of a name"
)
current_rpc_agent: Any = None
is_rpc_running: Any = None
if torch.distributed.rpc.is_available():  # not in every build of torch
    current_rpc_agent = _take("torch.distributed.rpc._get_current_rpc_agent", "RPC's workers")
    is_rpc_running = _take(
        "torch.distributed.rpc._is_current_rpc_agent_set", "whether RPC was started"
    )

if TYPE_CHECKING:
    import torch.distributed.remote_device

    RemoteDevice = torch.distributed.remote_device._remote_device
else:
    RemoteDevice = _take(
        "torch.distributed.remote_device._remote_device", "`rank:1/cpu` in a ShardedTensor's spec"
    )

_take(
    "torch.distributed.ProcessGroup._allgather_base", "all_gather into one buffer, without a copy"
)
_take("torch.distributed.ProcessGroup._reduce_scatter_base", "reduce_scatter of one buffer")
_take("torch.distributed.ProcessGroup._get_backend", "gives a group's timeout")

ProcessGroupBackend: Any = _take(
    "torch._C._distributed_c10d.Backend", "the class of the backends of a group, such as gloo's"
)
broadcast_coalesced: Any = _take(
    "torch.distributed._broadcast_coalesced", "how wrappers broadcast parameters"
)
start_coalescing: Any = _take(
    "torch.distributed.ProcessGroup._start_coalescing", "several calls go to NCCL as one"
)
end_coalescing: Any = _take("torch.distributed.ProcessGroup._end_coalescing", "the same")


def world_of_torch() -> Any:
    """Return torch's record of process groups. Threads of a test may have one each."""
    return torch.distributed.distributed_c10d._world


def start_all_gather(group: Any, out: torch.Tensor, part: torch.Tensor) -> Any:
    """Start an all_gather into one buffer; return the work to wait for."""
    return group._allgather_base(out, part)


def start_reduce_scatter(group: Any, out: torch.Tensor, packed: torch.Tensor, options: Any) -> Any:
    """Start a reduce_scatter of one buffer per rank; return the work to wait for."""
    return group._reduce_scatter_base(out, packed, options)


def timeout_of(group: Any) -> Any:
    """Return the timeout of a group's collectives; torch's default for threads, which have none."""
    if world_of_torch().pg_map[group][0] == "threaded":
        return torch.distributed.constants.default_pg_timeout
    return timeout_in(group._get_backend(torch.device(device_for_objects(group))).options)


def timeout_in(options: Any) -> Any:
    """Return the timeout that the options of a backend give."""
    return options._timeout
