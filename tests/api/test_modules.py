"""nn.Module with DTensor parameters: conversion, state dicts, copies, hooks, distribute_module."""

import copy
import io

import pytest
import torch
from support.rules import full, ranks, split
from torch import nn

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def by_rows(name, module, mesh):
    """Split the weights and biases of linear layers over output features."""
    if isinstance(module, nn.Linear):
        for key, parameter in list(module.named_parameters(recurse=False)):
            made = sw.distribute_tensor(parameter.detach(), mesh, [Shard(0)])
            module.register_parameter(key, nn.Parameter(made))


def distributed(mesh):
    return sw.distribute_module(two_layers(), mesh, by_rows)


def test_distribute_module_splits_what_it_is_told_and_replicates_the_rest():
    def run(mesh):
        module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
        sw.distribute_module(module, mesh, by_rows)
        assert module[0].weight.placements == (Shard(0),)
        assert module[1].weight.placements == (Replicate(),)
        assert isinstance(module[1].running_mean, DTensor)
        assert all(isinstance(each, nn.Parameter) for each in module.parameters())

    ranks(run)


def test_distribute_module_calls_the_input_and_output_functions():
    def run(mesh):
        module = sw.distribute_module(
            two_layers(),
            mesh,
            by_rows,
            lambda module, inputs, mesh: (DTensor.from_local(inputs[0], mesh),),
            lambda module, outputs, mesh: outputs.full_tensor(),
        )
        x = torch.randn(5, 4)
        result = module(x)
        assert type(result) is torch.Tensor
        assert torch.allclose(result, two_layers()(x), atol=1e-6)

    ranks(run)


def test_a_model_made_on_the_meta_device_is_split_made_empty_and_initialized():
    def run(mesh):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))

        def lay_out(name, module, mesh):
            if name == "0":
                weight = sw.distribute_tensor(module.weight, mesh, [Shard(0)])
                module.weight = nn.Parameter(weight)

        sw.distribute_module(model, mesh, lay_out)
        assert model[0].weight.is_meta and model[0].weight.placements == (Shard(0),)
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        for module in model:
            module.reset_parameters()
        assert isinstance(model[0].weight, nn.Parameter) and not model[0].weight.is_meta
        return torch.cat([each.full_tensor().flatten() for each in model.parameters()])

    one, *_ = ranks(run, 1)
    for made in ranks(run, 3):
        torch.testing.assert_close(made, one)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


def test_distribute_module_keeps_tied_parameters_tied():
    def run(mesh, split_at):
        def lay_out(name, module, mesh):
            if name == split_at:
                weight = sw.distribute_tensor(module.weight.detach(), mesh, [Shard(0)])
                module.weight = nn.Parameter(weight)

        model = sw.distribute_module(Tied(), mesh, lay_out)
        assert model.head.weight is model.embedding.weight
        model(torch.tensor([1, 2])).sum().backward()
        return len(list(model.parameters())), model.head.weight.placements

    assert ranks(lambda mesh: run(mesh, "embedding"))[0] == (1, (Shard(0),))
    assert ranks(lambda mesh: run(mesh, "head"))[0] == (1, (Shard(0),))
    assert ranks(lambda mesh: run(mesh, "neither"))[0] == (1, (Replicate(),))


def test_forward_and_gradients_are_those_of_one_process():
    def run(mesh):
        module, plain = distributed(mesh), two_layers()
        x = torch.randn(5, 4)
        module(x).square().sum().backward()
        plain(x).square().sum().backward()
        for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
            assert ours.grad.placements == (Shard(0),)
            assert torch.allclose(ours.grad.full_tensor(), theirs.grad, atol=1e-6)

    ranks(run)


def test_to_dtype_converts_parameters_in_place():
    def run(mesh):
        module = distributed(mesh)
        before = module[0].weight
        module.to(torch.float64)
        assert module[0].weight is before and before.dtype is torch.float64
        assert isinstance(module[0].weight, nn.Parameter) and before.placements == (Shard(0),)
        module.half().float().to("cpu")
        assert module[2].bias.dtype is torch.float32 and module[2].bias.requires_grad

    ranks(run)


def test_state_dict_holds_dtensors_and_loads_dtensors_of_any_layout_or_plain_tensors():
    def run(mesh):
        module = distributed(mesh)
        state = module.state_dict()
        assert all(isinstance(value, DTensor) for value in state.values())
        plain = {name: value * 2 for name, value in two_layers().state_dict().items()}
        module.load_state_dict(plain)
        assert torch.equal(module[0].weight.full_tensor(), plain["0.weight"])
        assert module[0].weight.placements == (Shard(0),)
        whole = {
            name: sw.distribute_tensor(value * 2, mesh, [Replicate()])
            for name, value in plain.items()
        }
        module.load_state_dict(whole)
        assert torch.equal(module[0].weight.full_tensor(), plain["0.weight"] * 2)
        module.load_state_dict(whole, assign=True)
        assert module[0].weight.placements == (Replicate(),)
        two_layers().load_state_dict({name: value.full_tensor() for name, value in whole.items()})

    ranks(run)


