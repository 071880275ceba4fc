"""Prints at which rate agents handle what can succeed, by that with pacing off; fails below what is promised."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import NamedTuple

from _goodput import cases
from _goodput.cases import CONCURRENCY, FORMS, PROMISED, SHARES, Row

LAST_SECONDS = 60.0
"""What comes behind a run that fails begins to succeed within this time."""
MOST_DEAD_LETTERS = 1.0
"""In a second, where all is wrong."""


class Claim(NamedTuple):
    """Something that is promised besides the rates."""

    text: str
    holds: bool
    is_promised: bool = True


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/goodput", description=__doc__)
    parser.add_argument("--form", choices=FORMS, action="append", help="measure agents of this form only")
    parser.add_argument("--at-once", type=int, choices=CONCURRENCY, action="append", help="with so many calls at once")
    parser.add_argument("--processes", type=int, help="how many run at once; by default, one for each processor")
    asked = parser.parse_args(arguments)
    forms, at_once = asked.form or FORMS, asked.at_once or CONCURRENCY
    began = time.monotonic()
    wanted = [case for case in cases.all_cases() if case.form in forms and case.concurrency in at_once]
    with ProcessPoolExecutor(asked.processes) as pool:
        claims = list(pool.map(_call, _claims(forms, at_once)))
        rows = list(pool.map(cases.measure, wanted, chunksize=4))
    for line in table(rows):
        print(line)
    low = sorted((row for row in rows if row.ratio < PROMISED), key=lambda row: (not row.case.is_promised, row.ratio))
    print(f"\nBelow {PROMISED}:" if low else f"\nNone is below {PROMISED}.")
    for row in low:
        print(_line(row))
    print()
    for claim in claims:
        print(f"{'holds' if claim.holds else 'FAILS' if claim.is_promised else 'fails, as it may':16} {claim.text}")
    short = sum(row.falls_short for row in rows) + sum(not claim.holds for claim in claims if claim.is_promised)
    seconds = time.monotonic() - began
    verdict = f"{short} FALL SHORT" if short else "HOLDS"
    print(f"\n{len(rows)} rates and {len(claims)} claims in {seconds:.0f} s: {verdict}")
    return int(bool(short))


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the least rate of each form, load, pattern and kind, by the share of calls that fail."""
    yield "The rate with pacing, by the rate with pacing off; the least of all concurrencies"
    yield f"{'':50}" + "".join(f"{share:>7.0%}" for share in SHARES)
    named: dict[tuple[str, bool, str, str], dict[float, float]] = {}
    for row in rows:
        case = row.case
        if not case.share:
            continue
        least = named.setdefault((case.form, case.trickle, case.pattern, case.kind), {})
        least[case.share] = min(row.ratio, least.get(case.share, row.ratio))
    for (form, trickle, pattern, kind), least in named.items():
        name = f"{form:10} {'1/s' if trickle else 'backlog':8} {pattern:13} {kind:12}"
        yield f"{name:50}" + "".join(f"{least[share]:7.2f}" if share in least else f"{'':7}" for share in SHARES)
    unfailing = [row.ratio for row in rows if not row.case.share]
    yield f"Where nothing fails: {min(unfailing, default=1.0):.2f} and more"


def _line(row: Row) -> str:
    promised = "PROMISED" if row.case.is_promised else "not promised"
    return (
        f"{row.ratio:5.2f} {promised:13} {row.case}: {row.successes} successes, {row.calls} calls ({row.calls_off} off)"
    )


def _claims(forms: Sequence[str], at_once: Sequence[int]) -> Iterator[Callable[[], Claim]]:
    for form in forms:
        for concurrency in at_once if form not in ("singleton", "window") else (1,):
            for waiting in (True, False):
                yield partial(_outage, form, concurrency, waiting=waiting)
            yield partial(_all_wrong, form, concurrency)
            for kind in ("away", "wrong", "undecodable"):
                if form == "window" and kind == "undecodable":
                    continue
                yield partial(_behind, form, concurrency, kind)


def _call(claim: Callable[[], Claim]) -> Claim:
    return claim()


def _outage(form: str, concurrency: int, *, waiting: bool) -> Claim:
    wrong = cases.outage(form, concurrency, waiting=waiting)
    load = "with a backlog" if waiting else "at 1/s"
    name = f"{form}, C={concurrency}, {load}: an outage costs at most a call a second, and ten seconds"
    return Claim(f"{name} ({'; '.join(wrong)})" if wrong else name, not wrong)


def _all_wrong(form: str, concurrency: int) -> Claim:
    rate, exact = cases.all_wrong(form, concurrency)
    text = f"{form}, C={concurrency}: where all is wrong, {rate:.2f} dead letters a second, each after its attempts"
    return Claim(text, exact and rate <= MOST_DEAD_LETTERS)


def _behind(form: str, concurrency: int, kind: cases.Kind) -> Claim:
    seconds = cases.behind_a_run(form, concurrency, kind)
    text = f"{form}, C={concurrency}: {seconds:.1f} s until the first succeeds behind 500 that fail as {kind}"
    # What has an order waits for what is before it.
    return Claim(text, seconds <= LAST_SECONDS, is_promised=form not in ("order_by", "singleton"))


if __name__ == "__main__":
    sys.exit(main())
