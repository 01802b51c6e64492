"""cross_entropy and nll_loss: split batches, split space, split classes."""

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.rules import heard, in_layout, ranks, values

import shardwise as sw
from shardwise.testing import Sample, check_rule

REDUCTIONS = ("none", "mean", "sum")


def targets(*shape: int, classes: int, ignored: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    made = torch.randint(classes, shape, generator=generator)
    if ignored is not None:
        made[torch.rand(shape, generator=generator) < 0.4] = ignored
    return made


def weights(classes: int) -> torch.Tensor:
    return values(classes, seed=9).detach().abs() + 0.1


def check(function: Any, *args: Any, most: int = 5, **kwargs: Any) -> None:
    samples = [Sample(*args, **kwargs, reduction=reduction) for reduction in REDUCTIONS]
    check_rule(function, samples, mesh_shapes=((3,), (2, 2)), most=most)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_of_classes(smoothing: float, weighted: bool) -> None:
    weight = weights(4) if weighted else None
    options: dict[str, Any] = {"weight": weight, "label_smoothing": smoothing}
    check(F.cross_entropy, values(5, 4), targets(5, classes=4, ignored=-100), **options)
    check(
        F.cross_entropy,
        values(3, 4, 2),
        targets(3, 2, classes=4, ignored=1),
        ignore_index=1,
        **options,
    )
    check(F.cross_entropy, values(4), targets(classes=4), **options)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_of_probabilities(smoothing: float, weighted: bool) -> None:
    weight = weights(4) if weighted else None
    options: dict[str, Any] = {"weight": weight, "label_smoothing": smoothing}
    for shape in ((5, 4), (2, 4, 3), (4,)):
        target = torch.softmax(values(*shape, seed=1).detach(), min(len(shape) - 1, 1))
        check(F.cross_entropy, values(*shape), target.requires_grad_(), **options)


@pytest.mark.parametrize("weighted", [False, True])
def test_nll_loss(weighted: bool) -> None:
    weight = weights(4) if weighted else None
    check(F.nll_loss, values(5, 4), targets(5, classes=4, ignored=-100), weight=weight)
    check(F.nll_loss, values(3, 4, 2, 2), targets(3, 2, 2, classes=4), weight=weight)
    check(F.nll_loss, values(4), targets(classes=4), weight=weight, ignore_index=2)


def test_a_pending_sum_flows_through_nll_loss() -> None:
    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        x = in_layout(values(5, 4), mesh, sw.Partial())
        loss = F.nll_loss(x, targets(5, classes=4))
        assert loss.placements == (sw.Partial(),)

    sw.simulate(run, 2)


def test_torchs_builtins_take_the_reduction_as_a_number() -> None:
    target = targets(5, classes=4, ignored=-100)
    for number in range(3):
        sample = Sample(values(5, 4), target, weights(4), number, -100)
        for function in (torch._C._nn.cross_entropy_loss, torch._C._nn.nll_loss_nd):
            check_rule(function, [sample], mesh_shapes=((3,),), most=12)


def test_a_mean_divides_by_the_weights_of_all_ranks() -> None:
    """One rank has most of the valid targets, another none."""
    logits = torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 3.0], [0.0, 5.0]])
    target = torch.tensor([0, 1, -100, -100])
    want = torch.tensor(2.0).log()  # of two rows with even odds

    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        loss = F.cross_entropy(in_layout(logits, mesh, sw.Shard(0)), target)
        torch.testing.assert_close(loss.full_tensor(), want)

    sw.simulate(run, 2)


def test_nothing_but_ignored_targets_is_nan_as_in_torch() -> None:
    target = torch.full((4,), -100)

    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        for dim in (0, 1):
            x = in_layout(values(4, 4), mesh, sw.Shard(dim))
            assert F.cross_entropy(x, target).full_tensor().isnan()
            assert F.cross_entropy(x, target, reduction="sum").full_tensor() == 0

    sw.simulate(run, 2)


def test_split_classes_are_never_gathered() -> None:
    def run(mesh: sw.DeviceMesh) -> list[Any]:
        x = in_layout(values(3, 50), mesh, sw.Shard(1))
        target = targets(3, classes=50)
        events, _ = heard(mesh, lambda: F.cross_entropy(x, target).backward())
        return [(event.kind, event.shape) for event in events]

    assert ranks(run) == [[("all_reduce", (3, 1)), ("all_reduce", (2, 3))]] * 2


