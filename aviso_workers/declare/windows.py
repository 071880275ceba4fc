"""Windows: notifications gathered by the time at which they happened, as one value for each key and stretch of time.

Pure. What is known of a key is one `KeyState`, and each step that it takes is a function here: a notification is
counted, windows are closed, one is done. What is known for all keys is a `WindowProgress`. Which notifications were
counted that the states do not list any more is on pages (`seen`).

All windows of an agent have one size and begin at one interval, which the progress has from the first worker: a worker
whose code states others is refused. So a window is known by its end. `features.windows` keeps all of these
where all workers find them, and says when a window closes. Times are seconds since 1970 UTC.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import math
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from types import CodeType
from typing import Annotated, Any, Generic, Never

from msgspec import Meta, Struct, structs
from typing_extensions import TypeVar

from aviso_workers.aviso import literals
from aviso_workers.aviso.literals import AnyDuration
from aviso_workers.aviso.notifications import Notification
from aviso_workers.declare import durations
from aviso_workers.declare.seen import NEVER, SeenList
from aviso_workers.declare.verdicts import FinalError
from aviso_workers.errors import DeclarationError, InvalidKeyError, LateError

A = TypeVar("A", default=Any)
T = TypeVar("T", default=Any)

LISTED = 256
"""So many notifications a state may list as counted; then the older half of them is left out."""
LONGEST_SECONDS = 9_223_372_036
"""No duration is longer that `Duration` reads."""


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
    - `fold`: a function that returns the new value of a window, made from the old value and a notification. It may be
      called again with the same ones, so it must do nothing else. None is refused unless `initial` is None.
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
            function = getattr(self, name)
            if not callable(function) and (function is not None or name == "fold"):
                raise DeclarationError(f"Windowing: {name} must be a function, found {function!r:.100}")
            if inspect.iscoroutinefunction(function):
                raise DeclarationError(f"Windowing: {name} must not be async: it only computes a value")
        for name in ("size", "every", "lateness", "idle"):
            given = getattr(self, name)
            if given in (None, "") and name in ("every", "idle"):
                continue
            seconds = durations.seconds(f"Windowing: {name}", given)
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
        """Return the key of a notification's windows. Raises `InvalidKeyError` for one that is not a text."""
        key = self.key(notification) if self.key else ""
        if not isinstance(key, str):
            raise InvalidKeyError(f"Windowing: key must return a text, returned {key!r:.100}: such as str(...)")
        return key

    def time_of(self, notification: Notification[T]) -> float:
        """Return the time by which a notification is counted, in seconds since 1970.

        Raises `ValueError` for a time that has no zone, or a year outside of 1001 to 8999, and `TypeError` for what is
        not a datetime.
        """
        time = self.time(notification) if self.time else notification.time
        if not isinstance(time, datetime):
            raise TypeError(f"Windowing: time must return a datetime with a time zone, returned {time!r:.100}")
        if time.tzinfo is None or not 1000 < time.year < 9000:
            raise ValueError(f"the time of a notification needs a zone, and a year from 1001 to 8999; found {time!r}")
        return time.timestamp()

    def ends(self, time: float) -> list[int]:
        """Return the ends of the windows that a time is in, the latest first."""
        last = int(time // self.every_seconds) * self.every_seconds
        first = int(time // 1) - self.size_seconds  # no window that starts then has the time
        return [start + self.size_seconds for start in range(last, first, -self.every_seconds)]

    def last_end(self, time: float) -> int:
        """Return the end of the last window that is over at a time."""
        last = (int(time // 1) - self.size_seconds) // self.every_seconds  # of integers: exact
        return last * self.every_seconds + self.size_seconds

    @property
    def fingerprints(self) -> dict[str, str]:
        """The fingerprints of `fold`, `key` and `time`, which tell other workers that a function was changed.

        They are of a function's name and of the names and values in its code. A function of the same name that was
        changed in another way has the same one.
        """
        return {name: _fingerprint(getattr(self, name)) for name in ("fold", "key", "time")}


class KeyState(Struct, Generic[A], frozen=True, kw_only=True, omit_defaults=True):
    """The stored state of a key."""

    open: dict[int, A] = {}
    """The values of the windows that are not done, by end."""
    closed: int = NEVER
    """Windows that end by then take nothing any more."""
    time: float = NEVER
    """When the newest notification happened that was counted."""
    sequence: int = 0
    """Of that one."""
    stored: float = NEVER
    """When the last was stored that was counted."""
    counted: SeenList = SeenList()
    """The newest that were counted: fewer than `LISTED`, but for moments. The others are settled, or on a page. Those
    have a mark that came too late for one of their windows, and not for all."""
    retried: list[str] = []
    """The dead letters that were tried again and counted. Their sequences may be settled all the same."""


class SettledUpTo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far the server knows that everything is settled: nothing up to there comes again, but for a reset."""

    sequence: int = 0
    time: float = NEVER
    """When the server said so. What was stored later is of a stream that was recreated."""

    def covers(self, sequence: int, stored: float) -> bool:
        """Return whether the message of this sequence and store time is settled."""
        return sequence <= self.sequence and stored <= self.time


class WindowProgress(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The stored state of all keys together."""

    closed: int = NEVER
    """As `KeyState.closed`."""
    settled: SettledUpTo = SettledUpTo()
    size: Annotated[int, Meta(ge=0, le=LONGEST_SECONDS)] = 0
    """The length of all windows, in seconds; 0 until the first worker begins. Only workers whose code states this size
    and this interval count and close."""
    every: int = 0
    """The interval at which they begin, in seconds."""
    functions: dict[str, str] = {}
    """The `Windowing.fingerprints` of the worker that closes windows."""
    values: str = ""
    """The fingerprint of the type of the windows' values; only workers whose type has it count and close."""


def window(state: KeyState[A], key: str, end: int, *, size: int) -> Window[A]:
    """Return a window of the key, which is open or over and not done."""
    start, after = (datetime.fromtimestamp(each, UTC) for each in (end - size, end))
    return Window(key=key, start=start, end=after, value=state.open[end])


def newest(states: Iterable[KeyState[Any]]) -> tuple[float, int]:
    """Return when the newest notification happened that was counted, and its sequence."""
    return max(((state.time, state.sequence) for state in states), default=(NEVER, 0))


def add(
    state: KeyState[A],
    notification: Notification[T],
    windowing: Windowing[A, T],
    *,
    time: float,
    passed: int = NEVER,
    retry: str = "",
) -> KeyState[A]:
    """Return the state with the notification counted in each of its windows that is open; as it was, where it had been
    before.

    `time` is when it happened. Windows that end by `passed` are closed, whatever the key. `retry` is the id of the dead
    letter that it was, if it was one. Raises `FinalError` where none of its windows is open, `DeclarationError` where
    `fold` returns None, and what `fold` raises.
    """
    sequence, stored = this = notification.sequence, notification.time.timestamp()
    if this in state.counted.newest or (retry and retry in state.retried):
        return state
    containing = windowing.ends(time)
    taking = [end for end in containing if end > max(passed, state.closed)]
    if not taking:
        last = datetime.fromtimestamp(containing[0], UTC)
        raise late(f"all of its windows have closed, the last at {last.isoformat()}")
    values = dict(state.open)
    for end in taking:
        before: Any = values[end] if end in values else copy.deepcopy(windowing.initial)
        values[end] = _folded(windowing, before, notification)
    newer = time > state.time
    return structs.replace(
        state,
        open=values,
        time=time if newer else state.time,
        sequence=sequence if newer else state.sequence,
        stored=max(stored, state.stored),
        counted=state.counted.plus(this, marked=len(taking) < len(containing)),
        retried=[*state.retried, retry] if retry else state.retried,
    )


def _folded(windowing: Windowing[A, T], before: Any, notification: Notification[T]) -> A:
    folded = windowing.fold(before, notification)
    if folded is None and windowing.initial is not None:
        raise DeclarationError("fold returned None, as `list.append` does: let it return the new value")
    return folded


def late(text: str) -> FinalError:
    """Return the error of a notification that came too late: it would be late again."""
    return FinalError(LateError(text), reason="late")


def close(state: KeyState[A], until: int) -> KeyState[A]:
    """Return the state with the windows closed that end by then; as it was, where there are none."""
    return structs.replace(state, closed=until) if any(state.closed < end <= until for end in state.open) else state


def still_open(state: KeyState[A], *, passed: int) -> list[int]:
    """Return the ends of its windows that take notifications, the oldest first. Those that end by `passed` do not,
    whatever the key.
    """
    return sorted(end for end in state.open if end > max(state.closed, passed))


def first_end(state: KeyState[Any]) -> float:
    """Return when its first open window ends, as a time to close it by: before every time where one is closed and not
    done, after every time where none is open.
    """
    first = min(state.open, default=math.inf)
    return NEVER if first <= state.closed else first


def due(state: KeyState[A]) -> list[int]:
    """Return the ends of the windows that are closed and not done, the oldest first."""
    return sorted(end for end in state.open if end <= state.closed)


def without(state: KeyState[A], end: int) -> KeyState[A]:
    """Return the state when this window is done; as it was, where it was done before."""
    if end not in state.open:
        return state
    values = {known: value for known, value in state.open.items() if known != end}
    return structs.replace(state, open=values, retried=state.retried if values else [])


def _fingerprint(function: Callable[..., Any] | None) -> str:
    code = getattr(function, "__code__", None)
    named = getattr(function, "__qualname__", None) or type(function).__qualname__
    return named if code is None else f"{named} {hashlib.sha256(_content(code).encode()).hexdigest()[:12]}"


def _content(constant: object) -> str:
    """Return the names and values of a function's code, spelled alike in all processes and versions of Python."""
    if isinstance(constant, CodeType):
        return f"{constant.co_names} {[_content(each) for each in constant.co_consts if each is not None]}"
    if isinstance(constant, frozenset):
        return f"{sorted(map(_content, constant))}"
    return repr(constant)


@functools.cache
def _seconds(duration: AnyDuration) -> int:
    return int(literals.seconds_of(duration))
