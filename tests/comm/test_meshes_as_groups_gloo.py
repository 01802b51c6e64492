"""Torch's functional collectives take our meshes, and a mesh and an axis, as they take torch's."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch.distributed.device_mesh import init_device_mesh as init_torch_mesh

import shardwise as sw
from shardwise import Replicate, Shard

Call = Callable[[torch.Tensor, Any], Any]

CALLS: dict[str, Call] = {
    "all_reduce": lambda x, group: functional.all_reduce(x, "sum", group),
    "all_reduce, by keyword": lambda x, group: functional.all_reduce(
        x, reduceOp=dist.ReduceOp.RedOpType.MAX.name, group=group
    ),
    "all_gather_single": lambda x, group: functional.all_gather_single(x, 0, group),
    "all_gather_tensor": lambda x, group: functional.all_gather_tensor(
        x, gather_dim=1, group=group
    ),
    "all_gather_tensor_autograd": lambda x, group: functional.all_gather_tensor_autograd(
        x, gather_dim=0, group=group
    ),
    "reduce_scatter_single": lambda x, group: functional.reduce_scatter_single(x, "sum", 0, group),
    "reduce_scatter_tensor": lambda x, group: functional.reduce_scatter_tensor(x, "sum", 1, group),
    "reduce_scatter_tensor_autograd": lambda x, group: functional.reduce_scatter_tensor_autograd(
        x, "sum", 0, group
    ),
    "all_to_all_single": lambda x, group: functional.all_to_all_single(x, None, None, group),
    "all_to_all_single_autograd": lambda x, group: functional.all_to_all_single_autograd(
        x, [2, 2], [2, 2], group
    ),
    "permute_tensor": lambda x, group: functional.permute_tensor(x.reshape(-1), [1, 0], group),
    "all_reduce_coalesced": lambda x, group: functional.all_reduce_coalesced(
        [x, 2 * x], "sum", group
    ),
    "all_gather_into_tensor_coalesced": lambda x, group: (
        functional.all_gather_into_tensor_coalesced([x, 2 * x], group)
    ),
    "reduce_scatter_tensor_coalesced": lambda x, group: functional.reduce_scatter_tensor_coalesced(
        [x, 2 * x], "sum", [0, 0], group
    ),
    "the name, in the operator": lambda x, group: functional.wait_tensor(
        torch.ops._c10d_functional.all_reduce(x, "sum", functional._resolve_group_name(group))
    ),
    "the expanded group": lambda x, group: [
        torch.tensor(functional._expand_group(group)[1]),
        torch.tensor(functional._expand_group(group)[2]),
    ],
}
"""Functional collectives, called with a tensor and a group."""


WITHOUT_NAMES = ("the expanded group", "permute_tensor")
"""Calls that do not take the name of a group, in torch either."""


def quietly(call: Call, x: torch.Tensor, group: Any) -> list[torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # some names are deprecated
        result = call(x, group)
    results = result if isinstance(result, list) else [result]
    return [functional.wait_tensor(each) for each in results]


def differences() -> list[str]:
    """What is wrong with our meshes as groups, compared with torch's meshes."""
    ours = sw.init_device_mesh("cpu", (2, 2), ("dp", "tp"))
    theirs = init_torch_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    start = torch.arange(24.0).reshape(4, 6) * (dist.get_rank() + 1)
    wrong = []
    for axis, name in enumerate(("dp", "tp")):
        groups = {
            "a mesh": ours[name],
            "a mesh and a number": (ours, axis),
            "a mesh and a name": (ours, name),
            "a process group": ours.get_group(name),
            "the name of a group": ours.get_group(name).group_name,
        }
        for case, call in CALLS.items():
            expected = quietly(call, start, (theirs, axis))
            for kind, group in groups.items():
                if kind == "the name of a group" and case in WITHOUT_NAMES:
                    continue
                got = quietly(call, start, group)
                if len(got) != len(expected) or not all(map(torch.equal, got, expected)):
                    wrong.append(f"{case} over {name} with {kind}: {got}, not {expected}")
    return wrong


