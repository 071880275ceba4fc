"""What declared settings do: retention, storage, limits, and what messages may ask for."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import nats
import pytest

from aviso_workers.backends import Administration
from aviso_workers.errors import UnavailableError
from aviso_workers.server import NatsServer, processes
from tests.ops.conftest import Administer, Api, Declare, Run, administered
from tests.waits import PATIENCE_SECONDS

SECOND = 10**9

Publish = Callable[..., dict[str, Any]]
Make = Callable[..., Path]
Tell = Callable[..., dict[str, Any]]


@pytest.fixture
def make(run: Run, declare: Declare) -> Make:
    """`make(max_msgs=3)`: the stream ORDERS with these settings; its configuration."""

    def make(**settings: Any) -> Path:
        config = declare({"ORDERS": {"subjects": ["orders.>"], **settings}})
        ran = run("streams", "apply", "--config", config)
        assert ran.code == 0, ran
        return config

    return make


@pytest.fixture
def held(api: Api) -> Callable[[], int]:
    """`held()`: how many messages the stream holds."""
    return lambda: int(api("STREAM.INFO.ORDERS")["state"]["messages"])


@pytest.fixture
def take(administer: Administer) -> Callable[..., None]:
    """`take("shipping", 2)`: as many messages, acknowledged by a pull consumer's reader."""

    def take(consumer: str, count: int) -> None:
        async def pull(administration: Administration) -> None:
            inbox = administration.new_inbox()
            async with administration.listen(inbox) as pulled:
                request = json.dumps({"batch": count, "expires": int(PATIENCE_SECONDS) * SECOND}).encode()
                administration.send(f"$JS.API.CONSUMER.MSG.NEXT.ORDERS.{consumer}", request, reply=inbox)
                with anyio.fail_after(PATIENCE_SECONDS):
                    for _ in range(count):
                        await administration.request((await pulled.receive()).reply, b"+ACK")

        administer(pull)

    return take


@pytest.fixture
def tell(url: str) -> Tell:
    """`tell("orders.1", **{"Nats-TTL": "1s"})`: what the stream answers to a message with these headers."""

    async def ask(subject: str, data: bytes, headers: dict[str, str]) -> dict[str, Any]:
        client = await nats.connect(url)
        answer = await client.request(subject, data, headers=headers)
        await client.close()
        found: dict[str, Any] = json.loads(answer.data)
        return found

    return lambda subject, data=b"here", **headers: asyncio.run(ask(subject, data, headers))


@pytest.mark.covers("001-08", "001-09", "001-10", "002-11", "002-15", "003-04")
@pytest.mark.parametrize(
    ("retention", "left"),
    [("limits", [3, 3, 3]), ("interest", [3, 3, 0]), ("workqueue", [3, 0])],
)
def test_retention_says_what_lets_a_message_go(
    make: Make, publish: Publish, take: Callable[..., None], held: Callable[[], int], retention: str, left: list[int]
) -> None:
    names = ["shipping", "billing"][: len(left) - 1]
    make(retention=retention, consumers={name: {} for name in names})
    publish("orders.1", "orders.2", "orders.3")
    found = [held()]
    for name in names:
        take(name, 3)
        found.append(held())
    assert found == left


def test_with_retention_by_interest_nothing_is_kept_that_nobody_wants(
    make: Make, publish: Publish, held: Callable[[], int]
) -> None:
    make(retention="interest", consumers={"shipping": {"filter_subjects": ["orders.new"]}})
    publish("orders.new", "orders.paid")
    assert held() == 1


def test_a_work_queue_takes_no_two_consumers_of_one_subject(run: Run, declare: Declare) -> None:
    consumers = {"shipping": {"filter_subjects": ["orders.new"]}, "billing": {"filter_subjects": ["orders.>"]}}
    config = declare({"ORDERS": {"subjects": ["orders.>"], "retention": "workqueue", "consumers": consumers}})
    ran = run("streams", "apply", "--config", config)
    assert (ran.code, "filtered consumer not unique on workqueue stream" in ran.err) == (1, True), ran


