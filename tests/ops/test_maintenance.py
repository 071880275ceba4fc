"""What operators do by hand, and what cannot be taken back: `streams purge|seal|rm`, `consumers rm|unpin`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aviso_workers.server import NatsServer
from tests.ops.conftest import Api, Declare, Ran, Run

Publish = Callable[..., dict[str, Any]]


@pytest.fixture
def config(declare: Declare, run: Run, publish: Publish) -> Path:
    """The stream ORDERS with 10 messages, of two subjects in turn."""
    path = declare({"ORDERS": {"subjects": ["orders.>"], "consumers": {"shipping": {}}}})
    assert run("streams", "apply", "--config", path).code == 0
    publish(*(f"orders.{number % 2}" for number in range(10)))
    return path


@pytest.fixture
def messages(api: Api) -> Callable[[], int]:
    return lambda: int(api("STREAM.INFO.ORDERS")["state"]["messages"])


@pytest.mark.parametrize(
    "command",
    [
        ("streams", "purge", "ORDERS"),
        ("streams", "seal", "ORDERS"),
        ("streams", "rm", "ORDERS"),
        ("consumers", "rm", "ORDERS", "shipping"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_taken_back_is_shown_and_needs_a_yes(
    run: Run, config: Path, api: Api, command: tuple[str, ...]
) -> None:
    before = api("STREAM.INFO.ORDERS")
    asked = run(*command, "--config", config)
    assert (asked.code, "--yes" in asked.err, "would be" in asked.out) == (2, True, True), asked
    after = api("STREAM.INFO.ORDERS")
    assert (after["config"], after["state"]) == (before["config"], before["state"])


@pytest.mark.covers("002-58")
@pytest.mark.parametrize(
    ("options", "removed"),
    [
        ((), 10),
        (("--subject", "orders.1"), 5),
        (("--subject", "orders.*"), 10),
        (("--subject", "returns.>"), 0),
        (("--keep", "3"), 7),
        (("--keep", "30"), 0),
        (("--before", "5"), 4),
        (("--before", "50"), 10),
        (("--subject", "orders.0", "--keep", "1"), 4),
    ],
)
def test_a_purge_removes_what_it_says(
    run: Run, config: Path, messages: Callable[[], int], options: tuple[str, ...], removed: int
) -> None:
    said = f"ORDERS: {removed} messages would be removed\nORDERS: {removed} removed\n"
    assert run("streams", "purge", "ORDERS", *options, "--yes", "--config", config) == Ran(code=0, out=said, err="")
    assert messages() == 10 - removed


def test_a_purge_before_a_sequence_counts_no_gaps(run: Run, config: Path, api: Api) -> None:
    for sequence in (1, 3, 4, 8):
        api("STREAM.MSG.DELETE.ORDERS", {"seq": sequence})
    ran = run("streams", "purge", "ORDERS", "--before", "9", "--yes", "--config", config)
    assert ran.out == "ORDERS: 4 messages would be removed\nORDERS: 4 removed\n"


def test_a_purge_of_a_subject_before_a_sequence_says_how_many_at_most(run: Run, config: Path) -> None:
    ran = run("streams", "purge", "ORDERS", "--subject", "orders.0", "--before", "4", "--yes", "--config", config)
    assert ran.out == "ORDERS: 3 messages would be removed\nORDERS: 2 removed\n"


def test_a_purge_does_not_both_keep_and_go_before(run: Run, config: Path) -> None:
    ran = run("streams", "purge", "ORDERS", "--keep", "1", "--before", "5", "--yes", "--config", config)
    assert (ran.code, "not both" in ran.err) == (2, True), ran


@pytest.mark.covers("001-41")
@pytest.mark.parametrize("switch", ["deny_purge", "sealed"])
def test_a_stream_that_denies_purges_is_not_purged(
    run: Run, config: Path, declare: Declare, messages: Callable[[], int], switch: str
) -> None:
    assert run("streams", "apply", "--config", declare({"ORDERS": {switch: True}})).code == 0
    ran = run("streams", "purge", "ORDERS", "--yes", "--config", config)
    assert (ran.code, f"it has {switch}, which cannot be taken back" in ran.err) == (1, True), ran
    assert messages() == 10


def test_the_stream_of_an_event_type_that_denies_purges_is_not_wiped(run: Run, declare: Declare) -> None:
    config = declare({"MARS": {"deny_purge": True}})
    run("notify", "mars", "class=od", "step=1", "--config", config)
    for command in (("wipe", "mars"), ("wipe-all",)):
        ran = run("streams", *command, "--yes", "--config", config)
        assert (ran.code, "it has deny_purge" in ran.err) == (1, True), ran


@pytest.mark.covers("001-41")
def test_a_stream_that_denies_deletes_keeps_its_messages(run: Run, declare: Declare) -> None:
    config = declare({"MARS": {"deny_delete": True}})
    run("notify", "mars", "class=od", "step=1", "--config", config)
    ran = run("delete", "mars@1", "--yes", "--config", config)
    assert (ran.code, "message delete not permitted" in ran.err) == (1, True), ran


@pytest.mark.covers("002-54")
def test_a_sealed_stream_takes_nothing_and_gives_what_it_has(
    run: Run, config: Path, publish: Publish, api: Api
) -> None:
    ran = run("streams", "seal", "ORDERS", "--yes", "--config", config)
    assert (ran.code, ran.lines[-1]) == (0, "ORDERS: sealed"), ran
    assert publish("orders.new")["error"]["err_code"] == 10109
    assert api("STREAM.INFO.ORDERS")["config"]["sealed"] is True
    assert run("streams", "get", "ORDERS", "1", "--config", config).code == 0


@pytest.mark.covers("002-55")
def test_a_stream_is_removed(run: Run, config: Path, api: Api) -> None:
    asked = run("streams", "rm", "ORDERS", "--config", config)
    assert "10 messages and 1 consumers" in asked.out
    assert run("streams", "rm", "ORDERS", "--yes", "--config", config).code == 0
    assert "ORDERS" not in api("STREAM.NAMES")["streams"]


@pytest.mark.covers("002-64")
def test_a_consumer_is_removed_and_made_anew(run: Run, config: Path, api: Api) -> None:
    asked = run("consumers", "rm", "ORDERS", "shipping", "--config", config)
    assert "with 10 messages before it" in asked.out
    assert run("consumers", "rm", "ORDERS", "shipping", "--yes", "--config", config).code == 0
    assert not api("CONSUMER.NAMES.ORDERS")["consumers"]
    assert run("consumers", "rm", "ORDERS", "shipping", "--yes", "--config", config).code == 1
    assert "ORDERS shipping: done" in run("streams", "apply", "--config", config).out


def test_another_reader_of_a_group_is_pinned(run: Run, declare: Declare, api: Api) -> None:
    pinned = {"priority_groups": ["shippers"], "priority_policy": "pinned_client"}
    config = declare({"ORDERS": {"subjects": ["orders.>"], "consumers": {"shipping": pinned}}})
    run("streams", "apply", "--config", config)
    unpinned = run("consumers", "unpin", "ORDERS", "shipping", "shippers", "--config", config)
    assert (unpinned.code, unpinned.out) == (0, "shippers of shipping: unpinned\n"), unpinned
    unknown = run("consumers", "unpin", "ORDERS", "shipping", "packers", "--config", config)
    assert (unknown.code, "priority group does not exist" in unknown.err) == (1, True), unknown


def test_a_stream_with_one_copy_has_nobody_to_step_down_for(run: Run, config: Path) -> None:
    ran = run("streams", "step-down", "ORDERS", "--config", config)
    assert (ran.code, "ORDERS has one copy" in ran.err) == (1, True), ran
    ran = run("streams", "remove-peer", "ORDERS", "n-1", "--yes", "--config", config)
    assert (ran.code, "n-1 holds no copy of ORDERS" in ran.err) == (1, True), ran


class TestPermissions:
    """Of a user that may read what there is, and make one consumer of one filter."""

    ALLOWED = (
        "$JS.API.INFO",
        "$JS.API.STREAM.INFO.>",
        "$JS.API.STREAM.LIST",
        "$JS.API.CONSUMER.INFO.>",
        "$JS.API.CONSUMER.CREATE.ORDERS.shipping.orders.new.>",
    )

    @pytest.fixture
    def config(self, tmp_path: Path, write_config: Callable[..., Path], run: Run) -> Iterator[Path]:
        """Of that user, who declares the consumer of a stream that is there."""
        allowed = ", ".join(f'"{subject}"' for subject in self.ALLOWED)
        users = "{user: admin, password: admin}, {user: reader, password: reader, permissions: {publish: [%s]}}"
        accounts = f"accounts {{ A {{ jetstream: enabled, users: [{users % allowed}] }} }}\n"

        def login(user: str, **stream: Any) -> Path:
            path = write_config(server.url, name=f"{user}.yaml", user=user, password=user)
            orders = {"subjects": ["orders.>"], "allow_direct": True, **stream}
            path.write_text(json.dumps({**json.loads(path.read_text()), "streams": {"ORDERS": orders}}))
            return path

        with NatsServer.start(store_dir=tmp_path / "permissions", config=accounts) as server:
            assert run("streams", "apply", "--config", login("admin")).code == 0
            yield login("reader", consumers={"shipping": {"filter_subjects": ["orders.new.>"]}})

    @pytest.mark.slow
    @pytest.mark.covers("003-02")
    @pytest.mark.parametrize(
        ("command", "said"),
        [
            (("streams", "purge", "ORDERS", "--yes"), ("permissions violation", "$js.api.stream.purge.orders")),
            (("streams", "get", "ORDERS", "1", "--direct"), ("permissions violation", "$js.api.direct.get.orders")),
            (("consumers", "ls", "ORDERS"), ("no consumers that can be shown", "$js.api.consumer.names.orders")),
        ],
        ids=lambda value: " ".join(value[:2]),
    )
    def test_that_are_missing_are_named(
        self, run: Run, config: Path, command: tuple[str, ...], said: tuple[str, ...]
    ) -> None:
        ran = run(*command, "--config", config)
        assert (ran.code, [each in (ran.out + ran.err).lower() for each in said]) == (1, [True, True]), ran

    @pytest.mark.slow
    @pytest.mark.covers("002-63", "003-02")
    def test_can_be_given_for_a_consumer_by_its_filter(self, run: Run, config: Path) -> None:
        ran = run("streams", "apply", "--config", config)
        assert (ran.code, "ORDERS shipping: done" in ran.out) == (0, True), ran
