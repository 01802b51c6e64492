"""Attention: every layout gives what the plain call gives; keys may be split."""

import copy
import functools
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from support.rules import values
from torch import nn

from shardwise import (
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    fallback,
    init_device_mesh,
    simulate,
)
from shardwise.comm import listen
from shardwise.testing import Sample, check_rule

attention = F.scaled_dot_product_attention


check = functools.partial(check_rule, attention, mesh_shapes=((3,), (2, 2)), most=7)


def three(*, queries=5, keys=4, heads=2, key_heads=2, features=3, width=3):
    return [
        values(2, heads, queries, features),
        values(2, key_heads, keys, features),
        values(2, key_heads, keys, width),
    ]


MASK = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 0], [1, 0, 0, 1]]).bool()

CASES = {
    "plain": Sample(*three()),
    "scale": Sample(*three(width=2), scale=0.3),
    "matrices": Sample(values(5, 3), values(4, 3), values(4, 2), is_causal=True),
    "causal": Sample(*three(), is_causal=True),
    "causal, fewer queries": Sample(*three(queries=3, keys=5), is_causal=True),
    "causal, more queries": Sample(*three(queries=7, keys=2), is_causal=True),
    "mask": Sample(*three(), attn_mask=MASK),
    "mask of a batch": Sample(*three(), attn_mask=torch.stack([MASK, ~MASK])[:, None]),
    "mask of keys": Sample(*three(), attn_mask=MASK[:1]),
    "added mask": Sample(*three(), attn_mask=values(5, 4)),
    "added mask of heads": Sample(*three(), attn_mask=values(2, 1, 4)),
    "broadcasting": Sample(values(2, 3, 5, 3), values(2, 1, 4, 3), values(1, 4, 3)),
    "groups": Sample(*three(heads=6, key_heads=3), enable_gqa=True),
    "groups of one": Sample(*three(heads=4, key_heads=1), enable_gqa=True, is_causal=True),
    "uneven groups": Sample(*three(heads=4, key_heads=2), attn_mask=values(5, 4), enable_gqa=True),
}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_plain_call_on_every_layout(name):
    check([CASES[name]])


def placed(tensors, mesh, placements):
    """Leaves in these placements."""
    found = []
    for tensor, placement in zip(tensors, placements, strict=True):
        leaf = distribute_tensor(tensor.detach(), mesh, [placement])
        leaf.requires_grad = tensor.requires_grad
        found.append(leaf)
    return found


def communication_of(fn, placements, tensors):
    """What two ranks send, as (collective, elements), and the result's placement."""
    events = []

    def run():
        mesh = init_device_mesh("cpu", (2,))
        inputs = placed(tensors, mesh, placements)
        with listen(events.append), torch.no_grad():
            return fn(*inputs).placements[0]

    placement = simulate(run, 2)[0]
    return [(event.kind, math.prod(event.shape)) for event in events], placement


def test_split_keys_move_two_numbers_for_each_query():
    tensors = three(queries=3, keys=8)
    events, placement = communication_of(attention, [Replicate(), Shard(2), Shard(2)], tensors)
    assert {kind for kind, _ in events} == {"all_reduce"}
    assert {elements for _, elements in events} == {2 * 2 * 3}  # batch, heads, queries
    assert placement == Partial()


@pytest.mark.parametrize("name", ["plain", "causal", "mask", "added mask", "groups of one"])
def test_split_keys_give_the_values_and_gradients_of_the_plain_call(name):
    tensors = CASES[name].tensors()
    args, kwargs = CASES[name].filled(tensors)
    expected = attention(*args, **kwargs)
    wanted = torch.autograd.grad(expected.sin().sum(), tensors[:3])

    def run():
        mesh = init_device_mesh("cpu", (3,))
        inputs = placed(tensors[:3], mesh, [Replicate(), Shard(-2), Shard(-2)])
        args, kwargs = CASES[name].filled([*inputs, *(each.detach() for each in tensors[3:])])
        result = attention(*args, **kwargs)
        assert result.placements == (Partial(),)
        torch.testing.assert_close(result.full_tensor(), expected)
        grads = torch.autograd.grad(result.full_tensor().sin().sum(), inputs)
        torch.testing.assert_close([grad.full_tensor() for grad in grads], list(wanted))

    simulate(run, 3)


def test_queries_that_are_split_with_their_keys_stay_split():
    events, placement = communication_of(attention, [Shard(2)] * 3, three(queries=4))
    assert {kind for kind, _ in events} == {"all_gather"}
    assert placement == Shard(2)


@pytest.mark.parametrize("dim", [0, 1])
def test_batch_and_heads_need_no_communication(dim):
    causal = functools.partial(attention, is_causal=True)
    assert communication_of(causal, [Shard(dim)] * 3, three()) == ([], Shard(dim))
    grouped = functools.partial(attention, enable_gqa=True)
    tensors = three(heads=6, key_heads=2)
    assert communication_of(grouped, [Shard(dim)] * 3, tensors) == ([], Shard(dim))


