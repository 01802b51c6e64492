"""Parallelize functions as torchtitan writes them, from either import, on four real gloo ranks.

Each program gets `lib`, which is `shardwise` or `torch.distributed.tensor`, on a mesh of two axes
whose second one is the axis of tensor parallelism, and is compared with one process.
"""

import importlib
from functools import partial

import pytest
import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from support.torch_traps import RANKS, library, outcome
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

import shardwise as sw

WIDTH, HEAD, WORDS, LAYERS, LENGTH = 8, 2, 12, 2, 8


def styles(lib):
    return importlib.import_module(f"{lib.__name__}.parallel")


def meshes(lib):
    return lib.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


# ---- a decoder


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, False) for _ in range(4))

    def forward(self, x, rotation, mask=None):
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, -1, HEAD).transpose(1, 2)
            for layer in (self.wq, self.wk, self.wv)
        )
        q, k = q * rotation, k * rotation
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, 12, False), nn.Linear(WIDTH, 12, False)
        self.w2 = nn.Linear(12, WIDTH, False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x, rotation):
        h = x + self.attention(self.attention_norm(x), rotation, None)
        return h + self.feed_forward(self.ffn_norm(h))


class Decoder(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleDict({str(at): Block() for at in range(LAYERS)})
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, False)
        if tied:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        rotation = torch.linspace(0.5, 1.0, HEAD)
        for layer in self.layers.values():
            h = layer(h, rotation)
        return self.output(self.norm(h))


def parallelize(lib, model, tp_mesh):
    """As torchtitan's `apply_tp`, with sequence parallelism and loss parallelism."""
    parallel = styles(lib)
    colwise, rowwise = parallel.ColwiseParallel, parallel.RowwiseParallel
    split, whole = lib.Shard(1), lib.Replicate()
    parallel.parallelize_module(
        model,
        tp_mesh,
        {
            "tok_embeddings": rowwise(input_layouts=whole, output_layouts=split),
            "norm": parallel.SequenceParallel(),
            "output": colwise(
                input_layouts=split, output_layouts=lib.Shard(-1), use_local_output=False
            ),
        },
    )
    plan = {
        "attention_norm": parallel.SequenceParallel(),
        "attention": parallel.PrepareModuleInput(
            input_layouts=(split, None, None), desired_input_layouts=(whole, None, None)
        ),
        "attention.wq": colwise(),
        "attention.wk": colwise(),
        "attention.wv": colwise(),
        "attention.wo": rowwise(output_layouts=split),
        "ffn_norm": parallel.SequenceParallel(),
        "feed_forward": parallel.PrepareModuleInput(
            input_layouts=(split,), desired_input_layouts=(whole,)
        ),
        "feed_forward.w1": colwise(),
        "feed_forward.w2": rowwise(output_layouts=split),
        "feed_forward.w3": colwise(),
    }
    for block in model.layers.values():
        parallel.parallelize_module(block, tp_mesh, plan)


def made(tied=False):
    torch.manual_seed(0)
    return Decoder(tied)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(WORDS, (2, LENGTH + 1), generator=generator)


