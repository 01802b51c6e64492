"""Errors of the engine name the operator, the layouts and a remedy; the remedy is then tried."""

import pytest
import torch
import torch.nn.functional as F
from support.rules import full, ranks, split, values
from support.torch_versions import torch_bug

import shardwise as sw
from shardwise import DeviceMesh, DTensor, Replicate, Shard


def test_a_view_that_splits_an_uneven_dim_says_what_it_costs_and_how_to_make_it_possible():
    def run(mesh):
        heads = split(torch.arange(24.0).reshape(2, 12), mesh, Shard(1))  # three heads on two ranks
        with sw.explicit():
            with pytest.raises(sw.PolicyError) as caught:
                heads.view(2, 3, 4)
            message = str(caught.value)
            assert message.startswith("view: ") and "[2, 12@0] -> [2, 12]" in message
            assert "all_gather over 0" in message and "48 B from 1 peer" in message
            assert "x.redistribute(placements=[Replicate()])" in message
            whole = heads.redistribute(placements=[Replicate()])
            assert whole.view(2, 3, 4).shape == (2, 3, 4)
        # Without explicit() the same move is made for you.
        assert torch.equal(heads.view(2, 3, 4).full_tensor(), whole.view(2, 3, 4).to_local())

    ranks(run)


def test_an_in_place_change_of_layout_is_refused_and_the_remedy_works():
    def run(mesh):
        x = split(torch.arange(6.0), mesh, Shard(0))
        with pytest.raises(sw.DispatchError, match=r"resize_: .*\[6@0\].*x.view\(...\)"):
            x.resize_(3, 2)
        assert x.view(3, 2).shape == (3, 2) and x.shape == (6,)
        with pytest.raises(sw.LayoutError, match=r"set_: .*x.copy_\(other\)"):
            x.set_(torch.ones(3))
        assert torch.equal(x.copy_(torch.ones(6)).full_tensor(), torch.ones(6))

    ranks(run)


def second_derivative(loss, x):
    """Of the square of the gradient."""
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad((first * first).sum(), x)
    return second


def test_a_second_derivative_that_torch_lacks_names_the_operator():
    targets = torch.zeros(3, dtype=torch.int64)

    def run(mesh):
        x = split(torch.randn(3, 4), mesh, Shard(0)).requires_grad_()
        loss = F.multi_margin_loss(x.square(), split(targets, mesh, Shard(0)))
        with pytest.raises(RuntimeError, match="multi_margin_loss_backward is not implemented"):
            second_derivative(loss, x)

    ranks(run)


@pytest.mark.parametrize("function", ["cdist", "pdist"])
@torch_bug("no second derivative of distances", fixed_in="2.14")
def test_distances_have_the_second_derivatives_of_one_process(function):
    x, y = values(3, 4), values(5, 4)

    def loss(x, y):
        return torch.cdist(x, y).sum() if function == "cdist" else F.pdist(x).sum()

    expected = second_derivative(loss(x, y), x)

    def run(mesh):
        mine = split(x.detach(), mesh, Shard(0)).requires_grad_()
        found = second_derivative(loss(mine, split(y.detach(), mesh, Replicate())), mine)
        torch.testing.assert_close(found.full_tensor(), expected)

    ranks(run)


def test_results_whose_shape_depends_on_data_are_whole_and_need_data():
    def run(mesh):
        x = split(torch.tensor([0.0, 3.0, 0.0, 5.0, 0.0]), mesh, Shard(0))
        found = x.nonzero()
        assert found.placements == (Replicate(),) and found.to_local().tolist() == [[1], [3]]
        assert x[x > 0].to_local().tolist() == [3.0, 5.0]

    ranks(run)
    mesh = DeviceMesh.abstract((2,), ("tp",))
    nowhere = sw.zeros(4, device_mesh=mesh, placements=[Shard(0)])
    with pytest.raises((RuntimeError, NotImplementedError), match=r"nonzero|meta"):
        nowhere.nonzero()