def test_every_functional_collective_takes_them_as_torchs_meshes(workers4) -> None:
    assert workers4.run(differences) == [[]] * 4


def grads(call_name: str) -> list[torch.Tensor]:
    ours = sw.init_device_mesh("cpu", (2, 2), ("dp", "tp"))
    theirs = init_torch_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for group in ((theirs, 1), (ours, 1), (ours, "tp"), ours["tp"]):
        x = (torch.arange(24.0).reshape(4, 6) * (dist.get_rank() + 1)).requires_grad_()
        (result,) = quietly(CALLS[call_name], x, group)
        (result * torch.arange(result.numel()).reshape(result.shape)).sum().backward()
        found.append(x.grad)
    return found


@pytest.mark.parametrize(
    "call_name",
    [
        "all_gather_tensor_autograd",
        "reduce_scatter_tensor_autograd",
        "all_to_all_single_autograd",
    ],
)
def test_gradients_are_torchs(workers4, call_name) -> None:
    for expected, *found in workers4.run(grads, call_name):
        assert all(torch.equal(each, expected) for each in found)


def broadcast_from(source: int) -> list[float]:
    ours = sw.init_device_mesh("cpu", (4,), ("all",))
    x = torch.tensor([float(dist.get_rank())])
    return [
        functional.broadcast(x, source, group).item()
        for group in (ours, (ours, 0), (ours, "all"), ours.get_group())
    ]


def test_a_mesh_is_the_group_of_a_broadcast(workers4) -> None:
    assert workers4.run(broadcast_from, 2) == [[2.0] * 4] * 4


def compiled() -> list[float]:
    mesh = sw.init_device_mesh("cpu", (2, 2), ("dp", "tp"))
    found = []
    for group in (mesh["tp"], (mesh, "dp"), (mesh, 1)):

        def doubled(x: torch.Tensor, group: Any = group) -> torch.Tensor:
            return functional.all_reduce(2 * x, "sum", group) + 1

        run = torch.compile(doubled, backend="aot_eager", fullgraph=True)
        found.append(run(torch.tensor([float(dist.get_rank())])).item())
    return found


@pytest.mark.slow
def test_they_are_constants_of_compiled_functions(workers4) -> None:
    assert workers4.run(compiled) == [[3.0, 5.0, 3.0], [3.0, 9.0, 3.0],
                                      [11.0, 5.0, 11.0], [11.0, 9.0, 11.0]]  # fmt: skip


# ---- DTensors


def reductions_of_whole_tensors() -> list[float]:
    mesh = sw.init_device_mesh("cpu", (2, 2), ("dp", "tp"))
    whole = sw.distribute_tensor(torch.ones(2), mesh["tp"], [Replicate()])
    loss = sw.distribute_tensor(torch.arange(8.0), mesh["tp"], [Shard(0)]).sum()  # pending
    return [
        functional.all_reduce(whole, "sum", mesh["dp"]).sum().item(),
        # as torchtitan's dist_utils reduce a loss
        functional.all_reduce(loss.full_tensor(), reduceOp="max", group=mesh["dp"]).item(),
    ]


def test_whole_dtensors_are_reduced(workers4) -> None:
    assert workers4.run(reductions_of_whole_tensors) == [[4.0, 28.0]] * 4


def refused_shard() -> str:
    mesh = sw.init_device_mesh("cpu", (4,), ("tp",))
    with pytest.raises(sw.DispatchError) as caught:
        functional.all_reduce(sw.distribute_tensor(torch.ones(8), mesh, [Shard(0)]), "sum", mesh)
    return str(caught.value)


def test_a_shard_is_refused(workers4) -> None:
    assert all("x.to_local()" in text for text in workers4.run(refused_shard))


