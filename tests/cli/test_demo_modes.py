"""Each mode of the demo trains as one process does, and lists its collectives; simulated ranks."""

import pytest

import shardwise as sw
from shardwise.demo.display import collective_rows, communication_table, shard_table
from shardwise.demo.options import MODES, UsageError, check_options
from shardwise.demo.training import alone, load_weights, on_each_rank

LAYERS = "layers.{0,1,2}"
GATHERED, BACK = "parameters, put together", "gradients, mean over the batch, a piece each"
ACROSS = "gradients, mean over the replicas' parts of the batch"
# Of three layers the last, with which backward begins, and the model's own group are kept.
AGAIN = f"layers.{{0,1}}: {GATHERED}"
SENT = {  # of the parameters: in which direction, what, along which axis, how often, for what
    "fsdp": [
        ("forward", "all-gather", "dp", 2, f"FSDPLlama, {LAYERS}: {GATHERED}"),
        ("backward", "all-gather", "dp", 1, AGAIN),
        ("backward", "reduce-scatter", "dp", 2, f"{LAYERS}, FSDPLlama: {BACK}"),
    ],
    "hsdp": [
        ("forward", "all-gather", "shard", 2, f"FSDPLlama, {LAYERS}: {GATHERED}"),
        ("backward", "all-gather", "shard", 1, AGAIN),
        ("backward", "reduce-scatter", "shard", 2, f"{LAYERS}, FSDPLlama: {BACK}"),
        ("backward", "all-reduce", "replicate", 2, f"{LAYERS}, FSDPLlama: {ACROSS}"),
    ],
    # Half of the model travels at once, so nothing is gathered again.
    "fsdp+tp": [
        ("forward", "all-gather", "dp", 1, f"FSDPLlama, {LAYERS}: {GATHERED}"),
        ("backward", "reduce-scatter", "dp", 1, f"FSDPLlama, {LAYERS}: {BACK}"),
    ],
}
SENT["tp"] = SENT["dp+tp"] = []


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """What one process has learned: the same for every mode."""
    return alone(check_options(steps=3, output=tmp_path_factory.mktemp("alone")), lambda loss: None)


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_learns_as_one_process_does_and_says_what_it_sends(mode, single, tmp_path):
    options = check_options(mode=mode, steps=3, output=tmp_path)
    outcomes = sw.simulate(on_each_rank, 4, options, tmp_path / "losses")
    for each in outcomes:
        assert each.losses == pytest.approx(single.losses, abs=1e-5)
        assert each.last_loss == pytest.approx(single.last_loss, abs=1e-5)
    assert load_weights(tmp_path / "model.safetensors").config == options.size.model

    found = collective_rows(outcomes[0].events)
    sent = [(row.direction, row.kind, ".".join(row.axes), row.count, row.why) for row in found]
    assert [each for each in sent if each[4].endswith((GATHERED, BACK, ACROSS))] == SENT[mode]
    tensor_parallel = [row for row in found if row.axes == ("tp",)]
    assert bool(tensor_parallel) == ("tp" in mode)
    kinds = {row.kind for row in found}
    assert set(communication_table(outcomes[0].events).columns[0].cells) >= kinds


def test_the_picture_has_a_column_for_each_part_of_the_parameters(tmp_path):
    def columns(mode):
        options = check_options(mode=mode, model="tiny", steps=1, output=tmp_path)
        outcomes = sw.simulate(on_each_rank, 4, options, tmp_path / "losses")
        return [str(column.header) for column in shard_table(outcomes).columns[1:]]

    assert columns("hsdp") == ["shard=0: ranks 0, 2", "shard=1: ranks 1, 3"]
    assert columns("fsdp+tp") == [
        f"dp={dp}, tp={tp}: rank {2 * dp + tp}" for dp in (0, 1) for tp in (0, 1)
    ]


def test_the_mesh_of_a_mode_is_made_of_the_ranks(tmp_path):
    def mesh(mode, **given):
        return check_options(mode=mode, output=tmp_path, **given).mesh

    assert [mesh(mode) for mode in MODES] == [(2, 2), (4,), (2, 2), (4,), (2, 2)]
    assert mesh("fsdp", ranks=2) == mesh("tp", ranks=2) == (2,)
    assert mesh("hsdp", ranks=8) == (2, 4)
    assert mesh("hsdp", mesh=(4, 1)) == (4, 1)
    assert mesh("tp", ranks=3) == mesh("tp", mesh=(3,)) == (3,)
    assert check_options(mode="fsdp", output=tmp_path).label == "fsdp 4"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mode": "ddp"}, "--mode: expected one of dp.tp, fsdp, hsdp, tp, fsdp.tp; got 'ddp'"),
        ({"mode": "fsdp", "mesh": (2, 2)}, "one size, dp, such as 4, for --mode fsdp; got 2x2"),
        ({"mode": "hsdp", "mesh": (4,)}, "two sizes, replicate x shard, such as 2x2, .* got 4"),
        ({"mode": "hsdp", "ranks": 3}, "--ranks: expected an even number for two replicas"),
        ({"mode": "fsdp", "ranks": 3}, "the 8 sequences of a batch cannot be .* among 3 data-par"),
        ({"mode": "fsdp+tp", "mesh": (3, 1)}, "--mode fsdp.tp: the 8 sequences"),
        ({"mode": "hsdp", "sequence_parallel": True}, "--sequence-parallel: .* got --mode hsdp"),
    ],
)
def test_options_that_contradict_a_mode_are_refused(given, said, tmp_path):
    with pytest.raises(UsageError, match=said):
        check_options(output=tmp_path, **given)
