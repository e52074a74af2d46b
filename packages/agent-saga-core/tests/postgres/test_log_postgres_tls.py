"""The PostgreSQL log over TLS: the server is who its certificate says, or nothing is sent to it."""

from __future__ import annotations

import shutil
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_saga_core import ActionSemantics, Compensation, saga_scope
from agent_saga_core.errors import LogUnavailable
from agent_saga_core.log import open_log
from agent_saga_core.log.open import init_log

from .between import TlsEnd, certificate
from .server import fresh_schema, sql

PASSWORD = "s3cr3t-over-tls"

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates; it is missing")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """That of the server, and one for the same name of somebody else."""
    directory = tmp_path_factory.mktemp("tls")
    return certificate(directory, "server"), certificate(directory, "other")


@pytest.fixture(scope="module")
def tls(mortal: Any, certificates: tuple[Path, Path]) -> Iterator[TlsEnd]:
    """A server that speaks TLS alone, and wants a password of the user `tess`."""
    uri = mortal.get_uri()
    sql(f"{uri}&schema=x", f"CREATE ROLE tess LOGIN PASSWORD '{PASSWORD}'")
    sql(f"{uri}&schema=x", "GRANT CREATE ON DATABASE postgres TO tess")
    rules = mortal.pgdata / "pg_hba.conf"
    rules.write_text("local all tess scram-sha-256\n" + rules.read_text("utf-8"), "utf-8")
    sql(f"{uri}&schema=x", "SELECT pg_reload_conf()")
    made = TlsEnd(uri, certificates[0])
    yield made
    made.close()


@pytest.fixture
def url(tls: TlsEnd, certificates: tuple[Path, Path]) -> str:
    """The address of a new log there."""
    trust = f"sslmode=verify-full&sslrootcert={certificates[0]}"
    made = fresh_schema(f"postgresql://tess:{PASSWORD}@localhost:{tls.port}/postgres?hostaddr=127.0.0.1&{trust}")
    assert init_log(made).made
    return made


def test_a_saga_on_a_server_that_shows_who_it_is(tls: TlsEnd, url: str) -> None:
    before = len(tls.spoken)
    log = open_log(url)
    done: list[str] = []
    with saga_scope("s", log=log) as saga:
        saga.execute("act", lambda: done.append("act"), semantics=ActionSemantics.COMPENSABLE, compensate=_nothing)
    assert str(log.read("s")[-1].type) == "COMMITTED" and done == ["act"]
    assert set(tls.spoken[before:]) <= {"TLSv1.2", "TLSv1.3"} and len(tls.spoken) > before
    assert PASSWORD not in log.url and "sslmode=verify-full" in log.url
    log.close()


Change = Callable[[str, Path], str]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda url, other: url.replace("@localhost", "@example.org"), "does not match host name"),
        (lambda url, other: f"{url.partition('&sslrootcert=')[0]}&sslrootcert={other}", "certificate verify failed"),
        (lambda url, other: url.replace("sslmode=verify-full", "sslmode=disable"), "no encryption"),
        (lambda url, other: url.replace(PASSWORD, f"{PASSWORD}x"), "password authentication failed"),
    ],
    ids=["another name", "another certificate", "no encryption", "wrong password"],
)
def test_what_cannot_be_trusted_is_refused_in_one_line_before_any_effect(
    certificates: tuple[Path, Path], url: str, change: Change, says: str
) -> None:
    address = change(url, certificates[1])
    assert address != url
    done: list[str] = []
    with pytest.raises(LogUnavailable, match=says) as caught, saga_scope("s", log=address) as saga:
        saga.execute("act", lambda: done.append("act"), semantics=ActionSemantics.COMPENSABLE, compensate=_nothing)
    assert done == []
    assert "\n" not in str(caught.value) and PASSWORD not in "".join(traceback.format_exception(caught.value))


def _nothing(result: object) -> Compensation:
    return Compensation(fn=lambda: None)
