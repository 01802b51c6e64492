"""Programs and steps that draw random numbers draw those of one process, from torch's generator."""

import io

import pytest
import torch
import torch.nn.functional as F
from support.export_ranks import Routed
from torch import nn
from torch.func import functional_call
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import Shard
from shardwise.export import ExportError, shard_program, shard_step
from shardwise.export.random import Draw

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

X = torch.linspace(-1, 1, 6 * 4 * 5).view(6, 4, 5)


class Module(nn.Module):
    def __init__(self, *functions):
        super().__init__()
        self.functions = functions

    def forward(self, x):
        return [function(x) for function in self.functions]


def reloaded(made):
    file = io.BytesIO()
    torch.export.save(made, file)
    file.seek(0)
    return torch.export.load(file)


def twice(function, *inputs):
    """Return two results, and a draw after them: the generators must have advanced equally."""
    torch.manual_seed(5)
    return pytree.tree_leaves([function(*inputs), function(*inputs), torch.rand(2)])


def no_grad(x):
    with torch.no_grad():
        y = F.dropout(x, 0.4)
    return x + y


DROPOUTS = [
    lambda x: F.dropout(x, 0.3),
    lambda x: F.dropout(x, 1.0),  # draws nothing
    lambda x: F.dropout(x.transpose(0, 2), 0.3),  # in the order of the memory
    lambda x: torch.native_dropout(x.permute(1, 2, 0), 0.3, True),
    lambda x: F.dropout2d(x[None], 0.5),
    lambda x: F.alpha_dropout(x, 0.4, True),
    lambda x: F.feature_alpha_dropout(x, 0.4, True),
    lambda x: F.rrelu(x, training=True),  # draws as much as there is below 0
    lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.4, is_causal=True),
    no_grad,
    lambda x: F.dropout(x[None].transpose(1, 3), 0.3),  # dims of size 1 have no order
    lambda x: F.dropout(x[:, None].permute(3, 1, 2, 0), 0.3),
]
NUMBERS = [
    torch.rand_like,
    lambda x: torch.randn_like(x.transpose(0, 1)),
    lambda x: torch.randint_like(x, 2, 9),
    lambda x: torch.bernoulli(x.sigmoid()),
    lambda x: torch.bernoulli(x.sigmoid().mT),
    lambda x: torch.bernoulli(x, 0.3),
    lambda x: torch.zeros_like(x).bernoulli_(x.sigmoid().double()),
    lambda x: torch.normal(x, 2.0) + torch.normal(0.0, x.exp()),
    lambda x: torch.empty_like(x).uniform_(1, 2) + torch.empty_like(x).normal_(1, 2),
    lambda x: torch.empty_like(x).log_normal_() + torch.empty_like(x).exponential_(2.0),
    lambda x: torch.empty_like(x).cauchy_() + torch.empty_like(x).geometric_(0.3),
    lambda x: torch.empty_like(x).random_(3) + torch.empty_like(x).random_(),
    lambda x: torch.empty_like(x, dtype=torch.int64).random_(),
    lambda x: x + torch.rand(4, 5) + torch.randn(6, 1, 5) + torch.randperm(4)[:, None],
    lambda x: torch.multinomial(x.flatten(1).exp(), 3) + torch.randint(3, (3,)),
    lambda x: torch.multinomial(x.flatten(1).exp(), 3, True),
    lambda x: torch.poisson(x.exp()),
]


def check(original, shape, placements):
    """Compare each rank's program, with these placements of its input, with the original."""
    want = twice(original.module(), X)

    def rank():
        mesh = sw.init_device_mesh("cpu", shape, ("dp", "tp")[-len(shape) :])
        made = shard_program(original, mesh, {}, input_placements={"x": placements})
        piece = sw.distribute_tensor(X, mesh, placements).to_local()
        with Routed(mesh):
            return twice(made.module(), piece)

    for got in sw.simulate(rank, torch.Size(shape).numel()):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("functions", [DROPOUTS, NUMBERS], ids=["dropout", "numbers"])
def test_programs_draw_what_one_process_does(functions):
    check(torch.export.export(Module(*functions), (X,)), (2,), [Shard(0)])


def test_dims_of_size_1_do_not_change_what_is_drawn():
    rows = Draw("one", (6, 4), (0, 1))
    assert rows.numbers == Draw("other", (1, 6, 1, 4), (2, 0, 1, 3)).numbers
    assert rows.numbers != Draw("columns", (1, 6, 4), (0, 2, 1)).numbers
    assert rows.numbers != Draw("with gaps", (6, 4), None).numbers
    assert rows.numbers != Draw("turned", (4, 6), (0, 1)).numbers


