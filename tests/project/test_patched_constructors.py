"""Functions of torch that shardwise replaces are torch's for everything but DTensors."""

import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import shardwise as sw  # noqa: F401 (replaces them)

CONSTRUCTORS: dict[str, Callable[[], torch.Tensor]] = {
    "tensor": lambda: torch.tensor([1.0]),
    "as_tensor": lambda: torch.as_tensor([1.0]),
    "asarray": lambda: torch.asarray([1.0]),
    "full": lambda: torch.full((2,), 1.0),
    "arange": lambda: torch.arange(3),
    "scalar_tensor": lambda: torch.scalar_tensor(1.0),
    "sparse_coo_tensor": lambda: torch.sparse_coo_tensor(
        [[0]], [1.0], (2,), check_invariants=False
    ),
}


class Seen(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_a_mode_sees_the_function_that_the_name_stands_for(name: str) -> None:
    with Seen() as outer, Seen() as inner:
        CONSTRUCTORS[name]()
    for seen in (outer, inner):
        assert seen.functions[0] is getattr(torch, name)


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_the_default_device_applies_to_them(name: str) -> None:
    with torch.device("meta"):
        assert CONSTRUCTORS[name]().device.type == "meta"


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_they_are_pickled_by_name(name: str) -> None:
    function = getattr(torch, name)
    assert pickle.loads(pickle.dumps(function)) is function


def _scripted(a: torch.Tensor) -> torch.Tensor:
    made = torch.tensor(1.0) + torch.full([2], 3.0) + torch.arange(2) + torch.as_tensor(2.0)
    return a + made + torch.scalar_tensor(2.0) + a.new_full([2], 1.0)


def test_torch_script_knows_them() -> None:
    a = torch.ones(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit.script is deprecated
        scripted = torch.jit.script(_scripted)
    assert torch.equal(scripted(a), _scripted(a))


class Tagged(torch.Tensor):
    """A subclass of somebody else, with arguments of its own."""

    def __new__(cls, data: Any, tag: str) -> "Tagged":
        return super().__new__(cls, data)

    def __init__(self, data: Any, tag: str) -> None:
        self.tag = tag


def test_constructors_of_classes_are_as_before() -> None:
    assert torch.Tensor([1.0, 2.0]).tolist() == [1.0, 2.0]
    assert torch.Tensor(2, 3).shape == (2, 3)
    assert torch.Tensor().shape == (0,)
    tagged = Tagged([1.0], "mine")
    assert type(tagged) is Tagged and tagged.tag == "mine" and (tagged + 1).tolist() == [2.0]
    assert type(tagged.new_tensor([1.0])) is Tagged
    assert type(nn.Parameter(torch.ones(2))) is nn.Parameter
    plain = torch.ones(2)
    assert plain.new_tensor([1]).dtype is torch.float32
    assert plain.new_full((2,), 3.0).tolist() == [3.0, 3.0]
    assert torch.empty(0).set_(plain).data_ptr() == plain.data_ptr()


COMPILED = """
import sys, torch
if "before" in sys.argv:  # the compiler looks at torch's functions first
    torch.compile(lambda a: a + torch.tensor(1.0), backend="eager")(torch.ones(2))
import shardwise
functions = [
    lambda a: a + torch.tensor(1.0),
    lambda a: torch.tensor([1.0, 2.0], dtype=torch.float64) + a,
    lambda a: torch.as_tensor(a, dtype=torch.float64),
    lambda a: a.new_tensor([1.0, 2.0]) + a.new_full((2,), 3.0),
    lambda a: torch.full(a.shape, 1.5) + torch.arange(a.shape[0]) + torch.scalar_tensor(2.0),
]
for function in functions:
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), function(torch.ones(2)))
print("compiled")
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_the_compiler_knows_them(when: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", COMPILED, when]
    run = subprocess.run(command, capture_output=True, check=False, text=True)
    assert run.stdout == "compiled\n", run.stderr
