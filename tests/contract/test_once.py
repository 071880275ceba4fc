"""Updates of a table that are applied once for a notification, however often it is handled. On either backend."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import anyio
import anyio.from_thread
import pytest

from aviso_workers import (
    App,
    Batch,
    Delete,
    GivenUp,
    Notification,
    Reject,
    RetryPolicy,
    Stream,
    Table,
    Window,
    Windowing,
)
from aviso_workers.declare.tables import PAGES
from aviso_workers.engine.key_value import RetryingKeyValue
from aviso_workers.errors import ConflictError, DeclarationError, OutcomeUnknownError
from aviso_workers.features import seen, tables
from aviso_workers.ops.dead_letters import Selection, StoredDeadLetters
from aviso_workers.testing import Harness, harness
from tests.contract.settings import mars

pytestmark = pytest.mark.anyio

PROMPT = RetryPolicy(first=0.01, factor=1, attempts=4, jitter=0)


def happened(notification: Notification[Any]) -> datetime:
    return datetime(2026, 11, 20, notification.payload, tzinfo=UTC)


def add_one(count: int) -> int:
    return count + 1


@pytest.fixture(params=[False, True], ids=["", "cached"])
def counts(app: App, request: pytest.FixtureRequest) -> Table[int]:
    return app.table("counts", int, default=0, cached=request.param)


@pytest.fixture(params=[64, 2], ids=["listed", "on pages"])
def listed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many notifications the header of a key may list."""
    monkeypatch.setattr(tables, "LISTED", request.param)


@pytest.mark.usefixtures("listed")
class TestForms:
    """Whatever form a function has."""

    def one(self, app: App, counts: Table[int]) -> None:
        @app.agent("mars", retry=PROMPT)
        async def count(notification: Notification[Any]) -> None:
            await counts.update("od", add_one, once=notification)
            if notification.num_delivered < 3:
                raise ValueError("again")

    def thread(self, app: App, counts: Table[int]) -> None:
        def update(notification: Notification[Any]) -> Any:
            return counts.update("od", add_one, once=notification)

        @app.agent("mars", retry=PROMPT)
        def count(notification: Notification[Any]) -> None:
            anyio.from_thread.run(update, notification)
            if notification.num_delivered < 3:
                raise ValueError("again")

    def batch(self, app: App, counts: Table[int]) -> None:
        @app.agent("mars", retry=PROMPT)
        async def count(batch: Batch[Any]) -> None:
            for notification in batch:
                await counts.update("od", add_one, once=notification)
            if any(notification.num_delivered < 3 for notification in batch):
                raise ValueError("again")

    def stream(self, app: App, counts: Table[int]) -> None:
        @app.agent("mars", retry=PROMPT)
        async def count(stream: Stream[Any]) -> None:
            async for notification in stream:
                await counts.update("od", add_one, once=notification)
                if notification.num_delivered < 3:
                    raise ValueError("again")

    @pytest.mark.parametrize("form", [one, thread, batch, stream])
    async def test_a_notification_that_is_tried_again_counts_once(
        self, app: App, url: str | None, counts: Table[int], form: Callable[..., None]
    ) -> None:
        form(self, app, counts)
        async with harness(app, server=url) as t:
            for step in range(9):
                await t.notify("mars", mars(step=step), {})
            await t.settle()
            assert t.outcomes("count").count("acked") == 9
            assert await counts.get("od") == 9
            assert await counts.items() == {"od": 9}


async def hand_back(stored: StoredDeadLetters, t: Harness) -> None:
    for dead_letter in [each async for each in stored.select(Selection())]:
        await stored.retry(dead_letter)
    await t.settle()


@pytest.mark.usefixtures("listed")
async def test_a_dead_letter_that_is_handed_back_counts_once(app: App, url: str | None, counts: Table[int]) -> None:
    broken = True

    @app.agent("mars")
    async def count(notification: Notification[Any]) -> None:
        if int(notification.identifier["step"]) % 2:
            await counts.update("od", add_one, once=notification)
        if broken:
            raise Reject("after its update, or before it")
        await counts.update("all", add_one, once=notification)
        if not int(notification.identifier["step"]) % 2:
            await counts.update("od", add_one, once=notification)

    async with harness(app, server=url) as t:
        stored = StoredDeadLetters(app.session.admin, events=app.events)
        for step in range(9):
            await t.notify("mars", mars(step=step), {})
        await t.settle()
        assert await counts.get("od") == 4
        await hand_back(stored, t)  # each becomes another dead letter
        broken = False
        await hand_back(stored, t)
        assert (await counts.get("od"), await counts.get("all")) == (9, 9)


