"""The wheel that users get, alone in an environment of its own."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "packages/agent-saga-core"

# The first run on a machine may have to fetch the build backend.
pytestmark = pytest.mark.timeout(300)


def uv(*arguments: str) -> None:
    """Run uv from its cache; where that lacks something, once more with the network."""
    program = os.environ.get("UV") or shutil.which("uv")
    assert program, "these tests need uv"
    if subprocess.run([program, "--offline", *arguments], cwd=ROOT, capture_output=True, check=False).returncode:
        subprocess.run([program, *arguments], cwd=ROOT, check=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    uv("build", "--wheel", "--package", "agent-saga-core", "--out-dir", str(folder))
    (built,) = folder.glob("*.whl")
    return built


def environment(folder: Path, requirement: str) -> Path:
    """A new virtual environment that holds `requirement`; return its folder of scripts."""
    uv("venv", "--python", sys.executable, str(folder))
    uv("pip", "install", "--python", str(folder), requirement)
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
