"""Products: every layout gives what the plain call gives, and the cheap splits are found."""

import functools

import pytest
import torch
import torch.nn.functional as F
from support.rules import heard, in_layout, leaf, ranks, values

from shardwise import (
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    simulate,
)
from shardwise.comm import listen
from shardwise.rules.linalg.scaled_matmul import scaled_mm
from shardwise.testing import Sample, check_rule

check = functools.partial(check_rule, mesh_shapes=((3,), (2, 2)), most=9)

PRODUCTS = {
    "mm": (torch.mm, [Sample(leaf(5, 4), leaf(4, 3))]),
    "bmm": (torch.bmm, [Sample(leaf(2, 5, 4), leaf(2, 4, 3))]),
    "mv": (torch.mv, [Sample(leaf(5, 4), leaf(4))]),
    "dot": (torch.dot, [Sample(leaf(5), leaf(5))]),
    "vdot": (torch.vdot, [Sample(*[leaf(5, dtype=torch.complex128)] * 2)]),
    "outer": (torch.outer, [Sample(leaf(5), leaf(3))]),
    "ger": (torch.ger, [Sample(leaf(5), leaf(3))]),
    "matmul": (
        torch.matmul,
        [
            Sample(leaf(5), leaf(5)),
            Sample(leaf(4), leaf(2, 4, 3)),
            Sample(leaf(2, 5, 4), leaf(4)),
            Sample(leaf(2, 5, 4), leaf(4, 3)),
            Sample(leaf(3, 1, 5, 4), leaf(1, 2, 4, 3)),
            Sample(leaf(5, 4), leaf(2, 4, 3)),
        ],
    ),
    "@": (lambda a, b: a @ b, [Sample(leaf(5, 4), leaf(4, 3))]),
    "__rmatmul__": (lambda a, b: a.__rmatmul__(b), [Sample(leaf(4, 3), leaf(5, 4))]),
    "linalg.matmul": (torch.linalg.matmul, [Sample(leaf(5, 4), leaf(4))]),
    "linear": (
        F.linear,
        [
            Sample(leaf(4), leaf(3, 4)),
            Sample(leaf(5, 4), leaf(3, 4), leaf(3)),
            Sample(leaf(2, 5, 4), leaf(3, 4), bias=leaf(3)),
            Sample(leaf(2, 4), leaf(4)),
        ],
    ),
    "inner": (
        torch.inner,
        [Sample(leaf(2, 5), leaf(3, 5)), Sample(leaf(3), leaf()), Sample(leaf(4), leaf(4))],
    ),
    "vecdot": (
        torch.linalg.vecdot,
        [Sample(leaf(5, 4), leaf(3, 1, 4)), Sample(leaf(5, 4), leaf(3, 5, 4), dim=1)],
    ),
    "tensordot": (
        torch.tensordot,
        [
            Sample(leaf(2, 4, 3), leaf(4, 3, 2)),
            Sample(leaf(4, 3), leaf(2, 4), dims=([0], [1])),
            Sample(leaf(4, 3), leaf(2, 1), dims=([0], [-1])),
            Sample(leaf(3), leaf(2), dims=0),
        ],
    ),
    "kron": (
        torch.kron,
        [
            Sample(leaf(5), leaf(3)),
            Sample(leaf(4, 1), leaf(2, 3)),
            Sample(leaf(3, 2), leaf(4)),
            Sample(leaf(4), leaf(2, 3)),
        ],
    ),
    "bilinear": (
        F.bilinear,
        [Sample(leaf(2, 4), leaf(2, 3), leaf(5, 4, 3), leaf(5)),
         Sample(leaf(4), leaf(3), leaf(2, 4, 3))],
    ),
    "multi_dot": (
        torch.linalg.multi_dot,
        [
            Sample([leaf(5, 4), leaf(4, 3), leaf(3, 2)]),
            Sample([leaf(4), leaf(4, 3), leaf(3)]),
            Sample((leaf(5, 4), leaf(4, 3))),
        ],
    ),
    "addmm": (
        torch.addmm,
        [
            Sample(leaf(5, 3), leaf(5, 4), leaf(4, 3)),
            Sample(leaf(3), leaf(5, 4), leaf(4, 3), beta=2, alpha=-0.5),
            Sample(leaf(1, 3), leaf(5, 4), leaf(4, 3)),
        ],
    ),
    "addmv": (torch.addmv, [Sample(leaf(5), leaf(5, 4), leaf(4), alpha=3)]),
    "addr": (torch.addr, [Sample(leaf(5, 3), leaf(5), leaf(3), beta=0.5)]),
    "addbmm": (torch.addbmm, [Sample(leaf(5, 3), leaf(2, 5, 4), leaf(2, 4, 3), beta=3)]),
    "baddbmm": (torch.baddbmm, [Sample(leaf(1, 3), leaf(2, 5, 4), leaf(2, 4, 3), alpha=2)]),
    "einsum": (
        torch.einsum,
        [
            Sample("ij,jk->ik", leaf(5, 4), leaf(4, 3)),
            Sample("ij, kj", leaf(5, 4), leaf(3, 4)),
            Sample("bhld,bhsd->bhls", leaf(2, 2, 3, 2), leaf(2, 2, 5, 2)),
            Sample("...i,i", leaf(3, 2, 5), leaf(5)),
            Sample("...ij,...jk->k...i", leaf(2, 1, 3, 2), leaf(3, 2, 2)),
            Sample("i...j->j", leaf(2, 3, 4)),
            Sample("ij,jk,kl->il", leaf(2, 3), leaf(3, 5), leaf(5, 2)),
            Sample("ij,ij->j", leaf(3, 1), leaf(3, 4)),
            Sample("ba,->ab", leaf(2, 5), leaf()),
        ],
    ),
}  # fmt: skip


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", PRODUCTS)
def test_agrees_with_the_plain_call_on_every_layout(name):
    check(*PRODUCTS[name])


