"""Every change that shardwise makes to torch is listed, made once, and can be undone."""

import inspect
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn, optim, overrides
from torch._dynamo import convert_frame
from torch.distributed import _functional_collectives, _state_dict_utils
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup
from torch.utils import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import shardwise as sw
from shardwise import torch_internals, torch_patches
from shardwise.api import optimizers
from shardwise.parallel import shard_module
from shardwise.torch_patches import collectives

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of TorchScript
    import torch.distributed.optim


@pytest.fixture(autouse=True)
def _installed_afterwards() -> Iterator[None]:
    yield
    torch_patches.install()


CONSTRUCTORS = (
    *("tensor", "as_tensor", "asarray", "full", "arange", "scalar_tensor"),
    *("sparse_coo_tensor", "sparse_csr_tensor", "sparse_csc_tensor", "sparse_bsr_tensor"),
    *("sparse_bsc_tensor", "sparse_compressed_tensor", "to_dlpack"),
)
METHODS = ("new_tensor", "new_full", "new", "set_", "__new__", "_make_subclass")


def changed_places() -> dict[str, Any]:
    """What the patches change, as it is now."""
    frame = torch_internals.CheckpointFrame
    transforms, vmap = torch_internals.transforms_module, torch_internals.vmap_module
    return {
        "apply": inspect.getattr_static(torch.autograd.Function, "apply"),
        "_add_batch_dim": vmap._add_batch_dim,
        "_wrap_for_grad": transforms._wrap_for_grad,
        "_wrap_functional_tensor": transforms._wrap_functional_tensor,
        **{
            f"{kind}_{change}": getattr(module, f"{kind}_{change}_nesting")
            for module, kind in ((vmap, "_vmap"), (transforms, "_grad"), (transforms, "_jvp"))
            for change in ("increment", "decrement")
        },
        "checkpoint": checkpoint._allowed_determinism_checks_to_fns["default"],
        "save_inputs": frame.save_inputs,
        "state": inspect.getattr_static(
            optim.Optimizer, "_process_value_according_to_param_policy"
        ),
        "foreach": tuple(map(tuple, torch_internals.foreach_types)),
        "flops": FlopCounterMode._count_flops,
        "compiled": convert_frame.ConvertFrame.__call__,
        "profiler": torch.autograd.profiler.profile._prepare_trace,
        "profiler's end": torch.autograd.profiler.profile.__exit__,
        **{
            name: getattr(module, name)
            for module, names in (
                (_state_dict_utils, ("_iterate_state_dict", "_broadcast_tensors")),
                (
                    state_dict,
                    (
                        "_verify_options",
                        "_broadcast_state_dict",
                        "_distribute_state_dict",
                        "_load_model_state_dict",
                        "_load_optim_state_dict",
                    ),
                ),
            )
            for name in names
        },
        "stager": StateDictStager._offload_tensor,
        "multi_grad_hook": torch.autograd.graph.register_multi_grad_hook,
        "in_backward": torch.distributed.optim._apply_optimizer_in_backward,
        "DDP": inspect.getattr_static(nn.parallel.DistributedDataParallel, "__init__"),
        "DataParallel": inspect.getattr_static(nn.parallel.DataParallel, "__init__"),
        "vector_to_parameters": nn.utils.vector_to_parameters,
        "_broadcast_coalesced": torch.distributed._broadcast_coalesced,
        **{
            f"{kind.__name__}.{name}": vars(kind)[name]
            for kind in (
                torch.distributed.ProcessGroup,
                torch_internals.ProcessGroupBackend,
                ProcessLocalGroup,
            )
            for name in collectives.METHODS
            if name in vars(kind)
        },
        "groups of functional collectives": (
            _functional_collectives._resolve_group,
            _functional_collectives._expand_group,
        ),
        "hooks": tuple(_global_optimizer_pre_hooks.values()),
        "after": tuple(_global_optimizer_post_hooks.values()),
        **{kind.__name__: vars(kind).get("step") for kind in optimizers.POINTWISE},
        **{f"torch.{name}": getattr(torch, name) for name in CONSTRUCTORS},
        **{name: inspect.getattr_static(torch.Tensor, name) for name in METHODS},
        "to_dlpack": torch.utils.dlpack.to_dlpack,
        "nested": (torch.nested.nested_tensor, torch.nested.as_nested_tensor),
        # torch's own tests wrap it
        **(
            {"script": inspect.getattr_static(torch.jit.ScriptFunction, "__call__")}
            if "torch.testing._internal.common_utils" not in sys.modules
            else {}
        ),
        "trace": (
            torch._C._create_function_from_trace,
            torch._C._create_function_from_trace_with_dict,
            torch._C.ScriptModule._create_method_from_trace,
            torch._C.ScriptModule._create_method_from_trace_with_dict,
        ),
        "create_script_module": torch.jit._recursive.create_script_module,
    }


