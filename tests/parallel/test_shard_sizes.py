"""The global size of a split dim of plain shards: known where it can be, asked for otherwise."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import DTensor, Replicate, Shard
from shardwise.core.mesh import init_device_mesh
from shardwise.fsdp import fully_shard
from shardwise.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

WIDTH, HEAD, WORDS = 12, 2, 11
QUESTION = (1, 33)  # the shape of what ranks send to ask each other for sizes


def on(count, run):
    return sw.simulate(lambda: run(init_device_mesh("cpu", (count,), ("tp",))), count)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x, mask=None):
        q, k, v = (
            layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for layer in (self.wq, self.wk, self.wv)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3 = (
            nn.Linear(WIDTH, 12),
            nn.Linear(12, WIDTH),
            nn.Linear(WIDTH, 12),
        )

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.dropout = nn.Dropout(0.0)

    def forward(self, x):
        x = x + self.dropout(self.attention(self.attention_norm(x), None))
        return x + self.dropout(self.feed_forward(self.ffn_norm(x)))


class Transformer(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.checkpointed = False

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.output(self.norm(x))


PLAN = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "output": ColwiseParallel(
        input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
    ),
}
BLOCK_PLAN = {
    "attention_norm": SequenceParallel(),
    "attention": PrepareModuleInput(
        input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
    ),
    "attention.w[qkv]": ColwiseParallel(),
    "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    "ffn_norm": SequenceParallel(),
    "feed_forward": PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
    ),
    "feed_forward.w[13]": ColwiseParallel(),
    "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
}


def made(mesh=None):
    torch.manual_seed(0)
    model = Transformer().double()
    if mesh is not None:
        parallelize_module(model, mesh, PLAN)
        for block in model.layers:
            parallelize_module(block, mesh, BLOCK_PLAN)
    return model


def tokens_of(length):
    return torch.arange(2 * length).view(2, length) * 7 % WORDS


def loss_of(model, length):
    tokens = tokens_of(length)
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def questions(mesh, call):
    """How many questions for sizes this rank takes part in, of how many collectives; the result."""
    events = []
    with sw.listen(events.append):
        result = call()
    mine = [each for each in events if each.rank == mesh.get_rank()]
    asked = [each for each in mine if each.kind == "all_gather" and each.shape == QUESTION]
    return len(asked), len(mine), result


@pytest.mark.parametrize("count", [2, 3])
def test_a_training_step_asks_for_no_sizes_also_where_the_length_changes(count):
    lengths = (6, 7, 5, 4)  # from even to uneven lengths, where only some ranks' pieces change
    plain = made()
    expected = []
    for length in lengths:
        loss = loss_of(plain, length)
        loss.backward()
        expected.append(loss.item())

    def run(mesh):
        model = made(mesh)
        for length, wanted in zip(lengths, expected, strict=True):

            def step(length=length):
                loss = loss_of(model, length)
                loss.backward()
                return loss.item()

            asked, _, loss = questions(mesh, step)
            assert asked == 0 and loss == pytest.approx(wanted, abs=1e-12)
        for ours, one in zip(model.parameters(), plain.parameters(), strict=True):
            grad = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad
            torch.testing.assert_close(grad, one.grad)

    on(count, run)


def test_the_policy_decides_and_all_agree():
    def run(mesh):
        model = made(mesh)

        def step():
            return loss_of(model, 6).item()

        known = questions(mesh, step)
        with sw.piece_sizes("ask"):
            asked = questions(mesh, step)
        with sw.piece_sizes("even"):
            even = questions(mesh, step)
        assert known == even
        assert asked == (7, known[1] + 7, known[2])  # two norms of each of three layers, and one

    on(2, run)


def test_checkpointed_layers_ask_for_no_sizes_in_backward_either():
    plain = made()
    loss_of(plain, 7).backward()

    def run(mesh):
        model = made(mesh)
        model.checkpointed = True
        asked, _, _ = questions(mesh, lambda: loss_of(model, 7).backward())
        torch.testing.assert_close(model.embed.weight.grad.full_tensor(), plain.embed.weight.grad)
        assert asked == 0

    on(2, run)


def test_with_fully_shard_around_it_no_sizes_are_asked_for():
    plain = made()
    loss_of(plain, 6).backward()

    def run():
        mesh = init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        model = made(mesh["tp"])
        for block in model.layers:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        asked, _, _ = questions(mesh, lambda: loss_of(model, 6).backward())
        assert asked == 0
        torch.testing.assert_close(model.embed.weight.grad.full_tensor(), plain.embed.weight.grad)

    sw.simulate(run, 4)


def test_in_low_precision_the_sizes_are_known_as_well():
    def run(mesh):
        model = made(mesh).float()

        def step():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, 5)
            loss.backward()

        assert questions(mesh, step)[0] == 0

    on(2, run)


def test_without_gradients_sizes_are_asked_for():
    """Without a graph nobody knows where a plain tensor came from."""
    expected = loss_of(made(), 7)

    def run(mesh):
        model = made(mesh)
        with torch.no_grad():
            asked, _, loss = questions(mesh, lambda: loss_of(model, 7))
        torch.testing.assert_close(loss.full_tensor(), expected)
        assert asked == 7

    on(2, run)


# ---- which tensors are known


def shard(mesh, length=5, width=4):
    """The local shard, in a graph, of a DTensor that is split along dim 1."""
    whole = torch.arange(2.0 * length * width).view(2, length, width)
    return sw.distribute_tensor(whole, mesh, [Shard(1)]).requires_grad_().to_local()


KNOWN = {
    "itself": lambda x: x,
    "residual": lambda x: x + F.gelu(x) * 2,
    "in place": lambda x: (x * 1).add_(x),
    "broadcast": lambda x: x + torch.ones(4),
    "more dims": lambda x: x + torch.ones(3, 1, 1, 4),
    "norm": lambda x: F.layer_norm(x, (4,)),
    "dtype": lambda x: x.double().relu(),
    "dropout": lambda x: F.dropout(x, 0.5),
    "mask": lambda x: torch.where(x > 1, x, 0.0).masked_fill(x < 3, 1.0),
    "far": lambda x: sum([x * k for k in range(20)]),
}
ASKED = {
    "slice": lambda x: x[:, :2],
    "slice of all": lambda x: x[:, :5],
    "pad": lambda x: F.pad(x, (0, 0, 0, 0)),
    "joined": lambda x: torch.cat([x, x[:, :0]], 1),
    "view": lambda x: x.reshape(x.shape),
    "detached": lambda x: x.detach(),
    "matmul": lambda x: x @ torch.ones(4, 4),
    "other dim": lambda x: x.transpose(0, 1),
    "no graph": lambda x: torch.ones(x.shape),
}


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize(("count", "length"), [(2, 5), (3, 8), (4, 6)])
def test_what_keeps_the_shape_keeps_the_size(name, count, length):
    def run(mesh):
        def call():
            y = KNOWN[name](shard(mesh, length))
            return DTensor.from_local(y, mesh, [Shard(y.dim() - 2)])

        asked, _, y = questions(mesh, call)
        assert asked == 0 and y.shape[-2:] == (length, 4)
        whole = torch.arange(2.0 * length * 4).view(2, length, 4)
        if name != "dropout":
            torch.testing.assert_close(y.full_tensor(), KNOWN[name](whole))

    on(count, run)


@pytest.mark.parametrize("name", ASKED)
def test_what_may_change_the_shape_on_some_ranks_is_asked_for(name):
    def run(mesh):
        y = ASKED[name](shard(mesh, 6))
        dim = 0 if name == "other dim" else 1
        asked, _, y = questions(mesh, lambda: DTensor.from_local(y, mesh, [Shard(dim)]))
        assert asked == 1 and y.shape[dim] == (4 if name == "slice" else 6)

    on(2, run)


def test_a_dim_that_was_expanded_is_refused_and_one_that_was_not_split_is_asked_for():
    def run(mesh):
        wide = shard(mesh, 2) + torch.ones(2, 3, 4)  # [2, 2, 4] and [2, 6, 4] in one process
        with pytest.raises(sw.LayoutError, match=r"expected \(2, 1, 4\).*expanded.*'ask'"):
            DTensor.from_local(wide, mesh, [Shard(1)])
        with sw.piece_sizes("ask"):
            assert DTensor.from_local(wide, mesh, [Shard(1)]).shape == (2, 6, 4)
        row = torch.ones(2, 1, 4, requires_grad=True)
        row = sw.distribute_tensor(torch.ones(2, 1, 4), mesh, [Shard(0)]).requires_grad_()
        mine = row.to_local() + torch.ones(1, 3 - mesh.get_rank(), 4)
        asked, _, y = questions(mesh, lambda: DTensor.from_local(mine, mesh, [Shard(1)]))
        assert asked == 1 and y.shape == (1, 5, 4)

    on(2, run)


def test_a_dim_in_units_is_known_where_it_is_split_alike():
    def run(mesh):
        whole = torch.arange(12.0).view(2, 6)
        x = sw.distribute_tensor(whole, mesh, [Shard(1, unit=2)]).requires_grad_().to_local() * 2
        assert x.shape[1] == (4, 2)[mesh.get_rank()]
        asked, _, y = questions(mesh, lambda: DTensor.from_local(x, mesh, [Shard(1, unit=2)]))
        assert asked == 0
        torch.testing.assert_close(y.full_tensor(), whole * 2)
        with pytest.raises(sw.LayoutError, match="no legal sharding"):
            DTensor.from_local(x, mesh, [Shard(1)])

    on(2, run)


def test_an_answer_is_known_to_what_is_computed_from_it():
    def run(mesh):
        x = nn.Linear(4, 4)(torch.ones(2, 3 - mesh.get_rank(), 4))
        assert DTensor.from_local(x, mesh, [Shard(1)]).shape == (2, 5, 4)
        asked, _, y = questions(mesh, lambda: DTensor.from_local(x * 2, mesh, [Shard(1)]))
        assert asked == 0 and y.shape == (2, 5, 4)

    on(2, run)


def test_another_mesh_and_another_split_are_no_answer():
    def run():
        mesh = init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        x = shard(mesh["tp"], 5)
        asked, _, y = questions(mesh, lambda: DTensor.from_local(x, mesh["dp"], [Shard(1)]))
        assert asked == 1 and y.shape[1] == 2 * x.shape[1]
        whole = torch.ones(6, 5, 4)
        both = sw.distribute_tensor(whole, mesh, [Shard(0), Shard(1)]).requires_grad_()
        local = both.to_local() * 2
        asked, _, y = questions(mesh, lambda: DTensor.from_local(local, mesh, [Shard(0), Shard(1)]))
        assert asked == 0 and y.shape == (6, 5, 4)
        local = both.to_local().sum(0)  # an operator that does not keep the shape
        asked, _, y = questions(
            mesh, lambda: DTensor.from_local(local, mesh, [sw.Partial(), Shard(0)])
        )
        assert asked == 1 and y.shape == (5, 4)

    sw.simulate(run, 4)


# ---- ranks that part


def test_a_rank_that_alone_changes_its_length_is_told_so():
    def run(mesh):
        x = shard(mesh, 6)
        if mesh.get_rank() == 1:
            x = x[:, :2]
        return DTensor.from_local(x, mesh, [Shard(1)]).full_tensor()

    with pytest.raises(sw.MismatchError, match=r"(?s)known\(.*rank 1: sizes of shards are exch"):
        on(2, run)


def test_pieces_that_fit_no_sharding_are_refused_on_all_ranks():
    def run(mesh):
        norm = parallelize_module(nn.LayerNorm(4), mesh, SequenceParallel())
        assert norm(torch.ones(2, 3, 4)).shape == (2, 6, 4)
        with pytest.raises(sw.LayoutError, match="no legal sharding"):
            norm(torch.ones(2, 3 + mesh.get_rank(), 4))
        return True

    assert on(2, run) == [True, True]


def test_shards_of_a_dim_that_is_said_to_be_whole_are_refused_on_all_ranks():
    def run():
        mesh = init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        x = sw.distribute_tensor(torch.ones(5, 3), mesh, [Shard(0), Shard(1)]).requires_grad_()
        with pytest.raises(sw.LayoutError, match="no legal sharding"):
            DTensor.from_local(x.to_local() * 2, mesh, [Shard(0), Replicate()])
        return True

    assert sw.simulate(run, 4) == [True] * 4
