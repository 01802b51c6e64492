"""The ready plans: values and gradients of one process, and the collectives a block needs."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from support.rules import heard
from torch import nn

import shardwise as sw
from shardwise import DTensor, Replicate, Shard
from shardwise.core.mesh import init_device_mesh
from shardwise.examples.llama import Config, Llama
from shardwise.parallel import Activations, PlanError, parallelize_module, plans, shard_module

MESHES = [((2,), ("tp",)), ((2, 2), ("dp", "tp"))]


def assert_same(ours, theirs):
    whole = ours.full_tensor() if isinstance(ours, DTensor) else ours
    torch.testing.assert_close(whole, theirs, rtol=1e-9, atol=1e-11)


def assert_same_gradients(module, plain):
    for (name, ours), (_, theirs) in zip(
        module.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert ours.grad is not None, name
        assert_same(ours.grad, theirs.grad)


def on(shape, names, run):
    def start():
        with sw.fallback("error"):
            return run(init_device_mesh("cpu", shape, names))

    count = 1
    for size in shape:
        count *= size
    return sw.simulate(start, count)


def encoder(**options):
    layer = nn.TransformerEncoderLayer(12, 3, 14, dropout=0.0, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def decoder(**options):
    layer = nn.TransformerDecoderLayer(12, 3, 14, dropout=0.0, **options)
    return nn.TransformerDecoder(layer, 1)


@pytest.mark.parametrize(("shape", "names"), MESHES)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("build", [encoder, decoder])
def test_torch_s_transformers_with_heads_that_do_not_divide(
    build, batch_first, sequence_parallel, shape, names
):
    torch.manual_seed(0)
    plain = build(batch_first=batch_first, norm_first=sequence_parallel).double()
    inputs = [torch.randn(5, 4, 12, dtype=torch.float64) for _ in range(2)]
    inputs = inputs[: 1 if build is encoder else 2]
    expected = plain(*inputs)
    expected.square().sum().backward()

    def run(mesh):
        torch.manual_seed(0)
        module = build(batch_first=batch_first, norm_first=sequence_parallel).double()
        plan = plans.transformer(
            module,
            data_axis="dp" if "dp" in names else None,
            sequence_parallel=sequence_parallel,
        )
        shard_module(module, mesh, plan)
        output = module(*inputs)
        assert_same(output, expected)
        output.square().sum().backward()
        assert_same_gradients(module, plain)

    on(shape, names, run)


def test_an_encoder_layer_needs_one_all_reduce_forward_and_one_backward_for_each_block():
    def run(mesh):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(12, 3, 14, dropout=0.0)
        shard_module(layer, mesh, plans.transformer(layer))
        x = sw.distribute_tensor(torch.randn(5, 4, 12), mesh).requires_grad_()
        events, _ = heard(mesh, lambda: layer(x).sum().backward())
        assert Counter((each.kind, each.shape) for each in events) == {
            ("all_reduce", (5, 4, 12)): 4
        }

    on((2,), ("tp",), run)


def test_attention_of_a_sequence_to_itself_gathers_it_once():
    def run(mesh):
        layer = nn.TransformerEncoderLayer(64, 4, 64, dropout=0.0, batch_first=True)
        shard_module(layer, mesh, plans.transformer(layer, sequence_parallel=True))
        # large enough that a reduce-scatter pays
        x = sw.distribute_tensor(torch.randn(8, 128, 64), mesh, [Shard(1)])
        events, _ = heard(mesh, lambda: layer(x))
        assert [each.kind for each in events] == ["all_gather", "reduce_scatter"] * 2

    on((2,), ("tp",), run)


CONFIG = Config(vocabulary=23, width=24, layers=2, heads=6, kv_heads=3, hidden=14, longest=8)
UNITS = {"head_dim": 4, "queries_per_key": 2}


def llama(tied=False):
    torch.manual_seed(0)
    return Llama(Config(**{**vars(CONFIG), "tied": tied})).double()


def text():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(23, (3, 8), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize(("shape", "names"), MESHES)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("units", [{}, UNITS], ids=["even", "units"])
def test_llama_by_shard_module(units, sequence_parallel, shape, names):
    plain = llama()
    expected = plain.loss(*text())
    expected.backward()

    def run(mesh):
        model = llama()
        plan = plans.llama(
            data_axis="dp" if "dp" in names else None, sequence_parallel=sequence_parallel, **units
        )
        shard_module(model, mesh, plan)
        loss = model.loss(*text())
        assert_same(loss, expected)
        loss.backward()
        assert_same_gradients(model, plain)

    on(shape, names, run)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_llama_by_styles_on_local_heads_that_do_not_divide(sequence_parallel, tied):
    plain = llama(tied)
    expected = plain.loss(*text())
    expected.backward()

    def run(mesh):
        model = llama(tied)
        plan = plans.llama_styles(sequence_parallel=sequence_parallel, **UNITS)
        parallelize_module(model, mesh, plan)
        logits = model(text()[0])
        assert logits.placements == (Shard(2),)
        loss = F.cross_entropy(logits.flatten(0, 1), text()[1].flatten())
        assert_same(loss, expected)
        loss.backward()
        assert_same_gradients(model, plain)

    on((2,), ("tp",), run)


def test_whole_heads_need_no_more_than_one_all_reduce_a_block_also_if_they_do_not_divide():
    def run(mesh):
        model = llama()
        shard_module(model, mesh, plans.llama(**UNITS))
        tokens, targets = text()
        events, _ = heard(mesh, lambda: model.loss(tokens, targets).backward())
        activations = [each for each in events if each.shape == (3, 7, 24)]
        assert {each.kind for each in events} == {"all_reduce"}
        # the embedding, and four blocks forward; four and the head backward
        assert len(activations) == 5 + 5
        assert len(events) == 10 + 2  # the loss: a maximum and a sum for each row

    on((2,), ("tp",), run)


def test_a_plan_is_a_dict_that_can_be_changed():
    plan = plans.llama("tensor", data_axis="data")
    assert plan["layers.*.attention.w[kv].*"] == {"tensor": Shard(0)}
    assert plan[""] == Activations(inputs={"tokens": {"data": Shard(0)}})
    changed = plan | {"output": Activations(outputs={"tensor": Replicate()})}
    assert len(changed) == len(plan) + 1


def test_a_model_without_torch_s_layers_is_refused():
    with pytest.raises(PlanError, match=r"expected an nn\.TransformerEncoderLayer.*got Linear"):
        plans.transformer(nn.Linear(2, 2))
