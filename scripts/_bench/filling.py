"""The notifications that are measured: 250 bytes of JSON each, on 1,000 subjects, and a stream full of them.

Stored with nats-py and not with what is measured; with the headers that aviso-workers publishes with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence

import nats
from nats.aio.client import Client
from nats.js import JetStreamContext

from aviso_workers import App, Notify

STREAM = "MARS"
FILTER = "mars.>"
SUBJECTS = 1000
IDENTIFIER = {"class": "od", "date": "20261120", "time": "0000"}
PAYLOAD_BYTES = 250
CHUNK = 1000
ACK_SECONDS = 30.0

_EMPTY = json.dumps({"location": "", "size": 5_242_880}, separators=(",", ":"))
PAYLOAD = {"location": "s3://forecasts/".ljust(PAYLOAD_BYTES - len(_EMPTY), "x"), "size": 5_242_880}
BODY = json.dumps(PAYLOAD, separators=(",", ":")).encode()


def make_notifications(count: int) -> Iterator[Notify]:
    for number in range(count):
        yield Notify("mars", {**IDENTIFIER, "step": number % SUBJECTS}, PAYLOAD)


def _step(number: int) -> int:
    return number % SUBJECTS


async def fill(nats_url: str, app: App, *, count: int, first: int = 0, step: Callable[[int], int] = _step) -> None:
    """Store so many notifications, numbered from `first`; for 0, make the stream as aviso-workers does.

    `step` says which step, and so which subject, a number has.
    """
    if not first:
        async with app:
            await app.notify_many(make_notifications(1))
    connection = await nats.connect(nats_url)
    try:
        stream = connection.jetstream(timeout=ACK_SECONDS)
        for begin in range(max(1, first), first + count, CHUNK):
            subjects = [subject(step(number)) for number in range(begin, min(begin + CHUNK, first + count))]
            await _store(stream, connection, begin, subjects)
    finally:
        await connection.close()


async def _store(stream: JetStreamContext, connection: Client, begin: int, subjects: Sequence[str]) -> None:
    """All but the last without an acknowledgement: a stream stores in order, so the last one's tells of them all."""
    *numbered, (number, last) = enumerate(subjects, begin)
    for each, its_subject in numbered:
        await connection.publish(its_subject, BODY, headers=_headers(each))
    await stream.publish(last, BODY, headers=_headers(number))


def subject(step: int) -> str:
    """Return the subject of a step."""
    return ".".join(("mars", *IDENTIFIER.values(), str(step)))


def _headers(number: int) -> dict[str, str]:
    return {"Nats-Msg-Id": f"{number:032x}", "Nats-Expected-Stream": STREAM}
