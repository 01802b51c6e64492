"""Models of Hugging Face, unchanged, train and generate on shards as they do in one process."""

import importlib.util
import math
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.overrides import TorchFunctionMode

import shardwise as sw
from shardwise import DTensor, Shard
from shardwise.parallel import Activations, plans, shard_module

pytestmark = pytest.mark.needs("transformers")

if importlib.util.find_spec("transformers"):
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        MistralConfig,
        MistralForCausalLM,
        StaticCache,
    )
    from transformers.utils import logging

    logging.set_verbosity_error()

VOCABULARY, LAYERS, LENGTH = 48, 2, 10

BATCH = Activations(inputs={"input_ids": {"dp": Shard(0)}, "labels": {"dp": Shard(0)}})

LLAMA = {
    "model.embed_tokens.weight": {"tp": Shard(0)},
    "model.layers.*.self_attn.[qkv]_proj.weight": {"tp": Shard(0)},
    "model.layers.*.self_attn.o_proj.weight": {"tp": Shard(1)},
    "model.layers.*.mlp.gate_proj.weight": {"tp": Shard(0)},
    "model.layers.*.mlp.up_proj.weight": {"tp": Shard(0)},
    "model.layers.*.mlp.down_proj.weight": {"tp": Shard(1)},
    "lm_head.weight": {"tp": Shard(0)},
    "": BATCH,
}

FUSED = {"tp": Shard(-1, pieces=3)}

GPT2 = {
    "transformer.wte.weight": {"tp": Shard(0)},
    "transformer.h.*.attn.c_attn.*": FUSED,
    "transformer.h.*.attn.c_proj.weight": {"tp": Shard(0)},
    "transformer.h.*.mlp.c_fc.*": {"tp": Shard(-1)},
    "transformer.h.*.mlp.c_proj.weight": {"tp": Shard(0)},
    "lm_head.weight": {"tp": Shard(0)},
    "": BATCH,
}


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def llama(**options):
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **options}))


def gpt2(**options):
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=LAYERS,
            n_head=4,
            n_positions=64,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            **options,
        )
    )


MODELS = {"llama": (llama, LLAMA), "gpt2": (gpt2, GPT2)}

models = pytest.mark.parametrize("name", MODELS)
meshes = pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=["tp2", "dp2xtp2"])
heads = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
attentions = pytest.mark.parametrize("attention", ["sdpa", "eager"])


def made(name, shape=None, dtype=torch.float32, spread=0.3, **options):
    """A model of random weights, on a mesh of this shape or as a plain one.

    With a large spread of weights all they do is seen; with a small one rounding does not grow.
    """
    torch.manual_seed(0)
    make, plan = MODELS[name]
    model = make(initializer_range=spread, **options).to(dtype)
    if shape is None:
        return model
    mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])
    return shard_module(model, mesh, plan, strict=False)  # the plan names dp on any mesh


def on_ranks(shape, run):
    """What `run` returns on the first of simulated ranks, where every operator must have a rule."""

    def with_rules():
        with sw.fallback("error"):
            return run()

    return sw.simulate(with_rules, math.prod(shape))[0]


