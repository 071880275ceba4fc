"""A copy that is completed while its original is published to, and takes its place when that is fenced."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from aviso_workers import App
from aviso_workers.backends import Administration, Message, Outgoing
from aviso_workers.errors import BackupError, UnavailableError
from aviso_workers.jetstream.metadata import UNFINISHED
from aviso_workers.ops import backups, mirrors, stream_copies
from aviso_workers.ops.backups import restoration
from aviso_workers.ops.stream_copies import Copied, Followed
from aviso_workers.server import NatsServer
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio


class Move:
    """The stream MARS on one server, and another server that it moves to."""

    def __init__(self, source: App, target: App) -> None:
        self.source = source
        self.target = target
        self.caught_up = anyio.Event()

    @property
    def here(self) -> Administration:
        return self.source.session.admin.administration()

    @property
    def there(self) -> Administration:
        return self.target.session.admin.administration()

    async def make(self, messages: int = 5, **config: Any) -> None:
        await self.here.api("STREAM.CREATE.MARS", {"name": "MARS", "subjects": ["mars.>"], **config})
        await self.publish(messages)

    async def publish(self, messages: int, *, app: App | None = None, key: str = "", message_id: str = "") -> None:
        backend = (app or self.source).session.backend
        for step in range(messages):
            message = Message(subject=f"mars.od.{key or step}", data=b"%d" % step, headers={"note": "x"})
            await backend.publish(message, message_id=message_id, stream="MARS", timeout_seconds=PATIENCE_SECONDS)

    async def copy(self) -> Copied:
        return await stream_copies.copy(
            self.source.session.admin,
            self.target.session.admin,
            "MARS",
            keep_fenced=True,
            progress=lambda size: None,
        )

    async def follow(self) -> Followed:
        with anyio.fail_after(PATIENCE_SECONDS):
            return await stream_copies.follow(
                self.source.session.admin, self.target.session.admin, "MARS", on_progress=self._on_progress
            )

    async def fence(self) -> None:
        await mirrors.fence(self.source.session.admin, "MARS")

    async def contents(self, app: App) -> list[tuple[int, str, bytes]]:
        backend = app.session.backend
        last = (await backend.stream_info("MARS")).last_sequence
        reading = backend.read("MARS", filter_subjects=(), last_sequence=last)
        return [(message.sequence, message.subject, message.data) async for message in reading]

    async def is_the_same(self) -> bool:
        states = [await server.api("STREAM.INFO.MARS") for server in (self.here, self.there)]
        lasts = {state["state"]["last_seq"] for state in states}
        return len(lasts) == 1 and await self.contents(self.source) == await self.contents(self.target)

    def _on_progress(self, appended: int, last: int) -> None:
        self.caught_up.set()


@pytest.fixture
async def move(
    nats_server: NatsServer, tmp_path: Path, write_config: Callable[..., Path]
) -> AsyncGenerator[Move, None]:
    with NatsServer.start(store_dir=tmp_path / "target") as target:
        async with (
            App("tests", config=write_config(nats_server.url)) as here,
            App("tests", config=write_config(target.url, name="target.yaml")) as there,
        ):
            yield Move(here, there)


async def test_a_copy_follows_its_original_until_that_is_fenced(move: Move) -> None:
    await move.make(5)
    copied = await move.copy()
    assert (copied.whole, copied.subjects) == (True, ())
    await move.publish(3)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(move.follow)
        await move.caught_up.wait()
        with pytest.raises(UnavailableError):  # until then it takes none of what is published
            await move.there.request("mars.od.1", b"{}")
        await move.publish(2)
        await move.fence()
    assert await move.is_the_same()
    await move.publish(1, app=move.target)
    assert (await move.target.session.backend.stream_info("MARS")).last_sequence == 11
    with pytest.raises(UnavailableError):
        await move.here.request("mars.od.1", b"{}")


async def test_sequences_that_the_original_does_not_have_are_holes_in_the_copy(move: Move) -> None:
    await move.make(5)
    await move.copy()
    await move.publish(6)
    for sequence in (2, 7, 8, 11):
        await move.here.api("STREAM.MSG.DELETE.MARS", {"seq": sequence})
    await move.fence()
    followed = await move.follow()
    assert (followed.messages, followed.appended, followed.deleted, followed.last_sequence) == (7, 3, 1, 11)
    assert await move.is_the_same()
    assert [sequence for sequence, _, _ in await move.contents(move.target)] == [1, 3, 4, 5, 6, 9, 10]


async def test_a_copy_of_which_nothing_is_left_goes_on_far_behind(move: Move) -> None:
    await move.make(5)
    await move.copy()
    await move.publish(20)
    await move.here.api("STREAM.PURGE.MARS", {"seq": 20})
    await move.fence()
    assert (await move.follow()).appended == 6
    assert await move.is_the_same()


async def test_one_message_per_subject_stays_one(move: Move) -> None:
    await move.make(5, max_msgs_per_subject=1, allow_direct=True, deny_delete=True, max_msgs=100, discard="new")
    await move.copy()
    await move.publish(3)
    await move.publish(4, key="same")
    await move.fence()
    followed = await move.follow()
    assert await move.is_the_same()
    assert (followed.messages, followed.last_sequence) == (6, 12)
    ours, theirs = [(await server.api("STREAM.INFO.MARS"))["config"] for server in (move.here, move.there)]
    assert theirs == {**ours, "subjects": ["mars.>"], "metadata": theirs["metadata"]}
    assert not [key for key in theirs["metadata"] if key.startswith("aviso-workers")]


async def test_messages_of_one_id_are_all_appended(move: Move) -> None:
    """The original had forgotten the id when it came again, after its duplicate window."""
    await move.make(1, duplicate_window=100_000_000)
    await move.copy()
    await move.publish(1, message_id="same")
    await move.here.api(
        "STREAM.UPDATE.MARS",
        {**(await move.source.session.admin.stream_info("MARS")).config, "duplicate_window": 120 * 10**9},
    )
    await anyio.sleep(0.3)
    await move.publish(2, message_id="same")
    await move.publish(1)
    copied = (await move.target.session.admin.stream_info("MARS")).config
    await move.there.api("STREAM.UPDATE.MARS", {**copied, "duplicate_window": 120 * 10**9})
    await move.fence()
    await move.follow()
    assert await move.is_the_same()


async def test_what_was_published_together_is_appended(move: Move) -> None:
    """A server keeps the headers of an atomic batch, and a copy that is not whole takes none."""
    await move.make(5, allow_atomic=True)
    await move.copy()
    together = [Outgoing(Message(subject=f"mars.rd.{step}", data=b"{}"), "", "MARS") for step in range(3)]
    await move.source.session.backend.publish_together(together, timeout_seconds=PATIENCE_SECONDS)
    await move.fence()
    assert (await move.follow()).appended == 3
    assert await move.is_the_same()


async def test_an_original_that_is_made_again_while_it_is_followed_changes_nothing(
    move: Move, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has sequences behind those of the copy and none before, and what the copy has is nowhere else."""
    await move.make(5)
    await move.copy()
    opened = stream_copies._FollowingCopy.open

    async def make_again(self: Any) -> None:
        await opened(self)
        await move.here.api("STREAM.DELETE.MARS")
        await move.make(10)
        await move.here.api("STREAM.PURGE.MARS", {"seq": 8})
        await move.fence()

    monkeypatch.setattr(stream_copies._FollowingCopy, "open", make_again)
    with pytest.raises(BackupError, match="MARS was deleted and recreated at"):
        await move.follow()
    assert [sequence for sequence, _, _ in await move.contents(move.target)] == [1, 2, 3, 4, 5]


