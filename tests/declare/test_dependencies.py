"""Dependencies: how they are declared, which failures say that one is away, and how it is in the worker here."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import http.client
import socket
import sqlite3
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from email.message import Message
from typing import Any

import anyio
import anyio.to_thread
import httpx
import pytest

from aviso_workers import App, Batch, Dependency, Notification, Router, Unavailable
from aviso_workers.declare.dependencies import OWN_TIMEOUT, at_work, is_unavailable, retry_after_seconds
from aviso_workers.errors import DeclarationError

pytestmark = pytest.mark.anyio

SHORT = 0.05


class DatabaseGoneError(Exception):
    """An error of a client that nobody else knows."""


@pytest.fixture(scope="module")
def silent() -> Iterator[int]:
    """The port of a server that accepts connections and never answers."""
    server = socket.create_server(("127.0.0.1", 0))
    accepted: list[socket.socket] = []

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                accepted.append(server.accept()[0])

    threading.Thread(target=accept, daemon=True).start()
    yield server.getsockname()[1]
    server.shutdown(socket.SHUT_RDWR)
    for each in (server, *accepted):
        each.close()


async def failure(call: Callable[[], Any]) -> BaseException:
    """Return what the call raises; one that is not async runs in a thread, as of an agent."""
    try:
        if asyncio.iscoroutinefunction(call):
            await call()
        else:
            await anyio.to_thread.run_sync(call)
    except Exception as error:
        return error
    raise AssertionError("it raises nothing")


class TestAway:
    """Sockets and clients say that something is away, also by what has caused their error."""

    @pytest.mark.parametrize(
        "error",
        [
            Unavailable("maintenance"),
            ConnectionRefusedError(111, "refused"),
            ConnectionResetError(),
            BrokenPipeError(),
            OSError(113, "no route to host"),
            TimeoutError(110, "connection timed out"),
            socket.gaierror(-2, "name or service not known"),
            sqlite3.OperationalError("database is locked"),
            urllib.error.HTTPError("http://x", 503, "unavailable", Message(), None),
            httpx.HTTPStatusError("too many", request=httpx.Request("GET", "http://x"), response=httpx.Response(429)),
        ],
        ids=repr,
    )
    def test_errors_that_say_it(self, error: Exception) -> None:
        assert is_unavailable(error)

    async def test_a_socket_that_waits_for_too_long(self, silent: int) -> None:
        def receive() -> None:
            with socket.create_connection(("127.0.0.1", silent)) as connection:
                connection.settimeout(SHORT)
                connection.recv(1)

        def read() -> None:
            with (
                socket.create_connection(("127.0.0.1", silent), timeout=SHORT) as connection,
                connection.makefile("rb") as file,
            ):
                file.read(1)

        def request() -> None:
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", silent, timeout=SHORT)) as connection:
                connection.request("GET", "/")
                connection.getresponse()

        def fetch() -> None:
            urllib.request.urlopen(f"http://127.0.0.1:{silent}", timeout=SHORT)

        for call in (receive, read, request, fetch):
            error = await failure(call)
            assert is_unavailable(error), (call, error)

    async def test_a_client_that_waits_for_too_long_or_is_refused(self, silent: int) -> None:
        async def wait() -> None:
            async with httpx.AsyncClient(timeout=SHORT, trust_env=False) as client:
                await client.get(f"http://127.0.0.1:{silent}")

        def wait_in_thread() -> None:
            httpx.get(f"http://127.0.0.1:{silent}", timeout=SHORT, trust_env=False)

        async def connect() -> None:
            async with httpx.AsyncClient(trust_env=False) as client:
                await client.get("http://127.0.0.1:1")

        for call in (wait, wait_in_thread, connect):
            error = await failure(call)
            assert is_unavailable(error), (call, error)

    async def test_a_library_that_sets_the_time_itself(self, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        installed = tmp_path / "site-packages"
        installed.mkdir()
        (installed / "some_client.py").write_text(
            "import asyncio\nasync def ask():\n    async with asyncio.timeout(0.01):\n        await asyncio.sleep(5)\n"
        )
        monkeypatch.syspath_prepend(str(installed))
        import some_client  # type: ignore[import-not-found]

        async def handler() -> None:
            await some_client.ask()

        assert is_unavailable(await failure(handler))
        error = await failure(some_client.ask)
        assert error.__traceback__ is not None
        as_called_by_us = error.with_traceback(error.__traceback__.tb_next)
        assert not is_unavailable(as_called_by_us), "the app itself is installed"

    def test_what_the_author_lists_and_what_it_has_caused(self) -> None:
        error = RuntimeError("no field")
        error.__cause__ = DatabaseGoneError()
        assert not is_unavailable(error)
        assert is_unavailable(error, (DatabaseGoneError,))
        assert is_unavailable(TimeoutError(), (TimeoutError,))

    @pytest.mark.parametrize("group", [anyio.create_task_group, asyncio.TaskGroup])
    async def test_a_task_group_all_of_whose_errors_say_it(self, group: Callable[[], Any], silent: int) -> None:
        """A group beside them says nothing of others where one of its errors does not."""

        async def ask() -> None:
            async with httpx.AsyncClient(timeout=SHORT, trust_env=False) as client:
                await client.get(f"http://127.0.0.1:{silent}")

        async def limit() -> None:
            async with asyncio.timeout(SHORT):
                await asyncio.sleep(5)

        def asked(*calls: Callable[[], Any]) -> Callable[[], Any]:
            async def together() -> None:
                async with group() as tasks:
                    for call in calls:
                        if isinstance(tasks, asyncio.TaskGroup):
                            tasks.create_task(call())
                        else:
                            tasks.start_soon(call)

            return together

        assert is_unavailable(await failure(asked(ask)))
        assert is_unavailable(await failure(asked(asked(ask))))
        assert not is_unavailable(await failure(asked(limit)))
        wrong = ExceptionGroup("both", [ConnectionRefusedError(), ValueError()])
        assert not is_unavailable(wrong)
        later = ExceptionGroup("both", [Unavailable("a", after=5), Unavailable("b", after=9)])
        assert retry_after_seconds(later, datetime.now(UTC)) == 9


class TestWrong:
    """What the author's code limits or raises says nothing of others."""

    @pytest.mark.parametrize(
        "error",
        [ValueError(), OSError(2, "no such file"), sqlite3.OperationalError("no such table"), TimeoutError()],
        ids=repr,
    )
    def test_errors_that_do_not_say_it(self, error: Exception) -> None:
        assert not is_unavailable(error)

    async def test_a_limit_of_the_author(self, silent: int) -> None:
        async def by_asyncio() -> None:
            async with asyncio.timeout(SHORT):
                await asyncio.sleep(5)

        async def by_wait_for() -> None:
            await asyncio.wait_for(asyncio.sleep(5), SHORT)

        async def by_anyio() -> None:
            with anyio.fail_after(SHORT):
                await anyio.sleep(5)

        async def around_a_client() -> None:
            async with httpx.AsyncClient(timeout=None, trust_env=False) as client, asyncio.timeout(SHORT):
                await client.get(f"http://127.0.0.1:{silent}")

        async def around_a_connection() -> None:
            async with asyncio.timeout(SHORT):
                reader, _ = await asyncio.open_connection("127.0.0.1", silent)
                await reader.read(1)

        async def raised_again() -> None:
            try:
                await by_asyncio()
            except TimeoutError as error:
                raise RuntimeError("the report is too slow") from error

        def of_a_thread() -> None:
            with concurrent.futures.ThreadPoolExecutor() as pool:
                pool.submit(time.sleep, 4 * SHORT).result(timeout=SHORT)

        def by_hand() -> None:
            raise TimeoutError("the report takes too long")

        limited = (by_asyncio, by_wait_for, by_anyio, around_a_client, around_a_connection, raised_again)
        for call in (*limited, of_a_thread, by_hand):
            error = await failure(call)
            assert not is_unavailable(error), (call, error)

    def test_the_timeout_of_the_agent(self) -> None:
        error = TimeoutError(110, "not done within 1 s")
        setattr(error, OWN_TIMEOUT, True)
        assert not is_unavailable(error, (TimeoutError,))


