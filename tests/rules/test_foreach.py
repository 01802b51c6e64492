"""torch._foreach_*, fused optimizers, norms and checks of many tensors."""

import math

import pytest
import torch
from support.rules import full, leaf, ranks, split

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from shardwise.comm import listen
from shardwise.rules.pointwise import foreach
from shardwise.rules.registry import lookup
from shardwise.testing import Sample, check_rule


def plain(*shape):
    return leaf(*shape).detach()


def pair():
    return [leaf(5, 2), leaf(3)]


POSITIVE = [leaf(5, 2).detach().sigmoid().requires_grad_(), leaf(3).detach().sigmoid()]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", foreach.POINTWISE)
def test_pointwise(name):
    unary = getattr(torch, f"_foreach_{name}")
    samples = SAMPLES.get(name, [Sample(POSITIVE)])
    check_rule(unary, samples, mesh_shapes=[(3,), (2, 2)], most=8)


SAMPLES = {
    "add": [Sample(pair(), pair(), alpha=2), Sample(pair(), 2.0), Sample(pair(), [1.0, 2.0]),
            Sample(pair(), plain())],
    "sub": [Sample(pair(), pair())],
    "mul": [Sample(pair(), pair()), Sample(pair(), 2.0), Sample(pair(), plain())],
    "div": [Sample(pair(), POSITIVE), Sample(pair(), [2.0, 3.0])],
    "addcmul": [Sample(pair(), pair(), pair(), [0.5, 2.0]),
                Sample(pair(), pair(), pair(), value=0.5)],
    "addcdiv": [Sample(pair(), pair(), POSITIVE, 0.5),
                Sample([plain(5, 2)], [plain(5, 2)], [plain(5, 2)], torch.tensor([2.0]))],
    "lerp": [Sample(pair(), pair(), 0.3), Sample(pair(), pair(), pair())],
    "pow": [Sample(POSITIVE, 2), Sample(2.0, pair()), Sample(POSITIVE, [2.0, 3.0])],
    **{name: [Sample(pair(), pair()), Sample(pair(), 0.1)]
       for name in ("maximum", "minimum", "clamp_min", "clamp_max")},
}  # fmt: skip


def test_in_place_of_each_kind():
    def inplace(name):
        def run(tensors, *args, **kwargs):
            made = [each * 1 for each in tensors]
            result = getattr(torch, f"_foreach_{name}_")(made, *args, **kwargs)
            assert result is made
            return made

        return run

    for name in ("add", "mul", "addcmul", "lerp"):
        check_rule(inplace(name), SAMPLES[name][:2], mesh_shapes=[(3,)], most=8)
    for name in ("sqrt", "neg", "zero"):
        check_rule(inplace(name), [Sample(POSITIVE)], mesh_shapes=[(3,)], most=8)
    for name in ("copy", "maximum"):
        samples = [Sample([plain(5, 2), plain(3)], [plain(5, 2), plain(3)])]
        check_rule(inplace(name), samples, mesh_shapes=[(3,)], most=8)


@pytest.mark.parametrize("order", [1, 2, math.inf, 3])
def test_norms(order):
    tensors = [plain(5, 2), plain(3), plain()]
    check_rule(torch._foreach_norm, [Sample(tensors, order)], most=20, allow_missing=True)
    check_rule(torch._foreach_norm, [Sample(pair(), order)], most=6, allow_missing=True)


def test_other_reductions():
    check_rule(torch._foreach_powsum, [Sample(pair()[:1])], most=8, gradients=False,
               allow_missing=True)  # fmt: skip
    check_rule(torch._foreach_max, [Sample([plain(5, 2), plain(3)])], most=8)


def test_every_foreach_function_of_torch_has_a_handler():
    for name in dir(torch):
        if name.startswith("_foreach_"):
            assert lookup(getattr(torch, name)) is not None, name


# ---- by hand


def test_norms_of_many_tensors_take_one_collective():
    def run():
        mesh = init_device_mesh("cpu", (2, 2))
        whole = [torch.full((5, 3), 2.0), torch.ones(4), torch.tensor(3.0)]
        lies = [[Shard(0), Shard(1)], [Replicate(), Shard(0)], [Replicate(), Replicate()]]
        tensors = [distribute_tensor(x, mesh, p) for x, p in zip(whole, lies, strict=True)]
        events = []
        with listen(events.append):
            norms = torch._foreach_norm(tensors)
        mine = [event.kind for event in events if event.rank == mesh.get_rank()]
        assert mine == ["all_reduce"]
        assert all(each.placements == (Replicate(), Replicate()) for each in norms)
        return [each.item() for each in norms]

    assert sw.simulate(run, 4)[3] == pytest.approx([math.sqrt(60), 2, 3])


def test_the_norm_of_half_precision_does_not_overflow_on_the_way():
    def run():
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.full((4,), 3e4, dtype=torch.float16), mesh, [Shard(0)])
        (norm,) = torch._foreach_norm([x])
        assert norm.dtype == torch.float16
        return norm.item()

    assert sw.simulate(run, 2)[0] == pytest.approx(6e4, rel=1e-3)


