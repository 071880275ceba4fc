"""An app inside of another program's event loop: when its block begins, how it ends, and what is seen of it."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NoReturn

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
import structlog

from aviso_workers import App, Notification, Reject
from aviso_workers.backends.in_memory.consumer import InMemoryConnection
from aviso_workers.backends.provisioning import Provisioner
from aviso_workers.declare.retry import RetryPolicy
from aviso_workers.errors import (
    ConfigError,
    DeclarationError,
    ResourceError,
    UnavailableError,
)
from aviso_workers.events import AgentDisturbed, AgentStopped, Settled
from aviso_workers.server import NatsServer
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

IN_MEMORY = """
notification_backend:
  kind: in_memory
  in_memory: {max_history_per_topic: 100}
notification_schema:
  mars:
    topic: {base: mars, key_order: [class, step]}
    identifier:
      class: {type: StringHandler, required: true}
      step: {type: IntHandler, required: true}
workers:
  status: {token: secret}
"""


@pytest.fixture
def app(tmp_path: Path) -> App:
    path = tmp_path / "in_memory.yaml"
    path.write_text(IN_MEMORY)
    return App("embedded", config=path)


class Work:
    """An agent that takes as long as a test wants."""

    def __init__(self, app: App) -> None:
        self.begun, self.go, self.cancelled = anyio.Event(), anyio.Event(), anyio.Event()
        self.done: list[str] = []
        app.agent("mars", name="work")(self.handle)

    async def handle(self, notification: Notification[Any]) -> None:
        self.begun.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        self.done.append(notification.identifier["step"])


@pytest.fixture
def work(app: App) -> Work:
    return Work(app)


async def notify(app: App, step: int = 6) -> None:
    await app.notify("mars", {"class": "od", "step": step})


async def get(url: str, token: str = "secret") -> tuple[int, str]:
    def ask() -> tuple[int, str]:
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    return await anyio.to_thread.run_sync(ask)


class TestTheBlock:
    async def test_begins_when_every_agent_reads(self, app: App) -> None:
        handled: list[str] = []
        done = anyio.Event()

        @app.agent("mars", start="new")  # what is published before it reads, it does not see
        async def index(notification: Notification[Any]) -> None:
            handled.append(notification.identifier["step"])
            done.set()

        with anyio.fail_after(PATIENCE_SECONDS):
            async with app.running() as running:
                assert running is app
                assert list(app.runs) == ["index"]
                await notify(app, 12)
                await done.wait()
        assert handled == ["12"]
        assert app.runs == {}

    async def test_begins_without_agents(self, app: App) -> None:
        with anyio.fail_after(PATIENCE_SECONDS):
            async with app.running():
                await notify(app)

    async def test_does_not_wait_for_an_agent_that_has_said_why_it_cannot_read(
        self, app: App, work: Work, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def ensure_consumer(*_: object, **__: object) -> NoReturn:
            raise UnavailableError("no leader")

        monkeypatch.setattr(Provisioner, "ensure_consumer", ensure_consumer)
        disturbed: list[AgentDisturbed] = []
        app.events.listen(disturbed.append, AgentDisturbed)
        with anyio.fail_after(PATIENCE_SECONDS):
            async with app.running():
                assert {event.agent for event in disturbed} >= {"work"}

    async def test_ends_when_what_runs_has_finished(self, app: App, work: Work) -> None:
        stopped: list[AgentStopped] = []
        app.events.listen(stopped.append, AgentStopped)
        with anyio.fail_after(PATIENCE_SECONDS):
            async with app.running():
                await notify(app)
                await work.begun.wait()
                work.go.set()
        assert work.done == ["6"]
        (of_agent,) = (event for event in stopped if event.agent == "work")
        assert (of_agent.finished, of_agent.returned) == (1, 0)

    async def test_that_raises_lets_what_runs_finish_and_raises_that(self, app: App, work: Work) -> None:
        async def program() -> None:
            async with app.running():
                await notify(app)
                await work.begun.wait()
                asyncio.get_running_loop().call_later(0.01, work.go.set)
                raise KeyError("mine")

        with anyio.fail_after(PATIENCE_SECONDS), pytest.raises(KeyError, match="mine"):
            await program()
        assert work.done == ["6"]

    async def test_that_is_cancelled_lets_what_runs_finish(self, app: App, work: Work) -> None:
        with anyio.fail_after(PATIENCE_SECONDS):
            with anyio.CancelScope() as scope:
                async with app.running():
                    await notify(app)
                    await work.begun.wait()
                    asyncio.get_running_loop().call_later(0.01, work.go.set)
                    scope.cancel()
                    await anyio.sleep_forever()
        assert scope.cancelled_caught
        assert work.done == ["6"]
        assert not work.cancelled.is_set()

    async def test_of_a_task_that_is_cancelled_once_finishes_and_twice_does_not(self, app: App, work: Work) -> None:
        async def program() -> None:
            async with app.running():
                await notify(app)
                await anyio.sleep_forever()

        with anyio.fail_after(PATIENCE_SECONDS):
            task = asyncio.create_task(program())
            await work.begun.wait()
            task.cancel()
            while not app.runs["work"].flow.closed:
                await anyio.lowlevel.checkpoint()
            assert not work.cancelled.is_set()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert (work.cancelled.is_set(), work.done) == (True, [])

    async def test_tells_handlers_that_it_ends(self, app: App) -> None:
        seen: list[bool] = []
        begun = anyio.Event()

        @app.agent("mars")
        async def index(notification: Notification[Any]) -> None:
            begun.set()
            while not app.stopping:  # noqa: ASYNC110
                await anyio.sleep(0.01)
            seen.append(app.stopping)

        with anyio.fail_after(PATIENCE_SECONDS):
            async with app.running():
                await notify(app)
                await begun.wait()
                assert not app.stopping
        assert seen == [True]

    async def test_is_cancelled_and_raises_why_when_the_connection_is_lost_for_good(
        self, app: App, work: Work, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def failed(self: InMemoryConnection) -> NoReturn:
            await work.begun.wait()
            raise UnavailableError("lost for good")

        async def program() -> None:
            async with app.running():
                await notify(app)
                await anyio.sleep_forever()

        monkeypatch.setattr(InMemoryConnection, "failed", failed)
        with anyio.fail_after(PATIENCE_SECONDS), pytest.raises(UnavailableError, match="lost for good"):
            await program()
        assert "worker.failed app='embedded' error='lost for good'" in caplog.messages

    async def test_raises_why_a_server_does_not_come_back(
        self, write_config: Callable[..., Path], nats_server: NatsServer
    ) -> None:
        app = App("embedded", config=write_config(nats_server.url, enable_auto_reconnect=False))
        work = Work(app)

        async def program() -> None:
            async with app.running():
                await notify(app)
                await work.begun.wait()
                nats_server.kill()
                await anyio.sleep_forever()

        with anyio.fail_after(PATIENCE_SECONDS), pytest.raises(UnavailableError, match="is lost for good"):
            await program()
        assert work.cancelled.is_set()

    async def test_is_entered_by_one_task_of_two(self, app: App, work: Work) -> None:
        work.go.set()
        refused: list[str] = []
        left = anyio.Event()

        async def enter(step: int) -> None:
            try:
                async with app.running():
                    await notify(app, step)
                    await left.wait()
            except DeclarationError as error:
                refused.append(str(error))
                left.set()

        with anyio.fail_after(PATIENCE_SECONDS):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(enter, 1)
                tasks.start_soon(enter, 2)
        assert refused == ["app 'embedded' is connected already"]
        assert len(work.done) == 1

    async def test_is_used_in_its_own_event_loop_only(self, app: App) -> None:
        """Its connection would never answer in another one."""

        def in_another_loop() -> list[str]:
            async def publish() -> list[str]:
                said = []
                for call in (lambda: app.session, lambda: app.sync(app.notify, "mars", {"class": "od", "step": 1})):
                    with pytest.raises(DeclarationError) as found:
                        call()
                    said.append(str(found.value))
                return said

            return asyncio.run(publish())

        with anyio.fail_after(PATIENCE_SECONDS):
            async with app.running():
                elsewhere, waiting = await anyio.to_thread.run_sync(in_another_loop)
        assert elsewhere.startswith("app 'embedded' is connected in another event loop: ")
        assert waiting.endswith("`await asyncio.to_thread(app.sync, App.notify, ...)` instead")

    async def test_may_be_entered_again_and_not_twice_at_once(self, app: App, work: Work) -> None:
        work.go.set()
        with anyio.fail_after(PATIENCE_SECONDS):
            async with app.running():
                with pytest.raises(DeclarationError, match="app 'embedded' is connected already"):
                    await app.running().__aenter__()
                await notify(app, 1)
                await work.begun.wait()
            work.begun = anyio.Event()
            async with app.running():
                await notify(app, 2)
                await work.begun.wait()
        assert work.done == ["1", "2"]


class TestWhatKeepsItFromBeginning:
    async def test_are_mistakes_all_of_them(self, app: App) -> None:
        @app.agent("marsh")
        async def index(notification: Notification[Any]) -> None: ...

        @app.agent("mars", where={"level": 1})
        async def load(notification: Notification[Any]) -> None: ...

        with pytest.raises(ConfigError) as raised:
            async with app.running():
                pytest.fail("it began")
        assert [mistake.split(":")[0] for mistake in raised.value.mistakes] == ["agent 'index'", "agent 'load'"]

    async def test_is_a_resource_that_cannot_be_opened(self, app: App) -> None:
        @app.resource
        async def settings() -> AsyncIterator[Work]:
            raise OSError("no such host")
            yield

        with pytest.raises(ResourceError, match="resource 'settings' cannot be opened: OSError: no such host"):
            async with app.running():
                pytest.fail("it began")

    async def test_is_a_port_that_is_taken_and_nothing_listens_afterwards(
        self, app: App, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO")
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
                async with app.running(status_port=port):
                    pytest.fail("it began")
        async with app.running():
            pass
        assert caplog.messages.count("connection.up") == 1

    async def test_is_waiting_for_its_server_which_a_cancellation_ends(
        self, write_config: Callable[..., Path], free_port: int
    ) -> None:
        app = App("embedded", config=write_config(f"nats://127.0.0.1:{free_port}", max_reconnect_attempts=None))
        with anyio.fail_after(PATIENCE_SECONDS), anyio.CancelScope() as scope:
            app.events.listen(lambda _: scope.cancel())
            async with app.running():
                pytest.fail("it began")
        assert scope.cancelled_caught

    async def test_is_waiting_for_its_server_until_that_comes(
        self, write_config: Callable[..., Path], free_port: int, tmp_path: Path
    ) -> None:
        app = App("embedded", config=write_config(f"nats://127.0.0.1:{free_port}"))
        work = Work(app)
        work.go.set()
        missing = anyio.Event()
        app.events.listen(lambda _: missing.set())
        with anyio.fail_after(PATIENCE_SECONDS):
            async with anyio.create_task_group() as tasks:

                async def program() -> None:
                    async with app.running():
                        await notify(app)
                        await work.begun.wait()

                tasks.start_soon(program)
                await missing.wait()
                with NatsServer.start(store_dir=tmp_path / "store", port=free_port):
                    await work.begun.wait()
                    while app.runs:  # noqa: ASYNC110
                        await anyio.sleep(0.01)
        assert work.done == ["6"]


class TestWhatIsSeen:
    async def test_are_failures_and_dead_letters_in_the_programs_log(
        self, app: App, caplog: pytest.LogCaptureFixture
    ) -> None:
        settled: list[str] = []
        done = anyio.Event()

        def note(event: Settled) -> None:
            settled.append(event.outcome)
            if event.outcome == "dead_lettered":
                done.set()

        app.events.listen(note, Settled)

        @app.agent("mars", retry=RetryPolicy(first=0.01))
        async def index(notification: Notification[Any]) -> None:
            if notification.num_delivered == 1:
                raise ValueError("boom\n2026-01-01 [info] forged")
            raise Reject("as agreed")

        caplog.set_level("INFO", logger="aviso_workers")
        with anyio.fail_after(PATIENCE_SECONDS):
            async with app.running():
                await notify(app)
                await done.wait()

        assert settled == ["retried", "dead_lettered"]
        assert not structlog.is_configured()
        ours = [record for record in caplog.records if record.name == "aviso_workers"]
        lines = {record.message.split()[0]: record for record in ours}
        assert lines["worker.started"].message == "worker.started app='embedded' agents=['index']"
        retried, dead_lettered = lines["notification.retried"], lines["notification.dead_lettered"]
        assert retried.message.startswith(
            "notification.retried agent='index' notification='mars@1' reason='ValueError' "
        )
        assert (retried.levelno, dead_lettered.levelno) == (logging.WARNING, logging.ERROR)
        assert retried.exc_info is not None
        assert isinstance(retried.exc_info[1], ValueError)
        assert " reason='rejected' " in dead_lettered.message
        assert ours[-1].message == "worker.stopped app='embedded'"

    async def test_is_in_structlog_where_the_program_has_configured_that(self, app: App, work: Work) -> None:
        entries: list[Any] = []

        def capture(_: object, level: str, entry: Any) -> NoReturn:
            entries.append((level, entry["event"]))
            raise structlog.DropEvent

        structlog.configure(processors=[capture])
        async with app.running():
            pass
        assert [entries[0], entries[-1]] == [("info", "worker.started"), ("info", "worker.stopped")]

    async def test_is_a_status_port_where_it_is_asked_for(
        self, app: App, work: Work, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO", logger="aviso_workers")
        work.go.set()
        with anyio.fail_after(PATIENCE_SECONDS):
            async with app.running(status_port=0):
                (started,) = (line for line in caplog.messages if line.startswith("worker.started"))
                url = started.rpartition("status=")[2].strip("'")
                await notify(app)
                while not work.done:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
                assert await get(f"{url}/readyz") == (200, "ok\n")
                status, numbers = await get(f"{url}/metrics")
                assert (await get(f"{url}/metrics", token="wrong"))[0] == 401
        assert status == 200
        assert (
            'aviso_worker_notifications_total{agent="work",app="embedded",base="mars",outcome="acked"} 1.0' in numbers
        )
        with pytest.raises(OSError, match="refused"):
            await get(f"{url}/livez")

    async def test_are_no_signals(self, app: App) -> None:
        before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        async with app.running():
            assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
