"""cat, stack and broadcasting of DTensors."""

import pytest
import torch
import torch.nn.functional as F
from support.rules import leaf

from shardwise import Layout, init_device_mesh, listen, simulate
from shardwise.testing import Sample, check_rule, distributed

CASES = {
    "cat": (
        torch.cat,
        [
            Sample([leaf(5, 2), leaf(3, 2)]),
            Sample((leaf(2, 3), leaf(2, 1), leaf(2, 2)), dim=-1),
        ],
    ),
    "cat, an empty one left out": (torch.cat, [Sample([leaf(0), leaf(3, 2), leaf(2, 2)])]),
    "concat": (torch.concat, [Sample([leaf(3, 2), leaf(3, 2)], 1)]),
    "stack": (
        torch.stack,
        [Sample([leaf(5, 2), leaf(5, 2)]), Sample([leaf(4), leaf(4)], dim=1)],
    ),
    "hstack": (
        torch.hstack,
        [Sample([leaf(3, 4), leaf(3, 1)]), Sample([leaf(4), leaf(), leaf(1)])],
    ),
    "vstack": (torch.vstack, [Sample([leaf(3, 4), leaf(2, 4)]), Sample([leaf(4), leaf(2, 4)])]),
    "dstack": (torch.dstack, [Sample([leaf(4), leaf(4)]), Sample([leaf(3, 4), leaf(3, 4, 2)])]),
    "column_stack": (torch.column_stack, [Sample([leaf(4), leaf(4, 3)])]),
    "block_diag": (torch.block_diag, [Sample(leaf(2, 3), leaf(4))]),
    "broadcast_tensors": (torch.broadcast_tensors, [Sample(leaf(5, 1), leaf(4))]),
    "meshgrid": (
        lambda *tensors, indexing="ij": torch.meshgrid(*tensors, indexing=indexing),
        [Sample(leaf(5), leaf(4)), Sample(leaf(3), leaf(4), leaf(2), indexing="xy")],
    ),
}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_plain_call_in_every_layout(name):
    fn, samples = CASES[name]
    check_rule(fn, samples, most=20, mesh_shapes=((3,), (2, 2)))


def on_two(run):
    return simulate(lambda: run(init_device_mesh("cpu", (2,), ("tp",))), 2)


def test_rows_joined_along_a_split_dim_stay_split():
    def run(mesh):
        cache = distributed(torch.arange(5.0), Layout(mesh, (5,), {0: ["tp"]}))
        new = distributed(torch.tensor([5.0]), Layout(mesh, (1,)))
        events = []
        with listen(events.append):
            both = torch.cat([cache, new])
        return repr(both.mesh_layout), both.to_local().tolist(), {event.kind for event in events}

    assert on_two(run) == [
        ("[6@tp]", [0, 1, 2], {"all_to_all"}),
        ("[6@tp]", [3, 4, 5], {"all_to_all"}),
    ]


def test_dtypes_are_promoted_and_a_plain_tensor_is_whole():
    def run(mesh):
        x = distributed(torch.arange(4), Layout(mesh, (4,), {0: ["tp"]}))
        result = torch.cat([x, torch.full((2,), 0.5)])
        return result.dtype, result.full_tensor().tolist()

    assert on_two(run)[0] == (torch.float32, [0, 1, 2, 3, 0.5, 0.5])


def test_pending_sums_flow_through_if_all_are():
    def run(mesh):
        pending = Layout(mesh, (3,), partial={"tp": "sum"})
        x, y = (distributed(torch.ones(3), pending) for _ in range(2))
        return repr(torch.cat([x, y]).mesh_layout), repr(torch.stack([x, y]).mesh_layout)

    assert on_two(run)[0] == ("[6] +sum@tp", "[2, 3] +sum@tp")


def test_sizes_that_do_not_match_give_the_error_of_torch():
    def run(mesh):
        x = distributed(torch.zeros(4, 3), Layout(mesh, (4, 3), {0: ["tp"]}))
        with pytest.raises(RuntimeError, match="Sizes of tensors must match except in dimension 0"):
            torch.cat([x, x[:, :2]])

    on_two(run)


@pytest.mark.parametrize(
    ("size", "ranks", "function"),
    [
        (5, 4, lambda a: torch.cat([a**2, torch.ones(2, dtype=a.dtype)])),
        (5, 4, lambda a: torch.hstack([a, a**2])),
        (1, 2, lambda a: F.pad(a**2, (1, 1))),
        (1, 2, lambda a: torch.diff(a**2, prepend=torch.zeros(1, dtype=a.dtype))),
        (1, 2, lambda a: torch.cat([a, a]).roll(1)),
    ],
)
def test_second_gradients_reach_all_ranks_where_a_piece_is_empty(size, ranks, function):
    """torch.cat ignores empty vectors: their gradients required no grad, and ranks parted."""
    values = torch.linspace(1, 2, size, dtype=torch.float64)

    def second(a):
        (first,) = torch.autograd.grad(function(a).pow(3).sum(), a, create_graph=True)
        assert first.requires_grad
        (first**2).sum().backward()
        return a.grad

    expected = second(values.clone().requires_grad_())

    def run():
        layout = Layout(init_device_mesh("cpu", (ranks,)), (size,), {0: (0,)})
        a = distributed(values.clone().requires_grad_(), layout)
        torch.testing.assert_close(second(a).full_tensor(), expected)

    simulate(run, ranks)
