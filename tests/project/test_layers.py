"""Imports between the modules of shardwise go downwards only, and torch's own DTensor stays out."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "shardwise"
ROOT = Path(__file__).resolve().parents[2] / "src" / PACKAGE

# Low to high. A folder is a layer of its own: it imports only folders before it. Names in one line
# do not import each other. __init__ is the root of the package.
LAYERS: list[set[str]] = [
    {"core"},
    {"torch_internals"},
    {"comm"},
    {"redistribute"},
    {"dtensor"},
    {"random"},
    {"rules"},
    {"dispatch"},
    {"api"},
    {"torch_patches"},
    {"parallel"},
    {"fsdp", "export", "sharded"},
    {"tensor", "device_mesh"},  # torch's module paths
    {"run"},
    {"hugging_face", "interop", "testing"},
    {"__init__"},
    {"examples"},
    {"demo"},
    {"cli"},
    {"__main__"},
]
LAYER_OF = {module: level for level, modules in enumerate(LAYERS) for module in modules}

# Only interop may touch these (the underscored ones are other doors to the same code).
TORCH_SHARDING = (
    "torch.distributed.tensor",
    "torch.distributed._tensor",
    "torch.distributed.fsdp",
    "torch.distributed._composable",
    "torch.distributed._shard",
    "torch.distributed._sharded_tensor",
    "torch.distributed._sharding_spec",
)
WITHOUT_DISTRIBUTED = LAYERS[0]


ENGINES = ("c10d", "process_groups", "simulated", "rank_scheduler", "offline")
STARTS_RANKS = {"comm", "run", "export"}
"""What makes worlds of ranks: threads, processes, and the one that records programs."""
MAY_BE_LAZY = {"cli"}  # `shardwise --help` does not wait for the demo
SAME_NAME = {"Shard": "torch has two: the placement, and the shard of a ShardedTensor"}


def module_name(path: Path) -> str:
    """The dotted name of a file of the package; a package's own file ends in `.__init__`."""
    return ".".join((PACKAGE, *path.relative_to(ROOT).with_suffix("").parts))


def place(module: str) -> str:
    """The name in the table that a dotted module name of the package belongs to."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below `node` but for the bodies of `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and is_type_checking(child.test):
            for other in child.orelse:
                yield other
                yield from runtime_nodes(other)
        else:
            yield child
            yield from runtime_nodes(child)


def base_of(module: str, node: ast.ImportFrom) -> str:
    """The absolute name of X in `from X import ...` written in `module`."""
    if not node.level:
        return node.module or ""
    parents = module.split(".")[: -node.level]
    return ".".join([*parents, node.module] if node.module else parents)


def dotted(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (left := dotted(node.value)):
        return f"{left}.{node.attr}"
    return None


def imports(module: str, source: str) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of what a source imports.

    `from a import b` gives `a.b`, be b a module or not. `import_module("a.b")` with a literal
    counts.
    """
    for node in runtime_nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.lineno, f"{base_of(module, node)}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args:
            name, first = dotted(node.func) or "", node.args[0]
            if name.split(".")[-1] in ("import_module", "__import__") and (
                isinstance(first, ast.Constant) and isinstance(first.value, str)
            ):
                yield node.lineno, first.value


