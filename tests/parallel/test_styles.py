"""Styles of tensor parallelism: values, gradients, and exactly what is communicated."""

import copy
import gc
import io
import weakref
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard
from shardwise.core.mesh import init_device_mesh
from shardwise.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PlanError,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
    shard_module,
)

WIDTH, HEADS, HEAD = 12, 4, 3


def on(ranks, run):
    """Run `run(mesh)` on every rank of a mesh of one axis, whose making communicates nothing."""
    return sw.simulate(lambda: run(init_device_mesh("cpu", (ranks,), ("tp",))), ranks)


def heard(events, mesh):
    """The collectives of this rank: kind and shape, in their order."""
    return [(each.kind, each.shape) for each in events if each.rank == mesh.get_rank()]


class Mlp(nn.Module):
    def __init__(self, hidden=7, bias=True):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden, bias), nn.Linear(hidden, WIDTH, bias)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    """Works on whole heads, be they all or this rank's: `-1` is how many there are."""

    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for layer in (self.wq, self.wk, self.wv)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


MLP = {"up": ColwiseParallel(), "down": RowwiseParallel()}
ATTENTION = {"w[qkv]": ColwiseParallel(), "wo": RowwiseParallel()}


def made(kind, *args, **kwargs):
    torch.manual_seed(0)
    return kind(*args, **kwargs).double()


def data(*shape):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(ours, theirs):
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def assert_trains_alike(build, plan, x, ranks=2, spread=lambda x, mesh: x):
    """Output, input's gradient and all parameters' gradients are those of one process."""
    plain, given = build(), x.clone().requires_grad_()
    expected = plain(given)
    expected.square().sum().backward()

    def run(mesh):
        module, mine = build(), x.clone().requires_grad_()
        assert parallelize_module(module, mesh, plan) is module
        output = module(spread(mine, mesh))
        assert_same(full(output), expected)
        output.square().sum().backward()
        assert_same(mine.grad, given.grad)
        for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
            assert_same(full(ours.grad), theirs.grad)

    on(ranks, run)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("hidden", [8, 7, 2])
