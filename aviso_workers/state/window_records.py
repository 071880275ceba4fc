"""The states of windows as their bucket keeps them, and the windows of dead letters; `features.windows` counts.

A key of the author's has one entry, its `declare.windows.KeyState`. What is known for all keys is below `PROGRESS`, and
what no state lists any more below `PAGES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, structs

from aviso_workers.aviso import payloads
from aviso_workers.aviso.codec import UNREADABLE_JSON, Message, read_json, read_number
from aviso_workers.backends import Backend
from aviso_workers.backends.buckets import open_existing
from aviso_workers.declare import seen, windows
from aviso_workers.declare.agents import Agent
from aviso_workers.declare.seen import SeenPage
from aviso_workers.declare.windows import KeyState, Window, Windowing, WindowProgress
from aviso_workers.errors import DeclarationError, RefusedError, UndecodableError
from aviso_workers.jetstream import key_value
from aviso_workers.jetstream.key_value import Entry, decode_key, encode_key
from aviso_workers.state import bucket_names

EARLIEST, LATEST = -30_610_224_000, 253_370_764_800
"""Seconds since 1970 UTC: the beginnings of the years 1000 and 9999. No window of a notification ends outside of them,
and a datetime tells the start and the end of each window that ends within them."""
NO_KEY = "="
"""Of windows without keys. No key is spelled like this."""
PROGRESS, PAGES = "=passed", "=counted."
"""What no key of an author's is spelled like."""


class KeptWindow(Struct, frozen=True, kw_only=True):
    """The body of a window's dead letter."""

    start: int
    """Seconds since 1970 UTC, as the end."""
    end: Annotated[int, Meta(ge=EARLIEST, le=LATEST)]
    value: Any
    values: str
    """As `WindowProgress.values`."""


def is_window(stream: str, *, app: str, agent: str) -> bool:
    """Return whether a dead letter of the agent whose original is in that stream is of a window, and not of a
    notification.
    """
    return stream == f"KV_{bucket_of(app, agent)}"


async def put_back(backend: Backend, dead_letter: Message, *, app: str, agent: str) -> None:
    """Put the window of a dead letter back, so that the function is run for it; `dead_letter` is what was stored of it.

    Raises `UndecodableError`; `RefusedError` where the agent's windows have another size or values of another type by
    now, so that it could not go on with this one; `BackendError`.
    """
    kept = read_json(dead_letter.data, KeptWindow)
    prefix = f"$KV.{bucket_of(app, agent)}."
    key = dead_letter.subject.removeprefix(prefix)
    if not dead_letter.subject.startswith(prefix) or is_own(key):
        raise UndecodableError(f"{dead_letter.subject} is no key of the agent's windows")
    bucket = await open_existing(backend, bucket_of(app, agent))
    progress = read_progress(await bucket.get(PROGRESS)) if bucket else WindowProgress()
    if bucket is None or (kept.end - kept.start, kept.values) != (progress.size, progress.values):
        raise RefusedError(
            f"a window of agent {agent} has another size, or a value of another type, than its windows have now: retry "
            "its dead letter while a version with these runs, or handle its body (`aviso-workers dead-letters show`) "
            "yourself"
        )

    def read(entry: Entry | None) -> KeyState[Any]:
        return read_json(entry.value, KeyState[Any]) if entry else KeyState()

    def with_window(state: KeyState[Any]) -> KeyState[Any]:
        opened = {**state.open, kept.end: kept.value}
        return structs.replace(state, open=opened, closed=max(state.closed, kept.end))

    await key_value.compare_and_set(bucket, key, read=read, change=with_window)


