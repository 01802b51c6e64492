"""Gather extensions that return wrong results are refused; the error names the parameter."""

import pytest
import torch
from support.fsdp_cases import WIDTH, batch, made, on_ranks
from support.fsdp_extensions import extend, same_after, same_before
from torch import nn

from shardwise.fsdp import FSDPError, fully_shard, replicate


def refused(before=same_before, after=same_after, expected="", at_once=False):
    def run(mesh):
        layer = made().layers[1]
        for name, function in (("pre", before), ("post", after)):
            if function is not None:
                setattr(layer.linear.weight, f"fsdp_{name}_all_gather", function)

        def use():
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
            assert not at_once
            layer(batch()).sum().backward()

        with pytest.raises(FSDPError, match=rf"(?s)^linear\.weight: .*{expected}"):
            use()
        if at_once:
            assert type(layer).__name__ == "Block"  # nothing was changed

    on_ranks(run)


def test_one_of_the_two_is_not_enough():
    refused(
        before=None, expected="has fsdp_post_all_gather and no function fsdp_pre_all", at_once=True
    )
    refused(
        after=None, expected="has fsdp_pre_all_gather and no function fsdp_post_all", at_once=True
    )
    refused(before=3, expected="no function fsdp_pre_all_gather", at_once=True)


def test_other_signatures():
    refused(lambda shard, mesh, more: None, expected=r"got \(shard, mesh, more\)", at_once=True)


@pytest.mark.parametrize(
    "returned", [None, torch.ones(2), (torch.ones(2),), ((), None), ((1,), None), (3, 4)]
)
def test_what_goes_out_must_be_tensors_and_metadata(returned):
    refused(lambda shard, mesh: returned, expected="must return .tensors to gather, metadata.")


@pytest.mark.parametrize(
    "returned",
    [
        None,
        torch.ones(WIDTH, WIDTH),
        (torch.ones(WIDTH, WIDTH), None),
        (3, ()),
    ],
)
def test_what_comes_back_must_be_a_parameter_and_tensors(returned):
    refused(
        after=lambda shard, gathered, metadata, param_dtype, *, out=None: returned,
        expected="must return .parameter, tensors to free.",
    )


def test_of_another_shape_or_dtype():
    for made_ in (torch.ones(2, 2).double(), torch.ones(WIDTH, WIDTH)):
        refused(
            after=lambda *args, out=None: (made_, ()),  # noqa: B023
            expected=r"must return a parameter of torch.float64 \(5, 5\), got",
        )


def test_out_must_be_written_to():
    refused(
        after=lambda shard, gathered, *args, out=None: (gathered[0].clone(), ()),
        expected="must write to `out`",
    )


def test_the_shard_is_no_parameter():
    def run(mesh):
        model = extend(nn.Linear(4, 4), same_before, lambda shard, *args, out=None: (shard, ()))
        replicate(model, mesh=mesh)
        with pytest.raises(FSDPError, match=r"^weight: .*must not return the memory of the shard"):
            model(torch.ones(1, 4))

    on_ranks(run)


def test_what_ranks_send_must_fit_together():
    refused(
        lambda shard, mesh: ((shard,) * (1 + mesh.get_rank()), None),
        expected="rank 0 has torch.float64 .3, 5., rank 1 has .*, torch.float64",
    )
    refused(
        lambda shard, mesh: ((shard[:, mesh.get_rank() :],), None),
        expected="differ in dim 0 only",
    )


def test_what_ranks_send_must_stay_the_same():
    calls = []

    def before(shard, mesh):
        calls.append(mesh.get_rank())
        return (shard.to(torch.float64 if len(calls) <= 2 else torch.float32),), None

    refused(before, expected=r"each time, at first torch.float64 \(., 5\); got torch.float32")


RELEASE = "fsdp_should_release_all_gather_outputs_after_post_all_gather"


@pytest.mark.parametrize(
    ("before", "after", "release", "expected"),
    [
        (None, None, lambda: True, "neither fsdp_pre_all_gather nor"),
        (same_before, same_after, lambda: 1, "must return True or False, got 1"),
        (same_before, same_after, True, "must be a function"),
        (same_before, same_after, lambda shard: True, "lies in their memory"),
    ],
)
def test_what_is_said_about_the_memory_of_what_was_gathered(before, after, release, expected):
    def run(mesh):
        layer = made().layers[1]
        if before is not None:
            layer.linear.weight.fsdp_pre_all_gather = before
            layer.linear.weight.fsdp_post_all_gather = after
        setattr(layer.linear.weight, RELEASE, release)
        with pytest.raises(FSDPError, match=rf"(?s)^linear\.weight: .*{RELEASE}.*{expected}"):
            fully_shard(layer, mesh=mesh)(batch())

    on_ranks(run)
