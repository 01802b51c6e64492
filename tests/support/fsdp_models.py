"""A small model, and every way to train it: in one process on whole batches, or on data-parallel
ranks with a part of each batch. Shared by simulated and real ranks.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import DTensor, Replicate, Shard
from shardwise.fsdp import fully_shard
from shardwise.fsdp import replicate as replicated
from shardwise.parallel import (
    Activations,
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
    shard_module,
)

BATCH, LENGTH = 12, 3


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """An embedding, blocks and a head, which may be the embedding again."""

    def __init__(self, vocabulary=7, width=6, hidden=10, tied=False, layers=3):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.regions = [1] * layers
        """How many blocks are called at once."""
        self.checkpointed = None
        """Whether regions are computed anew in backward: with `use_reentrant` or without."""

    def forward(self, tokens):
        x = self.embedding(tokens)
        first = 0
        for count in self.regions:
            region = functools.partial(self.through, first, first + count)
            first += count
            if self.checkpointed is None:
                x = region(x)
            else:
                x = checkpoint(region, x, use_reentrant=self.checkpointed)
        return self.head(self.norm(x))

    def through(self, first, end, x):
        for block in self.blocks[first:end]:
            x = block(x)
        return x


# ---- what is trained, and how


@dataclass(frozen=True)
class Task:
    """The training, as one process does it."""

    dtype: torch.dtype = torch.float64
    sizes: tuple[int, int, int] = (7, 6, 10)
    tied: bool = False
    frozen: str = "nothing"
    clip: float | None = None
    steps: int = 10


FROZEN: dict[str, Callable[[str], bool]] = {
    "nothing": lambda name: False,
    "some": lambda name: name in ("blocks.0.norm.bias", "blocks.1.up.weight", "norm.weight"),
    "whole layers": lambda name: name.startswith(("embedding.", "blocks.0.", "blocks.2.")),
    "all but biases": lambda name: not name.endswith("bias"),
}


@dataclass(frozen=True)
class Way:
    """How ranks share the work.

    Arguments:
        shape, names: the mesh; axes other than "tp" are data-parallel.
        prepare: makes a module data-parallel.
        lay_out: makes it tensor-parallel first, if there is an axis "tp".
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]
    prepare: Callable[..., None]
    lay_out: Callable[..., None] | None = None

    @property
    def ranks(self):
        return math.prod(self.shape)

    @property
    def data_shape(self):
        """Return the sizes of the data-parallel axes, over which the batch is split."""
        return self.shape if self.lay_out is None else self.shape[:1]


@dataclass(frozen=True)
class Variation:
    """A change of the schedule that must not change any value.

    Arguments:
        microbatches: the number of microbatches of each part.
        sync: when gradients are reduced: for "every" microbatch; with the "last" for all of them;
            for HSDP "shards": each over the shard axis, and the last one over the other axis.
        regions, checkpointed: see `Net`.
        options: for `fully_shard` or `replicate`.
    """

    microbatches: int = 1
    sync: str = "every"
    regions: tuple[int, ...] = (1, 1, 1)
    checkpointed: bool | None = None
    options: dict = field(default_factory=dict)


PLAIN = Variation()

FEATURES: dict[str, tuple[dict, Variation]] = {
    "nothing else": ({}, PLAIN),
    "tied": ({"tied": True}, PLAIN),
    "some frozen": ({"frozen": "some"}, PLAIN),
    "layers frozen": ({"frozen": "whole layers"}, PLAIN),
    "biases trained": ({"frozen": "all but biases"}, PLAIN),
    "microbatches": ({}, Variation(3)),
    "microbatches, reduced once": ({}, Variation(3, "last")),
    "checkpoints": ({}, Variation(checkpointed=False)),
    "checkpoints, reentrant": ({}, Variation(checkpointed=True)),
    "checkpoints of two": ({}, Variation(regions=(2, 1), checkpointed=False)),
    "checkpoints of two, reentrant": ({}, Variation(regions=(2, 1), checkpointed=True)),
    "clipped": ({"clip": 0.1}, PLAIN),
    "all of it": (
        {"tied": True, "frozen": "some", "clip": 0.1},
        Variation(3, "last", (2, 1), checkpointed=False),
    ),
    "all of it, reentrant": (
        {"tied": True, "frozen": "some", "clip": 0.1},
        Variation(3, "last", (2, 1), checkpointed=True),
    ),
}

