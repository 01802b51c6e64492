"""RPC workers for tests."""

import torch.distributed as dist
from torch.distributed import rpc


def started(path, ranks=(0, 1, 2, 3)):
    """Start RPC.

    Arguments:
        ranks: the worker number of each process; None for a process that is no worker.
    """
    rank = dist.get_rank()
    if ranks[rank] is None:
        return
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{path}", rpc_timeout=60, num_worker_threads=4, _transports=["uv"]
    )
    count = sum(each is not None for each in ranks)
    rpc.init_rpc(
        f"trainer{ranks[rank]}", rank=ranks[rank], world_size=count, rpc_backend_options=options
    )


def stopped():
    if rpc.api._is_current_rpc_agent_set():
        rpc.shutdown()


def group_of(ranks):
    """Return a process group of these ranks; None on the others."""
    group = dist.new_group(ranks)
    return group if dist.get_rank() in ranks else None
