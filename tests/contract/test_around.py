"""What `@app.around` runs around each call of an agent, and what is opened for each call. On either backend."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from aviso_workers import (
    Ack,
    App,
    Batch,
    Batching,
    Notification,
    Notify,
    Receipt,
    Reject,
    Retry,
    RetryPolicy,
    Router,
    Tick,
    Window,
    Windowing,
)
from aviso_workers.engine.publisher import Publisher
from aviso_workers.errors import RefusedError
from aviso_workers.testing import Harness, harness
from tests.contract.settings import mars

pytestmark = pytest.mark.anyio

PROMPT = RetryPolicy(first=0.05, factor=1, attempts=2, jitter=0)
TIMEOUT_SECONDS = 0.2


@pytest.fixture
def told() -> list[str]:
    """What happened, in order."""
    return []


@pytest.fixture
def around(app: App, told: list[str]) -> None:
    """Tells what becomes of each call of a function of a Notification."""

    @app.around
    async def tell(notification: Notification[Any]) -> AsyncIterator[None]:
        told.append(f"before {notification.identifier['step']}")
        try:
            yield
        except Exception as error:
            told.append(f"failed: {type(error).__name__}")
            raise
        told.append("after")


async def handle(app: App, url: str | None, *steps: int) -> Harness:
    """The app, after it has handled a notification of each of these steps."""
    async with harness(app, server=url) as t:
        for step in steps or (12,):
            await t.notify("mars", mars(step=step), {})
        await t.settle()
    return t


class TestAround:
    async def test_each_call_it_runs_before_and_after(
        self, app: App, url: str | None, told: list[str], around: None
    ) -> None:
        @app.agent("mars")
        async def index(notification: Notification[Any]) -> None:
            told.append("index")

        t = await handle(app, url, 1, 2)
        assert told == ["before 1", "index", "after", "before 2", "index", "after"]
        assert t.outcomes(index) == ["acked", "acked"]

    @pytest.mark.parametrize("instruction", [RuntimeError("no database"), Retry(after=0.05), Reject("no field")])
    @pytest.mark.parametrize("returned", [False, True])
    async def test_what_the_function_raises_or_returns_instead_is_raised_at_the_yield(
        self, app: App, url: str | None, told: list[str], around: None, instruction: Exception, returned: bool
    ) -> None:
        @app.agent("mars", retry=PROMPT)
        async def index(notification: Notification[Any]) -> Any:
            if len(told) > 1:
                return None
            if returned:
                return instruction
            raise instruction

        t = await handle(app, url)
        failed = ["before 12", f"failed: {type(instruction).__name__}"]
        if isinstance(instruction, Reject):
            assert (told, t.outcomes(index)) == (failed, ["dead_lettered"])
            assert t.settled(index)[0].reason == "rejected"
        else:
            assert (told, t.outcomes(index)) == ([*failed, "before 12", "after"], ["retried", "acked"])
            assert t.settled(index)[0].reason == type(instruction).__name__

    async def test_a_function_in_a_thread_it_runs_on_the_event_loop(self, app: App, url: str | None) -> None:
        ran_in: list[int] = []

        @app.around
        async def note(notification: Notification[Any]) -> AsyncIterator[None]:
            ran_in.append(threading.get_ident())
            with pytest.raises(ConnectionError):
                yield
            ran_in.append(threading.get_ident())

        @app.agent("mars", retry=PROMPT)
        def index(notification: Notification[Any]) -> None:
            ran_in.append(threading.get_ident())
            raise ConnectionError

        t = await handle(app, url)
        assert t.outcomes(index) == ["acked"]
        before, function, after = ran_in
        assert before == after == threading.get_ident() != function

    async def test_a_batch_and_a_window_as_well(self, app: App, url: str | None, told: list[str]) -> None:
        @app.around
        async def of_batches(batch: Batch[Any]) -> AsyncIterator[None]:
            told.append(f"a batch of {len(batch)}")
            yield
            told.append("the batch is done")

        @app.around
        async def of_windows(window: Window[Any]) -> AsyncIterator[None]:
            told.append(f"a window of {window.value}")
            yield
            told.append("the window is done")

        @app.agent("mars", batch=Batching(size=2, within=10))
        async def load(batch: Batch[Any]) -> None:
            told.append("load")
            batch.reject(batch.notifications[0], "too small")

        hourly: Windowing[int, Any] = Windowing(
            size="1h", fold=lambda total, one: total + 1, initial=0, lateness="0s", idle="1s"
        )

        @app.agent("mars", window=hourly)
        async def sum_up(window: Window[int]) -> None:
            told.append("sum up")

        async with harness(app, server=url) as t:
            for step in (1, 2):
                await t.notify("mars", mars(step=step), {})
            await t.settle()
            while not t.windows(sum_up):
                await t.advance(0.5)
            assert sorted(t.outcomes(load)) == ["acked", "dead_lettered"]
        assert told == ["a batch of 2", "load", "the batch is done", "a window of 2", "sum up", "the window is done"]

    async def test_an_error_that_is_not_raised_again_means_that_it_is_done(
        self, app: App, url: str | None, told: list[str]
    ) -> None:
        @app.around
        async def forgive(notification: Notification[Any]) -> AsyncIterator[None]:
            try:
                yield
            except FileExistsError:
                told.append("forgiven")

        @app.agent("mars", retry=PROMPT)
        async def index(notification: Notification[Any]) -> None:
            raise FileExistsError

        assert ((await handle(app, url)).outcomes(index), told) == (["acked"], ["forgiven"])

    async def test_another_error_is_the_functions_in_its_place(self, app: App, url: str | None) -> None:
        @app.around
        async def translate(notification: Notification[Any]) -> AsyncIterator[None]:
            try:
                yield
            except KeyError as error:
                raise Reject("no such field") from error

        @app.agent("mars")
        async def index(notification: Notification[Any]) -> None:
            raise KeyError

        t = await handle(app, url)
        assert [(fact.outcome, fact.reason) for fact in t.settled(index)] == [("dead_lettered", "rejected")]

    @pytest.mark.parametrize("where", ["before", "after"])
    async def test_what_it_raises_itself_is_judged_as_what_the_function_raises(
        self, app: App, url: str | None, told: list[str], where: str
    ) -> None:
        @app.around
        async def connect(notification: Notification[Any]) -> AsyncIterator[None]:
            if where == "before":
                raise RuntimeError("no database")
            yield
            raise RuntimeError("no database")

        @app.agent("mars", retry=PROMPT)
        async def index(notification: Notification[Any]) -> None:
            told.append("index")

        @index.on_error(RuntimeError)
        def done(error: Exception) -> Ack | None:
            told.append(str(error))
            return Ack() if told.count(str(error)) == 2 else None

        t = await handle(app, url)
        assert [(fact.outcome, fact.reason) for fact in t.settled(index)] == [
            ("retried", "RuntimeError"),
            ("acked", "on_error"),
        ]
        assert told == (["no database"] if where == "before" else ["index", "no database"]) * 2

    async def test_it_yields_once(self, app: App, url: str | None, told: list[str]) -> None:
        @app.around(agents=["not_at_all"])
        async def absent(notification: Notification[Any]) -> AsyncIterator[None]:
            if not notification:
                yield

        @app.around(agents=["twice", "twice_after_a_failure"])
        async def doubled(notification: Notification[Any]) -> AsyncIterator[None]:
            try:
                yield
            except RuntimeError:
                told.append("failed")
            try:
                yield
            finally:
                told.append("closed")

        once = RetryPolicy(attempts=1)

        @app.agent("mars", retry=once)
        async def not_at_all(notification: Notification[Any]) -> None:
            told.append("called without")

        @app.agent("mars", retry=once)
        async def twice(notification: Notification[Any]) -> None: ...

        @app.agent("mars", retry=once)
        async def twice_after_a_failure(notification: Notification[Any]) -> None:
            raise RuntimeError

        t = await handle(app, url)
        errors = {dead_letter.agent: dead_letter.error for dead_letter in t.dead_letters}
        assert errors == {
            "not_at_all": "RuntimeError: around 'absent' has to yield once: it did not yield",
            "twice": "RuntimeError: around 'doubled' has to yield once: it yielded twice",
            "twice_after_a_failure": "RuntimeError: around 'doubled' has to yield once: it yielded twice",
        }
        assert sorted(told) == ["closed", "closed", "failed"]

    @pytest.mark.parametrize("raised", [StopAsyncIteration, GeneratorExit, SystemExit, KeyboardInterrupt])
    @pytest.mark.parametrize("in_thread", [False, True])
    async def test_what_ends_something_elsewhere_stays_what_it_is(
        self, app: App, url: str | None, around: None, raised: type[BaseException], in_thread: bool
    ) -> None:
        async def index(notification: Notification[Any]) -> None:
            raise raised("nothing more")

        def index_in_thread(notification: Notification[Any]) -> None:
            raise raised("nothing more")

        app.agent("mars", retry=RetryPolicy(attempts=1))(index_in_thread if in_thread else index)
        t = await handle(app, url)
        assert [dead_letter.error for dead_letter in t.dead_letters] == [f"{raised.__name__}: nothing more"]

    async def test_the_log_tells_where_the_function_has_failed(self, app: App, url: str | None, around: None) -> None:
        @app.agent("mars", retry=RetryPolicy(attempts=1))
        async def index(notification: Notification[Any]) -> None:
            raise RuntimeError

        t = await handle(app, url)
        (dead_letter,) = t.dead_letters
        assert dead_letter.traceback.rpartition(" ")[2] == "index"

    async def test_the_first_is_the_outermost(self, app: App, url: str | None, told: list[str]) -> None:
        def tell(name: str) -> None:
            @app.around
            async def tell(notification: Notification[Any]) -> AsyncIterator[None]:
                told.append(name)
                try:
                    yield
                finally:
                    told.append(f"{name} ends")

        router = Router("theirs")

        @router.around
        async def inner(notification: Notification[Any]) -> AsyncIterator[None]:
            told.append("inner")
            yield

        @router.agent("mars", retry=RetryPolicy(attempts=1))
        async def index(notification: Notification[Any]) -> None:
            told.append("index")
            raise RuntimeError

        app.include(router, prefix="our")
        tell("first")
        tell("second")
        await handle(app, url)
        assert told == ["first", "second", "inner", "index", "second ends", "first ends"]


class TestPublishing:
    async def returned(self, app: App, output: Any) -> None:
        @app.agent("mars", retry=RetryPolicy(attempts=1))
        async def derive(notification: Notification[Any]) -> Any:
            return output

    async def yielded(self, app: App, output: Any) -> None:
        @app.agent("mars", retry=RetryPolicy(attempts=1))
        async def derive(notification: Notification[Any]) -> AsyncIterator[Any]:
            yield output

    FORMS = pytest.mark.parametrize("form", [returned, yielded])

    @FORMS
    async def test_is_done_before_it_goes_on(
        self, app: App, url: str | None, told: list[str], form: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tell_of_publishing(told, monkeypatch)

        @app.around
        async def tell(notification: Notification[Any]) -> AsyncIterator[None]:
            yield
            told.append("after")

        await form(self, app, Notify("plain", {"a": 1, "b": "x"}))
        await handle(app, url)
        assert told == ["stored", "after"]

    @FORMS
    async def test_a_failure_of_it_is_raised_at_the_yield(
        self, app: App, url: str | None, told: list[str], around: None, form: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tell_of_publishing([], monkeypatch, error=RefusedError("no right to"))
        await form(self, app, Notify("plain", {"a": 1, "b": "x"}))
        t = await handle(app, url)
        assert (told, t.outcomes("derive")) == (["before 12", "failed: RefusedError"], ["dead_lettered"])

    @FORMS
    async def test_what_is_no_valid_notification_is_a_dead_letter_that_says_so(
        self, app: App, url: str | None, told: list[str], around: None, form: Any
    ) -> None:
        await form(self, app, Notify("plain", {"a": 1}))
        t = await handle(app, url)
        assert told == ["before 12", "failed: InvalidIdentifierError"]
        assert t.settled("derive")[0].reason == "invalid_notification"

    async def test_by_what_is_around_has_ids_that_follow_from_the_notification(
        self, app: App, url: str | None, told: list[str]
    ) -> None:
        @app.around
        async def announce(notification: Notification[Any]) -> AsyncIterator[None]:
            await app.notify("plain", {"a": 1, "b": "begun"})
            yield

        @app.agent("mars", retry=PROMPT)
        async def index(notification: Notification[Any]) -> None:
            told.append("index")
            if len(told) == 1:
                raise ConnectionError

        t = await handle(app, url)
        assert (t.outcomes(index), len([one for one in t.published if one.event_type == "plain"])) == (
            ["retried", "acked"],
            1,
        )


def tell_of_publishing(told: list[str], monkeypatch: pytest.MonkeyPatch, *, error: Exception | None = None) -> None:
    """Have it told when a `plain` is stored, or have that fail."""
    notify = Publisher.notify

    async def notify_and_tell(publisher: Publisher, wanted: Notify) -> Receipt:
        if wanted.event_type == "plain" and error is not None:
            raise error
        receipt = await notify(publisher, wanted)
        if wanted.event_type == "plain":
            told.append("stored")
        return receipt

    monkeypatch.setattr(Publisher, "notify", notify_and_tell)


class TestTime:
    """`timeout` is the function's; all of the call has twice as long."""

    async def test_when_the_functions_is_over_what_is_around_it_can_still_wait(
        self, app: App, url: str | None, told: list[str]
    ) -> None:
        @app.around
        async def roll_back(notification: Notification[Any]) -> AsyncIterator[None]:
            try:
                yield
            except TimeoutError:
                await anyio.lowlevel.checkpoint()
                told.append("rolled back")
                raise

        @app.agent("mars", retry=RetryPolicy(attempts=1), timeout=TIMEOUT_SECONDS)
        async def index(notification: Notification[Any]) -> None:
            await anyio.sleep_forever()

        async with harness(app, server=url) as t:
            await t.notify("mars", mars(), {})
            while not t.outcomes(index):
                await t.advance(TIMEOUT_SECONDS)
        assert (told, t.outcomes(index)) == (["rolled back"], ["dead_lettered"])
        assert t.dead_letters[0].error == "TimeoutError: not done within 0.2 s"

    @pytest.mark.parametrize("where", ["before", "after"])
    async def test_what_is_around_it_cannot_hang_for_ever(
        self, app: App, url: str | None, told: list[str], where: str
    ) -> None:
        @app.around
        async def hang(notification: Notification[Any]) -> AsyncIterator[None]:
            try:
                if where == "before":
                    await anyio.sleep_forever()
                yield
                await anyio.sleep_forever()
            except anyio.get_cancelled_exc_class():
                told.append("cancelled")
                raise

        @app.agent("mars", retry=RetryPolicy(attempts=1), timeout=TIMEOUT_SECONDS)
        async def index(notification: Notification[Any]) -> None: ...

        async with harness(app, server=url) as t:
            await t.notify("mars", mars(), {})
            while not t.outcomes(index):
                await t.advance(TIMEOUT_SECONDS)
        assert (told, t.outcomes(index)) == (["cancelled"], ["dead_lettered"])
        assert t.dead_letters[0].error == "TimeoutError: not done within 0.4 s"

    async def test_it_may_give_the_function_another_time(self, app: App, url: str | None) -> None:
        @app.around
        async def in_time(notification: Notification[Any]) -> AsyncIterator[None]:
            async with anyio.create_task_group() as beside:
                beside.start_soon(anyio.sleep_forever)
                with anyio.fail_after(0.02):
                    yield
                beside.cancel_scope.cancel()

        @app.agent("mars", retry=PROMPT)
        async def index(notification: Notification[Any]) -> None:
            if notification.num_delivered == 1:
                await anyio.sleep_forever()

        t = await handle(app, url)
        assert t.outcomes(index) == ["retried", "acked"]
        error = t.settled(index)[0].error
        assert isinstance(error, ExceptionGroup)
        assert [type(each) for each in error.exceptions] == [TimeoutError]

    @pytest.mark.slow
    async def test_a_worker_that_stops_cancels_it_and_gives_the_notification_back(
        self, app: App, told: list[str]
    ) -> None:
        begun = anyio.Event()

        @app.around
        async def swallow(notification: Notification[Any]) -> AsyncIterator[None]:
            try:
                yield
            except anyio.get_cancelled_exc_class():
                told.append("cancelled")

        @app.agent("mars")
        async def index(notification: Notification[Any]) -> None:
            told.append("index")
            if told.count("index") == 1:
                begun.set()
                await anyio.sleep_forever()

        async with harness(app) as t:
            await t.notify("mars", mars(), {})
            await begun.wait()
            await t.stop()
            assert told == ["index", "cancelled"]
            assert t.outcomes(index) == []
            await t.start()
            await t.settle()
            assert t.outcomes(index) == ["acked"]


