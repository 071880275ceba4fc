"""What becomes of a notification by what its handler raises or returns, in every call form. On either backend."""

from __future__ import annotations

import argparse
import asyncio
import inspect
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import pytest
from msgspec import Struct, structs

from aviso_workers import (
    Ack,
    Agent,
    App,
    Batch,
    Batching,
    Notification,
    Notify,
    Reject,
    Retry,
    RetryPolicy,
    Stream,
    Window,
    Windowing,
    testing,
)
from aviso_workers.config import Config
from aviso_workers.errors import InvalidNotificationError, LateError, ResourceError, UndecodableError
from aviso_workers.state.dead_letter_records import DeadLetter
from aviso_workers.testing import Harness, harness
from tests.contract.settings import mars
from tests.odd_errors import EndlessError, nested
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

ONCE = RetryPolicy(attempts=1)
PROMPT = RetryPolicy(first=0.05, factor=1, attempts=3, jitter=0)
UNITS = {"m": 1, "km": 1000}


class Length(Struct):
    unit: str

    def __post_init__(self) -> None:
        UNITS[self.unit]


class UnspeakableError(Exception):
    """Its text cannot be had."""

    def __str__(self) -> str:
        raise KeyError("no text")

    __repr__ = __str__


Work = Callable[[str], Any]
"""What a handler does with a step, at once or (not in a thread) awaited; what it returns, the handler returns."""


async def done(work: Work, step: str) -> Any:
    result = work(step)
    return await result if inspect.isawaitable(result) else result


def one_by_one(app: App, work: Work, **stated: Any) -> Agent[Any, Any]:
    @app.agent("mars", **stated)
    async def index(notification: Notification[Any]) -> Any:
        return await done(work, notification.identifier["step"])

    return index


def in_a_thread(app: App, work: Work, **stated: Any) -> Agent[Any, Any]:
    @app.agent("mars", **stated)
    def index(notification: Notification[Any]) -> Any:
        return work(notification.identifier["step"])

    return index


def yielding(app: App, work: Work, **stated: Any) -> Agent[Any, Any]:
    @app.agent("mars", **stated)
    async def index(notification: Notification[Any]) -> AsyncIterator[Any]:
        yield await done(work, notification.identifier["step"])

    return index


def in_batches(app: App, work: Work, **stated: Any) -> Agent[Any, Any]:
    @app.agent("mars", batch=Batching(size=1), **stated)
    async def index(batch: Batch[Any]) -> Any:
        (notification,) = batch
        return await done(work, notification.identifier["step"])

    return index


def as_a_stream(app: App, work: Work, **stated: Any) -> Agent[Any, Any]:
    @app.agent("mars", **stated)
    async def index(stream: Stream[Any]) -> Any:
        async for notification in stream:
            if (said := await done(work, notification.identifier["step"])) is not None:
                return said
        return None

    return index


FORMS = [one_by_one, in_a_thread, yielding, in_batches, as_a_stream]


@pytest.fixture(params=FORMS, ids=[form.__name__ for form in FORMS])
def declare(request: pytest.FixtureRequest, app: App) -> Callable[..., Agent[Any, Any]]:
    """`declare(work)`: an agent, in each of the call forms, that does this work."""

    def declare(work: Work, **stated: Any) -> Agent[Any, Any]:
        agent: Agent[Any, Any] = request.param(app, work, **stated)
        return agent

    return declare


async def handle(t: Harness, *steps: int) -> None:
    for step in steps:
        await t.notify("mars", mars(step=step), {})
    await t.settle()


def step_of(dead_letter: DeadLetter) -> str:
    return dead_letter.original.subject.rpartition(".")[2]


