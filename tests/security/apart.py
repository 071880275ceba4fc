"""Two apps on one JetStream, each of which has streams, buckets and consumers of its own, beside all other roles.

The app `a` handles notifications of `mars`, and `b` those of `mars` and `other`. All users have the permissions that
`server render --role` prints, and an operator has made the streams, as `streams apply --role` does.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from aviso_agents import spark_events
from aviso_workers import App, Notification, Rate, RetryPolicy, Slots, Tick, Window, Windowing
from aviso_workers import config as settings
from aviso_workers.config.nats_server import Permissions
from aviso_workers.errors import NotFoundError
from aviso_workers.events import Events
from aviso_workers.jetstream.specs import StreamSpec
from aviso_workers.ops import permissions, timer_control
from aviso_workers.ops.dead_letters import Selection, StoredDeadLetters
from aviso_workers.server import processes
from aviso_workers.state import audit_records, delayed_messages, orders, own_streams
from aviso_workers.state.dead_letter_records import DeadLetter
from tests.conftest import write_mars_config
from tests.security.test_roles import NOWHERE, make_streams, working
from tests.waits import PATIENCE_SECONDS, PROMPT_SECONDS, flushed

__all__ = ["BASES", "SECRET", "USERS", "Site", "denied", "foreign", "operators_only", "secrets_heard_by", "started"]

BASES = {
    "a": ("mars",),
    "b": ("mars", "other"),
    "bridge": ("mars",),
    "publisher": ("mars",),
    "spark": ("mars",),
    "everything": ("mars", "other"),
}
"""The bases of the event types in the configuration of each user."""
USERS = ("a", "bridge", "publisher", "spark")
"""Those who have rights on `mars` alone."""
PLAIN, SECRET = "anybody may read this", "the other base has this alone"
API = "$JS.API."
EVERYBODY = "everything"


class Site:
    """The servers, and what the workers have done on them."""

    def __init__(self, nodes: Sequence[processes.Node], directory: Path) -> None:
        self.nodes = nodes
        self.directory = directory
        self.mended: set[str] = set()
        self.handled: dict[str, set[tuple[str, int]]] = {"a": set(), "b": set()}
        self.ticks: list[str] = []
        self.violations_of_workers: list[str] = []
        self.serves_newer = True
        """Whether the servers know counters and delayed notifications: 2.12 or newer."""

    @property
    def url(self) -> str:
        return ",".join(node.url for node in self.nodes)

    @property
    def violations(self) -> list[str]:
        """The lines of the servers' logs that say that something was denied."""
        lines = [line for node in self.nodes for line in node.log.splitlines()]
        return [line for line in lines if " Violation - " in line]

    def config(self, user: str, *, url: str = "") -> Path:
        path = self.directory / f"{user}.yaml"
        login = {"user": user, "password": user, "replicas": len(self.nodes) or 1}
        return write_config(path, BASES[user], url or self.url or NOWHERE, **login)

    @asynccontextmanager
    async def operator(self) -> AsyncGenerator[App, None]:
        async with App("operator", config=self.config(EVERYBODY)) as app:
            yield app

    @asynccontextmanager
    async def connected(
        self, user: str, hear: Callable[[Exception], None] | None = None
    ) -> AsyncGenerator[Client, None]:
        async def on_error(error: Exception) -> None:
            if hear is not None:
                hear(error)

        client = await nats.connect(
            [node.url for node in self.nodes],
            user=user,
            password=user,
            error_cb=on_error,
            inbox_prefix=f"_INBOX_{user}".encode(),
        )
        yield client
        await client.close()

    def app(self, name: str, config: Path | None = None) -> App:
        """Return an app that uses all that a worker has permissions for."""
        app = App(name, config=config or self.config(name))
        table = app.table("newest", str)
        counter = app.counter("done") if self.serves_newer else None

        async def index(notification: Notification[dict[str, Any]]) -> None:
            payload = notification.payload or {}
            if payload.get("fails") and name not in self.mended:
                raise ValueError(payload["text"])
            await table.put(f"{notification.event_type}.newest", payload["text"])
            if counter is not None:
                await counter.add("all", 1)
                await counter.items()
            await table.items()
            self.handled[name].add((notification.event_type, int(notification.identifier["step"])))

        async def daily(window: Window[str]) -> None:
            pass

        async def tick(tick: Tick) -> None:
            self.ticks.append(name)

        windowing = Windowing(size="1d", fold=lambda value, each: str(each.payload["text"]), initial="")
        for base in BASES[name]:
            app.agent(
                base,
                name=f"index-{base}",
                retry=RetryPolicy(first=0.1, attempts=2, jitter=0),
                limits=[Rate(100, per=1), Slots(1, by=["class"])],
            )(index)
            app.agent(base, name=f"daily-{base}", window=windowing)(daily)
        app.every("1s", singleton=True)(tick)
        return app

    def permissions(self, user: str) -> Permissions:
        config = self.config(user, url=NOWHERE)
        loaded = settings.load(config, environ={})
        match user:
            case "bridge":
                return permissions.of_worker(a_bridge(config), loaded, buckets=[permissions.BRIDGE])
            case "publisher":
                return permissions.of_publisher(loaded)
            case "spark":
                return permissions.of_spark(loaded)
            case _:
                return permissions.of_worker(self.app(user, config), loaded)

    def own(self, user: str) -> list[StreamSpec]:
        """Return the streams that `streams apply --role` makes beside those of event types."""
        config = self.config(user)
        loaded = settings.load(config, environ={})
        match user:
            case "bridge":
                return permissions.streams_of_worker(a_bridge(config), loaded, opened=[spark_events.BUCKET])
            case "publisher":
                return permissions.streams_of_publisher(loaded)
            case "spark":
                return permissions.streams_of_spark(loaded)
            case _:
                return permissions.streams_of_worker(self.app(user), loaded)

    async def make(self) -> None:
        """Make all streams, and let the workers of both apps do all that they do."""
        async with self.operator() as operator:
            self.serves_newer = delayed_messages.is_served(operator.session.backend)
            own = [*self.own("a"), *self.own("b"), *self.own("bridge"), *self.own("spark")]
            await make_streams(self.config(EVERYBODY), [*own, audit_records.stream_spec(operator.config)])
            for app in ("a", "b"):  # a pause makes the bucket of what operators order
                await operator.session.admin.key_value(orders.bucket_of(app), own=True)
            async with anyio.create_task_group() as tasks:
                for name in ("a", "b"):
                    tasks.start_soon(self.work, name, operator)

    async def work(self, name: str, operator: App) -> None:
        """Run a worker until it has done all that workers do: what fails becomes a dead letter, and is retried."""
        app, bases = self.app(name), BASES[name]
        async with app, working(app):
            for base in bases:
                await notify(app, base, 1)
                await notify(app, base, 2, fails=True)
                if self.serves_newer:
                    await notify(app, base, 3, due=datetime.now(UTC) + timedelta(seconds=1))
                    await notify(app, base, 4, due=datetime.now(UTC) + timedelta(days=1), message_id=name)
                    await app.cancel(base, name)
                    if name == "b":  # one that still waits
                        await notify(app, base, 8, due=datetime.now(UTC) + timedelta(days=1))
            await until(lambda: self.has_failed(operator, name, 2))
            self.mended.add(name)
            await self.retry(operator, name)
            steps = [1, 2, 3] if self.serves_newer else [1, 2]
            await until(lambda: self.handled[name] >= {(base, step) for base in bases for step in steps})
            for base in bases:
                found = {int(each.identifier["step"]) async for each in app.replay(base)}
                assert {*steps} <= found <= {*steps, 5, 6}, "the fourth is cancelled"
            await until(lambda: name in self.ticks)
            for base in bases:
                windows = f"KV_{name}__windows__daily-{base}"
                await until(lambda windows=windows: _has_messages(operator, windows))  # type: ignore[misc]
            self.mended.discard(name)
            for base in bases:
                await notify(app, base, 5, fails=True)
                await notify(app, base, 6, fails=True)
            await until(lambda: self.has_failed(operator, name, 5, 6))
        await self.retry(operator, name, step=5)  # which waits until another worker comes
        await timer_control.pause(operator.session.admin, name, "tick", note=SECRET if name == "b" else PLAIN)

    async def letters(self, operator: App, app: str) -> list[DeadLetter]:
        stored = StoredDeadLetters(operator.session.admin, events=Events())
        return [each async for each in stored.select(Selection(app=app))]

    async def has_failed(self, operator: App, app: str, *steps: int, bases: Iterable[str] = ()) -> bool:
        """Return whether there is a dead letter for each of these steps, of each base."""
        found = {each.original.subject for each in await self.letters(operator, app)}
        return {f"{base}.od.{step}" for base in bases or BASES[app] for step in steps} <= found

    async def retry(self, operator: App, app: str, *, step: int | None = None) -> None:
        """Retry the dead letters of an app, or those of one step."""
        found = await self.letters(operator, app)
        chosen = [each for each in found if step is None or each.original.subject.endswith(f".{step}")]
        await StoredDeadLetters(operator.session.admin, events=Events()).retry(*chosen)

    async def state(self, streams: Iterable[str]) -> dict[str, Any]:
        """Return the configuration of these streams and of their consumers, and what is known of their content.

        Keys of leases and of living workers go by themselves, without a message.
        """
        found: dict[str, Any] = {}
        async with self.connected(EVERYBODY) as owner:
            for stream in sorted(streams):
                info = await ask(owner, f"STREAM.INFO.{stream}")
                if "config" not in info:
                    continue  # that of delayed notifications, on a server that keeps none
                known = ["last_seq", "consumer_count"]
                if not info["config"].get("max_age"):
                    known += ["messages", "bytes", "first_seq", "num_deleted"]
                consumers = await ask(owner, f"CONSUMER.LIST.{stream}")
                with anyio.fail_after(PATIENCE_SECONDS):
                    while consumers.get("missing"):  # those whose leader has not answered in time
                        consumers = await ask(owner, f"CONSUMER.LIST.{stream}")
                found[stream] = {
                    "config": info["config"],
                    "state": {key: info["state"].get(key) for key in known},
                    "consumers": {
                        each["name"]: (each["config"], each["delivered"], each["ack_floor"], each["num_pending"])
                        for each in consumers["consumers"] or ()
                    },
                }
        return found


