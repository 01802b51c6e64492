"""Overhead of a call on a DTensor over the call on plain tensors, for ours and torch's DTensor.

One process, one thread, 8x8 tensors, the three kinds of tensor taking turns. torch's DTensor runs
on a fake process group of two ranks, ours on a mesh of one rank. So neither communicates; and ours
has no autograd node for the sum of a replicated weight's gradients, which several ranks would have
(torch leaves that sum pending). Overhead = time of the call - time of the plain call.
"""

import math
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

GOAL_ROW, GOAL_MEAN, GOAL_NEW_SHAPE = 0.35, 0.2, 0.1
ROUNDS = 9


class Kind:
    """Makes tensors of one kind: plain, ours, or torch's."""

    name = "plain"

    def split(self, tensor: torch.Tensor) -> Any:
        """Return the tensor, split along its first dim."""
        return tensor

    def whole(self, tensor: torch.Tensor) -> Any:
        """Return the tensor, replicated."""
        return tensor


class Ours(Kind):
    """Makes DTensors of shardwise."""

    name = "shardwise"

    def __init__(self) -> None:
        import shardwise as sw

        self.sw = sw
        self.mesh = sw.init_device_mesh("cpu", (1,))

    def split(self, tensor: torch.Tensor) -> Any:
        return self._made(tensor, [self.sw.Shard(0)])

    def whole(self, tensor: torch.Tensor) -> Any:
        return self._made(tensor, [self.sw.Replicate()])

    def _made(self, tensor: torch.Tensor, placements: Any) -> Any:
        made = self.sw.distribute_tensor(tensor.detach(), self.mesh, placements, src_data_rank=None)
        return made.requires_grad_(tensor.requires_grad)


class Theirs(Kind):
    """Makes DTensors of torch.distributed.tensor, on a fake process group."""

    name = "torch"

    def __init__(self) -> None:
        import torch.distributed as dist
        from torch.distributed import tensor
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
        self.tensor = tensor
        self.mesh = dist.init_device_mesh("cpu", (2,))

    def split(self, tensor: torch.Tensor) -> Any:
        return self._made(tensor, [self.tensor.Shard(0)])

    def whole(self, tensor: torch.Tensor) -> Any:
        return self._made(tensor, [self.tensor.Replicate()])

    def _made(self, tensor: torch.Tensor, placements: Any) -> Any:
        made = self.tensor.distribute_tensor(
            tensor.detach(), self.mesh, placements, src_data_rank=None
        )
        return made.requires_grad_(tensor.requires_grad)


Case = Callable[[Kind], Callable[[], Any]]


def _random(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape).requires_grad_(grad)


def add(kind: Kind) -> Callable[[], Any]:
    """Add two tensors that are split along dim 0."""
    x, y = kind.split(_random(8, 8)), kind.split(_random(8, 8))
    return lambda: x + y


def scale(kind: Kind) -> Callable[[], Any]:
    """Multiply by a Python number."""
    x = kind.split(_random(8, 8))
    return lambda: x * 2.0


def mm(kind: Kind) -> Callable[[], Any]:
    """Multiply a tensor that is split along dim 0 by a replicated one."""
    x, y = kind.split(_random(8, 8)), kind.whole(_random(8, 8))
    return lambda: torch.mm(x, y)


def view(kind: Kind) -> Callable[[], Any]:
    """Make a view that keeps the split dim."""
    x = kind.split(_random(8, 8))
    return lambda: x.view(8, 2, 4)


def add_replicated(kind: Kind) -> Callable[[], Any]:
    """Add a replicated tensor, which is sliced, to one that is split along dim 0."""
    x, y = kind.split(_random(8, 8)), kind.whole(_random(8, 8))
    return lambda: x + y


def linear(kind: Kind) -> Callable[[], Any]:
    """Call F.linear with a 3-d input."""
    x, w, b = kind.split(_random(8, 2, 8)), kind.whole(_random(8, 8)), kind.whole(_random(8))
    return lambda: F.linear(x, w, b)


def layer_norm(kind: Kind) -> Callable[[], Any]:
    """Call F.layer_norm with weight and bias."""
    x, w, b = kind.split(_random(8, 8)), kind.whole(_random(8)), kind.whole(_random(8))
    return lambda: F.layer_norm(x, (8,), w, b)


def softmax(kind: Kind) -> Callable[[], Any]:
    """Compute a softmax over a dim that is not split."""
    x = kind.split(_random(8, 8))
    return lambda: torch.softmax(x, -1)


def linear_gelu(kind: Kind) -> Callable[[], Any]:
    """Run linear and gelu forward, while gradients are recorded."""
    x, w, b = _trained(kind)
    return lambda: F.gelu(F.linear(x, w, b))


