"""Context parallelism on real ranks, beside data parallelism, through torch's module paths."""

import torch
import torch.nn.functional as F

import shardwise as sw
from shardwise.tensor.experimental import context_parallel
from shardwise.tensor.experimental._attention import context_parallel_unshard

LENGTH = 16


def tensors(batch: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(batch)
    return [torch.randn(1, 2, LENGTH, 8, generator=generator) for _ in range(3)]


def attended(batch: int, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    out = F.scaled_dot_product_attention(*leaves, is_causal=True)
    (out * out.sin()).sum().backward()
    return [out.detach(), *(each.grad for each in leaves if each.grad is not None)]


def in_parts() -> tuple[int, list[torch.Tensor]]:
    mesh = sw.init_device_mesh("cpu", (2, 2), ("dp", "cp"))
    batch = mesh.get_local_rank("dp")
    buffers = tensors(batch)
    with context_parallel(mesh["cp"], buffers=buffers, buffer_seq_dims=[2, 2, 2]):
        parts = attended(batch, [each.clone().requires_grad_() for each in buffers])
    return batch, context_parallel_unshard(mesh["cp"], parts, [2] * 4)


def test_attention_over_one_axis_of_a_mesh(workers4) -> None:
    for batch, found in workers4.run(in_parts):
        expected = attended(batch, [each.requires_grad_() for each in tensors(batch)])
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