def is_ours(function: Any) -> bool:
    """Whether a function is a wrapper of shardwise, whatever name it took over."""
    return bool(function.__code__.co_filename == optimizers.__file__)


def test_no_step_is_wrapped_twice() -> None:
    for kind in optimizers.POINTWISE:
        ours = inspect.unwrap(kind.step, stop=is_ours)
        assert is_ours(ours) and not is_ours(inspect.unwrap(ours.__wrapped__, stop=is_ours))


def test_installing_again_changes_nothing() -> None:
    before = changed_places()
    torch_patches.install()
    assert changed_places() == before


def is_of_shardwise(value: object) -> bool:
    """Whether shardwise defines it. By name: the path of any module may have "shardwise" in it."""
    module = inspect.getmodule(value)
    return module is not None and module.__name__.partition(".")[0] == "shardwise"


def test_uninstall_takes_every_change_back_and_install_makes_it_again() -> None:
    ours = changed_places()
    torch_patches.uninstall()
    without = changed_places()
    assert not torch_patches.is_installed()
    assert [name for name in ours if ours[name] == without[name]] == []
    assert [name for name, value in without.items() if is_of_shardwise(value)] == []
    steps = [inspect.unwrap(kind.step, stop=is_ours) for kind in optimizers.POINTWISE]
    assert not any(map(is_ours, steps))
    torch_patches.uninstall()
    assert changed_places() == without
    torch_patches.install()
    assert [name for name, value in changed_places().items() if value == without[name]] == []


LATE = """
import sys
import shardwise
from shardwise import torch_patches
{before}
import torch.distributed._state_dict_utils as utils
print(utils._iterate_state_dict.__module__, utils._iterate_state_dict.__code__.co_filename)
torch_patches.uninstall()
ours = [each for each in sys.meta_path if type(each).__module__.startswith("shardwise")]
print(utils._iterate_state_dict.__code__.co_filename, len(ours))
"""


@pytest.mark.parametrize("is_installed", [True, False])
def test_a_module_imported_later_is_changed_then_if_the_patches_are_there(
    is_installed: bool,
) -> None:
    code = LATE.format(before="" if is_installed else "torch_patches.uninstall()")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, text=True)
    assert run.returncode == 0, run.stderr
    first, second = run.stdout.splitlines()
    assert ("shardwise" in first.rpartition("/src/")[2]) == is_installed
    assert "_state_dict_utils.py" in second
    assert second.endswith(" 0")  # nobody waits for an import any more


def test_every_patch_gives_its_name_and_reason() -> None:
    names = [patch.name for patch in torch_patches.PATCHES]
    assert len(set(names)) == len(names) > 8
    assert all(patch.name and len(patch.reason) > 40 for patch in torch_patches.PATCHES)


def test_if_a_patch_fails_none_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_patches.uninstall()
    without = changed_places()

    def fail() -> Any:
        raise RuntimeError("no such place")

    broken = torch_patches.Patch("torch.nowhere", "It is there to fail.", fail)
    monkeypatch.setattr(torch_patches, "PATCHES", (*torch_patches.PATCHES, broken))
    with pytest.raises(RuntimeError, match="no such place"):
        torch_patches.install()
    assert changed_places() == without


def test_a_change_made_by_others_meanwhile_stays() -> None:
    apply = torch_internals.vmap_module._add_batch_dim

    def theirs(*args: Any, **kwargs: Any) -> Any:
        return apply(*args, **kwargs)

    torch_internals.vmap_module._add_batch_dim = theirs
    try:
        torch_patches.uninstall()
        assert torch_internals.vmap_module._add_batch_dim is theirs
    finally:
        torch_internals.vmap_module._add_batch_dim = apply.__wrapped__


def test_an_optimizer_steps_as_before_while_the_patches_are_gone() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = optim.SGD([weight], lr=1.0)
    for is_installed in (True, False, True):
        (torch_patches.install if is_installed else torch_patches.uninstall)()
        weight.grad = torch.ones(3)
        optimizer.step()
    assert weight.tolist() == [-2.0] * 3


def test_modules_are_named_only_while_somebody_listens() -> None:
    call = nn.Module.__call__
    with sw.listen(lambda event: None):
        assert nn.Module.__call__ is not call
        torch_patches.uninstall()
        assert nn.Module.__call__ is call
        torch_patches.install()
        assert nn.Module.__call__ is not call
    assert nn.Module.__call__ is call


