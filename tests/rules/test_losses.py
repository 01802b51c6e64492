"""Losses: sums and means are of the global tensor."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.rules import values

import shardwise as sw
from shardwise.comm import Event, listen
from shardwise.testing import Sample, check_rule, distributed


def shares(*shape: int, seed: int = 3) -> torch.Tensor:
    """Between 0 and 1."""
    return values(*shape, seed=seed, grad=False).sigmoid().requires_grad_()


def signs(*shape: int) -> torch.Tensor:
    return values(*shape, seed=4, grad=False).sign().long()


def check(function: Any, *args: Any, most: int = 4, **kwargs: Any) -> None:
    for reduction in ("none", "mean", "sum"):
        sample = Sample(*args, **kwargs, reduction=reduction)
        check_rule(function, [sample], mesh_shapes=((3,), (2, 2)), most=most)


@pytest.mark.parametrize("name", ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"])
def test_losses_of_a_difference(name: str) -> None:
    check(getattr(F, name), values(5, 4), values(5, 4, seed=1))


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_inputs_that_broadcast_count_as_often_as_they_are_used() -> None:
    check(F.mse_loss, values(5, 4), values(4, seed=1))
    check(F.mse_loss, values(5, 1), values(5, 4, seed=1))


@pytest.mark.parametrize("name", ["mse_loss", "l1_loss", "huber_loss"])
def test_weights_of_elements(name: str) -> None:
    check(getattr(F, name), values(5, 4), values(5, 4, seed=1), weight=shares(5, 4))


def test_binary_cross_entropy() -> None:
    target, weight = shares(5, 4, seed=1), shares(4, seed=2).detach()
    check(F.binary_cross_entropy, shares(5, 4), target)
    check(F.binary_cross_entropy, shares(5, 4), target, weight)
    check(F.binary_cross_entropy_with_logits, values(5, 4), target)
    check(
        F.binary_cross_entropy_with_logits,
        values(5, 4),
        target.detach(),
        weight=shares(5, 1).detach(),
        pos_weight=weight,
    )


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("log_target", [False, True])
def test_kl_div_by_every_count(log_target: bool) -> None:
    target = values(5, 4, seed=1) if log_target else shares(5, 4)
    check(F.kl_div, values(5, 4), target, log_target=log_target)
    sample = Sample(values(5, 4), target, reduction="batchmean", log_target=log_target)
    check_rule(F.kl_div, [sample], mesh_shapes=((3,), (2, 2)), most=6)


def test_losses_with_a_sign_for_target() -> None:
    check(F.soft_margin_loss, values(5, 4), signs(5, 4))
    check(F.hinge_embedding_loss, values(5, 4), signs(5, 4), margin=0.5)
    check(F.margin_ranking_loss, values(5), values(5, seed=1), signs(5), 0.2)
    check(F.cosine_embedding_loss, values(5, 4), values(5, 4, seed=1), signs(5), margin=0.1)
    check(F.cosine_embedding_loss, values(4), values(4, seed=1), signs())


def test_likelihoods() -> None:
    check(F.poisson_nll_loss, values(5, 4), shares(5, 4))
    check(F.poisson_nll_loss, values(5, 4), shares(5, 4).detach() * 5, full=True)
    check(F.gaussian_nll_loss, values(5, 4), values(5, 4, seed=1), shares(5, 4))
    check(F.gaussian_nll_loss, values(5, 4), values(5, 4, seed=1), shares(5), full=True)
    check(F.gaussian_nll_loss, values(5, 4), values(5, 4, seed=1), shares(5, 1))
    check(F.gaussian_nll_loss, values(5, 4), values(5, 4, seed=1), shares(1, 4))


def test_losses_per_row() -> None:
    three = values(5, 4), values(5, 4, seed=1), values(5, 4, seed=2)
    check(F.triplet_margin_loss, *three, swap=True)
    check(F.triplet_margin_loss, values(2, 3), values(1, 3, seed=1), values(2, 3, seed=2), p=1)
    classes = torch.tensor([3, 0, 1, 1, 2])
    check(F.multi_margin_loss, values(5, 4), classes, weight=shares(4).detach())
    several = torch.tensor([[3, 0, -1, 1]]).expand(5, 4).clone()
    check(F.multilabel_margin_loss, values(5, 4), several)


def test_torchs_builtins_take_the_reduction_as_a_number() -> None:
    for number in range(3):
        samples = [Sample(values(5, 4), values(5, 4, seed=1), reduction=number)]
        check_rule(torch._C._nn.mse_loss, samples, mesh_shapes=((3,),))
        samples = [Sample(values(5, 4), shares(5, 4), number, log_target=True)]
        check_rule(torch.kl_div, samples, mesh_shapes=((3,),))
    sample = Sample(values(5, 4), values(5, 4, seed=1), 1)
    check_rule(torch.ops.aten.mse_loss, [sample], mesh_shapes=((3,),))


@pytest.mark.filterwarnings("ignore:size_average and reduce")
def test_the_old_names_of_reductions() -> None:
    for old in ({"size_average": False}, {"reduce": False}, {"reduce": True}):
        sample = Sample(values(5, 4), values(5, 4, seed=1), **old)
        check_rule(F.mse_loss, [sample], mesh_shapes=((3,),))


def test_an_unknown_reduction_is_refused_as_torch_does() -> None:
    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        x = distributed(values(4), sw.Layout.from_placements(mesh, (4,), [sw.Shard(0)]))
        with pytest.raises(ValueError, match="median is not a valid value for reduction"):
            F.mse_loss(x, x, reduction="median")

    sw.simulate(run, 2)


def test_a_mean_over_uneven_pieces_is_the_global_mean_and_nothing_travels() -> None:
    events: list[Event] = []

    def run() -> float:
        mesh = sw.init_device_mesh("cpu", (4,))
        x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])  # 2, 2, 1 and no elements
        here = distributed(x, sw.Layout.from_placements(mesh, (5,), [sw.Shard(0)]))
        with listen(events.append):
            loss = F.mse_loss(here, torch.zeros(5))
        assert loss.placements == (sw.Partial(),)
        return loss.full_tensor().item()

    assert sw.simulate(run, 4) == [11.0] * 4
    assert not [event for event in events if event.kind != "all_reduce"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_half_types_neither_overflow_nor_change_the_dtype(
    dtype: torch.dtype, autocast: bool
) -> None:
    x = torch.full((64, 16), 200.0, dtype=dtype)
    y, target = torch.zeros_like(x), torch.ones(64, dtype=torch.int64)

    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        for dim in (0, 1):
            here = distributed(x, sw.Layout.from_placements(mesh, x.shape, [sw.Shard(dim)]))
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                for apply in (
                    lambda x: F.l1_loss(x, y),
                    lambda x: F.mse_loss(x, y),
                    lambda x: F.gaussian_nll_loss(x, y, y + 200),
                    lambda x: F.cosine_embedding_loss(x / 200, y + 1, target),
                ):
                    got, want = apply(here), apply(x)
                    assert got.dtype == want.dtype
                    torch.testing.assert_close(got.full_tensor(), want, rtol=1e-2, atol=1e-2)

    sw.simulate(run, 2)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_ctc_loss_of_split_sequences(reduction: str) -> None:
    log_probs = values(7, 5, 4).detach().log_softmax(-1).requires_grad_()
    generator = torch.Generator().manual_seed(0)
    padded = torch.randint(1, 4, (5, 3), generator=generator)
    lengths = torch.tensor([7, 6, 7, 5, 7]), torch.tensor([2, 1, 3, 2, 0])
    numbers = [each.tolist() for each in lengths]
    joined = torch.cat([row[:length] for row, length in zip(padded, numbers[1], strict=True)])
    samples = [
        Sample(log_probs, padded, *lengths, reduction=reduction),
        Sample(log_probs, padded, *numbers, reduction=reduction),
        Sample(log_probs, joined, *lengths, reduction=reduction),
        Sample(log_probs, joined, *numbers, reduction=reduction),
    ]
    check_rule(F.ctc_loss, samples, mesh_shapes=((4,),), most=8, allow_missing=True)
    number = ["none", "mean", "sum"].index(reduction)
    sample = Sample(log_probs, padded, *lengths, 0, number)
    check_rule(torch.ctc_loss, [sample], mesh_shapes=((2,),), most=4, allow_missing=True)
