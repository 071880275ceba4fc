"""Two versions of the app that run side by side: what they declare differently, and what has to become of that.

One of them filters by other lanes, and has another name for one agent. Whichever workers live, each notification must
be in one window, and each agent must have what it wants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from aviso_workers import Notification, Router, Window, Windowing
from aviso_workers.backends import Backend
from aviso_workers.state import window_records

VARIABLE = "CHAOS_VERSION"
"""The variable of the environment that says which version a worker is of."""
RECORD_SUFFIX = ".windows"
"""What is behind the name of the record, for the record of the windows that have closed."""
WINDOWS = "in_windows"


class Version(NamedTuple):
    lanes: tuple[int, ...]
    name: str


VERSIONS = {
    "old": Version((0, 1, 2, 3, 4, 5), "before"),
    "new": Version((3, 4, 5, 6, 7, 8), "after"),
}
SIZE_SECONDS = 4
WANTED: dict[str, set[int] | None] = {
    WINDOWS: None,
    "filtered": {lane for version in VERSIONS.values() for lane in version.lanes},
    **{version.name: None for version in VERSIONS.values()},
}
"""The lanes of which each agent must have all notifications; None: of all lanes."""


def declare(
    router: Router,
    version: Version,
    event: str,
    *,
    do: Callable[[str, Notification[Any]], Awaitable[None]],
    write_window: Callable[[str], None],
    **policy: Any,
) -> None:
    """Declare the agents that differ between versions on a router."""
    windowing: Windowing[list[int], Any] = Windowing(
        size=SIZE_SECONDS,
        fold=lambda numbers, notification: [*numbers, _number(notification)],
        initial=list[int](),
        lateness="2s",
    )

    @router.agent(event, name=WINDOWS, concurrency=16, window=windowing, **policy)
    async def in_windows(window: Window[list[int]]) -> None:
        numbers = ",".join(map(str, window.value))
        write_window(f"{window.start.isoformat()} {window.end.isoformat()} {numbers}\n")

    @router.agent(event, concurrency=16, where={"lane": list(version.lanes)}, **policy)
    async def filtered(notification: Notification[Any]) -> None:
        await do("filtered", notification)

    @router.agent(event, name=version.name, concurrency=16, start="new", **policy)
    async def renamed(notification: Notification[Any]) -> None:
        await do(version.name, notification)


def numbers_in_windows(record: Path) -> Counter[int]:
    """Return how often each number is in windows that have closed. One that was run twice counts once."""
    return Counter(number for _, _, numbers in _windows(record) for number in numbers)


def wrong_windows(record: Path) -> list[str]:
    """Return what is wrong with the windows that have closed."""
    wrong, known = list[str](), dict[tuple[datetime, datetime], tuple[int, ...]]()
    for start, end, numbers in _windows(record):
        if (end - start).total_seconds() != SIZE_SECONDS or start.timestamp() % SIZE_SECONDS:
            wrong.append(f"a window from {start} to {end}")
        if known.setdefault((start, end), numbers) != numbers:
            wrong.append(f"the window from {start} to {end} closed twice, with different values")
    twice = [number for number, times in numbers_in_windows(record).items() if times > 1]
    return [*wrong, *([f"in two windows: {sorted(twice)[:20]}"] if twice else [])]


async def open_numbers(backend: Backend, app: str, event: str) -> set[int]:
    """Return the numbers in the windows that are open. Raises `BackendError`."""
    router = Router("look")

    async def nothing(_: str, __: Notification[Any]) -> None: ...

    declare(router, VERSIONS["new"], event, do=nothing, write_window=lambda _: None)
    (agent,) = (agent for agent in router.agents if agent.name == WINDOWS)
    found = await window_records.open_windows(agent, backend, app=app, key="")
    return {number for window in found for number in window.value}


def _windows(record: Path) -> Iterable[tuple[datetime, datetime, tuple[int, ...]]]:
    """Return the windows that have closed, each once for each value."""
    lines = dict.fromkeys(record.read_text().splitlines()) if record.exists() else {}
    for line in lines:
        start, end, numbers = line.split()
        yield datetime.fromisoformat(start), datetime.fromisoformat(end), tuple(map(int, numbers.split(",")))


def _number(notification: Notification[Any]) -> int:
    return int(notification.identifier["number"])
