"""shard_module: a plan of patterns lays out parameters, inputs and outputs; and loss_parallel."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from support.rules import heard
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard
from shardwise.core.mesh import init_device_mesh
from shardwise.parallel import Activations, ColwiseParallel, PlanError, loss_parallel, shard_module

WIDTH, CLASSES = 6, 5


class Net(nn.Module):
    """Sizes that do not divide; a norm, a buffer and a tie."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return self.head(self.norm(x)) * self.scale


PLAN = {
    "layers.0.*": {"tp": Shard(0)},
    "layers.1.weight": {"tp": Shard(1)},
    "embedding.weight": {"tp": Shard(0)},
    "": Activations(inputs={"dp": Shard(0)}),
}


def made(kind=Net):
    torch.manual_seed(0)
    return kind().double()


def on_two_by_two(run):
    return sw.simulate(lambda: run(init_device_mesh("cpu", (2, 2), ("dp", "tp"))), 4)


TOKENS = torch.tensor([[0, 3, 2, 1], [4, 4, 0, 2], [1, 2, 3, 0]])


def test_a_model_trains_as_in_one_process_with_no_change_to_its_code():
    plain = made()
    expected = F.cross_entropy(plain(TOKENS).flatten(0, 1), TOKENS.flatten())
    expected.backward()

    def run(mesh):
        model = made()
        assert shard_module(model, mesh, PLAN) is model
        assert model.layers[0].bias.placements == (Replicate(), Shard(0))
        assert model.layers[1].weight.placements == (Replicate(), Shard(1))
        assert all(isinstance(each, DTensor) for each in [*model.parameters(), *model.buffers()])
        assert model.head.weight is model.embedding.weight
        output = model(TOKENS)
        assert output.shape == (3, 4, CLASSES)
        loss = F.cross_entropy(output.flatten(0, 1), TOKENS.flatten())
        torch.testing.assert_close(loss.full_tensor(), expected, rtol=1e-10, atol=1e-12)
        loss.backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-10, atol=1e-12)

    on_two_by_two(run)


def test_ranks_get_the_values_of_the_source_and_frozen_stays_frozen():
    def run(mesh):
        torch.manual_seed(mesh.get_rank())
        model = Net()
        model.norm.weight.requires_grad_(False)
        model.norm.weight.note = "kept"
        shard_module(model, mesh, PLAN)
        assert not model.norm.weight.requires_grad and model.norm.weight.note == "kept"
        return model.layers[0].weight.full_tensor()

    torch.manual_seed(0)
    expected = Net().layers[0].weight
    for found in on_two_by_two(run):
        assert torch.equal(found, expected)


def test_nothing_is_communicated_for_a_plain_input_and_all_axes_but_the_named_stay():
    class Same(nn.Module):
        def forward(self, x):
            return x

    def run(mesh):
        module = nn.Sequential(Same(), Same())
        plan = {
            "0": Activations(inputs={"dp": Shard(0)}),
            "1": Activations(outputs={"tp": Shard(1)}),
        }
        shard_module(module, mesh, plan)
        events, result = heard(mesh, lambda: module(torch.arange(15.0).reshape(5, 3)))
        assert events == [] and result.placements == (Shard(0), Shard(1))
        assert torch.equal(result.full_tensor(), torch.arange(15.0).reshape(5, 3))

    on_two_by_two(run)


@pytest.mark.parametrize(
    ("inputs", "args", "kwargs", "found"),
    [
        ({"tp": Shard(1)}, 0, ("mask", "other"), "mask"),  # the first, in the forward's order
        ({"x": {"tp": Shard(1)}}, 1, (), 0),  # it has a position only
        ({"y": {"tp": Shard(1)}}, 2, (), 1),
        ({1: {"tp": Shard(1)}}, 1, ("y",), "y"),
        ({"mask": {"tp": Shard(1)}}, 2, ("mask",), "mask"),
        ({"other": {"tp": Shard(1)}}, 1, ("y", "other"), "other"),
    ],
)
def test_inputs_of_every_kind_of_argument_are_found_by_name(inputs, args, kwargs, found):
    class Any(nn.Module):
        def forward(self, x=None, /, y=None, *rest, mask=None, **others):
            return [x, y, *rest], {"y": y, "mask": mask, **others}

    def run():
        mesh = init_device_mesh("cpu", (2,), ("tp",))
        module = shard_module(Any(), mesh, {"": Activations(inputs=inputs)})
        given = [torch.ones(2, 2) for _ in range(args)]
        by_position, by_name = module(*given, **{name: torch.ones(2, 2) for name in kwargs})
        tensor = by_position[found] if isinstance(found, int) else by_name[found]
        assert isinstance(tensor, DTensor) and tensor.placements == (Shard(1),)
        everything = [*by_position, *(by_name[name] for name in by_name if name != "y")]
        assert sum(isinstance(each, DTensor) for each in everything) == 1

    sw.simulate(run, 2)


