"""Every private name of torch that shardwise uses, in one place.

No other module reads an underscored name of torch: `tests/project/test_torch_internals.py` checks
it.
Three kinds of names need not be listed here: aten's underscored operators (`torch._foreach_add_`),
methods of torch's classes that ours override, and torch's own DTensor in `interop`.

Each name is taken by its path, with its purpose, when shardwise is imported. If any is missing or
has other parameters than expected, the import fails with all of them in one ImportError, before
anything in torch is changed. `report()` lists them for `shardwise doctor --self-test`. All look
alike in torch 2.13, 2.14 and 2.15 unless the purpose says otherwise.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed.rpc
from torch import fx, nn, optim

from shardwise.torch_internals.lookup import Internal as Internal
from shardwise.torch_internals.lookup import check_internals
from shardwise.torch_internals.lookup import getter as _getter
from shardwise.torch_internals.lookup import report as report
from shardwise.torch_internals.lookup import take as _take

# ---- tensors: the shard below a DTensor

TensorBase: Any = _take(
    "torch._C.TensorBase", "the C class of tensors: its properties are those of the shard"
)
as_local: Any = _take("torch._C.DisableTorchFunctionSubclass", "within, torch functions see shards")
without_torch_function: Any = _take(
    "torch._C.DisableTorchFunction", "within, no mode and no subclass sees a call"
)
locally: Any = _take(
    "torch._C._disabled_torch_function_impl",
    "`locally(function, (), arguments)` is `with as_local(): function(*arguments)`, and faster",
)
is_torch_function_enabled: Callable[[], bool] = _take(
    "torch._C._is_torch_function_enabled", "false within `as_local()`"
)
is_torch_function_mode_enabled: Callable[[], bool] = _take(
    "torch._C._is_torch_function_mode_enabled", "whether a mode sees calls of torch functions"
)
base_of: Callable[[torch.Tensor], Any] = _getter(
    "torch._C.TensorBase._base", "the tensor that a view was taken of"
)
version_of: Callable[[torch.Tensor], int] = _getter(
    "torch._C.TensorBase._version", "how often the memory was written to"
)
backward_hooks_of: Callable[[torch.Tensor], Any] = _getter(
    "torch._C.TensorBase._backward_hooks", "the hooks of a tensor; None if it has none"
)
post_accumulate_hooks_of: Callable[[torch.Tensor], Any] = _getter(
    "torch._C.TensorBase._post_accumulate_grad_hooks",
    "the same for hooks that run after accumulation",
)
HOOK_ATTRIBUTES = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""The attributes to copy to a tensor that takes another's place."""
PARAMETER_FLAG = "_is_param"
"""The attribute by which `isinstance(x, nn.Parameter)` recognizes a parameter of a subclass."""


def has_own_grad_dtype(parameter: Any) -> bool:
    """Tell whether a `grad_dtype` was set on a parameter.

    Before torch 2.15, False also for a `grad_dtype` that is the parameter's own dtype.
    """
    is_set = getattr(parameter, "_has_grad_dtype_override", None)
    return parameter.grad_dtype is not parameter.dtype if is_set is None else bool(is_set)