class Pool:
    pass


class Session:
    def __init__(self, name: str) -> None:
        self.name = name


class Repository:
    def __init__(self, session: Session) -> None:
        self.session = session


class TestResourcesOfCalls:
    @pytest.fixture
    def opened(self, app: App, told: list[str]) -> None:
        """A session for each call, and what is made of it; they tell of themselves."""

        @app.resource(scope="call")
        async def repository(session: Session) -> AsyncIterator[Repository]:
            told.append("repository")
            yield Repository(session)
            told.append("repository closed")

        @app.resource(scope="call")
        async def session(pool: Pool) -> AsyncIterator[Session]:
            told.append("session")
            try:
                yield Session("s")
            except Exception as error:
                told.append(f"rolled back: {type(error).__name__}")
                raise
            told.append("committed")

        @app.resource
        def pool() -> Pool:
            told.append("pool")
            return Pool()

    async def test_are_opened_for_each_call_and_closed_in_the_opposite_order(
        self, app: App, url: str | None, told: list[str], opened: None
    ) -> None:
        sessions: list[Session] = []

        @app.agent("mars")
        async def index(notification: Notification[Any], repository: Repository, session: Session) -> None:
            assert repository.session is session
            sessions.append(session)
            told.append("index")

        t = await handle(app, url, 1, 2)
        of_a_call = ["session", "repository", "index", "repository closed", "committed"]
        assert told == ["pool", *of_a_call, *of_a_call]
        assert t.outcomes(index) == ["acked", "acked"]
        assert sessions[0] is not sessions[1]

    async def test_are_not_opened_for_who_needs_none(
        self, app: App, url: str | None, told: list[str], opened: None
    ) -> None:
        @app.agent("mars")
        async def index(notification: Notification[Any], pool: Pool) -> None: ...

        await handle(app, url)
        assert told == ["pool"]

    async def test_have_the_functions_error_raised_at_their_yield(
        self, app: App, url: str | None, told: list[str], opened: None
    ) -> None:
        @app.agent("mars", retry=PROMPT)
        async def index(notification: Notification[Any], session: Session) -> Retry | None:
            return Retry(after=0.05) if len(told) == 2 else None

        t = await handle(app, url)
        assert told == ["pool", "session", "rolled back: Retry", "session", "committed"]
        assert t.outcomes(index) == ["retried", "acked"]

    async def test_cannot_make_a_failure_of_the_function_a_success(
        self, app: App, url: str | None, told: list[str]
    ) -> None:
        @app.resource(scope="call")
        async def session() -> AsyncIterator[Session]:
            try:
                yield Session("s")
            except ConnectionError:
                told.append("rolled back, and forgot to raise")

        @app.agent("mars", retry=PROMPT)
        async def index(notification: Notification[Any], session: Session) -> None:
            if not told:
                raise ConnectionError

        t = await handle(app, url)
        assert (told, t.outcomes(index)) == (["rolled back, and forgot to raise"], ["retried", "acked"])

    @pytest.mark.parametrize("where", ["opening", "closing"])
    async def test_fail_the_call_where_they_cannot_be_opened_or_closed(
        self, app: App, url: str | None, told: list[str], where: str
    ) -> None:
        @app.resource(scope="call")
        async def session() -> AsyncIterator[Session]:
            told.append("session")
            if where == "opening" and told.count("session") == 1:
                raise RuntimeError
            yield Session("s")
            if told.count("session") == 1:
                raise RuntimeError

        @app.agent("mars", retry=PROMPT)
        async def index(notification: Notification[Any], session: Session) -> None:
            told.append("index")

        t = await handle(app, url)
        assert [(fact.outcome, fact.reason) for fact in t.settled(index)] == [
            ("retried", "RuntimeError"),
            ("acked", ""),
        ]
        assert told == (["session"] if where == "opening" else ["session", "index"]) + ["session", "index"]

    async def test_are_given_to_functions_of_every_kind(self, app: App, url: str | None) -> None:
        seen: set[str] = set()

        @app.resource(scope="call")
        def session(pool: Pool) -> Iterator[Session]:
            yield Session("s")

        @app.resource
        def pool() -> Pool:
            return Pool()

        @app.agent("mars")
        def in_thread(notification: Notification[Any], session: Session, pool: Pool) -> None:
            seen.add(f"in_thread {session.name}")

        @app.agent("mars", timeout=60)
        async def yielding(notification: Notification[Any], session: Session) -> AsyncIterator[Notify]:
            seen.add(f"yielding {session.name}")
            yield Notify("plain", {"a": 1, "b": "x"})

        @app.agent("mars", singleton=True)
        async def alone(notification: Notification[Any], session: Session) -> None:
            seen.add(f"alone {session.name}")

        @app.agent("mars")
        async def many(batch: Batch[Any], session: Session) -> None:
            seen.add(f"many {session.name}")

        t = await handle(app, url)
        assert seen == {"in_thread s", "yielding s", "alone s", "many s"}
        assert [t.outcomes(agent) for agent in (in_thread, yielding, alone, many)] == [["acked"]] * 4
        assert len(t.published) == 2

    async def test_are_opened_for_each_tick_of_a_timer(self, app: App, told: list[str], opened: None) -> None:
        @app.every("1m", singleton=False)
        async def tidy(tick: Tick, session: Session) -> None:
            told.append(session.name)
            if told.count(session.name) == 1:
                raise ConnectionError

        async with harness(app) as t:
            await t.advance(120)
            assert [type(fact.error) for fact in t.ticks(tidy)] == [ConnectionError, type(None)]
        assert told == ["pool", "session", "s", "rolled back: ConnectionError", "session", "s", "committed"]

    async def test_may_need_the_notification(self, app: App, url: str | None, told: list[str]) -> None:
        @app.resource(scope="call")
        def session(notification: Notification[Any]) -> Session:
            return Session(notification.identifier["step"])

        @app.agent("mars")
        async def index(notification: Notification[Any], session: Session) -> None:
            told.append(session.name)

        await handle(app, url, 1, 2)
        assert told == ["1", "2"]

    async def test_are_opened_inside_of_what_is_around_the_call_and_outside_of_what_needs_them(
        self, app: App, url: str | None, told: list[str], opened: None
    ) -> None:
        @app.around
        async def measure(notification: Notification[Any], pool: Pool) -> AsyncIterator[None]:
            told.append("measure")
            yield
            told.append("measured")

        @app.around
        async def log(notification: Notification[Any], session: Session) -> AsyncIterator[None]:
            told.append("log")
            yield
            told.append("logged")

        @app.agent("mars")
        async def index(notification: Notification[Any], repository: Repository) -> None:
            told.append("index")

        await handle(app, url)
        assert told[1:] == [
            *("measure", "session", "log", "repository", "index"),
            *("repository closed", "logged", "committed", "measured"),
        ]

    async def test_are_replaced_by_what_a_test_gives(
        self, app: App, url: str | None, told: list[str], opened: None
    ) -> None:
        @app.agent("mars")
        async def index(notification: Notification[Any], repository: Repository) -> None:
            told.append(repository.session.name)

        async with harness(app, server=url, resources={Session: Session("fake")}) as t:
            await t.notify("mars", mars(), {})
            await t.settle()
        assert told == ["pool", "repository", "fake", "repository closed"]


async def test_what_a_batch_has_acked_is_tried_again_where_its_session_cannot_be_committed(
    app: App, url: str | None
) -> None:
    committed: list[str] = []
    commits = 0

    @app.resource(scope="call")
    async def rows() -> AsyncIterator[list[str]]:
        nonlocal commits
        written: list[str] = []
        yield written
        commits += 1
        if commits == 1:
            raise ConnectionError("the database is away")
        committed.extend(written)

    @app.agent("mars", batch=Batching(size=4, within=10), retry=PROMPT)
    async def load(batch: Batch[Any], rows: list[str]) -> None:
        for notification in batch:
            rows.append(notification.identifier["step"])
            if notification.identifier["step"] < "2":
                batch.ack(notification)

    async with harness(app, server=url) as t:
        for step in range(4):
            await t.notify("mars", mars(step=step), {})
        await t.settle()

        assert sorted(committed) == ["0", "1", "2", "3"]
        assert t.outcomes("load").count("acked") == 4
