"""Backups of real streams on real servers: as they were, or refused."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.from_thread
import pytest

from aviso_workers import App
from aviso_workers.backends import Admin, ConsumerInfo
from aviso_workers.backends.jetstream.connection import NatsConnection, ServerVersion
from aviso_workers.errors import BackupError, InvalidIdentifierError, NotFoundError, RefusedError, UnavailableError
from aviso_workers.jetstream import metadata
from aviso_workers.jetstream.plans import Plan
from aviso_workers.ops import backups, stream_policy
from aviso_workers.ops.backups import Backup, Forgotten, Keep, creation, restoration, schedules
from aviso_workers.ops.backups.storage import Draft
from aviso_workers.server import NatsServer, processes
from tests.conftest import write_mars_config
from tests.ops.backups.conftest import STORED, Original, Site
from tests.server.conftest import load_server

pytestmark = pytest.mark.anyio

OF_OLD_SERVER = Path(__file__).parents[2] / "data" / "backups" / "nats-server-2.9"
MANY_BYTES = 6_000_000
"""So much of the archive is sent, and not all of it, before the restore is killed."""


@pytest.fixture
def copied(original: Original, tmp_path: Path) -> Backup:
    """The backup, to do with as one likes."""
    return backups.load(Path(shutil.copytree(original.backup.directory, tmp_path / "copied")))


def by_another_program(backup: Backup) -> Backup:
    """Without our record, as the nats CLI leaves it."""
    meta = backup.directory / "backup.json"
    meta.write_text(json.dumps({key: json.loads(meta.read_text())[key] for key in ("config", "state")}))
    return backups.load(backup.directory)


@pytest.mark.slow
@pytest.mark.covers("001-05", "004-30")
async def test_a_stream_is_restored_as_it_was(site: Site, original: Original) -> None:
    restored = await backups.restore(site.app.session.admin, original.backup)
    assert restored.state == original.account["state"]
    assert await site.account() == original.account
    assert original.account["index"]["num_ack_pending"] == 3
    receipt = await site.app.notify("mars", {"class": "od", "step": 1})
    assert receipt.sequence == STORED + 1, "it takes notifications again, and goes on counting"


def test_the_layout_is_that_of_the_nats_cli(original: Original) -> None:
    files = sorted(path.name for path in original.backup.directory.iterdir())
    assert files == ["backup.json", "stream.arc.s2"]
    meta = json.loads((original.backup.directory / "backup.json").read_text())
    assert (meta["config"]["name"], meta["state"]["messages"]) == ("MARS", STORED - 1)
    assert re.fullmatch(r"2\.\d+\.\d+", meta["aviso_workers"]["server_version"])


def test_all_of_it_is_read_and_counted(original: Original) -> None:
    sizes: list[int] = []
    contents = backups.verify(original.backup, progress=sizes.append)
    assert contents is not None
    state = original.account["state"]
    assert (contents.messages, contents.bytes, contents.missing) == (state["messages"], state["bytes"], 0)
    for consumer in ("index", "idle"):
        assert contents.consumers[consumer]["ack_floor"] == original.account[consumer]["ack_floor"], consumer
    assert sum(sizes) == original.backup.size


@pytest.mark.slow
async def test_a_backup_by_the_nats_cli_is_restored(site: Site, original: Original, copied: Backup) -> None:
    theirs = by_another_program(copied)
    assert (theirs.record, backups.verify(theirs)) == (None, backups.verify(original.backup))
    await backups.restore(site.app.session.admin, theirs)
    assert await site.account() == original.account


def flip_a_bit(backup: Backup) -> None:
    data = bytearray(backup.archive.read_bytes())
    data[len(data) // 2] ^= 0x10
    backup.archive.write_bytes(data)


def cut_it_off(backup: Backup) -> None:
    os.truncate(backup.archive, backup.size // 2)


def cut_off_the_end(backup: Backup) -> None:
    """At the end of a chunk, so that all that is left is good."""
    data, at, last = backup.archive.read_bytes(), 0, 0
    while at < len(data):
        last, at = at, at + 4 + int.from_bytes(data[at + 1 : at + 4], "little")
    backup.archive.write_bytes(data[:last])


@pytest.mark.parametrize("name", ["backup.json", "stream.arc.s2"])
def test_a_file_without_an_end_is_refused_at_once(name: str, tmp_path: Path) -> None:
    state = {"messages": 0, "bytes": 0, "first_seq": 1, "last_seq": 0, "consumer_count": 0, "last_ts": ""}
    (tmp_path / "backup.json").write_text(json.dumps({"config": {"name": "MARS"}, "state": state}))
    (tmp_path / "stream.arc.s2").touch()
    backups.load(tmp_path)
    for endless in (lambda path: path.symlink_to("/dev/zero"), os.mkfifo):
        (tmp_path / name).unlink()
        endless(tmp_path / name)
        with pytest.raises(BackupError, match=rf"{name} is not a regular file"):
            backups.load(tmp_path)


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "another program's"])
@pytest.mark.parametrize("harm", [flip_a_bit, cut_it_off, cut_off_the_end])
async def test_a_damaged_archive_is_refused(
    site: Site, copied: Backup, harm: Callable[[Backup], None], ours: bool
) -> None:
    harm(copied)
    backup = copied if ours else by_another_program(copied)
    with pytest.raises(BackupError, match="is damaged"):
        backups.verify(backup)
    with pytest.raises(BackupError, match="is damaged"):
        await backups.restore(site.app.session.admin, backup)
    assert await site.streams() == []


async def test_a_changed_configuration_is_refused(site: Site, copied: Backup) -> None:
    meta = copied.directory / "backup.json"
    meta.write_text(meta.read_text().replace('"max_age": 0', '"max_age": 1'))
    changed = backups.load(copied.directory)
    with pytest.raises(BackupError, match=r"backup\.json has changed"):
        backups.verify(changed)
    with pytest.raises(BackupError, match=r"backup\.json has changed"):
        await backups.restore(site.app.session.admin, changed)


def test_what_is_no_backup_is_told(copied: Backup, tmp_path: Path) -> None:
    with pytest.raises(BackupError, match=r"is not a backup: .*backup\.json.*it holds .*copied"):
        backups.load(tmp_path)
    copied.archive.rename(tmp_path / "elsewhere")
    with pytest.raises(BackupError, match=r"is not a backup: .*stream\.tar\.s2: No such file"):
        backups.load(copied.directory)
    (copied.directory / "backup.json").write_text("{")
    with pytest.raises(BackupError, match=r"backup\.json: "):
        backups.load(copied.directory)


async def test_a_copy_stands_beside_the_original(site: Site, original: Original) -> None:
    await backups.restore(site.app.session.admin, original.backup)
    await backups.restore(site.app.session.admin, original.backup, name="OLD", storage="memory")
    copy = await site.account("OLD")
    assert (copy["config"]["subjects"], copy["config"]["storage"]) == (["OLD"], "memory")
    state = original.account["state"]
    assert {**copy["state"], "bytes": state["bytes"]} == state, "in memory a message takes less"
    assert copy["index"]["ack_floor"] == original.account["index"]["ack_floor"]


async def test_a_consumer_of_which_the_server_tells_nothing_is_an_error(
    site: Site, original: Original, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restoration, "CONSUMERS_SECONDS", 0.2)
    consumers = type(site.app.session.admin).consumers

    async def all_but_one(self: Admin, stream: str) -> list[ConsumerInfo]:
        return [each for each in await consumers(self, stream) if each.name != "idle"]

    monkeypatch.setattr(type(site.app.session.admin), "consumers", all_but_one)
    with pytest.raises(BackupError, match="MARS is restored, but not proven to have its consumers idle"):
        await backups.restore(site.app.session.admin, original.backup)


async def test_a_stream_that_exists_is_not_restored_over(site: Site, original: Original) -> None:
    await site.fill(1)
    with pytest.raises(BackupError, match="MARS exists, with 1 messages: restore under another name"):
        await backups.restore(site.app.session.admin, original.backup)
    await site.delete()
    await site.server.api("STREAM.CREATE.OTHER", {"name": "OTHER", "subjects": ["mars.od.>"]})
    with pytest.raises(BackupError, match=r"OTHER has the subjects mars\.> of MARS"):
        await backups.restore(site.app.session.admin, original.backup)
    assert await site.streams() == ["OTHER"]


async def test_a_subject_that_is_taken_meanwhile_leaves_nothing(
    site: Site, original: Original, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def see_no_other(app: App, config: Any) -> None:
        await site.server.api("STREAM.CREATE.OTHER", {"name": "OTHER", "subjects": ["mars.od.>"]})

    monkeypatch.setattr(restoration, "_require_free", see_no_other)
    with pytest.raises(RefusedError, match=r"STREAM\.UPDATE\.MARS: subjects overlap"):
        await backups.restore(site.app.session.admin, original.backup)
    assert await site.streams() == ["OTHER"]


async def test_what_the_server_refuses_leaves_nothing(site: Site, original: Original) -> None:
    with pytest.raises(RefusedError, match="replicas > 1 not supported"):
        await backups.restore(site.app.session.admin, original.backup, replicas=3)
    assert await site.streams() == []


async def test_a_server_too_old_for_the_format_is_left_alone(
    site: Site, original: Original, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NatsConnection, "server_version", ServerVersion(2, 14))
    for act in (backups.restore, backups.drill):
        with pytest.raises(RefusedError, match=r"2\.15 or newer is needed; this one is 2\.14"):
            await act(site.app.session.admin, original.backup)
    assert await site.streams() == []


async def test_an_answer_that_names_no_subject_for_the_archive_is_told(
    site: Site, original: Original, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = NatsConnection.api

    async def answer(self: NatsConnection, subject: str, request: Any = None, **options: Any) -> dict[str, Any]:
        if subject == "STREAM.RESTORE.MARS":
            return {"type": "io.nats.other"}
        return await api(self, subject, request, **options)

    monkeypatch.setattr(NatsConnection, "api", answer)
    with pytest.raises(UnavailableError, match=r"restore of MARS: .*io\.nats\.other"):
        await backups.restore(site.app.session.admin, original.backup)
    assert await site.streams() == []


async def test_a_cancelled_restore_leaves_nothing(site: Site, original: Original) -> None:
    read = 0
    scope = anyio.CancelScope()

    def cancel_later(size: int) -> None:
        nonlocal read
        read += size
        if read > MANY_BYTES:
            anyio.from_thread.run_sync(scope.cancel)

    with scope:
        await backups.restore(site.app.session.admin, original.backup, progress=cancel_later)
    assert scope.cancelled_caught
    assert await site.streams() == []
    await backups.restore(site.app.session.admin, original.backup)
    assert await site.account() == original.account


KILLED = """
import os, signal, sys
from pathlib import Path
import anyio
import anyio.from_thread
from aviso_workers import App
from aviso_workers.errors import NotFoundError
from aviso_workers.ops import backups

