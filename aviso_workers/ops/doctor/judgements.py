"""Checks and their results: a check is data and a pure function, which is applied to the facts.

The checks are under `checks`. A function yields what it finds wrong, and nothing where all is well. What it could not
examine it yields as SKIP, so that it is never taken for a PASS; what is missing of the facts is added here.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from msgspec import Struct, structs

from aviso_workers.aviso.literals import quoted
from aviso_workers.config.settings import Accepted
from aviso_workers.jetstream.info import ConsumerInfo, StreamInfo
from aviso_workers.ops.doctor.facts import Facts, Need
from aviso_workers.ops.doctor.monitoring_port import Monitored

PAGE = "docs/operations/checks.md"
COMMANDS = ("aviso-workers ", "nats ")
NOT_IN_PRODUCTION = "checked only with --production"


class State(enum.IntEnum):
    """The state of a check or a finding, the worst last."""

    PASS = 0
    SKIP = 1
    ACCEPTED = 2
    """Found, and accepted in the configuration: no failure."""
    WARN = 3
    FAIL = 4


class Finding(Struct, frozen=True, kw_only=True):
    """A finding of a check: what is wrong with a stream, a consumer, a server or a setting."""

    found: str
    """The fact that is wrong, with its numbers."""
    stream: str = ""
    consumer: str = ""
    place: str = ""
    """The server, the event type or the key of the configuration, where the finding is not about a stream."""
    state: State | None = None
    """Default: as bad as the check says."""
    cure: str = ""
    """Default: the check's. It has the names as `Check.cure` has them."""
    accepted: str = ""
    """The reason and the end of the acceptance, where the finding is accepted."""

    @property
    def where(self) -> str:
        return " > ".join(filter(None, (self.place or self.stream, self.consumer)))


Found = Finding | str
"""What a check finds: a text is a finding about what the check looks at."""


def about(
    one: StreamInfo | ConsumerInfo | Monitored | None, found: Found, *, state: State | None = None, cure: str = ""
) -> Finding:
    """Return a finding about a stream, a consumer or a server; one that is whole stays as it is."""
    if isinstance(found, Finding):
        return found
    if isinstance(one, ConsumerInfo):
        return Finding(stream=one.stream, consumer=one.name, found=found, state=state, cure=cure)
    if isinstance(one, StreamInfo):
        return Finding(stream=one.name, found=found, state=state, cure=cure)
    return Finding(place=one.name if one else "", found=found, state=state, cure=cure)


def quoted_in_cure(name: str) -> str:
    """Return a name for a command in a cure that is not one of the finding's, as `{stream}` is."""
    return quoted(name).replace("{", "{{").replace("}", "}}")


Judge = Callable[..., Iterator[Found]]
"""The function of a check, of one after the other that it looks at, and of the facts. Its docstring is Markdown: what
docs/operations/checks.md says beside `why` and `cure`.
"""
Rows = Callable[[Facts], Iterable[StreamInfo | ConsumerInfo | Monitored]]
"""What a check looks at, one after the other."""


def each_stream(facts: Facts) -> Iterable[StreamInfo]:
    return facts.streams.values()


def each_consumer(facts: Facts) -> Iterable[ConsumerInfo]:
    return facts.consumers.values()


def each_server(facts: Facts) -> Iterable[Monitored]:
    return facts.monitored


class Declaration(Struct, frozen=True):
    """A check before its words and its function: a decorator makes the check of these, and adds it to `DECLARED`."""

    code: str
    severity: State = State.WARN
    """The state of a finding that has none of its own."""
    each: Rows | None = None
    """What the function is called with, one after the other, before the facts; None: once, with the facts only."""
    needs: tuple[Need, ...] = ("streams",)
    production: bool = False
    """Judged only in production: elsewhere it is meant to be otherwise."""

    def says(self, title: str, *, why: str, cure: str, cure_of_others: str = "") -> Callable[[Judge], Judge]:
        """Return a decorator that makes a check of a function, with these words."""

        def add(judge: Judge) -> Judge:
            words: dict[str, Any] = {"title": title, "why": why, "cure": cure, "cure_of_others": cure_of_others}
            DECLARED.append(Check(**structs.asdict(self), **words, judge=judge))
            return judge

        return add


