"""Pointwise operators: any split, any broadcast; pending sums flow where the operator is linear."""

import gc
import operator

import pytest
import torch
import torch.nn.functional as F
from support.rules import in_layout, ranks

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from shardwise.comm import listen
from shardwise.rules.pointwise import elementwise
from shardwise.rules.registry import functions_named, lookup
from shardwise.testing import Sample, check_rule

generator = torch.Generator().manual_seed(5)


def normal(*shape):
    return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)


def between(low, high, *shape):
    values = torch.rand(shape, generator=generator, dtype=torch.float64)
    return (low + (high - low) * values).requires_grad_()


def integers(*shape):
    return torch.randint(1, 9, shape, generator=generator)


def found(name):
    return functions_named(name)[0]


# ---- every name of the table

WITHOUT_GRADIENT = {
    "isfinite", "isinf", "isnan", "isneginf", "isposinf", "isreal", "signbit", "logical_not",
}  # fmt: skip
ARGUMENTS = {"mvlgamma": (2,), "polygamma": None, "threshold": (0.3, 0.1)}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", elementwise.UNARY + elementwise.ACTIVATIONS)
def test_unary(name):
    x = between(0.1, 0.9, 5, 2)
    if name in ("acosh", "arccosh", "mvlgamma"):
        x = (x + 2).detach().requires_grad_()
    if name in ("bitwise_not", "__invert__"):
        x = integers(5, 2)
    sample = Sample(2, x) if name == "polygamma" else Sample(x, *ARGUMENTS.get(name, ()))
    gradients = name not in WITHOUT_GRADIENT
    check_rule(found(name), [sample], mesh_shapes=[(3,), (2, 2)], most=9, gradients=gradients)


def test_unary_functions_of_torch_special():
    for name in elementwise.SPECIAL:
        function = found(name)
        x = between(0.1, 0.9, 5)
        for sample in (
            Sample(x), Sample(x, between(1.1, 2, 5)), Sample(x + 3, 2), Sample(2, x)
        ):  # fmt: skip
            try:
                function(*sample.args)
            except TypeError:
                continue
            check_rule(function, [sample], mesh_shapes=[(2,)], most=9, gradients=False)
            break
        else:
            raise AssertionError(f"no sample suits {name}")


INTEGERS_ONLY = {
    "gcd", "lcm", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift",
    "bitwise_right_shift", "__and__", "__or__", "__xor__", "__lshift__", "__rshift__",
}  # fmt: skip


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", elementwise.BINARY)
def test_binary_with_broadcasting(name):
    if name in INTEGERS_ONLY:
        sample = Sample(integers(5, 2), integers(2))
    else:
        sample = Sample(between(0.6, 2, 5, 1).detach(), between(0.6, 2, 2).detach())
    # Of few small integers some results agree by chance.
    by_chance = name in INTEGERS_ONLY
    check_rule(found(name), [sample], mesh_shapes=[(3,), (2, 2)], most=9, allow_missing=by_chance)


def test_every_operator_that_torch_calls_pointwise_has_a_rule():
    others = {"max", "min", "native_dropout_backward", "rrelu", "clone"}
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in getattr(packet, "overloads", list)():
            function = getattr(packet, overload)
            if torch.Tag.pointwise in function.tags and not overload.endswith("out"):
                assert lookup(function) is not None or name in others, function


# ---- gradients of those with more than one input

