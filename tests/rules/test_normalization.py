"""Normalization: statistics of the global tensor, whichever dims are split."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.rules import heard, in_layout, ranks, values

import shardwise as sw
from shardwise.testing import Sample, check_rule

MESHES = ((3,), (2, 2))


def test_layer_norm_over_whole_and_split_dims() -> None:
    for function in (F.layer_norm, torch.layer_norm):
        check_rule(
            function,
            [
                Sample(values(5, 4), (4,), values(4, seed=1), values(4, seed=2)),
                Sample(values(2, 3, 5), [3, 5], weight=values(3, 5, seed=1)),
                Sample(values(5, 4), (4,), eps=0.1),
            ],
            mesh_shapes=MESHES,
            most=15,
        )


def test_native_layer_norm_returns_its_statistics() -> None:
    weight, bias = values(4, seed=1), values(4, seed=2)
    samples = [
        Sample(values(5, 4), (4,), weight, bias, 1e-5),
        Sample(values(2, 3, 2), (3, 2), None, None, 1e-5),
    ]
    check_rule(torch.native_layer_norm, samples, mesh_shapes=MESHES, most=15)


def test_rms_norm_over_whole_and_split_dims() -> None:
    for function in (F.rms_norm, torch.rms_norm):
        check_rule(
            function,
            [
                Sample(values(5, 4), (4,), values(4, seed=1)),
                Sample(values(2, 3, 5), [3, 5], eps=0.1),
            ],
            mesh_shapes=MESHES,
            most=15,
        )


def test_group_norm_whose_groups_are_whole_or_cut() -> None:
    weight, bias = values(6, seed=1), values(6, seed=2)
    samples = [
        Sample(values(3, 6, 4), 3, weight, bias),  # three ranks have a group each
        Sample(values(2, 6, 3), 2, weight, bias, 0.1),  # three ranks cut two groups
        Sample(values(5, 6), 2),
        Sample(values(1, 4, 2, 3), 1),
    ]
    check_rule(F.group_norm, samples, mesh_shapes=MESHES, most=15)
    check_rule(torch.group_norm, samples[:2], mesh_shapes=((2,),), most=10)


def test_instance_norm() -> None:
    weight, bias = values(4, seed=1), values(4, seed=2)
    samples = [Sample(values(3, 4, 5), None, None, weight, bias), Sample(values(2, 3, 2, 3))]
    check_rule(F.instance_norm, samples, mesh_shapes=MESHES, most=15)


def test_batch_norm_without_running_statistics() -> None:
    weight, bias = values(4, seed=1), values(4, seed=2)
    samples = [
        Sample(values(5, 4), None, None, weight, bias, True),
        Sample(values(3, 2, 4), None, None, training=True),
    ]
    check_rule(F.batch_norm, samples, mesh_shapes=MESHES, most=15)


def test_batch_norm_by_given_statistics_is_pointwise() -> None:
    mean, variance = values(4).detach(), values(4).detach().square()
    samples = [
        Sample(values(5, 4, 2), mean, variance, values(4, seed=1), values(4, seed=2)),
        Sample(values(5, 4), mean, variance),
    ]
    check_rule(F.batch_norm, samples, mesh_shapes=MESHES, most=25)
    samples = [Sample(values(3, 4, 2), mean, variance, use_input_stats=False)]
    check_rule(F.instance_norm, samples, mesh_shapes=MESHES, most=15)


PLACEMENTS = [
    (sw.Shard(0), sw.Replicate()),
    (sw.Shard(0), sw.Shard(2)),
    (sw.Shard(1), sw.Shard(0)),
    (sw.Partial(), sw.Shard(1)),
]
STATISTICS = [(sw.Replicate(), sw.Replicate()), (sw.Shard(0), sw.Replicate()), None]


def address(tensor: torch.Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, sw.DTensor) else tensor).data_ptr()


@pytest.mark.parametrize("function", [F.batch_norm, F.instance_norm])
@pytest.mark.parametrize("kept", STATISTICS)
def test_running_statistics_are_updated_in_place_wherever_they_lie(
    function: Callable[..., Any], kept: tuple[sw.Placement, ...] | None
) -> None:
    """`kept` None: as plain tensors."""
    x = values(5, 3, 4).detach()
    mean, variance = torch.ones(3).double(), torch.full((3,), 2.0).double()
    wanted = mean.clone(), variance.clone()
    result = function(x, *wanted, None, None, True, 0.3)

    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2, 2))
        for placements in PLACEMENTS:
            running = [
                each.clone() if kept is None else in_layout(each, mesh, *kept)
                for each in (mean, variance)
            ]
            before = [address(each) for each in running]
            got = function(in_layout(x, mesh, *placements), *running, None, None, True, 0.3)
            torch.testing.assert_close(got.full_tensor(), result)
            assert [address(each) for each in running] == before
            for each, want in zip(running, wanted, strict=True):
                whole = each.full_tensor() if isinstance(each, sw.DTensor) else each
                torch.testing.assert_close(whole, want)

    sw.simulate(run, 4)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_the_module_batch_norm_counts_and_averages_as_in_one_process(
    momentum: float | None,
) -> None:
    batches = [values(5, 3, 2, seed=seed).detach() for seed in range(3)]

    def trained(place: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        module = torch.nn.BatchNorm1d(3, momentum=momentum, dtype=torch.float64)
        for batch in batches:
            module(place(batch))
        return dict(module.state_dict())

    wanted = trained(lambda batch: batch)

    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (3,))
        got = trained(lambda batch: in_layout(batch, mesh, sw.Shard(0)))
        torch.testing.assert_close(got, wanted)

    sw.simulate(run, 3)


def test_split_statistics_travel_as_sums_and_nothing_else_does() -> None:
    def run(mesh: sw.DeviceMesh) -> list[Any]:
        x = in_layout(values(3, 40), mesh, sw.Shard(1))
        batch = in_layout(values(30, 4), mesh, sw.Shard(0))

        def normalize() -> None:
            F.layer_norm(x, (40,))
            F.rms_norm(x, (40,))
            F.batch_norm(batch, None, None, training=True)

        return [(event.kind, event.shape) for event in heard(mesh, normalize)[0]]

    by_row, by_channel = ("all_reduce", (3, 1)), ("all_reduce", (1, 4))
    assert ranks(run) == [[by_row, by_row, by_row, by_channel, by_channel]] * 2


def test_a_far_mean_costs_no_accuracy_in_float32() -> None:
    x = values(2, 64).detach().float() + 1e4

    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (4,))
        got = F.layer_norm(in_layout(x, mesh, sw.Shard(1)), (64,)).full_tensor()
        exact = F.layer_norm(x.double(), (64,)).float()
        ours, theirs = ((each - exact).abs().max() for each in (got, F.layer_norm(x, (64,))))
        assert ours <= 2 * theirs + 1e-6

    sw.simulate(run, 4)


@pytest.mark.parametrize("function", ["layer_norm", "rms_norm", "group_norm", "batch_norm"])
def test_half_types_stay_and_are_rounded_once(function: str) -> None:
    x, weight = values(4, 6).detach().bfloat16(), values(6, seed=1).detach()

    def apply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if function == "layer_norm":
            return F.layer_norm(x, (6,), weight, weight)
        if function == "rms_norm":
            return F.rms_norm(x, (6,), weight)
        if function == "group_norm":
            return F.group_norm(x, 2, weight, weight)
        return F.batch_norm(x, None, None, weight, weight, True)

    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (4,))
        for dtype in (torch.bfloat16, torch.float32)[: 1 if function == "rms_norm" else 2]:
            for dim in (0, 1):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    got = apply(in_layout(x, mesh, sw.Shard(dim)), weight.to(dtype))
                    want = apply(x, weight.to(dtype))
                assert got.dtype == want.dtype
                torch.testing.assert_close(got.full_tensor(), want, rtol=0.02, atol=0.02)

    sw.simulate(run, 4)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.layer_norm(x, (5,)),
        lambda x: F.rms_norm(x, (5,)),
        lambda x: F.group_norm(x, 1),
        lambda x: F.batch_norm(x, None, None, training=True),
    ],
    ids=["layer_norm", "rms_norm", "group_norm", "batch_norm"],
)
def test_norms_can_be_differentiated_twice(function: Callable[..., torch.Tensor]) -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        y = function(x)
        (first,) = torch.autograd.grad(y, x, y * y, create_graph=True)
        return first

    x = values(3, 5)
    weights = torch.ones_like(x) + x.detach()
    want = torch.autograd.grad(twice(x), x, weights)

    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2, 2))
        for placements in itertools.product([sw.Replicate(), sw.Shard(0), sw.Shard(1)], repeat=2):
            here = in_layout(x, mesh, *placements)
            first = twice(here)
            cotangent = in_layout(weights, mesh, *placements)
            (got,) = torch.autograd.grad(first, here, cotangent)
            torch.testing.assert_close(got.full_tensor(), *want)

    sw.simulate(run, 4)


def test_errors_are_torchs_own_about_global_shapes() -> None:
    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        x = in_layout(values(2, 4), mesh, sw.Shard(0))
        with pytest.raises(RuntimeError, match=r"Given normalized_shape=\[3\]"):
            F.layer_norm(x, (3,))
        with pytest.raises(RuntimeError, match="divisible by num_groups"):
            F.group_norm(x, 3)
        with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
            F.batch_norm(in_layout(values(1, 4), mesh, sw.Shard(1)), None, None, training=True)
        F.batch_norm(x, None, None, training=True)  # one value per rank is enough

    sw.simulate(run, 2)


def test_native_group_norm_returns_its_statistics() -> None:
    sample = Sample(values(2, 6, 3), values(6), values(6, seed=1), 2, 6, 3, 2, 1e-5)
    check_rule(torch.native_group_norm, [sample], mesh_shapes=((3,), (2, 2)), most=15)


@pytest.mark.parametrize("placement", [sw.Replicate(), sw.Shard(0)])
def test_native_batch_norms_update_and_return_statistics(placement: sw.Placement) -> None:
    x, weight = values(5, 3, 2), values(3)
    aten = torch.ops.aten

    def results(x: Any, weight: Any, mean: Any, variance: Any) -> list[Any]:
        running = mean, variance
        return [
            *torch.native_batch_norm(x, weight, None, *running, True, 0.3, 1e-5),
            *torch.native_batch_norm(x, weight, None, *running, False, 0.3, 1e-5),
            *aten._native_batch_norm_legit.no_stats(x, weight, None, True, 0.3, 1e-5),
            *aten._batch_norm_with_update(x, weight, None, *running, 0.3, 1e-5),
            *aten._batch_norm_no_update(x, weight, None, *running, 0.3, 1e-5),
            *running,
            *aten._native_batch_norm_legit_functional(x, weight, None, *running, True, 0.3, 1e-5),
            *aten._native_batch_norm_legit_no_training(x, weight, None, *running, 0.3, 1e-5),
            *running,
        ]

    want = results(x, weight, torch.zeros(3).double(), torch.ones(3).double())

    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        for dim in range(3):
            inputs = [in_layout(x, mesh, sw.Shard(dim)), in_layout(weight, mesh, placement)]
            running = torch.zeros(3).double(), torch.ones(3).double()
            found = results(*inputs, *(in_layout(each, mesh, placement) for each in running))
            for got, expected in zip(found, want, strict=True):
                torch.testing.assert_close(got.full_tensor(), expected)

    sw.simulate(run, 2)


def test_native_batch_norms_of_halves_return_statistics_in_the_dtype_of_the_weight() -> None:
    x, weight = values(4, 3, grad=False, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)

    def run(mesh: sw.DeviceMesh) -> None:
        x_here = in_layout(x, mesh, sw.Shard(0))
        made = torch.native_batch_norm(x_here, weight, None, None, None, True, 0.1, 1e-5)
        plain = torch.native_batch_norm(x, weight, None, None, None, True, 0.1, 1e-5)
        assert [each.dtype for each in made] == [each.dtype for each in plain]

    ranks(run)


def test_an_input_without_channels_is_let_through_if_it_is_empty() -> None:
    for training in (True, False):
        sample = Sample(values(0), values(0, grad=False), values(0, grad=False), training=training)
        check_rule(F.batch_norm, [sample], mesh_shapes=((2,),), allow_missing=True)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("which", ["running_mean", "running_var", "weight", "bias"])
@pytest.mark.parametrize("function", [F.batch_norm, F.instance_norm])
def test_only_one_of_the_tensors_beside_a_plain_input_is_a_dtensor(function, which, training):
    x = values(4, 6, 3, grad=False)
    others = {
        name: values(6, seed=at, grad=False).abs() + 0.5
        for at, name in enumerate(("running_mean", "running_var", "weight", "bias"))
    }
    switch = "training" if function is F.batch_norm else "use_input_stats"
    plain = {name: each.clone() for name, each in others.items()}
    expected = function(x, **plain, **{switch: training})

    def run(mesh):
        given = {name: each.clone() for name, each in others.items()}
        given[which] = in_layout(given[which], mesh, sw.Shard(0))
        made = function(x, **given, **{switch: training})
        torch.testing.assert_close(made.full_tensor(), expected)
        for name, each in given.items():
            whole = each.full_tensor() if name == which else each
            torch.testing.assert_close(whole, plain[name])

    ranks(run)


def test_the_running_variance_of_one_value_per_channel_is_nan_as_torchs():
    """`F.batch_norm` refuses one value; `torch.batch_norm`, which it calls, does not."""
    x = values(1, 4, grad=False)

    def run(mesh: sw.DeviceMesh) -> None:
        for held, shown in ((sw.Shard(0), sw.Replicate()), (sw.Shard(1), sw.Shard(0))):
            running = torch.zeros(4).double(), torch.ones(4).double()
            ours = [in_layout(each, mesh, shown) for each in running]
            want = torch.batch_norm(x, None, None, *running, True, 0.3, 1e-5, False)
            split = in_layout(x, mesh, held)
            got = torch.batch_norm(split, None, None, *ours, True, 0.3, 1e-5, False)
            assert running[1].isnan().all() and ours[1].full_tensor().isnan().all()
            torch.testing.assert_close(ours[0].full_tensor(), running[0])
            torch.testing.assert_close(got.full_tensor(), want)

    ranks(run)
