from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from aviso_workers.errors import UndecodableError
from aviso_workers.spark import event_log, job_events
from aviso_workers.spark.event_log import EventLog, EventLogReader, LogPosition
from aviso_workers.spark.job_events import SparkApplication

MANY = 32 << 20
"""Bytes that a kibibyte of zstd decompresses to at most."""
CODECS = ["", ".zstd", ".lz4", ".snappy"]


def line(number: int, name: str = "SparkListenerJobEnd") -> bytes:
    return json.dumps({"Event": name, "Job ID": number}, separators=(",", ":")).encode()


def on_disk(lines: list[bytes], codec: str = "") -> bytes:
    """Lines as Spark writes them, with a frame or a block for each."""
    return b"".join(COMPRESS[codec](each + b"\n") for each in lines)


def to_lz4(content: bytes) -> bytes:
    """A block as lz4-java writes it: compressed, or as it is where that is no larger."""
    block = pyarrow.Codec("lz4_raw").compress(content, asbytes=True)
    method, block = (0x20, block) if len(block) < len(content) else (0x10, content)
    return struct.pack("<8sBiii", b"LZ4Block", method | 5, len(block), len(content), 0) + block


def to_snappy(content: bytes) -> bytes:
    """A stream of one block as snappy-java writes it. Streams may follow each other."""
    block: bytes = pyarrow.Codec("snappy").compress(content, asbytes=True)
    return struct.pack(">8siii", b"\x82SNAPPY\0", 1, 1, len(block)) + block


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".zstd": zstandard.ZstdCompressor().compress,
    ".lz4": to_lz4,
    ".snappy": to_snappy,
}


def take(text: bytes) -> bytes:
    """A decoder that wants everything as it is."""
    if b"undecodable" in text or not text.startswith(b"{"):
        raise UndecodableError("told to be undecodable")
    return text


READERS: list[EventLogReader[bytes]] = []
"""Those of the test that runs. Each keeps a file open."""


@pytest.fixture(autouse=True)
def readers_are_closed() -> Iterator[None]:
    yield
    while READERS:
        READERS.pop().close()


def reader_at(position: LogPosition | None = None) -> EventLogReader[bytes]:
    READERS.append(EventLogReader(take, position or LogPosition()))
    return READERS[-1]


def read_all(reader: EventLogReader[bytes], log: EventLog) -> tuple[list[bytes], list[str]]:
    events, problems = [], []
    while True:
        batch = reader.read(log)
        events += batch.events
        problems += batch.problems
        if not batch.more:
            return events, problems


def read_once(path: Path) -> tuple[list[bytes], list[str]]:
    log = event_log.snapshot(str(path))
    assert log is not None
    return read_all(reader_at(), log)


class RollingLog:
    """A rolling log of one application, written as Spark writes it."""

    def __init__(self, directory: Path, codec: str = "") -> None:
        self.codec = codec
        self.path = directory / "eventlog_v2_local-1"
        self.path.mkdir()
        (self.path / "appstatus_local-1.inprogress").touch()

    def write(self, index: int, *lines: bytes) -> Path:
        file = self.path / f"events_{index}_local-1{self.codec}"
        with file.open("ab") as out:
            out.write(on_disk(list(lines), self.codec))
        return file

    def close(self) -> None:
        (self.path / "appstatus_local-1.inprogress").rename(self.path / "appstatus_local-1")

    def snapshot(self) -> EventLog:
        log = event_log.snapshot(str(self.path))
        assert log is not None
        return log


@pytest.fixture(params=CODECS, ids=["plain", "zstd", "lz4", "snappy"])
def rolling(request: pytest.FixtureRequest, tmp_path: Path) -> RollingLog:
    return RollingLog(tmp_path, request.param)


# Which logs there are


def test_finds_rolling_and_single_logs_and_nothing_hidden(tmp_path: Path) -> None:
    RollingLog(tmp_path)
    for name in ["app-2.zstd.inprogress", "app-3", ".app-3.crc"]:
        (tmp_path / name).touch()
    (tmp_path / "somebody's directory").mkdir()
    found = sorted(Path(path).name for path in event_log.find(str(tmp_path)))
    assert found == ["app-2.zstd", "app-3", "eventlog_v2_local-1"]


