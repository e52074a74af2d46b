"""Reading streams: which records stand where, and which places are torn or damaged.

A stream is read once from its beginning; later calls read only what was added. The rules are those of "Torn or
damaged" in `docs/log-format.md`.
"""

from __future__ import annotations

import os
import re
from binascii import hexlify
from collections.abc import Callable, Iterable
from copy import copy
from hashlib import sha256
from typing import Final, NamedTuple

import msgspec

from agent_saga_core.log import osfile
from agent_saga_core.log.base import Damage
from agent_saga_core.log.segments import END_LINE, HEAD_LINE, Tail, segment_name
from agent_saga_core.records import FORMAT_VERSION, MAX_LINE_BYTES, NUMBER, RECORD_LINE, STRING

__all__ = ["Found", "Page", "Sink", "Skip", "Stream", "saga_name"]

CHUNK: Final = 1 << 20
MAX_SEGMENT_BYTES: Final = 1 << 28
"""A segment longer than this was not written by us."""

MAX_DAMAGE: Final = 100
"""After so many damaged places a stream is not read on."""

MAX_REGION: Final = 10_000
"""Nor after so many lines of which none can be tied to the chain."""

_REGION_BYTES: Final = 1 << 16
_IDENTITY = re.compile(rb'"saga":(' + STRING + rb'),"n":(' + NUMBER + rb")[,}]")
_SYNCED = re.compile(rb'"synced":(' + NUMBER + rb")[,}]")
_match_record = RECORD_LINE.fullmatch


_LINE_START: Final = b'{"hash":"'

# What `RECORD_LINE` matches, but for escapes in names, `critical` and erased records: for lines that are read by the
# million. What this does not match is looked at again. Nothing in it is tried twice: `++` and the like do not go back.
_PLAIN = rb'"[^"\\\x00-\x1f]*+"'
_COUNT = rb"[1-9][0-9]{0,14}+"
_match_plain = re.compile(
    rb'\{"hash":"(.{64})",("saga":(' + _PLAIN + rb'),"n":(' + _COUNT + rb")"
    rb'(?:,"epoch":' + _COUNT + rb')?+,"type":"([A-Z_]{1,64}+)"'
    rb',"time":([0-9]{1,11}+(?:\.[0-9]{1,32}+)?+(?:e-[0-9]{1,3}+)?+)'
    rb'(?:,"synced":(' + _COUNT + rb'))?+(?:,"prev":\[(' + _PLAIN + rb"),(" + _COUNT + rb")\])?+"
    rb',"digest":"(.{64})"),"salt":"([A-Za-z0-9_-]{22}+)","data":(\{[^\n]*\})\}\n',
    re.DOTALL,
).match

_AT_ONCE: Final = 500
"""So many plain lines have their hashes compared in one go."""

Found = tuple[str, int, bytes, bytes, int]
"""One intact record: saga, number, type, time as it stands there, offset in the segment."""

Sink = Callable[[int, list[Found]], None]
"""Takes the number of a segment and intact records of it."""


def saga_name(name: bytes) -> str | None:
    """The saga id that stands in a line as `name`; None unless it stands there as we would write it."""
    try:
        if b"\\" not in name:
            return name[1:-1].decode()
        saga_id = msgspec.json.decode(name, type=str)
        return saga_id if msgspec.json.encode(saga_id) == name else None
    except (msgspec.MsgspecError, ValueError):
        return None


class _Region:
    """Lines between the last intact one and the next that can be tied to the chain."""

    __slots__ = ("blob", "count", "last", "offset", "tail")

    def __init__(self, offset: int, line: bytes, tail: Tail) -> None:
        self.offset = offset
        self.tail = tail  # the end of what is intact
        self.blob = line[:_REGION_BYTES]
        self.count = 1
        self.last = line[9:73]

    def grown(self, line: bytes) -> _Region:
        more = copy(self)
        if len(more.blob) < _REGION_BYTES:
            more.blob = (self.blob + b"\n" + line)[:_REGION_BYTES]
        more.count += 1
        more.last = line[9:73]
        return more


