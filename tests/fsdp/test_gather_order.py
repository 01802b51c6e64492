"""All ranks gather the same units in the same order, even if they use different parameters."""

import pytest
import torch
from support.fsdp_cases import shard_all
from torch import nn

import shardwise as sw
from shardwise.fsdp import build, flat_buffer, fully_shard


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
        self.head = nn.Linear(width, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x, is_scaled=True, depth=2):
        for layer in list(self.layers)[:depth]:
            x = layer(x)
        x = self.head(x)
        return x * self.scale if is_scaled else x


@pytest.mark.parametrize("width", [8, 600], ids=["groups that travel together", "each by itself"])
@pytest.mark.parametrize(("reshard", "times"), [(None, 0), (True, 1)])
def test_ranks_that_give_back_the_head_at_different_times_gather_alike(width, reshard, times):
    """The head's backward is over before that of the layers, on the ranks that use all of it."""

    def run():
        torch.manual_seed(0)
        model = Net(width)
        mesh = sw.init_device_mesh("cpu", (2,), ("dp",))
        shard_all(model, mesh, reshard_after_forward=reshard)
        for _ in range(2):
            model(torch.ones(1, width), is_scaled=mesh.get_rank() == 0).sum().backward()
        return model.head.bias.grad.full_tensor()

    events = []
    with sw.listen(lambda event: event.cause.operator == "unshard" and events.append(event)):
        for gradient in sw.simulate(run, 2):
            torch.testing.assert_close(gradient, torch.full((4,), 2.0))
    first, second = ([each.cause for each in events if each.rank == rank] for rank in (0, 1))
    assert first == second
    again = [each for each in first if "Net" in each.module and each.direction == "backward"]
    assert len(again) == 2 * times  # in two steps


class Turned(nn.Module):
    """Two layers, in either order."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])

    def forward(self, x, is_turned):
        for layer in reversed(self.layers) if is_turned else self.layers:
            x = torch.tanh(layer(x))
        return x


def test_large_gradients_meet_their_own_in_whichever_order_they_come(monkeypatch):
    monkeypatch.setattr(flat_buffer, "DIRECT_BYTES", 8)  # each travels by itself

    def made():
        torch.manual_seed(0)
        return Turned()

    plain = made()
    sum(plain(torch.ones(1, 4), is_turned).sum() / 2 for is_turned in (False, True)).backward()

    def run():
        model = made()
        mesh = sw.init_device_mesh("cpu", (2,), ("dp",))
        shard_all(model, mesh, reshard_after_forward=None)
        model(torch.ones(1, 4), is_turned=mesh.get_rank() == 1).sum().backward()
        return [each.grad.full_tensor() for each in model.parameters()]

    for gradients in sw.simulate(run, 2):
        for ours, theirs in zip(gradients, plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.grad)


def test_backward_gathers_a_layer_once_though_the_last_forward_had_another_order(monkeypatch):
    """The group that it has resharded comes next in that order."""
    monkeypatch.setattr(build, "BUCKET_BYTES", 0)
    events = []

    def run():
        model = Turned()
        mesh = sw.init_device_mesh("cpu", (2,), ("dp",))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        fully_shard(model, mesh=mesh)
        loss = model(torch.ones(1, 4), is_turned=False).sum()
        model(torch.ones(1, 4), is_turned=True)
        loss.backward()

    with sw.listen(lambda event: event.rank == 0 and events.append(event.cause)):
        sw.simulate(run, 2)
    gathered = [
        each.module for each in events if (each.operator, each.direction) == ("unshard", "backward")
    ]
    assert gathered == ["layers.1", "layers.0"]


def test_groups_that_travel_with_used_ones_and_are_not_used_have_no_gradients():
    """Whatever is in the memory that they would have come in."""

    def run():
        model = Net(8)
        mesh = sw.init_device_mesh("cpu", (2,), ("dp",))
        shard_all(model, mesh, reshard_after_forward=None)
        model(torch.ones(1, 8)).sum().backward()
        model.zero_grad()
        model.layers[1](torch.ones(1, 8)).sum().backward()
        return [name for name, each in model.named_parameters() if each.grad is not None]

    assert sw.simulate(run, 2) == 2 * [["layers.1.weight", "layers.1.bias"]]


def test_gradients_that_were_accumulated_are_reduced_by_a_backward_that_does_not_use_their_group():
    def run():
        model = Net(600)
        mesh = sw.init_device_mesh("cpu", (2,), ("dp",))
        shard_all(model, mesh, reshard_after_forward=None)
        model.set_requires_gradient_sync(False)
        model(torch.ones(1, 600)).sum().backward()
        model.set_requires_gradient_sync(True)
        model(torch.ones(1, 600), depth=1).sum().backward()
        first = model.layers[1].bias.grad.full_tensor()
        torch.testing.assert_close(first, model.head.weight.full_tensor().sum(0))
        model.zero_grad()
        model(torch.ones(1, 600), depth=1).sum().backward()
        return model.layers[1].bias.grad

    assert sw.simulate(run, 2) == [None, None]


def test_buffers_of_inference_serve_in_training():
    """Though its tensors may not be written to afterwards."""

    def run():
        model = Net(8)
        mesh = sw.init_device_mesh("cpu", (2,), ("dp",))
        shard_all(model, mesh, reshard_after_forward=None)
        with torch.inference_mode():
            model(torch.ones(1, 8))
        model(torch.ones(1, 8)).sum().backward()
        return model.head.bias.grad.full_tensor().tolist()

    assert sw.simulate(run, 2) == [[1.0] * 4] * 2
