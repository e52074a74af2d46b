"""The leases of a NATS log: kept by a message in the index, judged by how long that has not changed.

No two clocks are compared. Whoever wants to take over watches the revision of a lease, on its own monotonic clock, from
when it has read it until it asks again; the owner counts from before it sent it. So the owner's count ends first.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Coroutine, Sequence
from enum import Enum
from typing import Any, ClassVar, Final, NamedTuple

from agent_saga_core.errors import LogUnavailable, SagaError
from agent_saga_core.log import lease as shared
from agent_saga_core.log.lease import Writer, now
from agent_saga_core.log.nats.connection import Away, Conflict, Server
from agent_saga_core.log.nats.index import Index, Leased
from agent_saga_core.log.nats.messages import Lease
from agent_saga_core.log.nats.writing import Pen

__all__ = ["Heart", "State", "Watch"]


_TRIES: Final = 3
_LEAVING: Final = 2.0
_SOON: Final = 0.01
_LONG_AGO: Final = 10.0
"""How many times its length a lease must have been unchanged before anybody but a claimer ends its writer: one that
only slept finds what it had when it wakes."""


class State(Enum):
    """What is known of a writer."""

    LIVE = "live"
    EXPIRED = "expired"
    FENCED = "fenced"
    GONE = "gone"


class _Look(NamedTuple):
    revision: int
    since: float
    renewed: bool
    """Whether it was seen to change."""


class Watch:
    """What this process has seen of the leases of others, and for how long. For the loop of the connection."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._looks: dict[str, _Look] = {}

    async def judge(self, nonce: str) -> tuple[State, Leased | None]:
        """Whether a writer may be taken from. LIVE says that it may not, or that this was not watched long enough."""
        asked = now()
        leased = await self._index.get_lease(nonce)
        if leased is None:
            self._looks.pop(nonce, None)
            return State.GONE, None
        if leased.lease.fenced:
            return State.FENCED, leased
        if nonce not in self._looks:
            await self.look_around()  # so that whoever waits for one waits for all at once
        if self.ran_out(leased, asked) or await self._index.expired(nonce) == leased.revision:
            return State.EXPIRED, leased
        return State.LIVE, leased

    def ran_out(self, leased: Leased, asked: float, *, times: float = 1.0) -> bool:
        """Note a lease that was read, asked for at that moment; whether it is known to have run out.

        Args:
            leased: What was read.
            asked: When it was asked for.
            times: How many times its length it must have been watched.
        """
        look = self._looks.get(leased.nonce)
        if look is None or look.revision != leased.revision:
            self._looks[leased.nonce] = _Look(leased.revision, now(), look is not None)
            return False
        return asked - look.since >= times * leased.lease.seconds

    async def undecided(self, nonces: Collection[str]) -> float:
        """Seconds until it is known of all these writers, at the latest, whether their leases run; 0 if it is."""
        asked, longest = now(), 0.0
        for leased in await self._index.leases():
            if leased.nonce not in nonces or leased.lease.fenced or self.ran_out(leased, asked):
                continue
            look = self._looks[leased.nonce]
            if not look.renewed and await self._index.expired(leased.nonce) != leased.revision:
                # At least something: it is asked for again after that, and counts from when it has been read.
                longest = max(longest, look.since + leased.lease.seconds - asked, _SOON)
        return longest

    async def look_around(self) -> list[Leased]:
        """Begin to watch every lease that is there; all of them."""
        asked = now()
        found = await self._index.leases()
        for leased in found:
            self.ran_out(leased, asked)
        return found

    async def patrol(self, own: Collection[str], bury: Callable[[Leased], Coroutine[Any, Any, None]]) -> None:
        """Look at every lease, and let others know of those that ran out: who comes later need not watch them again.

        Args:
            own: The writers of this process.
            bury: What to do with one that ran out long ago.
        """
        asked = now()
        there: set[str] = set()
        for leased in await self._index.leases():
            there.add(leased.nonce)
            if leased.nonce in own or leased.lease.fenced:
                continue
            if self.ran_out(leased, asked) and await self._index.expired(leased.nonce) != leased.revision:
                await self._index.put_expired(leased.nonce, leased.revision)
            if self.ran_out(leased, asked, times=_LONG_AGO):
                await bury(leased)
        for nonce in self._looks.keys() - there:
            self._looks.pop(nonce, None)


