"""What is to be known of an operator before it is run on DTensors: may it be, and how."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from shardwise.errors import ShardwiseError
from shardwise.export.errors import ExportError
from shardwise.tensor import DTensor
from shardwise.torch_internals import HigherOrderOperator, schema_of

_TO_NUMBER = {torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default}


def check_operator(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse what the ranks of a program cannot do together."""
    if isinstance(target, HigherOrderOperator):
        raise ExportError(
            f"exported_program: {target} has graphs of its own, which are not supported; export "
            "without it: the branch that is taken by Python's if, loops and scans by Python's for"
        )
    if target in _TO_NUMBER:
        raise ExportError(
            f"exported_program: {target} makes a number of data, on which what follows may depend; "
            "such programs are not supported. Keep it a tensor"
        )


_NEEDS_DATA = re.compile(
    r"\bmeta\b|register_meta|value out of a tracing tensor|data-dependent", re.I
)


def needs_data(error: Exception) -> bool:
    """Whether something failed as tensors have no data while a program is recorded."""
    is_ours = isinstance(error, ShardwiseError)
    return not is_ours and _NEEDS_DATA.search(f"{type(error).__name__}: {error}") is not None


def data_refused(node: fx.Node, values: Sequence[Any]) -> ExportError:
    """The error for an operator that would have to see numbers, to know what ranks exchange."""
    lie = [repr(each._layout) for each in values if isinstance(each, DTensor)]
    return ExportError(
        f"exported_program: {node.name} ({node.target}) of {', '.join(lie) or 'these values'}: on "
        "dims that are split, what each rank does depends on numbers, which are not known while a "
        "program is made. Keep the dims that it picks from or writes to whole: by the plan for "
        "what the program holds, or by Activations for the module that it is in"
    )


def draws(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator is random: dropout is not, outside of training or of nothing."""
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    given = _by_name(target, args, kwargs)
    chance = given.get("dropout_p", given.get("dropout"))
    return given.get("train", given.get("training")) is not False and chance != 0


STATISTICS = ("running_mean", "running_var")
"""Arguments that norms write to although their schemas do not say so."""

_TRAINING: dict[Any, str] = {
    torch.ops.aten.batch_norm.default: "training",
    torch.ops.aten.native_batch_norm.default: "training",
    torch.ops.aten.cudnn_batch_norm.default: "training",
    torch.ops.aten.instance_norm.default: "use_input_stats",
}
"""These norms, and the arguments that say whether they do."""


def updates_statistics(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator is a norm that writes to running statistics."""
    flag = _TRAINING.get(target)
    if flag is None:
        return False
    given = _by_name(target, args, kwargs)
    return bool(given[flag]) and any(given[name] is not None for name in STATISTICS)


def _by_name(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an operator, with defaults."""
    arguments = schema_of(target).arguments
    given = {each.name: each.default_value for each in arguments if each.has_default_value()}
    given |= dict(zip((each.name for each in arguments), args, strict=False))
    return given | dict(kwargs)


def _group_norm(
    input: Any, weight: Any, bias: Any, n: int, c: int, space: int, groups: int, eps: float
) -> Any:
    return torch.group_norm(input, groups, weight, bias, eps)


# Statistics are whole on every rank, which costs collectives; the result alone may need none.
_WITHOUT_STATISTICS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.native_group_norm.default: _group_norm,
}


def first_alone(node: fx.Node) -> Callable[..., Any] | None:
    """What makes only the first result of a node, where no other is used; None if it is as dear."""
    made = _WITHOUT_STATISTICS.get(node.target)
    if made is None or any(
        user.target is not operator.getitem or user.args[1] != 0 for user in node.users
    ):
        return None
    return made
