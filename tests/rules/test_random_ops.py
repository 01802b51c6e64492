"""Random operators: one seed, one global tensor, whatever the layout."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.rules import ranks
from torch import nn

import shardwise as sw
from shardwise.dtensor.tensor import DTensor
from shardwise.random.samplers import draw_key
from shardwise.testing import distributed, layouts_of

MESHES = [(2,), (3,), (2, 2)]
BASE = torch.randn(5, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def copied(change: Callable[..., Any]) -> Callable[..., Any]:
    """An in-place function, on a copy: the argument itself is a leaf."""
    return lambda x: change(x.clone())


def sample_weights(count: int, replacement: bool = False) -> Callable[..., Any]:
    return lambda x: torch.multinomial(x[:, :, 0].softmax(-1), count, replacement)


OPERATORS: dict[str, Callable[..., Any]] = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 3, 9),
    "randint_like below": lambda x: torch.randint_like(x, 9, dtype=torch.int32),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli of p": lambda x: torch.bernoulli(x, 0.3),
    "bernoulli_": copied(lambda x: x.bernoulli_(0.4)),
    "bernoulli_ of a tensor": lambda x: torch.empty_like(x).bernoulli_(x.sigmoid()),
    "dropout": F.dropout,
    "torch.dropout": lambda x: torch.dropout(x, 0.3, True),
    "dropout in place": copied(lambda x: F.dropout(x, 0.4, inplace=True)),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "native_dropout's mask": lambda x: torch.ops.aten.native_dropout(x, 0.3, True)[1].double(),
    "dropout off": lambda x: F.dropout(x, training=False),
    "dropout of all": lambda x: F.dropout(x, 1.0),
    "dropout1d": F.dropout1d,
    "dropout1d of one": lambda x: F.dropout1d(x[0]),
    "dropout2d": lambda x: F.dropout2d(x.unsqueeze(-1)),
    "dropout3d": lambda x: F.dropout3d(x.unsqueeze(-1).unsqueeze(-1)),
    "dropout1d in place": copied(lambda x: F.dropout1d(x, inplace=True)),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, True),
    "alpha_dropout in place": copied(lambda x: F.alpha_dropout(x, 0.3, True, inplace=True)),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.3, True),
    "normal_": copied(lambda x: x.normal_(1, 2)),
    "uniform_": copied(lambda x: x.uniform_(-1, to=1)),
    "random_": copied(lambda x: x.random_()),
    "random_ below": copied(lambda x: x.random_(5)),
    "random_ between": copied(lambda x: x.long().random_(-3, 5)),
    "exponential_": copied(lambda x: x.exponential_(2.0)),
    "geometric_": copied(lambda x: x.geometric_(p=0.2)),
    "cauchy_": copied(lambda x: x.cauchy_()),
    "log_normal_": copied(lambda x: x.log_normal_(std=0.3)),
    "normal of tensors": lambda x: torch.normal(x, x.abs()),
    "normal of a mean": lambda x: torch.normal(x, 2.0),
    "normal of a deviation": lambda x: torch.normal(0.0, x.abs()),
    "normal that broadcasts": lambda x: torch.normal(x[:, :1], x[:1].abs()),
    "poisson": lambda x: torch.poisson(x.abs() * 3),
    "gamma": lambda x: torch._standard_gamma(x.abs() + 1),
    "beta": lambda x: torch.distributions.Beta(x.abs() + 1, 2.0).rsample(),
    "binomial": lambda x: torch.binomial((x.detach().abs() * 5).round(), x.detach().sigmoid()),
    "multinomial of one": sample_weights(1),
    "multinomial": sample_weights(2),
    "multinomial with replacement": sample_weights(5, True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rrelu in place": copied(lambda x: F.rrelu(x, training=True, inplace=True)),
    "rrelu off": F.rrelu,
    "gumbel_softmax": F.gumbel_softmax,
    "gumbel_softmax, hard": lambda x: F.gumbel_softmax(x, hard=True),
    "kaiming_uniform_": copied(nn.init.kaiming_uniform_),
    "kaiming_normal_": copied(nn.init.kaiming_normal_),
    "xavier_uniform_": copied(nn.init.xavier_uniform_),
    "xavier_normal_": copied(nn.init.xavier_normal_),
    "trunc_normal_": copied(nn.init.trunc_normal_),
    "trunc_normal_ of a tail": copied(lambda x: nn.init.trunc_normal_(x, a=1.5, b=2.5)),
    "init.normal_": copied(nn.init.normal_),
    "init.uniform_": copied(nn.init.uniform_),
    "constant_": copied(lambda x: nn.init.constant_(x, 0.3)),
    "ones_": copied(nn.init.ones_),
    "zeros_": copied(nn.init.zeros_),
    "dirac_": copied(nn.init.dirac_),
    "eye_": lambda x: nn.init.eye_(x[0].clone()),
    "sparse_": lambda x: nn.init.sparse_(x[0].clone(), 0.4),
    "orthogonal_": lambda x: nn.init.orthogonal_(x[0].clone()),
}


def weights(shape: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def results(function: Callable[..., Any], mesh_shape: tuple[int, ...]) -> list[Any]:
    """For every rank and layout: value, gradient, and the random state after."""

    def run() -> list[Any]:
        mesh = sw.init_device_mesh("cpu", mesh_shape)
        found = []
        tried = layouts_of(BASE, mesh)
        for layout in tried[:: 1 if len(tried) < 10 else 3]:
            x = distributed(BASE, layout).requires_grad_()
            torch.manual_seed(4)
            y = function(x)
            after = torch.get_rng_state()
            assert isinstance(y, DTensor)
            assert y.to_local().shape == y.mesh_layout.local_shape()
            whole = y.full_tensor()
            gradient = None
            if whole.requires_grad:
                (whole * weights(whole.shape)).sum().backward()
                gradient = None if x.grad is None else x.grad.full_tensor()
            found.append((layout, whole.detach(), gradient, after))
        return found

    per_rank = sw.simulate(run, math.prod(mesh_shape))
    return [each for rank in per_rank for each in rank]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", OPERATORS)
def test_the_same_global_tensor_on_every_layout(name: str) -> None:
    with sw.fallback("replicate"):
        (_, value, gradient, after), *_ = results(OPERATORS[name], (1,))
    for mesh_shape in MESHES:
        for layout, values, gradients, state in results(OPERATORS[name], mesh_shape):
            assert torch.allclose(values, value, rtol=1e-12, atol=1e-14), layout
            assert values.dtype == value.dtype
            assert torch.equal(state, after), layout
            if gradient is not None:
                assert torch.allclose(gradients, gradient, rtol=1e-12, atol=1e-14), layout


@pytest.mark.parametrize("name", ["randn_like", "uniform_", "dropout", "kaiming_uniform_"])
def test_the_same_to_the_last_bit(name: str) -> None:
    expected = results(OPERATORS[name], (1,))[0][1]
    for layout, values, *_ in results(OPERATORS[name], (3,)):
        if not layout.partial:  # a sum of contributions is rounded
            assert torch.equal(values, expected), layout


def ones(mesh: sw.DeviceMesh, shape: tuple[int, ...], *placements: sw.Placement) -> DTensor:
    return distributed(torch.ones(shape), sw.Layout.from_placements(mesh, shape, placements))


# ---- what torch's DTensor gets wrong


def test_dropout_differs_between_shards_and_between_calls() -> None:
    def run(mesh: sw.DeviceMesh) -> list[list[float]]:
        x = ones(mesh, (200,), sw.Shard(0))
        return [F.dropout(x).to_local().tolist() for _ in range(2)]

    masks = [tuple(mask) for rank in ranks(run) for mask in rank]
    assert len(set(masks)) == 4


def test_dropout_keeps_its_rate_and_the_mean() -> None:
    def run(mesh: sw.DeviceMesh) -> None:
        x = ones(mesh, (400, 500), sw.Shard(1)).requires_grad_()
        y = F.dropout(x, 0.2)
        kept = (y != 0).double().full_tensor()
        assert abs(kept.mean() - 0.8) < 0.005
        assert (kept.mean(0) - 0.8).abs().max() < 0.1 and (kept.mean(1) - 0.8).abs().max() < 0.1
        assert y.full_tensor().unique().tolist() == [0.0, 1.25]
        y.sum().backward()
        assert torch.equal(x.grad.full_tensor(), y.full_tensor())

    ranks(run)


def test_dropout_of_contributions_uses_one_mask() -> None:
    def run(mesh: sw.DeviceMesh) -> None:
        x = ones(mesh, (1000,), sw.Partial())
        events: list[sw.Event] = []
        with sw.listen(events.append):
            y = F.dropout(x, 0.5)
        assert not events and y.placements == (sw.Partial(),)
        found = y.full_tensor()
        assert torch.allclose(found, found.round(), atol=1e-5)  # 0 or 2, but for rounding
        assert 400 < (found > 1).sum() < 600

    ranks(run)


def test_numbers_written_to_a_pending_sum_count_once() -> None:
    def run(mesh: sw.DeviceMesh) -> None:
        for placement in (
            sw.Partial(),
            sw.Partial("avg"),
            sw.Partial("max"),
            sw.Partial("product"),
        ):
            x = ones(mesh, (1000,), sw.Partial())
            x = DTensor.from_local(x.to_local(), mesh, [placement], shape=(1000,))
            x.uniform_(1, 2)
            assert x.placements == (placement,)
            found = x.full_tensor()
            assert found.min() >= 1 and found.max() < 2
            assert abs(found.mean() - 1.5) < 0.05

    ranks(run)


def test_noise_after_the_model_of_a_pending_sum_is_whole() -> None:
    def run(mesh: sw.DeviceMesh) -> None:
        made = torch.rand_like(ones(mesh, (4, 4), sw.Partial()))
        assert made.placements == (sw.Replicate(),)
        made = torch.randn_like(ones(mesh, (4, 4), sw.Shard(1)), dtype=torch.float64)
        assert made.placements == (sw.Shard(1),) and made.dtype == torch.float64
        assert torch.rand_like(made, requires_grad=True).requires_grad

    ranks(run)


@pytest.mark.parametrize("name", ["rand_like", "dropout", "normal_", "bernoulli", "alpha_dropout"])
def test_nothing_is_communicated_for_shards(name: str) -> None:
    def run(mesh: sw.DeviceMesh) -> int:
        events: list[sw.Event] = []
        x = ones(mesh, (5, 4), sw.Shard(1)) / 2
        with sw.listen(events.append):
            OPERATORS[name](x)
        return len(events)

    assert ranks(run) == [0, 0]


# ---- as torch does


def test_dropout_returns_the_tensor_itself_when_there_is_nothing_to_do() -> None:
    def run(mesh: sw.DeviceMesh) -> None:
        x = ones(mesh, (4,), sw.Shard(0))
        before = torch.get_rng_state()
        assert F.dropout(x, training=False) is x
        assert nn.Dropout().eval()(x) is x and F.dropout(x, 0.0) is x
        assert F.alpha_dropout(x) is x
        assert torch.equal(before, torch.get_rng_state())
        assert F.dropout(x, 0.5, inplace=True) is x

    ranks(run)


def test_half_precision_and_autocast_keep_the_dtype() -> None:
    def run(mesh: sw.DeviceMesh) -> None:
        x = ones(mesh, (6,), sw.Shard(0)).bfloat16()
        assert F.dropout(x).dtype == torch.bfloat16
        assert torch.rand_like(x).dtype == torch.bfloat16
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert F.dropout(x.float()).dtype == torch.float32

    ranks(run)


def test_strides_follow_the_model() -> None:
    def run(mesh: sw.DeviceMesh) -> None:
        x = ones(mesh, (4, 6), sw.Shard(0)).t()
        torch.manual_seed(1)
        made = torch.rand_like(x)
        assert made.to_local().stride() == x.to_local().stride()
        torch.manual_seed(1)
        assert torch.equal(torch.rand_like(x.contiguous()).full_tensor(), made.full_tensor())

    ranks(run)


def test_writing_to_a_leaf_needs_no_grad_as_ever() -> None:
    def run(mesh: sw.DeviceMesh) -> None:
        x = ones(mesh, (4,), sw.Shard(0)).requires_grad_()
        with pytest.raises(RuntimeError, match="leaf Variable"):
            x.normal_()
        with torch.no_grad():
            assert x.normal_() is x
        (y := x * 2).normal_()
        y.sum().backward()
        assert not x.grad.full_tensor().any()

    ranks(run)


def test_a_sample_has_zero_gradients() -> None:
    def run(mesh: sw.DeviceMesh) -> None:
        p = (ones(mesh, (4,), sw.Shard(0)) / 2).requires_grad_()
        for sample in (torch.bernoulli(p), torch.normal(p, 1.0), torch.poisson(p)):
            assert torch.equal(
                torch.autograd.grad(sample.sum(), p)[0].full_tensor(), torch.zeros(4)
            )

    ranks(run)


BAD_CALLS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda x: x.uniform_(2, 1), "uniform_ expects to return a .from, to. range"),
    (lambda x: x.normal_(0, -1), "normal expects std >= 0"),
    (lambda x: x.exponential_(-1), "exponential_ expects lambda > 0"),
    (lambda x: x.geometric_(2), "geometric_ expects p"),
    (lambda x: x.random_(5, 3), "random_ expects 'from' to be less than 'to'"),
    (lambda x: x.bernoulli_(2), "bernoulli_ expects p to be in"),
    (lambda x: F.dropout(x, 2), "dropout probability has to be between 0 and 1"),
    (lambda x: torch.dropout(x, -1, True), "dropout probability has to be between 0 and 1"),
    (lambda x: torch.randint_like(x, 4, 4), "to be less than"),
    (lambda x: torch.randn_like(x, dtype=torch.int32), "not implemented for"),
    (lambda x: x.cauchy_(0, 0), "cauchy_ expects sigma > 0.0"),
    (lambda x: x.log_normal_(0, 0), "log_normal_ expects std > 0.0"),
    (lambda x: torch.normal(x, -1.0), "normal expects std >= 0"),
    (lambda x: x.long().normal_(), "not implemented for"),
    (lambda x: torch.multinomial(x - 2, 1), "element < 0"),
    (lambda x: torch.multinomial(x, 9), "cannot sample n_sample"),
]


@pytest.mark.parametrize(("call", "message"), BAD_CALLS)
def test_bad_arguments_are_refused_as_torch_does(call: Any, message: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=message) as theirs:
        call(torch.ones(4))

    def run(mesh: sw.DeviceMesh) -> None:
        with pytest.raises(theirs.type, match=message):
            call(ones(mesh, (4,), sw.Shard(0)))

    ranks(run)


def test_numbers_drawn_into_a_part_of_a_split_dim_are_those_of_the_tensor() -> None:
    def run(mesh: sw.DeviceMesh) -> None:
        x = ones(mesh, (5, 3), sw.Shard(1))
        for change in (lambda v: v.normal_(), lambda v: v.bernoulli_(0.5), lambda v: v.random_(3)):
            drawn = change(x[:, 0])
            assert torch.equal(x.full_tensor()[:, 0], drawn.full_tensor())
            assert torch.equal(x.full_tensor()[:, 1:], torch.ones(5, 2))

    ranks(run)


# ---- generators


def test_a_generator_of_ones_own_is_used_and_the_default_one_is_not() -> None:
    calls: list[Callable[[Any, Any], Any]] = [
        lambda x, g: x.clone().normal_(generator=g),
        lambda x, g: torch.bernoulli(x / 2, generator=g),
        lambda x, g: torch.normal(x, 1.0, generator=g),
        lambda x, g: torch.poisson(x, generator=g),
        lambda x, g: torch.multinomial(x, 3, generator=g),
        lambda x, g: nn.init.kaiming_uniform_(x.clone(), generator=g),
    ]

    def run(mesh: sw.DeviceMesh) -> None:
        x = ones(mesh, (4, 6), sw.Shard(0))
        for call in calls:
            before = torch.get_rng_state()
            first, again, other = (
                call(x, torch.Generator().manual_seed(seed)).full_tensor() for seed in (1, 1, 2)
            )
            assert torch.equal(first, again) and not torch.equal(first, other)
            assert torch.equal(before, torch.get_rng_state())

    ranks(run)


def test_each_operator_draws_one_key_however_much_its_data_needs() -> None:
    def run(mesh: sw.DeviceMesh) -> None:
        x = ones(mesh, (50,), sw.Shard(0))
        for call in (F.dropout, torch.poisson, lambda v: v.normal_()):
            torch.manual_seed(3)
            call(x * 100)
            after = torch.get_rng_state()
            torch.manual_seed(3)
            draw_key()
            assert torch.equal(after, torch.get_rng_state())

    ranks(run)


# ---- statistics


def test_samples_follow_their_distribution() -> None:
    def run(mesh: sw.DeviceMesh) -> None:
        x = ones(mesh, (40_000,), sw.Shard(0))
        assert abs(torch.bernoulli(x * 0.3).mean().item() - 0.3) < 0.02
        assert abs(torch.normal(x * 5, 2.0).full_tensor().mean() - 5) < 0.1
        assert abs(torch.normal(x * 5, 2.0).full_tensor().std() - 2) < 0.1
        assert abs(torch.poisson(x * 4).mean().item() - 4) < 0.1
        assert abs(torch.binomial(x * 10, x * 0.2).mean().item() - 2) < 0.1
        normal = x.clone().normal_()
        dropped = F.alpha_dropout(F.selu(normal), 0.2, True).full_tensor()
        assert abs(dropped.mean()) < 0.05 and abs(dropped.std() - 1) < 0.05

    ranks(run)


def test_multinomial_samples_by_weight() -> None:
    def run(mesh: sw.DeviceMesh) -> None:
        torch.manual_seed(0)
        shape = (20_000, 4)
        weights = torch.tensor([0.0, 1.0, 2.0, 5.0]).expand(shape)
        split = sw.Layout.from_placements(mesh, shape, [sw.Shard(1)])
        x = distributed(weights, split)
        once = torch.bincount(torch.multinomial(x, 1).full_tensor()[:, 0], minlength=4) / 20_000
        assert torch.allclose(once, torch.tensor([0, 1 / 8, 2 / 8, 5 / 8]), atol=0.02)
        pair = torch.multinomial(x, 2).full_tensor()
        assert (pair[:, 0] != pair[:, 1]).all() and (pair > 0).all()

    ranks(run)


def test_initialization_sees_the_global_fan() -> None:
    def run(mesh: sw.DeviceMesh) -> None:
        for placement in (sw.Shard(0), sw.Shard(1)):
            weight = ones(mesh, (300, 400), placement)
            found = nn.init.kaiming_uniform_(weight, a=math.sqrt(5)).full_tensor()
            assert abs(found.abs().max() - 1 / math.sqrt(400)) < 1e-3
            assert (
                abs(nn.init.xavier_normal_(weight).full_tensor().std() - math.sqrt(2 / 700)) < 1e-3
            )

    ranks(run)


def test_on_meta_nothing_is_drawn() -> None:
    mesh = sw.DeviceMesh.abstract((2,))
    x = sw.DTensor.from_local(torch.empty(2, 3, device="meta"), mesh, [sw.Shard(0)])
    before = torch.get_rng_state()
    for name in ("rand_like", "dropout", "normal_", "alpha_dropout", "bernoulli of p"):
        made = OPERATORS[name](x)
        assert made.is_meta and made.shape == (4, 3)
    assert torch.equal(before, torch.get_rng_state())
