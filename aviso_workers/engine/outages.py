"""How what agents depend on is, in one worker: who is told of failures and successes, and what follows from them.

`acknowledging`, windows and functions of `on_dead_letter` tell an `Outage` how calls have ended. It judges which
failures say that something is away (`declare.dependencies`), and keeps the `pace` at which the agents begin. Where a
dependency has fields (`by`), it is away for each of their values by itself: the outage is a limit of `dispatch` as
well, which stops the notifications of one value alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable
from datetime import datetime
from functools import partial

import anyio

from aviso_workers import clocks
from aviso_workers.aviso.literals import printable
from aviso_workers.backends import Delivery
from aviso_workers.clocks import Clock
from aviso_workers.declare.dependencies import Dependency, Unavailable, is_unavailable, retry_after_seconds
from aviso_workers.engine.flow import Flow
from aviso_workers.engine.pace import LONGEST_SECONDS, Pace
from aviso_workers.errors import DeclarationError
from aviso_workers.events import Events, OutageBegan, OutageEnded, OutageGoesOn

TOLD_SECONDS = 60.0
"""How often it is told that an outage goes on."""
UNANSWERED_SECONDS = 30.0
"""After so long without a success, failures that say that something is away are told as an outage: of an agent that
has few notifications, the pace is never shut."""
EVERYTHING = 1_000_000
MAX_KEYS = 10_000
"""The keys of a dependency of which a worker remembers that something has failed."""


class _KeyPace:
    """The pace of one key of a dependency."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self.running = 0
        self.pace = Pace(running=lambda: (self.running, self.running), tell=tell)


