"""A log on a server whose user `default` may do less: starting again may drop what that user may not write."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agent_saga_core.log.redis import RedisLog, init
from agent_saga_core.log.redis.address import address_of

from ..servers.addresses import SECRET, begin, refused
from .server import Server, fresh_prefix, server_of_its_own

RIGHTS = {
    "nothing": (["off"], False),
    "not all": (["on", "~*", "+@all", "-rpush"], False),
    "other keys": (["off", "~another:*", "+@all"], False),
    "no other database": (["off", "~*", "+@all", "-select"], False),
    "to write": (["off", "~t-*:*", "+@write", "+select"], True),
    "everything": (["off", "~*", "&*", "+@all"], True),
}


@pytest.fixture(params=RIGHTS)
def restricted(request: pytest.FixtureRequest) -> Iterator[tuple[Server, str, bool]]:
    """A server whose default user has those rights, the address of a log for another user, and whether they suffice."""
    rights, enough = RIGHTS[request.param]
    with server_of_its_own() as server:
        address = fresh_prefix(f"redis://scott:{SECRET}@127.0.0.1:{server.port}/1")
        users = server.root / "users.acl"
        server.stop()
        users.write_text(
            f"user scott on >{SECRET} ~* &* +@all\nuser default nopass resetkeys -@all {' '.join(rights)}\n"
        )
        server.start(aclfile=str(users))
        yield server, address, enough


def test_a_default_user_that_may_not_write_the_log_is_refused_because_a_start_drops_it(
    restricted: tuple[Server, str, bool],
) -> None:
    server, address, enough = restricted
    accepting, said = f"{address}&accept_data_loss=1", ""
    if enough:
        init(address)
    else:
        for use in (init, RedisLog):
            said = refused(lambda use=use: use(address))
            assert "user default" in said and ("RPUSH" in said or "SELECT" in said)
        assert any("user default" in one for one in init(accepting).warnings)
    log = RedisLog(address if enough else accepting)
    begin(log, "s", "INTENT")
    log.close()
    server.kill()
    server.start()
    if enough:
        log = RedisLog(address)
        assert len(log.read("s")) == 2 and log.verify().intact
        log.close()
    elif "ZADD" in said:
        assert "initialised" in refused(lambda: RedisLog(accepting))  # not an empty log that is intact


def test_a_default_user_that_may_write_no_more_stops_the_log(mortal: Server, mortal_url: str) -> None:
    with mortal.client() as client:
        client.execute_command("ACL", "SETUSER", "scott", "reset", "on", f">{SECRET}", "~*", "+@all")
        log = RedisLog(mortal_url.replace("redis://", f"redis://scott:{SECRET}@"))
        begin(log, "s")
        scott = log._server.connect()
        try:
            scott.call("ACL", "SETUSER", "default", "-rpush")
            assert "RPUSH" in refused(lambda: log._server.meet(scott))
            scott.call("ACL", "SETUSER", "scott", "-acl|dryrun")
            assert "ACL DRYRUN" in refused(lambda: log._server.meet(scott))
        finally:
            scott.call("ACL", "SETUSER", "default", "+@all")
            scott.close()
        log.close()
    assert address_of(mortal_url).parameters["username"] is None
    RedisLog(mortal_url).close()
