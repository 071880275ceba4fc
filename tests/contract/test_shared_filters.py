"""Workers whose agents want different notifications of one durable consumer, as while a deploy replaces them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import anyio
import pytest
from msgspec import structs

from aviso_workers import Agent, App, Notification, RetryPolicy, Router
from aviso_workers.aviso.literals import SECOND
from aviso_workers.backends import Backend, ConsumerInfo, Message
from aviso_workers.engine import acknowledging, shared_filters
from aviso_workers.errors import NotFoundError, RefusedError
from aviso_workers.events import AckWaitDiffers, AgentStarted, FilterHides, FiltersDiffer
from aviso_workers.jetstream.specs import ConsumerSpec
from aviso_workers.sessions.session import open_session
from aviso_workers.state import own_streams
from aviso_workers.state.dead_letter_records import compressed, retry_subject
from aviso_workers.testing import Harness, harness
from tests.contract.settings import mars
from tests.waits import PATIENCE_SECONDS

RETRIES = own_streams.of_app(own_streams.RETRIES, "contract")

pytestmark = pytest.mark.anyio

EVERYTHING = ("mars.>",)
NARROW = ("mars.od.>",)
WIDE = ("mars.od.>", "mars.rd.>")


class Deployment:
    """The app's agent `index` in versions that want different classes, and what each of them has handled."""

    def __init__(self, t: Harness) -> None:
        self.t = t
        self.handled: list[tuple[str, str, str]] = []
        """Version, class and step."""
        self.stated: list[FiltersDiffer] = []
        t.app.events.listen(self.stated.append, FiltersDiffer)
        self.hidden: list[FilterHides] = []
        t.app.events.listen(self.hidden.append, FilterHides)
        self.ack_waits: list[tuple[float, float]] = []
        """Its own and that in effect, of each worker that said that they differ, or do so no more."""
        t.app.events.listen(
            lambda event: self.ack_waits.append((event.own_seconds, event.in_effect_seconds)), AckWaitDiffers
        )

    def version(self, *classes: str, ack_wait: float, seconds: float) -> Agent[Any, Any]:
        name = " ".join(classes)

        async def index(notification: Notification[Any]) -> None:
            self.handled.append((name, notification.identifier["class"], notification.identifier["step"]))
            await self.t.app.session.backend.clock.sleep(seconds)

        where = {"class": list(classes)}
        return Router("deployed").agent("mars", where=where, name="index", ack_wait=ack_wait)(index)

    @asynccontextmanager
    async def worker(self, *classes: str, ack_wait: float = 20.0, seconds: float = 0.0) -> AsyncIterator[None]:
        """A worker of the version that wants these classes, from when it reads until the block is left."""
        started, stop = anyio.Event(), anyio.Event()
        self.t.app.events.listen(lambda event: started.set() if event.stream == "MARS" else None, AgentStarted)
        async with anyio.create_task_group() as tasks:
            version = self.version(*classes, ack_wait=ack_wait, seconds=seconds)
            tasks.start_soon(self.t.app.session.run_agent, version, stop)
            await started.wait()
            yield
            stop.set()

    async def edit_filter(self, *filters: str) -> None:
        """Edit the filter of the consumer as another program does, and nothing else."""
        found = await self.info()
        spec = ConsumerSpec(
            durable_name=found.name,
            filter_subjects=filters,
            ack_wait=found.config.ack_wait,
            max_ack_pending=found.config.max_ack_pending,
        )
        await self.backend.ensure_consumer("MARS", spec)
        assert tuple((await self.info()).config.filters) == filters

    async def publish(self, *classes: str, steps: range) -> None:
        for step in steps:
            for name in classes:
                await self.t.notify("mars", mars(step=step, **{"class": name}), {})

    async def retry(self, name: str, body: bytes) -> None:
        """Try a dead letter of this class again, whose original was the first message of the stream."""
        first = await self.backend.message("MARS", 1)
        assert first is not None
        headers = {
            "Aviso-App": "contract",
            "Aviso-Agent": "index",
            "Aviso-Subject": first.subject.replace(".xx.", f".{name}."),
            "Aviso-Stream": "MARS",
            "Aviso-Sequence": "1",
            "Aviso-Timestamp": str(first.timestamp_ns),
        }
        retry = Message(subject=retry_subject("contract", "index"), data=body)
        if len(body) > 1000:
            retry = compressed(retry)
        retry = structs.replace(retry, headers={**(retry.headers or {}), **headers})
        await self.backend.publish(retry, message_id="1", stream=RETRIES, timeout_seconds=PATIENCE_SECONDS)

    @property
    def backend(self) -> Backend:
        return self.t.app.session.backend

    async def info(self) -> ConsumerInfo:
        return await self.backend.consumer_info("MARS", "contract__index")

    async def until(self, expected: Callable[[ConsumerInfo], bool], *, seconds: float = 60.0) -> None:
        """Let time pass until the consumer is as expected; meanwhile it may be recreated."""
        passed = 0.0
        info: ConsumerInfo | None = None
        while True:
            with suppress(NotFoundError):
                if expected(info := await self.info()):
                    return
            assert passed < seconds, f"after {passed:.1f} s the consumer is still {info}"
            await self.t.advance(0.1)
            passed += 0.1

    async def ack_wait(self) -> float:
        return float((await self.info()).config["ack_wait"]) / SECOND

    async def settled(self) -> None:
        await self.until(lambda info: info.num_pending == info.num_ack_pending == 0)

    def by(self, version: str) -> set[tuple[str, str]]:
        return {(name, step) for by, name, step in self.handled if by == version}


