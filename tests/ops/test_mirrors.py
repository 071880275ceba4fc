"""Two sites, each with a server and a JetStream domain of its own, joined by a leaf node."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec import structs

from aviso_workers import App, Notification, config
from aviso_workers.backends import Administration, Management
from aviso_workers.errors import RefusedError, UnavailableError
from aviso_workers.jetstream.plans import Plan
from aviso_workers.ops import mirrors, promotion, recovery, stream_policy
from aviso_workers.ops.mirrors import Link, Mirrors, StreamPlace
from aviso_workers.server import processes
from aviso_workers.server.processes import Node
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

HUB = "$JS.hub.API"
MARS = {
    "topic": {"base": "mars", "key_order": ["class", "step"]},
    "identifier": {
        "class": {"type": "StringHandler", "required": True},
        "step": {"type": "IntHandler", "range": [0, 1000], "required": True},
    },
    "storage_policy": {"allow_duplicates": True},
}


class Site:
    """A server of a domain of its own, that can be lost and come back."""

    def __init__(self, directory: Path, **server: Any) -> None:
        directory.mkdir()
        self._directory = directory
        self._server = {"port": 0, "monitoring": {"port": 0}, **server}
        self.node: Node

    def start(self) -> None:
        (self.node,) = processes.start(config.load(self._file("")), directory=self._directory, detached=False)

    def lose(self) -> None:
        os.kill(self.node.pid, signal.SIGKILL)
        assert processes.eventually(lambda: not processes.is_running(self.node), PATIENCE_SECONDS)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stopped in the block as a process, so that nothing reaches it."""
        os.kill(self.node.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.node.pid, signal.SIGCONT)

    def stop(self) -> None:
        processes.stop(self._directory)

    def app(self, **streams: Any) -> App:
        """An app that is connected here and nowhere else, with these declared streams."""
        return App("tests", config=self._file(self.node.url, **streams))

    def _file(self, url: str, **streams: Any) -> Path:
        jetstream = {"nats_url": url or "nats://127.0.0.1:4222", "publish_deadline_seconds": 2}
        document = {
            "notification_backend": {"kind": "jetstream", "jetstream": jetstream},
            "notification_schema": {"mars": MARS},
            "server": self._server,
            "streams": streams,
        }
        path = self._directory / "config.yaml"
        path.write_text(json.dumps(document))
        return path


class Sites:
    """The hub, which has MARS, and the other site, whose MARS is a mirror of it. The app is connected to that."""

    def __init__(self, hub: Site, other: Site, app: App) -> None:
        self.hub = hub
        self.other = other
        self.app = app

    @property
    def there(self) -> Management:
        return self.app.session.admin.at(HUB)

    @property
    def server(self) -> Administration:
        return self.app.session.admin.administration()

    @property
    def mirrors(self) -> Mirrors:
        return Mirrors(self.app.session.admin)

    async def mirror(self, messages: int = 10) -> None:
        await self.server.api("STREAM.CREATE.MARS", {"name": "MARS", "subjects": ["mars.>"]}, prefix=HUB)
        mirror = {"name": "MARS", "external": {"api": HUB}}
        await self.server.api("STREAM.CREATE.MARS", {"name": "MARS", "mirror": mirror})
        await self.publish(messages)
        await self.until(lambda info: info["state"]["last_seq"] == messages)

    async def publish(self, messages: int) -> None:
        for step in range(messages):
            await self.server.request(f"mars.od.{step}", b"{}")

    async def deliver(self, pull: str) -> None:
        """Have a consumer deliver a message, which nobody acknowledges."""
        inbox = self.server.new_inbox()
        async with self.server.listen(inbox) as heard:
            self.server.send(pull, b"1", reply=inbox)
            with anyio.fail_after(PATIENCE_SECONDS):
                assert not (await heard.receive()).status

    async def info(self, *, prefix: str = "") -> dict[str, Any]:
        return await self.server.api("STREAM.INFO.MARS", prefix=prefix)

    async def until_nobody_waits(self, consumer: str) -> None:
        """A pull request of a connection that was closed takes messages until the hub has seen it close."""
        with anyio.fail_after(PATIENCE_SECONDS):
            while (await self.server.api(f"CONSUMER.INFO.MARS.{consumer}", prefix=HUB))["num_waiting"]:  # noqa: ASYNC110
                await anyio.sleep(0.02)

    async def reaches_the_hub(self) -> bool:
        with suppress(UnavailableError):
            return bool(await self.info(prefix=HUB))
        return False

    async def until(self, holds: Callable[[dict[str, Any]], bool]) -> None:
        """A server does not tell when a mirror has caught up."""
        with anyio.fail_after(PATIENCE_SECONDS):
            while not holds(await self.info()):  # noqa: ASYNC110
                await anyio.sleep(0.02)

    async def link(self) -> Link:
        [link] = await self.mirrors.links()
        return link


