"""Operators described by the placements they accept, as torch's `register_sharding` takes them."""

import pytest
import torch
from support.rules import heard, in_layout, ranks, values

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.rules import registry
from shardwise.tensor.experimental import register_sharding


@torch.library.custom_op("shardwise_listed::scaled_softmax", mutates_args=())
def scaled_softmax(x: torch.Tensor, scale: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.softmax(x * scale, dim)


@scaled_softmax.register_fake
def _(x, scale, dim):
    return torch.empty_like(x)


def _save(ctx, inputs, output):
    x, scale, ctx.dim = inputs
    ctx.save_for_backward(x, scale)


def _backward(ctx, gradient):
    x, scale = (each.detach().requires_grad_() for each in ctx.saved_tensors)
    with torch.enable_grad():
        y = torch.softmax(x * scale, ctx.dim)
    return (*torch.autograd.grad(y, (x, scale), gradient), None)


scaled_softmax.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("shardwise_listed::product", mutates_args=())
def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


@product.register_fake
def _(a, b):
    return a.new_empty(a.shape[0], b.shape[1])


product.register_autograd(
    lambda ctx, gradient: (gradient @ ctx.b.T, ctx.a.T @ gradient),
    setup_context=lambda ctx, inputs, output: ctx.__dict__.update(a=inputs[0], b=inputs[1]),
)

SEEN = []


@pytest.fixture(autouse=True)
def the_table_is_restored():
    before = dict(registry._table)
    SEEN.clear()
    yield
    registry._table.clear()
    registry._table.update(before)
    sw.cache_clear()


def register_softmax():
    @register_sharding(torch.ops.shardwise_listed.scaled_softmax.default)
    def sharding(x, scale, dim):
        SEEN.append((tuple(x.shape), x.ndim, dim, x.placements, scale.tensor_meta.shape))
        listed = [([Replicate()], [Replicate(), Replicate(), None])]
        for each in range(x.ndim):
            if each != dim % x.ndim:
                listed.append(([Shard(each)], [Shard(each), Replicate(), None]))
        return listed

    return sharding


def register_product():
    @register_sharding([torch.ops.shardwise_listed.product.default])
    def sharding(a, b):
        return [
            ([Replicate()], [Replicate(), Replicate()]),
            ([Shard(0)], [Shard(0), Replicate()]),
            ([Shard(1)], [Replicate(), Shard(1)]),
            ([Partial()], [Shard(1), Shard(0)]),
            ([Partial()], [Partial(), Replicate()]),
            ([Partial()], [Replicate(), Partial()]),
        ]


X, SCALE = values(5, 4, 3), values(3)
LAYOUTS = (
    [(one,) for one in (Shard(0), Shard(1), Shard(2), Replicate(), Partial())],
    [
        (Shard(0), Shard(1)),
        (Shard(0), Shard(0)),
        (Shard(2), Shard(0)),
        (Replicate(), Shard(1)),
        (Partial(), Shard(0)),
        (Shard(2), Shard(2)),
    ],
)


@pytest.mark.parametrize("placements", [*LAYOUTS[0], *LAYOUTS[1]], ids=str)
def test_values_and_gradients_are_those_of_one_process(placements):
    register_softmax()
    weight = values(5, 4, 3, seed=1, grad=False)

    def run(mesh):
        x = in_layout(X, mesh, *placements)
        scale = in_layout(SCALE, mesh, *[Replicate()] * mesh.ndim)
        y = scaled_softmax(x, scale, 2)
        (y * weight).sum().backward()
        split = {each.dim for each in y.placements if each.is_shard()}
        return y.full_tensor().detach(), x.grad.full_tensor(), scale.grad.full_tensor(), split

    x, scale = (each.detach().requires_grad_() for each in (X, SCALE))
    y = scaled_softmax(x, scale, 2)
    (y * weight).sum().backward()
    for value, of_x, of_scale, split in ranks(
        run, *((3, (3,)) if len(placements) == 1 else (4, (2, 2)))
    ):
        torch.testing.assert_close(value, y.detach())
        torch.testing.assert_close(of_x, x.grad)
        torch.testing.assert_close(of_scale, scale.grad)
        assert 2 not in split


PRODUCTS = [
    ((Shard(0),), (Replicate(),), 0),
    ((Replicate(),), (Shard(1),), 0),
    ((Shard(1),), (Shard(0),), 0),
    ((Partial(),), (Replicate(),), 0),
    ((Shard(0),), (Shard(1),), 1),
    ((Shard(0), Replicate()), (Replicate(), Shard(1)), 0),
    ((Shard(1), Shard(0)), (Shard(0), Replicate()), 0),
    ((Shard(1), Shard(1)), (Shard(0), Shard(0)), 0),
    ((Partial(), Shard(0)), (Replicate(), Replicate()), 0),
]


@pytest.mark.parametrize(("left", "right", "moves"), PRODUCTS, ids=str)
def test_the_cheapest_listed_sharding_is_taken(left, right, moves):
    register_product()
    a, b = values(5, 6), values(6, 3, seed=2)
    weight = values(5, 3, seed=3, grad=False)

    def run(mesh):
        one, other = in_layout(a, mesh, *left), in_layout(b, mesh, *right)
        events, y = heard(mesh, lambda: product(one, other))
        (y * weight).sum().backward()
        return (
            len(events),
            y.full_tensor().detach(),
            one.grad.full_tensor(),
            other.grad.full_tensor(),
        )

    one, other = (each.detach().requires_grad_() for each in (a, b))
    y = product(one, other)
    (y * weight).sum().backward()
    for events, value, of_a, of_b in ranks(run, *((2, (2,)) if len(left) == 1 else (4, (2, 2)))):
        assert events == moves
        torch.testing.assert_close(value, y.detach())
        torch.testing.assert_close(of_a, one.grad)
        torch.testing.assert_close(of_b, other.grad)


def test_the_function_sees_global_shapes_and_is_returned():
    sharding = register_softmax()
    assert callable(sharding)

    def run(mesh):
        x = in_layout(X, mesh, Shard(0))
        for _ in range(3):
            scaled_softmax(x, SCALE.detach(), 2)

    ranks(run)
    seen = (5, 4, 3), 3, 2, (Shard(0),), (3,)
    assert [seen] * 2 == SEEN  # once for each rank: planned calls are cached


def test_an_aten_operator_also_rules_torchs_function_and_method_of_its_name():
    @register_sharding(torch.ops.aten.mm.default)
    def whole(a, b):
        return [([Replicate()], [Replicate(), Replicate()])]

    def run(mesh):
        a, b = in_layout(full(4, 4), mesh, Shard(0)), in_layout(full(4, 4), mesh, Replicate())
        found = [
            torch.mm(a, b),
            a.mm(b),
            torch.ops.aten.mm.default(a, b),
            torch.mm(input=a, mat2=b),
        ]
        return [(each.placements, each.full_tensor()) for each in found], torch.matmul(a, b)

    def full(*shape):
        return torch.arange(16.0).reshape(shape)

    for found, untouched in ranks(run):
        for placements, value in found:
            assert placements == (Replicate(),)
            torch.testing.assert_close(value, full(4, 4) @ full(4, 4))
        assert untouched.placements == (Shard(0),)


def test_calls_of_another_overload_keep_their_rule():
    @register_sharding(torch.ops.aten.add.Tensor)
    def whole(a, b, alpha=1):
        return [([Replicate()], [Replicate(), Replicate(), None])]

    def run(mesh):
        x = in_layout(torch.ones(4), mesh, Shard(0))
        return (x + x).placements, torch.add(x, 2).placements

    for both, number in ranks(run):
        assert number == (Shard(0),)
        assert both in ((Replicate(),), (Shard(0),))


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ([([Shard(0)],)], "expected pairs"),
        ([([Shard(0)], [Shard(0)])], "for 1 results and 2 tensors"),
        ([([Shard(0)], ["x", Replicate()])], "placement"),
        ([([Shard(5)], [Shard(5), Replicate()])], "no sharding that its rule lists fits"),
        ([([Shard(1)], [Shard(0), Replicate()])], "the shard of result 0 must have the shape"),
    ],
)
def test_a_list_that_does_not_fit_is_refused(listed, message):
    register_sharding(torch.ops.shardwise_listed.product.default)(lambda a, b: listed)

    def run(mesh):
        a, b = in_layout(values(4, 6), mesh, Shard(0)), in_layout(values(6, 3), mesh, Replicate())
        with pytest.raises(sw.RuleError, match=message):
            product(a, b)

    ranks(run)


def test_an_operator_that_writes_to_its_arguments_is_refused():
    with pytest.raises(sw.RuleError, match=r"aten\.add_\.Tensor, which writes to its arguments"):
        register_sharding(torch.ops.aten.add_.Tensor)(lambda a, b: [])


def test_a_rule_registered_after_a_call_counts():
    def run(mesh):
        a, b = in_layout(values(4, 6), mesh, Shard(0)), in_layout(values(6, 3), mesh, Replicate())
        with sw.fallback("replicate"):
            before = product(a, b).placements
        register_product()
        return before, product(a, b).placements

    assert ranks(run, 1) == [((Replicate(),), (Shard(0),))]
