"""Windows: notifications gathered by the time at which they happened, as one value for each key and stretch of time.

Pure. What is known of a key is one `KeyState`, and each step that it takes is a function here: a notification is
counted, windows are closed, one is done. What is known for all keys is a `WindowProgress`, and a `CountedPage` says
with one bit for each sequence of the stream which notifications were counted that the states do not list any more.

How long windows are, and how often they begin, is stored with them as `Sizings`, and only that counts: a worker whose
code states another size counts and closes by what is stored. A new size is stored with the time from which on it holds,
at which windows of the old and of the new size begin. So each window has one size from its beginning to its end, and
each notification of tumbling windows is in one window.
`features.windows.handler` keeps all of these where all workers find them, and says when a window closes. Times are
seconds since 1970 UTC.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from types import CodeType
from typing import Annotated, Any, Generic, Never

from msgspec import Meta, Struct, structs
from typing_extensions import TypeVar

from aviso_workers.aviso import literals
from aviso_workers.aviso.literals import AnyDuration
from aviso_workers.aviso.notifications import Notification
from aviso_workers.declare import durations
from aviso_workers.declare.verdicts import FinalError
from aviso_workers.errors import DeclarationError, InvalidKeyError, LateError
from aviso_workers.jetstream.sequences import has_bit, last_of_page, with_bits

__all__ = [
    "CountedPage",
    "KeyState",
    "SettledUpTo",
    "Sizing",
    "Sizings",
    "Window",
    "WindowProgress",
    "Windowing",
    "add",
    "close",
    "due",
    "end",
    "ended",
    "first_end",
    "has_missed",
    "is_older",
    "last_end",
    "late",
    "leave_out",
    "newest",
    "oldest",
    "prune",
    "resized",
    "sized",
    "starts",
    "still_needed",
    "still_open",
    "window",
    "without",
]

A = TypeVar("A", default=Any)
T = TypeVar("T", default=Any)

NEVER = -(2**53)
"""Before every time: the least whole number that JSON carries everywhere."""
LISTED = 256
"""So many notifications a state may list as counted; then the older half of them is left out."""
LAST_SINCE = 253_370_764_800
"""The beginning of the year 9999, later than any notification: a size that would hold from then on never does."""
LONGEST_SECONDS = 9_223_372_036
"""No duration is longer that `Duration` reads."""


class Sizing(Struct, frozen=True, array_like=True):
    """The size of the windows that start at `since` or later, and how often they begin. All are in seconds."""

    since: Annotated[int, Meta(ge=NEVER, le=LAST_SINCE)]
    size: Annotated[int, Meta(ge=1, le=LONGEST_SECONDS)]
    every: Annotated[int, Meta(ge=1, le=LONGEST_SECONDS)]

    def is_as(self, other: Sizing) -> bool:
        """Return whether windows have the same size and begin as often, since whenever."""
        return (self.size, self.every) == (other.size, other.every)


Sizings = tuple[Sizing, ...]
"""At least one `Sizing`, the oldest first. Each holds until the next one begins, and the first one from ever."""


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

    @property
    def sizing(self) -> Sizing:
        """How long these windows are, and how often they begin."""
        return Sizing(NEVER, int(self.size_seconds), int(self.every_seconds))

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
    """The values of the windows that are not done, by start."""
    sizings: Sizings = ()
    """By which the key's windows were opened, and are. Empty for a new key; see `sized`."""
    ends: dict[int, int] = {}
    """By start, the ends of the windows of `open` that were dead letters: they may be older than all `sizings`."""
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
    settled, or on a `CountedPage`."""
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
    sizings: Sizings = ()
    """By which new states are begun. Empty until the first worker counts or closes."""
    functions: dict[str, str] = {}
    """The `Windowing.fingerprints` of the worker that closes windows."""
    values: str = ""
    """The fingerprint of the type of the windows' values; only workers whose type has it count and close."""


