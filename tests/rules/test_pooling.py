"""Pooling: windows that reach over the pieces of a split dim, and counts of the global tensor."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.rules import check_modules, in_layout, values
from torch import nn

import shardwise as sw
from shardwise.comm import Event, listen
from shardwise.testing import Sample, check_rule

MESHES = ((2,), (4,), (2, 3))


def check(function: Callable[..., Any], *samples: Sample, most: int = 12) -> None:
    check_rule(function, samples, mesh_shapes=MESHES, most=most)


def pieces(function: Callable[..., Any], x: torch.Tensor, dim: int, ranks: int) -> list[Any]:
    """What each of the ranks has of the result, and the collectives it took part in."""

    def run() -> tuple[list[float], list[str]]:
        mesh = sw.init_device_mesh("cpu", (ranks,))
        events: list[Event] = []
        with listen(events.append):
            made = function(in_layout(x, mesh, sw.Shard(dim)))
        kinds = [event.kind for event in events if event.rank == mesh.get_rank()]
        return made.to_local().flatten().tolist(), kinds

    return sw.simulate(run, ranks)


def test_a_window_over_two_pieces() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, 9.0, 5.0, 6.0]])
    largest = pieces(lambda x: F.max_pool1d(x, 3, 1, 1), x, 1, 2)
    assert largest == [([2, 3, 9], ["all_to_all"]), ([9, 9, 6], ["all_to_all"])]
    average = pieces(lambda x: F.avg_pool1d(x, 3, 1, 1), x, 1, 2)
    assert average[0][0] == pytest.approx([3 / 3, 6 / 3, 14 / 3])
    assert average[1][0] == pytest.approx([17 / 3, 20 / 3, 11 / 3])


def test_windows_within_the_pieces_need_nobody() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, 9.0, 5.0, 6.0, 8.0, 7.0]])
    assert pieces(lambda x: F.max_pool1d(x, 2), x, 1, 2) == [([2, 9], []), ([6, 8], [])]


def test_one_average_of_all_moves_no_plane() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]])
    made = pieces(lambda x: F.adaptive_avg_pool1d(x, 1), x, 1, 2)
    assert made == [([pytest.approx(6 / 5)], []), ([pytest.approx(9 / 5)], [])]  # to be added


def test_indices_are_those_in_the_global_plane() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, 9.0, 5.0, 6.0, 8.0, 7.0]])
    made = pieces(lambda x: F.max_pool1d(x, 2, return_indices=True)[1], x, 1, 2)
    assert made[1][0] == [1, 3, 5, 6]


def test_max_pool() -> None:
    check(
        F.max_pool1d,
        Sample(values(2, 3, 7), 3, 2, 1),
        Sample(values(3, 8), 2, dilation=3),
        Sample(values(3, 7), 3, 2, 1, return_indices=True),
    )
    check(torch.max_pool1d, Sample(values(1, 3, 7), 3, 2, 1, 1, True), most=10)
    check(
        F.max_pool2d,
        Sample(values(2, 3, 5, 6), 2),
        Sample(values(1, 2, 7, 5), (2, 3), ceil_mode=True, padding=(0, 1)),
        Sample(values(2, 7, 7), 3, (1, 2), 1, 2),
        Sample(values(2, 3, 5, 6), 2, return_indices=True),
    )
    check(F.max_pool3d, Sample(values(1, 2, 4, 5, 3), 2, 1))
    check(F.max_pool3d, Sample(values(1, 2, 4, 5, 3), 2, return_indices=True), most=10)


def test_max_pool_of_integers() -> None:
    check(F.max_pool2d, Sample(torch.arange(30).view(1, 5, 6) - 40, 3, 2, 1))


def test_avg_pool() -> None:
    check(
        F.avg_pool1d,
        Sample(values(2, 3, 7), 3, 2, 1),
        Sample(values(2, 7), 3, 2, 1, ceil_mode=True, count_include_pad=False),
    )
    input = values(1, 2, 7, 6)
    check(
        F.avg_pool2d,
        Sample(values(2, 3, 5, 6), 2),
        Sample(input, 3, 2, 1),
        Sample(input, 3, 2, 1, count_include_pad=False),
        Sample(input, 3, 2, 1, ceil_mode=True),
        Sample(input, (3, 2), 2, (1, 0), ceil_mode=True, divisor_override=3),
    )
    check(F.avg_pool3d, Sample(values(1, 2, 4, 5, 3), 2, 1, 1))


@pytest.mark.slow
def test_adaptive() -> None:
    check(
        F.adaptive_avg_pool2d,
        Sample(values(2, 3, 6, 4), (3, None)),
        Sample(values(2, 3, 5, 3), 1),
        Sample(values(3, 5, 3), 2),
    )
    check(F.adaptive_avg_pool1d, Sample(values(2, 3, 7), 1), Sample(values(3, 6), 3), most=10)
    check(F.adaptive_avg_pool3d, Sample(values(2, 2, 4, 2, 3), 1), most=10)
    check(F.adaptive_max_pool1d, Sample(values(2, 3, 6), 3), Sample(values(3, 7), 1), most=10)
    check(
        F.adaptive_max_pool2d,
        Sample(values(2, 3, 6, 4), (3, 2)),
        Sample(values(2, 3, 7, 5), 2),
        Sample(values(2, 3, 6, 4), (3, 2), return_indices=True),
        most=10,
    )


def test_unpool() -> None:
    pooled, indices = F.max_pool2d(values(2, 3, 6, 4).detach(), 2, return_indices=True)
    check(F.max_unpool2d, Sample(pooled.requires_grad_(), indices, 2), most=10)
    pooled, indices = F.max_pool1d(values(2, 3, 6).detach(), 2, return_indices=True)
    check(F.max_unpool1d, Sample(pooled.requires_grad_(), indices, 2), most=10)


def test_fractional() -> None:
    samples = torch.rand(2, 3, 2, dtype=torch.float64)
    check(F.fractional_max_pool2d, Sample(values(2, 3, 7, 6), 2, (3, 3), _random_samples=samples))
    alone = Sample(values(3, 7, 6), 2, (3, 3), _random_samples=samples[:1], return_indices=True)
    check(F.fractional_max_pool2d, alone, most=10)

    def run() -> torch.Tensor:
        torch.manual_seed(5)
        split = in_layout(x, sw.init_device_mesh("cpu", (2,)), sw.Shard(1))
        return F.fractional_max_pool2d(split, 2, output_ratio=(0.5, 0.5)).full_tensor()

    x = values(2, 3, 7, 6)
    torch.manual_seed(5)
    expected = F.fractional_max_pool2d(x, 2, output_ratio=(0.5, 0.5))
    assert all(torch.equal(made, expected) for made in sw.simulate(run, 2))


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_modules(dim: int) -> None:
    modules = [nn.MaxPool2d(2), nn.AvgPool2d(3, 1), nn.LPPool2d(2, 2), nn.AdaptiveMaxPool2d(3)]
    check_modules(modules, values(3, 4, 6, 6), dim)


@pytest.mark.parametrize("space", [1, 2, 3])
def test_autocast_gives_the_dtype_of_plain_tensors(space: int) -> None:
    x = values(2, 3, *(4,) * space).detach().bfloat16()
    functions = [
        lambda x: getattr(F, f"max_pool{space}d")(x, 3, 2, 1),
        lambda x: getattr(F, f"avg_pool{space}d")(x, 3, 2, 1, count_include_pad=False),
        lambda x: getattr(F, f"adaptive_avg_pool{space}d")(x, 1),
        lambda x: getattr(F, f"adaptive_avg_pool{space}d")(x, 2),
        lambda x: getattr(F, f"adaptive_max_pool{space}d")(x, 2),
    ]

    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (3,))
        for dim in (1, 2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                for function in functions:
                    made = function(in_layout(x, mesh, sw.Shard(dim)))
                    torch.testing.assert_close(
                        made.full_tensor(), function(x), rtol=2e-2, atol=1e-2
                    )

    sw.simulate(run, 3)


def test_what_torch_refuses_is_torchs_error() -> None:
    def run() -> None:
        x = in_layout(values(1, 2, 4), sw.init_device_mesh("cpu", (2,)), sw.Shard(2))
        with pytest.raises(RuntimeError, match="padding should be at most half of kernel"):
            F.max_pool1d(x, 2, padding=2)
        with pytest.raises(RuntimeError, match=r"(?i)output size"):
            F.max_pool1d(x, 5)

    sw.simulate(run, 2)


def test_an_average_of_integers_is_rounded_once_and_planned_apart_from_that_of_floats():
    def run():
        mesh = sw.init_device_mesh("cpu", (2,))
        found = []
        for x in (torch.tensor([[1.0, 2, 3, 4]]), torch.tensor([[1, 0, 1, 2]])):
            mine = sw.DTensor.from_local(x, mesh, [sw.Partial()])
            found.append(F.avg_pool1d(mine, 2).full_tensor().tolist())
        return found

    # Rounded on each rank, the averages of the integers would be 0 + 0 and 1 + 1.
    assert sw.simulate(run, 2) == [[[[3.0, 7.0]], [[1, 3]]]] * 2
