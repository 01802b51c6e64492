"""Ours and torch's FSDP2 side by side on real ranks: the same names do the same.

What torch 2.15 has is here with every torch. An older torch lacks some names: then ours is compared
with what must come out, and torch's with what it can do.
"""

import dataclasses

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import fsdp as ours

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
IS_NEW = VERSION >= (2, 15)
"""Whether torch has the names that are tested here."""

RANKS, WIDTH, ROWS = 4, 6, 16
HALF, SINGLE = torch.bfloat16, torch.float32


class Net(nn.Module):
    """Layers whose rows four ranks cannot share equally; one of them has an empty piece."""

    def __init__(self):
        super().__init__()
        sizes = [(WIDTH, 7), (7, WIDTH), (WIDTH, 3)]
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in sizes)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def made(dtype=torch.float64):
    torch.manual_seed(0)
    return Net().to(dtype)


def batch(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)


def loss_of(model, x):
    return model(x).float().square().mean() if x.dtype is HALF else model(x).square().mean()


def in_one_process():
    model = made()
    loss_of(model, batch()).backward()
    return gradients(model)


def gradients(model):
    return [
        each.grad.full_tensor() if hasattr(each.grad, "full_tensor") else each.grad
        for each in model.parameters()
    ]


def libraries():
    """Ours, and torch's; of each the functions, and a way to make a mesh."""
    import torch.distributed.fsdp as theirs
    from torch.distributed.device_mesh import init_device_mesh

    return (ours, sw.init_device_mesh), (theirs, init_device_mesh)


def sharded(library, make_mesh, model, shape, **options):
    names = ("dp",) if len(shape) == 1 else ("replicate", "shard")
    mesh = make_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model.layers:
        library.fully_shard(layer, mesh=mesh, **options)
    return library.fully_shard(model, mesh=mesh, **options)


def part(dtype=torch.float64):
    return batch(dtype).chunk(RANKS)[torch.distributed.get_rank()]


def compared(run):
    """What `run(library, make_mesh)` gives of ours, and of torch's if that has the names."""
    mine, theirs = libraries()
    assert hasattr(theirs[0], "GradientReductionHandle") is IS_NEW
    return run(*mine), run(*theirs) if IS_NEW else None


def check(workers, function, *args, wanted=None):
    for mine, theirs in workers.run(compared_on_ranks, function, *args):
        assert (theirs is not None) is IS_NEW
        for expected in (theirs, wanted):
            if expected is not None:
                torch.testing.assert_close(mine, expected)


def compared_on_ranks(function, *args):
    return compared(lambda library, make_mesh: function(library, make_mesh, *args))


# ---- manual finalization


def finalized(library, make_mesh, shape, async_op, is_synchronised):
    model = sharded(library, make_mesh, made(), shape)
    model.set_manual_backward_finalization(True)
    assert model.finalize_backward() is None  # before the first forward
    model.set_requires_gradient_sync(is_synchronised)
    for some in part().chunk(2):
        (loss_of(model, some) / 2).backward()
    with pytest.raises(RuntimeError):
        model.set_manual_backward_finalization(False)
    with pytest.raises(RuntimeError):
        model.layers[0].finalize_backward()
    model.set_requires_gradient_sync(True)
    handle = model.finalize_backward(async_op=async_op)
    if async_op:
        assert isinstance(handle, library.GradientReductionHandle)
        for call in (lambda: model(part()), model.finalize_backward):
            with pytest.raises(RuntimeError):
                call()
        handle.wait()
        handle.wait()
    model.set_manual_backward_finalization(False)
    with pytest.raises(RuntimeError):
        model.finalize_backward()
    with pytest.raises(RuntimeError):
        model.layers[0].set_manual_backward_finalization(True)
    return gradients(model)


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("is_synchronised", [False, True])
def test_manual_finalization(workers4, shape, async_op, is_synchronised):
    check(workers4, finalized, shape, async_op, is_synchronised, wanted=in_one_process())


def forgotten(library, make_mesh):
    model = sharded(library, make_mesh, made(), (4,))
    model.set_manual_backward_finalization(True)
    loss_of(model, part()).backward()
    handle = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    with pytest.raises(RuntimeError):
        handle.wait()
    model.zero_grad()
    loss_of(model, part()).backward()
    model.finalize_backward()
    return gradients(model)


def test_a_handle_after_a_reset(workers4):
    check(workers4, forgotten, wanted=in_one_process())


def partial(library, make_mesh):
    model = sharded(library, make_mesh, made(), (2, 2))
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    loss_of(model, part()).backward()
    model.set_requires_gradient_sync(True)
    model.set_requires_all_reduce(False)
    with pytest.raises(RuntimeError):
        model.finalize_backward()
    model.set_requires_all_reduce(True)
    model.finalize_backward()
    return gradients(model)


def test_gradients_must_be_summed_over_replicas(workers4):
    check(workers4, partial, wanted=in_one_process())


