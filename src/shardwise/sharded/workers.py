"""The RPC workers of torch.distributed: whether they run, and which rank each is."""

from __future__ import annotations

from typing import Any

from shardwise.sharded.errors import ShardedStateError


def ranks_by_name(reason: str) -> dict[str, int]:
    """The rank of each worker.

    Arguments:
        reason: why it is asked, for the message if RPC is not running.
    """
    agent = check_running(reason)._get_current_rpc_agent()
    return {each.name: each.id for each in agent.get_worker_infos()}


def check_running(reason: str) -> Any:
    """torch's RPC; refused where it is not running."""
    from torch.distributed import rpc

    api: Any = rpc
    if not rpc.is_available() or not api._is_current_rpc_agent_set():
        raise ShardedStateError(
            f"{reason}, and RPC is not running; call torch.distributed.rpc.init_rpc(name, "
            "rank=..., world_size=...) on every rank first, with the ranks of the process group"
        )
    return api