def failing_at_six(error: BaseException) -> Work:
    def work(step: str) -> None:
        if step == "6":
            raise error

    return work


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (SystemExit(2), "SystemExit: 2"),
        (KeyboardInterrupt("pressed"), "KeyboardInterrupt: pressed"),
        (GeneratorExit("left"), "GeneratorExit: left"),
        (BaseException("worst"), "BaseException: worst"),
        (
            BaseExceptionGroup("both", [SystemExit(1), ValueError("no")]),
            "BaseExceptionGroup: both (2 sub-exceptions): SystemExit: 1, ValueError: no",
        ),
        (UnspeakableError(), "UnspeakableError: the error has no text, because its __str__ raises KeyError"),
        (ValueError("a\x00b\ud800c\r\nd"), "ValueError: a?b?c d"),
        (EndlessError("on and on"), "EndlessError: on and on"),
        (
            nested(3000),
            "ExceptionGroup: " + "all (1 sub-exception): ExceptionGroup: " * 20 + "all (1 sub-exception): ...",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
async def test_whatever_a_handler_raises_is_the_failure_of_its_notification(
    declare: Callable[..., Agent[Any, Any]], app: App, url: str | None, error: BaseException, told: str
) -> None:
    agent = declare(failing_at_six(error), retry=ONCE)
    async with harness(app, server=url) as t:
        await handle(t, 5, 6, 7)
        (dead_letter,) = t.dead_letters
        assert (dead_letter.reason, dead_letter.error, step_of(dead_letter)) == ("attempts_exhausted", told, "6")
        assert sorted(t.outcomes(agent)) == ["acked", "acked", "dead_lettered"]


async def test_an_exit_in_a_threads_own_thread_or_a_called_tool_is_a_failure(app: App, url: str | None) -> None:
    @app.agent("mars", retry=ONCE)
    async def index(notification: Notification[Any]) -> None:
        await anyio.to_thread.run_sync(argparse.ArgumentParser().parse_args, ["--no-such-option"])

    async with harness(app, server=url) as t:
        await handle(t, 6, 7)
        assert [dead_letter.error for dead_letter in t.dead_letters] == ["SystemExit: 2"] * 2


async def test_an_exit_of_a_fold_is_a_failure(app: App, url: str | None) -> None:
    def fold(total: int, notification: Notification[Any]) -> int:
        sys.exit("no such unit")

    @app.agent("mars", window=Windowing(size="1h", fold=fold, initial=0), retry=ONCE)
    async def total(window: Window[int]) -> None: ...

    async with harness(app, server=url) as t:
        await handle(t, 6, 7)
        assert [dead_letter.error for dead_letter in t.dead_letters] == ["SystemExit: no such unit"] * 2


async def test_an_exit_of_a_window_lets_it_be_run_again(app: App, url: str | None) -> None:
    tries: list[int] = []

    @app.agent(
        "mars", window=Windowing(size="1s", fold=lambda total, one: total + 1, initial=0, idle="1s"), retry=PROMPT
    )
    async def total(window: Window[int]) -> None:
        tries.append(window.value)
        if len(tries) == 1:
            sys.exit()

    async with harness(app, server=url) as t:
        await handle(t, 6)
        while len(t.windows(total)) < 2:
            await t.advance(0.2)
        assert [type(run.error) for run in t.windows(total)] == [SystemExit, type(None)]


async def test_an_exit_of_a_timer_is_its_failure(app: App, url: str | None) -> None:
    @app.every("1s", singleton=False)
    async def tidy() -> None:
        sys.exit("no room")

    async with harness(app, server=url) as t:
        while len(t.ticks(tidy)) < 2:
            await t.advance(0.5)
        assert {repr(tick.error) for tick in t.ticks(tidy)} == {"SystemExit('no room')"}


async def test_an_exit_of_a_task_is_its_failure(app: App, url: str | None) -> None:
    @app.task
    async def follow() -> None:
        sys.exit("no peer")

    with pytest.raises(SystemExit, match="no peer"):  # the worker goes on, and the harness raises what has failed
        async with harness(app, server=url):
            await anyio.sleep(PATIENCE_SECONDS)


async def test_an_exit_of_a_resource_says_that_it_cannot_be_opened(app: App, url: str | None) -> None:
    @app.resource
    async def lengths() -> AsyncIterator[Length]:
        sys.exit("no database")
        yield Length("m")

    with pytest.raises(ResourceError, match="resource 'lengths' cannot be opened: SystemExit: no database"):
        async with harness(app, server=url):
            pass


@pytest.mark.parametrize("declare", [one_by_one, in_batches, as_a_stream], indirect=True)
async def test_a_payload_that_its_own_type_refuses_is_undecodable_whatever_it_raises(
    declare: Callable[..., Agent[Any, Any]], app: App, url: str | None
) -> None:
    agent = declare(lambda step: None)
    agent.payload_type = Length
    async with harness(app, server=url) as t:
        for step, unit in enumerate(["m", "parsec", "km"]):
            await t.notify("mars", mars(step=step), {"unit": unit})
        await t.settle()
        (dead_letter,) = t.dead_letters
        assert (dead_letter.reason, dead_letter.error) == (
            "undecodable",
            "UndecodableError: the payload does not fit: KeyError: 'parsec'",
        )
        assert sorted(t.outcomes(agent)) == ["acked", "acked", "dead_lettered"]


class TestCancelled:
    """A call that was cancelled is not done, whatever it returns or raises afterwards."""

    @pytest.fixture(autouse=True)
    def short_of_patience(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """In memory the harness gives code 10 real seconds before it lets the drain timeout pass."""
        monkeypatch.setattr(testing, "CODE_PATIENCE_SECONDS", 0.2)

    @pytest.fixture
    def calls(self) -> list[str]:
        return []

    @pytest.fixture
    def began(self) -> anyio.Event:
        return anyio.Event()

    @pytest.fixture
    def work(self, calls: list[str], began: anyio.Event) -> Work:
        """At its first call it waits, catches its cancellation, and returns."""

        async def work(step: str) -> None:
            calls.append(step)
            if len(calls) == 1:
                began.set()
                try:
                    await anyio.sleep_forever()
                except BaseException:
                    return

        return work

    @pytest.mark.parametrize("declare", [one_by_one, yielding, in_batches], indirect=True)
    async def test_at_its_timeout_it_has_timed_out(
        self,
        declare: Callable[..., Agent[Any, Any]],
        app: App,
        url: str | None,
        work: Work,
        began: anyio.Event,
        calls: list[str],
    ) -> None:
        agent = declare(work, timeout=0.05, retry=PROMPT)
        async with harness(app, server=url) as t:
            await t.notify("mars", mars(step=6), {})
            await began.wait()
            await t.advance(0.1)
            await t.settle()
            told = [(settled.outcome, settled.reason) for settled in t.settled(agent)]
            assert (told, calls) == ([("retried", "TimeoutError"), ("acked", "")], ["6", "6"])

    @pytest.mark.parametrize(
        ("declare", "stated"),
        [(one_by_one, {}), (one_by_one, {"timeout": 60.0}), (yielding, {}), (in_batches, {}), (as_a_stream, {})],
        indirect=["declare"],
    )
    async def test_at_the_drain_timeout_it_is_given_back(
        self,
        declare: Callable[..., Agent[Any, Any]],
        app: App,
        url: str | None,
        work: Work,
        began: anyio.Event,
        calls: list[str],
        stated: dict[str, Any],
    ) -> None:
        app.configure(draining_within(0.1, app.config))
        agent = declare(work, **stated)
        async with harness(app, server=url) as t:
            await t.notify("mars", mars(step=6), {})
            await began.wait()
            await t.stop()
            assert t.outcomes(agent) == []
            await t.start()
            await t.settle()
            assert (t.outcomes(agent), calls) == (["acked"], ["6", "6"])

    async def test_at_the_drain_timeout_what_it_raises_uses_up_no_attempt(
        self, app: App, url: str | None, began: anyio.Event
    ) -> None:
        app.configure(draining_within(0.1, app.config))
        calls: list[int] = []

        @app.agent("mars", retry=ONCE)
        async def index(notification: Notification[Any]) -> None:
            calls.append(notification.num_delivered)
            if len(calls) == 1:
                began.set()
                try:
                    await anyio.sleep_forever()
                finally:
                    raise BaseExceptionGroup("closing", [asyncio.CancelledError(), ConnectionError()])

        async with harness(app, server=url) as t:
            await t.notify("mars", mars(), {})
            await began.wait()
            await t.stop()
            await t.start()
            await t.settle()
            assert (t.outcomes(index), calls) == (["acked"], [1, 2])

    async def test_by_itself_it_has_failed_and_the_agent_goes_on(self, app: App, url: str | None) -> None:
        @app.agent("mars", retry=PROMPT)
        async def index(notification: Notification[Any]) -> None:
            if notification.num_delivered == 1:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                await anyio.sleep(1)

        async with harness(app, server=url) as t:
            await handle(t, 6, 7)
            assert sorted(t.outcomes(index)) == ["acked", "acked", "retried", "retried"]

    async def test_by_itself_and_returning_at_once_it_is_done_and_the_agent_goes_on(
        self, app: App, url: str | None
    ) -> None:
        @app.agent("mars")
        async def index(notification: Notification[Any]) -> None:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()

        async with harness(app, server=url) as t:
            await handle(t, 6, 7)
            assert t.outcomes(index) == ["acked", "acked"]


@pytest.mark.parametrize(
    ("returned", "reason", "told"),
    [
        (
            Retry,
            "attempts_exhausted",
            "DeclarationError: the handler returned the class Retry: return Retry() instead",
        ),
        (Reject, "attempts_exhausted", "DeclarationError: the handler returned the class Reject: return Reject("),
        ([Retry(after=5)], "invalid_notification", "InvalidNotificationError: there is Retry("),
        ([Notify("mars", mars(step=8)), Reject("no")], "invalid_notification", "InvalidNotificationError: there is"),
        ((Reject,), "invalid_notification", "InvalidNotificationError: there is <class"),
        (
            {"a": Notify("mars", mars(step=8))},
            "invalid_notification",
            "InvalidNotificationError: the handler returned the dict {'a': Notify(",
        ),
    ],
    ids=["Retry", "Reject", "retry", "beside", "class", "dict"],
)
async def test_what_is_returned_and_would_come_to_nothing_is_a_failure(
    declare: Callable[..., Agent[Any, Any]], app: App, url: str | None, returned: object, reason: str, told: str
) -> None:
    agent = declare(lambda step: returned if step == "6" else None, retry=ONCE)
    async with harness(app, server=url) as t:
        await handle(t, 6, 7)
        (dead_letter,) = t.dead_letters
        assert sorted(t.outcomes(agent)) == ["acked", "dead_lettered"]
        assert (dead_letter.reason, dead_letter.error[: len(told)]) == (reason, told)


async def test_a_coroutine_that_is_returned_is_a_failure(app: App, url: str | None) -> None:
    made: list[Any] = []

    @app.agent("mars", retry=ONCE)
    def index(notification: Notification[Any]) -> Any:
        made.append(anyio.sleep(1))
        return made[0]

    async with harness(app, server=url) as t:
        await handle(t, 6)
        assert [each.error for each in t.dead_letters] == [
            "DeclarationError: the handler returned the coroutine sleep, of which nothing has run: await it"
        ]
    made[0].close()


class TestOnError:
    """What an author says that an exception means."""

    async def test_none_leaves_it_to_the_policy(
        self, declare: Callable[..., Agent[Any, Any]], app: App, url: str | None
    ) -> None:
        agent = declare(failing_at_six(RuntimeError("no")), retry=PROMPT)
        seen: list[Exception] = []
        agent.on_error(RuntimeError)(seen.append)
        async with harness(app, server=url) as t:
            await handle(t, 6)
            assert t.outcomes(agent) == ["retried", "retried", "dead_lettered"]
            assert (len(seen), t.dead_letters[0].error) == (3, "RuntimeError: no")

    async def test_ack_says_that_it_is_done_and_is_stated_with_the_error(
        self, declare: Callable[..., Agent[Any, Any]], app: App, url: str | None
    ) -> None:
        agent = declare(failing_at_six(FileExistsError("there")), retry=PROMPT)
        agent.on_error(FileExistsError)(lambda error: Ack())
        async with harness(app, server=url) as t:
            await handle(t, 6)
            (settled,) = t.settled(agent)
            assert (settled.outcome, settled.reason, str(settled.error)) == ("acked", "on_error", "there")

    async def test_one_that_exits_is_a_failure(
        self, declare: Callable[..., Agent[Any, Any]], app: App, url: str | None
    ) -> None:
        agent = declare(failing_at_six(ConnectionError("no")), retry=ONCE)

        @agent.on_error(ConnectionError)
        def leave(error: Exception) -> Retry:
            sys.exit(3)

        async with harness(app, server=url) as t:
            await handle(t, 6, 7)
            assert [dead_letter.error for dead_letter in t.dead_letters] == ["SystemExit: 3"]


class TestWhereItWasRaised:
    """Only what our own step found about the notification itself is final."""

    @pytest.mark.parametrize("error", [UndecodableError("?"), InvalidNotificationError("?"), LateError("?")])
    async def test_an_error_of_ours_from_a_handler_is_tried_again(
        self, declare: Callable[..., Agent[Any, Any]], app: App, url: str | None, error: Exception
    ) -> None:
        agent = declare(failing_at_six(error), retry=PROMPT)
        async with harness(app, server=url) as t:
            await handle(t, 6)
            assert t.outcomes(agent) == ["retried", "retried", "dead_lettered"]
            assert t.dead_letters[0].reason == "attempts_exhausted"

    async def test_a_table_of_another_type_is_tried_again(self, app: App, url: str | None) -> None:
        table = app.table("seen", int, default=0)
        broken = [True]

        @app.agent("mars", retry=PROMPT)
        async def index(notification: Notification[Any]) -> None:
            if broken:
                await (await app.key_value("contract__table__seen")).put("od", b'"of another type"')
                broken.clear()
            else:
                await (await app.key_value("contract__table__seen")).put("od", b"1")
            await table.get("od")

        async with harness(app, server=url) as t:
            await handle(t, 6)
            told = [(settled.outcome, settled.reason) for settled in t.settled(index)]
            assert told == [("retried", "UndecodableError"), ("acked", "")]

    async def test_an_invalid_notification_that_the_handler_publishes_itself_is_tried_again(
        self, app: App, url: str | None
    ) -> None:
        @app.agent("mars", retry=PROMPT)
        async def derive(notification: Notification[Any]) -> None:
            await app.notify("plain", {"a": 1} if notification.num_delivered == 1 else {"a": 1, "b": "x"})

        async with harness(app, server=url) as t:
            await handle(t, 6)
            told = [(settled.outcome, settled.reason) for settled in t.settled(derive)]
            assert told == [("retried", "InvalidIdentifierError"), ("acked", "")]

    async def test_a_fold_that_raises_late_error_is_tried_again(self, app: App, url: str | None) -> None:
        def fold(total: int, notification: Notification[Any]) -> int:
            if notification.num_delivered == 1:
                raise LateError("somebody else's")
            return total

        @app.agent("mars", window=Windowing(size="1h", fold=fold, initial=0), retry=PROMPT)
        async def total(window: Window[int]) -> None: ...

        async with harness(app, server=url) as t:
            await handle(t, 6)
            assert t.outcomes(total) == ["retried", "acked"]


def draining_within(seconds: float, config: Config) -> Config:
    return structs.replace(config, workers=structs.replace(config.workers, drain_timeout_seconds=seconds))
