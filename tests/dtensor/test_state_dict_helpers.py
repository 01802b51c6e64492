"""torch's helpers for state dicts give and take with our tensors what they do in one process."""

import io
import subprocess
import sys
from typing import Any

import pytest
import torch
from support.state_dicts import SPREAD, assert_same, made, optimizer_of, spread, train
from torch import nn
from torch.distributed import _state_dict_utils
from torch.distributed.checkpoint import state_dict as helpers
from torch.distributed.checkpoint.state_dict import StateDictOptions

import shardwise as sw
from shardwise import DTensor, Shard
from shardwise.parallel import shard_module

FULL = StateDictOptions(full_state_dict=True)


def on_ranks(kind: str, run: Any) -> list[Any]:
    return sw.simulate(run, SPREAD[kind][0])


def trained_alone(steps: int = 2) -> Any:
    model = made()
    optimizer = optimizer_of(model)
    train(model, optimizer, steps)
    return model, optimizer


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("cpu_offload", [False, True])
@pytest.mark.parametrize("kind", SPREAD)
def test_a_full_state_dict_is_that_of_one_process(kind: str, cpu_offload: bool, flatten: bool):
    options = StateDictOptions(
        full_state_dict=True, cpu_offload=cpu_offload, flatten_optimizer_state_dict=flatten
    )
    expected = helpers.get_state_dict(*trained_alone(), options=options)

    def run() -> None:
        model, optimizer = spread(kind)
        train(model, optimizer)
        got = helpers.get_state_dict(model, optimizer, options=options)
        assert_same(got, expected)
        assert_same(helpers.get_model_state_dict(model, options=options), expected[0])
        assert_same(
            helpers.get_optimizer_state_dict(model, optimizer, options=options), expected[1]
        )

    on_ranks(kind, run)


@pytest.mark.parametrize("kind", SPREAD)
def test_what_torch_save_keeps_of_it_loads_in_one_process(kind: str):
    expected = trained_alone()[0]

    def run() -> bytes:
        model, optimizer = spread(kind)
        train(model, optimizer)
        file = io.BytesIO()
        torch.save(helpers.get_model_state_dict(model, options=FULL), file)
        return file.getvalue()

    for saved in on_ranks(kind, run):
        model = made(seed=1)
        model.load_state_dict(torch.load(io.BytesIO(saved), weights_only=True))
        assert_same(model.state_dict(), expected.state_dict())


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("kind", SPREAD)
def test_a_full_state_dict_is_loaded_and_training_goes_on_as_in_one_process(
    kind: str, flatten: bool
):
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=flatten)
    # In torch itself the two options together cannot set a state (KeyError), in one process too.
    setting = StateDictOptions(full_state_dict=not flatten, flatten_optimizer_state_dict=flatten)
    model, optimizer = trained_alone()
    saved = helpers.get_state_dict(model, optimizer, options=options)
    file = io.BytesIO()
    torch.save(saved, file)
    train(model, optimizer)
    expected = helpers.get_state_dict(model, optimizer, options=options)

    def run() -> None:
        for at_once in (True, False):
            model, optimizer = spread(kind, seed=1)
            layouts = [each._layout for each in model.parameters()]
            whole, state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
            if at_once:
                keys = helpers.set_state_dict(
                    model,
                    optimizer,
                    model_state_dict=whole,
                    optim_state_dict=state,
                    options=setting,
                )
            else:
                keys = helpers.set_model_state_dict(model, whole, options=setting)
                helpers.set_optimizer_state_dict(model, optimizer, state, options=setting)
            assert keys.missing_keys == [] == keys.unexpected_keys
            train(model, optimizer)
            assert [each._layout for each in model.parameters()] == layouts
            got = helpers.get_state_dict(model, optimizer, options=options)
            assert_same(got, expected)

    on_ranks(kind, run)


@pytest.mark.parametrize("kind", SPREAD)
def test_a_sharded_state_dict_goes_from_one_model_to_another(kind: str):
    model, optimizer = trained_alone()
    train(model, optimizer)
    expected = helpers.get_state_dict(model, optimizer, options=FULL)

    def run() -> None:
        first = spread(kind)
        train(*first)
        state, of_optimizer = helpers.get_state_dict(*first)
        assert any(type(each) is DTensor for each in state.values())
        second = spread(kind, seed=1)
        helpers.set_state_dict(*second, model_state_dict=state, optim_state_dict=of_optimizer)
        train(*second)
        assert_same(helpers.get_state_dict(*second, options=FULL), expected)

    on_ranks(kind, run)


def test_offloading_alone_keeps_the_layout():
    def run() -> None:
        model, optimizer = spread("tp")
        train(model, optimizer)
        options = StateDictOptions(cpu_offload=True)
        state = helpers.get_model_state_dict(model, options=options)
        assert state["embed.weight"]._layout is model.embed.weight._layout
        assert torch.equal(state["embed.weight"].to_local(), model.embed.weight.to_local())

    on_ranks("tp", run)


@pytest.mark.parametrize("kind", SPREAD)
def test_submodules_and_frozen_parameters_are_chosen_as_in_one_process(kind: str):
    alone, _ = trained_alone()
    options = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
    bare = StateDictOptions(full_state_dict=True, keep_submodule_prefixes=False)

    def get(model: Any) -> Any:
        with pytest.warns(FutureWarning, match="submodules"):
            part = helpers.get_model_state_dict(model, submodules={model.fused}, options=bare)
        return helpers.get_model_state_dict(model, options=options), part

    expected = get(alone)
    assert list(expected[1]) == ["weight", "bias"] and "scale" not in expected[0]

    def run() -> None:
        model, optimizer = spread(kind)
        train(model, optimizer)
        assert_same(get(model), expected)

    on_ranks(kind, run)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("kind", SPREAD)