make_wrapper_subclass: Any = _take(
    "torch.Tensor._make_wrapper_subclass", "a tensor with a size and no memory"
)
is_zero_tensor: Callable[[torch.Tensor], bool] = _take(
    "torch.Tensor._is_zerotensor", "whether autograd represents zeros without memory"
)
_storage_use_count: Any = _take(
    "torch._C._storage_Use_Count", "the number of tensors that hold a memory"
)
_take("torch.UntypedStorage._cdata", "the address of a storage's C object, its identity")
dtypes_without_typed_storage: Any = _take(
    "torch.storage._new_dtypes", "the dtypes that a typed storage cannot pickle"
)


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return a number that two storages share only if they are one memory."""
    return cast(int, storage._cdata)


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """Return the number of tensors and storages in C++ that hold this memory."""
    return cast(int, _storage_use_count(storage._cdata))


# ---- autograd

_is_key_excluded: Callable[[Any], bool] = _take(
    "torch._C._dispatch_tls_is_dispatch_key_excluded", "whether C++ calls us below autograd"
)
_AUTOGRAD: Any = _take("torch._C.DispatchKey.AutogradFunctionality", "the key asked for")
current_graph_task: Callable[[], int] = _take(
    "torch._C._current_graph_task_id", "the number of the running backward; -1 outside of one"
)
current_autograd_node: Callable[[], Any] = _take(
    "torch._C._current_autograd_node", "the node of the graph whose backward runs; None outside"
)
next_sequence_number: Callable[[], int] = _take(
    "torch._C._autograd._get_sequence_nr", "the number of the next node of the graph"
)
top_saved_tensors_hooks: Any = _take(
    "torch._C._autograd._top_saved_tensors_default_hooks", "the current hooks for saved tensors"
)
engine: Any = _take(
    "torch.autograd.variable.Variable._execution_engine", "calls back at the end of a backward"
)
preserve_version_counter: Callable[[Any], AbstractContextManager[None]] = _take(
    "torch.autograd.grad_mode._unsafe_preserve_version_counter",
    "writes that do not change versions",
    "tensors",
)


def is_autograd_excluded() -> bool:
    """Tell whether the call comes from C++ below autograd."""
    return _is_key_excluded(_AUTOGRAD)


def sequence_number(node: Any) -> int:
    """Return the number of a node of the graph, in the order in which nodes were made."""
    return cast(int, node._sequence_nr())


def backward_node(function: type[torch.autograd.Function]) -> type:
    """Return the class of the nodes that an autograd function puts into the graph."""
    return cast(type, cast(Any, function)._backward_cls)


# ---- custom autograd functions of torch that DTensors may enter (torch_patches, dispatch)

CheckpointFunction: Any = _take(
    "torch.utils.checkpoint.CheckpointFunction", "reentrant checkpointing: hands tensors through"
)
BackwardHookFunction: Any = _take(
    "torch.nn.modules._functions.BackwardHookFunction",
    "backward hooks of modules: hands tensors through",
)
Dirichlet: Any = _take("torch.distributions.dirichlet._Dirichlet", "samples of Dirichlet and Beta")

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


# ---- process groups

_c10d = "torch.distributed.distributed_c10d"
_take(f"{_c10d}._world", "the process groups by what they are")
default_group: Any = _take(f"{_c10d}._get_default_group", "all ranks; an error before the start")
new_process_group: Any = _take(
    f"{_c10d}._new_process_group_helper",
    "makes a group under a name of ours, by its members only",
    "group_size group_rank global_ranks_in_group backend store group_name backend_options timeout "
    "group_desc",
)
root_of_torch_mesh: Any = _take(
    "torch.distributed.device_mesh.DeviceMesh._get_root_mesh", "what a mesh of torch was cut from"
)
device_for_objects: Any = _take(
    f"{_c10d}._get_object_coll_device", "the device on which a group sends bytes", "group"
)
forget_group: Any = _take(
    f"{_c10d}._cleanup_process_group_global_state", "removes a group that was aborted"
)
set_default_group: Any = _take(
    f"{_c10d}._update_default_pg", "set to None after all ranks were aborted"
)
register_group: Any = _take(
    "torch._C._distributed_c10d._register_process_group",
    "makes a group known by its name, for programs",
)
resolve_group: Any = _take(
    "torch._C._distributed_c10d._resolve_process_group", "the group of a name"
)
current_rpc_agent: Any = None
is_rpc_running: Any = None
if torch.distributed.rpc.is_available():  # not in every build of torch
    current_rpc_agent = _take("torch.distributed.rpc._get_current_rpc_agent", "RPC's workers")
    is_rpc_running = _take(
        "torch.distributed.rpc._is_current_rpc_agent_set", "whether RPC was started"
    )

if TYPE_CHECKING:
    import torch.distributed.remote_device

    RemoteDevice = torch.distributed.remote_device._remote_device
else:
    RemoteDevice = _take(
        "torch.distributed.remote_device._remote_device", "`rank:1/cpu` in a ShardedTensor's spec"
    )

_take(
    "torch.distributed.ProcessGroup._allgather_base", "all_gather into one buffer, without a copy"
)
_take("torch.distributed.ProcessGroup._reduce_scatter_base", "reduce_scatter of one buffer")
_take("torch.distributed.ProcessGroup._get_backend", "gives a group's timeout")

ProcessGroupBackend: Any = _take(
    "torch._C._distributed_c10d.Backend", "the class of the backends of a group, such as gloo's"
)
broadcast_coalesced: Any = _take(
    "torch.distributed._broadcast_coalesced", "how wrappers broadcast parameters"
)
start_coalescing: Any = _take(
    "torch.distributed.ProcessGroup._start_coalescing", "several calls go to NCCL as one"
)
end_coalescing: Any = _take("torch.distributed.ProcessGroup._end_coalescing", "the same")


def world_of_torch() -> Any:
    """Return torch's record of process groups. Threads of a test may have one each."""
    return torch.distributed.distributed_c10d._world


