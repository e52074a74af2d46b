"""What holds for every integration test, and the promises that nothing proves yet, named after every run."""

import os
import signal
import tomllib
from pathlib import Path

import pytest

# A log named in the developer's shell is never read or written by a test.
os.environ.pop("AGENT_SAGA_LOG", None)

# Whoever started the tests in the background may have had them ignore Ctrl-C, and with them every process they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    promises = tomllib.loads(Path(__file__).with_name("promises.toml").read_text("utf-8"))
    pending = {name: entry["pending"] for name, entry in promises.items() if "pending" in entry}
    if pending:
        terminalreporter.section("promises not fully proved yet")
    for name, reason in pending.items():
        terminalreporter.write_line(f"{name}: {reason}")
