"""The wheel and the sdist have everything in them, and the wheel works without the checkout."""

import ast
import email
import email.message
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.needs("pip"), pytest.mark.needs("setuptools")]  # uv has no pip

ROOT = Path(__file__).resolve().parents[2]

# The files of a checkout that distributions are made of. They are copied, as building leaves files
# behind and other tests may build at the same time.
SOURCES = ("src", "pyproject.toml", "README.md", "LICENSE")

PIP = ("-m", "pip", "--disable-pip-version-check")


def run(*command: object, **options: object) -> str:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=300, check=False, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the sources."""
    target = tmp_path_factory.mktemp("checkout")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            leave = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(source, target / name, symlinks=True, ignore=leave)
        else:
            shutil.copy(source, target / name)
    return target


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory) -> Path:
    """A wheel, built without the network."""
    made = tmp_path_factory.mktemp("wheel")
    options = ("--no-index", "--no-deps", "--no-build-isolation", "--no-cache-dir")
    run(sys.executable, *PIP, "wheel", *options, "--wheel-dir", made, checkout)
    (found,) = made.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The folder of the commands of a new environment, in which the wheel is installed.

    The packages that shardwise requires are those of the environment that runs the tests: a .pth
    file adds its folders after the new environment's own. Python does not read the .pth files of
    folders that are added so, one of which would add the checkout.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=os.name != "nt")
    paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})
    commands, packages = Path(paths["scripts"]), Path(paths["purelib"])
    here = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (packages / "required.pth").write_text("\n".join(here), "utf-8")
    options = ("--no-index", "--no-deps", "--no-cache-dir", "--ignore-installed")
    run(commands / "python", *PIP, "install", *options, wheel, env=environment())
    return commands


def environment() -> dict[str, str]:
    """Return the environment variables of the tests, without the path to the checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def modules_of_the_checkout() -> set[str]:
    package = ROOT / "src" / "shardwise"
    found = {f"shardwise/{p.relative_to(package).as_posix()}" for p in package.rglob("*.py")}
    assert {"shardwise/examples/llama.py", "shardwise/examples/train_llama.py"} <= found
    return found


# ---- what is in them


