"""Redistribution: ours against torch's DTensor, on the same pairs, in the same processes.

Table 1 is measured on 8 gloo ranks of a 2x4 mesh: time (alternating, minimum and median over
repeats, slowest rank) and bytes on the loopback interface per rank. Table 2 is bytes only, on
abstract meshes, beside the plan of torch's own planner (before the merging of steps that torch does
if the user has flattened the mesh; table 1 has that).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

import shardwise as sw

PAIRS = [
    ("S0 R", "R S0"),
    ("S0 S1", "S1 S0"),
    ("S0 S0", "S1 S1"),
    ("S0 S0", "R S0"),
    ("S0 S1", "S1 S1"),
    ("S0 S0", "S0 S1"),
    ("S0 R", "R R"),
    ("P P", "R R"),
    ("P P", "S0 S1"),
    ("P R", "R S0"),
    ("P S0", "R S1"),
]
PERMUTING = PAIRS[:5]
SIZES = {"64 MB": ((4096, 4096), 5), "256 kB": ((256, 256), 25)}
THREE_AXES = [
    ("S0 S1 R", "R S0 S1"),
    ("S0 S0 S0", "S1 S1 S1"),
    ("S0 S0 S1", "S1 S0 S0"),
    ("P P P", "R S0 R"),
    ("P S0 S1", "S0 R S1"),
]


def ours(text: str) -> list[sw.Placement]:
    """Parse a text such as `S0 R P` into our placements."""
    return [_placement(word, sw.Shard, sw.Replicate, sw.Partial) for word in text.split()]


def torchs(text: str) -> list[object]:
    """Parse a text such as `S0 R P` into torch's placements."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    return [_placement(word, Shard, Replicate, Partial) for word in text.split()]


def _placement(word: str, shard: Callable, replicate: Callable, partial: Callable) -> object:
    return shard(int(word[1:])) if word[0] == "S" else replicate() if word == "R" else partial()


# ---- table 1


def measure(shape: tuple[int, int], repeats: int) -> list[dict[str, object]]:
    """Measure all pairs with both libraries, in alternation; every rank runs this."""
    from torch.distributed.tensor import DTensor

    torch.set_num_threads(1)
    mesh = sw.init_device_mesh("cpu", (2, 4), ("x", "y"))
    torch_mesh = mesh.to_torch()
    torch_mesh._flatten("x_y")  # torch merges steps only if the user has done this
    everybody = sw.communicator(mesh)
    rows = []
    for source, target in PAIRS:
        src = sw.Layout.from_placements(mesh, shape, ours(source))
        dst = sw.Layout.from_placements(mesh, shape, ours(target))
        whole = torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape) / 1000
        local = whole[src.box().slices].contiguous()
        distributed = DTensor.from_local(
            local, torch_mesh, torchs(source), shape=whole.shape, stride=whole.stride()
        )
        there = torchs(target)

        def run_ours(local=local, src=src, dst=dst) -> torch.Tensor:
            return sw.redistribute_local(local, src, dst)

        def run_torch(distributed=distributed, there=there) -> torch.Tensor:
            return distributed.redistribute(placements=there).to_local()

        torch.testing.assert_close(run_ours(), run_torch(), rtol=1e-5, atol=1e-3)
        times: dict[str, list[float]] = {"ours": [], "torch": []}
        wire: dict[str, float] = {}
        runs = {"ours": run_ours, "torch": run_torch}
        for repeat in range(repeats + 2):
            for name in sorted(runs, reverse=bool(repeat % 2)):
                everybody.barrier()
                before = loopback_bytes()
                everybody.barrier()
                begin = time.perf_counter()
                runs[name]()
                spent = everybody.all_reduce(torch.tensor(time.perf_counter() - begin), "max")
                everybody.barrier()
                if repeat >= 2:
                    times[name].append(float(spent))
                wire[name] = (loopback_bytes() - before) / 8
        plan = sw.plan_redistribute(src, dst)
        rows.append({"pair": (source, target), "times": times, "wire": wire, "plan": plan})
    return rows


