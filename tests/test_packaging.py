"""The wheel has everything in it, and works without the checkout."""

import email
import email.message
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.needs("pip"), pytest.mark.needs("setuptools")]  # uv has no pip

ROOT = Path(__file__).resolve().parent.parent

# Of a checkout, what a wheel is made of: building leaves files behind, and other tests may build.
SOURCES = ("src", "examples", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy of the sources, without the network."""
    folder = tmp_path_factory.mktemp("wheel")
    checkout, made = folder / "checkout", folder / "made"
    copy(checkout)
    run(
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-index"),
        *("--no-deps", "--no-build-isolation", "--no-cache-dir", "--wheel-dir", made, checkout),
    )
    (found,) = made.glob("*.whl")
    return found


def copy(target: Path) -> None:
    target.mkdir()
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            leave = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(source, target / name, symlinks=True, ignore=leave)
        else:
            shutil.copy(source, target / name)


def run(*command: object, **options: object) -> str:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=300, check=False, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_has_every_module_and_the_mark_of_types(wheel):
    package = ROOT / "src" / "shardwise"
    # Not by a glob: it would not follow a link.
    wanted = {
        f"shardwise/{path.relative_to(package).as_posix()}"
        for folder, _, names in os.walk(package, followlinks=True)
        for path in map(Path(folder).joinpath, names)
        if path.suffix == ".py"
    }
    assert {"shardwise/examples/llama.py", "shardwise/examples/train_llama.py"} <= wanted
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == wanted | {"shardwise/py.typed"}


def metadata_of(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def test_the_metadata_name_the_versions_that_are_supported(wheel):
    metadata = metadata_of(wheel)
    assert metadata["Requires-Python"] == ">=3.11"
    (torch,) = [each for each in metadata.get_all("Requires-Dist") if each.startswith("torch")]
    assert set(torch.removeprefix("torch").split(",")) == {">=2.13", "<2.16"}
    assert set(metadata.get_all("Provides-Extra")) == {"demo", "hf", "dev"}


def test_the_first_program_of_the_readme_runs_on_an_unpacked_wheel(wheel, tmp_path):
    readme = (ROOT / "README.md").read_text("utf-8")
    program, printed = (
        re.search(rf"```{language}\n(.*?)```", readme, re.DOTALL)[1]
        for language in ("python", "text")
    )
    unpacked, script = tmp_path / "unpacked", tmp_path / "readme.py"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    script.write_text(program + "    print(sw.__file__)\n", "utf-8")
    # First on the path, before the checkout that is installed here.
    environment = os.environ | {"PYTHONPATH": str(unpacked)}
    said = run(sys.executable, "-W", "error", script, cwd=tmp_path, env=environment)
    assert said == f"{printed}{unpacked / 'shardwise' / '__init__.py'}\n"
    help = run(sys.executable, "-m", "shardwise", "demo", "--help", cwd=tmp_path, env=environment)
    assert help.startswith("usage: shardwise demo")
