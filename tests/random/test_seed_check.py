"""Ranks whose generators differ are told so: at the operator, on simulated ranks."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import RandomStateError, check_random_state
from shardwise.random.samplers import draw_key
from shardwise.random.seed_check import manual_seed

MESHES = [(1,), (2,), (3,), (2, 2)]


def on_ranks(run: Callable[..., Any], *mesh_shape: int, **options: Any) -> list[Any]:
    def start() -> Any:
        return run(sw.init_device_mesh("cpu", mesh_shape))

    return sw.simulate(start, math.prod(mesh_shape), **options)


def differs(run: Callable[[sw.DeviceMesh], Any], *mesh_shape: int) -> str:
    """Return the message of the error that some rank gets; the others do not."""
    with pytest.raises(sw.RankError) as caught:
        on_ranks(run, *mesh_shape)
    assert isinstance(caught.value.__cause__, RandomStateError)
    return str(caught.value.__cause__)


# ---- check_random_state


def test_equal_generators_are_found_equal() -> None:
    def run(mesh: sw.DeviceMesh) -> None:
        torch.manual_seed(4)
        torch.rand(mesh.size())
        check_random_state(mesh)
        check_random_state(mesh, generator=torch.Generator().manual_seed(3))

    for mesh_shape in MESHES:
        on_ranks(run, *mesh_shape)
    check_random_state(sw.DeviceMesh.abstract((4,)))


def test_the_ranks_that_differ_are_named() -> None:
    def run(mesh: sw.DeviceMesh) -> None:
        generator = torch.Generator().manual_seed(3)
        if mesh.get_rank() in (1, 3):
            torch.rand(())
            torch.rand((), generator=generator)
        expected = r"generator on ranks \[1, 3\] of .* state than on ranks \[0, 2, 4\].*sw.seed"
        with pytest.raises(RandomStateError, match=expected):
            check_random_state(mesh)
        with pytest.raises(RandomStateError, match=expected):
            check_random_state(mesh, generator=generator)

    on_ranks(run, 5)


# ---- random operators on ranks whose generators differ


OPERATORS: dict[str, Callable[[sw.DTensor], Any]] = {
    "factory": lambda x: sw.rand(4, device_mesh=x.device_mesh),
    "fill": lambda x: x.uniform_(),
    "like": torch.rand_like,
    "dropout": lambda x: F.dropout(x, 0.5),
    "module": nn.Dropout(0.5),
    "init": nn.init.kaiming_uniform_,
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
    "multinomial": lambda x: torch.multinomial(x.abs(), 1),
    "poisson": lambda x: torch.poisson(x.abs()),
    "attention": lambda x: F.scaled_dot_product_attention(
        *([x.view(1, 1, 4, 4)] * 3), dropout_p=0.5
    ),
    "low rank": lambda x: torch.svd_lowrank(x, 2),
    "windows": lambda x: F.fractional_max_pool2d(x.view(1, 1, 4, 4), 2, output_size=2),
    "recurrent": nn.LSTM(4, 3, 2, dropout=0.5),
    "generator": lambda x: x.uniform_(
        generator=torch.Generator().manual_seed(x.device_mesh.get_rank())
    ),
}


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.filterwarnings("ignore::shardwise.FallbackWarning")
def test_every_random_operator_notices_generators_that_differ(name: str, split: bool) -> None:
    def run(mesh: sw.DeviceMesh) -> None:
        placement = sw.Shard(0) if split else sw.Replicate()
        x = sw.distribute_tensor(torch.arange(16.0).view(4, 4) + 1, mesh, [placement])
        torch.manual_seed(mesh.get_rank())
        OPERATORS[name](x)

    message = differs(run, 2)
    assert re.search(
        r"random operator 1 on .* drew other random numbers here than on rank 0", message
    )
    assert "sw.seed(mesh, n)" in message


def test_an_operator_without_a_rule_that_draws_notices_it_too() -> None:
    def run(mesh: sw.DeviceMesh) -> None:
        x = sw.distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [sw.Replicate()])
        torch.manual_seed(mesh.get_rank())
        torch.ops.shardwise_test.noisy(x)

    with torch.library._scoped_library("shardwise_test", "DEF") as library:
        library.define("noisy(Tensor x) -> Tensor")
        library.impl("noisy", lambda x: x + torch.rand(x.shape), "CPU")
        assert "drew other random numbers" in differs(run, 2)


@pytest.mark.parametrize("make", ["DeviceMesh", "init_device_mesh"])
def test_a_later_difference_is_noticed_at_the_next_operator(make: str) -> None:
    def run() -> None:
        rank = sw.DeviceMesh("cpu", [0]).get_rank()
        if make == "DeviceMesh":
            mesh = sw.DeviceMesh("cpu", [0, 1, 2])
        else:
            mesh = sw.init_device_mesh("cpu", (3,))
        for _ in range(5):
            sw.rand(4, device_mesh=mesh)
        torch.rand(3)  # on all ranks
        sw.rand(4, device_mesh=mesh)
        if rank == 2:
            torch.rand(3)
        sw.rand(4, device_mesh=mesh)

    with pytest.raises(sw.RankError, match=r"rank 2 raised RandomStateError: .*operator 7 on"):
        sw.simulate(run, 3)


def test_ranks_that_agree_again_may_go_on() -> None:
    def run(mesh: sw.DeviceMesh) -> Any:
        torch.manual_seed(mesh.get_rank())
        for _ in range(2):
            if mesh.get_rank() == 0:  # whose numbers the others are compared with
                sw.rand(4, device_mesh=mesh)
            else:
                with pytest.raises(RandomStateError):
                    sw.rand(4, device_mesh=mesh)
        sw.seed(mesh, 3)
        return sw.rand(4, device_mesh=mesh).full_tensor().tolist()

    first, *others = on_ranks(run, 3)
    assert others == [first, first]


def test_each_mesh_is_compared_for_itself() -> None:
    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        torch.manual_seed(mesh.get_local_rank("dp"))
        for _ in range(3):
            sw.rand(4, device_mesh=mesh["tp"])
        sw.rand(4, device_mesh=mesh["dp"])

    with pytest.raises(sw.RankError, match=r"rank 2 raised RandomStateError: .*operator 1 on"):
        sw.simulate(run, 4)


def test_nothing_is_sent_between_simulated_ranks() -> None:
    def run(mesh: sw.DeviceMesh) -> int:
        events: list[sw.Event] = []
        with sw.listen(events.append):
            for _ in range(70):
                sw.rand(4, device_mesh=mesh)
        return len(events)

    assert on_ranks(run, 2) == [0, 0]


def test_a_mesh_that_was_aborted_and_made_again_counts_anew() -> None:
    def run() -> list[float]:
        mesh = sw.init_device_mesh("cpu", (2,))
        sw.rand(4, device_mesh=mesh)
        if mesh.get_rank() == 0:  # one more than rank 1, which is told when it waits
            sw.rand(4, device_mesh=mesh)
        torch.manual_seed(0)
        mesh.abort()
        sw.communicator(sw.DeviceMesh("cpu", [[0], [1]]), 0).barrier()
        mesh = sw.init_device_mesh("cpu", (2,))
        return [sw.rand(1, device_mesh=mesh).item() for _ in range(2)]

    first, second = sw.simulate(run, 2)
    assert first == second


# ---- what is legal


def test_restored_and_forked_states_are_fine() -> None:
    def run(mesh: sw.DeviceMesh) -> None:
        state = torch.get_rng_state()
        sw.rand(4, device_mesh=mesh)
        with torch.random.fork_rng():
            torch.manual_seed(5)
            sw.rand(4, device_mesh=mesh)
        if mesh.get_rank() == 1:
            with torch.random.fork_rng():
                torch.rand(3)
            torch.rand(3, generator=torch.Generator())
        sw.rand(4, device_mesh=mesh)
        torch.set_rng_state(state)
        sw.rand(4, device_mesh=mesh)

    on_ranks(run, 2)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_rank_may_recompute_activations_that_others_keep(use_reentrant: bool) -> None:
    def run(mesh: sw.DeviceMesh) -> Any:
        x = sw.distribute_tensor(torch.ones(4, 6), mesh, [sw.Shard(0)]).requires_grad_()
        for _ in range(2):
            if mesh.get_rank() == 0:
                y = checkpoint(lambda z: F.dropout(z.relu(), 0.5), x, use_reentrant=use_reentrant)
            else:
                y = F.dropout(x.relu(), 0.5)
            y.square().sum().backward()
        assert x.grad is not None
        return x.grad.full_tensor()

    first, second = on_ranks(run, 2)
    assert torch.equal(first, second)


def test_ranks_in_parallel_draw_the_same_numbers() -> None:
    def run(mesh: sw.DeviceMesh) -> Any:
        return [sw.rand(3, device_mesh=mesh).tolist() for _ in range(20)]

    first, *others = on_ranks(run, 4, parallel=True)
    assert others == [first] * 3
    assert first[0] != first[1]


def test_ranks_in_parallel_refuse_what_cannot_be_right() -> None:
    def recompute(mesh: sw.DeviceMesh) -> None:
        x = sw.distribute_tensor(torch.ones(4, 6), mesh, [sw.Shard(0)]).requires_grad_()
        checkpoint(lambda z: F.dropout(z, 0.5), x, use_reentrant=False).square().sum().backward()

    with pytest.raises(sw.RankError, match="simulate without parallel"):
        on_ranks(recompute, 2, parallel=True)


def test_one_rank_and_abstract_meshes_compare_nothing() -> None:
    sw.rand(4, device_mesh=sw.DeviceMesh.abstract((8,)))
    assert draw_key(sw.init_device_mesh("cpu", (1,))) != draw_key()


# ---- seed


def test_seed_makes_all_ranks_agree() -> None:
    def run(mesh: sw.DeviceMesh) -> Any:
        torch.manual_seed(mesh.get_rank())
        assert sw.seed(mesh, 42) == 42
        check_random_state(mesh)
        assert torch.initial_seed() == 42
        own = torch.Generator().manual_seed(mesh.get_rank())
        assert sw.seed(mesh, -1, generator=own) == -1
        check_random_state(mesh, generator=own)
        assert torch.initial_seed() == 42
        return sw.rand(5, device_mesh=mesh, generator=own).full_tensor().tolist()

    for mesh_shape in MESHES:
        first, *others = on_ranks(run, *mesh_shape)
        assert all(each == first for each in others)


def test_without_a_number_the_first_rank_chooses_the_seed() -> None:
    def run(mesh: sw.DeviceMesh) -> Any:
        return sw.seed(mesh), sw.seed(mesh), torch.initial_seed()

    first, *others = on_ranks(run, 2, 2)
    assert others == [first] * 3
    assert first[0] != first[1] == first[2]
    assert isinstance(sw.seed(sw.DeviceMesh.abstract((8,))), int)


def test_seeds_that_differ_are_refused_on_every_rank() -> None:
    def run(mesh: sw.DeviceMesh) -> None:
        for given in (mesh.get_rank(), 5 if mesh.get_rank() else None):
            with pytest.raises(RandomStateError, match=r"same on all ranks .*rank 0: .*, rank 1: "):
                sw.seed(mesh, given)
        with pytest.raises(RandomStateError, match=r"seed: expected an int .*, got 1.5"):
            sw.seed(mesh, 1.5)  # type: ignore[arg-type]
        with pytest.raises(RandomStateError, match="seed: expected an int"):
            sw.seed(mesh, 2**64)

    on_ranks(run, 2)


def test_manual_seed_is_torchs_without_communication():
    def run():
        mesh = sw.DeviceMesh("cpu", [0, 1])
        if mesh.get_coordinate() is None:
            with pytest.raises(RuntimeError, match="expected a mesh that this rank is in"):
                manual_seed(3, mesh)
            return None
        manual_seed(3, mesh)
        return sw.rand(4, device_mesh=mesh, placements=[sw.Shard(0)]).full_tensor()

    first, second, outside = sw.simulate(run, 3)
    assert torch.equal(first, second) and outside is None