def test_a_module_call_that_others_have_wrapped_meanwhile_stays() -> None:
    call, heard = nn.Module.__call__, []

    def theirs(module: nn.Module, *args: Any) -> Any:
        heard.append(module)
        return call(module, *args)

    nn.Module.__call__ = theirs
    try:
        with sw.listen(lambda event: None):
            nn.Identity()(torch.ones(1))
        assert len(heard) == 1
        assert nn.Module.__call__ is theirs
    finally:
        nn.Module.__call__ = call


# An optimizer that is made before shardwise is imported is watched as all others are.

EARLY = """
import torch
from torch import nn, optim
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
model = nn.Linear(4, 4)
early = optim.{name}(model.parameters(), lr=0.5)
optim.SGD([torch.ones(1)], lr=0.1), optim.AdamW([torch.ones(1)])  # their steps are hooked now

import shardwise as sw
from shardwise import Shard
from shardwise.parallel import shard_module
from shardwise.torch_patches import collectives

def train():
    mesh = sw.init_device_mesh("cpu", (1,), ("tp",))
    shard_module(model, mesh, {{"weight": {{"tp": Shard(0)}}}})
    model(torch.ones(2, 4)).sum().backward()
    try:
        early.step()
    except sw.OptimizerError as error:
        print("refused", error)
    late = optim.AdamW(model.parameters(), lr=0.5)
    kinds = []
    late.register_step_pre_hook(lambda *_: kinds.append(type(model.weight).__name__))
    late.step()
    print(kinds, type(late.state[model.weight]["exp_avg"]).__name__)

sw.simulate(train, 1)
"""


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", ["SGD", "Adafactor"])
def test_an_optimizer_made_before_shardwise_is_imported_is_refused_with_stale_parameters(
    name: str,
) -> None:
    code = EARLY.format(name=name)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, text=True)
    assert run.returncode == 0, run.stderr
    assert f"refused {name}: expected the parameters that the module has, got weight" in run.stdout
    assert "['DTensor'] DTensor" in run.stdout


def test_a_step_that_fails_leaves_dtensors_and_the_users_hooks_see_them() -> None:
    def train() -> None:
        mesh = sw.init_device_mesh("cpu", (2,), ("tp",))
        model = nn.Linear(4, 4)
        shard_module(model, mesh, {"weight": {"tp": sw.Shard(0)}})
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        seen = []
        optimizer.register_step_pre_hook(lambda *_: seen.append(type(model.weight)))
        optimizer.register_step_post_hook(lambda *_: seen.append(type(model.weight)))
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert seen == [sw.DTensor] * 2
        optimizer.param_groups[0]["momentum"] = "much"
        with pytest.raises(Exception, match=r"much|str"):
            optimizer.step()
        assert type(model.weight) is sw.DTensor
        assert type(model.weight.grad) is sw.DTensor

    sw.simulate(train, 2)


# Programs without DTensors, whatever was imported first.


def test_the_contexts_of_transforms_that_compile_knows_by_identity_are_torchs_own() -> None:
    transforms, vmap = torch_internals.transforms_module, torch_internals.vmap_module
    for module, name in ((vmap, "vmap"), (transforms, "grad"), (transforms, "jvp")):
        assert not is_of_shardwise(getattr(module, f"{name}_increment_nesting").__wrapped__)


COMPILED_FIRST = """
import torch
import torch._dynamo
from torch import overrides
x = torch.ones(3, 4)
torch.compile(torch.vmap(torch.sin), backend="eager", fullgraph=True)(x)
import shardwise
for transform in (torch.vmap, torch.func.jacrev, torch.func.jacfwd):
    function = transform(torch.sin)
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), function(x))
"""


@pytest.mark.slow
def test_transforms_compile_also_if_something_was_compiled_before_shardwise_is_imported() -> None:
    run = subprocess.run(
        [sys.executable, "-c", COMPILED_FIRST], capture_output=True, check=False, text=True
    )
    assert run.returncode == 0, run.stderr


def test_torchs_tables_of_functions_hold_the_changed_ones_also_if_made_before() -> None:
    for change in (torch_patches.uninstall, torch_patches.install):
        overrides.get_testing_overrides()
        change()
        assert {torch.tensor, torch.full, torch.arange} <= overrides.get_ignored_functions()
        assert overrides.resolve_name(torch.Tensor.set_) == "torch.Tensor.set_"
        assert torch.Tensor.set_ in overrides.get_testing_overrides()


def test_changed_constructors_can_be_pickled() -> None:
    functions = [getattr(torch, name) for name in CONSTRUCTORS]
    functions += [getattr(torch.Tensor, name) for name in ("new_tensor", "new_full", "set_")]
    for function in functions:
        assert pickle.loads(pickle.dumps(function)) is function, function
