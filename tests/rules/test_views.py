"""Views and parts: what is here stays here, and is a view wherever torch returns one."""

import pytest
import torch
import torch.nn.functional as F
from support.rules import leaf

from shardwise import (
    DispatchError,
    Layout,
    LayoutError,
    Replicate,
    Shard,
    distribute_tensor,
    explicit,
    init_device_mesh,
    listen,
    simulate,
)
from shardwise.core.errors import PolicyError
from shardwise.testing import Sample, check_rule, distributed


def whole_numbers(*shape):
    return torch.randint(9, shape)


VIEWS = {
    "transpose": (torch.transpose, [Sample(leaf(5, 4, 2), 0, -1), Sample(leaf(), 0, 0)]),
    "swapaxes": (torch.swapaxes, [Sample(leaf(5, 4), axis0=0, axis1=1)]),
    "swapdims": (torch.swapdims, [Sample(leaf(5, 4), 0, 1)]),
    "t": (torch.t, [Sample(leaf(5, 4)), Sample(leaf(5))]),
    "adjoint": (torch.adjoint, [Sample(leaf(2, 5, 4))]),
    "T": (lambda x: x.T, [Sample(leaf(5, 4))]),
    "mT": (lambda x: x.mT, [Sample(leaf(2, 5, 4))]),
    "H": (lambda x: x.H, [Sample(torch.randn(5, 4, dtype=torch.complex128))]),
    "mH": (lambda x: x.mH, [Sample(leaf(2, 5, 4))]),
    "permute": (
        torch.Tensor.permute,
        [Sample(leaf(5, 4, 2), 2, 0, 1), Sample(leaf(5, 4), (1, -2))],
    ),
    "movedim": (
        torch.movedim,
        [Sample(leaf(5, 4, 2), 0, 2), Sample(leaf(5, 4, 2), (0, 1), (2, 0))],
    ),
    "squeeze": (
        torch.squeeze,
        [
            Sample(leaf(1, 2, 1)),
            Sample(leaf(1, 2), 0),
            Sample(leaf(1, 2), 1),
            Sample(leaf(1, 2, 1), (0, 1)),
        ],
    ),
    "unsqueeze": (
        torch.unsqueeze,
        [Sample(leaf(5, 4), 1), Sample(leaf(5), -1), Sample(leaf(), 0)],
    ),
    "expand": (torch.Tensor.expand, [Sample(leaf(5, 1), 2, -1, 3), Sample(leaf(1, 4), (5, 4))]),
    "expand_as": (torch.Tensor.expand_as, [Sample(leaf(1, 4), torch.zeros(5, 4))]),
    "broadcast_to": (torch.broadcast_to, [Sample(leaf(5, 1), (2, 5, 3))]),
    "linalg.diagonal": (torch.linalg.diagonal, [Sample(leaf(2, 3, 4)), Sample(A=leaf(3, 4, 2))]),
    "diagonal": (
        torch.diagonal,
        [
            Sample(leaf(5, 4)),
            Sample(leaf(5, 4), -2),
            Sample(leaf(3, 2, 5), 1, 0, 2),
            Sample(leaf(2, 3), 7),
        ],
    ),
    "diag": (torch.diag, [Sample(leaf(5, 4), 1), Sample(leaf(4), -1)]),
    "diag_embed": (torch.diag_embed, [Sample(leaf(5, 4)), Sample(leaf(5, 4), 1, 0, 2)]),
    "unfold": (torch.Tensor.unfold, [Sample(leaf(5, 6), 1, 3, 2)]),
}

