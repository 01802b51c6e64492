"""Operators of op_db with second gradients, empty pieces, strided memory, and plain tensors.

A few operators are quick; the slow tests try one sample of each, `make sweep` more.
"""

from typing import Any

import pytest
import torch
from support.op_db import second_order, variations
from support.op_db.entries import entries

from shardwise import DTensor

JOINED_OR_PADDED = [
    "cat",
    "hstack",
    "diff",
    "cumprod",
    "cummax",
    "addmv",
    "ormqr",
    "nn.functional.pad.reflect",
    "nn.functional.batch_norm",
    "nn.functional.conv_transpose1d",
]
"""Operators that lost the graph of second gradients on ranks with empty pieces, or failed there."""

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")

OF_SEVERAL_TENSORS = ["nn.functional.batch_norm", "addmm", "where", "index_put", "kron", "lerp"]


def quick_and_slow(names: list[str], quick: list[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", quick_and_slow(second_order.names(), JOINED_OR_PADDED))
def test_second_gradients_are_those_of_one_process_where_pieces_are_empty(name):
    assert not list(second_order.problems(entries()[name], samples=2, most=3))


@pytest.mark.parametrize("name", quick_and_slow([*entries()], ["kron", "view_copy", "flatten"]))
def test_inputs_need_not_be_contiguous(name):
    assert not list(variations.in_other_memory(entries()[name], samples=2, most=2))


@pytest.mark.parametrize("name", quick_and_slow([*entries()], OF_SEVERAL_TENSORS))
def test_tensors_at_any_position_may_be_plain(name):
    assert not list(variations.with_plain_tensors(entries()[name], samples=2, most=2))


# ---- the checks tell right from wrong


def test_a_gradient_that_requires_grad_on_some_ranks_alone_is_found(monkeypatch):
    def on_some(x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, DTensor) and x.mesh_layout.mesh.get_rank() == 1:
            return x * 1 + x.square().detach()
        return x * 1 + x.square()

    monkeypatch.setattr(entries()["square"].info, "op", on_some)
    found = list(second_order.problems(entries()["square"], samples=1, most=2))
    assert found and "gradients differs between ranks" in found[0]


def test_what_fails_for_strided_inputs_alone_is_found(monkeypatch):
    def refuses_strides(x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, DTensor) and not x.to_local().is_contiguous():
            raise RuntimeError("not contiguous")
        return x.exp()

    monkeypatch.setattr(entries()["exp"].info, "op", refuses_strides)
    found = list(variations.in_other_memory(entries()["exp"], samples=1, most=2))
    assert found and "not contiguous" in found[0]


def test_what_fails_beside_a_plain_tensor_alone_is_found(monkeypatch):
    def wants_dtensors(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if isinstance(x, DTensor) != isinstance(y, DTensor):
            raise IndexError("one is plain")
        return x * y

    monkeypatch.setattr(entries()["mul"].info, "op", wants_dtensors)
    found = list(variations.with_plain_tensors(entries()["mul"], samples=1, most=2))
    assert found and "one is plain" in found[0]
