"""Tests each package alone in an isolated environment: `python lanes.py floors | newest [NAME ...]`.

`floors` takes the lowest version that the package's own pyproject.toml allows of everything it names, `newest` the
highest; what those bring along is resolved as for any user. NAME is a package such as `langchain`; default: all. Of the
core, the tests are those of its extras: `core`.
Needs uv. Exits with 1 if a package's tests failed, and says which versions they ran with.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CORE = ROOT / "packages/agent-saga-core"
HARNESS = ("pytest", "pytest-asyncio", "pytest-timeout", "pytest-socket", "hypothesis", "inline-snapshot")
"""What the tests need beside the package; at the versions of the lock, so that only the framework varies."""


QUIET = ("-W", "ignore:'click.utils:DeprecationWarning")
"""What a typer of the past asks of today's click is no concern of ours before it breaks."""
OF_CORE = (
    "test_cli.py",
    "test_cli_metrics.py",
    "nats/test_log_nats.py",
    "postgres/test_log_postgres.py",
    "redis/test_log_redis.py",
)
"""The tests of the core in which its extras are used for what they are there for."""


def packages() -> dict[str, Path]:
    """Every package by its short name."""
    found = sorted(ROOT.glob("packages/agent-saga-*/pyproject.toml"))
    return {path.parent.name.removeprefix("agent-saga-"): path.parent for path in found}


def project(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]


def name_of(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found, requirement
    return found[0].lower().replace("_", "-")


def requirements(folder: Path) -> tuple[list[str], list[Path]]:
    """What a package names of others, its extras and core's command line included, and the local packages it needs."""
    named: dict[str, str] = {}
    local: list[Path] = []
    queue = list(dict.fromkeys([folder, CORE]))
    for package in queue:
        local.append(package)
        found = project(package)
        for requirement in [*found["dependencies"], *sum(found.get("optional-dependencies", {}).values(), [])]:
            name = name_of(requirement)
            if not name.startswith("agent-saga-"):
                named.setdefault(name, requirement)
            elif (other := ROOT / "packages" / name) not in queue:
                queue.append(other)
    return list(named.values()), local


def locked() -> dict[str, str]:
    lock = tomllib.loads((ROOT / "uv.lock").read_text("utf-8"))
    return {package["name"]: package.get("version", "") for package in lock["package"]}


def test_needs(folder: Path) -> list[str]:
    """What only the tests of this package need: listed in its `[dependency-groups] test`, at the lock's version."""
    groups = tomllib.loads((folder / "pyproject.toml").read_text("utf-8")).get("dependency-groups", {})
    versions = locked()
    return [
        f"{needed}=={versions[needed]}" if needed == name_of(needed) else needed for needed in groups.get("test", [])
    ]


def run(lane: str, name: str, folder: Path) -> bool:
    named, local = requirements(folder)
    versions = locked()
    harness = [f"{tool}=={versions[tool]}" for tool in HARNESS]
    extras = test_needs(folder)
    with tempfile.TemporaryDirectory() as scratch:
        wanted = Path(scratch) / "requirements.txt"
        # What is named here is a direct requirement: `lowest-direct` takes the lowest of those alone.
        wanted.write_text("\n".join([*named, *harness, *extras]) + "\n", "utf-8")
        command = ["uv", "run", "--isolated", "--no-project", "--python", sys.executable]
        command += ["--resolution", "lowest-direct" if lane == "floors" else "highest"]
        command += ["--with-requirements", str(wanted)]
        for package in local:
            command += ["--with-editable", str(package)]  # a built one may be an older build, from the cache
        env = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH")}
        frameworks = [name_of(requirement) for requirement in project(folder)["dependencies"]]
        show = "import sys; from importlib.metadata import version as v; print(*(f'{n} {v(n)}' for n in sys.argv[1:]))"
        print(f"\n== {lane} {name}", flush=True)
        subprocess.run([*command, "python", "-c", show, *frameworks], cwd=ROOT, env=env, check=False)
        where = [f"packages/{folder.name}/tests/{part}" for part in (OF_CORE if folder == CORE else ("",))]
        tests = [*command, "python", "-m", "pytest", "-q", *QUIET, *where]
        return subprocess.run(tests, cwd=ROOT, env=env, check=False).returncode == 0


def main(arguments: list[str]) -> int:
    lane, *names = arguments or [""]
    known = packages()
    if lane not in ("floors", "newest") or not set(names) <= known.keys():
        print(f"{__doc__}\nPackages: {', '.join(known)}", file=sys.stderr)
        return 2
    failed = [name for name in names or known if not run(lane, name, known[name])]
    print(f"\n== {lane}: " + (f"failed: {', '.join(failed)}" if failed else "all passed"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