class Heart(shared.Heart[Server]):
    """Keeps the lease of this process alive, from a thread of its own, on the loop of the connection."""

    passing: ClassVar[tuple[type[Exception], ...]] = (OSError, Away, LogUnavailable)

    def __init__(
        self,
        server: Server,
        index: Index,
        watch: Watch,
        seconds: float,
        *,
        leave: Callable[[Pen], Coroutine[Any, Any, None]],
        bury: Callable[[Leased], Coroutine[Any, Any, None]],
    ) -> None:
        super().__init__(seconds, server.timeout)
        self._server = server
        self._index = index
        self._watch = watch
        self._leave = leave
        self._bury = bury
        self.pens: dict[uuid.UUID, Pen] = {}

    def pen(self, writer: Writer) -> Pen:
        """What that writer writes with."""
        return self.pens[writer.nonce]

    def mine_named(self, nonce: str) -> Pen | None:
        """The writer of this process that has this nonce and has not lost its lease."""
        pens = self.pens.copy().values()
        return next((pen for pen in pens if pen.nonce == nonce and pen.writer.lost is None), None)

    def register(self, writer: Writer) -> None:
        """See `lease.Heart.register`."""

        async def appear() -> None:
            pen = self.pens.get(writer.nonce)
            if pen is None:
                pen = self.pens[writer.nonce] = Pen(self._server, writer)
            await pen.birth()
            await self._renew(pen)

        self._server.run(appear)

    def renew(self, writers: Sequence[Writer]) -> Collection[uuid.UUID]:
        """See `lease.Heart.renew`."""
        return self._server.run(lambda: self._renew_all(writers))

    def retire_all(self, nonces: Sequence[uuid.UUID]) -> None:
        """See `lease.Heart.retire_all`."""

        async def leave() -> None:
            for nonce in nonces:
                pen = self.pens.get(nonce)
                if pen is not None:
                    await self._leave(pen)

        # What cannot be given back now is free when the lease has run out.
        self._server.run(lambda: self._server.patient(min(self._timeout, _LEAVING), leave))

    def connect(self) -> Server:
        """See `lease.Heart.connect`."""
        return self._server

    def renew_on(self, connection: Server, writers: Sequence[Writer]) -> Collection[uuid.UUID]:
        """See `lease.Heart.renew_on`."""
        # What hangs must be given up while there is time for another try.
        patience = self._lease / 6
        renewed = connection.run(lambda: connection.patient(patience, lambda: self._renew_all(writers)))
        own = {pen.nonce for pen in self.pens.copy().values()}
        try:
            connection.run(lambda: connection.patient(patience, lambda: self._watch.patrol(own, self._bury)))
        except SagaError:
            return renewed  # that is for others; the lease of this process does not depend on it
        return renewed

    def disconnect(self, connection: Server) -> None:
        """See `lease.Heart.disconnect`. It is the log's own, which ends it."""

    async def _renew_all(self, writers: Sequence[Writer]) -> Collection[uuid.UUID]:
        renewed: set[uuid.UUID] = set()
        for writer in writers:
            pen = self.pens.get(writer.nonce)
            if pen is not None and not pen.fenced and await self._renew(pen):
                renewed.add(writer.nonce)
        return renewed

    async def _renew(self, pen: Pen) -> bool:
        """Begin the lease anew; False if it was taken."""
        async with pen.renewing:
            for _ in range(_TRIES):
                try:
                    pen.revision = await self._index.put_lease(
                        pen.nonce, Lease(seconds=self._lease, beat=pen.beat + 1), pen.revision
                    )
                except Conflict:
                    found = await self._index.get_lease(pen.nonce)
                    if found is None or found.lease.fenced or found.lease.beat > pen.beat + 1:
                        return False
                    pen.revision = found.revision  # an earlier renewal of this process, of which it never heard
                    continue
                pen.beat += 1
                return True
        raise Away("the lease could not be renewed")