class Page(NamedTuple):
    """One segment of a stream, as a reader needs it that goes on behind it."""

    before: Tail
    """The end of the stream before the segment, as a place in the segment."""
    after: Tail
    """The end of what is intact in it."""
    size: int
    """Bytes of the file; more than `after.offset` only where the end is torn."""
    synced: int
    """The greatest number of durable bytes that the stream has stated up to here."""
    ended: bool
    peers: frozenset[str] | None


class Skip(NamedTuple):
    """Segments that are not read: retired ones. The stream goes on behind them."""

    first: int
    last: int
    after: Tail
    """The end of the stream before the next segment, as a place in that segment."""
    synced: int
    peers: frozenset[str] | None


class _State:
    """How far a stream is read. Replaced as a whole, so that an interrupted read is simply done again."""

    __slots__ = ("before", "cut", "damage", "ended", "peers", "region", "stuck", "synced", "tail")

    def __init__(self, tail: Tail) -> None:
        self.before = tail  # as it was where this segment begins
        self.tail = tail
        self.synced = 0
        self.ended = False
        self.stuck = False
        self.peers: frozenset[str] | None = None
        self.region: _Region | None = None
        self.cut: tuple[bytes, int] | None = None  # a line whose frame is damaged, and where it ends
        self.damage: tuple[Damage, ...] = ()


Known = Callable[[Tail, int, int], Page | None]
"""Gives a segment's page without reading it all: from the tail before it, its size, and its descriptor."""