PARTS = {
    "select": (torch.select, [Sample(leaf(5, 4), 0, -1), Sample(whole_numbers(5, 4) > 4, 1, 2)]),
    "narrow": (
        torch.narrow,
        [
            Sample(leaf(5, 4), 0, 1, 3),
            Sample(leaf(5, 4), 1, -1, 1),
            Sample(leaf(5), 0, 0, 5),
            Sample(leaf(5), 0, 2, 0),
        ],
    ),
    "narrow_copy": (torch.narrow_copy, [Sample(whole_numbers(5, 4), 0, 1, 3)]),
    "slice": (torch.ops.aten.slice, [Sample(leaf(7, 2), 0, 1, 100, 2), Sample(leaf(7, 2), 1)]),
    "split": (
        torch.split,
        [Sample(leaf(7, 2), 3), Sample(leaf(7, 2), [4, 0, 3]), Sample(leaf(2, 4), 2, dim=1)],
    ),
    "split method": (torch.Tensor.split, [Sample(leaf(7, 2), 3), Sample(leaf(4, 2), 9)]),
    "split_with_sizes": (torch.split_with_sizes, [Sample(leaf(4, 5), [1, 4], -1)]),
    "unsafe_split": (torch.unsafe_split, [Sample(leaf(4, 5), 2, 1)]),
    "chunk": (
        torch.chunk,
        [Sample(leaf(7, 3), 3), Sample(leaf(5, 8), 2, -1), Sample(leaf(0, 3), 2)],
    ),
    "tensor_split": (
        torch.tensor_split,
        [
            Sample(leaf(7, 2), 3),
            Sample(leaf(7, 2), (2, 5)),
            Sample(leaf(7, 2), (5, 2, -1)),
            Sample(leaf(2, 3), sections=2, dim=1),
        ],
    ),
    "hsplit": (torch.hsplit, [Sample(leaf(3, 4), 2), Sample(leaf(5), [2])]),
    "vsplit": (torch.vsplit, [Sample(leaf(4, 3), 2)]),
    "dsplit": (torch.dsplit, [Sample(leaf(2, 3, 4), [1])]),
    "unbind": (torch.unbind, [Sample(leaf(3, 4)), Sample(leaf(3, 4), dim=1)]),
}

ORDERS = {
    "flip": (torch.flip, [Sample(leaf(5, 4), (0,)), Sample(leaf(5, 4), dims=(0, -1))]),
    "fliplr": (torch.fliplr, [Sample(leaf(5, 4))]),
    "flipud": (torch.flipud, [Sample(leaf(5, 4))]),
    "rot90": (torch.rot90, [Sample(leaf(5, 4), k) for k in range(4)]),
    "roll": (
        torch.roll,
        [
            Sample(leaf(5, 4), 2, 0),
            Sample(leaf(5, 4), (1, -3, 1), (0, 1, 0)),
            Sample(leaf(5, 2), 3),
            Sample(leaf(5), 2),
        ],
    ),
    "repeat": (
        torch.Tensor.repeat,
        [Sample(leaf(5, 4), 2, 1), Sample(leaf(3), (2, 2)), Sample(leaf(3), 0)],
    ),
    "tile": (torch.tile, [Sample(leaf(5, 2), (2,)), Sample(leaf(5), (2, 3))]),
    "pad": (
        F.pad,
        [
            Sample(leaf(5, 4), (1, 2)),
            Sample(leaf(5, 4), (0, 0, 3, -1)),
            Sample(leaf(5, 4), (1, 0, 0, 2), "constant", 7.0),
        ],
    ),
    "pad, reflect": (
        F.pad,
        [
            Sample(leaf(2, 3, 5), (2, 1), "reflect"),
            Sample(leaf(2, 4, 3), (1, 1, 2, 0), mode="reflect"),
        ],
    ),
    "pad, replicate": (F.pad, [Sample(leaf(2, 3, 5), (2, 3), "replicate")]),
    "pad, circular": (F.pad, [Sample(leaf(2, 3, 5), (2, 3), "circular")]),
    "constant_pad_nd": (torch.constant_pad_nd, [Sample(whole_numbers(5, 4), (1, 1), 3)]),
}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", VIEWS)
def test_views_agree_with_the_plain_call_in_every_layout(name):
    check_rule(VIEWS[name][0], VIEWS[name][1], most=18, mesh_shapes=((3,), (2, 2)))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", PARTS)
def test_parts_agree_with_the_plain_call_in_every_layout(name):
    check_rule(PARTS[name][0], PARTS[name][1], most=18, mesh_shapes=((3,), (2, 2)))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", ORDERS)
