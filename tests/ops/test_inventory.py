"""What a server holds, shown: `streams ls|info|gaps|get`, `consumers ls|show`, `report account`."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pytest

from aviso_workers.backends import Administration, Management
from aviso_workers.errors import NotFoundError, UnavailableError
from aviso_workers.jetstream.info import ConsumerConfig, ConsumerInfo
from aviso_workers.ops import inventory
from aviso_workers.server import NatsServer
from tests.ops.conftest import Administer, Api, Declare, Ran, Run

Publish = Callable[..., dict[str, Any]]


@pytest.fixture
def config(declare: Declare, run: Run) -> Path:
    """The stream ORDERS, with a consumer for each kind of order."""
    consumers = {"new": {"filter_subjects": ["orders.new"]}, "all": {"deliver_subject": "display.orders"}}
    path = declare({"ORDERS": {"subjects": ["orders.>"], "allow_direct": True, "consumers": consumers}})
    assert run("streams", "apply", "--config", path).code == 0
    return path


def listed(ran: Ran) -> list[dict[str, Any]]:
    """The rows that a command has listed with `--json`."""
    assert ran.code == 0, ran
    return [json.loads(line) for line in ran.lines]


@pytest.mark.covers("002-57", "004-24")
def test_all_streams_are_listed_whoever_made_them(run: Run, config: Path, api: Api, publish: Publish) -> None:
    api("STREAM.CREATE.THEIRS", {"name": "THEIRS"})
    publish("orders.new", "orders.paid")
    found = {row["stream"]: row for row in listed(run("streams", "ls", "--json", "--config", config))}
    assert {name: (row["configured"], row["messages"]) for name, row in found.items()} == {
        "MARS": ("notification_schema", 0),
        "aviso_workers_audit": ("-", 2),
        "ORDERS": ("streams", 2),
        "THEIRS": ("-", 0),
    }
    orders = found["ORDERS"]
    assert (orders["first"], orders["last"], orders["deleted"], orders["consumers"]) == (1, 2, 0, 2)


def test_a_configured_stream_that_does_not_exist_is_named(run: Run, config: Path, api: Api) -> None:
    api("STREAM.DELETE.ORDERS")
    ran = run("streams", "ls", "--config", config)
    assert ran.code == 0, ran
    assert "ORDERS" not in ran.out
    assert ran.err.startswith("ORDERS: configured, but there is no such stream. "), ran.err


@pytest.mark.covers("002-56")
def test_a_stream_is_told_as_the_server_tells_it(run: Run, config: Path, api: Api) -> None:
    told = json.loads(run("streams", "info", "ORDERS", "--json", "--config", config).out)
    assert told["config"] == api("STREAM.INFO.ORDERS")["config"]
    missing = run("streams", "info", "NONE", "--config", config)
    assert (missing.code, "STREAM.INFO.NONE: stream not found" in missing.err) == (1, True), missing


def test_a_stream_and_a_consumer_are_shown_with_units(run: Run, config: Path, publish: Publish) -> None:
    publish("orders.new", "orders.paid")
    shown = _details(run("streams", "info", "ORDERS", "--config", config))
    assert {name: shown[name] for name in ("stream", "sequences", "consumers", "storage", "duplicate_window")} == {
        "stream": "ORDERS",
        "sequences": "1 to 2, 0 deleted",
        "consumers": "2",
        "storage": "file",
        "duplicate_window": "2m",
    }, shown
    assert "metadata" not in shown, "what the server wrote there is of no use to people"
    shown = _details(run("consumers", "show", "ORDERS", "new", "--config", config))
    assert {name: shown[name] for name in ("pending", "delivered", "pull requests", "ack_wait", "filter_subject")} == {
        "pending": "1",
        "delivered": "up to sequence 0",
        "pull requests": "0 waiting",
        "ack_wait": "30s",
        "filter_subject": "orders.new",
    }, shown


def _details(ran: Ran) -> dict[str, str]:
    """Return the names and values of a command's lines."""
    return {name.strip(): value.strip() for name, _, value in (line.partition("  ") for line in ran.lines)}


