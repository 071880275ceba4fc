"""Erased means: not on the server any more, and not on its disk."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import signal
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import IO, Any

import anyio
import pytest

from aviso_workers import App, Counter, Notification, Reject, files
from aviso_workers.backends import Administration, Chunk, Message
from aviso_workers.errors import InvalidNotificationError, NotFoundError, RefusedError, UnavailableError
from aviso_workers.jetstream.info import Cluster, Replica, StreamConfig, StreamInfo
from aviso_workers.ops import backups
from aviso_workers.ops.erasure import Eraser, Survey, copies, erase
from aviso_workers.server import NatsServer
from aviso_workers.state import consumer_records, orders
from tests.stories.processes import cluster
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio


class Place:
    """An app, its server and the server's disk."""

    def __init__(self, app: App, server: NatsServer, directory: Path) -> None:
        self.app = app
        self.directory = directory
        self.audit = directory / "audit.json"
        self._store = server.store_dir

    @property
    def administration(self) -> Administration:
        return self.app.session.admin.administration()

    async def notify(self, klass: str, steps: Sequence[int]) -> None:
        for step in steps:
            await self.app.notify("mars", {"class": klass, "step": step}, f"secret-of-{klass}-{step}.")

    async def create(self, name: str, **config: Any) -> None:
        await self.administration.api(f"STREAM.CREATE.{name}", {"name": name, **config})

    async def until_stored(self, stream: str, messages: int) -> None:
        """A server says nothing when a mirror has caught up."""
        with anyio.fail_after(PATIENCE_SECONDS):
            while await self._messages(stream) < messages:  # noqa: ASYNC110
                await anyio.sleep(0.02)

    async def _messages(self, stream: str) -> int:
        try:
            return (await self.app.session.backend.stream_info(stream)).messages
        except NotFoundError:
            return 0

    async def erase(self, **wanted: Any) -> Survey:
        eraser = Eraser(self.app.session.admin, self.app.config, "mars", **wanted)
        return await eraser.erase(await eraser.survey(), audit=self.audit)

    def on_disk(self, text: str) -> int:
        """In how many places of the server's files the text stands."""
        files = [path for path in self._store.rglob("*") if path.is_file()]
        return sum(path.read_bytes().count(text.encode()) for path in files)

    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.audit.read_bytes())
        return found


@pytest.fixture
async def place(
    nats_server: NatsServer, write_config: Callable[..., Path], tmp_path: Path
) -> AsyncGenerator[Place, None]:
    app = App("index", config=write_config(nats_server.url))

    @app.agent("mars", where={"class": "xx"})
    async def refuse(notification: Notification[str]) -> None:
        raise Reject("never")

    async with app:
        yield Place(app, nats_server, tmp_path)


@pytest.fixture
def umask_for_all() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def _found(survey: Survey) -> dict[str, tuple[int, ...]]:
    return {finding.stream: finding.sequences for finding in survey.findings}


@pytest.mark.parametrize("compression", ["none", "s2"])
async def test_what_is_erased_is_on_no_disk_any_more(place: Place, compression: str) -> None:
    await place.create("MARS", subjects=["mars.>"], compression=compression)
    await place.notify("od", range(3))
    await place.notify("rd", range(3))
    assert place.on_disk("secret-of-od-1.") == 1
    left = await place.erase(where={"class": "od"})
    assert left.findings == ()
    assert [place.on_disk(f"secret-of-od-{step}.") for step in range(3)] == [0, 0, 0]
    assert [place.on_disk(f"secret-of-rd-{step}.") for step in range(3)] == [1, 1, 1]


