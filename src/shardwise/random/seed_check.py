"""Checks that all ranks draw the same random numbers, and `seed`, which makes them.

A random operator draws a key on every rank (`samplers.draw_key`). If the keys differ, the shards of
its result do not fit together, and "replicas" differ. A rank cannot notice that alone: plain
tensors may be drawn, and generators seeded again, as long as all ranks do the same. So the ranks
compare, and when they do must depend on facts that all of them share. That is the number of random
operators run on a mesh so far: they compare a digest of all keys at the 1st, 2nd, 4th, ... operator
and then at every 64th (`MOST_UNCHECKED`). So every difference is found, late by 63 operators at
most, even if the generators agree again by then. Simulated ranks compare at every operator, as that
needs no collective.

Draws within a backward are neither counted nor compared: they repeat those of a forward, and a rank
may recompute activations that others kept.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from shardwise.comm import Communicator, carries_values, communicator
from shardwise.comm.trace import operator_scope
from shardwise.core import world
from shardwise.core.checks import as_int
from shardwise.core.errors import ShardwiseError
from shardwise.core.mesh import DeviceMesh, as_mesh
from shardwise.dtensor.local_shards import differing_ranks
from shardwise.torch_internals import current_graph_task

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

MOST_UNCHECKED = 64
"""The ranks of a mesh compare their keys at least once in this many random operators."""

_REMEDY = (
    "call sw.seed(mesh, n), or torch.manual_seed(n), on all ranks of the mesh, and draw plain "
    "random tensors on all ranks alike, or from a torch.Generator of their own"
)

_SHARING = "sw.simulate(parallel=True) and of torch's threaded process group"


class RandomStateError(ShardwiseError, RuntimeError):
    """Random generators are in different states on ranks that must agree."""


# ---- functions for users


def seed(
    device_mesh: DeviceMesh | TorchMesh,
    seed: int | None = None,
    *,
    generator: torch.Generator | None = None,
) -> int:
    """Seed the generators of all ranks of a mesh alike; all of them call this. Return the seed.

    Costs one small collective, which also checks that all ranks pass the same seed.

    Arguments:
        device_mesh: the mesh of the ranks.
        seed: as for `torch.manual_seed`. None: the first rank of the mesh chooses a random one.
        generator: the generator to seed on this rank. None: torch's default generators, of the CPU
            and of all other devices.

    Raises:
        RandomStateError: the ranks pass different seeds.

    Example:
        >>> mesh = sw.init_device_mesh("cpu", (4,))
        >>> sw.seed(mesh, 42)
        42
    """
    mesh = as_mesh(device_mesh)
    given = None if seed is None else as_int(seed)
    if seed is not None and (given is None or not -(2**63) <= given < 2**64):
        raise RandomStateError(f"seed: expected an int from -2**63 to 2**64 - 1, got {seed!r}")
    chosen = secrets.randbits(63) if given is None else given
    if mesh.size() > 1 and carries_values(mesh):
        seeds = communicator(mesh).gather_objects((given, chosen))
        if len({each for each, _ in seeds}) > 1:
            ranks = mesh.mesh.flatten().tolist()
            shown = ", ".join(f"rank {r}: {n}" for r, (n, _) in zip(ranks, seeds, strict=True))
            raise RandomStateError(f"seed: expected the same on all ranks of {mesh!r}, got {shown}")
        chosen = seeds[0][1]
    if generator is None:
        torch.manual_seed(chosen)
    else:
        generator.manual_seed(chosen)
    return chosen


def manual_seed(seed: int, device_mesh: DeviceMesh | TorchMesh) -> None:
    """Seed torch's default generators on this rank, without communication, as torch's function of
    this name does.

    All ranks of a mesh pass the same seed; ranks of another mesh, such as other stages of a
    pipeline, may pass another. `seed` also checks that they agree.

    Arguments:
        seed: as for `torch.manual_seed`.
        device_mesh: a mesh that this rank is in.
    """
    mesh = as_mesh(device_mesh)
    if mesh.get_coordinate() is None:
        raise RandomStateError(
            f"manual_seed: expected a mesh that this rank is in, got {mesh!r}; call it on the "
            "ranks of the mesh only"
        )
    torch.manual_seed(seed)


def is_rng_supported_mesh(device_mesh: DeviceMesh | TorchMesh) -> bool:
    """Return True: random operators are right on every device, as torch's are on some."""
    as_mesh(device_mesh)
    return True


