"""The demo: train a language model on a mesh of processes and in one process, and compare.

main.py      from start to end
options.py   the options, and the modes of parallelism
training.py  the model on a mesh, the training of every rank, the weights
display.py   progress, loss curves, what was communicated and why, which rank holds what
"""

from shardwise.demo.main import run
from shardwise.demo.options import MODELS, Options, UsageError

__all__ = ["MODELS", "Options", "UsageError", "run"]
