"""Ready plans: layouts of well-known models.

`llama`, `gpt2` and `transformer` are plans for `shard_module`, `llama_styles` is one for
`parallelize_module`. They are dicts: print one, or change it with `|`.

All split a block as Megatron does: the first projections by their outputs (heads, hidden features),
the last one by its inputs. A block needs one all-reduce at its end, and in the backward one at its
start. With sequence parallelism it starts with an all-gather and ends with a reduce-scatter
instead, and the tensors between blocks are split along the sequence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from shardwise.core.placement import Replicate, Shard
from shardwise.parallel.activations import Activations
from shardwise.parallel.plan_spec import PlanError, all_modules, join_names
from shardwise.parallel.prepare import PrepareModuleInput
from shardwise.parallel.projections import ColwiseParallel, RowwiseParallel, SequenceParallel
from shardwise.torch_internals import own_parameters

ModelPlan = dict[str, Any]


class Names(NamedTuple):
    """The names that a Llama-style model has for its parts."""

    embedding: str
    layer: str
    attention: str
    queries: str
    keys: str
    mixed: str
    feed_forward: str
    up: str
    down: str
    norms: tuple[str, ...]
    last_norm: str
    head: str
    tokens: str


META = Names(
    embedding="tok_embeddings",
    layer="layers.*",
    attention="attention",
    queries="wq",
    keys="w[kv]",
    mixed="wo",
    feed_forward="feed_forward",
    up="w[13]",
    down="w2",
    norms=("attention_norm", "ffn_norm"),
    last_norm="norm",
    head="output",
    tokens="tokens",
)
"""The names in Meta's code, and in `examples/llama.py`."""

HUGGING_FACE = Names(
    embedding="model.embed_tokens",
    layer="model.layers.*",
    attention="self_attn",
    queries="q_proj",
    keys="[kv]_proj",
    mixed="o_proj",
    feed_forward="mlp",
    up="[gu]*_proj",
    down="down_proj",
    norms=("input_layernorm", "post_attention_layernorm"),
    last_norm="model.norm",
    head="lm_head",
    tokens="input_ids",
)
"""The names in `transformers`' LlamaForCausalLM and similar models (Mistral, Qwen2, ...)."""


def llama(
    axis: str = "tp",
    *,
    data_axis: str | None = None,
    sequence_parallel: bool = False,
    head_dim: int = 1,
    queries_per_key: int = 1,
    names: Names = META,
) -> ModelPlan:
    """Return the plan of a Llama-style decoder, for `shard_module`.

    Arguments:
        axis: the axis of tensor parallelism.
        data_axis: the axis that splits the batch, if there is one.
        sequence_parallel: whether to split the tensors between blocks along the sequence.
        head_dim: the size of a head; needed only if the ranks do not divide the heads evenly, so
            that no head is split.
        queries_per_key: the number of query heads that share a head of keys and values; needed if
            `head_dim` is.
        names: the names of the model's parts: `META` or `HUGGING_FACE`.

    Example:
        >>> shard_module(model, mesh, plans.llama("tp", data_axis="dp"))
    """
    layer, attention = names.layer, f"{names.layer}.{names.attention}"
    feed_forward = f"{layer}.{names.feed_forward}"
    queries = head_dim * queries_per_key
    plan: ModelPlan = {
        f"{names.embedding}.weight": {axis: Shard(0)},
        f"{names.head}.weight": {axis: Shard(0)},
        f"{attention}.{names.queries}.*": {axis: _in_units(0, queries)},
        f"{attention}.{names.keys}.*": {axis: _in_units(0, head_dim)},
        f"{attention}.{names.mixed}.weight": {axis: _in_units(1, queries)},
        f"{feed_forward}.{names.up}.*": {axis: Shard(0)},
        f"{feed_forward}.{names.down}.weight": {axis: Shard(1)},
    }
    blocks = attention, feed_forward
    plan |= _between_blocks(axis, sequence_parallel, names.embedding, blocks, names.head)
    if data_axis is not None:
        plan[""] = Activations(inputs={names.tokens: {data_axis: Shard(0)}})
    return plan


