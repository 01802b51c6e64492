"""Communication goes on beside the computation: shown with a clock that only the test moves.

A collective takes a fixed time, and those of one channel follow one another; so does a layer, in
forward and in backward. The clock jumps on when somebody waits for what is not there yet.
"""

from functools import partial

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import Pending
from shardwise.comm.simulated import SimulatedCommunicator
from shardwise.core import world
from shardwise.fsdp import build, fully_shard, replicate, shard_memory

LAYERS = 8
FORWARD, BACKWARD = 2, 4
"""How long a layer computes."""


class Clock:
    """The time of one rank, and of what it sends.

    Arguments:
        delay: how long a collective takes.
        waits_at_once: whether whoever starts one stands still until it is over.
    """

    def __init__(self, delay, waits_at_once=False):
        self.delay = delay
        self.waits_at_once = waits_at_once
        self.now = 0
        self.spent = 0
        """By all collectives together."""
        self._free = {}
        """When a channel has done all that it was given."""

    def started(self, channel):
        """A collective starts now; says when it will be over."""
        self.spent += self.delay
        self._free[channel] = max(self.now, self._free.get(channel, 0)) + self.delay
        if self.waits_at_once:
            self.wait_until(self._free[channel])
        return self._free[channel]

    def wait_until(self, time):
        self.now = max(self.now, time)

    def install(self):
        """Let all communication of this rank take its time."""
        here = world.current()

        def communicator(ranks, axes, channel=""):
            index = ranks.index(here.rank)
            return SlowCommunicator(self, here._scheduler, ranks, index, axes, channel)

        here.communicator = communicator


class SlowCommunicator(SimulatedCommunicator):
    def __init__(self, clock, place, ranks, index, axes, channel):
        super().__init__(place, ranks, index, axes, channel)
        self._clock = clock
        self._channel = channel

    def _meet(self, *args):
        pending = super()._meet(*args)
        end = self._clock.started((self.ranks, self._channel))

        def finish():
            result = pending.wait()
            self._clock.wait_until(end)
            return result

        return Pending(finish)


class Computing(torch.autograd.Function):
    """Takes its time in forward, and in backward."""

    @staticmethod
    def forward(context, x, clock):
        context.clock = clock
        clock.now += FORWARD
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        context.clock.now += BACKWARD
        return gradient, None


class Layer(nn.Module):
    def __init__(self, clock):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.clock = clock

    def forward(self, x):
        return Computing.apply(x @ self.weight, self.clock)


class Net(nn.Module):
    """Layers between two that are in the group of the whole, as embeddings and heads are."""

    def __init__(self, clock):
        super().__init__()
        self.again = ()
        """Layers that are called once more, at the end."""
        self.first = Layer(clock)
        self.layers = nn.ModuleList(Layer(clock) for _ in range(LAYERS))
        self.last = Layer(clock)

    def forward(self, x):
        x = self.first(x)
        for layer in (*self.layers, *self.again):
            x = layer(x)
        return self.last(x)


def each_layer(model, mesh, **options):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def as_one_whole(model, mesh):
    replicate(model, mesh=mesh)


def without_prefetch(model, mesh):
    each_layer(model, mesh)
    for module in (model, *model.layers):
        module.set_modules_to_forward_prefetch([])
        module.set_modules_to_backward_prefetch([])


def timed(prepare, shape, delay, waits_at_once=False):
    """The time of forward and of backward of the second step, and that of all its collectives."""

    def run():
        clock = Clock(delay, waits_at_once)
        clock.install()
        mesh = sw.init_device_mesh("cpu", shape, ("replicate", "shard")[-len(shape) :])
        model = Net(clock)
        prepare(model, mesh)
        model(torch.ones(2, 4)).sum().backward()
        start, spent = clock.now, clock.spent
        output = model(torch.ones(2, 4))
        middle = clock.now
        output.sum().backward()
        return middle - start, clock.now - middle, clock.spent - spent

    first, *others = sw.simulate(run, 2 * len(shape))
    assert others == [first] * len(others)
    return first


