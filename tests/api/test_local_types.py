"""`local_map(spmd_types=True)` has the package spmd_types check the function."""

import sys
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise import DispatchError, LayoutError, Partial, Replicate, Shard

torch.manual_seed(0)
A, B = torch.randn(6, 4, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)


def mesh_of_two() -> sw.DeviceMesh:
    return sw.init_device_mesh("cpu", (2,), ("tp",))


def test_without_the_package_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "spmd_types", None)

    def run() -> None:
        mesh = mesh_of_two()
        mapped = sw.local_map(torch.relu, [Shard(0)], ([Shard(0)],), spmd_types=True)
        with pytest.raises(
            DispatchError, match=r"pip install spmd_types, or pass spmd_types=False"
        ):
            mapped(sw.distribute_tensor(A, mesh, [Shard(0)]))
        assert torch.equal(mapped(A), torch.relu(A))  # without DTensors there is nothing to check

    sw.simulate(run, 2)


@pytest.mark.needs("spmd_types")
class TestWithThePackage:
    def test_a_product_of_split_factors_is_a_contribution(self) -> None:
        def run() -> None:
            mesh = mesh_of_two()
            a = sw.distribute_tensor(A, mesh, [Shard(1)]).requires_grad_()
            b = sw.distribute_tensor(B, mesh, [Shard(0)]).requires_grad_()
            how = ([Shard(1)], [Shard(0)])
            out = sw.local_map(torch.mm, [Partial()], how, spmd_types=True)(a, b)
            check(out, (a, b), lambda a, b: a @ b)

        sw.simulate(run, 2)

    @pytest.mark.parametrize("in_placements", [None, ([Shard(0)], [Replicate()])], ids=str)
    def test_the_gradient_of_a_whole_input_is_a_sum_of_contributions(
        self, in_placements: Any
    ) -> None:
        def run() -> None:
            mesh = mesh_of_two()
            a = sw.distribute_tensor(A, mesh, [Shard(0)]).requires_grad_()
            b = sw.distribute_tensor(B, mesh, [Replicate()]).requires_grad_()

            @sw.local_map(out_placements=[Shard(0)], in_placements=in_placements, spmd_types=True)
            def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
                return (a @ b).sin()

            check(product(a, b), (a, b), lambda a, b: (a @ b).sin())

        sw.simulate(run, 2)

    @pytest.mark.parametrize("gradients", [Partial(), Replicate()], ids=str)
    def test_a_function_of_whole_inputs_has_the_gradients_that_it_says(
        self, gradients: sw.Placement
    ) -> None:
        def run() -> None:
            mesh = mesh_of_two()
            a = sw.distribute_tensor(A, mesh, [Replicate()]).requires_grad_()
            grads = ([gradients],)
            mapped = sw.local_map(torch.sin, [Replicate()], None, grads, spmd_types=True)
            check(mapped(a), (a,), torch.sin)

        sw.simulate(run, 2)

    def test_each_axis_has_its_own_types(self) -> None:
        def run() -> None:
            mesh = sw.init_device_mesh("cpu", (2, 2, 1), ("dp", "tp", "pp"))
            a = sw.distribute_tensor(A, mesh, [Shard(0), Shard(1), Replicate()]).requires_grad_()
            b = sw.distribute_tensor(B, mesh, [Replicate(), Shard(0), Shard(1)]).requires_grad_()
            out = [Shard(0), Partial(), Shard(1)]
            check(sw.local_map(torch.mm, out, spmd_types=True)(a, b), (a, b), lambda a, b: a @ b)

        sw.simulate(run, 4)

    def test_a_function_that_takes_a_contribution_for_a_value_is_refused(self) -> None:
        from spmd_types import SpmdTypeError

        def run() -> None:
            mesh = mesh_of_two()
            x = sw.distribute_tensor(A, mesh, [Partial()])
            for func in (torch.sin, lambda x: x * x):
                with pytest.raises(SpmdTypeError):
                    sw.local_map(func, [Partial()], spmd_types=True)(x)
                sw.local_map(func, [Partial()])(x)  # unchecked, and wrong
            twice = sw.local_map(lambda x: x * 2, [Partial()], spmd_types=True)(x)
            assert torch.equal(twice.full_tensor(), A * 2)

        sw.simulate(run, 2)

    def test_results_must_be_what_is_said_of_them(self) -> None:
        def run() -> None:
            mesh = mesh_of_two()
            x = sw.distribute_tensor(A, mesh, [Shard(0)])
            with pytest.raises(
                LayoutError, match=r"out_placements\[0\]: .* of type R or I on axis tp, .* type V"
            ):
                sw.local_map(torch.sin, [Replicate()], spmd_types=True)(x)
            whole = x.redistribute(placements=[Replicate()])
            with pytest.raises(LayoutError, match=r"expected a result of type V on axis tp"):
                sw.local_map(torch.sin, [Shard(0)], spmd_types=True)(whole)

        sw.simulate(run, 2)

    def test_gradients_that_no_type_has_are_refused(self) -> None:
        def run() -> None:
            mesh = mesh_of_two()
            how: dict[str, Any] = {"out_placements": [Shard(0)], "spmd_types": True}
            for placement, gradient in (
                (Shard(0), Replicate()),
                (Shard(0), Partial()),
                (Replicate(), Shard(0)),
                (Partial(), Partial()),
            ):
                x = sw.distribute_tensor(A, mesh, [placement])
                mapped = sw.local_map(torch.sin, in_grad_placements=([gradient],), **how)
                with pytest.raises(LayoutError):
                    mapped(x)
            x = sw.distribute_tensor(A, mesh, [Partial("max")])
            with pytest.raises(LayoutError, match="spmd_types knows pending sums only"):
                sw.local_map(torch.sin, **how)(x)

        sw.simulate(run, 2)


def check(out: sw.DTensor, inputs: tuple[sw.DTensor, ...], func: Any) -> None:
    """The same values and gradients as one process has."""
    whole = [each.full_tensor().detach().clone().requires_grad_() for each in inputs]
    expected = func(*whole)
    assert torch.allclose(out.full_tensor(), expected)
    (out * out).sum().backward()
    (expected * expected).sum().backward()
    for ours, theirs in zip(inputs, whole, strict=True):
        assert torch.allclose(ours.grad.full_tensor(), theirs.grad)
        assert ours.grad.placements == ours.placements
