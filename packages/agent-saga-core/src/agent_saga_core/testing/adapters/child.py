"""The other processes of the killing test: one that runs an agent until it is killed, and one that recovers.

What recovers imports the compensators and nothing of the adapter or its framework.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from agent_saga_core.log.file import FileLog
from agent_saga_core.recovery import recover
from agent_saga_core.testing.adapters.desk import BOUND, BY_ITEM, BY_RESULT, Desk

if TYPE_CHECKING:
    from agent_saga_core.testing.adapters.harness import AdapterHarness


def _harness(file: str, name: str) -> AdapterHarness:
    """Make the harness of this name in this file."""
    spec = importlib.util.spec_from_file_location("adapter_conformance_child", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where the classes made in it look for their names
    spec.loader.exec_module(module)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
    return cast("AdapterHarness", found())


def _run(directory: Path, file: str, name: str, entry_name: str, kind: str) -> None:
    from agent_saga_core.testing.adapters.harness import Call, Script

    # Frameworks print; the line that the parent waits for goes where nothing else goes.
    line = os.dup(1)
    os.dup2(2, 1)
    harness = _harness(file, name)
    entry = next(entry for entry in harness.entries if entry.name == entry_name)
    desk = Desk(directory / "desk")
    desk.register()

    def hold(item: str) -> None:
        os.write(line, b"standing\n")
        threading.Event().wait(2 * BOUND)  # to be killed here
        os._exit(70)

    desk.then["hold"] = hold
    is_async = kind == "async"
    tools = [
        harness.wrap(harness.tool(desk.function("book", is_async)), **BY_RESULT),
        harness.wrap(harness.tool(desk.function("hold", is_async)), **BY_ITEM),
    ]
    script = Script([Call("book", {"item": "a"}), Call("hold", {"item": "b"}), "all is booked"])
    log = FileLog(directory / "log")
    if entry.is_async:
        asyncio.run(harness.arun(entry, tools, script, log=log, saga_id="s"))
    else:
        harness.run(entry, tools, script, log=log, saga_id="s")


def _recover(directory: Path) -> None:
    Desk(directory / "desk").register()
    report = recover(FileLog(directory / "log", create=False))
    assert report.recovered == ("s",), report


if __name__ == "__main__":
    verb, where, *rest = sys.argv[1:]
    if verb == "run":
        _run(Path(where), *rest)
    else:
        _recover(Path(where))
