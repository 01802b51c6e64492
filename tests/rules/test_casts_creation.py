"""Casts, copies, new tensors after a model, triangles: the layout stays."""

import pytest
import torch
from support.rules import full, in_layout, leaf, ranks, split

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from shardwise.comm import listen
from shardwise.core.errors import DispatchError
from shardwise.dtensor.writes import mark_detached_copy
from shardwise.testing import Sample, check_rule

CASTS = {
    "to dtype": lambda x: x.to(torch.float32),
    "to int": lambda x: (x * 3).to(torch.int32),
    "to keywords": lambda x: x.to(device="cpu", dtype=torch.complex64, copy=True),
    "to device and dtype": lambda x: x.to("cpu", torch.float32, False, True),
    "to other": lambda x: x.to(torch.ones(1, dtype=torch.int64)),
    "type": lambda x: x.type(torch.float32),
    "type by name": lambda x: x.type("torch.IntTensor"),
    "type_as": lambda x: x.type_as(torch.ones(1, dtype=torch.float32)),
    "float": lambda x: x.float(),
    "long": lambda x: (x * 3).long(),
    "bool": lambda x: x.bool(),
    "a float that is not summed": lambda x: x.to(torch.float8_e5m2).double(),
    "clone": lambda x: x.clone(memory_format=torch.contiguous_format) * 2,
    "detach": lambda x: x.detach() * x,
    "contiguous": lambda x: x.contiguous() + x,
    "cpu": lambda x: x.cpu(),
}


def test_pending_integers_that_stay_integers_stay_pending():
    def run(mesh):
        x = DTensor.from_local(torch.arange(4), mesh, [Partial()])
        return x.to(torch.int64) is x, x.long() is x, x.int().placements == (Replicate(),)

    assert ranks(run)[0] == (True, True, True)


def test_numbers_between_tensors_are_between_global_ones():
    ends = Sample(torch.tensor(1.0), torch.tensor(2.5))
    check_rule(lambda a, b: torch.linspace(a, b, 4), [ends], allow_missing=True)
    check_rule(lambda a, b: torch.logspace(a, end=b, steps=3, base=2), [ends], allow_missing=True)


@pytest.mark.parametrize("name", CASTS)
def test_casts(name):
    check_rule(CASTS[name], [Sample(leaf(5, 4))], most=12)


def test_to_a_tensor_takes_its_dtype_and_nothing_else():
    samples = [Sample(leaf(5, 4), torch.ones(3, dtype=torch.float32))]
    check_rule(lambda x, y: x.to(y), samples, most=12)
    check_rule(lambda x, y: x.type_as(other=y), samples, most=12)


COPIES = {
    "copy_": (lambda x, y: (x * 1).copy_(y), [Sample(leaf(5, 4), leaf(5, 4)),
                                              Sample(leaf(5, 4), leaf(4))]),
    "fill_": (lambda x: (x * 1).fill_(3.0), [Sample(leaf(5, 4))]),
    "fill_ with a tensor": (lambda x, y: (x * 1).fill_(y), [Sample(leaf(5, 4), leaf())]),
    "zero_": (lambda x: (x * 1).zero_() + x, [Sample(leaf(5, 4))]),
    "fill": (torch.fill, [Sample(leaf(5, 4).detach(), 2.0)]),
    "zeros_like": (torch.zeros_like, [Sample(leaf(5, 4))]),
    "full_like": (lambda x: torch.full_like(x, 3, dtype=torch.int32), [Sample(leaf(5, 4))]),
    "new_ones": (lambda x: x.new_ones(3, 2) * x[:3, :2], [Sample(leaf(3, 2))]),
    "new_full": (lambda x: x.new_full((2, 3), 7.0, dtype=torch.float32), [Sample(leaf(5, 4))]),
    "new_tensor": (lambda x: x.new_tensor([1.0, 2.0]), [Sample(leaf(5, 4))]),
    "tril": (torch.tril, [Sample(leaf(5, 4)), Sample(leaf(2, 4, 5), 1)]),
    "triu": (torch.triu, [Sample(leaf(5, 4), diagonal=-1)]),
    "tril_": (lambda x: (x * 1).tril_(-1), [Sample(leaf(5, 4))]),
    "fill_diagonal_": (lambda x: (x * 1).fill_diagonal_(3.0), [Sample(leaf(5, 4)),
                                                               Sample(leaf(3, 3, 3))]),
    "fill_diagonal_ of a tall one": (lambda x: (x * 1).fill_diagonal_(2.0, wrap=True),
                                     [Sample(leaf(7, 3))]),
}  # fmt: skip


@pytest.mark.parametrize("name", COPIES)
def test_copies_and_creation(name):
    function, samples = COPIES[name]
    check_rule(function, samples, most=14)


# ---- by hand


def on_two_ranks(run):
    def on_mesh():
        return run(init_device_mesh("cpu", (2,)))

    return sw.simulate(on_mesh, 2)


