"""What the server denies is told once for each kind of subject, however many there are, and takes no more room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import nats
import pytest
from nats.aio.msg import Msg

from aviso_workers import App, Notification, Rate, Slots, config
from aviso_workers.backends.jetstream.connection import MAX_DENIALS, NatsConnection
from aviso_workers.backends.jetstream.inboxes import denies
from aviso_workers.engine import replay
from aviso_workers.errors import DeniedError, UnansweredError
from aviso_workers.events import AgentDisturbed, LeadershipHindered, PermissionDenied
from aviso_workers.server import NatsServer
from tests.conftest import write_mars_config
from tests.waits import LONG_SECONDS, PATIENCE_SECONDS, PROMPT_SECONDS, flushed

pytestmark = pytest.mark.anyio

MANY = 2 * MAX_DENIALS
SHORT_SECONDS = 3.0


async def test_what_is_denied_is_told_once_for_each_kind_of_subject(tmp_path: Path) -> None:
    told: list[str] = []

    def listen(*, connected: bool, reason: str, denied: str = "", foreign: str = "", times: int = 0) -> None:
        if denied:
            told.append(denied)

    users = "authorization { users: [{user: worker, password: right, permissions: {publish: [allowed]}}] }\n"
    with NatsServer.start(store_dir=tmp_path, config=users) as server:
        settings = config.JetStream(
            nats_url=config.ServerUrls(server.url), user="worker", password=config.Secret("right")
        )
        connection = NatsConnection(settings, on_connection=listen)
        await connection.open()
        for number in range(MANY):
            for subject in (
                f"$JS.ACK.MARS.field__index.1.{number}.1.1.0",
                f"$JS.ACK.MARS.field__other.1.{number}.1.1.0",
                f"$KV.field__failures.{number}",
                f"$JS.API.CONSUMER.MSG.NEXT.MARS.{number}",
                f"mars.od.{number}",
            ):
                connection.wire.send(subject.encode(), b"")
        assert await connection.answers()
        remembered = len(connection._denials)
        await connection.close()

    assert sorted(told) == [
        "publish to $js.ack.mars.field__index.>",
        "publish to $js.ack.mars.field__other.>",
        "publish to $js.api.consumer.msg.next.>",
        "publish to $kv.field__failures.>",
        "publish to mars.>",
    ]
    assert remembered <= MAX_DENIALS


async def test_who_asks_for_what_is_denied_is_told_at_once(tmp_path: Path) -> None:
    users = "authorization { users: [{user: reader, password: right, permissions: {publish: [allowed]}}] }\n"
    with NatsServer.start(store_dir=tmp_path, config=users) as server:
        url = server.url.replace("//", "//reader:right@")
        connection = NatsConnection(config.JetStream(nats_url=config.ServerUrls(url)), on_connection=None)
        await connection.open()
        with anyio.fail_after(PROMPT_SECONDS):
            for subject in ("STREAM.LIST", "STREAM.INFO.MARS"):
                with pytest.raises(DeniedError, match=rf"^\$JS\.API\.{subject}: permissions violation"):
                    await connection.api(subject, timeout_seconds=LONG_SECONDS)
            for subject in ("anything", 'any"thing'):
                with pytest.raises(DeniedError, match=subject):
                    await connection.request(subject, b"", timeout_seconds=LONG_SECONDS)
        await connection.close()


def test_only_the_subject_that_is_quoted_is_denied() -> None:
    said = 'nats: permissions violation for publish to "svc.orders"'
    assert denies(said, "svc.Orders")
    assert not denies(said, "orders")
    assert not denies(said, 'x"svc.orders')
    assert not denies('nats: permissions violation for publish to "x\\"svc.orders"', "svc.orders")
    assert denies('nats: permissions violation for publish to "x\\"svc.orders"', 'x"svc.orders')


@pytest.mark.slow
async def test_a_request_is_not_ended_for_one_whose_subject_differs_in_case(tmp_path: Path) -> None:
    users = "authorization { users: [{user: u, password: p, permissions: {publish: {deny: ['svc.Orders']}}}] }\n"
    with NatsServer.start(store_dir=tmp_path, config=users) as server:
        url = server.url.replace("//", "//u:p@")
        asker = NatsConnection(config.JetStream(nats_url=config.ServerUrls(url)), on_connection=None)
        server_side = await nats.connect(url)
        denied_told = anyio.Event()
        await asker.open()

        async def answer(message: Msg) -> None:
            await denied_told.wait()
            await message.respond(b"done")

        await server_side.subscribe("svc.orders", cb=answer)
        await flushed(server_side)
        with anyio.fail_after(PATIENCE_SECONDS):
            async with anyio.create_task_group() as tasks:

                async def ask_what_is_denied() -> None:
                    with pytest.raises(DeniedError, match=r"svc\.Orders"):
                        await asker.request("svc.Orders", b"", timeout_seconds=SHORT_SECONDS)
                    denied_told.set()

                tasks.start_soon(ask_what_is_denied)
                answered = await asker.request("svc.orders", b"", timeout_seconds=LONG_SECONDS)
        assert answered.data == b"done"
        await server_side.close()
        await asker.close()


async def test_a_worker_that_may_not_record_itself_works_and_ends_as_ever(tmp_path: Path) -> None:
    users = (
        "authorization { users: [{user: worker, password: right, "
        "permissions: {publish: {deny: ['$KV.field__live.>']}}}] }\n"
    )
    with NatsServer.start(store_dir=tmp_path / "store", config=users) as server:
        app = App("field", config=write_mars_config(tmp_path / "c.yaml", server.url, user="worker", password="right"))
        ticked, told = anyio.Event(), anyio.Event()
        stated: list[str] = []

        @app.every("1s", singleton=False)
        async def tick() -> None:
            ticked.set()

        def hear(event: PermissionDenied) -> None:
            stated.append(event.denied)
            told.set()

        app.events.listen(hear, PermissionDenied)
        with anyio.fail_after(PATIENCE_SECONDS):
            async with app.running():
                await ticked.wait()
                await told.wait()
    assert stated == ["publish to $kv.field__live.>"]


@pytest.mark.slow
@pytest.mark.parametrize("read", ["replay", "watch"])
async def test_a_reading_that_may_not_pull_ends_and_names_the_subject(tmp_path: Path, read: str) -> None:
    users = (
        "authorization { users: [{user: all, password: right}, {user: reader, password: right, "
        "permissions: {publish: {deny: ['$JS.API.CONSUMER.MSG.NEXT.MARS.>']}}}] }\n"
    )
    with NatsServer.start(store_dir=tmp_path / "store", config=users) as server:
        writer, reader = (
            write_mars_config(tmp_path / f"{user}.yaml", server.url, user=user, password="right")
            for user in ("all", "reader")
        )
        async with App("writer", config=writer) as app:
            await app.notify("mars", {"class": "od", "step": 6})
        with anyio.fail_after(PATIENCE_SECONDS):
            async with App("reader", config=reader) as app:
                with pytest.raises(DeniedError, match=r"CONSUMER\.MSG\.NEXT\.MARS\."):
                    await anext(getattr(app, read)("mars", from_id=1))


@pytest.mark.parametrize("read", ["replay", "watch"])
@pytest.mark.parametrize("lacking", ["CONSUMER.CREATE.MARS", "CONSUMER.MSG.NEXT"])
async def test_a_reading_whose_account_lacks_an_import_ends_and_names_the_request(
    tmp_path: Path, read: str, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "MAX_UNANSWERED", 2)
    requests = ("INFO", "STREAM.INFO.MARS", "STREAM.MSG.GET.MARS", "CONSUMER.CREATE.MARS.*", "CONSUMER.MSG.NEXT.MARS.*")
    imported = [f"$JS.API.{request}" for request in requests if not request.startswith(lacking)]
    imports = ", ".join(f'{{service: {{account: OWNER, subject: "{subject}"}}}}' for subject in imported)
    accounts = (
        "accounts {\n"
        " OWNER {jetstream: enabled, users: [{user: owner, password: right}],"
        ' exports: [{service: "$JS.API.>", response: stream}]}\n'
        f" OTHER {{users: [{{user: other, password: right}}], imports: [{imports}]}} }}\n"
    )
    with NatsServer.start(store_dir=tmp_path / "store", config=accounts) as server:
        owner, other = (
            write_mars_config(tmp_path / f"{user}.yaml", server.url, user=user, password="right")
            for user in ("owner", "other")
        )
        async with App("owner", config=owner) as app:
            await app.notify("mars", {"class": "od", "step": 6})
        with anyio.fail_after(PATIENCE_SECONDS):
            async with App("other", config=other) as app:
                with pytest.raises(UnansweredError, match=rf"{lacking}.* imported"):
                    await anext(getattr(app, read)("mars", from_id=1))


@pytest.mark.slow
async def test_a_denied_settlement_of_a_server_with_longer_replies_is_told(tmp_path: Path) -> None:
    """The feature `js_ack_fc_v2` of a nats-server names the domain and the account in what a message is settled by."""
    server_config = (
        "feature_flags { js_ack_fc_v2: true }\n"
        "authorization { users: [{user: worker, password: right, "
        "permissions: {publish: {deny: ['$JS.ACK.*.*.MARS.>']}}}] }\n"
    )
    with NatsServer.start(store_dir=tmp_path / "store", config=server_config) as server:
        app = App("field", config=write_mars_config(tmp_path / "c.yaml", server.url, user="worker", password="right"))

        @app.agent("mars")
        async def index(notification: Notification[Any]) -> None: ...

        told: list[Exception] = []
        disturbed, stop = anyio.Event(), anyio.Event()

        def hear(event: AgentDisturbed) -> None:
            told.append(event.error)
            disturbed.set()

        app.events.listen(hear, AgentDisturbed)
        async with app, anyio.create_task_group() as tasks:
            await app.notify("mars", {"class": "od", "step": 6})
            tasks.start_soon(app._work, stop)
            with anyio.fail_after(PATIENCE_SECONDS):
                await disturbed.wait()
            tasks.cancel_scope.cancel()
        assert isinstance(told[0], DeniedError)
        assert "$js.ack._." in str(told[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "bucket"),
    [(Rate(100, per=1), "field__limits"), (Slots(1), "field__leases")],
    ids=["rate", "slots"],
)
async def test_without_the_right_to_the_bucket_of_a_limit_nothing_begins_and_the_cure_is_told_once(
    tmp_path: Path, limit: Rate | Slots, bucket: str
) -> None:
    server_config = (
        "authorization { users: [{user: worker, password: right, "
        f"permissions: {{publish: {{deny: ['$KV.{bucket}.>']}}}}}}] }}\n"
    )
    with NatsServer.start(store_dir=tmp_path / "store", config=server_config) as server:
        app = App("field", config=write_mars_config(tmp_path / "c.yaml", server.url, user="worker", password="right"))
        begun: list[int] = []

        @app.agent("mars", limits=[limit])
        async def index(notification: Notification[Any]) -> None:
            begun.append(notification.sequence)

        told: list[LeadershipHindered] = []
        hindered, stop = anyio.Event(), anyio.Event()

        def hear(event: LeadershipHindered) -> None:
            told.append(event)
            hindered.set()

        app.events.listen(hear, LeadershipHindered)
        async with app, anyio.create_task_group() as tasks:
            await app.notify("mars", {"class": "od", "step": 6})
            tasks.start_soon(app._work, stop)
            with anyio.fail_after(PATIENCE_SECONDS):
                await hindered.wait()
            await anyio.sleep(SHORT_SECONDS)
            tasks.cancel_scope.cancel()
    assert begun == []
    assert [event.bucket for event in told] == [bucket]
    assert "begins no call for which a Rate or Slots have to be asked" in str([line.fields for line in told[0].lines()])
