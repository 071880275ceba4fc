"""What operators order of an app: workers with their rendered role obey it, and can neither write nor erase it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import pytest

from aviso_workers import App, Notification, RetryPolicy, Tick
from aviso_workers.aviso.codec import Message
from aviso_workers.errors import DeniedError, RefusedError
from aviso_workers.ops import permissions, retried, timer_control
from aviso_workers.ops.agent_control import AgentConsumer
from aviso_workers.ops.permissions import Role
from aviso_workers.server import NatsServer
from aviso_workers.state import consumer_records, orders, timer_requests
from tests.conftest import write_mars_config
from tests.security.test_roles import NOWHERE, make_streams, user, working
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

ORDERS = "KV_field__orders"
ROLLUP = {"Nats-Rollup": "all"}
PAUSE = f"$KV.field__orders.{timer_requests.pause_key('field', 'look')}"


class Site:
    """A server with the users `worker` and `operator`, each with its rendered role, and what the workers have run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.looked: list[Tick] = []
        self.reported: list[Tick] = []
        self.attempts: list[int] = []
        self.url = NOWHERE

    def app(self, role: Role) -> App:
        file = self.directory / f"{role}.yaml"
        app = App("field", config=write_mars_config(file, self.url, user=role, password=role))

        @app.agent("mars", retry=RetryPolicy(first="10m", attempts=6))
        async def index(notification: Notification[dict[str, int]]) -> None:
            self.attempts.append(notification.attempt)
            if notification.attempt == 1:
                raise ValueError("no such field")

        @app.every("1s", singleton=False)
        async def look(tick: Tick) -> None:
            self.looked.append(tick)

        @app.every("1h", singleton=False)
        async def report(tick: Tick) -> None:
            self.reported.append(tick)

        return app

    @asynccontextmanager
    async def operator(self) -> AsyncGenerator[App, None]:
        async with self.app("operator") as app:
            yield app

    @asynccontextmanager
    async def workers(self, count: int = 1) -> AsyncGenerator[list[App], None]:
        async with AsyncExitStack() as stack:
            apps = [await stack.enter_async_context(self.app("worker")) for _ in range(count)]
            for app in apps:
                await stack.enter_async_context(working(app))
            yield apps


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    worker, operator = site.app("worker"), site.app("operator")
    users = (
        user("worker", permissions.of_worker(worker, worker.config)),
        user("operator", permissions.of_operator(operator.config)),
    )
    accounts = f"accounts: {{ DATA: {{ jetstream: enabled, users: [{', '.join(users)}] }} }}\n"
    with NatsServer.start(store_dir=tmp_path / "store", config=accounts) as server:
        site.url = server.url
        site.app("operator")
        anyio.run(make_streams, tmp_path / "operator.yaml", permissions.streams_of_worker(worker, worker.config))
        yield site


async def until(condition: Callable[[], Awaitable[bool] | bool]) -> None:
    with anyio.fail_after(PATIENCE_SECONDS):
        while not (met if isinstance(met := condition(), bool) else await met):  # noqa: ASYNC110
            await anyio.sleep(0.1)


@pytest.mark.slow
async def test_a_worker_obeys_a_pause_and_can_neither_write_nor_erase_it(site: Site) -> None:
    async with site.operator() as operator:
        admin = operator.session.admin
        async with site.workers() as [worker]:
            await until(lambda: len(site.looked) > 0)  # also where nobody has ordered anything yet
            backend = worker.session.admin
            await timer_control.pause(admin, "field", "look", note="the archive is down")
            before = await admin.stream_info(ORDERS)

            async def publish(subject: str, headers: dict[str, str]) -> None:
                bucket = subject.split(".")[1]
                message = Message(subject=subject, data=b"{}", headers=headers)
                await backend.publish(message, message_id=str(headers), stream=f"KV_{bucket}", timeout_seconds=5.0)

            for attempt in (
                publish(PAUSE, {}),
                publish(PAUSE, ROLLUP),
                backend.purge_stream(ORDERS),
                backend.delete_stream(ORDERS),
                backend.update_stream({**before.config, "max_age": 1_000_000_000}),
                timer_control.resume(backend, "field", "look"),
                timer_control.ask(backend, "field", "report"),
            ):
                with pytest.raises(DeniedError):
                    await attempt

            key = timer_requests.runs_key("field")
            with pytest.raises(RefusedError, match="rollup not permitted"):
                await publish(f"$KV.field__state.{key}", ROLLUP)
            after = await admin.stream_info(ORDERS)
            assert (after.last_sequence, after.messages) == (before.last_sequence, before.messages)

            await anyio.sleep(1.5)  # a tick that ran has ended
            ticks = len(site.looked)
            await anyio.sleep(3.0)
            assert len(site.looked) == ticks
            await timer_control.resume(admin, "field", "look")
            await until(lambda: len(site.looked) > ticks)


@pytest.mark.slow
async def test_of_two_workers_one_runs_what_an_operator_has_asked_for(site: Site) -> None:
    async with site.operator() as operator, site.workers(2):
        admin = operator.session.admin
        for number in (1, 2):
            asked = await timer_control.ask(admin, "field", "report", by="anna")

            async def ended() -> bool:
                run = await timer_control.asked(admin, "field", "report")
                return run is not None and run.seconds is not None

            await until(ended)
            await anyio.sleep(6.0)  # both have looked again
            assert [tick.time for tick in site.reported][number - 1 :] == [asked.asked]
        entries = await consumer_records.entries(admin, kind="orders")
        [ordered] = [entry for entry in entries if entry.key == timer_requests.runs_key("field")]
        assert timer_requests.read_runs(ordered)["report"].worker == "", "workers write nothing there"


async def test_a_worker_carries_out_a_decision_and_records_that_in_its_own_bucket(site: Site) -> None:
    index = AgentConsumer(app="field", agent="index", stream="MARS")
    async with site.operator() as operator, site.workers(2):
        admin = operator.session.admin
        await operator.notify("mars", {"class": "od", "step": 1}, {"n": 1})

        async def listed() -> bool:
            return bool(await retried.of_agent(admin, index))

        await until(listed)
        asked = await retried.plan(admin, index, [], "retry", by="anna")
        await retried.decide(admin, index, asked)
        revision = await (await orders.bucket(admin, "field")).revision()
        [answer] = await retried.wait(admin, index, asked)
        assert (answer.carried_out, answer.text) == (True, "handled")
        assert site.attempts == [1, 2]
        bucket = await orders.bucket(admin, "field")
        assert (await bucket.keys(), await bucket.revision()) == ([], revision + 1), "only its removal came after it"
