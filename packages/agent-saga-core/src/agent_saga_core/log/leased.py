"""What the logs on a server have in common, whichever it is: sagas owned under a lease, and the guard of effects."""

from __future__ import annotations

import secrets
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from agent_saga_core.clock import Clock
from agent_saga_core.errors import Fenced, SagaBusy, SagaError
from agent_saga_core.log.base import readable_history
from agent_saga_core.log.commit import Entry, GroupCommitLog, Owned
from agent_saga_core.log.lease import Heart, Writer
from agent_saga_core.log.sql import Refusals, Rows, SagaBatch, body_of
from agent_saga_core.records import FINAL, Record, RecordType, encode

__all__ = [
    "TRIES",
    "Claim",
    "Holding",
    "LeasedLog",
    "Taken",
    "busy",
    "claim_of",
    "contested",
    "fit",
]

TRIES: Final = 16
"""How often a saga may change under a claimer before it is called busy."""


B = TypeVar("B", bound=SagaBatch)
T = TypeVar("T")


class Holding:
    """Under what token a saga is owned: the epoch, and the nonce of the writer."""

    __slots__ = ("asked", "epoch", "fresh", "kept", "turn", "writer")

    def __init__(self, writer: Writer, epoch: int, *, fresh: bool) -> None:
        self.writer = writer
        self.epoch = epoch
        self.fresh = fresh  # the store learns of the saga with its first record
        self.asked = False  # whether the server may have heard of this ownership
        self.kept = 0  # the last record of the saga that is known to be stored
        # Drawn by a claim, 0 of a fresh saga. It tells this ownership from the next one of the same writer, which has
        # the same epoch while nothing is begun: what was asked for this one may arrive late.
        self.turn = 0


class Place(Protocol):
    """What is asked of the address of a log on a server."""

    @property
    def url(self) -> str: ...
    @property
    def max_result_bytes(self) -> int: ...
    @property
    def lease(self) -> float: ...


class Reached(Protocol):
    """What is asked of a server."""

    @property
    def address(self) -> Place: ...
    def close(self) -> None: ...
    def abandon(self) -> None: ...


class Taken(NamedTuple):
    """What claiming came to."""

    records: tuple[Record, ...]
    """All that can be read, the new CLAIM at the end."""
    last_n: int


class Claim(NamedTuple):
    """A CLAIM that may be appended."""

    before: tuple[Record, ...]
    """What it follows."""
    record: Record
    body: bytes

    @property
    def taken(self) -> Taken:
        """What claiming has come to once it is stored."""
        return Taken((*self.before, self.record), self.record.n)


def claim_of(saga_id: str, records: Sequence[Record], log_id: bytes, time: float) -> Claim | Taken:
    """The CLAIM that is to follow all records of a saga; what there is of it, if it has ended.

    Raises:
        LogCorrupted: A newer version wrote them.
    """
    before = readable_history(saga_id, records)
    n = len(records) + 1
    if before and before[-1].type in FINAL:
        return Taken(before, n - 1)
    record = Record(saga=saga_id, n=n, epoch=n, type=RecordType.CLAIM, time=time, data={})
    return Claim(before, record, body_of(encode(record), log_id))


def busy(saga_id: str) -> SagaBusy:
    """What is said of a saga that cannot be claimed or adopted, because somebody has it."""
    said = "wait until its owner is done or, if it has died, until its lease has run out"
    return SagaBusy(f"saga {saga_id!r} is owned; {said}", saga_id=saga_id)


def contested(saga_id: str) -> SagaBusy:
    """What a claimer hears of a saga that was another one each time it looked."""
    return SagaBusy(f"saga {saga_id!r} goes from hand to hand; try again", saga_id=saga_id)


