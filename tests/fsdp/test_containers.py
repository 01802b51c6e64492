"""Sharded modules take and return tensors in whatever holds them: containers, records, objects."""

from dataclasses import dataclass

import pytest
import torch
from support.fsdp_cases import (
    WIDTH,
    Block,
    Net,
    assert_close,
    batch,
    check_trains_as_one,
    full,
    in_one,
    made,
    on_ranks,
    replicated,
    shard_all,
)
from torch import nn

from shardwise.fsdp import fully_shard


@dataclass
class Record:
    values: torch.Tensor
    name: str


class Opaque:
    """Something that nobody can look into."""

    def __init__(self, values):
        self.values = values


class Returns(Block):
    """A block whose outputs are in something."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        return self.kind(super().forward(x))


PACKED = {
    "dict": (lambda x: {"a": x, "n": 1}, lambda x: x["a"]),
    "dataclass": (lambda x: Record(x, "it"), lambda x: x.values),
    "tuple": (lambda x: (1, (x, None)), lambda x: x[1][0]),
    "opaque": (Opaque, lambda x: x.values),
}


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("reshard", [True, False])
def test_outputs_in_containers_of_any_kind(packed, reshard):
    pack, unpack = PACKED[packed]

    class Packed(Net):
        def __init__(self):
            super().__init__(0)
            self.layers.extend(Returns(pack) for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = unpack(layer(x))
            return pack(self.head(x))

    def shard(model, mesh):
        shard_all(model, mesh, reshard_after_forward=reshard)

    check_trains_as_one(Packed, shard, loss=lambda model, x: unpack(model(x)).square().mean())


class Unfolded(Block):
    """Returns a view."""

    def forward(self, x):
        return super().forward(x).unsqueeze(0).squeeze(0)


class Adds(Block):
    """Returns its input, changed in place."""

    def forward(self, x):
        x += torch.tanh(self.linear(x.clone()))
        return x


@pytest.mark.parametrize("kind", [Block, Unfolded, Adds])
def test_outputs_that_the_caller_changes_in_place(kind):
    class Changes(Net):
        def __init__(self):
            super().__init__(0)
            self.layers.extend(kind() for _ in range(3))

        def forward(self, x):
            x = x.clone()
            for layer in self.layers:
                x = layer(x)
                x += 1
                x[:, 0].mul_(0.5)
            return self.head(x)

    check_trains_as_one(Changes, shard_all)


def test_a_loss_in_an_attribute():
    """Its backward comes before that of the output, and needs the parameters too."""

    class Beside(Block):
        def forward(self, x):
            output = super().forward(x)
            self.loss = self.linear(x).square().mean()
            return output

    class Sums(Net):
        def __init__(self):
            super().__init__(0)
            self.layers.extend(Beside() for _ in range(3))

    def loss(model, x):
        result = model(x).square().mean()
        return result + sum(layer.loss for layer in model.layers)

    check_trains_as_one(Sums, shard_all, loss=loss)


def test_inputs_by_keyword_and_in_containers():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, values, *, record, scale=None):
            return self.linear(values["x"]) * record.values + (0 if scale is None else scale)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Named(), Named()])

        def forward(self, *, x):
            first, second = self.layers
            y = first({"x": x}, record=Record(x, "it"))
            return second(values={"x": y}, record=Record(y, "it"), scale=x)

    check_trains_as_one(Outer, shard_all, loss=lambda model, x: model(x=x).square().mean())


def test_outputs_that_are_views_of_parameters_are_copies():
    class Gives(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, WIDTH))

        def forward(self, x):
            return x, self.weight[1:], self.weight

    class Uses(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Gives(), Block()])

        def forward(self, x):
            x, part, weight = self.layers[0](x)
            return self.layers[1](x) @ weight.t() + part.sum()

    check_trains_as_one(Uses, shard_all)

    def run(mesh):
        model = shard_all(made(Uses), mesh)
        with torch.no_grad():
            _, part, weight = model.layers[0](batch())
        assert_close(weight, full(model.layers[0].weight))
        assert_close(part, weight[1:])

    on_ranks(run)


def test_lstm():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.LSTM(WIDTH, 4, num_layers=2, batch_first=True)])
            self.head = nn.Linear(4, 2)

        def forward(self, x):
            output, (hidden, _) = self.layers[0](x.unflatten(0, (-1, 2)))
            return self.head(output) + hidden[-1].sum(-1)[:, None, None]

    check_trains_as_one(Recurrent, shard_all)


def test_frozen_parameters_are_there_for_the_gradients_of_inputs_that_nobody_sees():
    class Wraps(nn.Sequential):
        def forward(self, packed):
            return super().forward(packed.values)

    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.layers = nn.ModuleList([Wraps(nn.Linear(WIDTH, 4), nn.Linear(4, 3))])
            self.layers[0][0].requires_grad_(False)

        def forward(self, x):
            return self.layers[0](Opaque(torch.tanh(self.first(x))))

    check_trains_as_one(Hidden, shard_all)


# ---- containers with a forward


class Chain(nn.ModuleList):
    def forward(self, x):
        for each in self:
            x = torch.tanh(each(x))
        return x


class Choice(nn.ModuleDict):
    def forward(self, x):
        return self["second"](torch.tanh(self["first"](x)))


def chain():
    return Chain(nn.Linear(5, 5) for _ in range(3))


def choice():
    return Choice({"first": nn.Linear(5, 5), "second": nn.Linear(5, 5)})


def chain_with_a_forward_of_its_own():
    model = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
    model.forward = lambda x: model[1](torch.tanh(model[0](x)))
    return model


@pytest.mark.parametrize("kind", [chain, choice, chain_with_a_forward_of_its_own])
@pytest.mark.parametrize("shard", [in_one, replicated])
def test_a_list_or_dict_of_modules_that_has_a_forward_is_a_module_like_others(kind, shard):
    check_trains_as_one(kind, shard)


def test_a_slice_of_a_list_that_has_a_forward_is_one():
    def run(mesh):
        model = fully_shard(made(chain), mesh=mesh)
        part = model[1:]
        assert type(part) is Chain and len(part) == 2

    on_ranks(run)