async def test_copies_are_found_by_what_they_say_of_themselves(place: Place) -> None:
    await place.notify("od", range(2))
    await place.notify("rd", range(2))
    transforms = [{"src": "mars.*.*", "dest": "turned.{{wildcard(2)}}.{{wildcard(1)}}"}]
    await place.create("MIRROR", mirror={"name": "MARS"})
    await place.create("SOURCED", sources=[{"name": "MARS"}])
    await place.create("TURNED", sources=[{"name": "MARS", "subject_transforms": transforms}])
    await place.create("MIRROR_OF_TURNED", mirror={"name": "TURNED"})
    copies = ["MIRROR", "SOURCED", "TURNED", "MIRROR_OF_TURNED"]
    for stream in copies:
        await place.until_stored(stream, 4)
    survey = await Eraser(place.app.session.admin, place.app.config, "mars", where={"class": "od", "step": 1}).survey()
    assert _found(survey) == dict.fromkeys(["MARS", *copies], (2,))
    assert place.on_disk("secret-of-od-1.") == 5
    left = await place.erase(where={"class": "od", "step": 1})
    assert (left.findings, place.on_disk("secret-of-od-1.")) == ((), 0)
    assert place.on_disk("secret-of-rd-1.") == 5


async def test_what_waits_to_be_delivered_is_erased_and_never_comes(place: Place) -> None:
    for klass in ("od", "rd"):
        identifier = {"class": klass, "step": 1}
        await place.app.notify("mars", identifier, f"secret-of-{klass}-1.", due=3600)
    survey = await Eraser(place.app.session.admin, place.app.config, "mars", where={"class": "od"}).survey()
    assert _found(survey) == {"aviso_workers_schedule__MARS": (1,)}
    left = await place.erase(where={"class": "od"})
    assert (left.findings, place.on_disk("secret-of-od-1."), place.on_disk("secret-of-rd-1.")) == ((), 0, 1)


async def test_a_copy_is_found_when_its_original_is_gone(place: Place) -> None:
    await place.notify("od", range(3))
    await place.create("SOURCED", sources=[{"name": "MARS"}])
    await place.until_stored("SOURCED", 3)
    await place.app.session.backend.purge_stream("MARS")
    assert _found(await Eraser(place.app.session.admin, place.app.config, "mars", where={"step": 1}).survey()) == {
        "SOURCED": (2,)
    }
    assert _found(await Eraser(place.app.session.admin, place.app.config, "mars", sequence=3).survey()) == {
        "SOURCED": (3,)
    }


async def test_copies_of_copies_are_found_when_all_originals_are_gone(place: Place) -> None:
    await place.notify("od", range(3))
    transforms = [{"src": "mars.*.*", "dest": "turned.{{wildcard(2)}}.{{wildcard(1)}}"}]
    await place.create("MIRROR", mirror={"name": "MARS"})
    await place.create("TURNED", sources=[{"name": "MARS", "subject_transforms": transforms}])
    await place.create("MIRROR_OF_MIRROR", mirror={"name": "MIRROR"})
    await place.create("SOURCED", sources=[{"name": "MIRROR"}])
    await place.create("TURNED_LATER", sources=[{"name": "MIRROR", "subject_transforms": transforms}])
    await place.create("MIRROR_OF_TURNED", mirror={"name": "TURNED"})
    copies = ["MIRROR_OF_MIRROR", "SOURCED", "TURNED_LATER", "MIRROR_OF_TURNED"]
    for stream in copies:
        await place.until_stored(stream, 3)
    for stream in ("MIRROR", "TURNED"):
        await place.app.session.backend.purge_stream(stream)
    copies_by_id = copies[:3]  # what mirrors TURNED has other sequences
    assert _found(
        await Eraser(place.app.session.admin, place.app.config, "mars", sequence=2).survey()
    ) == dict.fromkeys(["MARS", *copies_by_id], (2,))
    await place.app.session.backend.purge_stream("MARS")
    assert _found(
        await Eraser(place.app.session.admin, place.app.config, "mars", sequence=2).survey()
    ) == dict.fromkeys(copies_by_id, (2,))
    assert _found(
        await Eraser(place.app.session.admin, place.app.config, "mars", where={"step": 1}).survey()
    ) == dict.fromkeys(copies, (2,))
    await place.administration.api("STREAM.DELETE.MARS")
    left = await place.erase(where={"step": 1})
    assert (left.findings, place.on_disk("secret-of-od-1.")) == ((), 0)


