"""The collectives between simulated ranks, on abstract meshes, and their checks of arguments."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from support.collectives import CASES, DTYPES, OPS, WHERES, Where, run_case, size_patterns, value
from support.collectives_in_place import IN_PLACE_CASES, IN_PLACE_RUNS

import shardwise as sw
from shardwise.comm.offline import AbstractCommunicator, AloneCommunicator

# torch warns that it knows complex32 only in part; moves need no more.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

ALL_CASES = CASES | IN_PLACE_CASES


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("case", "where"), [*product(CASES, WHERES), *IN_PLACE_RUNS])
def test_collectives_of_simulated_ranks(case: str, where: str) -> None:
    ran_with = sw.simulate(run_case, 4, ALL_CASES[case], WHERES[where], exact=True)
    check_membership(WHERES[where], ran_with)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("case", ALL_CASES)
def test_collectives_of_fewer_ranks(case: str, world_size: int) -> None:
    ranks = tuple(range(world_size))
    where = Where(ranks, ("x",), ("x",), (ranks,))
    ran_with = sw.simulate(run_case, world_size, ALL_CASES[case], where, True)
    assert ran_with == [ranks] * world_size


@pytest.mark.parametrize("case", ALL_CASES)
def test_collectives_of_ranks_that_run_in_parallel(case: str) -> None:
    ran_with = sw.simulate(run_case, 4, ALL_CASES[case], WHERES["tp-dp"], exact=True, parallel=True)
    check_membership(WHERES["tp-dp"], ran_with)


@pytest.mark.parametrize("case", ALL_CASES)
def test_collectives_of_a_process_alone(case: str) -> None:
    assert run_case(ALL_CASES[case], Where((0,), ("x",), ("x",), ((0,),)), exact=True) == (0,)


def check_membership(where: Where, ran_with: list[tuple[int, ...] | None]) -> None:
    """Every rank ran the case with the ranks that were worked out by hand, the others did not."""
    for rank, ranks in enumerate(ran_with):
        assert ranks == next((group for group in where.expected if rank in group), None)


# ---- abstract ranks: the shapes of real ones


def collectives(comm: sw.Communicator, make: Callable[..., torch.Tensor]) -> dict[str, Any]:
    """One result of each, with inputs from `make(index, shape)`."""
    n, me = comm.size, comm.index
    results: dict[str, Any] = {}
    for op in OPS:
        results[f"all_reduce {op}"] = comm.all_reduce(make(me, (2, 3)), op)
    results["all_reduce scalar"] = comm.all_reduce(make(me, ()))
    for dim in (0, 1, -1):
        for sizes in size_patterns(n):
            shape = [2, 3]
            shape[dim] = sizes[me]
            name = f"{dim} {sizes}"
            results[f"all_gather {name}"] = comm.all_gather(make(me, shape), dim, sizes)
            shape[dim] = sum(sizes)
            x = make(me, shape)
            results[f"reduce_scatter {name}"] = comm.reduce_scatter(x, dim, sizes)
    results["all_gather"] = comm.all_gather(make(me, (2, 3)), 1)
    results["reduce_scatter"] = comm.reduce_scatter(make(me, (2, 3 * n)), 1)
    results["all_to_all"] = comm.all_to_all(
        [make(me, (me, peer)) for peer in range(n)], [(peer, me) for peer in range(n)]
    )
    for peer in range(n):
        results[f"broadcast {peer}"] = comm.broadcast(make(me, (2, 3)), peer)
        results[f"gather {peer}"] = comm.gather(
            make(me, (me, 2)), [(index, 2) for index in range(n)], peer
        )
        pieces = [make(me, (index, 4)) for index in range(n)]
        results[f"scatter {peer}"] = comm.scatter(
            make(me, (me, 4)), pieces if me == peer else None, peer
        )
    results["all_reduce in place"] = comm.all_reduce(make(me, (2, 3)), "max", in_place=True)
    results["all_gather_into"] = comm.all_gather_into(make(me, (2, 3)), make(me, (n, 6)))
    outs = [[make(me, (index, at)) for index in range(n)] for at in (2, 3)]
    results["all_gather_in_place"] = comm.all_gather_in_place(
        [make(me, (me, at)) for at in (2, 3)], outs
    )
    for op in ("sum", "max"):
        results[f"reduce_scatter_in_place {op}"] = comm.reduce_scatter_in_place(
            outs, [make(me, (me, at)) for at in (2, 3)], op
        )
    sent = comm.send_async(make(me, (me, 5)), (me + 1) % n)
    before = (me - 1) % n
    results["recv"] = comm.recv(make(me, (before, 5)), before)
    results["send"] = sent.wait()
    results["barrier"] = comm.barrier()
    return results


def described(results: dict[str, Any]) -> dict[str, Any]:
    def describe(result: Any) -> Any:
        if isinstance(result, list):
            return [describe(each) for each in result]
        return result if result is None else (tuple(result.shape), result.dtype, result.stride())

    return {name: describe(result) for name, result in results.items()}


@pytest.mark.parametrize("axes", [("dp",), ("tp",), ("dp", "tp"), ("tp", "dp")])
def test_abstract_results_have_the_shapes_of_real_ones(axes: tuple[str, ...]) -> None:
    names = ("dp", "tp")

    def real() -> dict[str, Any]:
        comm = sw.communicator(sw.init_device_mesh("cpu", (2, 3), names), axes)
        return described(collectives(comm, value))

    mesh = sw.DeviceMesh.abstract((2, 3), names)
    for rank, expected in enumerate(sw.simulate(real, 6)):
        comm = sw.communicator(mesh, axes, rank=rank)
        assert isinstance(comm, AbstractCommunicator)
        results = collectives(comm, lambda _, shape: torch.empty(tuple(shape), device="meta"))
        assert described(results) == expected
        for result in results.values():
            for each in result if isinstance(result, list) else [result]:
                assert each is None or each.is_meta


def test_an_abstract_communicator_sees_the_ranks_of_the_rank_it_looks_from() -> None:
    mesh = sw.DeviceMesh.abstract((2, 3), ("dp", "tp"))
    assert sw.communicator(mesh, "tp", rank=4).ranks == (3, 4, 5)
    assert sw.communicator(mesh, "tp", rank=4).index == 1
    assert sw.communicator(mesh, ("tp", "dp"), rank=4).ranks == (0, 3, 1, 4, 2, 5)
    assert sw.communicator(mesh, ("tp", "dp"), rank=4).index == 3
    assert sw.communicator(mesh).ranks == (0, 1, 2, 3, 4, 5)
    assert sw.communicator(mesh).index == 0


def test_a_hundred_thousand_abstract_ranks_are_no_trouble() -> None:
    mesh = sw.DeviceMesh.abstract((100, 1000), ("dp", "tp"))
    comm = sw.communicator(mesh, rank=99_999)
    gathered = comm.all_gather(torch.empty(7, 2, device="meta"))
    assert gathered.shape == (700_000, 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_abstract_results_keep_the_dtype(dtype: torch.dtype) -> None:
    comm = sw.communicator(sw.DeviceMesh.abstract((4,)))
    assert comm.all_reduce(torch.empty(4, dtype=dtype, device="meta")).dtype == dtype
    assert comm.reduce_scatter(torch.empty(4, dtype=dtype, device="meta")).dtype == dtype


REAL_ON_ABSTRACT: dict[str, Callable[[sw.Communicator, torch.Tensor, torch.Tensor], Any]] = {
    "all_reduce": lambda comm, real, meta: comm.all_reduce(real),
    "all_gather": lambda comm, real, meta: comm.all_gather(real),
    "reduce_scatter": lambda comm, real, meta: comm.reduce_scatter(real),
    "all_reduce in place": lambda comm, real, meta: comm.all_reduce(real, in_place=True),
    "all_gather_into": lambda comm, real, meta: comm.all_gather_into(real, torch.zeros(2, 2)),
    "all_gather_in_place": lambda comm, real, meta: comm.all_gather_in_place(
        [real], [[real, real]]
    ),
    "all_gather_in_place, of the other": lambda comm, real, meta: comm.all_gather_in_place(
        [meta], [[meta, real]]
    ),
    "reduce_scatter_in_place": lambda comm, real, meta: comm.reduce_scatter_in_place(
        [[real, real]], [real]
    ),
    "reduce_scatter_in_place, to the other": lambda comm, real, meta: comm.reduce_scatter_in_place(
        [[meta, real]], [meta], "max"
    ),
    "all_to_all": lambda comm, real, meta: comm.all_to_all([real, real]),
    "all_to_all, first": lambda comm, real, meta: comm.all_to_all([real, meta]),
    "all_to_all, last": lambda comm, real, meta: comm.all_to_all([meta, real]),
    "broadcast": lambda comm, real, meta: comm.broadcast(real),
    "scatter like": lambda comm, real, meta: comm.scatter(real, [meta, meta]),
    "scatter pieces": lambda comm, real, meta: comm.scatter(meta, [meta, real]),
    "gather": lambda comm, real, meta: comm.gather(real),
    "gather elsewhere": lambda comm, real, meta: comm.gather(real, destination=1),
    "send": lambda comm, real, meta: comm.send(real, 1),
    "recv": lambda comm, real, meta: comm.recv(real, 1),
}


@pytest.mark.parametrize("call", REAL_ON_ABSTRACT)
def test_abstract_ranks_refuse_real_tensors(call: str) -> None:
    comm = sw.communicator(sw.DeviceMesh.abstract((2,)))
    with pytest.raises(sw.CollectiveError, match=r"expected a meta tensor.*x\.to\('meta'\)"):
        REAL_ON_ABSTRACT[call](comm, torch.zeros(2), torch.zeros(2, device="meta"))


def test_abstract_ranks_have_no_objects_to_gather() -> None:
    comm = sw.communicator(sw.DeviceMesh.abstract((2,)))
    with pytest.raises(sw.CollectiveError, match="gather_objects: an abstract mesh"):
        comm.gather_objects(1)


def test_the_rank_to_look_from_is_checked() -> None:
    mesh = sw.DeviceMesh.abstract((2, 2))
    for rank in (4, -1, "a", 1.0, True):
        with pytest.raises(sw.MeshError, match=rf"^rank: expected one of .*got {rank!r}"):
            sw.communicator(mesh, rank=rank)  # type: ignore[arg-type]
    with pytest.raises(sw.MeshError, match=r"^rank: expected None"):
        sw.communicator(sw.init_device_mesh("cpu", (1,)), rank=0)


def test_along_an_axis_of_one_nothing_moves() -> None:
    for mesh in (sw.DeviceMesh.abstract((1, 4)), sw.init_device_mesh("cpu", (1, 1))):
        comm = sw.communicator(mesh, 0)
        assert isinstance(comm, AloneCommunicator)
        assert comm.all_reduce(torch.ones(2)).tolist() == [1, 1]


# ---- which communicator


def test_no_axes_named_means_all_of_them() -> None:
    def ranks() -> tuple[int, ...]:
        mesh = sw.init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        assert sw.communicator(mesh) is sw.communicator(mesh, ("dp", "tp"))
        assert sw.communicator(mesh, "tp") is sw.communicator(mesh, 1)
        assert sw.communicator(mesh, "tp") is sw.communicator(mesh, -1)
        assert sw.communicator(mesh, ("tp", "dp")) is not sw.communicator(mesh)
        return sw.communicator(mesh).ranks

    assert sw.simulate(ranks, 4) == [(0, 1, 2, 3)] * 4


def test_bad_axes_are_refused_by_name() -> None:
    mesh = sw.init_device_mesh("cpu", (1, 1), ("dp", "tp"))
    with pytest.raises(sw.MeshError, match=r"axis: expected one of .*dp.*got 'pp'"):
        sw.communicator(mesh, "pp")
    with pytest.raises(sw.MeshError, match=r"^axes: expected names or positions.*got 0\.5"):
        sw.communicator(mesh, 0.5)  # type: ignore[arg-type]
    with pytest.raises(sw.MeshError, match="axes: expected each axis once"):
        sw.communicator(mesh, ("dp", "dp"))
    with pytest.raises(sw.MeshError, match=r"mesh: expected a DeviceMesh, got 3 \(int\)"):
        sw.communicator(3)  # type: ignore[arg-type]


def test_a_rank_outside_the_mesh_is_told_so() -> None:
    def outside() -> None:
        mesh = sw.DeviceMesh("cpu", [0, 1])
        if sw.DeviceMesh("cpu", [0, 1, 2]).get_rank() == 2:
            with pytest.raises(sw.MeshError, match=r"rank 2 is not part of DeviceMesh\('cpu'|init"):
                sw.communicator(mesh)

    sw.simulate(outside, 3)


def test_a_mesh_of_another_world_is_refused() -> None:
    def made_there() -> sw.DeviceMesh:
        return sw.init_device_mesh("cpu", (4,))

    mesh, *_ = sw.simulate(made_there, 4)
    with pytest.raises(sw.MeshError, match=r"^mesh: expected ranks 0 to 0, .*process is alone"):
        sw.communicator(mesh)

    def in_a_smaller_one() -> None:
        with pytest.raises(sw.MeshError, match=r"^mesh: expected ranks 0 to 1, .*runs 2 ranks"):
            sw.communicator(mesh)

    sw.simulate(in_a_smaller_one, 2)


def test_a_communicator_shows_who_it_is() -> None:
    mesh = sw.DeviceMesh.abstract((2, 2), ("dp", "tp"))
    shown = repr(sw.communicator(mesh, ("tp", "dp"), rank=2))
    assert shown == "AbstractCommunicator(rank 2 of (0, 2, 1, 3) over tp.dp)"


def test_a_communicator_of_very_many_shows_the_first_of_them() -> None:
    comm = sw.communicator(sw.DeviceMesh.abstract((100_000,), ("x",)), rank=99_999)
    first = "0, 1, 2, 3, 4, 5, 6, 7 and 99992 more"
    assert repr(comm) == f"AbstractCommunicator(rank 99999 of ({first}) over x)"
    with pytest.raises(sw.CollectiveError, match=r"got \(1, 1, .* and 99992 more\)$") as caught:
        comm.all_gather(torch.empty(2, device="meta"), sizes=[1] * 100_000)
    assert len(str(caught.value)) < 300


# ---- bad arguments, refused on the rank that gives them, by the argument's name

X = torch.zeros(4, 6)
OTHER = torch.zeros(4, dtype=torch.int64)

# The caller is index 1 of 3.
REFUSED: dict[str, tuple[Callable[[sw.Communicator], Any], str]] = {
    "all_reduce op": (
        lambda c: c.all_reduce(X, "mean"),
        r"^op: expected one of sum, avg, max, min, product, got 'mean'",
    ),
    "reduce_scatter op": (lambda c: c.reduce_scatter(X, 1, op="SUM"), r"^op: .* got 'SUM'"),
    "reduce_scatter dim": (lambda c: c.reduce_scatter(X, 2), r"^dim: .*-2 <= dim < 2; got 2"),
    "reduce_scatter dim, negative": (lambda c: c.reduce_scatter(X, -3), r"^dim: .* got -3"),
    "reduce_scatter of a scalar": (lambda c: c.reduce_scatter(torch.ones(())), r"^dim: .*0-d"),
    "reduce_scatter without sizes": (
        lambda c: c.reduce_scatter(X, 0),
        r"^reduce_scatter\(sizes\): .*dim 0 of \(4, 6\) does not divide evenly; got None",
    ),
    "reduce_scatter count of sizes": (
        lambda c: c.reduce_scatter(X, 0, [2, 2]),
        r"^reduce_scatter\(sizes\): expected 3 lengths, one per rank; got \(2, 2\)",
    ),
    "reduce_scatter negative size": (
        lambda c: c.reduce_scatter(X, 0, [5, -2, 1]),
        r"^reduce_scatter\(sizes\): .* got \(5, -2, 1\)",
    ),
    "reduce_scatter sum of sizes": (
        lambda c: c.reduce_scatter(X, 0, [2, 2, 1]),
        r"^reduce_scatter\(sizes\): expected a sum of 4, the length of dim 0 .*got \(2, 2, 1\)",
    ),
    "all_gather dim": (lambda c: c.all_gather(X, 2), r"^dim: .*got 2"),
    "all_gather of a scalar": (
        lambda c: c.all_gather(torch.ones(())),
        r"^dim: expected a tensor that has dims, got dim=0 of a 0-d one",
    ),
    "all_gather dim of a wrong kind": (lambda c: c.all_gather(X, "0"), r"^dim: .*; got '0'"),
    "all_gather sizes of a wrong kind": (
        lambda c: c.all_gather(X, sizes=2),
        r"^all_gather\(sizes\): expected 3 lengths, one per rank; got 2 \(int\)",
    ),
    "all_gather sizes of wrong kinds": (
        lambda c: c.all_gather(X, sizes=(4, 4.0, 4)),
        r"^all_gather\(sizes\): expected 3 lengths.*got \(4, 4\.0, 4\) \(tuple\)",
    ),
    "all_gather sizes, one tensor": (
        lambda c: c.all_gather(X, sizes=torch.tensor(2)),
        r"^all_gather\(sizes\): .*got tensor\(2\) \(Tensor\)",
    ),
    "all_gather count of sizes": (
        lambda c: c.all_gather(X, 0, [4] * 4),
        r"^all_gather\(sizes\): expected 3 lengths",
    ),
    "all_gather negative size": (
        lambda c: c.all_gather(X, 0, [-1, 4, 4]),
        r"^all_gather\(sizes\): .*got \(-1, 4, 4\)",
    ),
    "all_gather own size": (
        lambda c: c.all_gather(X, 0, [4, 3, 4]),
        r"^all_gather\(sizes\): expected sizes\[1\] to be 4, the length of dim 0.*got \(4, 3, 4\)",
    ),
    "all_reduce in place op": (
        lambda c: c.all_reduce(X, "mean", in_place=True),
        r"^op: expected one of .* got 'mean'",
    ),
    "all_gather_into shape of rows": (
        lambda c: c.all_gather_into(X, torch.zeros(3, 4, 6)),
        r"^all_gather_into\(rows\): expected torch.float32 \(3, 24\) on cpu, contiguous; got "
        r"torch.float32 \(3, 4, 6\) on cpu",
    ),
    "all_gather_into dtype of rows": (
        lambda c: c.all_gather_into(X, torch.zeros(3, 24, dtype=torch.float64)),
        r"^all_gather_into\(rows\): .*got torch.float64 \(3, 24\)",
    ),
    "all_gather_into device of rows": (
        lambda c: c.all_gather_into(X, torch.zeros(3, 24, device="meta")),
        r"^all_gather_into\(rows\): .*got torch.float32 \(3, 24\) on meta",
    ),
    "all_gather_into rows that are not contiguous": (
        lambda c: c.all_gather_into(X, torch.zeros(24, 3).t()),
        r"^all_gather_into\(rows\): .*got torch.float32 \(3, 24\) on cpu, not contiguous",
    ),
    "all_gather_in_place nothing": (
        lambda c: c.all_gather_in_place([], []),
        r"^all_gather_in_place\(xs\): expected a list of tensors, at least one; got \[\] \(list\)",
    ),
    "all_gather_in_place xs of a wrong kind": (
        lambda c: c.all_gather_in_place(3, [[X] * 3]),
        r"^all_gather_in_place\(xs\): expected a list of tensors, .*got 3 \(int\)",
    ),
    "all_gather_in_place one of a wrong kind": (
        lambda c: c.all_gather_in_place([X, 3], [[X] * 3] * 2),
        r"^all_gather_in_place\(xs\)\[1\]: expected a tensor, got 3 \(int\)",
    ),
    "all_gather_in_place dtypes": (
        lambda c: c.all_gather_in_place([X, OTHER], [[X] * 3, [OTHER] * 3]),
        r"^all_gather_in_place\(xs\): expected one dtype, got torch.float32, torch.int64",
    ),
    "all_gather_in_place count of outs": (
        lambda c: c.all_gather_in_place([X, X], [[X] * 3]),
        r"^all_gather_in_place\(outs\): expected 2 lists, each of a tensor per rank; got 1",
    ),
    "all_gather_in_place outs of a wrong kind": (
        lambda c: c.all_gather_in_place([X], None),
        r"^all_gather_in_place\(outs\): expected 1 lists, .*got None \(NoneType\)",
    ),
    "all_gather_in_place outs of too few ranks": (
        lambda c: c.all_gather_in_place([X, X], [[X] * 3, [X] * 2]),
        r"^all_gather_in_place\(outs\)\[1\]: expected 3, one per rank; got 2",
    ),
    "all_gather_in_place own shape": (
        lambda c: c.all_gather_in_place([X], [[X, X.t(), X]]),
        r"^all_gather_in_place\(outs\)\[0\]\[1\]: expected torch.float32 \(4, 6\) on cpu, as this "
        r"rank's; got torch.float32 \(6, 4\) on cpu",
    ),
    "all_gather_in_place own dtype": (
        lambda c: c.all_gather_in_place([X], [[X.double()] * 3]),
        r"^all_gather_in_place\(outs\)\[0\]\[1\]: expected torch.float32 .*got torch.float64",
    ),
    "reduce_scatter_in_place op": (
        lambda c: c.reduce_scatter_in_place([[X] * 3], [X], "mean"),
        r"^op: expected one of .* got 'mean'",
    ),
    "reduce_scatter_in_place nothing": (
        lambda c: c.reduce_scatter_in_place([], []),
        r"^reduce_scatter_in_place\(outs\): expected a list of tensors, at least one; got \[\]",
    ),
    "reduce_scatter_in_place count of xs": (
        lambda c: c.reduce_scatter_in_place([[X] * 3] * 2, [X]),
        r"^reduce_scatter_in_place\(xs\): expected 1 lists, each of a tensor per rank; got 2",
    ),
    "reduce_scatter_in_place xs of too many ranks": (
        lambda c: c.reduce_scatter_in_place([[X] * 4], [X]),
        r"^reduce_scatter_in_place\(xs\)\[0\]: expected 3, one per rank; got 4",
    ),
    "reduce_scatter_in_place own shape": (
        lambda c: c.reduce_scatter_in_place([[X] * 3], [X.t()]),
        r"^reduce_scatter_in_place\(xs\)\[0\]\[1\]: expected torch.float32 \(6, 4\)",
    ),
    "reduce_scatter_in_place own dtype": (
        lambda c: c.reduce_scatter_in_place([[X] * 3], [X.double()]),
        r"^reduce_scatter_in_place\(xs\)\[0\]\[1\]: expected torch.float64 .*got torch.float32",
    ),
    "all_to_all count of pieces": (
        lambda c: c.all_to_all([X, X]),
        r"^all_to_all\(pieces\): expected 3, one per rank; got 2",
    ),
    "all_to_all no pieces": (lambda c: c.all_to_all([]), r"^all_to_all\(pieces\): .*got 0"),
    "all_to_all dtypes": (
        lambda c: c.all_to_all([X, OTHER, X]),
        r"^all_to_all\(pieces\): expected one dtype, got torch.float32, torch.int64",
    ),
    "all_to_all pieces of a wrong kind": (
        lambda c: c.all_to_all(3),
        r"^all_to_all\(pieces\): expected 3 tensors, one per rank; got 3 \(int\)",
    ),
    "all_to_all one piece of a wrong kind": (
        lambda c: c.all_to_all([X, 3, X]),
        r"^all_to_all\(pieces\)\[1\]: expected a tensor, got 3 \(int\)",
    ),
    "all_to_all shapes of a wrong kind": (
        lambda c: c.all_to_all([X] * 3, [24, 24, 24]),
        r"^all_to_all\(shapes\): expected 3 shapes, one per rank; got \[24, 24, 24\] \(list\)",
    ),
    "all_to_all count of shapes": (
        lambda c: c.all_to_all([X] * 3, [(4, 6)] * 2),
        r"^all_to_all\(shapes\): expected 3, one per rank; got 2",
    ),
    "all_to_all own shape": (
        lambda c: c.all_to_all([X] * 3, [(4, 6), (6, 4), (4, 6)]),
        r"^all_to_all\(shapes\): expected shapes\[1\] to be \(4, 6\).*got \(6, 4\)",
    ),
    "broadcast source": (
        lambda c: c.broadcast(X, 3),
        r"^broadcast\(source\): expected an index from 0 to 2; got 3",
    ),
    "broadcast negative source": (
        lambda c: c.broadcast(X, -1),
        r"^broadcast\(source\): .*got -1",
    ),
    "broadcast source of a wrong kind": (
        lambda c: c.broadcast(X, "0"),
        r"^broadcast\(source\): expected an index from 0 to 2; got '0'",
    ),
    "scatter source": (lambda c: c.scatter(X, [X] * 3, 3), r"^scatter\(source\): .*got 3"),
    "scatter without pieces": (
        lambda c: c.scatter(X, None, 1),
        r"^scatter\(pieces\): expected tensors on the source rank, got None",
    ),
    "scatter count of pieces": (
        lambda c: c.scatter(X, [X] * 2, 1),
        r"^scatter\(pieces\): expected 3, one per rank; got 2",
    ),
    "scatter dtypes": (
        lambda c: c.scatter(X, [X, X, OTHER], 1),
        r"^scatter\(pieces\): expected one dtype",
    ),
    "scatter own shape": (
        lambda c: c.scatter(X, [X, X.t(), X], 1),
        r"^scatter\(like\): expected torch.float32 \(6, 4\).*got torch.float32 \(4, 6\)",
    ),
    "scatter own dtype": (
        lambda c: c.scatter(X.double(), [X, X, X], 1),
        r"^scatter\(like\): expected torch.float32 .*got torch.float64",
    ),
    "gather destination": (
        lambda c: c.gather(X, destination=3),
        r"^gather\(destination\): .*got 3",
    ),
    "gather count of shapes": (
        lambda c: c.gather(X, [(4, 6)] * 2),
        r"^gather\(shapes\): expected 3, one per rank",
    ),
    "gather own shape": (
        lambda c: c.gather(X, [(4, 6), (6, 4), (4, 6)]),
        r"^gather\(shapes\): .*with \(4, 6\) at 1; got .*\(6, 4\)",
    ),
    "gather shapes of a wrong kind": (
        lambda c: c.gather(X, 3),
        r"^gather\(shapes\): expected 3 shapes, one per rank; got 3 \(int\)",
    ),
    "exchange sends of a wrong kind": (
        lambda c: c.exchange([X], {}),
        r"^exchange\(sends\): expected a dict of tensors by peer, got \[.*\(list\)",
    ),
    "exchange a piece of a wrong kind": (
        lambda c: c.exchange({}, {0: 3}),
        r"^exchange\(receives\)\[0\]: expected a tensor, got 3 \(int\)",
    ),
    "exchange with itself": (lambda c: c.exchange({1: X}, {}), r"^exchange\(sends\): .*besides 1"),
    "send destination": (lambda c: c.send(X, 3), r"^send\(destination\): .*got 3"),
    "send to itself": (
        lambda c: c.send(X, 1),
        r"^send\(destination\): .*besides 1, which is this rank; got 1",
    ),
    "recv source": (lambda c: c.recv(X, -1), r"^recv\(source\): .*got -1"),
    "recv from itself": (
        lambda c: c.recv(X, 1),
        r"^recv\(source\): .*besides 1, which is this rank; got 1",
    ),
}

NO_TENSOR: dict[str, Callable[[sw.Communicator, Any], Any]] = {
    "all_reduce(x)": lambda c, x: c.all_reduce(x),
    "reduce_scatter(x)": lambda c, x: c.reduce_scatter(x),
    "all_gather(x)": lambda c, x: c.all_gather(x),
    "broadcast(x)": lambda c, x: c.broadcast(x),
    "scatter(like)": lambda c, x: c.scatter(x, [X] * 3),
    "gather(x)": lambda c, x: c.gather(x),
    "send(x)": lambda c, x: c.send(x, 0),
    "recv(like)": lambda c, x: c.recv(x, 0),
}
REFUSED |= {
    f"{argument} {given!r}": (
        lambda c, call=call, given=given: call(c, given),
        rf"^{re.escape(argument)}: expected a tensor, got {re.escape(repr(given))} \({kind}\)",
    )
    for argument, call in NO_TENSOR.items()
    for given, kind in ((3, "int"), ([1, 2], "list"), (None, "NoneType"))
}


@pytest.mark.parametrize("argument", REFUSED)
def test_a_bad_argument_is_refused_by_its_name(argument: str) -> None:
    call, message = REFUSED[argument]

    def refused() -> str | None:
        comm = sw.communicator(sw.init_device_mesh("cpu", (3,)))
        if comm.index != 1:
            return None
        with pytest.raises(sw.CollectiveError) as caught:
            call(comm)
        return str(caught.value)

    _, text, _ = sw.simulate(refused, 3)
    assert text is not None
    assert re.search(message, text), text
    assert text.endswith("[rank 1 of 3]")


def test_pieces_in_place_that_another_rank_does_not_expect_are_named() -> None:
    def unlike(which: str) -> None:
        comm = sw.communicator(sw.init_device_mesh("cpu", (3,)))
        row = [X, X, X if comm.index else X.t()]  # on rank 0, what has to do with rank 2
        if which == "gather":
            comm.all_gather_in_place([X], [row])
        else:
            comm.reduce_scatter_in_place([row], [torch.zeros(4, 6)])

    wide, long = r"torch.float32 \(4, 6\)", r"torch.float32 \(6, 4\)"
    said = rf"rank 2 sends {wide} to rank 0, which expects {long}"
    with pytest.raises(sw.MismatchError, match=said):
        sw.simulate(unlike, 3, "gather")
    said = rf"rank 0 sends {long} to rank 2, which expects {wide}"
    with pytest.raises(sw.MismatchError, match=said):
        sw.simulate(unlike, 3, "reduce")


def test_several_tensors_in_place_are_one_event() -> None:
    events: list[sw.Event] = []

    def program() -> None:
        mesh = sw.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        comm = sw.communicator(mesh, "dp")
        sizes = (1, 3)  # of rows of 12 bytes
        outs = [[torch.zeros(size, 3) for size in sizes] for _ in range(2)]
        mine = [torch.ones(sizes[comm.index], 3) for _ in range(2)]
        comm.all_gather_in_place(mine, outs)
        comm.reduce_scatter_in_place(outs, mine)
        comm.all_gather_into(mine[0][0], torch.zeros(2, 3))
        comm.all_reduce(torch.ones(2, 3), in_place=True)

    with sw.listen(events.append):
        sw.simulate(program, 4)
    assert all(event.axes == ("dp",) and event.ended is not None for event in events)
    told = [(event.kind, event.shape, event.bytes) for event in events if event.rank == 3]
    assert told == [
        ("all_gather", (3, 3), 2 * 12),  # the one row of the other, of both
        ("reduce_scatter", (1, 3), 2 * 36),  # contributions to three rows
        ("all_gather", (3,), 12),
        ("all_reduce", (2, 3), 24),
    ]


def test_within_a_channel_ranks_that_do_not_meet_are_named() -> None:
    def apart() -> None:
        comm = sw.communicator(sw.init_device_mesh("cpu", (2,)), channel="other")
        comm.barrier() if comm.index else comm.all_reduce(X)

    with pytest.raises(sw.MismatchError, match=r"(?s)all_reduce.*barrier"):
        sw.simulate(apart, 2)


def test_a_rank_alone_has_nobody_to_send_to() -> None:
    comm = sw.communicator(sw.init_device_mesh("cpu", (1,)))
    with pytest.raises(sw.CollectiveError, match=r"send\(destination\)"):
        comm.send(torch.ones(1), 0)
    with pytest.raises(sw.CollectiveError, match=r"recv\(source\)"):
        comm.recv(torch.ones(1), 0)


# ---- Pending


def test_a_pending_result_can_be_changed_on_its_way_and_shows_whether_it_is_there() -> None:
    def doubled() -> list[float]:
        comm = sw.communicator(sw.init_device_mesh("cpu", (2,)))
        pending = comm.all_reduce_async(torch.ones(2)).then(lambda total: 2 * total)
        assert repr(pending) == "Pending(under way)"
        result = pending.wait()
        assert repr(pending) == f"Pending({result!r})"
        return result.tolist()

    assert sw.simulate(doubled, 2) == [[4, 4], [4, 4]]
