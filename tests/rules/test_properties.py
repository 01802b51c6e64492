"""Questions about a tensor are answered at once, with neither plan nor communication."""

import torch

import shardwise as sw
from shardwise import Partial, Shard, distribute_tensor, init_device_mesh
from shardwise.comm import listen
from shardwise.dtensor.state import cache_info


def test_answers_are_those_of_a_plain_tensor():
    def run():
        mesh = init_device_mesh("cpu", (2,))
        plain = torch.ones(5, 4)
        misses = cache_info().misses
        for placement in (Shard(0), Shard(1), Partial()):
            x = distribute_tensor(plain, mesh, [placement])
            misses = cache_info().misses
            events = []
            with listen(events.append):
                for name in METHODS:
                    assert getattr(x, name)() == getattr(plain, name)(), name
                for name in PROPERTIES:
                    assert getattr(x, name) == getattr(plain, name), name
                assert torch.is_floating_point(x) and not torch.is_complex(x)
                assert torch.numel(x) == 20 and torch.Tensor.size(x) == (5, 4)
                assert torch.Tensor.shape.__get__(x) == (5, 4)
                assert torch.Tensor.layout.__get__(x) is torch.strided
                assert torch.result_type(x, torch.ones((), dtype=torch.float64)) == torch.float32
                assert x.dim_order() == (0, 1)
                assert torch._has_compatible_shallow_copy_type(x, x)
            assert events == []
        assert cache_info().misses == misses

    sw.simulate(run, 2)


METHODS = [
    "is_complex", "is_floating_point", "is_signed", "is_contiguous", "is_inference", "is_conj",
    "is_neg", "element_size", "storage_offset", "get_device", "dense_dim", "_is_view", "is_shared",
    "size", "dim", "numel", "nelement", "ndimension",
]  # fmt: skip
PROPERTIES = [
    "is_leaf", "grad_fn", "is_cuda", "is_cpu", "is_sparse", "is_quantized", "is_meta", "is_nested",
    "is_mps", "is_xla", "output_nr", "_base", "retains_grad", "itemsize", "name", "shape", "dtype",
    "device", "ndim", "nbytes", "requires_grad", "grad", "_backward_hooks",
]  # fmt: skip


def test_same_size_compares_global_shapes():
    def run():
        mesh = init_device_mesh("cpu", (2,))
        rows = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        columns = distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)])
        pieces = distribute_tensor(torch.ones(2, 4), mesh, [Partial()])
        assert rows.is_same_size(columns) and torch.is_same_size(rows, torch.ones(4, 4))
        assert not rows.is_same_size(pieces)

    sw.simulate(run, 2)


def test_a_changed_tensor_has_a_new_version():
    def run():
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        before = x._version
        x.add_(1)
        assert x._version == before + 1

    sw.simulate(run, 2)


def test_gradients_of_results_can_be_retained():
    def run():
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)]).requires_grad_()
        y = x * 2
        y.retain_grad()
        assert y.retains_grad and not y.is_leaf and y.grad_fn.name() == "MulBackward0"
        (y * 3).sum().backward()
        return y.grad.full_tensor().tolist()

    assert sw.simulate(run, 2)[0] == [3, 3, 3, 3]
