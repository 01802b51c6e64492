"""Random small models, sharded in random ways and trained as in one process."""

import functools
import math
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import DTensor, Replicate, Shard
from shardwise.fsdp import FSDPModule, all_gather, flat_buffer, fully_shard, replicate
from shardwise.fsdp import build as fsdp_build

ROWS, STEPS = 24, 3


class Layer(nn.Module):
    """A layer of one of a few kinds, with parameters of 0 to 3 dims."""

    def __init__(self, kind, width, out):
        super().__init__()
        self.kind = kind
        if kind == "linear":
            self.weight = nn.Parameter(torch.randn(out, width) / width)
            self.bias = nn.Parameter(torch.randn(out))
        elif kind == "transposed":  # not contiguous
            self.weight = nn.Parameter((torch.randn(width, out) / width).t())
        elif kind == "gain":
            self.weight = nn.Parameter(torch.randn(()))
        elif kind == "norm":
            self.weight = nn.Parameter(torch.randn(width))
        elif kind == "two matrices":
            self.weight = nn.Parameter(torch.randn(2, width, width) / width)
        elif kind == "product":  # of parameters alone
            self.weight = nn.Parameter(torch.randn(width, width) / width)
            self.vector = nn.Parameter(torch.randn(width))

    def forward(self, x):
        if self.kind in ("linear", "transposed"):
            return torch.tanh(nn.functional.linear(x, self.weight, getattr(self, "bias", None)))
        if self.kind == "two matrices":
            return x + torch.tanh(x @ self.weight[0]) @ self.weight[1]
        if self.kind == "product":
            return x * (self.weight @ self.vector)
        return x * self.weight


class Chain(nn.Module):
    """Layers one after the other; some are called twice or not at all, some are checkpointed."""

    def __init__(self, layers, calls, checkpointed):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.calls, self.checkpointed = calls, checkpointed

    def forward(self, x):
        for layer, calls, kind in zip(self.layers, self.calls, self.checkpointed, strict=True):
            is_plain = kind is None or not torch.is_grad_enabled()
            for _ in range(calls):
                x = layer(x) if is_plain else checkpoint(layer, x, use_reentrant=kind)
        return x


@dataclass(frozen=True)
class Case:
    """A model, and how it is sharded and trained.

    Arguments:
        kinds: the kinds of the layers, each with its output width.
        ties: pairs of layers of the same kind and shape that share their weight.
        placements: for each parameter the dim to split; larger numbers mean replicated or default.
        groups: the layers of each call of `fully_shard`, and how it reshards.
        root: how the call on the whole model reshards; "none" without such a call.
        mesh: one axis, or two for HSDP.
        reduces_once: only the backward of the last microbatch reduces gradients.
        evaluates: a forward without gradients precedes each step.
        passes: the number of forwards before each backward.
        keeps: parameters stay gathered after backward.
        limits: three limits in bytes: of groups that communicate together, of groups whose own row
            is not copied, and of groups that communicate alone; small, as these models are.
    """

    width: int
    kinds: tuple[tuple[str, int], ...]
    calls: tuple[int, ...]
    checkpointed: tuple[bool | None, ...]
    ties: tuple[tuple[int, int], ...]
    frozen: frozenset[int]
    placements: tuple[int, ...]
    groups: tuple[tuple[tuple[int, ...], bool | int | None], ...]
    root: bool | int | str | None
    mesh: tuple[int, ...]
    is_replicated: bool
    microbatches: int
    reduces_once: bool
    evaluates: bool
    passes: int = 1
    keeps: bool = False
    limits: tuple[int, int, int] = (1 << 20, 1 << 20, 1 << 19)


MESHES = [(1,), (2,), (3,), (4,), (2, 2), (1, 2), (2, 1)]


@st.composite
def cases(draw, meshes=MESHES):
    mesh = draw(st.sampled_from(meshes))
    is_replicated = len(mesh) == 1 and draw(st.booleans())
    divisors = [each for each in range(1, mesh[-1] + 1) if mesh[-1] % each == 0]
    reshard = st.sampled_from([None, True, False, *divisors])
    count = draw(st.integers(1, 4))
    names = ["linear", "transposed", "gain", "norm", "two matrices", "product"]
    kinds = []
    width = start = draw(st.integers(1, 7))
    calls = []
    for _ in range(count):
        kind = draw(st.sampled_from(names))
        out = draw(st.integers(1, 7)) if kind in ("linear", "transposed") else width
        kinds.append((kind, out))
        calls.append(draw(st.sampled_from([1, 1, 2, 0])) if out == width else 1)
        width = out
    some = st.integers(0, count - 1)
    groups = []
    first = 0
    root = draw(st.sampled_from(["none", None, True, False, *divisors]))
    while first < count:
        end = draw(st.integers(first + 1, count))
        if root == "none" or draw(st.booleans()):
            groups.append((tuple(range(first, end)), draw(reshard)))
        first = end
    return Case(
        start,
        tuple(kinds),
        tuple(calls),
        tuple(draw(st.sampled_from([None, None, False, True])) for _ in range(count)),
        tuple(draw(st.lists(st.tuples(some, some), max_size=2))),
        frozenset(draw(st.sets(st.integers(0, 4)))),
        tuple(draw(st.integers(0, 4)) for _ in range(5)),
        tuple(groups),
        root,
        mesh,
        is_replicated,
        draw(st.sampled_from([1, 2])),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from([1, 1, 2])),
        draw(st.sampled_from([False, False, True])),
        tuple(draw(st.sampled_from([limit, 64, 400])) for limit in Case.limits),
    )


