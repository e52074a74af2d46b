"""The manifest: which segments are retired, which carry-over streams count, and where the chains go on.

It is the one file of a log that is replaced, always as a whole; `docs/log-format.md` describes it. A log without one
has nothing retired.
"""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Final

import msgspec

from agent_saga_core.errors import LogCorrupted, LogUnavailable
from agent_saga_core.log import osfile
from agent_saga_core.log.scan import Skip
from agent_saga_core.log.segments import WRITER_NAME, Tail, stream_names
from agent_saga_core.records import FORMAT_VERSION

__all__ = ["EMPTY", "MANIFEST", "Manifest", "Run", "counts", "encode_manifest", "parse_manifest", "read_manifest"]

MANIFEST: Final = "manifest.json"

_MAX_BYTES: Final = 1 << 26
_START: Final = b'{"digest":"'
_DIGEST_END: Final = len(_START) + 64


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive retired segments of one writer, and the end of its stream behind them."""

    first: int
    last: int
    base: int
    """Bytes of the stream before the next segment."""
    chain: str
    saga: str
    """Saga of the last record line; empty if there is none."""
    n: int
    synced: int
    peers: list[str] | None

    def skip(self) -> Skip:
        """What a reader of the stream does about it."""
        name = msgspec.json.encode(self.saga) if self.saga else b""
        after = Tail(self.last + 1, 0, self.base, self.chain.encode(), name, self.n)
        peers = None if self.peers is None else frozenset(self.peers)
        return Skip(self.first, self.last, after, self.synced, peers)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What one compaction decided, and those before it."""

    format: int
    log: str
    number: int
    """Counts the manifests of a log."""
    carried: list[str]
    """The carry-over streams that count. Any other is what a compaction left that was not finished."""
    retired: dict[str, list[Run]]
    """Per writer that is still there, its retired segments, in order."""
    gone: list[str]
    """Writers of which every segment is retired."""


EMPTY: Final = Manifest(format=FORMAT_VERSION, log="", number=0, carried=[], retired={}, gone=[])
_FORMAT: Final = re.compile(rb'"format":([0-9]{1,9})')
_decode = msgspec.json.Decoder(Manifest).decode


def counts(manifest: Manifest, stream: str) -> bool:
    """Whether readers look at a stream."""
    return stream in manifest.carried if stream[0] == "c" else stream not in manifest.gone


def read_manifest(directory: str) -> bytes | None:
    """The manifest as it stands there; None if there is none.

    Raises:
        OSError: It cannot be read.
    """
    try:
        return osfile.read_whole(f"{directory}/{MANIFEST}", _MAX_BYTES)
    except FileNotFoundError:
        return None


def encode_manifest(manifest: Manifest) -> bytes:
    """The file of a manifest."""
    body = msgspec.json.encode(manifest)[1:] + b"\n"
    return b'%b%b",%b' % (_START, sha256(body).hexdigest().encode(), body)


def parse_manifest(data: bytes | None, directory: str, log_id: str) -> Manifest:
    """What a manifest says.

    Raises:
        LogUnavailable: It is of a newer version.
        LogCorrupted: It is damaged, or another log's.
    """
    path = f"{directory}/{MANIFEST}"
    if data is None:
        # The first compaction writes a manifest before anything else.
        if any(name[0] == "c" for name in stream_names(directory)) and read_manifest(directory) is None:
            raise LogCorrupted(
                f"{path} is missing, but there are carry-over streams; restore it from a copy", where=path
            )
        return EMPTY
    body = data[_DIGEST_END + 2 :]
    try:
        framed = data[: len(_START)] == _START and data[_DIGEST_END : _DIGEST_END + 2] == b'",'
        intact = framed and sha256(body).hexdigest().encode() == data[len(_START) : _DIGEST_END]
        manifest = _decode(b"{" + body) if intact else None
    except (msgspec.MsgspecError, RecursionError, ValueError):
        manifest = None
    if manifest is None or manifest.format > FORMAT_VERSION:
        stated = _FORMAT.search(data)
        if stated is not None and int(stated[1]) > FORMAT_VERSION:
            raise LogUnavailable(f"{path} was written by a newer version of agent-saga; upgrade to read the log")
        raise LogCorrupted(f"{path} is damaged; restore it from a copy", where=path)
    if manifest.log != log_id or not _is_sane(manifest):
        raise LogCorrupted(f"{path} is damaged; restore it from a copy", where=path)
    return manifest


def _is_sane(manifest: Manifest) -> bool:
    names = [*manifest.carried, *manifest.retired, *manifest.gone]
    runs = [run for of in manifest.retired.values() for run in of]
    return (
        manifest.format == FORMAT_VERSION
        and all(WRITER_NAME.fullmatch(name) for name in names)
        and all(0 < run.first <= run.last < 1 << 16 and run.base >= 0 and run.n >= 0 for run in runs)
    )