def gpt2(
    axis: str = "tp",
    *,
    data_axis: str | None = None,
    sequence_parallel: bool = False,
    head_dim: int = 1,
) -> ModelPlan:
    """Return the plan of `transformers`' GPT2LMHeadModel, for `shard_module`.

    Its projection to queries, keys and values is fused: each third of it is split by itself.

    Arguments:
        axis: the axis of tensor parallelism.
        data_axis: the axis that splits the batch, if there is one.
        sequence_parallel: whether to split the tensors between blocks along the sequence.
        head_dim: the size of a head; needed only if the ranks do not divide the heads evenly, so
            that no head is split.
    """
    block = "transformer.h.*"
    plan: ModelPlan = {
        "transformer.wte.weight": {axis: Shard(0)},
        f"{block}.attn.c_attn.weight": {axis: Shard(1, pieces=3, unit=head_dim)},
        f"{block}.attn.c_attn.bias": {axis: Shard(0, pieces=3, unit=head_dim)},
        f"{block}.attn.c_proj.weight": {axis: _in_units(0, head_dim)},
        f"{block}.mlp.c_fc.weight": {axis: Shard(1)},
        f"{block}.mlp.c_fc.bias": {axis: Shard(0)},
        f"{block}.mlp.c_proj.weight": {axis: Shard(0)},
    }
    blocks = f"{block}.attn", f"{block}.mlp"
    plan |= _between_blocks(axis, sequence_parallel, "transformer.wte", blocks, "lm_head")
    if data_axis is not None:
        plan[""] = Activations(inputs={"input_ids": {data_axis: Shard(0)}})
    return plan


def transformer(
    module: nn.Module,
    axis: str = "tp",
    *,
    data_axis: str | None = None,
    sequence_parallel: bool = False,
) -> ModelPlan:
    """Return the plan of torch's nn.TransformerEncoderLayer and -DecoderLayer, for `shard_module`.

    Arguments:
        module: one such layer, or a module that has some: nn.TransformerEncoder, your model.
        axis: the axis of tensor parallelism.
        data_axis: the axis that splits the batch, if there is one. The plan splits the inputs of
            `module` if it is one of torch's; for your own model, add its inputs to the plan.
        sequence_parallel: whether to split the tensors between blocks along the sequence.
    """
    plan: ModelPlan = {}
    kinds = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    for path, layer in all_modules(module):
        if isinstance(layer, kinds):
            plan |= {
                join_names(path, name): each
                for name, each in _torch_layer(layer, axis, sequence_parallel).items()
            }
    if not plan:
        raise PlanError(
            "module: expected an nn.TransformerEncoderLayer or nn.TransformerDecoderLayer, or "
            f"something that has one; got {type(module).__name__}"
        )
    of_torch = (nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder, *kinds)
    if isinstance(module, of_torch):
        plan[""] = _torch_inputs(module, axis, data_axis, sequence_parallel)
    return plan


def llama_styles(
    *, sequence_parallel: bool = False, head_dim: int = 1, queries_per_key: int = 1
) -> ModelPlan:
    """Return the plan of a Llama-style decoder, for `parallelize_module`.

    The modules work on local tensors, so their code must take the number of heads from the tensors
    (`unflatten(-1, (-1, head_dim))`). Names are Meta's, as in `examples/llama.py`. The logits are a
    DTensor that is split along the vocabulary: pass it to `cross_entropy`.

    Arguments:
        sequence_parallel: whether to split the tensors between blocks along the sequence; they are
            DTensors then.
        head_dim: the size of a head; needed only if the ranks do not divide the heads evenly.
        queries_per_key: the number of query heads that share a head of keys and values.
    """
    names = META
    layer, attention = names.layer, f"{names.layer}.{names.attention}"
    feed_forward = f"{layer}.{names.feed_forward}"
    between = Shard(1) if sequence_parallel else Replicate()
    is_local = not sequence_parallel
    queries = head_dim * queries_per_key
    plan: ModelPlan = {
        names.embedding: RowwiseParallel(output_layouts=between, use_local_output=is_local),
        f"{attention}.{names.queries}": ColwiseParallel(unit=queries),
        f"{attention}.{names.keys}": ColwiseParallel(unit=head_dim),
        f"{attention}.{names.mixed}": RowwiseParallel(
            output_layouts=between, use_local_output=is_local, unit=queries
        ),
        f"{feed_forward}.{names.up}": ColwiseParallel(),
        f"{feed_forward}.{names.down}": RowwiseParallel(
            output_layouts=between, use_local_output=is_local
        ),
        names.head: ColwiseParallel(use_local_output=False),
    }
    if sequence_parallel:
        for each in (attention, feed_forward):
            plan[each] = PrepareModuleInput(
                input_kwarg_layouts={"x": Shard(1)},
                desired_input_kwarg_layouts={"x": Replicate()},
            )
        for norm in (*(f"{layer}.{each}" for each in names.norms), names.last_norm):
            plan[norm] = SequenceParallel()
    return plan


