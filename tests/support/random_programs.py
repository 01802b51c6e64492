"""Random programs: hypothesis composes operators, and every layout must give the plain result."""

import math

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

import shardwise as sw
from shardwise import DTensor
from shardwise.testing import distributed, layouts_of

MOST_ELEMENTS = 400


class Step:
    """One operator of a program, and the earlier values it is applied to."""

    def __init__(self, name, operands, run, relays=False):
        self.name, self.operands, self.run, self.relays = name, operands, run, relays

    def __repr__(self):
        return f"{self.name}{self.operands}"


UNARY = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "neg": torch.neg,
    "square": torch.square,
    "gelu": F.gelu,
    "scale": lambda x: x * 0.5,
    "shift": lambda x: x + 0.25,
    "from one": lambda x: 1 - x,
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "keep positive": lambda x: torch.where(x > 0, x, x * 0.1),
    "mask": lambda x: x.masked_fill(x < -0.5, 0.0),
    "clone": lambda x: x.clone(),
    "single and back": lambda x: x.float().double() * 0 + x,
    "in place": lambda x: x.clone().mul_(2.0).add_(1.0).tanh_(),
    "total": lambda x: x + x.sum() * 0.01,
    "average": lambda x: x - x.mean(),
    "flat": lambda x: x.reshape(-1),
    "norm": lambda x: x / (1 + torch.linalg.vector_norm(x)),
}
ALONG = {
    "sum": lambda x, dim: x.sum(dim),
    "sum, kept": lambda x, dim: x.sum(dim, keepdim=True),
    "mean": lambda x, dim: x.mean(dim),
    "amax": lambda x, dim: x.amax(dim, keepdim=True),
    "max": lambda x, dim: x.max(dim).values,
    "logsumexp": lambda x, dim: x.logsumexp(dim),
    "softmax": lambda x, dim: x.softmax(dim),
    "log_softmax": F.log_softmax,
    "var": lambda x, dim: x.var(dim, correction=0),
    "cumsum": lambda x, dim: x.cumsum(dim),
    "flip": lambda x, dim: x.flip(dim),
    "roll": lambda x, dim: x.roll(1, dim),
    "unsqueeze": lambda x, dim: x.unsqueeze(dim),
    "select": lambda x, dim: x.select(dim, x.shape[dim] - 1),
    "narrow": lambda x, dim: x.narrow(dim, x.shape[dim] // 3, x.shape[dim] - x.shape[dim] // 3),
    "first and last": lambda x, dim: torch.cat([x.narrow(dim, 0, 1), x], dim),
    "pick": lambda x, dim: x.index_select(dim, torch.tensor([0, x.shape[dim] - 1])),
    "to front": lambda x, dim: x.movedim(dim, 0),
    "to back": lambda x, dim: x.transpose(dim, -1),
    "halves": lambda x, dim: x.chunk(2, dim)[0],
    "top": lambda x, dim: x.topk(1, dim).values,
    "prefix": lambda x, dim: x[(slice(None),) * dim + (slice(0, None, 2),)],
}
LAST = {
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "normalize": lambda x: F.normalize(x, dim=-1, eps=0.1),
    "pad": lambda x: F.pad(x, (1, 0)),
    "glu": lambda x: F.glu(torch.cat([x, x], -1), -1),
}
BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "maximum": torch.maximum,
    "where": lambda x, y: torch.where(x > y, x, y * 0.5),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5),
    "lerp": lambda x, y: torch.lerp(x, y, 0.25),
    "loss": lambda x, y: (
        x + F.mse_loss(x, x.detach() + y.detach()) if x.shape == y.shape else x + y
    ),
}


@st.composite
def programs(draw, most_steps=7):
    """Draw shapes of inputs, and steps whose operands are numbers of earlier values."""
    shapes = draw(
        st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=3)
    )
    values = [torch.zeros(shape, dtype=torch.float64, device="meta") for shape in shapes]
    steps = []
    for _ in range(draw(st.integers(1, most_steps))):
        step = draw(_step(values))
        made = step.run(*(values[at] for at in step.operands))
        if made.numel() > MOST_ELEMENTS or made.dim() > 4:
            continue
        steps.append(step)
        values.append(made)
    return [tuple(shape) for shape in shapes], steps


