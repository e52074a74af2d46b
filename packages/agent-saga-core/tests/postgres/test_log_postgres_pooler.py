"""The PostgreSQL log behind a pooler in transaction mode, where every transaction may meet another session."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from psycopg.conninfo import conninfo_to_dict

from agent_saga_core import ActionSemantics, Compensation, saga_scope
from agent_saga_core.log.postgres import PostgresLog, init, migrate
from agent_saga_core.testing import LogConformance

from .between import Pooler
from .server import expire, fresh_schema


@pytest.fixture(scope="module")
def pooler(uri: str) -> Iterator[Pooler]:
    made = Pooler(uri)
    yield made
    made.close()


def through(port: int, url: str) -> str:
    """The same log, by a port of this machine."""
    target = conninfo_to_dict(url.partition("&schema=")[0])
    user, name = target.get("user") or "postgres", target.get("dbname") or "postgres"
    return f"postgresql://{user}@127.0.0.1:{port}/{name}?schema={url.partition('schema=')[2]}"


class TestPostgresLogBehindAPooler(LogConformance):
    """Everything that a log is asked, through a double of pgbouncer that gives each transaction another session."""

    lease: ClassVar[float] = 2.0

    @pytest.fixture
    def open_log_again(self, pooler: Pooler, uri: str) -> Iterator[Callable[[], PostgresLog]]:
        address = through(pooler.port, fresh_schema(uri, lease=self.lease))
        assert init(address).made
        before = pooler.transactions, pooler.moves
        self.address = address
        yield lambda: PostgresLog(address)
        transactions, moves = pooler.transactions - before[0], pooler.moves - before[1]
        assert moves >= transactions * 3 // 4, "the same connection, again and again: that proves nothing"

    @pytest.fixture
    def end_leases(self) -> Callable[[], None]:
        return lambda: expire(self.address)


@pytest.fixture
def pgbouncer(mortal: Any) -> Iterator[int]:
    """The port of a real one."""
    program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if program is None:
        pytest.skip("the program pgbouncer is missing (Debian has it as the package of that name); its double ran")
    target = conninfo_to_dict(mortal.get_uri())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        where = Path(directory)
        where.chmod(0o755)
        (where / "users").write_text('"postgres" ""\n', "ascii")
        settings = {
            "listen_addr": "127.0.0.1", "listen_port": port, "unix_socket_dir": "", "auth_type": "any",
            "auth_file": where / "users", "pool_mode": "transaction", "default_pool_size": 4,
            "server_round_robin": 1, "ignore_startup_parameters": "extra_float_digits",
        }  # fmt: skip
        database = f"host={target.get('host')} port={target.get('port') or 5432} dbname={target.get('dbname')}"
        lines = [f"[databases]\npostgres = {database} user=postgres\n[pgbouncer]"]
        (where / "ini").write_text("\n".join([*lines, *(f"{k} = {v}" for k, v in settings.items()), ""]), "utf-8")
        user = ["-u", mortal.system_user] if os.geteuid() == 0 else []  # who may use the socket of the server
        process = subprocess.Popen([program, *user, str(where / "ini")], stderr=subprocess.DEVNULL)
        try:
            _until_it_listens(port, process)
            yield port
        finally:
            process.terminate()
            process.wait(30)


def _until_it_listens(port: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=30).close()
            return
        except OSError:
            assert process.poll() is None and time.monotonic() < until, "pgbouncer does not listen"


def test_sagas_and_their_upkeep_behind_a_real_pgbouncer(pgbouncer: int, mortal: Any) -> None:
    address = through(pgbouncer, fresh_schema(mortal.get_uri()))
    assert init(address).made and migrate(address).applied == ()
    log, other = PostgresLog(address), PostgresLog(address)
    done: list[str] = []
    for number in range(8):
        with saga_scope(f"s{number}", log=log) as saga:
            for step in "ab":
                saga.execute(
                    step,
                    lambda step=step: done.append(step),
                    semantics=ActionSemantics.COMPENSABLE,
                    compensate=_nothing,
                )
            assert other.is_live(f"s{number}")
    assert len(done) == 16 and other.unfinished().saga_ids == () and other.verify().intact
    assert other.compact(keep_days=0).sagas == 8 and log.saga_ids() == ()
    log.close()
    other.close()


def _nothing(result: object) -> Compensation:
    return Compensation(fn=lambda: None)
