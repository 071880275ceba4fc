"""A mirror beside an origin that was recreated: equal numbers, other messages."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest

from aviso_workers import App
from aviso_workers.backends import Administration, Message
from aviso_workers.errors import RefusedError, UnavailableError
from aviso_workers.ops import backups, mirrors, promotion
from aviso_workers.ops.mirrors import Link, Mirrors
from aviso_workers.server import NatsServer
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio


class Pair:
    """The stream MARS and its mirror COPY, in one account."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.mirrors = Mirrors(app.session.admin)

    @property
    def server(self) -> Administration:
        return self.app.session.admin.administration()

    async def make_origin(self, messages: int, **config: Any) -> None:
        await self.server.api("STREAM.CREATE.MARS", {"name": "MARS", "subjects": ["mars.>"], **config})
        await self.publish(messages)

    async def make_origin_again(self, messages: int, **config: Any) -> None:
        await self.server.api("STREAM.DELETE.MARS")
        await self.make_origin(messages, **config)

    async def make_mirror(self, **config: Any) -> None:
        await self.server.api("STREAM.CREATE.COPY", {"name": "COPY", "mirror": {"name": "MARS"}, **config})

    async def publish(self, messages: int) -> None:
        headers = {"Nats-Expected-Stream": "MARS", "note": "x"}
        for step in range(messages):
            message = Message(subject=f"mars.od.{step}", data=b"{}", headers=headers)
            await self.app.session.backend.publish(message, message_id="", stream="MARS", timeout_seconds=5)

    async def state(self, stream: str) -> dict[str, Any]:
        state: dict[str, Any] = (await self.server.api(f"STREAM.INFO.{stream}"))["state"]
        return state

    async def caught_up(self, last: int) -> None:
        with anyio.fail_after(PATIENCE_SECONDS):
            while (await self.state("COPY"))["last_seq"] < last:  # noqa: ASYNC110
                await anyio.sleep(0.02)

    async def link(self) -> Link:
        [link] = await self.mirrors.links()
        return link

    async def takes_publishes(self) -> bool:
        config = (await self.server.api("STREAM.INFO.MARS"))["config"]
        return bool(config["subjects"] == ["mars.>"])


@pytest.fixture
async def pair(nats_server: NatsServer, write_config: Callable[..., Path]) -> AsyncGenerator[Pair, None]:
    async with App("tests", config=write_config(nats_server.url)) as app:
        yield Pair(app)


async def test_a_mirror_is_of_the_history_of_its_origin(pair: Pair) -> None:
    await pair.make_origin(30)
    await pair.make_mirror()
    await pair.caught_up(30)
    await pair.server.api("STREAM.MSG.DELETE.MARS", {"seq": 1})
    await pair.server.api("STREAM.MSG.DELETE.COPY", {"seq": 15})
    assert (await pair.link()).trouble == ""
    await pair.server.api("STREAM.PURGE.MARS")
    assert (await pair.link()).trouble == ""
    assert (await promotion.promote(pair.app.session.admin, "COPY")).gap == 0


@pytest.mark.parametrize("messages", [40, 10, 0])
async def test_an_origin_that_was_made_again_is_another_history(pair: Pair, messages: int) -> None:
    await pair.make_origin(40)
    await pair.make_mirror()
    await pair.caught_up(40)
    await pair.make_origin_again(messages)
    assert "recreated" in (await pair.link()).trouble
    with pytest.raises(RefusedError, match=r"recreated.* --origin-was-recreated"):
        await promotion.promote(pair.app.session.admin, "COPY")
    assert await pair.takes_publishes()


async def test_an_origin_without_its_newest_messages_is_found_in_between(pair: Pair, tmp_path: Path) -> None:
    """A backup lacked messages 41 to 45 of 200, which the mirror has, and the origin has other ones there."""
    await pair.make_origin(40)
    await pair.make_mirror()
    backup = await backups.create(pair.app.session.admin, "MARS", tmp_path)
    await pair.publish(5)
    await pair.caught_up(45)
    await pair.server.api("STREAM.DELETE.MARS")
    await backups.restore(pair.app.session.admin, backup)
    await pair.publish(160)
    assert "its message 4" in (await pair.link()).trouble


async def test_an_origin_that_was_restored_whole_is_the_same_history(pair: Pair, tmp_path: Path) -> None:
    await pair.make_origin(40)
    await pair.make_mirror()
    await pair.caught_up(40)
    backup = await backups.create(pair.app.session.admin, "MARS", tmp_path)
    await pair.server.api("STREAM.DELETE.MARS")
    await backups.restore(pair.app.session.admin, backup)
    await pair.publish(1)
    assert (await pair.link()).trouble == ""


async def test_an_origin_without_a_common_message_is_judged_by_its_creation(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirrors, "CLOCKS", timedelta(0))
    await pair.make_origin(10)
    await pair.make_mirror()
    await pair.caught_up(10)
    await pair.make_origin_again(12)
    await pair.server.api("STREAM.PURGE.MARS")
    assert "has older messages" in (await pair.link()).trouble


async def test_a_mirror_that_was_emptied_lacks_what_a_new_origin_holds(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirrors, "CLOCKS", timedelta(0))
    await pair.make_origin(10)
    await pair.make_mirror()
    await pair.caught_up(10)
    await pair.server.api("STREAM.PURGE.COPY")
    await pair.make_origin_again(10)
    assert "holds messages before 11, the first one of the mirror" in (await pair.link()).trouble


async def test_a_mirror_that_keeps_less_than_its_origin_is_well(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirrors, "CLOCKS", timedelta(0))
    await pair.make_origin(10)
    await pair.make_mirror(max_msgs=4)
    await pair.caught_up(10)
    assert (await pair.link()).trouble == ""


