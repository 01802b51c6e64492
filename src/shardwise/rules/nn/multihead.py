"""torch's multi_head_attention_forward, of nn.MultiheadAttention and nn.TransformerEncoderLayer.

torch composes it of other functions, but merges batch and heads into one dim, and length and batch
into another, where the inner one cannot stay split. Here the dims are kept apart, so batch, heads
or queries stay split from the input to the result.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.dtensor.composite import decompose
from shardwise.rules.nn.attention import axes_of
from shardwise.rules.registry import handler
from shardwise.torch_internals import check_attention_shapes

Tensor = torch.Tensor


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
    weights = (q_proj_weight, k_proj_weight, v_proj_weight)
    projected = _projected((query, key, value), in_proj_weight, in_proj_bias, weights)
    q, k, v = (_by_head(each if batched else each.unsqueeze(1), num_heads) for each in projected)
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


def _projected(
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


def _by_head(projected: Tensor, heads: int) -> Tensor:
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
    if is_hint and mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
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