def test_a_name_with_the_signs_of_a_pattern_fits_itself():
    def run(mesh):
        module = nn.ParameterDict({"a[0]": torch.ones(2), "a0": torch.ones(2), "b": torch.ones(2)})
        shard_module(module, mesh, {"a[0]": {"tp": Shard(0)}})
        return [each.placements[1] for each in module.values()]

    assert on_two_by_two(run)[0] == [Shard(0), Shard(0), Replicate()]


def test_activations_may_consist_of_pieces():
    def run(mesh):
        fused = {"tp": Shard(-1, pieces=(4, 2))}
        module = shard_module(nn.Identity(), mesh, {"": Activations(outputs=fused)})
        events, result = heard(mesh, lambda: module(torch.arange(6.0)).split([4, 2]))
        assert events == [] and [each.placements[1] for each in result] == [Shard(0)] * 2

    on_two_by_two(run)


@dataclass
class Found:
    first: torch.Tensor
    second: torch.Tensor


class Two(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.wrap = wrap

    def forward(self, x, y=None, *, scale=1):
        return self.wrap(x, x if y is None else y)


@pytest.mark.parametrize(
    ("wrap", "outputs"),
    [
        (lambda x, y: (x, y), (None, {"tp": Shard(0)})),
        (lambda x, y: {"first": x, "second": y}, {"second": {"tp": Shard(0)}}),
        (Found, {"second": [Replicate(), Shard(0)]}),
    ],
)
def test_outputs_by_position_and_by_name(wrap, outputs):
    def run(mesh):
        module = Two(wrap)
        plan = {
            "": Activations(inputs={"y": {"dp": Shard(1)}, 0: [Replicate()] * 2}, outputs=outputs)
        }
        shard_module(module, mesh, plan)
        result = module(torch.ones(4, 4), y=torch.ones(4, 4))
        assert type(result) is type(wrap(1, 2))
        get = (lambda at, name: result[at]) if isinstance(result, tuple) else (
            lambda at, name: result[name] if isinstance(result, dict) else getattr(result, name)
        )  # fmt: skip
        assert get(0, "first").placements == (Replicate(), Replicate())
        assert get(1, "second").placements[1] == Shard(0)

    on_two_by_two(run)


def test_the_first_tensor_is_that_of_the_forward_however_the_caller_orders_keywords():
    def run(mesh):
        module = Two(lambda x, y: (x, y))
        shard_module(module, mesh, {"": Activations(inputs={"dp": Shard(0)})})
        first, second = module(y=torch.ones(4), x=torch.zeros(4))
        assert first.placements == (Shard(0), Replicate()) and type(second) is torch.Tensor

    on_two_by_two(run)


def test_the_last_pattern_counts_and_a_tie_takes_what_one_of_its_names_gets():
    def run(mesh):
        model = Net()
        plan = {"layers.*.weight": {"tp": Shard(0)}, "layers.1.weight": {"tp": Shard(1)}}
        shard_module(model, mesh, {**plan, "head.weight": {"tp": Shard(1)}})
        assert model.layers[0].weight.placements[1] == Shard(0)
        assert model.layers[1].weight.placements[1] == Shard(1)
        assert model.embedding.weight.placements[1] == Shard(1)
        assert model.head.weight is model.embedding.weight

    on_two_by_two(run)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"layer.*.weight": {"tp": Shard(0)}}, r"matches nothing; near it are layers\.0\.weight"),
        ({"layers.0": {"tp": Shard(0)}}, r"layers\.0, which is a module: 'layers\.0\.\*' names"),
        ({"": {"tp": Shard(0)}}, r"the module itself, which is a module: '\*' names"),
        ({"layers.0.weight": Activations()}, r"which is a parameter or buffer: give it placements"),
        ({"layers.0": ColwiseParallel()}, r"got a style.*styles are for parallelize_module"),
        ({"layers.*.weight": {"pp": Shard(0)}}, r"axes of the mesh, \(dp=2, tp=2\); got 'pp'"),
        ({"layers.*.weight": [Shard(0)]}, r"expected 2 placements, one per axis"),
        (
            {"layers.*.weight": {"tp": Shard(2)}},
            r"^layers\.0\.weight: .*a dim of a 2-d tensor, got 2 \[rank \d of 4\]$",
        ),
        ({"layers.*.weight": 3}, r"layers\.\*\.weight.*expected 2 placements"),
        (
            {"embedding.weight": {"tp": Shard(0)}, "head.weight": {"tp": Shard(1)}},
            r"head\.weight: it is tied to embedding\.weight",
        ),
        ({"": Activations(inputs={"x": {"tp": Shard(0)}})}, r"arguments, tokens; got 'x'"),
        ({"": Activations(outputs={"pp": Shard(0)})}, r"outputs of the module: expected axes"),
        ([Shard(0)], r"plan: expected a dict of patterns, got list"),
        ({"norm.weight": {"tp": Partial("avg")}}, r"norm\.weight: .* has its gradient"),
        ({3: {"tp": Shard(0)}}, r"plan: expected names, .* got 3"),
        ({"norm.weight": {"tp": Shard(0), 1: Shard(0)}}, r"each axis once, got tp twice"),
    ],
)
def test_a_wrong_plan_is_named_and_nothing_is_done(plan, message):
    def run(mesh):
        model = Net()
        with pytest.raises(PlanError, match=message):
            shard_module(model, mesh, plan)
        assert not any(isinstance(each, DTensor) for each in model.parameters())

    on_two_by_two(run)


