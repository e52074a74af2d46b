"""The wheels that users get, each alone in an environment of its own."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "packages/agent-saga-core"
ADAPTERS = sorted(path for path in ROOT.glob("packages/agent-saga-*") if path != CORE)

# The first run on a machine may have to fetch the build backend.
pytestmark = pytest.mark.timeout(300)


def uv(*arguments: str) -> None:
    """Run uv from its cache; where that lacks something, once more with the network."""
    program = os.environ.get("UV") or shutil.which("uv")
    assert program, "these tests need uv"
    if subprocess.run([program, "--offline", *arguments], cwd=ROOT, capture_output=True, check=False).returncode:
        subprocess.run([program, *arguments], cwd=ROOT, check=True)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel of every package."""
    folder = tmp_path_factory.mktemp("dist")
    for package in (CORE, *ADAPTERS):
        uv("build", "--wheel", "--package", package.name, "--out-dir", str(folder))
    return folder


def wheel_of(package: Path, dist: Path) -> Path:
    (built,) = dist.glob(f"{package.name.replace('-', '_')}-*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return wheel_of(CORE, dist)


def environment(folder: Path, requirement: str, *options: str) -> Path:
    """A new virtual environment that holds `requirement`; return its folder of scripts."""
    uv("venv", "--python", sys.executable, str(folder))
    uv("pip", "install", "--python", str(folder), *options, requirement)
    return folder / "bin"


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("AGENT_SAGA_", "PYTHON", "COV"))}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_the_wheel_holds_the_package_its_types_and_its_license(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    modules = {f"{file.relative_to(CORE / 'src')}" for file in (CORE / "src").rglob("*.py")}
    assert modules <= names
    assert "agent_saga_core/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    tops = {name.partition("/")[0].partition("-")[0] for name in names}
    assert tops == {"agent_saga_core", "agent_saga_core_pytest.py"}
    assert (CORE / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    scripts = environment(tmp_path / "env", str(wheel))
    names = run(scripts / "python", "-c", "from agent_saga_core import *; print(saga_scope.__name__)", cwd=tmp_path)
    assert (names.returncode, names.stdout) == (0, "saga_scope\n"), names.stderr

    # Without its extra the CLI says in one line what to install.
    bare = run(scripts / "agent-saga", "version", cwd=tmp_path)
    assert bare.returncode == 2
    assert "agent-saga-core[cli]" in bare.stderr and len(bare.stderr.splitlines()) == 1


def test_the_wheel_with_its_cli(wheel: Path, tmp_path: Path) -> None:
    scripts = environment(tmp_path / "env", f"agent-saga-core[cli] @ {wheel.as_uri()}")
    version = wheel.name.split("-")[1]
    for command in ([scripts / "agent-saga"], [scripts / "python", "-m", "agent_saga_core"]):
        shown = run(*command, "version", cwd=tmp_path)
        assert shown.returncode == 0, shown.stderr
        assert version in shown.stdout


@pytest.mark.parametrize("package", ADAPTERS, ids=lambda package: package.name)
def test_an_adapters_wheel_alone(package: Path, dist: Path, tmp_path: Path) -> None:
    module = package.name.replace("-", "_")
    built = wheel_of(package, dist)
    with zipfile.ZipFile(built) as archive:
        names = set(archive.namelist())
    assert {f"{file.relative_to(package / 'src')}" for file in (package / "src").rglob("*.py")} <= names
    assert f"{module}/py.typed" in names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {module}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert (package / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()

    scripts = environment(tmp_path / "env", str(built), "--find-links", str(dist))
    code = f"""
import sys
from agent_saga_core.fleet import adapters
light = [adapter for adapter in adapters() if adapter.package == {module!r}]
assert len(light) == 1 and not [root for root in light[0].roots if root in sys.modules], light
from {module} import asaga_run, coverage, saga_run, wrap_tool
import {module}
assert {{"wrap_tool", "saga_run", "asaga_run", "coverage"}} <= set({module}.__all__)
print(light[0].load().__name__)
"""
    done = run(scripts / "python", "-c", code, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{module}\n"), done.stderr
