"""Backups of buckets that are written to meanwhile, on real servers: every key, as it was at one moment."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from msgspec import structs

from aviso_workers.backends import StreamSnapshot
from aviso_workers.backends.jetstream.admin import JetStreamAdministration
from aviso_workers.jetstream.info import SnapshotState
from aviso_workers.ops import backups
from aviso_workers.ops.backups import completion
from tests.ops.backups.conftest import Site
from tests.ops.backups.test_encryption import Key

pytestmark = pytest.mark.anyio

KEYS = 600
FILLING = b"." * 20_000
"""So that the archive is larger than what a server sends before it waits for the first acknowledgement (8 MiB)."""


@pytest.mark.slow
async def test_a_table_that_is_written_to_keeps_every_key(site: Site, tmp_path: Path) -> None:
    bucket = await site.app.session.backend.key_value("table")
    names = [f"key{number:03d}" for number in range(KEYS)]
    await bucket.put_many(dict.fromkeys(names, b"0" + FILLING))
    backup = None

    async def write() -> None:
        """Each key, the last one first, again and again with the next number."""
        for number in count(1):
            for name in reversed(names):
                if backup is not None:
                    return
                await bucket.put(name, b"%d" % number + FILLING)

    async with anyio.create_task_group() as writing:
        writing.start_soon(write)
        backup = await backups.create(site.app.session.admin, "KV_table", tmp_path)
    assert backup is not None
    assert backups.verify(backup) is not None
    await site.delete("KV_table")
    restored = await backups.restore(site.app.session.admin, backup)
    assert restored.state["messages"] == KEYS
    found = {entry.key: int(entry.value.rstrip(b".")) for entry in await bucket.entries()}
    assert sorted(found) == names, "a key that was written while the server read it is in neither state"
    rounds = [found[name] for name in names]
    assert (rounds, rounds[-1] - rounds[0] <= 1) == (sorted(rounds), True), "of one moment"
    assert await bucket.put("key000", b"new") > restored.state["last_seq"]


async def test_what_only_an_earlier_snapshot_has_is_there_whoever_reads_meanwhile(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = await site.app.session.backend.key_value("table")
    await bucket.put("first", b"1")
    sent_by_server = JetStreamAdministration.snapshot

    @asynccontextmanager
    async def with_a_reader_that_goes(server: JetStreamAdministration, stream: str) -> AsyncIterator[StreamSnapshot]:
        """The server counts the consumers once more when it writes the archive."""
        async with sent_by_server(server, stream) as sent:
            yield structs.replace(
                sent, state=SnapshotState({**sent.state, "consumer_count": sent.state["consumer_count"] + 1})
            )

    monkeypatch.setattr(JetStreamAdministration, "snapshot", with_a_reader_that_goes)
    async with completion.spooled(site.app.session.admin, "KV_table", beside=tmp_path, encrypted=False) as earlier:
        await site.app.session.backend.delete_message("KV_table", 1)
        await bucket.put("second", b"2")
        backup = await backups.create(site.app.session.admin, "KV_table", tmp_path, earlier=earlier)
    monkeypatch.undo()
    assert backup is not None
    assert backups.verify(backup) is not None
    await site.delete("KV_table")
    await backups.restore(site.app.session.admin, backup)
    assert {entry.key: entry.value for entry in await bucket.entries()} == {"first": b"1", "second": b"2"}


@pytest.mark.parametrize("written_meanwhile", [False, True])
async def test_nothing_of_an_encrypted_backup_lies_on_the_disk_in_the_clear(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written_meanwhile: bool
) -> None:
    """Also not in files without a name, whose blocks the disk may keep."""
    key, marker = Key(tmp_path / "key.txt"), os.urandom(20).hex().encode()
    bucket = await site.app.session.backend.key_value("table")
    await bucket.put_many({"first": marker, "second": marker})
    make_file, kept = tempfile.TemporaryFile, list[int]()

    def noted(**arguments: Any) -> Any:
        file = make_file(**arguments)
        kept.append(os.dup(file.fileno()))
        return file

    monkeypatch.setattr(tempfile, "TemporaryFile", noted)
    async with AsyncExitStack() as stack:
        earlier = None
        if written_meanwhile:
            spooled = completion.spooled(site.app.session.admin, "KV_table", beside=tmp_path, encrypted=True)
            earlier = await stack.enter_async_context(spooled)
            await site.app.session.backend.delete_message("KV_table", 1)
        backup = await backups.create(
            site.app.session.admin, "KV_table", tmp_path, encrypt_to=[key.public], earlier=earlier
        )
    found = [os.pread(each, 1_000_000, 0) for each in kept]
    for each in kept:
        os.close(each)
    assert len(found) == (4 if written_meanwhile else 1)
    assert [each[:21] for each in found] == [b"age-encryption.org/v1"] * len(found)
    assert not any(marker in each for each in found)
    contents = backups.verify(backup, identities=key.identities)
    assert contents is not None
    assert contents.messages == 2


async def test_what_is_cancelled_while_a_chunk_is_written_asks_for_no_further_one() -> None:
    asked: list[bytes] = []
    at_work, go_on = threading.Event(), threading.Event()

    async def send() -> AsyncGenerator[bytes, None]:
        for chunk in (b"first", b"second"):
            asked.append(chunk)
            yield chunk

    def write() -> None:
        for _ in completion.arriving(send()):
            at_work.set()
            go_on.wait()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.to_thread.run_sync, write)
        await anyio.to_thread.run_sync(at_work.wait)
        tasks.cancel_scope.cancel()
        go_on.set()

    assert asked == [b"first"]