def train(model, parallel=None, steps=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    losses = []
    for step in range(steps):
        tokens = batch(step)
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        if parallel is None:
            loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
            loss.backward()
        else:
            with parallel.loss_parallel():
                loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
                loss.backward()
        losses.append(loss.full_tensor().item() if hasattr(loss, "full_tensor") else loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def a_decoder_with_sequence_and_loss_parallelism_on_a_sub_mesh(lib):
    expected = train(made())
    model = made()
    parallelize(lib, model, meshes(lib)["tp"])
    assert train(model, styles(lib)) == pytest.approx(expected, abs=1e-5)


def tied_embeddings_parallelized_and_tied_again(lib):
    expected = train(made(tied=True))
    model = made(tied=True)
    parallelize(lib, model, meshes(lib)["tp"])
    model.output.weight = model.tok_embeddings.weight
    assert train(model, styles(lib)) == pytest.approx(expected, abs=1e-5)


def keyword_arguments_are_prepared(lib):
    class Two(nn.Module):
        def forward(self, x, *, other, scale=1.0):
            return (x + other).to_local() * scale

    parallel, mesh = styles(lib), meshes(lib)["tp"]
    style = parallel.PrepareModuleInput(
        input_layouts=(lib.Shard(0),),
        desired_input_layouts=(lib.Replicate(),),
        input_kwarg_layouts={"other": lib.Replicate()},
        desired_input_kwarg_layouts={"other": lib.Replicate()},
    )
    module = parallel.parallelize_module(Two(), mesh, style)
    rank = mesh.get_local_rank()
    got = module(torch.full((2, 3), float(rank)), other=torch.ones(4, 3), scale=2.0)
    assert got[:, 0].tolist() == [2.0, 2.0, 4.0, 4.0]


# ---- experts: torchtitan's styles


class Experts(nn.Module):
    def __init__(self, count=4):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(count, 6, WIDTH))
        self.w2 = nn.Parameter(torch.randn(count, WIDTH, 6))

    def forward(self, x, counts):
        w1, w2 = (
            each.to_local() if hasattr(each, "to_local") else each for each in (self.w1, self.w2)
        )
        parts = torch.split(x[: int(counts.sum())], counts.tolist())
        out = [
            F.silu(part @ w1[at].transpose(0, 1)) @ w2[at].transpose(0, 1)
            for at, part in enumerate(parts)
        ]
        return torch.cat(out)


def expert_parallel(lib):
    class ExpertParallel(styles(lib).ParallelStyle):
        """Each rank has some experts, and sends tokens to the ranks that have theirs."""

        def _partition_fn(self, name, mod, device_mesh):
            for key, parameter in mod.named_parameters(recurse=False):
                split = lib.distribute_tensor(parameter, device_mesh, [lib.Shard(0)])
                mod.register_parameter(key, nn.Parameter(split))

        def _token_dispatch(self, mod, inputs, device_mesh):
            routed, counts = inputs
            group, degree = device_mesh.get_group(), device_mesh.shape[0]
            with torch.no_grad():
                theirs = funcol.wait_tensor(funcol.all_to_all_single(counts, None, None, group))
                self.sent = counts.view(degree, -1).sum(1).tolist()
                self.received = theirs.view(degree, -1).sum(1).tolist()
            routed = funcol.all_to_all_single_autograd(routed, self.received, self.sent, group)
            routed = funcol.wait_tensor(routed)
            own = theirs.view(degree, -1)
            # from (sender, expert) to (expert, sender)
            parts = torch.split(routed, own.flatten().tolist())
            self.order = [
                sender * own.shape[1] + expert
                for expert in range(own.shape[1])
                for sender in range(degree)
            ]
            self.lengths = [len(parts[at]) for at in self.order]
            return torch.cat([parts[at] for at in self.order]), own.sum(0)

        def _token_combine(self, mod, routed, device_mesh):
            parts = torch.split(routed, self.lengths)
            back = [None] * len(parts)
            for position, at in enumerate(self.order):
                back[at] = parts[position]
            routed = funcol.all_to_all_single_autograd(
                torch.cat(back), self.sent, self.received, device_mesh.get_group()
            )
            return funcol.wait_tensor(routed)

        def _apply(self, module, device_mesh):
            return lib.distribute_module(
                module,
                device_mesh,
                partition_fn=self._partition_fn,
                input_fn=self._token_dispatch,
                output_fn=self._token_combine,
            )

    return ExpertParallel()


def expert_tensor_parallel(lib):
    class ExpertTensorParallel(styles(lib).ParallelStyle):
        """Experts split over one axis of a mesh, and each of them over the other."""

        def _partition_fn(self, name, mod, device_mesh):
            for key, dim in (("w1", 1), ("w2", 2)):
                split = lib.distribute_tensor(
                    mod.get_parameter(key), device_mesh, [lib.Shard(0), lib.Shard(dim)]
                )
                mod.register_parameter(key, nn.Parameter(split))

        def _enter(self, mod, inputs, device_mesh):
            x, counts = inputs
            experts = len(counts) // device_mesh.shape[0]
            first = device_mesh.get_local_rank("ep") * experts
            bounds = [0, *counts.cumsum(0).tolist()]
            # The gradient of each rank is a contribution, over both axes.
            whole = lib.DTensor.from_local(x, device_mesh, [lib.Replicate()] * 2, run_check=False)
            x = whole.to_local(grad_placements=[lib.Partial()] * 2)
            self.box = bounds[first], bounds[first + experts], len(x)
            return x[self.box[0] : self.box[1]], counts[first : first + experts]

        def _leave(self, mod, outputs, device_mesh):
            start, stop, length = self.box
            outputs = F.pad(outputs, (0, 0, start, length - stop))
            pending = lib.DTensor.from_local(
                outputs, device_mesh, [lib.Partial()] * 2, run_check=False
            )
            return pending.redistribute(placements=[lib.Replicate()] * 2).to_local()

        def _apply(self, module, device_mesh):
            return lib.distribute_module(
                module, device_mesh, self._partition_fn, self._enter, self._leave
            )

    return ExpertTensorParallel()


def experts():
    torch.manual_seed(0)
    return Experts()


def routed(rank):
    generator = torch.Generator().manual_seed(rank)
    counts = torch.tensor([[1, 2, 0, 3], [2, 1, 2, 1], [0, 0, 4, 1], [3, 1, 1, 1]][rank])
    return torch.randn(int(counts.sum()), WIDTH, generator=generator), counts


def experts_that_tokens_are_sent_to(lib):
    mesh = meshes(lib)["tp"]
    rank = mesh.get_local_rank()
    plain, module = experts(), experts()
    expected = [plain(*routed(each)) for each in range(2)]
    sum(each.square().sum() for each in expected).backward()
    styles(lib).parallelize_module(module, mesh, {"": expert_parallel(lib)})
    x, counts = routed(rank)
    got = module(x, counts)
    torch.testing.assert_close(got, expected[rank])
    got.square().sum().backward()
    for ours, one in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), one.grad)


