"""The permissions that `server render --role` gives: with them each role works, and needs every line of them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import anyio
import nats
import pyarrow as pa
import pytest
from msgspec import structs
from nats.aio.msg import Msg
from pyspark.sql.types import DataType, LongType, MapType, StringType, StructField, StructType, TimestampType

from aviso_agents import spark_events
from aviso_workers import App, Notification, Rate, RetryPolicy, Slots, Window, Windowing, cli
from aviso_workers import config as settings
from aviso_workers.aviso.codec import Message
from aviso_workers.backends import Backend, open_backend
from aviso_workers.backends.jetstream.management import PING
from aviso_workers.config.nats_server import Permissions, Subjects
from aviso_workers.errors import DeniedError, NotFoundError
from aviso_workers.jetstream import identities
from aviso_workers.jetstream.specs import StreamSpec
from aviso_workers.jetstream.subjects import pattern
from aviso_workers.ops import permissions, stream_policy
from aviso_workers.server import NatsServer
from aviso_workers.spark import writers
from aviso_workers.spark.data_source import AvisoDataSource
from aviso_workers.state import dead_letter_records, delayed_messages, own_streams
from tests.conftest import write_mars_config
from tests.waits import PATIENCE_SECONDS, flushed

DEAD_LETTERS = own_streams.of_app(own_streams.DEAD_LETTERS, "field")
RETRIES = own_streams.of_app(own_streams.RETRIES, "field")

pytestmark = pytest.mark.anyio

EVERYTHING = json.dumps({"user": "everything", "password": "everything"})
DELAYED = delayed_messages.stream_of("MARS")
NOWHERE = "nats://127.0.0.1:1"
Configure = Callable[..., Path]
Scenario = Callable[[Configure], Awaitable[None]]


def an_app(config: Path) -> App:
    """An app that uses all that a worker has permissions for."""
    app = App("field", config=config)
    table, counter = app.table("newest", int), app.counter("done")

    @app.agent(
        "mars",
        retry=RetryPolicy(first=0.1, attempts=2, jitter=0),
        order_by=("class",),
        limits=[Rate(100, per=1), Slots(1, by=["class"])],
    )
    async def index(notification: Notification[dict[str, int]]) -> None:
        await table.put("step", 1)
        await counter.add("all", 1)
        await counter.get("all")
        await table.items()
        await counter.items()
        raise ValueError("refused")

    @app.agent("mars", singleton=True)
    async def alone(notification: Notification[dict[str, int]]) -> None:
        pass

    @app.agent("mars", window=Windowing(size="1d", fold=lambda value, _: value + 1, initial=0))
    async def daily(window: Window[int]) -> None:
        pass

    @app.every("1s", singleton=True)
    async def tick() -> None:
        pass

    return app


async def publish(configure: Configure) -> None:
    async with App("publisher", config=configure()) as app:
        await publish_with(app)


async def publish_with(app: App) -> None:
    await app.notify("mars", {"class": "od", "step": 1}, {"n": 1})
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    await app.notify("mars", {"class": "od", "step": 1}, {"n": 1}, due=tomorrow, message_id="later")
    await app.cancel("mars", "later")


async def deliver_later(app: App) -> None:
    soon = datetime.now(UTC) + timedelta(seconds=1)
    await app.notify("mars", {"class": "od", "step": 2}, {"n": 1}, due=soon)
    await until_messages(app, DELAYED, lambda count: count == 0)


async def work(configure: Configure) -> None:
    app = an_app(configure())
    async with app, working(app):
        await publish_with(app)
        await deliver_later(app)
        await until_messages(app, DEAD_LETTERS, lambda count: count > 0)
        async for _ in app.replay("mars"):
            pass
        await read_by_each_name_of_the_app(app)
        await read_what_is_seldom_read(app)


async def read_by_each_name(backend: Backend, owner: str, *streams: str) -> None:
    """Read as often at once as the owner may."""
    for stream in streams:
        async with AsyncExitStack() as open_readings:
            for _ in identities.reader_names(owner, stream):
                reading = await open_readings.enter_async_context(aclosing(backend.read(stream, filter_subjects=())))
                await anext(reading)


async def read_by_each_name_of_the_app(app: App) -> None:
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    await app.notify("mars", {"class": "od", "step": 1}, {"n": 1}, due=tomorrow, message_id="read")
    await read_by_each_name(app.session.backend, app.name, "MARS", DELAYED)
    await app.cancel("mars", "read")


async def read_what_is_seldom_read(app: App) -> None:
    """As a worker does that follows one that was killed, and one whose answers were lost."""
    backend = app.session.backend
    for stream in (DEAD_LETTERS, DELAYED, "MARS"):
        assert await backend.message(stream, 10_000) is None
    for bucket in (
        "field__table__newest",
        "field__failures",
        "field__leases",
        "field__limits",
        "field__timers",
        "field__windows__daily",
    ):
        await (await backend.key_value(bucket)).get("nothing")
    with suppress(NotFoundError):  # no operator has ordered anything
        await backend.message("KV_field__orders", last_by_subject="$KV.field__orders.nothing")


def a_bridge(config: Path) -> App:
    """A stand-in for the agent: it does with the server what that does for each application."""
    app = App(permissions.BRIDGE, config=config)

    @app.task
    async def tail(app: App) -> None:
        positions = await app.key_value(spark_events.BUCKET)
        await positions.put("application", b"1")
        await positions.entries()
        async for _ in app.replay("mars"):
            pass
        await anyio.sleep_forever()

    return app


async def bridge(configure: Configure) -> None:
    app = a_bridge(configure())
    async with app, working(app):
        await publish_with(app)
        await deliver_later(app)
        for stream in (DELAYED, "MARS"):
            assert await app.session.admin.message(stream, 10_000) is None
        bucket = await app.session.backend.key_value(spark_events.BUCKET)
        assert await bucket.get("nothing") is None
        await read_by_each_name_of_the_app(app)
        await read_by_each_name(app.session.backend, app.name, f"KV_{spark_events.BUCKET}")


async def run_jobs(configure: Configure) -> None:
    config = configure()
    await anyio.to_thread.run_sync(write_and_read, config)
    async with App("job", config=config) as app:
        assert await app.session.backend.message("MARS", 10_000) is None
    async with open_backend(app.config, owner=identities.SPARK) as backend:
        await read_by_each_name(backend, identities.SPARK, "MARS")


def write_and_read(config: Path) -> None:
    """What a driver and an executor do, here without Spark's processes: rows are written under ids of their own, twice,
    which compares them with those that are stored; then as a batch of a streaming query, and all are read.
    """
    options = {"config": str(config), "event": "mars"}
    rows = pa.RecordBatch.from_pylist([{"id": "one", "class": "od", "step": 1, "payload": "{}"}])
    text, number = StringType(), LongType()
    columns = struct({"id": text, "class": text, "step": number, "payload": text})
    with pytest.MonkeyPatch.context() as patched:
        task = SimpleNamespace(partitionId=lambda: 0)
        patched.setattr(writers, "TaskContext", SimpleNamespace(get=lambda: task))
        with_ids = AvisoDataSource({**options, "msgIdColumn": "id"}).writer(columns, False)
        for _ in range(2):
            with_ids.commit([with_ids.write(iter([rows]))])
        of_query = {**options, "msgIdColumn": "id", "queryId": "copy"}
        for batch in ("0", "1"):
            of_batch = AvisoDataSource({**of_query, "batchId": batch}).writer(columns, False)
            of_batch.commit([of_batch.write(iter([rows]))])
    seen = {"event_type": text, "sequence": number, "time": TimestampType(), "topic": text}
    reader = AvisoDataSource({"config": str(config), "stream": "MARS"}).reader(
        struct({**seen, "identifier": MapType(text, text), "payload": text})
    )
    assert sum(batch.num_rows for partition in reader.partitions() for batch in reader.read(partition)) == 1


def struct(columns: dict[str, DataType]) -> StructType:
    return StructType([StructField(name, kind) for name, kind in columns.items()])


async def operate(configure: Configure) -> None:
    async with App("operator", config=configure()) as app:
        backend, dead_letters = app.session.admin, f"{dead_letter_records.RETRIES_SUBJECT}.field.index"
        administration = backend.administration()
        await app.notify("mars", {"class": "od", "step": 1}, {"n": 1})
        async with administration.listen("$JS.EVENT.>"), administration.snapshot("MARS") as snapshot:
            async for _ in snapshot.chunks:
                pass
        await (await backend.key_value("bucket")).put("key", b"value")
        await app.session.own_streams.ensure(dead_letter_records.retries_spec("field", app.config))
        retried = Message(subject=dead_letters, data=b"{}", headers={})
        await backend.publish(retried, message_id="one", stream=RETRIES, timeout_seconds=10.0)


@asynccontextmanager
async def working(app: App) -> AsyncGenerator[None, None]:
    stop = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(app._work, stop)
        with anyio.fail_after(PATIENCE_SECONDS):
            yield
        stop.set()


async def messages(app: App, stream: str) -> int:
    try:
        return (await app.session.backend.stream_info(stream)).messages
    except NotFoundError:
        return 0


async def until_messages(app: App, stream: str, holds: Callable[[int], bool]) -> None:
    """Return when the number of messages of the stream is as it should be."""
    while not holds(await messages(app, stream)):
        await app.session.backend.clock.sleep(0.05)


RARE = {f"$JS.API.CONSUMER.UNPIN.{RETRIES}.field__alone", "$JS.SNAPSHOT.ACK.MARS.1", PING}
"""What is sent when a worker ends while a singleton's dead letters are tried again, in the backup of much, and in a
cluster."""
SCENARIOS: dict[permissions.Role, Scenario] = {
    "publisher": publish,
    "worker": work,
    "bridge": bridge,
    "spark": run_jobs,
    "operator": operate,
}


def granted(role: permissions.Role, config: Path) -> Permissions:
    match role:
        case "worker":
            app = an_app(config)
            return permissions.of_worker(app, app.config)
        case "bridge":
            app = a_bridge(config)
            return permissions.of_worker(app, app.config, buckets=[permissions.BRIDGE])
        case "spark":
            return permissions.of_spark(App("any", config=config).config)
        case "operator":
            return permissions.of_operator(App("any", config=config).config)
        case _:
            return permissions.of_publisher(App("any", config=config).config)


def own_streams_of(role: permissions.Role, config: Path) -> list[StreamSpec]:
    app = an_app(config)
    match role:
        case "worker":
            return permissions.streams_of_worker(app, app.config)
        case "bridge":
            return permissions.streams_of_worker(a_bridge(config), app.config, opened=[spark_events.BUCKET])
        case "spark":
            return permissions.streams_of_spark(app.config)
        case _:
            return permissions.streams_of_publisher(app.config)


async def make_streams(config: Path, own: Sequence[StreamSpec]) -> None:
    """Make what `streams apply --role` does."""
    async with App("operator", config=config) as operator:
        admin = operator.session.admin
        for plan in await stream_policy.plans(admin, operator.config, own):
            await stream_policy.carry_out(admin, operator.config, plan)
        assert not any(plan.needed for plan in await stream_policy.plans(admin, operator.config, own))


def user(name: str, allowed: Permissions) -> str:
    rights = {side: {"allow": list(getattr(allowed, side).allow)} for side in ("publish", "subscribe")}
    return json.dumps({"user": name, "password": name, "permissions": rights})


@asynccontextmanager
async def heard_by_everybody(server: NatsServer) -> AsyncGenerator[set[str], None]:
    """The subjects to which anybody publishes meanwhile."""
    heard: set[str] = set()

    async def hear(message: Msg) -> None:
        heard.add(message.subject)

    client = await nats.connect(server.url, user="everything", password="everything")
    await client.subscribe(">", cb=hear, pending_msgs_limit=0)
    await flushed(client)
    yield heard
    await flushed(client)  # behind what was published
    await client.drain()  # and handed to `hear`, which `close` does not wait for


async def denied(server: NatsServer, name: str, *, publish: str = "", subscribe: str = "") -> bool:
    """Whether the user may not publish to the subject, or not subscribe to it."""
    said: list[str] = []

    async def hear(error: Exception) -> None:
        said.append(str(error))

    client = await nats.connect(server.url, user=name, password=name, error_cb=hear)
    if publish:
        await client.publish(publish, b"")
    if subscribe:
        await client.subscribe(subscribe)
    await flushed(client)
    await client.close()
    return any("permissions violation" in each.lower() for each in said)


@pytest.mark.slow
@pytest.mark.parametrize("role", SCENARIOS)
async def test_a_role_works_and_needs_every_line(role: permissions.Role, tmp_path: Path) -> None:
    def configure(url: str = NOWHERE, **jetstream: object) -> Path:
        return write_mars_config(tmp_path / "config.yaml", url, **jetstream)

    login = {"user": "role", "password": "role"}
    rights = granted(role, configure(**login))
    lines, heard_lines = rights.publish.allow, rights.subscribe.allow
    without = [user(f"without-{i}", structs.replace(rights, publish=less)) for i, less in enumerate(each_less(lines))]
    deaf = [user(f"deaf-{i}", structs.replace(rights, subscribe=less)) for i, less in enumerate(each_less(heard_lines))]
    users = ", ".join([user("role", rights), *without, *deaf, EVERYTHING])
    accounts = f"accounts: {{ DATA: {{ jetstream: enabled, users: [{users}] }} }}\n"
    with NatsServer.start(store_dir=tmp_path / "store", config=accounts) as server:
        everything = configure(server.url, user="everything", password="everything")
        await make_streams(everything, own_streams_of(role, everything))
        async with heard_by_everybody(server) as heard:
            heard |= RARE
            await SCENARIOS[role](lambda: configure(server.url, **login))
        assert " Violation - " not in server.log

        needed = {line: only_by(line, lines, heard) for line in lines}
        assert not (unneeded := {line for line, subjects in needed.items() if not subjects}), "\n".join(unneeded)
        for i, line in enumerate(lines):
            assert await denied(server, f"without-{i}", publish=needed[line][0]), line
        for i, line in enumerate(heard_lines):
            assert await denied(server, f"deaf-{i}", subscribe=line), line


def each_less(lines: tuple[str, ...]) -> list[Subjects]:
    """The lines without each of them in turn. A server takes an empty list for the right to everything."""
    return [Subjects(allow=lines[:i] + lines[i + 1 :] or ("nothing",)) for i in range(len(lines))]


def only_by(line: str, lines: Sequence[str], heard: set[str]) -> list[str]:
    """Return the subjects that this line allows, and no other one does."""
    others = pattern([other for other in lines if other != line])
    return [subject for subject in heard if pattern([line]).fullmatch(subject) and not others.fullmatch(subject)]


async def test_a_worker_without_its_streams_says_which_and_by_which_command_they_are_made(tmp_path: Path) -> None:
    def configure(url: str = NOWHERE, **jetstream: object) -> Path:
        return write_mars_config(tmp_path / "config.yaml", url, **jetstream)

    users = ", ".join([user("role", granted("worker", configure())), EVERYTHING])
    accounts = f"accounts: {{ DATA: {{ jetstream: enabled, users: [{users}] }} }}\n"
    with NatsServer.start(store_dir=tmp_path / "store", config=accounts) as server:
        app = an_app(configure(server.url, user="role", password="role"))
        async with app:
            said = "stream {} is missing, and our user may not create it: .*`aviso-workers streams apply --role`"
            with pytest.raises(DeniedError, match=said.format("MARS")):
                await app.notify("mars", {"class": "od", "step": 1}, {"n": 1})
            with pytest.raises(DeniedError, match=said.format("KV_field__state")):
                await app.session.backend.key_value("field__state")


async def test_the_role_of_a_former_version_is_refused_with_the_right_that_is_missing(tmp_path: Path) -> None:
    def configure(url: str = NOWHERE, **jetstream: object) -> Path:
        return write_mars_config(tmp_path / "config.yaml", url, **jetstream)

    rights = granted("worker", configure(user="role", password="role"))
    former = "$KV.aviso_workers_consumers.>", "$JS.API.STREAM.INFO.KV_aviso_workers_consumers"
    lines = (*(line for line in rights.publish.allow if "__" not in line or ".field__" in line), *former)
    old = structs.replace(rights, publish=Subjects(allow=lines))
    accounts = f"accounts: {{ DATA: {{ jetstream: enabled, users: [{user('role', old)}, {EVERYTHING}] }} }}\n"
    with NatsServer.start(store_dir=tmp_path / "store", config=accounts) as server:
        everything = configure(server.url, user="everything", password="everything")
        await make_streams(everything, own_streams_of("worker", everything))
        app = an_app(configure(server.url, user="role", password="role"))
        with pytest.raises(DeniedError, match=r"INFO\.KV_field__state.*server render --role worker --app MODULE:APP`"):
            async with app.running():
                await anyio.sleep_forever()


def test_a_worker_may_use_the_lease_by_which_one_of_all_closes_windows(tmp_path: Path) -> None:
    app = App("field", config=write_mars_config(tmp_path / "config.yaml", NOWHERE))

    @app.agent("mars", window=Windowing(size="1d", fold=lambda value, _: value + 1, initial=0))
    async def daily(window: Window[int]) -> None:
        pass

    lines = permissions.of_worker(app, app.config).publish.allow
    assert {"$KV.field__leases.>", "$JS.API.STREAM.INFO.KV_field__leases"} <= {*lines}
    assert "$KV.field__timers.>" not in lines


def test_no_role_but_the_operators_may_create_or_update_a_stream(tmp_path: Path) -> None:
    config = write_mars_config(tmp_path / "config.yaml", NOWHERE)
    for role in ("publisher", "worker", "bridge", "spark"):
        allowed = granted(role, config).publish.allow
        assert not [line for line in allowed if ".STREAM.CREATE." in line or ".STREAM.UPDATE." in line]
        assert not [line for line in allowed if "DIRECT.GET" in line]
        assert "$JS.API.STREAM.INFO.MARS" in allowed


def test_what_a_role_reaches_beyond_its_subjects_is_told(tmp_path: Path) -> None:
    def told(role: permissions.Role, **jetstream: object) -> list[str]:
        config = write_mars_config(tmp_path / "config.yaml", NOWHERE, **jetstream)
        parts = ("its acknowledgement", "deliver it to any subject", "remove and replace")
        return [part for part in parts for each in permissions.beyond(granted(role, config)) if part in each]

    published, removed = "its acknowledgement", "remove and replace"
    assert told("publisher") == [published, removed]
    assert told("worker") == [published, "deliver it to any subject", removed]
    assert told("operator") == []


async def test_a_publisher_of_an_existing_stream_needs_no_right_on_what_waits_until_it_delivers_later(
    tmp_path: Path,
) -> None:
    def configure(url: str = NOWHERE, **jetstream: object) -> Path:
        return write_mars_config(tmp_path / "config.yaml", url, stream_management="observe", **jetstream)

    lines = tuple(line for line in granted("publisher", configure()).publish.allow if "schedule" not in line)
    fewer = Permissions(publish=Subjects(allow=lines), subscribe=Subjects(allow=("_INBOX_role.>",)))
    assert [said for said in permissions.beyond(fewer) if "acknowledgement" not in said] == []
    accounts = f"accounts: {{ DATA: {{ jetstream: enabled, users: [{user('role', fewer)}, {EVERYTHING}] }} }}\n"
    with NatsServer.start(store_dir=tmp_path / "store", config=accounts) as server:
        managed = write_mars_config(tmp_path / "all.yaml", server.url, user="everything", password="everything")
        async with App("operator", config=managed) as app:
            await app.notify("mars", {"class": "od", "step": 1}, {"n": 1})
        async with App("publisher", config=configure(server.url, user="role", password="role")) as app:
            await app.notify("mars", {"class": "od", "step": 2}, {"n": 1})
            assert (await app.session.backend.stream_info("MARS")).messages == 2
        assert " Violation - " not in server.log


def test_in_a_domain_requests_go_to_its_own_subjects(tmp_path: Path) -> None:
    config = write_mars_config(tmp_path / "config.yaml", NOWHERE, domain="hub")
    assert "$JS.hub.API.STREAM.INFO.MARS" in granted("publisher", config).publish.allow


@pytest.mark.parametrize("role", ["publisher", "operator"])
def test_the_command_prints_what_belongs_below_a_user(
    role: Literal["publisher", "operator"],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = write_mars_config(tmp_path / "config.yaml", NOWHERE)
    monkeypatch.setattr("sys.argv", ["aviso-workers", "server", "render", "--role", role, "--config", str(config)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    printed = "".join(f"          {line}\n" for line in capsys.readouterr().out.splitlines())

    assert ended.value.code == 0
    users = f"server:\n  accounts:\n    DATA:\n      users:\n        {role}:\n          password: hush\n{printed}"
    (tmp_path / "server.yaml").write_text(f"notification_backend: {{kind: jetstream}}\n{users}")
    loaded = settings.load(tmp_path / "server.yaml", environ={})
    assert loaded.server.accounts["DATA"].users[role].permissions == granted(role, config)
    assert not list(Path.cwd().glob("nats-server.conf"))


def test_an_operator_reaches_the_origins_of_declared_mirrors(write_config: Callable[..., Path]) -> None:
    path = write_config("nats://127.0.0.1:4222")
    mirror = {"name": "MARS", "external": {"api": "$JS.hub.API"}}
    path.write_text(json.dumps({**json.loads(path.read_text()), "streams": {"COPY": {"mirror": mirror}}}))
    assert "$JS.hub.API.>" in permissions.of_operator(App("any", config=path).config).publish.allow
