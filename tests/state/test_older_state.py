"""What a worker of the version 0.1.0 left on its server, and what one of this version makes of it.

tests/data/older-state.json was recorded on 2026-11-23 by the commit edec75a. Its times are moved to now when it is put
on a server, because much of it is kept for days only.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import anyio
import nats
import pytest
from nats.aio.client import Client

from aviso_workers.server import NatsServer
from tests.state.app import Kept, write_config
from tests.state.recording import api, hand_back
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

RECORDED = Path(__file__).parents[1] / "data/older-state.json"


class Putting:
    """Streams, messages and consumers put on a server as they were recorded, with the times of now."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._times: dict[bytes, bytes] = {}
        """By the text of a time that was recorded, that of its moment here."""

    async def stream(self, recorded: dict[str, Any]) -> None:
        name = recorded["config"]["name"]
        metadata = {key: value for key, value in recorded["config"].get("metadata", {}).items() if key[0] != "_"}
        created = await api(self._client, f"STREAM.CREATE.{name}", {**recorded["config"], "metadata": metadata})
        self._times[recorded["created"].encode()] = created["created"].encode()
        for message in recorded["messages"]:
            await self._message(name, message)
        for consumer in recorded["consumers"]:
            await self._consumer(name, consumer)

    async def _message(self, stream: str, recorded: dict[str, Any]) -> None:
        subject, data = self._moved(recorded["subject"].encode()), self._moved(b64decode(recorded["data"] or ""))
        headers = _headers(self._moved(b64decode(recorded["hdrs"] or "")))
        if "Nats-Incr" in headers:
            headers["Nats-Incr"] = json.loads(data)["val"]
        sequence = recorded["seq"]
        last = (await api(self._client, f"STREAM.INFO.{stream}"))["state"]["last_seq"]
        for removed in range(last + 1, sequence):
            filler = {"Nats-Incr": "0"} if "Nats-Incr" in headers else None
            await self._store(subject.decode(), b"", filler)
            await api(self._client, f"STREAM.MSG.DELETE.{stream}", {"seq": removed})
        assert await self._store(subject.decode(), b"" if "Nats-Incr" in headers else data, headers) == sequence
        stored = await api(self._client, f"STREAM.MSG.GET.{stream}", {"seq": sequence})
        for spelled in (_nanoseconds, _seconds, _isoformat):
            self._times[spelled(recorded["time"])] = spelled(stored["message"]["time"])

    async def _store(self, subject: str, data: bytes, headers: dict[str, str] | None) -> int:
        answer: dict[str, Any] = json.loads(
            (await self._client.request(subject, data, headers=headers, timeout=PATIENCE_SECONDS)).data
        )
        assert "error" not in answer, (subject, headers, answer)
        return int(answer["seq"])

    async def _consumer(self, stream: str, recorded: dict[str, Any]) -> None:
        """With what it had delivered delivered, and what was settled acknowledged."""
        config = recorded["config"]
        name = config["durable_name"]
        await api(self._client, f"CONSUMER.CREATE.{stream}.{name}", {"stream_name": stream, "config": config})
        if not recorded["delivered"]:
            return
        group = {"group": config["priority_groups"][0]} if "priority_groups" in config else {}
        ask = json.dumps({"batch": recorded["delivered"], **group}).encode()
        inbox = self._client.new_inbox()
        arriving = await self._client.subscribe(inbox)
        await self._client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}", ask, reply=inbox)
        for _ in range(recorded["delivered"]):
            message = await arriving.next_msg(timeout=PATIENCE_SECONDS)
            if message.metadata.sequence.stream not in recorded["pending"]:
                await message.ack_sync()

    def _moved(self, text: bytes) -> bytes:
        for recorded, here in self._times.items():
            text = text.replace(recorded, here)
        return text


def _headers(block: bytes) -> dict[str, str]:
    """Without what was a condition on the stream as it was then."""
    lines = [line.partition(": ") for line in block.decode().split("\r\n")[1:] if line]
    return {name: value for name, _, value in lines if name != "Nats-Expected-Last-Subject-Sequence"}


def _nanoseconds(time: str) -> bytes:
    seconds, _, fraction = time.removesuffix("Z").partition(".")
    return b"%d" % (int(datetime.fromisoformat(f"{seconds}+00:00").timestamp()) * 10**9 + int(fraction.ljust(9, "0")))


def _seconds(time: str) -> bytes:
    return repr(int(_nanoseconds(time)) // 1000 / 1e6).encode()


def _isoformat(time: str) -> bytes:
    return datetime.fromisoformat(time).isoformat().encode()


@pytest.fixture
async def older_state(nats_server: NatsServer) -> None:
    client = await nats.connect(nats_server.url)
    putting = Putting(client)
    recorded = json.loads(RECORDED.read_text())
    for stream in sorted(recorded, key=lambda stream: stream["config"]["name"] != "MARS"):  # others tell of its times
        await putting.stream(stream)
    await client.close()


@pytest.mark.usefixtures("older_state")
async def test_what_an_older_version_has_stored_is_taken_up(nats_server: NatsServer, tmp_path: Path) -> None:
    config = write_config(tmp_path, nats_server.url)
    await anyio.to_thread.run_sync(hand_back, 2, config)
    kept = Kept(config, mended=True)
    stop = anyio.Event()
    async with kept.app as app, anyio.create_task_group() as working:
        assert await kept.newest.get("od") == 6
        assert [entry.value for entry in await kept.newest.history("od")] == [1, 4, 6]
        assert await kept.bytes.get("od") == 300

        working.start_soon(app.work, stop)
        # Dead letters that were handed back then and now, what had failed once, and what was to be delivered later.
        await until(lambda: sorted(kept.handled) == [2, 3, 3, 5, 50], kept)
        assert kept.failed == [(3, 2)], "the failure that the older version had counted counts"
        await until(lambda: len(kept.ticks) > 1, kept)
        await app.notify("mars", {"class": "od", "step": 250}, {})
        await until(lambda: bool(kept.sums), kept)
        assert kept.sums == [1 + 2 + 3 + 4 + 5 + 6 + 50], "what was counted then is counted once"
        stop.set()


async def until(condition: Callable[[], bool], kept: Kept) -> None:
    with anyio.move_on_after(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.01)
        return
    raise AssertionError(f"handled {kept.handled}, failed {kept.failed}, sums {kept.sums}, ticks {kept.ticks}")
