"""Attention: scaled_dot_product_attention, multi_head_attention_forward.

Batch, heads, queries and the values' features are free factors.

The keys are a summed factor: each rank normalises its weights by the sum over all keys, so only a
maximum and a sum per query are communicated, and the result is pending a sum. Attention is linear
in the values.

torch's own kernel runs wherever it can. `LocalAttention.by_parts` handles the other cases: split
keys, dropout by global position, broadcast dims, and empty shards, for which torch drops the mask's
gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.core.cut import rescale_cut
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh
from shardwise.dtensor.composite import decompose
from shardwise.random.samplers import bernoulli, draw_shard
from shardwise.rules.helpers.collectives import all_reduce_both_ways, all_reduce_extreme
from shardwise.rules.helpers.local_tensors import autocast, widen, without_autocast
from shardwise.rules.pattern import contraction, expanded_dims
from shardwise.rules.registry import handler, rule
from shardwise.rules.spec import Spec, SplitContext
from shardwise.torch_internals import check_attention_shapes, nn_builtins

Tensor = torch.Tensor

_kernel = nn_builtins.scaled_dot_product_attention


@rule("scaled_dot_product_attention")
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Spec:
    heads = None
    if enable_gqa:
        heads = Heads(query.shape[-3], key.shape[-3], value.shape[-3])
        if heads.queries % heads.keys or heads.queries % heads.values:
            raise RuntimeError(f"expected heads of queries to be a multiple, got {heads}")
    h, hk, hv = ("", "", "") if heads is None else ("h", "h_keys", "h_values")
    spec = contraction(f"... {h} l e, ... {hk} s e, ... {hv} s w -> ... {h} l w", query, key, value)
    inputs = list(spec.inputs)
    batch = [name for name in spec.outputs[0].dims[:-2] if name is not None]
    is_shared = heads is not None and heads.split_alike(query, key)
    if is_shared:
        inputs = [(each, tuple("h" if name and name.startswith("h") else name for name in dims))
                  for each, dims in inputs]  # fmt: skip
    whole = (*spec.outputs[0].shape[:-1], key.shape[-2])
    if attn_mask is not None:
        inputs.append((attn_mask, expanded_dims(attn_mask, [*batch, "l", "s"], whole)))
    queries = axes_of(query, -2)
    gathers_queries = _gathering_queries_is_cheaper(query, key, value)

    def allows(splits: Mapping[str, tuple[int, ...]], mesh: DeviceMesh) -> bool:
        # If one axis splits keys and queries, the queries stay split, as the result is.
        return gathers_queries or not set(queries) & set(splits.get("s", ()))

    def lower(context: SplitContext) -> Callable[..., Tensor] | None:
        order = [context.axes(name) for name in (*batch, "l", "s")]
        weights = Layout(context.mesh, whole, order, {}, (*context.outputs[0].cuts[:-1], None))
        local = LocalAttention(weights, context.axes("s"), heads, is_shared)
        is_empty = 0 in context.outputs[0].local_shape()
        if dropout_p > 0 or context.axes("s") or is_empty:
            return local.by_parts
        is_offset = is_causal and context.axes("l")
        is_regrouped = heads is not None and not is_shared and context.axes("h")
        return local.by_kernel if is_offset or is_regrouped else None

    return Spec(
        inputs,
        spec.outputs,
        reduces={"s": "sum"},
        linear=[(2,)],
        allows=allows,
        lower=lower,
        positions=["l", "s", *(["h"] if heads is not None and not is_shared else [])],
        scales=is_shared,
    )


def axes_of(tensor: Tensor, dim: int) -> tuple[int, ...]:
    """Return the axes that split a dim of a tensor; none for a plain tensor."""
    layout = getattr(tensor, "_layout", None)
    return () if layout is None else layout.shard_order[dim]


def _gathering_queries_is_cheaper(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether gathering queries and summing results moves less than gathering keys and
    values.
    """
    features, width = query.shape[-1], value.shape[-1]
    return query.shape[-2] * (features + 2 * width) < key.shape[-2] * (features + width)


@dataclass(frozen=True)
class Heads:
    """The numbers of heads, where several heads of queries share one head of keys and values."""

    queries: int
    keys: int
    values: int

    def split_alike(self, query: Tensor, key: Tensor) -> bool:
        """Return whether keys and values can be split with the queries.

        The heads of queries on each rank must be those of its keys and values; otherwise keys and
        values must be whole.
        """
        for tensor in (query, key):
            axes = axes_of(tensor, -3)
            if axes:
                layout: Layout = tensor._layout  # type: ignore[attr-defined]
                counts = tuple(layout.mesh.shape[axis] for axis in axes)
                cut = layout.cuts[-3] or ((layout.shape[-3], 1),)
                sizes = (self.queries, self.keys, self.values)
                return all(rescale_cut(cut, size, counts) is not None for size in sizes)
        return True


