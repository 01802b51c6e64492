"""The passes `clean` and `simplify`: the same results from fewer nodes."""

import pytest
import torch
from support.exported_models import CASES, MLP, MLP_PLAN, program
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import shardwise as sw
from shardwise.core import world
from shardwise.export.operators import is_collective
from shardwise.export.program import ProgramSharder
from shardwise.export.recording import RecordingWorld
from shardwise.export.simplify import simplify

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.export's own

aten = torch.ops.aten
X, WEIGHT, BIAS = torch.randn(3, 4), torch.randn(4, 4), torch.randn(4)


def counted(function, *inputs):
    """Return the number of operators before and after; check that results are the same."""
    module = make_fx(function, pre_dispatch=True)(*inputs)
    FakeTensorProp(module).propagate(*inputs)
    before = sum(node.op == "call_function" for node in module.graph.nodes)
    given = [each.clone() for each in inputs]
    expected = function(*given)
    simplify(module.graph)
    module.recompile()
    found = [each.clone() for each in inputs]
    torch.testing.assert_close(module(*found), expected, rtol=0, atol=0)
    torch.testing.assert_close(found, given, rtol=0, atol=0)
    return before, sum(node.op == "call_function" for node in module.graph.nodes)


FEWER = {
    "a linear layer without its zero bias": (
        lambda x, w, b: aten.linear(x, w, aten.zeros_like(b)),
        1,
    ),
    "a convolution without its zero bias": (
        lambda x, w, b: aten.conv1d(x, w.unsqueeze(-1)[:, :3], aten.zeros_like(b)),
        3,
    ),
    "a product that is added to zeros": (
        lambda x, w, b: aten.addmm(aten.zeros_like(b), x, w),
        1,
    ),
    "zeros and a residual": (lambda x, w, b: (aten.zeros_like(x) + x.relu()).exp(), 2),
    "a residual and zeros": (lambda x, w, b: (x.relu() + aten.zeros_like(b)).exp(), 2),
    "minus nothing": (lambda x, w, b: (x - 0).exp(), 1),
    "itself": (lambda x, w, b: aten.view_as(x, x).exp(), 1),
    "where it is": (lambda x, w, b: aten.to.dtype(x, torch.float32).exp(), 1),
    "a constant": (lambda x, w, b: aten.lift_fresh_copy(b).detach_().exp(), 1),
}

AS_MANY = {
    "zeros that are broader": lambda x, w, b: (aten.zeros_like(x) + b).exp(),
    "zeros of a wider dtype": lambda x, w, b: (aten.zeros_like(b, dtype=torch.float64) + x).exp(),
    "zeros plus twice something": lambda x, w, b: aten.add(aten.zeros_like(x), x, alpha=2).exp(),
    "zeros minus something": lambda x, w, b: (aten.zeros_like(x) - x).exp(),
    "zeros that are written to": lambda x, w, b: x + aten.zeros_like(x).add_(1),
    "a sum that is written to": lambda x, w, b: (x + aten.zeros_like(x)).mul_(2),
    "a sum of what is written to": lambda x, w, b: (x + aten.zeros_like(x), x.mul_(2)),
    "a copy of what is written to by a view": lambda x, w, b: (
        aten.lift_fresh_copy(x).exp(),
        x[0].mul_(2),
    ),
    "a new tensor that is returned": lambda x, w, b: x + aten.zeros_like(x),
    "a copy that is returned by a view": lambda x, w, b: aten.lift_fresh_copy(x)[0],
    "another dtype": lambda x, w, b: aten.to.dtype(x, torch.float64).exp(),
    "another's shape": lambda x, w, b: aten.view_as(x.reshape(-1), x).exp(),
}


@pytest.mark.parametrize("name", FEWER)
def test_there_is_no_longer(name):
    function, wanted = FEWER[name]
    before, after = counted(function, X, WEIGHT, BIAS)
    assert after == wanted < before


@pytest.mark.parametrize("name", AS_MANY)
def test_there_still_is(name):
    before, after = counted(AS_MANY[name], X, WEIGHT, BIAS)
    assert after == before


def test_statistics_that_a_norm_writes_to_are_not_zeros():
    def normed(x, w, b):
        mean = aten.zeros_like(b)
        y = aten.batch_norm(x, None, None, mean, aten.ones_like(b), True, 1.0, 1e-5, False)
        return y + mean

    before, after = counted(normed, X, WEIGHT, BIAS)
    assert after == before


# ---- of whole programs


def program_of(exported, plan, rank, size=2):
    here = RecordingWorld(rank, size)
    with world.use(here):
        mesh = sw.DeviceMesh("cpu", list(range(size)), mesh_dim_names=("tp",))
    return ProgramSharder(exported, mesh, here, plan).program()


def operators(program):
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_mlp_is_what_one_would_write(rank):
    exported = torch.export.export(MLP(), (torch.randn(2, 3, 8),))
    assert operators(program_of(exported, MLP_PLAN, rank)) == [
        "aten.linear.default",
        "aten.relu.default",
        "aten.linear.default",
        "_c10d_functional.all_reduce.default",
        "_c10d_functional.wait_tensor.default",
    ]


def test_a_gather_copies_once():
    exported = torch.export.export(MLP(), (torch.randn(2, 3, 8),))
    found = operators(program_of(exported, {"down.*": {"tp": sw.Shard(0)}}, 1))
    assert found[3:] == [
        "_c10d_functional.all_gather_into_tensor.default",
        "_c10d_functional.wait_tensor.default",
        "aten.view.default",
        "aten.unbind.int",
        "<built-in function getitem>",
        "<built-in function getitem>",
        "aten.cat.default",
    ]


FIXED = [(name, False) for name, case in CASES.items() if case.dynamic is None]
DECOMPOSED = [(name, True) for name in ("written", "cache by slice", "image, training")]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name, decomposed", FIXED + DECOMPOSED)
def test_all_ranks_meet_in_the_same_collectives_in_the_same_order(name, decomposed):
    exported, plan = program(name, decomposed), CASES[name].plan
    found = [_collectives(program_of(exported, plan, rank, 3)) for rank in range(3)]
    assert found == [found[0]] * 3


def _collectives(program):
    return [
        (
            node.target,
            *(each for each in node.args if isinstance(each, str)),
            node.meta["val"].dtype,
        )
        + (() if "all_to_all" in str(node.target) else (tuple(node.args[0].meta["val"].shape),))
        for node in program.graph.nodes
        if is_collective(node)
    ]
