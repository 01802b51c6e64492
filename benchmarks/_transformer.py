"""The model of `tensor_parallel` and `fsdp`: a Llama-like decoder, ordinary PyTorch code.

The code does not refer to ranks. It takes the number of heads from the tensors (`-1`), because
modules with styles get local tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256


@dataclass(frozen=True)
class Size:
    """The sizes of a model and of its data."""

    name: str
    width: int
    heads: int
    hidden: int
    batch: int
    length: int
    layers: int = 4
    """The number of blocks of `Model`; `OneBlock` has one."""

    @property
    def head_width(self) -> int:
        """The width of one head."""
        return self.width // self.heads


SIZES = (
    Size("small", width=256, heads=4, hidden=704, batch=2, length=128),
    Size("large", width=1024, heads=16, hidden=2816, batch=2, length=128),
)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_width = size.head_width
        self.wq, self.wk, self.wv, self.wo = (
            nn.Linear(size.width, size.width, bias=False) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            layer(x).view(batch, length, -1, self.head_width).transpose(1, 2)
            for layer in (self.wq, self.wk, self.wv)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.w1 = nn.Linear(size.width, size.hidden, bias=False)
        self.w3 = nn.Linear(size.width, size.hidden, bias=False)
        self.w2 = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Attention and feed-forward, each after a norm and beside a residual."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.width)
        self.attention = Attention(size)
        self.feed_forward_norm = nn.RMSNorm(size.width)
        self.feed_forward = FeedForward(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class OneBlock(nn.Module):
    """A block alone, on given activations."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(size)])

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.layers[0](x), target)

    @staticmethod
    def data(size: Size) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets."""
        shape = (size.batch, size.length, size.width)
        return torch.randn(shape), torch.randn(shape)


class Model(nn.Module):
    """Blocks between an embedding and a head of a small vocabulary."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size.width)
        self.layers = nn.ModuleList([Block(size) for _ in range(size.layers)])
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    @staticmethod
    def data(size: Size) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens, and for each the next one."""
        tokens = torch.randint(VOCABULARY, (size.batch, size.length + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


MODELS: dict[str, type[OneBlock] | type[Model]] = {"one block": OneBlock, "4 layers": Model}
