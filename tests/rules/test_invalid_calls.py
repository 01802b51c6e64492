"""A call that torch refuses is refused on DTensors with the same type of error, on every rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.rules import ranks, split
from torch import nn

import shardwise as sw
from shardwise import Replicate, Shard

Make = Callable[..., torch.Tensor]
"""Makes a tensor of a shape and dtype: a plain one, or a DTensor that is split along dim 0."""

LONG = torch.int64

SHAPES: dict[str, Callable[[Make], object]] = {
    "cat of other numbers of dims": lambda t: torch.cat([t(4), t(4, 4)]),
    "stack of other shapes": lambda t: torch.stack([t(4), t(5)]),
    "fliplr of a vector": lambda t: torch.fliplr(t(4)),
    "flipud of a number": lambda t: torch.flipud(t()),
    "rot90 in one dim": lambda t: torch.rot90(t(4, 4), 1, (0, 0)),
    "more paddings than dims": lambda t: F.pad(t(4), (1, 1, 1, 1)),
    "a reflection that is too long": lambda t: F.pad(t(2, 4), (4, 0), mode="reflect"),
    "a diagonal of a vector": lambda t: t(4).fill_diagonal_(0),
    "flatten backwards": lambda t: torch.flatten(t(4, 4), 1, 0),
    "pixel_shuffle by another factor": lambda t: F.pixel_shuffle(t(4, 3, 2, 2), 2),
    "pixel_unshuffle by another factor": lambda t: F.pixel_unshuffle(t(4, 3, 3, 3), 2),
    "narrow from a float": lambda t: torch.narrow(t(4), 0, t(), 1),
    "slice backwards": lambda t: torch.ops.aten.slice(t(4), 0, 0, 4, -1),
    "split by a negative size": lambda t: torch.split(t(4), -1),
    "no chunks": lambda t: torch.chunk(t(4), 0),
    "no sections": lambda t: torch.tensor_split(t(4), 0),
    "hsplit by another factor": lambda t: torch.hsplit(t(4, 3), 2),
    "a diagonal of one dim": lambda t: torch.diagonal(t(4, 4), 0, 1, 1),
    "as_strided with fewer strides": lambda t: torch.as_strided(t(4, 2), (2, 2), (1,)),
    "as_strided out of bounds": lambda t: torch.as_strided(t(4, 2), (4, 4), (4, 1)),
    "a scatter of another shape": lambda t: torch.as_strided_scatter(t(4, 2), t(3), (2, 2), (2, 1)),
    "expand of a bias": lambda t: torch.addmm(t(3, 3), t(4, 2), t(2, 5)),
    "an index that is none": lambda t: t(4)[object()],
    "a mask of another shape": lambda t: t(4, 2).__setitem__(t(3) > 0, 0),
    "bucketize by a matrix": lambda t: torch.bucketize(t(4), t(4, 2)),
    "a fill with a vector": lambda t: t(4).fill_(t(4)),
}

REDUCTIONS: dict[str, Callable[[Make], object]] = {
    "gradient of one dim twice": lambda t: torch.gradient(t(4, 4), dim=(0, 0)),
    "gradient of one element": lambda t: torch.gradient(t(1, 1)),
    "trapezoid at other points": lambda t: torch.trapezoid(t(4, 3), t(5), dim=0),
    "histogramdd with bins for other dims": lambda t: torch.histogramdd(t(4, 2), [2, 2, 2]),
    "trace of a vector": lambda t: torch.trace(t(4)),
    "sum to another size": lambda t: t(4, 3).sum_to_size(2, 3),
    "more than all": lambda t: torch.topk(t(4), 5),
    "the variance of integers": lambda t: torch.var(t(4, dtype=LONG)),
    "the nanmean of integers": lambda t: torch.nanmean(t(4, dtype=LONG)),
    "the norm of integers": lambda t: torch.linalg.vector_norm(t(4, dtype=LONG)),
    "renorm of a vector": lambda t: torch.renorm(t(4), 2, 0, 1.0),
    "segments without lengths": lambda t: torch.segment_reduce(t(4), "sum"),
    "an infinity norm of nothing": lambda t: torch._foreach_norm([t(0)], float("inf")),
    "an unknown mode of qr": lambda t: torch.linalg.qr(t(4, 2), "some"),
    "a transform to no points": lambda t: torch.fft.fft(t(4), 0),
    "a transform of a dim of a number": lambda t: torch.fft.fftn(t(), dim=(0,)),
    "a window longer than the signal": lambda t: torch.stft(
        t(2, 4), 8, center=False, return_complex=True
    ),
    "a repeated subscript": lambda t: torch.einsum("ii->i", t(4, 3)),
}

LAYERS: dict[str, Callable[[Make], object]] = {
    "an attention of another width": lambda t: attention(t, t(2, 4, 6), t(2, 4, 6)),
    "an attention of other lengths": lambda t: attention(t, t(2, 4, 8), t(2, 5, 8)),
    "a causal hint without a mask": lambda t: nn.MultiheadAttention(8, 2, dtype=torch.float64)(
        *[t(4, 2, 8)] * 3, is_causal=True
    ),
    "a causal hint without a mask and weights": lambda t: nn.MultiheadAttention(
        8, 2, dtype=torch.float64
    )(*[t(4, 2, 8)] * 3, is_causal=True, need_weights=False),
    "heads that do not divide the width": lambda t: F.multi_head_attention_forward(
        *[t(4, 2, 8)] * 3, 8, 3, t(24, 8), t(24), None, None, False, 0.0, t(8, 8), t(8)
    ),
    "a batch norm without eps": lambda t: F.batch_norm(t(4, 2), None, None, training=True, eps=0),
    "the same padding with a stride": lambda t: F.conv1d(
        t(4, 2, 5), t(2, 2, 3), padding="same", stride=2
    ),
    "a convolution of other channels": lambda t: F.conv1d(t(4, 3, 5), t(2, 2, 3)),
    "a transposed convolution of other channels": lambda t: F.conv_transpose1d(
        t(4, 3, 5), t(2, 2, 3)
    ),
    "a convolution of other dims": lambda t: F.conv2d(t(4, 5), t(2, 2, 3, 3)),
    "patches larger than the plane": lambda t: F.unfold(t(2, 3, 4, 4), 5),
    "columns of another number": lambda t: F.fold(t(2, 5, 4), (3, 3), 2),
    "more than all of a label": lambda t: F.cross_entropy(
        t(4, 3), t(4, dtype=LONG), label_smoothing=2.0
    ),
    "ignored probabilities": lambda t: F.cross_entropy(t(4, 3), t(4, 3), ignore_index=1),
    "a dropout of features of a vector": lambda t: torch.feature_dropout(t(4), 0.5, True),
    "bags of bags": lambda t: F.embedding_bag(t(2, 2, 2, dtype=LONG), t(9, 3)),
    "classes of nothing": lambda t: F.one_hot(t(0, dtype=LONG)),
    "a grid of another batch": lambda t: F.grid_sample(
        t(4, 1, 3, 3), t(2, 3, 3, 2), align_corners=False
    ),
    "a variance of another size": lambda t: F.gaussian_nll_loss(t(4, 3), t(4, 3), t(4, 2).abs()),
    "cosines of other shapes": lambda t: F.cosine_embedding_loss(t(4, 3), t(4, 2), t(4)),
    "a mask of fewer values": lambda t: t(4).masked_scatter(t(4) > -99, t(2)),
    "a source of another dtype": lambda t: t(4).masked_scatter(t(4) > 0, t(4, dtype=LONG)),
    "an unknown keyword": lambda t: t(4).uniform_(middle=1),
    "a probability of another shape": lambda t: torch.bernoulli(t(4), t(3)),
}

INVALID = SHAPES | REDUCTIONS | LAYERS


def attention(t: Make, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    module = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    result: torch.Tensor = module(t(2, 4, 8), key, value)[0]
    return result


def plain(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=dtype).reshape(shape)


def maker(mesh: sw.DeviceMesh) -> Make:
    def made(*shape: int, **options: Any) -> torch.Tensor:
        tensor = plain(*shape, **options)
        return split(tensor, mesh, Shard(0) if shape else Replicate())

    return made


@pytest.mark.parametrize("name", INVALID)
def test_a_call_that_torch_refuses_is_refused_alike(name: str) -> None:
    call = INVALID[name]
    with pytest.raises(Exception) as expected:  # noqa: PT011
        call(plain)

    def run(mesh: sw.DeviceMesh) -> None:
        with pytest.raises(expected.type), sw.fallback("replicate"):
            call(maker(mesh))
        assert torch.equal((maker(mesh)(4) + 1).full_tensor(), plain(4) + 1)  # ranks still meet

    ranks(run)