def start_all_gather(group: Any, out: torch.Tensor, part: torch.Tensor) -> Any:
    """Start an all_gather into one buffer; return the work to wait for."""
    return group._allgather_base(out, part)


def start_reduce_scatter(group: Any, out: torch.Tensor, packed: torch.Tensor, options: Any) -> Any:
    """Start a reduce_scatter of one buffer per rank; return the work to wait for."""
    return group._reduce_scatter_base(out, packed, options)


def timeout_of(group: Any) -> Any:
    """Return the timeout of a group's collectives; torch's default for threads, which have none."""
    if world_of_torch().pg_map[group][0] == "threaded":
        return torch.distributed.constants.default_pg_timeout
    return timeout_in(group._get_backend(torch.device(device_for_objects(group))).options)


def timeout_in(options: Any) -> Any:
    """Return the timeout that the options of a backend give."""
    return options._timeout


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


# ---- what torch_patches changes

add_batch_dim: Any = _take("torch._functorch.vmap._add_batch_dim", "vmap wraps its inputs")
wrap_for_grad: Any = _take(
    "torch._functorch.eager_transforms._wrap_for_grad", "grad, vjp and jvp wrap their inputs"
)
wrap_functional: Any = _take(
    "torch._functorch.eager_transforms._wrap_functional_tensor", "functionalize wraps its inputs"
)
is_transformed: Any = _take(
    "torch._C._functorch.is_functorch_wrapped_tensor", "is a tensor wrapped by a transform?"
)
inside_of_transform: Any = _take(
    "torch._C._functorch.get_unwrapped", "the tensor that a transform has wrapped"
)
for _names in ("vmap._vmap", "eager_transforms._grad", "eager_transforms._jvp"):
    _take(f"torch._functorch.{_names}_increment_nesting", "called where a transform begins")
    _take(f"torch._functorch.{_names}_decrement_nesting", "called where it ends")