def test_rows_in_another_order_agree_with_the_plain_call_in_every_layout(name):
    check_rule(ORDERS[name][0], ORDERS[name][1], most=18, mesh_shapes=((3,), (2, 2)))


def on_two(run):
    return simulate(lambda: run(init_device_mesh("cpu", (2,), ("tp",))), 2)


def rows(mesh, *shape, split, dtype=torch.float32):
    count = torch.Size(shape).numel()
    return distributed(
        torch.arange(count, dtype=dtype).reshape(shape), Layout(mesh, shape, {split: ["tp"]})
    )


def test_writing_to_a_view_of_an_unsplit_dim_reaches_the_tensor():
    def run(mesh):
        x = rows(mesh, 4, 3, split=0)
        x.T.select(0, 1).zero_()
        x.narrow(1, 2, 1).fill_(-1)
        first, *_ = x.split(1, dim=1)
        first.add_(100)
        x.unsqueeze(0).mul_(2)
        return x.full_tensor().tolist()

    assert on_two(run)[0] == [[200, 0, -2], [206, 0, -2], [212, 0, -2], [218, 0, -2]]


def test_writing_to_a_part_of_a_split_dim_that_no_index_gives_is_refused():
    def run(mesh):
        x = rows(mesh, 6, 3, split=0)
        for part in (x.diagonal(), x.view(9, 2), x.unfold(0, 2, 1)):
            with pytest.raises(DispatchError, match="copy"):
                part.mul_(2)

    on_two(run)


def test_with_one_rank_on_the_axis_parts_are_views():
    def run():
        x = rows(init_device_mesh("cpu", (1,), ("tp",)), 3, 2, split=0)
        x.select(0, 1).zero_()
        x.narrow(0, 2, 1).fill_(9)
        x.split(1)[0].mul_(5)
        return x.to_local().tolist()

    assert simulate(run, 1) == [[[0, 5], [0, 0], [9, 9]]]


def test_what_torch_copies_is_a_copy_even_if_no_row_changes_hands():
    def run(mesh):
        x = rows(mesh, 4, split=0)
        x.roll(0, 0).mul_(0)
        x.narrow_copy(0, 1, 2).mul_(0)
        x.narrow_copy(0, 0, 4).mul_(0)
        F.pad(x, (-1, -1)).mul_(0)
        return x.full_tensor().tolist()

    assert on_two(run)[0] == [0, 1, 2, 3]


def test_halves_of_a_split_dim_stay_split():
    # as gate and up of a fused projection, whose columns tp splits
    def run(mesh):
        events = []
        with listen(events.append):
            gate, up = rows(mesh, 2, 8, split=1).chunk(2, -1)
        kinds = {event.kind for event in events}
        return repr(gate.mesh_layout), up.to_local().tolist(), kinds

    found = on_two(run)
    assert found[0] == ("[2, 4@tp]", [[4, 5], [12, 13]], {"all_to_all"})
    assert found[1] == ("[2, 4@tp]", [[6, 7], [14, 15]], {"all_to_all"})


def test_one_row_of_a_split_dim_is_whole_and_only_it_travels():
    def run(mesh):
        x = rows(mesh, 100, 3, split=0)
        events = []
        with listen(events.append):
            row = x.select(0, 70)
        return repr(row.mesh_layout), row.to_local().tolist(), {event.kind for event in events}

    assert on_two(run)[0] == ("[3]", [210, 211, 212], {"all_reduce"})


def test_rows_that_change_hands_are_refused_within_explicit():
    def run(mesh):
        x = rows(mesh, 6, 3, split=0)
        with explicit():
            x.narrow(1, 1, 2)
            with pytest.raises(PolicyError, match="a dim that tp splits"):
                x.narrow(0, 2, 4)
            with pytest.raises(PolicyError, match="a dim that tp splits"):
                x.select(0, 2)

    on_two(run)