class Outage:
    """What agents depend on, in one worker. Keep `work` running beside them."""

    def __init__(self, dependency: Dependency, *, declared: bool, clock: Clock, events: Events) -> None:
        """`declared`: an author has declared it. Else it is that of one agent, and a server that asks to be left alone
        for a while (`Retry-After`) speaks of one notification only.
        """
        self.is_away = False
        """Whether the dependency is away, and not for some of its keys only."""
        self.since: datetime | None = None
        """When the outage began, also one of a single key; None while there is none."""
        self.reason = ""
        """The error that says that it is away, with its class; empty while it is not away."""
        self.pace = Pace(running=self._running, tell=self._tell)
        self.strained = False
        """Whether something has failed that successes have not made up for: only then they need to be told."""
        self.patience = dependency.patience
        self._dependency = dependency
        self._declared = declared
        self._clock = clock
        self._events = events
        self._on_open: dict[str, Callable[[], None]] = {}
        """By agent that depends on it."""
        self._flows: dict[str, Flow] = {}
        """By agent, unless its notifications do not depend on it, as those of windows."""
        self.keys: dict[Hashable, _KeyPace] = {}
        """Of which something has failed."""
        self._gates: list[KeyGate] = []
        self._unanswered_since = math.inf
        """When the first failure was that says that something is away, since the last success or other failure."""
        self._began_at = 0.0
        self._calls = self._failures = self._told_calls = self._told_failures = 0
        self._began = anyio.Event()
        self._working = anyio.Lock()

    @property
    def away_seconds(self) -> float:
        """For how long it is away."""
        return self._clock.monotonic() - self._began_at if self.is_away else 0.0

    def join(self, agent: str, flow: Flow | None, *, most: int, on_open: Callable[[], None]) -> None:
        """Add an agent that makes at most so many calls at once. `on_open` is called when everything may begin again
        after the pace was shut."""
        self._on_open[agent] = on_open
        if flow is not None:
            self._flows[agent] = flow
        self.pace.most += most

    def is_unavailable(self, error: BaseException) -> bool:
        """Return whether a failure says that what the agents depend on is away, and there is patience with that."""
        if self.patience <= 0 or not isinstance(error, Exception) or isinstance(error, DeclarationError):
            return False  # what ends a program, and a mistake of its author, may have come of one that says so
        return is_unavailable(error, self._dependency.unavailable)

    def asked_seconds(self, error: BaseException) -> float:
        """Return for how long a failure asks to be left alone; 0 where it does not."""
        return retry_after_seconds(error, clocks.utc_now(self._clock))

    def succeeded(self, key: Hashable = None) -> None:
        """Note that a call has succeeded, for a notification with these values of the dependency's fields."""
        self._calls += 1
        self._unanswered_since = math.inf
        was_shut = self.pace.is_shut
        self.pace.succeeded()
        if (known := self.keys.get(key)) is not None:
            known.pace.succeeded()
            if known.pace.is_full:
                del self.keys[key]
        self.strained = bool(self.keys) or not self.pace.is_full
        if was_shut:
            self._open()
        if self._began.is_set() and not self._is_closed() and not any(map(_is_shut, self.keys.values())):
            self._end()

    def failed(self, error: BaseException, *, again: bool, away: bool, key: Hashable = None) -> None:
        """Note that a call has failed, `again` where it was a retry."""
        self._calls += 1
        self._failures += 1
        self.strained = True
        now = self._clock.monotonic()
        self.pace.failed(now, again=again, away=away)
        until = now + self.asked_seconds(error) if away else now
        if key is not None:
            self._fail_key(key, now, again=again, away=away, until=until)
        elif until > now and (self._declared or _is_asked_by_author(error)):
            self.pace.close(until)
        self._unanswered_since = min(self._unanswered_since, now) if away and key is None else math.inf
        if away and (self._is_closed() or now - self._unanswered_since >= UNANSWERED_SECONDS):
            if not self.is_away:
                self._begin(error)
        elif away and key is not None and not self._began.is_set() and _is_shut(self.keys[key]):
            self._begin(error, key=self._text_of(key))

    def begins(self, *, again: bool) -> bool:
        """Return whether a call may begin now that is none of a delivery, and count it where it may."""
        return self.pace.begins(self._clock.monotonic(), random.random(), again=again)

    def trip(self, reason: str, after_seconds: float | None) -> None:
        """Take it for away until something succeeds; where that is given, nothing is tried for so many seconds."""
        now = self._clock.monotonic()
        self.strained = True
        self.pace.shut(now)
        if after_seconds:
            self.pace.close(now + after_seconds)
        if not self.is_away:
            self._begin(Unavailable(reason))

    def reset(self) -> None:
        """Take it for there, and let everything begin."""
        self.strained = False
        self.pace.reset()
        for key in self.keys.values():
            key.pace.reset()
        self.keys.clear()
        self._open()
        if self._began.is_set():
            self._end()

    async def work(self) -> None:
        """Tell once a minute that an outage goes on; never returns. Of several that run this, one does it."""
        async with self._working:
            while True:
                await self._began.wait()
                began = self._began
                while self._began is began:
                    await self._clock.sleep(TOLD_SECONDS)
                    if self._began is began:
                        self._tell_agents()

    def gate(self, key_of: Callable[[str], Hashable]) -> KeyGate:
        """Return a limit that stops the notifications of an agent whose key is away; `key_of` returns that of a
        subject."""
        gate = KeyGate(self, key_of, self._clock)
        self._gates.append(gate)
        return gate

    def _text_of(self, key: Hashable) -> str:
        values = key if isinstance(key, tuple) else (key,)
        return printable(" ".join(f"{name}={value}" for name, value in zip(self._dependency.by, values, strict=False)))

    def _is_closed(self) -> bool:
        return self.pace.is_shut or self.pace.closed_until > self._clock.monotonic()

    def _open_key(self, key: Hashable) -> None:
        for gate in self._gates:
            gate.open(key)

    def _fail_key(self, key: Hashable, now: float, *, again: bool, away: bool, until: float) -> None:
        if (known := self.keys.get(key)) is None:
            if len(self.keys) >= MAX_KEYS:
                self.keys.pop(next(iter(self.keys))).pace.reset()
            known = self.keys[key] = _KeyPace(partial(self._open_key, key))
        known.pace.failed(now, again=again, away=away)
        if until > now:
            known.pace.close(until)

    def _running(self) -> tuple[int, int]:
        again = sum(flow.dispatch.running_again for flow in self._flows.values())
        return sum(flow.dispatch.running for flow in self._flows.values()) - again, again

    def _tell(self) -> None:
        for flow in self._flows.values():
            flow.dispatch.special = True
            flow.wake()

    def _begin(self, error: BaseException, *, key: str = "") -> None:
        self.is_away, self.since = not key, clocks.utc_now(self._clock)
        self._began_at = self._clock.monotonic()
        self._calls = self._failures = self._told_calls = self._told_failures = 0
        began = OutageBegan(dependency=self._dependency.name, agents=tuple(self._on_open), error=error, key=key)
        self.reason = began.reason
        self._events.emit(began)
        self._began.set()

    def _tell_agents(self) -> None:
        self._events.emit(
            OutageGoesOn(
                dependency=self._dependency.name,
                agents=tuple(self._on_open),
                reason=self.reason,
                seconds=self._clock.monotonic() - self._began_at,
                calls=self._calls - self._told_calls,
                failures=self._failures - self._told_failures,
                waiting=sum(flow.waiting for flow in self._flows.values()),
            )
        )
        self._told_calls, self._told_failures = self._calls, self._failures

    def _open(self) -> None:
        for on_open in self._on_open.values():
            on_open()

    def _end(self) -> None:
        seconds = self._clock.monotonic() - self._began_at
        self.is_away, self.since, self.reason, self._began = False, None, "", anyio.Event()
        self._events.emit(
            OutageEnded(
                dependency=self._dependency.name,
                agents=tuple(self._on_open),
                seconds=seconds,
                calls=self._calls,
                failures=self._failures,
            )
        )


