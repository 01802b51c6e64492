"""Every registered aten operator takes its arguments by keyword, in all forms of a call."""

from typing import Any

import pytest
import torch
from support.op_db.aten_calls import aten_calls
from torch.utils._pytree import tree_map_only

import shardwise as sw
from shardwise.dtensor.tensor import tensors_in
from shardwise.rules.registry import lookup
from shardwise.testing import distributed, value_difference

aten = torch.ops.aten


def in_rows(given: Any, mesh: sw.DeviceMesh) -> Any:
    """Return arguments with DTensors in place of tensors, split by rows."""

    def as_dtensor(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout != torch.strided:
            return tensor
        placement = sw.Shard(0) if tensor.dim() else sw.Replicate()
        return distributed(
            tensor, sw.Layout.from_placements(mesh, tensor.shape, [placement])
        ).detach()

    return tree_map_only(torch.Tensor, as_dtensor, given)


def outcome(function: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return layouts and values, or the kind of the error."""
    torch.manual_seed(0)
    try:
        made = function(*args, **kwargs)
    except Exception as error:
        return [type(error)]
    return [
        (each.mesh_layout, each.full_tensor()) if isinstance(each, sw.DTensor) else (None, each)
        for each in tensors_in(made)
    ]


def names_of(function: Any, overload: Any) -> list[str]:
    names = [each.name for each in overload._schema.arguments]
    if function in (overload, overload.overloadpacket):
        return names
    return ["input" if name == "self" else name for name in names]


def is_called_by(function: Any, names: list[str], args: Any, kwargs: Any) -> bool:
    """Return whether torch itself takes these names."""
    given = dict(zip(names, args, strict=False)) | kwargs
    try:
        function(**tree_map_only(torch.Tensor, torch.clone, given))
    except Exception:
        return False
    return True


def difference(overload: Any) -> str:
    """Describe how a call by keywords differs from the call by position."""
    args, kwargs = aten_calls()[overload]
    packet = overload.overloadpacket
    for function in (overload, packet, getattr(torch, packet.__name__, None)):
        names = names_of(function, overload)
        if function is None or not is_called_by(function, names, args, kwargs):
            continue

        def run(function: Any = function, names: list[str] = names) -> str:
            mesh = sw.init_device_mesh("cpu", (2,))
            given, options = in_rows((args, kwargs), mesh)
            by_position = outcome(function, given, options)
            given, options = in_rows((args, kwargs), mesh)
            by_keyword = outcome(function, (), dict(zip(names, given, strict=False)) | options)
            return described(by_position, by_keyword)

        found = next(filter(None, sw.simulate(run, 2)), "")
        if found:
            return f"{function}: {found}"
    return ""


def described(by_position: list[Any], by_keyword: list[Any]) -> str:
    for first, second in zip(by_position, by_keyword, strict=True):
        if isinstance(first, type) or isinstance(second, type):
            if first is not second:
                return f"{first} by position, {second} by keyword"
        elif first[0] is not second[0]:
            return f"{first[0]} by position, {second[0]} by keyword"
        else:
            apart = value_difference(first[1], second[1])
            if apart:
                return apart
    return ""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_registered_overload_takes_keywords():
    tried = [each for each in aten_calls() if lookup(each) is not None]
    assert len(tried) > 400
    unfilled = {aten.empty_like, aten.new_empty, aten.new_empty_strided, aten.empty_strided}
    found = [difference(each) for each in tried if each.overloadpacket not in unfilled]
    assert not list(filter(None, found))


X = torch.linspace(-1, 1, 6, dtype=torch.float64)


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        (aten.native_dropout_backward, {"grad_output": X, "mask": X > 0, "scale": 2.0}),
        (aten.threshold_backward, {"grad_output": X, "self": X, "threshold": 0.0}),
        (aten.gelu_backward, {"grad_output": X, "self": X, "approximate": "tanh"}),
        (aten.gelu_backward, {"self": X, "grad_output": X}),
        (aten.tanh_backward, {"output": X, "grad_output": X}),
        (aten.sigmoid_backward, {"grad_output": X, "output": X}),
        (
            aten.elu_backward,
            {
                "grad_output": X,
                "alpha": 1.0,
                "scale": 2.0,
                "input_scale": 1.0,
                "is_result": False,
                "self_or_result": X,
            },
        ),
        (aten.where, {"condition": X > 0, "self": X, "other": -X}),
        (aten.zeros_like, {"self": X}),
        (torch.zero_, {"input": X}),
        (torch.repeat_interleave, {"repeats": torch.tensor([1, 0, 2])}),
    ],
)
def test_operators_and_their_overloads_take_keywords_in_any_order(operator, arguments):
    overloads = [getattr(operator, each) for each in getattr(operator, "overloads", list)()]
    forms = [operator, *(each for each in overloads if is_called_by(each, [], (), arguments))]
    expected = operator(**tree_map_only(torch.Tensor, torch.clone, arguments))

    def run() -> list[torch.Tensor]:
        given = in_rows(arguments, sw.init_device_mesh("cpu", (4,)))
        return [form(**given).full_tensor() for form in forms]

    for made in sw.simulate(run, 4):
        for each in made:
            torch.testing.assert_close(each, expected)
