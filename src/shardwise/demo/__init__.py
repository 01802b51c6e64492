"""The demo: train a language model on a mesh of processes and in one process, and compare.

main.py      from start to end
options.py   the options, and the modes of parallelism
training.py  the model on a mesh, the training of every rank, the weights
display.py   progress, loss curves, a table of collectives, a table of shards
"""

from shardwise.demo.main import run
from shardwise.demo.options import MODELS, Options, UsageError

__all__ = ["MODELS", "Options", "UsageError", "run"]
