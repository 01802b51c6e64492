"""sw.flops counts what this rank does and what one process would do."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.examples.llama import Config, Llama
from shardwise.examples.train_llama import DATA_PARALLEL, SEQUENCE_PARALLEL, TENSOR_PARALLEL
from shardwise.fsdp import fully_shard
from shardwise.parallel import shard_module

Make = Callable[..., torch.Tensor]
"""Makes a tensor: its placement on the last axis of the mesh, and its shape."""

CASES: dict[str, Callable[[Make], torch.Tensor]] = {
    "mm": lambda new: torch.mm(new(Shard(0), 4, 8), new(Replicate(), 8, 6)),
    "a pending sum": lambda new: new(Shard(1), 4, 8) @ new(Shard(0), 8, 6),
    "uneven": lambda new: F.linear(new(Replicate(), 4, 8), new(Shard(0), 7, 8), new(Shard(0), 7)),
    "empty shards": lambda new: F.linear(new(Replicate(), 4, 8), new(Shard(0), 1, 8)),
    "a sum that moves": lambda new: new(Partial(), 4, 8) @ new(Shard(1), 8, 6),
    "bmm": lambda new: torch.bmm(new(Shard(0), 5, 8, 3), new(Shard(0), 5, 3, 5)),
    "baddbmm": lambda new: torch.baddbmm(
        new(Replicate(), 4, 8, 5), new(Shard(0), 4, 8, 3), new(Shard(0), 4, 3, 5)
    ),
    "addmm": lambda new: torch.addmm(
        new(Replicate(), 6), new(Shard(0), 4, 8), new(Replicate(), 8, 6)
    ),
    "einsum": lambda new: torch.einsum("ij,jk->ki", new(Shard(0), 5, 8), new(Replicate(), 8, 6)),
    "conv": lambda new: F.conv2d(new(Shard(0), 4, 3, 8, 8), new(Replicate(), 5, 3, 3, 3)),
    "attention": lambda new: F.scaled_dot_product_attention(
        *(new(Shard(1), 2, 4, 6, 8) for _ in range(3))
    ),
    "embedding": lambda new: F.linear(
        F.embedding(torch.arange(3), new(Shard(0), 5, 8)), new(Shard(0), 5, 8)
    ),
    "no work": lambda new: new(Shard(0), 4, 8).relu() + 1,
    "replicated": lambda new: torch.mm(new(Replicate(), 4, 8), new(Replicate(), 8, 6)),
    "plain": lambda new: torch.mm(torch.ones(4, 8, requires_grad=True), torch.ones(8, 6)),
    "frozen": lambda new: torch.mm(new(Shard(0), 4, 8).detach(), new(Replicate(), 8, 6)),
}


def forward_and_backward(case: Callable[[Make], torch.Tensor], new: Make) -> sw.FlopCount:
    with sw.flops() as count:
        case(new).sum().backward()
    return count


def plain(placement: sw.Placement, *shape: int) -> torch.Tensor:
    return torch.ones(shape).requires_grad_()


def on(mesh: sw.DeviceMesh) -> Make:
    def new(placement: sw.Placement, *shape: int) -> torch.Tensor:
        placements = [Replicate()] * (mesh.ndim - 1) + [placement]
        return sw.distribute_tensor(torch.ones(shape), mesh, placements).requires_grad_()

    return new


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (2, 2)])
@pytest.mark.parametrize("name", CASES)
def test_one_process_does_what_torch_counts(name: str, mesh_shape: tuple[int, ...]) -> None:
    if name == "a sum that moves" and mesh_shape == (2, 2):
        pytest.skip("distribute_tensor makes pending sums on one axis only")
    alone = forward_and_backward(CASES[name], plain)
    if name != "attention":  # on a CPU, torch has no formula for it
        with FlopCounterMode(display=False) as torchs:
            CASES[name](plain).sum().backward()
        assert alone.rank == alone.one_process == torchs.get_total_flops()

    def run() -> Any:
        mesh = sw.init_device_mesh("cpu", mesh_shape)
        count = forward_and_backward(CASES[name], on(mesh))
        with FlopCounterMode(display=False) as torchs:
            CASES[name](on(mesh)).sum().backward()
        if name != "attention":
            assert count.rank == torchs.get_total_flops()
        assert not count.unmeasured
        return count.rank, count.one_process, count.over(mesh)

    found = sw.simulate(run, math.prod(mesh_shape))
    for _, one_process, totals in found:
        assert one_process == alone.one_process
        assert totals.ranks == tuple(rank for rank, _, _ in found)
        assert totals.total == sum(totals.ranks)
        if name == "plain":  # it may differ from rank to rank
            assert totals.one_process == totals.total
        else:
            assert totals.one_process == alone.one_process
        if name == "replicated":
            assert totals.redundancy == math.prod(mesh_shape)
        elif name in ("mm", "attention", "uneven", "empty shards"):
            assert totals.redundancy == math.prod(mesh_shape[:-1])


def test_work_is_split_by_operator_and_by_module() -> None:
    def run() -> Any:
        mesh = sw.init_device_mesh("cpu", (2,), ("tp",))
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
        shard_module(model, mesh, {"0.*": {"tp": Shard(0)}, "2.weight": {"tp": Shard(1)}})
        with sw.flops() as count:
            model(torch.ones(3, 4)).sum().backward()
        assert count.by_operator["aten.addmm"] == (72 + 36, 144 + 72)
        assert sum(each.rank for each in count.by_operator.values()) == count.rank
        assert sum(each.one_process for each in count.by_operator.values()) == count.one_process
        # the first layer has a gradient for its weight, the second for its input too
        assert count.by_module["Sequential.0"] == (2 * 72, 2 * 144)
        assert count.by_module["Sequential.2"] == (3 * 36, 3 * 72)
        assert count.by_module["Sequential"] == (count.rank, count.one_process)
        total, *_ = [line for line in count.table().splitlines() if line.startswith("total")]
        assert total.split() == ["total", str(count.rank), str(count.one_process)]

    sw.simulate(run, 2)


CONFIG = Config(vocabulary=16, width=16, layers=2, heads=4, kv_heads=2, hidden=24, longest=8)


def llama_step(model: Llama, checkpointed: bool) -> sw.FlopCount:
    tokens = torch.arange(32).view(4, 8) % 16
    if checkpointed:
        for layer in model.layers:
            whole = layer.forward
            layer.forward = lambda *args, whole=whole: checkpoint(whole, *args, use_reentrant=False)
    with sw.flops() as count:
        for _ in range(2):
            model.loss(tokens, tokens).backward()
    return count


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [True, False])
@pytest.mark.parametrize("plan", [TENSOR_PARALLEL, SEQUENCE_PARALLEL])
def test_a_model_on_a_mesh_counts_as_in_one_process(plan: Any, checkpointed: bool) -> None:
    alone = llama_step(Llama(CONFIG), checkpointed)

    def run() -> Any:
        mesh = sw.init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        model = Llama(CONFIG)
        shard_module(model, mesh, plan | DATA_PARALLEL)
        count = llama_step(model, checkpointed)
        assert not count.unmeasured
        for name in ("Llama", "Llama.layers.1", "Llama.layers.0.feed_forward", "Llama.output"):
            expected = alone.by_module[name].one_process
            assert count.by_module[name].one_process == expected
        return count.one_process, count.over(mesh)

    for one_process, totals in sw.simulate(run, 4):
        assert one_process == totals.one_process == alone.one_process
        assert totals.redundancy == 1


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
def test_data_parallel_ranks_do_their_rows_of_the_batch(mesh_shape: tuple[int, ...]) -> None:
    model, batch = mlp(), torch.ones(8, 4)
    with sw.flops() as alone:
        model(batch).sum().backward()

    def run() -> Any:
        mesh = sw.init_device_mesh("cpu", mesh_shape, ("dp", "tp")[: len(mesh_shape)])
        model = mlp()
        if len(mesh_shape) == 2:  # with tensor parallelism
            plan = {"0.*": {"tp": Shard(0)}, "2.weight": {"tp": Shard(1)}}
            shard_module(model, mesh["tp"], plan)
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh["dp"] if len(mesh_shape) == 2 else mesh)
        rows = batch.chunk(mesh_shape[0])[mesh.get_local_rank(0)]
        with sw.flops() as count:
            model(rows).sum().backward()
        totals = count.over(mesh)
        assert count.one_process == alone.one_process // mesh_shape[0]
        assert totals.one_process == alone.one_process
        assert totals.redundancy == 1
        return count.rank

    assert sw.simulate(run, 4) == [alone.rank // 4] * 4


def refuse(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("needs data")


def test_a_function_that_needs_data_is_named() -> None:
    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.distribute_tensor(torch.ones(4, 4), mesh, [Replicate()])
        with sw.flops() as count:
            torch.ops.shardwise_flops.product(x)
        assert len(count.unmeasured) == 1
        assert count.rank == count.one_process == 2 * 4 * 4 * 4

    with torch.library._scoped_library("shardwise_flops", "DEF") as library:
        library.define("product(Tensor x) -> Tensor")
        library.impl("product", lambda x: x @ x, "CPU")
        library.impl("product", refuse, "Meta")
        product = torch.ops.shardwise_flops.product
        register_flop_formula(product)(lambda shape, **_: 2 * math.prod(shape) * shape[-1])
        try:
            sw.simulate(run, 2)
        finally:
            del flop_registry[product]


def test_the_count_neither_draws_nor_changes_results() -> None:
    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))

        def step() -> Any:
            torch.manual_seed(1)
            x = sw.randn(4, 4, device_mesh=mesh, placements=[Shard(0)], requires_grad=True)
            norm = nn.BatchNorm1d(4)
            y = F.dropout(norm(x @ x), 0.5)
            y.square().sum().backward()
            assert x.grad is not None
            return [x.grad.full_tensor(), norm.running_mean, torch.rand(3)]

        expected = step()
        with sw.flops():
            found = step()
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))

    sw.simulate(run, 2)


def test_torchs_counter_sees_the_shards_in_a_backward_too() -> None:
    """Autograd hands it the DTensors that it saved."""
    aten = torch.ops.aten

    def shapes(gradient: Any, query: Any, *others: Any, out_shape: Any = None, **_: Any) -> int:
        assert tuple(gradient) == tuple(query)
        return math.prod(query)

    def run() -> int:
        mesh = sw.init_device_mesh("cpu", (2,))
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        with FlopCounterMode(display=False, custom_mapping={backward: shapes}) as counter:
            CASES["attention"](on(mesh)).sum().backward()
        return counter.get_flop_counts()["Global"][backward]

    assert sw.simulate(run, 2) == [2 * 2 * 6 * 8] * 2