def write_config(path: Path, bases: Iterable[str], url: str, **jetstream: Any) -> Path:
    """Write a file with an event type for each base."""
    document = json.loads(write_mars_config(path, url, **jetstream).read_text())
    mars = document["notification_schema"]["mars"]
    document["notification_schema"] = {base: {**mars, "topic": {**mars["topic"], "base": base}} for base in bases}
    path.write_text(json.dumps(document))
    return path


def a_bridge(config: Path) -> App:
    app = App(permissions.BRIDGE, config=config)

    @app.task
    async def tail() -> None:
        pass

    return app


async def notify(app: App, base: str, step: int, *, fails: bool = False, **more: Any) -> None:
    text = SECRET if base == "other" else PLAIN
    with anyio.fail_after(PATIENCE_SECONDS):
        await app.notify(base, {"class": "od", "step": step}, {"text": text, "fails": fails}, **more)


async def until(condition: Callable[[], Awaitable[bool] | bool]) -> None:
    with anyio.fail_after(PATIENCE_SECONDS):
        while not (met if isinstance(met := condition(), bool) else await met):  # noqa: ASYNC110
            await anyio.sleep(0.05)


async def fail(app: App, base: str, step: int) -> tuple[int, int]:
    """Publish a notification that fails, and return its sequence and its store time in nanoseconds."""
    await notify(app, base, step, fails=True)
    stored = await app.session.backend.message(base.upper(), last_by_subject=f"{base}.od.{step}")
    assert stored is not None
    return stored.sequence, stored.timestamp_ns