def test_shapes_change_in_place():
    def run(mesh):
        x = rows(mesh, 4, 1, 3, split=0)
        local = x.to_local().data_ptr()
        x.transpose_(0, 2).squeeze_().unsqueeze_(0).squeeze_(())
        x.squeeze_(0).t_().unsqueeze_(2).squeeze_(dim=2)
        return repr(x.mesh_layout), x.to_local().data_ptr() == local, x.full_tensor().tolist()

    values = torch.arange(12.0).reshape(4, 3).tolist()
    assert on_two(run) == [("[4@tp, 3]", True, values)] * 2


def test_a_dim_with_one_local_row_is_not_squeezed():
    def run(mesh):
        x = rows(mesh, 2, 1, 3, split=0)
        return (
            repr(x.squeeze().mesh_layout),
            repr(x.squeeze(0).mesh_layout),
            repr(x.squeeze((0, 1)).mesh_layout),
        )

    assert on_two(run)[0] == ("[2@tp, 3]", "[2@tp, 1, 3]", "[2@tp, 3]")


def test_exchanges_can_be_differentiated_twice():
    def run(mesh):
        x = rows(mesh, 6, split=0, dtype=torch.float64).requires_grad_()
        loss = (x.roll(1, 0) * x * x).sum()
        (once,) = torch.autograd.grad(loss, x, create_graph=True)
        (twice,) = torch.autograd.grad((once * once).sum(), x)
        return twice.full_tensor()

    plain = torch.arange(6.0, dtype=torch.float64, requires_grad=True)
    loss = (plain.roll(1, 0) * plain * plain).sum()
    (once,) = torch.autograd.grad(loss, plain, create_graph=True)
    (twice,) = torch.autograd.grad((once * once).sum(), plain)
    assert all(torch.equal(found, twice) for found in on_two(run))


def test_mistakes_give_the_errors_of_torch():
    def run(mesh):
        x = rows(mesh, 4, 3, split=0)
        for wrong in (
            lambda x: x.select(0, 4),
            lambda x: x.narrow(0, 2, 3),
            lambda x: x.transpose(0, 2),
            lambda x: x.permute(0, 0),
            lambda x: x.split([1, 2]),
            lambda x: x.expand(5, 3),
            lambda x: x.repeat(2),
        ):
            with pytest.raises((RuntimeError, IndexError)) as theirs:
                wrong(torch.zeros(4, 3, device="meta"))
            with pytest.raises(type(theirs.value)) as ours:
                wrong(x)
            assert str(ours.value) == str(theirs.value)

    on_two(run)


def test_an_offset_is_counted_in_the_strides_of_the_shard():
    """Row 1 starts 4 elements after the start, and 2 in the shard of a rank."""
    whole = torch.arange(24.0).reshape(2, 3, 4)

    def program():
        x = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(2)])
        return x.as_strided((2, 4), (12, 1), 4).full_tensor()

    assert torch.equal(simulate(program, 2)[0], whole[:, 1])


def test_as_strided_in_place_changes_the_layout_and_keeps_the_memory():
    whole = torch.arange(24.0).reshape(4, 6)

    def program():
        mesh = init_device_mesh("cpu", (2,))
        for before, after, view in (
            (Shard(0), Shard(1), ((6, 4), (1, 6))),
            (Shard(0), Shard(0), ((4, 3), (6, 2))),
            (Shard(1), Shard(1), ((2, 6), (12, 1), 6)),
            (Replicate(), Replicate(), ((2, 6), (12, 1), 6)),
        ):
            x = distribute_tensor(whole, mesh, [before])
            memory = x.to_local().untyped_storage().data_ptr()
            assert x.as_strided_(*view) is x and x.placements == (after,)
            assert x.to_local().untyped_storage().data_ptr() == memory
            assert torch.equal(x.full_tensor(), whole.as_strided(*view))

    simulate(program, 2)


def test_as_strided_in_place_is_refused_where_elements_would_move():
    def program():
        x = distribute_tensor(torch.zeros(4, 6), init_device_mesh("cpu", (2,)), [Shard(1)])
        with pytest.raises(LayoutError, match=r"as_strided_: it would have to move"):
            x.as_strided_((4, 3), (6, 1))
        assert x.shape == (4, 6) and x.placements == (Shard(1),)

    simulate(program, 2)
