"""What was erased from a server does not come back with any backup of it."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from aviso_workers import App, Notification, Reject
from aviso_workers.errors import BackupError, InvalidNotificationError, NotFoundError, UnknownEventTypeError
from aviso_workers.ops import backups
from aviso_workers.ops.backups import Backup, Forgotten, s2
from aviso_workers.ops.erasure import Eraser, ErasureRecord, erase
from aviso_workers.server import NatsServer
from tests.cli.conftest import Ran
from tests.cli.conftest import run as run
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

OWN = ["MARS", "aviso_workers_dead_letters__index", "aviso_workers_schedule__MARS", "KV_index__table__sums"]
COPIES = ["MIRROR", "SOURCED", "TURNED", "MIRROR_OF_TURNED", "RENAMED"]


class Place:
    """An app whose notifications stand in streams of all kinds, and backups of these."""

    def __init__(self, app: App, directory: Path) -> None:
        self.app = app
        self.backups = directory / "backups"
        self.audit = directory / "erasure.json"

    async def notify(self, klass: str, steps: Sequence[int], **how: Any) -> None:
        for step in steps:
            await self.app.notify("mars", {"class": klass, "step": step}, f"secret-of-{klass}-{step}.", **how)

    async def create(self, name: str, **config: Any) -> None:
        await self.app.session.admin.administration().api(f"STREAM.CREATE.{name}", {"name": name, **config})

    async def until_stored(self, stream: str, messages: int) -> None:
        with anyio.fail_after(PATIENCE_SECONDS):
            while await self._messages(stream) < messages:  # noqa: ASYNC110 - a server says nothing of it
                await anyio.sleep(0.02)

    async def _messages(self, stream: str) -> int:
        try:
            return (await self.app.session.backend.stream_info(stream)).messages
        except NotFoundError:
            return 0

    async def fill(self) -> None:
        """Two notifications of each class, in every stream that an app of ours makes, and in five that copy."""
        async with anyio.create_task_group() as working:
            stop = anyio.Event()
            working.start_soon(partial(self.app.session.work, self.app, stop, agents=self.app.agents))
            for klass in ("od", "rd"):
                await self.notify(klass, range(2))
                await self.notify(klass, [2], due=3600)
            await self.until_stored("aviso_workers_dead_letters__index", 4)
            stop.set()
        bucket = await self.app.session.backend.key_value("index__table__sums")
        await bucket.put("od", b"secret-of-od-sum.")
        await bucket.put("rd", b"secret-of-rd-sum.")
        transforms = [{"src": "mars.*.*", "dest": "turned.{{wildcard(2)}}.{{wildcard(1)}}"}]
        await self.create("MIRROR", mirror={"name": "MARS"})
        await self.create("SOURCED", sources=[{"name": "MARS"}])
        await self.create("TURNED", sources=[{"name": "MARS", "subject_transforms": transforms}])
        await self.create("MIRROR_OF_TURNED", mirror={"name": "TURNED"})
        await self.create("RENAMED", mirror={"name": "MARS", "subject_transforms": transforms})
        for stream in COPIES:
            await self.until_stored(stream, 4)

    async def back_up(self, *streams: str) -> list[Backup]:
        return [
            await backups.create(self.app.session.admin, stream, self.backups) for stream in streams or (*OWN, *COPIES)
        ]

    async def erase(self, **wanted: Any) -> ErasureRecord:
        eraser = Eraser(self.app.session.admin, self.app.config, "mars", **wanted)
        await eraser.erase(await eraser.survey(), audit=self.audit)
        return erase.read_record(self.audit)


@pytest.fixture
async def place(
    nats_server: NatsServer, write_config: Callable[..., Path], tmp_path: Path
) -> AsyncGenerator[Place, None]:
    app = App("index", config=write_config(nats_server.url))

    @app.agent("mars")
    async def refuse(notification: Notification[str]) -> None:
        raise Reject("never")

    async with app:
        yield Place(app, tmp_path)


def _secrets(backup: Backup, klass: str) -> int:
    with backup.archive.open("rb") as file:
        return b"".join(s2.decompressed(file)).count(f"secret-of-{klass}-".encode())


def _forget(found: Sequence[Backup], forgotten: Forgotten) -> dict[str, int]:
    removed = {backup.stream: backups.forget(backup, forgotten.takes(backup)) for backup in found}
    return {stream: count for stream, count in removed.items() if count}


@pytest.mark.slow
async def test_by_the_record_of_an_erasure_it_is_gone_from_every_backup(place: Place) -> None:
    await place.fill()
    found = await place.back_up()
    assert all(_secrets(backup, "od") for backup in found)
    record = await place.erase(where={"class": "od"}, keys=["index__table__sums/od"])
    forgotten = Forgotten(records=[record])
    assert forgotten.doubts(found) == []
    assert _forget(found, forgotten) == {
        "MARS": 2,
        "aviso_workers_dead_letters__index": 2,
        "aviso_workers_schedule__MARS": 1,
        "KV_index__table__sums": 1,
        **dict.fromkeys(COPIES, 2),
    }
    after = [backups.load(backup.directory) for backup in found]
    assert [_secrets(backup, "od") for backup in after] == [0] * len(found)
    assert [_secrets(backup, "rd") for backup in after] == [2, 2, 1, 1, 2, 2, 2, 2, 2]
    assert all(backups.verify(backup) for backup in after)


async def test_by_identifier_copies_are_known_by_what_they_say_of_themselves(place: Place) -> None:
    """Also what the server had no more when its data was erased."""
    await place.fill()
    found = await place.back_up()
    wanted = backups.of_identifier(place.app.config, found, {"class": "od"})
    forgotten = Forgotten(wanted, keys=["index__table__sums/od"])
    [doubt] = forgotten.doubts(found)
    assert doubt.startswith("RENAMED has other subjects than the streams whose messages it copies")
    assert set(_forget(found, forgotten)) == {*OWN, *COPIES} - {"RENAMED"}
    after = {backup.stream: _secrets(backups.load(backup.directory), "od") for backup in found}
    assert {stream for stream, secrets in after.items() if secrets} == {"RENAMED"}


async def test_a_stream_that_was_made_again_keeps_its_other_messages(place: Place) -> None:
    await place.notify("od", range(3))
    [old] = await place.back_up("MARS")
    record = await place.erase(where={"class": "od"})
    await place.app.session.admin.delete_stream("MARS")
    await place.create("MARS", subjects=["mars.>"])
    await place.notify("rd", range(3))
    [new] = await place.back_up("MARS")
    assert _forget([new], Forgotten(records=[record])) == {}
    assert _forget([old], Forgotten(records=[record])) == {"MARS": 3}


async def test_a_dead_letter_that_was_dropped_before_the_erasure_goes_from_its_backup(place: Place) -> None:
    await place.fill()
    found = await place.back_up("aviso_workers_dead_letters__index")
    await place.app.session.backend.purge_stream("aviso_workers_dead_letters__index")
    record = await place.erase(where={"class": "od"})
    assert _forget(found, Forgotten(records=[record])) == {"aviso_workers_dead_letters__index": 2}


async def test_a_dead_letter_goes_from_a_backup_of_what_mirrors_dead_letters(place: Place) -> None:
    await place.fill()
    await place.create("ARCHIVE", mirror={"name": "aviso_workers_dead_letters__index"})
    await place.until_stored("ARCHIVE", 4)
    [backup] = await place.back_up("ARCHIVE")
    wanted = backups.of_identifier(place.app.config, [backup], {"class": "od"}, event_type="mars")
    assert _forget([backup], Forgotten(wanted)) == {"ARCHIVE": 2}
    assert _secrets(backups.load(backup.directory), "od") == 0


async def test_a_backup_of_a_restored_copy_is_cleansed_too(place: Place) -> None:
    await place.notify("od", range(2))
    await place.notify("rd", range(2))
    [backup] = await place.back_up("MARS")
    await backups.restore(place.app.session.admin, backup, name="LOOKED_INTO")
    found = await place.back_up("LOOKED_INTO")
    await place.app.session.admin.delete_stream("LOOKED_INTO")
    record = await place.erase(where={"class": "od"})
    assert _forget(found, Forgotten(records=[record])) == {"LOOKED_INTO": 2}


async def test_all_backups_of_a_chain_are_cleansed_as_one(place: Place) -> None:
    await place.notify("od", range(2))
    full = await backups.create(place.app.session.admin, "MARS", place.backups)
    await place.notify("od", [2])
    await place.notify("rd", range(2))
    increment = await backups.create(place.app.session.admin, "MARS", place.backups, since=full)
    record = await place.erase(where={"class": "od"})
    [chosen] = backups.one_of_each_chain([full, increment])
    assert _forget([chosen], Forgotten(records=[record])) == {"MARS": 3}
    after = [backups.load(backup.directory) for backup in (full, increment)]
    assert [_secrets(backup, "od") for backup in after] == [0, 0]
    assert [contents.messages for backup in after if (contents := backups.verify(backup))] == [0, 2]


async def test_one_event_type_is_meant(place: Place) -> None:
    await place.notify("od", [1])
    [mars] = await place.back_up("MARS")
    assert backups.of_identifier(place.app.config, [mars], {"class": "od"}).event_type == "mars"
    with pytest.raises(BackupError, match="that is the stream of no configured event type: say --event"):
        backups.of_identifier(place.app.config, [], {"class": "od"})
    with pytest.raises(UnknownEventTypeError, match="unknown event type 'venus'"):
        backups.of_identifier(place.app.config, [mars], {"class": "od"}, event_type="venus")


async def test_a_record_without_times_is_no_proof(tmp_path: Path) -> None:
    old: dict[str, Any] = {"state": "done", "begun": "", "by": "root", "event_type": "mars"}
    old["found"] = [{"stream": "MARS", "what": "notifications of mars", "sequences": [1]}]
    (tmp_path / "old.json").write_bytes(msgspec.json.encode(old))
    with pytest.raises(InvalidNotificationError, match="missing required field `times_ns`"):
        erase.read_record(tmp_path / "old.json")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(InvalidNotificationError, match="is not a record of an erasure"):
        erase.read_record(tmp_path / "other.json")


def test_the_command_cleanses_all_backups_below_a_directory(
    run: Callable[..., Ran], nats_server: NatsServer, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    config = write_config(nats_server.url)
    for step in (1, 2):
        assert run("notify", "mars", "class=od", f"step={step}", "--payload", '"here"', "-c", config).code == 0
    for what in ("mars", "--all"):
        assert run("backup", "create", what, "--to", "backups", "-c", config).code == 0
    assert run("erase", "mars", "step=1", "--yes", "--audit", "erased.json", "-c", config).code == 0
    asked = run("backup", "cleanse", "backups", "--erasure", "erased.json", "-c", config)
    assert (asked.code, [line.partition(": ")[2] for line in asked.lines]) == (2, ["1 messages match, 1 stay"] * 2)
    done = run("backup", "cleanse", "backups", "--erasure", "erased.json", "--yes", "-c", config)
    assert (done.code, [line.partition(": ")[2] for line in done.lines[2:]]) == (0, ["1 messages removed"] * 2)
    again = run("backup", "cleanse", "backups", "step=1", "--erasure", "erased.json", "--yes", "-c", config)
    assert (again.code, [line.partition(": ")[2] for line in again.lines]) == (0, ["0 messages match, 1 stay"] * 2)
    assert run("backup", "verify", "backups").code == 0, "also the set"

    record = erase.read_record(tmp_path / "erased.json")
    erase.replace_record(tmp_path / "erased.json", msgspec.structs.replace(record, state="begun"))
    begun = run("backup", "cleanse", "backups", "--erasure", "erased.json", "--yes", "-c", config)
    assert (begun.code, "was broken off, so its record may not have all" in begun.err) == (1, True)

    damaged = backups.places(tmp_path / "backups")[0]
    os.truncate(damaged / "stream.arc.s2", 10)
    ran = run("backup", "cleanse", "backups", "step=2", "--yes", "-c", config)
    assert (ran.code, f"{damaged.relative_to(tmp_path)} is damaged" in ran.err) == (1, True)
    assert ran.lines[-1].endswith("1 messages removed"), "the other one is cleansed all the same"
