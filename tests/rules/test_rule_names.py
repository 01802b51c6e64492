"""A rule is found by a function's name: two operators of one short name never share a rule.

torch.polar makes complex numbers, torch.linalg.polar (2.14) decomposes matrices. What a later torch
brings under a name that has a rule is found here, by its name.
"""

import itertools
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise.rules import registry
from shardwise.rules.registry import Aten, RuleError, functions_named, lookup, rule

MODULES = {
    "torch": torch,
    "Tensor": torch.Tensor,
    "F": F,
    "_nn": torch._C._nn,
    "special": torch.special,
    "linalg": torch.linalg,
    "fft": torch.fft,
}

_SPECIAL = """digamma erf erfc erfinv exp2 expm1 i0 log1p log_softmax logit logsumexp polygamma
    round sinc softmax xlogy"""

SAME = {
    # Written in Python around the other, or around the same operator.
    ("torch", "Tensor"): """cholesky istft norm qr split stft unflatten unique
        unique_consecutive""",
    ("torch", "F"): """alpha_dropout dropout feature_alpha_dropout layer_norm max_pool1d
        max_pool1d_with_indices max_pool2d max_pool3d rms_norm rrelu sigmoid tanh""",
    ("Tensor", "F"): "sigmoid tanh",
    ("F", "_nn"): """adaptive_avg_pool2d adaptive_avg_pool3d glu max_pool2d_with_indices
        max_pool3d_with_indices pad""",
    # Aliases, as torch's documentation says.
    ("torch", "special"): _SPECIAL,
    ("Tensor", "special"): _SPECIAL,
    ("torch", "linalg"): "matmul",
    ("Tensor", "linalg"): "matmul",
}
"""Functions of one short name that share a rule, for they are one operator, with one signature."""

NOT_IN_ATEN = """
    __dlpack_device__ __invert__ _is_view _typed_storage apply_ bfloat16 bool byte cdouble
    cfloat char const_data_ptr cross_entropy data_ptr dim_order double float gaussian_nll_loss
    half int is_shared logsigmoid long map2_ map_ new new_tensor share_memory_ short softsign
    storage storage_type tanhshrink tolist type unique untyped_storage"""
"""Names with a rule that aten does not have: should it come to have one, is that the same?"""

REMOVED_FROM_ATEN = {"cholesky", "qr"}  # in torch 2.14


def is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, type | types.ModuleType)


def namesakes() -> Iterator[tuple[str, str, str]]:
    """A short name, and two modules that have different functions of it."""
    for name in sorted({name for module in MODULES.values() for name in dir(module)}):
        if name.startswith("__"):
            continue
        found: dict[str, Any] = {}
        for module, holder in MODULES.items():
            function = getattr(holder, name, None)
            if is_function(function) and not any(function is each for each in found.values()):
                found[module] = function
        for first, second in itertools.combinations(found, 2):
            in_python = any(isinstance(found[each], types.FunctionType) for each in (first, second))
            # torch generates a function and a method of C from one operator.
            if (first, second) != ("torch", "Tensor") or in_python:
                yield name, first, second


def share_a_rule(name: str, first: str, second: str) -> bool:
    known = [lookup(getattr(MODULES[each], name)) for each in (first, second)]
    one, other = (each and (each.rule or each.handler) for each in known)
    return one is not None and one is other


def test_namesakes_share_a_rule_only_if_they_are_one_operator():
    same = {(name, *modules) for modules, names in SAME.items() for name in names.split()}
    unknown = [each for each in namesakes() if share_a_rule(*each) and each not in same]
    assert not unknown, (
        f"torch {torch.__version__} has functions of one name that share a rule: {unknown}. Are "
        "they one operator, with one signature? If so list them in SAME, else register their rules "
        "for the functions themselves"
    )


def test_namesakes_that_are_seen_to_share_a_rule_are_complained_of(monkeypatch):
    def abs(input, by):  # not torch.abs
        return input * by

    monkeypatch.setattr(F, "abs", abs, raising=False)
    assert ("abs", "torch", "F") in list(namesakes())
    assert not share_a_rule("abs", "torch", "F")
    monkeypatch.setitem(registry._table, abs, lookup(torch.abs))
    with pytest.raises(AssertionError, match=r"\('abs', 'torch', 'F'\)"):
        test_namesakes_share_a_rule_only_if_they_are_one_operator()


def test_aten_has_no_operator_of_a_name_that_was_not_its_own():
    missing = {name for name in registry._aten if not hasattr(torch.ops.aten, name)}
    unknown = set(NOT_IN_ATEN.split())
    came = unknown - missing
    assert not came, f"aten {torch.__version__} now has {came}: are these what the rules are of?"
    assert missing - unknown <= REMOVED_FROM_ATEN


@pytest.mark.parametrize("namespace", ["special", "linalg", "fft"])
def test_a_short_name_does_not_stand_for_what_another_module_calls_so(monkeypatch, namespace):
    def sin(A):
        return A

    monkeypatch.setattr(MODULES[namespace], "sin", sin, raising=False)
    assert functions_named("sin") == [torch.sin, torch.Tensor.sin, Aten("sin")]
    assert functions_named(f"{namespace}.sin") == [sin, Aten(f"{namespace}_sin")]


def test_a_rule_for_a_qualified_name_is_for_no_other(monkeypatch):
    for table in ("_table", "_aten"):
        monkeypatch.setattr(registry, table, {})
    registered = rule("linalg.cross")(lambda *args, **kwargs: None)
    for known in (torch.linalg.cross, torch.ops.aten.linalg_cross.default):
        assert lookup(known).rule is registered
        assert lookup(known).name == "linalg_cross"
    for other in (torch.cross, torch.Tensor.cross, torch.ops.aten.cross.default):
        assert lookup(other) is None


def test_a_name_that_torch_lacks_is_an_error():
    for name in ("no_such_function", "linalg.exp", "special.qr", "sparse.mm"):
        with pytest.raises(RuleError, match=f"torch has no function named '{name}'"):
            rule(name)(lambda *args: None)


def test_polar_of_numbers_and_polar_of_matrices_have_rules_of_their_own():
    if not hasattr(torch.linalg, "polar"):  # before torch 2.14
        assert lookup(torch.polar).name == "polar"
        return
    assert lookup(torch.linalg.polar).rule is not lookup(torch.polar).rule
    aten = torch.ops.aten
    assert lookup(aten.linalg_polar.default).rule is lookup(torch.linalg.polar).rule
    assert lookup(aten.polar.default).rule is lookup(torch.polar).rule