async def test_two_workers_that_handle_the_same_count_it_once(app: App, url: str | None, counts: Table[int]) -> None:
    @app.agent("mars", concurrency=8, retry=PROMPT)
    async def count(notification: Notification[Any]) -> None:
        await counts.update("od", add_one, once=notification)
        if notification.num_delivered < 2:
            raise ValueError("for the other one, maybe")

    async with harness(app, server=url, workers=2) as t:
        for step in range(40):
            await t.notify("mars", mars(step=step), {})
        await t.settle()
        assert await counts.get("od") == 40


async def test_agents_count_each_for_itself(app: App, url: str | None, counts: Table[int]) -> None:
    async def count(notification: Notification[Any]) -> None:
        await counts.update("od", add_one, once=notification)

    for name in ("first", "second"):
        app.agent("mars", name=name)(count)
    async with harness(app, server=url) as t:
        await t.notify("mars", mars(), {})
        await t.settle()
        assert await counts.get("od") == 2


async def test_the_value_is_returned_where_it_was_applied_before(app: App, url: str | None, counts: Table[int]) -> None:
    returned: list[int] = []

    @app.agent("mars", retry=PROMPT)
    async def count(notification: Notification[Any]) -> None:
        returned.append(await counts.update("od", add_one, once=notification))
        if notification.num_delivered == 1:
            raise ValueError("again")

    async with harness(app, server=url) as t:
        await counts.put("od", 5)
        await t.notify("mars", mars(), {})
        await t.settle()
    assert returned == [6, 6]


@pytest.mark.usefixtures("listed")
async def test_a_key_that_an_update_deletes_remembers(app: App, url: str | None, counts: Table[int]) -> None:
    deleted = 0

    def delete(_: int) -> Delete:
        nonlocal deleted
        deleted += 1
        return Delete()

    @app.agent("mars", retry=PROMPT)
    async def count(notification: Notification[Any]) -> None:
        await counts.update("od", delete, once=notification)
        if notification.num_delivered < 3:
            raise ValueError("again")

    async with harness(app, server=url) as t:
        await counts.put("od", 1)
        for step in range(4):
            await t.notify("mars", mars(step=step), {})
        await t.settle()
        assert await counts.items() == {}
        assert deleted == 4


async def test_a_key_that_is_put_begins_anew(app: App, url: str | None, counts: Table[int]) -> None:
    @app.agent("mars", retry=PROMPT)
    async def count(notification: Notification[Any]) -> None:
        await counts.update("od", add_one, once=notification)
        if notification.num_delivered == 1:
            await counts.put("od", 0)
            raise ValueError("again")

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(), {})
        await t.settle()
        assert await counts.get("od") == 1