@pytest.mark.covers("002-56")
def test_gaps_are_shown_as_runs(run: Run, config: Path, api: Api, publish: Publish) -> None:
    publish(*(f"orders.{number}" for number in range(1, 10)))
    for sequence in (1, 3, 4, 5, 8):
        api("STREAM.MSG.DELETE.ORDERS", {"seq": sequence})
    gaps = listed(run("streams", "gaps", "ORDERS", "--json", "--config", config))
    assert gaps == [{"first": 3, "last": 5, "gone": 3}, {"first": 8, "last": 8, "gone": 1}], "nor before the first one"
    ran = run("streams", "gaps", "ORDERS", "--config", config)
    assert ran.lines[-1] == "ORDERS 2 to 9: 4 messages, 4 gone"


@pytest.mark.covers("002-59", "002-61", "003-08")
def test_a_message_is_got_by_sequence_or_as_the_last_of_a_subject(
    run: Run, config: Path, publish: Publish, administer: Administer
) -> None:
    publish("orders.new", data=b"first")
    publish("orders.new", data=b"second")
    publish("orders.paid", data=b"\xff")
    for direct in ([], ["--direct"]):

        def got(*which: str, direct: list[str] = direct) -> dict[str, Any]:
            ran = run("streams", "get", "ORDERS", *which, *direct, "--config", config)
            assert ran.code == 0, ran
            document: dict[str, Any] = json.loads(ran.out)
            return document

        assert (got("1")["data"], got("1")["subject"], got("1")["headers"]) == ("first", "orders.new", {})
        last = got("--last", "orders.new")
        assert (last["stream"], last["sequence"], last["data"]) == ("ORDERS", 2, "second")
        assert last["time"].endswith("Z")
        assert got("3")["data_base64"] == base64.b64encode(b"\xff").decode()


def test_the_headers_of_a_message_are_shown(run: Run, config: Path) -> None:
    assert run("notify", "mars", "class=od", "step=1", "--config", config).code == 0
    headers = json.loads(run("streams", "get", "MARS", "1", "--config", config).out)["headers"]
    assert headers["Nats-Expected-Stream"] == "MARS"


@pytest.mark.parametrize("direct", [(), ("--direct",)])
def test_a_message_that_is_not_there_is_said(run: Run, config: Path, direct: tuple[str, ...]) -> None:
    ran = run("streams", "get", "ORDERS", "7", *direct, "--config", config)
    assert ran.code == 1
    assert "o message" in ran.err or "Message Not Found" in ran.err, ran


def test_a_stream_that_answers_nobody_directly_says_so(run: Run, config: Path) -> None:
    ran = run("streams", "get", "MARS", "1", "--direct", "--config", config)
    assert (ran.code, "set allow_direct" in ran.err) == (1, True), ran


def test_one_message_is_asked_for(run: Run, config: Path) -> None:
    assert run("streams", "get", "ORDERS", "--config", config).code == 2
    assert run("streams", "get", "ORDERS", "1", "--last", "orders.new", "--config", config).code == 2


@pytest.mark.covers("002-65", "002-66")
def test_consumers_are_listed_and_shown(run: Run, config: Path, publish: Publish, api: Api) -> None:
    publish("orders.new", "orders.paid")
    command = ("consumers", "ls", "ORDERS", "--seconds", "0.1")
    ran = run(*command, "--json", "--config", config)
    found = {row["consumer"]: (row["filters"], row["pending"], row["trouble"]) for row in map(json.loads, ran.lines)}
    assert (ran.code, found) == (
        1,
        {
            "all": ([], 2, "2 pending, and no client pulls them"),
            "new": (["orders.new"], 1, "1 pending, and no client pulls them"),
        },
    )
    (paid,) = (row for row in map(json.loads, ran.lines) if row["consumer"] == "all")
    assert (paid["lag"], paid["drain_seconds"]) == (2, None)
    table = run(*command, "--config", config)
    assert [line.split()[:3] for line in table.lines[1:]] == [["ORDERS", "all", "2"], ["ORDERS", "new", "1"]]
    missing = run("consumers", "ls", "NONE", "--config", config)
    assert (missing.code, "stream not found" in missing.err) == (1, True), missing
    shown = json.loads(run("consumers", "show", "ORDERS", "new", "--json", "--config", config).out)
    assert shown["config"] == api("CONSUMER.INFO.ORDERS.new")["config"]


