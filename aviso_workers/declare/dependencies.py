"""What agents depend on, such as a database, and which failures say that it is away.

An author declares a `Dependency` and gives it to agents. The session of a worker says by `at_work` how the dependencies
are there, so that the same object tells it to the author's code. The engine asks `is_unavailable` of each failure.
"""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import sqlite3
import sysconfig
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from traceback import walk_tb
from types import FrameType, TracebackType
from typing import NamedTuple, Protocol

from aviso_workers import event_loops
from aviso_workers.aviso.literals import AnyDuration
from aviso_workers.declare import durations
from aviso_workers.declare.limits import identifier_fields
from aviso_workers.errors import DeclarationError

PATIENCE = "1d"
MAX_CAUSES = 10
"""How many exceptions are looked at, from one that was raised back along what caused it."""
AWAY = (ConnectionError, socket.gaierror)
AWAY_ERRNOS = frozenset(
    {errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE, errno.ETIMEDOUT, errno.ENETUNREACH}
    | {errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN}
)
CLIENTS_SAY = frozenset(
    {"httpx.NetworkError", "httpx.TimeoutException", "httpx2.NetworkError", "httpx2.TimeoutException"}
    | {"psycopg.errors.ConnectionTimeout", "pymongo.errors.ConnectionFailure"}
)
"""Exceptions of clients that do not say which error of a socket has caused them; they are not imported here."""
AWAY_STATUSES = frozenset({429, 502, 503, 504})
"""The statuses of HTTP with which a server says that it, or what is behind it, cannot answer now."""
LONGEST_RETRY_AFTER_SECONDS = 3600.0
OWN_TIMEOUT = "aviso_workers_own_timeout"
"""The attribute of the error of a call that exceeded its agent's `timeout`, which says nothing about others."""
LIMITING = frozenset({"aviso_workers", "anyio", "async_timeout", "asyncio", "concurrent", "contextlib"})
"""The packages that end, with a TimeoutError, what takes longer than their caller allows."""
SOCKETS_SAY = re.compile(r"(_ssl\.c:\d+: )?(timed out|The \w+ operation timed out)")
"""The texts of the TimeoutErrors of Python's sockets, which have no errno."""
PACKAGES = {"site-packages", "dist-packages"}
"""The directories in which libraries are installed."""
STDLIB = sysconfig.get_path("stdlib")


class Unavailable(Exception):  # noqa: N818 - an instruction, like Retry and Reject
    """Raised by an agent: what it depends on is away. Try the notification again when it is back.

    It is no failed attempt. See `Dependency`. With `after`, a number of seconds, a text such as `30s`, or a timedelta,
    nothing that depends on the same is tried before. Raises `DeclarationError` for an `after` that is no duration.
    """

    def __init__(self, reason: str = "", after: AnyDuration | None = None) -> None:
        self.after = None if after is None else durations.seconds("Unavailable: after", after)
        super().__init__(reason or "what the agent depends on is away")


class Outage(Protocol):
    """How a dependency is in one worker. Its methods are called on the event loop of the worker."""

    is_away: bool
    since: datetime | None
    reason: str

    def trip(self, reason: str, after_seconds: float | None) -> None: ...
    def reset(self) -> None: ...


class _Worker(NamedTuple):
    """A worker that is at work in this process."""

    outages: Mapping[str, Outage]
    """By the name of the dependency; of those of which an agent is at work."""
    loop: asyncio.AbstractEventLoop


_HERE: ContextVar[_Worker | None] = ContextVar("here", default=None)
"""The worker that runs this code."""