async def test_a_page_that_another_worker_wrote_first_is_written_on_top_of_that(
    app: App, url: str | None, counts: Table[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "LISTED", 2)
    put, overtaken = RetryingKeyValue.put, [True]

    async def put_too_late(bucket: RetryingKeyValue, key: str, *arguments: Any, **stated: Any) -> int:
        if key.startswith(PAGES) and overtaken:
            overtaken.clear()
            raise ConflictError("its newest revision is not 0")
        return await put(bucket, key, *arguments, **stated)

    monkeypatch.setattr(RetryingKeyValue, "put", put_too_late)

    @app.agent("mars")
    async def count(notification: Notification[Any]) -> None:
        await counts.update("od", add_one, once=notification)

    async with harness(app, server=url) as t:
        for step in range(5):
            await t.notify("mars", mars(step=step), {})
        await t.settle()
        assert (await counts.get("od"), t.outcomes("count"), overtaken) == (5, ["acked"] * 5, [])


async def test_a_page_is_kept_for_as_long_as_its_notifications_come_again(
    app: App, url: str | None, counts: Table[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bucket forgets it some time after it was written last, so it is written when it is read."""
    monkeypatch.setattr(tables, "LISTED", 2)
    broken = True

    @app.agent("mars")
    async def count(notification: Notification[Any]) -> None:
        await counts.update("od", add_one, once=notification)
        if broken:
            raise Reject("after its update")

    async def written() -> int:
        (page,) = [entry for entry in await bucket.entries() if entry.key.startswith(PAGES)]
        return page.revision

    async with harness(app, server=url) as t:
        for step in range(5):
            await t.notify("mars", mars(step=step), {})
        await t.settle()
        broken = False
        bucket = await app.key_value("contract__table__counts")
        before = await written()
        await hand_back(StoredDeadLetters(app.session.admin, events=app.events), t)
        assert (await counts.get("od"), await written() > before) == (5, True)


async def test_a_key_that_is_put_forgets_what_is_on_pages_as_well(
    app: App, url: str | None, counts: Table[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "LISTED", 2)

    broken = True

    @app.agent("mars")
    async def count(notification: Notification[Any]) -> None:
        await counts.update("od", add_one, once=notification)
        if broken:
            raise Reject("after its update")

    async with harness(app, server=url) as t:
        stored = StoredDeadLetters(app.session.admin, events=app.events)
        for step in range(5):
            await t.notify("mars", mars(step=step), {})
        await t.settle()
        broken = False
        await counts.put("od", 0)
        for step in range(5, 10):
            await t.notify("mars", mars(step=step), {})
        await t.settle()
        assert await counts.get("od") == 5
        await hand_back(stored, t)
        assert await counts.get("od") == 10


async def test_an_update_of_anybody_else_forgets_nothing(app: App, url: str | None, counts: Table[int]) -> None:
    @app.agent("mars", retry=PROMPT)
    async def count(notification: Notification[Any]) -> None:
        await counts.update("od", add_one, once=notification)
        await counts.update("od", lambda count: count + 10)
        if notification.num_delivered == 1:
            raise ValueError("again")

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(), {})
        await t.settle()
        assert await counts.get("od") == 21


@pytest.mark.usefixtures("listed")
async def test_a_stream_that_is_made_anew_has_other_notifications(
    app: App, url: str | None, counts: Table[int]
) -> None:
    @app.agent("mars")
    async def count(notification: Notification[Any]) -> None:
        await counts.update("od", add_one, once=notification)

    async with harness(app, server=url) as t:
        for _ in range(2):
            for step in range(5):
                await t.notify("mars", mars(step=step), {})
            await t.settle()
            await t.stop()
            await app.session.admin.delete_stream("MARS")
            await t.start()
        assert await counts.get("od") == 10


@pytest.mark.usefixtures("listed")
async def test_notifications_that_are_older_than_their_stream_count_once(
    app: App, url: str | None, counts: Table[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a stream that was restored from a backup are, and of a mirror that was promoted."""

    @app.agent("mars", retry=PROMPT)
    async def count(notification: Notification[Any]) -> None:
        await counts.update("od", add_one, once=notification)
        if notification.num_delivered == 1:
            raise ValueError("after its update")

    async with harness(app, server=url) as t:

        async def created(*_: Any) -> float:
            return t.clock.time_ns() / 1e9 + 3600

        monkeypatch.setattr(seen, "_created", created)
        for step in range(9):
            await t.notify("mars", mars(step=step), {})
        await t.settle()
        assert await counts.get("od") == 9


async def test_a_second_update_of_a_key_in_one_call_is_refused(app: App, url: str | None, counts: Table[int]) -> None:
    @app.agent("mars", retry=RetryPolicy(attempts=1))
    async def count(notification: Notification[Any]) -> None:
        await counts.update("other", add_one, once=notification)
        await counts.update("od", add_one, once=notification)
        with pytest.raises(DeclarationError, match=r"key 'od': updated before with once=mars@1, in the same call"):
            await counts.update("od", add_one, once=notification)

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(), {})
        await t.settle()
        assert t.outcomes("count") == ["acked"]
        assert await counts.get("od") == 1


async def test_what_no_agent_handles_is_refused(app: App, url: str | None, counts: Table[int]) -> None:
    @app.agent("mars")
    async def count(notification: Notification[Any]) -> None:
        other = Notification(event_type="mars", identifier={}, payload=None, sequence=7)
        with pytest.raises(DeclarationError, match="once= takes the notification that an agent handles now, found"):
            await counts.update("od", add_one, once=other)

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(), {})
        await t.settle()
        assert t.outcomes("count") == ["acked"]
        with pytest.raises(DeclarationError, match="found mars@1: call update in the agent's function"):
            await counts.update(
                "od", add_one, once=Notification(event_type="mars", identifier={}, payload=None, sequence=1)
            )
        assert await counts.get("od") == 0


@pytest.mark.usefixtures("listed")
async def test_a_function_of_on_dead_letter_counts_once_and_beside_its_agent(
    app: App, url: str | None, counts: Table[int]
) -> None:
    calls: list[int] = []

    @app.agent("mars", retry=RetryPolicy(attempts=1))
    async def count(notification: Notification[Any]) -> None:
        await counts.update("od", add_one, once=notification)
        raise Reject("after its update")

    @count.on_dead_letter
    async def given_up(given_up: GivenUp[Any]) -> None:
        calls.append(given_up.notification.sequence)
        await counts.update("od", add_one, once=given_up.notification)
        if calls.count(given_up.notification.sequence) == 1:
            raise ConnectionError("after its update")

    async with harness(app, server=url) as t:
        for step in range(9):
            await t.notify("mars", mars(step=step), {})
        await t.settle()
        await t.retry_dead_letters()
        await t.settle()
        assert (await counts.get("od"), len(calls)) == (18, 27)


async def test_a_dead_letter_that_cannot_be_read_counts_once(app: App, url: str | None, counts: Table[int]) -> None:
    @app.agent("mars")
    async def count(notification: Notification[int]) -> None: ...

    @count.on_dead_letter
    async def given_up(given_up: GivenUp[Any]) -> None:
        await counts.update(given_up.reason, add_one, once=given_up.notification)

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(), "no number")
        await t.settle()
        assert await counts.get("undecodable") == 1


