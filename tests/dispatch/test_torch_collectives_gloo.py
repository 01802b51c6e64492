"""Torch's own collectives that get DTensors: right, or refused with the remedy."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable

import shardwise as sw
from shardwise import Partial, Replicate, Shard

FULL = torch.arange(24.0).reshape(8, 3)


def mesh1() -> sw.DeviceMesh:
    return sw.init_device_mesh("cpu", (4,), ("tp",))


def split(placement: Any = None, rows: int = 8) -> sw.DTensor:
    return sw.distribute_tensor(FULL[:rows], mesh1(), [placement or Shard(0)])


def world() -> Any:
    return dist.group.WORLD


def peer() -> int:
    return int(dist.get_rank() ^ 1)


def like(x: torch.Tensor, count: int = 4) -> list[torch.Tensor]:
    return [torch.zeros(x.shape) for _ in range(count)]


def coalesced(x: torch.Tensor) -> None:
    with dist._coalescing_manager():
        dist.all_reduce(x)


READING: dict[str, Callable[[torch.Tensor], Any]] = {
    "all_gather": lambda x: dist.all_gather(like(x), x),
    "all_gather, by keyword": lambda x: dist.all_gather(tensor_list=like(x), tensor=x),
    "all_gather_into_tensor": lambda x: dist.all_gather_into_tensor(torch.zeros(32, 3), x),
    "all_gather_coalesced": lambda x: world().allgather_coalesced(
        [like(x, 1) for _ in range(4)], [x]
    ),
    "gather": lambda x: dist.gather(x, like(x) if dist.get_rank() == 0 else None),
    "reduce_scatter": lambda x: dist.reduce_scatter(torch.zeros(8, 3), [x] * 4),
    "reduce_scatter_tensor": lambda x: dist.reduce_scatter_tensor(torch.zeros(2, 3), x),
    "all_to_all": lambda x: dist.all_to_all(like(x), [x] * 4),
    "all_to_all_single": lambda x: dist.all_to_all_single(torch.zeros(8, 3), x),
    "isend": lambda x: dist.isend(x, peer()),
    "batch_isend_irecv": lambda x: dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, peer()), dist.P2POp(dist.irecv, torch.zeros(8, 3), peer())]
    ),
    "the group's allgather": lambda x: world().allgather([like(x)], [x]),
    "the backend's send": lambda x: world()._get_backend(torch.device("cpu")).send([x], peer(), 0),
    "functional all_reduce": lambda x: functional.all_reduce(x, "sum", world()),
    "functional all_gather": lambda x: functional.all_gather_single(x, 0, world()),
    "functional all_reduce_coalesced": lambda x: functional.all_reduce_coalesced(
        [x], "sum", world()
    ),
    "nn.all_reduce": differentiable.all_reduce,
    "nn.all_gather": differentiable.all_gather,
    "nn.broadcast": lambda x: differentiable.broadcast(x, 0),
    "nn.reduce": lambda x: differentiable.reduce(x, 0),
    "nn.all_to_all": lambda x: differentiable.all_to_all(like(x), [x] * 4),
}
"""Calls that send a tensor."""

WRITING: dict[str, Callable[[torch.Tensor], Any]] = {
    "all_reduce": dist.all_reduce,
    "all_reduce, later": lambda x: dist.all_reduce(x, async_op=True),
    "all_reduce_coalesced": lambda x: dist.all_reduce_coalesced([x]),
    "all_reduce in a coalescing manager": coalesced,
    "broadcast": lambda x: dist.broadcast(x, 0),
    "all_gather": lambda x: dist.all_gather([x] * 4, torch.zeros(8, 3)),
    "the group's allreduce": lambda x: world().allreduce([x]),
    "the group's allreduce of a tuple": lambda x: world().allreduce((x,)),
    "the group's broadcast of one": lambda x: world().broadcast(x, 0),
    "broadcast of many": lambda x: dist._broadcast_coalesced(world(), [x], 1 << 20, 0),
}
"""Calls that write the same values to a tensor of every rank."""

WRITING_OWN: dict[str, Callable[[torch.Tensor], Any]] = {
    "reduce": lambda x: dist.reduce(x, 0),
    "scatter": lambda x: dist.scatter(x, like(x) if dist.get_rank() == 0 else None),
    "reduce_scatter": lambda x: dist.reduce_scatter(x, like(x)),
    "reduce_scatter_tensor": lambda x: dist.reduce_scatter_tensor(x, torch.zeros(32, 3)),
    "the group's reduce_scatter, input first": lambda x: world().reduce_scatter(
        input_tensors=[like(x)], output_tensors=[x]
    ),
    "all_to_all": lambda x: dist.all_to_all([x] * 4, like(x)),
    "all_to_all_single": lambda x: dist.all_to_all_single(x, torch.zeros(8, 3)),
    "recv": lambda x: dist.recv(x, peer()),
    "irecv": lambda x: dist.irecv(x, peer()),
    "functional all_reduce in place": lambda x: torch.ops._c10d_functional.all_reduce_(
        x, "sum", world().group_name
    ),
    "c10d.allreduce_": lambda x: torch.ops.c10d.allreduce_(
        [x], world(), dist.ReduceOp.SUM, None, False, -1
    ),
}
"""Calls that write other values to the tensor of each rank, or whose operator does not say."""


def quietly(call: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own functions are deprecated
        return call()


def refusals(calls: dict[str, Callable[[torch.Tensor], Any]], make: Callable[[], Any]) -> list[str]:
    """What is wrong with the refusals of these calls."""
    wrong = []
    for name, call in calls.items():
        x = make()
        before = x.to_local().clone()
        try:
            quietly(functools.partial(call, x))
            wrong.append(f"{name}: not refused")
        except sw.DispatchError as error:
            if "x.to_local()" not in str(error) or repr(x.mesh_layout) not in str(error):
                wrong.append(f"{name}: {error}")
        if not torch.equal(x.to_local(), before):
            wrong.append(f"{name}: has changed its shard")
    return wrong


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Partial()], ids=str)
def test_a_tensor_that_is_not_whole_on_each_rank_is_refused(workers4, placement) -> None:
    for rows in (8, 5):
        make = functools.partial(split, placement, rows)
        for calls in (READING, WRITING, WRITING_OWN):
            assert workers4.run(refusals_of, list_name(calls), make) == [[]] * 4


def list_name(calls: dict[str, Any]) -> str:
    return next(name for name, value in globals().items() if value is calls)


def refusals_of(name: str, make: Callable[[], Any]) -> list[str]:
    return refusals(globals()[name], make)


def test_calls_that_give_each_rank_other_values_do_not_write_to_a_whole_tensor(workers4) -> None:
    make = functools.partial(split, Replicate())
    assert workers4.run(refusals_of, "WRITING_OWN", make) == [[]] * 4


def plain_results() -> list[str]:
    """What differs between calls on whole DTensors and on plain tensors."""
    torch.manual_seed(dist.get_rank())
    wrong = []
    for name, call in (READING | WRITING).items():
        if "send" in name or "batch" in name:
            continue
        ours, plain = split(Replicate()), FULL.clone()
        got, wanted = quietly(lambda: call(ours)), quietly(lambda: call(plain))  # noqa: B023
        for each in (got, wanted):
            if hasattr(each, "wait") and not isinstance(each, torch.Tensor):
                each.wait()
        if isinstance(wanted, torch.Tensor | tuple | list):
            try:
                torch.testing.assert_close(list(got), list(wanted))
            except AssertionError as error:
                wrong.append(f"{name}: {error}")
        if not torch.equal(ours.to_local(), plain):
            wrong.append(f"{name}: {ours.to_local()} is not {plain}")
    return wrong


def test_a_whole_tensor_is_read_and_written_as_a_plain_one(workers4) -> None:
    assert workers4.run(plain_results) == [[]] * 4


def sent_and_received() -> list[Any]:
    x = split(Replicate())
    got = torch.zeros(8, 3)
    if dist.get_rank() % 2:
        dist.recv(got, peer())
        dist.send(x, peer())
    else:
        dist.send(x, peer())
        dist.recv(got, peer())
    again = torch.zeros(8, 3)
    operations = [dist.P2POp(dist.isend, x, peer()), dist.P2POp(dist.irecv, again, peer())]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    gathered = [torch.zeros_like(x) for _ in range(4)]  # DTensors, as torchmetrics makes them
    dist.all_gather(gathered, x)
    return [got, again, *(each.full_tensor() for each in gathered)]


def test_a_whole_tensor_is_sent_and_gathered(workers4) -> None:
    for results in workers4.run(sent_and_received):
        assert all(torch.equal(each, FULL) for each in results)


# ---- groups of some ranks


def over_groups() -> dict[str, Any]:
    mesh = sw.init_device_mesh("cpu", (2, 2), ("dp", "tp"))
    rank, row = dist.get_rank(), mesh.get_local_rank("dp")
    dp = mesh.get_group("dp")
    found: dict[str, Any] = {}
    # Each row of the mesh has a tensor of its own, split over tp: dp adds them piece by piece.
    for rows in (8, 5):
        x = sw.distribute_tensor(FULL[:rows] + row, mesh["tp"], [Shard(0)])
        dist.all_reduce(x, group=dp)
        found[f"sum of {rows}"] = x.full_tensor()
        x = sw.distribute_tensor(FULL[:rows] + row, mesh["tp"], [Shard(0)])
        dist.broadcast(x, group=dp, group_src=1)
        found[f"broadcast of {rows}"] = x.full_tensor()
    whole = sw.distribute_tensor(FULL + row, mesh["tp"], [Replicate()])
    dist.all_reduce(whole, group=dp)
    found["sum of whole ones"] = whole.full_tensor()
    loss = sw.distribute_tensor(FULL, mesh, [Replicate()] * 2)
    dist.all_reduce(loss, group=dp)
    found["along an axis"] = loss.to_local()

    def error(call: Callable[[], Any]) -> str:
        try:
            call()
        except sw.DispatchError as caught:
            return str(caught)
        return ""

    pending = sw.DTensor.from_local(FULL, mesh["tp"], [Partial()])
    found["pending"] = error(lambda: dist.all_reduce(pending, group=dp))
    piece = sw.distribute_tensor(FULL, mesh["tp"], [Shard(0)])
    found["gather of pieces"] = error(lambda: dist.all_gather(like(piece, 2), piece, group=dp))
    some = dist.new_group([0, 1, 2])
    if rank < 3:
        found["some"] = error(lambda: dist.all_reduce(loss, group=some))
    return found


def test_groups_beside_the_mesh_and_along_its_axes_are_right_and_others_refused(workers4) -> None:
    for rank, found in enumerate(workers4.run(over_groups)):
        for rows in (8, 5):
            assert torch.equal(found[f"sum of {rows}"], 2 * FULL[:rows] + 1)
            assert torch.equal(found[f"broadcast of {rows}"], FULL[:rows] + 1)
        assert torch.equal(found["sum of whole ones"], 2 * FULL + 1)
        assert torch.equal(found["along an axis"], 2 * FULL)
        assert "computes the pending reduction" in found["pending"]
        assert "of which this rank holds a part" in found["gather of pieces"]
        assert rank == 3 or "give only ranks [0, 1, 2] new values" in found["some"]


# ---- what was moved before a collective writes


def reread() -> list[bool]:
    mesh = mesh1()
    results = []
    x, y = split(Replicate()), split()
    with torch.no_grad():
        first = x @ y.T  # x may be moved, and remembered
        dist.all_reduce(x)
        results.append(torch.equal((x @ y.T).full_tensor(), 4 * first.full_tensor()))
        z = split()
        first = (z.cumsum(0) + z.flip(0)).full_tensor()
        local = z.to_local()
        dist.all_reduce(local)  # on purpose: the remedy that errors name
        local.zero_()
        total = z.full_tensor()
        results.append(torch.equal(total, torch.zeros(8, 3)))
        results.append(torch.equal((z.cumsum(0) + z.flip(0)).full_tensor(), total))
    model = torch.nn.Linear(3, 4, bias=False)
    sw.parallel.shard_module(model, mesh, {"weight": {"tp": Shard(0)}, "": batch_split()})
    batch = FULL.clone()
    with torch.no_grad():
        first = model(batch).full_tensor()
        dist.all_reduce(batch)
        results.append(torch.allclose(model(batch).full_tensor(), 4 * first))
    return results


def batch_split() -> Any:
    return sw.parallel.Activations(inputs={"input": {"tp": Shard(0)}})


def test_values_moved_before_a_collective_wrote_to_a_tensor_are_not_used_again(workers4) -> None:
    assert workers4.run(reread) == [[True] * 4] * 4


# ---- pickles


def exchanged(placement: Any) -> list[Any]:
    x = split(placement)
    found: list[Any] = [None] * 4
    dist.all_gather_object(found, {"x": x})
    return [each["x"].full_tensor() for each in found]


def test_objects_with_whole_tensors_are_exchanged_and_pieces_of_others_refused(workers4) -> None:
    for results in workers4.run(exchanged, Replicate()):
        assert all(torch.equal(each, FULL) for each in results)
    for placement in (Shard(0), Partial()):
        assert workers4.run(refused_object, placement) == [True] * 4


def refused_object(placement: Any) -> bool:
    try:
        exchanged(placement)
    except sw.LayoutError as error:
        return "pickle: expected to be the rank at" in str(error)
    return False
