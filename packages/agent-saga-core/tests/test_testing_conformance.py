"""Every store of the core passes the suite that other stores are measured against, and a broken one does not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from agent_saga_core import FileLog, MemoryLog
from agent_saga_core.log.memory import MemoryStore
from agent_saga_core.testing import FaultyLog, LogConformance


class TestMemoryLog(LogConformance):
    survives_process = False

    @pytest.fixture
    def open_log_again(self):
        store = MemoryStore()
        return lambda: MemoryLog(store=store)


class TestFileLog(LogConformance):
    @pytest.fixture
    def open_log_again(self, tmp_path):
        return lambda: FileLog(tmp_path / "log")

    @pytest.fixture
    def spoil(self, tmp_path):
        def spoil(saga_id, n):
            (segment,) = (tmp_path / "log").glob("w-*/*.jsonl")
            lines = segment.read_bytes().splitlines(keepends=True)
            (at,) = (i for i, line in enumerate(lines) if f'"saga":"{saga_id}","n":{n},'.encode() in line)
            lines[at] = lines[at][:-20] + bytes([lines[at][-20] ^ 1]) + lines[at][-19:]
            segment.write_bytes(b"".join(lines))

        return spoil


class TestFaultyLogWithoutFaults(LogConformance):
    """The wrapper adds nothing when nothing is planned."""

    @pytest.fixture
    def open_log_again(self, tmp_path):
        return lambda: FaultyLog(FileLog(tmp_path / "log"))


BROKEN = """
import pytest
from agent_saga_core import MemoryLog
from agent_saga_core.log.memory import MemoryStore
from agent_saga_core.testing import LogConformance

class Forgetful(MemoryLog):
    def flush(self, ticket):
        pass

class Shared(MemoryLog):
    def take(self, saga_id, token):
        self.store.owners[saga_id] = (self, token)

class Reordering(MemoryLog):
    def read(self, saga_id):
        return super().read(saga_id)[::-1]

class Suite(LogConformance):
    survives_process = False
    kind = MemoryLog

    @pytest.fixture
    def open_log_again(self):
        store = MemoryStore()
        return lambda: self.kind(store=store)

class TestForgetful(Suite):
    kind = Forgetful

class TestShared(Suite):
    kind = Shared

class TestReordering(Suite):
    kind = Reordering

class TestForgotten(LogConformance):
    pass
"""


def test_broken_stores_do_not_pass(tmp_path):
    (tmp_path / "test_broken.py").write_text(BROKEN, "utf-8")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfE", "--tb=no", "test_broken.py",
         "-k", "at_once or is_busy or in_order or it_is_a_log"],
        cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert ran.returncode == 1, ran.stdout
    for name in (
        "FAILED test_broken.py::TestForgetful::test_what_is_flushed_is_there_for_others_at_once",
        "FAILED test_broken.py::TestShared::test_an_owned_saga_is_busy_for_everybody",
        "FAILED test_broken.py::TestReordering::test_records_come_back_equal_and_in_order",
        "ERROR test_broken.py::TestForgotten::test_it_is_a_log",
    ):
        assert name in ran.stdout, ran.stdout