class CountedPage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which sequences of one page (`jetstream.sequences`) were counted, whatever their keys."""

    created: float
    """When the stream was created whose sequences these are."""
    newest: float = NEVER
    """When the last of them was stored that was counted."""
    counted: bytes = b""
    missed: bytes = b""
    """As `KeyState.missed`."""

    def has(self, sequence: int, stored: float) -> bool:
        """Return whether the message of this sequence and store time was counted."""
        return self.created <= stored <= self.newest and has_bit(self.counted, sequence)

    def has_missed(self, sequence: int) -> bool:
        """Return whether one that it `has` came too late for one of its windows."""
        return has_bit(self.missed, sequence)

    def plus(self, counted: Mapping[int, float], missed: Iterable[int]) -> CountedPage:
        """Return the page with these as well: store times by sequence, and which of them were late for a window."""
        return structs.replace(
            self,
            newest=max([self.newest, *counted.values()]),
            counted=with_bits(self.counted, counted),
            missed=with_bits(self.missed, missed),
        )

    def is_settled(self, number: int, settled: SettledUpTo) -> bool:
        """Return whether all that was counted on the page of this number is settled."""
        return settled.covers(last_of_page(number), self.newest)


def resized(sizings: Sizings, wanted: Sizing, *, counted: float, closed: int) -> Sizings:
    """Return the sizings by which windows are as `wanted` as soon as that can be.

    This is at the first moment at which windows of the last size that has begun and of the wanted one begin, after
    `counted`, the time of the newest notification that was counted, and not before `closed`: so no window that has
    begun is changed, and none of the new size lacks what was counted. It is not before `wanted.since` either, where
    windows of both begin then.
    """
    begun = [sizing for sizing in sizings[1:] if sizing.since <= counted or sizing.since < closed]
    begun.insert(0, sizings[0])
    last = begun[-1]
    if last.is_as(wanted):
        return tuple(begun)
    together = math.lcm(last.every, wanted.every)
    after = max(counted, closed - 1)
    since = wanted.since
    if since <= after or since % together:
        since = (int(after // together) + 1) * together
    return (*begun, structs.replace(wanted, since=min(since, LAST_SINCE)))


def still_needed(sizings: Sizings, *, closed: int, first_start: float = math.inf) -> Sizings:
    """Return the sizings without those of which no window takes anything any more.

    `closed` is as in `KeyState`; those of windows that start at `first_start` or later are needed as well. The windows
    of a newer size that would have begun before it have closed too, so that none of them can be opened.
    """
    while len(sizings) > 1:
        old, new = sizings[:2]
        if first_start < new.since or closed < max(new.since - each.every + each.size for each in (old, new)):
            break
        sizings = sizings[1:]
    return sizings if len(sizings) > 1 else tuple(structs.replace(each, since=NEVER) for each in sizings)


def sized(state: KeyState[A], sizings: Sizings, *, passed: int) -> KeyState[A]:
    """Return the state whose windows are as the newest of these sizings, which are those of all keys, as soon as that
    can be; as it was, where they are. `passed` is as in `add`.

    A state without sizings is of a new key.
    """
    if state.sizings == sizings:
        return state
    if state.sizings:
        closed = max(state.closed, passed)
        changed = resized(state.sizings, sizings[-1], counted=state.time, closed=closed)
        sizings = still_needed(changed, closed=closed, first_start=min(state.open, default=math.inf))
    return state if sizings == state.sizings else structs.replace(state, sizings=sizings)


def starts(sizings: Sizings, time: float) -> list[int]:
    """Return the starts of the windows that a time is in, the latest first."""
    found: list[int] = []
    until = math.inf
    for sizing in reversed(sizings):
        since = NEVER if sizing is sizings[0] else sizing.since
        last = int(time // sizing.every) * sizing.every
        first = int(time // 1) - sizing.size  # no window that starts then has the time
        found += [start for start in range(last, first, -sizing.every) if since <= start < until]
        until = since
    return found


def end(state: KeyState[Any], start: int) -> int:
    """Return when a window of the key ends."""
    if start in state.ends:
        return state.ends[start]
    sizing = state.sizings[0]
    for later in state.sizings[1:]:
        if later.since <= start:
            sizing = later
    return start + sizing.size


def ended(sizings: Sizings, time: float) -> int:
    """Return a number that grows when one more window has ended by then."""
    return sum(int((time - sizing.size) // sizing.every) for sizing in sizings)


def window(state: KeyState[A], key: str, start: int) -> Window[A]:
    """Return a window of the key, which is open or over and not done."""
    begins, ends = (datetime.fromtimestamp(each, UTC) for each in (start, end(state, start)))
    return Window(key=key, start=begins, end=ends, value=state.open[start])


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
    sequence, stored = notification.sequence, notification.time.timestamp()
    if _is_counted(state, sequence, stored, retry):
        return state
    containing = starts(state.sizings, time)
    closed = max(passed, state.closed)
    taking = [start for start in containing if end(state, start) > closed]
    if not taking:
        last = max(end(state, start) for start in containing)
        raise late(f"all of its windows have closed, the last at {datetime.fromtimestamp(last, UTC).isoformat()}")
    values = dict(state.open)
    for start in taking:
        before: Any = values[start] if start in values else copy.deepcopy(windowing.initial)
        values[start] = _folded(windowing, before, notification)
    this = {sequence: stored}
    newer = time > state.time
    return structs.replace(
        state,
        open=values,
        time=time if newer else state.time,
        sequence=sequence if newer else state.sequence,
        stored=max(stored, state.stored),
        counted=state.counted | this,
        missed=state.missed if len(taking) == len(containing) else state.missed | this,
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


def has_missed(state: KeyState[Any], notification: Notification[Any]) -> bool:
    """Return whether it was counted, and came too late for one of its windows."""
    return state.missed.get(notification.sequence) == notification.time.timestamp()


def prune(state: KeyState[A], settled: SettledUpTo) -> KeyState[A]:
    """Return the state without those listed as counted that are settled."""
    return leave_out(
        state, [sequence for sequence, stored in state.counted.items() if settled.covers(sequence, stored)]
    )


def oldest(state: KeyState[Any]) -> dict[int, float]:
    """Return the older half of those listed as counted: what comes next is rarely older than that."""
    return {sequence: state.counted[sequence] for sequence in sorted(state.counted)[: len(state.counted) // 2]}


def leave_out(state: KeyState[A], gone: Iterable[int]) -> KeyState[A]:
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


def is_older(state: KeyState[Any], sequence: int, stored: float) -> bool:
    """Return whether the state alone cannot tell that a message was not counted, because it may have been left out."""
    greatest, newest = state.left_out
    return sequence <= greatest and stored <= newest and state.counted.get(sequence) != stored


def close(state: KeyState[A], until: float) -> KeyState[A]:
    """Return the state with the windows closed that end by then; as it was, where there are none."""
    if not any(state.closed < end(state, start) <= until for start in state.open):
        return state
    return structs.replace(state, closed=int(until // 1))


def still_open(state: KeyState[A], *, passed: int) -> list[int]:
    """Return the starts of its windows that take notifications, the oldest first. Those that end by `passed` do not,
    whatever the key.
    """
    closed = max(state.closed, passed)
    return sorted(start for start in state.open if end(state, start) > closed)


def first_end(state: KeyState[Any]) -> float:
    """Return when its first open window ends, as a time to close it by: before every time where one is closed and not
    done, after every time where none is open.
    """
    first = min((end(state, start) for start in state.open), default=math.inf)
    return NEVER if first <= state.closed else first


def last_end(state: KeyState[Any]) -> int:
    """Return when the last of its open windows ends; before every time where none is open."""
    return max((end(state, start) for start in state.open), default=NEVER)


def due(state: KeyState[A]) -> list[int]:
    """Return the starts of the windows that are closed and not done, the oldest first."""
    return sorted(start for start in state.open if end(state, start) <= state.closed)


def without(state: KeyState[A], start: int) -> KeyState[A]:
    """Return the state when this window is done; as it was, where it was done before."""
    if start not in state.open:
        return state
    values = {known: value for known, value in state.open.items() if known != start}
    ends = {known: end for known, end in state.ends.items() if known != start}
    return structs.replace(state, open=values, ends=ends, retried=state.retried if values else [])


def _is_counted(state: KeyState[Any], sequence: int, stored: float, retry: str) -> bool:
    return state.counted.get(sequence) == stored or (retry != "" and retry in state.retried)


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