app = App("killed", config=sys.argv[1])
act = sys.argv[4]
done = 0

async def until_the_stream_has_messages():
    while True:
        try:
            if (await app.session.backend.stream_info("MARS")).messages:
                return
        except NotFoundError:
            pass  # the server has not come so far yet
        await anyio.sleep(0.01)

def die_later(size):
    global done
    done += size
    if done > int(sys.argv[3]):
        if act == "restore":
            anyio.from_thread.run(until_the_stream_has_messages)
        os.kill(os.getpid(), signal.SIGKILL)

async def main():
    async with app:
        if act == "restore":
            await backups.restore(app.session.admin, backups.load(Path(sys.argv[2])), progress=die_later)
        else:
            await backups.create(app.session.admin, "MARS", Path(sys.argv[2]), progress=die_later)

anyio.run(main)
"""


def run_until_killed(config: Path, directory: Path, after_bytes: int, act: str) -> None:
    command = [sys.executable, "-c", KILLED, str(config), str(directory), str(after_bytes), act]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL


@pytest.mark.slow
async def test_what_a_killed_restore_left_is_marked_and_replaced(
    site: Site, original: Original, nats_server: NatsServer, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    run_until_killed(write_config(nats_server.url), original.backup.directory, MANY_BYTES, "restore")
    left = await site.account()
    assert metadata.is_unfinished(left["config"])
    assert (left["config"]["subjects"], left["state"]["messages"] < STORED - 1) == (["MARS"], True), left
    [plan] = [
        plan for plan in await stream_policy.plans(site.app.session.admin, site.app.config) if plan.stream == "MARS"
    ]
    assert isinstance(plan, Plan)
    with pytest.raises(UnavailableError, match="MARS is being restored"):
        await site.app.session.provisioner.carry_out(plan)
    with pytest.raises(BackupError, match="MARS is incomplete, because its restore was interrupted"):
        await backups.create(site.app.session.admin, "MARS", tmp_path)
    await backups.restore(site.app.session.admin, original.backup)
    assert await site.account() == original.account


@pytest.mark.slow
async def test_a_killed_backup_is_no_backup_and_is_swept_away(
    site: Site, nats_server: NatsServer, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    await site.fill(2_000)
    run_until_killed(write_config(nats_server.url), tmp_path, 1, "create")
    assert [path.name.startswith(".unfinished-") for path in (tmp_path / "MARS").iterdir()] == [True]
    assert backups.find(tmp_path) == []
    with Draft(tmp_path / "MARS" / "another's"):
        made = await backups.create(site.app.session.admin, "MARS", tmp_path)
        left = {path.name for path in (tmp_path / "MARS").iterdir()} - {made.directory.name}
        assert len(left) == 1, "what is still being written stays"


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """As if the disk were full after so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_full_disk_is_told_and_nothing_is_left(site: Site, tmp_path: Path) -> None:
    await site.fill(2_000)
    with largest_file(600_000), pytest.raises(BackupError, match=r"cannot write .*MARS.*nothing of it is kept"):
        await backups.create(site.app.session.admin, "MARS", tmp_path)
    assert list((tmp_path / "MARS").iterdir()) == []


