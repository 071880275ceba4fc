"""What only the origin of a promoted mirror has, listed and published to the mirror."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from aviso_workers import App
from aviso_workers.backends import Message, Outgoing
from aviso_workers.errors import RefusedError
from aviso_workers.ops import mirrors, promotion, recovery
from aviso_workers.ops.recovery import Recovered
from aviso_workers.server import NatsServer
from tests.cli.conftest import Ran, run  # noqa: F401
from tests.ops.test_mirror_histories import Pair

pytestmark = pytest.mark.anyio


@pytest.fixture
async def pair(nats_server: NatsServer, write_config: Callable[..., Path]) -> AsyncGenerator[Pair, None]:
    async with App("tests", config=write_config(nats_server.url)) as app:
        yield Pair(app)


async def promoted_without_the_newest(pair: Pair, **config: Any) -> None:
    """COPY takes the subjects below `copy`, and MARS has stored three more messages in the meantime."""
    await pair.make_origin(5, **config)
    await pair.make_mirror(**config)
    await pair.caught_up(5)
    await promotion.promote(pair.app.session.admin, "COPY", subjects=("copy.>",))
    await mirrors.unfence(pair.app.session.admin, "MARS")
    await pair.publish(3)
    await mirrors.fence(pair.app.session.admin, "MARS")


async def take_the_same_subjects(pair: Pair) -> None:
    config = (await pair.server.api("STREAM.INFO.COPY"))["config"]
    await pair.server.api("STREAM.UPDATE.COPY", {**config, "subjects": ["mars.>"]})


async def missing(pair: Pair) -> list[int]:
    async with recovery.opened(pair.app.session.admin, pair.app.config, "COPY") as found:
        return [message.sequence async for message in found.only_there()]


async def publish(pair: Pair) -> Recovered:
    async with recovery.opened(pair.app.session.admin, pair.app.config, "COPY") as found:
        return await found.publish()


async def contents(pair: Pair) -> list[str]:
    backend = pair.app.session.backend
    last = (await backend.stream_info("COPY")).last_sequence
    return [message.subject async for message in backend.read("COPY", filter_subjects=(), last_sequence=last)]


async def test_what_came_after_the_promotion_is_only_there(pair: Pair) -> None:
    await promoted_without_the_newest(pair)
    await take_the_same_subjects(pair)
    await pair.server.request("mars.rd.1", b"{}")  # has the sequence of one of these
    await pair.server.api("STREAM.MSG.DELETE.COPY", {"seq": 2})
    assert await missing(pair) == [6, 7, 8]
    recovered = await publish(pair)
    assert recovered == Recovered(published=3, present=0, superseded=0, undecided=1)
    assert (await contents(pair))[4:] == ["mars.rd.1", "mars.od.0", "mars.od.1", "mars.od.2"]


async def test_what_is_published_is_never_published_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it was killed in between, and the duplicate window is over."""
    await promoted_without_the_newest(pair)
    await take_the_same_subjects(pair)
    config = (await pair.server.api("STREAM.INFO.COPY"))["config"]
    await pair.server.api("STREAM.UPDATE.COPY", {**config, "duplicate_window": 100_000_000})
    monkeypatch.setattr(recovery, "BATCH", 1)
    publish_many = pair.app.session.backend.publish_many

    async def publish_and_end(*arguments: Any, **options: Any) -> Any:
        await publish_many(*arguments, **options)
        ended.cancel()
        await anyio.sleep_forever()

    with monkeypatch.context() as patched, anyio.CancelScope() as ended:
        patched.setattr(pair.app.session.admin, "publish_many", publish_and_end)
        await publish(pair)
    await anyio.sleep(0.15)
    assert await publish(pair) == Recovered(published=2, present=1, superseded=0, undecided=0)
    assert await publish(pair) == Recovered(published=0, present=3, superseded=0, undecided=0)
    assert (await contents(pair))[5:] == ["mars.od.0", "mars.od.1", "mars.od.2"]


async def test_what_its_publisher_has_repeated_is_there(pair: Pair) -> None:
    """It did not know whether it was stored, and published again under the same id when the mirror was promoted."""
    await promoted_without_the_newest(pair)
    await mirrors.unfence(pair.app.session.admin, "MARS")
    message = Message(subject="mars.od.9", data=b"{}")
    backend = pair.app.session.backend
    await backend.publish(message, message_id="unknown", stream="MARS", timeout_seconds=5)
    await mirrors.fence(pair.app.session.admin, "MARS")
    await take_the_same_subjects(pair)
    await backend.publish(message, message_id="unknown", stream="COPY", timeout_seconds=5)
    assert await publish(pair) == Recovered(published=3, present=1, superseded=0, undecided=0)


