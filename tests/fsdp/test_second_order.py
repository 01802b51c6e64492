"""torch.autograd.grad with respect to parameters, and gradients of gradients, as in one process."""

import warnings

import pytest
import torch
from support.fsdp_cases import (
    Net,
    assert_close,
    assert_same,
    batch,
    full,
    hybrid,
    in_one,
    made,
    mean_square,
    mine,
    replicated,
    shard_all,
)
from torch import nn

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.dtensor.tensor import as_layout
from shardwise.fsdp import MixedPrecisionPolicy, StateError, fully_shard
from shardwise.parallel import ColwiseParallel, parallelize_module


def kept(model, mesh):
    return shard_all(model, mesh, reshard_after_forward=False)


def on_other_dims(model, mesh):
    return shard_all(model, mesh, shard_placement_fn=lambda each: Shard(each.dim() - 1))


def over_tensor_parallel(model, mesh):
    both = sw.init_device_mesh("cpu", (2, mesh.size() // 2), ("dp", "tp"))
    whole = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, both["tp"], {f"layers.{index}.linear": whole for index in range(3)})
    return shard_all(model, both["dp"])


WAYS = {
    "by layer": shard_all,
    "in one": in_one,
    "kept": kept,
    "replicated": replicated,
    "hybrid": hybrid,
    "other dims": on_other_dims,
    "over tensor parallel": over_tensor_parallel,
}


def on_ranks(run, way, count=4):
    def on_rank():
        mesh = sw.init_device_mesh("cpu", (count,), ("dp",))
        model = made()
        WAYS[way](model, mesh)
        if way == "over tensor parallel":
            return run(model, batch().chunk(2)[mesh.get_rank() // (count // 2)])
        return run(model, mine(batch(), mesh))

    return sw.simulate(on_rank, count)


def directions(parameters):
    """Vectors for products with the Hessian, the same however parameters are laid out."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for each in parameters:
        value = torch.randn(each.shape, generator=generator, dtype=torch.float64)
        if isinstance(each, sw.DTensor):
            value = as_layout(value, each.mesh_layout, "value")
        found.append(value)
    return found


@pytest.fixture(autouse=True)
def no_warning_of_cycles():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using backward.*create_graph=True")
        yield


def compare(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(full(ours), full(theirs))


def sum_of_squares(tensors):
    """Return a plain number, of tensors that may be on several meshes."""
    found = [each.square().sum() for each in tensors]
    return sum(each.full_tensor() if isinstance(each, sw.DTensor) else each for each in found)


# ---- the programs


def first_order(model, x):
    return torch.autograd.grad(mean_square(model, x), list(model.parameters()))


def first_order_and_backward(model, x):
    parameters = list(model.parameters())
    found = torch.autograd.grad(mean_square(model, x), parameters)
    mean_square(model, x).backward()
    return [*found, *(each.grad for each in parameters)]


def adahessian(model, x):
    """As AdaHessian: backward with a graph, then products of the Hessian with vectors."""
    parameters = list(model.parameters())
    mean_square(model, x).backward(create_graph=True)
    gradients = [each.grad for each in parameters]
    vectors = directions(parameters)
    found = torch.autograd.grad(gradients, parameters, grad_outputs=vectors)
    traces = [product * vector for product, vector in zip(found, vectors, strict=True)]
    model.zero_grad()
    return [*found, *traces]


def several_products(model, x):
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(mean_square(model, x), parameters, create_graph=True)
    found = []
    for scale in (1.0, 2.0, -3.0):
        vectors = [each * scale for each in directions(parameters)]
        found += torch.autograd.grad(gradients, parameters, vectors, retain_graph=True)
    return found


def gradient_penalty(model, x):
    parameters = list(model.parameters())
    loss = mean_square(model, x)
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    penalty = sum_of_squares(gradients)
    (loss + 0.3 * penalty).backward()
    return [each.grad for each in parameters]


def penalty_of_grad(model, x):
    """The gradients are those of a backward."""
    parameters = list(model.parameters())
    mean_square(model, x).backward(create_graph=True)
    penalty = sum_of_squares(each.grad for each in parameters)
    model.zero_grad()
    penalty.backward()
    return [each.grad for each in parameters]


def third_order(model, x):
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(mean_square(model, x), parameters, create_graph=True)
    vectors = directions(parameters)
    products = torch.autograd.grad(gradients, parameters, vectors, create_graph=True)
    return torch.autograd.grad(products, parameters, vectors)


def accumulated(model, x):
    parameters = list(model.parameters())
    for _ in range(2):
        mean_square(model, x).backward(create_graph=True)
    vectors = directions(parameters)
    return torch.autograd.grad([each.grad for each in parameters], parameters, vectors)


def chosen_inputs(model, x):
    parameters = list(model.parameters())[::2]
    torch.autograd.backward(mean_square(model, x), inputs=parameters)
    return [each.grad for each in parameters]


def with_a_regularizer(model, x):
    """Which is of the parameters themselves, not of what modules compute."""
    parameters = list(model.parameters())
    loss = mean_square(model, x) + sum_of_squares(parameters)
    return torch.autograd.grad(loss, parameters)


def with_hooks(model, x):
    parameters = list(model.parameters())
    handles = [each.register_hook(lambda gradient: gradient.tanh() * 3) for each in parameters]
    gradients = torch.autograd.grad(mean_square(model, x), parameters, create_graph=True)
    products = torch.autograd.grad(gradients, parameters, directions(parameters))
    for handle in handles:
        handle.remove()
    return [*gradients, *products]


def with_hooks_in_backward(model, x):
    parameters = list(model.parameters())
    handles = [each.register_hook(lambda gradient: gradient.tanh() * 3) for each in parameters]
    mean_square(model, x).backward(create_graph=True)
    gradients = [each.grad for each in parameters]
    for handle in handles:
        handle.remove()
    return torch.autograd.grad(gradients, parameters, directions(parameters))


PROGRAMS = [
    first_order,
    first_order_and_backward,
    adahessian,
    several_products,
    gradient_penalty,
    penalty_of_grad,
    third_order,
    accumulated,
    chosen_inputs,
    with_a_regularizer,
    with_hooks,
    with_hooks_in_backward,
]


@pytest.mark.sampled(every=9)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("way", WAYS)
def test_it_is_as_in_one_process(way, program):
    plain = made()
    expected = program(plain, batch())
    plain = made()
    mean_square(plain, batch()).backward()

    def run(model, x):
        for _ in range(2):
            model.zero_grad()
            compare(program(model, x), expected)
        model.zero_grad()
        mean_square(model, x).backward()  # training goes on
        assert_same(model, plain)

    on_ranks(run, way)


def test_a_second_order_optimizer_trains_as_in_one_process():
    def trained(model, x):
        parameters = list(model.parameters())
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            mean_square(model, x).backward(create_graph=True)
            vectors = directions(parameters)
            found = torch.autograd.grad(
                [each.grad for each in parameters], parameters, vectors, retain_graph=False
            )
            with torch.no_grad():
                for each, product, vector in zip(parameters, found, vectors, strict=True):
                    each.grad = each.grad.detach() / ((product * vector).abs() + 0.5)
            optimizer.step()
        return model

    plain = trained(made(), batch())
    on_ranks(lambda model, x: compare(trained(model, x).parameters(), plain.parameters()), "hybrid")


# ---- ranks that differ


class Choice(nn.Module):
    """Ranks may use different parameters."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.never = nn.Linear(5, 5)

    def forward(self, x, uses_second):
        y = torch.tanh(self.first(x))
        return torch.tanh(self.second(y)) if uses_second else y


@pytest.mark.parametrize("count", [2, 4])
def test_parameters_that_only_some_ranks_use(count):
    def program(model, losses):
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(losses(), parameters, create_graph=True, allow_unused=True)
        assert [each is None for each in gradients] == [False] * 4 + [True] * 2
        used = parameters[:4]
        return torch.autograd.grad(gradients[:4], used, directions(used))

    plain = made(Choice)

    def losses_of_all():
        parts = batch().chunk(count)
        return (
            sum(plain(each, rank == 1).square().mean() for rank, each in enumerate(parts)) / count
        )

    expected = program(plain, losses_of_all)

    def run():
        mesh = sw.init_device_mesh("cpu", (count,), ("dp",))
        model = fully_shard(made(Choice), mesh=mesh)
        x = mine(batch(), mesh)
        compare(program(model, lambda: model(x, mesh.get_rank() == 1).square().mean()), expected)

    sw.simulate(run, count)


def test_an_unused_parameter_is_an_error_on_every_rank():
    def run():
        mesh = sw.init_device_mesh("cpu", (2,), ("dp",))
        model = fully_shard(made(Choice), mesh=mesh)
        loss = model(mine(batch(), mesh), True).sum()
        with pytest.raises(RuntimeError, match="index 4 appears to not have been used"):
            torch.autograd.grad(loss, list(model.parameters()))

    sw.simulate(run, 2)


# ---- dtypes and refusals


def test_mixed_precision():
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    expected = adahessian(made(), batch())

    def run():
        mesh = sw.init_device_mesh("cpu", (2,), ("dp",))
        model = shard_all(made(), mesh, mp_policy=policy)
        found = adahessian(model, mine(batch(), mesh))
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype is torch.float64
            torch.testing.assert_close(full(ours), theirs, rtol=1e-3, atol=1e-4)

    sw.simulate(run, 2)


def test_gradients_that_are_left_without_the_sum_over_replicas_have_no_history():
    def run():
        mesh = sw.init_device_mesh("cpu", (2, 2), ("replicate", "shard"))
        model = fully_shard(Net().double(), mesh=mesh)
        model.set_requires_all_reduce(False)
        with pytest.raises(StateError, match="set_requires_all_reduce"):
            mean_square(model, batch()).backward(create_graph=True)
        model.reset_iter_state()

    sw.simulate(run, 4)
