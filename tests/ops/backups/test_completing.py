"""Backups of buckets that are written to meanwhile, on real servers: every key, as it was at one moment."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import anyio
import pytest
from msgspec import structs

from aviso_workers.backends import Snapshot
from aviso_workers.backends.jetstream.administering import Administration
from aviso_workers.ops import backups
from aviso_workers.ops.backups import completing
from tests.ops.backups.conftest import Site

pytestmark = pytest.mark.anyio

KEYS = 600
FILLING = b"." * 20_000
"""So that the archive is larger than what a server sends before it waits for the first acknowledgement (8 MiB)."""


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
        backup = await backups.create(site.app, "KV_table", tmp_path)
    assert backups.verify(backup) is not None
    await site.delete("KV_table")
    restored = await backups.restore(site.app, backup)
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
    sent_by_server = Administration.snapshot

    @asynccontextmanager
    async def with_a_reader_that_goes(server: Administration, stream: str) -> AsyncIterator[Snapshot]:
        """The server counts the consumers once more when it writes the archive."""
        async with sent_by_server(server, stream) as sent:
            yield structs.replace(sent, state={**sent.state, "consumer_count": sent.state["consumer_count"] + 1})

    monkeypatch.setattr(Administration, "snapshot", with_a_reader_that_goes)
    async with completing.spooled(site.app, "KV_table", beside=tmp_path) as earlier:
        await site.app.session.backend.delete_message("KV_table", 1)
        await bucket.put("second", b"2")
        backup = await backups.create(site.app, "KV_table", tmp_path, earlier=earlier)
    monkeypatch.undo()
    assert backups.verify(backup) is not None
    await site.delete("KV_table")
    await backups.restore(site.app, backup)
    assert {entry.key: entry.value for entry in await bucket.entries()} == {"first": b"1", "second": b"2"}
