"""Private names of torch are taken in one module; what is missing is said before any patch."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shardwise import torch_internals
from shardwise.core.torch_version import TESTED

ROOT = Path(__file__).resolve().parents[2] / "src" / "shardwise"
HOME = "torch_internals"

# Of Python's own library.
PYTHONS = {"_current_frames", "_exit", "_fields", "_getframe", "_inheriting", "_replace"}
# Methods of torch's classes, and of transformers' Trainer, that ours override or call on `self`.
OVERRIDDEN = {"_apply", "_load_from_state_dict", "_save"}
# Names that torch's classes have and that some class of ours has too.
TORCHS = {"_backward_hooks", "_base", "_is_param", "_opname", "_overloadname", "_version"}
# torch's own DTensor, which only interop may touch.
INTEROP = {"torch.distributed.tensor.placement_types._StridedShard"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_aten(node: ast.Attribute) -> bool:
    """Whether it is an operator of aten: `torch._foreach_add_`, `torch.ops.aten._to_copy`."""
    owner = ast.unparse(node.value)
    return "ops.aten" in owner or (owner == "torch" and hasattr(torch.ops.aten, node.attr))


def our_names(trees: list[ast.Module]) -> set[str]:
    """The names that shardwise gives to anything."""
    found: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found - TORCHS


def private_names(tree: ast.Module, ours: set[str]) -> Iterator[tuple[int, str]]:
    """(line, name) of the private names of torch that a source uses."""
    known = ours | PYTHONS | OVERRIDDEN
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for full in (module + alias.name for alias in node.names):
                if full.split(".")[0] == "torch" and any(map(is_private, full.split("."))):
                    yield node.lineno, full
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            if node.attr not in known and not is_aten(node):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            name = node.args[1]
            if (
                isinstance(name, ast.Constant)
                and is_private(name.value)
                and name.value not in known
            ):
                yield node.lineno, f"{ast.unparse(node.args[0])}.{name.value}"


def test_no_other_module_uses_private_names_of_torch() -> None:
    trees = {path: ast.parse(path.read_text("utf-8")) for path in sorted(ROOT.rglob("*.py"))}
    ours = our_names([tree for path, tree in trees.items() if HOME not in path.parts])
    found = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path, tree in trees.items()
        if HOME not in path.parts
        for line, name in private_names(tree, ours)
        if name not in INTEROP
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._C._nn.gelu",
        "from torch._ops import OpOverload",
        "from torch.utils import _pytree as pytree",
        "import torch._subclasses.fake_tensor",
        "def f(x): return x._version",
        "def f(x): return x.untyped_storage()._cdata",
        "def f(x): return getattr(x, '_is_param', False)",
        "from torch.utils.checkpoint import _CheckpointFrame",
    ],
)
def test_a_private_name_is_caught(source: str) -> None:
    assert list(private_names(ast.parse(source), set()))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._foreach_add_([], [])",
        "import torch\ntorch.ops.aten._to_copy",
        "import sys\nsys._getframe()",
        "import torch\ntorch.__version__",
    ],
)
def test_operators_of_aten_and_names_of_python_are_allowed(source: str) -> None:
    assert not list(private_names(ast.parse(source), set()))


def test_each_internal_is_as_expected_in_the_installed_torch_and_has_a_purpose() -> None:
    entries = torch_internals.report()
    assert len(entries) > 50
    assert not [each for each in entries if each.problem or not each.purpose]
    paths = [each.path for each in entries]
    assert len(paths) == len(set(paths))


BROKEN = """
import torch
from torch.distributed import distributed_c10d as c10d
apply = torch.autograd.Function.__dict__["apply"]
del torch._C._storage_Use_Count
c10d._new_process_group_helper = lambda group_size, group_rank: None
try:
    import shardwise
except ImportError as error:
    assert torch.autograd.Function.__dict__["apply"] is apply
    print(error)
"""


def test_missing_and_changed_internals_are_one_import_error_before_torch_is_changed() -> None:
    run = subprocess.run(
        [sys.executable, "-c", BROKEN], capture_output=True, check=False, text=True
    )
    assert run.returncode == 0, run.stderr
    assert f"torch {torch.__version__} is not supported" in run.stdout
    assert "torch._C._storage_Use_Count: torch._C._storage_Use_Count does not exist" in run.stdout
    assert re.search(r"_new_process_group_helper: has no parameter .*store.*", run.stdout)
    assert f"tested with, {TESTED} " in run.stdout


WITHOUT_RPC = """
import sys, torch
del torch._C._rpc_init
for name in [name for name in sys.modules if name.startswith("torch.distributed.rpc")]:
    del sys.modules[name]
import shardwise, shardwise.sharded
"""


@pytest.mark.slow
def test_a_torch_without_rpc_will_do() -> None:
    command = [sys.executable, "-c", WITHOUT_RPC]
    run = subprocess.run(command, capture_output=True, check=False, text=True)
    assert run.returncode == 0, run.stderr