@pytest.mark.parametrize(
    ("file", "name", "complete"),
    [
        ("app-1.zstd.inprogress", "app-1", False),
        ("app-1.zstd", "app-1", True),
        ("application_17_0001_2.inprogress", "application_17_0001_2", False),
    ],
)
def test_a_single_log_is_complete_when_spark_has_renamed_it(
    tmp_path: Path, file: str, name: str, complete: bool
) -> None:
    (tmp_path / file).write_bytes(b"123")
    (path,) = event_log.find(str(tmp_path))
    log = event_log.snapshot(path)
    assert log is not None
    assert (log.name, log.complete, log.files[0].size) == (name, complete, 3)


def test_a_rolling_log_has_its_files_in_order_and_is_complete_by_its_status(tmp_path: Path) -> None:
    rolling = RollingLog(tmp_path)
    for index in [10, 9, 1]:
        rolling.write(index, line(index))
    log = rolling.snapshot()
    assert (log.name, [file.index for file in log.files], log.complete) == ("local-1", [1, 9, 10], False)
    rolling.close()
    assert rolling.snapshot().complete


def test_where_a_rename_is_a_copy_the_log_is_complete_with_the_copy(rolling: RollingLog) -> None:
    (rolling.path / "appstatus_local-1").touch()
    assert rolling.snapshot().complete


def test_a_log_is_equal_to_itself_until_it_grows(rolling: RollingLog) -> None:
    rolling.write(1, line(1))
    before = rolling.snapshot()
    assert rolling.snapshot() == before
    rolling.write(1, line(2))
    assert rolling.snapshot() != before


def test_a_log_that_is_gone_is_none(tmp_path: Path) -> None:
    assert event_log.snapshot(str(tmp_path / "app-1")) is None
    assert event_log.snapshot(str(tmp_path / "eventlog_v2_app-1")) is None


def test_another_codec_is_a_problem_with_a_cure(tmp_path: Path) -> None:
    (tmp_path / "app-1.lzf.inprogress").touch()
    log = event_log.snapshot(str(tmp_path / "app-1.lzf"))
    assert log is not None
    assert log.problem == "lzf is not supported: run the application with spark.eventLog.compression.codec=zstd"


# What is new in them


def test_what_is_written_is_read_once_in_order_and_live(rolling: RollingLog) -> None:
    reader = reader_at()
    assert read_all(reader, rolling.snapshot()) == ([], [])
    for number in range(3):
        rolling.write(1, line(number))
        assert read_all(reader, rolling.snapshot()) == ([line(number)], [])
    rolling.write(2, line(3))
    rolling.write(3, line(4))
    rolling.close()
    assert read_all(reader, rolling.snapshot()) == ([line(3), line(4)], [])
    assert read_all(reader, rolling.snapshot()) == ([], [])


def test_a_line_is_read_when_it_is_complete(tmp_path: Path) -> None:
    file = tmp_path / "app-1.inprogress"
    file.write_bytes(line(1) + b"\n" + line(2)[:20])
    reader = reader_at()
    for expected in ([line(1)], []):
        log = event_log.snapshot(str(tmp_path / "app-1"))
        assert log is not None
        assert read_all(reader, log) == (expected, [])
    assert reader.position == LogPosition(index=0, offset=len(line(1)) + 1, size=file.stat().st_size)
    with file.open("ab") as out:
        out.write(line(2)[20:] + b"\n")
    log = event_log.snapshot(str(tmp_path / "app-1"))
    assert log is not None
    assert read_all(reader, log) == ([line(2)], [])


def test_the_rename_at_the_end_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "app-1.zstd.inprogress"
    file.write_bytes(on_disk([line(1)], ".zstd"))
    reader = reader_at()
    log = event_log.snapshot(str(tmp_path / "app-1.zstd"))
    assert log is not None
    assert read_all(reader, log) == ([line(1)], [])
    with file.open("ab") as out:
        out.write(on_disk([line(2)], ".zstd"))
    file.rename(tmp_path / "app-1.zstd")
    log = event_log.snapshot(str(tmp_path / "app-1.zstd"))
    assert log is not None
    assert read_all(reader, log) == ([line(2)], [])


def test_reading_goes_on_at_a_position(rolling: RollingLog) -> None:
    rolling.write(1, line(1), line(2))
    first = reader_at()
    read_all(first, rolling.snapshot())
    rolling.write(1, line(3))
    rolling.write(2, line(4))
    assert read_all(reader_at(first.position), rolling.snapshot()) == ([line(3), line(4)], [])