async def _has_messages(operator: App, stream: str) -> bool:
    try:
        return (await operator.session.admin.stream_info(stream)).messages > 0
    except NotFoundError:
        return False


async def ask(client: Client, request: str, **body: Any) -> dict[str, Any]:
    data = json.dumps(body).encode() if body else b""
    answer = await client.request(f"{API}{request}", data, timeout=PATIENCE_SECONDS)
    said: dict[str, Any] = json.loads(answer.data or b"{}")
    return said


@contextmanager
def started(directory: Path, *, nodes: int = 1, publishers_apart: bool = False) -> Iterator[Site]:
    """Run servers on which the workers of both apps have done their work, and yield the site."""
    site = Site((), directory)
    users: dict[str, Any] = {EVERYBODY: {"password": EVERYBODY}}
    for name in (*USERS, "b"):
        rights = site.permissions(name)
        allowed = {side: {"allow": getattr(rights, side).allow} for side in ("publish", "subscribe")}
        users[name] = {"password": name, "permissions": allowed}
    accounts: dict[str, Any] = {"workers": {"users": users}}
    if publishers_apart:
        accounts["publishers"] = {"publishes": ["mars"], "users": {"publisher": {"password": "publisher"}}}
        del users["publisher"]
    path = write_config(directory / "server.yaml", BASES[EVERYBODY], NOWHERE)
    server = {"port": 0, "monitoring": {"port": 0}, "cluster": {"port": 0}, "accounts": accounts}
    path.write_text(json.dumps({**json.loads(path.read_text()), "server": server}))
    loaded = settings.load(path, environ={})
    try:
        site.nodes = processes.start(loaded, directory=directory / "servers", nodes=nodes, detached=False)
        anyio.run(site.make)
        site.violations_of_workers = site.violations
        yield site
    finally:
        processes.stop(directory / "servers")


