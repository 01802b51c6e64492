"""Private names of torch that `torch_patches` changes, or looks up when somebody imports them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from shardwise.torch_internals.lookup import take as _take

Function = TypeVar("Function", bound=Callable[..., Any])

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
STATE_DICT_UTILS = "torch.distributed._state_dict_utils"
"""The module that gathers and distributes the values of state dicts. Like the next, it imports
torch's own DTensor, and so shardwise never imports it: its names are changed when somebody does."""
STATE_DICT_HELPERS = "torch.distributed.checkpoint.state_dict"
"""The module of `get_model_state_dict` and its siblings."""
OPTIMIZER_IN_BACKWARD = "torch.distributed.optim.apply_optimizer_in_backward"
"""The module of the next."""
APPLY_IN_BACKWARD = "_apply_optimizer_in_backward"
"""The function that lets optimizers step as soon as a parameter has its gradient."""
IN_BACKWARD_OPTIMIZERS = "_in_backward_optimizers"
"""The attribute of a parameter that holds these optimizers."""
STATE_DICT_STAGER = "torch.distributed.checkpoint._state_dict_stager"
"""The module of `StateDictStager`, which copies the tensors of `async_save`. It imports torch's own
DTensor too."""


def constant_when_compiled(function: Function) -> Function:
    """Mark a function as `torch.compiler.assume_constant_result` does, without importing dynamo:
    torch.compile calls it while it traces, and keeps the result."""
    cast(Any, function)._dynamo_marked_constant = True
    return function