def test_a_file_that_has_not_grown_is_not_opened(rolling: RollingLog) -> None:
    file = rolling.write(1, line(1))
    first = reader_at()
    read_all(first, rolling.snapshot())
    log = rolling.snapshot()
    file.unlink()
    again = reader_at(first.position)
    assert read_all(again, log) == ([], [])
    assert not again.open


def test_a_closed_reader_opens_again_when_there_is_more(rolling: RollingLog) -> None:
    reader = reader_at()
    rolling.write(1, line(1))
    read_all(reader, rolling.snapshot())
    reader.close()
    rolling.write(1, line(2))
    assert read_all(reader, rolling.snapshot()) == ([line(2)], [])


@settings(deadline=None)
@given(
    files=st.lists(st.lists(st.binary(max_size=200), max_size=8), min_size=1, max_size=3),
    codec=st.sampled_from(CODECS),
    cuts=st.lists(st.integers(1, 150), min_size=1, max_size=30),
    restarts=st.lists(st.booleans(), min_size=1, max_size=10),
)
def test_however_a_log_grows_and_its_reader_restarts_each_line_comes_once(
    tmp_path_factory: pytest.TempPathFactory,
    files: list[list[bytes]],
    codec: str,
    cuts: list[int],
    restarts: list[bool],
) -> None:
    lines = [[event_log.EVENT + text.hex().encode() for text in file] for file in files]
    rolling = RollingLog(tmp_path_factory.mktemp("log"), codec)
    reader = reader_at()
    events: list[bytes] = []
    step = 0
    for index, file in enumerate(lines, start=1):
        data = on_disk(file, codec)
        path = rolling.write(index)
        while data:
            cut = cuts[step % len(cuts)]
            with path.open("ab") as out:
                out.write(data[:cut])
            data = data[cut:]
            if restarts[step % len(restarts)]:
                reader.close()
                reader = reader_at(reader.position)
            found, problems = read_all(reader, rolling.snapshot())
            assert problems == []
            events += found
            step += 1
    rolling.close()
    found, problems = read_all(reader, rolling.snapshot())
    reader.close()
    assert problems == []
    assert events + found == [each for file in lines for each in file]


def test_a_large_log_comes_in_parts_and_is_never_held_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "READ_BYTES", 1 << 20)
    file = tmp_path / "app-1.zstd"
    part = b"".join(line(number, "SparkListenerTaskEnd") + b"\n" for number in range(20_000))
    size = 20 * len(part)
    with file.open("wb") as out:
        for _ in range(20):
            out.write(zstandard.ZstdCompressor().compress(part))
    log = event_log.snapshot(str(file))
    assert log is not None
    reader: EventLogReader[bytes] = EventLogReader(lambda _: None, LogPosition())
    READERS.append(reader)
    tracemalloc.start()
    read_all(reader, log)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert reader.position.offset == size
    assert peak < size / 3, f"{peak} bytes of memory for a log of {size}"


# What was compacted


def compact(rolling: RollingLog, index: int, *lines: bytes) -> None:
    for old in range(1, index + 1):
        rolling.write(old).unlink()
    name = rolling.write(index).rename(rolling.path / f"events_{index}_local-1{rolling.codec}.compact")
    other = {"": ".lz4", ".lz4": ".snappy"}.get(rolling.codec, ".zstd")
    name.write_bytes(on_disk(list(lines), other))  # by a history server that compresses, whatever the name says


def test_a_compacted_file_stands_for_all_before_it(rolling: RollingLog) -> None:
    rolling.write(4, line(4))
    compact(rolling, 3, line(1), line(3))
    events, problems = read_all(reader_at(), rolling.snapshot())
    assert events == [line(1), line(3), line(4)]
    assert [problem.partition(": ")[2] for problem in problems] == [
        "compacted before all of it was read; of jobs that had ended some events are missing"
    ]


def test_what_it_was_made_of_is_not_read_beside_it(rolling: RollingLog) -> None:
    compact(rolling, 2, line(2))
    rolling.write(1, line(1))
    rolling.write(2, line(2))
    (rolling.path / f"events_3_local-1{rolling.codec}.compact.inprogress").write_bytes(b"not ready")
    assert [file.place for file in rolling.snapshot().files] == [(2, True)]