TOGETHER: dict[str, tuple[dict, Variation]] = {
    # All of the above in a few cases; each by itself: tests/sweep.
    "nothing else": FEATURES["nothing else"],
    "tied, microbatches": ({"tied": True}, Variation(3)),
    "some frozen, clipped, checkpoints of two, reentrant": (
        {"frozen": "some", "clip": 0.1},
        Variation(regions=(2, 1), checkpointed=True),
    ),
    "layers frozen, microbatches reduced once": ({"frozen": "whole layers"}, Variation(3, "last")),
    "biases trained, checkpoints": ({"frozen": "all but biases"}, Variation(checkpointed=False)),
    "all of it": FEATURES["all of it"],
}


def each_block(model, mesh, **options):
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def as_one(model, mesh, **options):
    fully_shard(model, mesh=mesh, **options)


def as_one_whole(model, mesh, **options):
    replicated(model, mesh=mesh, **options)


PLAN = {
    "blocks.*.up.*": {"tp": Shard(0)},
    "blocks.*.down.weight": {"tp": Shard(1)},
    "embedding.weight": {"tp": Shard(0)},
    "": Activations(inputs={"tp": Replicate()}),
}


def by_plan(model, mesh):
    """Lay out every parameter on the axis."""
    shard_module(model, mesh, PLAN)


def by_styles(model, mesh):
    """Lay out the parameters except those of norms, the embedding and the head."""
    styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, styles)


WAYS = {
    "fsdp": Way((2,), ("dp",), each_block),
    "hsdp": Way((2, 2), ("replicate", "shard"), each_block),
    "fsdp x tp": Way((2, 2), ("dp", "tp"), each_block, by_plan),
    "fsdp x styles": Way((2, 2), ("dp", "tp"), each_block, by_styles),
    "replicate": Way((2,), ("dp",), as_one_whole),
}


UNEVEN = {
    "fsdp 2": Way((2,), ("dp",), each_block),
    "fsdp 3": Way((3,), ("dp",), each_block),
    "fsdp 4": Way((4,), ("dp",), each_block),
    "hsdp 2x2": WAYS["hsdp"],
    "hsdp 2x3": Way((2, 3), ("replicate", "shard"), each_block),
    "fsdp 2 x tp 2": WAYS["fsdp x tp"],
    "fsdp 3 x tp 2": Way((3, 2), ("dp", "tp"), each_block, by_plan),
    "fsdp 2 x styles 2": WAYS["fsdp x styles"],
}
UNEVEN_SIZES = (5, 7, 3)


def columns(parameter):
    """Split matrices along their second dim."""
    return Shard(1) if parameter.dim() > 1 else Shard(0)


def some_whole(parameter):
    """Split matrices along their last dim, and replicate the rest."""
    return Replicate() if parameter.dim() == 1 else Shard(-1)


# ---- training


@dataclass
class Outcome:
    losses: list[float]
    gradients: dict[str, torch.Tensor | None]
    """Of the first step."""
    parameters: dict[str, torch.Tensor]
    """After the last."""
    norms: list[float]


def build(task):
    torch.manual_seed(0)
    vocabulary, width, hidden = task.sizes
    model = Net(vocabulary, width, hidden, task.tied).to(task.dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not FROZEN[task.frozen](name))
    batches = torch.randint(vocabulary, (task.steps, BATCH, LENGTH + 1))
    return model, batches