@pytest.fixture(autouse=True)
def every_layer_travels_alone(monkeypatch):
    """However small it is."""
    monkeypatch.setattr(build, "BUCKET_BYTES", 0)
    monkeypatch.setattr(shard_memory, "REPLICATED_UNIT_BYTES", 1)


ALL = LAYERS + 2
SHARDED = LAYERS + 1
"""Each layer, and the two that are in the model's own group."""
AGAIN = LAYERS - 1
"""Which groups are resharded after forward: all but the last layer and the model's own group."""

WAYS = {
    # how, on which mesh, the number of collectives, and how many of them nothing goes on beside
    "fsdp": (each_layer, (2,), SHARDED + AGAIN + SHARDED, (1, 1)),
    "all resharded": (partial(each_layer, reshard_after_forward=True), (2,), 3 * SHARDED, (1, 2)),
    "kept": (partial(each_layer, reshard_after_forward=False), (2,), 2 * SHARDED, (1, 1)),
    "hsdp": (each_layer, (2, 2), SHARDED + AGAIN + 2 * SHARDED, (1, 2)),
    "replicate": (as_one_whole, (2,), ALL, (0, 1)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("delay", [1, FORWARD])
def test_only_the_first_gathers_and_the_last_reduction_are_waited_for(way, delay):
    prepare, shape, collectives, (before, after) = WAYS[way]
    forward, backward, spent = timed(prepare, shape, delay)
    assert spent == collectives * delay
    assert forward == ALL * FORWARD + before * delay
    assert backward == ALL * BACKWARD + after * delay


@pytest.mark.parametrize("way", ["fsdp", "hsdp"])
def test_a_step_takes_far_less_than_its_computation_and_its_collectives(way):
    prepare, shape, *_ = WAYS[way]
    forward, backward, spent = timed(prepare, shape, delay=FORWARD)
    computation = ALL * (FORWARD + BACKWARD)
    assert forward + backward < 0.6 * (computation + spent)
    assert forward + backward < 1.15 * computation


def test_slow_collectives_follow_one_another_without_a_gap():
    delay = 2 * BACKWARD
    forward, backward, _ = timed(*WAYS["fsdp"][:2], delay)
    assert forward == SHARDED * delay + 2 * FORWARD  # the last layer, and the last of all
    assert backward == 2 * BACKWARD + SHARDED * delay  # until a layer is through, all reductions
    forward, backward, _ = timed(*WAYS["replicate"][:2], delay)
    assert forward == ALL * FORWARD
    assert backward == BACKWARD + ALL * delay


def test_backward_prefetches_what_forward_has_used_last():
    def twice(model, mesh):
        each_layer(model, mesh)
        model.again = (model.layers[0],)

    _, backward, _ = timed(twice, (2,), delay=FORWARD)
    assert backward == (ALL + 1) * BACKWARD + FORWARD


def test_without_prefetch_every_gather_is_waited_for():
    forward, backward, _ = timed(without_prefetch, (2,), delay=FORWARD)
    assert forward == ALL * FORWARD + SHARDED * FORWARD
    assert backward == ALL * BACKWARD + AGAIN * FORWARD + FORWARD


def test_what_was_gathered_for_nothing_is_over_when_the_call_is():
    """From then on shards may change, and the memory it came in is used again."""

    def run():
        clock = Clock(10 * FORWARD)
        clock.install()
        model = Net(clock)
        each_layer(model, sw.init_device_mesh("cpu", (2,)))
        model(torch.ones(2, 4)).sum().backward()
        spent = clock.spent
        model.layers[0](torch.ones(2, 4))
        assert clock.spent == spent + 2 * clock.delay  # its own, and the next one's
        assert clock.now == max(clock._free.values())

    sw.simulate(run, 2)


@pytest.mark.parametrize("way", WAYS)
def test_the_clock_adds_up_what_does_not_overlap(way):
    """Collectives that end before they return, such as those that torch's FSDP2 makes on gloo."""
    prepare, shape, *_ = WAYS[way]
    forward, backward, spent = timed(prepare, shape, FORWARD, waits_at_once=True)
    assert forward + backward == ALL * (FORWARD + BACKWARD) + spent
