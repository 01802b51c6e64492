"""torch.distributed.tensor.experimental: one program, with torch's imports and with ours."""

import torch
import torch.distributed._functional_collectives as funcol


def packages(package):
    """Import the names of torch or of shardwise."""
    if package == "torch":
        import torch.distributed.tensor as tensor
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import experimental
    else:
        import shardwise.tensor as tensor
        from shardwise.device_mesh import init_device_mesh
        from shardwise.tensor import experimental
    return tensor, experimental, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def local_maps(package):
    """Run functions of local tensors; return values, gradients and the errors of wrong calls."""
    tensor, experimental, mesh = packages(package)
    Shard, Replicate, Partial = tensor.Shard, tensor.Replicate, tensor.Partial
    tp = mesh["tp"]
    columns, rows = [Shard(1)], [Shard(0)]
    generator = torch.Generator().manual_seed(0)
    w, x = (torch.randn(*shape, generator=generator) for shape in ((12, 8), (8, 16)))

    def product(mesh, w, x):
        return funcol.all_reduce(torch.mm(w, x), "sum", mesh)

    summed = experimental.local_map(
        product, out_placements=[Replicate()], in_placements=(None, columns, rows), device_mesh=tp
    )
    found = [
        summed(
            tp, tensor.distribute_tensor(w, tp, columns), tensor.distribute_tensor(x, tp, rows)
        ).full_tensor()
    ]

    @experimental.local_map(
        out_placements=(rows, None, [Partial()]),
        in_placements=(rows, [Replicate()]),
        in_grad_placements=(rows, [Partial()]),
        redistribute_inputs=True,
    )
    def several(a, b):
        return a @ b, len(a), (a @ b).sum()

    a = tensor.distribute_tensor(x, tp, columns).requires_grad_()
    b = tensor.distribute_tensor(torch.ones(16, 3), tp, [Replicate()]).requires_grad_()
    one, length, total = several(a, b)
    one.full_tensor().square().sum().backward()
    found += [one.placements == (Shard(0),), length, total.placements == (Partial(),)]
    found += [total.full_tensor(), a.grad.full_tensor(), b.grad.full_tensor()]
    found.append(several(torch.ones(2, 2), torch.ones(2, 2))[0])  # no DTensor: the function itself
    strict = experimental.local_map(several_plain, out_placements=rows, in_placements=(rows,))
    try:
        strict(a)
    except Exception as error:
        found.append(isinstance(error, ValueError))
    return [each.detach() if isinstance(each, torch.Tensor) else each for each in found]


def several_plain(a):
    return a * 2


def replications(package):
    """Add a plain tensor within `implicit_replication`."""
    tensor, experimental, mesh = packages(package)
    x = tensor.distribute_tensor(torch.arange(5.0), mesh["tp"], [tensor.Shard(0)])
    with experimental.implicit_replication():
        return (x + torch.ones(5)).full_tensor()


def listed(package):
    """Register the shardings of an operator of our own; return values and placements."""
    tensor, experimental, mesh = packages(package)
    Shard, Replicate = tensor.Shard, tensor.Replicate

    @torch.library.custom_op(f"moving_{package}::double_rows", mutates_args=())
    def double_rows(x: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.softmax(x, dim) * 2

    @double_rows.register_fake
    def _(x, dim):
        return torch.empty_like(x)

    @experimental.register_sharding(getattr(torch.ops, f"moving_{package}").double_rows.default)
    def sharding(x, dim):
        at = dim if dim >= 0 else dim + x.ndim
        accepted = [([Replicate()], [Replicate(), None])]
        accepted += [([Shard(d)], [Shard(d), None]) for d in range(x.ndim) if d != at]
        return accepted

    whole = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    found = []
    for placements in ([Shard(0), Replicate()], [Shard(0), Shard(0)], [Shard(0), Shard(1)]):
        y = double_rows(tensor.distribute_tensor(whole, mesh, placements), -1)
        found += [y.full_tensor(), str(y.placements[0])]
    return found


def test_local_map_does_what_torchs_does(workers4):
    ours, torchs = workers4.run(local_maps, "shardwise"), workers4.run(local_maps, "torch")
    assert [len(each) for each in ours] == [len(each) for each in torchs] == [9] * 4
    for one, other in zip(ours, torchs, strict=True):
        torch.testing.assert_close(one, other)


def test_implicit_replication_and_register_sharding_give_torchs_values(workers4):
    for program in (replications, listed):
        ours, torchs = workers4.run(program, "shardwise"), workers4.run(program, "torch")
        for one, other in zip(ours, torchs, strict=True):
            values = [
                (a, b) for a, b in zip(one, other, strict=True) if isinstance(a, torch.Tensor)
            ]
            torch.testing.assert_close(*map(list, zip(*values, strict=True)))
