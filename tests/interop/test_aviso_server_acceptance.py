"""What an aviso-server stores of notifications, and what we store: the same ones are accepted, byte for byte alike."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import nats
import pytest

from aviso_workers import App
from aviso_workers.errors import InvalidNotificationError
from aviso_workers.server import NatsServer
from tests.interop import conversations, generated
from tests.interop.aviso_server import AvisoServer

pytestmark = pytest.mark.anyio

STREAM = "MEASURED-1"
STORED = tuple[str, bytes, dict[str, str]]
"""Subject, body and headers of a message."""

ACCEPTED_BY_AN_AVISO_SERVER_ONLY: Mapping[str, frozenset[Any]] = {
    **dict.fromkeys(
        ("day", "iso_day"),
        frozenset(
            (
                *("2025-1-1", "2025-1-01", "2025-01-1", " 2025-12-25", "+2025-01-01", "-2025-01-01", "2025-1"),
                *("2025-01", "2025-99", "0000-01-01", "00000101"),
            )
        ),
    ),
    **dict.fromkeys(("expver", "version", "short"), frozenset(("*",))),
    "text": frozenset(("*", "\x00", "\x7f", "\u00a0", "\u2028")),
}
"""By field, the values that docs/aviso/differences.md says we refuse."""

SPELLED_OTHERWISE = frozenset((999.9999999999999,))
"""Numbers that an aviso-server reads as another one, one unit in the last place away, where they are not text."""


async def test_both_sides_accept_the_same_notifications_and_store_the_same(
    server: AvisoServer, aviso_config: Path, nats_server: NatsServer
) -> None:
    cases = [*generated.single_changes(), *generated.notifications(random.Random(generated.SEED), 300)]
    theirs = [server.notify("measured", identifier, payload)[0] == 200 for identifier, payload in cases]
    async with App("acceptance", config=aviso_config) as app:
        ours = [await accepts(app, identifier, payload) for identifier, payload in cases]

    agreed = [case for case, *sides in zip(cases, theirs, ours, strict=True) if sides[0] == sides[1]]
    differ = [case for case in cases if case not in agreed]
    assert [identifier for identifier, _ in differ if not is_documented(identifier)] == [], f"seed {generated.SEED}"
    assert {True, False} <= {*theirs} & {*ours}

    stored = iter(await messages(nats_server))
    by_them = {number: next(stored) for number, accepted in enumerate(theirs) if accepted}
    by_us = {number: next(stored) for number, accepted in enumerate(ours) if accepted}
    assert next(stored, None) is None
    for number in by_us:
        if not SPELLED_OTHERWISE & {*cases[number][0].values()}:
            assert with_signed_exponents(by_us[number]) == by_them[number], f"seed {generated.SEED}: {cases[number]}"


@pytest.mark.parametrize("without", ["day", "kind", "text"])
async def test_required_or_not_a_notification_has_every_field(
    server: AvisoServer, aviso_config: Path, without: str
) -> None:
    """`required` concerns the requests for a watch or a replay; see the next test."""
    identifier = {field: value for field, value in generated.PLAIN.items() if field != without}

    assert server.notify("measured", identifier)[0] == 400
    async with App("acceptance", config=aviso_config) as app:
        assert not await accepts(app, identifier, None)


async def test_a_replay_may_leave_out_what_is_not_required_and_ours_may_leave_out_all(
    server: AvisoServer, aviso_config: Path
) -> None:
    assert server.notify("measured", generated.PLAIN)[0] == 200
    body = {"event_type": "measured", "identifier": {}, "from_id": "1"}

    status, refusal = server.request("POST", "/api/v1/replay", body)
    asked = conversations.replay(server, "measured", {"day": "20261120"}, from_id="1")
    async with App("acceptance", config=aviso_config) as app:
        unasked = [notification.id async for notification in app.replay("measured")]

    assert (status, "day" in refusal) == (400, True)
    assert [event["id"] for event in asked] == unasked == ["measured@1"]


@pytest.mark.parametrize("payload", [None, {"location": "/data/1"}])
async def test_a_required_payload_is_required_by_both(server: AvisoServer, aviso_config: Path, payload: Any) -> None:
    identifier = {
        "class": "od",
        "expver": "1",
        "domain": "g",
        "date": "20261120",
        "time": "0",
        "stream": "o",
        "step": 1,
    }
    async with App("acceptance", config=aviso_config) as app:
        with_payload = payload is not None
        try:
            await app.notify("mars", identifier, payload)
            ours = True
        except InvalidNotificationError:
            ours = False

    assert (server.notify("mars", identifier, payload)[0] == 200, ours) == (with_payload, with_payload)


async def test_a_subject_that_python_would_part_is_read(server: AvisoServer, aviso_config: Path) -> None:
    """Once a message of it ended every connection that came to it."""
    texts = ["a", "a\vb", "a\fb", "a\x00b", "a\x85b", "a\u2028b", "z"]
    for text in texts:
        assert server.notify("measured", {**generated.PLAIN, "text": text})[0] == 200

    async with App("acceptance", config=aviso_config) as app:
        assert [notification.identifier["text"] async for notification in app.replay("measured")] == texts


def test_a_field_that_no_subject_carries_keeps_newer_servers_from_starting(
    aviso_server_version: str, start_aviso_server: Callable[..., AvisoServer], aviso_config: Path
) -> None:
    """We warn of it when a worker starts."""
    text = aviso_config.read_text()
    aviso_config.write_text(text.replace("time, stream, step]", "time, stream]"))

    if aviso_server_version == "0.7.1":
        start_aviso_server(aviso_server_version, config=aviso_config)
        return
    with pytest.raises(AssertionError, match="key_order must include identifier 'step'"):
        start_aviso_server(aviso_server_version, config=aviso_config)


async def accepts(app: App, identifier: Mapping[str, Any], payload: Any) -> bool:
    try:
        await app.notify("measured", identifier, payload)
    except InvalidNotificationError:
        return False
    return True


def is_documented(identifier: Mapping[str, Any]) -> bool:
    return any(
        isinstance(value, str) and value in ACCEPTED_BY_AN_AVISO_SERVER_ONLY.get(field, ())
        for field, value in identifier.items()
    )


async def messages(server: NatsServer) -> list[STORED]:
    """Return all that the stream holds, without the headers of JetStream's own."""
    client = await nats.connect(server.url)
    try:
        context = client.jetstream()
        last = (await context.stream_info(STREAM)).state.last_seq
        found = [await context.get_msg(STREAM, sequence) for sequence in range(1, last + 1)]
    finally:
        await client.close()
    return [(one.subject or "", one.data or b"", dict(_own(one.headers or {}))) for one in found]


def with_signed_exponents(stored: STORED) -> STORED:
    """Return the message with 1e16 written as 1e+16, as an aviso-server writes it in a body."""
    subject, data, headers = stored
    return (subject, b"1e+16" if data == b"1e16" else data, headers)


def _own(headers: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    return ((name, value) for name, value in headers.items() if not name.startswith("Nats-"))
