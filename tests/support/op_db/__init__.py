"""PyTorch's own samples of its operators (op_db), run on DTensors and compared with one process.

entries.py     the operators of op_db, their samples and the forms of a call
cases.py       the layouts that are tried for the tensors of a sample
reference.py   the result in one process, and how results are compared with it
ours.py        the call on our DTensors
theirs.py      the call on torch's DTensors
their_ranks.py the ranks of torch's DTensors
second_order.py  second gradients, with empty pieces on some ranks
variations.py  inputs that are strided in memory, and plain tensors beside DTensors
outcomes.py    the outcome of an operator, over all its cases
expected.py    the outcomes that are allowed
page.py        docs/op-coverage.md
"""