async def test_dead_letters_are_erased_too(place: Place) -> None:
    async with anyio.create_task_group() as working:
        stop = anyio.Event()
        working.start_soon(partial(place.app.session.work, place.app, stop, agents=place.app.agents))
        await place.notify("xx", range(2))
        await place.until_stored("aviso_workers_dead_letters__index", 2)
        stop.set()
    assert place.on_disk("secret-of-xx-0.") == 2
    left = await place.erase(where={"class": "xx", "step": 0})
    assert (left.findings, place.on_disk("secret-of-xx-0.")) == ((), 0)
    assert place.on_disk("secret-of-xx-1.") == 2


@pytest.mark.slow
async def test_copies_of_dead_letters_that_are_gone_are_found(place: Place) -> None:
    await place.create("ARCHIVE", sources=[{"name": "aviso_workers_dead_letters__index"}])
    async with anyio.create_task_group() as working:
        stop = anyio.Event()
        working.start_soon(partial(place.app.session.work, place.app, stop, agents=place.app.agents))
        await place.notify("xx", range(2))
        await place.until_stored("ARCHIVE", 2)
        stop.set()
    await place.create("MIRROR", mirror={"name": "ARCHIVE"})
    await place.until_stored("MIRROR", 2)
    for stream in ("aviso_workers_dead_letters__index", "ARCHIVE"):
        await place.app.session.backend.purge_stream(stream)
    found = _found(
        await Eraser(place.app.session.admin, place.app.config, "mars", where={"class": "xx", "step": 0}).survey()
    )
    assert found.keys() == {"MARS", "MIRROR"}
    left = await place.erase(where={"class": "xx", "step": 0})
    assert (left.findings, place.on_disk("secret-of-xx-0.")) == ((), 0)
    assert place.on_disk("secret-of-xx-1.") == 2


async def test_the_key_of_a_table_goes_with_its_history(place: Place) -> None:
    await place.notify("od", [1])
    bucket = await place.app.session.backend.key_value("index__table__sums", history=5)
    for value in (b"secret-value", b"secret-value", b"another"):
        await bucket.put("od", value)
    await bucket.put("rd", b"of-somebody-else")
    await place.erase(where={"class": "od"}, keys=["index__table__sums/od"])
    assert [place.on_disk(text) for text in ("secret-value", "another", "of-somebody-else")] == [0, 0, 1]
    assert await bucket.get("od") is None
    assert (await bucket.get("rd")) is not None


