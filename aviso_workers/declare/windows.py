"""Windows: notifications gathered by the time at which they happened, as one value for each key and stretch of time.

Pure. What is known of a key is one `State`, and each step that it takes is a function here: a notification is counted,
windows are closed, one is done. What is known for all keys is a `Progress`, and a `Page` says with one bit for each
sequence of the stream which notifications were counted that the states do not list any more.
`engine.handlers.windowed` keeps all of these where all workers find them, and says when a window closes. Times are
seconds since 1970 UTC.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Generic, Never

from msgspec import Struct, structs
from typing_extensions import TypeVar

from aviso_workers.aviso import literals
from aviso_workers.aviso.literals import AnyDuration
from aviso_workers.aviso.notifications import Notification
from aviso_workers.declare.verdicts import FinalError
from aviso_workers.errors import DeclarationError, LateError

__all__ = [
    "Page",
    "Progress",
    "Settled",
    "State",
    "Window",
    "Windowing",
    "add",
    "adopted",
    "close",
    "due",
    "first_end",
    "has_missed",
    "is_older",
    "late",
    "leave_out",
    "newest",
    "oldest",
    "page_number",
    "prune",
    "still_open",
    "without",
]

A = TypeVar("A", default=Any)
T = TypeVar("T", default=Any)

NEVER = -(2**53)
"""Before every time: the least whole number that JSON carries everywhere."""
LISTED = 256
"""So many notifications a state may list as counted; then the older half of them is left out."""
PAGE_SEQUENCES = 16_384
"""How many sequences of the stream a page is for: 2 KiB."""
LAYOUT = 1
ANY_SEQUENCE = 2**53
"""No sequence is greater that JSON carries everywhere."""


class Window(Struct, Generic[A], frozen=True, kw_only=True):
    """The value of the notifications of one key in a stretch of time.

    An agent is given the value of all of them. `App.open_windows` returns the value so far. `key` is empty if the
    agent's windows have no keys. `start` and `end` are UTC, and `end` is the first moment after the window.
    """

    key: str
    """The key; empty if the agent's windows have no keys."""
    start: datetime
    """The first moment of the window, in UTC."""
    end: datetime
    """The first moment after the window, in UTC."""
    value: A