@pytest.fixture
async def deployment(app: App, nats_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Deployment]:
    monkeypatch.setattr(shared_filters, "CHECK_SECONDS", 0.5)
    monkeypatch.setattr(shared_filters, "CHECK_AGAIN_SECONDS", 0.1)
    monkeypatch.setattr(shared_filters, "GONE_SECONDS", 2.0)
    async with harness(app, server=nats_url or None) as t:
        await t.notify("mars", mars(step=0, **{"class": "xx"}), {})  # makes the stream
        yield Deployment(t)


def each(*classes: str, steps: range) -> set[tuple[str, str]]:
    return {(name, str(step)) for step in steps for name in classes}


async def test_a_deploy_that_widens_a_filter_loses_nothing(deployment: Deployment) -> None:
    async with deployment.worker("od"), deployment.worker("od", "rd"):
        await deployment.publish("od", "rd", steps=range(20))
        await deployment.settled()
        await deployment.until(lambda _: len(deployment.stated) == 2)

    assert {(name, step) for _, name, step in deployment.handled} == each("od", "rd", steps=range(20))
    assert len(deployment.handled) == 40, "something was handled twice"
    assert {name for name, _ in deployment.by("od")} <= {"od"}
    assert deployment.t.dead_letters == []
    assert {(event.own, event.others) for event in deployment.stated} == {(NARROW, (WIDE,)), (WIDE, (NARROW,))}


async def test_what_another_version_gave_back_is_handled_side_by_side(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acknowledging, "OTHER_VERSION", RetryPolicy(first=0.1, max=0.2, jitter=0.0))  # all come at once
    count, running, most = 4, 0, 0
    gather = Router("deployed").agent

    @gather("mars", where={"class": ["od", "rd"]}, name="index", concurrency=count)
    async def wide(notification: Notification[Any]) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await deployment.t.app.session.backend.clock.sleep(0.2)
        running -= 1

    async with deployment.worker("od", "rd"):
        pass  # the consumer has the wide filter
    async with deployment.worker("od"):
        await deployment.publish("rd", steps=range(count))
        for _ in range(10):  # each was given back at least three times
            await deployment.t.advance(0.1)
    stop = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(deployment.t.app.session.run_agent, wide, stop)
        await deployment.settled()
        stop.set()

    assert most == count, "nothing has ended a worker, so nothing had to be run alone"


