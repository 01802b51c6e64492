"""The programs of simulated ranks return the results of the original."""

import copy
import io
from collections import Counter

import pytest
import torch
from support.export_ranks import Routed, check_metadata, collectives
from support.exported_models import CASES, program, runs

import shardwise as sw
from shardwise import Shard
from shardwise.core import world
from shardwise.export import shard_program
from shardwise.parallel import shard_module

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def reloaded(made):
    file = io.BytesIO()
    torch.export.save(made, file)
    file.seek(0)
    return torch.export.load(file)


def results(name, decomposed, shape, input_placements=None):
    """Return the result of each rank's program, and its collectives."""
    case, original = CASES[name], program(name, decomposed)

    def rank():
        mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])
        made = shard_program(original, mesh, case.plan, input_placements=input_placements)
        args, kwargs = case.inputs()
        split = input_placements is not None
        if split:
            args = args[0].chunk(shape[0])[mesh.get_local_rank("dp")], *args[1:]
        inputs = [(args, kwargs)] * 2 if split else case.all_inputs()
        saved = made if split or decomposed else reloaded(made)  # takes as long as the rest
        with Routed(mesh):
            if not case.others:
                check_metadata(made, args, kwargs)
            again = None if saved is made else runs(saved.module(), inputs)
            return runs(made.module(), inputs), again, collectives(made)

    return sw.simulate(rank, mesh_size(shape))


def mesh_size(shape):
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


def agrees(got, want, case):
    torch.testing.assert_close(got, want, rtol=1e-4, atol=case.tolerance)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_get_what_one_process_does(name):
    case = CASES[name]
    before = copy.deepcopy(program(name))
    want = runs(case.made(), case.all_inputs())
    for got, saved, counted in results(name, False, (2,)):
        agrees(got, want, case)
        agrees(saved, want, case)
        assert counted == case.collectives
    assert str(program(name)) == str(before)
    torch.testing.assert_close(program(name).state_dict, before.state_dict, rtol=0, atol=0)


# Dynamic sizes take several recordings: one such case is enough.
MORE_RANKS = [name for name in CASES if "dynamic" not in name and "llama" not in name]


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("name", [*MORE_RANKS, "mlp, dynamic"])
def test_four_ranks_get_it_from_decomposed_programs(name):
    case = CASES[name]
    want = runs(case.made(), case.all_inputs())
    for got, _, counted in results(name, True, (4,)):
        agrees(got, want, case)
        assert counted == (case.decomposed or case.collectives)


@pytest.mark.parametrize("name", [name for name in MORE_RANKS if CASES[name].batch])
def test_each_row_of_a_mesh_may_have_a_part_of_the_batch(name):
    case = CASES[name]
    want = runs(case.made(), [case.inputs()])[0][0]
    for got, _, counted in results(name, False, (2, 2), {case.batch: {"dp": Shard(0)}}):
        for result, *_ in got:
            agrees(result, want, case)
        assert sum(counted.values()) >= sum(case.collectives.values())


class Pair(torch.nn.Module):
    def forward(self, x, y):
        return x + y, x - y


@pytest.mark.parametrize(
    "shape, given, first, second",
    [
        ((2,), Shard(0), (2, 6), (2, 6)),
        ((2,), {"dp": Shard(1)}, (4, 3), (4, 3)),
        ((2,), [Shard(1)], (4, 3), (4, 3)),
        ((2,), [Shard(0), Shard(1)], (2, 6), (4, 3)),  # in order, as there is one axis
        ((2,), {0: Shard(0)}, (2, 6), (4, 6)),  # by position, not by axis
        ((2, 2), [Shard(0), Shard(1)], (2, 3), (2, 3)),
        ((2, 2), {"tp": Shard(1)}, (4, 3), (4, 3)),
        ((2, 2), [{"dp": Shard(0)}, None], (2, 6), (4, 6)),
    ],
)
def test_placements_of_outputs_are_for_all_or_in_order(shape, given, first, second):
    mesh = sw.DeviceMesh.abstract(shape, ("dp", "tp")[: len(shape)])
    original = torch.export.export(Pair(), (torch.ones(4, 6), torch.ones(4, 6)))
    made = shard_program(original, mesh, {}, output_placements=given)
    (outputs,) = made.graph.output_node().args
    assert [node.meta["val"].shape for node in outputs] == [first, second]


def test_placements_of_inputs_may_be_for_all_unless_one_has_the_name_of_the_axis():
    original = torch.export.export(Pair(), (torch.ones(4, 6), torch.ones(4, 6)))
    for axis, shapes in (("tp", [(2, 6), (2, 6)]), ("x", [(2, 6), (4, 6)])):
        mesh = sw.DeviceMesh.abstract((2,), (axis,))
        made = shard_program(original, mesh, {}, input_placements={axis: Shard(0)})
        inputs = [node for node in made.graph.nodes if node.op == "placeholder"]
        assert [node.meta["val"].shape for node in inputs] == shapes


def test_a_program_sends_nothing_whose_size_depends_on_values():
    """A lookup for which eager mode fetches rows from their owners."""
    indices = torch.arange(200)
    original = torch.export.export(torch.nn.Embedding(1000, 1000), (indices,))
    mesh = sw.DeviceMesh.abstract((2,), ("tp",))
    made = shard_program(original, mesh, {"weight": [Shard(0)]}, input_placements=[[Shard(0)]])
    called = " ".join(str(node.target) for node in made.graph.nodes)
    assert "all_gather" in called and "all_to_all" not in called


def test_a_rank_that_gets_nothing_gives_what_it_has():
    x = torch.arange(8.0).view(1, 8)
    original = torch.export.export(Pair(), (x, x)).run_decompositions()

    def rank():
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        rows, columns = {"tp": Shard(0)}, {"tp": Shard(1)}
        made = shard_program(
            original, mesh, {}, input_placements=columns, output_placements=[rows, columns]
        )
        piece = x.chunk(2, 1)[mesh.get_rank()]
        with Routed(mesh):
            return made.module()(piece, piece)[0]

    first, second = sw.simulate(rank, 2)
    assert torch.equal(first, x + x)
    assert second.shape == (0, 8)


EAGER = ["attention by hand", "sdpa", "fused qkv", "multihead", "encoder", "tied", "image"]


@pytest.mark.parametrize("name", EAGER)
def test_a_program_has_the_collectives_of_the_same_plan_in_eager_mode(name):
    case = CASES[name]

    def rank():
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = shard_module(case.made(), mesh, case.plan, src_data_rank=None)
        args, _ = case.inputs()
        before = len(heard())  # ranks agree on the model first
        with torch.no_grad():
            model(*args).full_tensor()
        return heard()[before:]

    def heard():
        return [event.kind for event in events if event.rank == world.current().rank]

    events = []
    with sw.listen(events.append):
        eager = Counter(sw.simulate(rank, 2)[0])
    names = {"all_gather": "all_gather_into_tensor"}
    assert {names.get(kind, kind): count for kind, count in eager.items()} == case.collectives
