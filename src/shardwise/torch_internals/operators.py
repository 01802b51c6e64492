"""Private names of torch: operators, modules, optimizers, and programs made of them."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import fx, nn, optim

from shardwise.torch_internals.lookup import take as _take

# ---- operators

if TYPE_CHECKING:
    from torch._ops import HigherOrderOperator as HigherOrderOperator
    from torch._ops import OpOverload as OpOverload
    from torch._ops import OpOverloadPacket as OpOverloadPacket
else:
    HigherOrderOperator = _take("torch._ops.HigherOrderOperator", "operators that call functions")
    OpOverload = _take("torch._ops.OpOverload", "one overload of an operator")
    OpOverloadPacket = _take("torch._ops.OpOverloadPacket", "an operator with its overloads")

nn_builtins: Any = _take("torch._C._nn", "the functions of C below torch.nn.functional")
variable_functions: Any = _take(
    "torch._C._VariableFunctions", "the functions of C below torch's Python functions"
)
VF: Any = _take("torch._VF", "the same, where Python and C share a name: norm, stft")
functional_collectives: Any = _take(
    "torch.ops._c10d_functional", "the collectives that an exported program calls"
)


def functional_operators() -> Any:
    """Return the functional collectives by the names by which torch's CommDebugMode counts them.

    Importing the module defines them.
    """
    importlib.import_module("torch.distributed._functional_collectives")
    return torch.ops.c10d_functional


def schema_of(operator: Any) -> Any:
    """Return the signature of an operator's overload: its arguments and what it writes to."""
    return operator._schema


def operator_name(target: Any) -> str:
    """Return the name of an operator without namespace and overload; empty if it is none."""
    return getattr(target, "_opname", "")


def overload_name(target: Any) -> str:
    """Return the name of an overload; empty if the target is none."""
    return getattr(target, "_overloadname", "")


def overload_of_custom_operator(operator: Any) -> Any:
    """Return the overload that `torch.library.custom_op` made, or the operator as it is."""
    return getattr(operator, "_opoverload", operator)


# ---- modules and their functions

verify_batch_size: Any = _take(
    "torch.nn.functional._verify_batch_size", "refuses norms of one value per channel", "size"
)
verify_spatial_size: Any = _take(
    "torch.nn.functional._verify_spatial_size", "the same for instance norms", "size"
)
check_attention_shapes: Any = _take(
    "torch.nn.functional._mha_shape_check",
    "refuses shapes that do not fit; tells whether there is a batch dim",
    "query key value key_padding_mask attn_mask num_heads",
)
legacy_reduction: Any = _take(
    "torch.nn._reduction.legacy_get_string", "losses' arguments size_average and reduce"
)
fill_uniform: Any = _take("torch.nn.init._no_grad_uniform_", "what torch.nn.init fills with")
fill_normal: Any = _take("torch.nn.init._no_grad_normal_", "the same")
fill_constant: Any = _take("torch.nn.init._no_grad_fill_", "the same")
fan_of: Any = _take(
    "torch.nn.init._calculate_correct_fan", "the size that scales initial values", "tensor mode"
)


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return a module's own parameters by name, as the dict in which it keeps them."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return a module's own buffers by name, as the dict in which it keeps them."""
    return module._buffers


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return a module's children by name, shared ones several times."""
    return module._modules


def forward_pre_hooks(module: nn.Module) -> list[Any]:
    """Return the hooks that run before a module's forward, in order."""
    return list(module._forward_pre_hooks.values())


# ---- optimizers

foreach_types: list[list[type]] = [
    _take(path, "the types that optimizers and clip_grad_norm_ hand to torch._foreach_*")
    for path in (
        "torch.utils._foreach_utils._foreach_supported_types",
        "torch.optim.optimizer._foreach_supported_types",
    )
]


def hooks_of_optimizer(optimizer: optim.Optimizer, when: str) -> list[Any]:
    """Return an optimizer's hooks: `state_dict_pre`, `load_state_dict_post`, ..."""
    return list(getattr(optimizer, f"_optimizer_{when}_hooks").values())


# ---- exported programs

if TYPE_CHECKING:
    import torch.utils._pytree
    from torch._guards import TracingContext as TracingContext
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

    pytree = torch.utils._pytree
else:
    TracingContext = _take(
        "torch._guards.TracingContext", "holds the fake tensor mode while torch traces"
    )
    FakeTensorMode = _take("torch._subclasses.fake_tensor.FakeTensorMode", "tensors without data")
    pytree = _take("torch.utils._pytree", "nested arguments and results")
    TorchDispatchMode = _take(
        "torch.utils._python_dispatch.TorchDispatchMode", "sees every operator below autograd"
    )

without_dispatch_modes: Any = _take(
    "torch.utils._python_dispatch._disable_current_modes", "within, no mode sees operators"
)
tracing: Any = _take("torch._guards.tracing", "sets the context of a trace", "context")
enable_python_dispatcher: Any = _take(
    "torch._dispatch.python.enable_python_dispatcher", "kernels in Python, for dynamic sizes"
)
_take("torch.fx.Node._rename", "gives a node a name of ours")
_take("torch.fx.Interpreter._set_current_node", "notes the node that runs")


def guard_error() -> type[Exception]:
    """Return the error of a program that would hold for some sizes only.

    Imported late: its module takes long to import, and only programs with dynamic sizes need it.
    """
    return cast(
        type[Exception],
        importlib.import_module("torch.fx.experimental.symbolic_shapes")._ShapeEnvGuardError,
    )


def rename_node(node: fx.Node, name: str) -> None:
    """Give a node another name, made unique in its graph."""
    node._rename(name)


def current_node(interpreter: fx.Interpreter, node: fx.Node) -> AbstractContextManager[None]:
    """Return a context in which the interpreter runs this node."""
    return interpreter._set_current_node(node)


# ---- state of the process, which simulated ranks have one each of (comm/process_state)

_hooks_of_modules = "torch.nn.modules.module._global"
global_hooks: list[dict[int, Any]] = [
    *(
        _take(f"{_hooks_of_modules}_{kind}", "hooks of all modules, by their handles")
        for kind in (
            "buffer_registration_hooks",
            "module_registration_hooks",
            "parameter_registration_hooks",
            "backward_pre_hooks",
            "backward_hooks",
            "forward_pre_hooks",
            "forward_hooks",
            "forward_hooks_always_called",
            "forward_hooks_with_kwargs",
        )
    ),
    _take("torch.optim.optimizer._global_optimizer_pre_hooks", "hooks of all optimizers"),
    _take("torch.optim.optimizer._global_optimizer_post_hooks", "the same, after a step"),
]