class LeasedLog(GroupCommitLog[B]):
    """A log on a server, whose processes own sagas as long as their lease runs.

    A store supplies `prepare`, `write_batch`, which makes durable what it writes, `admit`, `take_over`, `hand_back` and
    `history_there`. It calls `found`, and `begin` once it is open.

    Args:
        server: The server.
        clock: What records are stamped with.
    """

    _heart: Heart[Any]

    def __init__(self, server: Reached, clock: Clock) -> None:
        self._reached: Final = server
        self._refusals: Final = Refusals()
        self._holdings: dict[Owned, Holding] = {}
        self._held: dict[str, object] = {}
        self._writable = False
        super().__init__(clock)

    def found(self, find: Callable[[], T]) -> T:
        """What `find` finds of the log that is there. If it raises, this log is closed, and that comes out."""
        try:
            return find()
        except BaseException:
            self._closed = "it could not be opened"
            self._reached.close()
            raise

    def begin(self, heart: Heart[Any]) -> None:
        """Let `heart` stop with this log."""
        self._heart = heart
        weakref.finalize(self, heart.stop)

    # --- what a store supplies

    @abstractmethod
    def admit(self) -> None:
        """Before the first claim: refuse a process that may look and not write.

        Raises:
            LogUnavailable: It lacks a right.
        """

    @abstractmethod
    def take_over(self, saga_id: str, holding: Holding) -> Taken | None:
        """Own the saga, whatever there is of it, and set the epoch of `holding`; every record returned is durable.

        None says that the writer itself has lost its lease, without having heard of it: another may try.

        Raises:
            SagaBusy: A live process has it.
            LogCorrupted: Damage concerns it. It is not owned.
            LogUnavailable: The server cannot be reached, or refuses.
        """

    @abstractmethod
    def hand_back(self, saga_id: str, holding: Holding) -> None:
        """Give the saga back; as soon as the server is there again, if it is not there now."""

    @abstractmethod
    def history_there(self, saga_id: str) -> list[Record]:
        """Every record of the saga, in order, whatever its type.

        Raises:
            LogCorrupted: Damage concerns this saga.
        """

    # --- the log protocol

    @property
    def url(self) -> str:
        """See `Log.url`."""
        return self._reached.address.url

    @property
    def max_result_bytes(self) -> int:
        """See `Log.max_result_bytes`."""
        return self._reached.address.max_result_bytes

    @property
    def lease(self) -> float:
        """See `Leased.lease`."""
        return self._reached.address.lease

    def read(self, saga_id: str) -> tuple[Record, ...]:
        """See `Log.read`."""
        self.check_readable()
        return readable_history(saga_id, self.history_there(fit(saga_id)))

    def claim(self, saga_id: str, *, fresh: bool = False) -> tuple[Record, ...]:
        """See `Log.claim`. Once a CLAIM is returned, whoever owned the saga before can append nothing more to it."""
        self._check(appending=True)
        owner = Owned()
        try:
            self.take(saga_id, owner)
            records = () if fresh else self._take_over(saga_id, owner)
            self._owned[saga_id] = owner
            return records
        except BaseException:
            if self._owned.get(saga_id) is owner:
                self.release(saga_id)
            else:
                self.give_up(saga_id, owner)
            raise

    def take(self, saga_id: str, token: object) -> None:
        """See `GroupCommitLog.take`. This excludes the other scopes of this process; a fresh id needs no more."""
        fit(saga_id)
        self.check_writable()
        writer = self._heart.writer()
        if self._held.setdefault(saga_id, token) is not token:
            raise SagaBusy(f"saga {saga_id!r} is owned by another scope of this process", saga_id=saga_id)
        if isinstance(token, Owned):
            self._holdings[token] = Holding(writer, 1, fresh=True)

    def check_writable(self) -> None:
        """Refuse to write where this process may not, once it is asked for: then no effect must start."""
        if not self._writable:
            self.admit()
            self._writable = True

    def _take_over(self, saga_id: str, owner: Owned) -> tuple[Record, ...]:
        holding = self._holdings[owner]
        holding.fresh = False
        holding.turn = secrets.randbits(62) + 1
        taken = self.take_over(saga_id, holding)
        while taken is None:
            holding.writer = self._heart.writer()
            taken = self.take_over(saga_id, holding)
        owner.base_n = taken.last_n
        owner.base_ended = any(record.type in FINAL for record in taken.records)
        return taken.records

    def durable_history(self, saga_id: str) -> tuple[tuple[Record, ...], int]:
        """See `GroupCommitLog.durable_history`. What can be read is durable."""
        records = self.history_there(saga_id)
        return readable_history(saga_id, records), len(records)

    def give_up(self, saga_id: str, token: object) -> None:
        """See `GroupCommitLog.give_up`. If the server is away, it is told when it is back."""
        if self._held.get(saga_id) is token:
            holding = self._holdings.get(token) if isinstance(token, Owned) else None
            # The end of this log frees everything at once, and the final record of a saga freed that.
            if holding is not None and holding.asked and not self._closing and not _is_over(token):
                self.hand_back(saga_id, holding)
            self._held.pop(saga_id, None)
        if isinstance(token, Owned):
            self._holdings.pop(token, None)
        self._refusals.forget(token)

    # --- the store's part of group commit

    def asked(self, batch: B) -> dict[str, tuple[Rows, Holding]]:
        """What of a batch may be sent to the server, by saga; the rest is refused. To be asked before each try."""
        asked: dict[str, tuple[Rows, Holding]] = {}
        for saga_id, rows in batch.sagas.items():
            first = rows.entries[0]
            error, holding = self._refusals.of(first), self._holdings.get(first.owner)
            if error is None and holding is not None:
                holding.asked = True
                asked[saga_id] = rows, holding
            else:
                gone = Fenced(f"this process does not own saga {saga_id!r} any more")
                self._refusals.refuse(rows.entries, error or gone)
        return asked

    def accept(self, batch: B) -> None:
        """See `GroupCommitLog.accept`."""
        if any(entry.error is not None for entry in batch.entries):
            self._heart.ask()  # who lost one saga may have lost all

    def sync(self) -> None:
        """See `GroupCommitLog.sync`: what was written is durable."""

    # --- durable, and still the owner

    def flush(self, ticket: int) -> None:
        """See `Log.flush`. When this returns, the lease runs, or the record ended its saga: nothing is done after that.

        Raises:
            Fenced: Another process has taken over, or may have: the lease ran out, and could not be renewed.
            LogUnavailable: The server stayed away. The log takes no more records; open it again.
        """
        self._flush(ticket)
        holding = self._in_doubt(ticket)
        if holding is not None:
            self._heart.hold(holding.writer)

    async def aflush(self, ticket: int) -> None:
        """See `flush`."""
        await super().aflush(ticket)
        holding = self._in_doubt(ticket)
        if holding is not None:
            await self._heart.ahold(holding.writer)

    def _in_doubt(self, ticket: int) -> Holding | None:
        """Under what the record was written, if nobody may act on its being durable before the lease is renewed.

        Nothing is done after a final record that another owner could do as well.
        """
        if not isinstance(ticket, Entry):
            return next((one for one in list(self._holdings.values()) if not one.writer.good()), None)
        if ticket.final:
            return None
        holding = self._holdings.get(ticket.owner)
        return None if holding is None or holding.writer.good() else holding

    def holds(self, saga_id: str) -> bool:
        """Whether this process owns the saga, and may act on it at this moment."""
        owner = self._owned.get(saga_id)
        holding = None if owner is None else self._holdings.get(owner)
        return holding is not None and holding.writer.good()

    # --- the end

    def shut(self, *, clean: bool) -> None:
        """See `GroupCommitLog.shut`."""
        try:
            self._heart.retire()
        except SagaError:
            return  # the lease runs out by itself
        finally:
            self._reached.close()

    def abandon(self) -> None:
        """See `GroupCommitLog.abandon`."""
        heart: Heart[Any] | None = getattr(self, "_heart", None)
        if heart is not None:
            heart.abandon()
        self._held.clear()
        self._holdings.clear()
        self._reached.abandon()

    def check_readable(self) -> None:
        """Raise if this log is closed. One that takes no more records can still be read."""
        if self._closed is not None:
            self._check()


def _is_over(token: object) -> bool:
    """Whether the saga has certainly ended: the store then names no owner."""
    if not isinstance(token, Owned):
        return False
    last = token.last
    return token.base_ended if last is None else last.final and last.durable and last.error is None


def fit(saga_id: str) -> str:
    """The id, if a store can hold it.

    Raises:
        ValueError: It cannot.
    """
    try:
        saga_id.encode()
    except UnicodeEncodeError:
        raise ValueError("A saga id is UTF-8. Choose another id.") from None
    if "\0" in saga_id:
        raise ValueError("A saga id has no control characters. Choose another id.")
    return saga_id
