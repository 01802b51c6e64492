"""torch's module paths: every facade imports, defines nothing of its own, and waits to be asked."""

import ast
import importlib
import re
import shlex
import subprocess
import sys
import textwrap
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


def test_submodules_are_there_once_their_package_is_imported():
    program = """
        import shardwise.tensor, shardwise.fsdp._fully_shard
        from shardwise import tensor
        tensor.parallel.style, tensor.parallel.api, tensor.parallel.loss
        tensor.debug._comm_mode, tensor._api, tensor._random, tensor._redistribute, tensor._utils
        tensor.experimental._attention, tensor.experimental._func_map
        tensor.placement_types, tensor.device_mesh, tensor._dtensor_spec
        shardwise.fsdp._fully_shard._fully_shard, shardwise.fsdp._fully_shard._fsdp_api
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)


def test_the_sed_line_of_the_page_moves_imports(tmp_path):
    page = (ROOT.parents[1] / "docs" / "moving-over.md").read_text("utf-8")
    (line,) = re.findall(r"^    sed -i (.*) \*\.py$", page, re.MULTILINE)
    program = tmp_path / "program.py"
    program.write_text(
        "from torch.distributed.tensor.parallel import ColwiseParallel\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.fsdp import fully_shard\n"
        "from torch.distributed._shard.sharded_tensor import ShardedTensor\n"
        "import torch.distributed.checkpoint as dcp\n"
    )
    subprocess.run(["sed", "-i", shlex.split(line)[0], str(program)], check=True)
    names: dict[str, object] = {}
    exec(program.read_text(), names)
    assert names["ColwiseParallel"] is sw.parallel.ColwiseParallel
    assert names["ShardedTensor"] is sw.sharded.ShardedTensor
    assert names["fully_shard"] is sw.fsdp.fully_shard
    assert names["init_device_mesh"] is sw.init_device_mesh