def linear_gelu_backward(kind: Kind) -> Callable[[], Any]:
    """Run linear and gelu forward and backward."""
    x, w, b = _trained(kind)
    seed = kind.split(torch.ones(8, 8))

    def run() -> None:
        F.gelu(F.linear(x, w, b)).backward(seed)
        w.grad = b.grad = x.grad = None

    return run


def _trained(kind: Kind) -> tuple[Any, Any, Any]:
    x = kind.split(_random(8, 8, grad=True))
    return x, kind.whole(_random(8, 8, grad=True)), kind.whole(_random(8, grad=True))


def _parameters(kind: Kind) -> list[Any]:
    parameters = [nn.Parameter(kind.split(_random(8, 8))) for _ in range(50)]
    for parameter in parameters:
        parameter.grad = kind.split(_random(8, 8))
    return parameters


def adamw_loop(kind: Kind) -> Callable[[], Any]:
    """Step 50 parameters, one by one."""
    return torch.optim.AdamW(_parameters(kind), foreach=False).step


def adamw_foreach(kind: Kind) -> Callable[[], Any]:
    """Step 50 parameters with the foreach functions."""
    return torch.optim.AdamW(_parameters(kind), foreach=True).step


def clip_grad_norm(kind: Kind) -> Callable[[], Any]:
    """Clip the gradients of 50 parameters."""
    parameters = _parameters(kind)
    return lambda: nn.utils.clip_grad_norm_(parameters, 1.0)


def new_shape(kind: Kind) -> Callable[[], Any]:
    """Add tensors of a new shape each time: each call is planned."""
    fresh = iter([kind.split(torch.randn(8 + at, 8)) for at in range(600)])

    def run() -> Any:
        x = next(fresh)
        return x + x

    return run


# name, case, calls per round, whether gradients are recorded
CASES: list[tuple[str, Case, int, bool]] = [
    ("add S0+S0", add, 2000, False),
    ("x * 2.0", scale, 2000, False),
    ("mm S0@R", mm, 2000, False),
    ("view keeping S0", view, 1000, False),
    ("add S0+R", add_replicated, 500, False),
    ("F.linear 3-d S0", linear, 1000, False),
    ("layer_norm", layer_norm, 1000, False),
    ("softmax", softmax, 1000, False),
    ("linear+gelu", linear_gelu, 500, True),
    ("linear+gelu forward+backward", linear_gelu_backward, 200, True),
    ("AdamW 50 params, loop", adamw_loop, 3, False),
    ("AdamW 50 params, foreach", adamw_foreach, 10, False),
    ("clip_grad_norm_ of 50", clip_grad_norm, 10, False),
    ("a new shape each call", new_shape, 50, False),
]


def measure(case: Case, kinds: list[Kind], calls: int, grad: bool) -> list[list[float]]:
    """Return the microseconds per call for each kind of tensor, a list with one item per round."""
    with torch.set_grad_enabled(grad or case in (adamw_loop, adamw_foreach, clip_grad_norm)):
        runs = [case(kind) for kind in kinds]
        for run in runs:
            for _ in range(max(2, calls // 20)):
                run()
        times: list[list[float]] = [[] for _ in kinds]
        for _ in range(ROUNDS):
            for at, run in enumerate(runs):
                start = time.perf_counter()
                for _ in range(calls):
                    run()
                times[at].append((time.perf_counter() - start) / calls * 1e6)
    return times


def main() -> None:
    """Measure, and print the table."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kinds = [Kind(), Ours(), Theirs()]
    print(f"{'microseconds, minimum (median)':<30} {'plain':>15} {'+ shardwise':>17} "
          f"{'+ torch DTensor':>19} {'ratio':>6}")  # fmt: skip
    ratios = []
    for name, case, calls, grad in CASES:
        plain, ours, theirs = measure(case, kinds, calls, grad)
        base = min(plain), median(plain)
        over = [(min(each) - base[0], median(each) - base[1]) for each in (ours, theirs)]
        ratio = over[0][0] / over[1][0]
        goal = GOAL_NEW_SHAPE if case is new_shape else GOAL_ROW
        ratios.append(max(ratio, 1e-3))
        print(f"{name:<30} {base[0]:7.1f} ({base[1]:5.1f}) {over[0][0]:8.1f} ({over[0][1]:6.1f}) "
              f"{over[1][0]:9.1f} ({over[1][1]:7.1f}) {ratio:6.2f} "
              f"{'met' if ratio <= goal else 'MISSED'} (goal {goal})", flush=True)  # fmt: skip
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    verdict = "met" if mean <= GOAL_MEAN else "MISSED"
    print(f"geometric mean of the ratios: {mean:.3f} (goal {GOAL_MEAN}: {verdict})")


if __name__ == "__main__":
    main()
