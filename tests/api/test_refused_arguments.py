"""Arguments that make no sense are refused by name, with what was expected, on every rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.refusals import refused
from support.rules import full, ranks, split

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard

Call = Callable[[sw.DeviceMesh, DTensor], Any]


ROWS = (Shard(0),)


def mapped(function: Callable[..., Any], out: Any = ROWS, **options: Any) -> Any:
    return sw.local_map(function, out_placements=out, **options)


REFUSED: dict[str, tuple[Call, tuple[str, ...]]] = {
    "a list for a tensor": (
        lambda mesh, x: sw.distribute_tensor([1.0], mesh),  # type: ignore[arg-type]
        ("tensor: expected a tensor, got list",),
    ),
    "a DTensor of another layout": (
        lambda mesh, x: sw.distribute_tensor(x, mesh, [Replicate()]),
        ("tensor: it is a DTensor", "tensor.redistribute("),
    ),
    "a tensor with a history": (
        lambda mesh, x: sw.distribute_tensor(torch.ones(2, requires_grad=True) * 2, mesh),
        ("expected a leaf", "DTensor.from_local"),
    ),
    "a source that is on no axis": (
        lambda mesh, x: sw.distribute_tensor(full(4), mesh, [Shard(0)], src_data_rank=2),
        ("src_data_rank: expected a position on every axis", "got 2"),
    ),
    "no placements for a DTensor": (
        lambda mesh, x: mapped(torch.neg, in_placements=(None,))(x),
        ("in_placements[0]: expected placements",),
    ),
    "placements for a number": (
        lambda mesh, x: mapped(torch.add, in_placements=([Shard(0)], [Shard(0)]))(x, 1),
        ("in_placements[1]: expected None, as the argument is 1",),
    ),
    "placements of fewer arguments": (
        lambda mesh, x: mapped(torch.add, in_placements=([Shard(0)],))(x, x),
        ("in_placements: expected 2 entries",),
    ),
    "gradients of fewer arguments": (
        lambda mesh, x: mapped(torch.add, in_grad_placements=([Shard(0)],))(x, x),
        ("in_grad_placements: expected 2 entries",),
    ),
    "placements of fewer results": (
        lambda mesh, x: mapped(lambda x: (x, x), ([Shard(0)],))(x),
        ("out_placements: expected 2",),
    ),
    "placements for a result that is a number": (
        lambda mesh, x: mapped(lambda x: 1, [Shard(0)])(x),
        ("out_placements[0]: expected None, as the result is 1",),
    ),
    "a result that is a DTensor": (
        lambda mesh, x: mapped(lambda local: x, [Shard(0)])(x),
        ("func: expected a local tensor as result 0, got a DTensor",),
    ),
    "integers of no shape": (
        lambda mesh, x: sw.randint(10, device_mesh=mesh),
        ("randint(size): expected the global shape, got None",),
    ),
    "integers up to less": (
        lambda mesh, x: sw.randint(5, 5, (2,), device_mesh=mesh),
        ("randint(low, high): expected low < high",),
    ),
    "a shape of letters": (
        lambda mesh, x: sw.zeros("ab", device_mesh=mesh),  # type: ignore[arg-type]
        ("size: expected ints",),
    ),
    "a pending sum of floats by a word": (
        lambda mesh, x: sw.Layout(mesh, (4,), partial="sum"),
        ("partial: expected such as",),
    ),
    "the backward of a pending maximum": (
        lambda mesh, x: DTensor.from_local(
            torch.ones((), requires_grad=True), mesh, [Partial("max")]
        ).backward(),
        ("a pending reduction", "has no gradient"),
    ),
    "batches of gradients": (
        lambda mesh, x: torch.autograd.grad(
            x.requires_grad_() * 2, x, torch.ones(1, 4), is_grads_batched=True
        ),
        ("is_grads_batched is not supported", "once for each grad_outputs"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_argument_is_refused_by_name(name: str) -> None:
    call, parts = REFUSED[name]

    def run(mesh: sw.DeviceMesh) -> None:
        with refused(*parts):
            call(mesh, split(full(4), mesh, Shard(0)))

    ranks(run)


def test_a_dtensor_of_the_wanted_layout_is_returned_as_it_is() -> None:
    def run(mesh: sw.DeviceMesh) -> None:
        x = split(full(4), mesh, Shard(0))
        assert sw.distribute_tensor(x, mesh, [Shard(0)]) is x

    ranks(run)


def test_distributing_over_one_rank_copies() -> None:
    """Nothing is sent, and yet a write to the result must not change the tensor it came from."""

    def run(mesh: sw.DeviceMesh) -> None:
        given = full(4)
        sw.distribute_tensor(given, mesh, [Replicate()]).zero_()
        assert torch.equal(given, full(4))

    ranks(run, 1)


def test_local_map_takes_the_placements_of_one_result_as_a_tuple() -> None:
    def run(mesh: sw.DeviceMesh) -> None:
        made = mapped(torch.neg, (Shard(0),))(split(full(4), mesh, Shard(0)))
        assert torch.equal(made.full_tensor(), -full(4))

    ranks(run)


def test_local_map_sums_gradients_as_in_grad_placements_say() -> None:
    def run(mesh: sw.DeviceMesh) -> None:
        x = split(full(4), mesh, Shard(0))
        weight = split(full(1), mesh, Replicate()).requires_grad_()
        for how, factor in ((Partial(), 1.0), (Replicate(), 0.0)):
            product = mapped(torch.mul, [Shard(0)], in_grad_placements=([Shard(0)], [how]))
            (found,) = torch.autograd.grad(product(x, weight).sum(), weight)
            expected = full(4).sum() if factor else full(4).chunk(2)[mesh.get_rank()].sum()
            assert found.to_local().item() == expected

    ranks(run)


def test_gradients_of_unused_inputs_may_be_filled_with_zeros() -> None:
    def run(mesh: sw.DeviceMesh) -> None:
        x, unused = (split(full(4), mesh, Shard(0)).requires_grad_() for _ in range(2))
        plain = torch.ones(3, requires_grad=True)
        found = torch.autograd.grad((x * 2).sum(), (x, unused, plain), materialize_grads=True)
        assert torch.equal(found[0].full_tensor(), torch.full((4,), 2.0))
        assert found[1].placements == (Shard(0),) and not found[1].full_tensor().any()
        assert torch.equal(found[2], torch.zeros(3))

    ranks(run)