def test_unknown_and_missing_names_are_told_as_in_one_process(kind: str, strict: bool):
    saved = trained_alone()[0].state_dict()
    saved["other.weight"] = saved.pop("out.weight")

    def told(model: nn.Module, full: bool) -> str:
        options = StateDictOptions(full_state_dict=full, strict=strict)
        try:
            return str(helpers.set_model_state_dict(model, dict(saved), options=options))
        except RuntimeError as error:
            return str(error)

    expected = [told(made(), full) for full in (True, False)]
    assert all("other.weight" in each for each in expected) and "out.weight" in expected[1]

    def run() -> None:
        model, _ = spread(kind)
        got = [told(model, full) for full in (True, False)]
        assert [each.replace(type(model).__name__, "Model") for each in got] == expected

    on_ranks(kind, run)


def test_a_tensor_of_another_shape_is_refused_by_name():
    saved = dict(made().state_dict())
    saved["embed.weight"] = saved["embed.weight"][:17]  # the rows of rank 0

    def run() -> None:
        model, _ = spread("tp")
        with pytest.raises(RuntimeError, match=r"size mismatch for embed.weight.*17, 6.*33, 6"):
            helpers.set_model_state_dict(model, dict(saved), options=FULL)

    on_ranks("tp", run)


def test_an_empty_state_dict_on_some_rank_is_refused_with_the_remedy():
    whole = trained_alone()
    saved = helpers.get_state_dict(*whole, options=FULL)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)

    def run() -> None:
        model, optimizer = spread("tp")
        with pytest.raises(sw.LayoutError, match="broadcast_from_rank0=True"):
            helpers.set_model_state_dict(model, {}, options=options)
        with pytest.raises(sw.LayoutError, match="broadcast_from_rank0=True"):
            helpers.set_optimizer_state_dict(model, optimizer, {}, options=options)
        helpers.set_model_state_dict(model, dict(saved[0]), options=options)

    on_ranks("tp", run)


def test_state_dicts_of_gathered_parameters_are_those_of_the_shards():
    expected = helpers.get_state_dict(*trained_alone(), options=FULL)

    def run() -> None:
        model, optimizer = spread("fsdp")
        train(model, optimizer)
        model.unshard()
        got = helpers.get_state_dict(model, optimizer, options=FULL)
        assert_same(got, expected)
        model.unshard()
        helpers.set_state_dict(
            model, optimizer, model_state_dict=got[0], optim_state_dict=got[1], options=FULL
        )
        assert_same(helpers.get_state_dict(model, optimizer, options=FULL), expected)

    on_ranks("fsdp", run)


def test_state_that_does_not_have_the_shape_of_its_parameter():
    def program(mesh: Any = None) -> Any:
        torch.manual_seed(0)
        model = nn.Linear(5, 7)
        if mesh is not None:
            shard_module(model, mesh, {"weight": {"tp": Shard(0)}})
        optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(3, 5)).square().sum().backward()
            optimizer.step()
        return helpers.get_optimizer_state_dict(model, optimizer, options=FULL)

    expected = program()

    def run() -> None:
        assert_same(program(sw.init_device_mesh("cpu", (2,), ("tp",))), expected)

    sw.simulate(run, 2)


def test_staged_state_dicts_are_copies_in_the_same_layout():
    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.distribute_tensor(torch.arange(33.0), mesh, [Shard(0)])
        state = {"x": x, "nested": {"one": sw.distribute_tensor(torch.tensor(2.0), mesh)}}
        staged = _state_dict_utils._create_cpu_state_dict(state)
        assert _state_dict_utils._check_state_dict_similarity(state, staged)
        _state_dict_utils._copy_state_dict(state, staged)
        x.zero_()
        assert staged["x"]._layout is x._layout and staged["nested"]["one"].item() == 2.0
        assert torch.equal(staged["x"].full_tensor(), torch.arange(33.0))

    sw.simulate(run, 2)


def test_a_sharded_table_is_gathered_too():
    spec = sw.sharded.ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
    torch.manual_seed(0)
    table = nn.Embedding(33, 4)

    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        torch.manual_seed(0)
        model = nn.Embedding(33, 4)
        sw.sharded.shard_parameter(model, "weight", spec, process_group=mesh)
        got = helpers.get_model_state_dict(model, options=FULL)
        assert_same(got, dict(table.state_dict()))

    sw.simulate(run, 2)


@pytest.mark.slow
@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("first", ["torch.distributed.checkpoint.state_dict", "shardwise"])
def test_the_helpers_are_right_whichever_was_imported_first(first: str):
    second = "shardwise" if first != "shardwise" else "torch.distributed.checkpoint.state_dict"
    code = f"""
import sys, torch
import {first}
if "{first}" == "shardwise":
    assert "torch.distributed.tensor" not in sys.modules
import {second}
import shardwise as sw
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

def run():
    model = nn.Linear(3, 33)
    sw.fsdp.fully_shard(model, mesh=sw.init_device_mesh("cpu", (2,)))
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return [(type(each).__name__, tuple(each.shape)) for each in state.values()]

print(sw.simulate(run, 2)[1])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[('Tensor', (33, 3)), ('Tensor', (33,))]"


def test_models_of_plain_tensors_go_as_before():
    model = nn.Linear(2, 2)
    state = helpers.get_model_state_dict(model, options=FULL)
    assert state["weight"].data_ptr() == model.weight.data_ptr()
    fully = StateDictOptions(full_state_dict=True, cpu_offload=True)
    assert helpers.set_model_state_dict(model, {}, options=fully).missing_keys == {}
