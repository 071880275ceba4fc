"""Backups whose files are not as they were written: each is a `BackupError`, and soon."""

from __future__ import annotations

import hashlib
import io
import json
import random
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import pytest

from aviso_workers.errors import BackupError
from aviso_workers.ops import backups
from aviso_workers.ops.backups import archive, s2
from aviso_workers.ops.backups.s2 import MalformedError
from aviso_workers.ops.backups.storage import META, OF_ENTRIES, Draft, new_record
from tests.fuzz.mutations import Rounds, mutated, with_another_value
from tests.ops.backups.entries import backed_up, varint
from tests.ops.backups.test_chains import MOMENTS
from tests.ops.backups.test_encryption import Key

OLD = Path(__file__).parents[1] / "data" / "backups" / "nats-server-2.9"
TIME = "2026-01-01T00:00:00Z"
MEBIBYTE = 1 << 20
BLOCKS = [list(s2.written([bytes((byte,))]))[1] for byte in range(256)]
"""A block for each byte."""


def message(sequence: int) -> bytes:
    name, headers, body = b"mars.od.%d" % sequence, b"NATS/1.0\r\nNats-Msg-Id: 1\r\n\r\n", b'{"n":1}'
    fields = (len(name), sequence << 1, sequence, len(headers), len(body))
    return b"".join(map(varint, fields)) + name + headers + body


def state(size: int) -> dict[str, object]:
    counts = {"messages": 3, "bytes": size, "first_seq": 1, "last_seq": 3, "consumer_count": 1}
    return {**counts, "first_ts": TIME, "last_ts": TIME}


def contents(size: int) -> bytes:
    head = archive.encode(archive.STATE, json.dumps(state(size)).encode(), timestamp_ns=1)
    consumer = archive.encode(
        b"consumers/index", b'{"config":{},"state":{"delivered":{"stream_seq":0}}}', timestamp_ns=1
    )
    return b"".join((archive.MAGIC, head, consumer, message(1), message(2), message(3), archive.END))


@pytest.fixture
def backup(tmp_path: Path) -> backups.Backup:
    entries = archive.entries(io.BytesIO(b"".join(s2.written([contents(0)]))))
    size = sum(archive.stored_bytes(entry, in_memory=False) for entry in entries if entry.sequence)
    with Draft(tmp_path / "backups" / "MARS" / "one") as draft:
        draft.write_all(s2.written([contents(size)]))
        record = new_record(datetime.now(UTC), server_version="2.15.0")
        return draft.finish({"name": "MARS", "subjects": ["mars.>"]}, state(size), record)


def spoil(place: Path, meta: bytes, packed: bytes, chance: random.Random) -> None:
    """Change one of the files; without the record of checksums most of the time, which would find nearly all."""
    document = json.loads(meta)
    if chance.random() < 0.8:
        del document["aviso_workers"]
    match chance.randrange(4):
        case 0:
            meta = mutated(meta, chance)
        case 1:
            meta = json.dumps(with_another_value(json.loads(meta), chance)).encode()
        case 2:
            meta, packed = json.dumps(document).encode(), mutated(packed, chance)
        case _:
            changed = mutated(b"".join(s2.decompressed(io.BytesIO(packed))), chance)
            meta, packed = json.dumps(document).encode(), b"".join(s2.written([changed]))
    place.joinpath(META).write_bytes(meta)
    place.joinpath(OF_ENTRIES).write_bytes(packed)


@pytest.mark.slow
def test_a_backup_that_was_changed_is_read_or_is_a_backup_error(
    backup: backups.Backup, rounds: Callable[[int], Rounds]
) -> None:
    place, root = backup.directory, backup.directory.parents[1]
    meta, packed = place.joinpath(META).read_bytes(), backup.archive.read_bytes()
    assert backups.verify(backup)
    turns = rounds(600)
    for chance in turns:
        spoil(place, meta, packed, chance)
        try:
            backups.find(root)
            found = backups.load(place)
            backups.verify(found)
            backups.cleanse(backups.plan_cleanse(found, backups.of_subject("mars.od.1")))
            backups.verify(backups.load(place))
        except BackupError:
            pass
        except Exception as error:
            raise AssertionError(turns.which) from error


def test_a_backup_of_an_older_server_that_was_changed_is_read_or_is_a_backup_error(
    tmp_path: Path, rounds: Callable[[int], Rounds]
) -> None:
    place = tmp_path / "old"
    shutil.copytree(OLD, place)
    packed = place.joinpath("stream.tar.s2").read_bytes()
    turns = rounds(100)
    for chance in turns:
        place.joinpath("stream.tar.s2").write_bytes(mutated(packed, chance))
        try:
            with suppress(BackupError):
                backups.verify(backups.load(place))
        except Exception as error:
            raise AssertionError(turns.which) from error