async def test_a_mirror_of_an_origin_that_was_deleted_says_so(pair: Pair) -> None:
    await pair.make_origin(10)
    await pair.make_mirror()
    await pair.caught_up(10)
    await pair.server.api("STREAM.DELETE.MARS")
    assert (await pair.link()).trouble == "MARS does not exist any more"
    with pytest.raises(RefusedError, match=r"MARS, the origin of COPY, cannot be fenced"):
        await promotion.promote(pair.app.session.admin, "COPY")


async def test_a_mirror_of_an_origin_that_was_made_again_is_promoted_where_that_is_said(pair: Pair) -> None:
    await pair.make_origin(40)
    await pair.make_mirror()
    await pair.caught_up(40)
    await pair.make_origin_again(40)
    promoted = await promotion.promote(pair.app.session.admin, "COPY", origin_was_recreated=True)
    assert (promoted.gap, promoted.last_sequence, promoted.proven) == (None, 40, False)
    assert not await pair.takes_publishes()


async def test_a_fence_of_before_stays_where_a_promotion_is_refused(pair: Pair) -> None:
    await pair.make_origin(10)
    await pair.make_mirror(max_msgs=5, discard="new")
    await pair.caught_up(5)
    await mirrors.fence(pair.app.session.admin, "MARS")
    with pytest.raises(RefusedError, match="did not catch up with MARS"):
        await promotion.promote(pair.app.session.admin, "COPY", patience_seconds=0.1)
    assert not await pair.takes_publishes()


async def test_a_promotion_needs_its_fence_until_its_end(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another promotion that runs side by side takes the fence down when it gives up."""
    await pair.make_origin(5)
    await pair.make_mirror()
    await pair.caught_up(5)
    carry = mirrors.carry_consumers

    async def give_up_beside(*places: Any) -> list[mirrors.Carried]:
        await mirrors.unfence(pair.app.session.admin, "MARS")
        return await carry(*places)

    with monkeypatch.context() as patched:
        patched.setattr(mirrors, "carry_consumers", give_up_beside)
        with pytest.raises(RefusedError, match="MARS takes publishes again"):
            await promotion.promote(pair.app.session.admin, "COPY")
    assert (await pair.link()).relation == "mirror"
    assert (await promotion.promote(pair.app.session.admin, "COPY")).proven


async def test_a_promotion_that_gives_up_leaves_the_fence_to_one_that_was_done(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pair.make_origin(5)
    await pair.make_mirror()
    await pair.caught_up(5)

    async def be_late(*places: Any) -> list[mirrors.Carried]:
        monkeypatch.undo()
        await promotion.promote(pair.app.session.admin, "COPY", subjects=("copy.>",))
        raise UnavailableError("no answer in time")

    monkeypatch.setattr(mirrors, "carry_consumers", be_late)
    with pytest.raises(UnavailableError):
        await promotion.promote(pair.app.session.admin, "COPY")
    assert not await pair.takes_publishes()


async def test_a_fence_that_cannot_be_taken_down_is_told(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    await pair.make_origin(5)
    await pair.make_mirror()
    await pair.caught_up(5)

    async def fail(*places: Any, **options: Any) -> None:
        raise UnavailableError("no answer in time")

    monkeypatch.setattr(mirrors, "carry_consumers", fail)
    monkeypatch.setattr(mirrors, "unfence", fail)
    with pytest.raises(UnavailableError, match="nothing was promoted, and MARS may be fenced still"):
        await promotion.promote(pair.app.session.admin, "COPY")


async def test_an_origin_that_follows_or_has_its_place_again_is_no_trouble(pair: Pair) -> None:
    """As on the way back: told to fence it, an operator would stop all publishing."""
    await pair.make_origin(5)
    await pair.make_mirror()
    await pair.caught_up(5)
    await promotion.promote(pair.app.session.admin, "COPY", subjects=("copy.>",))
    await pair.server.api("STREAM.DELETE.MARS")
    await pair.server.api("STREAM.CREATE.MARS", {"name": "MARS", "mirror": {"name": "COPY"}})
    with anyio.fail_after(PATIENCE_SECONDS):
        while any(link.trouble for link in await pair.mirrors.links()):  # noqa: ASYNC110
            await anyio.sleep(0.02)
    await promotion.promote(pair.app.session.admin, "MARS", subjects=("mars.>",))
    assert [(link.stream, link.trouble) for link in await pair.mirrors.links()] == [("MARS", "")]


async def test_an_origin_whose_newest_messages_were_deleted_has_nothing_more_to_come(pair: Pair) -> None:
    """The mirror never learns of their sequences, and gives them to what it takes next: agents must be given that."""
    await pair.make_origin(10)
    request = {"stream_name": "MARS", "config": {"durable_name": "reader", "ack_policy": "none"}}
    await pair.server.api("CONSUMER.DURABLE.CREATE.MARS.reader", request)
    inbox = pair.server.new_inbox()
    async with pair.server.listen(inbox) as heard:
        pair.server.send("$JS.API.CONSUMER.MSG.NEXT.MARS.reader", b"10", reply=inbox)
        for _ in range(10):
            await heard.receive()
    for sequence in (9, 10):
        await pair.server.api("STREAM.MSG.DELETE.MARS", {"seq": sequence})
    await pair.make_mirror()
    await pair.caught_up(8)
    promoted = await promotion.promote(pair.app.session.admin, "COPY", subjects=("copy.>",), patience_seconds=1)
    assert (promoted.gap, promoted.last_sequence) == (0, 8)
    assert [each.next_sequence for each in promoted.consumers or ()] == [9]
    await pair.server.request("copy.1", b"{}")
    assert (await pair.server.api("CONSUMER.INFO.COPY.reader"))["num_pending"] == 1
