"""shard_step: the graph of a training step, and refused steps. The ranks need not exist."""

import pytest
import torch
from support.training_steps import MLP, model_of, start, training_step
from torch import nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

import shardwise as sw
from shardwise import Shard
from shardwise.export import ExportError, shard_step
from shardwise.export.operators import is_collective
from shardwise.parallel import Activations
from shardwise.parallel.plan_spec import PlanError

TWO = sw.DeviceMesh.abstract((2,), ("tp",))
ALONE = sw.DeviceMesh("cpu", [0], mesh_dim_names=("tp",))
PLAN = {"up.*": {"tp": Shard(0)}, "down.weight": {"tp": Shard(1)}}
MODEL = MLP()
PARAMS = {name: each.detach() for name, each in MODEL.named_parameters()}
X = torch.linspace(-1, 1, 32).view(4, 8)


def copies(tree):
    return pytree.tree_map_only(torch.Tensor, torch.clone, tree)


def with_grad(params, x):
    """A step that calls torch.autograd.grad and returns new tensors as parameters."""
    params = {name: each.detach().requires_grad_() for name, each in params.items()}
    loss = functional_call(MODEL, params, (x,)).pow(2).sum()
    gradients = torch.autograd.grad(loss, list(params.values()))
    pairs = zip(params.items(), gradients, strict=True)
    return {name: each.detach() - 0.1 * g for (name, each), g in pairs}, loss.detach()


def with_backward(params, x):
    """A step that calls backward()."""
    params = {name: each.detach().requires_grad_() for name, each in params.items()}
    loss = functional_call(MODEL, params, (x,)).pow(2).sum()
    loss.backward()
    return {name: each.detach() - 0.1 * each.grad for name, each in params.items()}, loss.detach()


def in_place(params, x):
    """A step that changes its parameters in place."""
    changed = {name: each.detach().requires_grad_() for name, each in params.items()}
    loss = functional_call(MODEL, changed, (x,)).pow(2).sum()
    gradients = torch.autograd.grad(loss, list(changed.values()))
    for each, gradient in zip(params.values(), gradients, strict=True):
        each.sub_(gradient, alpha=0.1)
    return params, loss.detach()


@pytest.mark.parametrize("fn", [with_grad, with_backward, in_place])
def test_gradients_can_be_taken_and_used_in_several_ways(fn):
    step = shard_step(fn, ALONE, PLAN, (PARAMS, X))
    wanted, got = copies(PARAMS), copies(PARAMS)
    for _ in range(2):
        wanted, loss = fn(wanted, X)
        got, ours = step(got, X)
        torch.testing.assert_close((got, ours), (wanted, loss))
    two = shard_step(fn, TWO, PLAN, (PARAMS, X)).graph_module
    assert sum(map(is_collective, two.graph.nodes)) == 1  # the sum after the second projection


def test_tensors_from_elsewhere_are_constants_of_the_graph():
    scale = torch.arange(8.0)

    def fn(params, x):
        ones = torch.ones(8, device=x.device)
        number = float(torch.tensor(2.0))
        scaled = x.to("cpu") * scale + torch.tensor([3.0]) * ones + number
        return params, {"scaled": scaled, "zeros": torch.zeros(2), "scale": scale, "count": 3}

    step = shard_step(fn, ALONE, {}, (PARAMS, X))
    torch.testing.assert_close(step(PARAMS, X), fn(PARAMS, X))
    assert len(list(step.graph_module.buffers())) == 2


def test_the_state_of_an_optimizer_lies_as_its_parameter():
    state = start(model_of("mlp"), "adam")
    batch = {"x": X.double()[:, None], "y": X.double()[:, None]}
    plan = {"params.up.*": {"tp": Shard(0)}, "params.down.weight": {"tp": Shard(1)}}
    plan |= {"adam.square.up.bias": {}}
    step = shard_step(training_step("mlp", "adam"), TWO, plan, (state, batch))
    assert repr(step.layouts["adam.mean.up.weight"]) == "[16@tp, 8]"
    assert repr(step.layouts["adam.mean.down.weight"]) == "[8, 16@tp]"
    assert repr(step.layouts["adam.mean.down.bias"]) == "[8]"
    assert repr(step.layouts["adam.mean.up.bias"]) == "[16@tp]"
    assert repr(step.layouts["adam.square.up.bias"]) == "[16]"  # the plan names it
    pieces = step.shard(state)
    assert pieces["adam"]["mean"]["up.weight"].shape == (8, 8)
    assert pieces["params"]["down.weight"].shape == (8, 8)


def test_a_graph_has_nothing_that_changes_no_result():
    def fn(params, x):
        return params, (x + 0.0) * 2

    graph = shard_step(fn, TWO, {}, (PARAMS, X)).graph_module.graph
    called = [node.target for node in graph.nodes if node.op == "call_function"]
    assert called == [torch.ops.aten.mul.Tensor]