def test_a_state_dict_of_the_wrong_shape_is_refused():
    def run(mesh):
        module = distributed(mesh)
        state = {name: value[:1] for name, value in two_layers().state_dict().items()}
        with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
            module.load_state_dict(state)

    ranks(run)


def test_torch_load_takes_a_saved_state_dict_of_dtensors_as_it_is():
    def run(mesh):
        model = sw.distribute_module(nn.Linear(2, 3), mesh)
        model.weight = nn.Parameter(sw.distribute_tensor(full(3, 2), mesh, [Shard(0)]))
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "step": 3}, file)
        file.seek(0)
        loaded = torch.load(file)["model"]
        assert loaded["weight"].mesh_layout is model.weight.mesh_layout
        assert torch.equal(loaded["weight"].full_tensor(), full(3, 2))

    ranks(run)


def test_a_deepcopy_of_a_module_is_independent():
    def run(mesh):
        module = distributed(mesh)
        average = copy.deepcopy(module)
        with torch.no_grad():
            for ours, theirs in zip(average.parameters(), module.parameters(), strict=True):
                theirs.zero_()
                ours.lerp_(theirs, 0.5)
        assert torch.allclose(average[0].weight.full_tensor(), two_layers()[0].weight / 2)

    ranks(run)


def test_module_hooks_see_dtensors():
    seen = []

    def run(mesh):
        module = distributed(mesh)
        module[0].register_forward_hook(lambda m, i, o: seen.append(type(o)))
        module[2].register_full_backward_hook(
            lambda m, gi, go: seen.append((type(gi[0]), type(go[0])))
        )
        x = DTensor.from_local(torch.randn(5, 4), mesh).requires_grad_()
        module(x).sum().backward()
        assert x.grad is not None

    ranks(run)
    assert sorted(map(str, seen)) == sorted(map(str, [DTensor, (DTensor, DTensor)] * 2))


def test_parametrizations_of_a_split_weight_give_what_they_give_on_one_process():
    def run(mesh, is_split):
        torch.manual_seed(0)
        layer = nn.Linear(2, 5)
        if is_split:
            layer.weight = nn.Parameter(split(full(5, 2), mesh, Shard(0)))
        else:
            layer.weight = nn.Parameter(full(5, 2))
        with sw.fallback("replicate"):
            nn.utils.parametrizations.weight_norm(layer)
            nn.utils.parametrizations.spectral_norm(layer)
            return layer(torch.ones(3, 2)), layer.weight

    def both(mesh):
        for made, plain in zip(run(mesh, True), run(mesh, False), strict=True):
            torch.testing.assert_close(made.full_tensor(), plain)

    ranks(both)


def test_autocast_gives_the_dtypes_that_plain_tensors_get():
    def run(mesh):
        module, plain = distributed(mesh), two_layers()
        x = torch.randn(5, 4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ours, theirs = module(x), plain(x)
            assert ours.dtype is theirs.dtype is torch.bfloat16
            assert ours.softmax(-1).dtype is theirs.softmax(-1).dtype
            assert ours.sum().dtype is theirs.sum().dtype
            assert torch.allclose(ours.full_tensor(), theirs, atol=0.02)
            loss = ours.float().square().mean()
        loss.backward()
        assert module[0].weight.grad.dtype is torch.float32

    ranks(run)


def test_local_map_runs_a_local_function_with_the_right_gradients():
    def run(mesh):
        x = sw.distribute_tensor(torch.randn(5, 4), mesh, [Shard(0)]).requires_grad_()
        w = sw.distribute_tensor(torch.randn(4, 3), mesh, [Replicate()]).requires_grad_()

        @sw.local_map(out_placements=[Shard(0)], in_placements=([Shard(0)], [Replicate()]))
        def product(x, w):
            assert type(x) is torch.Tensor
            return torch.relu(x @ w)

        product(x, w).square().sum().backward()
        px, pw = (t.full_tensor().detach().requires_grad_() for t in (x, w))
        torch.relu(px @ pw).square().sum().backward()
        assert torch.allclose(x.grad.full_tensor(), px.grad, atol=1e-5)
        assert torch.allclose(w.grad.full_tensor(), pw.grad, atol=1e-5)

    ranks(run)


def test_local_map_refuses_or_moves_inputs_of_another_layout():
    def run(mesh):
        x = sw.distribute_tensor(torch.randn(4, 4), mesh, [Shard(1)])

        def total(x):
            return x.sum()

        strict = sw.local_map(total, [Partial()], ([Shard(0)],))
        with pytest.raises(sw.LayoutError, match=r"in_placements\[0\].*redistribute_inputs=True"):
            strict(x)
        moving = sw.local_map(total, [Partial()], ([Shard(0)],), redistribute_inputs=True)
        assert moving(x).item() == pytest.approx(x.full_tensor().sum().item(), abs=1e-5)
        with pytest.raises(sw.LayoutError, match="in_placements: expected 1 entries"):
            sw.local_map(total, [Partial()], ())(x)
        with pytest.raises(sw.LayoutError, match="out_placements: expected 2"):
            sw.local_map(lambda x: (x, x), ([Shard(1)],))(x)

    ranks(run)