def test_diagonals_in_an_einsum_split_without_a_gather():
    # That the second dim of a diagonal is split is no legal split for a plain local call.
    check(
        torch.einsum,
        [
            Sample("ii->i", leaf(5, 5)),
            Sample("ii", leaf(5, 5)),
            Sample("ijii,i->ij", leaf(3, 2, 3, 3), leaf(3)),
        ],
    )


def test_the_subscript_lists_of_einsum_are_an_equation():
    def product(a, b):
        return torch.einsum(a, [..., 0, 1], b, [1, 2], [2, ..., 0])

    check(product, [Sample(leaf(2, 5, 4), leaf(4, 3))])


def test_distances_between_rows():
    for p in (2.0, 1.0, 0.0, 3.0):
        check(torch.cdist, [Sample(leaf(5, 2), leaf(3, 2), p=p)])
    check(torch.cdist, [Sample(leaf(2, 1, 27, 2), leaf(3, 4, 2))], most=6, rtol=1e-6)


def test_how_distances_are_computed_depends_on_the_global_number_of_rows():
    """Far from the origin torch's product for more than 25 rows is off by far more than 1e-6."""
    rows = 1000 + leaf(28, 2).detach().float()

    def program():
        mesh = init_device_mesh("cpu", (2,))
        return torch.cdist(distribute_tensor(rows, mesh, [Shard(0)]), rows[:3]).full_tensor()

    expected = torch.cdist(rows, rows[:3])
    exact = torch.cdist(rows.double(), rows[:3].double()).float()
    assert not torch.allclose(expected, exact, atol=1e-3)
    torch.testing.assert_close(simulate(program, 2)[0], expected, atol=1e-3, rtol=0)


def test_the_old_chain_matmul():
    with pytest.warns(UserWarning, match="deprecated"):
        check(torch.chain_matmul, [Sample(leaf(5, 4), leaf(4, 3), leaf(3, 2))])


@pytest.mark.parametrize("name", ["addmm_", "addmv_", "addr_", "addbmm_", "baddbmm_"])
def test_in_place_forms_keep_the_layout_of_their_target(name):
    shapes = {
        "addmm_": [(5, 3), (5, 4), (4, 3)],
        "addmv_": [(5,), (5, 4), (4,)],
        "addr_": [(5, 3), (5,), (3,)],
        "addbmm_": [(5, 3), (2, 5, 4), (2, 4, 3)],
        "baddbmm_": [(2, 5, 3), (2, 5, 4), (2, 4, 3)],
    }[name]
    first, *rest = [leaf(*shape).detach() for shape in shapes]
    expected = getattr(first.clone(), name)(*rest, alpha=2)

    def run():
        mesh = init_device_mesh("cpu", (3,))
        for placement in (Replicate(), Shard(0), Partial()):
            for other in (Replicate(), Shard(0), Shard(-1)):
                target = distribute_tensor(first, mesh, [placement])
                operands = [distribute_tensor(each, mesh, [other]) for each in rest]
                result = getattr(target, name)(*operands, alpha=2)
                assert result is target and target.placements == (placement,)
                torch.testing.assert_close(target.full_tensor(), expected)

    simulate(run, 3)