async def test_two_that_follow_side_by_side_disturb_nothing(move: Move, monkeypatch: pytest.MonkeyPatch) -> None:
    await move.make(5)
    await move.copy()
    await move.publish(3)
    await move.here.api("STREAM.MSG.DELETE.MARS", {"seq": 2})
    late = stream_copies._FollowingCopy(move.source.session.admin, move.target.session.admin, "MARS")
    await late.open()
    await move.fence()
    compare = stream_copies._FollowingCopy._compare

    async def compare_late(self: Any, last: int) -> tuple[int, int]:
        compared = await compare(self, last)
        monkeypatch.undo()
        assert (await move.follow()).messages == 7
        return compared

    monkeypatch.setattr(stream_copies._FollowingCopy, "_compare", compare_late)
    with pytest.raises(BackupError, match="has taken its place already, by another command"):
        await move.follow()
    with pytest.raises(BackupError, match="has taken its place already, by another command"):
        await late.open()
    await move.publish(1, app=move.target)


async def test_a_copy_that_another_command_has_brought_further_is_no_other_stream(move: Move) -> None:
    await move.make(5)
    await move.copy()
    await move.publish(3)
    late, other = [
        stream_copies._FollowingCopy(move.source.session.admin, move.target.session.admin, "MARS") for _ in range(2)
    ]
    await late.open()
    await other.open()
    await other.catch_up(8)
    assert not await late.catch_up(6)


