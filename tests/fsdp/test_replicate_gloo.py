"""Torch's older `replicate(module, device_mesh=, bucket_cap_mb=)` beside ours, on real ranks."""

import torch
from support.fsdp_cases import Net, batch, mean_square
from torch.distributed._composable.replicate import replicate as torchs_replicate
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.fsdp import replicate


def made():
    torch.manual_seed(torch.distributed.get_rank())  # the first rank's values count
    return Net().double()


def trained(model, rows, is_synced):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for index in range(4):
        model.set_requires_gradient_sync(is_synced or index % 2 == 1)
        mean_square(model, rows).backward()
        if is_synced or index % 2:
            optimizer.step()
            optimizer.zero_grad()
    return [
        each.full_tensor() if hasattr(each, "full_tensor") else each.detach()
        for each in model.parameters()
    ]


def both(is_synced):
    rank = torch.distributed.get_rank()
    rows = batch().chunk(4)[rank]
    names = {"mesh_dim_names": ("dp",)}
    ours = replicate(made(), device_mesh=sw.init_device_mesh("cpu", (4,), **names), bucket_cap_mb=9)
    theirs = torchs_replicate(
        made(), device_mesh=init_device_mesh("cpu", (4,), **names), bucket_cap_mb=9
    )
    group = torch.distributed.new_group(list(range(4)))
    by_group = replicate(made(), process_group=group)
    return [trained(each, rows, is_synced) for each in (ours, theirs, by_group)]


def test_training_is_that_of_torchs(workers4):
    for is_synced in (True, False):
        for ours, theirs, by_group in workers4.run(both, is_synced):
            torch.testing.assert_close(ours, theirs)
            torch.testing.assert_close(by_group, theirs)
