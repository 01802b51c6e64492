"""Train a Llama-style language model on a mesh of data and tensor parallelism: start from here.

python -m shardwise.examples.train_llama --mesh 2x2                    # four processes of this host
torchrun --nproc-per-node 4 -m shardwise.examples.train_llama --mesh 2x2   # any hosts
"""

from __future__ import annotations

import argparse
import os
import time

import torch

import shardwise as sw
from shardwise.examples.llama import Config, Llama
from shardwise.examples.llama_plan import DATA_PARALLEL, SEQUENCE_PARALLEL, TENSOR_PARALLEL
from shardwise.examples.text import VOCABULARY, all_tokens, batches
from shardwise.parallel import shard_module


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
