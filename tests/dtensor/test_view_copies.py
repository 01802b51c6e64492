"""Write-back copies of split dims behave as views do in one process."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.rules import full, ranks, split
from torch.utils.checkpoint import checkpoint

from shardwise import (
    DispatchError,
    DTensor,
    Event,
    LayoutError,
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


def test_a_copy_that_no_index_gives_is_not_written() -> None:
    def main() -> None:
        x = on_mesh(X.clone(), (2,), Shard(0))
        for part in (x.diagonal(), x.view(2, 14), x[1:3].detach(), x[1:3].data):
            with pytest.raises(DispatchError, match="would not reach the original"):
                part.add_(1)
        x.zero_()
        assert part.sum().item() == 0

    simulate(main, 2)


def of_other_memory(x: Tensor) -> list[Tensor]:
    part = x[1:5]
    x.data = x.data * 2
    return [x, part]


def of_lists(x: Tensor) -> list[Tensor]:
    part, overlapping = x[1:5], x[4:]
    torch._foreach_mul_([x, part, overlapping], 2.0)
    torch._foreach_add_([x[1:2], x[2:3]], [x[:1], x[1:2]])
    return [x, part, overlapping]


def of_a_leaf(x: Tensor) -> list[Tensor]:
    part = x[1:5].requires_grad_()
    parameter = torch.nn.Parameter(x[2:4])
    x[3] = 7.0
    return [part, part * 2, parameter, parameter * 2]


def of_chunks(x: Tensor) -> list[Tensor]:
    head, tail = x.chunk(2)
    x += 1
    wide, tall = torch.broadcast_tensors(head[:3], tail)
    tail *= 3
    return [x, head, tail, wide, tall]


def of_gradients(x: Tensor) -> list[Tensor]:
    weight = x.clone().requires_grad_()
    (weight * weight).sum().backward()
    assert weight.grad is not None
    parts = [weight.grad[1:5], weight.grad[:, 1]]
    (weight * weight).sum().backward()
    parts[0] *= 2
    return [weight.grad, *parts]


def of_the_state_of_an_optimizer(x: Tensor) -> list[Tensor]:
    weight = x.clone().requires_grad_()
    optimizer = torch.optim.SGD([weight], 0.1, momentum=0.9)
    parts = []
    for _ in range(3):
        optimizer.zero_grad()
        (weight * weight).sum().backward()
        optimizer.step()
        parts += [weight.detach()[1:5], optimizer.state[weight]["momentum_buffer"][1:5]]
    return parts


WITHOUT_HISTORY = [
    of_other_memory, of_lists, of_a_leaf, of_chunks, of_gradients, of_the_state_of_an_optimizer,
]  # fmt: skip


@pytest.mark.parametrize("program", WITHOUT_HISTORY)
def test_parts_are_those_of_one_process(program: Callable[[Tensor], list[Tensor]]) -> None:
    wanted = program(X.clone())

    def main() -> None:
        for dim in (0, 1):
            found = program(on_mesh(X.clone(), (2,), Shard(dim)))
            for have, want in zip(found, wanted, strict=True):
                torch.testing.assert_close(have.detach().full_tensor(), want.detach())  # type: ignore[attr-defined]

    simulate(main, 2)


def test_chunks_of_what_has_a_history_show_what_was_written_unseen() -> None:
    def main() -> None:
        x = on_mesh(X.clone(), (2,), Shard(0)).requires_grad_() * 1
        head, tail = x.chunk(2)
        with torch.no_grad():
            other = x.chunk(2)[0]
            x.mul_(2)
        x.data.add_(1)
        for have, want in ((head, X[:4]), (tail, X[4:]), (other, X[:4])):
            assert torch.equal(have.detach().full_tensor(), want * 2 + 1)
        assert head.requires_grad and not other.requires_grad

    simulate(main, 2)


def test_rows_of_unbind_and_writes_of_init_without_gradients() -> None:
    def main() -> None:
        leaf = on_mesh(X.clone(), (2,), Shard(0)).requires_grad_()
        rows, part = leaf.unbind(), leaf[2:4]
        torch.nn.init.constant_(part, 5.0)
        assert torch.equal(rows[2].detach().full_tensor(), torch.full((4,), 5.0).double())
        assert leaf.is_leaf and rows[2].requires_grad

    simulate(main, 2)


def test_a_part_without_elements_leaves_its_tensor_as_it_is_on_every_rank() -> None:
    def main() -> None:
        x = on_mesh(X.clone(), (2,), Shard(0))
        empty = x[:, 4:]
        for row in (empty[1], empty.select(0, 1), empty.diagonal(), empty[:2]):
            assert row.numel() == 0
        x += 1
        empty += 1
        assert torch.equal(x.full_tensor(), X + 1)

    simulate(main, 2)


def test_windows_that_overlap_have_their_gradients_when_taken_again() -> None:
    def grad(leaf: Tensor) -> Any:
        windows = leaf.unfold(0, 3, 1)
        with torch.no_grad():
            leaf[1:3] += 1
        windows.sin().sum().backward()
        return leaf.grad

    def main() -> None:
        found = grad(on_mesh(X.clone(), (2,), Shard(0)).requires_grad_())
        torch.testing.assert_close(found.full_tensor(), grad(X.clone().requires_grad_()))

    simulate(main, 2)


def test_what_is_refused_writes_nothing() -> None:
    def main() -> None:
        x = on_mesh(X.clone(), (2,), Shard(0))
        row = x[1:5].data[2]  # data is no view to autograd
        with pytest.raises(DispatchError, match="would not reach the original"):
            row += 1
        assert torch.equal(row.full_tensor(), X[3])
        leaf = x.clone().requires_grad_()
        part = leaf[1:5]
        with pytest.raises(RuntimeError, match="leaf"):
            part += 1
        assert torch.equal(part.detach().full_tensor(), X[1:5])
        replaced = x[1:5]
        x.data = on_mesh(X * 2, (2,), Shard(0))
        with pytest.raises(DispatchError, match="would not reach the original"):
            replaced += 1
        assert torch.equal(x.full_tensor(), X * 2)
        with pytest.raises(DispatchError, match="Load into the original"):
            x[1:5].__create_chunk_list__()  # torch's checkpoints call this first when they load
        with pytest.raises(LayoutError, match=r"clone\(\) it"):
            leaf[1:5].detach().clone().grad = x[1:5]

    simulate(main, 2)


def test_dims_that_change_in_place_are_no_part_any_more() -> None:
    def main() -> None:
        x = on_mesh(X[:4].clone(), (2,), Shard(0))
        part = x[1:3]
        with pytest.raises(LayoutError, match="must keep its dims"):
            part.t_()
        x.t_()
        with pytest.raises(DispatchError, match="would not reach the original"):
            part.add_(1)
        assert torch.equal(part.full_tensor(), X[1:3])
        x.add_(1)
        with pytest.raises(DispatchError, match="other dims"):
            part.sum()

    simulate(main, 2)


def test_checkpointing_saves_a_part_as_it_is_now() -> None:
    def main() -> None:
        leaf = on_mesh(X / 28, (2,), Shard(0)).requires_grad_()
        x = leaf * 1
        part = x[1:5]
        x += 1
        checkpoint(lambda part: (part * part).sin(), part, use_reentrant=False).sum().backward()
        alone = (X / 28).requires_grad_()
        (alone[1:5] + 1).square().sin().sum().backward()
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad.full_tensor(), alone.grad)

    simulate(main, 2)


def test_writing_to_a_diagonal_that_is_split_is_refused_and_the_remedy_works() -> None:
    def main() -> None:
        x = on_mesh(X, (2,), Shard(0))
        with pytest.raises(DispatchError, match=r"result of diagonal, .*or clone\(\) it"):
            x.diagonal().add_(1)
        remedy = x.diagonal().clone()
        assert remedy.add_(1).tolist() == [1 + x[at, at].item() for at in range(4)]

    simulate(main, 2)


ALIASES: dict[str, Callable[[Tensor], Tensor]] = {
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
def test_an_alias_of_a_detached_copy_is_not_written(
    alias: Callable[[Tensor], Tensor], write: Callable[[Tensor], object]
) -> None:
    def main() -> None:
        x = on_mesh(X, (2,), Shard(0))
        part = alias(x[1:3])
        with pytest.raises(DispatchError, match="would not reach the original"):
            write(part)

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
            call(fine)  # no rank is left waiting

    simulate(main, 4 if shape == (2, 2) else shape[0])


SOMETIMES_A_COPY = {
    "columns, contiguous": lambda x: x[:, :2].contiguous(),
    "columns, flatten": lambda x: x[:, :2].flatten(),
    "columns, reshape": lambda x: x[:, 1:3].reshape(8),
    "columns, ravel": lambda x: torch.ravel(x[:, 4:]),
    "a column": lambda x: x[:, 1].contiguous(),
    "a part of a part": lambda x: x[1:3][:, 2:4].contiguous(),
    "rows": lambda x: x[1:3].contiguous(),
    "all": lambda x: x[:, :].contiguous(),
    "one row": lambda x: x[1].flatten(),
    "a part of one row": lambda x: x[1:2, 0:2].reshape(2),
    "transposed columns": lambda x: x[:, :2].t().contiguous(),
}


@pytest.mark.parametrize("take", SOMETIMES_A_COPY.values(), ids=SOMETIMES_A_COPY)
@pytest.mark.parametrize("dim", [0, 1])
def test_a_write_reaches_the_original_where_one_process_has_a_view_and_only_there(take, dim):
    def run(mesh):
        one = full(4, 6)
        x = split(one.clone(), mesh, Shard(dim))
        part, expected = take(x), take(one)
        part.add_(100)
        expected.add_(100)
        assert torch.equal(part.full_tensor(), expected)
        assert torch.equal(x.full_tensor(), one)

    ranks(run, 2)
    ranks(run, 3)
