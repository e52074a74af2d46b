"""The connection to the servers of a NATS log: a loop and a thread of its own, what can be asked, and what errors mean.

Everything here may be asked twice. What writes names the sequence that it must follow, and carries an id of its own: if
an answer is lost, the last message of the subject tells whether it was stored.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from itertools import count
from shlex import quote
from typing import Any, Final, NamedTuple, TypeVar

import nats.errors
from nats.aio.msg import Msg

from agent_saga_core.errors import LogUnavailable, SagaError
from agent_saga_core.log.nats.address import Address
from agent_saga_core.log.nats.link import Away, Link, Loop, NoStream, Refused, connect, line_of

__all__ = ["Away", "Conflict", "Message", "NoStream", "Refused", "Server"]

T = TypeVar("T")

_ANSWER_WITHIN: Final = 2.0
"""Seconds after which a request is made again: a cluster that elects a leader does not answer at all."""
_LOOK_EVERY: Final = 5.0
_HEADER_ROOM: Final = 4_096
_PAGE_BYTES: Final = 16 * 2**20

_WRONG_LAST: Final = frozenset({10071, 10164})
_NOTHING_THERE: Final = frozenset({10037, 10043, 10057})
_NO_STREAM: Final = 10059
_AWAY: Final = frozenset({10008, 10158, 10201})  # temporarily unavailable, the same message is being stored, no leader


class Conflict(Exception):
    """Something else is the last message of the subject."""

    def __init__(self, last: Message | None = None) -> None:
        super().__init__("another message is the last one")
        self.last = last


class Message(NamedTuple):
    """One stored message."""

    subject: str
    seq: int
    headers: Mapping[str, str]
    data: bytes


_patience: ContextVar[float | None] = ContextVar("patience", default=None)
_inherited: list[object] = []  # connections of a parent: closing one in the child would end it for the parent


class Server:
    """The servers of a log, as seen by one process.

    What begins with `async` is for the loop of this object; the others are for every thread.

    Attributes:
        address: Where they are.
        timeout: Seconds for which something is tried again while they are away.
        max_payload: Bytes that one message may have, as far as is known.
    """

    def __init__(self, address: Address) -> None:
        self.address: Final = address
        self.timeout: Final = address.timeout
        self.max_payload = 2**20
        self._loop: Loop | None = None
        self._link: Link | None = None
        self._connecting: asyncio.Lock | None = None
        self._discovered: tuple[str, ...] = ()
        self._tokens = count(1)
        self._closed = False

    @property
    def stream(self) -> str:
        """The stream of the records."""
        return self.address.name

    @property
    def index(self) -> str:
        """The stream of everything of which only the last message counts."""
        return f"{self.address.name}_index"

    # --- from any thread

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run something on the loop, and wait for it.

        Raises:
            LogUnavailable: It cannot be done, or the servers stayed away.
        """
        try:
            return self.wait_for(self.start(work))
        except (Away, Refused) as error:
            raise self.translated(error) from None

    def start(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Have something run on the loop.

        Raises:
            LogUnavailable: This is closed.
        """
        if self._closed:
            raise LogUnavailable(f"the log {self.address.url} is closed; open it again")
        loop = self._loop
        if loop is None:
            loop = self._loop = Loop()
            weakref.finalize(self, loop.stop)
        return loop.start(work)

    def wait_for(self, future: Future[T]) -> T:
        """The outcome of something that was started.

        An interrupt comes out once it is known what became of it: what is half done must not go on behind the back of
        whoever cleans up. A second interrupt does not wait.
        """
        try:
            while True:
                try:
                    return future.result(_LOOK_EVERY)
                except TimeoutError:
                    if future.done():
                        raise
                    if self._closed:  # and so the loop is gone
                        raise Away("the log is closed") from None
        except (KeyboardInterrupt, SystemExit):
            if not future.done():
                with suppress(Exception):
                    future.result(self.timeout)
            raise

    def close(self) -> None:
        """End the connection; nothing is waited for any more."""
        loop, self._loop = self._loop, None
        closed, self._closed = self._closed, True
        if loop is None or closed:
            return
        link, self._link = self._link, None
        if link is not None:
            with suppress(Exception):
                loop.start(link.close).result(2.0)
        loop.stop()
        if threading.current_thread() is not loop.thread:
            loop.thread.join(5.0)

    def abandon(self) -> None:
        """In a forked child: forget the connection, without a word to the servers."""
        self._closed = True
        link, loop = self._link, self._loop
        _inherited.append((link, loop))
        self._link = self._loop = None
        if link is not None:
            link.close_inherited()

    # --- the connection

    async def patient(self, seconds: float, work: Callable[[], Awaitable[T]]) -> T:
        """Do something that waits for servers that are away, each time, for so long and not for `timeout`."""
        token = _patience.set(seconds)
        try:
            return await work()
        finally:
            _patience.reset(token)

    async def greet(self) -> None:
        """Connect, in one try.

        Raises:
            Away: There is nobody.
            Refused: The server does not want this client, or is not fit.
        """
        await self._linked()

    async def _linked(self) -> Link:
        link = self._link
        if link is not None and link.lost is None:
            return link
        if self._connecting is None:
            self._connecting = asyncio.Lock()
        async with self._connecting:
            link = self._link
            if link is not None and link.lost is None:
                return link
            self._link = link = await connect(self.address, self._discovered)
            self.max_payload = link.client.max_payload
            self._discovered = tuple(server.geturl() for server in link.client.discovered_servers)
            return link

    # --- requests

    async def insist(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do something again and again while the servers are away, up to `timeout`, or what `patient` says.

        Raises:
            Away: They stayed away.
            Refused: They say no.
        """
        seconds = _patience.get()
        until = time.monotonic() + (self.timeout if seconds is None else seconds)
        pause = 0.02
        while True:
            try:
                return await work()
            except Away:
                if self._closed or time.monotonic() > until:
                    raise
            if self._loop is not None:
                await self._loop.pause(pause)
            pause = min(2 * pause, 0.5)

    async def ask(self, subject: str, data: bytes = b"", headers: dict[str, str] | None = None) -> Msg:
        """One request, one answer.

        Raises:
            Away: There was none.
        """
        link = await self._linked()
        token = str(next(self._tokens))
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Msg] = loop.create_future()
        link.waiting[token] = answer
        link.asked[token] = subject
        timer = loop.call_later(_ANSWER_WITHIN, _late, answer)
        try:
            try:
                await link.client.publish(subject, data, reply=f"{link.inbox}.{token}", headers=headers)
            except nats.errors.MaxPayloadError:
                raise Refused(f"a message of {len(data)} bytes is longer than max_payload of the server") from None
            except (nats.errors.Error, OSError) as error:
                raise Away(self.line_of(error)) from None
            if link.lost is not None:
                raise Away(link.lost)
            message = await answer
        finally:
            timer.cancel()
            link.waiting.pop(token, None)
            link.asked.pop(token, None)
        if (message.headers or {}).get("Status") == "503":
            raise Away("no JetStream answers there")
        return message

    async def api(self, subject: str, body: object = None) -> dict[str, Any]:
        """Ask the JetStream API.

        Raises:
            Away: It does not answer.
            NoStream: There is no such stream.
            Refused: It says no.
        """
        data = b"" if body is None else json.dumps(body).encode()
        answer: dict[str, Any] = json.loads((await self.ask(f"$JS.API.{subject}", data)).data)
        error = answer.get("error")
        if error is not None:
            raise _refusal(error)
        return answer

    async def put(
        self, subject: str, data: bytes, *, expected: int, token: str, headers: Mapping[str, str] | None = None
    ) -> int:
        """Store a message behind the one of sequence `expected` on its subject; its sequence. One try.

        Raises:
            Away: Nobody knows whether it is stored.
            Conflict: Another is the last one. It may be this very message.
            Refused: The servers say no.
        """
        given = {
            "Nats-Expected-Last-Subject-Sequence": str(expected),
            "Nats-Msg-Id": token,
            **(headers or {}),
        }
        answer: dict[str, Any] = json.loads((await self.ask(subject, data, given)).data)
        error = answer.get("error")
        if error is None:
            return int(answer["seq"])
        if error.get("err_code") in _WRONG_LAST:
            raise Conflict
        raise _refusal(error)

    async def write(
        self, subject: str, data: bytes, *, expected: int, token: str, headers: Mapping[str, str] | None = None
    ) -> int:
        """`put`, until it is known what became of it.

        Raises:
            Away: The servers stayed away.
            Conflict: Another message is the last one, and it is not this one.
            Refused: The servers say no.
        """
        stream = self.stream_of(subject)

        async def once() -> int:
            try:
                return await self.put(subject, data, expected=expected, token=token, headers=headers)
            except Conflict:
                last = await self.last(stream, subject)
                if last is not None and last.headers.get("Nats-Msg-Id") == token:
                    return last.seq
                raise Conflict(last) from None

        return await self.insist(once)

    def stream_of(self, subject: str) -> str:
        """In which of the two streams a subject is."""
        return self.index if subject.startswith(f"{self.address.name}.i.") else self.stream

    async def last(self, stream: str, subject: str) -> Message | None:
        """The last message of a subject, as the leader of the stream has it."""
        return await self._get(stream, {"last_by_subj": subject})

    async def at(self, stream: str, seq: int) -> Message | None:
        """The message of that sequence, from whichever server has it."""
        answer = await self.ask(f"$JS.API.DIRECT.GET.{stream}", json.dumps({"seq": seq}).encode())
        found = _direct(answer)
        # One that lags behind does not know it yet.
        return found if found is not None else await self._get(stream, {"seq": seq})

    async def next(self, stream: str, subject: str, seq: int) -> Message | None:
        """The first message from that sequence on whose subject matches, as the leader of the stream has it."""
        return await self._get(stream, {"seq": seq, "next_by_subj": subject})

    async def _get(self, stream: str, body: dict[str, Any]) -> Message | None:
        try:
            found = (await self.api(f"STREAM.MSG.GET.{stream}", body))["message"]
        except Refused as error:
            if error.code in _NOTHING_THERE:
                return None
            raise
        headers = _headers(base64.b64decode(found.get("hdrs", "")))
        return Message(found["subject"], int(found["seq"]), headers, base64.b64decode(found.get("data", "")))

    async def scan(self, stream: str, subject: str, start: int = 1) -> AsyncIterator[Message]:
        """Every message from that sequence on whose subject matches, in order.

        From whichever server has them: the very newest may not be there yet.
        """
        while True:
            at = start
            page = await self.insist(
                lambda at=at: self._page(stream, {"seq": at, "next_by_subj": subject, "batch": 512})
            )
            for message in page:
                start = message.seq + 1
                yield message
            if not page:
                return

    async def latest(self, stream: str, subjects: list[str]) -> list[Message]:
        """The last message of each of these subjects that has one, from whichever server has it."""
        found: list[Message] = []
        for begin in range(0, len(subjects), 256):
            some = subjects[begin : begin + 256]
            while some:
                page = await self.insist(lambda some=some: self._page(stream, {"multi_last": some, "batch": 256}))
                found += page
                there = {message.subject for message in page}
                # A page ends early where it is long.
                some = [subject for subject in some if subject not in there] if page and len(page) < len(some) else []
        return found

    async def _page(self, stream: str, body: dict[str, Any]) -> list[Message]:
        link = await self._linked()
        token = str(next(self._tokens))
        answers: asyncio.Queue[Msg | None] = asyncio.Queue()
        link.waiting[token] = answers
        found: list[Message] = []
        data = json.dumps({**body, "max_bytes": _PAGE_BYTES}).encode()
        try:
            try:
                await link.client.publish(f"$JS.API.DIRECT.GET.{stream}", data, reply=f"{link.inbox}.{token}")
            except (nats.errors.Error, OSError) as error:
                raise Away(self.line_of(error)) from None
            while True:
                try:
                    answer = await asyncio.wait_for(answers.get(), _ANSWER_WITHIN)
                except TimeoutError:
                    raise Away("no answer came in time") from None
                if answer is None:
                    raise Away(link.lost or "the connection was lost")
                message = _direct(answer)
                if message is None:
                    status = (answer.headers or {}).get("Status")
                    if status in ("204", "404"):  # that was all; there is nothing
                        return found
                    if status == "503":
                        raise Away("no JetStream answers there")
                    raise Refused(f"reading is refused (status {status})")
                found.append(message)
        finally:
            link.waiting.pop(token, None)

    async def delete(self, stream: str, seq: int) -> bool:
        """Remove one message; False if it is not there."""
        try:
            await self.api(f"STREAM.MSG.DELETE.{stream}", {"seq": seq, "no_erase": True})
        except Refused as error:
            if error.code in _NOTHING_THERE:
                return False
            raise
        return True

    async def purge(self, stream: str, subject: str, before: int = 0) -> int:
        """Remove every message of a subject, or those of it before a sequence; how many."""
        body: dict[str, Any] = {"filter": subject, **({"seq": before} if before else {})}
        return int((await self.api(f"STREAM.PURGE.{stream}", body)).get("purged", 0))

    async def put_all(self, items: list[tuple[str, bytes, int]]) -> list[int] | None:
        """Store several messages at once, each behind what it expects, or none; None if they cannot be."""
        batch = os.urandom(12).hex()
        link = await self._linked()
        try:
            for at, (subject, data, expected) in enumerate(items, 1):
                headers = {
                    "Nats-Expected-Last-Subject-Sequence": str(expected),
                    "Nats-Batch-Id": batch,
                    "Nats-Batch-Sequence": str(at),
                }
                if at < len(items):
                    await link.client.publish(subject, data, headers=headers)
                else:
                    answer = await self.ask(subject, data, {**headers, "Nats-Batch-Commit": "1"})
                    said: dict[str, Any] = json.loads(answer.data)
                    if "error" in said or said.get("count") != len(items) or link is not self._link:
                        return None
                    last = int(said["seq"])
                    return list(range(last - len(items) + 1, last + 1))
        except (Away, nats.errors.Error, OSError, ValueError):
            return None
        return []

    def room(self) -> int:
        """Bytes of payload that one message may have beside its headers."""
        return self.max_payload - _HEADER_ROOM

    # --- errors

    def translated(self, error: Exception) -> SagaError:
        """What a log raises for that: one line, without credentials."""
        url, said = self.address.url, self.line_of(error)
        if isinstance(error, NoStream):
            return LogUnavailable(
                f"there is no log at {url}: it was not initialised; make it: agent-saga log init {quote(url)}"
            )
        if "ermissions" in said:
            said += (
                f"; grant this user to publish on {self.address.name}.> and on the subjects of the API that "
                "docs/log-nats.md lists under Rights"
            )
        return LogUnavailable(f"the log {url} cannot be used: {said}")

    def line_of(self, error: BaseException) -> str:
        """What was said, on one line, without what must not be shown."""
        return line_of(error, self.address)


def _late(answer: asyncio.Future[Msg]) -> None:
    if not answer.done():
        answer.set_exception(Away("no answer came in time"))


def _refusal(error: dict[str, Any]) -> Exception:
    code, said = int(error.get("err_code", 0)), str(error.get("description", "refused"))
    if code == _NO_STREAM:
        return NoStream(said, code)
    return Away(said) if code in _AWAY or error.get("code") == 503 else Refused(said, code)


def _direct(answer: Msg) -> Message | None:
    headers: Mapping[str, str] = answer.headers or {}
    if "Nats-Sequence" not in headers:
        return None
    return Message(headers["Nats-Subject"], int(headers["Nats-Sequence"]), headers, answer.data)


def _headers(raw: bytes) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in raw.decode("utf-8", "replace").split("\r\n")[1:]:
        name, colon, value = line.partition(":")
        if colon:
            found[name] = value.strip()
    return found