class Check(Declaration, frozen=True, kw_only=True):
    title: str
    """The statement that is true where the check passes."""
    why: str
    cure: str
    """The cure, with `{stream}`, `{consumer}`, `{place}`, `{app}` and `{agent}` for those of the finding."""
    cure_of_others: str
    """The cure for a stream that is not an event type's; empty where that is the same."""
    judge: Judge

    @property
    def anchor(self) -> str:
        return f"{PAGE}#{self.code.lower()}"


class Result(Struct, frozen=True, kw_only=True):
    """The result of a check: its findings in the facts."""

    check: Check
    findings: tuple[Finding, ...]
    """The worst first, each with its state and its cure."""

    @property
    def state(self) -> State:
        return max((finding.state or State.PASS for finding in self.findings), default=State.PASS)


DECLARED: list[Check] = []
"""The checks of all modules that were imported."""


def judge(checks: Iterable[Check], facts: Facts) -> list[Result]:
    """Apply every check to the facts, and return the results, the worst first."""
    results = [_result(one, facts) for one in checks]
    return sorted(results, key=lambda result: (-result.state, result.check.code))


def _result(check: Check, facts: Facts) -> Result:
    if check.production and not facts.scope.production:
        return Result(check=check, findings=(Finding(found=NOT_IN_PRODUCTION, state=State.SKIP),))
    missing = [Finding(found=facts.unknown[need], state=State.SKIP) for need in check.needs if need in facts.unknown]
    findings = [_whole(check, finding, facts) for finding in (*_found(check, facts), *missing)]
    findings.sort(key=lambda each: (-(each.state or State.PASS), each.where))
    return Result(check=check, findings=tuple(findings))


def _found(check: Check, facts: Facts) -> Iterator[Finding]:
    if check.each is None:
        yield from (about(None, found) for found in check.judge(facts))
    else:
        yield from (about(one, found) for one in check.each(facts) for found in check.judge(one, facts))


def _whole(check: Check, finding: Finding, facts: Facts) -> Finding:
    state = check.severity if finding.state is None else finding.state
    usual = check.cure if finding.stream in facts.event_streams else check.cure_of_others or check.cure
    found, accepted = finding.found, ""
    if state >= State.WARN and (acceptance := _acceptance(check, finding, facts)):
        if acceptance.until > facts.now:
            state, accepted = State.ACCEPTED, f"until {acceptance.until:%Y-%m-%d %H:%M %Z}: {acceptance.reason}"
        else:
            found += f" (was accepted until {acceptance.until:%Y-%m-%d %H:%M %Z}: {acceptance.reason})"
    app, _, agent = finding.consumer.partition("__")
    names = {"stream": finding.stream, "consumer": finding.consumer, "place": finding.place, "app": app, "agent": agent}
    return structs.replace(
        finding,
        found=found,
        state=state,
        accepted=accepted,
        cure="" if state <= State.SKIP else _filled_in(finding.cure or usual, names),
    )


def _acceptance(check: Check, finding: Finding, facts: Facts) -> Accepted | None:
    """Return the acceptance of a finding that ends last; None where there is none."""
    known = [
        each
        for each in facts.config.doctor.accepted
        if each.code == check.code and fnmatchcase(finding.where, each.where)
    ]
    return max(known, key=lambda each: each.until, default=None)


def _filled_in(cure: str, names: Mapping[str, str]) -> str:
    """Return a cure with the names of its finding, which are quoted within commands."""
    words = {key: quoted(name) for key, name in names.items()}
    parts = cure.split("`")
    return "`".join(part.format_map(words if part.startswith(COMMANDS) else names) for part in parts)
