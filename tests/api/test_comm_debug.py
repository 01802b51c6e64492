"""CommDebugMode and visualize_sharding."""

import json

import pytest
import torch
from support.rules import ranks, split, values
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.fsdp import fully_shard
from shardwise.tensor.debug import CommDebugMode, visualize_sharding
from shardwise.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

FUNCTIONAL, C10D = torch.ops.c10d_functional, torch.ops.c10d


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(self.up(x).relu())


PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def tp_model(mesh):
    torch.manual_seed(0)
    return parallelize_module(MLP(), mesh, PLAN)


def test_collectives_are_counted_by_kind_module_and_direction():
    def run(mesh):
        model, mode = tp_model(mesh), CommDebugMode()
        x = torch.ones(3, 4, requires_grad=True)
        with mode:
            model(x).sum().backward()
        assert mode.get_comm_counts() == {FUNCTIONAL.all_reduce: 2}
        assert mode.get_total_counts() == 2
        assert repr(mode) == "CommDebugMode(get_total_counts()=2)"
        counts = mode.comm_module_counts
        assert counts["MLP.down"]["forward"] == {FUNCTIONAL.all_reduce: 1}
        assert counts["MLP"]["forward"] == {FUNCTIONAL.all_reduce: 1}
        assert counts["Global"]["forward"] == {FUNCTIONAL.all_reduce: 1}
        assert counts["Global"]["backward"] == {FUNCTIONAL.all_reduce: 1}
        assert mode.get_sharding_info() == {
            "MLP.up.weight": (Shard(0),),
            "MLP.up.bias": (Shard(0),),
            "MLP.down.weight": (Shard(1),),
            "MLP.down.bias": (Replicate(),),
        }
        assert mode.get_parameter_info()["MLP.up"]["weight"] is model.up.weight

    ranks(run)


def test_each_rank_counts_its_own_and_entering_starts_anew():
    def run(mesh):
        x, mode = split(values(4, 4), mesh, Shard(0)), CommDebugMode()
        with mode:
            x.full_tensor()
            x.redistribute(placements=[Shard(1)])
            if mesh.get_rank() == 0:
                x.sum().to_local()
        first = dict(mode.get_comm_counts())
        with mode:
            pass
        return first, mode.get_total_counts()

    gathers = {FUNCTIONAL.all_gather_into_tensor: 1, FUNCTIONAL.all_to_all_single: 1}
    assert ranks(run) == [(gathers, 0)] * 2


def test_moves_of_each_kind_have_the_names_that_torch_counts():
    def run(mesh):
        partial = sw.DTensor.from_local(torch.ones(512, 512), mesh, [Partial()])
        with CommDebugMode() as mode:
            partial.redistribute(placements=[Replicate()])
            partial.redistribute(placements=[Shard(0)])
            sw.distribute_tensor(torch.ones(4), mesh, [Shard(0)])
            sw.distribute_tensor(torch.ones(4), mesh, [Replicate()])
        return mode.get_comm_counts()

    expected = {
        FUNCTIONAL.all_reduce: 1,
        FUNCTIONAL.reduce_scatter_tensor: 1,
        C10D.scatter_: 1,
        FUNCTIONAL.broadcast: 1,
    }
    assert ranks(run) == [expected] * 2


def test_data_parallel_collectives_have_c10ds_names():
    def run(mesh):
        torch.manual_seed(0)
        model = fully_shard(MLP(), mesh=mesh)
        with CommDebugMode() as mode:
            model(torch.ones(3, 4)).sum().backward()
        return mode.get_comm_counts()

    for counts in ranks(run):
        assert counts[C10D._allgather_base_] == 1
        assert counts[C10D._reduce_scatter_base_] == 1


