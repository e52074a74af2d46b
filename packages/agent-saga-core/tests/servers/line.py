"""What stands between a log and its server, and can lose what the server says."""

from __future__ import annotations

import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress

Pair = tuple[socket.socket, socket.socket]


class Line(ABC):
    """Stands between a log and its server, on a port of this machine. A store says where its server is.

    Attributes:
        port: Its own.
        lost: Set when an answer was lost as `lose_the_answer` asked.
    """

    def __init__(self) -> None:
        self._marker: bytes | None = None
        self._away = self._stay_away = False
        self._pairs: list[Pair] = []
        self._taking = threading.Lock()
        self.lost = threading.Event()
        self._refused = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @abstractmethod
    def connect(self) -> socket.socket:
        """A connection to the server.

        Raises:
            OSError: It is down.
        """

    @abstractmethod
    def address(self, url: str) -> str:
        """The same log, through here."""

    def lose_the_answer(self, marker: bytes, *, and_stay_away: bool = False) -> None:
        """The next request that holds `marker` reaches the server, and what it answers reaches nobody."""
        self.lost.clear()
        self._stay_away = and_stay_away
        self._marker = marker

    def cut(self) -> None:
        """Cut every connection, whatever is on its way there and back; others are taken."""
        with self._taking:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            _cut(pair)

    def go_away(self) -> threading.Event:
        """Cut every connection, and take no other; set as soon as one was refused."""
        self._refused = threading.Event()
        with self._taking:
            self._away = True
        self.cut()
        return self._refused

    def come_back(self) -> None:
        """Take connections again."""
        self._away = False

    def close(self) -> None:
        """End everything."""
        self._listener.close()
        self.go_away()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                pair = client, self.connect()
            except OSError:
                client.close()
                continue
            with self._taking:  # what is taken is cut by who goes away after it
                away = self._away
                if not away:
                    self._pairs.append(pair)
            if away:
                _cut(pair)
                self._refused.set()
                continue
            doomed = threading.Event()
            threading.Thread(target=self._requests, args=(pair, doomed), daemon=True).start()
            threading.Thread(target=self._answers, args=(pair, doomed), daemon=True).start()

    def _requests(self, pair: Pair, doomed: threading.Event) -> None:
        for data in _received(pair[0]):
            if self._marker is not None and self._marker in data:
                self._marker = None
                doomed.set()
            try:
                pair[1].sendall(data)
            except OSError:
                break
        _cut(pair)

    def _answers(self, pair: Pair, doomed: threading.Event) -> None:
        for data in _received(pair[1]):
            if doomed.is_set():  # it is done, or the server would not say a word yet
                if self._stay_away:
                    self.go_away()
                _cut(pair)
                self.lost.set()
                return
            try:
                pair[0].sendall(data)
            except OSError:
                break
        _cut(pair)


def _received(source: socket.socket) -> Iterator[bytes]:
    while True:
        try:
            data = source.recv(1 << 20)
        except OSError:
            return
        if not data:
            return
        yield data


def _cut(pair: Pair) -> None:
    for end in pair:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
