"""torch's helpers for state dicts on real ranks: what only rank 0 has, and models on "meta"."""

import functools
from typing import Any

import pytest
import torch
from support.state_dicts import SPREAD, TOKENS, assert_same, made, optimizer_of, spread, train
from torch import distributed as dist
from torch.distributed.checkpoint import state_dict as helpers
from torch.distributed.checkpoint.state_dict import StateDictOptions

import shardwise as sw
from shardwise import DTensor, Replicate, Shard

FULL = StateDictOptions(full_state_dict=True)
OFFLOAD = StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
RANKS = 4


def alone(steps: int) -> Any:
    model = made()
    optimizer = optimizer_of(model)
    train(model, optimizer, steps)
    return helpers.get_state_dict(model, optimizer, options=FULL)


def saved_by_rank_0_and_broadcast(kind: str) -> None:
    first = spread(kind, ranks=RANKS)
    train(*first)
    model_state, optimizer_state = helpers.get_state_dict(*first, options=OFFLOAD)
    if dist.get_rank() == 0:
        assert_same((model_state, optimizer_state), alone(2))
    else:
        assert model_state == {} == optimizer_state
    second = spread(kind, seed=1, ranks=RANKS)
    keys = helpers.set_state_dict(
        *second,
        model_state_dict=model_state,
        optim_state_dict=optimizer_state,
        options=BROADCAST,
    )
    assert keys.missing_keys == [] == keys.unexpected_keys
    layouts = [each._layout for each in first[0].parameters()]
    assert [each._layout for each in second[0].parameters()] == layouts
    train(*second)
    assert_same(helpers.get_state_dict(*second, options=FULL), alone(4))


@pytest.mark.parametrize("kind", ["tp", "fsdp over tp"])
def test_a_state_dict_of_rank_0_is_broadcast_to_all(workers4, kind):
    workers4.run(saved_by_rank_0_and_broadcast, kind)


def onto_meta(kind: str, options: StateDictOptions) -> None:
    expected = made()
    model = made(device="meta")
    SPREAD[kind][1](model, RANKS)
    named = functools.partial(model.named_parameters, remove_duplicate=False)
    layouts = {name: each._layout for name, each in named()}
    has_values = dist.get_rank() == 0 or not options.broadcast_from_rank0
    state = dict(expected.state_dict()) if has_values else {}
    helpers.set_model_state_dict(model, state, options=options)
    for name, parameter in named():  # assigned tensors are not tied any more, as in torch
        assert type(parameter) is DTensor and parameter._layout is layouts[name], name
    assert_same(helpers.get_model_state_dict(model, options=FULL), dict(expected.state_dict()))
    result: Any = model(TOKENS)
    whole = result.full_tensor() if isinstance(result, DTensor) else result
    torch.testing.assert_close(whole, expected(TOKENS))


@pytest.mark.parametrize(
    ("kind", "options"),
    [("tp", FULL), ("fsdp", FULL), ("tp", BROADCAST), ("fsdp over tp", BROADCAST)],
)
def test_a_model_without_memory_gets_pieces_not_whole_tensors(workers4, kind, options):
    workers4.run(onto_meta, kind, options)


def pieces_as_if_whole() -> None:
    model, optimizer = spread("tp", ranks=RANKS)
    train(model, optimizer)
    before = helpers.get_model_state_dict(model, options=FULL)
    before = {key: value.clone() for key, value in before.items() if torch.is_tensor(value)}
    state, of_optimizer = helpers.get_state_dict(model, optimizer)
    for call in (
        lambda: helpers.set_model_state_dict(model, dict(state), options=BROADCAST),
        lambda: helpers.set_optimizer_state_dict(model, optimizer, of_optimizer, options=BROADCAST),
    ):
        with pytest.raises(sw.LayoutError, match="expected a whole tensor on rank 0"):
            call()
    after = helpers.get_model_state_dict(model, options=FULL)
    for key, value in before.items():
        assert torch.equal(after[key], value), key


def test_pieces_on_rank_0_are_refused_on_every_rank_and_change_nothing(workers4):
    workers4.run(pieces_as_if_whole)


def replicas_broadcast() -> None:
    mesh = sw.init_device_mesh("cpu", (RANKS,), ("tp",))
    model = torch.nn.Linear(3, 5)
    sw.parallel.shard_module(model, mesh, {"weight": {"tp": Shard(0)}})
    weight = sw.distribute_tensor(torch.arange(15.0).reshape(5, 3), mesh, [Replicate()])
    state = {"weight": weight, "bias": torch.ones(5)} if dist.get_rank() == 0 else {}
    helpers.set_model_state_dict(model, state, options=BROADCAST)
    assert torch.equal(model.weight.full_tensor(), torch.arange(15.0).reshape(5, 3))
    assert torch.equal(model.bias.full_tensor(), torch.ones(5))


def test_replicas_on_rank_0_are_whole_tensors(workers4):
    workers4.run(replicas_broadcast)