def test_who_is_past_it_reads_nothing_again(rolling: RollingLog) -> None:
    reader = reader_at()
    for number in (1, 2, 3):
        rolling.write(number, line(number))
    read_all(reader, rolling.snapshot())
    compact(rolling, 2, line(2))
    rolling.write(3, line(4))
    log = rolling.snapshot()
    assert not log.repeats(reader.position)
    assert read_all(reader, log) == ([line(4)], [])


def test_who_was_in_the_middle_of_it_begins_it_anew(rolling: RollingLog) -> None:
    reader = reader_at()
    rolling.write(1, line(1))
    read_all(reader, rolling.snapshot())
    rolling.write(2, line(2))
    compact(rolling, 1, line(1), line(11))
    log = rolling.snapshot()
    assert log.repeats(reader.position)
    assert read_all(reader, log)[0] == [line(1), line(11), line(2)]
    assert not log.repeats(reader.position)


# What cannot be read


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("notes.txt", b"{}"),
        ("notes", b"Dear all,\n"),
        ("notes.zstd", b"not compressed at all"),
        ("notes.zstd", on_disk([b"Dear all,"], ".zstd")),
        ("image", bytes(range(256)) * 100),
        ("notes.lz4", b"not compressed at all"),
        ("notes.lz4", to_lz4(b"x" * 100).replace(b"\x64\0\0\0", b"\x64\0\0\x7f")),
        ("notes.lz4", b"LZ4Block\x77" + to_lz4(b"Dear all,")[9:]),
        ("notes.lz4", to_lz4(b"Dear all, " * 10)[:-1] + b"\xff"),
        ("notes.snappy", b"not compressed at all"),
        ("notes.snappy", to_snappy(b"Dear all,")[:16] + b"\x80\0\0\0"),
        ("notes.snappy", to_snappy(b"Dear all,")[:16] + b"\0\0\0\5\xff\xff\xff\xff\xff"),
    ],
)
def test_a_file_that_is_not_sparks_is_told_apart(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    log = event_log.snapshot(str(tmp_path / name))
    assert log is not None
    problems = [log.problem] if log.problem else read_all(reader_at(), log)[1]
    assert len(problems) == 1
    assert "not a Spark event log" in problems[0] or "damaged" in problems[0]


@pytest.mark.parametrize(("codec", "cut"), [("", 2), *((codec, cut) for codec in CODECS if codec for cut in (1, 20))])
def test_a_complete_log_without_its_end_is_truncated(tmp_path: Path, codec: str, cut: int) -> None:
    file = tmp_path / f"app-1{codec}"
    file.write_bytes(on_disk([line(1), line(2)], codec)[:-cut])
    events, problems = read_once(file)
    assert events == [line(1)]
    assert problems == [f"{file}: ends in the middle of an event: it is read on when it grows"]


@pytest.mark.parametrize("codec", CODECS)
def test_the_last_event_of_a_closed_log_needs_no_line_break(tmp_path: Path, codec: str) -> None:
    file = tmp_path / f"app-1{codec}"
    file.write_bytes(COMPRESS[codec](line(1) + b"\n" + line(2)))
    log = event_log.snapshot(str(file))
    assert log is not None
    reader = reader_at()
    assert read_all(reader, log) == ([line(1), line(2)], [])
    assert read_all(reader, log) == ([], [])
    with file.open("ab") as out:
        out.write(COMPRESS[codec](b"\n" + line(3) + b"\n"))
    for reading in (reader, reader_at(reader.position)):
        grown = event_log.snapshot(str(file))
        assert grown is not None
        assert read_all(reading, grown) == ([line(3)], [])


def test_the_last_event_of_a_log_that_is_written_to_waits_for_its_line_break(tmp_path: Path) -> None:
    file = tmp_path / "app-1.inprogress"
    file.write_bytes(line(1) + b"\n" + line(2))
    log = event_log.snapshot(str(tmp_path / "app-1"))
    assert log is not None
    assert read_all(reader_at(), log) == ([line(1)], [])


@pytest.mark.parametrize("indent", [b' "Event": ', b'\t"Event" : '])
def test_a_log_that_a_json_tool_has_written_again_is_read(tmp_path: Path, indent: bytes) -> None:
    file = tmp_path / "app-1"
    lines = [line(number).replace(b'"Event":', indent) for number in (1, 2)]
    file.write_bytes(b"\r\n".join([*lines, b"\r\n"]))
    assert read_once(file) == ([each + b"\r" for each in lines], [])


def test_damage_ends_a_file_and_the_next_one_is_read(tmp_path: Path) -> None:
    rolling = RollingLog(tmp_path, ".zstd")
    with rolling.write(1, line(1)).open("ab") as out:
        out.write(b"damage" * 10)
    rolling.write(1, line(2))
    reader = reader_at()
    events, problems = read_all(reader, rolling.snapshot())
    assert events == [line(1)]
    assert [problem.partition(": ")[2].partition(":")[0] for problem in problems] == ["damaged"]
    rolling.write(1, line(3))
    assert read_all(reader, rolling.snapshot()) == ([], []), "reported once"
    rolling.write(2, line(4))
    assert read_all(reader, rolling.snapshot()) == ([line(4)], [])


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[: len(data) // 2] + b"\0" * (len(data) - len(data) // 2), lambda data: b"\0" * len(data)],
)
@pytest.mark.parametrize("again", [False, True])
def test_a_good_copy_in_the_place_of_a_damaged_one_is_read(
    tmp_path: Path, damage: Callable[[bytes], bytes], *, again: bool
) -> None:
    file = tmp_path / "app-1.zstd"
    data = on_disk([line(1), line(2)], ".zstd")
    file.write_bytes(damage(data))
    damaged = event_log.snapshot(str(file))
    assert damaged is not None
    reader = reader_at()
    before, problems = read_all(reader, damaged)
    assert len(problems) == 1
    assert damaged.unread_bytes(reader.position), "the damage is never taken for read"
    file.write_bytes(data)
    os.utime(file, (1, 1))
    good = event_log.snapshot(str(file))
    assert good is not None
    reader = reader_at(reader.position) if again else reader
    assert before + read_all(reader, good)[0] == [line(1), line(2)]
    assert good.unread_bytes(reader.position) == 0


def test_a_link_to_itself_hides_no_log(tmp_path: Path) -> None:
    (tmp_path / "app-1").write_bytes(on_disk([line(1)]))
    (tmp_path / "loop").symlink_to("loop")
    assert sorted(event_log.find(str(tmp_path))) == [str(tmp_path / "app-1"), str(tmp_path / "loop")]
    with pytest.raises(OSError, match="symbolic links"):
        event_log.snapshot(str(tmp_path / "loop"))


def test_a_rolled_file_that_is_a_link_to_nothing_is_told(rolling: RollingLog) -> None:
    """As long as it cannot be followed, its log is not taken for one that is gone."""
    rolling.write(1, line(1))
    (rolling.path / "events_2_local-1").symlink_to("nowhere")
    with pytest.raises(OSError, match="events_2_local-1 is a link to what is not there"):
        rolling.snapshot()


def test_lines_that_are_no_events_are_left_out_and_counted(rolling: RollingLog) -> None:
    rolling.write(1, line(1), b"garbage", b'{"Event":"undecodable', line(2))
    events, problems = read_all(reader_at(), rolling.snapshot())
    assert events == [line(1), line(2)]
    assert len(problems) == 1
    assert "left out 2 lines" in problems[0]
    assert "told to be undecodable" in problems[0]


def test_an_endless_line_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "LINE_BYTES", 1000)
    monkeypatch.setattr(event_log, "PLAIN_CHUNK", 100)
    file = tmp_path / "app-1"
    file.write_bytes(line(1) + b"\n" + event_log.EVENT + b"x" * 10_000 + b"\n" + line(2) + b"\n")
    (first, endless, last), problems = read_once(file)
    assert (first, last, problems) == (line(1), line(2), [])
    assert len(endless) < 1200