def build(case):
    torch.manual_seed(0)
    layers = []
    width = case.width
    for kind, out in case.kinds:
        layers.append(Layer(kind, width, out).double())
        width = out
    for first, second in case.ties:
        one, other = layers[first], layers[second]
        if one.kind == other.kind and one.weight.shape == other.weight.shape:
            other.weight = one.weight
    model = Chain(layers, case.calls, case.checkpointed)
    parameters = list(model.parameters())
    for index, parameter in enumerate(parameters):
        parameter.choice = case.placements[index % len(case.placements)]
        parameter.requires_grad_(index not in case.frozen or len(parameters) == 1)
    if not any(each.requires_grad for each in parameters):
        parameters[0].requires_grad_()
    inputs = torch.randn(STEPS, ROWS, case.width, dtype=torch.float64)
    targets = torch.randn(STEPS, ROWS, width, dtype=torch.float64)
    return model, inputs, targets


def placement_of(parameter):
    if parameter.choice < parameter.dim():
        return Shard(parameter.choice)
    return None if parameter.choice % 2 else Replicate()


def shard(model, case):
    names = ("dp",) if len(case.mesh) == 1 else ("replicate", "shard")
    mesh = sw.init_device_mesh("cpu", case.mesh, names)
    if case.is_replicated:
        call = functools.partial(replicate, mesh=mesh)
    else:
        call = functools.partial(fully_shard, mesh=mesh, shard_placement_fn=placement_of)
    for indices, reshard in case.groups:
        options = {} if case.is_replicated else {"reshard_after_forward": reshard}
        call([model.layers[index] for index in indices], **options)
    if case.root != "none":
        options = {} if case.is_replicated else {"reshard_after_forward": case.root}
        call(model, **options)
    return mesh


def trained(case, is_sharded, watch=None):
    """Train as a case says; `watch` gets the sharded model, and checks it after every step."""
    model, inputs, targets = build(case)
    mesh = shard(model, case) if is_sharded else None
    watched = watch(model) if watch is not None else None
    sharded = [each for each in model.modules() if isinstance(each, FSDPModule)]
    parts, place = (1, 0) if mesh is None else (mesh.size(), mesh.get_rank())
    count = case.microbatches
    optimizer = torch.optim.SGD(
        [each for each in model.parameters() if each.requires_grad], 0.1, momentum=0.9
    )
    if case.keeps:
        for module in sharded:
            module.set_reshard_after_backward(False)
    for x, y in zip(inputs, targets, strict=True):
        if case.evaluates:
            with torch.no_grad():
                model(x)
        optimizer.zero_grad()
        for index, (some, wanted) in enumerate(zip(x.chunk(count), y.chunk(count), strict=True)):
            if case.reduces_once:
                for module in sharded:
                    module.set_requires_gradient_sync(index == count - 1)
            mine = some.chunk(parts)[place].clone().requires_grad_()
            output = torch.cat([model(part) for part in mine.chunk(case.passes)])
            loss = (output - wanted.chunk(parts)[place]).square().mean() / count
            loss.backward()
        optimizer.step()
        if watched is not None:
            watched.check()
    if is_sharded and case.root != "none" and not case.keeps:
        units = model._fsdp_group.schedule.unit_set.units
        assert not any(each.gathered_bytes for each in units), "gathered memory is freed"
    return [
        each.full_tensor() if isinstance(each, DTensor) else each.detach()
        for each in model.parameters()
    ]


@contextmanager
def limited(case):
    """Set the limits of a case for all ranks of this process."""
    places = (
        (fsdp_build, "BUCKET_BYTES"),
        (all_gather, "SKIP_OWN_BYTES"),
        (flat_buffer, "DIRECT_BYTES"),
    )
    with ExitStack() as stack:
        for (module, name), value in zip(places, case.limits, strict=True):
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def check_case(case, watch=None):
    with limited(case):
        outcomes = sw.simulate(lambda: trained(case, True, watch), math.prod(case.mesh))
    compare_case(outcomes, case)


def trained_in_process(case):
    """Train as one rank in a process of its own."""
    with limited(case):
        return trained(case, True)


def compare_case(outcomes, case):
    expected = trained(case, is_sharded=False)
    for found in outcomes:
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.detach(), theirs, rtol=1e-10, atol=1e-10)