def test_whole_tensors_do_not_change_with_the_next_step():
    def run():
        mesh = sw.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        step = shard_step(in_place, mesh, {}, (PARAMS, X))
        pieces = step.shard(PARAMS)
        before = step.unshard(pieces)
        step(pieces, X)
        torch.testing.assert_close(before, PARAMS, rtol=0, atol=0)

    sw.simulate(run, 1)


def test_an_example_needs_no_data():
    example = pytree.tree_map(lambda each: each.to("meta"), (PARAMS, X))
    step = shard_step(with_grad, ALONE, PLAN, example)
    torch.testing.assert_close(step(PARAMS, X), with_grad(PARAMS, X))


def test_every_node_with_a_layout_has_a_value_of_its_shape():
    graph = shard_step(with_grad, TWO, PLAN, (PARAMS, X)).graph_module.graph
    said = [node.meta["custom"]["layout"] for node in graph.nodes if "layout" in node.meta]
    assert "[4, 8] +sum@tp" in said and "[4, 16@tp]" in said
    for node in graph.nodes:
        if node.op == "placeholder":
            assert node.meta["val"].shape == node.meta["layout"].local_shape([0])


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return self.up(x)


def uses_parameters_of_a_module(params, x):
    return params, MODEL(x)


def asks_for_a_value(params, x):
    return params, x.sum().item()


def branches(params, x):
    return params, x if x.sum() > 0 else -x


def casts(params, x):
    with torch.autocast("cpu", torch.bfloat16):
        return params, functional_call(MODEL, params, (x,))


def writes_elsewhere(params, x, module=Counting().requires_grad_(False)):  # noqa: B008
    return params, module(x)


@pytest.mark.parametrize(
    "fn, message",
    [
        (uses_parameters_of_a_module, r"tensor of shape \(16, 8\) that requires grad"),
        (asks_for_a_value, "asks for the value of a tensor"),
        (branches, "asks for the value of a tensor"),
        (casts, "autocast"),
        (writes_elsewhere, r"writes to a tensor of shape \(\)"),
        (lambda params, x: x, r"return \(new_state, outputs\)"),
        (lambda params, x: ({}, x), "the new state that it returns: expected a tree like"),
        (
            lambda params, x: ({name: each[:1] for name, each in params.items()}, x),
            r"expected up.weight of the new state to be as it was, \(\(16, 8\)",
        ),
        (lambda params: (params, None), "too many positional arguments"),
    ],
)
def test_what_cannot_be_a_graph_is_refused(fn, message):
    before = torch.get_rng_state()
    with pytest.raises(ExportError, match=message):
        shard_step(fn, TWO, PLAN, (PARAMS, X))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    "plan, example, message",
    [
        ({"upp.weight": [Shard(0)]}, (PARAMS, X), "matches nothing; near it are up.*leave it out"),
        ({"up.weight": {"dp": Shard(0)}}, (PARAMS, X), "expected axes of the mesh.*leave it out"),
        ({"": Activations()}, (PARAMS, X), "the plan of a step is for tensors"),
        (PLAN, PARAMS, "the state first; got dict$"),
        (PLAN, (nn.Linear(8, 16), X), r"params: .*got a module, Linear.*named_parameters\(\)"),
    ],
)
def test_plans_and_examples_that_do_not_fit_are_refused(plan, example, message):
    with pytest.raises((ExportError, PlanError), match=message) as raised:
        shard_step(with_grad, TWO, plan, example)
    assert "strict=False" not in str(raised.value)


def test_names_of_state_and_batch_must_differ():
    with pytest.raises(ExportError, match="'x' twice"):
        shard_step(lambda state, x: (state, None), TWO, {}, ({"x": X}, X))


def test_arguments_that_the_graph_is_not_for_are_refused():
    step = shard_step(lambda state, x, rate: (state, x * rate), TWO, PLAN, (PARAMS, X, 0.5))
    pieces = step.shard(PARAMS)
    with pytest.raises(ExportError, match=r"up.weight: expected this rank's piece, \(8, 8\)"):
        step(PARAMS, X, 0.5)
    with pytest.raises(ExportError, match=r"rate: expected 0.5.*got 0.6"):
        step(pieces, X, 0.6)
    with pytest.raises(ExportError, match=r"x: expected torch.float32, got torch.float64"):
        step(pieces, X.double(), 0.5)
    with pytest.raises(ExportError, match="state: expected a tree like the example's"):
        step({}, X, 0.5)
    with pytest.raises(ExportError, match=r"expected the arguments \['state', 'x', 'rate'\]"):
        step(pieces, X)
    with pytest.raises(ExportError, match=r"up.weight: expected the whole tensor, \(16, 8\)"):
        step.shard(pieces)
    with pytest.raises(ExportError, match="argument: expected one of"):
        step.shard(X, "y")
    assert step(pieces, X, 0.5)[0].keys() == PARAMS.keys()