def test_heads_of_queries_are_split_though_the_keys_of_their_group_are_not():
    grouped = functools.partial(attention, enable_gqa=True)
    tensors = three(heads=4, key_heads=1)
    placements = [Shard(1), Replicate(), Replicate()]
    assert communication_of(grouped, placements, tensors) == ([], Shard(1))


def test_dropout_is_the_same_on_every_layout():
    tensors = three(queries=6, keys=6)

    def run():
        mesh = init_device_mesh("cpu", (3,))
        found = []
        for placements in (
            [Replicate()] * 3,
            [Shard(0)] * 3,
            [Shard(1)] * 3,
            [Shard(2), Replicate(), Replicate()],
            [Replicate(), Shard(2), Shard(2)],
            [Replicate(), Replicate(), Partial()],
        ):
            torch.manual_seed(3)
            inputs = placed(tensors, mesh, placements)
            result = attention(*inputs, dropout_p=0.4, is_causal=True).full_tensor()
            grads = torch.autograd.grad(result.cos().sum(), inputs)
            found.append([result, *(grad.full_tensor() for grad in grads)])
        for others in found[1:]:
            for first, other in zip(found[0], others, strict=True):
                torch.testing.assert_close(first, other)
        return found[0][0]

    dropped = simulate(run, 3)[0]
    assert not torch.allclose(dropped, attention(*tensors, is_causal=True))


def test_dropout_keeps_the_mean():
    query, key = torch.zeros(1, 40, 8), torch.zeros(1, 50, 8)

    def run():
        mesh = init_device_mesh("cpu", (2,))
        inputs = placed([query, key, torch.ones(1, 50, 4)], mesh, [Shard(1), Replicate(), Shard(2)])
        return attention(*inputs, dropout_p=0.25).full_tensor().mean().item()

    assert simulate(run, 2)[0] == pytest.approx(1, abs=0.05)


def test_autocast_gives_split_keys_the_dtype_and_precision_of_the_kernel():
    tensors = [each.detach().float() for each in three(keys=6)]

    def run():
        mesh = init_device_mesh("cpu", (2,))
        inputs = placed(tensors, mesh, [Replicate(), Shard(2), Shard(2)])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected, result = attention(*tensors), attention(*inputs)
        assert result.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(result.full_tensor(), expected, rtol=2e-2, atol=2e-2)

    simulate(run, 2)


def test_heads_that_make_no_groups_are_torchs_own_error():
    def run():
        mesh = init_device_mesh("cpu", (2,))
        inputs = placed(three(heads=3, key_heads=2), mesh, [Shard(1)] * 3)
        with pytest.raises(RuntimeError, match="heads"):
            attention(*inputs, enable_gqa=True)

    simulate(run, 2)


# ---- modules made of it


def distributed_module(module, mesh, plan):
    """A copy whose parameters lie as the plan says, by how their names end; others are whole."""
    module = copy.deepcopy(module)
    for name, parameter in list(module.named_parameters()):
        how = next((how for ending, how in plan.items() if name.endswith(ending)), Replicate())
        owner, _, last = name.rpartition(".")
        piece = distribute_tensor(parameter.detach(), mesh, [how], src_data_rank=None)
        setattr(module.get_submodule(owner), last, nn.Parameter(piece))
    return module


PLANS = [
    {},
    {"in_proj_weight": Shard(0), "in_proj_bias": Shard(0), "out_proj.weight": Shard(1)},
    {"weight": Shard(0), "bias": Shard(0)},
]


def compare_modules(module, inputs, dims=(0, 1, 2), **kwargs):
    """A module with its distributed copies, on inputs that lie in several ways."""
    expected = module(*inputs, **kwargs)
    outputs = expected if isinstance(expected, tuple) else (expected,)
    outputs = [each for each in outputs if each is not None]
    wanted = torch.autograd.grad(sum(each.cos().sum() for each in outputs), module.parameters())

    def run():
        mesh = init_device_mesh("cpu", (2,))
        for plan, dim in itertools.product(PLANS, dims):
            copied = distributed_module(module, mesh, plan)
            places = {id(each): distribute_tensor(each, mesh, [Shard(dim)]) for each in inputs}
            with fallback("error"):
                result = copied(*(places[id(each)] for each in inputs), **kwargs)
            results = result if isinstance(result, tuple) else (result,)
            wholes = [each.full_tensor() for each in results if each is not None]
            torch.testing.assert_close(wholes, outputs)
            loss = sum(each.cos().sum() for each in wholes)
            grads = torch.autograd.grad(loss, copied.parameters())
            torch.testing.assert_close([grad.full_tensor() for grad in grads], list(wanted))

    simulate(run, 2)


PADDING = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0], [0, 0, 0, 1]]).bool()


@pytest.mark.parametrize(
    "options",
    [
        {"need_weights": True},
        {"need_weights": False},
        {"need_weights": True, "average_attn_weights": False, "key_padding_mask": PADDING},
        {"need_weights": False, "key_padding_mask": PADDING},
        {"need_weights": False, "attn_mask": torch.ones(4, 4).triu(1).bool(), "is_causal": True},
    ],
    ids=["weights", "no weights", "weights of heads", "padding", "causal"],
)
@pytest.mark.parametrize("training", [True, False])
def test_multihead_attention_to_itself(options, training):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(6, 3, batch_first=True, dtype=torch.float64).train(training)
    x = values(3, 4, 6).detach()
    compare_modules(module, (x, x, x), **options)


