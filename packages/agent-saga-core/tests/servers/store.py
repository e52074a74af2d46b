"""A store, as far as the suite that all of them pass must know which, and what its tests are given."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import pytest

from agent_saga_core.records import Record

from .line import Line

BOUND = 60.0


class Store(NamedTuple):
    """Each store's conftest has one as its fixture `store`, for the session."""

    name: str
    """Of its module in `agent_saga_core.log`."""
    log: Callable[..., Any]
    """The class of its logs."""
    init: Callable[[str], Any]
    migrate: Callable[[str], Any]
    fresh: Callable[[str], str]
    """The address of a log of its own on that server; nothing is made."""
    any_server: Callable[[], AbstractContextManager[str]]
    """The address of a server that tests share."""
    line: Callable[[str], Line]
    """What stands between a log and that server."""

    def made(self, uri: str) -> str:
        """The address of a new log on that server, which is made."""
        url = self.fresh(uri)
        self.init(url)
        return url


def also(url: str, **options: object) -> str:
    """The same address with more options."""
    more = "&".join(f"{name}={value}" for name, value in options.items())
    return f"{url}{'&' if '?' in url else '?'}{more}" if more else url


def record(saga: str, n: int, kind: str = "INTENT", *, epoch: int = 1, **data: Any) -> Record:
    return Record(saga=saga, n=n, epoch=epoch, type=kind, time=1000.0, data=data)


def begin(log: Any, saga: str, *, fresh: bool = False) -> None:
    log.claim(saga, fresh=fresh)
    log.flush(log.append(record(saga, 1, "START")))


def wait_for(what: Callable[[], Any], bound: float = BOUND) -> Any:
    """What it is true to, once it is."""
    until = time.monotonic() + bound
    pause = threading.Event()
    while True:
        found = what()
        if found:
            return found
        assert time.monotonic() < until, "it did not happen"
        pause.wait(0.01)


# --- fixtures: a store's conftest takes them over


@pytest.fixture(scope="session")
def uri(store: Store) -> Iterator[str]:
    """The address of a server that tests share."""
    with store.any_server() as found:
        yield found


@pytest.fixture
def url(store: Store, uri: str) -> str:
    """The address of a new log on it, which is made."""
    return store.made(uri)


@pytest.fixture
def opened(store: Store, url: str) -> Iterator[Callable[..., Any]]:
    """A callable that opens that log, once more each time; options are added to its address."""
    logs: list[Any] = []

    def open_one(**options: object) -> Any:
        logs.append(store.log(also(url, **options)))
        return logs[-1]

    yield open_one
    for log in reversed(logs):
        log.close()


@pytest.fixture
def proxy(store: Store, uri: str) -> Iterator[Line]:
    """What stands between a log and that server."""
    made = store.line(uri)
    yield made
    made.close()
