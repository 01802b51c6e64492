"""Copies that stand for views of split dims are kept as views: compared with one process."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardwise import (
    DispatchError,
    DTensor,
    Event,
    Placement,
    Shard,
    distribute_tensor,
    init_device_mesh,
    listen,
    simulate,
)

Tensor = torch.Tensor
X = torch.arange(28.0, dtype=torch.float64).reshape(7, 4)  # uneven on two ranks, three and four


def written_by_index(x: Tensor) -> list[Tensor]:
    x[1] += 2
    x[1:3] *= 3.0
    x[:, 1] = 5.0
    x[x > 20] = -1
    return [x]


def written_through_parts(x: Tensor) -> list[Tensor]:
    part = x[2:6]
    part += 10
    turned = part.t()
    turned.mul_(2)
    row = part[1]
    row += 100
    narrowed, selected = x.narrow(0, 1, 4), x.select(1, 2)
    narrowed.sub_(7)
    selected.add_(1000)
    return [x, part, turned, row, narrowed, selected]


def seen_in_parts(x: Tensor) -> list[Tensor]:
    part = x[2:6]
    of_part, turned, row = part[1:], part.t(), x[4, 1:3]
    x.mul_(2)
    x.detach()[3] = 1.0
    x[:, 2] = x[:, 2] * 3
    other = x.view_as(x)
    other += 1
    return [row, turned, of_part, part, x]


PROGRAMS = [written_by_index, written_through_parts, seen_in_parts]


def on_mesh(tensor: Tensor, shape: tuple[int, ...], *placements: Placement) -> DTensor:
    return distribute_tensor(tensor, init_device_mesh("cpu", shape), placements)


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("program", PROGRAMS)
def test_parts_of_a_tensor_share_its_memory_as_in_one_process(
    program: Callable[[Tensor], list[Tensor]], shape: tuple[int, ...]
) -> None:
    def ran(leaf: Tensor, whole: Callable[[Any], Tensor]) -> list[Tensor]:
        values = program(leaf.requires_grad_() * 1)
        sum((each * (at + 1)).sin().sum() for at, each in enumerate(values)).backward()  # type: ignore[union-attr]
        return [whole(each).detach() for each in (*values, leaf.grad)]

    wanted = ran(X.clone(), lambda x: x)

    def main() -> None:
        for dim in (0, 1):
            leaf = on_mesh(X.clone(), shape, *[Shard(dim)] * len(shape))
            found = ran(leaf, lambda x: x.full_tensor())
            for have, want in zip(found, wanted, strict=True):
                torch.testing.assert_close(have, want)

    simulate(main, 4 if shape == (2, 2) else shape[0])


def causes(events: list[Event]) -> list[str]:
    """The operators for which rank 0 communicated, but for the making of the tensor."""
    found = [each.cause.operator for each in events if each.rank == 0 and each.cause]
    return [each for each in found if each in ("__getitem__", "__setitem__", "add_", "__iadd__")]


def test_an_augmented_assignment_sends_its_rows_once() -> None:
    events: list[Event] = []

    def main() -> None:
        x = on_mesh(X.clone(), (2,), Shard(0))
        x[1:5] += 1
        piece = X + torch.tensor([0.0, 1, 1, 1, 1, 0, 0], dtype=X.dtype).unsqueeze(1)
        assert torch.equal(x.to_local(), piece[x.box.slices])

    with listen(events.append):
        simulate(main, 2)
    assert causes(events) == ["__getitem__", "__setitem__"]


def test_a_part_that_is_not_used_again_is_not_sent_again() -> None:
    events: list[Event] = []

    def main() -> None:
        x = on_mesh(X.clone(), (2,), Shard(0))
        part = x[1:5]
        x.add_(1)
        assert "before add_" in repr(part)

    with listen(events.append):
        simulate(main, 2)
    assert causes(events) == ["__getitem__"]


def test_a_part_is_written_though_nobody_holds_its_tensor_any_more() -> None:
    def main() -> None:
        part = on_mesh(X.clone(), (2,), Shard(0))[1:5]
        part /= 2
        assert torch.equal(part.full_tensor(), X[1:5] / 2)

    simulate(main, 2)


def test_while_gradients_are_recorded_a_part_keeps_no_tensor_alive() -> None:
    def main() -> None:
        x = on_mesh(X.clone(), (2,), Shard(0)).requires_grad_() * 1
        alias, memory = x.detach(), weakref.ref(x)
        part, other = x[1:5], x[2:3]
        del x
        assert memory() is None
        with pytest.raises(DispatchError, match=r"clone\(\) it"):
            other.add_(1)
        assert torch.equal(other.clone().add_(1).detach().full_tensor(), X[2:3] + 1)
        alias.zero_()
        for use in (lambda: part + 1, part.to_local, part.full_tensor):
            with pytest.raises(DispatchError, match="changed since, by zero_"):
                use()

    simulate(main, 2)


def test_rows_of_a_loop_are_written() -> None:
    def main() -> None:
        x = on_mesh(X.clone(), (2,), Shard(0))
        for at, row in enumerate(x):
            row += at
        assert torch.equal(x.full_tensor(), X + torch.arange(7).unsqueeze(1))

    simulate(main, 2)


def test_a_copy_that_no_index_names_is_not_written() -> None:
    def main() -> None:
        x = on_mesh(X.clone(), (2,), Shard(0))
        for part in (x.diagonal(), x.view(2, 14), x[1:3].detach(), x[1:3].data):
            with pytest.raises(DispatchError, match="would not reach the original"):
                part.add_(1)
        x.zero_()
        assert part.sum().item() == 0

    simulate(main, 2)


# ---- what fails for one rank's part of a batch

EYES = torch.eye(3, dtype=torch.float64).repeat(5, 1, 1)
SINGULAR, UNKNOWN = EYES.clone(), EYES.clone()
SINGULAR[4], UNKNOWN[4] = -1.0, torch.nan

FAILING: dict[str, tuple[Callable[[Tensor], Any], Tensor]] = {
    "cholesky": (torch.linalg.cholesky, SINGULAR),
    "inv": (torch.linalg.inv, SINGULAR),
    "solve": (lambda x: torch.linalg.solve(x, x), SINGULAR),
    "lu_factor": (torch.linalg.lu_factor, SINGULAR),
    "eigh": (torch.linalg.eigh, UNKNOWN),
    "svd": (torch.linalg.svd, UNKNOWN),
    "cond": (torch.linalg.cond, UNKNOWN),
    "norm": (lambda x: torch.linalg.matrix_norm(x, "nuc"), UNKNOWN),
}


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)], ids=str)
def test_a_failed_factorization_fails_on_every_rank_with_torchs_error(
    shape: tuple[int, ...],
) -> None:
    def main() -> None:
        for call, batch in FAILING.values():
            with pytest.raises(RuntimeError) as wanted:
                call(batch)
            split = on_mesh(batch, shape, *[Shard(0)] * len(shape))
            with pytest.raises(wanted.type):
                call(split)
            fine = on_mesh(EYES, shape, *[Shard(0)] * len(shape))
            call(fine)  # and all go on together

    simulate(main, 4 if shape == (2, 2) else shape[0])