def test_multihead_attention_without_a_batch():
    torch.manual_seed(0)
    module = nn.MultiheadAttention(6, 3, dtype=torch.float64)
    x = values(4, 6).detach()
    for needs_weights in (True, False):
        compare_modules(module, (x, x, x), dims=(0, 1), need_weights=needs_weights)


def test_a_mask_for_each_batch_and_head():
    torch.manual_seed(0)
    module = nn.MultiheadAttention(6, 3, batch_first=True, dtype=torch.float64)
    x = values(2, 4, 6).detach()
    for mask in (values(6, 4, 4).detach(), values(6, 4, 4).detach() > 0.8):
        compare_modules(module, (x, x, x), attn_mask=mask, need_weights=False)


def test_autocast_gives_multihead_attention_the_dtypes_of_the_plain_one():
    torch.manual_seed(0)
    module = nn.MultiheadAttention(6, 3, batch_first=True)
    x, mask = torch.randn(2, 4, 6), torch.zeros(4, 4)

    def run():
        mesh = init_device_mesh("cpu", (2,))
        copied = distributed_module(module, mesh, PLANS[1])
        piece = distribute_tensor(x, mesh, [Shard(0)])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = module(x, x, x, attn_mask=mask)
            results = copied(piece, piece, piece, attn_mask=mask)
        for result, each in zip(results, expected, strict=True):
            assert result.dtype == each.dtype == torch.bfloat16
            torch.testing.assert_close(result.full_tensor(), each, rtol=3e-2, atol=3e-2)

    simulate(run, 2)


def test_batch_or_heads_of_a_multihead_attention_stay_split():
    tensors = [torch.ones(4, 6, 8), torch.ones(4, 6, 5)]
    module = nn.MultiheadAttention(8, 2, batch_first=True, kdim=5, vdim=5, bias=False)
    plan = {"q_proj_weight": Shard(0), "k_proj_weight": Shard(0), "v_proj_weight": Shard(0),
            "out_proj.weight": Shard(1)}  # fmt: skip

    def attend(plan, query, key):
        copied = distributed_module(module, query.device_mesh, plan)
        return copied(query, key, key, need_weights=False)[0]

    batch = functools.partial(attend, {})
    assert communication_of(batch, [Shard(0), Shard(0)], tensors) == ([], Shard(0))
    heads = functools.partial(attend, plan)
    assert communication_of(heads, [Replicate(), Replicate()], tensors) == ([], Partial())


def test_multihead_attention_to_others():
    torch.manual_seed(0)
    module = nn.MultiheadAttention(6, 2, kdim=5, vdim=4, add_bias_kv=True, dtype=torch.float64)
    mask = values(3, 4).detach()
    compare_modules(
        module,
        [values(*shape).detach() for shape in ((3, 2, 6), (4, 2, 5), (4, 2, 4))],
        attn_mask=mask,
    )


@pytest.mark.parametrize("training", [True, False])
def test_an_encoder_of_transformer_layers(training):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(6, 3, 8, 0.0, batch_first=True, dtype=torch.float64)
    module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    compare_modules(module, (values(3, 4, 6).detach(),), src_key_padding_mask=PADDING)
    with torch.no_grad():  # where plain tensors take torch's fast path
        x = values(3, 4, 6).detach()
        expected = module(x)

    def run():
        mesh = init_device_mesh("cpu", (2,))
        copied = distributed_module(module, mesh, PLANS[1])
        with torch.no_grad(), fallback("error"):
            result = copied(distribute_tensor(x, mesh, [Shard(0)]))
        torch.testing.assert_close(result.full_tensor(), expected)

    simulate(run, 2)


def test_dropout_in_a_multihead_attention_is_the_same_on_every_layout():
    torch.manual_seed(0)
    module = nn.MultiheadAttention(6, 3, 0.3, batch_first=True, dtype=torch.float64)
    x = values(3, 4, 6).detach()

    def run():
        mesh = init_device_mesh("cpu", (2,))
        for needs_weights in (True, False):
            found = []
            for plan, dim in itertools.product(PLANS, (0, 1, 2)):
                torch.manual_seed(5)
                copied = distributed_module(module, mesh, plan)
                places = distribute_tensor(x, mesh, [Shard(dim)])
                result, _ = copied(places, places, places, need_weights=needs_weights)
                found.append(result.full_tensor())
            for other in found[1:]:
                torch.testing.assert_close(found[0], other)

    simulate(run, 2)


def test_empty_shards_of_operands_that_are_broadcast():
    query, memory = values(4, 3, 8), values(4, 4, 6, 8)
    sample = Sample(query, memory, memory.detach().clone().requires_grad_())
    check_rule(F.scaled_dot_product_attention, [sample], mesh_shapes=((3,),), allow_missing=True)
