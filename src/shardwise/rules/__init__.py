"""Rules: how each operator relates the dims of its inputs and outputs.

Importing a module registers its rules.
"""

# ruff: noqa: F401

from shardwise.rules import properties
from shardwise.rules.index import assignment, gathering, indexing, scattering
from shardwise.rules.linalg import einsum, factorizations, fourier, matmul, scaled_matmul, solvers
from shardwise.rules.make import creation, initialization, random
from shardwise.rules.nn import (
    adaptive_pooling,
    attention,
    batch_norm,
    convolution,
    cross_entropy,
    dropout,
    embedding,
    interpolation,
    losses,
    multihead,
    normalization,
    patches,
    pooling,
    recurrent,
)
from shardwise.rules.pointwise import aliases, casts, elementwise, foreach, foreach_norm
from shardwise.rules.reduce import (
    cumulative,
    differences,
    extremes,
    histograms,
    reduction,
    softmax,
    sorting,
    statistics,
)
from shardwise.rules.shape import (
    joining,
    rearranging,
    reshape,
    splitting,
    strides,
    triangles,
    view_copies,
    views,
)