vmap_module: Any = _take("torch._functorch.vmap", "where `_add_batch_dim` is looked up")
transforms_module: Any = _take("torch._functorch.eager_transforms", "the same for the other two")
CheckpointFrame: Any = _take(
    "torch.utils.checkpoint._CheckpointFrame", "`save_inputs` gets what a checkpoint runs on"
)
_take("torch.utils.checkpoint._CheckpointFrame.save_inputs", "the method")
checkpoint_metadata: dict[str, Any] = _take(
    "torch.utils.checkpoint._allowed_determinism_checks_to_fns",
    "how checkpointing compares saved with recomputed tensors",
)
default_checkpoint_metadata: Any = _take(
    "torch.utils.checkpoint._default_meta_extractor", "the default of it"
)
_take(
    "torch.optim.Optimizer._process_value_according_to_param_policy",
    "gets each tensor of a state dict that an optimizer loads",
    "param value param_id param_groups key",
)
device_constructors: Any = _take(
    "torch.utils._device._device_constructors",
    "the functions that `with torch.device(...)` changes; made once, of what their names stand for",
)
override_tables: tuple[Any, ...] = (
    _take("torch.overrides.get_ignored_functions", "functions without __torch_function__"),
    _take("torch.overrides.get_testing_overrides", "functions with it"),
    _take("torch.overrides._get_overridable_functions", "the same, by their owners"),
    _take("torch.overrides._get_tensor_methods", "those of tensors"),
)
"""Tables of functions, each made once, like the set before."""
register_scripted: Callable[[Any, str], None] = _take(
    "torch.jit._builtins._register_builtin",
    "tells torch.jit.script that a function of ours stands for an operator",
    "fn op",
)
ScriptFunction: Any = _take("torch._C.ScriptFunction", "a scripted or traced function")
ScriptModule: Any = _take("torch._C.ScriptModule", "the C object of a scripted module")
_take("torch._C.ScriptModule._create_method_from_trace", "traces a method of a module")
_take("torch._C.ScriptModule._create_method_from_trace_with_dict", "the same, with keywords")
torch_c: Any = _take("torch._C", "holds what traces functions, and copies to other devices")
_take("torch._C._create_function_from_trace", "traces a function")
_take("torch._C._create_function_from_trace_with_dict", "the same, with keywords")
script_modules: Any = _take("torch.jit._recursive", "makes scripted modules")
_take("torch.jit._recursive.create_script_module", "the function that does", "nn_module")
_take("torch.Tensor._make_subclass", "gives a tensor another class")
Profiler: Any = _take("torch.autograd.profiler.profile", "torch.profiler uses it, too")
prepare_profiler: Any = _take(
    "torch.autograd.profiler.profile._prepare_trace", "called before a profiler starts"
)
DEVICE_COPIES = (
    "_broadcast",
    "_broadcast_coalesced",
    "_broadcast_out",
    "_gather",
    "_gather_out",
    "_scatter",
    "_scatter_out",
)
"""The names of these copies in a build with CUDA."""
TORCHS_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"
"""The module of `FullyShardedDataParallel`."""
TORCHS_FSDP2 = "torch.distributed.fsdp._fully_shard._fsdp_param"
"""The module of `FSDPParam`, one parameter of torch's `fully_shard` and `replicate`."""
TORCHS_REPLICATE = "torch.distributed._composable.replicate"
"""The module of torch's older `replicate`."""
REPLICATE_STATE = "_ReplicateState"
"""The class in it whose method `init` wraps a module."""
TORCHS_ZERO = "torch.distributed.optim.zero_redundancy_optimizer"
"""The module of `ZeroRedundancyOptimizer`."""
TORCHS_LOCAL_SGD = "torch.distributed.optim.post_localSGD_optimizer"
"""The module of `PostLocalSGDOptimizer`."""
TORCHS_PLACEMENTS = "torch.distributed.tensor.placement_types"
"""The module of torch's `Shard` and `Replicate`, whose methods distribute a tensor."""
TORCHS_DTENSOR = "torch.distributed.tensor._api"
"""The module of torch's DTensor."""
_take("torch.autograd.Function.apply", "since 2.14 a method of C, before of Python")

FRAME_CONVERSION = "torch._dynamo.convert_frame"
"""The module that compiles functions for torch.compile. It takes seconds to import: as the next."""
OPTIMIZER_IN_BACKWARD = "torch.distributed.optim.apply_optimizer_in_backward"
"""The module of the next."""
APPLY_IN_BACKWARD = "_apply_optimizer_in_backward"
"""The function that lets optimizers step as soon as a parameter has its gradient."""
IN_BACKWARD_OPTIMIZERS = "_in_backward_optimizers"
"""The attribute of a parameter that holds these optimizers."""
STATE_DICT_UTILS = "torch.distributed._state_dict_utils"
"""The module that gathers and distributes the values of state dicts. Like the next, it imports
torch's own DTensor, and so shardwise never imports it: its names are changed when somebody does."""
STATE_DICT_HELPERS = "torch.distributed.checkpoint.state_dict"
"""The module of `get_model_state_dict` and its siblings."""
STATE_DICT_STAGER = "torch.distributed.checkpoint._state_dict_stager"
"""The module of `StateDictStager`, which copies the tensors of `async_save`. It imports torch's own
DTensor too."""

check_internals()