def communication_of(fn, *placed):
    """What two ranks send for `fn` on tensors, given with their placements, and the result's."""
    events = []

    def run():
        mesh = init_device_mesh("cpu", (2,))
        tensors = [distribute_tensor(each.detach(), mesh, [how]) for each, how in placed]
        with listen(events.append):
            return fn(*tensors).placements[0]

    placement = simulate(run, 2)[0]
    return [event.kind for event in events], placement


def test_columns_then_rows_need_one_sum_at_the_end():
    def mlp(x, up, down, bias):
        return F.linear(F.linear(x, up), down, bias)

    events, placement = communication_of(
        mlp,
        (leaf(5, 4), Replicate()),
        (leaf(6, 4), Shard(0)),
        (leaf(4, 6), Shard(1)),
        (leaf(4), Replicate()),
    )
    assert (events, placement) == ([], Partial())


def test_a_pending_sum_flows_through_a_product():
    events, placement = communication_of(
        torch.addmm,
        (leaf(3), Partial()),
        (leaf(5, 4), Partial()),
        (leaf(4, 3), Replicate()),
    )
    assert (events, placement) == ([], Partial())


def test_a_matrix_of_other_size_is_torchs_own_error_on_every_layout():
    def run():
        mesh = init_device_mesh("cpu", (2,))
        narrow = distribute_tensor(torch.ones(3, 1), mesh, [Replicate()])
        split = distribute_tensor(torch.ones(2, 4), mesh, [Shard(0)])  # one row on each rank
        with pytest.raises(RuntimeError, match=r"3(x|, )1.*2(x|, )4"):
            narrow @ split

    simulate(run, 2)


def test_autocast_gives_the_dtypes_that_it_gives_plain_tensors():
    def run():
        mesh = init_device_mesh("cpu", (2,))
        x, w = torch.randn(4, 6), torch.randn(3, 6)
        dx, dw = distribute_tensor(x, mesh, [Shard(1)]), distribute_tensor(w, mesh, [Shard(1)])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for fn in (F.linear, lambda a, b: torch.einsum("ik,jk", a, b)):
                assert fn(dx, dw).dtype == fn(x, w).dtype == torch.bfloat16

    simulate(run, 2)


@pytest.mark.parametrize(
    "placements",
    [
        [Shard(0), Replicate()],
        [Replicate(), Shard(1)],
        [Shard(1), Shard(0)],
    ],
    ids=["rows", "columns", "summed"],
)
def test_second_derivatives_of_a_split_product(placements):
    x, w = leaf(4, 5), leaf(5, 3)
    (grad,) = torch.autograd.grad((x @ w).pow(3).sum(), x, create_graph=True)
    expected = torch.autograd.grad(grad.pow(2).sum(), w)[0]

    def run():
        mesh = init_device_mesh("cpu", (3,))
        a = distribute_tensor(x.detach(), mesh, placements[:1])
        b = distribute_tensor(w.detach(), mesh, placements[1:])
        a.requires_grad = b.requires_grad = True
        (first,) = torch.autograd.grad((a @ b).full_tensor().pow(3).sum(), a, create_graph=True)
        second = torch.autograd.grad(first.full_tensor().pow(2).sum(), b)[0]
        torch.testing.assert_close(second.full_tensor(), expected)

    simulate(run, 3)


def test_scaled_float8_matrices_split_in_whole_units() -> None:
    """Rows, columns, and what is summed over if the result can be summed; not below 16."""
    first = values(6, 64, grad=False).to(torch.float8_e4m3fn)
    second = values(32, 64, grad=False).to(torch.float8_e4m3fn).t()
    scales = torch.full((6, 1), 0.5), torch.full((1, 32), 1.5)
    want = torch._scaled_mm(first, second, *scales, out_dtype=torch.bfloat16)

    def run(mesh: DeviceMesh) -> dict[str, list[str]]:
        found = {}
        splits = {"m": (0, None, 0, None), "n": (None, 1, None, 1), "k": (1, 0, None, None)}
        for name, dims in splits.items():
            placed = [
                in_layout(each, mesh, Replicate() if dim is None else Shard(dim))
                for each, dim in zip((first, second, *scales), dims, strict=True)
            ]
            call = functools.partial(torch._scaled_mm, *placed, out_dtype=torch.bfloat16)
            events, result = heard(mesh, call)
            found[name] = [event.kind for event in events]
            torch.testing.assert_close(result.full_tensor(), want, rtol=2e-2, atol=0.1)
        return found

    assert ranks(run)[0] == {"m": [], "n": [], "k": []}
    assert ranks(run, 4)[0]["n"] == ["all_gather", "all_gather"]  # 8 columns are too few


