"""The log that the scopes of a process share by its URL: poisoned, closed, or opened while a child is forked."""

from __future__ import annotations

import errno
import os
import signal
import threading
from pathlib import Path

import pytest

from agent_saga_core import Log, LogUnavailable, SagaBusy, list_sagas, logs, saga_scope
from agent_saga_core.log import osfile
from agent_saga_core.logs import shared_log

WAIT = 20.0


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As long as anything stands in it, no sync succeeds."""
    fails: list[str] = []
    sync = osfile.sync_file

    def sync_file(descriptor: int) -> None:
        if fails:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    monkeypatch.setattr(osfile, "sync_file", sync_file)
    return fails


def test_a_shared_log_that_was_poisoned_is_opened_again_by_the_next_scope(tmp_path: Path, disk: list[str]) -> None:
    """A full disk that was mended must not need a new process: nobody holds the shared log who could reopen it."""
    url = f"file:{tmp_path}/log"
    with saga_scope("before", log=url):
        pass
    for round_ in range(2):
        disk.append("full")
        with pytest.raises(LogUnavailable), saga_scope(f"full {round_}", log=url):
            pass
    disk.clear()
    for round_ in range(3):
        with saga_scope(f"after {round_}", log=url):
            pass
    assert {head.saga_id for head in list_sagas(url)} >= {"before", "after 0", "after 1", "after 2"}
    assert logs._spent == []  # those that were replaced are closed  # pyright: ignore[reportPrivateUsage]
    shared_log(url).close()
    with saga_scope("closed by somebody", log=url):
        pass
    shared_log(url).close()


def test_a_shared_log_that_still_owns_a_saga_is_not_closed_under_it(tmp_path: Path, disk: list[str]) -> None:
    url = f"file:{tmp_path}/log"
    saga = saga_scope("owned", log=url)
    saga.__enter__()
    first = shared_log(url)
    disk.append("full")
    with pytest.raises(LogUnavailable):
        saga.abort("nothing can be written")
    disk.clear()
    with saga_scope("other", log=url, independent=True):
        assert first.owned("owned")
        with pytest.raises(SagaBusy), saga_scope("owned", log=url, independent=True):
            pass
    with pytest.raises(LogUnavailable):
        saga.__exit__(None, None, None)
    assert not first.owned("owned")
    shared_log(url).close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_child_forked_while_a_shared_log_is_being_opened_opens_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    opening, go = threading.Event(), threading.Event()
    opened = logs.open_log

    def slowly(url: str) -> Log:
        opening.set()
        assert go.wait(WAIT)
        return opened(url)

    monkeypatch.setattr(logs, "open_log", slowly)
    opener = threading.Thread(target=lambda: shared_log("memory:"), daemon=True)
    opener.start()
    assert opening.wait(WAIT)
    child = os.fork()
    if child == 0:
        logs.open_log = opened
        signal.alarm(int(WAIT))
        shared_log("memory:")
        os._exit(7)
    go.set()
    opener.join(WAIT)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
