"""`recover --watch --metrics`: what is served, and every way in which it cannot be."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from agent_saga_core import (
    ActionSemantics,
    MemoryLog,
    RollbackIncomplete,
    compensator,
    saga_scope,
    undo,
)
from agent_saga_core.cli.failures import Complaint
from agent_saga_core.cli.metrics import Metrics, address_of
from agent_saga_core.recovery import Recoverer, recover_as
from agent_saga_core.registry import isolated_registry
from agent_saga_core.testing import ManualClock

BOUND = 60.0
C = ActionSemantics.COMPENSABLE


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    with isolated_registry():

        @compensator("shop.refund")
        def refund() -> None:
            raise ConnectionError("sk_live_secret")

        @compensator("shop.release")
        def release() -> None:
            pass

        yield


def scraped(metrics: Metrics) -> tuple[str, dict[tuple[str, ...], float]]:
    """The text, and each sample by its name and the values of its labels."""
    with urllib.request.urlopen(metrics.url, timeout=BOUND) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        text = answer.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return text, {(sample.name, *sample.labels.values()): sample.value for sample in samples}


def failed(log: MemoryLog, saga_id: str, handler: str) -> None:
    """A saga that its own process could not roll back, or has left to others."""
    with pytest.raises(RollbackIncomplete):
        with saga_scope(saga_id, log=log) as saga:
            saga.execute("act", lambda: 1, semantics=C, compensate=undo(handler))
            raise ValueError


class Untouchable(MemoryLog):
    """A log that knows when it may be used."""

    closed_to_all = False

    def _check(self, *, appending: bool = False) -> None:
        assert not self.closed_to_all, "a scrape touches the log"
        super()._check(appending=appending)


def test_what_is_served() -> None:
    log = Untouchable(ManualClock(auto=True, wall=1_000_000.0))
    recoverer, reachable = Recoverer(), [True]
    failed(log, "secret-saga-id", "shop.refund")
    dead = MemoryLog(log.clock, store=log.store)
    scope = saga_scope("other", log=dead)
    with scope:
        scope.execute("act", lambda: 1, semantics=C, compensate=undo("shop.release"))
        scope.suspend("a person", deadline=1.0)
    log.clock.advance(5.0)
    recover_as(recoverer, log)
    with Metrics("0", recoverer, lambda: reachable[0]) as metrics:
        log.closed_to_all = True
        text, found = scraped(metrics)
        assert found["agent_saga_unfinished_sagas", "attention"] == 1
        assert {
            found["agent_saga_unfinished_sagas", each] for each in ("live", "orphaned", "suspended", "waiting")
        } == {0}
        assert found["agent_saga_unfinished_sagas", "damaged"] == 0
        assert found["agent_saga_oldest_unfinished_age_seconds",] > 1e9
        assert found["agent_saga_compensations_total", "shop.release", "compensated"] == 1
        assert found["agent_saga_recovered_sagas_total",] == 1
        assert found["agent_saga_recovery_rounds_total",] == 1
        assert found["agent_saga_log_up",] == 1
        assert found["agent_saga_backing_off_handlers",] == 1
        assert found["agent_saga_handler_failures", "shop.refund"] == 3
        assert found["agent_saga_handler_failures", "shop.release"] == 0
        assert "secret" not in text and "other" not in text
        names = set(re.findall(r"^([a-z_]+)(?:\{| )", text, re.MULTILINE))
        assert all(name.startswith("agent_saga_") for name in names)
        for name in names:
            assert re.search(rf"^# HELP {name} \w", text, re.MULTILINE), name
            assert re.search(rf"^# TYPE {name} (gauge|counter)$", text, re.MULTILINE), name
        reachable[0] = False
        assert scraped(metrics)[1]["agent_saga_log_up",] == 0
        log.closed_to_all = False
        recover_as(recoverer, log, retry=True)
        _, found = scraped(metrics)
        assert found["agent_saga_compensations_total", "shop.refund", "failed"] == 2
        assert found["agent_saga_compensations_total", "shop.refund", "given_up"] == 1


def test_every_metric_is_in_the_page_about_the_fleet() -> None:
    with Metrics("0", Recoverer(), lambda: None) as metrics:
        text, _ = scraped(metrics)
    page = (Path(__file__).parents[3] / "docs/recovery-fleet.md").read_text("utf-8")
    names = re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE)
    assert len(names) == 8
    for name in names:
        assert f"`{name}`" in page, name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("9464", ("127.0.0.1", 9464)),
        ("0.0.0.0:9464", ("0.0.0.0", 9464)),
        ("[::1]:0", ("::1", 0)),
        ("metrics.internal:80", ("metrics.internal", 80)),
    ],
)
def test_addresses(text: str, expected: tuple[str, int]) -> None:
    assert address_of(text) == expected


@pytest.mark.parametrize("text", ["", "x", ":1", "1:", "65536", "::1:80", "a b:1", "http://h:1", "1\n", "h:-1", "٣"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(Complaint, match=r"--metrics takes \[HOST:\]PORT"):
        address_of(text)


def test_it_listens_on_this_machine_alone_unless_told_otherwise() -> None:
    with Metrics("0", Recoverer(), lambda: None) as metrics:
        assert re.fullmatch(r"http://127\.0\.0\.1:[0-9]+/metrics", metrics.url)
        with pytest.raises(Complaint, match="cannot listen on"):
            Metrics(metrics.url.split("/")[2], Recoverer(), lambda: None)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", int(metrics.url.split(":")[2].split("/")[0])), timeout=5).close()


def test_a_host_that_is_not_ours() -> None:
    with pytest.raises(Complaint, match="cannot listen on 192.0.2.1:0"):
        Metrics("192.0.2.1:0", Recoverer(), lambda: None)


# --- as a process


def cli(directory: Path, *words: str, code: str = "0") -> subprocess.CompletedProcess[str]:
    run = f"import sys; {code}; from agent_saga_core.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", run, *words],
        cwd=directory,
        env={**os.environ, "AGENT_SAGA_LOG": "file:./log"},
        capture_output=True,
        text=True,
        timeout=BOUND,
        check=False,
    )


def test_faults_are_one_line_and_exit_code_2(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for words, code, said in (
            (("--watch", "--metrics", port), "0", f"cannot listen on {port}"),
            (("--watch", "--metrics", "here"), "0", "--metrics takes [HOST:]PORT"),
            (("--metrics", "0"), "0", "--metrics goes with --watch"),
            (("--interval", "5"), "0", "--interval goes with --watch"),
            (("--watch", "--metrics", "0"), "sys.modules['prometheus_client'] = None",
             "pip install 'agent-saga-core[metrics]'"),
        ):  # fmt: skip
            ended = cli(tmp_path, "recover", *words, code=code)
            (line,) = ended.stderr.splitlines()
            assert (ended.returncode, ended.stdout) == (2, "") and said in line, ended


def test_without_metrics_the_extra_is_not_imported(tmp_path: Path) -> None:
    code = "import atexit; atexit.register(lambda: print('prometheus_client' in sys.modules))"
    assert cli(tmp_path, "log", "init", "file:./log").returncode == 0
    ended = cli(tmp_path, "recover", "--json", code=code)
    assert ended.returncode == 0 and ended.stdout.splitlines()[-1] == "False"
    assert json.loads(ended.stdout.rpartition("}")[0] + "}")["recovered"] == []