class Dependency:
    """What agents depend on and which may be away. `App.dependency` and `Router.dependency` make one.

    Agents that are given the same one wait for it together. Its members say how it is in the worker that runs the code,
    and may be used in any thread. They raise `DeclarationError` where no agent that depends on it is at work in this
    process.
    """

    def __init__(
        self,
        name: str,
        *,
        unavailable: Sequence[type[Exception]] = (),
        patience: AnyDuration = PATIENCE,
        by: Sequence[str] = (),
    ) -> None:
        """See `Router.dependency`."""
        self.name = name
        self.unavailable = _exceptions(name, unavailable)
        self.patience = durations.seconds(f"dependency {name!r}: patience=", patience)
        """For how many seconds a notification is tried again without a failed attempt."""
        self.by = identifier_fields(f"dependency {name!r}: by=", by)
        if self.patience < 0:
            raise DeclarationError(f"dependency {name!r}: patience= must not be below 0, found {patience!r:.100}")
        self._workers: list[tuple[_Worker, str]] = []
        """The workers that it is at work in, and its name there; shared by its copies with a prefix."""

    @property
    def is_away(self) -> bool:
        """Whether it is away, as far as this worker knows."""
        return self._found()[0].is_away

    @property
    def since(self) -> datetime | None:
        """Since when it is away; None while it is not."""
        return self._found()[0].since

    @property
    def reason(self) -> str:
        """The error that says that it is away, with its class; empty while it is not away."""
        return self._found()[0].reason

    def trip(self, reason: str, after: AnyDuration | None = None) -> None:
        """Take it for away in this worker until something that depends on it succeeds. May be called in any thread.

        With `after`, a number of seconds, a text such as `30s`, or a timedelta, nothing is tried before. Raises
        `DeclarationError` also for an `after` that is no duration.
        """
        seconds = None if after is None else durations.seconds("trip: after", after)
        outage, loop = self._found()
        _run(loop, lambda: outage.trip(reason, seconds))

    def reset(self) -> None:
        """Take it for there in this worker, and let everything begin again. May be called in any thread."""
        outage, loop = self._found()
        _run(loop, outage.reset)

    def is_of(self, other: object) -> bool:
        """Return whether the other one has this name, or is of the same declaration."""
        return other == self.name or (isinstance(other, Dependency) and other._workers is self._workers)

    def __repr__(self) -> str:
        return f"<Dependency {self.name}>"

    def _found(self) -> tuple[Outage, asyncio.AbstractEventLoop]:
        here, workers = _HERE.get(), tuple(self._workers)
        found = [
            (name, worker.outages[name], worker.loop)
            for worker, name in workers
            if here in (None, worker) and name in worker.outages
        ]
        found = [each for each in found if each[0] == self.name] or found
        names = sorted({name for name, _, _ in found})
        if not found:
            raise DeclarationError(
                f"dependency {self.name!r} is not at work here: no agent that depends on it runs in this process"
            )
        if len(names) > 1:
            raise DeclarationError(
                f"dependency {self.name!r} is included as {' and as '.join(names)}: ask the one of app.dependencies "
                "that you mean"
            )
        return found[0][1:]


@contextmanager
def at_work(declared: Collection[Dependency], outages: Mapping[str, Outage]) -> Iterator[None]:
    """Let these dependencies say how they are in the worker that runs the block, by what `outages` has under their
    names, also for what is added to it meanwhile.
    """
    worker = _Worker(outages, asyncio.get_running_loop())
    for each in declared:
        each._workers.append((worker, each.name))
    token = _HERE.set(worker)
    try:
        yield
    finally:
        _HERE.reset(token)
        for each in declared:
            each._workers[:] = [known for known in each._workers if known[0] is not worker]


def is_unavailable(error: BaseException, kinds: tuple[type[BaseException], ...] = ()) -> bool:
    """Return whether an error, or one that caused it, says that something is away. `kinds` are further ones.

    A TimeoutError says so if it is that of a socket or of a client: it has an errno, or the text of Python's sockets,
    or is of a subclass, or a library has set the time that was exceeded. One that the author's code raises, or that
    ends what the author's code has limited (`asyncio.timeout`, `asyncio.wait_for`, `anyio.fail_after`,
    `Future.result`), says nothing of others. The frame that has set the limit is the last one of the traceback that
    belongs to none of the packages that keep such limits for their callers. It is that of a library if its module is
    installed or belongs to Python, and is of another package than the function that the engine has called.

    A group of errors, as a task group raises, says so if each of them does.

    An error may be an object of the author's, and whatever it raises when it is looked at says nothing.
    """
    with suppress(Exception):
        if getattr(error, OWN_TIMEOUT, False):
            return False  # whatever the call was ended in
        author = next(map(_package, _callers(error.__traceback__)), "")
        return _says_away(error, kinds, author)
    return False