def _in_units(dim: int, unit: int) -> Shard:
    """Return a `Shard` that never splits a unit."""
    return Shard(dim) if unit == 1 else Shard(dim, unit=unit)


def _between_blocks(
    axis: str, sequence_parallel: bool, embedding: str, blocks: tuple[str, ...], head: str
) -> ModelPlan:
    """Return the Activations between blocks: replicated, or split along the sequence."""
    whole, split = {axis: Replicate()}, {axis: Shard(1)}
    if not sequence_parallel:
        return dict.fromkeys((embedding, *blocks), Activations(outputs=whole))
    return {
        embedding: Activations(outputs=split),
        **dict.fromkeys(blocks, Activations(inputs=whole, outputs=split)),
        head: Activations(inputs=whole),
    }


def _torch_layer(layer: nn.Module, axis: str, sequence_parallel: bool) -> ModelPlan:
    """Return the plan of one encoder or decoder layer of torch."""
    plan: ModelPlan = {
        "linear1.*": {axis: Shard(0)},
        "linear2.weight": {axis: Shard(1)},
    }
    sequence = 0
    for name, attention in layer.named_children():
        if not isinstance(attention, nn.MultiheadAttention):
            continue
        sequence = 1 if attention.batch_first else 0
        head = attention.head_dim
        for key in own_parameters(attention):
            if getattr(attention, key) is not None:
                pieces = 3 if key.startswith("in_proj") else None
                plan[f"{name}.{key}"] = {axis: Shard(0, pieces=pieces, unit=head)}
        plan[f"{name}.out_proj.weight"] = {axis: Shard(1, unit=head)}
        outputs = ({axis: Shard(sequence) if sequence_parallel else Replicate()}, None)
        inputs = None
        if sequence_parallel:
            inputs = {each: {axis: Replicate()} for each in ("query", "key", "value")}
        plan[name] = Activations(inputs, outputs)
    if sequence_parallel:
        plan["linear1"] = Activations(inputs={axis: Replicate()})
    between = Shard(sequence) if sequence_parallel else Replicate()
    plan["linear2"] = Activations(outputs={axis: between})
    return plan


def _torch_inputs(
    module: nn.Module, axis: str, data_axis: str | None, sequence_parallel: bool
) -> Activations:
    """Return the Activations of the inputs of one of torch's transformer modules."""
    batch_first = any(
        each.batch_first for each in module.modules() if isinstance(each, nn.MultiheadAttention)
    )
    spec: dict[str, Any] = {}
    if data_axis is not None:
        spec[data_axis] = Shard(0 if batch_first else 1)
    if sequence_parallel:
        spec[axis] = Shard(1 if batch_first else 0)
    names = {
        nn.Transformer: ("src", "tgt"),
        nn.TransformerDecoder: ("tgt", "memory"),
        nn.TransformerDecoderLayer: ("tgt", "memory"),
    }
    found = next((each for kind, each in names.items() if isinstance(module, kind)), ("src",))
    return Activations(inputs=dict.fromkeys(found, spec) if spec else None)