def linear_of(x: torch.Tensor, mesh: sw.DeviceMesh) -> torch.Tensor:
    """Give a plain tensor to a module under a plan."""
    linear = torch.nn.Linear(8, 4, bias=False)
    torch.nn.init.ones_(linear.weight)
    plan = sw.parallel.ColwiseParallel(output_layouts=Replicate())
    return sw.parallel.parallelize_module(linear, mesh, plan)(x).detach()


def results_meet_dtensors() -> list[torch.Tensor]:
    """Results that nobody has waited for, in calls with DTensors."""
    mesh = sw.init_device_mesh("cpu", (4,), ("tp",))
    rank = float(dist.get_rank())
    x = sw.distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])

    def total() -> torch.Tensor:
        return functional.all_reduce(torch.full((8,), rank), "sum", mesh)

    piece = functional.reduce_scatter_single(torch.full((8,), rank), "sum", 0, mesh)
    return [
        (x + total()).full_tensor(),
        sw.DTensor.from_local(piece, mesh, [Shard(0)]).full_tensor(),
        sw.DTensor.from_local(total(), mesh, [Replicate()]).sum().full_tensor(),
        sw.distribute_tensor(total(), mesh, [Shard(0)]).full_tensor(),
        torch.empty(8).copy_(total()),
        torch.cat([x, total()]).full_tensor()[8:],
        linear_of(total(), mesh),
        torch.where(x > 3, x, total()).full_tensor(),
    ]


def test_results_under_way_meet_dtensors(workers4) -> None:
    six, count = torch.full((8,), 6.0), torch.arange(8.0)
    expected = [count + 6, six, torch.tensor(48.0), six, six, six, torch.full((4,), 48.0),
                torch.where(count > 3, count, 6.0)]  # fmt: skip
    for got in workers4.run(results_meet_dtensors):
        for one, other in zip(got, expected, strict=True):
            assert torch.equal(one, other)


# ---- torch.distributed's own functions


def own_functions() -> list[Any]:
    mesh = sw.init_device_mesh("cpu", (2, 2), ("dp", "tp"))
    group = mesh.get_group("tp")
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x, group=group)
    y = torch.tensor([float(dist.get_rank())], requires_grad=True)
    differentiable.all_reduce(y, group=group).backward()
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, dist.get_rank(), group=group)
    return [x.item(), y.grad.item(), gathered, dist.get_rank(group), dist.get_world_size(group)]


def test_groups_of_our_meshes_are_torchs(workers4) -> None:
    assert workers4.run(own_functions) == [
        [1.0, 2.0, [0, 1], 0, 2],
        [1.0, 2.0, [0, 1], 1, 2],
        [5.0, 2.0, [2, 3], 0, 2],
        [5.0, 2.0, [2, 3], 1, 2],
    ]


def refused_groups() -> list[str]:
    mesh = sw.init_device_mesh("cpu", (2, 2), ("dp", "tp"))
    texts = []
    calls: list[tuple[type[Exception], Callable[[], Any]]] = [
        (AssertionError, lambda: functional.all_reduce(torch.ones(1), "sum", mesh)),
        (ValueError, lambda: functional.all_reduce(torch.ones(1), "sum", (mesh, "cp"))),
        (ValueError, lambda: functional.all_reduce(torch.ones(1), "sum", (mesh, 2))),
        (ValueError, lambda: dist.all_reduce(torch.ones(1), group=mesh["tp"])),  # as torch's
    ]
    for kind, call in calls:
        with pytest.raises(kind) as caught:
            call()
        texts.append(str(caught.value))
    return texts


def test_what_is_no_group_is_refused(workers4) -> None:
    for several, unknown, beyond, in_place in workers4.run(refused_groups):
        assert "mesh['dp']" in several
        assert "'cp'" in unknown
        assert "2" in beyond
        assert "DeviceMesh" in in_place


def test_simulated_ranks_say_what_to_use_instead() -> None:
    def run() -> None:
        with pytest.raises(sw.MeshError, match=r"sw\.communicator"):
            functional.all_reduce(torch.ones(1), "sum", sw.init_device_mesh("cpu", (2,)))

    sw.simulate(run, 2)
