"""Convolutions: torch's own DTensor is silently wrong on channels and space; these are right."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.rules import in_layout, values
from torch import nn

import shardwise as sw
from shardwise.comm import Event, listen
from shardwise.rules.helpers.dims import chunks_of, same_units
from shardwise.rules.helpers.halo_exchange import Window, WindowExchange
from shardwise.testing import Sample, check_rule

MESHES = ((2,), (4,), (2, 3))


def check(function: Callable[..., Any], *samples: Sample, most: int = 12) -> None:
    check_rule(function, samples, mesh_shapes=MESHES, most=most)


# ---- what moves


def test_a_rank_gets_the_rows_next_to_its_own_and_no_others() -> None:
    # sums of three neighbours of 1, 2, ..., 8, two of which each rank has
    def run() -> tuple[Any, ...]:
        mesh = sw.init_device_mesh("cpu", (4,))
        x = torch.arange(1.0, 9.0).view(1, 1, 8).requires_grad_()
        split = in_layout(x, mesh, sw.Shard(2))
        events: list[Event] = []
        with listen(events.append):
            sums = torch.conv1d(split, torch.ones(1, 1, 3), padding=1)
        sums.sum().backward()
        mine = [event for event in events if event.rank == mesh.get_rank()]
        return sums.placements, sums.to_local(), split.grad.full_tensor(), mine

    found = sw.simulate(run, 4)
    sums = [3.0, 6.0, 9.0, 12.0, 15.0, 18.0, 21.0, 15.0]
    for rank, (placements, local, gradient, events) in enumerate(found):
        assert placements == (sw.Shard(2),)
        assert local.flatten().tolist() == sums[2 * rank : 2 * rank + 2]
        # each row is in three sums, those at the ends in two; most of them made on other ranks
        assert gradient.flatten().tolist() == [2, 3, 3, 3, 3, 3, 3, 2]
        (event,) = events
        neighbours = 1 if rank in (0, 3) else 2
        assert (event.kind, event.bytes) == ("all_to_all", 4 * neighbours)


def communication(
    function: Callable[..., Any], tensors: list[torch.Tensor], placements: list[sw.Placement]
) -> tuple[list[str], sw.Layout]:
    def run() -> tuple[list[str], sw.Layout]:
        mesh = sw.init_device_mesh("cpu", (2,))
        given = [in_layout(x, mesh, each) for x, each in zip(tensors, placements, strict=True)]
        events: list[Event] = []
        with listen(events.append), torch.no_grad():
            made = function(*given)
        return [event.kind for event in events], repr(made.mesh_layout)

    return sw.simulate(run, 2)[0]


WHOLE = sw.Replicate()


@pytest.mark.parametrize(
    ("input", "weight", "how", "placements", "layout"),
    [
        ((4, 3, 6), (4, 3, 3), {}, (sw.Shard(0), WHOLE), "[4@0, 4, 4]"),
        ((4, 3, 6), (4, 3, 3), {}, (WHOLE, sw.Shard(0)), "[4, 4@0, 4]"),
        ((4, 4, 6), (4, 4, 3), {}, (sw.Shard(1), sw.Shard(1)), "[4, 4, 4] +sum@0"),
        ((4, 4, 6), (4, 4, 3), {}, (sw.Partial(), WHOLE), "[4, 4, 4] +sum@0"),
        ((4, 4, 6), (8, 1, 3), {"groups": 4}, (sw.Shard(1), sw.Shard(0)), "[4, 8@0, 4]"),
        ((4, 3, 6), (4, 3, 1), {}, (sw.Shard(2), WHOLE), "[4, 4, 6@0]"),
        ((1, 3, 16), (4, 3, 4), {"stride": 4}, (sw.Shard(2), WHOLE), "[1, 4, 4@0]"),
    ],
    ids=["batch", "filters", "channels", "pending", "groups", "kernel of 1", "patches"],
)
def test_nothing_moves_where_nothing_must(
    input: Any, weight: Any, how: Any, placements: Any, layout: str
) -> None:
    tensors = [values(*input), values(*weight)]
    function = lambda x, w: torch.conv1d(x, w, **how)  # noqa: E731
    assert communication(function, tensors, placements) == ([], layout)


def test_groups_are_cut_only_between_them() -> None:
    mesh = sw.DeviceMesh.abstract((2,))
    assert same_units(4, (4, 8), mesh, (0,))
    assert not same_units(3, (6, 6), mesh, (0,))  # 3 + 3 channels, of groups of 2
    assert not same_units(3, (3, 6), mesh, (0,))  # 2 + 1 groups of inputs, 1.5 + 1.5 of results


def test_windows() -> None:
    window = Window(size=10, kernel=3, stride=2, before=1, after=1, dilation=2)
    assert (window.reach, window.count) == (5, 4)
    assert window.looks_at((0, 1)) == (-1, 4)
    assert window.needs((0, 1)) == (0, 4)
    assert window.padding((0, 1)) == (1, 0)
    assert window.needs((3, 3))[0] == window.needs((3, 3))[1]
    mesh = sw.DeviceMesh.abstract((2, 2))
    assert chunks_of(5, mesh, (1, 0)) == ((0, 2), (2, 3), (3, 4), (4, 5))
    assert WindowExchange(mesh, (0,), 0, ((0, 2), (2, 4)), ((0, 2), (4, 4))).is_local
    assert not WindowExchange(mesh, (0,), 0, ((0, 2), (2, 4)), ((0, 3), (3, 4))).is_local


# ---- values and gradients in every layout


def test_conv1d() -> None:
    weight = values(4, 3, 3)
    check(
        torch.conv1d,
        Sample(values(2, 3, 7), weight, values(4), padding=1),
        Sample(values(3, 8), weight, None, 2, 2, 2),
        Sample(values(2, 3, 11), values(2, 3, 2), stride=3),  # rows that no result looks at
        Sample(values(1, 3, 9), values(2, 3, 8), padding=2),  # windows over many ranks
        most=12,
    )


def test_conv2d() -> None:
    bias = values(4)
    check(
        F.conv2d,
        Sample(values(2, 3, 5, 7), values(4, 3, 3, 2), bias, 2, (1, 0)),
        Sample(values(1, 3, 7, 6), values(4, 3, 3, 2), bias, dilation=2, padding=(2, 1)),
        Sample(values(3, 7, 6), values(4, 3, 3, 3), bias),
    )


def test_conv3d() -> None:
    check(F.conv3d, Sample(values(1, 2, 4, 3, 5), values(2, 2, 2, 2, 3), values(2), padding=1))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_padding_by_name() -> None:
    input, bias = values(1, 2, 7, 6), values(2)
    check(
        F.conv2d,
        Sample(input, values(2, 2, 4, 2), bias, padding="same"),  # more behind than before
        Sample(input, values(2, 2, 3, 3), bias, padding="valid"),
    )


def test_groups() -> None:
    check(
        F.conv2d,
        Sample(values(2, 4, 5, 3), values(8, 1, 3, 3), values(8), padding=1, groups=4),
        Sample(values(1, 6, 5, 4), values(3, 2, 3, 3), padding=1, groups=3),
        most=16,
    )


@pytest.mark.slow
def test_transposed() -> None:
    check(
        torch.conv_transpose1d,
        Sample(values(2, 3, 5), values(3, 2, 3), values(2), 2, 1, 1),
        Sample(values(1, 2, 4), values(2, 2, 2), values(2), stride=4, output_padding=2),  # gaps
        Sample(values(2, 7), values(2, 2, 3), dilation=2),
        most=12,
    )
    check(
        F.conv_transpose2d,
        Sample(values(1, 3, 4, 5), values(3, 2, 3, 2), stride=2, padding=(1, 0)),
        Sample(values(2, 4, 3, 3), values(4, 2, 2, 2), values(4), groups=2),
        most=12,
    )
    check(F.conv_transpose3d, Sample(values(3, 3, 2, 4), values(3, 2, 2, 2, 2), values(2)), most=10)


def test_as_aten_has_it() -> None:
    for transposed in (False, True):
        weight = values(2, 2, 3)
        sample = Sample(values(2, 2, 5), weight, values(2), [1], [1], [1], transposed, [0], 1)
        check(torch.ops.aten.convolution.default, sample, most=10)


def test_patches() -> None:
    check(
        F.unfold,
        Sample(values(2, 3, 5, 4), 2),
        Sample(values(4, 5, 4), (3, 2), padding=1, stride=2),
        most=10,
    )
    check(F.fold, Sample(values(2, 12, 12), (5, 4), 2), Sample(values(8, 12), (5, 4), 2), most=10)


# ---- how it is used


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_modules(dim: int) -> None:
    modules = [
        nn.Conv2d(4, 6, 3, padding=1),
        nn.Conv2d(4, 4, 3, padding=1, groups=4, padding_mode="circular"),
        nn.Conv2d(4, 2, (3, 2), padding=(1, 1), padding_mode="reflect"),
        nn.Conv2d(4, 2, 3, padding="same"),
        nn.ConvTranspose2d(4, 2, 2, stride=2),
    ]
    x = values(3, 4, 5, 5)
    for module in modules:
        module.double()
        expected = module(x)

        def run(module: nn.Module = module) -> torch.Tensor:
            mesh = sw.init_device_mesh("cpu", (3,))
            return module(in_layout(x, mesh, sw.Shard(dim))).full_tensor()

        for made in sw.simulate(run, 3):
            torch.testing.assert_close(made, expected, rtol=1e-10, atol=1e-12)


def test_gradients_of_gradients_pass_the_halo() -> None:
    x, weight = values(1, 2, 6), values(2, 2, 3)

    def penalty(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        made = torch.conv1d(x, weight, padding=1)
        (slope,) = torch.autograd.grad((made * made * made).sum(), x, create_graph=True)
        return (slope * slope).sum()

    expected = torch.autograd.grad(penalty(x, weight), [x, weight])

    def run() -> list[torch.Tensor]:
        mesh = sw.init_device_mesh("cpu", (3,))
        given = in_layout(x, mesh, sw.Shard(2)), in_layout(weight, mesh, sw.Replicate())
        penalty(*given).backward()
        return [each.grad.full_tensor() for each in given]

    for made in sw.simulate(run, 3):
        torch.testing.assert_close(made, list(expected), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_autocast_gives_the_dtype_of_plain_tensors(dim: int) -> None:
    x, weight, bias = (values(*shape).float() for shape in ((3, 2, 5), (2, 2, 3), (2,)))

    def run() -> list[torch.dtype]:
        mesh = sw.init_device_mesh("cpu", (4,))  # with empty shards
        given = in_layout(x, mesh, sw.Shard(dim))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            made = [torch.conv1d(given, weight, bias), torch.conv_transpose1d(given, weight, bias)]
        return [each.to_local().dtype for each in made]

    assert sw.simulate(run, 4) == [[torch.bfloat16] * 2] * 4


def test_a_kernel_that_does_not_fit_is_torchs_error() -> None:
    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        x = in_layout(values(1, 2, 4), mesh, sw.Shard(2))
        with pytest.raises(RuntimeError, match="Kernel size can't be greater than"):
            torch.conv1d(x, values(2, 2, 5))
        with pytest.raises(RuntimeError, match="channel"):
            torch.conv1d(x, values(2, 3, 2))

    sw.simulate(run, 2)


class Block(nn.Module):
    """A residual block, as in ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 6, 3, padding=1)
        self.shortcut = nn.Conv2d(4, 6, 1, stride=2)
        self.pool = nn.MaxPool2d(3, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(x)
        hidden = torch.relu(self.norm(self.first(x)))
        made = torch.relu(self.second(hidden) + self.shortcut(x))
        return F.adaptive_avg_pool2d(made, 1).flatten(1)


@pytest.mark.parametrize(
    "placements",
    [
        (sw.Shard(0), sw.Replicate()),
        (sw.Shard(2), sw.Replicate()),
        (sw.Shard(0), sw.Shard(2)),
        (sw.Shard(2), sw.Shard(3)),
        (sw.Shard(2), sw.Shard(2)),
        (sw.Shard(1), sw.Shard(0)),
    ],
    ids=str,
)
@pytest.mark.parametrize("split_filters", [False, True])
def test_a_resnet_block_is_the_same_however_it_lies(
    placements: tuple[sw.Placement, ...], split_filters: bool
) -> None:
    torch.manual_seed(0)
    block = Block().double()
    x = values(3, 4, 13, 10)
    plain = block(x)
    (plain * plain).sum().backward()
    expected = {name: each.grad.clone() for name, each in block.named_parameters()}
    running = block.norm.running_mean.clone()

    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2, 2))
        torch.manual_seed(0)
        block = Block().double()
        for module in block.modules():
            for key, param in list(module.named_parameters(recurse=False)):
                filters = [sw.Replicate(), sw.Shard(0) if split_filters else sw.Replicate()]
                setattr(module, key, nn.Parameter(in_layout(param, mesh, *filters)))
        made = block(in_layout(x, mesh, *placements))
        torch.testing.assert_close(made.full_tensor(), plain, rtol=1e-10, atol=1e-10)
        (made * made).sum().backward()
        for name, param in block.named_parameters():
            torch.testing.assert_close(
                param.grad.full_tensor(), expected[name], rtol=1e-9, atol=1e-9
            )
        mean = block.norm.running_mean
        mean = mean.full_tensor() if isinstance(mean, sw.DTensor) else mean
        torch.testing.assert_close(mean, running, rtol=1e-10, atol=1e-12)

    sw.simulate(run, 4)
