"""How fast an agent begins while what it depends on is away: a pure rule, by credit.

A success gives `GAIN` of a credit of `FULL`, a failure takes 1. First tries and retries have an account each. A success
gives to both. A first try that fails takes from that of first tries, whatever failed; what needs something that is away
takes from that of retries. A retry that went wrong takes nothing, because it uses an attempt and so comes to an end. So
notifications that are tried again for a day, such as those for one target that is gone, slow nobody's first try.

Below `FIFO`, the next one is picked at random, so that what lies behind many bad ones is reached. At 0 the pace is
shut: one begins each second, and ever less often, up to `LONGEST_SECONDS`, where what failed last was away. The first
success lets two run, and each further one lets one more.

Each worker decides by itself: there is no record, and nobody is elected.
"""

from __future__ import annotations

import math
from collections.abc import Callable

FULL = 100
GAIN = 30
FIFO = 60
"""Below this credit, the next one is picked at random. Above it, retries are not limited."""
FIRST_SECONDS = 1.0
LONGEST_SECONDS = 4.0
GROWTH = 1.02
"""By how much the time between two tries grows with each of them."""
JITTER = 0.2
FIRST_SHARE = 0.8
"""The share of first tries while the pace is shut and retries are ready too."""


class Pace:
    """The credit of what one or several agents of a worker depend on. Times are those of the worker's clock."""

    def __init__(self, *, running: Callable[[], tuple[int, int]], tell: Callable[[], None]) -> None:
        """`running` returns how many first tries and how many retries run now; `tell` is called when the pace ceases to
        be free, and when more may begin.
        """
        self.free = True
        """Whether everything may begin, in its order."""
        self.away = False
        """Whether the last failure was one of something that is away."""
        self.credit = self.retries = FULL
        self.closed_until = -math.inf
        """Nothing begins before."""
        self.most = 1
        """How many calls can run at once: a larger window is no limit."""
        self._window = math.inf
        """How many may run of each kind: all, or none while the pace is shut."""
        self._interval = FIRST_SECONDS
        self._next = -math.inf
        """When one may begin although the pace is shut."""
        self._running = running
        self._tell = tell

    @property
    def is_shut(self) -> bool:
        """Whether one begins now and then, until one succeeds."""
        return self._window == 0

    @property
    def is_full(self) -> bool:
        """Whether successes have made up for all failures, so that nothing is limited and no credit is missing."""
        return self.free and self.credit == FULL == self.retries

    def succeeded(self) -> None:
        """Note that a call has succeeded."""
        if self.is_full:
            return
        self.retries = min(FULL, self.retries + GAIN)
        self.credit = min(FULL, self.credit + GAIN)
        self._interval = FIRST_SECONDS
        self._window += 2 if self._window == 0 else 1
        if self._window > self.most:
            self._window = math.inf
        self._look(opened=True)

    def failed(self, now: float, *, again: bool, away: bool) -> None:
        """Note that a call has failed, `again` where it was a retry."""
        self.away = away
        if away:
            self.retries = max(0, self.retries - 1)
        if not again:
            self.credit = max(0, self.credit - 1)
        if self.credit == 0 and self._window != 0:
            self._window, self._next = 0, now + self._interval
        elif self.retries == 0 and self._next < now:
            self._next = now + self._interval
        self._look()

    def close(self, until: float) -> None:
        """Let nothing begin before a time."""
        self.closed_until = max(self.closed_until, until)
        self._look()

    def shut(self, now: float) -> None:
        """Let one begin now and then, until one succeeds."""
        if not self.is_shut:
            self.credit = self.retries = 0
            self._window, self._next, self.away = 0, now + self._interval, True
            self._look()

    def reset(self) -> None:
        """Let everything begin."""
        self.credit = self.retries = FULL
        self._window, self._interval, self.closed_until = math.inf, FIRST_SECONDS, -math.inf
        self._look(opened=True)

    def lets(self, now: float, *, first: bool, again: bool) -> tuple[bool, bool]:
        """Return whether a first try and whether a retry may begin now, of those that are ready."""
        if self.closed_until > now:
            return False, False
        if self.closed_until > -math.inf:
            self.closed_until = -math.inf
            self._look()
        running, running_again = self._running()
        due = now >= self._next
        if first:
            first = due if self._window == 0 else running < self._window
        if again:
            again = due if self.retries == 0 else self.retries >= FIFO or running_again < self._window
        return first, again

    def picks(self, *, again: bool) -> bool:
        """Return whether the next one is to be picked at random."""
        return (self.retries if again else self.credit) < FIFO

    def prefers_first(self, random: float) -> bool:
        """Return whether a first try begins where a retry may, too."""
        return random < FIRST_SHARE

    def begins(self, now: float, random: float, *, again: bool) -> bool:
        """Return whether one may begin now, and note that it does where it may."""
        if not self.free and not any(self.lets(now, first=not again, again=again)):
            return False
        self.note_begin(now, random, again=again)
        return True

    def note_begin(self, now: float, random: float, *, again: bool) -> None:
        """Note that one begins."""
        if self.retries == 0 or (self.is_shut and not again):
            self._next = now + self._interval * (1 + JITTER * random)
            if self.away:
                self._interval = min(LONGEST_SECONDS, self._interval * GROWTH)

    def again_at(self, now: float, *, first: bool, again: bool) -> float:
        """Return when one may begin that is ready, where nothing happens until then."""
        if self.closed_until > now:
            return self.closed_until
        waits = (first and self.is_shut) or (again and self.retries == 0)
        return max(self._next, now) if waits else math.inf

    def _look(self, *, opened: bool = False) -> None:
        before, least = self.free, min(self.credit, self.retries)
        self.free = least >= FIFO and self._window == math.inf and self.closed_until == -math.inf
        if opened or self.free is not before:
            self._tell()
