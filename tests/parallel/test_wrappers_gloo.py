"""Wrappers of modules that know nothing of DTensors: right, or refused before they change one."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import shardwise as sw
from shardwise import Shard, torch_patches
from shardwise.fsdp import fully_shard, replicate
from shardwise.parallel import ColwiseParallel, parallelize_module, shard_module

PLAN = {
    "0.weight": {"tp": Shard(0)},
    "0.bias": {"tp": Shard(0)},
    "2.weight": {"tp": Shard(1)},
}
INPUTS = torch.linspace(-1, 1, 12).reshape(3, 4)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 7), nn.GELU(), nn.Linear(7, 3))  # 7 rows: uneven shards


def mesh1() -> sw.DeviceMesh:
    return sw.init_device_mesh("cpu", (4,), ("tp",))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plan": lambda: shard_module(build(), mesh1(), PLAN),
    "styles": lambda: parallelize_module(build(), mesh1(), {"0": ColwiseParallel()}),
    "fully_shard": lambda: fully_shard(build(), mesh=mesh1()),
    "inner fully_shard": lambda: nn.Sequential(*map(sharded_layer, build())),
    "replicate": lambda: replicate(build(), mesh=mesh1()),
    "whole": lambda: shard_module(build(), mesh1(), {}),
}


def sharded_layer(layer: nn.Module) -> nn.Module:
    return fully_shard(layer, mesh=mesh1()) if list(layer.parameters()) else layer


def torchs_mesh() -> Any:
    return torch.distributed.device_mesh.init_device_mesh("cpu", (4,))


def wrap_in_fsdp1(model: nn.Module) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def shard_with_torch(model: nn.Module) -> Any:
    from torch.distributed.fsdp import fully_shard as torchs

    return torchs(model, mesh=torchs_mesh())


def replicate_with_torch(model: nn.Module) -> Any:
    from torch.distributed._composable.replicate import replicate as torchs

    return torchs(model)(INPUTS)  # it begins with the first forward


def replicate_with_torchs_fsdp(model: nn.Module) -> Any:
    from torch.distributed._composable.replicate_with_fsdp import replicate as torchs

    return torchs(model, mesh=torchs_mesh())


def distribute_with_torch(model: nn.Module, **options: Any) -> Any:
    from torch.distributed.tensor import Replicate as TorchsReplicate
    from torch.distributed.tensor import distribute_tensor

    parameter = next(model.parameters()).detach()
    return distribute_tensor(parameter, torchs_mesh(), [TorchsReplicate()], **options)


def shard_tensor_with_torch(model: nn.Module) -> Any:
    from torch.distributed.tensor import Shard as TorchsShard
    from torch.distributed.tensor import distribute_tensor

    parameter = next(model.parameters()).detach()
    return distribute_tensor(parameter, torchs_mesh(), [TorchsShard(0)], src_data_rank=None)


def torchs_from_local(model: nn.Module) -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(next(model.parameters()), torchs_mesh())


def distribute_module_with_torch(model: nn.Module) -> Any:
    from torch.distributed.tensor import distribute_module

    return distribute_module(model, torchs_mesh())


def parallelize_with_torch(model: nn.Module) -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel as Torchs
    from torch.distributed.tensor.parallel import parallelize_module as torchs

    return torchs(model, torchs_mesh(), {"0": Torchs()})


def zero_redundancy(model: nn.Module) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)


def local_sgd(model: nn.Module) -> Any:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    averager = PeriodicModelAverager(period=1, warmup_steps=0)
    return PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)


DDP = {"DistributedDataParallel": DistributedDataParallel, "replicate": replicate_with_torch}
OPTIMIZERS = {"ZeroRedundancyOptimizer": zero_redundancy, "PostLocalSGDOptimizer": local_sgd}
OTHERS = {
    "DataParallel": DataParallel,
    "FullyShardedDataParallel": wrap_in_fsdp1,
    "torch's fully_shard": shard_with_torch,
    "torch's replicate with FSDP": replicate_with_torchs_fsdp,
    "torch's distribute_tensor": distribute_with_torch,
    "torch's distribute_tensor to shards": shard_tensor_with_torch,
    "torch's DTensor.from_local": torchs_from_local,
    "torch's distribute_module": distribute_module_with_torch,
    "torch's parallelize_module": parallelize_with_torch,
}
REFUSED = {
    **{name: DDP | OPTIMIZERS | OTHERS for name in MODELS if name not in ("whole", "replicate")},
    "replicate": DDP | OTHERS,
    "whole": OTHERS,
}
"""By model, the wrappers that refuse it."""
REMEDIES = ("use ", "shard_module", "fully_shard(module", "any other optimizer", "start a process")


def refusals(name: str) -> list[str]:
    """What is wrong with the refusals of a model."""
    wrong = []
    for wrapper, wrap in REFUSED[name].items():
        model = MODELS[name]()
        before = {each: x.to_local().clone() for each, x in tensors(model).items()}
        try:
            wrap(model)
            wrong.append(f"{wrapper}: not refused")
        except sw.DispatchError as error:
            if not any(word in str(error) for word in REMEDIES):
                wrong.append(f"{wrapper}: {error}")
        after = tensors(model)
        if not all(torch.equal(after[each].to_local(), x) for each, x in before.items()):
            wrong.append(f"{wrapper}: changed the model")
    return wrong


def tensors(model: nn.Module) -> dict[str, Any]:
    return {name: x for name, x in model.named_parameters() if isinstance(x, sw.DTensor)}


@pytest.mark.parametrize("name", MODELS)
def test_wrappers_refuse_a_sharded_model_and_leave_it_as_it_is(workers4, name: str) -> None:
    assert workers4.run(refusals, name) == [[]] * 4


# ---- the reverse: a wrapped model is not sharded


def sharding_of_wrapped() -> list[str]:
    mesh = mesh1()
    calls = {
        "shard_module": lambda model: shard_module(model, mesh, {}),
        "parallelize_module": lambda model: parallelize_module(model, mesh, {}),
        "distribute_module": lambda model: sw.distribute_module(model, mesh),
        "fully_shard": lambda model: fully_shard(model, mesh=mesh),
        "replicate": lambda model: replicate(model, mesh=mesh),
    }
    wrong = []
    for name, call in calls.items():
        outer = DistributedDataParallel(build())
        for model in (outer, outer.module, nn.Sequential(outer), DataParallel(build())):
            try:
                call(model)
                wrong.append(f"{name} of {type(model).__name__}: not refused")
            except sw.DispatchError as error:
                if not str(error).startswith(f"{name}: expected a module that is not wrapped"):
                    wrong.append(f"{name}: {error}")
    return wrong


def test_a_wrapped_model_is_not_sharded(workers4) -> None:
    assert workers4.run(sharding_of_wrapped) == [[]] * 4


# ---- what works


def trained(model: nn.Module, make: Callable[[nn.Module], Any] | None = None) -> dict[str, Any]:
    optimizer = make(model) if make else torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(INPUTS).square().mean().backward()
        optimizer.step()
    return full(model)


def full(model: nn.Module) -> dict[str, Any]:
    return {
        name.removeprefix("module."): (x.full_tensor() if isinstance(x, sw.DTensor) else x).detach()
        for name, x in model.named_parameters()
    }


def right() -> dict[str, dict[str, Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {"DDP of whole": trained(DistributedDataParallel(MODELS["whole"]()))}
        for name, make in OPTIMIZERS.items():
            found[f"{name} of whole"] = trained(MODELS["whole"](), make)
            found[f"{name} of replicate"] = trained(MODELS["replicate"](), make)
    return found


def test_whole_models_train_in_wrappers_as_in_one_process(workers4) -> None:
    expected = trained(build())
    for found in workers4.run(right):
        for parameters in found.values():
            torch.testing.assert_close(parameters, expected)


def averaged(name: str) -> dict[str, Any]:
    model = MODELS[name]() if name else build()
    average = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(INPUTS).square().mean().backward()
        optimizer.step()
        average.update_parameters(model)
    return full(average)


@pytest.mark.parametrize("name", ["plan", "fully_shard", "replicate"])
def test_averaged_models_are_those_of_one_process(workers4, name: str) -> None:
    expected = averaged("")
    for found in workers4.run(averaged, name):
        torch.testing.assert_close(found, expected)


def vectors(name: str) -> list[Any]:
    model = MODELS[name]()
    layouts = [each.mesh_layout for each in model.parameters()]
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(2 * vector, model.parameters())
    twice = full(model)
    results = [vector.full_tensor(), twice]
    plain = nn.utils.parameters_to_vector(build().parameters()).detach()
    nn.utils.vector_to_parameters(3 * plain, model.parameters())
    outputs = model(INPUTS)
    outputs = outputs.full_tensor() if isinstance(outputs, sw.DTensor) else outputs
    kept = [each.mesh_layout for each in model.parameters()] == layouts
    return [*results, full(model), outputs.detach(), kept]


@pytest.mark.parametrize("name", ["plan", "fully_shard", "replicate", "whole"])
def test_vectors_of_parameters_are_those_of_one_process_and_layouts_stay(
    workers4, name: str
) -> None:
    model = build()
    plain = nn.utils.parameters_to_vector(model.parameters()).detach()
    twice = {each: 2 * x for each, x in full(model).items()}
    thrice = {each: 3 * x for each, x in full(model).items()}
    nn.utils.vector_to_parameters(3 * plain, model.parameters())
    for vector, second, third, outputs, kept in workers4.run(vectors, name):
        assert torch.equal(vector, plain)
        torch.testing.assert_close(second, twice)
        torch.testing.assert_close(third, thrice)
        torch.testing.assert_close(outputs, model(INPUTS).detach())
        assert kept


def test_a_vector_of_plain_and_split_parameters_has_them_in_order() -> None:
    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2,), ("tp",))
        split = sw.distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
        columns = sw.distribute_tensor(torch.arange(6.0).reshape(2, 3), mesh, [Shard(1)])
        vector = nn.utils.parameters_to_vector([split, torch.ones(2), columns])
        expected = [*range(5), 1, 1, *range(6)]
        assert vector.full_tensor().tolist() == expected

    sw.simulate(run, 2)


def test_copies_to_other_devices_refuse_a_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for a function of a build with CUDA, below torch.cuda.comm."""
    seen = []

    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2,), ("tp",))
        split = sw.distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
        with pytest.raises(sw.DispatchError, match=r"torch\.cuda\.comm .*x\.full_tensor\(\)"):
            torch._C._broadcast(split, [0, 1])
        torch._C._broadcast(torch.ones(2), [0, 1])

    torch_patches.uninstall()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(torch._C, "_broadcast", lambda *args: seen.append(args), raising=False)
            torch_patches.install()
            sw.simulate(run, 2)
            torch_patches.uninstall()
    finally:
        torch_patches.install()
    assert len(seen) == 2
