"""torch.nn.init: the functions that call `__torch_function__` of their tensor.

The other functions of torch.nn.init are composed of operators that have rules.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch.nn import init

from shardwise.rules.registry import handler
from shardwise.torch_internals import fan_of, fill_constant, fill_normal, fill_uniform


@handler(init.uniform_)
def uniform_(func: Any, args: Any, kwargs: Any) -> Any:
    """Fill with uniform numbers in [a, b)."""
    return fill_uniform(*args, **kwargs)


@handler(init.normal_)
def normal_(func: Any, args: Any, kwargs: Any) -> Any:
    """Fill with normally distributed numbers."""
    return fill_normal(*args, **kwargs)


@handler(init.constant_)
def constant_(func: Any, args: Any, kwargs: Any) -> Any:
    """Fill with one value."""
    return fill_constant(*args, **kwargs)


@handler(init.kaiming_uniform_)
def kaiming_uniform_(func: Any, args: Any, kwargs: Any) -> Any:
    """Fill with uniform numbers whose bound follows from the global fan."""

    def initialized(
        tensor: Any,
        a: float = 0,
        mode: Any = "fan_in",
        nonlinearity: Any = "leaky_relu",
        generator: Any = None,
    ) -> Any:
        if 0 in tensor.shape:
            warnings.warn("Initializing zero-element tensors is a no-op", stacklevel=5)
            return tensor
        fan = fan_of(tensor, mode)
        bound = init.calculate_gain(nonlinearity, a) * math.sqrt(3 / fan)
        with torch.no_grad():
            return tensor.uniform_(-bound, bound, generator=generator)

    return initialized(*args, **kwargs)
