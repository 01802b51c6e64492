"""A Llama-style decoder: grouped-query attention, rotary positions, SwiGLU, RMSNorm.

Ordinary PyTorch for one process: the code does not refer to ranks. `train_llama.py` lays it out on
a mesh and trains it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """The sizes of a model."""

    vocabulary: int = 256
    width: int = 128
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    """The number of heads of keys and values; `heads` is a multiple of it."""
    hidden: int = 352
    """The width within a feed-forward block."""
    longest: int = 256
    """The largest number of tokens of a sequence."""
    tied: bool = False
    """Whether the embedding is the output layer too."""
    rope_base: float = 10000.0
    epsilon: float = 1e-5

    @property
    def head_width(self) -> int:
        """The features of one head."""
        return self.width // self.heads


class Attention(nn.Module):
    """Causal attention, in which several heads of queries share one of keys and values."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_width = config.head_width
        queries, keys = config.heads * config.head_width, config.kv_heads * config.head_width
        self.wq = nn.Linear(config.width, queries, bias=False)
        self.wk = nn.Linear(config.width, keys, bias=False)
        self.wv = nn.Linear(config.width, keys, bias=False)
        self.wo = nn.Linear(queries, config.width, bias=False)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Mix [batch, length, width] along the length."""
        queries, keys, values = (
            projection(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for projection in (self.wq, self.wk, self.wv)
        )
        queries, keys = rotated(queries, cosines, sines), rotated(keys, cosines, sines)
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=True
        )
        return self.wo(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: one projection gates another."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.width, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.width, bias=False)
        self.w3 = nn.Linear(config.width, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Change each position of [batch, length, width] by itself."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Attention and feed-forward, each with a norm before it and a residual connection."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, config.epsilon)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.width, config.epsilon)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Map [batch, length, width] to the same shape."""
        x = x + self.attention(self.attention_norm(x), cosines, sines)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """The decoder: tokens [batch, length] to logits [batch, length, vocabulary]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, config.epsilon)
        self.output = nn.Linear(config.width, config.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        if config.tied:
            self.output.weight = self.tok_embeddings.weight
        angles = rotary_angles(config)
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the token that follows each."""
        length = tokens.shape[1]
        cosines, sines = self.get_buffer("cosines")[:length], self.get_buffer("sines")[:length]
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, cosines, sines)
        return self.output(self.norm(x))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of the tokens that should follow."""
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())


def rotary_angles(config: Config) -> Tensor:
    """Return the angle of each pair of features at each position: [longest, head_width / 2]."""
    exponents = torch.arange(0, config.head_width, 2) / config.head_width
    return torch.arange(config.longest).unsqueeze(1) / config.rope_base**exponents


def rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate each pair of features (i, i + half) of heads [..., length, head_width]."""
    first, second = x.chunk(2, dim=-1)
    turned = first * cosines - second * sines, second * cosines + first * sines
    return torch.cat(turned, dim=-1)
