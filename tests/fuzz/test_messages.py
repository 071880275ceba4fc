"""Messages of streams that others may write to: each is read, or is undecodable, and soon."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from aviso_workers import App, Notify, Window, Windowing, config
from aviso_workers.aviso import codec, schema, spatial, topics
from aviso_workers.aviso.codec import Message, NotificationReader
from aviso_workers.aviso.literals import printable_lines
from aviso_workers.aviso.spatial import Footprint
from aviso_workers.backends.jetstream.wire import Headers, header_block
from aviso_workers.declare import windows
from aviso_workers.declare.seen import SeenPage
from aviso_workers.errors import UndecodableError
from aviso_workers.jetstream.key_value import Entry
from aviso_workers.state import (
    consumer_records,
    dead_letter_records,
    delayed_messages,
    failure_counts,
    window_records,
)
from aviso_workers.state.timer_records import Claim
from aviso_workers.state.window_records import WindowStates
from tests.contract import settings
from tests.fuzz.mutations import Rounds, mutated

EVENT_TYPES = config.load(Path(settings.__file__).with_name("aviso.yaml"), environ={}).notification_schema
SLOW_SECONDS = 0.5
"""A hundred times as long as any of them takes."""
POLYGON = "(52.5,13.4,52.6,13.5,52.5,13.6,52.4,13.5,52.5,13.4)"
DIGITS = b"1" * 60_000
OURS = {
    "Aviso-Subject": "mars.od.0001.g.20261120.0000.oper.12",
    "Aviso-Stream": "MARS",
    "Aviso-Sequence": "7",
    "Aviso-Timestamp": "1700000000000000000",
    "Aviso-App": "contract",
    "Aviso-Agent": "index",
    "Aviso-Attempts": "3",
    "Aviso-Reason": "rejected",
    "Aviso-Error": "ValueError: no",
    "Aviso-Traceback": "a.py:1 index",
    "Aviso-Message-Id": "mine",
    "Aviso-Compressed": "zlib",
    "Nats-Scheduler": delayed_messages.waiting("MARS", "mine"),
}
SPATIAL = {"spatial_bbox": "52.4,13.4,52.6,13.6", "spatial_geometry": POLYGON, "spatial_point_cloud": "[[52.5,13.5]]"}


def reader(name: str, **where: Any) -> NotificationReader:
    return NotificationReader(name, EVENT_TYPES[name], where=schema.parse_where(name, EVENT_TYPES[name], where))


READERS = [
    reader("mars"),
    reader("mars", step={"gte": 6}, domain="g"),
    reader("area"),
    reader("area", polygon=POLYGON),
    reader("area", point="52.5,13.5"),
]


HOURLY: Windowing[int, Any] = Windowing(
    size="1h", time=lambda _: datetime.now(UTC), fold=lambda total, _: total + 1, initial=0
)


def states() -> WindowStates:
    app = App("fuzz")

    @app.agent("mars", window=HOURLY)
    async def sums(window: Window[int]) -> Notify:
        return Notify("mars", {}, window.value)

    def refuse(_: Entry, error: UndecodableError) -> None:
        raise error

    return WindowStates(app.agents[0], on_unreadable=refuse)


def told(known: WindowStates, entry: Entry) -> None:
    """Read the state, and make the windows of it that are told to authors."""
    for key, state in known.by_key([entry]).items():
        for end in state.open:
            windows.window(state, key, end, size=windows.LONGEST_SECONDS)


def pages(entry: Entry) -> None:
    for _, last, page in window_records.pages([entry]):
        windows.SettledUpTo(sequence=last, time=page.created).covers(last, page.latest)


OF_HEADERS: dict[str, Callable[[Message], object]] = {
    "a notification": lambda message: [each.notification(message) for each in READERS],
    "whether it is wanted": lambda message: [each.matches(message) for each in READERS],
    "a dead letter": lambda message: dead_letter_records.DeadLetter.read(message, "field"),
    "a retry": dead_letter_records.unwrap,
    "what was handed back": lambda message: dead_letter_records.handed_back(message, "field"),
    "what is due": delayed_messages.original,
    "when it is due": delayed_messages.due_at,
    "a compressed retry": lambda message: dead_letter_records.unwrap(dead_letter_records.compressed(message)),
}
OF_JSON: dict[str, tuple[bytes, type]] = {
    "a claim": (b'{"time":"2026-11-22T06:00:00Z","token":3,"schedule":"1h"}', Claim),
    "a record": (
        b'{"stream_created":"2026-11-22T06:00:00Z","ack_floor":3,"filter_subjects":["a.>"],'
        b'"time":"2026-11-22T06:00:00Z","longest_seconds":60.0}',
        consumer_records.ConsumerRecord,
    ),
    "a window of a dead letter": (
        b'{"start":1700000000,"end":1700003600,"value":{"a":1},"values":"ab"}',
        window_records.KeptWindow,
    ),
    "progress": (
        b'{"closed":1700000000,"settled":{"sequence":7,"time":1700000000.5},"size":3600,"every":60}',
        windows.WindowProgress,
    ),
    "a page": (b'{"streams":[{"created":1700000000.5,"latest":1700000001.5,"seen":"AAAA"}]}', SeenPage),
}
TEXTS: dict[str, tuple[bytes, Callable[[str], object], type[Exception]]] = {
    "a subject": (b"mars.od.0001.g.2026%2E1.0000.oper.12", topics.check_subject, UndecodableError),
    "a number": (b"1700000000000000000", codec.read_number, UndecodableError),
    "a sequence": (
        b"7",
        lambda text: failure_counts.parse_began(f"$KV.a__failures.index.MARS.{text.replace('.', '')}.17.began"),
        UndecodableError,
    ),
    "a box": (b"52.4,13.4,52.6,13.6", spatial.Box.parse, ValueError),
    "a polygon": (POLYGON.encode(), spatial.parse_polygon, ValueError),
    "a cloud": (b"[[52.5,13.5],[1,2]]", spatial.parse_cloud, ValueError),
    "a footprint": (POLYGON.encode(), lambda text: Footprint(bbox=text, geometry=text).polygon(), ValueError),
    "a line of a log": ("größe\x1b[2J\n".encode(), lambda text: printable_lines(text).encode(), ValueError),
}


def spoiled(fields: Mapping[str, str], chance: random.Random) -> Headers:
    """The header block as it may come from the wire: changed, or with a value that is very long."""
    block = header_block(fields)
    if chance.random() < 0.1:
        name = chance.choice(list(fields))
        block = header_block({**fields, name: (DIGITS + b"x").decode()})
    return Headers(mutated(block, chance) if chance.random() < 0.9 else block)


def attempt(turns: Rounds, deed: Callable[[], object], *allowed: type[Exception]) -> None:
    began = time.process_time()
    try:
        deed()
    except allowed:
        pass
    except Exception as error:
        raise AssertionError(turns.which) from error
    assert time.process_time() - began < SLOW_SECONDS, turns.which


@pytest.mark.parametrize("what", OF_HEADERS)
def test_a_message_of_any_headers_is_read_or_is_undecodable(what: str, rounds: Callable[[int], Rounds]) -> None:
    turns = rounds(600)
    for chance in turns:
        subject = mutated(chance.choice((b"mars.od.0001.g.20261120.0000.oper.12", b"area.20261120")), chance)
        message = Message(
            subject=subject.decode("utf-8", "replace"),
            data=mutated(b'{"spatial_geometry":[[1,2],[3,4],[5,6],[1,2]]}', chance),
            headers=spoiled({**OURS, **SPATIAL}, chance),
            timestamp_ns=1_700_000_000_000_000_000,
        )
        attempt(turns, partial(OF_HEADERS[what], message), UndecodableError)


@pytest.mark.parametrize("what", OF_JSON)
def test_any_json_is_what_it_should_be_or_is_undecodable(what: str, rounds: Callable[[int], Rounds]) -> None:
    whole, kind = OF_JSON[what]
    codec.read_json(whole, kind)
    turns = rounds(1000)
    for chance in turns:
        attempt(turns, partial(codec.read_json, mutated(whole, chance), kind), UndecodableError)


def test_any_state_of_a_window_is_read_or_is_undecodable(rounds: Callable[[int], Rounds]) -> None:
    whole, known, turns = b'{"open":{"1700000000":5},"closed":3,"counted":{"newest":[[7,1.5]]}}', states(), rounds(1000)
    for chance in turns:
        key = mutated(chance.choice((b"od", b"=counted.7", b"=")), chance).decode("latin-1")
        entry = Entry(key=key, data=mutated(whole, chance), revision=1, time=None, deleted=False)  # type: ignore[arg-type]
        attempt(turns, partial(told, known, entry), UndecodableError)
        attempt(turns, partial(pages, entry))


@pytest.mark.parametrize("what", TEXTS)
def test_any_text_is_what_it_should_be_or_is_refused(what: str, rounds: Callable[[int], Rounds]) -> None:
    whole, read, refused = TEXTS[what]
    read(whole.decode())
    turns = rounds(1000)
    for chance in turns:
        data = mutated(whole if chance.random() < 0.95 else whole + DIGITS + b"x", chance)
        attempt(turns, partial(read, data.decode("utf-8", "replace")), refused)
