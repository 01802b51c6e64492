"""Sharded tensors: ours beside torch's ShardedTensor, on the same calls, in the same processes.

Four gloo ranks of one thread each, taking turns; the time of a call is that of the slowest rank.
`wire` is the number of bytes on the loopback interface per rank, `needed` the lower bound on it.
A call that torch's ShardedTensor refuses, or that ends its processes, has no number for torch.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

import shardwise as sw
from benchmarks._turns import taking_turns
from benchmarks.redistribute import loopback_bytes
from shardwise import sharded

RANKS = 4
SIZES = {"64 MB": ((4096, 4096), 6), "256 kB": ((256, 256), 40)}
IN_ORDER = (0, 1, 2, 3)
REVERSED = (3, 2, 1, 0)
CYCLE = (1, 2, 3, 0)


def _placements(order: tuple[int, ...]) -> list[str]:
    return [f"rank:{rank}/cpu" for rank in order]


def _quarters(rows: int, columns: int) -> sharded.EnumerableShardingSpec:
    """Return a grid of two by two boxes, one for each rank."""
    half = rows // 2, columns // 2
    return sharded.EnumerableShardingSpec(
        [
            sharded.ShardMetadata([i * half[0], j * half[1]], half, f"rank:{2 * i + j}/cpu")
            for i in range(2)
            for j in range(2)
        ]
    )


def measure(shape: tuple[int, int], rounds: int) -> list[tuple[str, dict[str, Any]]]:
    """Measure all calls with both libraries, in alternation; every rank runs this."""
    from torch.distributed._shard import sharded_tensor as theirs
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec as TheirChunks

    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)
    rank = dist.get_rank()
    rows = []
    here = torch.arange(shape[0] * shape[1] // RANKS, dtype=torch.float32) + rank
    here = here.reshape(shape[0] // RANKS, shape[1])
    our_spec = sharded.ChunkShardingSpec(0, _placements(IN_ORDER))
    their_spec = TheirChunks(0, _placements(IN_ORDER))
    ours = sharded.init_from_local_tensor(here.clone(), our_spec, shape)
    their_tensor = theirs.ShardedTensor._init_from_local_tensor(here.clone(), their_spec, shape)
    out = torch.empty(shape) if rank == 0 else None
    size = here.numel() * 4

    def add(name: str, our_call: Callable[[], Any], their_call: Any, needed: float) -> None:
        calls = {"ours": our_call, **({"torch": their_call} if their_call else {})}
        wire = {}
        for each, call in calls.items():
            call()
            dist.barrier()
            before = loopback_bytes()
            dist.barrier()
            call()
            dist.barrier()
            wire[each] = (loopback_bytes() - before) / RANKS
        times = taking_turns(calls, ["ours"], rounds)
        rows.append((name, {"times": times, "wire": wire, "needed": needed}))

    def there_and_back(tensor: Any, there: Any, back: Any) -> Callable[[], Any]:
        return lambda: tensor.reshard(there).reshard(back)

    def both(order: tuple[int, ...], dim: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
        mine = sharded.ChunkShardingSpec(dim, _placements(order))
        return (
            there_and_back(ours, mine, our_spec),
            there_and_back(their_tensor, TheirChunks(dim, _placements(order)), their_spec),
        )

    add("reshard dim 0 to 1 and back", *both(IN_ORDER, 1), 2 * size * 3 / 4)
    add("reshard reversed and back", *both(REVERSED, 0), 2 * size)
    add("reshard a cycle and back", both(CYCLE, 0)[0], None, 2 * size)
    quarters = _quarters(*shape)
    add("reshard to quarters and back", there_and_back(ours, quarters, our_spec), None, 1.0 * size)
    add(
        "gather",
        lambda: ours.gather(0, out),
        lambda: their_tensor.gather(0, out),
        size * 3 / RANKS,
    )
    # Each rank looks up its own indices and gets their rows, as with torch. The owners of the large
    # table send each row once; the small table is smaller than the result, so it is gathered.
    indices = torch.randint(shape[0], (512,), generator=torch.Generator().manual_seed(rank))
    batch = sw.DTensor.from_local(indices, sw.init_device_mesh("cpu", (RANKS,)), [sw.Shard(0)])

    def own_rows() -> torch.Tensor:
        return F.embedding(batch, ours).redistribute(placements=[sw.Shard(0)]).to_local()

    torch.testing.assert_close(own_rows(), F.embedding(indices, their_tensor))
    add(
        "embedding, 512 rows each",
        own_rows,
        lambda: F.embedding(indices, their_tensor),
        shape[1] * 4 * min(512, shape[0]) * 3 / 4,  # or all of the table
    )
    add("add", lambda: ours + ours, None, 0)
    return rows


def main() -> None:
    """Print the tables."""
    with sw.Workers(RANKS) as workers:
        for label, (shape, rounds) in SIZES.items():
            print(f"\n{label} float32, {RANKS} gloo ranks; ms: minimum (median); MB per rank")
            print(f"{'call':30}{'ours':>18}{'torch':>20}{'torch/ours':>12}", end="")
            print(f"{'wire':>8}{'torch':>8}{'needed':>8}")
            for name, row in workers.run(measure, shape, rounds)[0]:
                _print_row(name, row)


def _print_row(name: str, row: dict[str, Any]) -> None:
    times, wire = row["times"], row["wire"]
    shown = {
        each: f"{min(spent) * 1e3:.2f} ({statistics.median(spent) * 1e3:.2f})"
        for each, spent in times.items()
    }
    ratio = f"{min(times['torch']) / min(times['ours']):.2f}" if "torch" in times else "-"
    print(f"{name:30}{shown['ours']:>18}{shown.get('torch', '-'):>20}{ratio:>12}", end="")
    carried = [f"{wire[each] / 1e6:.2f}" if each in wire else "-" for each in ("ours", "torch")]
    print(f"{carried[0]:>8}{carried[1]:>8}{row['needed'] / 1e6:>8.2f}")


if __name__ == "__main__":
    main()