def attributes(module: str, source: str) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of attributes reached through imported names.

    `import torch.distributed as dist; dist.tensor` gives `torch.distributed.tensor`.
    """
    nodes = list(runtime_nodes(ast.parse(source)))
    known: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                known[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                known[alias.asname or alias.name] = f"{base_of(module, node)}.{alias.name}"
    for node in nodes:
        if isinstance(node, ast.Attribute) and (name := dotted(node)):
            first, _, rest = name.partition(".")
            if first in known:
                yield node.lineno, f"{known[first]}.{rest}"


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def lazy_imports(module: str, source: str) -> list[str]:
    """What a source imports of shardwise inside a function, as a way round a cycle would."""
    if place(module) in MAY_BE_LAZY:
        return []
    return [
        f"{module}:{inner.lineno} imports inside {node.name}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
        for inner in ast.walk(node)
        if (isinstance(inner, ast.ImportFrom) and within(base_of(module, inner), PACKAGE))
        or (isinstance(inner, ast.Import) and any(within(a.name, PACKAGE) for a in inner.names))
    ]


def layer_violations(module: str, source: str) -> list[str]:
    """What a source imports from a higher layer, or from outside the table."""
    own = place(module)
    if own not in LAYER_OF:
        return [
            f"{module}: {own!r} has no layer: place it in LAYERS of tests/project/test_layers.py"
        ]
    found = []
    for line, name in imports(module, source):
        if not within(name, PACKAGE):
            continue
        target = place(name)
        if name.count(".") == 1 and target not in LAYER_OF:
            # `from shardwise import x` with x no module takes x from the package root (a module
            # outside the table is reported at its own file).
            target = "__init__"
        if target not in LAYER_OF:
            found.append(
                f"{module}:{line} imports {name}: {target!r} has no layer: "
                "place it in LAYERS of tests/project/test_layers.py"
            )
        elif target != own and LAYER_OF[target] >= LAYER_OF[own]:
            found.append(
                f"{module}:{line} (layer {LAYER_OF[own]}) imports {name} "
                f"(layer {LAYER_OF[target]}, {target})"
            )
    return found


def torch_violations(module: str, source: str) -> list[str]:
    """Where a source reaches a part of torch.distributed that its module must not use."""
    own = place(module)
    forbidden = () if own == "interop" else TORCH_SHARDING
    if own in WITHOUT_DISTRIBUTED:
        forbidden = ("torch.distributed",)
    reached = {*imports(module, source), *attributes(module, source)}
    return [
        f"{module}:{line} reaches {name}, and {own} must not use {package}"
        for line, name in sorted(reached)
        for package in forbidden
        if within(name, package)
    ]


def all_sources() -> list[tuple[str, str]]:
    return [(module_name(p), p.read_text("utf-8")) for p in sorted(ROOT.rglob("*.py"))]


def test_the_package_is_there() -> None:
    assert "shardwise.__init__" in dict(all_sources())


def test_the_page_on_the_architecture_names_every_file() -> None:
    page = (ROOT.parent.parent / "docs" / "architecture.md").read_text("utf-8")
    table = page.split("```")[1]
    # A subpackage's files are listed below its name, further in.
    sections = dict(re.findall(r"^  (\w+)/ (.*\n(?:   .*\n)*)", table, re.MULTILINE))
    alone = {"demo", "examples"}  # the first says itself what is in it
    missing = [
        module
        for module, _ in all_sources()
        if not module.endswith(("__init__", "__main__")) and place(module) not in alone
        if not re.search(
            rf"\b{module.split('.')[-1]}\b",
            sections[place(module)] if module.count(".") > 1 else table,
        )
    ]
    assert not missing


def test_each_module_is_in_one_layer() -> None:
    assert len(LAYER_OF) == sum(map(len, LAYERS))


def test_imports_go_downwards() -> None:
    found = [v for module, source in all_sources() for v in layer_violations(module, source)]
    assert not found, "\n".join(found)


def test_no_import_waits_inside_a_function() -> None:
    found = [v for module, source in all_sources() for v in lazy_imports(module, source)]
    assert not found, "\n".join(found)


def test_engines_are_used_through_comm_alone() -> None:
    found = [
        f"{module}:{line} imports {name}"
        for module, source in all_sources()
        if place(module) not in STARTS_RANKS
        for line, name in imports(module, source)
        if any(within(name, f"{PACKAGE}.comm.{engine}") for engine in ENGINES)
    ]
    assert not found, "\n".join(found)


def test_a_class_name_stands_for_one_class() -> None:
    found: dict[str, list[str]] = {}
    for module, source in all_sources():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name.lstrip("_"), []).append(f"{module}:{node.lineno}")
    twice = {name: places for name, places in found.items() if len(places) > 1}
    assert twice.keys() == SAME_NAME.keys(), twice


def test_torch_sharding_stays_out() -> None:
    found = [v for module, source in all_sources() for v in torch_violations(module, source)]
    assert not found, "\n".join(found)


# The checks themselves, on small sources.


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("shardwise.core.mesh", "from shardwise.comm import all_gather"),
        ("shardwise.core.mesh", "from ..comm import all_gather"),
        ("shardwise.core.mesh", "from .. import comm"),
        ("shardwise.core.mesh", "from shardwise import comm"),
        ("shardwise.core.mesh", "import shardwise.comm as c"),
        ("shardwise.core.mesh", "import torch, shardwise.comm"),
        ("shardwise.core.mesh", "def f():\n    from ..comm import all_gather"),
        ("shardwise.core.mesh", "class A:\n    def f(self):\n        import shardwise.comm"),
        ("shardwise.core.mesh", "if True:\n    from ..comm import all_gather"),
        ("shardwise.core.mesh", "if not TYPE_CHECKING:\n    from ..comm import all_gather"),
        ("shardwise.core.mesh", "if TYPE_CHECKING:\n    pass\nelse:\n    from .. import comm"),
        ("shardwise.core.mesh", "importlib.import_module('shardwise.comm')"),
        ("shardwise.core.mesh", "from shardwise import DeviceMesh"),  # the root stands above it
        ("shardwise.core.mesh", "import shardwise"),
        ("shardwise.rules.__init__", "from ..fsdp import x"),
        ("shardwise.rules.linalg.matmul", "from ... import dispatch"),
        ("shardwise.fsdp.unit", "from shardwise.export import program"),  # beside it
        ("shardwise.run.simulate", "from ..cli import main"),
    ],
)
def test_an_upward_import_is_caught(module: str, source: str) -> None:
    assert len(layer_violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("shardwise.comm.c10d", "from shardwise.core.mesh import DeviceMesh"),
        ("shardwise.core.mesh", "from .layout import x"),
        ("shardwise.run.simulate", "from . import launch"),
        ("shardwise.run.launch", "from . import simulate"),
        ("shardwise.core.mesh", "if TYPE_CHECKING:\n    from ..comm import Group"),
        ("shardwise.core.mesh", "if typing.TYPE_CHECKING:\n    def f():\n        import shardwise"),
        ("shardwise.core.mesh", "import torch\nfrom shardwise_other import comm"),
        ("shardwise.rules.__init__", "from .linalg import matmul\nfrom ..dtensor import tensor"),
        ("shardwise.rules.linalg.matmul", "from .. import helpers\nfrom ...core.errors import E"),
        ("shardwise.__init__", "from .run.launch import launch\nfrom .dtensor.tensor import x"),
        ("shardwise.cli.__init__", "from shardwise import __version__"),
    ],
)
def test_an_allowed_import_passes(module: str, source: str) -> None:
    assert layer_violations(module, source) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("shardwise.novel", ""),
        ("shardwise.novel.__init__", ""),
        ("shardwise.novel.part", ""),
        ("shardwise.cli.__init__", "from ..novel import x"),
    ],
)
def test_a_module_outside_the_table_is_caught(module: str, source: str) -> None:
    (message,) = layer_violations(module, source)
    assert "place it in LAYERS" in message and "'novel'" in message


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed.tensor",
        "import torch.distributed.tensor.parallel as tp",
        "from torch.distributed import tensor",
        "from torch.distributed import fsdp as f",
        "from torch.distributed.tensor import DTensor",
        "from torch.distributed._shard.sharded_tensor import ShardedTensor",
        "from torch.distributed._tensor import DTensor",
        "def f():\n    from torch.distributed.fsdp import fully_shard",
        "importlib.import_module('torch.distributed.tensor')",
    ],
)
def test_an_import_of_torch_sharding_is_caught(source: str) -> None:
    assert torch_violations("shardwise.cli", source)
    assert torch_violations("shardwise.comm", source)
    assert torch_violations("shardwise.core.mesh", source)
    assert not torch_violations("shardwise.interop", source)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.distributed.tensor.DTensor",
        "import torch as t\nt.distributed.fsdp",
        "import torch.distributed as dist\ndist.tensor.DTensor",
        "from torch import distributed as d\ndef f():\n    return d.tensor",
    ],
)
def test_torch_sharding_reached_as_an_attribute_is_caught(source: str) -> None:
    assert torch_violations("shardwise.comm", source)
    assert not torch_violations("shardwise.interop", source)


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed import ProcessGroup",
        "import torch\ntorch.distributed.get_rank()",
    ],
)
def test_low_layers_do_without_torch_distributed(source: str) -> None:
    for module in WITHOUT_DISTRIBUTED:
        assert torch_violations(f"shardwise.{module}", source)
    assert not torch_violations("shardwise.comm", source)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.tensor([1]).tensor",
        "from torch.distributions import Normal",
        "import torch.distributed_other",
        "if TYPE_CHECKING:\n    import torch.distributed as dist\ndef f(g: dist.ProcessGroup): ...",
    ],
)
def test_other_torch_is_allowed(source: str) -> None:
    assert torch_violations("shardwise.core.mesh", source) == []