@dataclass(frozen=True)
class LocalAttention:
    """Attention on one rank's shards."""

    weights: Layout
    """The layout of the attention weights: a row for each query, a column for each key."""
    summed: tuple[int, ...]
    """The axes that split the keys."""
    heads: Heads | None
    is_shared: bool

    def by_kernel(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Run torch's operator: this rank has all keys, and there is no dropout."""
        if enable_gqa and not self.is_shared:
            key, value = self._of_queries(key, value)
            enable_gqa = False
        if is_causal:
            _, last = self.weights.range(-2)
            if (
                query.shape[-2] and last < key.shape[-2]
            ):  # no query of this rank attends to later keys
                key, value = key[..., :last, :], value[..., :last, :]
                attn_mask = _cut(attn_mask, last)
            attn_mask = self._causal(attn_mask, query, key)
        result: Tensor = _kernel(
            query, key, value, attn_mask, 0.0, False, scale=scale, enable_gqa=enable_gqa
        )
        return result

    def by_parts(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Compute scores, their softmax over the keys of all ranks, dropout, and the weighted
        sum."""
        query, key, value = map(autocast, (query, key, value))
        if enable_gqa:
            key, value = self._of_queries(key, value)
        if is_causal:
            attn_mask = self._causal(attn_mask, query, key)
        if scale is None:
            scale = 1 / math.sqrt(query.shape[-1])
        with without_autocast(query.device.type):
            scores = widen(query) @ widen(key).mT * scale
            if attn_mask is not None and attn_mask.dtype == torch.bool:
                scores = scores.masked_fill(~attn_mask, -math.inf)
            elif attn_mask is not None:
                scores = scores + attn_mask
            weights = self._softmax(scores)
            if dropout_p > 0:
                weights = weights * self._kept(dropout_p, weights)
            return (weights @ widen(value)).to(query.dtype)

    def _of_queries(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Repeat heads of keys and values, so that each head of queries has its own."""
        assert self.heads is not None, "only called for groups"
        ranges = self.weights.ranges(-3)
        count_here = sum(stop - start for start, stop in ranges)
        found = []
        for tensor, count in ((key, self.heads.keys), (value, self.heads.values)):
            each = self.heads.queries // count
            # If keys are split with the queries, the shards begin at the same head.
            first = 0 if self.is_shared else ranges[0][0]
            wanted = torch.arange(first, first + count_here, device=tensor.device) // each
            found.append(tensor.index_select(-3, wanted))
        return found[0], found[1]

    def _causal(self, mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
        """Return the mask with later keys masked for each query, by global positions."""
        (query_start, _), (key_start, _) = self.weights.range(-2), self.weights.range(-1)
        past = torch.ones(
            query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device
        ).tril(query_start - key_start)
        if mask is None:
            return past
        return mask & past if mask.dtype == torch.bool else mask.masked_fill(~past, -math.inf)

    def _softmax(self, scores: Tensor) -> Tensor:
        """Return softmax over the last dim, which is split over ranks; a fully masked row gives
        0."""
        mesh = self.weights.mesh
        if scores.shape[-1]:
            largest = scores.detach().amax(-1, keepdim=True)
        else:
            largest = scores.new_full((*scores.shape[:-1], 1), -math.inf)
        largest = all_reduce_extreme(largest, mesh, self.summed, "max")
        # Autograd treats the maximum as a constant: the result does not depend on it.
        exps = (scores - largest.masked_fill(largest == -math.inf, 0)).exp()
        sums = all_reduce_both_ways(exps.sum(-1, keepdim=True), mesh, self.summed)
        return exps / sums.masked_fill(sums == 0, 1)

    def _kept(self, dropout_p: float, like: Tensor) -> Tensor:
        """Return the dropout mask, scaled; it is the same for every layout."""
        if dropout_p == 1:  # nothing is drawn
            return torch.zeros_like(like)
        kept = 1 - dropout_p
        return draw_shard(bernoulli, self.weights, kept, kept, dtype=like.dtype, device=like.device)


def _cut(mask: Tensor | None, last: int) -> Tensor | None:
    return mask if mask is None or mask.shape[-1] == 1 else mask[..., :last]


# ---- nn.MultiheadAttention and nn.TransformerEncoderLayer
# torch composes multi_head_attention_forward of other functions, but merges batch and heads into
# one dim, and length and batch into another, where the inner one cannot stay split. Here the dims
# are kept apart, so batch, heads or queries stay split from the input to the result.


@handler(F.multi_head_attention_forward)
def multi_head_attention_forward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run on DTensors; calls with rare options are left to torch's own code."""
    names = func.__code__.co_varnames[: func.__code__.co_argcount]
    given = dict(zip(names, args, strict=False)) | kwargs
    rare = ("bias_k", "bias_v", "static_k", "static_v")
    if any(given.get(name) is not None for name in rare) or given["add_zero_attn"]:
        return decompose(func)(*args, **kwargs)  # type: ignore[misc]
    return _attend(**{name: value for name, value in given.items() if name not in rare})


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    batched = check_attention_shapes(query, key, value, key_padding_mask, attn_mask, num_heads)
    _check(query, key, value, embed_dim_to_check, num_heads, use_separate_proj_weight)
    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    weights = (q_proj_weight, k_proj_weight, v_proj_weight)
    projected = _project((query, key, value), in_proj_weight, in_proj_bias, weights)
    q, k, v = (
        _split_heads(each if batched else each.unsqueeze(1), num_heads) for each in projected
    )
    mask = _mask(key_padding_mask, attn_mask, is_causal and not need_weights, q, k)
    is_causal = is_causal and key_padding_mask is None and not need_weights
    dropout_p = dropout_p if training else 0.0
    seen = None
    if need_weights:
        scores = (q * math.sqrt(1 / q.shape[-1])) @ k.transpose(-2, -1)
        if mask is not None:
            scores = scores + mask.to(scores.dtype)  # autocast may have narrowed the product
        seen = F.softmax(scores, dim=-1)
        if dropout_p > 0:
            seen = F.dropout(seen, dropout_p)
        found = seen @ v
    else:
        found = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal)
    result = F.linear(found.permute(2, 0, 1, 3).flatten(-2), out_proj_weight, out_proj_bias)
    if seen is not None:
        seen = seen.mean(dim=1) if average_attn_weights else seen
        seen = seen if batched else seen.squeeze(0)
    return result if batched else result.squeeze(1), seen


def _check(
    query: Tensor, key: Tensor, value: Tensor, width: int, heads: int, are_separate: bool
) -> None:
    if query.shape[-1] != width:
        raise AssertionError(
            f"was expecting embedding dimension of {width}, but got {query.shape[-1]}"
        )
    if width % heads:
        raise AssertionError(f"embed_dim {width} not divisible by num_heads {heads}")
    if key.shape[:-1] != value.shape[:-1] or not (are_separate or key.shape == value.shape):
        raise AssertionError(f"key shape {key.shape} does not match value shape {value.shape}")


def _project(
    inputs: tuple[Tensor, ...],
    packed: Tensor | None,
    bias: Tensor | None,
    separate: tuple[Tensor | None, ...],
) -> list[Tensor]:
    """Return the projected queries, keys and values."""
    if packed is not None:
        query = inputs[0]
        taken = {axis for dim in range(query.dim()) for axis in axes_of(query, dim)}
        # If the packed rows are split by heads, each third of them must be split too. A layout
        # that is cut in pieces does that.
        layout = getattr(packed, "_layout", None)
        is_cut = layout is not None and layout.is_cut
        by_heads = not is_cut and not taken.issuperset(axes_of(packed, 0))
        if not by_heads and all(each is query for each in inputs):
            return list(F.linear(query, packed, bias).chunk(3, dim=-1))
        separate = packed.chunk(3)
    biases = (None, None, None) if bias is None else bias.chunk(3)
    return [
        F.linear(each, weight, part)  # type: ignore[arg-type]
        for each, weight, part in zip(inputs, separate, biases, strict=True)
    ]


def _split_heads(projected: Tensor, heads: int) -> Tensor:
    """Reshape (length, batch, features) to (batch, heads, length, features of a head)."""
    shape = (*projected.shape[:-1], heads, projected.shape[-1] // heads)
    return projected.view(shape).permute(1, 2, 0, 3)


def _mask(
    padding: Tensor | None, mask: Tensor | None, is_hint: bool, query: Tensor, key: Tensor
) -> Tensor | None:
    """Return the mask that is added to the scores (batch, heads, queries, keys); it broadcasts.

    Arguments:
        padding: the masked keys of each batch element.
        mask: one mask for all, or one for each batch element and head.
        is_hint: whether the mask only says that attention is causal.
    """
    batch, heads, length, _ = query.shape
    added: Tensor | None = None
    if padding is not None:
        if not padding.is_floating_point():
            padding = torch.zeros_like(padding, dtype=query.dtype).masked_fill(padding, -math.inf)
        added = padding.reshape(batch, 1, 1, key.shape[-2])
    if mask is not None and not (is_hint and padding is None):
        if not mask.is_floating_point():
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask, -math.inf)
        if mask.dim() == 3:
            mask = mask.reshape(batch, heads, length, key.shape[-2])
        added = mask if added is None else mask + added
    return added