@pytest.fixture
async def sites(tmp_path: Path, free_port: int) -> AsyncGenerator[Sites, None]:
    hub = Site(tmp_path / "hub", jetstream={"domain": "hub"}, leafnodes={"port": free_port})
    hub.start()
    remotes = {"hub": {"urls": [f"127.0.0.1:{free_port}"]}}
    other = Site(tmp_path / "other", jetstream={"domain": "other"}, leafnodes={"remotes": remotes})
    try:
        other.start()
        assert processes.eventually(lambda: processes.ask(hub.node, "/leafz")["leafnodes"] == 1, PATIENCE_SECONDS)
        async with other.app() as app:
            yield Sites(hub, other, app)
    finally:
        other.stop()
        hub.stop()


async def test_a_mirror_that_follows_is_without_trouble(sites: Sites) -> None:
    await sites.mirror()
    link = await sites.link()
    assert (link.stream, link.relation, link.origin, link.api, link.lag) == ("MARS", "mirror", "MARS", HUB, 0)
    assert link.active_seconds is not None
    assert link.trouble == ""


async def test_a_mirror_is_judged_by_when_it_heard_of_its_origin(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirrors, "STALE_SECONDS", 0.5)
    await sites.mirror()
    sites.hub.lose()
    await sites.until(lambda info: info["mirror"]["active"] > 0.6e9)
    link = await sites.link()
    assert link.lag == 0
    assert re.fullmatch(r"last contact with its origin \d+ s ago, so its lag is not known", link.trouble)


async def test_a_mirror_of_nothing_has_never_heard_of_it(sites: Sites) -> None:
    mirror = {"name": "MARS", "external": {"api": "$JS.nowhere.API"}}
    await sites.server.api("STREAM.CREATE.MARS", {"name": "MARS", "mirror": mirror})
    assert (await sites.link()).trouble == "it has never contacted its origin"


@pytest.mark.covers("001-26")
async def test_a_promoted_mirror_goes_on_where_its_origin_was(sites: Sites) -> None:
    await sites.mirror(10)
    promoted = await promotion.promote(sites.app.session.admin, "MARS")
    assert (promoted.subjects, promoted.last_sequence, promoted.gap) == (("mars.>",), 10, 0)
    receipt = await sites.app.notify("mars", {"class": "od", "step": 11})
    assert receipt.sequence == 11
    assert (await sites.info())["state"]["last_seq"] == 11
    assert (await sites.info(prefix=HUB))["state"]["last_seq"] == 10
    assert (await sites.link()).trouble == ""


async def test_an_origin_that_comes_back_refuses_publishes(sites: Sites) -> None:
    await sites.mirror(10)
    await promotion.promote(sites.app.session.admin, "MARS")
    sites.hub.lose()
    await sites.app.notify("mars", {"class": "od", "step": 11})
    sites.hub.start()
    async with sites.hub.app() as at_hub:
        with pytest.raises(RefusedError, match=r"MARS is fenced.*mirror unfence MARS"):
            await at_hub.notify("mars", {"class": "od", "step": 12})
        server = at_hub.session.admin.administration()
        assert (await server.api("STREAM.INFO.MARS"))["state"]["last_seq"] == 10
        plans = await stream_policy.plans(at_hub.session.admin, at_hub.config)
        [plan] = [plan for plan in plans if plan.stream == "MARS"]
        assert isinstance(plan, Plan)
        assert (plan.fenced, plan.needed) == (True, False)


