"""A log in a database other than 0, by a user with no more rights than the page names for that."""

from __future__ import annotations

import re
from pathlib import Path

from agent_saga_core.log.redis import RedisLog, init
from agent_saga_core.log.redis.address import address_of

from ..servers.addresses import SECRET, begin, refused
from .server import Server, fresh_prefix

PAGE = Path(__file__).parents[4] / "docs" / "log-redis.md"


def test_the_rights_that_the_page_names_for_another_database_are_enough(mortal: Server) -> None:
    said = " ".join(PAGE.read_text("utf-8").split())
    found = re.search(r"`~agent-saga:\* ([^`]+)`; in a database other than 0 also `(\+[^`]+)`", said)
    assert found is not None
    uri = f"redis://scott:{SECRET}@127.0.0.1:{mortal.port}"
    url, first = fresh_prefix(f"{uri}/1"), fresh_prefix(f"{uri}/0")
    rights = found[1].split()
    with mortal.client() as client:
        keys = [f"~{address_of(one).prefix}:*" for one in (url, first)]
        client.execute_command("ACL", "SETUSER", "scott", "reset", "on", f">{SECRET}", *keys, *rights)
        init(first)
        assert "select" in refused(lambda: init(url))
        client.execute_command("ACL", "SETUSER", "scott", found[2])
    init(url)
    log = RedisLog(url)
    begin(log, "s")
    begin(log, "over", "COMMITTED")
    log.release("s")
    assert len(log.claim("s")) == 2 and log.unfinished().saga_ids == ("s",) and log.verify().intact
    log.release("over")
    assert log.compact(keep_days=0).sagas == 1
    log.close()