async def test_an_old_worker_that_is_started_again_beside_new_ones_hides_nothing_from_them(
    deployment: Deployment,
) -> None:
    async with deployment.worker("od"):
        pass
    async with deployment.worker("od", "rd"):
        async with deployment.worker("od"):
            await deployment.publish("rd", steps=range(5))
            await deployment.settled()
        await deployment.publish("rd", steps=range(5, 10))
        await deployment.settled()

    assert deployment.by("od rd") == each("rd", steps=range(10))


async def test_what_only_a_version_that_is_gone_has_wanted_is_passed_over_after_a_while(
    deployment: Deployment,
) -> None:
    async with deployment.worker("od", "rd"):
        pass
    await deployment.publish("rd", steps=range(5))
    async with deployment.worker("od"):
        await deployment.publish("od", steps=range(5))
        await deployment.until(lambda info: info.num_ack_pending == 5)
        assert tuple((await deployment.info()).config["filter_subjects"]) == EVERYTHING

        await deployment.until(lambda info: tuple(info.config["filter_subjects"]) == NARROW)
        await deployment.settled()

    assert deployment.by("od") == each("od", steps=range(5))
    assert deployment.t.dead_letters == []
    assert [event.gone for event in deployment.stated if event.own == NARROW] == [(), (WIDE,)]


@pytest.mark.slow
async def test_a_version_that_wants_more_takes_its_part_while_a_narrower_one_is_deployed(
    deployment: Deployment,
) -> None:
    async with deployment.worker("od", "rd"), deployment.worker("od"):
        await deployment.t.advance(4.0)  # longer than it takes to be given up
        await deployment.publish("rd", steps=range(10))
        await deployment.settled()

    assert deployment.by("od rd") == each("rd", steps=range(10))


@pytest.mark.parametrize("large", [False, True])
async def test_a_dead_letter_that_is_tried_again_waits_for_a_version_that_wants_it(
    deployment: Deployment, *, large: bool
) -> None:
    async with deployment.worker("od", "rd"):
        pass
    async with deployment.worker("od"):
        await deployment.retry(
            "rd", b'"%s"' % (b"x" * (deployment.backend.connection.max_payload - 100)) if large else b"{}"
        )
        await deployment.t.advance(0.5)
        async with deployment.worker("od", "rd"):
            with anyio.fail_after(PATIENCE_SECONDS):
                while not deployment.by("od rd"):
                    await deployment.t.advance(0.1)

    assert deployment.handled == [("od rd", "rd", "0")]


async def test_a_smaller_max_ack_pending_of_an_older_worker_does_not_stay(deployment: Deployment) -> None:
    async with deployment.worker("od"):
        found = await deployment.info()
        of_older = ConsumerSpec(
            durable_name=found.name,
            filter_subjects=tuple(found.config["filter_subjects"]),
            ack_wait=found.config["ack_wait"],
            max_ack_pending=10_000,
        )
        await deployment.backend.ensure_consumer("MARS", of_older)
        assert (await deployment.info()).config["max_ack_pending"] == 10_000

        await deployment.until(lambda info: info.config["max_ack_pending"] == found.config["max_ack_pending"])


async def test_an_edit_of_the_filter_hides_nothing_from_a_running_agent(deployment: Deployment) -> None:
    async with deployment.worker("od", "rd"):
        await deployment.publish("od", "rd", steps=range(3))
        await deployment.settled()
        await deployment.edit_filter(*NARROW)
        await deployment.publish("od", "rd", steps=range(3, 20))
        await deployment.until(lambda info: tuple(info.config.filters) == WIDE)
        await deployment.settled()

    assert deployment.by("od rd") == each("od", "rd", steps=range(20))
    assert [(event.found, event.wanted) for event in deployment.hidden] == [(NARROW, WIDE)]
    assert deployment.t.dead_letters == []


async def test_an_edit_of_the_filter_while_no_worker_runs_hides_nothing(deployment: Deployment) -> None:
    async with deployment.worker("od", "rd"):
        pass
    await deployment.edit_filter(*NARROW)
    await deployment.publish("rd", steps=range(5))
    async with deployment.worker("od", "rd"):
        await deployment.settled()

    assert deployment.by("od rd") == each("rd", steps=range(5))