def test_a_server_says_when_to_come_again() -> None:
    now = datetime(2026, 11, 29, 6, 0, tzinfo=UTC)

    def asked(header: str) -> float:
        response = httpx.Response(429, headers={"Retry-After": header})
        error = httpx.HTTPStatusError("", request=httpx.Request("GET", "http://x"), response=response)
        return retry_after_seconds(error, now)

    assert [asked("30"), asked("Sun, 29 Nov 2026 06:01:00 GMT"), asked("soon")] == [30, 60, 0]
    assert [asked("-30"), asked("Sun, 29 Nov 2026 05:59:00 GMT")] == [0, 0], "a time that has passed"
    assert retry_after_seconds(Unavailable(after="5m"), now) == 300
    assert retry_after_seconds(ValueError(), now) == 0


class TestDeclared:
    def test_it_has_what_it_is_given(self) -> None:
        app = App("field")
        catalogue = app.dependency("catalogue", unavailable=[DatabaseGoneError], patience="2h", by=["class"])
        assert (catalogue.name, catalogue.unavailable, catalogue.patience, catalogue.by) == (
            "catalogue",
            (DatabaseGoneError,),
            7200,
            ("class",),
        )

        @app.agent("mars", depends_on=catalogue)
        async def index(notification: Notification[Any]) -> None: ...

        @app.agent("mars")
        async def verify(notification: Notification[Any]) -> None: ...

        assert index.dependency is catalogue
        own = verify.dependency
        assert (own.name, own.unavailable, own.patience, own.by) == ("verify", (), 86400, ())

    @pytest.mark.parametrize(
        ("given", "told"),
        [
            ({"unavailable": ["ValueError"]}, "unavailable= takes classes of exceptions, found 'ValueError'"),
            ({"unavailable": ValueError()}, "unavailable= takes classes of exceptions"),
            ({"patience": "soon"}, "patience="),
            ({"patience": -1}, "patience= must not be below 0, found -1"),
            ({"by": "class"}, r'by= must be a list of identifier fields, as in \["class"\], found .class.'),
        ],
    )
    def test_what_means_nothing_is_refused(self, given: dict[str, Any], told: str) -> None:
        with pytest.raises(DeclarationError, match=f"dependency 'catalogue': {told}"):
            App("field").dependency("catalogue", **given)

    def test_a_name_is_taken_once(self) -> None:
        app = App("field")
        app.dependency("catalogue")
        with pytest.raises(DeclarationError, match="dependency 'catalogue' is declared twice in 'field'"):
            app.dependency("catalogue")
        with pytest.raises(DeclarationError, match="dependency name 'a b'"):
            app.dependency("a b")

    def test_agents_are_given_the_object(self) -> None:
        given: Any = "catalogue"
        with pytest.raises(DeclarationError, match=r"depends_on= takes an object that app.dependency\(name\) has"):

            @App("field").agent("mars", depends_on=given)
            async def index(notification: Notification[Any]) -> None: ...

    def test_the_fields_of_by_are_part_of_the_topic(self) -> None:
        app = App("field")
        app.event_type("mars", key=["class", "step"])

        @app.agent("mars", depends_on=app.dependency("catalogue", by=["clas"]))
        async def index(notification: Notification[Any]) -> None: ...

        (mistake,) = app.mistakes()
        assert "dependency 'catalogue': by=: 'clas' is not part of the topic; did you mean 'class'?" in mistake

    def test_a_call_with_many_has_no_key(self) -> None:
        app = App("field")
        with pytest.raises(DeclarationError, match="a dependency with by= is for a function of a Notification"):

            @app.agent("mars", depends_on=app.dependency("catalogue", by=["class"]))
            async def index(notifications: Batch[Any]) -> None: ...

    def test_an_app_says_nothing_of_what_is_away_any_more(self) -> None:
        old: Any = {"unavailable": [ValueError]}
        with pytest.raises(DeclarationError, match=r"say depends_on=app\.dependency\(\.\.\., unavailable=\[\.\.\.\]\)"):
            App("field", **old)
        wrong: Any = {"unavailible": []}
        with pytest.raises(TypeError, match="unexpected keyword argument 'unavailible'"):
            App("field", **wrong)