class Windowing(Struct, Generic[A, T], frozen=True, kw_only=True):
    """How the notifications of a `Window` are gathered.

    Durations are a text such as `15m`, `1h` or `1d`, a whole number of seconds, or a timedelta.

    - `size`: the length of the windows. They begin at whole multiples of it since 1970 UTC
      (tumbling windows).
    - `every`: the interval at which windows begin, if it is shorter than `size`. Such windows overlap (hopping
      windows).
    - `fold`: a function that makes the new value of a window from the old value and a notification. It may be called
      again with the same ones, so it must do nothing else.
    - `initial`: the value before the first notification.
    - `key`: a function that returns the key of a notification. Each key has its own windows. Default: no keys.
    - `time`: a function that returns when the notification happened, with a time zone. Default: when its stream stored
      it.
    - `lateness`: how long a window stays open for late notifications. It closes when a notification comes that happened
      at least this long after its end.
    - `idle`: the time without notifications after which all windows close. Default: no limit.

    Raises `DeclarationError`.
    """

    size: AnyDuration
    fold: Callable[[A, Notification[T]], A]
    initial: A | list[Never] | dict[Never, Never] | set[Never]
    every: AnyDuration | None = None
    key: Callable[[Notification[T]], str] | None = None
    time: Callable[[Notification[T]], datetime] | None = None
    lateness: AnyDuration = "0s"
    idle: AnyDuration | None = None

    def __post_init__(self) -> None:
        for name in ("fold", "key", "time"):
            if inspect.iscoroutinefunction(getattr(self, name)):
                raise DeclarationError(f"Windowing: {name} must not be async: it only computes a value")
        for name in ("size", "every", "lateness", "idle"):
            given = getattr(self, name)
            if given in (None, "") and name in ("every", "idle"):
                continue
            try:
                seconds = literals.seconds_of(given)
            except ValueError as error:
                raise DeclarationError(f"Windowing: {name}: {error}") from error
            if not isinstance(seconds, int):
                raise DeclarationError(f"Windowing: {name} must be whole seconds, found {given!r:.100}")
            if seconds < 0 or (not seconds and name != "lateness"):
                raise DeclarationError(f"Windowing: {name} must be longer than 0 seconds")
        if self.every_seconds > self.size_seconds:
            raise DeclarationError(
                f"Windowing: every must be at most size, or some notifications are in no window, found {self.every}"
            )

    @property
    def size_seconds(self) -> int:
        return _seconds(self.size)

    @property
    def every_seconds(self) -> int:
        return _seconds(self.every or self.size)

    @property
    def lateness_seconds(self) -> int:
        return _seconds(self.lateness)

    @property
    def idle_seconds(self) -> int | None:
        return _seconds(self.idle) if self.idle else None

    def key_of(self, notification: Notification[T]) -> str:
        return self.key(notification) if self.key else ""

    def time_of(self, notification: Notification[T]) -> float:
        """Return the time by which a notification is counted, in seconds since 1970.

        Raises `ValueError` for a time that has no zone, or a year outside of 1001 to 8999.
        """
        time = self.time(notification) if self.time else notification.time
        if time.tzinfo is None or not 1000 < time.year < 9000:
            raise ValueError(f"the time of a notification needs a zone, and a year from 1001 to 8999; found {time!r}")
        return time.timestamp()

    def starts(self, time: float) -> list[int]:
        """Return the starts of the windows that a time is in, the latest first."""
        every = self.every_seconds
        last = int(time // every) * every
        return list(range(last, int(time // 1) - self.size_seconds, -every))

    def ended(self, time: float) -> int:
        """Return a number that grows when one more window has ended by then."""
        return int((time - self.size_seconds) // self.every_seconds)

    def window(self, key: str, start: int, value: A) -> Window[A]:
        begins, ends = (datetime.fromtimestamp(each, UTC) for each in (start, start + self.size_seconds))
        return Window(key=key, start=begins, end=ends, value=value)


class State(Struct, Generic[A], frozen=True, kw_only=True, omit_defaults=True):
    """What is known of a key."""

    open: dict[int, A] = {}
    """The values of the windows that are not done, by start."""
    closed: int = NEVER
    """Windows that end by then take nothing any more."""
    time: float = NEVER
    """When the newest notification happened that was counted."""
    sequence: int = 0
    """Of that one."""
    stored: float = NEVER
    """When the last was stored that was counted."""
    counted: dict[int, float] = {}
    """The newest that were counted: by sequence, when each was stored, because a stream that is recreated has the same
    sequences. Fewer than `LISTED`, but for moments."""
    missed: dict[int, float] = {}
    """Those of `counted` that came too late for one of their windows, and not for all."""
    left_out: tuple[int, float] = (0, NEVER)
    """The greatest sequence and store time of those that were counted and are not in `counted` any more: they are
    settled, or on a `Page`."""
    retried: list[str] = []
    """The dead letters that were tried again and counted. Their sequences may be settled all the same."""
    layout: int = 0
    """`LAYOUT` where this version wrote it last, 0 where an older one did, which knows neither pages nor `left_out`."""


class Settled(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far the server knows that everything is settled: nothing up to there comes again, but for a reset."""

    sequence: int = 0
    time: float = NEVER
    """When the server said so. What was stored later is of a stream that was recreated."""

    def covers(self, sequence: int, stored: float) -> bool:
        """Return whether the message of this sequence and store time is settled."""
        return sequence <= self.sequence and stored <= self.time


class Progress(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known for all keys."""

    closed: int = NEVER
    """As `State.closed`."""
    settled: Settled = Settled()


class Page(Struct, frozen=True, kw_only=True, omit_defaults=True, rename={"counted": "bits", "missed": "missed_bits"}):
    """Which of `PAGE_SEQUENCES` sequences were counted, whatever their keys: a bit each, the first one lowest.

    Its fields are not called as those of `State`, because versions before pages read it as one, which is empty then.
    """

    created: float
    """When the stream was created whose sequences these are."""
    newest: float = NEVER
    """When the last of them was stored that was counted."""
    counted: bytes = b""
    missed: bytes = b""
    """As `State.missed`."""

    def has(self, sequence: int, stored: float) -> bool:
        """Return whether the message of this sequence and store time was counted."""
        return self.created <= stored <= self.newest and _bit(self.counted, sequence)

    def has_missed(self, sequence: int) -> bool:
        """Return whether one that it `has` came too late for one of its windows."""
        return _bit(self.missed, sequence)

    def plus(self, counted: Mapping[int, float], missed: Iterable[int]) -> Page:
        """Return the page with these as well: store times by sequence, and which of them were late for a window."""
        return structs.replace(
            self,
            newest=max([self.newest, *counted.values()]),
            counted=_with_bits(self.counted, counted),
            missed=_with_bits(self.missed, missed),
        )

    def is_settled(self, number: int, settled: Settled) -> bool:
        """Return whether all that was counted on the page of this number is settled."""
        return settled.covers((number + 1) * PAGE_SEQUENCES - 1, self.newest)


def newest(states: Iterable[State[Any]]) -> tuple[float, int]:
    """Return when the newest notification happened that was counted, and its sequence."""
    return max(((state.time, state.sequence) for state in states), default=(NEVER, 0))


def add(
    state: State[A],
    notification: Notification[T],
    windowing: Windowing[A, T],
    *,
    time: float,
    passed: int = NEVER,
    retry: str = "",
) -> State[A]:
    """Return the state with the notification counted in each of its windows that is open; as it was, where it had been
    before.

    `time` is when it happened. Windows that end by `passed` are closed, whatever the key. `retry` is the id of the dead
    letter that it was, if it was one. Raises `FinalError` where none of its windows is open.
    """
    sequence, stored = notification.sequence, notification.time.timestamp()
    if _is_counted(state, sequence, stored, retry):
        return state
    starts = windowing.starts(time)
    closed = max(passed, state.closed)
    taking = [start for start in starts if start + windowing.size_seconds > closed]
    if not taking:
        raise late(f"all of its windows have closed, the last at {_text(starts[0] + windowing.size_seconds)}")
    values = dict(state.open)
    for start in taking:
        before: Any = values[start] if start in values else copy.deepcopy(windowing.initial)
        values[start] = windowing.fold(before, notification)
    this = {sequence: stored}
    newer = time > state.time
    return structs.replace(
        state,
        open=values,
        time=time if newer else state.time,
        sequence=sequence if newer else state.sequence,
        stored=max(stored, state.stored),
        counted=state.counted | this,
        missed=state.missed if len(taking) == len(starts) else state.missed | this,
        retried=[*state.retried, retry] if retry else state.retried,
    )


def late(text: str) -> FinalError:
    """Return the error of a notification that came too late: it would be late again."""
    return FinalError(LateError(text), reason="late")


def has_missed(state: State[Any], notification: Notification[Any]) -> bool:
    """Return whether it was counted, and came too late for one of its windows."""
    return state.missed.get(notification.sequence) == notification.time.timestamp()


def adopted(state: State[A]) -> State[A]:
    """Return the state as this version writes it.

    An older version that runs beside this one drops `left_out` where it changes a state. Any notification that was
    stored before its last one may then be on a page.
    """
    if state.layout == LAYOUT:
        return state
    left_out = state.left_out if state.stored == NEVER else (ANY_SEQUENCE, state.stored)
    return structs.replace(state, left_out=left_out, layout=LAYOUT)


def prune(state: State[A], settled: Settled) -> State[A]:
    """Return the state without those listed as counted that are settled."""
    return leave_out(
        state, [sequence for sequence, stored in state.counted.items() if settled.covers(sequence, stored)]
    )


def oldest(state: State[Any]) -> dict[int, float]:
    """Return the older half of those listed as counted: what comes next is rarely older than that."""
    return {sequence: state.counted[sequence] for sequence in sorted(state.counted)[: len(state.counted) // 2]}


def leave_out(state: State[A], gone: Iterable[int]) -> State[A]:
    """Return the state that does not list these sequences as counted any more; as it was, where there are none."""
    left_out = {sequence: state.counted[sequence] for sequence in gone}
    if not left_out:
        return state
    sequence, stored = state.left_out
    return structs.replace(
        state,
        counted={sequence: stored for sequence, stored in state.counted.items() if sequence not in left_out},
        missed={sequence: stored for sequence, stored in state.missed.items() if sequence not in left_out},
        left_out=(max([sequence, *left_out]), max([stored, *left_out.values()])),
    )


def is_older(state: State[Any], sequence: int, stored: float) -> bool:
    """Return whether the state alone cannot tell that a message was not counted, because it may have been left out."""
    greatest, newest = state.left_out
    return sequence <= greatest and stored <= newest and state.counted.get(sequence) != stored


def close(state: State[A], until: float, windowing: Windowing[A, Any]) -> State[A]:
    """Return the state with the windows closed that end by then; as it was, where there are none."""
    if not any(state.closed < start + windowing.size_seconds <= until for start in state.open):
        return state
    return structs.replace(state, closed=int(until // 1))


def still_open(state: State[A], windowing: Windowing[A, Any], *, passed: int) -> list[int]:
    """Return the starts of its windows that take notifications, the oldest first. Those that end by `passed` do not,
    whatever the key.
    """
    closed = max(state.closed, passed)
    return sorted(start for start in state.open if start + windowing.size_seconds > closed)


def first_end(state: State[Any], windowing: Windowing[Any, Any]) -> float:
    """Return when its first open window ends, as a time to close it by: before every time where one is closed and not
    done, after every time where none is open.
    """
    end = min(state.open, default=math.inf) + windowing.size_seconds
    return NEVER if end <= state.closed else end


def due(state: State[A], windowing: Windowing[A, Any]) -> list[int]:
    """Return the starts of the windows that are closed and not done, the oldest first."""
    return sorted(start for start in state.open if start + windowing.size_seconds <= state.closed)


def without(state: State[A], start: int) -> State[A]:
    """Return the state when this window is done; as it was, where it was done before."""
    if start not in state.open:
        return state
    values = {known: value for known, value in state.open.items() if known != start}
    return structs.replace(state, open=values, retried=state.retried if values else [])


def _is_counted(state: State[Any], sequence: int, stored: float, retry: str) -> bool:
    return state.counted.get(sequence) == stored or (retry != "" and retry in state.retried)


def page_number(sequence: int) -> int:
    """Return the number of the page that a sequence is on."""
    return sequence // PAGE_SEQUENCES


def _bit(bits: bytes, sequence: int) -> bool:
    byte, bit = divmod(sequence % PAGE_SEQUENCES, 8)
    return byte < len(bits) and bool(bits[byte] >> bit & 1)


def _with_bits(bits: bytes, sequences: Iterable[int]) -> bytes:
    changed = bytearray(bits.ljust(PAGE_SEQUENCES // 8, b"\0"))
    for sequence in sequences:
        byte, bit = divmod(sequence % PAGE_SEQUENCES, 8)
        changed[byte] |= 1 << bit
    return bytes(changed).rstrip(b"\0")


@functools.cache
def _seconds(duration: AnyDuration) -> int:
    return int(literals.seconds_of(duration))


def _text(time: int) -> str:
    return datetime.fromtimestamp(time, UTC).isoformat()
