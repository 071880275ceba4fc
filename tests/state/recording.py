"""Lets the app of the version that is imported work, and writes down what it leaves on its server."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import anyio
import nats
from nats.aio.client import Client

from aviso_workers import Notify
from aviso_workers.server import NatsServer
from tests.state.app import Kept, write_config

LATER_SECONDS = 60


async def api(client: Client, subject: str, request: Any = None) -> dict[str, Any]:
    data = b"" if request is None else json.dumps(request).encode()
    answer: dict[str, Any] = json.loads((await client.request(f"$JS.API.{subject}", data, timeout=10)).data)
    assert "error" not in answer, (subject, answer)
    return answer


async def work(kept: Kept) -> None:
    """Until all that can be settled is."""
    stop = anyio.Event()
    async with kept.app as app, anyio.create_task_group() as working:
        working.start_soon(app.work, stop)
        await app.notify_many(Notify("mars", {"class": "od", "step": step}, {}) for step in range(1, 7))
        await app.notify("mars", {"class": "od", "step": 50}, {}, deliver_after=LATER_SECONDS)
        with anyio.fail_after(60):
            while len(kept.handled) < 6 or len(kept.ticks) < 2:  # noqa: ASYNC110
                await anyio.sleep(0.1)
            await anyio.sleep(1)  # what was handled is settled
        stop.set()


async def recorded(url: str) -> list[dict[str, Any]]:
    client = await nats.connect(url)
    streams = []
    for stream in (await api(client, "STREAM.LIST"))["streams"]:
        name, state = stream["config"]["name"], stream["state"]
        messages = []
        for sequence in range(state["first_seq"], state["last_seq"] + 1):
            answer = json.loads(
                (await client.request(f"$JS.API.STREAM.MSG.GET.{name}", json.dumps({"seq": sequence}).encode())).data
            )
            if "message" in answer:
                messages.append({key: answer["message"].get(key) for key in ("seq", "time", "subject", "hdrs", "data")})
        consumers = (await api(client, f"CONSUMER.LIST.{name}"))["consumers"]
        streams.append(
            {
                "config": stream["config"],
                "created": stream["created"],
                "last_sequence": state["last_seq"],
                "messages": messages,
                "consumers": [
                    {
                        "config": consumer["config"],
                        "delivered": consumer["delivered"]["stream_seq"],
                        "pending": _pending(consumer),
                    }
                    for consumer in consumers
                    if consumer["config"].get("durable_name")
                ],
            }
        )
    await client.close()
    return streams


def hand_back(dead_letter: int, config: Path) -> None:
    """Give a dead letter back to its agent, as an operator does."""
    command = [
        sys.executable,
        "-m",
        "aviso_workers",
        "dead-letters",
        "retry",
        str(dead_letter),
        "--config",
        str(config),
    ]
    subprocess.run(command, check=True, capture_output=True)


def _pending(consumer: dict[str, Any]) -> list[int]:
    """What it has delivered and what is not settled: the server tells how many these are, and what is before them."""
    assert consumer["num_ack_pending"] <= 1, consumer
    return [consumer["ack_floor"]["stream_seq"] + 1][: consumer["num_ack_pending"]]


def main(path: Path) -> None:
    with tempfile.TemporaryDirectory() as directory, NatsServer.start(store_dir=Path(directory) / "store") as server:
        config = write_config(Path(directory), server.url)
        anyio.run(work, Kept(config, mended=False))
        hand_back(1, config)  # that of step 2; the one of step 5 stays
        streams = anyio.run(recorded, server.url)
    path.write_text(json.dumps(streams, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
