"""Increments of real streams on a real server: restored as they were, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from aviso_workers.backends.jetstream.admin import JetStreamAdministration
from aviso_workers.errors import AvisoWorkersError, BackupError, NotFoundError, StreamReplacedError, UnavailableError
from aviso_workers.ops import backups, inventory
from aviso_workers.ops.backups import archive, chains, completion, s2, storage
from aviso_workers.ops.backups.s2 import Prefetch, Readable
from tests.ops.backups.conftest import Site
from tests.ops.backups.test_encryption import Key
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio


async def acknowledge(site: Site, count: int) -> None:
    """So many more of what `index` is to handle."""
    inbox = site.server.new_inbox()
    async with site.server.listen(inbox) as deliveries:
        site.server.send("$JS.API.CONSUMER.MSG.NEXT.MARS.index", b'{"batch": %d}' % count, reply=inbox)
        with anyio.fail_after(PATIENCE_SECONDS):
            for _ in range(count):
                await site.server.request((await deliveries.receive()).reply, b"+ACK")


@pytest.mark.parametrize("encrypted", [False, True], ids=["in the clear", "encrypted"])
async def test_a_chain_restores_the_stream_and_its_consumers(site: Site, tmp_path: Path, encrypted: bool) -> None:
    key = Key(tmp_path / "key.txt")
    keys: dict[str, Any] = {"encrypt_to": [key.public], "identities": key.identities} if encrypted else {}
    identities = key.identities if encrypted else None
    await site.fill(500)
    await site.add_consumers()
    full = await backups.create(site.app.session.admin, "MARS", tmp_path, **keys)
    accounts = [await site.account()]
    for step in (1, 2):
        await site.fill(20)
        await site.app.session.backend.delete_message("MARS", 100 * step)
        await site.app.session.backend.delete_message("MARS", 500 + step)
        await acknowledge(site, 5)
        made = await backups.create_next(site.app.session.admin, "MARS", tmp_path, **keys)
        accounts.append(await site.account())
        assert (made.full_because, made.backup.size < full.size / 4) == ("", True)
    links = backups.find(tmp_path)
    assert [link.previous is None for link in links] == [True, False, False]
    assert (await backups.drill(site.app.session.admin, links[-1], identities=identities)).differences == []
    for link, account in zip(links, accounts, strict=True):
        await site.delete()
        await backups.restore(site.app.session.admin, link, identities=identities)
        assert await site.account() == account, link.directory
    assert (await site.app.notify("mars", {"class": "od", "step": 1})).sequence == 541


async def test_a_stream_that_was_made_again_gets_a_full_backup(site: Site, tmp_path: Path) -> None:
    await site.fill(5)
    first = await backups.create(site.app.session.admin, "MARS", tmp_path)
    await site.delete()
    await site.fill(3)
    with pytest.raises(StreamReplacedError, match=r"has 3 as its last sequence, and .* has 5"):
        await backups.create(site.app.session.admin, "MARS", tmp_path, since=first)
    await site.fill(3)
    with pytest.raises(StreamReplacedError, match="MARS: message 1 is another one"):
        await backups.create(site.app.session.admin, "MARS", tmp_path, since=first)
    assert backups.find(tmp_path) == [first], "nothing of the increment stays"
    made = await backups.create_next(site.app.session.admin, "MARS", tmp_path)
    assert (made.backup.previous, "message 1 is another one" in made.full_because) == (None, True)
    await site.delete()
    assert (await backups.restore(site.app.session.admin, made.backup)).state["messages"] == 6


async def test_a_full_backup_is_made_where_no_increment_can_be(site: Site, tmp_path: Path) -> None:
    await site.fill(5)
    first = await backups.create_next(site.app.session.admin, "MARS", tmp_path)
    assert first.full_because == "there is no earlier backup"
    data = bytearray(first.backup.archive.read_bytes())
    data[-20] ^= 1
    first.backup.archive.write_bytes(data)
    second = await backups.create_next(site.app.session.admin, "MARS", tmp_path)
    assert f"{first.backup.directory} is damaged" in second.full_because
    third = await backups.create_next(site.app.session.admin, "MARS", tmp_path, full_every_seconds=0)
    assert "the last full one is of" in third.full_because
    assert backups.verify(third.backup)


async def test_where_the_server_gives_up_meanwhile_a_full_backup_is_tried(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def give_up(*entries: Any) -> Iterator[bytes]:
        raise UnavailableError("snapshot of MARS: No Flow Response")

    await site.fill(5)
    await backups.create(site.app.session.admin, "MARS", tmp_path)
    monkeypatch.setattr(chains, "encode_increment", give_up)
    made = await backups.create_next(site.app.session.admin, "MARS", tmp_path)
    assert (made.backup.previous, made.full_because) == (None, "snapshot of MARS: No Flow Response")


async def test_an_increment_does_not_show_what_the_backup_before_encrypts(site: Site, tmp_path: Path) -> None:
    key = Key(tmp_path / "key.txt")
    await site.fill(5)
    await backups.create(site.app.session.admin, "MARS", tmp_path, encrypt_to=[key.public])
    with pytest.raises(BackupError, match="give the public keys for the increment"):
        await backups.create_next(site.app.session.admin, "MARS", tmp_path, identities=key.identities)
    with pytest.raises(BackupError, match="say which keys open it"):
        await backups.create_next(site.app.session.admin, "MARS", tmp_path, encrypt_to=[key.public])
    assert len(backups.find(tmp_path)) == 1


async def test_what_left_at_the_beginning_is_read_before_the_server_waits(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server gives a snapshot up for which nobody asks for 5 seconds, and to read on may take longer."""
    await site.fill(10)
    first = await backups.create(site.app.session.admin, "MARS", tmp_path)
    await site.server.api("STREAM.PURGE.MARS", {"seq": 8})
    seen: list[int | str] = []
    read, snapshot = archive.entries, JetStreamAdministration.snapshot

    def noted(file: Readable) -> Iterator[archive.ArchiveEntry]:
        for entry in read(file):
            seen.append(entry.sequence)
            yield entry

    def asked(*arguments: Any) -> Any:
        seen.append("snapshot")
        return snapshot(*arguments)

    monkeypatch.setattr(archive, "entries", noted)
    monkeypatch.setattr(JetStreamAdministration, "snapshot", asked)
    made = await backups.create(site.app.session.admin, "MARS", tmp_path, since=first)
    assert seen[: seen.index("snapshot")] == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    contents = backups.verify(made)
    assert contents is not None
    assert (contents.messages, contents.first_sequence) == (3, 8)


