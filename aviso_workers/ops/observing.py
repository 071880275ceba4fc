"""What a server knows of the agents of a whole deployment, whether anybody runs them or not.

Consumers are asked for by stream and some hundreds at a time, and counts are those of a stream's subjects: a handful of
requests, however many agents there are. An agent is known by its durable consumer, `<app>__<agent>`. A stream that does
not exist has nothing to tell.
"""

from __future__ import annotations

from aviso_workers import streams
from aviso_workers.app import App
from aviso_workers.backends import ConsumerInfo
from aviso_workers.engine import dead_lettering, deferring, sweeping
from aviso_workers.errors import NotFoundError

__all__ = ["ConsumerInfo", "agent_of", "agents", "dead_letters", "given_up", "streams_of"]

LETTER_WORDS = dead_lettering.SUBJECT.count(".") + 3
"""Of the subject of a dead letter."""


def streams_of(app: App) -> list[str]:
    """The streams that agents read, and what works for them: those of the configured event types, and our own."""
    event_types = app.config.notification_schema.items()
    of_events = [streams.event_stream(name, event_type, app.config).name for name, event_type in event_types]
    return [*of_events, dead_lettering.RETRIES, sweeping.STREAM, deferring.STREAM]


async def agents(app: App, stream: str) -> dict[tuple[str, str], ConsumerInfo]:
    """By app and agent, the consumers of a stream that are agents'. Raises `BackendError`."""
    try:
        consumers = await app.session.backend.consumers(stream)
    except NotFoundError:
        return {}
    return {found: consumer for consumer in consumers if (found := agent_of(consumer.name))}


async def dead_letters(app: App) -> dict[tuple[str, ...], int]:
    """By app and agent, how many dead letters are kept. Raises `BackendError`."""
    counts = await _subject_counts(app, dead_lettering.STREAM)
    return {
        (words[-2], words[-1]): count
        for subject, count in counts.items()
        if len(words := subject.split(".")) == LETTER_WORDS  # else it is the first part of a large one
    }


async def given_up(app: App) -> dict[tuple[str, ...], int]:
    """By app, agent and stream, how often the server gave a notification up. Raises `BackendError`.

    It does when the worker died on each of the deliveries that there can be; told are the last days' cases.
    """
    counts = await _subject_counts(app, sweeping.STREAM)
    return {
        (*found, subject.split(".")[-2]): count
        for subject, count in counts.items()
        if (found := agent_of(subject.split(".")[-1]))
    }


async def _subject_counts(app: App, stream: str) -> dict[str, int]:
    try:
        return await app.session.backend.subject_counts(stream)
    except NotFoundError:
        return {}


def agent_of(consumer: str) -> tuple[str, str] | None:
    """App and agent of a durable consumer; None where it is nobody's agent."""
    app, between, agent = consumer.partition("__")
    return (app, agent) if app and between and agent else None
