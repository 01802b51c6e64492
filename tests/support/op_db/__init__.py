"""PyTorch's own samples of its operators (op_db), run on DTensors and compared with one process.

entries.py     what op_db has: operators, samples, the forms an operator comes in
cases.py       which layouts of a sample's tensors are tried
reference.py   what a call gives in one process
ours.py        the call on our DTensors, and what came of it
theirs.py      the same on torch's DTensors
their_ranks.py the ranks these run on
outcomes.py    what came of an operator, over all its cases
page.py        docs/op-coverage.md
"""
