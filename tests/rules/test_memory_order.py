"""Whether an operator copies is that of the global tensor, also where a shard has one row."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.dtensor.local_shards import is_globally_contiguous, is_globally_viewable

ROUTES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": lambda x: x.t().contiguous(),
    "flattened": lambda x: x.flatten(),
    "transposed and flattened": lambda x: x.t().flatten(),
    "transposed and raveled": lambda x: x.t().ravel(),
    "transposed and reshaped": lambda x: x.t().reshape(2, 2, -1),
    "permuted": lambda x: x.view(-1, 2, 2).permute(2, 0, 1).reshape(2, -1),
    "transposed twice": lambda x: x.t().t().contiguous(),
    "channels last": lambda x: x[None, :, :, None].contiguous(memory_format=torch.channels_last),
}
OF_COLUMNS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "columns": lambda x: x[:, :2].contiguous(),
    "columns, flattened": lambda x: x[:, :2].flatten(),
}
CASES = [
    *((route, placement) for route in ROUTES for placement in (Shard(0), Shard(1), Replicate())),
    *((route, placement) for route in OF_COLUMNS for placement in (Shard(0), Replicate())),
]


@pytest.mark.parametrize(("name", "placement"), CASES)
@pytest.mark.parametrize("rows", [4, 5, 7])
def test_a_result_that_is_written_to_changes_its_origin_as_in_one_process(
    name: str, rows: int, placement: sw.Placement
) -> None:
    whole = torch.arange(rows * 4.0).view(rows, 4)

    def written(x: torch.Tensor) -> torch.Tensor:
        {**ROUTES, **OF_COLUMNS}[name](x).add_(100)
        return x

    expected = written(whole.clone())

    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (4,))
        try:
            found = written(sw.distribute_tensor(whole, mesh, [placement])).full_tensor()
        except sw.ShardwiseError:
            return  # a copy that would have to be a view
        assert torch.equal(found, expected)

    sw.simulate(run, 4)


@pytest.mark.parametrize("rows", [4, 5, 8])
def test_strides_and_contiguity_are_those_of_one_process(rows: int) -> None:
    whole = torch.zeros(rows, 4)

    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (4,))
        for placement in (Shard(0), Shard(1)):
            x = sw.distribute_tensor(whole, mesh, [placement])
            for made in (lambda x: x, lambda x: x.t(), lambda x: x.t().t()):
                expected, found = made(whole), made(x)
                if found.to_local().numel():  # an empty shard has no order
                    assert found.is_contiguous() == expected.is_contiguous()
                    assert found.stride() == expected.stride()

    sw.simulate(run, 4)


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_contiguous_has_the_order_that_was_asked_for_also_where_a_shard_has_one_row(
    format: torch.memory_format,
) -> None:
    """One row of each shard is in either order; the copies are of the order of the global one."""
    whole = torch.arange(4.0 * 2 * 3 * 3).view(4, 2, 3, 3)

    def made(x: torch.Tensor) -> torch.Tensor:
        return x.permute(1, 0, 2, 3).contiguous(memory_format=format)

    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (4,))
        found = made(sw.distribute_tensor(whole, mesh, [Shard(0)]))
        assert found.stride() == made(whole).stride()
        assert found.is_contiguous(memory_format=format)
        assert torch.equal(found.full_tensor(), made(whole))

    sw.simulate(run, 4)


@settings(max_examples=300)
@given(st.data())
def test_views_of_a_stored_tensor_are_those_that_torch_finds(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4))
    order = data.draw(st.permutations(range(len(shape))))
    x = torch.zeros([shape[dim] + 1 for dim in order])
    x = x[tuple(slice(data.draw(st.sampled_from([shape[dim], shape[dim] + 1]))) for dim in order)]
    x = x.permute([list(order).index(dim) for dim in range(len(shape))])
    factors = [2] * sum(n // 2 for n in x.shape if n in (2, 4)) + [n for n in x.shape if n % 2]
    target = []
    for factor in data.draw(st.permutations(factors)) if factors else []:
        if target and data.draw(st.booleans()):
            target[-1] *= factor
        else:
            target.append(factor)
    if torch.Size(target).numel() != x.numel():
        return
    layout = sw.Layout(sw.DeviceMesh.abstract((2,)), x.shape)
    try:
        x.view(target)
        is_view = True
    except RuntimeError:
        is_view = False
    assert is_globally_viewable(x, layout, target) == is_view
    assert is_globally_contiguous(x, layout) == x.is_contiguous()
