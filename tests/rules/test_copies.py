"""Views by strides or as another dtype, copies of views, copies with a view overwritten."""

import pytest
import torch
from rule_cases import full, heard, leaf, ranks, split

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.testing import Sample, check_rule

# A split of a dim that an operator leaves alone costs nothing: check_rule looks for such.
CASES = {
    "as_strided": (torch.as_strided, [Sample(leaf(4, 3, 2), (4, 2, 3), (6, 1, 2))]),
    "as_strided over rows": (torch.as_strided, [Sample(leaf(2, 4, 3), (4, 2), (3, 1), 2)]),
    "as_strided_scatter": (
        torch.as_strided_scatter,
        [Sample(leaf(4, 3), leaf(4, 2), (4, 2), (3, 1), 1)],
    ),
    "permute_copy": (torch.permute_copy, [Sample(leaf(4, 3), (1, 0))]),
    "unbind_copy": (torch.unbind_copy, [Sample(leaf(4, 2), 1)]),
    "select_scatter": (torch.select_scatter, [Sample(leaf(4, 3), leaf(4), 1, 2)]),
    "slice_scatter": (torch.slice_scatter, [Sample(leaf(5, 4), leaf(5, 3), 1, None, 3)]),
    "diagonal_scatter": (torch.diagonal_scatter, [Sample(leaf(3, 2, 4), leaf(2, 3), 1, 0, 2)]),
    "index_reduce": (
        torch.index_reduce,
        [Sample(leaf(4, 3), 1, torch.tensor([2, 0]), leaf(4, 2), "prod")],
    ),
    "copy": (torch.ops.aten.copy, [Sample(full(4, 3), full(3)), Sample(full(4, 3), full(4, 3))]),
    "_chunk_cat": (torch._chunk_cat, [Sample([full(3, 2), full(3, 3)], 1, 2)]),
}


@pytest.mark.filterwarnings("ignore:index_reduce")  # it is in beta
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_plain_call_in_every_layout(name):
    fn, samples = CASES[name]
    check_rule(fn, samples, most=12, mesh_shapes=((3,), (2, 2)))


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1), Partial()])
def test_copies_of_views_are_new_and_can_be_written_to(placement):
    def run(mesh):
        for call in (
            lambda x: torch.permute_copy(x, (1, 0)),
            lambda x: torch.select_copy(x, 1, 0),
            lambda x: torch.split_copy(x, 2)[1],
            lambda x: torch.as_strided_copy(x, (2, 2), (1, 2)),
            torch.alias_copy,
        ):
            x = split(full(4, 4), mesh, placement)
            made = call(x).fill_(0)
            assert torch.equal(made.full_tensor(), torch.zeros(made.shape))
            assert torch.equal(x.full_tensor(), full(4, 4))

    ranks(run)


def test_strides_along_a_dim_that_is_not_split_are_a_view_at_no_cost():
    def run(mesh):
        x = split(full(4, 6), mesh, Shard(0))
        events, view = heard(mesh, lambda: x.as_strided((4, 2, 3), (6, 1, 2)))
        view[:, 1, 2] = 0
        return len(events), repr(view.layout), x.full_tensor()[:, 5].tolist()

    assert ranks(run) == [(0, "[4@0, 2, 3]", [0, 0, 0, 0])] * 2


def test_strides_of_what_is_empty():
    sample = Sample(leaf(0, 3), (0, 2), (3, 1))
    check_rule(torch.as_strided, [sample], mesh_shapes=((2,),), allow_missing=True)


def test_strides_of_a_part_begin_where_it_does():
    def run(mesh):
        part = split(full(4, 6), mesh, Shard(1))[1:]
        pending = split(full(4, 6), mesh, Replicate()).redistribute(placements=[Partial()])[1:]
        return [
            part.as_strided((3, 6), (6, 1)).full_tensor().tolist(),
            pending.as_strided((2, 7), (7, 1)).full_tensor().tolist(),
        ]

    part = full(4, 6)[1:]
    assert ranks(run)[0] == [part.tolist(), part.flatten()[:14].view(2, 7).tolist()]


