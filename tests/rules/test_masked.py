"""torch.masked is made of operators that have rules."""

import pytest
import torch

import shardwise as sw
from shardwise.testing import Sample, check_rule

VALUES = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
MASK = VALUES > -0.5


@pytest.mark.parametrize("name", ["sum", "amax", "mean", "std", "norm", "softmax", "cumsum"])
def test_masked_operators_split_where_the_plain_ones_do(name: str) -> None:
    def masked(input: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        order = {"ord": 2.0} if name == "norm" else {}
        made: torch.Tensor = getattr(torch.masked, name)(input, dim=1, mask=mask, **order)
        return made

    check_rule(masked, [Sample(VALUES.clone().requires_grad_(), MASK)], most=12, mesh_shapes=[(2,)])


def test_a_mask_may_be_smaller_and_no_bool() -> None:
    def masked(input: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.masked.sum(input, 1, mask=mask)

    check_rule(masked, [Sample(VALUES, MASK[1].long())], allow_missing=True, mesh_shapes=[(3,)])


def test_a_mask_of_too_many_dims_is_refused() -> None:
    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.distribute_tensor(VALUES, mesh, [sw.Shard(0)])
        with pytest.raises(IndexError, match="broadcastable mask"):
            torch.masked.sum(x, 1, mask=MASK[None])

    sw.simulate(run, 2)