def experts_on_a_mesh_of_two_axes(lib):
    mesh = lib.init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    plain, module = experts(), experts()
    x, counts = routed(1)
    given, mine = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = plain(given, counts)
    expected.square().sum().backward()
    styles(lib).parallelize_module(module, mesh, expert_tensor_parallel(lib))
    got = module(mine, counts)
    torch.testing.assert_close(got, expected)
    got.square().sum().backward()
    torch.testing.assert_close(mine.grad, given.grad)
    for ours, one in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), one.grad)


def a_gate_that_every_rank_computes(lib):
    class NoParallel(styles(lib).ParallelStyle):
        @staticmethod
        def _prepare_input_fn(input_layout, desired_input_layout, mod, inputs, device_mesh):
            x = inputs[0]
            if not isinstance(x, lib.DTensor):
                x = lib.DTensor.from_local(x, device_mesh, (input_layout,), run_check=False)
            if input_layout != desired_input_layout:
                x = x.redistribute(placements=(desired_input_layout,), async_op=True)
            return (x, *inputs[1:])

        @staticmethod
        def _prepare_output_fn(output_layout, use_local_output, mod, outputs, device_mesh):
            if outputs.placements != (output_layout,):
                outputs = outputs.redistribute(placements=(output_layout,), async_op=True)
            return outputs.to_local() if use_local_output else outputs

        def _apply(self, module, device_mesh):
            return lib.distribute_module(
                module,
                device_mesh,
                None,
                partial(self._prepare_input_fn, lib.Shard(0), lib.Replicate()),
                partial(self._prepare_output_fn, lib.Shard(0), True),
            )

    torch.manual_seed(0)
    mesh, gate = meshes(lib)["tp"], nn.Linear(WIDTH, 4, bias=False)
    x = torch.randn(4, WIDTH)
    expected = gate(x).detach()
    styles(lib).parallelize_module(nn.ModuleDict({"gate": gate}), mesh, {"gate": NoParallel()})
    rank = mesh.get_local_rank()
    torch.testing.assert_close(gate(x.chunk(2)[rank]), expected.chunk(2)[rank])


PROGRAMS = [
    a_decoder_with_sequence_and_loss_parallelism_on_a_sub_mesh,
    tied_embeddings_parallelized_and_tied_again,
    keyword_arguments_are_prepared,
    experts_that_tokens_are_sent_to,
    experts_on_a_mesh_of_two_axes,
    a_gate_that_every_rank_computes,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("name", ["shardwise", "torch"])
def test_a_program_gives_what_one_process_gives(workers4, program, name):
    assert workers4.run(outcome, program, name) == [""] * RANKS


# ---- how many collectives


def collectives_of_a_step(name):
    """The collectives of one rank in the third step of training."""
    lib = library(name)
    model = made()
    parallelize(lib, model, meshes(lib)["tp"])
    train(model, styles(lib))
    if name == "torch":
        with CommDebugMode() as counted:
            train(model, styles(lib), steps=1)
        return counted.get_total_counts()
    events = []
    with sw.listen(events.append):
        train(model, styles(lib), steps=1)
    return sum(event.rank == sw.core.world.current().rank for event in events)


def test_a_training_step_has_no_more_collectives_than_torch_s(workers4):
    ours = workers4.run(collectives_of_a_step, "shardwise")
    torch_s = workers4.run(collectives_of_a_step, "torch")
    assert len(set(ours)) == 1 and ours[0] <= torch_s[0]


# ---- ranks that part


def one_rank_changes_its_length():
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    whole = torch.arange(2.0 * 16 * 4).view(2, 16, 4)
    x = sw.distribute_tensor(whole, mesh, [sw.Shard(1)]).requires_grad_().to_local()
    if mesh.get_rank() == 2:
        x = x[:, :3]
    return sw.DTensor.from_local(x * 2, mesh, [sw.Shard(1)]).full_tensor()


@pytest.mark.slow  # the ranks end, and are started again; test_shard_sizes has simulated ones
def test_a_rank_that_alone_changes_its_length_is_told_so(pool):
    workers = pool.get()
    with pytest.raises(sw.RankError, match=r"sizes of shards are (known|exchanged)"):
        workers.run(one_rank_changes_its_length)
