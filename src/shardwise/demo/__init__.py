"""The demo: a language model trained on a mesh of processes, and beside it in one process.

main.py           from beginning to end
options.py        what can be varied
modes.py          the ways to spread the model over processes
training.py       what every rank does, and the one process
show.py           progress while it runs, and the loss curves
communication.py  what was communicated, and why
picture.py        which rank holds what
saving.py         the plot and the weights
"""

from shardwise.demo.main import run
from shardwise.demo.options import MODELS, Options, UsageError

__all__ = ["MODELS", "Options", "UsageError", "run"]