def test_plain_lists_and_mixed_lists():
    def run():
        mesh = init_device_mesh("cpu", (2,))
        split = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        result = torch._foreach_add([split, torch.ones(2)], [split, torch.ones(2)])
        assert isinstance(result[0], DTensor) and type(result[1]) is torch.Tensor
        norms = torch._foreach_norm([split, torch.ones(4)])
        assert norms[0].item() == norms[1].item() == 2
        whole = distribute_tensor(torch.ones(4), mesh, [Replicate()])
        torch._foreach_add_([split], [whole])
        assert split.placements == (Shard(0),)
        with pytest.raises(RuntimeError, match="same number of tensors"):
            torch._foreach_add([split], [split, split])
        return split.full_tensor().tolist()

    assert sw.simulate(run, 2)[0] == [2, 2, 2, 2]


def test_lists_that_lie_alike_are_one_call_of_torch(monkeypatch):
    def run():
        mesh = init_device_mesh("cpu", (2,))
        tensors = [distribute_tensor(torch.ones(4, 2), mesh, [Shard(at % 2)]) for at in range(4)]
        torch._foreach_addcmul_(tensors, tensors, tensors, 2.0)
        coefficient = distribute_tensor(torch.tensor(0.5), mesh, [Replicate()])
        torch._foreach_mul_(tensors, coefficient)
        return torch._foreach_sqrt(tensors)[3].full_tensor().sum().item()

    def refuse(*args):
        raise AssertionError("one by one")

    monkeypatch.setattr(foreach, "_one_by_one", refuse)
    assert sw.simulate(run, 2)[0] == pytest.approx(8 * math.sqrt(1.5))


OPTIMIZERS = {
    "sgd": lambda p, **how: torch.optim.SGD(p, 0.1, momentum=0.9, **how),
    "adam": lambda p, **how: torch.optim.Adam(p, 0.1, amsgrad=True, **how),
    "adamw": lambda p, **how: torch.optim.AdamW(p, 0.1, **how),
    "adagrad": lambda p, **how: torch.optim.Adagrad(p, 0.1, **how),
}
SHAPES = [(5, 4), (3,), ()]


def trained(parameters, optimizer):
    for step in range(3):
        for parameter in parameters:
            parameter.grad = torch.sin(parameter.detach() + step)
        optimizer.step()
    return [each.detach() for each in parameters]


@pytest.mark.parametrize("how", ["foreach", "fused"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name, how):
    values = [plain(*shape) for shape in SHAPES]
    make = OPTIMIZERS[name]
    reference = [each.clone().requires_grad_() for each in values]
    expected = trained(reference, make(reference, **{how: True}))

    def run():
        mesh = init_device_mesh("cpu", (2, 2))
        lies = [[Shard(0), Shard(1)], [Replicate(), Shard(0)], [Replicate(), Replicate()]]
        parameters = [
            torch.nn.Parameter(distribute_tensor(x, mesh, p))
            for x, p in zip(values, lies, strict=True)
        ]
        found = trained(parameters, make(parameters, **{how: True}))
        for result, want in zip(found, expected, strict=True):
            torch.testing.assert_close(result.full_tensor(), want)

    sw.simulate(run, 4)


def test_fused_with_gradients_that_lie_otherwise():
    values, gradient = plain(5, 4), plain(5, 4)
    keywords = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9, "dampening": 0.0,
                "nesterov": False, "maximize": False, "is_first_step": False}  # fmt: skip
    expected = values.clone()
    momentum = torch.ones(5, 4, dtype=torch.float64)
    torch._fused_sgd_([expected], [gradient.clone()], [momentum], **keywords)

    def run():
        mesh = init_device_mesh("cpu", (2,))
        parameter = distribute_tensor(values, mesh, [Shard(0)])
        buffer = distribute_tensor(torch.ones(5, 4, dtype=torch.float64), mesh, [Replicate()])
        given = distribute_tensor(gradient, mesh, [Shard(1)])
        torch._fused_sgd_([parameter], [given], [buffer], **keywords)
        assert parameter.placements == (Shard(0),) and buffer.placements == (Replicate(),)
        torch.testing.assert_close(parameter.full_tensor(), expected)
        torch.testing.assert_close(buffer.full_tensor(), momentum)

    sw.simulate(run, 2)


def test_clipping_uses_the_norm_over_all_ranks():
    values = [plain(5, 4), plain(3)]

    def run():
        mesh = init_device_mesh("cpu", (2,))
        parameters = [torch.nn.Parameter(distribute_tensor(x, mesh, [Shard(0)])) for x in values]
        for parameter in parameters:
            parameter.grad = parameter.detach().clone()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        expected = torch.cat([x.flatten() for x in values]).norm()
        torch.testing.assert_close(norm.full_tensor(), expected)
        clipped = torch.nn.utils.get_total_norm([each.grad for each in parameters])
        assert clipped.item() == pytest.approx(1.0, rel=1e-5)

    sw.simulate(run, 2)