@pytest.mark.slow
async def test_a_backup_that_breaks_off_is_told_and_nothing_is_left(
    site: Site, nats_server: NatsServer, tmp_path: Path
) -> None:
    await site.fill(20_000)
    with pytest.raises(UnavailableError, match="snapshot of MARS: the connection was lost"):
        await backups.create(site.app.session.admin, "MARS", tmp_path, progress=lambda size: nats_server.kill())
    assert list((tmp_path / "MARS").iterdir()) == []


@pytest.mark.parametrize(
    "stated",
    [
        {"storage": "memory"},
        {"compression": "s2"},
        {"retention": "workqueue"},
        {"retention": "interest"},
        {"allow_msg_ttl": True, "deny_delete": True},
        {"sealed": True},
    ],
    ids=str,
)
async def test_any_stream_is_backed_up_and_drilled(site: Site, tmp_path: Path, stated: dict[str, Any]) -> None:
    config = {"name": "MARS", "subjects": ["mars.>"], "duplicate_window": 1_000_000_000, **stated, "sealed": False}
    await site.server.api("STREAM.CREATE.MARS", config)
    await site.add_consumer("index", "mars.od.*")
    for step in range(500):
        await site.put(f"mars.od.{step % 5}", os.urandom(step))
        await site.server.request(f"mars.od.{step % 5}", b"without headers")
    if stated.get("sealed"):
        await site.server.api("STREAM.UPDATE.MARS", config | {"sealed": True})
    before = await site.account()
    backup = await backups.create(site.app.session.admin, "MARS", tmp_path)
    assert (await backups.drill(site.app.session.admin, backup)).differences == []
    assert await site.streams() == ["MARS"], "the scratch stream is gone"
    await site.delete()
    await backups.restore(site.app.session.admin, backup)
    assert await site.account() == before


