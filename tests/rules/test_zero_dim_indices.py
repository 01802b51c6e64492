"""Index tensors without dims: each operator takes them as torch does, on every layout."""

import pytest
import torch
import torch.nn.functional as F
from support.rules import leaf

import shardwise as sw
from shardwise.testing import Sample, check_rule

aten = torch.ops.aten
X, ROW, COLUMN, NUMBER = leaf(5, 4), leaf(4), leaf(5), leaf()
AT, BACK, PAIR = torch.tensor(1), torch.tensor(-2), torch.tensor([0, 2])


CALLS = {
    "x[i]": (lambda x, i: x[i], X, AT),
    "x[:, i]": (lambda x, i: x[:, i], X, BACK),
    "x[i, j]": (lambda x, i, j: x[i, j], X, AT, PAIR),
    "x[true]": (lambda x, i: x[i], X, torch.tensor(True)),
    "index": (lambda x, i: aten.index.Tensor(x, [i]), X, AT),
    "index of columns": (lambda x, i: aten.index.Tensor(x, [None, i]), X, AT),
    "index_put": (lambda x, i, v: torch.index_put(x, [i], v), X, AT, ROW),
    "index_put of a plain index": (lambda x, v: torch.index_put(x, [AT], v), X, ROW),
    "index_put with a vector": (
        lambda x, i, j, v: torch.index_put(x, [i, j], v),
        X,
        AT,
        PAIR,
        leaf(2),
    ),
    "index_put, accumulated": (
        lambda x, i, v: torch.index_put(x, [i], v, accumulate=True),
        X,
        BACK,
        NUMBER,
    ),
    "index_put_": (lambda x, i, v: x.clone().index_put_((i,), v), X, AT, ROW),
    "_unsafe_index_put": (lambda x, i, v: aten._unsafe_index_put(x, [i], v), X, AT, ROW),
    "index_select": (lambda x, i: torch.index_select(x, 0, i), X, AT),
    "index_select of columns": (lambda x, i: torch.index_select(x, 1, i), X, AT),
    "index_add": (lambda x, i, v: torch.index_add(x, 0, i, v), X, AT, leaf(1, 4)),
    "index_copy": (lambda x, i, v: torch.index_copy(x, 0, i, v), X, AT, leaf(1, 4)),
    "index_copy of a number": (lambda x, i, v: torch.index_copy(x, 0, i, v), COLUMN, AT, NUMBER),
    "index_fill": (lambda x, i: torch.index_fill(x, 0, i, 2.0), X, AT),
    "take": (torch.take, X, torch.tensor(7)),
    "take_along_dim": (torch.take_along_dim, X, torch.tensor(7)),
    "put": (lambda x, i, v: x.put(i, v), X, torch.tensor(7), NUMBER),
    "put_": (lambda x, i, v: x.clone().put_(i, v, accumulate=True), X, torch.tensor(7), NUMBER),
    "gather": (lambda x, i: torch.gather(x, 0, i), COLUMN, AT),
    "scatter": (lambda x, i, v: torch.scatter(x, 0, i, v), COLUMN, AT, NUMBER),
    "scatter_add": (lambda x, i, v: torch.scatter_add(x, 0, i, v), COLUMN, AT, NUMBER),
    "scatter_reduce": (
        lambda x, i, v: torch.scatter_reduce(x, 0, i, v, "sum"),
        COLUMN,
        AT,
        NUMBER,
    ),
    "embedding": (lambda w, i: F.embedding(i, w), X, AT),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_is_an_index(name):
    function, *tensors = CALLS[name]
    check_rule(
        function,
        [Sample(*tensors)],
        mesh_shapes=((2,), (6,), (2, 2)),
        most=6,
        allow_missing=True,
        allow_fallback=True,
    )


def test_an_element_is_assigned_to():
    def run() -> torch.Tensor:
        x = sw.zeros(5, 4, device_mesh=sw.init_device_mesh("cpu", (2,)), placements=[sw.Shard(0)])
        x[AT] = 1.0
        x[:, BACK] = 2.0
        x[AT, BACK] = 3.0
        return x.full_tensor()

    expected = torch.zeros(5, 4)
    expected[1], expected[:, -2], expected[1, -2] = 1.0, 2.0, 3.0
    for made in sw.simulate(run, 2):
        assert torch.equal(made, expected)
