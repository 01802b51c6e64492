"""The RPC workers of torch.distributed: whether they run, and which rank each is."""

from __future__ import annotations

from typing import Any

from shardwise import world
from shardwise.sharded.errors import ShardedStateError
from shardwise.torch_internals import current_rpc_agent, is_rpc_running


def own_rank() -> int | None:
    """This rank's number among the workers; None where RPC is not running."""
    rpc = _running()
    return None if rpc is None else rpc.get_worker_info().id


def ranks_by_name(reason: str) -> dict[str, int]:
    """The rank of each worker.

    Arguments:
        reason: why it is asked, for the message if RPC is not running.
    """
    rpc = _running()
    if rpc is None:
        raise ShardedStateError(f"{reason}, and RPC is not running; {how_to_start()}")
    return {each.name: each.id for each in current_rpc_agent().get_worker_infos()}


def names_by_rank() -> dict[int, str]:
    """The worker of each rank, where RPC is running."""
    return {rank: name for name, rank in ranks_by_name("a worker is asked for").items()}


def how_to_start() -> str:
    """The end of a message that RPC is not running."""
    if world.current().is_simulated:
        return "simulated ranks are threads and have none: start processes, as sw.launch does"
    return (
        "call torch.distributed.rpc.init_rpc(name, rank=..., world_size=...) on every rank first, "
        "with the ranks of the processes"
    )


def _running() -> Any:
    """torch's RPC, if it is running for this rank."""
    from torch.distributed import rpc

    api: Any = rpc
    if world.current().is_simulated or not rpc.is_available():
        return None
    return api if is_rpc_running() else None
