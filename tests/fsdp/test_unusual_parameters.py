"""Parameters that torch's FSDP2 refuses: tied, of mixed dtypes, scalar, empty, uneven."""

import copy

import pytest
import torch
import torch.nn.functional as F
from support.fsdp_cases import (
    WIDTH,
    Block,
    Net,
    assert_at_rest,
    assert_same,
    batch,
    check_trains_as_one,
    made,
    mine,
    on_ranks,
    shard_all,
    train,
)
from torch import nn

from shardwise import DTensor, Replicate, Shard, init_device_mesh, simulate
from shardwise.fsdp import CPUOffloadPolicy, fully_shard, replicate
from shardwise.parallel import shard_module

# ---- tied weights


class Tied(nn.Module):
    """Weights tied across layers, from the embedding to the head, and between child and parent."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(WIDTH, 7, bias=False)
        self.layers = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 7)])
        self.layers[2].weight = self.layers[0].weight
        self.own = self.layers[1].bias
        self.head = nn.Linear(7, WIDTH, bias=False)
        self.head.weight = nn.Parameter(torch.randn(WIDTH, 7))
        self.turned = self.embedding.weight

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = torch.tanh(layer(x)) + self.own
        return F.linear(self.head(x), self.turned)


def ties_hold(model):
    assert model.layers[2].weight is model.layers[0].weight
    assert model.own is model.layers[1].bias
    assert model.turned is model.embedding.weight


def by_layer(model, mesh):
    shard_all(model, mesh)


def embedding_alone(model, mesh):
    fully_shard(model.embedding, mesh=mesh)
    fully_shard(model, mesh=mesh)


def siblings(model, mesh):
    fully_shard([model.layers[0], model.layers[1]], mesh=mesh)
    fully_shard(model.layers[2], mesh=mesh, reshard_after_forward=False)
    fully_shard([model.embedding, model.head], mesh=mesh)
    fully_shard(model, mesh=mesh)


def root_only(model, mesh):
    fully_shard(model, mesh=mesh)


def replicated(model, mesh):
    replicate(model, mesh=mesh)


def first_of_layers(model, mesh):
    fully_shard(model.layers[0], mesh=mesh)
    fully_shard(model.layers[1], mesh=mesh)
    fully_shard(model, mesh=mesh)


@pytest.mark.parametrize(
    "shard", [by_layer, embedding_alone, siblings, root_only, replicated, first_of_layers]
)
def test_tied_weights_train_as_one_in_whichever_groups_they_are(shard):
    check_trains_as_one(Tied, shard, also=[ties_hold])


@pytest.mark.parametrize("first", [True, None])
def test_tied_weights_of_groups_that_keep_different_parts_after_forward(first):
    def shard(model, mesh):
        fully_shard(model.layers[0], mesh=mesh, reshard_after_forward=first)
        fully_shard(model.layers[2], mesh=mesh, reshard_after_forward=2)
        fully_shard(model, mesh=mesh)

    check_trains_as_one(Tied, shard, count=4)


def test_tied_weights_of_one_module_used_by_two_names():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Block(), Block()])
            self.layers.append(self.layers[0])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    def shard(model, mesh):
        for layer in model.layers[:2]:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)

    def same(model):
        assert model.layers[2] is model.layers[0]

    check_trains_as_one(Twice, shard, also=[same])


# ---- kinds of parameters


class Mixed(nn.Module):
    """Two dtypes in one group."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 4)
        self.second = nn.Linear(4, 3)

    def double(self):
        self.first.float()
        self.second.double()
        return self

    def forward(self, x):
        return self.second(self.first(x.float()).double())


def test_parameters_of_different_dtypes_in_one_group():
    plain = train(made(Mixed), batch())

    def run(mesh):
        model = fully_shard(made(Mixed), mesh=mesh)
        train(model, mine(batch(), mesh))
        assert model.first.weight.dtype is torch.float32
        assert model.second.weight.dtype is torch.float64
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(
                ours.full_tensor().double(), theirs.double(), rtol=1e-5, atol=1e-6
            )
        assert_at_rest(model)

    on_ranks(run)