def test_a_call_that_is_new_is_planned_by_arithmetic_and_not_by_running_it(monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("a fake tensor was made")

    def run(mesh):
        x = split(torch.randn(5, 4), mesh, Shard(0))
        w = split(torch.randn(4, 4), mesh, Replicate())
        monkeypatch.setattr("torch._subclasses.fake_tensor.FakeTensorMode.__enter__", never)
        for size in range(1, 5):
            piece = x[:size]
            F.layer_norm(F.gelu(F.linear(piece, w)), (4,)).softmax(-1).sum(0).view(2, 2)

    ranks(run)


def test_an_error_of_planning_leaves_nothing_behind():
    def run(mesh):
        x = split(torch.randn(4, 4), mesh, Shard(0))
        entries = sw.cache_info().entries
        with pytest.raises(RuntimeError):
            x @ split(torch.randn(3, 3), mesh, Shard(0))
        assert sw.cache_info().entries == entries
        assert isinstance(x @ x, DTensor)

    ranks(run)


def test_torchs_errors_are_about_global_shapes_and_name_the_operator_and_the_layouts():
    with pytest.raises(sw.RankError, match=r"\[in matmul of \[5@0, 2\], \[5@0, 2\]\]"):
        ranks(lambda mesh: split(full(5, 2), mesh, Shard(0)) @ split(full(5, 2), mesh, Shard(0)))
    with pytest.raises(sw.RankError, match=r"\[7\].*size 10\n\n(.*\n)*\[in view of \[5@0, 2\]\]"):
        ranks(lambda mesh: split(full(5, 2), mesh, Shard(0)).view(7))


def test_a_plain_tensor_that_is_a_piece_is_told_from_local():
    def mistake(mesh):
        x = split(full(5, 2), mesh, Shard(0))
        return x + torch.ones(x.to_local().shape)

    with pytest.raises(sw.RankError, match=r"add of \[5@0, 2\], a plain \(3, 2\).*from_local"):
        ranks(mistake)

    def remedy(mesh):
        x = split(full(5, 2), mesh, Shard(0))
        ones = DTensor.from_local(torch.ones(x.to_local().shape), mesh, [Shard(0)])
        assert torch.equal((x + ones).full_tensor(), full(5, 2) + 1)

    ranks(remedy)


@pytest.mark.parametrize(
    "transform",
    [
        torch.vmap(lambda row: row.sum()),
        torch.func.grad(lambda it: it.sum()),
        lambda x: torch.func.vjp(lambda it: it * 2, x),
        torch.func.jacrev(lambda it: it.sum()),
        torch.func.functionalize(lambda it: it * 2),
    ],
)
def test_transforms_of_torch_func_are_refused_as_they_would_see_only_the_piece(transform):
    with pytest.raises(sw.RankError, match=r"torch\.func: got a DTensor .*torch\.autograd\.grad"):
        ranks(lambda mesh: transform(split(full(5, 2), mesh, Shard(0))))
    assert torch.equal(
        torch.vmap(lambda row: row.sum())(full(5, 2)), full(5, 2).sum(1)
    )  # plain ones are not


def test_torch_func_works_on_the_pieces_within_local_map():
    def run(mesh):
        sums = sw.local_map(torch.vmap(lambda row: row.sum()), out_placements=[Shard(0)])
        assert torch.equal(sums(split(full(5, 2), mesh, Shard(0))).full_tensor(), full(5, 2).sum(1))

    ranks(run)


@pytest.mark.parametrize("placement", [sw.Partial(), sw.Replicate()])
def test_a_tensor_in_the_place_of_a_size_is_refused_with_the_remedy(placement):
    def run(mesh):
        count = sw.distribute_tensor(torch.tensor(3), mesh, [placement])
        with pytest.raises(sw.DispatchError, match=r"expand: expected a number.*x\.item\(\)"):
            torch.ones(1, 2).expand(count, 2)

    sw.simulate(lambda: run(sw.init_device_mesh("cpu", (2,))), 2)