def test_strides_of_a_whole_tensor_are_about_its_memory():
    def run(mesh):
        part = split(full(4, 6), mesh, Replicate())[1:3].t()
        plain = full(4, 6)[1:3].t()
        for given in (((2, 2), (1, 6)), ((3, 2), (5, 1), 2)):
            assert torch.equal(part.as_strided(*given).to_local(), plain.as_strided(*given))
            source = torch.zeros(given[0])
            made = part.as_strided_scatter(source, *given)
            assert torch.equal(made.to_local(), plain.as_strided_scatter(source, *given))

    ranks(run)


def test_strides_of_what_is_not_contiguous_and_split_are_refused():
    def run(mesh):
        x = split(full(4, 6), mesh, Shard(0))
        with pytest.raises(sw.DispatchError, match=r"ranks share \[6, 4@0\].*x.contiguous\(\)"):
            x.t().as_strided((2, 2), (1, 2))
        with pytest.raises(RuntimeError, match="out of bounds for a tensor of 24 elements"):
            x.as_strided((4, 7), (6, 1))
        with pytest.raises(RuntimeError, match="none below 0"):
            x.as_strided((2, 2), (-1, 1))
        part = split(full(6, 4), mesh, Shard(1))[2:]
        with pytest.raises(sw.DispatchError, match="no storage_offset for a part"):
            part.as_strided((2, 2), (1, 2), 0)
        column = split(full(3, 4), mesh, Shard(0)).t()  # the last rank's, of one row, is contiguous
        with pytest.raises(sw.DispatchError, match=r"ranks share \[4, 3@0\]"):
            column.as_strided((4, 3), (3, 1))

    ranks(run)


def test_in_place_strides_change_the_layout_or_are_refused():
    def run(mesh):
        x = split(full(4, 6), mesh, Shard(0))
        assert x.as_strided_((6, 4), (1, 6)) is x
        assert repr(x.layout) == "[6, 4@0]" and torch.equal(x.full_tensor(), full(4, 6).t())
        with pytest.raises(sw.LayoutError, match=r"as_strided_: it would have to move \[4@0\]"):
            split(full(4), mesh, Shard(0)).as_strided_((2, 2), (1, 1))

    ranks(run)


def test_a_view_as_another_dtype_is_one_of_each_piece():
    def run(mesh):
        x = split(full(4, 4), mesh, Shard(1))
        events, view = heard(mesh, lambda: x.view(torch.float64))
        assert not events and view.shape == (4, 2)
        view.zero_()
        return repr(view.layout), float(x.full_tensor().sum())

    assert ranks(run) == [("[4, 2@0]", 0.0)] * 2


def test_places_that_tensors_hold_are_looked_up():
    def run(mesh):
        x = split(full(6), mesh, Shard(0))
        start = split(torch.tensor(2), mesh, Replicate())
        places = split(torch.tensor([1, 4]), mesh, Shard(0))
        parts = torch.tensor_split(x, places)
        return x.narrow(0, start, 3).full_tensor().tolist(), [len(part) for part in parts]

    assert ranks(run)[0] == ([3, 4, 5], [1, 3, 2])


def test_broadcast_tensors_are_views_of_each_and_stay_where_they_are():
    def run(mesh):
        rows, columns = (split(full(4), mesh, Shard(0)) for _ in range(2))

        def call():
            grids = torch.meshgrid(rows, columns, indexing="xy")
            return *grids, *torch.broadcast_tensors(rows.unsqueeze(1), columns)

        events, made = heard(mesh, call)
        sources = rows, columns, rows, columns
        shared = [a.data_ptr() == b.data_ptr() for a, b in zip(made, sources, strict=True)]
        return len(events), all(shared), [repr(each.layout) for each in made]

    layouts = ["[4, 4@0]", "[4@0, 4]", "[4@0, 4]", "[4, 4@0]"]
    assert ranks(run) == [(0, True, layouts)] * 2


def test_what_torch_would_return_as_a_view_is_marked_if_it_is_a_copy():
    def run(mesh):
        x = split(full(4), mesh, Shard(0))
        with pytest.raises(sw.DispatchError, match="writing to it would not reach the original"):
            torch.unsafe_split(x, 3)[1].add_(1)
        with pytest.raises(sw.DispatchError, match="writing to it would not reach the original"):
            x.as_strided((2, 2), (1, 2)).add_(1)

    ranks(run)