@pytest.fixture(params=[False, True], ids=["in the clear", "encrypted"])
def links(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[list[backups.Backup], Key]:
    key, made = Key(tmp_path / "key.txt"), list[backups.Backup]()
    for hours, moment in enumerate(MOMENTS):
        since = made[-1] if made else None
        recipients = [key.public] if request.param else []
        made.append(
            backed_up(tmp_path, moment, since=since, encrypt_to=recipients, identities=key.identities, hours=hours)
        )
    return made, key


def spoil_link(link: backups.Backup, chance: random.Random) -> None:
    """Change one of its files, with a record that knows of no change of the archive where there is one."""
    meta, packed = (link.directory / META).read_bytes(), link.archive.read_bytes()
    document = json.loads(meta)
    match chance.randrange(4):
        case 0:
            link.directory.joinpath(META).write_bytes(mutated(meta, chance))
            return
        case 1:
            document = with_another_value(document, chance)
        case 2:
            packed = mutated(packed, chance)
        case _ if not link.encrypted:
            packed = b"".join(s2.written([mutated(b"".join(s2.decompressed(io.BytesIO(packed))), chance)]))
    if isinstance(document, dict) and isinstance(document.get("aviso_workers"), dict):
        document["aviso_workers"]["archive_sha256"] = hashlib.sha256(packed).hexdigest()
    link.directory.joinpath(META).write_text(json.dumps(document))
    link.archive.write_bytes(packed)


def rejoin(links: list[backups.Backup]) -> None:
    """Have each name what lies before it as it is now, as somebody would who changes one on purpose."""
    for before, link in pairwise(links):
        document = json.loads((link.directory / META).read_bytes())
        digest = backups.load(before.directory).record
        assert digest is not None
        document["aviso_workers"]["previous"]["digest"] = digest.digest
        (link.directory / META).write_text(json.dumps(document))


@pytest.mark.slow
def test_a_chain_of_which_a_link_was_changed_is_read_or_is_a_backup_error(
    links: tuple[list[backups.Backup], Key], rounds: Callable[[int], Rounds], tmp_path: Path
) -> None:
    made, key = links
    whole = {path: path.read_bytes() for link in made for path in link.directory.iterdir()}
    identities = key.identities
    turns = rounds(60)
    for chance in turns:
        for link in made:
            link.directory.mkdir(exist_ok=True)
        for path, data in whole.items():
            path.write_bytes(data)
        spoil_link(chance.choice(made), chance)
        try:
            with suppress(Exception):
                rejoin(made)
            for place in backups.places(tmp_path / "MARS"):
                with suppress(BackupError):
                    backups.verify(backups.load(place))
                with suppress(BackupError):
                    found = backups.load(place)
                    backups.verify(found, identities=identities)
                    backups.plan_cleanse(found, backups.of_subject("mars.od.1"), identities=identities)
        except Exception as error:
            raise AssertionError(turns.which) from error


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(archive.MAGIC + b"\x80" * 3 * MEBIBYTE, id="a number of an entry"),
        pytest.param(archive.MAGIC + varint(1 << 40) + bytes(3 * MEBIBYTE), id="an entry that is larger than any"),
    ],
)
def test_a_size_without_end_is_found_at_once(data: bytes) -> None:
    """Putting such a number together takes time with the square of its length: minutes for these."""
    with pytest.raises(MalformedError, match=r"more than 64 bits|larger than any"):
        list(archive.entries(io.BytesIO(b"".join(s2.written([data])))))


@pytest.mark.slow
def test_an_entry_in_many_small_blocks_takes_a_time_that_grows_with_their_number() -> None:
    """The entry claims more than there is. Copied for each block, it took 30 times as long for eight times as many."""

    def seconds(count: int) -> float:
        data = archive.MAGIC + varint(1 << 26) + bytes(count)
        packed = s2.IDENTIFIER + b"".join(BLOCKS[byte] for byte in data)
        begun = time.process_time()
        with pytest.raises(MalformedError, match="breaks off"):
            list(archive.entries(io.BytesIO(packed)))
        return time.process_time() - begun

    few, many = (min(seconds(count) for _ in range(2)) for count in (60_000, 480_000))
    assert many / few < 16


def test_a_block_whose_size_does_not_end_is_found_at_once() -> None:
    chunk = bytes(4) + b"\x80" * 3 * MEBIBYTE
    with pytest.raises(MalformedError, match="has no size"):
        s2.decompress(s2.COMPRESSED, chunk)


def test_a_chunk_that_is_larger_than_any_block_is_found_before_it_is_read() -> None:
    head = s2.IDENTIFIER + bytes((s2.COMPRESSED,)) + (s2.LARGEST_CHUNK + 1).to_bytes(3, "little")
    with pytest.raises(MalformedError, match="larger than any"):
        list(s2.compressed_blocks(io.BytesIO(head)))