@st.composite
def _step(draw, values):
    at = draw(st.integers(0, len(values) - 1))
    x = values[at]
    kinds = ["unary", "binary", "relay"]
    if x.dim():
        kinds += ["along", "last"]
    if x.dim() >= 2:
        kinds += ["matmul", "merge", "permute"]
    kind = draw(st.sampled_from(kinds))
    if kind == "unary":
        name = draw(st.sampled_from(sorted(UNARY)))
        return Step(name, [at], UNARY[name])
    if kind == "last":
        name = draw(st.sampled_from(sorted(LAST)))
        return Step(name, [at], LAST[name])
    if kind == "along":
        name, dim = draw(st.sampled_from(sorted(ALONG))), draw(st.integers(0, x.dim() - 1))
        return Step(f"{name} {dim}", [at], lambda v: ALONG[name](v, dim))
    if kind == "permute":
        order = draw(st.permutations(range(x.dim())))
        return Step(f"permute {order}", [at], lambda v: v.permute(order))
    if kind == "merge":
        dim = draw(st.integers(0, x.dim() - 2))
        return Step(f"merge {dim}", [at], lambda v: v.flatten(dim, dim + 1))
    if kind == "relay":
        return Step("relay", [at], lambda v: v, relays=True)
    if kind == "matmul":
        others = [k for k, y in enumerate(values) if y.dim() == 2 and y.shape[0] == x.shape[-1]]
        if others:
            other = draw(st.sampled_from(others))
            return Step("matmul", [at, other], torch.matmul)
        return Step("gram", [at], lambda v: v @ v.mT)
    others = [k for k, y in enumerate(values) if _broadcasts(x.shape, y.shape)]
    other = draw(st.sampled_from(others))
    name = draw(st.sampled_from(sorted(BINARY)))
    return Step(name, [at, other], BINARY[name])


def _broadcasts(first, second):
    try:
        return math.prod(torch.broadcast_shapes(first, second)) <= MOST_ELEMENTS
    except RuntimeError:
        return False


MESHES = [(2,), (3,), (2, 2)]


def check_program(program, mesh_shape, choices):
    """Compare values and gradients with the plain program.

    `choices` picks the layout of each input, and of each value that a step redistributes.
    """
    shapes, steps = program
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    plain = [each.clone().requires_grad_() for each in inputs]
    expected = _evaluated(plain, steps, lambda value, step: value)
    _loss(expected).backward()

    def run():
        mesh = sw.init_device_mesh("cpu", mesh_shape)
        picks = iter(choices * (len(inputs) + len(steps)))

        def picked(tensor):
            options = layouts_of(tensor, mesh)
            return options[next(picks) % len(options)]

        leaves = [distributed(each.requires_grad_(), picked(each)) for each in inputs]

        def relay(value, step):
            layout = picked(value)
            return value.redistribute(placements=layout.placements, shard_order=layout.shard_order)

        found = _evaluated(leaves, steps, relay)
        for at, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            assert isinstance(ours, DTensor) and ours.shape == theirs.shape, (at, ours.shape)
            assert torch.allclose(ours.full_tensor(), theirs, rtol=1e-9, atol=1e-11), at
        _loss([value.full_tensor() for value in found]).backward()
        for at, (ours, theirs) in enumerate(zip(leaves, plain, strict=True)):
            assert torch.allclose(ours.grad.full_tensor(), theirs.grad, rtol=1e-8, atol=1e-10), (
                f"gradient of input {at}"
            )

    with torch.random.fork_rng():
        sw.simulate(run, math.prod(mesh_shape))


def _evaluated(inputs, steps, relay):
    values = list(inputs)
    for step in steps:
        operands = [values[at] for at in step.operands]
        values.append(relay(operands[0], step) if step.relays else step.run(*operands))
    return values


def _loss(values):
    total = 0.0
    for at, value in enumerate(values):
        weights = torch.linspace(-1, 1, max(value.numel(), 2), dtype=torch.float64)
        total = total + (value.reshape(-1) * weights[: value.numel()]).sum() / (1 + at)
    return total