def test_what_does_not_fit_is_left_out_if_it_is_not_strict():
    def run(mesh):
        plan = {"nothing": {"tp": Shard(0)}, "none": Activations({"tp": Shard(0)}), **PLAN}
        with pytest.warns(UserWarning, match="matches nothing") as warned:
            model = shard_module(Net(), mesh, plan, strict=False)
        assert [str(each.message)[:15] for each in warned] == ["plan['nothing']", "plan['none']: e"]
        assert {each.filename for each in warned} == {__file__}
        assert model(TOKENS).shape == (3, 4, CLASSES)

    sw.simulate(lambda: run(init_device_mesh("cpu", (2,), ("tp",))), 2)  # it has no axis dp


def test_activations_that_say_nothing_sensible_are_refused():
    for wrong in (3, "tp", {}, {"x": 3}, [None], [3]):
        with pytest.raises(PlanError, match="inputs: expected placements"):
            Activations(inputs=wrong)
    with pytest.raises(PlanError, match="outputs: expected placements"):
        Activations(outputs=({"tp": Shard(0)}, 3))


def test_plain_inputs_that_are_each_ranks_own_are_found_if_asked_for():
    def run(mesh):
        model = nn.Sequential(nn.Linear(4, 4))
        shard_module(model, mesh, {"": Activations(inputs={"dp": Shard(0)})})
        rows = torch.ones(2, 4) * mesh.get_local_rank("dp")
        model(rows)  # each takes a part of another batch, and nobody sees it
        with sw.plain_tensors("check"):
            with pytest.raises(sw.PolicyError, match=r"inputs of the module: .* on ranks \[2, 3\]"):
                model(rows)
            batch = DTensor.from_local(rows, mesh, [Shard(0), Replicate()])
            assert model(batch).shape == (4, 4)

    on_two_by_two(run)


def test_a_tensor_of_another_mesh_is_refused():
    def run(mesh):
        module = shard_module(nn.Identity(), mesh, {"": Activations(inputs={"tp": Shard(0)})})
        strange = sw.distribute_tensor(torch.ones(4), mesh["tp"], [Shard(0)])
        with pytest.raises(PlanError, match="expected a tensor on"):
            module(strange)

    on_two_by_two(run)