OF_STREAMS = (
    *("STREAM.CREATE", "STREAM.UPDATE", "STREAM.DELETE", "STREAM.PURGE", "STREAM.MSG.DELETE", "STREAM.SNAPSHOT"),
    *("STREAM.RESTORE", "STREAM.LEADER.STEPDOWN", "STREAM.PEER.REMOVE", "DIRECT.GET", "CONSUMER.NAMES"),
    *("CONSUMER.LIST",),
)
"""What an operator alone may ask of a stream, also of one that a worker reads and writes."""
OF_READERS = ("STREAM.INFO", "STREAM.MSG.GET", "CONSUMER.CREATE")
OF_CONSUMERS = (
    *("CREATE", "DURABLE.CREATE", "INFO", "DELETE", "MSG.NEXT", "PAUSE", "RESET", "UNPIN", "LEADER.STEPDOWN"),
)
OF_ACCOUNTS = (
    *("STREAM.CREATE.NEW", "STREAM.NAMES", "STREAM.LIST", "STREAM.TEMPLATE.CREATE.NEW", "INFO"),
    *("ACCOUNT.PURGE.workers", "META.LEADER.STEPDOWN", "SERVER.REMOVE"),
)
DELAYED = delayed_messages.stream_of("MARS")
BY_DESIGN = {f"{API}STREAM.PURGE.{DELAYED}", f"{API}STREAM.MSG.DELETE.{DELAYED}"}
"""What publishers and workers of one base may do to what others of this base have delayed."""
OF_WORKERS = {f"{API}CONSUMER.LIST.MARS"}
"""What a worker with an agent on the stream may ask of it as well."""