@pytest.mark.parametrize("level", range(4))
def test_the_table_tells_more_at_a_higher_level(level, tmp_path):
    def run(mesh):
        model = tp_model(mesh)
        with CommDebugMode() as mode:
            y = checkpoint(model, torch.ones(3, 4), use_reentrant=False)
            y.sum().backward()
        path = tmp_path / f"{mesh.get_rank()}.txt"
        mode.log_comm_debug_tracing_table_to_file(str(path), level)
        table = mode.generate_comm_debug_tracing_table(level)
        assert path.read_text("utf-8") == table
        return table

    for table in ranks(run):
        assert "        MLP.down\n" in table and "FORWARD PASS" in table
        assert "*c10d_functional.all_reduce: 1" in table
        assert ("*weight: (Shard(dim=0),)" in table or "*weight: (Shard(0),)" in table) == (
            level > 0
        )
        assert ("**linear" in table) == (level > 0)
        assert ("**aten.relu" in table) == (level > 1)
        assert ("**aten.detach" in table) == (level > 2)
        assert ("ACTIVATION CHECKPOINTING" in table) == (level > 0)


def test_the_json_file_has_the_tree_of_modules(tmp_path):
    def run(mesh):
        model = tp_model(mesh)
        with CommDebugMode() as mode:
            model(torch.ones(3, 4, requires_grad=True)).sum().backward()
        path = tmp_path / f"{mesh.get_rank()}.json"
        mode.generate_json_dump(str(path), 1)
        return json.loads(path.read_text("utf-8"))

    for tree in ranks(run):
        assert tree["fqn"] == "Global"
        (model,) = tree["children"]
        assert [each["fqn"] for each in model["children"]] == ["MLP.up", "MLP.down"]
        assert model["children"][1]["collectives_forward"] == [["c10d_functional.all_reduce", 1]]
        assert model["children"][0]["parameters"][0][0] == "weight"
        assert any(each["name"] == "linear" for each in model["children"][0]["operations_forward"])


def test_a_module_that_fails_is_left():
    def run(mesh):
        x = split(values(4, 3, grad=False), mesh, Shard(0))
        with CommDebugMode() as mode:
            with pytest.raises(RuntimeError):
                MLP()(torch.ones(3, 5))
            x.full_tensor()
        return mode.comm_module_counts["MLP"]["forward"], mode.get_total_counts()

    assert ranks(run) == [({}, 1)] * 2


def test_flops_are_counted_around_it():
    def run(mesh):
        model = tp_model(mesh)
        with sw.flops() as alone:
            model(torch.ones(3, 4))
        with sw.flops() as around, CommDebugMode():
            model(torch.ones(3, 4))
        return alone.one_process, around.one_process

    for alone, around in ranks(run):
        assert alone == around > 0


# ---- visualize_sharding


def printed(capsys, shape, placements, mesh_shape=(2, 2), **options):
    def run(mesh):
        x = split(torch.ones(shape), mesh, *placements)
        visualize_sharding(x, **options)

    ranks(run, torch.Size(mesh_shape).numel(), mesh_shape)
    return capsys.readouterr().out


def test_a_table_shows_the_ranks_of_each_part(capsys):
    assert printed(capsys, (4, 4), [Shard(0), Shard(1)]) == (
        "         Col 0-1  Col 2-3\n"
        "-------  -------  -------\n"
        "Row 0-1    cpu:0    cpu:1\n"
        "Row 2-3    cpu:2    cpu:3\n"
    )


def test_replicas_share_a_part_and_vectors_are_columns(capsys):
    assert printed(capsys, (5,), [Shard(0), Replicate()], header="bias") == (
        "bias\n         Col 0-0\n-------  -------\nRow 0-2  cpu:0,1\nRow 3-4  cpu:2,3\n"
    )


def test_empty_shards_pending_sums_and_more_dims_are_shown(capsys):
    assert "without elements: cpu:2" in printed(capsys, (2,), [Shard(0)], (3,))
    assert "cpu:(0,1)" in printed(capsys, (2, 2), [Partial()], (2,))
    assert "[0-0]\n" in printed(capsys, (2, 2, 2), [Shard(0)], (2,))
    assert "Row 0-0" in printed(capsys, (), [Replicate()], (2,))


def test_only_dtensors_are_shown():
    with pytest.raises(sw.LayoutError, match="expected a DTensor"):
        visualize_sharding(torch.ones(2))