@pytest.mark.parametrize("exists", [False, True], ids=["without a consumer", "with a consumer"])
async def test_an_update_of_another_version_that_comes_late_hides_nothing(
    deployment: Deployment, nats_url: str, monkeypatch: pytest.MonkeyPatch, *, exists: bool
) -> None:
    """The old version has read the consumer, and updates it when the new version reads already."""
    monkeypatch.setattr(shared_filters, "GONE_SECONDS", 300.0)
    held, late, stop = anyio.Event(), anyio.Event(), anyio.Event()

    async def ensure_late(stream: str, spec: ConsumerSpec) -> ConsumerInfo:
        if spec.filter_subjects == NARROW and not held.is_set():
            held.set()
            await late.wait()
        return await ensure_consumer(stream, spec)

    if exists:
        async with deployment.worker("od", ack_wait=2.0):
            pass
    async with AsyncExitStack() as stack:
        session = deployment.t.app.session
        if nats_url:  # a connection of its own, as each worker has
            session = await stack.enter_async_context(
                open_session(app="contract", config=deployment.t.app.config, events=deployment.t.app.events)
            )
        ensure_consumer = session.backend.ensure_consumer
        monkeypatch.setattr(session.backend, "ensure_consumer", ensure_late)
        tasks = await stack.enter_async_context(anyio.create_task_group())
        tasks.start_soon(session.run_agent, deployment.version("od", ack_wait=20.0, seconds=0.0), stop)
        await held.wait()
        async with deployment.worker("rd"):
            late.set()
            await deployment.publish("od", "rd", steps=range(20))
            await deployment.until(lambda _: deployment.by("rd") == each("rd", steps=range(20)))
            await deployment.until(lambda _: deployment.by("od") == each("od", steps=range(20)))
        stop.set()


@pytest.mark.slow
async def test_the_longest_ack_wait_of_several_versions_is_in_effect(deployment: Deployment) -> None:
    async with deployment.worker("od", ack_wait=2.0, seconds=1.5):
        async with deployment.worker("od", ack_wait=0.5):
            assert await deployment.ack_wait() == 2.0
        await deployment.publish("od", steps=range(3))
        await deployment.settled()

    assert [step for _, _, step in deployment.handled] == ["0", "1", "2"], "something was handled twice"
    assert deployment.ack_waits == [(0.5, 2.0)]


async def test_when_only_a_version_with_a_shorter_ack_wait_is_left_that_is_in_effect(deployment: Deployment) -> None:
    async with deployment.worker("od", ack_wait=2.0):
        pass
    async with deployment.worker("od", ack_wait=0.5):
        assert await deployment.ack_wait() == 2.0
        await deployment.until(lambda info: info.config["ack_wait"] == 0.5e9)
        await deployment.until(lambda _: len(deployment.ack_waits) == 2)

    assert deployment.ack_waits == [(0.5, 2.0), (0.5, 0.5)]


@pytest.mark.slow
async def test_an_ack_wait_that_somebody_made_shorter_is_kept_within_and_set_right(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = deployment.t.app.session.backend
    ensure_consumer = backend.ensure_consumer

    async def refuse(stream: str, spec: ConsumerSpec) -> ConsumerInfo:
        raise RefusedError("no permission")

    async with deployment.worker("od", ack_wait=20.0, seconds=4.0):
        found = await deployment.info()
        spec = ConsumerSpec(
            durable_name=found.name,
            filter_subjects=tuple(found.config["filter_subjects"]),
            ack_wait=900_000_000,
            max_ack_pending=found.config["max_ack_pending"],
        )
        await ensure_consumer("MARS", spec)
        with monkeypatch.context() as denied:
            denied.setattr(backend, "ensure_consumer", refuse)
            await deployment.until(lambda _: deployment.ack_waits == [(20.0, 0.9)])
            await deployment.publish("od", steps=range(1))
            await deployment.settled()
            assert len(deployment.handled) == 1, "it was redelivered while it was handled"
        await deployment.until(lambda info: info.config["ack_wait"] == 20e9)
        await deployment.until(lambda _: deployment.ack_waits == [(20.0, 0.9), (20.0, 20.0)])