def retry_after_seconds(error: BaseException, now: datetime) -> float:
    """Return how long a server asks to wait by `Retry-After` (RFC 9110, 10.2.3); 0 where it does not ask."""
    with suppress(Exception):
        for each in _causes(error):
            if isinstance(each, BaseExceptionGroup):
                return max(retry_after_seconds(inner, now) for inner in each.exceptions)
            if isinstance(each, Unavailable) and each.after is not None:
                return min(each.after, LONGEST_RETRY_AFTER_SECONDS)
            holder = getattr(each, "response", each)
            if (asked := getattr(holder, "headers", {}).get("Retry-After")) is not None:
                return min(max(0.0, _asked_seconds(str(asked), now)), LONGEST_RETRY_AFTER_SECONDS)
    return 0.0


def _run(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    if event_loops.running_loop() is loop:
        function()
    else:
        loop.call_soon_threadsafe(function)


def _exceptions(name: str, kinds: object) -> tuple[type[Exception], ...]:
    found = tuple(kinds) if isinstance(kinds, Sequence) else (kinds,)
    for kind in found:
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise DeclarationError(
                f"dependency {name!r}: unavailable= takes classes of exceptions, found {kind!r:.100}"
            )
    return found


def _causes(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    for _ in range(MAX_CAUSES):
        if found is None:
            return
        yield found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)


def _says_away(error: BaseException, kinds: tuple[type[BaseException], ...], author: str) -> bool:
    return any(
        all(_says_away(inner, kinds, author) for inner in each.exceptions)
        if isinstance(each, BaseExceptionGroup)
        else _is_away(each, kinds, author)
        for each in _causes(error)
    )


def _is_away(error: BaseException, kinds: tuple[type[BaseException], ...], author: str) -> bool:
    if isinstance(error, (Unavailable, *AWAY, *kinds)):
        return True
    if isinstance(error, TimeoutError):
        return not _is_limit_of(author, error)
    if isinstance(error, OSError) and error.errno in AWAY_ERRNOS:
        return True
    if isinstance(error, sqlite3.OperationalError):
        return "locked" in str(error)
    if not CLIENTS_SAY.isdisjoint([f"{each.__module__}.{each.__qualname__}" for each in type(error).__mro__]):
        return True
    return _status(error) in AWAY_STATUSES


def _is_limit_of(author: str, error: TimeoutError) -> bool:
    """Return whether it is the author's code that has set the time that was exceeded, or raises the error."""
    if type(error) is not TimeoutError or error.errno is not None or SOCKETS_SAY.fullmatch(str(error)):
        return False
    callers = list(_callers(error.__traceback__))
    return not callers or _package(callers[-1]) == author or not _is_library(callers[-1])


def _callers(frames: TracebackType | None) -> Iterator[FrameType]:
    """Yield the frames of a traceback, the outermost first, but for those that keep limits for their callers."""
    return (frame for frame, _ in walk_tb(frames) if _package(frame) not in LIMITING)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _is_library(frame: FrameType) -> bool:
    file = str(frame.f_globals.get("__file__") or frame.f_code.co_filename)
    return file.startswith(STDLIB) or not PACKAGES.isdisjoint(Path(file).parts)


def _status(error: BaseException) -> int | None:
    """Return the status of HTTP that an exception of a client has: requests, httpx, aiohttp, urllib or botocore."""
    holder = getattr(error, "response", None)
    for found in (
        getattr(holder, "status_code", None),
        getattr(error, "status_code", None),
        getattr(error, "status", None),
        getattr(error, "code", None),
    ):
        if isinstance(found, int):
            return found
    return None


def _asked_seconds(asked: str, now: datetime) -> float:
    if asked.strip().isdecimal():
        return float(asked)
    time = parsedate_to_datetime(asked)
    return ((time if time.tzinfo else time.replace(tzinfo=UTC)) - now).total_seconds()