def foreign(site: Site, user: str) -> list[str]:
    """Return the subjects of all that could be asked of what belongs to others, and of none of which the user may."""
    mine = {spec.name for spec in site.own(user)} | {"MARS"}
    specs = {spec.name: spec for name in ("a", "b", "bridge", "spark") for spec in site.own(name)}
    theirs = {name: spec.subjects for name, spec in specs.items() if name not in mine}
    everybody = site.own("b")
    assert theirs.keys() & {spec.name for spec in everybody}, "b is another app"
    theirs |= {"OTHER": ("other.>",), own_streams.AUDIT: ("aviso_workers.audit",)}
    subjects: list[str] = []
    for stream, written in theirs.items():
        subjects += [f"{API}{request}.{stream}" for request in (*OF_STREAMS, *OF_READERS)]
        subjects += [f"{API}CONSUMER.{request}.{stream}.{user}-r0" for request in OF_CONSUMERS]
        for subject in written or ():
            key = subject.replace(">", "key")
            subjects += [key, f"{API}DIRECT.GET.{stream}.{key}", f"{API}CONSUMER.CREATE.{stream}.{user}-r0.{key}"]
    consumers = [
        (stream, f"b__{agent}-{base}")
        for base in BASES["b"]
        for agent in ("index", "daily")
        for stream in (base.upper(), own_streams.of_app(own_streams.RETRIES, "b"))
    ]
    consumers += [("OTHER", "b-r0"), ("MARS", "b-r0"), ("MARS", "b-r15"), (DELAYED, "b-r0")]
    consumers += [(delayed_messages.stream_of("OTHER"), delayed_messages.DURABLE)]
    for stream, consumer in consumers:
        subjects += [f"{API}CONSUMER.{request}.{stream}.{consumer}" for request in OF_CONSUMERS]
        subjects += [f"{API}CONSUMER.CREATE.{stream}.{consumer}.mars.>", f"$JS.ACK.{stream}.{consumer}.1.1.1.1.1"]
    # What is written by operators alone, for the app: also its own worker cannot.
    subjects += ["$KV.a__orders.a/timers/tick/pause", "$KV.a__orders.key", "aviso_workers.retries.a.index-mars"]
    return sorted({*subjects})


def operators_only(site: Site, user: str) -> list[str]:
    """Return the subjects of what nobody but an operator may ask of a stream, of those that the user works with."""
    subjects = [f"{API}{request}" for request in OF_ACCOUNTS]
    for stream in sorted({spec.name for spec in site.own(user)} | {"MARS"}):
        subjects += [f"{API}{request}.{stream}" for request in OF_STREAMS]
        subjects.append(f"{API}DIRECT.GET.{stream}.key")
    for stream in ("MARS", DELAYED):  # these are read by consumers of the app's own names alone
        subjects += [f"{API}CONSUMER.CREATE.{stream}", f"{API}CONSUMER.CREATE.{stream}.mine.mars.>"]
        subjects += [f"{API}CONSUMER.{request}.{stream}.mine" for request in OF_CONSUMERS]
    subjects += [delayed_messages.due_subject("MARS"), "$SYS.REQ.ACCOUNT.PING.CONNZ"]
    return sorted({*subjects} - BY_DESIGN - (OF_WORKERS if user == "a" else set()))


async def denied(site: Site, user: str, subjects: Sequence[str]) -> list[str]:
    """Publish to each subject, and return those to which the server denied it."""
    told: set[str] = set()

    def hear(error: Exception) -> None:
        _, _, rest = str(error).partition('"')
        told.add(rest.partition('"')[0].lower())

    async with site.connected(user, hear) as client:
        for subject in subjects:
            await client.publish(subject, b"")
            await flushed(client)
    return [subject for subject in subjects if subject.lower() in told]


async def denied_to_hear(site: Site, user: str, subjects: Sequence[str]) -> list[str]:
    """Subscribe to each subject, and return those to which the server denied it."""
    told: set[str] = set()

    def hear(error: Exception) -> None:
        _, _, rest = str(error).partition('"')
        told.add(rest.partition('"')[0].lower())

    async def ignore(_: Msg) -> None:
        """What is heard is no matter here."""

    async with site.connected(user, hear) as client:
        for subject in subjects:
            await client.subscribe(subject, cb=ignore)
            await flushed(client)
    return [subject for subject in subjects if subject.lower() in told]


Requests = list[tuple[str, dict[str, Any]]]