CALLS = {
    "add": (torch.add, [Sample(normal(5, 4), normal(4), alpha=2), Sample(normal(5, 1), normal(4)),
                        Sample(normal(5, 4), 2.0)]),
    "sub": (torch.sub, [Sample(normal(5, 4), normal())]),
    "mul": (torch.mul, [Sample(normal(5, 4), normal(5, 1)), Sample(normal(5, 4), 3)]),
    "div": (torch.div, [Sample(normal(5, 4), between(1, 2, 4)), Sample(normal(5, 4), 2.0),
                        Sample(normal(5, 4), between(1, 2)),
                        Sample(normal(5, 4), between(1, 2, 4), rounding_mode="floor")]),
    "pow": (torch.pow, [Sample(between(1, 2, 5, 4), normal(4)), Sample(2.0, normal(5, 4))]),
    "maximum": (torch.maximum, [Sample(normal(5, 4), normal(4))]),
    "clamp": (torch.clamp, [Sample(normal(5, 4), -0.5, 0.5),
                            Sample(normal(5, 4), min=normal(4), max=normal(5, 1))]),
    "ldexp": (torch.ldexp, [Sample(normal(5, 4), integers(4))]),
    "addcmul": (torch.addcmul, [Sample(normal(5, 4), normal(4), normal(5, 1), value=0.5)]),
    "addcdiv": (torch.addcdiv, [Sample(normal(5, 4), normal(4), between(1, 2, 5, 1), value=0.5)]),
    "lerp": (torch.lerp, [Sample(normal(5, 4), normal(5, 4), 0.3),
                          Sample(normal(5, 4), normal(5, 4), normal(4))]),
    "where": (torch.where, [Sample(normal(5, 4) > 0, normal(5, 4), normal(4)),
                            Sample(normal(5, 4) > 0, normal(5, 4), 0.0),
                            Sample(normal(5, 4) > 0, 1.5, normal(5, 4))]),
    "Tensor.where": (torch.Tensor.where, [Sample(normal(5, 4), normal(5, 4) > 0, normal(4))]),
    "masked_fill": (torch.masked_fill, [Sample(normal(5, 4), normal(5, 4) > 0, 0.0),
                                        Sample(normal(5, 4), normal(4) > 0, -1.0),
                                        Sample(normal(5, 4), normal(5, 4) > 0, normal())]),
    "complex": (torch.complex, [Sample(normal(5, 4), normal(5, 4))]),
    "polar": (torch.polar, [Sample(normal(5, 4), normal(5, 4))]),
    "view_as_complex": (lambda x: torch.view_as_complex(x).conj().resolve_conj() * 2j,
                        [Sample(normal(5, 4, 2))]),
    "real and imag": (lambda x, y: torch.view_as_real(torch.complex(x, y)).sum(-1)
                      + torch.complex(x, y).real * torch.imag(torch.complex(x, y)),
                      [Sample(normal(5, 4), normal(5, 4))]),
    "frexp": (torch.frexp, [Sample(normal(5, 4).detach())]),
    "prelu": (F.prelu, [Sample(normal(3, 5, 2), normal(5)), Sample(normal(3, 5), normal(1))]),
    "glu": (F.glu, [Sample(normal(5, 4)), Sample(normal(4, 5), 0)]),
    "gelu": (F.gelu, [Sample(normal(5, 4), approximate="tanh")]),
    "operators": (lambda x, y: 2 - x + 3 / y + y**2 + 2**x - x * y, [
        Sample(normal(5, 4), between(1, 2, 4))]),
    "operators without gradient": (lambda x, y: x // y + 7 // y + 7 % y + (x % y), [
        Sample(between(1, 9, 5, 4).detach(), between(1, 3, 4).detach())]),
    "bits": (lambda x, y: (2 & x) | (y ^ 5) | (~x) | (1 << x) | (9 >> y) | (x << 1), [
        Sample(integers(5, 4), integers(4))]),
    "comparisons": (lambda x, y: (x == y) | (x != 1) & (x > 2) | (x <= y), [
        Sample(normal(5, 4), normal(4))]),
}  # fmt: skip


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients(name):
    function, samples = CALLS[name]
    check_rule(function, samples, most=10)


IN_PLACE = {
    "add_": lambda x, y: x.add_(y),
    "mul_ then exp_": lambda x, y: x.mul_(y).exp_(),
    "div_": lambda x, y: x.div_(y.exp()),
    "operators": lambda x, y: operator.ipow(operator.imul(operator.isub(x, y), 2.0), 2),
    "relu": lambda x, y: F.relu(x, inplace=True) + y,
    "leaky_relu": lambda x, y: F.leaky_relu(x, 0.1, True) + y,
    "elu": lambda x, y: F.elu_(x, 0.5) + y,
    "masked_fill_": lambda x, y: x.masked_fill_(y > 0, 2.0),
    "clamp_": lambda x, y: x.clamp_(min=y),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place(name):
    function = IN_PLACE[name]
    check_rule(lambda x, y: function(x * 1.0, y), [Sample(normal(5, 4), normal(4))], most=10)


def test_type_promotion_is_torchs():
    samples = [
        Sample(integers(5, 4), between(0, 1, 4).detach().float()),
        Sample(normal(5, 4).detach().float(), torch.tensor(2.0, dtype=torch.float64)),
        Sample(integers(5, 4) > 4, 2.5),
    ]
    check_rule(torch.add, samples, most=12)
    half = Sample(normal(5, 4).detach().to(torch.bfloat16), normal(4).detach().float())
    check_rule(torch.add, [half], most=12, atol=1e-5)  # contributions are rounded, each
    check_rule(torch.true_divide, [Sample(integers(5, 4), 2)], most=12)


def test_isin_needs_all_it_compares_with():
    sample = Sample(integers(5, 4), torch.tensor([1, 2, 3]))
    check_rule(torch.isin, [sample], most=12, allow_missing=True)


# ---- by hand


def pending(mesh, *contributions):
    """The sum of one contribution for each rank."""
    return DTensor.from_local(contributions[mesh.get_rank()], mesh, [Partial()])


def test_pending_sums_flow_through_linear_operators_and_nothing_is_sent():
    def run():
        mesh = init_device_mesh("cpu", (2,))
        x = pending(mesh, torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0]))
        whole = torch.tensor([2.0, 4.0])
        events = []
        with listen(events.append):
            results = [-x, x * whole, x / whole, x + x, x - whole, torch.lerp(x, x, 0.5),
                       torch.where(whole > 2, x, 0.0), x.masked_fill(whole > 2, 0.0)]  # fmt: skip
        assert events == []
        assert all(each.placements == (Partial(),) for each in results)
        return [each.full_tensor().tolist() for each in results]

    expected = [[-11, -22], [22, 88], [5.5, 5.5], [22, 44], [9, 18], [11, 22], [0, 22], [11, 0]]
    assert sw.simulate(run, 2)[1] == expected


