"""CommDebugMode on real ranks: the counts of torch's own mode, and collectives of the program."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn


def counts_of(package):
    """Count the collectives of tensor and data parallelism with torch's names or with ours."""
    if package == "torch":
        import torch.distributed.tensor.parallel as tp
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import DTensor, Partial, Replicate
        from torch.distributed.tensor.debug import CommDebugMode
    else:
        import shardwise.tensor.parallel as tp
        from shardwise.device_mesh import init_device_mesh
        from shardwise.fsdp import fully_shard
        from shardwise.tensor import DTensor, Partial, Replicate
        from shardwise.tensor.debug import CommDebugMode
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"0": tp.ColwiseParallel(), "2": tp.RowwiseParallel()}
    found = []
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    tp.parallelize_module(model, mesh["tp"], plan)
    mode = CommDebugMode()
    with mode:
        model(torch.ones(3, 4, requires_grad=True)).sum().backward()
    found.append({str(kind): count for kind, count in mode.get_comm_counts().items()})
    found.append(sorted(mode.get_sharding_info()))
    sharded = fully_shard(nn.Linear(4, 4), mesh=mesh["dp"])
    with mode:
        sharded(torch.ones(3, 4)).sum().backward()
    found.append({str(kind): count for kind, count in mode.get_comm_counts().items()})
    pending = DTensor.from_local(torch.ones(4), mesh["tp"], [Partial()])
    with mode:
        pending.redistribute(placements=[Replicate()])
        dist.all_reduce(torch.ones(2))
        funcol.all_reduce(torch.ones(2), "sum", dist.group.WORLD).sum()
    found.append({str(kind): count for kind, count in mode.get_comm_counts().items()})
    return found


def test_the_counts_are_those_of_torchs_mode(workers4):
    ours, torchs = workers4.run(counts_of, "shardwise"), workers4.run(counts_of, "torch")
    assert ours == torchs
    assert ours[0][3] == {"c10d_functional.all_reduce": 2, "c10d.allreduce_": 1}