class TestOfRouters:
    def test_a_prefix_is_put_before_its_name(self) -> None:
        app, router = App("field"), Router("r")
        app.event_type("mars", key=["class"])
        app.include(router, prefix="a")
        catalogue = router.dependency("catalogue")

        @router.agent("mars", depends_on=catalogue)
        async def index(notification: Notification[Any]) -> None: ...

        app.include(router, prefix="b")
        assert sorted(app.dependencies) == ["a_catalogue", "b_catalogue"]
        assert {each.name: each.dependency for each in app.agents} == {
            "a_index": app.dependencies["a_catalogue"],
            "b_index": app.dependencies["b_catalogue"],
        }
        assert app.mistakes() == []

    def test_what_the_app_does_not_have_is_a_mistake(self) -> None:
        app, router = App("field"), Router("r")
        app.event_type("mars", key=["class"])

        @app.agent("mars", depends_on=router.dependency("catalogue"))
        async def index(notification: Notification[Any]) -> None: ...

        (mistake,) = app.mistakes()
        assert "depends_on= is a dependency 'catalogue' that the app does not have under this name" in mistake
        app.include(router)
        assert app.mistakes() == []


class Played:
    """How a dependency is in a worker."""

    def __init__(self) -> None:
        self.is_away, self.reason = False, ""
        self.since: datetime | None = None
        self.calls: list[object] = []

    def trip(self, reason: str, after_seconds: float | None) -> None:
        self.is_away, self.reason = True, reason
        self.calls.append((after_seconds, threading.current_thread()))

    def reset(self) -> None:
        self.is_away = False
        self.calls.append(threading.current_thread())