def _reads(site: Site, user: str) -> dict[str, Requests]:
    """Return requests by which a user could read the streams that only `b` may read, with a body for each."""
    secret = {spec.name: spec.subjects or () for spec in site.own("b") if spec.name != DELAYED}
    secret |= {"OTHER": ("other.>",)}
    own = [] if user == EVERYBODY else ["MARS", "aviso_workers_retries__a", "KV_a__table__newest"]
    return {stream: [*_reads_of(stream, subject, user=user, own=own)] for stream, (subject, *_) in secret.items()}


def _reads_of(stream: str, subject: str, *, user: str, own: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for at in (stream, *own):
        sequences: list[dict[str, Any]] = [{"seq": sequence} for sequence in range(1, 4)] if at == stream else []
        for body in (*sequences, {"last_by_subj": subject}, {"next_by_subj": subject, "seq": 1}):
            yield f"STREAM.MSG.GET.{at}", body
            yield f"DIRECT.GET.{at}", body
    config = {"ack_policy": "none", "deliver_policy": "all"}
    for reader in (f"{user}-r0", *((f"{user}__index-mars", "b__index-other") if own else ())):
        named = {**config, "name": reader}
        for at in (stream, *own):
            create = f"CONSUMER.CREATE.{at}.{reader}"
            yield create, {"stream_name": stream, "config": named}
            yield f"CONSUMER.MSG.NEXT.{at}.{reader}", {"batch": 50, "no_wait": True}
            if at == stream:
                yield create, {"stream_name": stream, "config": {**named, "deliver_subject": f"_INBOX_{user}.pushed"}}
            else:
                for filtered in ({"filter_subject": subject}, {"filter_subjects": [subject]}):
                    yield create, {"stream_name": at, "config": {**named, **filtered}}
                    yield f"{create}.{subject}", {"stream_name": at, "config": {**named, **filtered}}
            yield f"CONSUMER.MSG.NEXT.{at}.{reader}", {"batch": 50, "no_wait": True}
            yield f"CONSUMER.DELETE.{at}.{reader}", {}
    if not own:
        return  # the operator changes nothing
    # As a copy of the stream, or in another one.
    yield "STREAM.CREATE.COPY", {"name": "COPY", "mirror": {"name": stream}}
    yield f"STREAM.UPDATE.{own[-1]}", {"name": own[-1], "sources": [{"name": stream}]}
    yield f"STREAM.SNAPSHOT.{stream}", {"deliver_subject": f"_INBOX_{user}.snapshot"}


async def secrets_heard_by(site: Site, user: str, *, expected: Sequence[str] = ()) -> dict[str, set[str]]:
    """Send all requests by which somebody could read, and return the subjects of the secrets that came, by stream.

    Those of streams whose names end as one of the `expected` are waited for.
    """
    found: dict[str, set[str]] = {}
    heard: set[str] = set()
    came = anyio.Event()

    async def hear(message: Msg) -> None:
        heard.update(_secret_in(message))
        if heard:
            came.set()

    async with site.connected(user) as client:
        await client.subscribe(f"_INBOX_{user}.>", cb=hear, pending_msgs_limit=0)
        for stream, requests in _reads(site, user).items():
            for request, body in requests:
                if expected and request.startswith("CONSUMER.CREATE"):  # several servers need a while for that
                    await ask(client, request, **body)
                    continue
                if stream.endswith(tuple(expected)) and request.startswith("CONSUMER.DELETE"):
                    with anyio.move_on_after(PROMPT_SECONDS):
                        await came.wait()
                await client.publish(f"{API}{request}", json.dumps(body).encode(), reply=f"_INBOX_{user}.answer")
                await flushed(client)
            await anyio.sleep(0.02 * len(site.nodes) ** 2)  # what is pushed comes by itself, and from another server
            await flushed(client)
            if heard:
                found[stream] = set(heard)
            heard.clear()
            came = anyio.Event()
    return found


def _secret_in(message: Msg) -> Iterator[str]:
    if SECRET.encode() in message.data:
        yield message.subject
    if message.data.startswith(b"{") and b'"message"' in message.data:
        stored = json.loads(message.data).get("message", {})
        if SECRET.encode() in b64decode(stored.get("data", "")):
            yield stored["subject"]
