"""A write is visible through every tensor that shares the memory, as in one process."""

import copy

import pytest
import torch
from support.export_ranks import Routed, collectives
from torch import nn

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.export import shard_program
from shardwise.parallel import Activations

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

X = torch.linspace(-1, 1, 24).view(4, 6)
ROWS, COLUMNS, WHOLE = {"tp": Shard(0)}, {"tp": Shard(1)}, {"tp": Replicate()}


class Model(nn.Module):
    def __init__(self, function, inner=None):
        super().__init__()
        self.function, self.inner = function, inner

    def forward(self, x):
        return self.function(self, x)


def exported(model, *, decomposed=False):
    with torch.no_grad():
        program = torch.export.export(model, (X.clone(),))
    return program.run_decompositions() if decomposed else program


def check(program, plan, placements):
    """Check the results, and the input and buffers after the call; return a program."""
    one, given = copy.deepcopy(program).module(), X.clone()
    want = one(given), given, dict(one.named_buffers())

    def rank():
        mesh = sw.init_device_mesh("cpu", (2,), ("tp",))
        made = shard_program(program, mesh, plan, input_placements={"x": placements})
        module = made.module()
        mine = sw.distribute_tensor(X, mesh, list(placements.values())).to_local().clone()
        with Routed(mesh), torch.no_grad():
            result = module(mine)
        whole = sw.DTensor.from_local(
            mine, mesh, list(placements.values()), shape=X.shape
        ).full_tensor()
        return (result, whole, dict(module.named_buffers())), made

    results = sw.simulate(rank, 2)
    for got, _ in results:
        torch.testing.assert_close(got, want)
    return results[0][1]


def test_statistics_are_updated_by_norms_whose_results_nobody_uses():
    def function(model, x):
        model.inner(x)
        model.inner(x)
        return x + 1

    check(exported(Model(function, nn.BatchNorm1d(6))), {}, COLUMNS)


@pytest.mark.parametrize("placements", [ROWS, COLUMNS])
def test_parts_that_are_returned_are_as_the_whole_is_in_the_end(placements):
    def function(model, x):
        whole = x * 2
        rows = whole[1:3]
        corner = rows[:, 1:3]
        whole.add_(1)
        return rows, corner

    check(exported(Model(function)), {}, placements)


class Adding(nn.Module):
    def forward(self, x):
        x.add_(1)
        return x * 2


class View(nn.Module):
    def forward(self, x):
        return x.view(-1, 6)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("sums", torch.ones(4, 6))

    def forward(self, x):
        return self.sums.add_(x)


def writes_to_view(model, x):
    hidden = x * 1
    seen = model.inner(hidden)
    seen.mul_(3)
    return hidden + 1


def writes_to_viewed(model, x):
    hidden = x * 1
    seen = model.inner(hidden)
    hidden.mul_(3)
    return hidden + seen


def writes_to_buffer(model, x):
    return model.inner(x).mul_(2) + 1


@pytest.mark.parametrize(
    "function, inner, activations",
    [
        (lambda model, x: model.inner(x) + x, Adding, Activations(inputs=COLUMNS)),
        (writes_to_view, View, Activations(inputs=WHOLE)),
        (writes_to_viewed, View, Activations(outputs=COLUMNS)),
        (writes_to_buffer, Counting, Activations(outputs=COLUMNS)),
    ],
)
def test_modules_whose_tensors_are_moved_share_memory_with_others_all_the_same(
    function, inner, activations
):
    check(exported(Model(function, inner())), {"inner": activations}, ROWS)


def test_what_a_module_writes_to_for_itself_is_not_written_back():
    def function(model, x):
        return model.inner(x).relu_()

    model = Model(function, nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True)))
    made = check(exported(model), {"inner": Activations(outputs=WHOLE), "inner.0.*": ROWS}, WHOLE)
    assert collectives(made) == {"all_gather_into_tensor": 1}
    assert not any("copy" in str(node.target) for node in made.graph.nodes)


class Cache(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.ones(4, 6))

    def forward(self, x):
        self.rows[:2] = x[:2]
        return self.rows * x


def test_a_buffer_that_a_module_writes_to_is_none_of_its_results():
    program = exported(Model(lambda model, x: model.inner(x) + 1, Cache()), decomposed=True)
    check(program, {"inner": Activations(outputs=COLUMNS)}, ROWS)


def test_operators_without_rules_write_where_they_should():
    def function(model, x):
        x[1][x[0] > 0] = 5  # by numbers, to a part that each rank has as a copy
        x.cumsum_(0)
        return x + 1

    check(exported(Model(function)), {}, ROWS)
