"""`local_map(spmd_types=True)` between real ranks: the function may use spmd_types' collectives."""

import pytest
import torch

import shardwise as sw
from shardwise import LayoutError, Replicate, Shard

A = torch.arange(24.0, dtype=torch.float64).reshape(6, 4) / 24
B = torch.arange(20.0, dtype=torch.float64).reshape(4, 5) / 20


def product_and_sum(names):
    import spmd_types as spmd

    mesh = sw.init_device_mesh("cpu", (2, 2), names)
    a = sw.distribute_tensor(A, mesh, [Shard(0), Shard(1)]).requires_grad_()
    b = sw.distribute_tensor(B, mesh, [Replicate(), Shard(0)]).requires_grad_()
    group = "tp" if names else mesh.get_group(1)

    def product(a, b):
        part = spmd.reinterpret(a @ b, group, src=spmd.V, dst=spmd.P)
        return spmd.all_reduce(part, group, src=spmd.P, dst=spmd.R).sin()

    how = ([Shard(0), Shard(1)], [Replicate(), Shard(0)])
    out = sw.local_map(product, [Shard(0), Replicate()], how, spmd_types=True)(a, b)
    (out * out).sum().backward()
    whole = [A.clone().requires_grad_(), B.clone().requires_grad_()]
    expected = (whole[0] @ whole[1]).sin()
    (expected * expected).sum().backward()
    assert torch.allclose(out.full_tensor(), expected)
    for ours, theirs in zip((a, b), whole, strict=True):
        assert torch.allclose(ours.grad.full_tensor(), theirs.grad)
    with pytest.raises(LayoutError, match="expected a result of type R or I on axis"):
        sw.local_map(torch.mm, [Shard(0), Replicate()], how, spmd_types=True)(a, b)


@pytest.mark.needs("spmd_types")
@pytest.mark.parametrize("names", [("dp", "tp"), None], ids=str)
def test_a_function_with_collectives_is_checked(workers4, names):
    workers4.run(product_and_sum, names)
