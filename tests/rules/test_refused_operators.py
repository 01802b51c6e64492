"""What has no meaning on a DTensor is refused alike on all ranks, with what to do instead."""

from collections.abc import Callable

import pytest
import torch

import shardwise as sw
from shardwise.core.errors import DispatchError, LayoutError

SPARSE = torch.eye(4).to_sparse()


REFUSED: dict[str, tuple[Callable[[sw.DTensor], object], str]] = {
    "to_sparse": (lambda x: x.to_sparse(), r"x\.full_tensor\(\)\.to_sparse"),
    "to_sparse_csr": (lambda x: x.to_sparse_csr(), r"x\.full_tensor\(\)\.to_sparse_csr"),
    "aten": (torch.ops.aten.to_sparse, "is dense on every rank"),
    "sparse_mask": (lambda x: x.sparse_mask(SPARSE), "is dense on every rank"),
    "a sparse operand": (lambda x: SPARSE @ x, "layout torch.sparse_coo beside a DTensor"),
    "torch.sparse.mm": (lambda x: torch.sparse.mm(SPARSE, x), "run the operator on pieces"),
    "zeros_like": (lambda x: torch.zeros_like(x, layout=torch.sparse_coo), "torch.strided"),
    "rand_like": (lambda x: torch.rand_like(x, layout=torch.sparse_coo), "torch.strided"),
    "a resized target": (
        lambda x: x[0, 0].clone().addbmm_(x[None], x[None]),
        "not resized in place",
    ),
    "a tangent": (lambda x: torch._make_dual(x, x, 0), r"autograd\.functional\.jvp"),
    "out= of gradients": (
        lambda x: torch.mm(x.requires_grad_(), x, out=torch.zeros_like(x)),
        "require no grad",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_with_a_remedy(name: str) -> None:
    call, message = REFUSED[name]

    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.distribute_tensor(torch.eye(4), mesh, [sw.Shard(0)])
        with pytest.raises(DispatchError, match=message):
            call(x)

    sw.simulate(run, 2)


def test_a_dense_operand_of_the_same_shape_does_not_let_a_sparse_one_pass() -> None:
    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.distribute_tensor(torch.eye(4), mesh, [sw.Shard(0)])
        torch.eye(4) @ x
        with pytest.raises(DispatchError, match="beside a DTensor"):
            SPARSE @ x

    sw.simulate(run, 2)


def test_only_dense_tensors_are_distributed() -> None:
    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        with pytest.raises(LayoutError, match="expected a dense tensor"):
            sw.distribute_tensor(SPARSE, mesh, [sw.Shard(0)])
        with pytest.raises(LayoutError, match="expected a dense tensor"):
            sw.DTensor.from_local(SPARSE, mesh, [sw.Shard(0)])

    sw.simulate(run, 2)


def test_what_is_dense_already_stays_as_it_is() -> None:
    def run() -> tuple[bool, str]:
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.distribute_tensor(torch.eye(4), mesh, [sw.Shard(0)])
        return x.to_dense() is x, repr(x.to_dense(torch.float64))[:17]

    assert sw.simulate(run, 2)[0] == (True, "DTensor(f64[4@0, ")


THEIRS: dict[str, tuple[Callable[[sw.DTensor], object], str]] = {
    "fftn": (lambda x: torch.fft.fftn(x, dim=(0, 0)), "dims that differ"),
    "tensor_split": (lambda x: x.tensor_split(torch.tensor([1.0])), "dtype of long"),
    "combinations": (torch.combinations, "expected a vector"),
    "ctc_loss": (lambda x: torch.ctc_loss(x[0], x, (1,), (1,)), "log_probs"),
}


@pytest.mark.parametrize("name", THEIRS)
def test_what_torch_refuses_is_an_error_of_its_kind_that_says_why(name: str) -> None:
    call, message = THEIRS[name]

    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        with pytest.raises(RuntimeError):
            call(torch.eye(4))
        with pytest.raises(RuntimeError, match=message):
            call(sw.distribute_tensor(torch.eye(4), mesh, [sw.Shard(0)]))

    sw.simulate(run, 2)
