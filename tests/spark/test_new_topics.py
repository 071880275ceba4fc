"""Rows that are stored only where their topic is new, against a stream in memory."""

from __future__ import annotations

from typing import Any

import pytest

from aviso_workers import Notify, config
from aviso_workers.aviso.codec import MARKER_HEADER
from aviso_workers.backends import Message, OutgoingChunk, PubAck
from aviso_workers.backends.in_memory import InMemoryBackend
from aviso_workers.errors import OutcomeUnknownError
from aviso_workers.events import Events
from aviso_workers.sessions.session import Session
from aviso_workers.spark import writers
from tests.engine.conftest import config_with

pytestmark = pytest.mark.anyio


class LosesAnAnswer(InMemoryBackend):
    """Stores the first message and says that it does not know."""

    answers = 0

    async def publish(self, message: Message, **stated: Any) -> PubAck:
        ack = await super().publish(message, **stated)
        self.answers += 1
        if self.answers == 1:
            raise OutcomeUnknownError("no answer")
        return ack


async def store(session: Session, *steps: int) -> list[PubAck | None]:
    """Store a row of each step."""
    rows = OutgoingChunk(
        subjects=[f"mars.od.{step}" for step in steps],
        data=[b"1"] * len(steps),
        headers=[None] * len(steps),
        message_ids=[f"row {step}" for step in steps],
    )
    return await writers.store_new_topics(session.publisher, session.backend, "mars", stream="MARS", chunk=rows)


def session_on(backend: InMemoryBackend) -> Session:
    return Session(backend, app="tests", config=config_with(publish_retry_base_delay_ms=1), events=Events())


async def test_a_row_whose_topic_the_stream_has_is_left_out() -> None:
    async with InMemoryBackend(config.InMemory()) as backend:
        session = session_on(backend)
        await session.publisher.notify(Notify("mars", {"class": "od", "step": 1}, "newer"))

        present, stored = await store(session, 1, 2)

        assert present is None
        assert stored is not None
        assert not stored.duplicate
        newest = await backend.message("MARS", last_by_subject="mars.od.1")
        assert newest is not None
        assert newest.data == b'"newer"'


async def test_a_marker_of_a_message_that_is_gone_is_no_notification_of_the_topic() -> None:
    async with InMemoryBackend(config.InMemory()) as backend:
        session = session_on(backend)
        await session.publisher.notify(Notify("mars", {"class": "od", "step": 2}))
        marker = Message(subject="mars.od.1", data=b"", headers={MARKER_HEADER: "MaxAge"})
        await backend.publish(marker, message_id="marker", stream="MARS", timeout_seconds=1)

        [stored] = await store(session, 1)

        assert stored is not None
        assert stored.sequence == 3


async def test_a_row_whose_acknowledgement_was_lost_is_found_by_its_id() -> None:
    async with LosesAnAnswer(config.InMemory()) as backend:
        [stored] = await store(session_on(backend), 1)

        assert stored is not None
        assert (stored.sequence, stored.duplicate) == (1, True)