async def test_messages_that_share_an_id_are_all_published(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The origin had forgotten the id when it came again, after its duplicate window."""
    await promoted_without_the_newest(pair)
    await mirrors.unfence(pair.app.session.admin, "MARS")
    config = (await pair.server.api("STREAM.INFO.MARS"))["config"]
    await pair.server.api("STREAM.UPDATE.MARS", {**config, "duplicate_window": 100_000_000})
    for data in (b"1", b"2", b"3"):
        message = Message(subject="mars.od.9", data=data)
        await pair.app.session.backend.publish(message, message_id="same", stream="MARS", timeout_seconds=5)
        await anyio.sleep(0.3)
    await mirrors.fence(pair.app.session.admin, "MARS")
    await take_the_same_subjects(pair)
    monkeypatch.setattr(recovery, "BATCH", 4)
    with monkeypatch.context() as patched:
        patched.setattr(recovery._RecoveryPublisher, "flush", _flush_once(recovery._RecoveryPublisher.flush))
        with pytest.raises(RefusedError):  # ended after the first of the three
            await publish(pair)
    assert await publish(pair) == Recovered(published=2, present=4, superseded=0, undecided=0)
    assert await publish(pair) == Recovered(published=0, present=6, superseded=0, undecided=0)
    backend = pair.app.session.backend
    stored = [each.data async for each in backend.read("COPY", filter_subjects=(), last_sequence=11)]
    assert stored[8:] == [b"1", b"2", b"3"]


def _flush_once(flush: Callable[[Any], Any]) -> Callable[[Any], Any]:
    async def flush_and_end(publishing: Any) -> None:
        await flush(publishing)
        raise RefusedError("ended")

    return flush_and_end


@pytest.mark.parametrize("atomic", [True, False])
async def test_what_was_published_together_is_published_one_by_one(pair: Pair, *, atomic: bool) -> None:
    """A server keeps the headers of an atomic batch, by which it would wait for the rest of it."""
    await promoted_without_the_newest(pair)
    config = (await pair.server.api("STREAM.INFO.MARS"))["config"]
    await pair.server.api("STREAM.UPDATE.MARS", {**config, "allow_atomic": True})
    await mirrors.unfence(pair.app.session.admin, "MARS")
    together = [Outgoing(Message(subject=f"mars.rd.{step}", data=b"{}"), "", "MARS") for step in range(3)]
    await pair.app.session.backend.publish_together(together, timeout_seconds=5)
    await mirrors.fence(pair.app.session.admin, "MARS")
    await take_the_same_subjects(pair)
    config = (await pair.server.api("STREAM.INFO.COPY"))["config"]
    await pair.server.api("STREAM.UPDATE.COPY", {**config, "allow_atomic": atomic})
    with anyio.fail_after(10):
        assert await publish(pair) == Recovered(published=6, present=0, superseded=0, undecided=0)


async def test_nothing_takes_the_place_of_a_newer_one_of_its_subject(pair: Pair) -> None:
    await promoted_without_the_newest(pair, max_msgs_per_subject=1)
    await take_the_same_subjects(pair)
    await pair.server.request("mars.od.1", b'"newer"')
    assert await publish(pair) == Recovered(published=2, present=0, superseded=1, undecided=0)
    found = await pair.app.session.backend.message("COPY", last_by_subject="mars.od.1")
    assert found is not None
    assert found.data == b'"newer"'
    again = await publish(pair)
    assert (again.published, again.present, again.superseded) == (0, 2, 1)


async def test_what_an_origin_stored_that_was_made_again_is_only_there(pair: Pair) -> None:
    await pair.make_origin(40)
    await pair.make_mirror()
    await pair.caught_up(40)
    await pair.make_origin_again(40)
    await promotion.promote(pair.app.session.admin, "COPY", origin_was_recreated=True)
    assert await missing(pair) == list(range(1, 41))
    assert (await publish(pair)).published == 40
    assert await missing(pair) == list(range(1, 41))
    assert (await publish(pair)).present == 40


async def test_an_origin_that_takes_publishes_has_to_be_fenced_before(pair: Pair) -> None:
    await promoted_without_the_newest(pair)
    await mirrors.unfence(pair.app.session.admin, "MARS")
    with pytest.raises(RefusedError, match=r"Fence it first: `aviso-workers mirror fence MARS"):
        await missing(pair)
    with pytest.raises(RefusedError, match="MARS is not a promoted mirror"):
        async with recovery.opened(pair.app.session.admin, pair.app.config, "MARS"):
            pass


def test_it_is_listed_before_it_is_published(
    run: Callable[..., Ran],  # noqa: F811
    nats_server: NatsServer,
    write_config: Callable[..., Path],
) -> None:
    config = write_config(nats_server.url)

    async def prepare() -> None:
        async with App("tests", config=config) as app:
            pair = Pair(app)
            await promoted_without_the_newest(pair)
            await take_the_same_subjects(pair)

    anyio.run(prepare)
    listed = run("mirror", "recover", "COPY", "-c", config)
    assert (listed.code, listed.lines[-1]) == (2, "only the origin of COPY has 3 messages")
    assert listed.lines[0].startswith("6 20")
    assert listed.lines[0].endswith(" mars.od.0")
    published = run("mirror", "recover", "COPY", "--yes", "-c", config)
    assert (published.code, published.lines) == (0, ["COPY: 3 messages published, 0 were there already"])