class KeyGate:
    """A limit of one agent (`dispatch.Limit`): it stops the notifications of a key of a dependency that is away."""

    def __init__(self, outage: Outage, key_of: Callable[[str], Hashable], clock: Clock) -> None:
        self._flow: Flow
        self._outage = outage
        self._key_of = key_of
        self._clock = clock
        self._ticking: set[Hashable] = set()
        """The keys that are opened at a time."""

    def attach(self, flow: Flow) -> None:
        """Limit what begins of this flow."""
        self._flow = flow

    def gate(self, delivery: Delivery) -> Hashable:
        return self._key_of(delivery.message.subject)

    def admits(self, delivery: Delivery, now: float) -> bool:
        if not self._outage.keys or (known := self._outage.keys.get(self.gate(delivery))) is None:
            return True
        again = delivery.tried
        if delivery.at_once:
            known.pace.note_begin(now, random.random(), again=again)
        elif not known.pace.begins(now, random.random(), again=again):
            return False
        known.running += 1
        return True

    def take_back(self, delivery: Delivery) -> None:
        raise NotImplementedError  # it is asked last

    def release(self, delivery: Delivery) -> None:
        if self._outage.keys and (known := self._outage.keys.get(self.gate(delivery))) is not None and known.running:
            known.running -= 1

    def wait(self, key: Hashable) -> None:
        if key in self._ticking:
            return
        self._ticking.add(key)
        now, known = self._clock.monotonic(), self._outage.keys.get(key)
        at = now if known is None else known.pace.again_at(now, first=True, again=True)
        self._clock.call_at(min(max(at, now), now + LONGEST_SECONDS), lambda: self._tick(key))

    def _tick(self, key: Hashable) -> None:
        self._ticking.discard(key)
        self.open(key)

    def open(self, key: Hashable) -> None:
        """Have those of a key asked again that may begin."""
        known = self._outage.keys.get(key)
        count = EVERYTHING if known is None or known.pace.free else 2 if not known.pace.is_shut else 1
        self._flow.open(self, key, count)
        if self._flow.dispatch.waiting_at(self, key):
            self.wait(key)


def _is_shut(known: _KeyPace) -> bool:
    """Return whether a key is away."""
    return known.pace.away and not known.pace.free and (known.pace.is_shut or known.pace.closed_until > -math.inf)


def _is_asked_by_author(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(map(_is_asked_by_author, error.exceptions))
    if isinstance(error, Unavailable):
        return error.after is not None
    return error.__cause__ is not None and _is_asked_by_author(error.__cause__)