class Odd(nn.Module):
    """A scalar, an empty parameter, and one whose dims are stored in another order."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.none_wide = nn.Parameter(torch.empty(4, 0))
        self.turned = nn.Parameter(torch.randn(WIDTH, 7).t())
        self.turned_even = nn.Parameter(torch.randn(3, 4).t())
        self.image = nn.Parameter(
            torch.randn(3, 2, 2, 2).to(memory_format=torch.channels_last), requires_grad=True
        )
        self.strides = ()

    def forward(self, x):
        self.strides = (self.turned.stride(), self.image.stride())
        rest = self.nothing.sum() + self.none_wide.sum() + self.image.square().sum()
        rest = rest + self.turned_even.square().cumsum(1).sum()
        return (x @ self.turned.t()) * self.scale + rest


def strides_hold(model):
    assert model.strides == ((1, 7), (8, 1, 4, 2))


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}])
@pytest.mark.parametrize("count", [2, 4])
def test_scalar_empty_and_non_contiguous_parameters(count, options):
    def shard(model, mesh):
        fully_shard(model, mesh=mesh, **options)
        assert model.scale.placements == (Replicate(),)
        assert model.nothing.shape == (0, 3) and model.none_wide.shape == (4, 0)

    check_trains_as_one(Odd, shard, count=count, also=[strides_hold])


def test_strides_are_kept_through_copies_casts_and_assigned_state():
    import copy

    def run(mesh):
        model = fully_shard(made(Odd), mesh=mesh)
        again = copy.deepcopy(model)
        again(batch())
        strides_hold(again)
        model.float()
        model(batch().float())
        strides_hold(model)
        model.load_state_dict(made(Odd).state_dict(), assign=True)
        model(batch())
        strides_hold(model)

    on_ranks(run)


def test_frozen_parameters_of_any_dtype():
    class Quantised(nn.Module):
        def __init__(self):
            super().__init__()
            values = torch.arange(15).reshape(3, WIDTH)
            self.whole = nn.Parameter((values - 7).to(torch.int8), requires_grad=False)
            self.mask = nn.Parameter(values % 2 == 0, requires_grad=False)
            self.turn = nn.Parameter(torch.tensor([1j, 2 + 1j, 3], dtype=torch.complex128))
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            weight = torch.where(self.mask, self.whole.double(), 0.5)
            return (self.linear(x) @ weight.t() * self.turn).abs()

        def double(self):
            self.linear.double()
            return self

    check_trains_as_one(Quantised, lambda model, mesh: fully_shard(model, mesh=mesh))


def test_a_mesh_of_one_rank():
    check_trains_as_one(Net, shard_all, count=1)


@pytest.mark.parametrize(
    ("dim", "reshard"), [(0, 2), (1, True), (1, 2), (1, 1), (1, False), (-1, None), (-1, 2)]
)
def test_uneven_shards_of_any_dim_with_any_reshard(dim, reshard):
    def placement(parameter):
        return Shard(dim if dim < 0 else min(dim, parameter.dim() - 1))

    def shard(model, mesh):
        shard_all(model, mesh, shard_placement_fn=placement, reshard_after_forward=reshard)
        assert model.layers[0].linear.weight.placements == (Shard(dim % 2),)

    check_trains_as_one(Net, shard, count=4)


def test_some_parameters_whole_by_the_placement_function():
    def placement(parameter):
        return Replicate() if parameter.dim() == 1 else None

    def shard(model, mesh):
        shard_all(model, mesh, shard_placement_fn=placement)
        assert model.head.bias.placements == (Replicate(),)
        assert model.head.weight.placements == (Shard(0),)

    check_trains_as_one(Net, shard, count=3, x=batch(9))


@pytest.mark.parametrize("pin", [True, False])
def test_cpu_offload_on_the_cpu_with_its_defaults(pin):
    def shard(model, mesh):
        policy = CPUOffloadPolicy() if pin else CPUOffloadPolicy(pin_memory=False)
        shard_all(model, mesh, offload_policy=policy)

    check_trains_as_one(Net, shard)


@pytest.mark.parametrize("factor", [1, 3.0])
def test_gradient_divide_factors(factor):
    plain = made()
    plain(batch()).square().mean().backward()
    for parameter in plain.parameters():
        parameter.grad *= 2 / factor

    def run(mesh):
        model = shard_all(made(), mesh)
        for module in (model, *model.layers):
            module.set_gradient_divide_factor(factor)
        model(mine(batch(), mesh)).square().mean().backward()
        assert_same(model, plain)

    on_ranks(run)


# ---- nothing to gather


def test_modules_without_parameters_pass_gradients_to_their_input():
    def run(mesh):
        model = nn.Sequential(nn.Tanh(), nn.Sequential(nn.ReLU(), nn.Tanh()))
        fully_shard(model[1], mesh=mesh)
        fully_shard(model, mesh=mesh)
        for _ in range(2):  # the second step goes in the order of the first
            x = torch.linspace(-1, 1, 6).requires_grad_()
            alone = x.detach().clone().requires_grad_()
            model(x).sum().backward()
            torch.tanh(torch.relu(torch.tanh(alone))).sum().backward()
            torch.testing.assert_close(x.grad, alone.grad)

    on_ranks(run, 2)


def test_a_unit_whose_parameters_are_empty_on_a_rank_trains_as_one():
    """A row split over two tensor-parallel ranks: the second has none, and shards that."""

    def run():
        mesh = init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        torch.manual_seed(0)
        alone = nn.Linear(5, 1, bias=False).double()
        model = nn.Sequential(copy.deepcopy(alone))
        shard_module(model, mesh["tp"], {"0.weight": {"tp": Shard(0)}})
        fully_shard(model, mesh=mesh["dp"])
        x = torch.arange(20.0).double().reshape(4, 5)
        rows = x[2 * mesh["dp"].get_local_rank() :][:2]
        for _ in range(2):
            local = model(rows)
            whole = local.full_tensor() if isinstance(local, DTensor) else local
            whole.square().mean().backward()
            alone(x).square().mean().backward()
            torch.testing.assert_close(model[0].weight.grad.full_tensor(), alone.weight.grad)
            for each in (model, alone):
                each.zero_grad()

    simulate(run, 4)
