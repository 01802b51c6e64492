"""Plans of a Llama-style decoder for `shard_module`, on one page.

A parameter that no plan names is replicated.
"""

from __future__ import annotations

from typing import Any

from shardwise import Replicate, Shard
from shardwise.parallel import Activations

_WEIGHTS = {
    "tok_embeddings.weight": {"tp": Shard(0)},  # each rank has some of the vocabulary,
    "output.weight": {"tp": Shard(0)},
    "layers.*.attention.w[qkv].weight": {"tp": Shard(0)},  # some of the heads,
    "layers.*.attention.wo.weight": {"tp": Shard(1)},
    "layers.*.feed_forward.w[13].weight": {"tp": Shard(0)},  # and some of the hidden features.
    "layers.*.feed_forward.w2.weight": {"tp": Shard(1)},
}

# What each rank has computed of a block's result is a contribution. Tensor parallelism sums
# them up on every rank: one all-reduce a block, and one backward where the block begins.
TENSOR_PARALLEL: dict[str, Any] = _WEIGHTS | {
    "tok_embeddings": Activations(outputs={"tp": Replicate()}),
    "layers.*.attention": Activations(outputs={"tp": Replicate()}),
    "layers.*.feed_forward": Activations(outputs={"tp": Replicate()}),
}

# Sequence parallelism leaves each rank with a part of the sequence between blocks, where norms and
# additions need no more: a reduce-scatter where a block ends, an all-gather where one begins.
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