@pytest.mark.covers("001-11", "001-12")
@pytest.mark.covers("002-02", "002-09", "002-21", "002-34", "002-37")
@pytest.mark.covers("004-20", "004-21", "004-43")
@pytest.mark.parametrize(("storage", "left"), [("file", {"ORDERS": 1}), ("memory", {})])
def test_what_is_in_a_file_outlives_its_server_and_what_is_in_memory_does_not(
    run: Run, tmp_path: Path, write_config: Callable[..., Path], storage: str, left: dict[str, int]
) -> None:
    async def store(administration: Administration) -> None:
        await administration.api("STREAM.CREATE.ORDERS", {"name": "ORDERS", "storage": storage})
        await administration.request("ORDERS", b"here")

    async def look(administration: Administration) -> dict[str, int]:
        found = (await administration.api("STREAM.LIST"))["streams"]
        return {stream["config"]["name"]: stream["state"]["messages"] for stream in found}

    with NatsServer.start(store_dir=tmp_path / "store") as server:
        administered(server.url, store)
        server.kill()
    with NatsServer.start(store_dir=tmp_path / "store") as server:
        assert administered(server.url, look) == left


@pytest.mark.covers("001-16", "001-17", "002-07", "002-17", "002-24")
def test_limits_let_the_oldest_go_or_refuse_the_newest(make: Make, publish: Publish, api: Api) -> None:
    make(max_msgs=2, discard="old")
    publish("orders.1", "orders.2", "orders.3")
    state = api("STREAM.INFO.ORDERS")["state"]
    assert (state["first_seq"], state["last_seq"]) == (2, 3)
    make(max_msgs=2, discard="new")
    assert publish("orders.4")["error"]["err_code"] == 10077
    make(max_msgs=-1, discard="new", discard_new_per_subject=True, max_msgs_per_subject=1)
    assert publish("orders.3")["error"]["err_code"] == 10077
    assert publish("orders.5")["seq"] == 4


@pytest.mark.covers("002-07", "002-19")
def test_messages_grow_too_old(make: Make, publish: Publish, held: Callable[[], int]) -> None:
    make(max_age="1s", duplicate_window="1s")
    publish("orders.1")
    assert held() == 1
    assert processes.eventually(lambda: held() == 0, PATIENCE_SECONDS)


@pytest.mark.covers("002-18", "002-20", "004-39")
@pytest.mark.parametrize(
    ("settings", "subject", "code"),
    [({"max_msg_size": "1Ki"}, "orders.1", 10054), ({"max_bytes": "1Ki", "discard": "new"}, "orders.1", 10077)],
    ids=["message", "stream"],
)
def test_what_is_too_large_is_refused(
    make: Make, publish: Publish, settings: dict[str, Any], subject: str, code: int
) -> None:
    make(**settings)
    assert publish(subject, data=b"x" * 2048)["error"]["err_code"] == code


@pytest.mark.covers("002-16", "004-38")
def test_no_more_consumers_than_allowed(run: Run, make: Make, declare: Declare) -> None:
    make(max_consumers=1, consumers={"shipping": {}})
    ran = run("streams", "apply", "--config", declare({"ORDERS": {"consumers": {"shipping": {}, "billing": {}}}}))
    assert (ran.code, "maximum consumers limit reached" in ran.err) == (1, True), ran


@pytest.mark.covers("002-23")
def test_without_acknowledgements_nobody_is_answered(
    make: Make, administer: Administer, held: Callable[[], int]
) -> None:
    make(no_ack=True)

    async def ask(administration: Administration) -> None:
        with pytest.raises(UnavailableError, match="no answer in time"):
            await administration.request("orders.1", b"here", timeout_seconds=0.5)

    administer(ask)
    assert held() == 1


@pytest.mark.covers("001-42", "002-25", "002-33", "002-81")
def test_a_message_id_is_stored_once_within_the_window(make: Make, tell: Tell) -> None:
    make(duplicate_window="1m")
    first, second = (tell("orders.1", **{"Nats-Msg-Id": "one"}) for _ in range(2))
    assert (first["seq"], second["seq"], second["duplicate"]) == (1, 1, True)


def test_what_is_stored_is_published_once_more_and_under_another_subject(make: Make, administer: Administer) -> None:
    make(
        subject_transform={"src": "orders.>", "dest": "stored.>"},
        republish={"src": "stored.>", "dest": "copy.>", "headers_only": True},
    )

    async def hear(administration: Administration) -> Any:
        async with administration.listen("copy.>") as copies:
            await administration.request("orders.1", b"here")
            with anyio.fail_after(PATIENCE_SECONDS):
                return await copies.receive()

    heard = administer(hear)
    assert (heard.subject, heard.data, heard.headers["Nats-Subject"]) == ("copy.1", b"", "stored.1")


