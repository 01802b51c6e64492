"""Calls that are seldom written so, such as aten's own operators or keywords in place of positions,
give what one process gives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.rules import full, ranks, split, values
from torch.utils import _pytree as pytree

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard

aten = torch.ops.aten
Make = Callable[..., Any]
"""Makes a tensor of a shape: a plain one, or a DTensor that is split along dim 0."""

SPELLINGS: dict[str, Callable[[Make], Any]] = {
    "zeros_like(input=)": lambda t: torch.zeros_like(input=t(5, 2)),
    "aten.to(other=)": lambda t: aten.to.other(t(5, 2), other=t(1).float()),
    "relu(x, True)": lambda t: F.relu(t(5, 2), True),
    "relu(x, False)": lambda t: F.relu(t(5, 2), False),
    "rrelu with a generator by position": lambda t: torch.rrelu(
        t(5, 2).abs(), 0.1, 0.2, True, torch.Generator().manual_seed(1)
    ),
    "hardtanh(x, low, high, inplace)": lambda t: F.hardtanh(t(5, 2), -0.5, 0.5, True),
    "native_dropout without training": lambda t: torch.native_dropout(t(5, 2), 0.5, False),
    "atleast_2d of two": lambda t: torch.atleast_2d(t(5), t()),
    "aten.index": lambda t: aten.index(t(5, 4), [None, t(3).argsort()]),
    "aten.index.Tensor": lambda t: aten.index.Tensor(t(5, 4), [t(3).argsort(), None]),
    "aten._unsafe_masked_index": lambda t: aten._unsafe_masked_index(
        t(5, 4), t(6, 4) > 0, [torch.arange(6) - 1, None], 0
    ),
    "a masked index of nothing": lambda t: aten._unsafe_masked_index(
        t(0, 4), t(6, 4) > 0, [torch.arange(6), None], 7
    ),
    "index_put with a mask that is false": lambda t: aten.index_put(
        t(5), [torch.tensor(False)], t(1)
    ),
    "a list with a tensor as key": lambda t: t(5, 4)[(t(3).argsort(), slice(1, 3))],
    "a slice by tensors": lambda t: t(5)[torch.tensor(1) : torch.tensor(4)],
    "take_along_dim of all": lambda t: torch.take_along_dim(t(3, 2), t(6).argsort().view(2, 3)),
    "frobenius_norm": lambda t: torch.frobenius_norm(t(5, 2), (0, 1)),
    "nuclear_norm": lambda t: torch.nuclear_norm(t(3, 2)),
    "norm with a dtype by position": lambda t: aten.norm(t(5, 2), 2, dtype=torch.float64),
    "logsumexp of nothing": lambda t: torch.logsumexp(t(0, 2), 0),
    "tensordot(dims_a, dims_b)": lambda t: torch._VF.tensordot(t(3, 2), t(2, 4), [1], [0]),
    "tensordot by a tensor": lambda t: torch.tensordot(t(3, 2), t(2, 4), torch.tensor(1)),
    "fft_c2c": lambda t: aten._fft_c2c(torch.complex(t(4, 3), t(4, 3)), [1], 0, True).abs(),
    "fft_r2c one-sided": lambda t: aten._fft_r2c(t(4, 3), [1], 0, True).abs(),
    "fft_r2c two-sided": lambda t: aten._fft_r2c(t(4, 3), [0], 0, False).abs(),
    "instance_norm with statistics": lambda t: torch.instance_norm(
        t(2, 3, 4), None, None, None, None, True, 0.1, 1e-5, True
    ),
    "instance_norm(use_input_stats=)": lambda t: torch.instance_norm(
        t(2, 3, 4),
        None,
        None,
        None,
        None,
        use_input_stats=True,
        momentum=0.1,
        eps=1e-5,
        cudnn_enabled=True,
    ),
    "view_copy(input=)": lambda t: torch.unsqueeze_copy(input=t(5), dim=0),
    "unflatten by a list": lambda t: torch.unflatten(t(4, 6), 1, [2, -1]),
    "a linear mask": lambda t: torch.where(t(4) > 0, t(4), 0.0).cumsum(0),
    "an uneven exchange": lambda t: t(5, 3).t().contiguous(),
    "cat along an axis": lambda t: torch.cat([t(3, 2), t(2, 2)], axis=0),
    "the largest of bools": lambda t: torch.amax(t(1) > 0, 0),
    "the smallest of bools": lambda t: torch.amin(t(1, 3) > 0, 0),
    "attention with floats as mask and padding": lambda t: F.scaled_dot_product_attention(
        t(2, 1, 4, 8), t(2, 1, 4, 8), t(2, 1, 4, 8), t(4, 4)
    ),
    "attention that drops everything": lambda t: F.scaled_dot_product_attention(
        t(2, 1, 4, 8), t(2, 1, 4, 8), t(2, 1, 4, 8), dropout_p=1.0
    ),
}


def plain(*shape: int) -> torch.Tensor:
    return values(*shape, grad=False)


@pytest.mark.filterwarnings("ignore:.*is deprecated and it is just left for JIT")
@pytest.mark.parametrize("name", SPELLINGS)
def test_it_gives_what_one_process_gives(name: str) -> None:
    call = SPELLINGS[name]
    expected = call(plain)

    def run(mesh: sw.DeviceMesh) -> None:
        found = call(lambda *shape: split(plain(*shape), mesh, Shard(0) if shape else Replicate()))
        found = pytree.tree_map_only(DTensor, DTensor.full_tensor, found)
        torch.testing.assert_close(found, expected, equal_nan=True)

    ranks(run)


# ---- variances without degrees of freedom


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("correction", [3, 5])
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_a_variance_without_degrees_of_freedom_is_infinite_with_torchs_gradient(
    correction: int, keepdim: bool
) -> None:
    whole = full(3, 2)

    def gradient(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = x.requires_grad_().var(0, correction=correction, keepdim=keepdim)
        return made, torch.autograd.grad(made.sum(), x)[0]

    expected = gradient(whole.clone())

    def run(mesh: sw.DeviceMesh) -> None:
        found = gradient(split(whole, mesh, Shard(0)))
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got.full_tensor(), want, equal_nan=True)

    ranks(run)


def test_a_mask_without_dims_selects_everything_or_nothing() -> None:
    """torch 2.13 has this in x[mask] = value only; its index_put_ ends in an internal assertion."""

    def run(mesh: sw.DeviceMesh) -> None:
        x, value = (split(full(5) * factor, mesh, Shard(0)) for factor in (1, 10))
        everything = [torch.tensor(True)]
        assert torch.equal(x.index_put(everything, value).full_tensor(), full(5) * 10)
        assert torch.equal(x.index_put(everything, value, True).full_tensor(), full(5) * 11)
        assert torch.equal(x.index_put([torch.tensor(False)], value).full_tensor(), full(5))

    ranks(run)


# ---- writes to plain tensors


def test_out_that_is_empty_takes_the_shape_of_the_result() -> None:
    def run(mesh: sw.DeviceMesh) -> None:
        x = split(full(4, 3), mesh, Replicate())
        target = torch.empty(0)
        assert torch.add(x, 1, out=target) is target
        assert torch.equal(target, full(4, 3) + 1)

    ranks(run)


def test_writing_a_pending_sum_to_a_plain_tensor_says_once_that_it_is_reduced() -> None:
    def run(mesh: sw.DeviceMesh) -> None:
        pending = DTensor.from_local(torch.ones(3), mesh, [Partial()])
        target = torch.zeros(3)
        target.copy_(pending)
        assert torch.equal(target, torch.full((3,), 2.0))

    with pytest.warns(UserWarning, match="pending a reduction.*x.full_tensor"):
        ranks(run)
    ranks(run)  # told once for each operator: a second warning would be an error


@pytest.mark.parametrize(
    "write",
    [
        lambda plain, x, rows: plain.index_put_((rows,), x),
        lambda plain, x, rows: plain.put_(rows, x),
        lambda plain, x, rows: plain.__setitem__(rows, x),
        lambda plain, x, rows: plain.index_copy_(0, rows, x),
        lambda plain, x, rows: torch._foreach_add_([plain, plain], [x.sum(), x.sum()]),
    ],
)
def test_writes_to_a_plain_tensor_by_index_write_the_same_on_every_rank(write: Any) -> None:
    rows = torch.tensor([3, 1])
    expected = torch.zeros(4)
    write(expected, full(2), rows)

    def run(mesh: sw.DeviceMesh) -> None:
        target = torch.zeros(4)
        write(target, split(full(2), mesh, Replicate()), rows)
        assert type(target) is torch.Tensor and torch.equal(target, expected)

    ranks(run)


def test_a_plain_buffer_that_split_rows_are_copied_into_is_split_as_they_are() -> None:
    rows = torch.tensor([2, 0])
    expected = torch.zeros(3, 4).index_copy_(0, rows, full(2, 4))

    def run(mesh: sw.DeviceMesh) -> None:
        cache = torch.zeros(3, 4)
        written = cache.index_copy_(0, rows, split(full(2, 4), mesh, Shard(1)))
        assert written is cache and isinstance(cache, DTensor)
        assert cache.to_local().shape == (3, 2) and torch.equal(cache.full_tensor(), expected)
        # The rows themselves are split: then every rank would need all of them.
        with pytest.raises(sw.ShardwiseError, match="index_copy_"):
            torch.zeros(3, 4).index_copy_(0, rows, split(full(2, 4), mesh, Shard(0)))
        # A part of another tensor cannot become a DTensor.
        with pytest.raises(sw.ShardwiseError, match="index_copy_"):
            torch.zeros(4, 4)[:3].index_copy_(0, rows, split(full(2, 4), mesh, Shard(1)))

    ranks(run)


# ---- as_strided_ in place


def test_as_strided_in_place_keeps_the_memory_and_takes_the_layout_of_the_view() -> None:
    def run(mesh: sw.DeviceMesh) -> None:
        x = split(full(4, 6), mesh, Shard(0))
        address = x.to_local().data_ptr()
        assert x.as_strided_((4, 3), (6, 2)) is x
        assert x.shape == (4, 3) and x.placements == (Shard(0),)
        assert x.to_local().data_ptr() == address
        assert torch.equal(x.full_tensor(), full(4, 6).as_strided((4, 3), (6, 2)))
        with pytest.raises(sw.LayoutError, match=r"as_strided_: .*x = x.as_strided"):
            split(full(4, 6), mesh, Shard(0)).as_strided_((8, 3), (3, 1))

    ranks(run)