def test_a_number_is_added_to_a_pending_sum_once():
    def run():
        mesh = init_device_mesh("cpu", (2,))
        x = pending(mesh, torch.tensor([1.0]), torch.tensor([10.0]))
        return [(x + 1).full_tensor().item(), (1 - x).full_tensor().item(),
                x.masked_fill(torch.tensor([True]), 3.0).full_tensor().item()]  # fmt: skip

    assert sw.simulate(run, 2)[0] == [12, -10, 3]


def test_a_column_meets_a_split_matrix_without_moving():
    def run():
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Shard(0)])
        column = distribute_tensor(torch.tensor([[1.0], [2.0], [3.0]]), mesh, [Shard(0)])
        events = []
        with listen(events.append):
            result = x * column + torch.tensor(1.0)
        assert events == [] and result.placements == (Shard(0),)
        return result.full_tensor().tolist()

    assert sw.simulate(run, 2)[0] == [[1, 2], [5, 7], [13, 16]]


def test_equality_with_none_is_false_as_in_torch():
    def run():
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        assert (x == None) is False  # noqa: E711
        with pytest.raises(TypeError):
            x + "a"

    sw.simulate(run, 2)


def test_the_real_part_is_a_view_that_can_be_written():
    def run():
        mesh = init_device_mesh("cpu", (2,))
        z = distribute_tensor(torch.ones(4, dtype=torch.complex64), mesh, [Shard(0)])
        z.real.mul_(3)
        z.imag = torch.tensor([1.0, 2.0, 3.0, 4.0])
        return z.full_tensor()

    expected = torch.complex(torch.full((4,), 3.0), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert torch.equal(sw.simulate(run, 2)[1], expected)


def test_autocast_gives_the_dtypes_of_torch():
    def run():
        mesh = init_device_mesh("cpu", (2,))
        plain = torch.rand(4, 4)
        x = distribute_tensor(plain, mesh, [Shard(0)])
        half = x.to(torch.bfloat16)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert (half + x).dtype == (plain.to(torch.bfloat16) + plain).dtype
            assert torch.exp(half).dtype == torch.exp(plain.to(torch.bfloat16)).dtype
            assert F.gelu(x).dtype == F.gelu(plain).dtype

    sw.simulate(run, 2)


def test_second_derivatives():
    def run():
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.tensor([1.0, 2.0, 3.0]), mesh, [Shard(0)]).requires_grad_()
        w = distribute_tensor(torch.tensor(2.0), mesh, [Replicate()]).requires_grad_()
        (first,) = torch.autograd.grad((x**3 * w).sum(), w, create_graph=True)
        (second,) = torch.autograd.grad(first, x)
        return second.full_tensor().tolist()

    assert sw.simulate(run, 2)[0] == [3, 12, 27]


def test_ranks_agree_on_the_moves_of_a_gradient_though_one_holds_nothing():
    def run():
        mesh = init_device_mesh("cpu", (3,))
        x = distribute_tensor(torch.ones(2, 4), mesh, [Replicate()]).requires_grad_()
        rows = distribute_tensor(torch.ones(2, 4), mesh, [Shard(0)])  # the last rank has none
        (x * rows + (x + rows)).sum().backward()
        return x.grad.full_tensor()

    assert torch.equal(sw.simulate(run, 3)[2], torch.full((2, 4), 2.0))


def test_ranks_agree_on_the_moves_of_a_pending_leaf_whenever_python_collects():
    def run():
        mesh = init_device_mesh("cpu", (2,))
        a = distribute_tensor(torch.ones(5, 4), mesh, [Shard(0)]).requires_grad_()
        b = distribute_tensor(torch.ones(3), mesh, [Shard(0)]).requires_grad_()
        s = DTensor.from_local(torch.tensor(1.0), mesh, [Partial()]).detach().requires_grad_()
        first = (a + s).sum()
        if mesh.get_rank() == 1:
            gc.collect()
        (first + (b + s).sum()).backward()
        return s.grad.full_tensor().item()

    gc.disable()
    try:
        assert sw.simulate(run, 2)[1] == 23
    finally:
        gc.enable()


def test_bitwise_operators_in_place() -> None:
    first, second = torch.tensor([[12, 10, 7], [1, 2, 3]]), torch.tensor([[10, 3, 1], [4, 0, 2]])
    operators = (
        operator.iand,
        operator.ior,
        operator.ixor,
        operator.ilshift,
        operator.irshift,
    )

    def run(mesh: sw.DeviceMesh) -> None:
        for change in operators:
            x = before = in_layout(first.clone(), mesh, sw.Shard(1))
            x = change(x, in_layout(second, mesh, sw.Shard(0)))
            assert x is before and x.placements == (sw.Shard(1),)
            assert torch.equal(x.full_tensor(), change(first.clone(), second))

    ranks(run)
