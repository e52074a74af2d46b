"""What a log on a server is opened by, what it says when it cannot be, its damage, and its upkeep."""

from __future__ import annotations

import json
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from agent_saga_core.cli.app import app
from agent_saga_core.errors import LogCorrupted, LogUnavailable
from agent_saga_core.log import open_log
from agent_saga_core.log.open import init_log

from .line import Line
from .store import Store, also, record

SECRET = "s3cr3t-of-Scott"


def begin(log: Any, saga: str, *kinds: str) -> None:
    log.claim(saga)
    for n, kind in enumerate(("START", *kinds), 1):
        log.flush(log.append(record(saga, n, kind)))


def cli(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.stdout, result.stderr


def refused(use: Callable[[], object], kind: type[Exception] = LogUnavailable) -> str:
    """The one clear line that it is refused with; no password is in it, nor in what is printed with it."""
    with pytest.raises(kind) as caught:
        use()
    said = str(caught.value)
    assert said and "\n" not in said and len(said) < 600
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    return said


class Addresses:
    """A store says which addresses are none, how a saga is damaged behind its back, and what the dead leave."""

    no_addresses: ClassVar[list[str]]
    """Each with `SECRET` as the password of scott."""
    spoils: ClassVar[dict[str, Callable[[str], object]]]
    """By their names: each does something to the saga `bad`, which has three records, in the log of an address.

    `epoch`, which every store has, makes its row or entry name a CLAIM that it does not have: that number is half of
    what keeps a former owner out.
    """
    damage_has_an_owner: ClassVar[bool] = True
    """Whether no place is damaged of which it cannot be said whose it is."""
    compactions: ClassVar[int] = 10
    """How many go on beside the writers."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "no_address" in metafunc.fixturenames:
            metafunc.parametrize("no_address", self.no_addresses)
        if "spoil" in metafunc.fixturenames:
            assert "epoch" in self.spoils
            metafunc.parametrize("spoil", self.spoils.values(), ids=self.spoils.keys())

    def as_scott(self, url: str) -> str:
        """That address, with scott and `SECRET`."""
        raise NotImplementedError

    def shown(self, url: str) -> str:
        """That address, as the log shows it."""
        raise NotImplementedError

    def check_nothing(self, url: str) -> None:
        """Nothing is on the server of that log."""
        raise NotImplementedError

    def check_what_the_dead_left(self, log: Any, other: Any, url: str) -> None:
        """What `log` has claimed and not begun is gone after a compaction by `other`, once its lease is long over."""
        raise NotImplementedError

    def check_what_ended_costs_nothing(self, log: Any, late: Any, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """To list what is unfinished, when as much has ended of what `log` began; `late` was just opened."""
        raise NotImplementedError

    def check_unfinished(self, saga_ids: tuple[str, ...]) -> None:
        """Of a log with a damaged saga."""
        assert "bad" in saga_ids

    def test_what_is_no_address_is_refused_without_repeating_it(self, no_address: str) -> None:
        refused(lambda: open_log(no_address), ValueError)
        code, out, complaint = cli("log", "init", no_address)
        assert code == 2 and out == "" and complaint.count("\n") == 1 and SECRET not in complaint

    def test_options_of_the_address_reach_the_log(self, url: str) -> None:
        log = open_log(also(url, max_result_bytes=77, lease=12.5))
        assert log.max_result_bytes == 77 and "lease=12.5" in log.url
        again = open_log(log.url)
        assert again.max_result_bytes == 77
        again.close()
        log.close()

    def test_an_id_that_is_no_text_is_refused(self, opened: Callable[..., Any]) -> None:
        log = opened()
        for saga in ("a\0b", "\ud800"):
            for use in (log.claim, log.read, log.is_live, log.lines):
                with pytest.raises(ValueError, match="saga id"):
                    use(saga)

    def test_a_host_that_cannot_be_reached_is_one_line(self, store: Store, proxy: Line, url: str) -> None:
        address = self.as_scott(proxy.address(url))
        proxy.close()
        for use in (store.log, store.init, store.migrate):
            assert "cannot be used" in refused(lambda use=use: use(address))
        code, out, complaint = cli("list", "--log", address)
        assert code == 2 and out == "" and complaint.count("\n") == 1 and SECRET not in complaint

    def test_a_log_that_was_not_initialised_is_one_line_and_is_not_made_in_passing(
        self, store: Store, uri: str
    ) -> None:
        url = store.fresh(uri)
        said = refused(lambda: open_log(url))
        assert "was not initialised" in said and "agent-saga log init" in said
        refused(lambda: store.migrate(url))
        code, out, complaint = cli("list", "--log", url)
        assert code == 2 and out == "" and "was not initialised" in complaint
        self.check_nothing(url)

    def test_many_make_one_log(self, store: Store, uri: str) -> None:
        url = store.fresh(uri)
        with ThreadPoolExecutor(6) as pool:
            done = list(pool.map(store.init, [url] * 6))
        assert sorted(one.made for one in done) == [False] * 5 + [True]

    def test_the_verbs_of_the_command_line(self, store: Store, uri: str) -> None:
        url = store.fresh(uri)
        shown = self.shown(url)
        assert cli("log", "init", url) == (0, f"made {shown} (version 1.0)\n", "")
        assert cli("log", "init", url)[1] == f"{shown} is a log already (version 1.0)\n"
        assert cli("log", "migrate", url)[1] == f"{shown} is at version 1.0: nothing to migrate\n"
        assert init_log(url).made is False
        log = open_log(url)
        for name, last in (("old", "COMMITTED"), ("open", "INTENT")):
            log.claim(name)
            log.append(record(name, 1, "START"))
            log.append(record(name, 2, last))
            log.release(name)
        log.close()
        assert cli("verify", "--log", url)[:2] == (0, "intact: 4 records\n")
        code, done, _ = cli("compact", "--log", url, "--json")
        assert code == 0 and json.loads(done)["sagas"] == 1
        again = open_log(url, create=False)
        assert again.unfinished().saga_ids == again.saga_ids() == ("open",)
        again.close()

    def test_damage_names_its_saga_and_stops_no_other(
        self, store: Store, url: str, spoil: Callable[[str], object]
    ) -> None:
        log = store.log(url)
        for saga in ("good", "bad", "done"):
            begin(log, saga, "INTENT", "COMMITTED" if saga == "done" else "DONE")
            log.release(saga)
        log.close()
        spoil(url)
        log = store.log(url)
        for use in (log.read, log.claim, log.lines):
            with pytest.raises(LogCorrupted, match="'bad'") as caught:
                use("bad")
            assert caught.value.saga_id == "bad"
        # A hint, and asked for all sagas in turn: one that is damaged must not stop who asks.
        assert not log.owned("bad") and not log.is_live("bad")
        self.check_unfinished(log.unfinished().saga_ids)
        found = log.verify()
        assert not found.intact and found.damage
        named = ["bad" in (one.saga_ids or ()) for one in found.damage]
        assert all(named) if self.damage_has_an_owner else any(named)
        assert len(log.claim("good")) == 4 and len(log.read("done")) == 3
        assert log.compact(keep_days=0).sagas == 1
        with pytest.raises(LogCorrupted):
            log.read("bad")  # compaction left it to be found
        log.close()

    def test_compaction_beside_writers_and_what_dead_processes_left(self, store: Store, url: str) -> None:
        log, other = store.log(url), store.log(url)
        stop = threading.Event()
        begun = threading.Semaphore(0)

        def work(at: int) -> int:
            n = 0
            while not stop.is_set():
                n += 1
                saga = f"{at}-{n}"
                log.claim(saga, fresh=n % 2 == 0)
                log.append(record(saga, 1, "START"))
                log.flush(log.append(record(saga, 2, "COMMITTED" if n % 3 else "INTENT")))
                log.release(saga)
                begun.release()
            return n

        with ThreadPoolExecutor(3) as pool:
            futures = [pool.submit(work, at) for at in range(3)]
            forgotten = 0
            try:
                for _ in range(self.compactions):
                    for _ in range(12):
                        assert begun.acquire(timeout=60)
                    forgotten += other.compact(keep_days=0).sagas
            finally:
                stop.set()
            counts = [future.result(60) for future in futures]
        forgotten += other.compact(keep_days=0).sagas
        assert forgotten == sum(n - n // 3 for n in counts)
        assert sorted(other.unfinished().saga_ids) == sorted(
            f"{at}-{n}" for at, most in enumerate(counts) for n in range(3, most + 1, 3)
        )
        assert other.verify().intact
        log.claim("never begun")
        self.check_what_the_dead_left(log, other, url)
        assert sorted(other.unfinished().saga_ids) == sorted(other.saga_ids())
        other.close()
        log.close()

    def test_ten_thousand_unfinished_sagas_are_found_beside_ten_thousand_that_ended(
        self, opened: Callable[..., Any], url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log, other = opened(), opened()
        ids = [f"saga-{at}" for at in range(20_000)]
        ticket = 0
        for at, saga in enumerate(ids):
            log.claim(saga, fresh=True)
            log.append(record(saga, 1, "START"))
            ticket = log.append(record(saga, 2, "COMMITTED" if at % 2 else "INTENT"))
        log.flush(ticket)
        assert list(other.unfinished().saga_ids) == ids[::2]
        assert list(other.saga_ids()) == ids
        told: list[int] = []
        assert other.verify(told.append).records == 40_000 and told[-1] == 40_000 and len(told) >= 4
        self.check_what_ended_costs_nothing(log, opened(), url, monkeypatch)
