"""A push consumer at work: flow control, heartbeats, acknowledgements, a queue group."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import anyio
import nats
import pytest
from nats.aio.msg import Msg

from aviso_workers.backends import Administration, Received
from tests.ops.conftest import Administer, Declare, Run
from tests.waits import PATIENCE_SECONDS

MANY = 1000


async def store(administration: Administration) -> None:
    for number in range(MANY):
        await administration.request("orders.new", f"{number} {'x' * 10_000}".encode())


@pytest.mark.slow
@pytest.mark.covers("001-19", "001-20", "001-21", "001-37", "002-28", "003-04")
def test_what_is_pushed_waits_for_slow_readers_and_says_that_it_is_alive(
    run: Run, declare: Declare, administer: Administer
) -> None:
    display = {"deliver_subject": "display.orders", "flow_control": True, "idle_heartbeat": "1s", "ack_policy": "all"}
    config = declare({"ORDERS": {"subjects": ["orders.>"], "consumers": {"display": display}}})
    assert run("streams", "apply", "--config", config).code == 0

    async def read(administration: Administration) -> dict[str, Any]:
        told: Counter[str] = Counter()
        await store(administration)
        async with administration.listen("display.orders") as pushed:
            last: Received | None = None
            with anyio.fail_after(PATIENCE_SECONDS):
                while not told["Idle Heartbeat"]:
                    heard = await pushed.receive()
                    told[heard.description or "message"] += 1
                    if heard.description == "FlowControl Request":
                        administration.send(heard.reply)  # ready for more
                    elif not heard.description:
                        last = heard
            assert last is not None
            administration.send(last.reply, b"+ACK")  # with ack_policy all, for all before it
            floor = 0
            with anyio.fail_after(PATIENCE_SECONDS):
                while floor < MANY:
                    info = await administration.api("CONSUMER.INFO.ORDERS.display")
                    floor = info["ack_floor"]["stream_seq"]
            return {"told": told, "bound": info["push_bound"], "left": info["num_pending"] + info["num_ack_pending"]}

    found = administer(read)
    assert found["told"]["message"] == MANY
    assert found["told"]["FlowControl Request"] > 0
    assert (found["bound"], found["left"]) == (True, 0)


@pytest.mark.slow
@pytest.mark.covers("001-20")
@pytest.mark.parametrize("answered", [True, False])
def test_flow_control_waits_until_it_is_answered(
    run: Run, declare: Declare, administer: Administer, answered: bool
) -> None:
    display = {"deliver_subject": "display.orders", "flow_control": True, "idle_heartbeat": "1s", "ack_policy": "none"}
    config = declare({"ORDERS": {"subjects": ["orders.>"], "consumers": {"display": display}}})
    assert run("streams", "apply", "--config", config).code == 0

    async def read(administration: Administration) -> bool:
        """Whether everything came before the server was silent but for heartbeats."""
        await store(administration)
        messages = 0
        async with administration.listen("display.orders") as pushed:
            with anyio.fail_after(PATIENCE_SECONDS):
                async for heard in pushed:
                    messages += not heard.description
                    if heard.description == "FlowControl Request" and answered:
                        administration.send(heard.reply)
                    if heard.description == "Idle Heartbeat":
                        break
        return messages == MANY

    assert administer(read) is answered


def test_the_members_of_a_group_share_what_is_pushed(run: Run, declare: Declare, url: str) -> None:
    display = {"deliver_subject": "display.orders", "deliver_group": "displays", "ack_policy": "none"}
    config = declare({"ORDERS": {"subjects": ["orders.>"], "consumers": {"display": display}}})
    assert run("streams", "apply", "--config", config).code == 0

    async def read() -> list[str]:
        heard: list[str] = []
        client = await nats.connect(url)
        everything = asyncio.Event()

        async def member(message: Msg) -> None:
            heard.append(message.data.decode())
            if len(heard) == 20:
                everything.set()

        for _ in range(2):
            await client.subscribe("display.orders", queue="displays", cb=member)
        for number in range(20):
            await client.request("orders.new", str(number).encode())
        await asyncio.wait_for(everything.wait(), PATIENCE_SECONDS)
        await client.drain()
        return heard

    assert sorted(asyncio.run(read()), key=int) == [str(number) for number in range(20)], "each came to one of them"
