"""Real ranks whose generators differ: when they compare, what it costs, what they are told."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.random.seed_check import MOST_UNCHECKED


def drawn(mesh: sw.DeviceMesh, count: int) -> list[int]:
    """Draw; return at which of the operators something was sent."""
    sent = []
    for number in range(1, count + 1):
        events: list[sw.Event] = []
        with sw.listen(events.append):
            sw.rand(3, device_mesh=mesh)
        if events:
            (event,) = events
            assert event.kind == "all_gather"
            assert event.cause.operator == "check_random_state"
            sent.append(number)
    return sent


def compares_seldom() -> list[list[int]]:
    mesh = sw.DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("new",))  # nobody has drawn on it
    sw.seed(mesh, 0)
    grid = sw.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("rows", "columns"))
    return [drawn(mesh, 300), drawn(grid, 5)]


def test_ranks_compare_at_the_first_operators_and_then_at_every_64th(workers4: sw.Workers) -> None:
    for of_mesh, of_grid in workers4.run(compares_seldom):
        assert of_mesh == [1, 2, 4, 8, 16, 32, 64, 128, 192, 256]
        assert of_grid == [1, 2, 4]


def message_of(call: Any) -> str:
    with pytest.raises(sw.RandomStateError) as caught:
        call()
    return str(caught.value).partition(" [rank")[0]


def seed_by_rank() -> list[str]:
    """Each on a mesh of its own, since comparisons are counted by mesh."""
    found = []
    for names in ("a", "b", "c"):
        mesh = sw.DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=(names,))
        if names == "a":  # before the first operator
            torch.manual_seed(mesh.get_rank() // 3)
            found.append(message_of(lambda mesh=mesh: sw.rand(3, device_mesh=mesh)))
            found.append(message_of(lambda mesh=mesh: sw.rand(3, device_mesh=mesh)))
        sw.seed(mesh, 1)
        drawn(mesh, 100)
        if names == "b":  # one rank draws a plain tensor
            if mesh.get_rank() == 2:
                torch.rand(())
            found.append(message_of(lambda mesh=mesh: drawn(mesh, MOST_UNCHECKED)))
        if names == "c":  # for a while only
            torch.manual_seed(mesh.get_rank())
            sw.rand(3, device_mesh=mesh)
            torch.manual_seed(1)
            found.append(message_of(lambda mesh=mesh: drawn(mesh, MOST_UNCHECKED)))
        sw.seed(mesh, 1)
        x = sw.distribute_tensor(torch.ones(8, 2), mesh, [sw.Shard(0)])
        for _ in range(70):  # told once
            x = F.dropout(x, 0.1)
    return found


def test_every_rank_is_told_of_generators_that_differ_and_once(workers4: sw.Workers) -> None:
    first, *others = workers4.run(seed_by_rank)
    assert others == [first] * 3
    assert "in this random operator on init_device_mesh" in first[0]
    assert "ranks [3] drew other random numbers than ranks [0, 1, 2]" in first[0]
    assert first[1] == first[0]
    assert "in one of the last 64 random operators" in first[2]
    assert "ranks [2] drew other" in first[2]
    assert "random operators on init_device_mesh" in first[3]


def recomputes_on_one_rank() -> torch.Tensor:
    mesh = sw.DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("d",))
    sw.seed(mesh)
    x = sw.distribute_tensor(torch.ones(8, 6), mesh, [sw.Shard(0)]).requires_grad_()
    for _ in range(5):
        if mesh.get_rank() == 1:
            y = checkpoint(lambda z: F.dropout(z.relu(), 0.5), x, use_reentrant=False)
        else:
            y = F.dropout(x.relu(), 0.5)
        y.square().sum().backward()
    assert x.grad is not None
    return x.grad.full_tensor()


def test_a_rank_that_recomputes_does_not_wait_for_the_others(workers4: sw.Workers) -> None:
    first, *others = workers4.run(recomputes_on_one_rank)
    assert all(torch.equal(first, each) for each in others)