async def test_a_server_that_waits_for_what_takes_long_gets_padding(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives a restore up to which nothing comes for 5 seconds, and to read over what is gone may take longer."""
    await site.fill(300)
    full = await backups.create(site.app.session.admin, "MARS", tmp_path)
    await site.fill(1)
    made = await backups.create(site.app.session.admin, "MARS", tmp_path, since=full)
    account = await site.account()
    await site.delete()
    sent: list[bytes] = []

    class Slow(Prefetch):
        """Of which nothing is there but every other time."""

        def next(self, *, within_seconds: float | None = None) -> bytes:
            if within_seconds is not None and sent and sent[-1] != s2.PADDING:
                sent.append(s2.PADDING)
                raise TimeoutError
            sent.append(super().next())
            return sent[-1]

    monkeypatch.setattr(s2, "Prefetch", Slow)
    await backups.restore(site.app.session.admin, made)
    assert sent.count(s2.PADDING) >= 2
    assert await site.account() == account


async def test_what_was_read_beside_a_snapshot_is_the_same_in_the_next_one(site: Site, tmp_path: Path) -> None:
    """A backup of a table holds messages that a reader was given; byte by byte as a server's snapshot has them."""
    config = {"name": "MARS", "subjects": ["mars.>"], "allow_msg_ttl": True, "max_msgs_per_subject": 1}
    await site.server.api("STREAM.CREATE.MARS", config)
    for n in range(10):
        await site.put(f"mars.od.{n}", b"x" * n, ttl="1h" if n % 3 == 0 else "")
        await site.server.request(f"mars.rd.{n}", b"without headers")
    first = await backups.create(site.app.session.admin, "MARS", tmp_path)
    with chains.opened_own_entries(first, None) as entries:
        stored = [entry.raw for entry in entries if entry.sequence]
    for read in (inventory.messages_between, completion._one_by_one):
        assert [
            completion._encoded(each) async for each in read(site.app.session.admin, "MARS", after=0, last=20)
        ] == stored
    await site.put("mars.od.3", b"again")
    made, account = await backups.create_next(site.app.session.admin, "MARS", tmp_path), await site.account()
    await site.delete()
    await backups.restore(site.app.session.admin, made.backup)
    assert (made.full_because, await site.account()) == ("", account)


async def test_what_lies_elsewhere_is_no_backup_before(site: Site, tmp_path: Path) -> None:
    await site.fill(5)
    elsewhere = await backups.create(site.app.session.admin, "MARS", tmp_path / "elsewhere")
    with pytest.raises(BackupError, match=r"is not in .*here/MARS"):
        await backups.create(site.app.session.admin, "MARS", tmp_path / "here", since=elsewhere)


async def test_the_backups_before_an_increment_stay_while_it_is_made(site: Site, tmp_path: Path) -> None:
    await site.fill(5)
    first = await backups.create(site.app.session.admin, "MARS", tmp_path)
    held: list[bool] = []

    def look(_: int) -> None:
        try:
            with storage.exclusive(first.directory.parent):
                held.append(False)
        except BlockingIOError:
            held.append(True)

    await backups.create(site.app.session.admin, "MARS", tmp_path, since=first, progress=look)
    assert held
    assert all(held)


async def test_backups_are_made_as_planned(site: Site, tmp_path: Path) -> None:
    await site.fill(10)
    admin = site.app.session.admin
    plain, after_last = backups.Making(to=tmp_path), backups.Making(to=tmp_path, since="last")
    full = (await plain.make(admin, "MARS")).backup
    second = (await after_last.make(admin, "MARS")).backup
    third = (await backups.Making(to=tmp_path, since=second.directory).make(admin, "MARS")).backup
    again = await backups.Making(to=tmp_path, since="last", full_every_seconds=0).make(admin, "MARS")

    after = [made.previous.directory if made.previous else None for made in (full, second, third, again.backup)]
    assert after == [None, full.directory.name, second.directory.name, None]
    assert again.full_because.startswith("the last full one is of")


async def test_a_stream_that_cannot_be_backed_up_does_not_stop_the_others(site: Site, tmp_path: Path) -> None:
    await site.fill(10)
    pruned: list[str] = []

    async def back_up(stream: str) -> backups.Backup:
        return await backups.create(site.app.session.admin, stream, tmp_path)

    async def prune(stream: str) -> list[AvisoWorkersError]:
        pruned.append(stream)
        return [BackupError("damaged")]

    failures = await backups.create_each(["NONE", "MARS"], back_up, prune)

    assert pruned == ["MARS"]
    assert [type(failure) for failure in failures] == [NotFoundError, BackupError]
