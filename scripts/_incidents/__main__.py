"""Makes the situations of the incident book, and compares what is seen with what is expected."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console

from _chaos.interrupts import end_in_order
from _incidents import book, healthy, page
from _incidents.book import Outcome
from _incidents.situations import SITUATIONS

console = Console(highlight=False, soft_wrap=True, markup=False)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/incidents", description="The situations of the incident book.")
    known = {situation.name: situation for situation in SITUATIONS}
    parser.add_argument("names", metavar="NAME", nargs="*", help="only these situations (default: all)")
    parser.add_argument("--list", action="store_true", help="list the situations, and make none")
    parser.add_argument("--write", action="store_true", help="write their rows of the page of the book")
    parser.add_argument("--healthy", type=int, metavar="N", help="look N times at a busy cluster without a fault")
    parser.add_argument("--texts", type=Path, metavar="DIR", help="write what the doctor says of each situation here")
    asked = parser.parse_args()
    if unknown := [name for name in asked.names if name not in known]:
        parser.error(f"no situation is called {', '.join(unknown)}; --list names them")
    if asked.list:
        for situation in SITUATIONS:
            console.print(f"{situation.name}: {situation.title}")
        return 0
    end_in_order()
    if asked.healthy:
        return int(healthy.conduct(asked.healthy, console) > 0)
    chosen = [known[name] for name in asked.names] or SITUATIONS
    began, outcomes = time.monotonic(), list[Outcome]()
    try:
        for outcome in book.conduct(chosen, console):
            outcomes.append(outcome)
            if asked.texts:
                asked.texts.mkdir(exist_ok=True)
                (asked.texts / f"{outcome.situation.name}.txt").write_text(f"{outcome.look}\n{outcome.doctors_words}")
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    console.print(f"{len(outcomes)} of {len(chosen)} situations as expected, in {time.monotonic() - began:.0f} s")
    if asked.write and outcomes:
        page.PAGE.write_text(page.text(outcomes, page.rows()))
        console.print(f"written: {page.PAGE}")
    return int(len(outcomes) < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