async def test_a_drill_tells_what_is_not_as_it_was(site: Site, tmp_path: Path) -> None:
    config = {"name": "MARS", "subjects": ["mars.>"], "allow_msg_ttl": True}
    await site.server.api("STREAM.CREATE.MARS", config)
    await site.put("mars.1", b"stays")
    await site.put("mars.2", b"goes", ttl="1s")
    backup = await backups.create(site.app.session.admin, "MARS", tmp_path)
    await site.until_messages(1)
    drilled = await backups.drill(site.app.session.admin, backup)
    assert drilled.differences[0] == "messages: 2 in the backup, 1 restored"


@pytest.mark.slow
async def test_a_cluster_takes_it_with_other_replicas_and_gives_it_back(original: Original, tmp_path: Path) -> None:
    loaded = load_server(tmp_path / "dev.yaml", "{port: 0, monitoring: {port: 0}}")
    nodes = processes.start(loaded, directory=tmp_path / "servers", nodes=3, detached=False)
    try:
        config = write_mars_config(tmp_path / "mars.yaml", nodes[0].url)
        async with App("tests", config=config) as app:
            site = Site(app)
            await backups.restore(app.session.admin, original.backup, replicas=3)
            account = await site.account()
            assert (account["config"]["num_replicas"], account["state"]) == (3, original.account["state"])
            assert (await backups.drill(app.session.admin, original.backup)).restored.messages == STORED - 1
            again = await backups.create(app.session.admin, "MARS", tmp_path)
    finally:
        processes.stop(tmp_path / "servers")
    contents, before = backups.verify(again), backups.verify(original.backup)
    assert contents is not None
    assert before is not None
    assert (contents.sha256, set(contents.consumers)) == (before.sha256, set(before.consumers))