@pytest.mark.parametrize("placement", [Shard(0), Partial()])
def test_one_ranks_infinity_is_found_by_all(placement):
    def run():
        mesh = init_device_mesh("cpu", (2,))
        bad = torch.tensor([1.0, 2.0, 3.0, math.inf])
        good = distribute_tensor(torch.full((4,), 8.0), mesh, [placement])
        found = torch.zeros(())
        scale = torch.tensor(0.5)
        torch._amp_foreach_non_finite_check_and_unscale_([good], found, scale)
        assert found.item() == 0 and good.full_tensor().tolist() == [4, 4, 4, 4]
        gradients = [good, distribute_tensor(bad, mesh, [placement])]
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, scale)
        return found.item()

    assert sw.simulate(run, 2) == [1, 1]


def test_grad_scaler_skips_the_step_on_every_rank():
    def run():
        mesh = init_device_mesh("cpu", (2,))
        parameter = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
        optimizer = torch.optim.SGD([parameter], 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for last in (math.inf, 1.0):
            optimizer.zero_grad()
            weights = distribute_tensor(torch.tensor([1.0, 1.0, 1.0, last]), mesh, [Shard(0)])
            scaler.scale((parameter * weights).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0
        return parameter.detach().full_tensor().tolist()

    assert sw.simulate(run, 2)[0] == pytest.approx([0.9] * 4)


ADAM = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "maximize": False}
FUSED = {
    "adam": lambda p, g, s, n: torch._fused_adam_(p, g, *s[:2], [], n, amsgrad=False, **ADAM),
    "adam, amsgrad": lambda p, g, s, n: torch._fused_adam_(p, g, *s, n, amsgrad=True, **ADAM),
    "adamw": lambda p, g, s, n: torch._fused_adamw_(p, g, *s, n, amsgrad=True, **ADAM),
    "adagrad": lambda p, g, s, n: torch._fused_adagrad_(
        p, g, s[0], n, lr=0.1, lr_decay=0.01, weight_decay=0.1, eps=1e-8, maximize=False
    ),
}


@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
@pytest.mark.parametrize("name", FUSED)
def test_fused_steps_take_their_numbers_as_dtensors(name, placement):
    """Steps without dims, as optimizers keep them; also beside parameters without dims."""
    generator = torch.Generator().manual_seed(0)
    tensors = [
        [torch.rand(shape, generator=generator) for shape in ((5, 3), (4,), ())] for _ in range(5)
    ]

    def run(make, step):
        parameters, gradients, *states = [[make(each.clone()) for each in group]
                                          for group in tensors]  # fmt: skip
        FUSED[name](parameters, gradients, states, [step() for _ in parameters])
        return [*parameters, *(each for group in states for each in group)]

    expected = run(lambda x: x, lambda: torch.tensor(3.0))

    def on_ranks():
        mesh = init_device_mesh("cpu", (2,))

        def make(x):
            how = placement if x.dim() else Replicate()
            return distribute_tensor(x, mesh, [how], src_data_rank=None)

        for got, want in zip(run(make, lambda: make(torch.tensor(3.0))), expected, strict=True):
            torch.testing.assert_close(got.full_tensor(), want)

    sw.simulate(on_ranks, 2)


# ---- fused optimizers with state that is not laid out as the parameters are


@pytest.mark.parametrize("rows", [4, 5])
def test_a_fused_step_takes_plain_state_and_updates_it(rows: int) -> None:
    def step(parameter, gradient, average, squares, count):
        torch._fused_adamw_(
            [parameter], [gradient], [average], [squares], [], [count],
            lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.01, eps=1e-8, amsgrad=False,
            maximize=False, grad_scale=None, found_inf=None,
        )  # fmt: skip
        return parameter, average, squares

    def state():
        return full(rows, 2) / 3, torch.zeros(rows, 2), torch.zeros(rows, 2), torch.tensor(1.0)

    expected = step(full(rows, 2), *state())

    def run(mesh):
        parameter = split(full(rows, 2), mesh, Shard(0))
        gradient, average, squares, count = state()
        found = step(parameter, split(gradient, mesh, Replicate()), average, squares, count)
        torch.testing.assert_close(found[0].full_tensor(), expected[0])
        assert found[0].placements == (Shard(0),)
        for got, want in zip(found[1:], expected[1:], strict=True):
            assert type(got) is torch.Tensor
            torch.testing.assert_close(got, want)

    ranks(run)


def test_norms_of_tensors_of_several_dtypes_keep_their_dtypes():
    tensors = [full(4), full(6).double(), full(5).bfloat16()]
    expected = torch._foreach_norm(tensors)

    def run(mesh):
        found = torch._foreach_norm([split(each, mesh, Shard(0)) for each in tensors])
        for got, want in zip(found, expected, strict=True):
            assert got.dtype == want.dtype
            torch.testing.assert_close(got.full_tensor(), want)

    ranks(run)


def test_a_scale_that_is_a_dtensor_unscales_gradients():
    def run(mesh):
        gradient = split(full(4), mesh, Shard(0))
        scale = split(torch.tensor(0.5), mesh, Replicate())
        found = torch.zeros(1)
        torch._amp_foreach_non_finite_check_and_unscale_([gradient], found, scale)
        assert torch.equal(gradient.full_tensor(), full(4) / 2) and found.item() == 0

    ranks(run)
