"""Train a Llama-style language model on a mesh of data and tensor parallelism: start from here.

python -m shardwise.examples.train_llama --mesh 2x2                    # four processes of this host
torchrun --nproc-per-node 4 -m shardwise.examples.train_llama --mesh 2x2   # any hosts
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.examples.llama import Config, Llama
from shardwise.parallel import Activations, shard_module

# ---- the plans for `shard_module`; a parameter that no plan names is replicated

_WEIGHTS = {
    "tok_embeddings.weight": {"tp": Shard(0)},  # each rank has some of the vocabulary,
    "output.weight": {"tp": Shard(0)},
    "layers.*.attention.w[qkv].weight": {"tp": Shard(0)},  # some of the heads,
    "layers.*.attention.wo.weight": {"tp": Shard(1)},
    "layers.*.feed_forward.w[13].weight": {"tp": Shard(0)},  # and some of the hidden features.
    "layers.*.feed_forward.w2.weight": {"tp": Shard(1)},
}

# Each rank computes a contribution to a block's result. Tensor parallelism sums them on every rank:
# one all-reduce at the end of a block, and in the backward one at its start.
TENSOR_PARALLEL: dict[str, Any] = _WEIGHTS | {
    "tok_embeddings": Activations(outputs={"tp": Replicate()}),
    "layers.*.attention": Activations(outputs={"tp": Replicate()}),
    "layers.*.feed_forward": Activations(outputs={"tp": Replicate()}),
}

# With sequence parallelism each rank has a part of the sequence between blocks: norms and additions
# need no more. A block starts with an all-gather and ends with a reduce-scatter.
SEQUENCE_PARALLEL: dict[str, Any] = _WEIGHTS | {
    "tok_embeddings": Activations(outputs={"tp": Shard(1)}),
    "layers.*.attention": Activations(inputs={"tp": Replicate()}, outputs={"tp": Shard(1)}),
    "layers.*.feed_forward": Activations(inputs={"tp": Replicate()}, outputs={"tp": Shard(1)}),
    "output": Activations(inputs={"tp": Replicate()}),
}

# Data parallelism, on a mesh with an axis "dp", alone or with one of the plans above:
# shard_module(model, mesh, TENSOR_PARALLEL | DATA_PARALLEL).
DATA_PARALLEL: dict[str, Any] = {
    "": Activations(inputs={"dp": Shard(0)}),  # each rank takes a part of the batch
}

# ---- the data: each byte of a text is a token

VOCABULARY = 256


def all_tokens() -> Tensor:
    """Return a text that every Python installation has, the documentation of its keywords."""
    text = "\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8).long()


def batches(tokens: Tensor, size: int, length: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random pieces of a text and, for each of their tokens, the next one.

    Both are [size, length]. All ranks must pass the same seed: then they get the same batches.
    """
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(length + 1)
    while True:
        starts = torch.randint(len(tokens) - length, (size, 1), generator=generator)
        pieces = tokens[starts + offsets]
        yield pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()


# ---- the training


def train(options: argparse.Namespace) -> list[float]:
    """Train on one rank, and return the losses."""
    torch.manual_seed(options.seed)  # on every rank alike
    mesh = sw.init_device_mesh("cpu", options.mesh, ("dp", "tp"))
    model = Llama(Config(VOCABULARY, longest=options.length))  # knows nothing of ranks
    plan = SEQUENCE_PARALLEL if options.sequence_parallel else TENSOR_PARALLEL
    shard_module(model, mesh, plan | DATA_PARALLEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)

    data = batches(all_tokens(), options.batch, options.length, options.seed)
    losses, started = [], time.perf_counter()
    for step in range(1, options.steps + 1):
        loss = model.loss(*next(data))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if mesh.get_rank() == 0 and (step % 10 == 0 or step == options.steps):
            rate = step * options.batch * options.length / (time.perf_counter() - started)
            print(f"step {step}: loss {losses[-1]:.4f}, {rate:.0f} tokens/s", flush=True)
    return losses


def main() -> None:
    """Read the options and start the ranks, if torchrun has not."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mesh", type=_sizes, default=(2, 2), help="data x tensor parallel (2x2)")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=8, help="sequences in a step, of all ranks")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sequence-parallel", action="store_true")
    options = parser.parse_args()
    if "RANK" in os.environ:
        train(options)
    else:
        sw.launch(train, options.mesh[0] * options.mesh[1], options)


def _sizes(text: str) -> tuple[int, int]:
    try:
        data, tensor = map(int, text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected sizes such as 2x2, got {text!r}") from None
    return data, tensor


if __name__ == "__main__":
    main()