@pytest.mark.covers("002-07")
def test_a_message_may_say_how_long_it_is_kept(make: Make, tell: Tell, held: Callable[[], int]) -> None:
    make(allow_msg_ttl=True)
    tell("orders.short", **{"Nats-TTL": "1s"})
    tell("orders.long")
    assert held() == 2
    assert processes.eventually(lambda: held() == 1, PATIENCE_SECONDS)


def test_that_a_subjects_last_message_was_too_old_is_told(make: Make, tell: Tell, api: Api) -> None:
    make(subject_delete_marker_ttl="1m", max_age="1s", duplicate_window="1s")
    tell("orders.1")

    def marked() -> bool:
        headers = api("STREAM.MSG.GET.ORDERS", {"last_by_subj": "orders.1"})["message"].get("hdrs", "")
        return b"Nats-Marker-Reason: MaxAge" in base64.b64decode(headers)

    assert processes.eventually(marked, PATIENCE_SECONDS)


def test_a_message_may_say_when_it_is_to_be_published(make: Make, tell: Tell, api: Api) -> None:
    make(allow_msg_schedules=True)
    tell("orders.later", **{"Nats-Schedule": "@every 1s", "Nats-Schedule-Target": "orders.due"})

    def subjects() -> dict[str, int]:
        return dict(api("STREAM.INFO.ORDERS", {"subjects_filter": ">"})["state"]["subjects"])

    assert processes.eventually(lambda: "orders.due" in subjects(), PATIENCE_SECONDS), subjects()


def test_a_message_may_take_the_place_of_all_before_it(make: Make, tell: Tell, held: Callable[[], int]) -> None:
    make(allow_rollup_hdrs=True)
    for _ in range(3):
        tell("orders.1")
    tell("orders.1", **{"Nats-Rollup": "sub"})
    assert held() == 1


def test_counters_add_up(make: Make, tell: Tell) -> None:
    make(allow_msg_counter=True)
    assert [tell("orders.n", b"", **{"Nats-Incr": by})["val"] for by in ("+5", "-2")] == ["5", "3"]


def test_acknowledgements_are_sampled(
    make: Make, publish: Publish, administer: Administer, take: Callable[..., None]
) -> None:
    make(consumers={"shipping": {"sample_freq": 100}})

    async def sampled(administration: Administration) -> Any:
        inbox = administration.new_inbox()
        async with (
            administration.listen("$JS.EVENT.METRIC.CONSUMER.ACK.ORDERS.shipping") as samples,
            administration.listen(inbox) as pulled,
        ):
            await administration.request("orders.1", b"here")
            administration.send("$JS.API.CONSUMER.MSG.NEXT.ORDERS.shipping", b"1", reply=inbox)
            with anyio.fail_after(PATIENCE_SECONDS):
                await administration.request((await pulled.receive()).reply, b"+ACK")
                return json.loads((await samples.receive()).data)

    assert administer(sampled)["stream_seq"] == 1


def test_a_paused_consumer_delivers_nothing(make: Make, publish: Publish, administer: Administer) -> None:
    make(consumers={"shipping": {"pause_until": "2200-01-01T00:00:00Z"}})
    publish("orders.1")

    async def pull(administration: Administration) -> str:
        inbox = administration.new_inbox()
        async with administration.listen(inbox) as pulled:
            request = json.dumps({"batch": 1, "expires": SECOND // 5}).encode()
            administration.send("$JS.API.CONSUMER.MSG.NEXT.ORDERS.shipping", request, reply=inbox)
            with anyio.fail_after(PATIENCE_SECONDS):
                return (await pulled.receive()).status

    assert administer(pull) == "408"


@pytest.mark.covers("001-36")
def test_delays_between_deliveries_follow_the_backoff(make: Make, publish: Publish, api: Api) -> None:
    make(consumers={"shipping": {"backoff": ["1s", "5s"], "max_deliver": 3}})
    found = api("CONSUMER.INFO.ORDERS.shipping")["config"]
    assert (found["ack_wait"], found["backoff"]) == (SECOND, [SECOND, 5 * SECOND]), (
        "the first is the wait for an acknowledgement"
    )


@pytest.mark.covers("002-27", "002-62")
def test_an_ephemeral_consumer_leaves_nothing_behind(run: Run, make: Make, api: Api) -> None:
    config = make()
    run("notify", "mars", "class=od", "step=1", "--config", config)
    assert len(run("replay", "mars", "--config", config).lines) == 1
    assert not api("CONSUMER.NAMES.MARS")["consumers"]