def test_a_target_that_is_no_class_is_refused() -> None:
    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        x = in_layout(values(3, 4), mesh, sw.Shard(1))
        with pytest.raises(IndexError, match="Target 4 is out of bounds"):
            F.cross_entropy(x, torch.tensor([0, 4, 1]))
        with pytest.raises(ValueError, match="to match target batch_size"):
            F.cross_entropy(x, torch.tensor([0, 1]))

    sw.simulate(run, 2)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_dtype_is_torchs_under_autocast(dtype: torch.dtype, autocast: bool) -> None:
    x = values(6, 4).detach().to(dtype)
    target, share = targets(6, classes=4), torch.softmax(values(6, 4).detach(), 1).to(dtype)

    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        for dim, reduction, aim in itertools.product((0, 1), REDUCTIONS, (target, share)):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                here = in_layout(x, mesh, sw.Shard(dim))
                got = F.cross_entropy(here, aim, reduction=reduction)
                want = F.cross_entropy(x, aim, reduction=reduction)
            assert got.dtype == want.dtype
            torch.testing.assert_close(got.full_tensor(), want, rtol=2e-2, atol=1e-2)

    sw.simulate(run, 2)


def test_cross_entropy_over_split_classes_can_be_differentiated_twice() -> None:
    target = targets(3, classes=5)

    def twice(x: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(x, target, reduction="none", label_smoothing=0.1)
        (first,) = torch.autograd.grad(loss, x, loss * loss, create_graph=True)
        return first

    x = values(3, 5)
    cotangent = values(3, 5, seed=1).detach()
    (want,) = torch.autograd.grad(twice(x), x, cotangent)

    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (3,))
        for dim in (0, 1):
            here = in_layout(x, mesh, sw.Shard(dim))
            given = in_layout(cotangent, mesh, sw.Shard(dim))
            (got,) = torch.autograd.grad(twice(here), here, given)
            torch.testing.assert_close(got.full_tensor(), want)

    sw.simulate(run, 3)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_rows_of_an_uneven_batch_stay_where_they_are(reduction):
    """Flattened with the sequence they are split in units: that is nothing to a loss."""
    torch.manual_seed(0)
    logits, classes = torch.randn(4, 5, 7), torch.randint(7, (4, 5))
    expected = F.cross_entropy(logits.flatten(0, 1), classes.flatten(), reduction=reduction)

    def run():
        mesh = sw.init_device_mesh("cpu", (3,))
        x = sw.distribute_tensor(logits, mesh, [sw.Shard(0)], src_data_rank=None)
        with sw.explicit():
            loss = F.cross_entropy(x.flatten(0, 1), classes.flatten(), reduction=reduction)
        torch.testing.assert_close(loss.full_tensor(), expected)

    sw.simulate(run, 3)


def test_a_chunked_linear_cross_entropy_gathers_neither_split_rows_nor_split_classes() -> None:
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=2, allow_retain_graph=True)
    input, matrix, target = values(5, 3), values(4, 3), targets(5, classes=4, ignored=-100)
    for reduction in REDUCTIONS:
        given = {"weight": weights(4), "reduction": reduction, "options": options}
        sample = Sample(input, matrix, target, linear_bias=values(4), **given)
        check_rule(
            F.linear_cross_entropy, [sample], mesh_shapes=((3,),), most=10, allow_missing=True
        )

    def run(mesh: sw.DeviceMesh) -> None:
        rows, classes = sw.Shard(0), sw.Replicate()
        kinds = []
        for _ in range(2):
            tensors = [
                in_layout(each.detach(), mesh, how)
                for each, how in ((input, rows), (matrix, classes), (target, rows))
            ]
            events, _ = heard(mesh, functools.partial(F.linear_cross_entropy, *tensors,
                              reduction="sum", options=options))  # fmt: skip
            kinds.append({event.kind for event in events})
            rows, classes = classes, rows
        assert kinds == [set(), {"all_reduce"}]

    ranks(run)