@pytest.mark.slow
async def test_cleansed_of_notifications_it_restores_without_them(
    site: Site, copied: Backup, original: Original
) -> None:
    wanted = backups.of_identifier(site.app.config, [copied], {"class": "od", "step": {"gte": 990}})
    plan = backups.plan_cleanse(copied, Forgotten(wanted).takes(copied))
    assert (len(plan.removed), plan.kept) == (
        STORED // 100 - 1,
        STORED * 99 // 100,
    )  # one of them had been deleted
    assert backups.load(copied.directory).record == copied.record, "planning changes nothing"
    cleansed = backups.cleanse(plan)
    assert cleansed.record is not None
    assert (cleansed.record.cleansed is not None, cleansed.made) == (True, copied.made)
    assert [path.name for path in copied.directory.parent.iterdir() if "copied" in path.name] == ["copied"]
    await backups.restore(site.app.session.admin, cleansed)
    after = await site.account()
    assert (after["state"]["messages"], after["state"]["last_seq"]) == (STORED * 99 // 100, STORED)
    for consumer in ("index", "idle"):
        assert after[consumer]["ack_floor"] == original.account[consumer]["ack_floor"], consumer
    found = await site.server.api("STREAM.INFO.MARS", {"subjects_filter": "mars.od.*"})
    assert {f"mars.od.{step}" for step in range(990)} == set(found["state"]["subjects"])


@pytest.mark.parametrize("compression", ["none", "s2"])
async def test_nothing_of_a_cleansed_payload_is_left(site: Site, tmp_path: Path, compression: str) -> None:
    secret = b"Ada Lovelace, Ockham Park"
    config = {"name": "MARS", "subjects": ["mars.>"], "compression": compression}
    await site.server.api("STREAM.CREATE.MARS", config)
    for subject, data in (("mars.ada", secret), ("mars.od", b"x"), ("mars.ada.address", secret * 3)):
        await site.put(subject, data)
    backup = await backups.create(site.app.session.admin, "MARS", tmp_path)
    assert secret in backup.archive.read_bytes()
    cleansed = backups.cleanse(backups.plan_cleanse(backup, backups.of_subject("mars.ada.>")))
    cleansed = backups.cleanse(backups.plan_cleanse(cleansed, backups.of_subject("mars.ada")))
    files = [path for path in (tmp_path / "MARS").rglob("*") if path.is_file()]
    assert sorted(path.name for path in files) == ["backup.json", "stream.arc.s2"]
    assert not any(b"Ada" in path.read_bytes() or b"mars.ada" in path.read_bytes() for path in files)
    await site.delete()
    state = (await backups.restore(site.app.session.admin, cleansed)).state
    assert (state["messages"], state["first_seq"], state["last_seq"]) == (1, 2, 3)
    assert await site.put("mars.od", b"y") == 4


async def test_cleansed_of_everything_it_restores_empty(site: Site, tmp_path: Path) -> None:
    await site.fill(10)
    backup = await backups.create(site.app.session.admin, "MARS", tmp_path)
    cleansed = backups.cleanse(backups.plan_cleanse(backup, backups.of_subject(">")))
    assert backups.verify(cleansed) is not None
    await site.delete()
    assert (await backups.restore(site.app.session.admin, cleansed)).state["messages"] == 0
    assert (await site.app.notify("mars", {"class": "od", "step": 1})).sequence == 11


async def test_what_cannot_be_cleansed_is_told(site: Site, original: Original, copied: Backup) -> None:
    flip_a_bit(copied)
    with pytest.raises(BackupError, match="is damaged"):
        backups.plan_cleanse(copied, backups.of_subject(">"))
    with pytest.raises(InvalidIdentifierError, match="'colour'"):
        backups.of_identifier(site.app.config, [original.backup], {"colour": "red"})


async def test_other_streams_are_not_cleansed_by_identifier(site: Site, tmp_path: Path) -> None:
    await site.server.api("STREAM.CREATE.OTHER", {"name": "OTHER", "subjects": ["other"]})
    backup = await backups.create(site.app.session.admin, "OTHER", tmp_path)
    with pytest.raises(BackupError, match="OTHER: that is the stream of no configured event type: say --event, or --s"):
        backups.of_identifier(site.app.config, [backup], {"class": "od"})


async def test_a_backup_of_a_server_before_2_15(site: Site, tmp_path: Path) -> None:
    old = backups.load(OF_OLD_SERVER)
    assert backups.verify(old) is None
    await backups.restore(site.app.session.admin, old)
    account = await site.account()
    assert {name: account["state"][name] for name in ("messages", "last_seq", "num_deleted")} == {
        "messages": 99,
        "last_seq": 100,
        "num_deleted": 1,
    }
    assert (account["w1"]["ack_floor"]["stream_seq"], account["w1"]["num_ack_pending"]) == (6, 4)
    assert account["config"]["subjects"] == ["mars.>"]
    with pytest.raises(BackupError, match=r"before 2\.15, and cannot be cleansed"):
        backups.plan_cleanse(old, backups.of_subject(">"))
    with pytest.raises(BackupError, match=r"before 2\.15"):
        await backups.drill(site.app.session.admin, old)
    cut = backups.load(Path(shutil.copytree(OF_OLD_SERVER, tmp_path / "cut")))
    os.truncate(cut.archive, cut.size - 10)
    with pytest.raises(BackupError, match="is damaged"):
        await backups.restore(site.app.session.admin, cut)
    changes: list[dict[str, Any]] = [{"name": "COPY"}, {"storage": "memory"}]
    for changed in changes:
        with pytest.raises(BackupError, match="so its name and storage cannot be changed"):
            await backups.restore(site.app.session.admin, old, **changed)


async def test_streams_are_named_by_event_type_or_stream(site: Site) -> None:
    await site.fill(1)
    await site.server.api("STREAM.CREATE.OTHER", {"name": "OTHER"})
    assert await backups.named_streams(site.app.session.admin, site.app.config, ()) == ["MARS", "OTHER"]
    assert await backups.named_streams(site.app.session.admin, site.app.config, ("mars", "OTHER", "MARS")) == [
        "MARS",
        "OTHER",
    ]
    with pytest.raises(NotFoundError, match="no stream NONE; there are: MARS, OTHER"):
        await backups.named_streams(site.app.session.admin, site.app.config, ("NONE",))


async def test_old_backups_go_and_the_newest_stays(site: Site, tmp_path: Path) -> None:
    await site.fill(1)
    made = [await backups.create(site.app.session.admin, "MARS", tmp_path) for _ in range(4)]
    assert backups.find(tmp_path) == made
    assert backups.newest(tmp_path) == backups.newest(tmp_path, stream="MARS") == made[-1].made
    assert backups.newest(tmp_path, stream="OTHER") is None
    assert backups.prune(tmp_path, "MARS", Keep()).removed == ()
    assert backups.prune(tmp_path, "MARS", Keep(newest=3)).removed == made[:1]
    in_a_week = datetime.now(UTC) + timedelta(days=7)
    assert backups.prune(tmp_path, "MARS", Keep(days=8), now=in_a_week).removed == ()
    by_another_program(made[1])
    assert backups.prune(tmp_path, "MARS", Keep(days=6), now=in_a_week).removed == made[2:3]
    assert [found.directory for found in backups.find(tmp_path)] == [made[3].directory, made[1].directory]


async def test_a_damaged_newest_backup_removes_no_whole_one(site: Site, tmp_path: Path) -> None:
    await site.fill(1)
    made = [await backups.create(site.app.session.admin, "MARS", tmp_path) for _ in range(4)]
    flip_a_bit(made[3])
    pruned = backups.prune(tmp_path, "MARS", Keep(newest=1))
    assert pruned.removed == made[:2], "the newest whole one stays"
    assert [found.startswith(f"{made[3].directory} is damaged") for found in pruned.not_counted] == [True]
    assert [found.directory for found in backups.find(tmp_path)] == [made[2].directory, made[3].directory]


async def test_a_backup_of_the_future_stays_and_does_not_count(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await site.fill(1)
    admin = site.app.session.admin
    first = await backups.create(admin, "MARS", tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(creation, "datetime", clock_ahead(timedelta(days=2)))
        of_future = await backups.create(admin, "MARS", tmp_path)
    second = await backups.create(admin, "MARS", tmp_path)
    pruned = backups.prune(tmp_path, "MARS", Keep(newest=1))
    assert (pruned.removed, pruned.not_counted) == (
        [first],
        [f"{of_future.directory} has a time in the future, from a wrong clock"],
    )
    assert backups.find(tmp_path) == [second, of_future]


@pytest.mark.parametrize(("ahead", "how"), [(timedelta(days=30), "ahead of"), (-timedelta(hours=1), "behind")])
async def test_nothing_is_removed_while_this_clock_differs_from_the_servers(
    site: Site, monkeypatch: pytest.MonkeyPatch, ahead: timedelta, how: str
) -> None:
    await site.fill(1)
    await schedules.require_same_clock(site.app.session.admin, "MARS")
    monkeypatch.setattr(schedules, "datetime", clock_ahead(ahead))
    with pytest.raises(BackupError, match=f"no backup of MARS is removed: this machine's clock is .* s {how} the"):
        await schedules.require_same_clock(site.app.session.admin, "MARS")


def clock_ahead(ahead: timedelta) -> SimpleNamespace:
    return SimpleNamespace(now=lambda zone: datetime.now(zone) + ahead)


async def test_only_the_owner_can_read_a_backup(site: Site, tmp_path: Path) -> None:
    await site.fill(1)
    before = os.umask(0)
    try:
        backup = await backups.create(site.app.session.admin, "MARS", tmp_path / "kept" / "here")
        cleansed = backups.cleanse(backups.plan_cleanse(backup, backups.of_subject(">")))
    finally:
        os.umask(before)
    found = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "kept", *(tmp_path / "kept").rglob("*"))}
    assert cleansed.archive in found
    assert {oct(mode) for path, mode in found.items() if path.is_dir()} == {"0o700"}
    assert {oct(mode) for path, mode in found.items() if path.is_file()} == {"0o600"}


@pytest.mark.parametrize("name", ["two words", "a.b", "a*", "a/b", "x" * 256, "a\n"])
async def test_a_name_that_no_stream_can_have_is_refused_first(site: Site, original: Original, name: str) -> None:
    with pytest.raises(BackupError, match="is not a name of a stream"):
        await backups.restore(site.app.session.admin, original.backup, name=name)
    assert await site.streams() == []


@pytest.mark.parametrize(
    ("denied", "act"),
    [
        ("$JS.API.STREAM.SNAPSHOT.MARS", "create"),
        ("$JS.SNAPSHOT.ACK.>", "create"),
        ("$JS.SNAPSHOT.RESTORE.>", "restore"),
    ],
)
async def test_a_missing_permission_names_the_subject(
    tmp_path: Path, write_config: Callable[..., Path], original: Original, denied: str, act: str
) -> None:
    users = f"""
        authorization {{ users = [
            {{user: all, password: x}},
            {{user: some, password: x, permissions: {{publish: {{deny: ["{denied}"]}}}}}},
        ]}}
    """
    with NatsServer.start(store_dir=tmp_path / "jetstream", config=users) as server:
        all_allowed = write_config(server.url, name="all.yaml", user="all", password="x")
        if act == "create":
            async with App("all", config=all_allowed) as app:
                await backups.restore(app.session.admin, original.backup)
        async with App("some", config=write_config(server.url, user="some", password="x")) as app:
            doing = (
                backups.create(app.session.admin, "MARS", tmp_path)
                if act == "create"
                else backups.restore(app.session.admin, original.backup)
            )
            with pytest.raises(RefusedError, match=re.escape(denied.rstrip(">").lower())) as refused:
                await doing
            assert "permissions violation" in str(refused.value)
        server.kill()  # it would wait for the rest of the archive
