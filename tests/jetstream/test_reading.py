"""Reading on and on: a request that expires leaves no gap."""

from __future__ import annotations

import time
from contextlib import aclosing

import anyio
import pytest

from aviso_workers import config
from aviso_workers.backends import Message
from aviso_workers.backends.jetstream import JetStreamBackend, pulling
from aviso_workers.streams import StreamSpec

pytestmark = pytest.mark.anyio


async def test_what_comes_after_a_request_has_expired_comes_at_once(nats_server, monkeypatch):
    monkeypatch.setattr(pulling, "EXPIRES_SECONDS", 1)
    settings = config.JetStream(nats_url=config.ServerUrls(nats_server.url))
    async with JetStreamBackend(settings) as backend:
        await backend.create_stream(StreamSpec(name="MARS", subjects=("mars.>",), storage="memory"))
        published = 0.0

        async def publish_later() -> None:
            nonlocal published
            await anyio.sleep(1.3)
            published = time.monotonic()
            await backend.publish(
                Message(subject="mars.od", data=b""), message_id="1", stream="MARS", timeout_seconds=5
            )

        async with anyio.create_task_group() as tasks, aclosing(backend.read("MARS", filter_subjects=())) as messages:
            tasks.start_soon(publish_later)
            await anext(messages)
            assert time.monotonic() - published < 0.5
