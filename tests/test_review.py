"""What a review of the engine found: stale moves, lost writes, ranks that part ways, odd calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import shardwise as sw
from shardwise import DTensor, Partial, Placement, Replicate, Shard
from shardwise.errors import DispatchError
from shardwise.layout import Layout
from shardwise.testing import distributed

X = torch.arange(24.0, dtype=torch.float64).reshape(6, 4) / 7
ROW = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)


def on_mesh(tensor: torch.Tensor, *placements: Placement, shape: tuple[int, ...] = (2,)) -> DTensor:
    mesh = sw.init_device_mesh("cpu", shape)
    return distributed(tensor, Layout.from_placements(mesh, tensor.shape, placements))


# ---- what a tensor was moved to is kept for other uses, and must not be stale


@pytest.mark.parametrize("placement", [Replicate(), Partial()], ids=["whole", "pending"])
@pytest.mark.parametrize("how", ["set", "written"])
def test_a_change_through_data_is_seen_by_the_next_use(placement: Placement, how: str) -> None:
    def run() -> float:
        x = on_mesh(X, Shard(1))
        weight = on_mesh(ROW.clone().requires_grad_(), placement)
        (x * weight).sum()  # without a backward: the move is kept
        if how == "set":
            weight.data = on_mesh(ROW * 3, placement)
        else:
            weight.data.mul_(3)
        return (x * weight).sum().item()

    for found in sw.simulate(run, 2):
        assert found == pytest.approx((X * ROW * 3).sum().item())


def test_data_may_get_another_layout_after_a_use() -> None:
    def run() -> torch.Tensor:
        x = on_mesh(X, Shard(1))
        weight = on_mesh(ROW.clone().requires_grad_(), Replicate())
        (x * weight).sum()
        weight.data = on_mesh(ROW, Shard(0))
        (x * weight).sum().backward()  # type: ignore[no-untyped-call]
        assert weight.grad is not None and weight.grad.layout is weight.layout
        return weight.grad.full_tensor()

    for found in sw.simulate(run, 2):
        torch.testing.assert_close(found, X.sum(0))


def test_pending_sums_are_reduced_in_inference_mode() -> None:
    def run() -> torch.Tensor:
        with torch.inference_mode():
            x, y = on_mesh(X, Shard(1)), on_mesh(X.t().contiguous(), Shard(0))
            product = x @ y
            first = product.relu()
            product.add_(1)  # has no version that would tell
            made = first + product.relu()
            return made.full_tensor()  # type: ignore[attr-defined,no-any-return]

    for found in sw.simulate(run, 2):
        torch.testing.assert_close(found, (X @ X.t()).relu() + (X @ X.t() + 1).relu())


# ---- writing to a copy that stands for a view is refused, never lost

ALIASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "detach": lambda part: part.detach(),
    "data": lambda part: part.data,
    "detach of a view": lambda part: part[0].detach(),
}


@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES.keys())
@pytest.mark.parametrize(
    "write",
    [lambda part: part.add_(1.0), lambda part: torch._foreach_add_([part], 1.0)],
    ids=["add_", "foreach"],
)
def test_an_alias_of_a_severed_view_is_not_written(
    alias: Callable[[torch.Tensor], torch.Tensor], write: Callable[[torch.Tensor], object]
) -> None:
    def run() -> None:
        x = on_mesh(X, Shard(0))
        part = alias(x[1:3])
        with pytest.raises(DispatchError, match="would not reach the original"):
            write(part)

    sw.simulate(run, 2)


# ---- ranks with empty pieces do as the others


@pytest.mark.parametrize("rows", [1, 4])
def test_run_check_takes_empty_pieces(rows: int) -> None:
    whole = torch.arange(2.0 * rows).reshape(rows, 2)

    def run() -> torch.Tensor:
        mesh = sw.init_device_mesh("cpu", (2, 3))
        placements = [Replicate(), Shard(0)]
        box = Layout.from_placements(mesh, whole.shape, placements).box()
        piece = whole[box.slices].clone()
        return DTensor.from_local(piece, mesh, placements, run_check=True).full_tensor()

    for found in sw.simulate(run, 6):
        assert torch.equal(found, whole)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dim", [0, 1])
def test_scatter_with_an_index_of_one_row_writes_to_the_first_only(ranks: int, dim: int) -> None:
    index = torch.zeros((1, 4) if dim == 1 else (6, 1), dtype=torch.int64)
    source = X + 1
    calls: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x.scatter(dim, index, 3.0),
        lambda x: x.clone().scatter_(dim, index, 3.0),
        lambda x: x.scatter_add(dim, index, source),
        lambda x: x.scatter_reduce(dim, index, source, "amax"),
    ]

    def run() -> list[torch.Tensor]:
        x = on_mesh(X, Shard(1 - dim), shape=(ranks,))
        return [call(x).full_tensor() for call in calls]  # type: ignore[attr-defined]

    for found in sw.simulate(run, ranks):
        for have, call in zip(found, calls, strict=True):
            torch.testing.assert_close(have, call(X))


# ---- calls in other forms


def test_sizes_may_be_tensors() -> None:
    def run() -> None:
        x = on_mesh(X, Shard(0))
        with sw.fallback("replicate"):
            for count in (2, 3, 6):  # the value is no part of a plan
                made = x.reshape(torch.tensor(count), -1)  # type: ignore[call-overload]
                assert made.shape == (count, 24 // count)

    sw.simulate(run, 2)


def test_an_operator_in_place_takes_its_target_by_name() -> None:
    def run() -> torch.Tensor:
        x = on_mesh(X - 1, Shard(0))
        assert torch.relu_(input=x) is x
        return x.full_tensor()

    for found in sw.simulate(run, 2):
        assert torch.equal(found, F.relu(X - 1))


def test_an_aten_overload_writes_to_out() -> None:
    def run() -> torch.Tensor:
        x = on_mesh(X, Shard(0))
        out = torch.empty_like(x)
        torch.ops.aten.add.out(x, x, alpha=2, out=out)
        return out.full_tensor()  # type: ignore[attr-defined, no-any-return]

    for found in sw.simulate(run, 2):
        assert torch.equal(found, 3 * X)


def test_adamw_takes_its_learning_rate_as_a_tensor_where_a_parameter_is_pending() -> None:
    def trained(weight: torch.Tensor) -> torch.Tensor:
        parameter = torch.nn.Parameter(weight)
        optimizer = torch.optim.AdamW([parameter], lr=torch.tensor(0.1), foreach=False)
        for _ in range(2):
            optimizer.zero_grad()
            (parameter**2).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return parameter.detach()

    def run() -> torch.Tensor:
        made = trained(on_mesh(ROW.clone(), Partial()))
        return made.full_tensor()  # type: ignore[attr-defined, no-any-return]

    for found in sw.simulate(run, 2):
        torch.testing.assert_close(found, trained(ROW.clone()))
