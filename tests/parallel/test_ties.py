"""Tied parameters under styles and plans, in one call and in several."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from support.rules import ranks
from torch import nn

import shardwise as sw
from shardwise import DTensor, Replicate, Shard
from shardwise.core.mesh import init_device_mesh
from shardwise.fsdp import fully_shard
from shardwise.parallel import (
    ColwiseParallel,
    PlanError,
    RowwiseParallel,
    parallelize_module,
    shard_module,
)

TOKENS = torch.tensor([[1, 6, 2, 0], [3, 3, 5, 6]])
ROWS = RowwiseParallel()
COLUMNS = ColwiseParallel(output_layouts=Replicate())
BY_ROWS = {"tp": Shard(0)}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.middle = nn.Embedding(7, 4), nn.Linear(4, 4)
        self.output = nn.Linear(4, 7, bias=False)
        self.output.weight = self.embed.weight

    def forward(self, tokens):
        return self.output(self.middle(self.embed(tokens)).relu())


def made():
    torch.manual_seed(0)
    return Tied().double()


def train(model):
    """Two steps of training; the losses, and the tied weight after them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    losses = []
    for _ in range(2):
        logits = model(TOKENS)
        loss = F.cross_entropy(logits.flatten(0, 1), TOKENS.flatten())
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def assert_trains_as_one_process(model):
    plain = made()
    expected = train(plain)
    assert model.output.weight is model.embed.weight
    assert isinstance(model.output.weight, nn.Parameter)
    assert len(list(model.parameters())) == 3
    assert train(model) == pytest.approx(expected, abs=1e-12)
    weight = model.embed.weight
    whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
    torch.testing.assert_close(whole, plain.embed.weight)


def on(count, run):
    return sw.simulate(lambda: run(init_device_mesh("cpu", (count,), ("tp",))), count)


# ---- several calls


def by_submodule(model, mesh):
    parallelize_module(model.embed, mesh, ROWS)
    parallelize_module(model.output, mesh, COLUMNS)


def by_submodule_and_tied_again(model, mesh):
    by_submodule(model, mesh)
    model.output.weight = model.embed.weight


def tied_again_between(model, mesh):
    parallelize_module(model.embed, mesh, ROWS)
    model.output.weight = model.embed.weight
    parallelize_module(model.output, mesh, COLUMNS)


def by_plans_of_the_model(model, mesh):
    parallelize_module(model, mesh, {"embed": ROWS})
    parallelize_module(model, mesh, {"output": COLUMNS})


def in_the_other_order(model, mesh):
    parallelize_module(model, mesh, {"output": COLUMNS})
    parallelize_module(model.embed, mesh, ROWS)


def in_one_plan(model, mesh):
    parallelize_module(model, mesh, {"embed": ROWS, "output": COLUMNS})


def by_one_name_only(model, mesh):
    # The other module has no style: it computes with the DTensor as it is, and torch's recipe
    # for that, to tie again, changes nothing.
    parallelize_module(model, mesh, {"embed": ROWS})
    model.output.weight = model.embed.weight


def by_plan_and_style(model, mesh):
    shard_module(model.embed, mesh, {"weight": BY_ROWS})
    parallelize_module(model.output, mesh, COLUMNS)
    parallelize_module(
        model,
        mesh,
        {
            "embed": sw.parallel.PrepareModuleOutput(
                output_layouts=Replicate(), desired_output_layouts=Replicate()
            )
        },
    )


def by_plans_of_parts(model, mesh):
    shard_module(model.embed, mesh, {"weight": BY_ROWS})
    shard_module(model.output, mesh, {"weight": BY_ROWS})
    shard_module(model.middle, mesh, {})


def by_a_plan_of_a_part_and_one_of_the_rest(model, mesh):
    shard_module(model.embed, mesh, {"weight": BY_ROWS})
    shard_module(model, mesh, {"middle.weight": BY_ROWS})


WAYS = [
    by_submodule,
    by_submodule_and_tied_again,
    tied_again_between,
    by_plans_of_the_model,
    in_the_other_order,
    in_one_plan,
    by_one_name_only,
    by_plan_and_style,
    by_plans_of_parts,
    by_a_plan_of_a_part_and_one_of_the_rest,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("count", [2, 3])
def test_tied_weights_stay_tied_and_train_as_in_one_process(way, count):
    def run(mesh):
        model = made()
        way(model, mesh)
        assert model.embed.weight.placements == (Shard(0),)
        assert_trains_as_one_process(model)

    on(count, run)


@pytest.mark.parametrize("way", [by_submodule, in_one_plan], ids=lambda way: way.__name__)
def test_fully_shard_over_tied_weights(way):
    def run():
        mesh = init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        model = made()
        way(model, mesh["tp"])
        fully_shard(model.middle, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        assert_trains_as_one_process(model)

    sw.simulate(run, 4)


def test_a_conflict_of_layouts_is_named_and_nothing_is_changed():
    def run(mesh):
        features = ColwiseParallel()  # of the embedding: split by features, the other by rows
        model = made()
        parallelize_module(model.output, mesh, COLUMNS)
        with pytest.raises(
            PlanError, match=r"weight: a parameter that it is tied to .*\[7@tp, 4\].*\[7, 4@tp\]"
        ):
            parallelize_module(model.embed, mesh, features)
        assert type(model.embed.weight) is nn.Parameter
        with pytest.raises(PlanError, match=r"weight: a parameter that it is tied to"):
            shard_module(model.embed, mesh, {"weight": {"tp": Shard(1)}})
        with pytest.raises(PlanError, match=r"tied to .*\[7, 4@tp\].*\[7@tp, 4\]"):
            parallelize_module(made(), mesh, {"output": COLUMNS, "embed": features})
        model = made()
        parallelize_module(model, mesh, {"output": COLUMNS})
        with pytest.raises(PlanError, match=r"embed\.weight: it is a DTensor \[7@tp, 4\]"):
            parallelize_module(model, mesh, {"embed": features})

    on(2, run)


def test_parameters_that_were_untied_before_get_layouts_of_their_own():
    def run(mesh):
        model = made()
        model.output.weight = nn.Parameter(model.output.weight.detach().clone())
        parallelize_module(model.output, mesh, COLUMNS)
        parallelize_module(model.embed, mesh, ColwiseParallel())
        assert model.embed.weight.placements == (Shard(1),)
        assert model.output.weight.placements == (Shard(0),)

    on(2, run)


def test_what_is_known_of_a_tie_ends_with_the_dtensor_and_is_neither_copied_nor_stored():
    def run(mesh):
        model = made()
        parallelize_module(model.embed, mesh, ROWS)
        copied = copy.deepcopy(model.output)
        file = io.BytesIO()
        torch.save(model.output.weight, file)
        assert b"shardwise" not in file.getvalue()
        parallelize_module(copied, mesh, COLUMNS)
        assert copied.weight is not model.embed.weight
        del model.embed
        parallelize_module(model.output, mesh, ColwiseParallel())
        assert model.output.weight.placements == (Shard(0),)

    on(2, run)


def test_simulated_ranks_may_share_a_plain_parameter():
    shared = nn.Parameter(torch.arange(12.0).view(6, 2))

    def run(mesh):
        first, second = nn.Linear(2, 6, bias=False), nn.Linear(2, 6, bias=False)
        first.weight = second.weight = shared
        for linear in (first, second):
            parallelize_module(linear, mesh, ColwiseParallel())
        assert first.weight is second.weight
        return first.weight.to_local().tolist()

    found = ranks(run, 2)
    assert found[0] + found[1] == shared.tolist()