# ---- storage


def addresses(library, make_mesh):
    model = sharded(library, make_mesh, made(), (4,), reshard_after_forward=True)
    model.set_keep_unsharded_storage(True)
    found = []
    for _ in range(3):
        model.zero_grad()
        loss_of(model, part()).backward()
        layer = model.layers[1]
        layer.unshard()
        found.append(layer.weight.data_ptr())
        layer.reshard()
    assert len(set(found)) == 1
    return gradients(model)


def test_kept_storage_has_one_address(workers4):
    check(workers4, addresses, wanted=in_one_process())


# ---- dtypes


def with_two_dtypes(library, make_mesh):
    """Biases are gathered as they are, all else in halves."""
    model = made(SINGLE)
    policy = library.MixedPrecisionPolicy(
        HALF,
        cast_forward_inputs=True,
        param_dtype_override_fn=lambda each: each.dtype if each.dim() == 1 else None,
    )
    seen = []
    for layer in model.layers:
        layer.forward = lambda x, own=layer: (
            seen.append((own.weight.dtype, own.bias.dtype, x.dtype)) or x @ own.weight.T + own.bias
        )
    sharded(library, make_mesh, model, (4,), mp_policy=policy)
    for some in part(SINGLE).chunk(2):
        model.set_requires_gradient_sync(len(seen) > 0)
        (loss_of(model, some) / 2).backward()
    assert set(seen) == {(HALF, SINGLE, HALF)}
    found = gradients(model)
    assert {each.dtype for each in found} == {SINGLE}
    bad = dataclasses.replace(policy, param_dtype_override_fn=lambda each: torch.float16)
    with pytest.raises(ValueError, match="param_dtype_override_fn"):
        sharded(library, make_mesh, made(SINGLE), (4,), mp_policy=bad)
    return found


def test_parameters_of_two_dtypes(workers4):
    check(workers4, with_two_dtypes)
    rough = [each.float() for each in in_one_process()]
    for mine, _ in workers4.run(compared_on_ranks, with_two_dtypes):
        torch.testing.assert_close(mine, rough, rtol=0.1, atol=0.01)


def with_grad_dtypes(library, make_mesh, reduce_dtype):
    model = made(SINGLE)
    for layer in model.layers:
        layer.bias.grad_dtype = HALF
    model.layers[0].weight.grad_dtype = None
    policy = library.MixedPrecisionPolicy(HALF, reduce_dtype)
    sharded(library, make_mesh, model, (4,), mp_policy=policy)
    loss_of(model, part(SINGLE)).backward()
    found = [each.grad for each in model.parameters()]
    dtypes = [each.dtype for each in found]
    # Gradients of one group are reduced in one dtype; here none is narrower than another's.
    assert dtypes[1::2] == [HALF] * 3 and dtypes[2::2] == [SINGLE] * 2
    assert dtypes[0] is (reduce_dtype or HALF)
    return gradients(model)


@pytest.mark.parametrize("reduce_dtype", [None, SINGLE])
def test_gradients_of_other_dtypes(workers4, reduce_dtype):
    for mine, theirs in workers4.run(compared_on_ranks, with_grad_dtypes, reduce_dtype):
        rough = [each.float() for each in in_one_process()]
        for index, found in enumerate(mine):
            torch.testing.assert_close(found.float(), rough[index], rtol=0.1, atol=0.01)
            if theirs is not None:
                assert found.dtype is theirs[index].dtype
                # Ours are not rounded before they are summed.
                torch.testing.assert_close(found, theirs[index], rtol=0.02, atol=0.002)


def by_default():
    """Beside torch's: an older one has another default, and is told to do what ours does."""
    found = []
    for library, make_mesh in libraries():
        is_theirs = library is not ours
        reduce_dtype = SINGLE if is_theirs and not IS_NEW else None
        policy = library.MixedPrecisionPolicy(HALF, reduce_dtype)
        model = sharded(library, make_mesh, made(SINGLE), (4,), mp_policy=policy)
        for some in part(SINGLE).chunk(2):
            model.set_requires_gradient_sync(bool(torch.equal(some, part(SINGLE)[2:])))
            (loss_of(model, some) / 2).backward()
        found.append(gradients(model))
    return found


def test_gradients_are_reduced_in_the_parameters_own_dtype_by_default(workers4):
    for mine, theirs in workers4.run(by_default):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


def in_halves():
    """With a dtype of its own for reductions, the meaning is the same in every torch."""
    found = []
    for library, make_mesh in libraries():
        policy = library.MixedPrecisionPolicy(HALF, HALF)
        model = sharded(library, make_mesh, made(SINGLE), (4,), mp_policy=policy)
        loss_of(model, part(SINGLE)).backward()
        found.append(gradients(model))
    return found


def test_reductions_in_halves(workers4):
    for mine, theirs in workers4.run(in_halves):
        torch.testing.assert_close(mine, theirs, rtol=0.03, atol=0.003)
