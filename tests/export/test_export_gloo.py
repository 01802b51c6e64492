"""Programs of real ranks: run, saved, loaded, compiled, and without shardwise."""

import copy
import subprocess
import sys

import pytest
import torch
from support.exported_models import CASES, program, runs

import shardwise as sw
from shardwise import Shard
from shardwise.core import world
from shardwise.export import make_groups, shard_program


def meshes():
    """All ranks, two rows of two, and the first two ranks."""
    whole = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    rows = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return whole, rows, rows["tp"]


def on_all_meshes(names):
    """Return for each case, and each mesh, the greatest difference to one process."""
    torch.set_num_threads(1)
    for name in names:
        case = CASES[name]
        want = runs(case.made(), case.all_inputs())
        for mesh in meshes():
            made = shard_program(program(name), mesh, case.plan)
            got = runs(made.module(), case.all_inputs())
            torch.testing.assert_close(got, want, rtol=1e-4, atol=case.tolerance)


def test_programs_over_gloo_do_what_one_process_does(workers4):
    names = "mlp, uneven", "tied", "image, training", "cache by index"
    workers4.run(on_all_meshes, names)


def batch_of_rows():
    case = CASES["llama, fixed"]
    (tokens,), _ = case.inputs()
    _, mesh, _ = meshes()
    batch = {"tokens": {"dp": Shard(0)}}
    split = [{"dp": Shard(0)}]
    original = program("llama, fixed", decomposed=True)
    made = shard_program(original, mesh, case.plan, input_placements=batch, output_placements=split)
    row = mesh.get_local_rank("dp")
    with torch.no_grad():
        got, want = made.module()(tokens[row : row + 1]), case.made()(tokens)[row : row + 1]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_a_row_may_take_and_return_its_part_of_the_batch(workers4):
    workers4.run(batch_of_rows)


def used_as_torch_does():
    case = CASES["mlp, dynamic"]
    (x,), _ = case.inputs()
    whole, *_ = meshes()
    made = shard_program(program("mlp, dynamic"), whole, case.plan)
    with torch.no_grad():
        want = case.made()(x)
        results = [
            copy.deepcopy(made).module()(x),
            made.run_decompositions().module()(x),
            torch.export.unflatten(made)(x),
            torch.compile(made.module(), backend="aot_eager")(x),
        ]
    for each in results:
        torch.testing.assert_close(each, want, rtol=1e-4, atol=1e-5)
    assert made.range_constraints == program("mlp, dynamic").range_constraints
    with pytest.raises(Exception, match=r"Guard failed|65|<= 64"):
        made.module()(torch.randn(65, 3, 8))


@pytest.mark.slow
def test_a_program_is_copied_decomposed_unflattened_and_compiled_as_others_are(workers4):
    workers4.run(used_as_torch_does)


# ---- where there is no shardwise

SCRIPT = """
import os
import sys
import torch
import torch.distributed as dist

folder, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
group = dist.new_group([1, 0])
torch._C._distributed_c10d._register_process_group("ranks_1_0", group)
x, want = torch.load(f"{folder}/example.pt")
for name in ("all", "turned"):
    made = torch.export.load(f"{folder}/{name}_{rank}.pt2").module()
    with torch.no_grad():
        torch.testing.assert_close(made(x), want, rtol=1e-4, atol=1e-5)
        made = torch.compile(made, backend="aot_eager")
        torch.testing.assert_close(made(x), want, rtol=1e-4, atol=1e-5)
assert not any(name.split(".")[0] == "shardwise" for name in sys.modules)
dist.barrier()
os._exit(0)  # torch's own teardown of a registered group may abort, as its threads are still there
"""


@pytest.mark.slow
def test_saved_programs_run_where_there_is_torch_only(tmp_path):
    """Programs of a group other than torch's default group can be saved and loaded too."""
    case = CASES["sdpa"]
    (x,), _ = case.inputs()
    with torch.no_grad():
        torch.save((x, case.made()(x)), tmp_path / "example.pt")

    def save():
        for name, ranks in (("all", [0, 1]), ("turned", [1, 0])):
            mesh = sw.DeviceMesh("cpu", ranks, mesh_dim_names=("tp",))
            made = shard_program(program("sdpa"), mesh, case.plan)
            torch.export.save(made, tmp_path / f"{name}_{world.current().rank}.pt2")

    sw.simulate(save, 2)
    started = [
        subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path), str(rank)])
        for rank in range(2)
    ]
    assert [each.wait(150) for each in started] == [0, 0]


def loaded(folder):
    """Run programs that other processes saved, with groups that `make_groups` makes."""
    case = CASES["sdpa"]
    (x,), _ = case.inputs()
    rank = world.current().rank
    made = torch.export.load(f"{folder}/{rank}.pt2")
    names = list(make_groups(made))
    with torch.no_grad():
        torch.testing.assert_close(made.module()(x), case.made()(x), rtol=1e-4, atol=1e-5)
    return names


def test_the_groups_of_a_loaded_program_can_be_made(workers4, tmp_path):
    def save():
        ranks = torch.tensor([[2, 0], [3, 1]])
        mesh = sw.DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp"))
        made = shard_program(program("sdpa"), mesh, CASES["sdpa"].plan)
        torch.export.save(made, tmp_path / f"{world.current().rank}.pt2")

    sw.simulate(save, 4)
    first, second = ["ranks_2_0"], ["ranks_3_1"]
    assert workers4.run(loaded, tmp_path) == [first, second, first, second]