def data():
    """Tokens, labels of which some do not count, and a mask that hides the same positions."""
    tokens = torch.randint(1, VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    mask[2, :1] = 0
    return tokens, tokens.masked_fill(mask == 0, -100), mask


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


class Doubles(TorchFunctionMode):
    """Where the models compute in float32 whatever their dtype (norms, softmax, the loss), they
    compute in float64: or nothing could be told that is smaller than float32's rounding."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def doubled(value):
            return torch.float64 if value is torch.float32 else value

        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(
            *map(doubled, args), **{key: doubled(each) for key, each in (kwargs or {}).items()}
        )


def train(model, **inputs):
    """Losses, all gradients and the final parameters of three steps, by name."""
    tokens, labels, _ = data()
    double = next(model.parameters()).dtype is torch.float64
    # A large eps: else the first steps are of the gradient's sign, which rounding decides.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    found = {}
    model.train()
    for step in range(3):
        optimizer.zero_grad()
        with Doubles() if double else nullcontext():
            loss = model(input_ids=tokens, labels=labels, **inputs).loss
            loss.backward()
        found[f"loss {step}"] = whole(loss)
        for name, parameter in model.named_parameters():
            found[f"gradient {step} of {name}"] = whole(parameter.grad)
        optimizer.step()
    return found | {name: whole(parameter) for name, parameter in model.named_parameters()}


def compare(ours, plain, tolerance):
    assert ours.keys() == plain.keys()
    for name, theirs in plain.items():
        scale = max(theirs.abs().max().item(), 1e-3)
        error = (ours[name] - theirs).abs().max().item()
        assert ours[name].dtype == theirs.dtype and error <= tolerance * scale, (name, error, scale)


def generate(model, **options):
    tokens, _, mask = data()
    model.eval()
    made = model.generate(
        tokens[:, :5],
        attention_mask=options.pop("attention_mask", torch.ones_like(mask[:, :5])),
        max_new_tokens=8,
        min_new_tokens=8,
        use_cache=True,
        pad_token_id=0,
        **{"do_sample": False, **options},
    )
    return whole(made)


# ---- training


@pytest.mark.sampled(every=3)
@attentions
@heads
@meshes
@models
def test_training_is_that_of_one_process(name, shape, tied, attention):
    options = {
        "dtype": torch.float64,
        "tie_word_embeddings": tied,
        "attn_implementation": attention,
    }
    plain = train(made(name, **options))
    compare(on_ranks(shape, lambda: train(made(name, shape, **options))), plain, 1e-10)


@meshes
@models
def test_training_in_float32_is_that_of_one_process(name, shape):
    plain = train(made(name, spread=0.05))
    compare(on_ranks(shape, lambda: train(made(name, shape, spread=0.05))), plain, 1e-5)


@models
def test_heads_that_do_not_divide_evenly_train_too(name):
    plain = train(made(name, dtype=torch.float64))
    ours = on_ranks((3,), lambda: train(made(name, (3,), dtype=torch.float64)))
    compare(ours, plain, 1e-10)


@attentions
@models
def test_training_with_padding_is_that_of_one_process(name, attention):
    options = {"dtype": torch.float64, "attn_implementation": attention}
    mask = data()[2]
    plain = train(made(name, **options), attention_mask=mask)
    ours = on_ranks((2, 2), lambda: train(made(name, (2, 2), **options), attention_mask=mask))
    compare(ours, plain, 1e-10)


@models
def test_gradient_checkpointing_gives_the_same(name):
    def run(shape):
        model = made(name, shape, spread=0.05)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return train(model)

    plain = train(made(name, spread=0.05))
    compare(on_ranks((2, 2), lambda: run((2, 2))), plain, 1e-5)


@models
def test_dropout_is_that_of_one_rank(name):
    def run(shape):
        model = made(name, shape, dtype=torch.float64)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.2
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.2
        torch.manual_seed(5)
        return train(model)

    one = on_ranks((1,), lambda: run((1,)))
    compare(on_ranks((2, 2), lambda: run((2, 2))), one, 1e-10)
    without = train(made(name, dtype=torch.float64))
    assert (one["loss 0"] - without["loss 0"]).abs() > 1e-3


READY = {
    "llama": lambda **options: plans.llama(names=plans.HUGGING_FACE, **options),
    "gpt2": plans.gpt2,
}


@pytest.mark.parametrize("sequence_parallel", [False, True])
@models
def test_the_ready_plans_train_the_same(name, sequence_parallel):
    def run():
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        plan = READY[name](data_axis="dp", sequence_parallel=sequence_parallel)
        return train(shard_module(made(name, dtype=torch.float64), mesh, plan))

    compare(on_ranks((2, 2), run), train(made(name, dtype=torch.float64)), 1e-10)


# ---- generation


@pytest.mark.sampled(every=3)
@attentions
@heads
@meshes
@models
def test_generation_with_a_cache_is_that_of_one_process(name, shape, tied, attention):
    options = {"tie_word_embeddings": tied, "attn_implementation": attention}
    plain = generate(made(name, **options))
    assert plain.shape == (4, 13) and len(plain[:, 5:].unique()) > 8  # not one word over and over
    assert torch.equal(on_ranks(shape, lambda: generate(made(name, shape, **options))), plain)


@meshes
@models
def test_generation_from_prompts_of_several_lengths_is_that_of_one_process(name, shape):
    mask = data()[2][:, :5]
    plain = generate(made(name), attention_mask=mask)
    assert not torch.equal(plain, generate(made(name)))
    ours = on_ranks(shape, lambda: generate(made(name, shape), attention_mask=mask))
    assert torch.equal(ours, plain)


@meshes
def test_beam_search_is_that_of_one_process(shape):
    plain = generate(made("llama"), num_beams=2)
    assert torch.equal(on_ranks(shape, lambda: generate(made("llama", shape), num_beams=2)), plain)


def test_sampling_is_that_of_one_rank():
    def run(shape):
        model = made("llama", shape)
        torch.manual_seed(5)
        return generate(model, do_sample=True, top_k=20, top_p=0.9)

    one = on_ranks((1,), lambda: run((1,)))
    assert not torch.equal(one, generate(made("llama")))
    assert torch.equal(on_ranks((2, 2), lambda: run((2, 2))), one)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
@meshes
@models
def test_generation_with_a_static_cache_is_that_of_one_process(name, shape, options):
    options = {"cache_implementation": "static", **options}
    plain = generate(made(name), **options)
    assert torch.equal(on_ranks(shape, lambda: generate(made(name, shape), **options)), plain)


@pytest.mark.parametrize("kv_heads", [1, 2, 3])
def test_a_static_cache_is_split_by_heads_and_costs_what_the_default_one_costs(kv_heads):
    sizes = {"num_attention_heads": 6, "hidden_size": 48, "num_key_value_heads": kv_heads}

    def model(shape=None):
        return made("llama", shape, **sizes)

    def static(model):
        return StaticCache(config=model.config, max_cache_len=16)

    plain = generate(model(), past_key_values=static(model()))

    def run():
        ours = model((2,))
        cache = static(ours)
        assert torch.equal(generate(ours, past_key_values=cache), plain)
        keys = cache.layers[0].keys
        if kv_heads == 2:  # one head, and three, do not divide evenly, and are whole
            assert isinstance(keys, DTensor) and keys.placements == (Shard(1),)
            assert keys.shape == (4, kv_heads, 16, 8)
        bytes_moved = [
            sum(size for _, size in collectives(lambda how=how: generate(ours, **how)))
            for how in ({}, {"cache_implementation": "static"})
        ]
        assert bytes_moved[1] <= bytes_moved[0]

    sw.simulate(run, 2)


def test_a_static_cache_of_a_sliding_window_is_right_or_refused():
    def mistral(shape=None):
        torch.manual_seed(0)
        config = MistralConfig(**SIZES, sliding_window=4, initializer_range=0.3)
        model = MistralForCausalLM(config)
        if shape is not None:
            mesh = sw.init_device_mesh("cpu", shape, ("tp",))
            shard_module(model, mesh, LLAMA, strict=False)
        return model

    plain = generate(mistral())
    assert torch.equal(generate(mistral(), cache_implementation="static"), plain)

    def run():
        assert torch.equal(generate(mistral((2,))), plain)  # the default cache has the window too
        with pytest.raises(sw.DispatchError, match="cannot write a DTensor's values into a plain"):
            generate(mistral((2,)), cache_implementation="static")

    sw.simulate(run, 2)


# ---- files


def test_the_state_dict_of_a_sharded_model_is_saved_as_one_process_saves_it(tmp_path):
    plain = made("llama", tie_word_embeddings=True)
    tokens = data()[0]
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)

    def run():
        model = made("llama", (2,), tie_word_embeddings=True)
        state = get_model_state_dict(model, options=full)
        main = model.lm_head.weight.device_mesh.get_rank() == 0
        if main:
            model.save_pretrained(tmp_path, state_dict=state)

    sw.simulate(run, 2)
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, plain(tokens).logits)
    assert again.lm_head.weight is again.model.embed_tokens.weight


# ---- communication


def collectives(run):
    """Kind and number of elements of what rank 0 takes part in."""
    found = []

    def hear(event):
        if event.rank == 0:
            found.append((event.kind, math.prod(event.shape)))

    with sw.listen(hear):
        run()
    return found


@attentions
@heads
@models
def test_a_step_takes_one_all_reduce_each_way_per_block(name, tied, attention):
    tokens, labels, mask = data()

    def run():
        model = made(name, (2,), tie_word_embeddings=tied, attn_implementation=attention)
        losses = []

        def forward():
            losses.append(model(input_ids=tokens, labels=labels, attention_mask=mask).loss)

        return collectives(forward), collectives(losses[0].backward)

    forward, backward = on_ranks((2,), run)
    rows, blocks = 4 * LENGTH, 2 * LAYERS  # an attention and an MLP per layer
    # One for the embedding and one for each block; of the logits only what the loss needs of each
    # row: the largest, and two sums.
    assert forward == [("all_reduce", rows * 32)] * (1 + blocks) + [
        ("all_reduce", rows),
        ("all_reduce", 2 * rows),
    ]
    # One for the head and one for each block.
    assert backward == [("all_reduce", rows * 32)] * (1 + blocks)


@models
def test_a_token_takes_one_all_reduce_per_block(name):
    def run():
        model = made(name, (2,))
        return collectives(lambda: generate(model))

    found = on_ranks((2,), run)
    blocks = 1 + 2 * LAYERS
    # The choice of a token takes two more: the largest score, and where it is.
    choice = [("all_reduce", 4)] * 2
    prompt, token = ([("all_reduce", 4 * length * 32)] * blocks for length in (5, 1))
    assert found == prompt + choice + (token + choice) * 7


def test_heads_that_stay_whole_on_their_ranks_take_no_more_on_three():
    plan = LLAMA | {
        "model.layers.*.self_attn.[qkv]_proj.weight": {"tp": Shard(0, unit=8)},
        "model.layers.*.self_attn.o_proj.weight": {"tp": Shard(1, unit=8)},
    }
    tokens, labels, _ = data()

    def run():
        mesh = sw.init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        model = shard_module(made("llama"), mesh, plan, strict=False)

        def step():
            model(input_ids=tokens, labels=labels).loss.backward()

        return collectives(step)

    assert len(on_ranks((3,), run)) == 2 * (1 + 2 * LAYERS) + 2


# ---- the page


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "hugging-face.md").read_text("utf-8")


def test_the_page_shows_these_plans_and_its_program_runs(capsys):
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, names)
    assert names["LLAMA"] == LLAMA and names["GPT2"] == GPT2
    (printed,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert capsys.readouterr().out == printed
