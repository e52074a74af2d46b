"""What a NATS log is opened by, what it says when it cannot be, its streams, its damage, and its upkeep."""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

import msgspec
import pytest

from agent_saga_core.errors import LogCorrupted, SagaBusy
from agent_saga_core.log.memory import MemoryLog
from agent_saga_core.log.nats import NatsLog, init, lease, migrate, schema
from agent_saga_core.log.nats.address import address_of
from agent_saga_core.log.nats.connection import Server
from agent_saga_core.log.nats.messages import meta_of, saga_of, token_of
from agent_saga_core.log.sql import Version

from ..servers.addresses import SECRET, Addresses, begin, cli, refused
from ..servers.store import record, wait_for
from .proxy import Proxy
from .server import Nats, behind, fresh, server_of_its_own, through

# --- addresses


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"nats://scott:{SECRET}@n.example:5222/shop", "nats://scott:@n.example:5222/shop"),
        (f"nats://{SECRET}@n.example", "nats://n.example"),
        (f"nats://a,b:1,c/x?token={SECRET}&lease=5&replicas=3", "nats://a,b:1,c/x?lease=5&replicas=3"),
        ("nats://", "nats://localhost"),
        (f"nats://sc%40tt:{SECRET}%40@h?creds=/etc/a%20b", "nats://sc%40tt:@h?creds=/etc/a%20b"),
        ("nats://[::1]:4222?tls=1&monitor=a:8222,b:8222", None),
    ],
)
def test_an_address_is_shown_without_its_credentials_and_means_the_same(url: str, shown: str | None) -> None:
    address = address_of(url)
    assert SECRET not in address.url and (shown is None or address.url == shown)
    again = address_of(address.url)
    secret = {"password": None, "token": None, "secrets": ()}
    assert again == address._replace(**secret)


def test_the_environment_supplies_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NATS_USER", "scott")
    monkeypatch.setenv("NATS_PASSWORD", SECRET)
    for url in ("nats://h", "nats://scott@h", "nats://scott:@h"):
        found = address_of(url)
        assert (found.user, found.password, found.token) == ("scott", SECRET, None) and SECRET not in repr(found.url)
    monkeypatch.delenv("NATS_USER")
    monkeypatch.delenv("NATS_PASSWORD")
    monkeypatch.setenv("NATS_TOKEN", SECRET)
    monkeypatch.setenv("NATS_CREDS", "/etc/creds")
    found = address_of("nats://h")
    assert (found.token, found.creds, found.secrets) == (SECRET, "/etc/creds", (SECRET,))


@pytest.mark.parametrize("saga", ["a", "A-b_c", "a.b", "*", ">", "ü ☃", "=", "==", " ", "\x7f", "a=2E", "x" * 512])
def test_an_id_is_one_token_of_a_subject_and_comes_back(saga: str) -> None:
    token = token_of(saga)
    assert token.isascii() and not set(token) & set(" .*>\r\n\t") and saga_of(token) == saga


@pytest.mark.parametrize("token", ["=2", "=zz", "=41", "=FF", "ü", "a.b", "= 1", "=2e"])
def test_a_token_that_no_id_has_is_none(token: str) -> None:
    assert saga_of(token) is None


# --- what cannot be opened


@pytest.fixture(scope="module")
def guarded() -> Iterator[Nats]:
    """A server that wants credentials, and on which one user may only look."""
    may_look = '{ publish: { allow: ["$JS.API.>", "_INBOX.>"], deny: ["$JS.API.STREAM.CREATE.>"] } }'
    api = ("STREAM.INFO.*", "STREAM.MSG.GET.*", "DIRECT.GET.>", "STREAM.MSG.DELETE.*", "STREAM.PURGE.*")
    allowed = ", ".join(f'"{subject}"' for subject in ("t_narrow.>", *(f"$JS.API.{one}" for one in api)))
    may_write = f'{{ publish: {{ allow: [{allowed}] }}, subscribe: {{ allow: ["_INBOX.>"] }} }}'
    users = (
        f'{{ user: "scott", password: "{SECRET}" }}, '
        f'{{ user: "looker", password: "{SECRET}", permissions: {may_look} }}, '
        f'{{ user: "writer", password: "{SECRET}", permissions: {may_write} }}'
    )
    with server_of_its_own(more=f"authorization {{ users: [ {users} ] }}") as server:
        yield server


