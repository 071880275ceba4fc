"""Writes docs/operations/incidents.md from what was seen of each situation."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from _incidents import prometheus
from _incidents.book import Outcome
from _incidents.situations import SITUATIONS

PAGE = Path(__file__).parents[2] / "docs/operations/incidents.md"
HERE = socket.gethostname()
PROCESS = re.compile(r"\b[\w.-]+/\d+(?=: )")
SINCE = re.compile(r" \(since [^)]*\)")
NUMBER = re.compile(r"(?<![\w.])\d{1,4}(?!\w)")
"""A number that differs from run to run; JetStream's codes have five digits."""
HEAD = """# Incidents

What an operator sees of each situation, and its cure. `scripts/incidents` made each of them on three servers with \
three replicas, looked until all surfaces said the same, carried out the cure, and waited until everything was quiet \
again and every stored notification was handled. `scripts/incidents --write` writes this page from what was seen.

- **`agents ls`** is the column `state` of the agent. N stands for a number and TIME for a time.
- **`doctor`** has the checks that were FAIL or WARN, with `--app` and `--monitor` for all servers. \
[Checks](checks.md) says what each of them means.
- **`/readyz`** is the answer of the worker, without its times. `/livez` was `200 ok` unless it is named here too.
- **Alerts** are those that fired, each with the time for which its rule must hold first. They were tried with shorter \
times. The alerts of the doctor need its timer.

| situation | `agents ls` | `doctor` | `/readyz` | alerts | cure |
|---|---|---|---|---|---|
"""


def rows() -> dict[str, str]:
    """Return the rows that the page has, by the titles of their situations."""
    return {line.split(" | ")[0].removeprefix("| "): line for line in PAGE.read_text().splitlines() if line[:2] == "| "}


def text(outcomes: Sequence[Outcome], known: Mapping[str, str]) -> str:
    """Return the page: of situations that were made now what was seen, of the others the rows that are known."""
    waits = prometheus.waits()
    seen = {outcome.situation.title: f"| {' | '.join(_cells(outcome, waits))} |" for outcome in outcomes}
    found = {**known, **seen}
    return HEAD + "".join(f"{found[each.title]}\n" for each in SITUATIONS if each.title in found)


def _cells(outcome: Outcome, waits: dict[str, str]) -> Iterable[str]:
    situation, look = outcome.situation, outcome.look
    yield situation.title
    yield f"`{_general(situation.name, look.state)}`"
    passing = situation.expected.passing
    fails, warns = look.fails - passing, look.warns - passing
    results = [f"{level} {_checks(codes)}" for level, codes in (("FAIL", fails), ("WARN", warns)) if codes]
    yield "; ".join(results) or "-"
    readyz = f"`{_answer(situation.name, look.readyz)}`"
    livez = "" if look.livez in ("200 ok", look.readyz) else f"; `/livez`: `{_answer(situation.name, look.livez)}`"
    yield readyz + livez
    yield ", ".join(f"{alert} ({waits[alert] or 'at once'})" for alert in sorted(look.alerts)) or "-"
    yield situation.cure


def _checks(codes: Iterable[str]) -> str:
    return ", ".join(f"[{code}](checks.md#{code.lower()})" for code in sorted(codes))


def _answer(name: str, answer: str) -> str:
    """Return the answer with its status, which is no number that differs, and without times."""
    status, _, said = answer.partition(" ")
    return f"{status} {_general(name, SINCE.sub('', said))}"


def _general(name: str, said: str) -> str:
    """Return the text without what is of this run or of this situation only."""
    said = PROCESS.sub("HOST/N", said).replace(f"{HERE}/", "HOST/").replace(f"on {HERE}", "on HOST")
    return NUMBER.sub("N", said.replace(name.upper(), "STREAM").replace(name, "APP")).replace("|", "\\|")