@pytest.mark.parametrize(
    ("count", "dims"),
    [
        (2, (1, 0, 1, 0)),
        (4, (1, 0, 1, 0)),
        (2, (0, None, 0, None)),
        (2, (None, 1, None, 1)),
        (2, (None, None, None, None)),
    ],
)
def test_scaled_float8_matrices_with_scales_of_blocks_of_what_is_summed_over(
    count: int, dims: tuple[int | None, ...]
) -> None:
    """As ranks have that scale their own parts: each multiplies its blocks, one or several."""
    first = values(6, 64, grad=False).to(torch.float8_e4m3fn)
    second = values(32, 64, grad=False).to(torch.float8_e4m3fn).t()
    rows, columns = values(6, count, grad=False).abs(), values(count, 32, grad=False).abs()
    scales = rows.float() + 0.5, columns.float() + 0.5
    block = 64 // count
    wide = first.float() * scales[0].repeat_interleave(block, 1)
    want = wide @ (second.float() * scales[1].repeat_interleave(block, 0))

    def run(mesh: DeviceMesh) -> None:
        placed = [
            in_layout(each, mesh, Replicate() if dim is None else Shard(dim))
            for each, dim in zip((first, second, *scales), dims, strict=True)
        ]
        call = functools.partial(torch._scaled_mm, *placed, out_dtype=torch.bfloat16)
        events, result = heard(mesh, call)
        assert events == []
        torch.testing.assert_close(result.full_tensor().float(), want, rtol=2e-2, atol=0.3)

    ranks(run)


def test_a_pending_maximum_that_is_added_to_a_split_product_is_made_whole_first():
    def run(mesh):
        first, second = values(3, 4, grad=False), values(4, 2, grad=False)
        mine = torch.full((3, 2), float(mesh.get_rank()), dtype=torch.float64)
        added = DTensor.from_local(mine, mesh, [Partial("max")])
        factors = in_layout(first, mesh, Shard(1)), in_layout(second, mesh, Shard(0))
        ours = torch.addmm(added, *factors)
        torch.testing.assert_close(ours.full_tensor(), first @ second + 1)

    ranks(run)


def test_scaled_float8_matrices_are_whole_where_contributions_would_not_add_up() -> None:
    """With a bias, which counts once; in float8; by the scales of blocks."""
    first = values(6, 64, grad=False).to(torch.float8_e4m3fn)
    second = values(32, 64, grad=False).to(torch.float8_e4m3fn).t()
    ones = torch.ones(()), torch.ones(())
    bias = torch.ones(32, dtype=torch.bfloat16)

    def run(mesh: DeviceMesh) -> None:
        placed = in_layout(first, mesh, Shard(1)), in_layout(second, mesh, Shard(0))
        for options in ({"bias": bias, "out_dtype": torch.bfloat16}, {}):
            want = torch._scaled_mm(first, second, *ones, **options)
            got = torch._scaled_mm(*placed, *ones, **options)
            assert not any(each.is_partial() for each in got.placements)
            assert torch.equal(got.full_tensor().float(), want.float())

    ranks(run)
    blocks = torch.ones(6, 4), torch.ones(4, 2)
    spec = scaled_mm(first, second, *blocks, out_dtype=torch.bfloat16)
    assert all(set(dims) == {None} for _, dims in spec.inputs)


def test_scaled_float8_matrices_whose_parts_have_scales_of_their_own_are_added() -> None:
    """Row parallel: each rank has scaled its part of the contracted dim, so scales are (m, ranks)
    and (ranks, n)."""
    first = values(6, 64, grad=False).to(torch.float8_e4m3fn)
    second = values(32, 64, grad=False).to(torch.float8_e4m3fn).t()
    generator = torch.Generator().manual_seed(0)
    scales = [torch.rand(shape, generator=generator) + 0.5 for shape in ((6, 2), (2, 32))]
    want = sum(
        torch._scaled_mm(
            first[:, part].contiguous(),
            second[part].t().contiguous().t(),
            scales[0][:, at : at + 1].contiguous(),
            scales[1][at : at + 1].contiguous(),
            out_dtype=torch.float32,
        )
        for at, part in enumerate((slice(0, 32), slice(32, 64)))
    )

    def run(mesh: DeviceMesh) -> list[str]:
        placed = [
            in_layout(each, mesh, Shard(dim))
            for each, dim in zip((first, second, *scales), (1, 0, 1, 0), strict=True)
        ]
        call = functools.partial(torch._scaled_mm, *placed, out_dtype=torch.float32)
        events, result = heard(mesh, call)
        torch.testing.assert_close(result.full_tensor(), want)
        return [event.kind for event in events]

    assert ranks(run)[0] == []
    ranks(run, 4)  # two blocks are not split over four ranks
