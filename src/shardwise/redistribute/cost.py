"""What communication costs: a model with a latency and a bandwidth for every axis.

A step takes `start + peers * alpha + bytes * beta` seconds, with the busiest rank's figures and,
over several axes, the worst alpha and beta among them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shardwise.errors import ShardwiseError


class CostsError(ShardwiseError, ValueError):
    """A file of costs that cannot be read, or costs that cannot be."""


def _check_seconds(name: str, value: object) -> None:
    if not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise CostsError(f"{name}: expected seconds, 0 or more; got {value!r}")


@dataclass(frozen=True)
class AxisCost:
    """Seconds per message and seconds per byte along one axis."""

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            _check_seconds(name, value)


@dataclass(frozen=True)
class Costs:
    """The costs of all axes.

    Arguments:
        axes: by axis name; `shardwise calibrate` measures them.
        default: for the axes not named.
        start: seconds that any collective takes before its first byte.

    Without arguments: 5 us a message and 10 GB/s, as between hosts with accelerators.
    """

    axes: Mapping[str, AxisCost] = field(default_factory=dict)
    default: AxisCost = AxisCost(alpha=5e-6, beta=1e-10)
    start: float = 2e-5

    def __post_init__(self) -> None:
        _check_seconds("start", self.start)
        for name, cost in self.axes.items():
            if not isinstance(name, str) or not isinstance(cost, AxisCost):
                raise CostsError(
                    f"axes: expected such as {{'tp': AxisCost(...)}}, got {self.axes!r}"
                )
        object.__setattr__(self, "axes", MappingProxyType(dict(self.axes)))
        # A key of the cache of plans: hashed at every move.
        axes = tuple(sorted(self.axes.items(), key=str))
        object.__setattr__(self, "_hash", hash((axes, self.default, self.start)))

    def __reduce__(self) -> tuple[Any, ...]:
        return Costs, (dict(self.axes), self.default, self.start)

    def __hash__(self) -> int:
        return int(vars(self)["_hash"])

    def seconds(self, axes: Iterable[str], peers: int, bytes: int, collectives: int = 1) -> float:
        """The time of one step."""
        alpha, beta = self.default.alpha, self.default.beta
        if self.axes:
            costs = [self.axes.get(axis, self.default) for axis in axes] or [self.default]
            alpha = max(cost.alpha for cost in costs)
            beta = max(cost.beta for cost in costs)
        return collectives * self.start + peers * alpha + bytes * beta

    def least_seconds(self, bytes: int) -> float:
        """No plan that moves so many bytes to a rank takes less."""
        if not bytes:
            return 0.0
        costs = [self.default, *self.axes.values()]
        alpha = min(cost.alpha for cost in costs)
        return self.start + alpha + bytes * min(cost.beta for cost in costs)

    def save(self, path: str | Path) -> None:
        """Write the file that `load` reads."""
        axes = {name: asdict(cost) for name, cost in self.axes.items()}
        data = {"axes": axes, "default": asdict(self.default), "start": self.start}
        try:
            Path(path).write_text(json.dumps(data, indent=2) + "\n")
        except OSError as error:
            raise CostsError(f"costs: cannot write {str(path)!r}: {error}") from error

    @staticmethod
    def load(path: str | Path) -> Costs:
        """Read a file that `save` or `shardwise calibrate` wrote."""
        try:
            data = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise CostsError(f"costs: cannot read {str(path)!r}: {error}") from error
        try:
            axes = {name: AxisCost(**cost) for name, cost in data["axes"].items()}
            return Costs(axes, AxisCost(**data["default"]), data["start"])
        except (KeyError, TypeError, AttributeError, CostsError) as error:
            raise CostsError(
                f"costs: {str(path)!r} is not a file of costs ({type(error).__name__}: {error}); "
                "`shardwise calibrate` writes one"
            ) from error


DEFAULT = Costs()
LOOPBACK = Costs(default=AxisCost(alpha=5e-5, beta=1e-9), start=1e-4)
"""What gloo takes between processes of one host, in round numbers."""


def as_costs(costs: Costs | str | Path | None, device_type: str) -> Costs:
    """What `costs=` takes: nothing, costs, or the path of a file of them."""
    if costs is None:
        return LOOPBACK if device_type == "cpu" else DEFAULT
    if isinstance(costs, Costs):
        return costs
    if isinstance(costs, str | Path):
        path = Path(costs)
        stamp: Any = path.stat().st_mtime_ns if path.exists() else None
        return _load(str(path), stamp)
    raise CostsError(f"costs: expected Costs or a path, got {costs!r} ({type(costs).__name__})")


@lru_cache(maxsize=16)
def _load(path: str, stamp: object) -> Costs:
    return Costs.load(path)
