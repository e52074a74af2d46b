"""Torn or damaged: by construction, at every byte, and never silently less than was written."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Callable, Iterator
from hashlib import sha256
from itertools import permutations
from pathlib import Path

import pytest

from agent_saga_core import records
from agent_saga_core.errors import LogCorrupted
from agent_saga_core.log import FileLog, scan, segments
from agent_saga_core.records import Record, encode, finish_line

# `*` and `J` turn into a newline, `@` into a NUL, when one bit of them flips.
SAGAS = ("alpha", "J*n@", "café")


def record(saga: str, n: int, kind: str = "INTENT", **data: object) -> Record:
    return Record(saga=saga, n=n, epoch=1, type=kind, time=1000.25 + n, data=data)


def die(log: FileLog) -> None:
    """What a kill leaves: no end line, no lock."""
    log.abandon()


def write_three_sagas(log: FileLog) -> None:
    for saga in SAGAS:
        log.claim(saga)
    log.append(record("alpha", 1, "START", name="x"))
    log.flush(log.append(record("alpha", 2, tool="charge", args={"m": "J@*"})))
    log.append(record("J*n@", 1, "START"))
    log.append(record("alpha", 3, "DONE"))
    log.flush(log.append(record("J*n@", 2)))
    log.append(record("café", 1, "START"))
    log.flush(log.append(record("alpha", 4, "COMMITTED")))
    log.append(record("café", 2))
    log.append(record("J*n@", 3, "DONE"))
    log.flush(log.append(record("J*n@", 4, "COMMITTED", z="@")))


def segment_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("w-*/*.jsonl"))


def read_all(directory: Path) -> dict[str, tuple[Record, ...] | None]:
    """What each saga reads as; None if it is refused."""
    log = FileLog(directory, create=False)
    found: dict[str, tuple[Record, ...] | None] = {}
    for saga in SAGAS:
        try:
            found[saga] = log.read(saga)
        except LogCorrupted:
            found[saga] = None
    log.unfinished()
    return found


@pytest.fixture
def fast_path(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one: these tests read the log some thousand times."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path
        return
    directory = memory / f"agent-saga-{tmp_path.name}-{id(tmp_path)}"
    directory.mkdir()
    yield directory
    shutil.rmtree(directory)


@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
def test_a_flipped_bit_anywhere_is_found_and_stays_with_its_saga(
    fast_path: Path, clean: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_salts", deque([b"J" * 22] * 20))  # a salt, too, can become two lines
    log = FileLog(fast_path / "log")
    write_three_sagas(log)
    if clean:
        log.close()
    else:
        die(log)
    good = read_all(fast_path / "log")
    (path,) = segment_files(fast_path / "log")
    raw = path.read_bytes()
    at = 0
    for line in raw.splitlines(keepends=True):
        mine = next((saga for saga in SAGAS if line[75:].startswith(b'"saga":"%b"' % saga.encode())), None)
        for offset in range(len(line)):
            bad = bytearray(raw)
            bad[at + offset] ^= 1 << (at + offset) % 8
            path.write_bytes(bad)
            assert not FileLog(fast_path / "log", create=False).verify().intact, (at + offset, line)
            for saga, found in read_all(fast_path / "log").items():
                if found is None:
                    assert saga == mine or mine is None, (at + offset, saga, line)
                else:
                    assert found == good[saga], (at + offset, saga, line)
                    # Its newline is the only byte of a record's line that its record can do without.
                    assert saga != mine or offset == len(line) - 1, (at + offset, line)
        at += len(line)


def test_damage_is_found_where_it_is_however_many_lines_are_looked_at_in_one_go(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = FileLog(fast_path / "log")
    write_three_sagas(log)
    die(log)
    (path,) = segment_files(fast_path / "log")
    raw = path.read_bytes()
    for at in range(0, len(raw), 5):
        bad = bytearray(raw)
        bad[at] ^= 1 << at % 8
        path.write_bytes(bad)
        verdicts: list[object] = []
        for at_once in (1, 2, 3, 500):
            monkeypatch.setattr(scan, "_AT_ONCE", at_once)
            verdicts.append((FileLog(fast_path / "log", create=False).verify(), read_all(fast_path / "log")))
        assert all(verdict == verdicts[0] for verdict in verdicts), at
        assert isinstance(verdicts[0], tuple) and not verdicts[0][0].intact


def test_an_end_torn_at_any_byte_costs_nothing_that_was_durable(fast_path: Path) -> None:
    directory = fast_path / "log"
    log = FileLog(directory)
    write_three_sagas(log)
    die(log)
    good = read_all(directory)
    (path,) = segment_files(directory)
    raw = path.read_bytes()
    lines = raw.splitlines(keepends=True)
    batch = len(raw) - sum(map(len, lines[-3:]))
    for cut in range(batch, len(raw)):
        for pad in (b"", bytes(len(raw) - cut)):
            path.write_bytes(raw[:cut] + pad)
            verification = FileLog(directory, create=False).verify()
            assert verification.intact, (cut, verification)
            whole = raw[:cut].count(b"\n") - 1
            assert verification.records == whole
            for saga, found in read_all(directory).items():
                expected = good[saga]
                assert found is not None and expected is not None
                assert found == expected[: len(found)]
            # A recoverer takes the saga on, behind what is left.
            with_claim = FileLog(directory, create=False)
            claimed = with_claim.claim("café")
            assert [entry.n for entry in claimed] == list(range(1, len(claimed) + 1))
            with_claim.close()
            for extra in segment_files(directory)[1:]:
                shutil.rmtree(extra.parent)


def padded(saga: str, n: int, length: int) -> Record:
    return record(saga, n, text="x" * length)


def test_a_block_that_was_never_written_is_torn_only_in_what_was_never_synced(tmp_path: Path) -> None:
    log = FileLog(tmp_path / "log")
    log.claim("a")
    log.claim("b")
    log.flush(log.append(record("a", 1, "START")))
    start = segment_files(tmp_path / "log")[0].stat().st_size
    log.append(padded("a", 2, 3000))
    log.write(log.append(record("b", 1, "START")))
    die(log)
    (path,) = segment_files(tmp_path / "log")
    raw = path.read_bytes()
    block = (start // 512 + 2) * 512
    holed = raw[:block] + bytes(512) + raw[block + 512 :]
    path.write_bytes(holed)
    reader = FileLog(tmp_path / "log", create=False)
    assert reader.verify().intact
    assert [entry.n for entry in reader.read("a")] == [1]
    assert reader.read("b") == ()
    # The same hole, not at a block: no lost write leaves that.
    path.write_bytes(raw[: block + 7] + bytes(512) + raw[block + 519 :])
    assert not FileLog(tmp_path / "log", create=False).verify().intact


def test_a_hole_before_what_was_synced_is_damage(tmp_path: Path) -> None:
    log = FileLog(tmp_path / "log")
    log.claim("a")
    log.flush(log.append(record("a", 1, "START")))
    log.flush(log.append(padded("a", 2, 3000)))
    log.flush(log.append(record("a", 3)))  # its line says that what stands before it was synced
    die(log)
    (path,) = segment_files(tmp_path / "log")
    raw = path.read_bytes()
    path.write_bytes(raw[:1024] + bytes(512) + raw[1536:])
    reader = FileLog(tmp_path / "log", create=False)
    assert not reader.verify().intact
    with pytest.raises(LogCorrupted):
        reader.read("a")


def test_an_unterminated_line_in_the_middle_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 600)
    log = FileLog(tmp_path / "log")
    log.claim("a")
    for n in range(1, 7):
        log.flush(log.append(record("a", n)))
    log.close()
    first, second, *_ = segment_files(tmp_path / "log")
    raw = first.read_bytes()
    first.write_bytes(raw[:-10])
    assert second.exists()
    reader = FileLog(tmp_path / "log", create=False)
    assert not reader.verify().intact
    with pytest.raises(LogCorrupted):
        reader.read("a")


Change = Callable[[list[bytes]], Iterator[list[bytes]]]


def without_a_line(lines: list[bytes]) -> Iterator[list[bytes]]:
    yield from (lines[:i] + lines[i + 1 :] for i in range(len(lines) - 1))


def with_a_line_twice(lines: list[bytes]) -> Iterator[list[bytes]]:
    for i, j in permutations(range(len(lines)), 2):
        yield lines[:i] + [lines[j]] + lines[i:]
    yield from (lines[:i] + [lines[i]] + lines[i:] for i in range(len(lines)))


def with_two_lines_swapped(lines: list[bytes]) -> Iterator[list[bytes]]:
    for i, j in permutations(range(len(lines)), 2):
        if i < j:
            yield [*lines[:i], lines[j], *lines[i + 1 : j], lines[i], *lines[j + 1 :]]


def with_bytes_overwritten(lines: list[bytes]) -> Iterator[list[bytes]]:
    raw = b"".join(lines)
    for at in range(0, len(raw) - 40, 23):
        yield [raw[:at] + b"\xff" * 40 + raw[at + 40 :]]


@pytest.mark.parametrize("change", [without_a_line, with_a_line_twice, with_two_lines_swapped, with_bytes_overwritten])
@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
def test_lines_that_are_not_where_they_were_written_are_found(fast_path: Path, change: Change, clean: bool) -> None:
    directory = fast_path / "log"
    log = FileLog(directory)
    write_three_sagas(log)
    if clean:
        log.close()
    else:
        die(log)
    good = read_all(directory)
    (path,) = segment_files(directory)
    lines = path.read_bytes().splitlines(keepends=True)
    tried = 0
    for changed in change(lines):
        path.write_bytes(b"".join(changed))
        assert not FileLog(directory, create=False).verify().intact, changed
        for saga, found in read_all(directory).items():
            assert found is None or found == good[saga], changed
        tried += 1
    assert tried >= len(lines) - 1


def test_a_line_from_another_writer_or_segment_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 900)
    directory = tmp_path / "log"
    for saga in ("alpha", "café"):
        log = FileLog(directory)
        log.claim(saga)
        for n in range(1, 5):
            log.flush(log.append(record(saga, n)))
        log.close()
    files = segment_files(directory)
    assert len(files) == 4
    kept = {path: path.read_bytes() for path in files}
    good = read_all(directory)
    for source in files:
        moved = kept[source].splitlines(keepends=True)[1]
        for target in files:
            target.write_bytes(kept[target] + moved)
            if source != target:
                source.write_bytes(kept[source].replace(moved, b""))
            assert not FileLog(directory, create=False).verify().intact
            for saga, found in read_all(directory).items():
                assert found is None or found == good[saga]
            for path, raw in kept.items():
                path.write_bytes(raw)
    # Whole files that change places.
    files[0].write_bytes(kept[files[2]])
    files[2].write_bytes(kept[files[0]])
    assert not FileLog(directory, create=False).verify().intact
    assert all(found is None or found == good[saga] for saga, found in read_all(directory).items())


def test_a_missing_segment_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 600)
    log = FileLog(tmp_path / "log")
    log.claim("alpha")
    for n in range(1, 7):
        log.flush(log.append(record("alpha", n)))
    log.close()
    for path in segment_files(tmp_path / "log")[:-1]:
        raw = path.read_bytes()
        path.unlink()
        assert not FileLog(tmp_path / "log", create=False).verify().intact
        with pytest.raises(LogCorrupted):
            FileLog(tmp_path / "log", create=False).read("alpha")
        path.write_bytes(raw)
    assert FileLog(tmp_path / "log", create=False).verify().intact


def test_damage_that_names_nobody_spares_what_it_cannot_concern(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    first = FileLog(directory)
    write_three_sagas(first)
    die(first)
    (path,) = segment_files(directory)
    raw = path.read_bytes()
    path.write_bytes(raw[:-200] + b"\xff" * 40 + raw[-160:])  # in the last line: nothing behind it vouches for it
    log = FileLog(directory)
    assert log.read("alpha")[-1].type == "COMMITTED"
    for suspect in ("J*n@", "café"):
        with pytest.raises(LogCorrupted, match="may concern") as caught:
            log.claim(suspect)
        assert caught.value.saga_id == suspect
        assert caught.value.where is not None and path.name in caught.value.where
        assert not log.owned(suspect)
    with pytest.raises(LogCorrupted):
        log.claim("never-met")  # all its records may have stood there
    # What begins after that writer's death is another matter, for every process.
    log.claim("later", fresh=True)
    log.flush(log.append(record("later", 1, "START")))
    die(log)
    recoverer = FileLog(directory)
    assert [entry.type for entry in recoverer.claim("later")] == ["START", "CLAIM"]
    unfinished = recoverer.unfinished()
    assert set(unfinished.saga_ids) == {"J*n@", "café", "later"}
    assert [set(damage.saga_ids or ()) for damage in unfinished.damage] == [{"J*n@", "café"}]


def test_damage_that_names_nobody_may_concern_what_began_while_its_writer_lived(tmp_path: Path) -> None:
    """It may have taken the saga over: its COMPENSATED may be what the damaged line said."""
    directory = tmp_path / "log"
    elder = FileLog(directory)
    elder.claim("own", fresh=True)
    elder.flush(elder.append(record("own", 1, "START")))
    (path,) = segment_files(directory)
    younger = FileLog(directory)
    younger.claim("handed over", fresh=True)
    younger.flush(younger.append(record("handed over", 1, "START")))
    die(younger)
    elder.claim("handed over")
    elder.flush(elder.append(record("handed over", 3, "COMPENSATING")))
    die(elder)
    raw = path.read_bytes()
    path.write_bytes(raw[:-200] + b"\xff" * 40 + raw[-160:])
    with pytest.raises(LogCorrupted, match="may concern"):
        FileLog(directory).claim("handed over")


def rechained(path: Path, change: Callable[[int, bytes], bytes]) -> None:
    """Change headers or data and mend every hash and digest after it: what only an attacker does."""
    writer = path.parent.name.encode()
    chain, lines = writer, []
    for number, line in enumerate(path.read_bytes().splitlines()):
        body = change(number, line[75:])
        if b',"salt":"' in body:
            header, _, rest = body.partition(b',"salt":"')
            salt, data = rest[:22], rest[31:-1]
            header = header[:-65] + sha256(salt + data).hexdigest().encode() + b'"'
            body = header + b',"salt":"' + rest
        else:
            header = body[:-1]
        chain = sha256(chain + header).hexdigest().encode()
        lines.append(b'{"hash":"' + chain + b'",' + body)
    path.write_bytes(b"\n".join(lines) + b"\n")


HOSTILE = {
    "deep": (b'"data":{"name":"x"}', b'"data":{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "huge int": (b'"data":{"name":"x"}', b'"data":{"a":' + b"9" * 10_000 + b"}"),
    "no json": (b'"data":{"name":"x"}', b'"data":{"a":}'),
    "not utf-8": (b'"data":{"name":"x"}', b'"data":{"a":"\xff"}'),
    "negative": (b'"n":1,', b'"n":-1,'),
    "zero": (b'"n":1,', b'"n":0,'),
    "twice": (b'"n":1,', b'"n":1,"n":1,'),
    "huge n": (b'"n":1,', b'"n":999999999999999,'),
    "synced ahead": (b'"time":1001.25,', b'"time":1001.25,"synced":999999,'),
    "odd id": (b'"saga":"alpha"', b'"saga":"\\u0061lpha"'),
    "bad id": (b'"saga":"alpha"', b'"saga":"\xff"'),
    "bad escape": (b'"saga":"alpha"', b'"saga":"\\x"'),
    "wrong prev": (b'"time":1001.25,', b'"time":1001.25,"prev":["zeta",9],'),
    "critical": (b'"type":"START"', b'"type":"FUTURE"'),
    "reserved": (b'"type":"START"', b'"type":"PREPARED","critical":false'),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_forged_line_gives_a_verdict_and_nothing_else(tmp_path: Path, name: str) -> None:
    log = FileLog(tmp_path / "log")
    write_three_sagas(log)
    log.close()
    (path,) = segment_files(tmp_path / "log")
    old, new = HOSTILE[name]

    def forge(number: int, body: bytes) -> bytes:
        changed = body.replace(old, new, 1) if number == 1 else body
        assert number != 1 or changed != body
        return changed

    rechained(path, forge)
    reader = FileLog(tmp_path / "log", create=False)
    reader.verify()
    reader.unfinished()
    reader.saga_ids()
    with pytest.raises(LogCorrupted):
        reader.read("alpha")


def test_an_unknown_record_that_is_not_critical_is_no_damage_and_counts(tmp_path: Path) -> None:
    log = FileLog(tmp_path / "log")
    log.claim("a")
    log.append(record("a", 1, "START"))
    log.append(Record(saga="a", n=2, epoch=1, type="HINT", time=1.0, data={}, critical=False))
    log.release("a")
    assert [entry.n for entry in log.read("a")] == [1, 2]
    assert [entry.n for entry in log.claim("a")] == [1, 2, 3]
    assert log.verify().intact


def test_an_erased_payload_leaves_the_chain_whole_and_is_not_made_up(tmp_path: Path) -> None:
    log = FileLog(tmp_path / "log")
    write_three_sagas(log)
    log.close()
    (path,) = segment_files(tmp_path / "log")
    raw = path.read_bytes()
    line = raw.splitlines()[2]
    at = line.index(b',"salt"')
    path.write_bytes(raw.replace(line, line[:at] + b" " * (len(line) - at - 1) + b"}"))
    reader = FileLog(tmp_path / "log", create=False)
    assert reader.verify().intact
    with pytest.raises(LogCorrupted, match="erased"):
        reader.read("alpha")
    assert reader.read("café")


def test_two_owners_at_once_are_detected(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    log = FileLog(directory)
    log.claim("a")
    log.flush(log.append(record("a", 1, "START")))
    log.flush(log.append(record("a", 2)))
    other = FileLog(directory)
    other.claim("b")
    other.flush(other.append(record("b", 1, "START")))
    die(other)
    # A writer that lost its exclusion: the same number in two streams.
    path = max(segment_files(directory))
    chain = path.read_bytes().splitlines()[-1][9:73]
    with path.open("ab") as file:
        file.write(finish_line(encode(record("a", 2)), chain, b',"prev":["b",1]')[0])
    log.close()
    reader = FileLog(directory, create=False)
    with pytest.raises(LogCorrupted, match="twice"):
        reader.read("a")
    assert reader.read("b")
    verification = reader.verify()
    assert not verification.intact
    assert verification.first_broken is not None and "twice" in verification.first_broken
    assert any(damage.saga_ids == ("a",) for damage in reader.unfinished().damage)


def test_garbage_is_not_read_for_ever(tmp_path: Path) -> None:
    log = FileLog(tmp_path / "log")
    write_three_sagas(log)
    log.close()
    (path,) = segment_files(tmp_path / "log")
    for garbage in (b"\n" * 1_000_000, b'{"hash":"' * 300_000 + b"\n", b"x" * 3_000_000, (b"{" * 99 + b"\n") * 20_000):
        raw = path.read_bytes()
        path.write_bytes(raw[:1500] + garbage + raw[1500:])
        reader = FileLog(tmp_path / "log", create=False)
        assert not reader.verify().intact
        reader.unfinished()
        path.write_bytes(raw)


def test_a_segment_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    log = FileLog(tmp_path / "log")
    write_three_sagas(log)
    log.close()
    (path,) = segment_files(tmp_path / "log")
    rechained(path, lambda number, body: body.replace(b'"format":1', b'"format":2') if number == 0 else body)
    reader = FileLog(tmp_path / "log", create=False)
    with pytest.raises(LogCorrupted, match="newer version"):
        reader.read("alpha")
    assert not reader.verify().intact