@pytest.mark.slow
@pytest.mark.parametrize("lines", [b"\n", b"{}\n", b"x"])
def test_a_small_file_that_decompresses_to_much_costs_little(tmp_path: Path, lines: bytes) -> None:
    file, tried, read = tmp_path / "app-1.zstd", [0], 0
    compressor = zstandard.ZstdCompressor(level=19).compressobj()
    file.write_bytes(compressor.compress(line(1) + b"\n" + lines * (2 * MANY // len(lines))) + compressor.flush())
    assert file.stat().st_size < 20_000
    log = event_log.snapshot(str(file))
    assert log is not None

    def decode(text: bytes) -> bytes:
        tried[0] += 1
        if text != line(1):
            job_events.decode(text, SparkApplication.of_log("app-1"))
        return text

    reader = EventLogReader(decode, LogPosition())
    READERS.append(reader)
    tracemalloc.start()
    while (found := reader.read(log)).more:
        read += 1
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert tried[0] <= event_log.MAX_BAD_LINES + 2, "each costs some microseconds"
    assert peak < 6 * MANY, f"{peak} bytes"
    assert (read, found.events) != (0, [])


def test_an_event_that_is_no_text_is_left_out(tmp_path: Path) -> None:
    last = b'{"Event":"SparkListenerEnvironmentUpdate","Spark Properties":{"a":"\xff"}}'
    file = tmp_path / "app-1"
    file.write_bytes(line(1) + b"\n" + last)
    events, problems = read_once(file)
    assert (events, len(problems)) == ([line(1)], 1)
    assert job_events.Decoder(SparkApplication.of_log("app-1"))(last) is None
    with pytest.raises(UndecodableError):
        job_events.decode(b' {"Event":"\xff"}', SparkApplication.of_log("app-1"))


@pytest.mark.parametrize("codec", CODECS)
def test_a_log_that_is_copied_under_its_final_name_is_read_on_as_it_grows(tmp_path: Path, codec: str) -> None:
    file = tmp_path / f"app-1{codec}"
    data = on_disk([line(1), line(2), line(3)], codec)
    reader = reader_at()
    found, told = [], []
    for end in (len(data) // 2, len(data) // 2 + 3, len(data)):
        file.write_bytes(data[:end])
        log = event_log.snapshot(str(file))
        assert log is not None
        for _ in range(2):
            events, problems = read_all(reader, log)
            found += events
            told += problems
        reader = reader_at(reader.position) if end == len(data) // 2 + 3 else reader
    assert found == [line(1), line(2), line(3)]
    assert all("ends in the middle of an event" in problem for problem in told)
    assert len(told) == 2, "once at each size that it cannot end at"


def test_a_file_that_was_replaced_is_read_from_its_beginning_until_it_has_more_than_before(rolling: RollingLog) -> None:
    file = rolling.write(1, line(1), line(2))
    reader = reader_at()
    read_all(reader, rolling.snapshot())
    size = file.stat().st_size
    file.write_bytes(b"")
    rolling.write(1, line(1))

    smaller = rolling.snapshot()
    assert smaller.repeats(reader.position)
    assert read_all(reader, smaller) == (
        [line(1)],
        [
            f"{file}: was replaced, since it has shrunk from {size} to {file.stat().st_size} bytes: "
            "read from its beginning"
        ],
    )
    again = reader_at(reader.position)
    assert rolling.snapshot().repeats(again.position), "also after a restart, since more of the same may come"
    rolling.write(1, line(2), line(3))
    assert read_all(again, rolling.snapshot()) == ([line(2), line(3)], [])
    assert not rolling.snapshot().repeats(again.position)


def test_a_file_that_shrinks_while_it_is_read_is_read_again(rolling: RollingLog) -> None:
    file = rolling.write(1, line(1))
    before = rolling.snapshot()
    os.truncate(file, 0)
    reader = reader_at()
    with pytest.raises(OSError, match="shrank while it was read"):
        reader.read(before)
    rolling.write(1, line(1), line(2))
    assert read_all(reader, rolling.snapshot()) == ([line(1), line(2)], [])


def test_files_that_went_before_they_were_read_are_missed(rolling: RollingLog) -> None:
    rolling.write(3, line(1))
    events, problems = read_all(reader_at(), rolling.snapshot())
    assert events == [line(1)]
    assert problems == [f"{rolling.path}: events_1 to events_2 went before they were read"]


def test_a_read_that_fails_is_repeated_without_loss(rolling: RollingLog, monkeypatch: pytest.MonkeyPatch) -> None:
    rolling.write(1, line(1))
    second = rolling.write(2, line(2))
    reader = reader_at()
    log = rolling.snapshot()
    aside = second.rename(second.with_suffix(".aside"))
    with pytest.raises(FileNotFoundError):
        reader.read(log)
    aside.rename(second)
    assert read_all(reader, log) == ([line(1), line(2)], [])


def test_the_spark_wing_is_imported_without_pyspark() -> None:
    program = "import sys, aviso_workers.spark.event_log; print('pyspark' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout == "False\n"