class Stream:
    """One writer's segments, as far as they have been read.

    Args:
        directory: The log's.
        writer: The writer's name.
        log_id: The log's id.
        skips: Segments that are passed over.
        known: Asked before a segment is read; what it knows is not read.
        turned: Called when an intact segment is done with, because another follows.
    """

    def __init__(
        self,
        directory: str,
        writer: str,
        log_id: str,
        *,
        skips: Iterable[Skip] = (),
        known: Known | None = None,
        turned: Callable[[Page], None] | None = None,
    ) -> None:
        self.writer = writer
        self._skips = {skip.first: skip for skip in skips}
        self._known = known
        self._turned = turned
        self._path = f"{directory}/{writer}"
        self._log_id = log_id
        self._state = _State(Tail(1, 0, 0, writer.encode(), b"", 0))
        self._torn: Damage | None = None  # what is wrong with the unterminated end, if it is not just torn
        self._size = -1
        self._listed = False

    @property
    def ended(self) -> bool:
        """Whether nothing can follow: the stream was closed, or cannot be read on."""
        return self._state.ended or self._state.stuck

    @property
    def peers(self) -> frozenset[str] | None:
        """The writers that may have been alive when this one was born; None if that is not known."""
        return self._state.peers

    def is_durable(self, segment: int, offset: int) -> bool:
        """Whether the stream itself says that the record at this place was synced."""
        state = self._state
        base = state.tail.base
        return state.synced > base + offset if segment == state.tail.segment else state.synced >= base

    def page(self) -> Page | None:
        """The segment that is being read, up to here; None if there is none, or the stream is damaged."""
        state = self._state
        if self._size < 0 or state.damage or state.region is not None or self._torn is not None:
            return None
        return Page(state.before, state.tail, self._size, state.synced, state.ended, state.peers)

    def damage(self) -> tuple[Damage, ...]:
        """What is damaged in what has been read; `saga_ids` None where it may be any unfinished saga."""
        state = self._state
        found = state.damage
        if state.region is not None:
            found = (*found, self._verdict(state.region, "", None))
        return found if self._torn is None else (*found, self._torn)

    def advance(self, sink: Sink) -> bool:
        """Read what was added since the last call; return whether there was anything.

        `sink` gets every intact record, and after an interrupt some of them twice.

        Raises:
            OSError: A segment cannot be read.
        """
        changed = False
        while not self._state.stuck:
            self._pass_over()
            changed = self._read_segment(sink) or changed
            if not self._follows():
                self._look_for_gap()
                break
            # The next segment was created after this one was complete: whatever it lacked a moment ago is there now.
            self._read_segment(sink)
            if os.path.exists(self._segment()):
                self._turn_page()
            else:
                self._stop("the segment is missing")
            changed = True
        return changed

    # --- segments

    def _segment(self, ahead: int = 0) -> str:
        return f"{self._path}/{segment_name(self._state.tail.segment + ahead)}"

    def _where(self, state: _State, offset: int) -> str:
        return f"{self.writer}/{segment_name(state.tail.segment)}, byte {offset}"

    def _pass_over(self) -> None:
        tail = self._state.tail
        skip = None if tail.offset else self._skips.get(tail.segment)
        if skip is not None:
            state = copy(self._state)
            state.tail = state.before = skip.after
            state.synced = max(state.synced, skip.synced)
            state.peers = state.peers or skip.peers
            self._state = state

    def _look_for_gap(self) -> None:
        if not self._listed:
            here = segment_name(self._state.tail.segment)
            passed = {skip.last for skip in self._skips.values()}
            names = os.listdir(self._path)
            later = [
                name for name in names if re.fullmatch(r"[0-9]{8}\.jsonl", name) and not self._is_passed(int(name[:8]))
            ]
            gone = bool(later) and here not in later and self._state.tail.segment - 1 not in passed
            # A live writer may have begun its next segment since we looked for it.
            if (gone or any(name > here for name in later)) and not self._follows():
                self._stop(f"a segment at or behind {here} is missing")
            self._listed = here in later

    def _follows(self) -> bool:
        return self._state.tail.segment + 1 in self._skips or os.path.exists(self._segment(1))

    def _is_passed(self, segment: int) -> bool:
        return any(skip.first <= segment <= skip.last for skip in self._skips.values())

    def _stop(self, reason: str) -> None:
        state = copy(self._state)
        state.stuck = True
        self._add(state, state.tail.offset, reason, None)
        self._state = state

    def _turn_page(self) -> None:
        state = copy(self._state)
        tail = state.tail
        size = os.stat(self._segment()).st_size
        if size > tail.offset and not state.stuck:
            self._add(state, tail.offset, "the segment ends within a line, and another segment follows", None)
        elif self._turned is not None and size == self._size and (page := self.page()) is not None:
            self._turned(page)
        state.tail = state.before = tail._replace(segment=tail.segment + 1, offset=0, base=tail.base + size)
        self._torn = None
        self._size = -1
        self._state = state

    def _read_segment(self, sink: Sink) -> bool:
        try:
            descriptor = osfile.open_file(self._segment(), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            size = os.fstat(descriptor).st_size
            if size == self._size:
                return False
            tail = self._state.tail
            known = self._known(tail, size, descriptor) if self._known is not None and not tail.offset else None
            if known is not None:
                state = copy(self._state)
                state.tail = known.after
                state.synced = max(state.synced, known.synced)
                state.ended = known.ended
                state.peers = state.peers or known.peers
                self._state = state
            elif size < self._state.tail.offset:
                self._stop("the segment is shorter than it was")
            elif size > MAX_SEGMENT_BYTES:
                self._stop("the segment is longer than any segment is written")
            else:
                self._read_lines(descriptor, sink)
            self._size = size
            return True
        finally:
            os.close(descriptor)

    def _read_lines(self, descriptor: int, sink: Sink) -> None:
        want = CHUNK
        self._torn = None
        while not self._state.stuck:
            data = osfile.pread(descriptor, want, self._state.tail.offset)
            cut = data.rfind(b"\n")
            if cut >= 0:
                want = CHUNK
                self._take(data[: cut + 1], sink, descriptor)
            elif len(data) < want:
                self._look_at_end(data)
                return
            elif want > MAX_LINE_BYTES:
                self._stop("a line is longer than any line is written")
            else:
                want *= 4

    def _look_at_end(self, rest: bytes) -> None:
        """Judge what stands behind the last newline. Torn costs nothing; a whole line ended wrongly is damage."""
        state = copy(self._state)
        if not rest or state.region is not None:
            return
        before = state.damage
        if state.ended:
            self._add(state, state.tail.offset, "something follows the line that ends the stream", ())
        else:
            self._split_off(state, rest)
        if len(state.damage) > len(before):
            self._torn = state.damage[-1]

    # --- lines

    def _take(self, data: bytes, sink: Sink, descriptor: int) -> None:
        """Read whole lines. What is simply the next record is dealt with quickly; `_odd` does the rest."""
        state = copy(self._state)
        at = 0
        while at < len(data) and not state.stuck:
            if state.region is None and not state.ended and state.tail.offset:
                at = self._take_plain(state, data, at, sink)
            if at < len(data):
                end = data.index(b"\n", at)
                self._odd(state, data[at:end], sink, descriptor)
                at = end + 1
        self._state = state

    def _take_plain(self, state: _State, data: bytes, at: int, sink: Sink) -> int:
        """Read lines that are simply the next record, up to the first that is not; return where that begins."""
        segment, offset, base, chain, name, n = state.tail
        shift = offset - at
        number, at_once, more = b"%d" % n, _AT_ONCE, True
        match_plain, hashed = _match_plain, sha256  # found sooner
        while more:
            start, top = at, state.synced
            found: list[Found] = []
            hashes: list[bytes] = []
            stated: list[bytes] = []
            more = False
            while match := match_plain(data, at):
                own, header, saga, this, kind, time, synced, of, of_n, digest, salt, body = match.groups()
                n = int(this)
                if of is None:
                    follows = not name or (saga == name and n == int(number) + 1)
                else:
                    follows = of_n == number and of == name
                try:
                    saga_id = saga[1:-1].decode()
                except UnicodeDecodeError:
                    break
                if not follows:
                    break
                if synced is not None:
                    if int(synced) > base + shift + at:
                        break
                    top = max(top, int(synced))
                hashes += (hashed(chain + header).digest(), hashed(salt + body).digest())
                stated += (own, digest)
                found.append((saga_id, n, kind, time, shift + at))
                chain, name, number = own, saga, this
                at = match.end()
                if len(found) == at_once:
                    more = True
                    break
            if hexlify(b"".join(hashes)) == b"".join(stated):
                if found:
                    state.synced = top
                    state.tail = Tail(segment, shift + at, base, chain, name, found[-1][1])
                    sink(segment, found)
            elif len(found) == 1:
                return start
            else:
                # One of these is not what was written: again, each by itself.
                at, at_once, more = start, 1, True
                chain, name, number = state.tail.chain, state.tail.name, b"%d" % state.tail.n
        return at

    def _odd(self, state: _State, line: bytes, sink: Sink, descriptor: int) -> None:
        """Judge a line that is not simply the next record, and go on behind it."""
        while not state.stuck:
            tail = state.tail
            if state.ended:
                self._add(state, tail.offset, "something follows the line that ends the stream", ())
            elif state.region is not None and not self._resync(state, state.region, line):
                state.region = state.region.grown(line)
                state.stuck = state.region.count >= MAX_REGION
            elif not self._stream_line(state, line):
                if _authentic(line, state.tail.chain) is not None:
                    rest = self._split_off(state, line)
                    if rest:
                        # The newline between two lines was lost: what is behind it is a line like any other.
                        line = line[rest:]
                        continue
                    if rest is not None:
                        state.tail = state.tail._replace(offset=tail.offset)
                    elif self._is_torn(state, line, descriptor):
                        state.stuck = True
                        return
                    else:
                        self._own_line(state, line, sink)
                elif self._is_torn(state, line, descriptor):
                    state.stuck = True
                    return
                elif not _is_rest(state.cut, line, tail.offset):
                    state.region = _Region(tail.offset, line, tail)
            state.tail = state.tail._replace(offset=state.tail.offset + len(line) + 1)
            return

    def _stream_line(self, state: _State, line: bytes) -> bool:
        """Take the line if it is the head of this segment or the end of the stream, in the right place."""
        tail = state.tail
        head, end = HEAD_LINE.fullmatch(line), END_LINE.fullmatch(line)
        match = head or end
        if match is None or _hash(tail.chain, match["header"]) != match["hash"]:
            return False
        if int(match["prev_n"] or 0) != tail.n or (match["prev_saga"] or b"") != tail.name:
            return False
        if head is not None:
            told = (head["log"], head["writer"], int(head["segment"]), int(head["base"]))
            if told != (self._log_id.encode(), self.writer.encode(), tail.segment, tail.base) or tail.offset:
                return False
            if int(head["format"]) > FORMAT_VERSION:
                self._add(state, 0, "the segment was written by a newer version; use that version to read it", None)
                state.stuck = True
            if head["peers"] is not None:
                state.peers = frozenset(re.findall(r"w-[0-9a-f-]+", head["peers"].decode()))
        elif end is not None:
            state.ended = True
            state.synced = max(state.synced, int(end["synced"]))
        state.tail = tail._replace(chain=match["hash"])
        return True

    def _own_line(self, state: _State, line: bytes, sink: Sink) -> None:
        """Take a line whose header is the one that was written here, whatever the rest of it is."""
        tail = state.tail
        header = _authentic(line, tail.chain) or b""
        identity = _IDENTITY.match(header)
        if identity is None:
            self._add(state, tail.offset, "a line about the stream itself is damaged or out of place", ())
            state.tail = tail._replace(chain=line[9:73])
            return
        name, n = identity[1], int(identity[2])
        saga_id = saga_name(name)
        match = _match_record(line)
        state.tail = tail._replace(chain=line[9:73], name=name, n=n)
        if saga_id is None:
            self._add(state, tail.offset, "a saga id is written as no writer writes it", None)
        elif match is None:
            self._add(state, tail.offset, "the frame of a record is damaged", (saga_id,))
            state.cut = line, tail.offset + len(line) + 1
        elif match["salt"] is not None and _hash(match["salt"], match["data"]) != match["digest"]:
            self._add(state, tail.offset, "the data of a record are not those that were written", (saga_id,))
        elif (
            not tail.offset
            # Behind damage that took bytes away, every place is off: the chain alone vouches for what follows.
            or (int(match["synced"] or 0) > tail.position and not state.damage)
            or (_line_before(match) != (tail.name, tail.n) and not (not tail.name and match["prev_saga"] is None))
        ):
            self._add(state, tail.offset, "a record contradicts the place where it stands", None)
        else:
            state.synced = max(state.synced, int(match["synced"] or 0))
            sink(tail.segment, [(saga_id, n, match["type"], match["time"], tail.offset)])

    def _split_off(self, state: _State, line: bytes) -> int | None:
        """If a whole intact line is followed by anything but a newline, report it and go behind that byte."""
        tail = state.tail
        header = _authentic(line, tail.chain)
        if header is None:
            return None
        stream_line = HEAD_LINE.match(line) or END_LINE.match(line)
        identity = _IDENTITY.match(header)
        if stream_line is not None and _hash(tail.chain, stream_line["header"]) == stream_line["hash"]:
            whole = stream_line.end()
        elif identity is not None:
            whole = _whole_record(line, 75 + len(header))
        else:
            whole = None
        # One NUL may be a wrong byte; more are a block that was never written, for `_is_torn` to judge.
        if whole is None or line.startswith(b"\0\0", whole) or not line[whole:].strip(b"\0"):
            return None  # ended, or torn at its end
        saga_id = None if identity is None else saga_name(identity[1])
        self._add(state, tail.offset, "a line is not ended by a newline", () if saga_id is None else (saga_id,))
        state.tail = tail._replace(chain=line[9:73], offset=tail.offset + whole + 1)
        if identity is not None:
            state.tail = state.tail._replace(name=identity[1], n=int(identity[2]))
        return whole + 1 if whole + 1 < len(line) else 0

    # --- damage

    def _add(self, state: _State, offset: int, reason: str, saga_ids: tuple[str, ...] | None) -> None:
        where = f"{self.writer}/{segment_name(state.tail.segment)}, byte {offset}"
        if len(state.damage) >= MAX_DAMAGE:
            state.stuck = True
            reason, saga_ids = "more damage than is worth reading on for", None
        state.damage = (*state.damage, Damage(where=where, reason=reason, saga_ids=saga_ids))

    def _is_torn(self, state: _State, line: bytes, descriptor: int) -> bool:
        """Whether a block of this line was never written, in a part of the stream that was never synced."""
        tail = state.tail
        start = line.find(b"\0")
        if start < 0 or tail.position < state.synced or self._follows():
            return False
        end = start + len(line[start:]) - len(line[start:].lstrip(b"\0"))
        # Unwritten blocks read as zeros from one block's end, or from where the last sync left off, to another's.
        if (start and (tail.offset + start) % _BLOCK) or (tail.offset + end) % _BLOCK:
            return False
        rest = osfile.pread(descriptor, MAX_SEGMENT_BYTES, tail.offset)
        claims = (_match_record(later) or END_LINE.fullmatch(later) for later in rest.split(b"\n"))
        return all(claim is None or int(claim["synced"] or 0) <= tail.position for claim in claims)

    def _resync(self, state: _State, region: _Region, line: bytes) -> bool:
        """If this line can be tied to the chain again, report the region before it and go on from here."""
        match = _match_record(line) or HEAD_LINE.fullmatch(line) or END_LINE.fullmatch(line)
        if match is None:
            return False
        ties = [("next", region.tail.chain), ("stored", region.blob[9:73]), ("last", region.last)]
        ties[2:2] = [("header", _hash(region.tail.chain, header)) for header in _headers(region.blob)]
        for how, chain in ties:
            if _hash(chain, match["header"]) == match["hash"]:
                before = _line_before(match)
                state.damage = (*state.damage, self._verdict(region, how, before))
                state.region = None
                name, n = (region.tail.name, region.tail.n) if how == "next" else before
                state.tail = state.tail._replace(chain=chain, name=name, n=n)
                return True
        return False

    def _verdict(self, region: _Region, how: str, before: tuple[bytes, int] | None) -> Damage:
        names = _records_in(region, how, before)
        saga_ids = None if names is None else tuple(saga_id for name in names if (saga_id := saga_name(name)))
        where = f"{self.writer}/{segment_name(region.tail.segment)}, byte {region.offset}"
        what = "a line is" if region.count == 1 else f"{region.count} lines are"
        return Damage(where=where, reason=f"{what} not what was written there", saga_ids=saga_ids)


# --- lines apart from any stream

_BLOCK: Final = 512
_DATA = re.compile(rb',"salt":"([A-Za-z0-9_-]{22})","data":')
_ERASED = re.compile(rb" *\}")
_BRACE_AND_WRONG_BYTE = re.compile(rb'\}(?=.(?:\{"hash":"|\{"?h?a?s?h?"?:?\Z|\Z))', re.DOTALL)


def _hash(chain: bytes, header: bytes | bytearray) -> bytes:
    return sha256(chain + header).hexdigest().encode()


def _headers(line: bytes) -> list[bytes]:
    """What may be the header of a line whose frame may be damaged."""
    digest, salt = line.find(b',"digest":"'), line.find(b',"salt":"')
    ends = [digest + 76] if digest >= 0 else []
    if salt >= 0 and salt not in ends:
        ends.append(salt)
    if digest < 0 and salt < 0:
        ends.append(max(line.rfind(b"}"), 75))
        ends.append(len(line) - 1)
    return [line[75:end] for end in ends]


def _authentic(line: bytes, chain: bytes) -> bytes | None:
    """The header of a line, if it and its hash are exactly those that were written behind `chain`."""
    for header in (
        *_headers(line),
        *(match["header"] for match in (HEAD_LINE.match(line), END_LINE.match(line)) if match),
    ):
        if _hash(chain, header) == line[9:73]:
            return header
    return None


def _whole_record(line: bytes, header_end: int) -> int | None:
    """The end of the record line that `line` begins with, if its data are intact and more follows."""
    data = _DATA.match(line, header_end)
    if data is None:
        erased = _ERASED.match(line, header_end)
        return None if erased is None else erased.end()
    digest = line[header_end - 65 : header_end - 1].decode("latin-1")
    so_far = sha256(data[1])
    at = data.end()
    for brace in _BRACE_AND_WRONG_BYTE.finditer(line, at):
        so_far.update(line[at : brace.start()])
        at = brace.start()
        if so_far.hexdigest() == digest:
            return at + 1
    return None


def _line_before(match: re.Match[bytes]) -> tuple[bytes, int]:
    """Saga and number of the record line before an intact line; its own predecessor, if it names none."""
    if match["prev_saga"] is not None:
        return match["prev_saga"], int(match["prev_n"])
    if match.re is RECORD_LINE and int(match["n"]) > 1:
        return match["saga"], int(match["n"]) - 1
    return b"", 0


def _records_in(region: _Region, how: str, before: tuple[bytes, int] | None) -> list[bytes] | None:
    """The sagas whose records stood in a damaged region; None if that cannot be told.

    Args:
        region: The lines.
        how: What ties the next intact line to the chain: `next` to the line before the region, `stored` to the hash
            that stands first in the region, `header` to the hash of what stands there as header, `last` to the hash
            of its last line; empty if there is no such line.
        before: Saga and number of the record line before that line.
    """
    if how == "next":
        # No line was lost between the two. What stands there may be a copy of the line before, or the rest of one
        # whose data got a newline; if it looks like another line, that one is missing where it belongs.
        copied = region.count == 1 and region.blob[9:73] == region.tail.chain
        return [] if copied or (_LINE_START not in region.blob and len(region.blob) < _REGION_BYTES) else None
    if b"\n" + _LINE_START in region.blob:
        return None
    known = (region.tail.name, region.tail.n)
    if how in ("stored", "header") and before == known and known[0]:
        return []
    if how != "last":
        name = _identity(region, alone=not how)
        if name is not None:
            return [name] if name else []
    if how == "stored" and before is not None and before[0]:
        # The next line vouches for the one line that stood here. Was there another before it? Its own words count:
        # lines that were cut out leave a line that names one of them.
        named = b',"prev":[%b,%d],"digest":"' % known in region.blob
        if named or (before == (known[0], known[1] + 1) and b',"prev":[' not in region.blob):
            return [before[0]]
    return None


def _identity(region: _Region, *, alone: bool) -> bytes | None:
    """The saga of the one line that a region began with, empty if that was no record; None if it cannot be told.

    It can be told if the line is one bit away from one that fits both its place in the chain and its own hash: no
    other change of it would.

    Args:
        region: The lines.
        alone: Whether to demand that the region is that line and nothing else.
    """
    chain, stored = region.tail.chain, region.blob[9:73]
    for header in _headers(region.blob):
        own = _hash(chain, header)
        if len(stored) == len(own) and sum(a != b for a, b in zip(own, stored, strict=True)) <= 1:
            right, hash_of = header, own
        else:
            right, hash_of = _one_bit_off(chain, header, stored), stored
        if right is None:
            continue
        if alone and region.count > 1:
            rest = region.blob[75 + len(header) :]
            if not _is_whole(b'{"hash":"%b",%b%b' % (hash_of, right, rest)):
                continue
        identity = _IDENTITY.match(right)
        return b"" if identity is None else identity[1]
    return None


def _is_whole(line: bytes) -> bool:
    match = _match_record(line)
    if match is None:
        return HEAD_LINE.fullmatch(line) is not None or END_LINE.fullmatch(line) is not None
    return match["salt"] is None or _hash(match["salt"], match["data"]) == match["digest"]


def _is_rest(cut: tuple[bytes, int] | None, line: bytes, offset: int) -> bool:
    """Whether a byte of the line before became a newline, and `line`, at `offset`, is what stood behind it."""
    if cut is None or cut[1] != offset:
        return False
    return any(_is_whole(b"%b%c%b" % (cut[0], 0x0A ^ 1 << bit, line)) for bit in range(8))


def _one_bit_off(chain: bytes, header: bytes, wanted: bytes) -> bytes | None:
    if len(header) > 4096:
        return None
    header_bytes = bytearray(header)
    for at in range(len(header_bytes)):
        for bit in range(8):
            header_bytes[at] ^= 1 << bit
            if _hash(chain, header_bytes) == wanted:
                return bytes(header_bytes)
            header_bytes[at] ^= 1 << bit
    return None