@pytest.mark.covers("002-52", "002-72", "002-73", "002-74", "002-75", "004-23", "004-24")
def test_the_account_shows_its_use_and_its_limits(
    run: Run, tmp_path: Path, write_config: Callable[..., Path], administer: Administer
) -> None:
    limits = "{max_memory: 1M, max_file: 2M, max_streams: 10, max_consumers: 20}"
    accounts = f"accounts {{ A {{ jetstream: {limits}, users: [{{user: a, password: a}}] }} }}\nno_auth_user: a\n"
    with NatsServer.start(store_dir=tmp_path / "limited", config=accounts) as server:
        config = write_config(server.url)
        assert run("streams", "apply", "--config", config).code == 0
        report = run("report", "account", "--json", "--config", config)
    found = {row["what"]: (row["used"], row["limit"]) for row in listed(report)}
    assert found["streams"] == (2, 10)
    assert found["consumers; the limit is for each stream"] == (0, 20)
    assert (found["bytes in memory"][1], found["bytes on disk"][1]) == (1000000, 2000000)
    assert found["requests to the API"][0] > 0
    assert "of which failed" in found


def test_nothing_to_administer_in_memory(run: Run, tmp_path: Path) -> None:
    (tmp_path / "memory.yaml").write_text("notification_backend: {kind: in_memory}")
    ran = run("streams", "ls", "--config", "memory.yaml")
    assert (ran.code, "in_memory is the memory of one process" in ran.err) == (2, True), ran


def test_many_directly_read_messages_come_with_one_request(
    administer: Administer, config: Path, publish: Publish
) -> None:
    """The Python call behind it: `Administration.listen` and `send`."""
    publish(*(f"orders.{number}" for number in range(3)))

    async def batch(administration: Administration) -> list[str]:
        inbox = administration.new_inbox()
        async with administration.listen(inbox) as answers:
            request = json.dumps({"seq": 1, "batch": 3}).encode()
            administration.send("$JS.API.DIRECT.GET.ORDERS", request, reply=inbox)
            return [(await answers.receive()).headers["Nats-Subject"] for _ in range(3)]

    assert administer(batch) == ["orders.0", "orders.1", "orders.2"]


class _Passing:
    """The consumers of a stream, of which one has a name only: what becomes of it is seen when it is asked for."""

    def __init__(self, answer: Exception | None) -> None:
        self._answer = answer

    async def consumer_names(self, stream: str) -> list[str]:
        return ["a", "other"]

    async def consumers(self, stream: str) -> list[ConsumerInfo]:
        return [_consumer(stream, "a")]

    async def consumer_info(self, stream: str, consumer: str, *, timeout_seconds: float) -> ConsumerInfo:
        if self._answer is not None:
            raise self._answer
        return _consumer(stream, consumer)


def _consumer(stream: str, name: str) -> ConsumerInfo:
    return ConsumerInfo(stream=stream, name=name, config=ConsumerConfig(), time=datetime.now(UTC))


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        pytest.param(NotFoundError("other"), (["a"], []), id="removed meanwhile"),
        pytest.param(None, (["a", "other"], []), id="made"),
        pytest.param(UnavailableError("other"), (["a"], ["other"]), id="without a server"),
    ],
)
async def test_only_what_stays_without_an_answer_is_unavailable(
    answer: Exception | None, expected: tuple[list[str], list[str]]
) -> None:
    listed = await inventory.consumers(cast(Management, _Passing(answer)), "MARS")
    assert ([each.name for each in listed.found], listed.unavailable) == expected
