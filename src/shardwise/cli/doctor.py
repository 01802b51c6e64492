"""The command `shardwise doctor`: show what is installed, and check that shardwise works with
it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Iterator

import torch
import torch.distributed
from torch import nn

from shardwise import __version__, torch_internals
from shardwise.api.distribute import distribute_tensor
from shardwise.core import torch_version
from shardwise.core.mesh import init_device_mesh
from shardwise.core.placement import Replicate, Shard
from shardwise.dtensor.tensor import DTensor
from shardwise.run.launch import launch
from shardwise.run.simulate import simulate
from shardwise.run.worker import usable_cores

REQUIRED = ("numpy",)
_LAUNCH_SECONDS = 60.0
"""How long the ranks of the self-test may run; `SHARDWISE_START_TIMEOUT` limits their start."""
OPTIONAL = {
    "cloudpickle": "launch of lambdas, closures and functions of notebooks",
    "matplotlib": "the plot of the demo",
    "rich": "the demo, and colours of migrate",
    "safetensors": "the demo",
    "transformers": "models of Hugging Face",
}
"""Packages that shardwise can do without, and the features that need them."""

_WIDTH = 14


def run(self_test: bool = False) -> bool:
    """Print the report, and the results of the self-test if asked for; return whether all checks
    passed."""
    for name, value in facts():
        print(f"{name:{_WIDTH}} {value}")
    if not self_test:
        return True
    failures = 0
    for name, problem in (*_internals(), *_checks()):
        print(f"{'ok' if problem is None else 'FAILED':{_WIDTH}} {name}", end="")
        print("" if problem is None else f": {problem}", flush=True)
        failures += problem is not None
    print(f"{failures} failed" if failures else "everything works")
    return not failures


# ---- what is installed


def facts() -> list[tuple[str, str]]:
    """Return the names and values of the report."""
    untested = torch_version.untested_because(torch.__version__)
    tested = f"{untested}, " if untested else ""
    found = [
        ("shardwise", __version__),
        ("python", f"{platform.python_version()} ({sys.platform}, {platform.machine()})"),
        ("torch", f"{torch.__version__} ({tested}tested: {torch_version.TESTED})"),
    ]
    found += [(name, _installed(name) or "MISSING, and required") for name in REQUIRED]
    found += [
        (name, _installed(name) or f"not installed (for {use})") for name, use in OPTIONAL.items()
    ]
    found += [
        ("cpu", f"{torch.backends.cpu.get_cpu_capability()}, {_cores()}"),
        ("accelerators", _accelerators()),
        ("backends", ", ".join(_backends()) or "none: torch was built without torch.distributed"),
    ]
    return found


def _installed(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cores() -> str:
    usable, total = usable_cores(), os.cpu_count()
    of_all = "" if usable == total else f" of {total}"
    return f"{usable}{of_all} cores, {torch.get_num_threads()} threads of torch"


def _accelerators() -> str:
    if not torch.cuda.is_available():
        return "none"
    count = torch.cuda.device_count()
    return f"{count} x {torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}"


def _backends() -> list[str]:
    """Return the backends of torch.distributed that this torch was built with."""
    distributed = torch.distributed
    if not distributed.is_available():
        return []
    available = {
        "gloo": distributed.is_gloo_available(),
        "nccl": distributed.is_nccl_available(),
        "mpi": distributed.is_mpi_available(),
    }
    return [name for name, is_there in available.items() if is_there]


# ---- the self-test


def _internals() -> Iterator[tuple[str, str | None]]:
    """Yield each internal of torch that shardwise uses, and its problem if it has one."""
    for each in torch_internals.report():
        yield f"{each.path} ({each.purpose})", each.problem


def _checks() -> Iterator[tuple[str, str | None]]:
    """Run each check; yield its name, and its error if it failed."""
    for name, check in CHECKS.items():
        try:
            check()
        except Exception as error:
            first_line = str(error).partition("\n")[0]
            yield name, f"{type(error).__name__}: {first_line}".removesuffix(": ")
        else:
            yield name, None


def _check_matmul() -> None:
    left, right = _example((5, 6)), _example((6, 4))

    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (2,), ("tp",))
        columns = distribute_tensor(left, mesh, [Shard(1)])
        rows = distribute_tensor(right, mesh, [Shard(0)])
        _expect_equal(_full(columns @ rows), left @ right)

    simulate(on_rank, 2)


def _check_backward() -> None:
    inputs, weight = _example((5, 6)), _example((6, 4)).requires_grad_()
    torch.autograd.backward((inputs @ weight).square().sum())

    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (2,), ("dp",))
        batch = distribute_tensor(inputs, mesh, [Shard(0)])
        whole = distribute_tensor(weight.detach(), mesh, [Replicate()]).requires_grad_()
        torch.autograd.backward((batch @ whole).square().sum())
        _expect_equal(_full(whole.grad), weight.grad)

    simulate(on_rank, 2)


def _check_redistribution() -> None:
    whole = _example((5, 7))

    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        rows = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
        columns = rows.redistribute(placements=[Shard(1), Replicate()])
        middle = 4  # torch.chunk splits seven columns into four and three
        expected = whole[:, :middle] if mesh.get_local_rank("dp") == 0 else whole[:, middle:]
        _expect_equal(columns.to_local(), expected)

    simulate(on_rank, 4)


def _check_fsdp() -> None:
    inputs = _example((4, 6))
    alone = _trained(inputs, lambda model: None)

    def on_rank() -> None:
        from shardwise.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2,), ("dp",))
        half = inputs.chunk(2)[mesh.get_rank()]
        weights = _trained(half, lambda model: fully_shard(model, mesh=mesh))
        for name, weight in weights.items():
            _expect_equal(_full(weight), alone[name])

    simulate(on_rank, 2)


def _check_processes() -> None:
    for total in launch(_sum_of_ranks, 2, timeout=_LAUNCH_SECONDS):
        if total != 1.0:
            raise AssertionError(f"expected the sum of ranks 0 and 1, got {total}")


def _sum_of_ranks() -> float:
    mesh = init_device_mesh("cpu", (2,), ("dp",))
    local = torch.tensor([float(mesh.get_rank())])
    return DTensor.from_local(local, mesh, [Shard(0)]).sum().item()


CHECKS: dict[str, Callable[[], None]] = {
    "dispatch: a product of split matrices": _check_matmul,
    "backward: the gradient of a whole weight beside a split batch": _check_backward,
    "redistribution: between two layouts of a 2 x 2 mesh": _check_redistribution,
    "fsdp: a training step on 2 simulated ranks": _check_fsdp,
    "processes: a sum over 2 local processes (gloo)": _check_processes,
}


def _trained(
    inputs: torch.Tensor, spread: Callable[[nn.Module], object]
) -> dict[str, nn.Parameter]:
    """Return the parameters of a small model after one step of training."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(_example(tuple(parameter.shape)))
    spread(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.autograd.backward(model(inputs).square().mean())
    optimizer.step()
    return dict(model.named_parameters())


def _example(shape: tuple[int, ...]) -> torch.Tensor:
    """Return values that are neither random nor all the same."""
    count = torch.Size(shape).numel()
    return torch.linspace(-1.0, 1.0, count).cos().mul(1.5).reshape(shape)


def _full(tensor: torch.Tensor | None) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        raise AssertionError(f"expected a DTensor, got {type(tensor).__name__}")
    return tensor.full_tensor()


def _expect_equal(got: torch.Tensor, expected: torch.Tensor | None) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