async def test_a_lost_origin_has_to_be_called_so(sites: Sites) -> None:
    await sites.mirror(10)
    sites.hub.lose()
    with pytest.raises(RefusedError, match=r"MARS, the origin of MARS, cannot be fenced: .* say --origin-is-lost"):
        await promotion.promote(sites.app.session.admin, "MARS")
    with pytest.raises(
        RefusedError, match=r"the subjects of MARS cannot be read from its server: name them with --subject"
    ):
        await promotion.promote(sites.app.session.admin, "MARS", origin_is_lost=True)
    promoted = await promotion.promote(sites.app.session.admin, "MARS", origin_is_lost=True, subjects=("mars.>",))
    assert (promoted.gap, promoted.last_sequence, promoted.consumers, promoted.proven) == (None, 10, None, False)
    assert (await sites.app.notify("mars", {"class": "od", "step": 11})).sequence == 11


async def test_a_lost_origin_that_is_back_is_told_until_it_is_fenced(sites: Sites) -> None:
    await sites.mirror(10)
    sites.hub.lose()
    await promotion.promote(sites.app.session.admin, "MARS", origin_is_lost=True, subjects=("mars.>",))
    assert (await sites.link()).trouble == ""
    sites.hub.start()
    with anyio.fail_after(PATIENCE_SECONDS):
        while not (await sites.link()).trouble:  # noqa: ASYNC110
            await anyio.sleep(0.05)
    assert (await sites.link()).trouble == (
        "MARS is back and takes publishes, although a mirror has replaced it: run "
        f"`aviso-workers mirror fence MARS --api '{HUB}'`"
    )
    fenced = await mirrors.fence(sites.there, "MARS")
    assert (fenced.subjects, fenced.last_sequence) == (("mars.>",), 10)
    assert (await sites.link()).trouble == ""


async def test_what_a_lost_origin_has_when_it_is_back_is_published_at_the_second_site(sites: Sites) -> None:
    await sites.mirror(10)
    sites.hub.lose()
    await promotion.promote(sites.app.session.admin, "MARS", origin_is_lost=True, subjects=("mars.>",))
    await sites.app.notify("mars", {"class": "od", "step": 11})
    with sites.other.paused():  # once they are joined again, both have what is published
        sites.hub.start()
        async with sites.hub.app() as at_hub:
            for step in range(3):
                await at_hub.notify("mars", {"class": "rd", "step": step})
            await mirrors.fence(at_hub.session.admin, "MARS")
    with anyio.fail_after(PATIENCE_SECONDS):
        while not await sites.reaches_the_hub():  # noqa: ASYNC110
            await anyio.sleep(0.05)
    for published in (3, 0):
        async with recovery.opened(sites.app.session.admin, sites.app.config, "MARS") as found:
            assert [message.subject async for message in found.only_there()] == [f"mars.rd.{step}" for step in range(3)]
            assert (await found.publish()).published == published
    assert (await sites.info())["state"]["last_seq"] == 14


async def test_a_mirror_that_does_not_catch_up_is_not_promoted(sites: Sites) -> None:
    await sites.mirror(10)
    await sites.server.api("STREAM.DELETE.MARS")
    full = {"max_msgs": 5, "discard": "new"}
    await sites.server.api(
        "STREAM.CREATE.MARS", {"name": "MARS", "mirror": {"name": "MARS", "external": {"api": HUB}}, **full}
    )
    with pytest.raises(RefusedError, match=r"did not catch up with MARS within 0\.2 s: (5|10) messages were missing"):
        await promotion.promote(sites.app.session.admin, "MARS", patience_seconds=0.2)
    await sites.publish(1)
    assert (await sites.info(prefix=HUB))["state"]["last_seq"] == 11


async def handled(app: App, count: int) -> list[int]:
    """The steps of the notifications that an agent of the app has handled when it was given so many."""
    steps: list[int] = []
    stop = anyio.Event()

    @app.agent("mars")
    async def index(notification: Notification[Any]) -> None:
        steps.append(int(notification.identifier["step"]))
        if len(steps) == count:
            stop.set()

    with anyio.fail_after(PATIENCE_SECONDS):
        async with app:
            await app._work(stop)
    return steps