async def test_one_that_was_ended_is_carried_on(move: Move, monkeypatch: pytest.MonkeyPatch) -> None:
    await move.make(5)
    await move.copy()
    await move.publish(700)
    publish_many = move.target.session.backend.publish_many

    async def publish_and_end(*arguments: Any, **options: Any) -> Any:
        await publish_many(*arguments, **options)
        ended.cancel()
        await anyio.sleep_forever()

    with monkeypatch.context() as patched, anyio.CancelScope() as ended:
        patched.setattr(move.target.session.admin, "publish_many", publish_and_end)
        await move.follow()
    assert (await move.target.session.backend.stream_info("MARS")).last_sequence == 505
    await move.fence()
    assert await stream_copies.is_begun(move.source.session.admin, move.target.session.admin, "MARS")
    followed = await move.follow()
    assert (followed.messages, followed.last_sequence, followed.appended) == (705, 705, 200)
    assert await move.is_the_same()


async def test_a_copy_of_which_only_part_was_restored_is_made_anew(move: Move, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process leaves it that was killed while it restored."""
    monkeypatch.setattr(restoration, "STANDSTILL_SECONDS", 0.0)
    await move.make(5)
    await move.copy()
    config = (await move.target.session.admin.stream_info("MARS")).config
    metadata = {**config["metadata"], UNFINISHED: "true"}
    await move.there.api("STREAM.UPDATE.MARS", {**config, "subjects": ["MARS"], "metadata": metadata})
    await move.there.request("MARS", b"not as the original has it")
    assert not await stream_copies.is_begun(move.source.session.admin, move.target.session.admin, "MARS")
    await move.copy()
    await move.fence()
    assert (await move.follow()).messages == 5
    assert await move.is_the_same()


async def test_a_copy_that_is_not_whole_is_not_made_beside_itself(move: Move) -> None:
    await move.make(5)
    await move.copy()
    with pytest.raises(BackupError, match="MARS on the target is an unfinished copy: continue it with --follow"):
        await move.copy()


async def test_consumers_of_the_copy_go_on_where_those_of_the_original_have_come_to(move: Move) -> None:
    await move.make(5)
    for name in ("moved", "stayed"):
        request = {"stream_name": "MARS", "config": {"durable_name": name, "ack_policy": "none"}}
        await move.here.api(f"CONSUMER.DURABLE.CREATE.MARS.{name}", request)
    await move.copy()
    await move.publish(1)
    inbox = move.here.new_inbox()
    async with move.here.listen(inbox) as heard:
        move.here.send("$JS.API.CONSUMER.MSG.NEXT.MARS.moved", b"2", reply=inbox)
        for _ in range(2):
            await heard.receive()
    await move.fence()
    assert (await move.follow()).consumers == 2
    floors = {
        name: (await move.there.api(f"CONSUMER.INFO.MARS.{name}"))["ack_floor"]["stream_seq"]
        for name in ("moved", "stayed")
    }
    assert floors == {"moved": 2, "stayed": 0}


async def test_a_copy_that_was_changed_is_never_called_whole(move: Move) -> None:
    await move.make(5)
    await move.copy()
    await move.there.request("aviso_workers.fenced.MARS", b"from somebody else")
    await move.publish(2)
    await move.fence()
    with pytest.raises(BackupError, match="message 6 is not in the copy as it is in the original"):
        await move.follow()
    assert stream_copies.is_fenced((await move.target.session.admin.stream_info("MARS")).config)


async def test_a_copy_of_another_stream_is_not_carried_on(move: Move) -> None:
    await move.make(5)
    await move.copy()
    await move.here.api("STREAM.DELETE.MARS")
    await move.make(7)
    with pytest.raises(BackupError, match="delete that copy to begin again"):
        await stream_copies.is_begun(move.source.session.admin, move.target.session.admin, "MARS")


@pytest.mark.parametrize("config", [{"retention": "interest"}, {"allow_msg_schedules": True}])
async def test_what_cannot_be_appended_is_refused(move: Move, config: dict[str, Any]) -> None:
    await move.make(0, **config)
    await move.copy()
    with pytest.raises(BackupError, match="fence it, and copy it as a whole"):
        await move.follow()


async def test_a_stream_that_moves_on_while_it_is_copied(move: Move, monkeypatch: pytest.MonkeyPatch) -> None:
    create = partial(_publishing_behind, move, backups.create)
    monkeypatch.setattr(backups, "create", create)
    await move.make(5)
    copied = await stream_copies.copy(
        move.source.session.admin, move.target.session.admin, "MARS", progress=lambda size: None
    )
    assert (copied.meanwhile, copied.whole, copied.subjects) == (2, False, ())
    await move.fence()
    assert await stream_copies.is_begun(move.source.session.admin, move.target.session.admin, "MARS")
    assert (await move.follow()).appended == 2
    assert await move.is_the_same()


async def _publishing_behind(move: Move, create: Any, *arguments: Any, **options: Any) -> Any:
    backup = await create(*arguments, **options)
    await move.publish(2)
    return backup