def _as(server: Nats, user: str, password: str | None, url: str = "") -> str:
    login = f"{user}:{quote(password)}@" if password is not None else ""
    return (url or fresh(server.uri)).replace("nats://", f"nats://{login}")


def test_a_wrong_password_and_none_are_one_line(guarded: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = fresh(guarded.uri)
    init(_as(guarded, "scott", SECRET, plain))
    for url in (_as(guarded, "scott", SECRET + "x", plain), plain, plain.replace("//", f"//{SECRET}@")):
        assert "refuses these credentials" in refused(lambda url=url: NatsLog(url))
        code, out, complaint = cli("list", "--log", url)
        assert code == 2 and out == "" and complaint.count("\n") == 1 and SECRET not in complaint
    log = NatsLog(_as(guarded, "scott", SECRET, plain))
    begin(log, "s")
    assert SECRET not in log.url
    monkeypatch.setenv("NATS_PASSWORD", SECRET)
    again = NatsLog(log.url)
    assert again.is_live("s")
    again.close()
    log.close()


def test_where_no_server_is_and_where_none_answers_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        given = f"nats://127.0.0.1:{port}/log?timeout=0"
        assert "no server answers in time" in refused(lambda: NatsLog(given))
    assert "no server can be reached" in refused(lambda: NatsLog(given))


def test_who_may_look_and_not_write_is_told_so_before_any_effect(guarded: Nats) -> None:
    plain = fresh(guarded.uri)
    init(_as(guarded, "scott", SECRET, plain))
    log = NatsLog(_as(guarded, "looker", SECRET, plain) + "?timeout=0.5")
    assert log.saga_ids() == () and log.verify().intact and log.unfinished().saga_ids == ()
    said = refused(lambda: log.claim("s", fresh=True))
    assert "ermission" in said and f"publish on {log._address.name}.>" in said and not log.owned("s")
    log.close()
    assert "ermission" in refused(lambda: init(_as(guarded, "looker", SECRET) + "?timeout=0.5"))


def test_the_rights_that_the_page_names_are_enough(guarded: Nats) -> None:
    plain = f"{guarded.uri}/t_narrow"
    init(_as(guarded, "scott", SECRET, plain))
    ended, log = (NatsLog(_as(guarded, "writer", SECRET, plain)) for _ in range(2))
    begin(ended, "s", "COMMITTED")
    begin(ended, "t", "INTENT")
    log.claim("nothing")
    log.release("nothing")
    ended.close()
    assert log.claim("t")[-1].type == "CLAIM" and log.unfinished().saga_ids == ("t",)
    assert log.compact(keep_days=0).sagas == 1 and log.saga_ids() == ("t",) and log.verify().intact
    log.close()


def test_a_server_without_jetstream_is_one_line() -> None:
    with server_of_its_own(more="") as server:
        config = server._config.read_text("utf-8")
        server.stop()
        server._config.write_text(config[: config.index("jetstream")], "utf-8")
        server.start()
        assert "JetStream" in refused(lambda: init(fresh(server.uri, timeout=0.2)))


def test_a_server_that_takes_only_small_messages_is_refused() -> None:
    with server_of_its_own(more="max_payload: 4096") as server:
        assert "max_payload" in refused(lambda: init(fresh(server.uri)))


def test_a_small_max_payload_divides_what_is_longer(caplog: pytest.LogCaptureFixture) -> None:
    with server_of_its_own(more="max_payload: 65536") as server:
        url = fresh(server.uri)
        init(url)
        log = NatsLog(url)
        ids = [f"s{n}" for n in range(400)]
        for saga in ids:
            log.claim(saga, fresh=True)
            log.append(record(saga, 1, "START", x="x" * 2_000))
        log.flush(0x7FFFFFFF)
        begin(log, "long", *["INTENT"] * 200)
        log.flush(log.append(record("long", 202, x="y" * 300_000)))
        other = NatsLog(url)
        assert other.read("long")[-1].data == {"x": "y" * 300_000}
        assert all(len(other.read(saga)) == 1 for saga in ids[::40])
        assert len(other.unfinished().saga_ids) == 401 and other.verify().intact
        assert other.verify().records == 602
        other.close()
        log.close()


def test_tls_is_asked_for_by_the_address(proxy: Proxy, url: str) -> None:
    said = refused(lambda: NatsLog(f"{through(url, proxy.port)}&tls=1".replace("//", f"//scott:{SECRET}@")))
    assert "asks for TLS" in said


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl")
def test_a_log_over_tls_and_only_with_a_certificate_that_is_known(tmp_path: Path) -> None:
    for name in ("known", "unknown"):
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
            + ["-subj", "/CN=agent-saga", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
            + ["-keyout", str(tmp_path / f"{name}.key"), "-out", str(tmp_path / f"{name}.pem")],
            check=True,
            capture_output=True,
        )
    chain, key = tmp_path / "known.pem", tmp_path / "known.key"
    users = f'authorization {{ user: "scott", password: "{SECRET}" }}'
    with server_of_its_own(more=f'tls {{ cert_file: "{chain}", key_file: "{key}" }}\n{users}') as server:
        plain = _as(server, "scott", SECRET)
        known = f"{plain}?tls_ca={tmp_path / 'known.pem'}"
        init(known)
        log = NatsLog(known)
        begin(log, "s")
        log.close()
        assert "TLS failed" in refused(lambda: NatsLog(f"{plain}?tls_ca={tmp_path / 'unknown.pem'}"))


# --- what a crash of the machine may lose


@pytest.fixture(scope="module")
def lazy() -> Iterator[Nats]:
    """A server with the sync interval that it has by default."""
    with server_of_its_own(sync=None) as server:
        yield server


def test_a_server_with_the_default_sync_interval_opens_with_a_warning_that_says_what_may_be_lost(
    lazy: Nats, caplog: pytest.LogCaptureFixture
) -> None:
    seen = fresh(lazy.uri, monitor=f"127.0.0.1:{lazy.monitor}")
    (warning,) = init(seen).warnings
    assert "syncs every 120 seconds" in warning and "the last 120 seconds may be lost" in warning
    assert "machine of the server crashes" in warning and "sync_interval: always" in warning
    caplog.set_level(logging.WARNING, "agent_saga")
    for _ in range(2):
        NatsLog(seen).close()
    (told,) = [one for one in caplog.records if one.name == "agent_saga"]  # once
    assert "the last 120 seconds may be lost" in told.getMessage()
    said = refused(lambda: NatsLog(f"{seen}&require_sync=1"))
    assert "require_sync" in said and "sync_interval: always" in said
    refused(lambda: init(f"{seen}&require_sync=1"))
    code, out, complaint = cli("log", "init", seen)
    assert code == 0 and "may be lost" in out + complaint


def test_a_sync_interval_that_cannot_be_seen_is_a_warning_too(lazy: Nats) -> None:
    unseen = fresh(lazy.uri)
    (warning,) = init(unseen).warnings
    assert "cannot be seen" in warning and "monitor=" in warning and "may be lost" in warning
    assert "cannot be seen" in refused(lambda: NatsLog(f"{unseen}?require_sync=1"))
    silent = f"{unseen}?monitor=127.0.0.1:{lazy.port}"
    (warning,) = init(silent).warnings
    assert "does not say" in warning
    refused(lambda: NatsLog(f"{silent}&require_sync=1"))


def test_a_server_that_syncs_always_is_what_require_sync_wants(mortal: Nats, mortal_url: str) -> None:
    url = f"{mortal_url}?monitor=127.0.0.1:{mortal.monitor}&require_sync=1"
    assert init(url).warnings == ()
    NatsLog(url).close()


def test_streams_that_would_lose_records_are_refused(url: str) -> None:
    name = address_of(url).name

    def change(stream: str, **options: object) -> None:
        async def do(server: Server) -> None:
            config = (await server.api(f"STREAM.INFO.{stream}"))["config"]
            await server.api(f"STREAM.UPDATE.{stream}", {**config, **options})

        behind(url, do)

    change(name, max_age=3600 * 10**9)
    assert "max_age of its log stream" in refused(lambda: NatsLog(url))
    change(name, max_age=0)
    change(f"{name}_index", max_msgs=1000)
    assert "max_msgs of its index stream" in refused(lambda: NatsLog(url))
    change(f"{name}_index", max_msgs=-1)
    NatsLog(url).close()


# --- versions


def set_meta(url: str, data: bytes) -> None:
    async def do(server: Server) -> None:
        subject = schema._subject(server)
        last = await server.last(server.index, subject)
        await server.put(subject, data, expected=last.seq if last else 0, token=repr(data))

    behind(url, do)


def test_a_newer_minor_version_is_used_and_other_versions_are_refused(url: str) -> None:
    set_meta(url, msgspec.json.encode({"log": "ab" * 16, "major": 1, "minor": 7, "new": True}))
    log = NatsLog(url)
    begin(log, "s")
    log.close()
    assert migrate(url).version == init(url).version == str(Version(1, 7))
    set_meta(url, msgspec.json.encode({"log": "ab" * 16, "major": 2, "minor": 0}))
    for use in (NatsLog, init, migrate):
        assert "schema 2.0, of a newer version" in refused(lambda use=use: use(url))


@pytest.mark.parametrize("meta", [b"", b"{}", b'{"log":"x","major":1,"minor":0}', b"\xff"])
def test_a_log_that_does_not_say_what_it_is_is_damaged(url: str, meta: bytes) -> None:
    set_meta(url, meta)
    refused(lambda: NatsLog(url), LogCorrupted)


def test_a_stream_of_somebody_else_is_left_alone(uri: str) -> None:
    url = fresh(uri)
    name = address_of(url).name

    async def do(server: Server) -> None:
        await server.api(f"STREAM.CREATE.{name}", {"name": name, "subjects": [f"{name}.orders"], "storage": "file"})

    behind(url, do)
    assert "something else" in refused(lambda: init(url))


# --- damage


async def _replace(server: Server, subject: str, data: bytes, **headers: str) -> None:
    last = await server.last(server.stream_of(subject), subject)
    assert last is not None
    given = {name: value for name, value in last.headers.items() if name.startswith("Saga-")}
    await server.put(subject, data, expected=last.seq, token=repr(data)[-60:], headers={**given, **headers})


async def spoil_entry(server: Server, **changes: object) -> None:
    subject = f"{server.address.name}.i.s.bad"
    last = await server.last(server.index, subject)
    assert last is not None
    entry = {**msgspec.json.decode(last.data), **changes}
    await _replace(server, subject, msgspec.json.encode(entry))


async def spoil_message(server: Server, at: int, spoil: Callable[[bytes], bytes]) -> None:
    """Give saga `bad` a copy of its message `at` in its place, spoiled: nothing in a stream can be changed itself."""
    messages = [one async for one in server.scan(server.stream, f"{server.address.name}.w.*")]
    of_bad = []
    for one in messages:
        read = meta_of(one.data)
        if read is not None and any(part.saga == "bad" for part in read[0].sagas):
            of_bad.append(one)
    chosen = of_bad[at]
    await server.delete(server.stream, chosen.seq)
    if at == -1:
        data = spoil(chosen.data)
        seq = await server.put(f"{server.address.name}.a.x", data, expected=0, token="spoiled")
        await spoil_entry(server, tail=seq)


SPOILS: dict[str, Callable[[Server], Any]] = {
    "first": lambda server: spoil_message(server, 0, bytes),
    "middle": lambda server: spoil_message(server, 1, bytes),
    "byte": lambda server: spoil_message(server, -1, lambda data: data.replace(b'"DONE"', b'"NONE"')),
    "data": lambda server: spoil_message(server, -1, lambda data: data.replace(b'"data":{}', b'"data":[]')),
    "no line": lambda server: spoil_message(server, -1, lambda data: data[:-30] + b"\n"),
    "no meta": lambda server: spoil_message(server, -1, lambda data: b"{}" + data),
    "next": lambda server: spoil_entry(server, next=9),
    "epoch": lambda server: spoil_entry(server, epoch=2),
    "tail": lambda server: spoil_entry(server, tail=10**9),
    "ended": lambda server: spoil_entry(server, ended=1.0),
    "life": lambda server: spoil_entry(server, life="another"),
    "other id": lambda server: spoil_entry(server, saga="good"),
    "no entry": lambda server: _replace(server, f"{server.address.name}.i.s.bad", b"\xff{"),
}


NO_ADDRESSES = [
    f"nats:scott:{SECRET}@h/d",
    f"nats://scott:{SECRET}/x@h/d",
    f"nats://scott:%{SECRET}@h/d",
    f"nats://scott:{SECRET}@h:port/d",
    f"nats://scott:{SECRET}@h/d?nonsense=1",
    f"nats://scott:{SECRET}@h/d.e",
    f"nats://scott:{SECRET}@h/d?lease=0",
    f"nats://scott:{SECRET}@h/d?lease=soon",
    f"nats://scott:{SECRET}@h/d?timeout=nan",
    f"nats://scott:{SECRET}@h/d?replicas=2",
    f"nats://scott:{SECRET}@h/d?require_sync=yes",
    f"nats://scott:{SECRET}@h/d?monitor=//x",
    f"nats://scott:{SECRET}@h/d?max_result_bytes=lots",
    f"nats://scott:{SECRET}@h,,g/d",
]


class TestNatsAddresses(Addresses):
    no_addresses: ClassVar[list[str]] = NO_ADDRESSES
    spoils: ClassVar[dict[str, Callable[[str], object]]] = {
        name: partial(behind, do=spoil) for name, spoil in SPOILS.items()
    }
    damage_has_an_owner: ClassVar[bool] = False
    compactions: ClassVar[int] = 5

    def as_scott(self, url: str) -> str:
        return url.replace("nats://", f"nats://scott:{SECRET}@")

    def shown(self, url: str) -> str:
        return address_of(url).url

    def check_what_ended_costs_nothing(
        self, log: NatsLog, late: NatsLog, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log._server.run(log._ownership.note)
        asked: list[str] = []
        latest = late._server.latest

        async def noted(stream: str, subjects: list[str]) -> Any:
            asked.extend(subjects)
            return await latest(stream, subjects)

        monkeypatch.setattr(late._server, "latest", noted)
        begin(log, "one more", "INTENT")
        assert len(late.unfinished().saga_ids) == 10_001 and len(asked) <= 10_001

    def check_nothing(self, url: str) -> None:
        name = address_of(url).name
        streams = behind(url, lambda server: server.api("STREAM.NAMES"))["streams"] or ()
        assert not [one for one in streams if one.startswith(name)]

    def check_unfinished(self, saga_ids: tuple[str, ...]) -> None:
        """An entry may say that its saga has ended, or whose it is may be all that is damaged."""

    def check_what_the_dead_left(self, log: NatsLog, other: NatsLog, url: str) -> None:
        log._heart.stop()
        for pen in log._nats_heart.pens.values():  # several, if several threads were the first
            other._server.run(lambda pen=pen: other._index.put_expired(pen.nonce, pen.revision))
        other.compact(keep_days=0)
        leases = other._server.run(other._index.leases)
        assert [one.nonce for one in leases] == [other._nats_heart.pen(other._nats_heart._current).nonce]
        assert "never begun" not in other._server.run(other._index.all)[0]


def test_an_entry_that_is_missing_is_found_and_its_saga_named(url: str) -> None:
    log = NatsLog(url)
    begin(log, "s", "INTENT")

    async def remove(server: Server) -> None:
        await server.purge(server.index, f"{server.address.name}.i.s.s")

    behind(url, remove)
    found = log.verify()
    assert [one.saga_ids for one in found.damage] == [("s",)] and "'s'" in str(found.first_broken)
    log.close()


# --- upkeep


def messages_in(log: NatsLog) -> int:
    async def count() -> int:
        return (await log._server.api(f"STREAM.INFO.{log._server.stream}"))["state"]["messages"]

    return log._server.run(count)


def test_a_log_of_which_everything_is_forgotten_is_nearly_empty(url: str) -> None:
    log = NatsLog(url)
    for n in range(30):
        begin(log, f"s{n}", "INTENT", "COMMITTED")
    log.claim("large")
    log.append(record("large", 1, "START", x="x" * 3_000_000))
    log.flush(log.append(record("large", 2, "COMMITTED")))
    log.close()
    log = NatsLog(url)
    assert log.compact(keep_days=0).sagas == 31
    assert messages_in(log) <= 6 + 4  # its own birth, and blobs, which stay for a day
    assert log.saga_ids() == () and log.verify().intact and log.verify().records == 0
    begin(log, "s1", "INTENT")  # an id that was forgotten begins anew
    assert len(log.read("s1")) == 2 and log.verify().intact and log.verify().records == 2
    log.close()


def entwined(url: str, most: int = 6) -> None:
    """Sagas that ended, each begun in one flush with the end of the one before."""
    log = NatsLog(url)
    for n in range(most):
        log.claim(f"s{n}", fresh=True)
        log.flush(log.append(record(f"s{n}", 1, "START")))
        if n:
            log.append(record(f"s{n}", 2))
            log.flush(log.append(record(f"s{n - 1}", 3, "COMMITTED")))
        else:
            log.flush(log.append(record("s0", 2)))
    log.flush(log.append(record(f"s{most - 1}", 3, "COMMITTED")))
    log.close()


def test_a_compaction_that_is_killed_leaves_nothing_that_looks_lost(
    url: str, opened: Callable[..., NatsLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    entwined(url)
    log = opened()
    delete, calls, stops = log._server.delete, 0, 0

    async def killed(stream: str, seq: int) -> bool:
        nonlocal calls
        if stream == log._server.stream:
            calls += 1
            if calls == stops + 1:  # those that were begun with it may be done
                raise KeyError
        return await delete(stream, seq)

    monkeypatch.setattr(log._server, "delete", killed)
    while True:
        calls = 0
        try:
            log.compact(keep_days=0)
            break
        except KeyError:
            stops += 1
            assert log.verify().intact, stops
    assert stops > 3 and log.verify().records == 0


def test_what_is_forgotten_while_it_is_verified_is_not_called_lost(
    url: str, opened: Callable[..., NatsLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    entwined(url)
    log, other = opened(), opened()
    begin(log, "open", "INTENT")
    page, pages = log._server._page, 0

    async def after_it(stream: str, body: dict[str, Any]) -> Any:
        nonlocal pages
        found = await page(stream, {**body, "batch": 1})
        pages += stream == log._server.stream
        if pages == 3:
            await asyncio.to_thread(other.compact, keep_days=0)
        return found

    monkeypatch.setattr(log._server, "_page", after_it)
    found = log.verify()
    assert found.intact and pages > 3 and log.saga_ids() == ("open",)


@pytest.mark.parametrize("swept", [False, True])
def test_what_ends_and_is_forgotten_after_verify_came_by_is_not_called_lost(
    opened: Callable[..., NatsLog], monkeypatch: pytest.MonkeyPatch, swept: bool
) -> None:
    log, other = opened(), opened()
    begin(other, "s")
    begin(other, "t", "INTENT")  # so that the end of `s` is behind another message
    everything, page, delete, ended = log._index.all, log._server._page, other._server.delete, False
    pen = other._nats_heart.pen(other._nats_heart._current)

    async def not_swept(stream: str, seq: int) -> bool:
        if stream == other._server.stream:
            raise KeyError
        return await delete(stream, seq)

    def end() -> None:
        other.flush(other.append(record("s", 2, "COMMITTED")))
        with monkeypatch.context() as patched, pytest.raises(KeyError):
            patched.setattr(other._server, "delete", not_swept)
            pen._since = 10**6  # the next message lists what is open: those before it may go
            other.flush(other.append(record("t", 3)))
            other.release("s")
            other.compact(keep_days=0)

    async def after_it() -> Any:
        nonlocal ended
        if not ended:
            await asyncio.to_thread(end)
            ended = True
        return await everything()

    async def beside(stream: str, body: dict[str, Any]) -> Any:
        found = await page(stream, {**body, "batch": 1})
        if swept and ended and any(b'["s",' in message.data for message in found):
            await asyncio.to_thread(other.compact, keep_days=0)
        return found

    monkeypatch.setattr(log._index, "all", after_it)
    monkeypatch.setattr(log._server, "_page", beside)
    assert log.verify().intact and ended and log.saga_ids() == ("t",)


def test_what_an_adoption_left_that_was_killed_is_no_damage(
    opened: Callable[..., NatsLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = MemoryLog(), opened()
    begin(source, "s", "INTENT")
    source.release("s")
    lines = source.lines("s")

    async def killed(changes: Sequence[Any]) -> list[int | None]:
        raise KeyError

    monkeypatch.setattr(target._index, "change_all", killed)
    with pytest.raises(KeyError):
        target.adopt({"s": lines})
    monkeypatch.undo()
    assert target.verify().intact and target.saga_ids() == () and target.unfinished().saga_ids == ()
    assert target.adopt({"s": lines}).stored == ("s",)
    assert target.verify().intact and target.verify().records == 2


def test_one_compaction_at_a_time(opened: Callable[..., NatsLog]) -> None:
    log, other = opened(), opened()
    begin(log, "s", "COMMITTED")
    begin(other, "t")
    pen = other._nats_heart.pen(other._nats_heart._current)

    async def lock() -> int:
        return await other._server.put(f"{other._address.name}.i.c", pen.nonce.encode(), expected=0, token="a lock")

    other._server.run(lock)
    with pytest.raises(SagaBusy):
        log.compact(keep_days=0)
    log._server.run(lambda: log._index.put_expired(pen.nonce, pen.revision))  # it was killed
    assert log.compact(keep_days=0).sagas == 1
    assert log.compact(keep_days=0).sagas == 0


def test_the_leases_of_dead_processes_with_nothing_to_recover_go_away_by_themselves(
    opened: Callable[..., NatsLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "_LONG_AGO", 2.0)
    log, witness = opened(lease=0.5), opened(lease=0.5)
    begin(log, "s", "COMMITTED")
    log._server.run(log._ownership.note)
    begin(witness, "t")
    log._heart.stop()
    wait_for(lambda: len(witness._server.run(witness._index.leases)) == 1)
    assert witness.verify().intact and witness.unfinished().saga_ids == ("t",)


def test_a_child_that_was_forked_in_the_middle_of_a_request_says_nothing(opened: Callable[..., NatsLog]) -> None:
    import os
    import warnings

    log = opened()
    begin(log, "s")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        try:
            mine = NatsLog(log.url)
            mine.claim("of the child")
            mine.flush(mine.append(record("of the child", 1, "START")))
            os._exit(0 if not log.owned("s") else 1)
        finally:
            os._exit(70)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    log.flush(log.append(record("s", 2)))
    assert set(log.saga_ids()) == {"s", "of the child"}


def test_credentials_in_a_file_that_cannot_be_used_are_one_line(url: str) -> None:
    refused(lambda: NatsLog(f"{url}&creds=/nowhere/at-all"))
