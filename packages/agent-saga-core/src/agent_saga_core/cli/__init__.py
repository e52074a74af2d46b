"""The command line: `agent-saga`. `docs/cli.md` is its manual."""

from __future__ import annotations

import sys
from importlib.util import find_spec

__all__ = ["main"]


def main() -> int:
    """Run the command line on `sys.argv` and return its exit code.

    Needs the extra `cli`; where that is missing, it says so in one line and returns 2.
    """
    if any(find_spec(needed) is None for needed in ("typer", "rich")):
        print("agent-saga: the command line needs an extra; pip install 'agent-saga-core[cli]'", file=sys.stderr)
        return 2
    from agent_saga_core.cli.app import run

    return run()