@pytest.mark.slow
async def test_agents_go_on_at_the_second_site_where_they_had_come_to(sites: Sites) -> None:
    """Also where one of their notifications was never acknowledged."""
    await sites.mirror(0)
    await sites.publish(5)
    assert await handled(sites.hub.app(), 5) == [0, 1, 2, 3, 4]
    await sites.until_nobody_waits("tests__index")
    await sites.publish(3)
    await sites.deliver("$JS.hub.API.CONSUMER.MSG.NEXT.MARS.tests__index")
    promoted = await promotion.promote(sites.app.session.admin, "MARS")
    [carried] = promoted.consumers or ()
    assert (carried.consumer, carried.next_sequence, carried.delivered, carried.made) == ("tests__index", 6, 6, True)
    assert promoted.proven
    assert await handled(sites.other.app(), 3) == [0, 1, 2]


async def test_a_consumer_that_is_at_work_at_the_second_site_stays_as_it_is(sites: Sites) -> None:
    await sites.mirror(4)
    config = {"durable_name": "reader", "ack_policy": "explicit"}
    for prefix in (HUB, ""):
        request = {"stream_name": "MARS", "config": config}
        await sites.server.api("CONSUMER.DURABLE.CREATE.MARS.reader", request, prefix=prefix)
    await sites.deliver("$JS.API.CONSUMER.MSG.NEXT.MARS.reader")
    await sites.server.api(
        "CONSUMER.DURABLE.CREATE.MARS.late",
        {"stream_name": "MARS", "config": {**config, "durable_name": "late", "deliver_policy": "new"}},
        prefix=HUB,
    )
    promoted = await promotion.promote(sites.app.session.admin, "MARS")
    assert [(each.consumer, each.made, each.next_sequence) for each in promoted.consumers or ()] == [
        ("late", True, 5),
        ("reader", False, 1),
    ]


async def test_a_consumer_that_is_refused_is_told_and_the_promotion_not_proven(sites: Sites) -> None:
    await sites.mirror(4)
    for name in ("first", "second"):
        request = {"stream_name": "MARS", "config": {"durable_name": name, "ack_policy": "explicit"}}
        await sites.server.api(f"CONSUMER.DURABLE.CREATE.MARS.{name}", request, prefix=HUB)
    await sites.server.api("STREAM.UPDATE.MARS", {**(await sites.info())["config"], "max_consumers": 1})
    promoted = await promotion.promote(sites.app.session.admin, "MARS")
    assert promoted.consumers is not None
    assert [bool(each.refused) for each in promoted.consumers] == [False, True]
    assert "maximum consumers" in promoted.consumers[1].refused
    assert not promoted.proven


async def test_consumers_are_made_again_where_a_promotion_is_repeated(sites: Sites) -> None:
    """As where the first one was killed when the consumers were there, and the agents went on at the first site."""
    await sites.mirror(4)
    request = {"stream_name": "MARS", "config": {"durable_name": "reader", "ack_policy": "none"}}
    await sites.server.api("CONSUMER.DURABLE.CREATE.MARS.reader", request, prefix=HUB)
    there = StreamPlace(streams=sites.there, stream="MARS")
    [before] = await mirrors.carry_consumers(there, StreamPlace(streams=sites.app.session.admin, stream="MARS"))
    await sites.deliver("$JS.hub.API.CONSUMER.MSG.NEXT.MARS.reader")
    promoted = await promotion.promote(sites.app.session.admin, "MARS")
    [after] = promoted.consumers or ()
    assert [(each.made, each.next_sequence) for each in (before, after)] == [(True, 1), (True, 2)]
    info = await sites.server.api("CONSUMER.INFO.MARS.reader")
    assert info["ack_floor"]["stream_seq"] == 1


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"subjects": ["mars.>"]}, "MARS is not a mirror"),
        (
            {"mirror": {"name": "X", "filter_subject": "mars.od.>"}},
            "MARS is not a complete mirror, because it has filter_subject",
        ),
        ({"mirror": {"name": "X", "opt_start_seq": 9}}, "MARS is not a complete mirror, because it has opt_start_seq"),
    ],
)
async def test_only_a_whole_mirror_is_promoted(sites: Sites, config: dict[str, Any], complaint: str) -> None:
    await sites.server.api("STREAM.CREATE.MARS", {"name": "MARS", **config})
    with pytest.raises(RefusedError, match=complaint):
        await promotion.promote(sites.app.session.admin, "MARS")


