"""Traps of torch's tensor-parallel styles, on four real gloo ranks: either import.

torch's column is expected to fail, strictly: if it stops failing, the trap is gone there.
"""

import importlib
import warnings

import pytest
import torch
import torch.nn.functional as F
from support.torch_traps import RANKS, made, outcome, values
from support.torch_versions import torch_bugs
from torch import nn


def styles(lib):
    """`shardwise.parallel`, or torch's."""
    return importlib.import_module(f"{lib.__name__}.parallel")


def quiet(parallel, *args, **kwargs):
    """torch only warns of what it ignores."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return parallel.parallelize_module(*args, **kwargs)


def a_misspelt_key_is_an_error(lib):
    parallel, mesh = styles(lib), made(lib)
    try:
        quiet(parallel, nn.Sequential(nn.Linear(4, 4)), mesh, {"O": parallel.ColwiseParallel()})
    except ValueError:
        return
    raise AssertionError("nothing was said")


def frozen_parameters_of_a_norm_stay_frozen(lib):
    parallel, mesh = styles(lib), made(lib)
    norm = nn.LayerNorm(4).requires_grad_(False)
    parallel.parallelize_module(norm, mesh, parallel.SequenceParallel())
    assert not norm.weight.requires_grad


def parameters_of_a_norm_are_made_equal(lib):
    parallel, mesh = styles(lib), made(lib)
    norm = nn.LayerNorm(4)
    with torch.no_grad():
        norm.weight.fill_(1.0 + mesh.get_rank())
    parallel.parallelize_module(norm, mesh, parallel.SequenceParallel())
    assert norm.weight.to_local().tolist() == [1.0] * 4


def the_empty_key_takes_the_parameters_of_the_source(lib):
    parallel, mesh = styles(lib), made(lib)
    linear = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        linear.weight.fill_(mesh.get_rank())
    plan = {"": parallel.ColwiseParallel()}
    parallel.parallelize_module(linear, mesh, plan, src_data_rank=2)
    assert linear.weight.to_local().unique().tolist() == [2.0]


def a_call_with_keywords_only(lib):
    parallel, mesh = styles(lib), made(lib)
    linear = parallel.parallelize_module(nn.Linear(4, 8), mesh, parallel.ColwiseParallel())
    assert linear(input=torch.ones(3, 4)).shape == (3, 2)


def uneven_features_with_local_tensors(lib):
    torch.manual_seed(0)
    parallel, mesh = styles(lib), made(lib)
    mlp = nn.Sequential(nn.Linear(4, 7), nn.GELU(), nn.Linear(7, 4))
    expected = mlp(values(3, 4))
    plan = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
    parallel.parallelize_module(mlp, mesh, plan)
    assert torch.allclose(mlp(values(3, 4)), expected, atol=1e-6)


def a_tuple_of_one_stays_a_tuple(lib):
    class One(nn.Module):
        def forward(self, x):
            return (x,)

    parallel, mesh = styles(lib), made(lib)
    style = parallel.PrepareModuleOutput(
        output_layouts=lib.Shard(0), desired_output_layouts=lib.Replicate()
    )
    result = parallel.parallelize_module(One(), mesh, style)(torch.ones(1, 2))
    assert isinstance(result, tuple) and result[0].shape == (4, 2)


def mean_loss_of_split_classes_on_two_axes(lib):
    parallel, mesh = styles(lib), made(lib, (2, 2))
    logits, targets = values(8, 6), torch.arange(8) % 6
    targets[:3] = -100
    split = lib.distribute_tensor(logits, mesh, [lib.Shard(0), lib.Shard(1)])
    labels = lib.distribute_tensor(targets, mesh, [lib.Shard(0), lib.Replicate()])
    with parallel.loss_parallel():
        loss = F.cross_entropy(split, labels)
    assert torch.allclose(loss.full_tensor(), F.cross_entropy(logits, targets))


def smoothed_loss_of_split_classes(lib):
    parallel, mesh = styles(lib), made(lib)
    logits, targets = values(8, 6), torch.arange(8) % 6
    split = lib.distribute_tensor(logits, mesh, [lib.Shard(1)])
    with parallel.loss_parallel():
        loss = F.cross_entropy(split, targets, label_smoothing=0.1)
    assert torch.allclose(loss.full_tensor(), F.cross_entropy(logits, targets, label_smoothing=0.1))


def nothing_is_left_of_loss_parallel_after_an_exception(lib):
    try:
        with styles(lib).loss_parallel():
            raise ZeroDivisionError
    except ZeroDivisionError:
        dispatcher = getattr(lib.DTensor, "_op_dispatcher", None)
        handlers = getattr(dispatcher, "_custom_op_handlers", {})
        assert torch.ops.aten.nll_loss_forward.default not in handlers


TRAPS = [
    a_misspelt_key_is_an_error,
    frozen_parameters_of_a_norm_stay_frozen,
    parameters_of_a_norm_are_made_equal,
    the_empty_key_takes_the_parameters_of_the_source,
    a_call_with_keywords_only,
    uneven_features_with_local_tensors,
    a_tuple_of_one_stays_a_tuple,
    mean_loss_of_split_classes_on_two_axes,
    smoothed_loss_of_split_classes,
    nothing_is_left_of_loss_parallel_after_an_exception,
]


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.__name__)
def test_shardwise_is_right(workers4, trap):
    assert workers4.run(outcome, trap, "shardwise") == [""] * RANKS


# torch's smoothed loss fails too, but only after the ranks have waited for each other in vain.
ENDING = [trap for trap in TRAPS if trap is not smoothed_loss_of_split_classes]


FIXED_IN: dict = {}  # none of them, up to torch 2.15


@pytest.mark.parametrize("trap", torch_bugs("tensor parallelism", ENDING, FIXED_IN))
def test_torch_is_right(workers4, trap):
    try:
        assert workers4.run(outcome, trap, "torch") == [""] * RANKS
    finally:
        workers4.run(end_loss_parallel)


def end_loss_parallel():
    """torch's loss_parallel does not end by an exception, and other tests share the ranks."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import loss

    for operator in loss.customized_loss_ops:
        DTensor._op_dispatcher._custom_op_handlers.pop(operator, None)