def test_an_mlp_is_that_of_one_process_also_with_uneven_and_empty_pieces(hidden, ranks):
    assert_trains_alike(lambda: made(Mlp, hidden), MLP, data(2, 5, WIDTH), ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_attention_on_local_heads_is_that_of_one_process(ranks):
    assert_trains_alike(lambda: made(Attention), ATTENTION, data(2, 5, WIDTH), ranks)


def test_a_block_is_that_of_one_process():
    assert_trains_alike(
        lambda: made(Block), {"attention": ATTENTION, "mlp": MLP}, data(2, 5, WIDTH)
    )


def test_global_outputs_between_the_modules():
    plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    assert_trains_alike(lambda: made(Mlp), plan, data(2, 5, WIDTH), 3)


@pytest.mark.parametrize("ranks", [2, 3])
def test_sequence_parallel_block_with_uneven_sequences(ranks):
    class Sequential(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()

        def forward(self, x):
            return x + self.mlp(self.norm(x))

    plan = {
        "norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "": PrepareModuleInputOutput(
            input_layouts=Replicate(),
            desired_input_layouts=Shard(1),
            output_layouts=Shard(1),
            desired_output_layouts=Replicate(),
        ),
    }
    assert_trains_alike(lambda: made(Sequential), plan, data(2, 7, WIDTH), ranks)


@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
@pytest.mark.parametrize("output", [Replicate(), Shard(0), Shard(1), Shard(-1)])
def test_every_input_and_output_layout_of_a_linear(style, output):
    torch.manual_seed(0)
    plain, x = nn.Linear(5, 7).double(), data(3, 4, 5)
    expected = plain(x)
    expected.square().sum().backward()

    def run(mesh):
        for given in (Replicate(), Shard(0), Shard(1), Shard(-1)):
            torch.manual_seed(0)
            module = nn.Linear(5, 7).double()
            plan = style(input_layouts=given, output_layouts=output, use_local_output=False)
            parallelize_module(module, mesh, plan)
            piece = sw.distribute_tensor(x, mesh, [given]).to_local()
            result = module(piece)
            assert result.placements == (output if output != Shard(-1) else Shard(2),)
            assert_same(result.full_tensor(), expected)
            result.square().sum().backward()
            assert_same(module.weight.grad.full_tensor(), plain.weight.grad)
            assert_same(module.bias.grad.full_tensor(), plain.bias.grad)

    on(2, run)


@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
def test_embeddings_split_by_features_and_by_rows(style):
    torch.manual_seed(0)
    plain, tokens = nn.Embedding(11, 5), torch.tensor([[0, 10, 3], [5, 5, 7]])
    expected = plain(tokens)
    expected.square().sum().backward()

    def run(mesh):
        torch.manual_seed(0)
        module = nn.Embedding(11, 5)
        parallelize_module(module, mesh, style(output_layouts=Replicate()))
        result = module(tokens)
        assert type(result) is torch.Tensor
        torch.testing.assert_close(result, expected)
        result.square().sum().backward()
        torch.testing.assert_close(module.weight.grad.full_tensor(), plain.weight.grad)

    on(3, run)


# ---- fused projections

QUERY_HEADS, KEY_HEADS = 6, 3


class Fused(nn.Module):
    """Grouped-query attention and SwiGLU, each with one projection for all it needs."""

    def __init__(self):
        super().__init__()
        queries, keys = QUERY_HEADS * HEAD, KEY_HEADS * HEAD
        self.qkv, self.out = nn.Linear(WIDTH, queries + 2 * keys), nn.Linear(queries, WIDTH)
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * 7), nn.Linear(7, WIDTH)

    def forward(self, x):
        heads = self.qkv(x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
        share = heads.shape[1] // 4  # of four heads two are of queries
        q, k, v = heads.split([2 * share, share, share], dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


FUSED = {
    "qkv": ColwiseParallel(pieces=(18, 9, 9), unit=(6, 3, 3)),
    "out": RowwiseParallel(unit=6),
    "gate_up": ColwiseParallel(pieces=2),
    "down": RowwiseParallel(),
}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_fused_projections_on_local_tensors_with_uneven_groups_of_heads(ranks):
    assert_trains_alike(lambda: made(Fused), FUSED, data(2, 5, WIDTH), ranks)


@pytest.mark.parametrize("ranks", [2, 3])
def test_fused_projections_with_global_outputs(ranks):
    plan = {
        "qkv": ColwiseParallel(pieces=(18, 9, 9), unit=(6, 3, 3), use_local_output=False),
        "out": RowwiseParallel(unit=6),
        "gate_up": ColwiseParallel(pieces=2, use_local_output=False),
        "down": RowwiseParallel(),
    }
    assert_trains_alike(lambda: made(Fused), plan, data(2, 5, WIDTH), ranks)


def test_an_input_that_consists_of_pieces():
    """As a projection of a fused one's local result; what holds the pieces is told by the style."""

    def run(mesh):
        module = made(nn.Linear, 12, 5)
        style = RowwiseParallel(input_layouts=Shard(-1, pieces=(6, 3, 3)))
        parallelize_module(module, mesh, style)
        mine = [piece.chunk(2, -1)[mesh.get_rank()] for piece in data(4, 12).split([6, 3, 3], -1)]
        assert_same(module(torch.cat(mine, -1)), made(nn.Linear, 12, 5)(data(4, 12)))

    on(2, run)


def test_each_piece_of_a_fused_weight_is_split_by_itself_and_the_whole_keeps_its_order():
    def run(mesh):
        linear = nn.Linear(2, 12, bias=False)
        whole = linear.weight.detach().clone()
        parallelize_module(linear, mesh, ColwiseParallel(pieces=3))
        assert torch.equal(linear.weight.full_tensor(), whole)
        mine = [piece.chunk(2)[mesh.get_rank()] for piece in whole.chunk(3)]
        assert torch.equal(linear.weight.to_local(), torch.cat(mine))
        with pytest.raises(PlanError, match=r"weight: .*5 pieces divide"):
            parallelize_module(nn.Linear(2, 12), mesh, ColwiseParallel(pieces=5))
        with pytest.raises(sw.LayoutError, match="unit"):
            ColwiseParallel(unit=0)

    sw.simulate(lambda: (torch.manual_seed(0), run(init_device_mesh("cpu", (2,), ("tp",)))), 2)


# ---- what is communicated


def step_events(build, plan, x, mesh):
    module = build()
    parallelize_module(module, mesh, plan)
    events = []
    with sw.listen(events.append):
        output = module(x.clone().requires_grad_())
        after_forward = len(heard(events, mesh))
        output.square().sum().backward()
    found = heard(events, mesh)
    return found[:after_forward], found[after_forward:]


@pytest.mark.parametrize(("build", "plan"), [(Mlp, MLP), (Attention, ATTENTION)])
def test_one_all_reduce_forward_and_one_backward_for_an_mlp_or_attention(build, plan):
    def run(mesh):
        forward, backward = step_events(lambda: made(build), plan, data(2, 5, WIDTH), mesh)
        assert forward == [("all_reduce", (2, 5, WIDTH))]
        assert backward == [("all_reduce", (2, 5, WIDTH))]

    on(2, run)


def test_the_bytes_of_the_all_reduces_are_those_of_the_activations():
    def run(mesh):
        module = made(Mlp)
        parallelize_module(module, mesh, MLP)
        events = []
        with sw.listen(events.append):
            module(data(2, 5, WIDTH).requires_grad_()).sum().backward()
        mine = [each for each in events if each.rank == mesh.get_rank()]
        held = 2 * 5 * WIDTH * 8
        # an all-reduce of n ranks: (n - 1) / n of the tensor twice, at the least
        assert [each.bytes for each in mine] == [held, held]

    on(2, run)


def test_sequence_parallel_gathers_and_scatters_in_pairs():
    plan = {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    }

    def run(mesh):
        module = made(Mlp)
        parallelize_module(module, mesh, plan)
        # large enough that bytes count: of a few, an all-reduce and a slice are quicker
        x = sw.distribute_tensor(data(16, 256, WIDTH), mesh, [Shard(1)]).requires_grad_()
        events = []
        with sw.listen(events.append):
            output = module(x)
            output.square().sum().backward()
        kinds = [kind for kind, _ in heard(events, mesh)]
        assert kinds == ["all_gather", "reduce_scatter", "all_gather", "reduce_scatter"]

    on(2, run)


def test_the_sizes_of_plain_pieces_are_asked_for_unless_they_are_even():
    def run(mesh):
        norm = parallelize_module(nn.LayerNorm(4), mesh, SequenceParallel())
        events = []
        with sw.listen(events.append):
            assert norm(torch.ones(2, 3, 4)).shape == (2, 6, 4)
            asked = heard(events, mesh)
            with sw.piece_sizes("even"):
                assert norm(torch.ones(2, 3, 4)).shape == (2, 6, 4)
        assert [kind for kind, _ in asked] == ["all_gather"] and heard(events, mesh) == asked
        with pytest.raises(sw.PolicyError, match="piece_sizes: expected one of known, ask, even"):
            sw.piece_sizes("odd")

    on(2, run)


def test_what_is_kept_of_an_input_for_other_uses_is_freed_with_it():
    def run(mesh):
        attention = made(Attention)
        parallelize_module(attention, mesh, ATTENTION)
        before = nn.Linear(WIDTH, WIDTH).double()
        hidden = before(data(2, 5, WIDTH))
        gone = weakref.ref(hidden)
        attention(hidden).sum().backward()
        gc.disable()
        try:
            del hidden
            return gone() is None
        finally:
            gc.enable()

    assert on(2, run) == [True, True]


def test_an_input_is_stored_without_what_is_kept_of_it():
    def run(mesh):
        linear = parallelize_module(made(nn.Linear, 4, 6), mesh, ColwiseParallel())
        hidden = torch.ones(2, 4, dtype=torch.float64, requires_grad=True) * 2
        linear(hidden)
        file = io.BytesIO()
        torch.save(hidden, file)
        assert b"shardwise" not in file.getvalue()
        file.seek(0)
        assert_same(linear(torch.load(file)), linear(hidden))

    on(2, run)


def test_inputs_that_no_gradient_is_asked_of_are_not_held_forever():
    def run(mesh):
        linear = parallelize_module(made(nn.Linear, 4, 6), mesh, ColwiseParallel())
        inputs = []
        for _ in range(200):
            x = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
            torch.autograd.grad(linear(x).sum(), linear.weight)
            inputs.append(weakref.ref(x))
        return sum(each() is not None for each in inputs)

    assert max(on(2, run)) < 100


# ---- plans


def test_a_key_that_matches_nothing_is_an_error_with_near_matches():
    def run(mesh):
        model = nn.ModuleDict({"layers": nn.ModuleList([Block(), Block()])})
        with pytest.raises(PlanError, match=r"layers\.\*\.attn\.wq.*layers\.0\.attention\.wq"):
            parallelize_module(model, mesh, {"layers.*.attn.wq": ColwiseParallel()})
        assert not any(isinstance(each, DTensor) for each in model.parameters())
        with pytest.warns(UserWarning, match=r"layers\.\*\.attn\.wq.*matches nothing.*left out"):
            parallelize_module(model, mesh, {"layers.*.attn.wq": ColwiseParallel()}, strict=False)
        assert not any(isinstance(each, DTensor) for each in model.parameters())

    on(2, run)


def test_nothing_is_changed_if_a_later_entry_is_wrong():
    def run(mesh):
        block = Block()
        plan = {"mlp.up": ColwiseParallel(), "mlp": RowwiseParallel()}
        with pytest.raises(PlanError, match=r"mlp: RowwiseParallel fits .* this is Mlp"):
            parallelize_module(block, mesh, plan)
        assert type(block.mlp.up.weight) is nn.Parameter
        assert not block.mlp.up._forward_pre_hooks

    on(2, run)


def test_patterns_the_empty_key_classes_and_nested_plans():
    def run(mesh):
        model = nn.Sequential(Block(), Block())
        plan = {
            "*": {
                "attention": {"w[qkv]": ColwiseParallel, "wo": RowwiseParallel()},
                "mlp": {"up": ColwiseParallel(), "down": {"": RowwiseParallel}},
            }
        }
        parallelize_module(model, mesh, plan)
        for block in model:
            assert block.attention.wk.weight.placements == (Shard(0),)
            assert block.attention.wo.weight.placements == (Shard(1),)
            assert block.mlp.down.weight.placements == (Shard(1),)
            assert type(block.mlp_norm.weight) is nn.Parameter

    on(2, run)


@pytest.mark.parametrize("plan", [ColwiseParallel(), {"": ColwiseParallel()}])
def test_all_ranks_get_the_parameters_of_the_source_rank(plan):
    def run(mesh):
        torch.manual_seed(mesh.get_rank())
        module = nn.Linear(4, 6)
        own = module.weight.detach().clone()
        parallelize_module(module, mesh, plan, src_data_rank=1)
        return own, module.weight.full_tensor()

    (_, first), (source, second) = on(2, run)
    assert torch.equal(first, source) and torch.equal(second, source)


def test_sequence_parallel_takes_the_source_rank_s_parameters_too_and_leaves_frozen_ones_frozen():
    def run(mesh):
        norm = nn.LayerNorm(4)
        with torch.no_grad():
            norm.weight.fill_(mesh.get_rank())
        norm.bias.requires_grad_(False)
        parallelize_module(norm, mesh, SequenceParallel(), src_data_rank=1)
        assert norm.weight.requires_grad and not norm.bias.requires_grad
        assert isinstance(norm.bias, nn.Parameter)
        return norm.weight.to_local().tolist()

    assert on(2, run) == [[1.0] * 4] * 2


@pytest.mark.parametrize("style", [ColwiseParallel(), RowwiseParallel()])
def test_frozen_parameters_stay_frozen(style):
    def run(mesh):
        module = nn.Linear(4, 4)
        module.weight.requires_grad_(False)
        parallelize_module(module, mesh, style)
        assert not module.weight.requires_grad and module.bias.requires_grad
        module(torch.ones(2, 2 if isinstance(style, RowwiseParallel) else 4)).sum().backward()
        assert module.weight.grad is None and module.bias.grad is not None

    on(2, run)


def test_a_module_used_in_two_places_is_parallelized_once():
    def run(mesh):
        shared = made(Mlp)
        model = nn.ModuleDict({"first": shared, "second": shared})
        parallelize_module(model, mesh, {"*": MLP})
        assert len(shared.up._forward_pre_hooks) == 1
        assert_same(model["second"](data(2, WIDTH)), made(Mlp)(data(2, WIDTH)))
        other = nn.ModuleDict({"first": (linear := nn.Linear(2, 2)), "second": linear})
        with pytest.raises(PlanError, match=r"second: .*Rowwise.*first.*the same module"):
            parallelize_module(
                other, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()}
            )

    on(2, run)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


def test_tied_parameters_stay_tied():
    torch.manual_seed(0)
    plain, tokens = Tied(), torch.tensor([[1, 6, 2]])
    plain(tokens).square().sum().backward()

    def run(mesh):
        torch.manual_seed(0)
        model = Tied()
        plan = {"embedding": RowwiseParallel(), "head": ColwiseParallel(output_layouts=Replicate())}
        parallelize_module(model, mesh, plan)
        assert model.head.weight is model.embedding.weight
        model(tokens).square().sum().backward()
        torch.testing.assert_close(model.head.weight.grad.full_tensor(), plain.head.weight.grad)

    on(2, run)


def test_a_tie_is_not_broken_silently():
    def run(mesh):
        model = parallelize_module(Tied(), mesh, {"head": ColwiseParallel()})
        assert model.head.weight is model.embedding.weight
        plan = {"head": ColwiseParallel(), "embedding": ColwiseParallel()}
        with pytest.raises(PlanError, match=r"tied to .*\[7, 4@tp\].*\[7@tp, 4\]"):
            parallelize_module(Tied(), mesh, plan)

    on(2, run)


def test_bad_meshes_plans_and_styles_are_named():
    def run():
        mesh = init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        linear = nn.Linear(4, 4)
        with pytest.raises(PlanError, match=r"one axis, got \(dp=2, tp=2\).*device_mesh\['tp'\]"):
            parallelize_module(linear, mesh, ColwiseParallel())
        with pytest.raises(sw.MeshError, match="device_mesh: expected a DeviceMesh, or a call wit"):
            parallelize_module(linear, None, ColwiseParallel())
        with pytest.raises(PlanError, match="expected a style"):
            parallelize_module(linear, mesh["tp"], {"": "colwise"})
        with pytest.raises(PlanError, match=r"ColwiseParallel fits .* this is LayerNorm"):
            parallelize_module(nn.LayerNorm(4), mesh["tp"], ColwiseParallel())
        parallelize_module(linear, mesh["tp"], ColwiseParallel())
        for again in (linear, copy.deepcopy(linear)):
            with pytest.raises(PlanError, match=r"a call before this one gave it a style"):
                parallelize_module(again, mesh["tp"], ColwiseParallel())
        with pytest.raises(
            PlanError, match=r"on DeviceMesh.*\('tp',\)\) already.*\('dp', 'tp'\)\);"
        ):
            shard_module(linear, mesh, {})
        with pytest.raises(PlanError, match=r"got Shard\(0\); placements .* are for shard_module"):
            parallelize_module(nn.Linear(4, 4), mesh["tp"], {"": Shard(0)})
        with pytest.raises(PlanError, match=r"styles are for the module that has it"):
            parallelize_module(nn.Linear(4, 4), mesh["tp"], {"weight": ColwiseParallel()})

    sw.simulate(run, 4)


def test_an_input_that_is_not_this_rank_s_piece_is_refused():
    def run(mesh):
        module = parallelize_module(nn.Linear(6, 4), mesh, RowwiseParallel())
        with pytest.raises(sw.LayoutError, match=r"expected \(2, 3\).*got \(2, 6\)"):
            module(torch.ones(2, 6))  # whole, and not split

    on(2, run)


def test_a_style_of_the_user_s_own():
    class Doubled(ParallelStyle):
        def _apply(self, module, device_mesh):
            module.register_forward_hook(lambda module, args, output: output * 2)
            module.source = self.src_data_rank
            return module

    def run(mesh):
        module = parallelize_module(nn.Identity(), mesh, {"": Doubled()}, src_data_rank=1)
        assert module(torch.ones(1)).item() == 2 and module.source == 1

    on(2, run)


# ---- how modules are called, and what they return


def test_calls_with_keywords_only():
    def run(mesh):
        module = parallelize_module(made(nn.Linear, 5, 7), mesh, ColwiseParallel())
        whole = made(nn.Linear, 5, 7)(data(2, 5))
        assert_same(module(input=data(2, 5)), whole.chunk(2, -1)[mesh.get_rank()])
        norm = parallelize_module(nn.LayerNorm(5), mesh, SequenceParallel(sequence_dim=0))
        assert norm(input=torch.ones(2, 5)).shape == (4, 5)

        class Two(nn.Module):
            def forward(self, x, *, mask=None, scale=1.0):
                return x.placements, None if mask is None else mask.placements

        two = parallelize_module(
            Two(),
            mesh,
            PrepareModuleInput(
                input_layouts=(Shard(0),),
                desired_input_layouts=(Replicate(),),
                input_kwarg_layouts={"mask": Replicate()},
                desired_input_kwarg_layouts={"mask": Shard(0)},
            ),
        )
        x = torch.ones(2, 2)
        assert two(x=x, mask=x, scale=2.0) == ((Replicate(),), (Shard(0),))
        assert two(x) == ((Replicate(),), None)

    on(2, run)


Pair = namedtuple("Pair", "first second")


@dataclass
class Result:
    logits: torch.Tensor
    extra: int = 3


class Returns(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.wrap = wrap

    def forward(self, x):
        return self.wrap(x)


@pytest.mark.parametrize(
    ("wrap", "layouts", "taken"),
    [
        (lambda x: x, Shard(0), lambda out: out),
        (lambda x: (x,), Shard(0), lambda out: out[0]),
        (lambda x: (x, 3), (Shard(0), None), lambda out: out[0]),
        (lambda x: [None, x], (None, Shard(0)), lambda out: out[1]),
        (lambda x: Pair(x, 2), (Shard(0), None), lambda out: out.first),
        (lambda x: {"a": x}, Shard(0), lambda out: out["a"]),
        (lambda x: {"b": 1, "a": x}, {"a": Shard(0)}, lambda out: out["a"]),
        (Result, (Shard(0), None), lambda out: out.logits),
        (Result, {"logits": Shard(0)}, lambda out: out.logits),
    ],
)
def test_results_stay_in_what_holds_them(wrap, layouts, taken):
    wanted = (
        Replicate() if isinstance(layouts, Shard)
        else {name: Replicate() for name in layouts} if isinstance(layouts, dict)
        else tuple(each and Replicate() for each in layouts)
    )  # fmt: skip

    def run(mesh):
        style = PrepareModuleOutput(output_layouts=layouts, desired_output_layouts=wanted)
        module = parallelize_module(Returns(wrap), mesh, style)
        piece = torch.full((1, 2), float(mesh.get_rank()))
        result = module(piece)
        assert type(result) is type(wrap(piece))
        assert taken(result).tolist() == [[0.0, 0.0], [1.0, 1.0]]

    on(2, run)


def test_results_of_another_number_are_refused():
    def run(mesh):
        style = PrepareModuleOutput(
            output_layouts=(Shard(0), None), desired_output_layouts=(Replicate(), None)
        )
        module = parallelize_module(Returns(lambda x: (x,)), mesh, style)
        with pytest.raises(PlanError, match="expected 2 results, as output_layouts has, got 1"):
            module(torch.ones(1))
        with pytest.raises(PlanError, match="desired_output_layouts: expected 1"):
            PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=())
        module = parallelize_module(
            Returns(lambda x: x),
            mesh,
            PrepareModuleInput(input_layouts=(None,), desired_input_layouts=(None,)),
        )
        with pytest.raises((PlanError, TypeError), match="positional"):
            module(torch.ones(1), torch.ones(1))

    on(2, run)


def test_a_pending_input_is_summed():
    def run(mesh):
        module = parallelize_module(
            made(nn.Linear, 3, 4),
            mesh,
            ColwiseParallel(input_layouts=Partial(), output_layouts=Replicate()),
        )
        assert_same(module(data(2, 3) / 2), made(nn.Linear, 3, 4)(data(2, 3)))

    on(2, run)


def test_a_pending_maximum_has_no_gradient():
    def run(mesh):
        module = parallelize_module(
            nn.Linear(3, 4), mesh, ColwiseParallel(input_layouts=Partial("max"))
        )
        assert module(torch.ones(2, 3)).shape == (2, 2)
        with pytest.raises(sw.LayoutError, match="has no gradient"):
            module(torch.ones(2, 3, requires_grad=True))

    on(2, run)


def test_a_hook_of_the_module_s_own_that_makes_the_result_local_is_refused():
    def run(mesh):
        module = nn.Linear(3, 4)
        module.register_forward_hook(lambda module, args, output: output.to_local())
        parallelize_module(module, mesh, ColwiseParallel())
        with pytest.raises(PlanError, match=r"output of .* expected .* a DTensor, got Tensor"):
            module(torch.ones(2, 3))

    on(2, run)


def test_without_gradients_and_in_inference_mode_nothing_differs():
    def run(mesh):
        module = made(Block)
        parallelize_module(module, mesh, {"attention": ATTENTION, "mlp": MLP})
        expected = made(Block)(data(2, 5, WIDTH))
        with torch.no_grad():
            assert_same(module(data(2, 5, WIDTH)), expected)
        with torch.inference_mode():
            assert_same(module(data(2, 5, WIDTH)).clone(), expected)

    on(2, run)
