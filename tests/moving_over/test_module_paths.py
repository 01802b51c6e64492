"""torch's module paths: every facade imports, defines nothing of its own, and waits to be asked."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import shardwise as sw

ROOT = Path(sw.__file__).parent
FACADES = [
    ROOT / "device_mesh.py",
    *ROOT.glob("tensor/**/*.py"),
    *ROOT.glob("fsdp/_fully_shard/*.py"),
]
MODULES = [
    ".".join(("shardwise", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for path in sorted(FACADES)
]


@pytest.mark.parametrize("module", MODULES)
def test_a_facade_has_the_names_that_it_lists(module):
    found = importlib.import_module(module)
    assert all(hasattr(found, name) for name in found.__all__)


@pytest.mark.parametrize("module", MODULES)
def test_torch_has_a_module_of_that_path(module):
    importlib.import_module(module.replace("shardwise", "torch.distributed", 1))


@pytest.mark.parametrize("path", FACADES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_facade_only_re_exports(path):
    for node in ast.parse(path.read_text("utf-8")).body:
        match node:
            case ast.Import() | ast.ImportFrom() | ast.Expr(ast.Constant()):
                pass
            case ast.Assign(targets=[ast.Name()], value=value):
                assert not isinstance(value, ast.Call | ast.Lambda)
            case ast.FunctionDef(name="__getattr__"):
                assert path.name == "__init__.py"
            case _:
                pytest.fail(f"line {node.lineno} defines something")


def test_importing_shardwise_loads_no_facade_and_nothing_only_they_need():
    loaded = subprocess.run(
        [sys.executable, "-c", "import sys, shardwise; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert not set(MODULES) & set(loaded)
    assert not {"shardwise.fsdp", "shardwise.parallel", "shardwise.export"} & set(loaded)


def test_submodules_are_attributes_as_in_torch():
    for name in ("tensor", "device_mesh"):
        assert getattr(sw, name) is importlib.import_module(f"shardwise.{name}")
    assert sw.tensor.parallel.style.ColwiseParallel is sw.parallel.ColwiseParallel
    assert sw.tensor.placement_types.Shard is sw.Shard
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = sw.tensor.nothing