def loss_of(model, tokens):
    logits = model(tokens[:, :-1]).flatten(0, 1)
    logits = logits.float() if logits.dtype is torch.bfloat16 else logits
    return F.cross_entropy(logits, tokens[:, 1:].flatten())


def stepped(model, task, accumulate):
    """Train: `accumulate(step)` leaves the gradients of a step, and returns its loss."""
    trained = [each for each in model.parameters() if each.requires_grad]
    # A large eps: else the first steps are of the gradient's sign, which rounding decides where a
    # gradient is nothing.
    optimizer = torch.optim.AdamW(trained, lr=0.01, eps=1e-3)
    outcome = Outcome([], {}, {}, [])
    for step in range(task.steps):
        optimizer.zero_grad()
        outcome.losses.append(accumulate(step))
        if not step:
            outcome.gradients = {
                name: None if each.grad is None else whole(each.grad)
                for name, each in model.named_parameters()
            }
        if task.clip is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), task.clip)
            outcome.norms.append(whole(norm).item())
        optimizer.step()
    outcome.parameters = {name: whole(each) for name, each in model.named_parameters()}
    return outcome


def whole(tensor):
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().clone()


@functools.cache
def alone(task):
    """Train in one process, on whole batches."""
    model, batches = build(task)

    def accumulate(step):
        loss = loss_of(model, batches[step])
        loss.backward()
        return loss.item()

    return stepped(model, task, accumulate)


def as_rank(way, task, variation=PLAIN):
    """Train as one of several ranks, on its part of every batch."""
    mesh = sw.init_device_mesh("cpu", way.shape, way.names)
    model, batches = build(task)
    if way.lay_out is not None:
        way.lay_out(model, mesh["tp"])
        mesh = mesh["dp"]
    way.prepare(model, mesh, **variation.options)
    model.regions, model.checkpointed = variation.regions, variation.checkpointed
    place = mesh.mesh.flatten().tolist().index(mesh.get_rank())
    count = variation.microbatches

    def accumulate(step):
        total = 0.0
        for index, microbatch in enumerate(batches[step].chunk(count)):
            is_last = index == count - 1
            if variation.sync == "last":
                model.set_requires_gradient_sync(is_last)
            elif variation.sync == "shards":
                model.set_requires_all_reduce(is_last)
            loss = loss_of(model, microbatch.chunk(mesh.size())[place]) / count
            loss.backward()
            total += whole(loss).item()
            check_memory(model)
        return total

    outcome = stepped(model, task, accumulate)
    check_memory(model)
    return outcome


TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}


def check(way, task, variation=PLAIN):
    """Check that simulated ranks train as one process does."""
    outcomes = sw.simulate(lambda: as_rank(way, task, variation), way.ranks)
    compare(outcomes, alone(task), TOLERANCES[task.dtype])


def check_memory(model):
    gathered = {
        unit.name: unit.gathered_bytes for unit in model._fsdp_group.schedule.unit_set.units
    }
    assert not any(gathered.values()), gathered


def compare(outcomes, expected, tolerance):
    """Compare the results of each rank, and the whole of their shards, with one process."""
    for step, loss in enumerate(expected.losses):
        mean = sum(outcome.losses[step] for outcome in outcomes) / len(outcomes)
        assert abs(mean - loss) <= tolerance, (step, mean, loss)
    for outcome in outcomes:
        assert len(outcome.norms) == len(expected.norms)
        for norm, other in zip(outcome.norms, expected.norms, strict=True):
            assert abs(norm - other) <= tolerance, (norm, other)
        for ours, theirs in (
            (outcome.gradients, expected.gradients),
            (outcome.parameters, expected.parameters),
        ):
            assert ours.keys() == theirs.keys()
            for name, tensor in theirs.items():
                assert (ours[name] is None) == (tensor is None), name
                if tensor is not None:
                    torch.testing.assert_close(
                        ours[name], tensor, rtol=tolerance, atol=tolerance, msg=explained(name)
                    )


def explained(name):
    return lambda message: f"{name}: {message}"
