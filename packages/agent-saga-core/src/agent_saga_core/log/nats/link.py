"""One connection to a server of a NATS log: made, asked over, lost. It never reconnects by itself."""

from __future__ import annotations

import asyncio
import os
import ssl
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final, TypeVar

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from agent_saga_core.log.nats.address import Address
from agent_saga_core.log.options import one_line

__all__ = ["Away", "Link", "Loop", "NoStream", "Refused", "connect", "line_of"]

T = TypeVar("T")

_CONNECT_WITHIN: Final = 2
_HANDSHAKES: Final = 5
_SMALLEST_PAYLOAD: Final = 65_536
_NO_TLS: Final = "the address asks for TLS, and the server does not: nothing was said to it"


class Away(Exception):
    """The servers cannot be reached, or did not answer in time. Another try may go better."""


class _CutOff(Exception):
    """A server that wants credentials ended the connection. What it said of them may have been lost with it."""


class Refused(Exception):
    """The servers answered, and said no."""

    def __init__(self, said: str, code: int = 0) -> None:
        super().__init__(said)
        self.code = code


class NoStream(Refused):
    """There is no such stream."""


class Loop:
    """An event loop on a thread of its own, which no loop of the user's holds up."""

    def __init__(self) -> None:
        self.loop: Final = asyncio.new_event_loop()
        self._stopping: Final = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.thread: Final = threading.Thread(target=_run, args=(self.loop,), name="agent-saga nats", daemon=True)
        self.thread.start()

    def start(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Have something run here.

        As `asyncio.run_coroutine_threadsafe`, with one turn of the loop less: a flush waits for each of them.
        """
        future: Future[T] = Future()

        async def run() -> None:
            try:
                result = await work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        def begin() -> None:
            task = self.loop.create_task(run())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self.loop.call_soon_threadsafe(begin)
        return future

    async def pause(self, seconds: float) -> None:
        """Let so much time pass, or this be stopped."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    def stop(self) -> None:
        """End the thread, soon."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._stopping.set)
            self.loop.call_soon_threadsafe(self.loop.stop)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        with suppress(RuntimeError):
            loop.run_until_complete(asyncio.sleep(0))
        loop.close()


class Link:
    """One connection, for as long as it lasts."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.lost: str | None = None
        self.said = ""  # what the server complained of last
        self.inbox = client.new_inbox()
        self.waiting: dict[str, asyncio.Future[Msg] | asyncio.Queue[Msg | None]] = {}
        self.asked: dict[str, str] = {}  # what is waited for, and the subject of the question

    async def begin(self) -> None:
        """Hear answers."""
        client: Any = self.client
        await client.subscribe(f"{self.inbox}.*", cb=self._answered, pending_msgs_limit=0, pending_bytes_limit=0)

    async def _answered(self, message: Msg) -> None:
        waiting = self.waiting.get(message.subject.rpartition(".")[2])
        if isinstance(waiting, asyncio.Queue):
            waiting.put_nowait(message)
        elif waiting is not None and not waiting.done():
            waiting.set_result(message)

    def deny(self, said: str) -> None:
        """The server says that this client may not publish there: no answer will come."""
        for token, subject in self.asked.copy().items():
            waiting = self.waiting.get(token)
            if f'"{subject.lower()}"' in said.lower() and isinstance(waiting, asyncio.Future) and not waiting.done():
                waiting.set_exception(Refused(said))

    def lose(self, why: str) -> None:
        """No answer will come any more."""
        if self.lost is not None:
            return
        self.lost = why
        for waiting in self.waiting.copy().values():
            if isinstance(waiting, asyncio.Queue):
                waiting.put_nowait(None)
            elif not waiting.done():
                waiting.set_exception(Away(why))

    def close_inherited(self) -> None:
        """In a forked child: give back the socket, without a word to the server."""
        writer = _writer(self.client)
        sock: Any = None if writer is None else writer.get_extra_info("socket")
        if sock is not None:
            with suppress(OSError):
                os.close(sock.fileno())

    async def close(self) -> None:
        """End it."""
        self.lose("it is closed")
        await _drop(self.client)


def line_of(error: BaseException, address: Address) -> str:
    """What was said, on one line, without what must not be shown."""
    return one_line(str(error), address.secrets) or type(error).__name__


async def connect(address: Address, discovered: tuple[str, ...]) -> Link:
    """Connect to one of the servers, each in one try.

    Raises:
        Away: There is nobody.
        Refused: The server does not want this client, or is not fit.
    """
    said = ""
    for _ in range(_HANDSHAKES):
        try:
            return await _connect(address, discovered)
        except _CutOff as error:
            said = str(error)
    raise Refused(f"the server refuses these credentials, or cuts the connection when it has them ({said})")


async def _connect(address: Address, discovered: tuple[str, ...]) -> Link:
    client = Client()
    link = Link(client)

    async def lost() -> None:
        link.lose("the connection was lost")

    async def failed(error: Exception) -> None:
        link.said = line_of(error, address)
        if "ermissions" in link.said:
            link.deny(link.said)

    given: dict[str, Any] = _options(address, discovered)
    given |= {"disconnected_cb": lost, "closed_cb": lost, "error_cb": failed}
    try:
        if address.tls:
            given["tls"] = _tls(address)
            # The client would go on without it where a server, or who stands before it, does not ask for it.
            for name in ("user", "password", "token"):
                given[name] = _if_encrypted(client, given.get(name))
        # A handshake that fails may leave the client waiting for what does not come.
        await asyncio.wait_for(
            client.connect(**{name: value for name, value in given.items() if value is not None}),
            _CONNECT_WITHIN * (1 + len(given["servers"])),
        )
    except BaseException as error:
        await _drop(client)
        why = _why_not(error, link.said, address)
        if why is None:
            raise
        info: dict[str, Any] = getattr(client, "_server_info", {})
        if isinstance(why, Away) and info.get("auth_required"):
            raise _CutOff(str(why)) from None
        raise why from None
    fault = _unfit(client, address)
    if fault is not None:
        await link.close()
        raise Refused(fault)
    await link.begin()
    return link


def _options(address: Address, discovered: tuple[str, ...]) -> dict[str, Any]:
    return {
        "servers": list(dict.fromkeys((*address.servers, *discovered))),
        "name": "agent-saga",
        "user": address.user,
        "password": address.password,
        "token": address.token,
        "user_credentials": address.creds,
        # A client that reconnects by itself would send what it had in hand, at a time of its own.
        "allow_reconnect": False,
        "max_reconnect_attempts": 1,
        "reconnect_time_wait": 0.02,
        "connect_timeout": _CONNECT_WITHIN,
        "ping_interval": 5,
    }


def _unfit(client: Client, address: Address) -> str | None:
    """Why this connection is not to be used."""
    if address.tls and not _is_encrypted(client):
        return _NO_TLS
    if client.max_payload < _SMALLEST_PAYLOAD:
        return f"max_payload of the server is {client.max_payload} bytes; a log needs {_SMALLEST_PAYLOAD} at least"
    return None


def _why_not(error: BaseException, complaint: str, address: Address) -> Exception | None:
    """What it means that there is no connection; None if it is about something else."""
    said = complaint or line_of(error, address)
    if isinstance(error, ModuleNotFoundError):
        return Refused("credentials in a file need a package; pip install nkeys")
    if isinstance(error, ssl.SSLError):
        return Refused(_NO_TLS if _NO_TLS in error.args else f"TLS failed: {line_of(error, address)}")
    if isinstance(error, ValueError):
        return Refused(line_of(error, address))
    if not isinstance(error, OSError | nats.errors.Error | asyncio.TimeoutError):
        return None
    if isinstance(error, nats.errors.AuthorizationError) or "uthorization" in said or "uthentication" in said:
        return Refused(f"the server refuses these credentials ({said})")
    if isinstance(error, TimeoutError):
        return Away("no server answers in time; check that it runs, and that nothing else has its port")
    return Away(f"no server can be reached: {said}" if isinstance(error, nats.errors.NoServersError) else said)


def _tls(address: Address) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=address.tls_ca)
    if address.tls_cert:
        context.load_cert_chain(address.tls_cert, address.tls_key)
    return context


def _writer(client: Client) -> Any:
    """What the client writes to; it does not show that otherwise."""
    return getattr(getattr(client, "_transport", None), "_io_writer", None)


async def _drop(client: Client) -> None:
    """End a client, also one that never came to be connected, and its socket."""
    transport: Any = getattr(client, "_transport", None)

    async def end() -> None:
        await client.close()
        if transport is not None:
            transport.close()
            await transport.wait_closed()

    # As a task of its own: what a failed handshake left is cancelled, or waited for without an end.
    await asyncio.wait([asyncio.ensure_future(_quietly(end()))], timeout=1.0)


async def _quietly(work: Coroutine[Any, Any, None]) -> None:
    with suppress(Exception, asyncio.CancelledError):
        await work


def _is_encrypted(client: Client) -> bool:
    writer = _writer(client)
    return writer is not None and writer.get_extra_info("ssl_object") is not None


def _if_encrypted(client: Client, secret: str | None) -> Callable[[], str] | None:
    """What gives that credential away on an encrypted connection only."""
    if secret is None:
        return None

    def give() -> str:
        if not _is_encrypted(client):
            raise ssl.SSLError(_NO_TLS)
        return secret

    return give