def test_activations_in_pieces_and_whole_units():
    def run():
        mesh = init_device_mesh("cpu", (2,), ("tp",))
        pieces = {"tp": Shard(-1, pieces=(2, 4))}
        heads = {"tp": Shard(-1, unit=2)}
        plan = {"0": Activations(outputs=pieces), "1": Activations(inputs=[heads["tp"]])}
        module = nn.Sequential(nn.Identity(), nn.Identity())
        shard_module(module, mesh, plan)
        x = torch.arange(12.0).view(2, 6)
        assert torch.equal(module(x).full_tensor(), x)
        local = module[0](x).to_local()
        assert torch.equal(local, x[:, [0, 2, 3]] if mesh.get_rank() == 0 else x[:, [1, 4, 5]])
        with pytest.raises(PlanError, match=r"outputs of 0: .* of size 8; got 2\+4"):
            module(torch.ones(2, 8))

    sw.simulate(run, 2)


MOVED = {
    "1.weight": {"tp": Shard(0)},
    "0": Activations(inputs={"tp": Shard(1)}, outputs={"tp": Shard(0)}),
    "1": Activations(inputs={"tp": Replicate()}, outputs={"tp": Shard(1)}),
}


def reentrant(module, x):
    return checkpoint(module[1], module[0](x), use_reentrant=True)


def hooked(module, x):
    module[0].register_full_backward_hook(lambda module, inputs, outputs: None)
    module[1].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2,))
    module[1].register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 3,))
    return module(x)


@pytest.mark.parametrize("call", [reentrant, hooked])
def test_gradients_from_checkpoints_and_hooks_of_modules_go_on_through_activations(call):
    """Both hand DTensors to the nodes before them, which move gradients as local tensors."""

    def layers():
        torch.manual_seed(0)
        return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 7)).double()

    def gradients(module):
        torch.manual_seed(1)
        x = torch.randn(3, 4, WIDTH, dtype=torch.float64, requires_grad=True)
        call(module, x * 1).square().sum().backward()
        return x.grad, module[0].weight.grad, module[1].weight.grad

    def run():
        mesh = init_device_mesh("cpu", (2,), ("tp",))
        found = gradients(shard_module(layers(), mesh, MOVED))
        for ours, theirs in zip(found, gradients(layers()), strict=True):
            full = ours.full_tensor() if isinstance(ours, DTensor) else ours
            torch.testing.assert_close(full, theirs)

    sw.simulate(run, 2)


# ---- loss_parallel


MANY = 23


def options():
    weight = torch.linspace(0.1, 3, MANY, dtype=torch.float64)
    for reduction in ("mean", "sum", "none"):
        yield {"reduction": reduction}
        yield {"reduction": reduction, "weight": weight, "ignore_index": 3}
        yield {"reduction": reduction, "weight": weight, "label_smoothing": 0.1}


@pytest.mark.parametrize("given", list(options()), ids=",".join)
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_cross_entropy_of_split_classes_is_exact_and_gathers_nothing(given, shape):
    torch.manual_seed(0)
    logits, targets = torch.randn(7, MANY, dtype=torch.float64), torch.arange(7) * 3
    plain = logits.clone().requires_grad_()
    expected = F.cross_entropy(plain, targets, **given)
    expected.sum().backward()

    def run():
        mesh = init_device_mesh("cpu", shape)
        placements = [Shard(1)] if len(shape) == 1 else [Shard(0), Shard(1)]
        ours = sw.distribute_tensor(logits, mesh, placements, src_data_rank=None).requires_grad_()

        def step():
            with loss_parallel():
                loss = F.cross_entropy(ours, targets, **given)
                loss.sum().backward()
            return loss

        events, loss = heard(mesh, step)
        assert max(event.bytes for event in events) < logits.numel() * 8  # rows, not classes
        assert all(event.kind == "all_reduce" for event in events)
        torch.testing.assert_close(loss.full_tensor(), expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(ours.grad.full_tensor(), plain.grad, rtol=1e-12, atol=1e-12)

    sw.simulate(run, 4)


def test_nothing_is_left_behind_when_the_body_raises():
    def run(mesh):
        before = F.cross_entropy
        with pytest.raises(ZeroDivisionError), loss_parallel():
            raise ZeroDivisionError
        assert F.cross_entropy is before
        plain = F.cross_entropy(torch.eye(3), torch.arange(3))
        split = sw.distribute_tensor(torch.eye(3), mesh, [Replicate(), Shard(1)])
        assert torch.allclose(F.cross_entropy(split, torch.arange(3)).full_tensor(), plain)

    on_two_by_two(run)