@pytest.mark.slow
def test_decomposed_programs_draw_what_one_process_does():
    functions = [*DROPOUTS[2:4], DROPOUTS[5], *NUMBERS[:2], NUMBERS[8]]
    original = torch.export.export(Module(*functions), (X,)).run_decompositions()
    check(original, (2, 2), [Shard(2), Shard(0)])


def test_saved_programs_draw_what_one_process_does_also_where_a_rank_has_nothing():
    original = torch.export.export(Module(DROPOUTS[0], torch.rand_like), (X[:3],))
    want = twice(original.module(), X[:3])

    def rank():
        mesh = sw.init_device_mesh("cpu", (4,), ("tp",))
        made = shard_program(original, mesh, {}, input_placements={"x": [Shard(0)]})
        piece = sw.distribute_tensor(X[:3], mesh, [Shard(0)]).to_local()
        with Routed(mesh):
            return twice(reloaded(made).module(), piece)

    for got in sw.simulate(rank, 4):
        assert all(map(torch.equal, got, want))


def test_sizes_may_be_dynamic():
    sizes = {0: torch.export.Dim("rows", max=64)}
    functions = [DROPOUTS[0], DROPOUTS[2], NUMBERS[0]]
    original = torch.export.export(Module(*functions), (X,), dynamic_shapes={"x": sizes})
    other = X.repeat(2, 1, 1)[:11]
    want = twice(original.module(), other)

    def rank():
        mesh = sw.init_device_mesh("cpu", (2,), ("tp",))
        made = shard_program(original, mesh, {}, input_placements={"x": {"tp": Shard(1)}})
        with Routed(mesh):
            return twice(made.module(), other.chunk(2, 1)[mesh.get_rank()])

    for got in sw.simulate(rank, 2):
        assert all(map(torch.equal, got, want))


# ---- steps

MODEL = nn.Sequential(nn.Linear(5, 12), nn.GELU(), nn.Dropout(0.3), nn.Linear(12, 5)).double()
PARAMS = {name: each.detach() for name, each in MODEL.named_parameters()}
PLAN = {"0.*": {"tp": Shard(0)}, "3.weight": {"tp": Shard(1)}, "x": {"dp": Shard(0)}}


def train(params, x):
    params = {name: each.detach().requires_grad_() for name, each in params.items()}
    made = F.dropout(functional_call(MODEL, params, (x,)).mT, 0.2) + torch.rand(4)
    loss = made.square().mean()
    gradients = torch.autograd.grad(loss, list(params.values()))
    pairs = zip(params.items(), gradients, strict=True)
    return {name: each.detach() - 0.1 * g for (name, each), g in pairs}, loss.detach()


def trained(step, params, x):
    torch.manual_seed(7)
    losses = []
    for _ in range(3):
        params, loss = step(params, x)
        losses.append(loss)
    return params, losses


def test_steps_with_dropout_train_as_one_process_does():
    x = X.double()
    want = trained(train, PARAMS, x)
    assert len({loss.item() for loss in want[1]}) == 3

    def rank():
        mesh = sw.init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        step = shard_step(train, mesh, PLAN, (PARAMS, x))
        with Routed(mesh):
            pieces, losses = trained(step, step.shard(PARAMS), step.shard(x, "x"))
        return step.unshard(pieces), losses

    for got in sw.simulate(rank, 4):
        torch.testing.assert_close(got, want)


def checkpointed(params, x):
    weight = params["0.weight"].detach().requires_grad_()
    loss = checkpoint(lambda w: F.dropout(x @ w.mT).sum(), weight, use_reentrant=False)
    loss.backward()
    return params | {"0.weight": weight.grad}, loss.detach()


@pytest.mark.parametrize(
    "fn, message",
    [
        (checkpointed, "in the backward pass.*Leave out the checkpoint"),
        (lambda p, x: (p, torch.rand(2, generator=torch.Generator())), "draws from a torch.Gener"),
        (lambda p, x: (p, torch.bernoulli(x, generator=torch.Generator())), "a torch.Generator"),
        (lambda p, x: (p, x.clone()[:, 1:].normal_()), "is not contiguous in memory"),
    ],
)
def test_steps_that_would_draw_other_numbers_are_refused(fn, message):
    before = torch.get_rng_state()
    mesh = sw.DeviceMesh.abstract((1, 2), ("dp", "tp"))
    with pytest.raises(ExportError, match=message):
        shard_step(fn, mesh, PLAN, (PARAMS, X.double()))
    assert torch.equal(before, torch.get_rng_state())
