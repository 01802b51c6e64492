"""Programs, plans and meshes that shard_program refuses, and the error messages."""

import pytest
import torch
from support.exported_models import BATCH, MLP, MLP_PLAN, ROWS
from torch import nn

import shardwise as sw
from shardwise import Partial, Shard
from shardwise.core import world
from shardwise.export import ExportError, shard_program
from shardwise.parallel.plan_spec import PlanError

# torch's own, when it copies a program.
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")

X = torch.randn(4, 8)


@pytest.fixture(scope="module")
def program():
    return torch.export.export(MLP(), (X,))


@pytest.fixture
def mesh():
    return sw.DeviceMesh.abstract((2,), ("tp",))


PLANS = {
    "no dict": ([1], "plan: expected a dict"),
    "an unknown name": (
        {"upp.weight": ROWS},
        r"near it are up.weight, .*leave it out: tensors that no",
    ),
    "a module": ({"up": ROWS}, r"matches up, which is a module: 'up\.\*' means what it holds"),
    "a style": ({"up": "colwise"}, r"'tp': Shard\(0\)}; got 'colwise'. Styles are for tensor_par"),
    "an unknown axis": ({"up.weight": {"dp": Shard(0)}}, r"axes of the mesh, \(tp=2\); got 'dp'"),
    "too many placements": ({"up.weight": [Shard(0)] * 2}, "expected 1 placements"),
    "a dim that is not there": ({"up.*": ROWS, "down.*": {"tp": Shard(1)}}, "down.bias: .* 1-d"),
    "a pending sum": ({"up.weight": [Partial()]}, "up.weight: expected Shard or Replicate"),
}


@pytest.mark.parametrize("name", PLANS)
def test_plans_that_do_not_fit(program, mesh, name):
    plan, message = PLANS[name]
    with pytest.raises((ExportError, PlanError), match=message) as raised:
        shard_program(program, mesh, plan)
    assert "strict=False" not in str(raised.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"y": [Shard(0)]}, r"\['y'\]: expected the name.* of inputs.*There are \['x'\]"),
        ([None, None], r"expected placements for each of \['x'\]"),
        ({"x": [Shard(2)]}, "x: expected a dim of a 2-d tensor"),
        (3, "input_placements: expected placements for each"),
    ],
)
def test_placements_of_inputs_that_do_not_fit(program, mesh, given, message):
    with pytest.raises((ExportError, PlanError), match=message):
        shard_program(program, mesh, MLP_PLAN, input_placements=given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({1: [Shard(0)]}, r"\['1'\]: expected the name.* of outputs.*There are \['0'\]"),
        ([None, None], r"expected placements for each of \['0'\]"),
        ([Shard(2)], r"output_placements\[0\]: expected a dim of a 2-d tensor"),
        (3, "output_placements: expected placements for each"),
    ],
)
def test_placements_of_outputs_that_do_not_fit(program, mesh, given, message):
    with pytest.raises((ExportError, PlanError), match=message):
        shard_program(program, mesh, MLP_PLAN, output_placements=given)


def test_a_model_is_no_program_and_a_number_no_mesh(program, mesh):
    with pytest.raises(ExportError, match=r"torch.export.export\(model, args\) returns, got MLP"):
        shard_program(MLP(), mesh, {})
    with pytest.raises(sw.MeshError, match="expected a DeviceMesh, got 2"):
        shard_program(program, 2, {})


def test_a_mesh_that_this_rank_is_not_in(program):
    def rank():
        if world.current().rank == 0:
            with pytest.raises(ExportError, match=r"one that this rank is in, got .*\[1\]"):
                shard_program(program, sw.DeviceMesh("cpu", [1]), {})

    sw.simulate(rank, 2)


def test_a_dynamic_dim_is_not_split(mesh):
    dynamic = torch.export.export(MLP(), (X,), dynamic_shapes=({0: BATCH},))
    with pytest.raises(ExportError, match=r"x: dim 0 is dynamic \(s.*axis tp would split it"):
        shard_program(dynamic, mesh, MLP_PLAN, input_placements={"x": {"tp": Shard(0)}})
    with pytest.raises(ExportError, match=r"output_placements\[0\]: dim 0 is dynamic"):
        shard_program(dynamic, mesh, MLP_PLAN, output_placements=[Shard(0)])


class Module(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


NUMBER = torch.tensor(2.0)
PROGRAMS = {
    "sizes of data": (torch.nonzero, (X,), "the size of nonzero .* depends on data"),
    "numbers of data": (
        lambda x, n: x * n.item(),
        (X, NUMBER),
        "item.* reads a number",
    ),
    "branches": (
        lambda x: torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x.clone(), (x,)),
        (X,),
        "cond has graphs of its own",
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("decomposed", [False, True])
def test_programs_that_ranks_cannot_share(mesh, name, decomposed):
    function, args, message = PROGRAMS[name]
    made = torch.export.export(Module(function), args)
    with pytest.raises(ExportError, match=message.replace("item", "(item|scalar)")):
        shard_program(made.run_decompositions() if decomposed else made, mesh, {})


def test_a_dynamic_number(mesh):
    dims = ((None, torch.export.Dim.DYNAMIC),)
    made = torch.export.export(Module(torch.mul), (X, 3), dynamic_shapes=dims)
    with pytest.raises(ExportError, match="is a dynamic number"):
        shard_program(made, mesh, {})


def test_a_program_of_no_tensors_is_that_of_every_rank(mesh):
    made = torch.export.export(Module(torch.ones), (3,))
    assert torch.equal(shard_program(made, mesh, {}).module()(3), torch.ones(3))
