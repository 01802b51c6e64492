"""Operators on sharded tensors over real gloo ranks."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.sharded_tensors import chunks

import shardwise as sw
import shardwise.sharded as sh
from shardwise.sharded import methods


def told_the_group() -> list[Any]:
    @sh.custom_sharded_op_impl(torch.sinc)
    def told(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        total = args[0].local_tensor().sum()
        dist.all_reduce(total, group=process_group)
        return isinstance(process_group, dist.ProcessGroup), total.item()

    everyone = chunks(0, 3, 1, 0, 2).shard(torch.arange(8.0))
    halves = dist.new_group([0, 1]), dist.new_group([2, 3])
    first = dist.get_rank() // 2 * 2
    half = chunks(0, first + 1, first).shard(
        torch.ones(5) * first, process_group=halves[first // 2]
    )
    try:
        return [torch.sinc(everyone), torch.sinc(half)]
    finally:
        del methods._for_all[torch.sinc]  # these ranks run other tests too


def test_operators_of_users_are_handed_a_process_group(workers4: sw.Workers) -> None:
    results = workers4.run(told_the_group)
    assert results[:2] == [[(True, 28.0), (True, 0.0)]] * 2
    assert results[2:] == [[(True, 28.0), (True, 10.0)]] * 2


def trained() -> torch.Tensor:
    torch.manual_seed(0)
    table = chunks(0, 2, 0, 1, 3).shard(torch.randn(10, 4).requires_grad_())
    up = chunks(0, 0, 1, 2, 3).shard(torch.randn(8, 4).requires_grad_())
    down = chunks(1, 0, 1, 2, 3).shard(torch.randn(2, 8).requires_grad_())
    rows = F.embedding_bag(torch.tensor([[0, 9], [3, 3], [5, 1]]), table, mode="sum")
    F.linear(F.relu(F.linear(rows, up)), down).sum().backward()
    return torch.cat([each.grad.full_tensor().flatten() for each in (table, up, down)])


def test_a_lookup_and_both_halves_of_an_mlp_have_the_gradients_of_one_process(
    workers4: sw.Workers,
) -> None:
    torch.manual_seed(0)
    table, up, down = (torch.randn(*size).requires_grad_() for size in ((10, 4), (8, 4), (2, 8)))
    rows = F.embedding_bag(torch.tensor([[0, 9], [3, 3], [5, 1]]), table, mode="sum")
    F.linear(F.relu(F.linear(rows, up)), down).sum().backward()
    expected = torch.cat([each.grad.flatten() for each in (table, up, down)])
    for result in workers4.run(trained):
        torch.testing.assert_close(result, expected)


def own_rows() -> Any:
    """Look up rows of a large table by each rank's own indices; some ranks have none."""
    mesh = sw.init_device_mesh("cpu", (4,))
    table = chunks(0, 0, 1, 2, 3).shard(torch.arange(3e6).view(3000, 1000).requires_grad_())
    batch = sw.distribute_tensor(torch.arange(0, 2700, 3).view(3, 300), mesh, [sw.Shard(0)])
    events: list[sw.Event] = []
    with sw.listen(events.append):
        rows = F.embedding(batch, table)
    rows.square().sum().backward()
    wrong = torch.zeros(3, 300, dtype=torch.long)
    wrong[-1, -1] = 3000  # of one rank
    try:
        F.embedding(sw.distribute_tensor(wrong, mesh, [sw.Shard(0)]), table)
    except IndexError as error:
        refused = str(error)
    return [each.kind for each in events], rows.full_tensor(), table.grad.full_tensor(), refused


def test_ranks_ask_each_other_for_the_rows_of_their_own_indices(workers4: sw.Workers) -> None:
    table = torch.arange(3e6).view(3000, 1000).requires_grad_()
    expected = F.embedding(torch.arange(0, 2700, 3).view(3, 300), table)
    expected.square().sum().backward()
    results = workers4.run(own_rows)
    for kinds, rows, gradient, refused in results:
        assert kinds == ["all_to_all"] * 3
        torch.testing.assert_close(rows, expected.detach())
        torch.testing.assert_close(gradient, table.grad)
        assert refused == results[0][3] and "from 0 to 2999" in refused
