"""The Llama example: as in one process on every mesh, and it communicates what it must, no more."""

import functools
import math
from collections import Counter

import pytest
import torch

import shardwise as sw
from shardwise.examples import train_llama
from shardwise.examples.llama import Config, Llama
from shardwise.examples.train_llama import (
    DATA_PARALLEL,
    SEQUENCE_PARALLEL,
    TENSOR_PARALLEL,
    train,
)
from shardwise.parallel import shard_module

PLANS = {"tensor parallel": TENSOR_PARALLEL, "sequence parallel": SEQUENCE_PARALLEL}
NAMES = {1: ("tp",), 2: ("dp", "tp")}
# Nothing divides: heads of keys, hidden features, vocabulary, length, batch.
UNEVEN = Config(vocabulary=101, width=24, layers=2, heads=6, kv_heads=3, hidden=50, longest=9)
EVEN = Config(vocabulary=96, width=64, layers=2, heads=4, kv_heads=2, hidden=160, longest=32)


def step(config, batch, length, mesh=None, plan=None, dtype=torch.float64):
    """A model after one backward, and its loss."""
    torch.manual_seed(0)
    model = Llama(config).to(dtype)
    tokens = torch.randint(config.vocabulary, (batch, length + 1))
    if mesh is not None:
        shard_module(model, mesh, plan)
    loss = model.loss(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return model, loss


@functools.cache
def alone(config, batch, length):
    model, loss = step(config, batch, length)
    return loss.item(), {name: each.grad for name, each in model.named_parameters()}


def run(shape, plan, config, batch, length):
    mesh = sw.init_device_mesh("cpu", shape, NAMES[len(shape)])
    plan = PLANS[plan] | (DATA_PARALLEL if len(shape) == 2 else {})
    with sw.fallback("error"):
        return step(config, batch, length, mesh, plan)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)])
def test_loss_and_gradients_are_those_of_one_process(shape, plan, tied):
    config = Config(**{**vars(UNEVEN), "tied": tied})
    expected_loss, expected = alone(config, 3, 7)

    def compared():
        model, loss = run(shape, plan, config, 3, 7)
        assert abs(loss.item() - expected_loss) < 1e-10
        found = {name: each.grad.full_tensor() for name, each in model.named_parameters()}
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            scale = expected[name].abs().max()
            assert (gradient - expected[name]).abs().max() <= 1e-10 * scale, name
        assert model.layers[0].attention.wq.weight.shape == (24, 24)

    sw.simulate(compared, math.prod(shape))


# ---- what is communicated in a step, exactly

BATCH, LENGTH, ITEM = 2, 32, 8
TENSOR = BATCH * LENGTH * EVEN.width * ITEM  # bytes of what runs between the blocks
ROWS = BATCH * LENGTH * ITEM  # bytes of one number for each token
BLOCKS = [f"layers.{at}.{block}" for at in (0, 1) for block in ("attention", "feed_forward")]
FIRST = {"attention": "wq", "feed_forward": "w1"}  # the first that uses a block's input
NORMS = ["norm", *(f"layers.{at}.{name}_norm" for at in (0, 1) for name in ("attention", "ffn"))]


def events_of(shape, plan):
    """How often: direction, kind, axes, bytes received by rank 0, module."""
    heard = []
    with sw.listen(lambda event: event.rank == 0 and heard.append(event)):
        sw.simulate(run, math.prod(shape), shape, plan, EVEN, BATCH, LENGTH)
    return Counter(
        (each.cause.direction, each.kind, *each.axes, each.bytes, each.cause.module)
        for each in heard
        if each.cause.operator  # what no operator needs is the placing of the parameters
    )


def first_use(block):
    return f"{block}.{FIRST[block.rpartition('.')[2]]}"


def loss_of_split_vocabulary(tokens):
    """The largest logit of each token; the sum of exponentials, and the target's logit."""
    return Counter(
        {
            ("forward", "all_reduce", "tp", tokens, ""): 1,
            ("forward", "all_reduce", "tp", 2 * tokens, ""): 1,
        }
    )