async def test_a_fence_is_put_up_once_and_taken_down(sites: Sites) -> None:
    await sites.mirror(10)
    first = await mirrors.fence(sites.there, "MARS")
    assert await mirrors.fence(sites.there, "MARS") == structs.replace(first, already_fenced=True)
    with pytest.raises(UnavailableError, match="nobody answers"):
        await sites.publish(1)
    assert await mirrors.unfence(sites.there, "MARS") == ("mars.>",)
    await sites.publish(1)
    with pytest.raises(RefusedError, match="MARS is not fenced"):
        await mirrors.unfence(sites.there, "MARS")


@pytest.mark.covers("001-27")
@pytest.mark.parametrize("origin_api", [HUB, ""], ids=["between two sites", "within one"])
async def test_a_failover_is_rehearsed_and_leaves_nothing_behind(sites: Sites, origin_api: str) -> None:
    drill = await promotion.rehearse(sites.app.session.admin, origin_api=origin_api, messages=200)
    assert (drill.stored, drill.published, drill.after_fence) == (200, 200, 0)
    assert drill.passed
    assert await sites.app.session.admin.stream_names() == []


@pytest.mark.covers("001-03", "001-24")
async def test_a_mirror_is_declared_planned_and_applied(sites: Sites) -> None:
    await sites.server.api("STREAM.CREATE.MARS", {"name": "MARS", "subjects": ["mars.>"]}, prefix=HUB)
    async with sites.other.app(MARS={"mirror": {"name": "MARS", "external": {"api": HUB}}}) as app:
        [plan] = await stream_policy.plans(app.session.admin, app.config)
        assert not plan.exists
        await stream_policy.carry_out(app.session.admin, app.config, plan)
        await sites.publish(3)
        await sites.until(lambda info: info["state"]["last_seq"] == 3)
        [plan] = await stream_policy.plans(app.session.admin, app.config)
        assert (plan.differences, plan.fixed) == ((), ())
        await promotion.promote(sites.app.session.admin, "MARS")
        [plan] = await stream_policy.plans(app.session.admin, app.config)
        [told] = map(str, plan.fixed)
    assert told == (
        'mirror: none -> {"name":"MARS","external":{"api":"$JS.hub.API"}}; '
        "it takes publishes, as after a promotion: leave mirror out, or delete the stream"
    )


@pytest.mark.covers("001-25")
async def test_sources_are_declared_and_changed(sites: Sites) -> None:
    await sites.server.api("STREAM.CREATE.MARS", {"name": "MARS", "subjects": ["mars.>"]}, prefix=HUB)
    transforms = [{"src": "mars.>", "dest": "all.mars.>"}]
    source = {"name": "MARS", "external": {"api": HUB}, "subject_transforms": transforms}
    for sources in ([], [source], [source]):
        async with sites.other.app(ALL={"sources": sources, "subjects": ["all.>"]}) as app:
            for plan in await stream_policy.plans(app.session.admin, app.config):
                if plan.stream == "ALL" and plan.needed:
                    await stream_policy.carry_out(app.session.admin, app.config, plan)
    assert not plan.needed
    await sites.publish(3)
    with anyio.fail_after(PATIENCE_SECONDS):
        while (await sites.server.api("STREAM.INFO.ALL"))["state"]["messages"] < 3:  # noqa: ASYNC110
            await anyio.sleep(0.02)
    stored = await sites.server.api("STREAM.MSG.GET.ALL", {"last_by_subj": "all.mars.od.2"})
    assert stored["message"]["subject"] == "all.mars.od.2"


async def test_a_rehearsal_that_fails_says_why_and_leaves_nothing_behind(
    sites: Sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*arguments: Any, **more: Any) -> None:
        raise RefusedError("not today")

    monkeypatch.setattr(mirrors, "fence", refuse)
    with pytest.raises(RefusedError, match="not today"):
        await promotion.rehearse(sites.app.session.admin, origin_api=HUB, messages=50)
    assert await sites.app.session.admin.stream_names() == []