class TestAtWork:
    async def test_it_says_how_it_is_and_can_be_tripped(self) -> None:
        app = App("field")
        catalogue, played = app.dependency("catalogue"), Played()
        outages: dict[str, Played] = {}
        with at_work(app.dependencies.values(), outages):
            outages["catalogue"] = played  # an agent begins
            assert (catalogue.is_away, catalogue.since, catalogue.reason) == (False, None, "")
            catalogue.trip("maintenance", after="1h")
            assert (catalogue.is_away, catalogue.reason) == (True, "maintenance")
            await anyio.to_thread.run_sync(catalogue.reset)
            await self.until(lambda: not catalogue.is_away)
            await anyio.to_thread.run_sync(catalogue.trip, "again")
            await self.until(lambda: catalogue.is_away)
            with pytest.raises(DeclarationError, match="trip: after"):
                catalogue.trip("maintenance", after="soon")
        here = threading.current_thread()
        assert played.calls == [(3600, here), here, (None, here)], "on the thread of the event loop"

    @staticmethod
    async def until(condition: Callable[[], bool]) -> None:
        with anyio.fail_after(5):
            while not condition():  # noqa: ASYNC110 - another thread has it changed
                await anyio.sleep(0.001)

    async def test_outside_of_a_running_app_it_says_so(self) -> None:
        app = App("field")
        catalogue = app.dependency("catalogue")
        acts: list[Callable[[], object]] = [
            lambda: catalogue.is_away,
            lambda: catalogue.since,
            lambda: catalogue.reason,
            lambda: catalogue.trip("maintenance"),
            catalogue.reset,
        ]
        wanted = "dependency 'catalogue' is not at work here: no agent that depends on it runs in this process"
        with at_work(app.dependencies.values(), {}):
            for act in acts:
                with pytest.raises(DeclarationError, match=wanted):
                    act()
        for act in acts:
            with pytest.raises(DeclarationError, match=wanted):
                act()

    async def test_each_worker_of_a_process_has_its_own(self) -> None:
        app = App("field")
        catalogue = app.dependency("catalogue")
        began, end = anyio.Event(), anyio.Event()

        async def worker(played: Played, then: Callable[[], Awaitable[None]]) -> None:
            with at_work(app.dependencies.values(), {"catalogue": played}):
                await then()

        async def trip() -> None:
            await began.wait()
            catalogue.trip("maintenance")
            end.set()

        async def look() -> None:
            began.set()
            await end.wait()
            assert not catalogue.is_away

        one, other = Played(), Played()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(worker, one, trip)
            tasks.start_soon(worker, other, look)
        assert (one.is_away, other.is_away) == (True, False)

    async def test_of_several_with_a_prefix_the_one_of_the_app_is_asked(self) -> None:
        app, router = App("field"), Router("r")
        catalogue = router.dependency("catalogue")
        app.include(router, prefix="a")
        played = {"a_catalogue": Played()}
        with at_work(app.dependencies.values(), played):
            catalogue.trip("maintenance")
            assert app.dependencies["a_catalogue"].is_away
        app.include(router, prefix="b")
        with at_work(app.dependencies.values(), played | {"b_catalogue": Played()}):
            with pytest.raises(
                DeclarationError, match="included as a_catalogue and as b_catalogue: ask the one of app"
            ):
                _ = catalogue.is_away
            assert not app.dependencies["b_catalogue"].is_away


def test_its_type_is_public() -> None:
    assert isinstance(App("field").dependency("catalogue"), Dependency)
