"""Gradients of sharded tensors, and of plain tensors used with them, are those of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.sharded_operators import (
    all_specs,
    boxes,
    chunks,
    gradient,
    layouts,
    odd,
    on_ranks,
    values,
)

import shardwise as sw
import shardwise.sharded as sh

X, Y = values(5, 4), values(5, 4, seed=1)
COUNTS = pytest.mark.parametrize("count", [2, 3, 4])
SEED = values(5, 4, seed=7, grad=False)


def sharded(name: str, seed: int = 0) -> sh.ShardedTensor:
    """Return a leaf that is cut by the spec of this name."""
    tensor = values(5, 4, seed=seed, grad=False)
    return all_specs(3)[name].shard(tensor).requires_grad_()


def holds_however_cut(program: Callable[[str], bool]) -> None:
    """Run a test on three ranks for each spec; by one spec ranks 0 and 1 hold no shards."""
    found = sw.simulate(lambda: {name: program(name) for name in all_specs(3)}, 3)
    assert found == [dict.fromkeys(all_specs(3), True)] * 3


# ---- of what is beside a sharded tensor


BESIDE: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "whole": (lambda x, plain: x * plain, (5, 4)),
    "row": (lambda x, plain: x * plain + x, (4,)),
    "column": (lambda x, plain: plain / (x * x + 1), (5, 1)),
    "number": (lambda x, plain: (x * plain).sin(), ()),
    "in place": (lambda x, plain: (x * 2).mul_(plain), (5, 4)),
    "copied": (lambda x, plain: x * torch.zeros_like(x).copy_(plain), (5, 4)),
}


@pytest.mark.parametrize("how", BESIDE)
def test_a_plain_tensor_gets_the_gradient_from_the_shards_of_all_ranks(how: str) -> None:
    function, shape = BESIDE[how]
    x, plain = values(5, 4), values(*shape, seed=1)
    function(x, plain).backward(SEED)

    def program(name: str) -> bool:
        mine = plain.detach().clone().requires_grad_()
        function(sharded(name), mine).backward(SEED)
        return torch.allclose(mine.grad, plain.grad)

    holds_however_cut(program)


def test_a_dtensor_that_is_copied_gets_its_gradient() -> None:
    def program(name: str) -> bool:
        mesh = sw.init_device_mesh("cpu", (3,))
        source = sw.distribute_tensor(values(5, 4, grad=False), mesh, [sw.Shard(1)])
        source.requires_grad_()
        (torch.zeros_like(sharded(name)).copy_(source) * 2).backward(SEED)
        return torch.allclose(source.grad.full_tensor(), 2 * SEED)

    holds_however_cut(program)


def test_the_gradient_that_backward_begins_with_has_one_too() -> None:
    def program(name: str) -> bool:
        x, seed = sharded(name), SEED.clone().requires_grad_()
        (first,) = torch.autograd.grad(x * x, x, seed, create_graph=True)
        (second,) = torch.autograd.grad(first, seed, torch.ones_like(SEED))
        return torch.allclose(second, 2 * values(5, 4))

    holds_however_cut(program)


# ---- second gradients


TWICE: dict[str, Callable[[Any], Any]] = {
    "pointwise": lambda x: x * x.tanh(),
    "whole": lambda x: _whole(x).sum() ** 3 * _whole(x),
    "moved": lambda x: _moved(x) ** 3,
}


def _whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, sh.ShardedTensor) else x


def _moved(x: torch.Tensor) -> torch.Tensor:
    return x.clone().reshard(chunks(1, 2, 0, 1)) if isinstance(x, sh.ShardedTensor) else x


@pytest.mark.parametrize("how", TWICE)
def test_second_gradients(how: str) -> None:
    def second(x: Any) -> Any:
        (first,) = torch.autograd.grad(TWICE[how](x), x, SEED, create_graph=True)
        return torch.autograd.grad(first * first, x, torch.ones_like(SEED))[0]

    expected = second(values(5, 4))

    def program(name: str) -> bool:
        return torch.allclose(second(sharded(name)).full_tensor(), expected)

    holds_however_cut(program)


# ---- on ranks without shards


def test_a_copy_of_a_leaf_is_none_on_ranks_without_shards_either() -> None:
    def program() -> Any:
        x = sharded("one rank")
        y = x.clone()
        y.zero_()  # which is refused for leaves
        y.retain_grad()
        (y * 2).backward(SEED)
        return y.is_leaf, y.grad_fn is None, y.retains_grad, y.grad is None, x.grad is None

    assert on_ranks(program, 3) == [(False, False, True, False, False)] * 3


def test_a_deep_copy_has_a_gradient_of_its_own_on_ranks_without_shards_too() -> None:
    def program() -> Any:
        x = sharded("one rank")
        (x * 2).backward(SEED)
        other = copy.deepcopy(x)
        other.grad = None
        return other.is_leaf, other.grad is None, x.grad is None

    assert on_ranks(program, 3) == [(True, True, False)] * 3


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.copy_(SEED),
        lambda x: x.add_(1),
        lambda x: x.zero_(),
        lambda x: x.normal_(),
        lambda x: torch.mul(SEED, 2, out=x),
    ],
)
def test_a_leaf_is_not_written_to_on_any_rank(write: Callable[[Any], Any]) -> None:
    def program(name: str) -> bool:
        x = sharded(name)
        with pytest.raises(RuntimeError):
            write(x)
        return torch.equal(x, values(5, 4, grad=False))

    holds_however_cut(program)


# ---- backward, grad and hooks


@COUNTS
def test_backward_of_sharded_tensors(count: int) -> None:
    def run() -> None:
        for name, spec in all_specs(count).items():
            for seed in (Y.detach(), spec.shard(Y.detach()), chunks(1, 1, 0).shard(Y.detach())):
                tensor = spec.shard(X)
                (tensor**3).backward(seed)
                torch.testing.assert_close(
                    gradient(tensor), 3 * X.detach() ** 2 * Y.detach(), msg=name
                )
                if tensor.local_shards():
                    assert isinstance(tensor.grad, sh.ShardedTensor)

    on_ranks(run, count)


@COUNTS
def test_autograd_grad_of_sharded_tensors(count: int) -> None:
    def run() -> None:
        for name, spec in layouts(count).items():
            x, y = spec.shard(X), spec.shard(Y)
            first, second = torch.autograd.grad((x * x * y).sum(), [x, y], create_graph=True)
            torch.testing.assert_close(first.full_tensor(), 2 * X * Y, msg=name)
            torch.testing.assert_close(second.full_tensor(), X * X, msg=name)
            (again,) = torch.autograd.grad(first.sum(), x)
            torch.testing.assert_close(again.full_tensor(), 2 * Y.detach(), msg=name)
            assert torch.autograd.grad(x.sum(), [y], allow_unused=True) == (None,)

    on_ranks(run, count)


def test_hooks_are_handed_sharded_tensors() -> None:
    def run() -> None:
        tensor = chunks(0, 0, 1).shard(X)
        seen: list[Any] = []
        tensor.register_hook(lambda gradient: gradient * 2)
        tensor.register_post_accumulate_grad_hook(seen.append)
        double = tensor * 1
        double.retain_grad()
        assert double.retains_grad and double.grad_fn is not None and not double.is_leaf
        double.sum().backward()
        assert seen == [tensor]
        torch.testing.assert_close(gradient(tensor), torch.full((5, 4), 2.0, dtype=torch.float64))
        torch.testing.assert_close(double.grad.full_tensor(), torch.ones(5, 4, dtype=torch.float64))
        for spec in (odd(2)["bricks"], odd(2)["one rank"]):
            with pytest.raises(sh.ShardedTensorError, match="expected one shard on each rank"):
                spec.shard(X).register_hook(print)

    on_ranks(run, 2)


def test_a_result_is_a_scalar_or_needs_a_gradient() -> None:
    def run() -> None:
        with pytest.raises(RuntimeError, match="only for scalar outputs"):
            (chunks(0, 0, 1).shard(X) * 2).backward()
        one = boxes((1, [0], [1])).shard(torch.ones(1, requires_grad=True))
        (one * 3).backward()
        assert gradient(one).tolist() == [3.0]

    on_ranks(run, 2)
