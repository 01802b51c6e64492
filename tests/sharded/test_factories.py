"""Factories, `*_like`, nn.init and dropout give the same numbers for every sharding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.sharded_operators import all_specs, boxes, chunks, gradient, odd, on_ranks, values
from torch.nn import init

import shardwise as sw
import shardwise.sharded as sh
from shardwise import Replicate

COUNTS = pytest.mark.parametrize("count", [2, 3, 4])


def seeded(make: Callable[[], Any]) -> Any:
    """Return the whole tensor that a function makes after a seed."""
    torch.manual_seed(3)
    made = make()
    return made.full_tensor() if hasattr(made, "full_tensor") else made


def alone(run: Callable[[torch.Tensor], Any], *shape: int) -> Any:
    """Return the result for a DTensor in one process, which draws as DTensors on any mesh do."""

    def one() -> Any:
        mesh = sw.init_device_mesh("cpu", (1,))
        tensor = sw.empty(*shape, device_mesh=mesh, placements=[Replicate()])
        return seeded(lambda: run(tensor))

    return on_ranks(one, 1)[0]


INITIALIZERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "uniform_": lambda x: init.uniform_(x, -1, 2),
    "normal_": lambda x: init.normal_(x, 1, 0.1),
    "trunc_normal_": lambda x: init.trunc_normal_(x, std=2),
    "constant_": lambda x: init.constant_(x, 0.3),
    "ones_": init.ones_,
    "zeros_": init.zeros_,
    "eye_": init.eye_,
    "xavier_uniform_": lambda x: init.xavier_uniform_(x, gain=2),
    "xavier_normal_": init.xavier_normal_,
    "kaiming_uniform_": lambda x: init.kaiming_uniform_(x, a=5**0.5),
    "kaiming_normal_": lambda x: init.kaiming_normal_(x, mode="fan_out", nonlinearity="relu"),
    "orthogonal_": init.orthogonal_,
    "sparse_": lambda x: init.sparse_(x, sparsity=0.4),
    "Tensor.random_": lambda x: x.random_(0, 10),
    "Tensor.bernoulli_": lambda x: x.bernoulli_(0.3),
    "Tensor.exponential_": lambda x: x.exponential_(),
    "Tensor.log_normal_": lambda x: x.log_normal_(),
    "Tensor.cauchy_": lambda x: x.cauchy_(),
    "Tensor.geometric_": lambda x: x.geometric_(0.2),
}


def test_every_function_of_nn_init_is_tried() -> None:
    public = {name for name in dir(init) if name.endswith("_") and not name.startswith("_")}
    assert public == {name for name in INITIALIZERS if "." not in name} | {"dirac_"}


@COUNTS
@pytest.mark.parametrize("name", INITIALIZERS)
def test_numbers_do_not_depend_on_how_a_tensor_is_cut(name: str, count: int) -> None:
    expected = alone(INITIALIZERS[name], 5, 4)

    def run() -> None:
        for how, spec in all_specs(count).items():
            tensor = sh.empty(spec, 5, 4)
            memory = [each.tensor.data_ptr() for each in tensor.local_shards()]
            made = seeded(lambda: INITIALIZERS[name](tensor))  # noqa: B023
            torch.testing.assert_close(made, expected, rtol=0, atol=1e-7, msg=how)
            torch.testing.assert_close(tensor.full_tensor(), made, rtol=0, atol=0)
            assert memory == [each.tensor.data_ptr() for each in tensor.local_shards()]

    on_ranks(run, count)


def test_a_kernel_of_a_convolution() -> None:
    expected = alone(init.dirac_, 3, 2, 3)
    specs = {
        "rows": chunks(0, 1, 0),
        "last": chunks(2, 0, 1),
        "odd": boxes(
            (0, [0, 0, 0], [1, 2, 3]), (1, [1, 0, 0], [2, 2, 2]), (0, [1, 0, 2], [2, 2, 1])
        ),
    }

    def run() -> None:
        for name, spec in specs.items():
            tensor = init.dirac_(sh.empty(spec, 3, 2, 3))
            torch.testing.assert_close(tensor.full_tensor(), expected, msg=name)

    on_ranks(run, 2)


def test_a_wide_matrix_is_made_orthogonal() -> None:
    expected = alone(init.orthogonal_, 3, 6)

    def run() -> None:
        for spec in (chunks(0, 0, 1), chunks(1, 1, 0), boxes((1, [0, 0], [3, 6]))):
            tensor = sh.empty(spec, 3, 6)
            made = seeded(lambda: init.orthogonal_(tensor, gain=1))  # noqa: B023
            torch.testing.assert_close(made, expected)
            torch.testing.assert_close(made @ made.T, torch.eye(3))

    on_ranks(run, 2)


@pytest.mark.parametrize("name", ["uniform_", "orthogonal_", "sparse_", "eye_", "trunc_normal_"])
def test_a_parameter_stays_one_when_it_is_initialized(name: str) -> None:
    def run() -> None:
        for spec in all_specs(3).values():
            tensor = sh.empty(spec, 5, 4, requires_grad=True)
            assert INITIALIZERS[name](tensor) is tensor or name == "eye_"
            assert tensor.requires_grad
            assert tensor.is_leaf
            assert all(each.tensor.requires_grad for each in tensor.local_shards())

    on_ranks(run, 3)


# ---- factories


@COUNTS
def test_factories(count: int) -> None:
    uniform = alone(lambda x: x.uniform_(), 5, 4)
    normal = alone(lambda x: x.normal_(), 5, 4)

    def run() -> None:
        for spec in all_specs(count).values():
            torch.testing.assert_close(seeded(lambda: sh.rand(spec, 5, 4)), uniform)  # noqa: B023
            torch.testing.assert_close(seeded(lambda: sh.randn(spec, [5, 4])), normal)  # noqa: B023
            assert sh.zeros(spec, 5, 4, dtype=torch.int8).full_tensor().tolist() == [[0] * 4] * 5
            assert sh.ones(spec, (5, 4)).full_tensor().tolist() == [[1.0] * 4] * 5
            made = sh.full(spec, (5, 4), 2, dtype=torch.float64, requires_grad=True)
            assert made.requires_grad
            torch.testing.assert_close(
                made.full_tensor().detach(), torch.full((5, 4), 2.0, dtype=torch.float64)
            )
            assert sh.empty(spec, 5, 4, dtype=torch.bool).dtype == torch.bool
            assert sh.rand(spec, 5, 4, requires_grad=True).is_leaf

    on_ranks(run, count)


LIKE: dict[str, Callable[..., Any]] = {
    "zeros": torch.zeros_like,
    "ones": torch.ones_like,
    "full": lambda x, **options: torch.full_like(x, 7, **options),
    "empty": lambda x, **options: torch.empty_like(x, **options).zero_(),
    "rand": torch.rand_like,
    "randn": torch.randn_like,
    "randint": lambda x, **options: torch.randint_like(x, 3, 9, **options),
}


@COUNTS
@pytest.mark.parametrize("name", LIKE)
def test_tensors_like_another_keep_its_cut_dtype_and_group(name: str, count: int) -> None:
    like = LIKE[name]
    expected = alone(lambda x: like(x.double()), 5, 4)

    def run() -> None:
        mesh = sw.DeviceMesh("cpu", list(reversed(range(count))))
        for how, spec in all_specs(count).items():
            data = values(5, 4)
            tensor = spec.shard(data, process_group=mesh)
            made = like(tensor)
            assert made.dtype == torch.float64
            assert made._group is tensor._group
            assert made.sharding_spec() == spec, how
            assert not made.requires_grad
            torch.testing.assert_close(seeded(lambda: like(tensor)), expected)  # noqa: B023
            other = like(tensor, dtype=torch.float32)
            assert other.dtype == other.full_tensor().dtype == torch.float32
            assert other.metadata().tensor_properties.dtype == torch.float32
            if name != "empty":
                recorded = like(tensor, requires_grad=True)
                assert recorded.requires_grad and recorded.is_leaf
                assert all(each.tensor.requires_grad for each in recorded.local_shards())

    on_ranks(run, count)


def test_by_name_too() -> None:
    def run() -> None:
        for spec in all_specs(2).values():
            tensor = sh.ones(spec, 5, 4)
            assert not torch.zeros_like(input=tensor).full_tensor().any()
            assert torch.equal(input=tensor, other=torch.ones(5, 4))

    on_ranks(run, 2)


# ---- dropout


@COUNTS
def test_dropout_does_not_depend_on_how_a_tensor_is_cut(count: int) -> None:
    data = values(5, 4)
    expected = alone(lambda x: F.dropout(x.copy_(data.detach()).double(), 0.4), 5, 4)

    def run() -> None:
        for how, spec in all_specs(count).items():
            tensor = spec.shard(data)
            torch.manual_seed(3)
            result = F.dropout(tensor, 0.4)
            torch.testing.assert_close(
                result.full_tensor(), expected, rtol=1e-6, atol=1e-6, msg=how
            )
            result.backward(torch.ones(5, 4, dtype=torch.float64))
            kept = torch.where(expected == 0, 0.0, 1 / 0.6)
            torch.testing.assert_close(gradient(tensor), kept.double(), rtol=1e-6, atol=1e-6)
            assert F.dropout(tensor, 0.4, training=False).full_tensor().equal(data)
            changed = tensor.detach().clone()
            assert seeded(lambda: F.dropout(changed, 0.4, inplace=True)).equal(  # noqa: B023
                result.full_tensor()
            )
            assert changed.full_tensor().equal(result.full_tensor())

    on_ranks(run, count)


# ---- comparisons


@COUNTS
def test_equal_and_allclose_however_both_are_cut(count: int) -> None:
    data = values(5, 4, grad=False)

    def run() -> None:
        specs = list(all_specs(count).values())
        for one, two in zip(specs, specs[1:] + specs[:1], strict=True):
            x, y = one.shard(data), two.shard(data)
            assert torch.equal(x, y) and x.equal(y) and torch.allclose(x, y)
            assert torch.equal(x, data) and torch.equal(data, x) and torch.allclose(data, x)
            z = two.shard(data + 1e-6)
            assert not torch.equal(x, z)
            assert torch.allclose(x, z, atol=1e-5) and not x.allclose(z, rtol=0, atol=1e-7)
            assert not torch.equal(x, data[:4])
            with_nan = data.clone()
            with_nan[4, 3] = torch.nan
            x, y = one.shard(with_nan), two.shard(with_nan)
            assert not torch.equal(x, y)
            assert not torch.allclose(x, y)
            assert torch.allclose(x, y, equal_nan=True)
            row = one.shard(torch.ones(5, 4))
            assert torch.allclose(row, torch.ones(4)) and torch.allclose(torch.ones(1), row)
            with pytest.raises(RuntimeError, match="did not match"):
                torch.allclose(x, y.float())

    on_ranks(run, count)


def test_ranks_without_shards_answer_as_all_do() -> None:
    def run() -> list[Any]:
        tensor = odd(3)["one rank"].shard(values(5, 4, grad=False))
        return [
            torch.equal(tensor, tensor),
            torch.allclose(tensor, tensor + 1),
            (tensor > 0).dtype,
            (tensor * 1j).dtype,
            tensor.exp_().requires_grad,
            (tensor.float() + tensor).dtype,
        ]

    assert (
        on_ranks(run, 3) == [[True, False, torch.bool, torch.complex128, False, torch.float64]] * 3
    )
