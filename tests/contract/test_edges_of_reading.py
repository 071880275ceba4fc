"""What `replay`, `watch` and agents get at the edges of a stream: tables of calls, with the answers of each backend.

The app is one in the harness, whose virtual time has to pass where a call waits, as it does on a server.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import anyio
import pytest

from aviso_workers import App, Notification
from aviso_workers.errors import AvisoWorkersError
from aviso_workers.testing import harness
from tests.contract.settings import mars
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

LAST = 6
GONE = 2
"""Notifications 1 and 2 were deleted."""
HELD = [3, 4, 5, 6]
PAST, FUTURE = "2001-01-01T00:00:00Z", "2200-01-01T00:00:00Z"
LARGEST_ID = 2**64 - 1
MISSING = "NotFoundError: stream PLAIN does not exist"
BEYOND = "NotFoundError: there is no {} to begin at: MARS ends at 6"

Call = tuple[str, dict[str, Any]]

REPLAYS: list[tuple[Call, list[int] | str]] = [
    (("mars", {}), HELD),
    (("mars", {"from_id": 0}), HELD),
    (("mars", {"from_id": 1}), HELD),
    (("mars", {"from_id": GONE}), HELD),
    (("mars", {"from_id": 5}), [5, 6]),
    (("mars", {"from_id": LAST}), [6]),
    (("mars", {"from_id": LAST + 1}), []),
    (("mars", {"from_id": LAST + 2}), BEYOND.format(LAST + 2)),
    (("mars", {"from_id": LARGEST_ID}), BEYOND.format(LARGEST_ID)),
    (("mars", {"from_id": LAST + 2, "to_id": 4}), BEYOND.format(LAST + 2)),
    (("mars", {"from_id": LAST + 2, "to_date": FUTURE}), BEYOND.format(LAST + 2)),
    (("mars", {"from_id": 5, "to_id": 4}), []),
    (("mars", {"from_id": 5, "to_id": 5}), [5]),
    (("mars", {"to_id": 0}), []),
    (("mars", {"to_id": GONE}), []),
    (("mars", {"to_id": LARGEST_ID}), HELD),
    (("mars", {"from_id": 5, "to_date": PAST}), []),
    (("mars", {"from_id": 5, "to_date": FUTURE}), [5, 6]),
    (("mars", {"from_date": PAST}), HELD),
    (("mars", {"from_date": "0001-01-01T00:00:00Z"}), HELD),
    (("mars", {"from_date": PAST, "to_id": 4}), [3, 4]),
    (("mars", {"from_date": FUTURE}), []),
    (("mars", {"from_date": FUTURE, "to_id": 4}), []),
    (("mars", {"from_date": FUTURE, "to_date": PAST}), []),
    (("mars", {"from_date": "9999-12-31T23:59:59Z"}), []),
    (("mars", {"to_date": FUTURE}), HELD),
    (("mars", {"to_date": PAST}), []),
    (("mars", {"where": {"step": [1, 2]}}), []),
    (("mars", {"where": {"step": {"gte": 5}}, "from_id": 3}), [5, 6]),
    (("mars", {"where": {"class": "rd"}, "from_id": LAST + 2}), BEYOND.format(LAST + 2)),
    (("plain", {}), MISSING),
    (("plain", {"from_id": 1}), MISSING),
    (("plain", {"from_id": 99}), MISSING),
    (("plain", {"to_id": 0}), MISSING),
    (("plain", {"from_date": FUTURE}), MISSING),
    (("mars", {"from_id": -1}), "InvalidPositionError: from_id must be a sequence number, found '-1'"),
    (("mars", {"from_id": "mars@2"}), "InvalidPositionError: from_id must be a sequence number, found 'mars@2'"),
    (("marsh", {}), "UnknownEventTypeError: unknown event type 'marsh'"),
]

NEXT = LAST + 1
WATCHES: list[tuple[Call, list[int], list[int]]] = [
    # the call, what it yields of what is stored, what it yields when one more is stored of each event type
    (("mars", {"from_id": 0}), HELD, [NEXT]),
    (("mars", {"from_id": GONE}), HELD, [NEXT]),
    (("mars", {"from_id": LAST}), [6], [NEXT]),
    (("mars", {"from_id": LAST + 1}), [], [NEXT]),
    (("mars", {"from_id": LAST + 2}), HELD, [NEXT]),
    (("mars", {"from_id": LARGEST_ID}), HELD, [NEXT]),
    (("mars", {"from_date": PAST}), HELD, [NEXT]),
    (("mars", {"from_date": FUTURE}), [], []),
    (("mars", {"where": {"class": "rd"}, "from_id": 1}), [], []),
    (("plain", {}), [], [1]),
    (("plain", {"from_id": 1}), [], [1]),
    (("plain", {"from_id": 99}), [], [1]),
    (("plain", {"from_date": PAST}), [], [1]),
    (("plain", {"from_date": FUTURE}), [], []),
]


async def store(app: App) -> None:
    """Have six notifications stored, of which the first two are deleted."""
    for step in range(1, LAST + 1):
        await app.notify("mars", mars(step=step), {})
    for sequence in range(1, GONE + 1):
        await app.session.admin.delete_message("MARS", sequence)


def spelled(call: Call) -> str:
    event_type, given = call
    return f"{event_type}({', '.join(f'{name}={value!r}' for name, value in given.items())})"


async def test_a_replay_gives_on_each_backend_what_the_table_says(app: App, url: str | None) -> None:
    answers: dict[str, list[int] | str] = {}

    async def ask(call: Call) -> None:
        event_type, given = call
        try:
            answers[spelled(call)] = [each.sequence async for each in app.replay(event_type, **given)]
        except AvisoWorkersError as error:
            answers[spelled(call)] = f"{type(error).__name__}: {error}"

    async with harness(app, server=url):
        await store(app)
        with anyio.fail_after(PATIENCE_SECONDS):
            async with anyio.create_task_group() as asking:
                for call, _ in REPLAYS:
                    asking.start_soon(ask, call)
    for call, expected in REPLAYS:
        answer = answers[spelled(call)]
        if isinstance(expected, str) and isinstance(answer, str):
            answers[spelled(call)] = answer[: len(expected)]
    assert answers == {spelled(call): expected for call, expected in REPLAYS}


async def test_a_watch_gives_on_each_backend_what_the_table_says(app: App, url: str | None) -> None:
    seen: dict[str, list[int]] = {spelled(call): [] for call, *_ in WATCHES}

    async def watch(call: Call) -> None:
        event_type, given = call
        notifications: AsyncGenerator[Notification[Any], None] = app.watch(event_type, **given)
        async with aclosing(notifications):
            async for each in notifications:
                seen[spelled(call)].append(each.sequence)

    async with harness(app, server=url):
        await store(app)
        async with anyio.create_task_group() as watching:
            for call, *_ in WATCHES:
                watching.start_soon(watch, call)
            stored = {spelled(call): first for call, first, _ in WATCHES}
            await until(lambda: seen == stored)
            assert seen == stored
            await app.notify("mars", mars(step=NEXT), {})
            await app.notify("plain", {"a": "1", "b": "2"})
            both = {spelled(call): [*first, *then] for call, first, then in WATCHES}
            await until(lambda: seen == both)
            assert seen == both
            watching.cancel_scope.cancel()


STARTS: list[tuple[Any, list[int]]] = [
    # where an agent starts, and what it is given of `HELD` and of one that is stored when it reads
    ("all", [*HELD, NEXT]),
    ("new", [NEXT]),
    (GONE, [*HELD, NEXT]),
    (LAST, [6, NEXT]),
    (LAST + 1, [NEXT]),
    (LAST + 2, []),
    (LAST + 99, []),
    (PAST, [*HELD, NEXT]),
]


async def test_an_agent_starts_on_each_backend_where_the_table_says(app: App, url: str | None) -> None:
    with_agents = App(app.name, config=app.config)
    for number, (start, _) in enumerate(STARTS):

        @with_agents.agent("mars", name=f"agent_{number}", start=start)
        async def index(notification: Notification[Any]) -> None: ...

    async with harness(app, server=url) as t:
        await store(app)
        await t.deploy(with_agents)
        await t.notify("mars", mars(step=NEXT), {})
        await t.settle()
        given = {
            start: sorted(each.sequence for each in t.settled(f"agent_{n}")) for n, (start, _) in enumerate(STARTS)
        }
    assert given == dict(STARTS)


async def until(holds: Callable[[], bool]) -> None:
    with anyio.move_on_after(PATIENCE_SECONDS):
        while not holds():  # noqa: ASYNC110 - what is waited for is what watches yield
            await anyio.sleep(0.01)
