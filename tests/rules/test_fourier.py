"""Fourier transforms: what they cost where dims are split."""

from __future__ import annotations

import pytest
import torch
from support.rules import heard, in_layout, ranks, values

from shardwise import DeviceMesh, Partial, Placement, Shard
from shardwise.testing import Sample, check_rule

X = values(4, 6)


@pytest.mark.parametrize("name", ["fft", "rfft", "irfft", "hfft", "ihfft"])
def test_other_dims_stay_split(name: str) -> None:
    samples = [Sample(X, 5, 0, "ortho"), Sample(values(2, 5), dim=1)]
    check_rule(getattr(torch.fft, name), samples, most=8)


@pytest.mark.parametrize("name", ["fftn", "ifft2", "rfftn", "irfftn", "hfft2", "ihfftn"])
def test_transforms_over_all_dims(name: str) -> None:
    samples = [Sample(X, (3, 8), (1, 0)), Sample(values(3, 1, 4), norm="forward")]
    check_rule(getattr(torch.fft, name), samples, most=8, allow_missing=True)


def collectives(function: object, *placements: Placement, shape: tuple[int, ...] = (2,)) -> object:
    """What a transform of a matrix costs, and how it lies."""

    def run(mesh: DeviceMesh) -> object:
        x = in_layout(X, mesh, *placements)
        events, y = heard(mesh, lambda: function(x))
        return [each.kind for each in events], y.placements

    (found,) = {str(each) for each in ranks(run, shape=shape, count=2 ** len(shape))}
    return found


def test_a_transform_over_all_dims_costs_one_exchange() -> None:
    once = "['all_to_all']"
    assert collectives(torch.fft.fft, Shard(1)) == f"({once}, (Shard(0),))"
    assert collectives(torch.fft.fft2, Shard(0)) == f"({once}, (Shard(1),))"
    assert collectives(torch.fft.rfftn, Shard(0)) == f"({once}, (Shard(1),))"
    assert collectives(torch.fft.irfft2, Shard(1)) == f"({once}, (Shard(0),))"


def test_where_all_dims_are_split_nothing_is_ever_whole() -> None:
    twice = "['all_to_all', 'all_to_all']"
    found = collectives(torch.fft.fftn, Shard(0), Shard(1), shape=(2, 2))
    assert found == f"({twice}, (Shard(0), Shard(0)))"


def test_pending_sums_flow_through_a_transform() -> None:
    assert collectives(torch.fft.fft, Partial()) == "([], (Partial(),))"


def test_what_torch_makes_them_of() -> None:
    def run(mesh: DeviceMesh) -> object:
        complex_x = torch.fft.fft(X.detach())
        x = in_layout(complex_x, mesh, Shard(0))
        got = torch.ops.aten._fft_c2r(x, [1], 0, 11)
        torch.testing.assert_close(got.full_tensor(), torch._fft_c2r(complex_x, [1], 0, 11))
        return got.placements

    assert ranks(run) == [(Shard(0),)] * 2


def test_shifts_stay_split() -> None:
    check_rule(torch.fft.fftshift, [Sample(X), Sample(values(5, 3), 0)], most=8)
    check_rule(torch.fft.ifftshift, [Sample(values(5, 3), (0, 1))], most=8)


def test_windows_of_short_times_cost_their_neighbours_alone() -> None:
    window = values(8, grad=False).abs() + 1
    samples = [
        Sample(values(30), 8, 3, window=window, return_complex=True),
        Sample(values(2, 17), 4, window=window[:4], center=False, return_complex=True),
    ]
    short = {"hop_length": 2, "win_length": 4, "center": False, "align_to_window": True}
    padded = Sample(values(17), 8, window=window[:4], return_complex=True, **short)
    check_rule(torch.stft, [padded], most=8, allow_missing=True)
    check_rule(torch.stft, samples, most=8)

    def run(mesh: DeviceMesh) -> object:
        x = in_layout(values(400), mesh, Shard(0))
        events, y = heard(
            mesh, lambda: torch.stft(x, 8, 8, window=window, center=False, return_complex=True)
        )
        return [each.kind for each in events], y.placements

    assert ranks(run) == [([], (Shard(1),))] * 2


def test_the_inverse_of_short_times() -> None:
    spectrum = torch.stft(
        values(2, 40), 8, 2, window=torch.ones(8).double(), return_complex=True
    ).detach()
    samples = [
        Sample(spectrum.requires_grad_(), 8, 2, window=torch.ones(8).double()),
        Sample(spectrum[0], 8, 2, window=torch.ones(8).double(), length=30),
    ]
    check_rule(torch.istft, samples, most=8)
