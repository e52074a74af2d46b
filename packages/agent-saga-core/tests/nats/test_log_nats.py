"""The NATS log passes the suite of every store."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import msgspec
import pytest

from agent_saga_core.log.nats.connection import Server
from agent_saga_core.log.nats.index import Index
from agent_saga_core.log.nats.messages import meta_of
from agent_saga_core.log.nats.reading import bodies_of

from ..servers.conformance import ServedConformance
from .server import GIVEN, behind


async def run_out(server: Server) -> None:
    """Say of every lease that it has been watched running out."""
    index = Index(server)
    for leased in await index.leases():
        await index.put_expired(leased.nonce, leased.revision)


async def spoil_record(server: Server, saga_id: str, n: int) -> None:
    """Change a byte of a record of a saga that was given back.

    Nothing in a stream can be changed itself: copies of its messages take their places, each behind the earlier ones.
    """
    name, index = server.address.name, Index(server)
    seen = await index.get(saga_id)
    assert seen is not None
    messages = [one async for one in server.scan(server.stream, f"{name}.w.*")]
    copied: dict[int, int] = {}
    spoiled = 0
    for one in messages:
        read = meta_of(one.data)
        part = read and next((part for part in read[0].sagas if part.saga == saga_id), None)
        if not (read and part):
            continue
        assert len(read[0].sagas) == 1, "another saga would lose its records"
        rows = bytearray(one.data[read[1] :])
        for number, line in bodies_of(part, one.data, read[1]):
            if number == n:
                rows[rows.index(line) + len(line) - 20] ^= 1
                spoiled += 1
        earlier = tuple(copied[seq] for seq in part.earlier)
        meta = msgspec.structs.replace(read[0], sagas=(msgspec.structs.replace(part, earlier=earlier),))
        data = msgspec.json.encode(meta) + b"\n" + rows
        copied[one.seq] = await server.put(f"{name}.a.{one.seq}", data, expected=0, token=f"copy of {one.seq}")
        await server.delete(server.stream, one.seq)
    assert spoiled == 1
    await index.change(msgspec.structs.replace(seen.entry, tail=copied[seen.entry.tail]), seen.revision)


class TestNatsLog(ServedConformance):
    given: ClassVar[str] = GIVEN

    @pytest.fixture
    def end_leases(self, url: str) -> Callable[[], object]:
        return lambda: behind(url, run_out)

    @pytest.fixture
    def spoil(self, url: str) -> Callable[[str, int], object]:
        return lambda saga, n: behind(url, partial(spoil_record, saga_id=saga, n=n))
