"""Styles are values: equal if they say the same, and printed as they are written."""

import pytest
import torch
from support.rules import ranks
from torch import nn

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.parallel import (
    ColwiseParallel,
    PlanError,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

STYLES = [
    ColwiseParallel(),
    ColwiseParallel(output_layouts=Replicate()),
    RowwiseParallel(),
    SequenceParallel(),
    SequenceParallel(sequence_dim=2),
    PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()),
    PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate()),
    PrepareModuleInputOutput(
        input_layouts=Shard(0),
        desired_input_layouts=Replicate(),
        output_layouts=Replicate(),
        desired_output_layouts=Shard(0),
    ),
]


def test_styles_that_say_the_same_are_equal_and_others_are_not():
    assert len(set(STYLES)) == len(STYLES)
    for style in STYLES:
        copy = type(style).__new__(type(style))
        vars(copy).update(vars(style))
        assert copy == style and hash(copy) == hash(style) and copy in STYLES


@pytest.mark.parametrize("style", STYLES, ids=lambda style: type(style).__name__)
def test_a_style_is_printed_with_what_tells_it_from_others(style):
    assert repr(style).startswith(f"{type(style).__name__}(")
    assert [each for each in STYLES if repr(each) == repr(style)] == [style]


def test_a_style_may_be_applied_to_one_module_by_itself():
    x = torch.randn(3, 4, dtype=torch.float64)
    torch.manual_seed(0)
    alone = nn.Linear(4, 6, dtype=torch.float64)

    def run(mesh: sw.DeviceMesh) -> None:
        torch.manual_seed(0)
        module = nn.Linear(4, 6, dtype=torch.float64)
        style = ColwiseParallel(output_layouts=Replicate())
        assert style._apply(module, mesh) is module
        assert module.weight.placements == (Shard(0),)
        torch.testing.assert_close(module(x), alone(x))
        with pytest.raises(PlanError):
            style._apply(module, mesh)  # it has one

    ranks(run)


def test_layouts_that_do_not_match_those_wanted_are_refused_by_name():
    with pytest.raises(PlanError, match="input_layouts: expected as many as desired_input"):
        PrepareModuleInput(desired_input_layouts=Shard(0))
    with pytest.raises(PlanError, match="desired_input_kwarg_layouts: expected the names of"):
        PrepareModuleInput(input_kwarg_layouts={"x": Shard(0)})
    with pytest.raises(PlanError, match="desired_output_layouts: expected 1"):
        PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=(Shard(0), Shard(1)))