def loopback_bytes() -> int:
    """Return the bytes that the loopback interface has carried so far (Linux)."""
    with open("/proc/net/dev") as counters:
        for line in counters:
            name, _, numbers = line.partition(":")
            if name.strip() == "lo":
                return int(numbers.split()[0])
    return 0


def time_table() -> None:
    """Print table 1."""
    with sw.Workers(8) as workers:
        for label, (shape, repeats) in SIZES.items():
            rows = workers.run(measure, shape, repeats)[0]
            print(
                f"\n{label} float32, 8 gloo ranks as 2x4; ms: minimum (median); wire: MB per rank"
            )
            head = ("move", "ours", "torch", "torch/ours", "wire", "torch", "bound")
            print(f"{head[0]:18}{head[1]:>16}{head[2]:>18}{head[3]:>12}", end="")
            print(f"{head[4]:>8}{head[5]:>8}{head[6]:>8}")
            for row in rows:
                _print_row(row)


def _print_row(row: dict[str, object]) -> None:
    times, wire, plan = row["times"], row["wire"], row["plan"]
    shown = {
        name: f"{min(each) * 1e3:.1f} ({statistics.median(each) * 1e3:.1f})"
        for name, each in times.items()
    }
    ratio = min(times["torch"]) / min(times["ours"])
    source, target = row["pair"]
    verdict = ""
    if row["pair"] in PERMUTING and plan.source.shape[0] > 1000:
        verdict = "" if ratio >= 10 else "  MISSED 10x"
    elif ratio < 0.9:
        verdict = "  MISSED: slower"
    print(
        f"{source + ' -> ' + target:18}{shown['ours']:>16}{shown['torch']:>18}{ratio:>11.1f}x",
        end="",
    )
    amounts = (wire["ours"], wire["torch"], plan.lower_bound)
    print("".join(f"{amount / 1e6:>8.2f}" for amount in amounts) + verdict)


# ---- table 2


def torch_percent(mesh: object, shape: tuple[int, ...], source: str, target: str) -> str:
    """Return the bytes that a rank receives by torch's plan, in percent of the tensor.

    Collectives are assumed to be rings.
    """
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(torch.Size(shape), (shape[1], 1), torch.float32)
    specs = [DTensorSpec(mesh, tuple(torchs(text)), tensor_meta=meta) for text in (source, target)]
    moved = 0.0
    steps = _redistribute._gen_transform_infos_non_cached(*specs)
    for step in steps:
        size = mesh.size(step.mesh_dim)
        whole = torch.Size(step.logical_shape).numel() * (size - 1) / size
        kind = step._comm_type_key() or "local"
        factor = {"all_reduce": 2, "all_to_all": 1 / size, "local": 0}
        moved += whole * factor.get(kind, 1)
    return f"{100 * moved / (shape[0] * shape[1]):.1f} {len(steps)}c"


def byte_table() -> None:
    """Print table 2."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=32)
    shape = (4096, 4096)
    for sizes, pairs in (((4, 8), PAIRS), ((2, 4, 4), THREE_AXES)):
        mesh = sw.DeviceMesh.abstract(sizes, tuple("xyz"[: len(sizes)]))
        torch_mesh = init_device_mesh("cpu", sizes, mesh_dim_names=mesh.mesh_dim_names)
        title = "x".join(map(str, sizes))
        print(f"\n{title} mesh, 4096x4096: bytes received by the busiest rank, % of the tensor")
        print(f"{'move':24}{'bound':>8}{'ours':>12}{'torch plan':>14}")
        for source, target in pairs:
            layouts = [sw.Layout.from_placements(mesh, shape, ours(t)) for t in (source, target)]
            plan = sw.plan_redistribute(*layouts)
            total = 4 * shape[0] * shape[1]
            steps = sum(step.peers > 0 for step in plan.steps)
            mine = f"{100 * plan.bytes_received / total:.1f} {steps}c"
            least = 100 * plan.lower_bound / total
            theirs = torch_percent(torch_mesh, shape, source, target)
            print(f"{source + ' -> ' + target:24}{least:>8.1f}{mine:>12}{theirs:>14}")
    dist.destroy_process_group()


if __name__ == "__main__":
    byte_table()
    time_table()