def test_the_wheel_has_every_module_and_the_mark_of_types(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == modules_of_the_checkout() | {"shardwise/py.typed"}


def test_the_sdist_has_every_module_and_the_mark_of_types(checkout, tmp_path):
    program = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    run(sys.executable, "-c", program, cwd=checkout)
    (found,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(found) as archive:
        files = {member.name: member for member in archive.getmembers()}
    assert not [name for name, member in files.items() if member.issym() or member.islnk()]
    names = {name.partition("/")[2] for name in files}
    assert {f"src/{name}" for name in modules_of_the_checkout()} <= names
    assert {"src/shardwise/py.typed", "pyproject.toml", "README.md", "LICENSE"} <= names


def test_the_repository_has_no_symbolic_links():
    """Checkouts on Windows and archives turn links into small text files."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        links = [path for path in (ROOT / "src").rglob("*") if path.is_symlink()]
    else:
        listed = run("git", "-C", ROOT, "ls-files", "--stage").splitlines()
        links = [line for line in listed if line.startswith("120000")]
    assert not links


def metadata_of(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def test_the_metadata_name_the_versions_that_are_supported(wheel):
    metadata = metadata_of(wheel)
    assert metadata["Requires-Python"] == ">=3.11"
    required = [each for each in metadata.get_all("Requires-Dist") if "extra ==" not in each]
    (torch,) = [each for each in required if each.startswith("torch")]
    assert set(torch.removeprefix("torch").split(",")) == {">=2.13", "<2.16"}
    assert set(required) == {torch, "numpy"}
    assert set(metadata.get_all("Provides-Extra")) == {"demo", "hf", "pickle", "dev"}


def test_only_the_commands_launch_and_hugging_face_import_packages_that_are_not_required():
    found = {}
    for path in (ROOT / "src" / "shardwise").rglob("*.py"):
        names = []
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                names += [each.name for each in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.append(str(node.module))
        packages = {name.partition(".")[0] for name in names}
        for package in packages - sys.stdlib_module_names - {"shardwise", "torch", "numpy"}:
            found.setdefault(package, set()).add(path)
    assert set(found) == {"cloudpickle", "rich", "safetensors", "transformers"}
    assert {path.name for path in found.pop("cloudpickle")} == {"worker.py"}
    assert {path.name for path in found.pop("transformers")} == {"hugging_face.py"}
    by_folder = {(path.parent.name, name) for name, paths in found.items() for path in paths}
    assert by_folder == {("demo", "rich"), ("demo", "safetensors"), ("cli", "rich")}


def test_the_metadata_say_what_it_is(wheel):
    metadata = metadata_of(wheel)
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert {"distributed training", "sharding"} <= set(metadata["Keywords"].split(","))
    assert {"Typing :: Typed", "Programming Language :: Python :: 3.11"} <= set(
        metadata.get_all("Classifier")
    )


# ---- installed, in an environment of its own

WITHOUT_EXTRAS = """
import importlib, pathlib, sys
extras = ("cloudpickle", "matplotlib", "rich", "safetensors", "spmd_types", "transformers")
sys.modules.update(dict.fromkeys(extras))  # as if they were not installed

import shardwise
folder = pathlib.Path(shardwise.__file__).parent
assert folder.is_relative_to(sys.prefix), folder
assert (folder / "py.typed").is_file()
for name in ("export", "fsdp", "interop", "parallel", "sharded", "testing"):
    assert getattr(shardwise, name).__name__ == f"shardwise.{name}"
for name in ("llama", "train_llama"):
    example = importlib.import_module(f"shardwise.examples.{name}")
    assert pathlib.Path(example.__file__).is_relative_to(sys.prefix)

from shardwise import cli
assert cli.main(["doctor"]) == 0
assert cli.main(["demo"]) == 1
del sys.modules["rich"]
assert cli.main(["demo"]) == 1
"""


def test_everything_but_the_demo_works_without_extras_and_the_demo_names_its_own(
    installed, wheel, tmp_path
):
    command = (installed / "python", "-W", "error", "-c", WITHOUT_EXTRAS)
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=environment(), check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:2] == ["shardwise", metadata_of(wheel)["Version"]]
    assert done.stderr.splitlines() == [
        f"shardwise: the demo needs the package {missing}, which is not installed: "
        'pip install "shardwise[demo]"'
        for missing in ("rich", "safetensors")
    ]


@pytest.mark.slow
def test_the_command_is_installed(installed, tmp_path):
    said = run(installed / "shardwise", "--help", cwd=tmp_path, env=environment())
    assert said.startswith("usage: shardwise")
    command = (installed / "python", "-m", "shardwise", "demo", "--help")
    assert run(*command, cwd=tmp_path, env=environment()).startswith("usage: shardwise demo")


@pytest.mark.slow
def test_an_installed_example_trains_on_processes(installed, tmp_path):
    options = ("--mesh", "2x1", "--steps", "2", "--batch", "2", "--length", "8")
    command = (installed / "python", "-m", "shardwise.examples.train_llama", *options)
    assert run(*command, cwd=tmp_path, env=environment()).startswith("step 2: loss ")


@pytest.mark.slow
def test_the_first_program_of_the_readme_runs_on_the_installed_package(installed, tmp_path):
    readme = (ROOT / "README.md").read_text("utf-8")
    program, printed = (
        re.search(rf"```{language}\n(.*?)```", readme, re.DOTALL)[1]
        for language in ("python", "text")
    )
    script = tmp_path / "readme.py"
    script.write_text(program, "utf-8")
    said = run(installed / "python", "-W", "error", script, cwd=tmp_path, env=environment())
    assert said == printed
