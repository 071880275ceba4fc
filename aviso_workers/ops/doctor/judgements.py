"""Checks and their results: a check is data and a pure function, which is applied to the facts.

The checks are under `checks`. A function yields what it finds wrong, and nothing where all is well. What it could not
examine it yields as SKIP, so that it is never taken for a PASS; what is missing of the facts is added here.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from msgspec import Struct, structs

from aviso_workers.aviso.literals import quoted
from aviso_workers.config.settings import Accepted
from aviso_workers.jetstream.info import ConsumerInfo, StreamInfo
from aviso_workers.ops.doctor.facts import Facts, Need

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


def about(one: StreamInfo | ConsumerInfo, found: str, *, state: State | None = None, cure: str = "") -> Finding:
    """Return a finding about a stream or a consumer."""
    if isinstance(one, StreamInfo):
        return Finding(stream=one.name, found=found, state=state, cure=cure)
    return Finding(stream=one.stream, consumer=one.name, found=found, state=state, cure=cure)


def quoted_in_cure(name: str) -> str:
    """Return a name for a command in a cure that is not one of the finding's, as `{stream}` is."""
    return quoted(name).replace("{", "{{").replace("}", "}}")


Judge = Callable[[Facts], Iterator[Finding]]
"""The function of a check. Its docstring is Markdown: what docs/operations/checks.md says beside `why` and `cure`."""


class Check(Struct, frozen=True, kw_only=True):
    code: str
    title: str
    """The statement that is true where the check passes."""
    severity: State
    """The state of a finding that has none of its own."""
    why: str
    cure: str
    """The cure, with `{stream}`, `{consumer}`, `{place}`, `{app}` and `{agent}` for those of the finding."""
    cure_of_others: str
    """The cure for a stream that is not an event type's; empty where that is the same."""
    judge: Judge
    needs: tuple[Need, ...]
    production: bool = False
    """Judged only in production: elsewhere it is meant to be otherwise."""

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


def check(
    into: list[Check],
    code: str,
    title: str,
    *,
    why: str,
    cure: str,
    cure_of_others: str = "",
    severity: State = State.WARN,
    needs: tuple[Need, ...] = ("streams",),
    production: bool = False,
) -> Callable[[Judge], Judge]:
    """Return a decorator that makes a check of a function and adds it to a list."""

    def add(judge: Judge) -> Judge:
        into.append(
            Check(
                code=code,
                title=title,
                severity=severity,
                why=why,
                cure=cure,
                cure_of_others=cure_of_others,
                judge=judge,
                needs=needs,
                production=production,
            )
        )
        return judge

    return add


def judge(checks: Iterable[Check], facts: Facts) -> list[Result]:
    """Apply every check to the facts, and return the results, the worst first."""
    results = [_result(one, facts) for one in checks]
    return sorted(results, key=lambda result: (-result.state, result.check.code))


def _result(check: Check, facts: Facts) -> Result:
    if check.production and not facts.scope.production:
        return Result(check=check, findings=(Finding(found=NOT_IN_PRODUCTION, state=State.SKIP),))
    missing = [Finding(found=facts.unknown[need], state=State.SKIP) for need in check.needs if need in facts.unknown]
    findings = [_whole(check, finding, facts) for finding in (*check.judge(facts), *missing)]
    findings.sort(key=lambda each: (-(each.state or State.PASS), each.where))
    return Result(check=check, findings=tuple(findings))


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


def worst(results: Sequence[Result]) -> State:
    """Return the worst state of all results."""
    return max((result.state for result in results), default=State.PASS)