class WindowStates:
    """What a bucket keeps of an agent's keys, as bytes and back."""

    def __init__(self, agent: Agent[Any, Any], *, on_unreadable: Callable[[Entry, UndecodableError], None]) -> None:
        """`on_unreadable` is called once for each entry that `by_key` leaves out."""
        self._agent = agent
        self._on_unreadable = on_unreadable
        kept: Any = KeyState
        self._read: Callable[[bytes], KeyState[Any]] = payloads.json_reader(kept[agent.argument_type])
        self.fingerprint = payloads.fingerprint(agent.argument_type)
        """Of the type of the values, the same in all workers that have it."""
        self.other_type = (
            f"the values of the windows of agent {agent.name!r} are not {agent.argument_type} any more: a worker of "
            "another version was started later, and counts in them until no such worker runs"
        )
        self._known: dict[str, tuple[Entry, KeyState[Any] | None]] = {}
        """What `by_key` has read, so that it reads only what has changed since."""

    def read(self, entry: Entry) -> KeyState[Any]:
        """Return the state that an entry stores.

        Raises `UndecodableError`, as where the agent's type is another one than it was.
        """
        try:
            state = self._read(entry.value)
        except UNREADABLE_JSON as error:
            raise self._unfit(error) from error
        if not all(EARLIEST <= end <= LATEST for end in state.open):
            raise UndecodableError(f"what windows of agent {self._agent.name!r} hold has a window of no time")
        return state

    def read_whole(self, entry: Entry) -> None:
        """Read the state that an entry stores. Raises as `read`, also where a value would lose a part of itself."""
        kept = msgspec.json.decode(payloads.to_json(self.read(entry)))
        if not _has_all(kept.get("open", {}), msgspec.json.decode(entry.value).get("open", {})):
            raise self._unfit("it has not all that is stored")

    def _unfit(self, problem: object) -> UndecodableError:
        agent = self._agent
        return UndecodableError(
            f"what windows of agent {agent.name!r} hold is not a {agent.argument_type}: {problem}; let the version "
            "that opened them close them, or give the agent another name"
        )

    def by_key(self, entries: Iterable[Entry]) -> dict[str, KeyState[Any]]:
        """Return the states that can be read. Who counts for a key whose state cannot be read, fails, and is heard."""
        known, self._known = self._known, {}
        for entry in entries:
            if not is_own(entry.key):
                found = known.get(entry.key)
                self._known[entry.key] = found if found and found[0] is entry else (entry, self._readable(entry))
        return {
            "" if spelled == NO_KEY else decode_key(spelled): state
            for spelled, (_, state) in self._known.items()
            if state is not None
        }

    def _readable(self, entry: Entry) -> KeyState[Any] | None:
        try:
            return self.read(entry)
        except UndecodableError as error:
            self._on_unreadable(entry, error)
            return None

    def spell(self, state: KeyState[Any]) -> bytes:
        """Return a state as it is stored.

        Raises `DeclarationError` where the author's `fold` has returned something else than it should.
        """
        try:
            data = payloads.to_json(state)
            self._read(data)
        except (*UNREADABLE_JSON, TypeError, ValueError) as error:
            raise DeclarationError(
                f"agent {self._agent.name!r}: fold returned what is not a {self._agent.argument_type}: {error}"
            ) from error
        return data


def _has_all(value: Any, stored: Any) -> bool:
    """Return whether a value has each part of the one that is stored, however it is spelled."""
    match stored, value:
        case dict(), dict():
            return all(key in value and _has_all(value[key], each) for key, each in stored.items())
        case list(), list():
            return len(value) == len(stored) and all(map(_has_all, value, stored))
    return not isinstance(stored, dict | list)


async def unfinished(agent: Agent[Any, Any], windowing: Windowing[Any, Any], backend: Backend, *, app: str) -> int:
    """Return how many windows are over by the time of what was counted, and not done.

    Raises `UndecodableError` where what the bucket holds is not of the agent's type.
    """
    bucket = await open_existing(backend, bucket_of(app, agent.name))
    if bucket is None:
        return 0
    states = WindowStates(agent, on_unreadable=_refuse).by_key(await bucket.entries()).values()
    until = windowing.last_end(windows.newest(states)[0] - windowing.lateness_seconds)
    return sum(len(windows.due(windows.close(state, until))) for state in states)


async def open_windows(agent: Agent[Any, Any], backend: Backend, *, app: str, key: str) -> list[Window[Any]]:
    """Return the windows of a key that take notifications now, the oldest first, as the server has them.

    Nothing is made: without a bucket there are none. Raises `InvalidKeyError`, `UndecodableError`, `BackendError`.
    """
    spelled = bucket_key(key)
    bucket = await open_existing(backend, bucket_of(app, agent.name))
    entry = None if bucket is None else await bucket.get(spelled)
    if bucket is None or entry is None:
        return []
    progress = read_progress(await bucket.get(PROGRESS))
    state = WindowStates(agent, on_unreadable=_refuse).read(entry)
    still_open = windows.still_open(state, passed=progress.closed)
    return [windows.window(state, key, end, size=progress.size) for end in still_open]


def _refuse(_: Entry, error: UndecodableError) -> None:
    raise error


def bucket_key(key: str) -> str:
    """Return a window's key as a bucket's key. Raises `InvalidKeyError`."""
    return encode_key(key) if key else NO_KEY


def bucket_of(app: str, agent: str) -> str:
    """Return the bucket of the agent's windows."""
    return bucket_names.bucket_of(app, "windows", agent)


def is_own(key: str) -> bool:
    """Return whether a key of the bucket is that of the progress or of a page, and not of a state."""
    return key == PROGRESS or key.startswith(PAGES)


def pages(entries: Iterable[Entry]) -> Iterator[tuple[Entry, int, SeenPage]]:
    """Yield the pages among the entries that can be read, each with the last sequence that may be on it. Who counts on
    one that cannot, fails, and is heard.
    """
    for entry in entries:
        if entry.key.startswith(PAGES):
            with suppress(UndecodableError):
                number = read_number(entry.key.removeprefix(PAGES))
                yield entry, seen.last_of_page(number), read_json(entry.value, SeenPage)


def read_progress(entry: Entry | None) -> WindowProgress:
    """Return what is known for all keys. Raises `UndecodableError`."""
    return read_json(entry.value, WindowProgress) if entry else WindowProgress()