def test_nothing_to_do_returns_the_tensor_itself():
    def run(mesh):
        for placement in (Shard(0), Partial(), Replicate()):
            x = distribute_tensor(torch.ones(5), mesh, [placement])
            assert x.to(torch.float32) is x
            assert x.to("cpu") is x and x.to(torch.device("cpu")) is x
            assert x.to(x) is x and x.type_as(x) is x and x.type(torch.float32) is x
            assert x.contiguous() is x and x.float() is x and x.cpu() is x
            assert x.requires_grad_() is x and x.is_leaf and x.requires_grad
            assert x.detach_() is x and not x.requires_grad
            assert x.to(torch.float32, copy=True) is not x
            plain = torch.ones(3)
            assert plain.to(x) is plain and plain.type_as(x.double()).dtype == torch.float64
            assert x.type() == "torch.FloatTensor"

    on_two_ranks(run)


def test_casting_a_pending_sum_to_integers_sums_first():
    def run(mesh):
        half = DTensor.from_local(torch.full((2,), 0.5), mesh, [Partial()])
        assert half.double().placements == (Partial(),)
        return half.int().full_tensor().tolist(), half.to(torch.int64).full_tensor().tolist()

    assert on_two_ranks(run)[0] == ([1, 1], [1, 1])


def test_copy_keeps_the_layout_and_takes_any():
    source = torch.arange(10.0).view(5, 2)

    def run(mesh):
        target = distribute_tensor(torch.zeros(5, 2), mesh, [Shard(0)])
        for each in (
            source,
            *(distribute_tensor(source, mesh, [p]) for p in (Shard(1), Partial())),
        ):
            target.zero_()
            assert target.copy_(each) is target and target.placements == (Shard(0),)
            assert torch.equal(target.full_tensor(), source)
        target.copy_(torch.tensor([1.0, 2.0]))
        assert torch.equal(target.full_tensor(), torch.tensor([[1.0, 2.0]] * 5))
        with pytest.raises(RuntimeError):
            target.copy_(torch.ones(3, 2))
        with pytest.raises(DispatchError, match="plain tensor"):
            torch.zeros(5, 2).copy_(target)

    on_two_ranks(run)


def test_new_tensor_takes_the_global_values_of_dtensors():
    def run(mesh):
        x = split(full(5, 2), mesh, Shard(0))
        assert x.new_tensor([x.sum(), 1.0]).tolist() == [55.0, 1.0]
        assert torch.equal(x.new_tensor(x.tolist()).full_tensor(), full(5, 2))

    ranks(run)


def test_python_functions_are_applied_to_each_element_where_it_is():
    def run(mesh):
        for placement in (Shard(0), Replicate()):
            x = distribute_tensor(torch.arange(5.0), mesh, [placement])
            assert x.apply_(lambda value: value + 1) is x
            x.map_(distribute_tensor(torch.arange(5.0), mesh, [Replicate()]), lambda a, b: a * b)
            x.map2_(torch.ones(1), x, lambda a, b, c: a + b + c)
            assert x.full_tensor().tolist() == [1, 5, 13, 25, 41] and x.placements == (placement,)
        with pytest.raises(DispatchError, match="pending contributions"):
            DTensor.from_local(torch.ones(2), mesh, [Partial()]).apply_(float)
        with pytest.raises(DispatchError, match="plain tensor"):
            torch.ones(5).map_(x, max)

    on_two_ranks(run)


def test_what_would_write_to_a_tensor_made_whole_is_refused():
    def run(mesh):
        x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        with pytest.raises(DispatchError, match="would write to a copy"):
            torch._index_put_impl_(x, [torch.tensor([0])], torch.ones(1))

    on_two_ranks(run)


@pytest.mark.parametrize("op", ["sum", "avg", "max", "product"])
def test_filling_a_pending_reduction_gives_the_value_once(op):
    def run(mesh):
        x = DTensor.from_local(torch.ones(2), mesh, [Partial(op)])
        assert x.fill_(3.0).placements == (Partial(op),)
        filled = x.full_tensor().tolist()
        x.copy_(torch.tensor([5.0, 6.0]))
        return filled, x.full_tensor().tolist()

    assert on_two_ranks(run)[1] == ([3, 3], [5, 6])


def test_a_pending_integer_sum_is_not_filled_with_rounded_parts():
    def run(mesh):
        target = DTensor.from_local(torch.zeros(1, dtype=torch.int64), mesh, [Partial()])
        target.copy_(DTensor.from_local(torch.full((1,), 0.5), mesh, [Partial()]))
        return target.full_tensor().item()

    assert on_two_ranks(run)[0] == 1


def test_like_a_pending_sum_is_whole_and_nothing_is_sent():
    def run(mesh):
        x = DTensor.from_local(torch.ones(3), mesh, [Partial()])
        events = []
        with listen(events.append):
            made = [torch.zeros_like(x), torch.ones_like(x), torch.full_like(x, 2.0)]
            empty = torch.empty_like(x, dtype=torch.int32, requires_grad=False)
        assert events == []
        assert all(each.placements == (Replicate(),) for each in (*made, empty))
        assert empty.dtype == torch.int32 and empty.shape == (3,)
        return [each.full_tensor().tolist() for each in made]

    assert on_two_ranks(run)[0] == [[0, 0, 0], [1, 1, 1], [2, 2, 2]]


