"""The Redis log over TLS: the server is who its certificate says, or nothing is sent to it."""

from __future__ import annotations

import shutil
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from agent_saga_core import ActionSemantics, Compensation, saga_scope
from agent_saga_core.errors import LogUnavailable
from agent_saga_core.log import open_log
from agent_saga_core.log.open import init_log

from ..postgres import between
from ..servers.addresses import SECRET
from .server import fresh_prefix, server_of_its_own

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates; it is missing")


class TlsEnd(between.TlsEnd):
    """Speaks TLS from the first byte with whoever connects; the server behind it need not know any."""

    def serve(self, client: socket.socket) -> None:
        with self._context.wrap_socket(client, server_side=True) as secure:
            self.opened(secure)
            self.spoken.append(str(secure.version()))
            parts = urlsplit(self._uri)
            server = self.opened(socket.create_connection((parts.hostname, parts.port)))
            threading.Thread(target=between._copy, args=(server, secure), daemon=True).start()
            between._copy(secure, server)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """That of the server, and one for the same name of somebody else."""
    directory = tmp_path_factory.mktemp("tls")
    return between.certificate(directory, "server"), between.certificate(directory, "other")


@pytest.fixture(scope="module")
def tls(certificates: tuple[Path, Path]) -> Iterator[TlsEnd]:
    """A server that speaks TLS alone, and wants a password."""
    with server_of_its_own(requirepass=SECRET) as server:
        made = TlsEnd(server.uri, certificates[0])
        yield made
        made.close()


@pytest.fixture
def url(tls: TlsEnd, certificates: tuple[Path, Path]) -> str:
    """The address of a new log there."""
    made = fresh_prefix(f"rediss://:{SECRET}@localhost:{tls.port}/0", ssl_ca_certs=certificates[0])
    assert init_log(made).made
    return made


Change = Callable[[str, Path], str]


@pytest.mark.parametrize(
    "change",
    [lambda url: url, lambda url: url.replace("@localhost", "@127.0.0.1") + "&ssl_check_hostname=0"],
    ids=["who it is", "another name that is accepted"],
)
def test_a_saga_on_a_server_that_shows_who_it_is(tls: TlsEnd, url: str, change: Callable[[str], str]) -> None:
    before = len(tls.spoken)
    log = open_log(change(url))
    done: list[str] = []
    with saga_scope("s", log=log) as saga:
        saga.execute("act", lambda: done.append("act"), semantics=ActionSemantics.COMPENSABLE, compensate=_nothing)
    assert str(log.read("s")[-1].type) == "COMMITTED" and done == ["act"]
    assert set(tls.spoken[before:]) <= {"TLSv1.2", "TLSv1.3"} and len(tls.spoken) > before
    assert SECRET not in log.url and log.url.startswith("rediss://")
    log.close()


def _trusting(url: str, other: Path) -> str:
    base, _, options = url.partition("ssl_ca_certs=")
    return f"{base}ssl_ca_certs={other}{options[len(options.partition('&')[0]) :]}"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda url, other: url.replace("@localhost", "@127.0.0.1"), "not valid for '127.0.0.1'"),
        (_trusting, "certificate verify failed"),
        (lambda url, other: f"{_trusting(url, other)}&ssl_check_hostname=0", "certificate verify failed"),
        (lambda url, other: url.partition("&ssl_ca_certs=")[0], "certificate verify failed"),
    ],
    ids=["another name", "another certificate", "another certificate and any name", "no certificate that is known"],
)
def test_nothing_is_said_to_a_server_that_cannot_be_trusted(
    tls: TlsEnd, certificates: tuple[Path, Path], url: str, change: Change, says: str
) -> None:
    before = len(tls.spoken)
    _refused(url, change(url, certificates[1]), says)
    assert len(tls.spoken) == before


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda url: f"{url.partition('&ssl_ca_certs=')[0]}".replace("rediss://", "redis://"), "cannot be used"),
        (lambda url: url.replace(SECRET, f"{SECRET}x"), "invalid username-password"),
    ],
    ids=["no encryption", "wrong password"],
)
def test_what_the_server_refuses_is_said_in_one_line(url: str, change: Callable[[str], str], says: str) -> None:
    _refused(url, change(url), says)


def _refused(url: str, address: str, says: str) -> None:
    """It is, in one line and before any effect."""
    assert address != url
    done: list[str] = []
    with pytest.raises(LogUnavailable, match=says) as caught, saga_scope("s", log=f"{address}&timeout=0") as saga:
        saga.execute("act", lambda: done.append("act"), semantics=ActionSemantics.COMPENSABLE, compensate=_nothing)
    assert done == []
    assert "\n" not in str(caught.value) and SECRET not in "".join(traceback.format_exception(caught.value))


def _nothing(result: object) -> Compensation:
    return Compensation(fn=lambda: None)
