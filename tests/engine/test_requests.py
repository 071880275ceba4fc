"""What a request does where the stream of replies cannot be read, or was restored meanwhile."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from aviso_workers import App, Notification, Notify
from aviso_workers.engine.replay import Replayer
from aviso_workers.engine.requests import request
from aviso_workers.errors import DeniedError
from tests.contract.settings import app_config, mars

pytestmark = pytest.mark.anyio

WANTED = Notify("plain", {"a": "1", "b": "2"})


class Replies:
    def __init__(self, *found: Notification[Any] | Exception) -> None:
        self._found = found

    async def watch(self, start: object) -> AsyncGenerator[Notification[Any], None]:
        for each in self._found:
            if isinstance(each, Exception):
                raise each
            yield each


async def requested(*found: Notification[Any] | Exception) -> Notification[Any]:
    replies = cast(Replayer, Replies(*found))
    async with App("requests", config=app_config("in_memory", "")) as app:
        await app.notify("mars", mars(), {})
        session = app.session
        return await request(WANTED, session.backend, session.publisher, replies, stream="MARS", timeout_seconds=0.1)


async def test_an_error_of_the_wait_says_that_the_request_is_stored() -> None:
    with pytest.raises(DeniedError) as raised:
        await requested(DeniedError("no right to read"))
    assert raised.value.__notes__ == ["the request is stored in PLAIN with the sequence 1"]


async def test_a_reply_of_a_restored_stream_that_is_older_than_the_request_is_none() -> None:
    old, new = (
        Notification(event_type="mars", identifier={}, payload=None, sequence=1, time=datetime.now(UTC) + since)
        for since in (timedelta(hours=-1), timedelta(0))
    )
    assert await requested(old, new) is new
