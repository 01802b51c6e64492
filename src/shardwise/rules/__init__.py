"""Rules: how each operator relates the dims of its inputs and outputs.

Importing a module registers its rules.
"""

# ruff: noqa: F401

from shardwise.rules import properties
from shardwise.rules.index import assignment, gathering, indexing, scattering
from shardwise.rules.linalg import factorizations, fourier, matmul, scaled_matmul, solvers
from shardwise.rules.make import creation, random
from shardwise.rules.nn import (
    attention,
    batch_norm,
    convolution,
    cross_entropy,
    dropout,
    embedding,
    interpolation,
    losses,
    normalization,
    pooling,
    recurrent,
)
from shardwise.rules.pointwise import casts, elementwise, foreach
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
    views,
)