async def test_an_erasure_that_does_not_find_what_the_server_counts_is_no_success(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    await place.notify("od", range(3))
    await place.notify("rd", range(3))
    backend = place.app.session.backend
    whole = backend.read_chunks

    async def short(stream: str, **bounds: Any) -> AsyncGenerator[Chunk, None]:
        async for chunk in whole(stream, **bounds):
            yield chunk.only([sequence != 2 for sequence in chunk.sequences])

    monkeypatch.setattr(backend, "read_chunks", short)
    with pytest.raises(UnavailableError, match="MARS: the server counts 3 messages that match, and reading finds 2"):
        await place.erase(where={"class": "od"})
    assert not place.audit.exists()


async def test_what_is_stored_during_a_survey_is_found(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    await place.notify("od", range(3))
    backend = place.app.session.backend
    whole = backend.read_chunks

    async def late(stream: str, **bounds: Any) -> AsyncGenerator[Chunk, None]:
        async for chunk in whole(stream, **bounds):
            yield chunk
        if stream == "MARS" and bounds["start_sequence"] == 1:
            await place.notify("od", [3])

    monkeypatch.setattr(backend, "read_chunks", late)
    assert _found(await Eraser(place.app.session.admin, place.app.config, "mars", where={"class": "od"}).survey()) == {
        "MARS": (1, 2, 3, 4)
    }


async def test_a_survey_ends_while_more_and_more_is_stored(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    await place.notify("od", range(3))
    backend = place.app.session.backend
    whole = backend.read_chunks
    steps = itertools.count(3)

    async def late(stream: str, **bounds: Any) -> AsyncGenerator[Chunk, None]:
        async for chunk in whole(stream, **bounds):
            yield chunk
        if stream == "MARS":
            await place.notify("od", [next(steps)])

    monkeypatch.setattr(backend, "read_chunks", late)
    found = _found(await Eraser(place.app.session.admin, place.app.config, "mars", where={"class": "od"}).survey())
    assert found["MARS"][:4] == (1, 2, 3, 4), "all that was stored when it was counted"


async def test_one_notification_is_erased_by_its_id(place: Place) -> None:
    await place.notify("od", range(3))
    await place.erase(sequence=2)
    assert [place.on_disk(f"secret-of-od-{step}.") for step in range(3)] == [1, 0, 1]


async def test_what_the_server_notes_in_place_of_a_notification_is_erased_with_its_subject(place: Place) -> None:
    await place.notify("rd", [1])
    marker = Message(subject="mars.of-a-person.1", data=b"", headers={"Nats-Marker-Reason": "MaxAge"})
    await place.app.session.backend.publish(
        marker, message_id="marker", stream="MARS", timeout_seconds=PATIENCE_SECONDS
    )
    await place.erase(where={"class": "of-a-person"})
    assert place.record()["erased"] == {"MARS": 1}
    assert place.on_disk("of-a-person") == 0


async def test_the_record_tells_all_but_what_was_erased(place: Place) -> None:
    await place.notify("od", range(3))
    await place.erase(where={"class": "od"})
    record = place.record()
    assert (record["state"], record["event_type"], record["by_fields"]) == ("done", "mars", ["class"])
    assert record["erased"] == {"MARS": 3}
    assert "secret" not in place.audit.read_text()
    assert '"od"' not in place.audit.read_text()


async def test_only_its_owner_reads_a_record(place: Place, umask_for_all: None) -> None:
    await place.notify("od", [1])
    await place.erase(where={"class": "od"})
    assert oct(place.audit.stat().st_mode & 0o777) == "0o600"
    assert [path.name for path in place.directory.iterdir() if "audit" in path.name] == ["audit.json"]


async def test_no_record_is_overwritten(place: Place) -> None:
    await place.notify("od", [1])
    await place.erase(where={"class": "od"})
    first = place.audit.read_bytes()
    await place.notify("od", [1])
    with pytest.raises(RefusedError, match=r"audit.json exists, and no record is overwritten: name another file"):
        await place.erase(where={"class": "od"})
    assert place.audit.read_bytes() == first
    assert (await place.app.session.backend.stream_info("MARS")).messages == 1


async def test_nothing_is_erased_where_no_record_can_be_written(place: Place) -> None:
    await place.notify("od", [1])
    place.audit = place.directory / "missing" / "audit.json"
    with pytest.raises(RefusedError, match=r"cannot write the record .*audit.json: No such file or directory"):
        await place.erase(where={"class": "od"})
    assert (await place.app.session.backend.stream_info("MARS")).messages == 1


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`full_disk(after=1)`: one record is written, and no more."""

    def fill(*, after: int) -> None:
        written = 0

        def sync(file: IO[bytes]) -> None:
            nonlocal written
            written += 1
            if written > after:
                raise OSError(errno.ENOSPC, "No space left on device")
            file.flush()

        monkeypatch.setattr(files, "sync", sync)

    return fill


async def test_a_disk_that_is_full_before_leaves_no_record_and_erases_nothing(
    place: Place, full_disk: Callable[..., None]
) -> None:
    await place.notify("od", [1])
    full_disk(after=0)
    with pytest.raises(RefusedError, match=r"No space left on device. Nothing was erased"):
        await place.erase(where={"class": "od"})
    assert (await place.app.session.backend.stream_info("MARS")).messages == 1
    assert not place.audit.exists()


async def test_a_disk_that_is_full_afterwards_is_told_with_what_was_erased(
    place: Place, full_disk: Callable[..., None]
) -> None:
    await place.notify("od", range(3))
    full_disk(after=1)
    with pytest.raises(
        RefusedError, match=r"^3 were erased, 0 are left, and the record says only that the erasure was begun"
    ):
        await place.erase(where={"class": "od"})
    assert place.record()["state"] == "begun"


async def test_that_nothing_was_found_is_recorded(place: Place) -> None:
    await place.notify("rd", [1])
    await place.erase(where={"class": "od"})
    record = place.record()
    assert (record["state"], record["by_fields"], record["found"]) == ("nothing found", ["class"], [])


async def test_the_record_tells_messages_from_those_of_a_stream_that_is_made_again(place: Place) -> None:
    await place.notify("od", range(2))
    stored = [
        message.timestamp_ns
        async for message in place.app.session.backend.read("MARS", filter_subjects=(), last_sequence=2)
    ]
    await place.erase(where={"class": "od"})
    [found] = place.record()["found"]
    assert (found["stream"], found["sequences"], found["times_ns"]) == ("MARS", [1, 2], stored)


async def test_tables_windows_and_counters_that_may_hold_copies_are_named(place: Place) -> None:
    backend = place.app.session.backend
    await place.notify("od", [1])
    sums = await backend.key_value("index__table__sums")
    for key, value in (("od", b"1"), ("rd", b'{"seen": ["od/7"]}'), ("other", b'{"mode": 12}')):
        await sums.put(key, value)
    windows = await backend.key_value("index__windows__hourly")
    await windows.put("=passed", b'{"settled": {}}')
    await windows.put("x=2Fod", b'{"open": {"0": 3}, "counted": {"1": 2.0}}')
    await (await backend.key_value("index__windows__count_failures")).put("od", b'{"open": {"0": 3}}')
    await (await backend.key_value("index__failures")).put("agent.MARS.1", b"1")
    records = await consumer_records.bucket(backend, "index")
    await records.put("index/count/MARS", b'{"filter_subjects": ["mars.od.*"]}')
    noted = ("index/agents/count/failure", "index/agents/count/run")
    for key in noted:
        await records.put(key, b'{"text": "no index for od"}')
    await (await orders.bucket(place.app.session.admin, "index")).put("index/timers/tick/pause", b'{"note": "no od"}')
    async with _counter_of(place) as counter:
        await counter.add("od")
        await counter.add("rd")
        survey = await Eraser(place.app.session.admin, place.app.config, "mars", where={"class": "od"}).survey()
        assert [(each.kind, each.name, each.keys, each.named) for each in survey.suspects] == [
            ("bucket", "index__orders", 1, ("index/timers/tick/pause",)),
            ("bucket", "index__state", 2, noted),
            ("table", "index__table__sums", 3, ("od", "rd")),
            ("windows", "index__windows__count_failures", 1, ("od",)),
            ("windows", "index__windows__hourly", 1, ("x=2Fod",)),
            ("counter", "index__seen", 2, ("od",)),
        ]
        keys = ["index__table__sums/od", "index__table__sums/rd", "index__seen/od"]
        await place.erase(where={"class": "od"}, keys=[*keys, *(f"index__state/{key}" for key in noted)])
        assert await records.keys() == ["index/count/MARS"]
        assert await counter.items() == {"rd": 1}
        assert await counter.add("od") == 1
        assert await sums.keys() == ["other"]
    record = place.record()
    assert record["by_keys_of"] == ["index__seen", "index__state", "index__table__sums"]
    assert record["may_hold_copies"][2] == {"kind": "table", "name": "index__table__sums", "keys": 3, "named": 2}
    assert "od" not in re.findall(r"[a-z]+", place.audit.read_text())


@pytest.mark.parametrize(
    ("value", "text", "found"),
    [
        ("-5", "green.-5", True),
        ("C++", "C++.12", True),
        ("+49 123", "od.+49 123", True),
        ("2026-11-25T00:00:00Z", "at 2026-11-25T00:00:00Z, od", True),
        ("od", "x" * 5000 + " od", True),
        ("od", "mode.odd", False),
        ("5", "15", False),
        ("", "od", False),
    ],
)
async def test_a_value_is_found_in_a_key_unless_it_is_a_part_of_a_longer_word(
    place: Place, value: str, text: str, found: bool
) -> None:
    await (await place.app.session.backend.key_value("index__table__sums")).put("one", json.dumps(text).encode())
    admin = place.app.session.admin
    infos = {"KV_index__table__sums": await admin.stream_info("KV_index__table__sums")}
    [suspect] = await copies.find_suspects(admin, infos, [value])
    assert suspect.named == (("one",) if found else ())


async def test_a_key_that_is_not_there_is_told_and_what_it_was_to_erase_is_not_proven(place: Place) -> None:
    await place.notify("od", [1])
    sums = await place.app.session.backend.key_value("index__table__sums")
    await sums.put("od", b"1")
    left = await place.erase(where={"class": "od"}, keys=["index__table__sums/od", "index__table__sums/0d"])
    assert [(each.where, each.why) for each in left.unreached] == [
        ("KV_index__table__sums", "1 of the keys that were given for it is not there")
    ]
    assert (left.whole, await sums.keys(), place.record()["state"]) == (False, [], "incomplete")
    assert "0d" not in place.audit.read_text()


@asynccontextmanager
async def _counter_of(place: Place) -> AsyncGenerator[Counter, None]:
    app = App("index", config=place.app.config)
    counter = app.counter("seen")
    async with app:
        yield counter


async def test_a_stream_that_was_restored_under_another_name_is_found(place: Place) -> None:
    await place.notify("od", range(2))
    backup = await backups.create(place.app.session.admin, "MARS", place.directory / "backups")
    await backups.restore(place.app.session.admin, backup, name="LOOKED_INTO")
    survey = await Eraser(place.app.session.admin, place.app.config, "mars", where={"class": "od", "step": 1}).survey()
    assert _found(survey) == {"MARS": (2,), "LOOKED_INTO": (2,)}
    assert _found(await Eraser(place.app.session.admin, place.app.config, "mars", sequence=2).survey()) == {
        "MARS": (2,),
        "LOOKED_INTO": (2,),
    }


async def test_a_stream_of_several_subjects_keeps_those_that_are_of_no_notification(place: Place) -> None:
    await place.create("ALL", subjects=["mars.>", "diss.>"])
    for number, subject in enumerate(("diss.od.1", "mars.od.1", "mars.rd.1", "diss.od.2")):
        await place.app.session.backend.publish(
            Message(subject=subject, data=b"here"),
            message_id=str(number),
            stream="ALL",
            timeout_seconds=PATIENCE_SECONDS,
        )
    await place.administration.api("STREAM.UPDATE.ALL", {"name": "ALL", "subjects": ["all.>"]})
    await place.notify("od", range(4))
    assert _found(await Eraser(place.app.session.admin, place.app.config, "mars", where={"class": "od"}).survey()) == {
        "MARS": (1, 2, 3, 4),
        "ALL": (2,),
    }
    await place.app.session.backend.delete_message("MARS", 2)
    assert _found(await Eraser(place.app.session.admin, place.app.config, "mars", sequence=2).survey()) == {}, (
        "another one has this id there"
    )


async def test_a_mirror_of_a_stream_that_was_made_again_keeps_its_other_messages(place: Place) -> None:
    await place.notify("od", range(2))
    await place.create("MIRROR", mirror={"name": "MARS"})
    await place.until_stored("MIRROR", 2)
    await place.app.session.admin.delete_stream("MARS")
    await place.create("MARS", subjects=["mars.>"])
    await place.notify("rd", range(2))
    assert _found(await Eraser(place.app.session.admin, place.app.config, "mars", where={"class": "rd"}).survey()) == {
        "MARS": (1, 2)
    }


async def test_what_is_stored_while_others_are_erased_counts_as_erased_or_as_left(place: Place) -> None:
    """A publisher that never stops: what was found at any look and is not there at the last one is erased."""
    await place.notify("od", range(3))
    eraser = Eraser(place.app.session.admin, place.app.config, "mars", where={"class": "od"})
    survey = eraser.survey

    async def look_after_more_has_come() -> Survey:
        await place.notify("od", range(2))
        return await survey()

    found = await survey()
    eraser.survey = look_after_more_has_come  # type: ignore[method-assign]
    left = await eraser.erase(found, audit=place.audit)
    assert (eraser.erased(left), left.messages) == ({"MARS": 3 + 2 + 2}, 2)
    assert place.record()["erased"] == {"MARS": 3 + 2 + 2}


async def test_a_survey_changes_nothing(place: Place) -> None:
    await place.notify("od", range(3))
    await Eraser(place.app.session.admin, place.app.config, "mars", where={"class": "od"}).survey()
    assert (await place.app.session.backend.stream_info("MARS")).messages == 3
    assert not place.audit.exists()


async def test_a_stream_that_denies_it_is_left_alone_and_named(place: Place) -> None:
    await place.create("MARS", subjects=["mars.>"], deny_delete=True)
    await place.notify("od", [1])
    with pytest.raises(RefusedError, match="MARS: it has deny_delete, which no server takes back; nothing was erased"):
        await place.erase(where={"class": "od"})
    assert not place.audit.exists()


async def test_a_copy_that_denies_it_is_told_and_the_rest_erased(place: Place) -> None:
    await place.notify("od", [1])
    await place.create("SOURCED", sources=[{"name": "MARS"}], deny_delete=True)
    await place.until_stored("SOURCED", 1)
    left = await place.erase(where={"class": "od"})
    assert (_found(left), [each.where for each in left.unreached]) == ({"SOURCED": (1,)}, ["SOURCED"])
    assert place.record()["state"] == "incomplete"
    assert place.record()["erased"] == {"MARS": 1}, "not what is left"


@pytest.mark.slow
async def test_nothing_is_erased_while_a_server_is_away_that_would_keep_it(
    write_config: Callable[..., Path], tmp_path: Path
) -> None:
    """Where it comes back and is told of many changes at once, it removes what was erased without overwriting it."""
    with cluster(tmp_path) as nodes:
        async with App("index", config=write_config(nodes[0].url, replicas=3)) as app:
            backend = app.session.admin
            await app.notify("mars", {"class": "od", "step": 1})
            leader = (await backend.administration().api("STREAM.INFO.MARS"))["cluster"]["leader"]
            away = next(node for node in nodes[1:] if node.name != leader)
            away.process.send_signal(signal.SIGSTOP)
            await _until_behind(app, (away.name,))
            eraser = Eraser(app.session.admin, app.config, "mars", sequence=1)
            with pytest.raises(
                RefusedError, match=f"MARS: its replica on {away.name} is not current.*; nothing was erased. Wait"
            ):
                await eraser.erase(await _survey(eraser), audit=tmp_path / "audit.json")
            assert (await backend.stream_info("MARS")).messages == 1
            away.process.send_signal(signal.SIGCONT)
            await _until_behind(app, ())
            left = await eraser.erase(await _survey(eraser), audit=tmp_path / "audit.json")
            assert left.whole, left
            assert (await _survey(eraser)).whole, "each of the three has counted none"
            away.process.send_signal(signal.SIGSTOP)
            await _until_behind(app, (away.name,))
            again = await _survey(eraser)
            assert (again.findings, again.whole) == ((), False), "its disk may have the bytes again when it is back"


async def _survey(eraser: Eraser) -> Survey:
    with anyio.fail_after(PATIENCE_SECONDS):
        while True:
            with suppress(UnavailableError):  # who is away may have led the servers
                return await eraser.survey()


async def _until_behind(app: App, servers: tuple[str, ...]) -> None:
    """Wait until the stream's leader says that the replicas on these servers are not current, and no others."""
    with anyio.fail_after(PATIENCE_SECONDS):
        while True:
            with suppress(UnavailableError):  # one that is paused may have led the stream
                if (await app.session.backend.stream_info("MARS")).behind == servers:
                    return
            await anyio.sleep(0.1)


class Replicas:
    """The administration of a cluster of three, of whose servers one carries out deletions late."""

    def __init__(self, late: Sequence[int]) -> None:
        self.late = list(late)
        """What the replica on n-3 holds, each time that it is asked; at last what the leader's holds."""
        self._turns = itertools.cycle(["n-1", "n-2", "n-3"])

    def administration(self) -> Replicas:
        return self

    async def stream_info(self, stream: str) -> StreamInfo:
        followers = tuple(Replica(name=name, current=True) for name in ("n-2", "n-3"))
        return StreamInfo(
            config=StreamConfig(name=stream),
            time=datetime.now(UTC),
            messages=7,
            cluster=Cluster(leader="n-1", replicas=followers),
        )

    async def replica_count(self, stream: str, *, filter_subjects: Sequence[str]) -> tuple[str, int]:
        server = next(self._turns)
        return server, self.late.pop(0) if server == "n-3" and self.late else 7


async def test_a_replica_that_has_not_carried_out_what_it_has_received_is_waited_for() -> None:
    cluster: Any = Replicas(late=[9, 8])
    assert await erase.not_current(cluster, "MARS", ()) == []
    assert cluster.late == []


async def test_a_replica_that_does_not_come_to_hold_what_its_leader_holds_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(erase, "WITHIN_SECONDS", 0.5)
    cluster: Any = Replicas(late=[9] * 1000)
    assert await erase.not_current(cluster, "MARS", ()) == ["n-3"]


async def test_what_was_purged_before_is_told(place: Place) -> None:
    """Its bytes stay in the block, and nobody can ask for them any more."""
    await place.notify("od", [1, 2])
    await place.administration.api("STREAM.PURGE.MARS", {"filter": "mars.od.1"})
    assert place.on_disk("secret-of-od-1.") == 1
    survey = await Eraser(place.app.session.admin, place.app.config, "mars", where={"class": "od"}).survey()
    assert [each.why for each in survey.unreached] == [
        "messages that were replaced, purged or too old may have left their bytes on disk"
    ]


async def test_what_is_to_be_erased_has_to_be_named(place: Place) -> None:
    with pytest.raises(InvalidNotificationError, match="say which notifications to erase"):
        Eraser(place.app.session.admin, place.app.config, "mars")
    with pytest.raises(InvalidNotificationError, match="'sums' is not BUCKET/KEY"):
        Eraser(place.app.session.admin, place.app.config, "mars", sequence=1, keys=["sums"])
    with pytest.raises(NotFoundError, match="no bucket 'none'"):
        await Eraser(place.app.session.admin, place.app.config, "mars", sequence=1, keys=["none/od"]).survey()


async def test_an_erasure_that_is_refused_says_why_and_is_known_as_begun(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(stream: str, sequence: int) -> None:
        raise RefusedError("not allowed to delete")

    await place.notify("od", range(3))
    monkeypatch.setattr(place.app.session.admin, "delete_message", refuse)
    with pytest.raises(RefusedError, match="not allowed to delete"):
        await place.erase(where={"class": "od"})
    assert place.record()["state"] == "begun"