async def test_a_window_that_is_given_up_is_refused(app: App, url: str | None, counts: Table[int]) -> None:
    @app.agent("mars", window=Windowing(size="1h", initial=0, fold=lambda total, _: total + 1, time=happened))
    async def hourly(window: Window[int]) -> None:
        raise Reject("no such hour")

    @hourly.on_dead_letter
    async def given_up(given_up: GivenUp[Any]) -> None:
        await counts.update("od", add_one, once=given_up.notification)

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(), 6)
        await t.notify("mars", mars(), 9)
        with pytest.raises(
            AssertionError, match="takes a notification of a stream, found mars@0, which stands for a window"
        ):
            await t.settle()


async def test_a_table_with_a_history_takes_no_once(app: App, url: str | None) -> None:
    kept = app.table("kept", int, default=0, history=5)

    @app.agent("mars")
    async def count(notification: Notification[Any]) -> None:
        with pytest.raises(DeclarationError, match="table 'kept': once= needs a table without a history"):
            await kept.update("od", add_one, once=notification)

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(), {})
        await t.settle()
        assert t.outcomes("count") == ["acked"]


async def test_a_dead_letter_of_long_ago_is_told_of(
    app: App, url: str | None, counts: Table[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "LISTED", 2)
    tells: list[str] = []

    @app.agent("mars", retry=RetryPolicy(attempts=1))
    async def count(notification: Notification[Any]) -> None:
        try:
            if notification.identifier["step"] != "0" or tells:
                await counts.update("od", add_one, once=notification)
        except OutcomeUnknownError as error:
            tells.append(str(error))
            raise
        if notification.identifier["step"] == "0" and not tells:
            tells.append("")
            raise Reject("before its update")

    async with harness(app, server=url) as t:
        stored = StoredDeadLetters(app.session.admin, events=app.events)
        for step in range(5):
            await t.notify("mars", mars(step=step), {})
        await t.settle()
        assert await counts.get("od") == 4
        monkeypatch.setattr(tables, "CERTAIN_SECONDS", -1.0)
        await hand_back(stored, t)
        assert "whether the update for mars@1 was applied before it became a dead letter is known for" in tells[-1]
        assert t.outcomes("count")[-1] == "dead_lettered"
        assert await counts.get("od") == 4


async def test_an_update_whose_acknowledgement_was_lost_is_applied_once(
    app: App, url: str | None, counts: Table[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = 0

    @app.agent("mars")
    async def count(notification: Notification[Any]) -> None:
        kind = type(counts._bucket)
        put = kind.put

        async def put_and_lose(*arguments: Any, **stated: Any) -> int:
            nonlocal lost
            await put(*arguments, **stated)
            lost += 1
            raise OutcomeUnknownError("the acknowledgement was lost, and the key has changed since")

        with monkeypatch.context() as patched:
            patched.setattr(kind, "put", put_and_lose)
            assert await counts.update("od", add_one, once=notification) == 1

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(), {})
        await t.settle()
        assert (lost, await counts.get("od"), t.outcomes("count")) == (1, 1, ["acked"])