def tensor_parallel(share=1):
    """One all-reduce a block in each direction, and of the embedding and of the head."""
    size = TENSOR // share  # received in an all-reduce of two: twice a half
    forward = [("forward", "all_reduce", "tp", size, at) for at in ("tok_embeddings", *BLOCKS)]
    uses = ["output", *map(first_use, BLOCKS)]
    backward = [("backward", "all_reduce", "tp", size, at) for at in uses]
    return Counter(forward + backward) + loss_of_split_vocabulary(ROWS // share)


def sequence_parallel(share=1):
    """A pair of all-gather and reduce-scatter a block in each direction, half the bytes each."""
    size = TENSOR // 2 // share
    ends, starts = ["tok_embeddings", *BLOCKS], ["output", *BLOCKS]
    uses = ["output", *map(first_use, BLOCKS)]
    pairs = [
        *[("forward", "reduce_scatter", "tp", size, at) for at in ends],
        *[("forward", "all_gather", "tp", size, at) for at in starts],
        *[("backward", "reduce_scatter", "tp", size, at) for at in uses],
        *[("backward", "all_gather", "tp", size, at) for at in ends],
    ]
    return Counter(pairs) + loss_of_split_vocabulary(ROWS // share)


def norms(*axes, ranks):
    """The sum of the norms' gradients, of which every rank has a contribution."""
    size = 2 * EVEN.width * ITEM * (ranks - 1) // ranks
    return Counter(("backward", "all_reduce", *axes, size, at) for at in NORMS)


def data_parallel():
    """The sum of every weight's gradient, of the half that a rank holds; and how many tokens."""
    weights = dict(Llama(EVEN).named_parameters())
    matrices = {name: each.numel() for name, each in weights.items() if each.dim() == 2}
    sums = [
        ("backward", "all_reduce", "dp", count // 2 * ITEM, name.removesuffix(".weight"))
        for name, count in matrices.items()
    ]
    return Counter([*sums, ("forward", "all_reduce", "dp", ITEM, "")])


def test_tensor_parallelism_takes_one_all_reduce_a_block_in_each_direction():
    assert events_of((2,), "tensor parallel") == tensor_parallel()


def test_sequence_parallelism_takes_a_gather_and_a_reduce_scatter_instead():
    assert events_of((2,), "sequence parallel") == sequence_parallel() + norms("tp", ranks=2)


def test_data_parallelism_adds_one_all_reduce_for_each_weight():
    expected = tensor_parallel(share=2) + data_parallel() + norms("dp", ranks=2)
    assert events_of((2, 2), "tensor parallel") == expected


def test_data_and_sequence_parallelism_sum_the_gradients_of_norms_once():
    expected = sequence_parallel(share=2) + data_parallel() + norms("dp", "tp", ranks=4)
    assert events_of((2, 2), "sequence parallel") == expected


# ---- the training script


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_script_trains_under_torchrun_as_one_process_does(
    sequence_parallel, monkeypatch, capsys
):
    """With RANK in the environment `main` trains in this process, as one rank of torchrun does."""
    flags = ["--sequence-parallel"] if sequence_parallel else []
    losses = []
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(train_llama, "train", lambda options: losses.append(train(options)))

    def run(mesh, *more):
        sizes = ["--mesh", "x".join(map(str, mesh)), "--batch", "4", "--length", "8", *more]
        monkeypatch.setattr("sys.argv", ["train_llama", *sizes, "--steps", "2"])
        sw.simulate(train_llama.main, math.prod(mesh))

    run((1, 1))
    run((2, 2), *flags)
    alone, *ranks = losses
    assert all(ranks[0] == each for each in ranks) and len(ranks) == 4
    assert ranks[0] == pytest.approx(alone, rel=1e-5) and len(alone) == 2
    assert capsys.readouterr().out.count("step 2: loss") == 2  # the first rank's only


def test_the_script_starts_its_ranks_and_refuses_a_mesh_that_is_none(monkeypatch, capsys):
    started = []
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sw, "launch", lambda fn, size, options: started.append((fn, size)))
    monkeypatch.setattr("sys.argv", ["train_llama", "--mesh", "3x2"])
    train_llama.main()
    assert started == [(train, 6)]
    monkeypatch.setattr("sys.argv", ["train_llama", "--mesh", "3"])
    with pytest.raises(SystemExit):
        train_llama.main()
    assert "expected sizes such as 2x2, got '3'" in capsys.readouterr().err