def check_random_state(
    device_mesh: DeviceMesh | TorchMesh, *, generator: torch.Generator | None = None
) -> None:
    """Check that a generator is in the same state on all ranks of a mesh.

    Costs an all_gather of 8 bytes per rank; all ranks of the mesh must call it. Random operators
    compare what they draw by themselves; this finds a difference before one runs.

    Arguments:
        device_mesh: the mesh of the ranks.
        generator: this rank's generator. None: torch's default generator of the CPU.

    Raises:
        RandomStateError: the states of some ranks differ; it names them.
    """
    mesh = as_mesh(device_mesh)
    others, same = differing_ranks(mesh, _state(generator))
    if others:
        which = "torch's default generator" if generator is None else "the generator"
        raise RandomStateError(
            f"random state: {which} on ranks {others} of {mesh!r} is in another state than on "
            f"ranks {same}, so random tensors would not fit together; {_REMEDY}"
        )


# ---- what random operators draw


@dataclass(slots=True)
class _Draws:
    """The random operators that ran on one mesh."""

    count: int = 0
    next_check: int = 1
    checked: int = 0
    """The number of operators up to the last comparison."""
    digest: int = 0
    """Of all keys so far, in their order."""


_draws: WeakKeyDictionary[Communicator, _Draws] = WeakKeyDictionary()
"""By the communicator of the mesh: it is made anew, on all ranks, after an abort."""


def compare_draw(mesh: DeviceMesh, key: int) -> int:
    """Count a draw, compare it with those of the other ranks if it is time; return the key.

    Ranks that are threads and run in parallel share one random state: they all get the key of the
    rank that came first.

    Raises:
        RandomStateError: a rank has drawn another key, here or since the last comparison.
    """
    if mesh.size() == 1 or not carries_values(mesh):
        return key
    here = world.current()
    if current_graph_task() != -1:
        if here.shares_random_state:
            raise RandomStateError(
                "random state: a random operator runs in a backward, but the ranks of "
                f"{_SHARING} share one random state, so it cannot draw the numbers of the forward "
                "again; use sw.simulate without parallel"
            )
        return key
    group = communicator(mesh, tuple(range(mesh.ndim)))
    draws = _draws.get(group)
    if draws is None:
        draws = _draws[group] = _Draws()
    draws.count += 1
    first = here.first_value(group.ranks, mesh, draws.count, key)
    if first is None:
        draws.digest = (draws.digest * 0x9E3779B97F4A7C15 + key) % 2**64
        if draws.count >= draws.next_check:
            _compare(mesh, draws)
        return key
    rank, expected = first
    if key != expected and not here.shares_random_state:
        raise RandomStateError(
            f"random state: random operator {draws.count} on {mesh!r} drew other random numbers "
            f"here than on rank {rank}, so their shards do not fit together: {_REMEDY}"
        )
    return expected


def check_plain_draws(mesh: DeviceMesh) -> None:
    """Compare the default generators before every rank draws the same plain tensors from them."""
    state = int.from_bytes(blake2b(_state(None), digest_size=8).digest(), "little")
    if compare_draw(mesh, state) != state:
        raise RandomStateError(
            "random state: this operator draws plain random tensors, which differ on the ranks of "
            f"{_SHARING}, as they share one random state; use sw.simulate without parallel"
        )


def _compare(mesh: DeviceMesh, draws: _Draws) -> None:
    with operator_scope("check_random_state"):
        others, same = differing_ranks(mesh, draws.digest.to_bytes(8, "little"))
    since, draws.checked = draws.count - draws.checked, draws.count
    if not others:
        draws.next_check = draws.count + min(draws.count, MOST_UNCHECKED)
        return
    draws.digest, draws.next_check = 0, draws.count + 1  # told once: compare what comes next
    when = "this random operator" if since == 1 else f"one of the last {since} random operators"
    raise RandomStateError(
        f"random state: in {when} on {mesh!r}, ranks {others} drew other random numbers than ranks "
        f"{same}, so their shards do not fit together: {_REMEDY}"
    )


def _state(generator: torch.Generator | None) -> bytes:
    state = torch.get_rng_state() if generator is None else generator.get_state()
    return state.numpy().tobytes()