def test_like_a_shard_is_split_alike_and_may_require_grad():
    def run(mesh):
        x = distribute_tensor(torch.ones(5, 2), mesh, [Shard(0)])
        made = torch.zeros_like(x, requires_grad=True)
        assert made.placements == (Shard(0),) and made.is_leaf and made.requires_grad
        assert made.shape == (5, 2) and made.to_local().shape == x.to_local().shape
        new = x.new_zeros((2, 2))
        assert new.placements == (Replicate(),) and new.device_mesh is mesh
        filled = torch.full_like(x, distribute_tensor(torch.tensor(4.0), mesh, [Replicate()]))
        assert filled.full_tensor().eq(4).all()

    on_two_ranks(run)


def test_the_diagonal_of_a_piece_is_that_of_the_whole():
    def run(mesh):
        x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        events = []
        with listen(events.append):
            lower = x.tril()
        assert events == []
        return lower.to_local().tolist()

    assert on_two_ranks(run) == [
        [[1, 0, 0, 0], [1, 1, 0, 0]],
        [[1, 1, 1, 0], [1, 1, 1, 1]],
    ]


def test_a_plain_source_is_refused_where_plain_tensors_are():
    def run(mesh):
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        with sw.plain_tensors("error"), pytest.raises(sw.ShardwiseError, match="copy_"):
            x.copy_(torch.ones(4))

    on_two_ranks(run)


def test_a_copy_that_looks_like_a_view_is_not_written_to():
    def run(mesh):
        x = distribute_tensor(torch.ones(5, 4), mesh, [Shard(0)])
        copy = x.detach()
        mark_detached_copy(copy, "view")  # as the rules of views mark it
        for write in (copy.zero_, lambda: copy.fill_(1), lambda: copy.copy_(copy)):
            with pytest.raises(DispatchError, match="is a copy"):
                write()

    on_two_ranks(run)


def test_a_parameter_of_a_tensor_cut_in_pieces_is_cut_so_and_nothing_moves():
    def run(mesh):
        fused = distribute_tensor(torch.arange(12.0), mesh, [Shard(0, pieces=3)])
        events = []
        with listen(events.append):
            parameter = torch.nn.Parameter(fused)
        assert (
            events == []
            and parameter.mesh_layout is fused.mesh_layout is fused.detach().mesh_layout
        )
        return parameter.to_local().tolist()

    assert on_two_ranks(run) == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]


NEW = {
    "new_zeros": lambda x: x.new_zeros(x.shape),
    "new_zeros of numbers": lambda x: x.new_zeros(5, 3),
    "new_ones": lambda x: x.new_ones((5, 3), dtype=torch.int32),
    "new_full": lambda x: x.new_full((5, 3), 7.0),
    "new_full of a tensor": lambda x: x.new_full(size=(5, 3), fill_value=torch.tensor(2.0)),
    "new_empty": lambda x: x.new_empty(size=(5, 3)).fill_(2),
    "new_empty_strided": lambda x: x.new_empty_strided((5, 3), (1, 5)).fill_(3),
    "new_empty_strided by name": lambda x: x.new_empty_strided(size=(5, 3), stride=(3, 1)).fill_(3),
    "requires_grad": lambda x: x.new_ones((5, 3), requires_grad=True),
}


@pytest.mark.parametrize("call", NEW.values(), ids=NEW)
@pytest.mark.parametrize("placement", [sw.Shard(0), sw.Shard(1), sw.Replicate(), sw.Partial()])
@pytest.mark.parametrize("count", [2, 4])
def test_new_tensors_of_the_models_shape_lie_as_the_model_does(call, placement, count):
    expected = call(full(5, 3))

    def run(mesh):
        x = in_layout(full(5, 3), mesh, placement)
        made = call(x.detach())
        assert made.placements == (sw.Replicate() if placement.is_partial() else placement,)
        assert torch.equal(made.full_tensor(), expected) and made.dtype is expected.dtype
        assert made.requires_grad is expected.requires_grad
        if made.to_local().numel():
            assert made.stride() == expected.stride()
        wanted = sw.Layout.from_placements(mesh, (5, 3), made.placements).local_shape()
        assert made.to_local().shape == wanted

    ranks(run, count)


def test_new_tensors_of_another_shape_are_whole():
    def run(mesh):
        x = in_layout(full(5, 3), mesh, sw.Shard(0)).detach()
        calls = (
            lambda x: x.new_zeros(3, 5),
            lambda x: x.new_ones([]),
            lambda x: x.new_full((2,), 1),
        )
        for call in calls:
            assert call(x).placements == (sw.Replicate(),)
            assert torch.equal(call(x).full_tensor(), call(full(5, 3)))
        gaps = x.new_empty_strided((5, 3), (8, 2))  # no piece has such strides
        assert gaps.placements == (sw.Replicate(),) and gaps.stride() == (8, 2)
        with pytest.raises(TypeError):
            x.new_zeros()

    ranks(run)
