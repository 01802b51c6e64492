"""Traps of torch's DTensor, on four real gloo ranks: the same program with either import.

torch's column is expected to fail, strictly: if it stops failing, the trap is gone there, and
FIXED_IN says since when.
"""

import pytest
import torch
import torch.nn.functional as F
from support.torch_traps import RANKS, made, outcome, split, values
from support.torch_versions import torch_bugs

import shardwise as sw


def item_of_a_pending_sum(lib):
    mesh = made(lib)
    x = split(lib, torch.arange(10.0), mesh, lib.Shard(0))
    assert x.sum().item() == 45.0
    assert float(x.sum()) == 45.0


def cross_entropy_with_weights(lib):
    mesh = made(lib)
    logits, targets, weight = values(8, 3), torch.arange(8) % 3, torch.tensor([0.1, 1.0, 5.0])
    ours = F.cross_entropy(
        split(lib, logits, mesh, lib.Shard(0)),
        split(lib, targets, mesh, lib.Shard(0)),
        split(lib, weight, mesh, lib.Replicate()),
    )
    assert torch.allclose(ours.full_tensor(), F.cross_entropy(logits, targets, weight))


def cross_entropy_with_ignored_targets(lib):
    mesh = made(lib)
    logits, targets = values(8, 3), torch.arange(8) % 3
    targets[:3] = -100  # the first rank has no target at all
    ours = F.cross_entropy(
        split(lib, logits, mesh, lib.Shard(0)), split(lib, targets, mesh, lib.Shard(0))
    )
    assert torch.allclose(ours.full_tensor(), F.cross_entropy(logits, targets))


def convolution_with_split_output_channels(lib):
    mesh = made(lib)
    x, w = values(2, 3, 8, 8), values(4, 3, 3, 3)
    ours = F.conv2d(
        split(lib, x, mesh, lib.Replicate()), split(lib, w, mesh, lib.Shard(0)), padding=1
    )
    assert torch.allclose(ours.full_tensor(), F.conv2d(x, w, padding=1), atol=1e-5)


def convolution_with_split_input_channels(lib):
    mesh = made(lib)
    x, w = values(2, 4, 8, 8), values(4, 4, 3, 3)
    ours = F.conv2d(split(lib, x, mesh, lib.Shard(1)), split(lib, w, mesh, lib.Shard(1)), padding=1)
    assert torch.allclose(ours.full_tensor(), F.conv2d(x, w, padding=1), atol=1e-5)


def convolution_with_split_rows(lib):
    mesh = made(lib)
    x, w = values(2, 3, 9, 8), values(4, 3, 3, 3)
    ours = F.conv2d(
        split(lib, x, mesh, lib.Shard(2)), split(lib, w, mesh, lib.Replicate()), padding=1
    )
    assert torch.allclose(ours.full_tensor(), F.conv2d(x, w, padding=1), atol=1e-5)


def dropout_differs_between_shards(lib):
    torch.manual_seed(0)
    mesh = made(lib)
    x = split(lib, torch.ones(RANKS, 64), mesh, lib.Shard(0))
    rows = F.dropout(x, 0.5).full_tensor()
    assert not torch.equal(rows[0], rows[1])


def uneven_pieces_have_one_global_shape(lib):
    mesh = made(lib)
    pieces = torch.arange(10.0).reshape(5, 2).chunk(3)
    rank = mesh.get_rank()
    local = pieces[rank] if rank < len(pieces) else torch.empty(0, 2)
    assert tuple(lib.DTensor.from_local(local, mesh, [lib.Shard(0)]).shape) == (5, 2)


def to_a_pending_sum(lib):
    mesh = made(lib)
    x = split(lib, torch.arange(10.0), mesh, lib.Shard(0)).redistribute(placements=[lib.Partial()])
    assert torch.equal(x.full_tensor(), torch.arange(10.0))


def to_another_mesh(lib):
    mesh, other = made(lib), made(lib, (2, 2))
    x = split(lib, torch.arange(10.0), mesh, lib.Shard(0))
    y = x.redistribute(other, [lib.Shard(0), lib.Replicate()])
    assert torch.equal(y.full_tensor(), torch.arange(10.0))


def attention_on_cpu(lib):
    mesh = made(lib)
    q = values(2, 4, 5, 8)
    ours = F.scaled_dot_product_attention(*[split(lib, q, mesh, lib.Shard(1))] * 3)
    plain = F.scaled_dot_product_attention(q, q, q)
    assert torch.allclose(ours.full_tensor(), plain, atol=1e-5)


def indexing_by_a_list(lib):
    mesh = made(lib)
    x = split(lib, values(6, 4), mesh, lib.Shard(0))
    assert torch.equal(x[[0, 2]].full_tensor(), values(6, 4)[[0, 2]])


def assignment_by_index(lib):
    mesh = made(lib)
    x = split(lib, values(6, 4), mesh, lib.Shard(0))
    x[0] = 3.0
    assert torch.equal(x.full_tensor()[0], torch.full((4,), 3.0))


def random_values_do_not_depend_on_the_layout(lib):
    mesh = made(lib)
    found = []
    for placement in (lib.Shard(0), lib.Shard(1), lib.Replicate()):
        torch.manual_seed(0)
        found.append(lib.rand(6, 8, device_mesh=mesh, placements=[placement]).full_tensor())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def a_view_of_an_uneven_dim(lib):
    mesh = made(lib)
    x = split(lib, values(2, 6), mesh, lib.Shard(1))
    assert torch.equal(x.view(2, 3, 2).full_tensor(), values(2, 6).view(2, 3, 2))


def uneven_nested_shards_are_gathered_in_order(lib):
    mesh = made(lib, (2, 2))
    x = split(lib, values(5, 3), mesh, lib.Shard(0), lib.Shard(0))
    if lib is not sw:
        mesh._flatten("both")  # what makes torch merge the two axes
    assert torch.equal(x.full_tensor(), values(5, 3))


TRAPS = [
    item_of_a_pending_sum,
    cross_entropy_with_weights,
    cross_entropy_with_ignored_targets,
    convolution_with_split_output_channels,
    convolution_with_split_input_channels,
    convolution_with_split_rows,
    dropout_differs_between_shards,
    uneven_pieces_have_one_global_shape,
    to_a_pending_sum,
    to_another_mesh,
    attention_on_cpu,
    indexing_by_a_list,
    assignment_by_index,
    random_values_do_not_depend_on_the_layout,
    a_view_of_an_uneven_dim,
    uneven_nested_shards_are_gathered_in_order,
]


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.__name__)
def test_shardwise_is_right(workers4, trap):
    assert workers4.run(outcome, trap, "shardwise") == [""] * RANKS


# torch's attention fails too, but only after a deadlock has timed out.
ENDING = [trap for trap in TRAPS if trap is not attention_on_cpu]


FIXED_IN = {
    cross_entropy_with_weights: "2.14",
    cross_entropy_with_ignored_targets: "2.14",
    to_a_pending_sum: "2.14",
}


@pytest.mark.parametrize("trap", torch_bugs("DTensor", ENDING, FIXED_IN))
def test_torch_is_right(workers4, trap):
    assert workers4.run(outcome, trap, "torch") == [""] * RANKS
