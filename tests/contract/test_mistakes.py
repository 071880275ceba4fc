"""Mistakes of authors that are errors of ours, which name what is wrong and what to do. On either backend."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any

import pytest

from aviso_workers import App, Notification, Notify
from aviso_workers.errors import DeclarationError, InvalidNotificationError

pytestmark = pytest.mark.anyio

PLAIN: Any = Notify("plain", {"a": 1, "b": "x"})


@pytest.mark.parametrize(
    ("several", "problem"),
    [
        ([{"event_type": "plain"}], r"must be a Notify\(event_type, identifier, payload\), found {'event_type'"),
        ([("plain", {"a": 1})], r"must be a Notify\(event_type, identifier, payload\), found \('plain'"),
        ([[PLAIN]], r"must be a Notify\(event_type, identifier, payload\), found \[Notify"),
        ([None], r"must be a Notify\(event_type, identifier, payload\), found None"),
        (PLAIN, r"notify_many and notify_together take a list of Notify, found Notify\("),
        (None, "notify_many and notify_together take a list of Notify, found None"),
        ([Notify({"a": 1}, "plain")], "the event type of a notification must be text, found {'a': 1}"),  # type: ignore[arg-type]
        ([Notify("plain", {"a": 1, "b": "x"}, message_id=3)], "plain: message id 3: it must be printable text"),  # type: ignore[arg-type]
        (
            [Notify("plain", {"a": 1, "b": "x"}, {1: 2})],
            "plain: the payload is not JSON: the keys of a mapping must be",
        ),
        ([Notify("plain", {"a": 1, "b": "x"}, ttl=0.5)], "plain: ttl must be a duration of whole seconds from 1"),
    ],
)
async def test_what_cannot_be_published_is_refused_by_name(app: App, several: Any, problem: str) -> None:
    async with app:
        for publish in (app.notify_many, app.notify_together):
            with pytest.raises(InvalidNotificationError, match=problem):
                await publish(several)
        if isinstance(several, list):
            with pytest.raises(InvalidNotificationError, match=problem):
                app.check(several[0])


async def handler(notification: Notification[Any]) -> None: ...


async def tidy() -> None: ...


class Database:
    """What a resource gives."""


async def database() -> AsyncIterator[Database]:
    return Database()  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("declare", "problem"),
    [
        (
            lambda app: app.every("5s", singleton=False)(app.agent("mars")(handler)),
            "timer of <Agent handler on mars>: .* another function",
        ),
        (lambda app: app.task(app.agent("mars")(handler)), "task of <Agent handler on mars>: .* another function"),
        (
            lambda app: app.agent("mars", name="g")(app.every("5s", singleton=False)(tidy)),
            "agent of <Timer tidy>: .* another function",
        ),
        (lambda app: app.resource(database), "resource 'database': it is annotated .* yields nothing: .* -> Database"),
    ],
)
def test_what_cannot_be_declared_is_refused_by_name(app: App, declare: Callable[[App], Any], problem: str) -> None:
    with pytest.raises(DeclarationError, match=problem):
        declare(app)


def test_a_duration_of_a_notification_is_checked_before_it_is_sent(app: App) -> None:
    app.check(Notify("plain", {"a": 1, "b": "x"}, ttl=timedelta(minutes=1), due="10m"))
    with pytest.raises(InvalidNotificationError, match=r"plain: due must be a datetime .*, found 'soon'"):
        app.check(Notify("plain", {"a": 1, "b": "x"}, due="soon"))
