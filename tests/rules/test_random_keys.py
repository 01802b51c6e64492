"""Random keys, layouts and values: reading and writing by index agree with the plain tensors."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from shardwise import init_device_mesh, simulate
from shardwise.testing import distributed, layouts_of

Random = random.Random


def random_item(chance: Random, size: int, common: tuple[int, ...]) -> Any:
    """An int, a slice, a list, a tensor or a mask, for a dim of this size."""
    match chance.choice(("int", "slice", "all", "list", "tensor", "tensor", "mask")):
        case "int":
            return chance.randrange(-size, size)
        case "slice":
            stop = chance.choice([None, size, -1, 2, 9])
            return slice(chance.choice([None, 0, 1, -2]), stop, chance.choice([None, 1, 2, 3]))
        case "all":
            return slice(None)
        case "list":
            return [chance.randrange(size) for _ in range(common[-1])]
        case "tensor":
            shape = [chance.choice((each, each, 1)) for each in common]
            return torch.tensor(
                [chance.randrange(-size, size) for _ in range(torch.Size(shape).numel())]
            ).reshape(shape)
        case _:
            return torch.tensor([chance.random() < 0.6 for _ in range(size)])


def random_key(chance: Random, shape: tuple[int, ...]) -> Any:
    common = chance.choice([(2,), (3,), (2, 3), (1,)])
    dims = shape[: chance.randrange(len(shape) + 1)]
    items = [random_item(chance, size, common) for size in dims]
    for extra in (None, ...):
        if chance.random() < 0.3:
            items.insert(chance.randrange(len(items) + 1), extra)
    return items[0] if len(items) == 1 else tuple(items)


def spread(chance: Random, tensor: torch.Tensor, mesh: Any) -> torch.Tensor:
    return distributed(tensor, chance.choice(layouts_of(tensor, mesh)))


def spread_key(chance: Random, key: Any, mesh: Any) -> Any:
    """The key, with some of its tensors as DTensors."""
    if isinstance(key, tuple):
        return tuple(spread_key(chance, item, mesh) for item in key)
    if isinstance(key, torch.Tensor) and chance.random() < 0.5:
        return spread(chance, key, mesh)
    return key


def leaf(chance: Random, shape: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(chance.randrange(10**6))
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def written_shape(chance: Random, shape: list[int]) -> list[int]:
    """The shape of a value that broadcasts."""
    return chance.choice([shape, shape, shape[1:], [1] * len(shape), [], [1, *shape]])


def check_one(chance: Random, mesh: Any) -> None:
    shape = tuple(chance.choice([1, 2, 3, 5]) for _ in range(chance.choice([1, 2, 3])))
    x, key = leaf(chance, shape), random_key(chance, shape)
    try:
        places = torch.arange(x.numel()).reshape(shape)[key]
    except IndexError:
        return  # what an Ellipsis moved does not fit there
    split, split_key = spread(chance, x, mesh), spread_key(chance, key, mesh)
    pairs = [(x, split)]
    want, got = x * 2, split * 2
    # Which of two values wins that are written to one place is not defined.
    if chance.random() < 0.5 and places.unique().numel() == places.numel():
        value = leaf(chance, written_shape(chance, list(places.shape)))
        pairs.append((value, spread(chance, value, mesh)))
        want[key], got[split_key] = value, pairs[1][1]
    else:
        want, got = want[key], got[split_key]
    full = got.full_tensor()
    torch.testing.assert_close(full, want)
    weights = leaf(chance, want.shape).detach()
    (full * weights).sum().backward()
    (want * weights).sum().backward()
    for plain, other in pairs:
        torch.testing.assert_close(other.grad.full_tensor(), plain.grad)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2)])
def test_random_keys(mesh_shape: tuple[int, ...], seed: int) -> None:
    def main() -> None:
        mesh = init_device_mesh("cpu", mesh_shape)
        chance = Random(f"{seed} {mesh_shape}")
        for _ in range(15):
            check_one(chance, mesh)

    simulate(main, torch.Size(mesh_shape).numel())
