"""Which calls fail in which agent, and what is promised: what can succeed is handled at nine tenths of the rate with
pacing off, wherever a tenth of any hundred calls in a row succeeds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Literal, NamedTuple

from msgspec import structs

from _goodput.simulation import KEYS, POLICY, Fails, Result, Setting, simulate

Kind = Literal["away", "wrong", "undecodable"]
KINDS: tuple[Kind, ...] = ("away", "wrong", "undecodable")
"""A call that exceeds its own timeout is wrong."""
PATTERNS = ("random", "notification", "runs of 10", "runs of 50", "runs of 500", "key", "time")
SHARES = (0.1, 0.2, 0.5, 0.8, 0.9)
FORMS = ("plain", "order_by", "batch", "singleton", "window")
CONCURRENCY = (1, 8, 64)
PROMISED = 0.9
REACHED = 0.9
"""Of what succeeds, the share whose time is compared."""
SEEDS = 5
"""How often a case is tried that seems to fall short."""
HALF_PERIOD_SECONDS = 10
SETTLED_SECONDS = 150.0
"""By then, what was tried before the pace was shut has used its attempts."""
BACKLOG, WINDOWS, TRICKLE = 3000, 600, 300
"""How many notifications or windows wait at the beginning, and how many come one each second."""


class Case(NamedTuple):
    pattern: str
    share: float
    kind: Kind
    form: str = "plain"
    concurrency: int = 8
    trickle: bool = False

    def __str__(self) -> str:
        load = "1/s" if self.trickle else "backlog"
        failing = "10 s of 20" if self.pattern == "time" else f"{self.share:.0%} {self.pattern}"
        return f"{self.form}, C={self.concurrency}, {load}, {failing}, {self.kind}"

    @property
    def is_promised(self) -> bool:
        """Whether a tenth of any hundred calls succeeds. With an order, what comes behind a run waits for it."""
        if self.form == "batch":  # a call fails where one of its notifications does
            return self.pattern == "random" or (self.pattern == "notification" and self.share <= 0.1)
        if self.pattern == "runs of 50":
            return self.share <= 0.8 and self.form != "order_by"
        return self.pattern not in ("runs of 500", "time")


class Row(NamedTuple):
    case: Case
    ratio: float
    """The rate with pacing by the rate without."""
    successes: int
    calls: int
    calls_off: int
    """How many calls there were with pacing off."""

    @property
    def falls_short(self) -> bool:
        return self.case.is_promised and self.ratio < PROMISED


def all_cases() -> Iterator[Case]:
    """Yield every combination that says something."""
    for form in FORMS:
        for concurrency in CONCURRENCY:
            if form in ("singleton", "window") and concurrency > 1:
                continue  # they make one call at a time
            for trickle in (False, True):
                yield Case("random", 0.0, "away", form, concurrency, trickle)
                for kind in KINDS:
                    if kind == "undecodable" and form == "window":
                        continue
                    yield Case("time", 0.5, kind, form, concurrency, trickle)
                    for pattern in PATTERNS[:-1]:
                        for share in SHARES:
                            yield Case(pattern, share, kind, form, concurrency, trickle)


def failing(case: Case, seed: int) -> Fails:
    """Return which calls fail."""
    share, chances = case.share, random.Random(seed)
    if case.pattern == "random":
        return lambda sequence, key, now: chances.random() < share
    if case.pattern == "notification":
        return lambda sequence, key, now: (sequence * 2654435761 % 2**32) / 2**32 < share
    if case.pattern == "key":
        return lambda sequence, key, now: key < KEYS * share
    if case.pattern == "time":
        return lambda sequence, key, now: now % (2 * HALF_PERIOD_SECONDS) < HALF_PERIOD_SECONDS
    run = int(case.pattern.removeprefix("runs of "))
    return lambda sequence, key, now: sequence % (run / share) < run


def measure(case: Case) -> Row:
    """Return how fast a case is with pacing. What seems slow is tried several times, as it may be by chance."""
    tried = [_both(case, seed) for seed in (1, 2)]
    if _ratio(tried) < 1:
        tried += [_both(case, seed) for seed in range(3, SEEDS + 1)]
    off, on = tried[0]
    return Row(case, _ratio(tried), len(on.successes), len(on.calls), len(off.calls))


def _both(case: Case, seed: int) -> tuple[Result, Result]:
    """Return what happens with pacing off and with pacing on."""
    setting = _setting(case, seed)
    away, counts = case.kind == "away", case.kind != "undecodable"
    off, on = (
        simulate(structs.replace(setting, paced=paced), failing(case, seed), away=away, counts=counts)
        for paced in (False, True)
    )
    return off, on


def _setting(case: Case, seed: int) -> Setting:
    count = TRICKLE if case.trickle else WINDOWS if case.form == "window" else BACKLOG
    fails = failing(case, seed)
    lasting = case.pattern in ("notification", "key") or case.pattern.startswith("runs")
    good = sum(not fails(each, each * 7919 % KEYS, 0.0) for each in range(count)) if lasting else count
    ends_with_good = lasting or case.kind == "away"
    return Setting(
        form=case.form,
        concurrency=case.concurrency,
        fails_by_call=case.pattern == "random",
        count=count,
        rate=1.0 if case.trickle else math.inf,
        until=count + 300.0 if case.trickle else 400.0,
        enough=math.ceil(0.95 * good) if ends_with_good else math.inf,
        seed=seed,
    )


def _ratio(tried: list[tuple[Result, Result]]) -> float:
    times_off, times_on = 0.0, 0.0
    for off, on in tried:
        if not off.successes:
            continue
        # By chance, others become dead letters.
        similar = len(on.successes) >= 0.93 * len(off.successes)
        wanted = max(1, int(REACHED * (min(len(off.successes), len(on.successes)) if similar else len(off.successes))))
        times_off += sorted(off.successes)[wanted - 1]
        times_on += sorted(on.successes)[wanted - 1] if len(on.successes) >= wanted else math.inf
    return times_off / times_on if times_on else 1.0


# What is promised where nothing succeeds, and behind what fails


def outage(form: str, concurrency: int, *, waiting: bool, seconds: float = 120.0) -> list[str]:
    """Return what is not as promised of an outage of so many seconds: at most one call a second after a hundred calls
    or ten seconds, whichever is later; all handled within ten seconds after the end and the time that takes."""
    count, rate = (WINDOWS if form == "window" else BACKLOG, math.inf) if waiting else (int(2 * seconds), 1.0)
    begin, end = (0.0, seconds) if waiting else (30.0, 30.0 + seconds)
    setting = Setting(form=form, concurrency=concurrency, count=count, rate=rate, until=4 * seconds + 400)
    result = simulate(setting, lambda sequence, key, now: begin <= now < end, away=True)
    during = sorted(each for each in result.calls if begin <= each < end - setting.call_seconds)
    shut_at = max([begin + 10.0, *during[99:100]])
    paced = [each for each in during if each > shut_at + 1.0]
    most = max((_within(paced, each, 10.0) for each in paced), default=0)
    last = max(result.successes, default=math.inf)
    left = sum(each >= end for each in result.successes)
    size = setting.batch_size if form == "batch" else 1
    takes = left * setting.call_seconds / concurrency / size + (setting.batch_seconds if form == "batch" else 0.0)
    by_then = max(end + takes, (count - 1) / rate if rate < math.inf else 0.0)
    told = {
        f"{most} calls in ten seconds": most > 11,
        f"{len(result.dead)} dead letters": bool(result.dead),
        f"{count - len(result.successes)} not handled": len(result.successes) < count,
        f"all handled {last - by_then:.1f} s later than they can be": last > by_then + 10.0,
    }
    return [what for what, is_wrong in told.items() if is_wrong]


def _within(times: list[float], begin: float, seconds: float) -> int:
    return sum(begin <= each <= begin + seconds for each in times)


def behind_a_run(form: str, concurrency: int, kind: Kind) -> float:
    """Return after how many seconds at most the first of 1,000 succeeds that come after 500 that fail."""
    firsts = []
    for seed in range(1, SEEDS + 1):
        setting = Setting(form=form, concurrency=concurrency, count=1500, until=600, enough=1, seed=seed)
        counts = kind != "undecodable"
        result = simulate(setting, lambda sequence, key, now: sequence < 500, away=kind == "away", counts=counts)
        firsts.append(min(result.successes, default=math.inf))
    return max(firsts)


def all_wrong(form: str, concurrency: int) -> tuple[float, bool]:
    """Return how many dead letters there are a second where all is wrong, after those of the first hundred calls, and
    whether each has used exactly its attempts."""
    setting = Setting(form=form, concurrency=concurrency, count=2000, until=600.0)
    result = simulate(setting, lambda sequence, key, now: True, away=False)
    late = [each for each in result.dead.values() if each > SETTLED_SECONDS]
    exact = all(result.attempts[each] == POLICY.attempts for each in result.dead)
    return len(late) / (setting.until - SETTLED_SECONDS), exact and bool(late)
