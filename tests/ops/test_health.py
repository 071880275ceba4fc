"""How agents are: a table of situations, orders of any two conditions, and random agents of which some is not known."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec import structs

from aviso_workers.ops import health
from aviso_workers.ops.health import BY_NAME, CALM, CONDITIONS, RULES, AgentFacts, Unknown, judge
from tests.ops.health_facts import (
    LONG_AGO,
    ago,
    consumer,
    facts,
    failure,
    record,
    retried,
    stream,
    worker,
)

BUSY: dict[str, Any] = {"events": consumer(num_pending=3, num_ack_pending=2, deliveries=20, ack_floor=9)}
EARLIER = facts(events=consumer(num_pending=5, num_ack_pending=2, deliveries=10, ack_floor=5))
QUIET = consumer(num_pending=840, num_ack_pending=8, num_waiting=0, quiet=900)
NO_STREAM: dict[str, Any] = {"stream_info": None, "events": None, "retries": None}
GONE: dict[str, Any] = {"events": None, "retries": None}
PURGED = Unknown("its records were purged")
DENIED = Unknown("the server denies our user $JS.API.STREAM.INFO.KV_field__state")
BLOCKED = retried(attempt=6, attempts=None, blocked=True, key="rd", behind=30)
WAITS = consumer(num_ack_pending=1)
PAUSED: dict[str, Any] = {"events": consumer(num_pending=9, paused=True), "retries": consumer("RETRIES", paused=True)}

ROWS: dict[str, tuple[AgentFacts, str, bool, str]] = {
    # facts, state, whether it needs somebody, a part of what is said
    "failed once, and its retry succeeded": (facts(failure=failure(handled=5)), "idle", False, ""),
    "became a dead letter just now": (facts(failure=failure()), "failing", False, "3 times"),
    "fails for a minute": (
        facts(events=WAITS, failure=failure(retrying=(retried(),))),
        "failing",
        False,
        "1 is tried again",
    ),
    "fails for ten minutes": (
        facts(events=WAITS, failure=failure(since=600, retrying=(retried(),))),
        "failing",
        True,
        "no such field",
    ),
    "failed, and that is over": (facts(failure=failure(until=5)), "idle", False, ""),
    "its call is stuck": (
        facts(EARLIER, **BUSY, workers=(worker(hindered=(100, "its call is stuck")),)),
        "hindered",
        True,
        "w1: its call is stuck",
    ),
    "of two workers one call is stuck": (
        facts(EARLIER, **BUSY, workers=(worker(), worker("w2", hindered=(100, "its call is stuck")))),
        "hindered",
        True,
        "1 of 2 workers",
    ),
    "its right to ack was withdrawn": (
        facts(EARLIER, **BUSY, workers=(worker(hindered=(50, "the server denies $JS.ACK.>")),)),
        "hindered",
        True,
        "$JS.ACK",
    ),
    "the same, of a worker that does not say so": (
        facts(
            facts(events=consumer(num_pending=9, num_ack_pending=5, num_redelivered=5, deliveries=50, quiet=300)),
            events=consumer(num_pending=9, num_ack_pending=5, num_redelivered=5, deliveries=60, quiet=300),
        ),
        "stuck",
        True,
        "no acknowledgement comes",
    ),
    "its lag grows, and nothing is wrong": (
        facts(
            facts(events=consumer(num_pending=800, deliveries=15)),
            events=consumer(num_pending=900),
            oldest_pending=ago(10),
        ),
        "behind",
        False,
        "more than before",
    ),
    "its lag grows for half an hour": (
        facts(
            facts(events=consumer(num_pending=800, deliveries=15)),
            events=consumer(num_pending=900),
            oldest_pending=ago(1800),
        ),
        "behind",
        True,
        "1 workers run",
    ),
    "its stream is gone": (facts(**NO_STREAM, workers=()), "stream gone", True, "up to sequence 9"),
    "its subjects are those of another stream": (
        facts(**NO_STREAM, taken_by="OTHER"),
        "stream gone",
        True,
        "its subjects are those of OTHER now",
    ),
    "its stream is there, and another one has its subjects": (
        facts(taken_by="OTHER"),
        "stream gone",
        True,
        "its stream MARS lacks its subjects; its subjects are those of OTHER now",
    ),
    "its stream was made again, and no worker runs": (
        facts(**GONE, stream_info=stream(created=800), workers=()),
        "consumer gone",
        True,
        "made again",
    ),
    "its consumer was deleted just now": (facts(**GONE), "consumer gone", False, "after sequence 9"),
    "its consumer was deleted": (facts(**GONE, record=record(time=900)), "consumer gone", True, "after sequence 9"),
    "its records were purged, and it works": (
        facts(EARLIER, **BUSY, record=PURGED, failure=PURGED),
        "unknown",
        True,
        "it seems working",
    ),
    "its records were purged, and a worker wrote them again": (facts(EARLIER, **BUSY), "working", False, ""),
    "its records were purged, and its call is stuck": (
        facts(EARLIER, **BUSY, record=PURGED, failure=PURGED, workers=(worker(hindered=(100, "its call is stuck")),)),
        "hindered",
        True,
        "not known, since its records were purged",
    ),
    "no worker, and nothing waits": (
        facts(events=consumer(num_waiting=0), retries=None, workers=()),
        "at rest",
        False,
        "no worker runs",
    ),
    "no worker, and what waits has come just now": (
        facts(
            events=consumer(num_pending=9, num_waiting=0, quiet=900), retries=None, workers=(), oldest_pending=ago(2)
        ),
        "no worker",
        False,
        "9 wait",
    ),
    "no worker, and something waits": (facts(events=QUIET, retries=None, workers=()), "no worker", True, "848 wait"),
    "a worker lives and asks for nothing": (facts(events=QUIET, retries=None), "no worker", True, "w1 lives and asks"),
    "a consumer of two seconds, and no worker yet": (
        facts(events=consumer(num_pending=9, num_waiting=0, quiet=2), retries=None, workers=()),
        "no worker",
        False,
        "no worker runs",
    ),
    "no worker asks for more while one handles for long": (
        facts(events=consumer(num_pending=9, num_ack_pending=1, num_waiting=0, quiet=100), retries=None),
        "working",
        False,
        "",
    ),
    "no server answers for its stream": (
        facts(stream_info=Unknown("no server answers for MARS"), events=Unknown("no server answers for MARS")),
        "unknown",
        True,
        "no server answers for MARS",
    ),
    "what it needs is away for a minute": (
        facts(EARLIER, **BUSY, workers=(worker(away="ConnectError: x", away_seconds=60, shut_seconds=60),)),
        "away",
        False,
        "5 wait, and no attempt is used",
    ),
    "what it needs is away for longer than its policy": (
        facts(
            events=consumer(num_pending=840, num_ack_pending=8),
            record=record(unfinished=900),
            workers=(worker(away="ConnectError: x", away_seconds=600, oldest=10),),
        ),
        "away",
        True,
        "ConnectError",
    ),
    "what it needs is away in one of two workers": (
        facts(EARLIER, **BUSY, workers=(worker(), worker("w2", away="ConnectError: x", away_seconds=60))),
        "away",
        False,
        "in 1 of 2 workers",
    ),
    "most of its calls fail": (facts(EARLIER, **BUSY, workers=(worker(shut_seconds=100),)), "pacing", False, "fail"),
    "blocked": (
        facts(events=WAITS, failure=failure(since=700, retrying=(BLOCKED,))),
        "blocked",
        True,
        "at MARS@12 (key rd), 30 wait behind it",
    ),
    "blocked and paused": (
        facts(
            events=consumer(num_ack_pending=31, paused=True),
            retries=consumer("RETRIES", paused=True),
            failure=failure(since=700, retrying=(BLOCKED,)),
        ),
        "blocked",
        True,
        "paused: until",
    ),
    "blocked for longer than its policy": (
        facts(events=WAITS, record=record(unfinished=LONG_AGO), failure=failure(since=700, retrying=(BLOCKED,))),
        "blocked",
        True,
        "no such field",
    ),
    "paused, and what it needs is away behind it": (
        facts(**PAUSED, workers=(worker(away="ConnectError: x", away_seconds=900),)),
        "paused",
        False,
        "ConnectError",
    ),
    "only its notifications are paused": (
        facts(events=consumer(num_pending=9, paused=True)),
        "half paused",
        True,
        "only its notifications",
    ),
    "only its retries are paused": (
        facts(retries=consumer("RETRIES", paused=True)),
        "half paused",
        True,
        "only its retries",
    ),
    "two programs in a deploy": (facts(functions=("a.f", "b.f"), deployed=ago(100)), "two programs", False, "a.f, b.f"),
    "two programs for long": (facts(functions=("a.f", "b.f"), deployed=ago(900)), "two programs", True, "a.f, b.f"),
    "declared, and its worker has not begun": (
        facts(**GONE, record=None, workers=(worker(started=900),)),
        "not begun",
        True,
        "has not begun to read",
    ),
    "declared, and its worker starts": (
        facts(**GONE, record=None, workers=(worker(started=5),)),
        "not begun",
        False,
        "has not begun to read",
    ),
    "declared, and no worker runs": (facts(**NO_STREAM, record=None, workers=()), "never started", False, ""),
    "removed by an operator": (facts(**GONE, record=record(removed=True)), "removed", False, "by an operator"),
    "records denied, idle": (facts(record=DENIED, failure=DENIED), "unknown", True, "denies"),
    "records denied, no worker": (
        facts(
            events=consumer(num_pending=9, num_waiting=0, quiet=100),
            retries=None,
            record=DENIED,
            failure=DENIED,
            workers=(),
        ),
        "no worker",
        True,
        "not known, since the server denies",
    ),
    "workers denied, works": (facts(EARLIER, **BUSY, workers=DENIED), "unknown", True, "it seems working"),
    "a worker of an older version does not say how it is": (
        facts(EARLIER, **BUSY, workers=(worker(), structs.replace(worker("old"), hindrances=None))),
        "unknown",
        True,
        "it seems working",
    ),
    "hangs without a timeout": (
        facts(events=WAITS, record=record(unfinished=LONG_AGO), workers=(worker(oldest=12),)),
        "stuck",
        True,
        "the oldest after sequence 9",
    ),
    "waits for a limit for longer than its policy": (
        facts(events=WAITS, record=record(unfinished=LONG_AGO), workers=(worker(oldest=12, waits_for="a limit"),)),
        "working",
        False,
        "",
    ),
    "another one waits for a limit, and the oldest hangs": (
        facts(
            events=consumer(num_ack_pending=2),
            record=record(unfinished=LONG_AGO),
            workers=(worker(oldest=12), worker("w2", oldest=14, waits_for="a limit")),
        ),
        "stuck",
        True,
        "not finished",
    ),
    "one is retried, and an older one hangs": (
        facts(
            events=consumer(num_ack_pending=2),
            record=record(unfinished=LONG_AGO),
            failure=failure(retrying=(retried(14),)),
            workers=(worker(oldest=12),),
        ),
        "stuck",
        True,
        "not finished",
    ),
    "one hangs since lately, and an older one is retried": (
        facts(
            events=consumer(num_ack_pending=2),
            record=record(unfinished=LONG_AGO),
            failure=failure(retrying=(retried(12),)),
            workers=(worker(oldest=14),),
        ),
        "failing",
        False,
        "1 is tried again",
    ),
    "what a worker said last that it holds is finished": (
        facts(
            events=consumer(num_ack_pending=1),
            record=record(unfinished=LONG_AGO),
            failure=failure(retrying=(retried(12),)),
            workers=(worker(oldest=8),),
        ),
        "failing",
        False,
        "1 is tried again",
    ),
    "catches up": (
        facts(facts(events=consumer(num_pending=990, deliveries=9)), events=consumer(num_pending=900)),
        "catching up",
        False,
        "",
    ),
    "was quick": (facts(facts(events=consumer(deliveries=9))), "working", False, ""),
    "idle": (facts(), "idle", False, ""),
}


@pytest.mark.parametrize("row", ROWS)
def test_an_agent_is_said_to_be_what_it_is(row: str) -> None:
    given, state, needs, part = ROWS[row]
    found = judge(given)
    assert (found.state, found.needs) == (state, needs), found.text
    assert part in found.text
    assert bool(found.cure) == found.is_trouble


@pytest.mark.parametrize(("error", "also"), [("ConnectError", 0), ("ValueError", 1)])
def test_what_failed_before_it_was_known_to_be_away_is_said_once(error: str, also: int) -> None:
    away = worker(away="ConnectError: x", away_seconds=9)
    found = judge(facts(EARLIER, **BUSY, failure=failure(error=error), workers=(away,)))
    assert (found.state, len(found.also)) == ("away", also), found.text


@pytest.mark.parametrize("left_out", CONDITIONS, ids=lambda each: each.name)
def test_each_condition_is_told_by_a_row(left_out: health.Condition, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "RULES", {name: holds for name, holds in RULES.items() if name != left_out.name})

    assert any(judge(given).state != state for given, state, _, _ in ROWS.values())


TRUE: dict[str, dict[str, Any]] = {
    "stream gone": {"stream_info": None, "record": record()},
    "consumer gone": {"events": None, "record": record()},
    "not begun": {"events": None, "record": None},
    "hindered": {"workers": (worker(hindered=(100, "its call is stuck")),)},
    "half paused": {"retries": consumer("RETRIES", paused=True)},
    "no worker": {"events": QUIET, "retries": None},
    "stuck": {"events": WAITS, "record": record(unfinished=LONG_AGO)},
    "blocked": {"events": WAITS, "failure": failure(retrying=(BLOCKED,))},
    "two programs": {"functions": ("a.f", "b.f")},
    "away": {"events": WAITS, "workers": (worker(away="ConnectError: x", away_seconds=60),)},
    "failing": {"failure": failure()},
    "pacing": {"workers": (worker(shut_seconds=100),)},
    "behind": {"events": consumer(num_pending=900), "before": EARLIER},
}


@pytest.mark.parametrize("first", range(len(CONDITIONS)))
def test_of_two_conditions_the_first_one_is_the_state(first: int) -> None:
    """Wherever both can hold at once."""
    for second in range(first + 1, len(CONDITIONS)):
        names = CONDITIONS[first].name, CONDITIONS[second].name
        for given in (TRUE[names[0]] | TRUE[names[1]], TRUE[names[1]] | TRUE[names[0]]):
            both = _holding(facts(**{name: each for name, each in given.items() if name != "before"}))
            if not {*names} <= both.keys():
                continue
            with_before = both[names[0]]
            found = judge(with_before)
            assert found.state in [each.name for each in CONDITIONS[: first + 1]], (names, found.text)
            assert any(text.startswith(f"{names[1]}: ") for text in found.also), (names, found.text)


def _holding(of: AgentFacts) -> dict[str, AgentFacts]:
    return {name: of for name, holds in RULES.items() if holds(of) is not None}


def test_nothing_that_needs_movement_is_said_at_the_first_look() -> None:
    found = judge(structs.replace(facts(events=QUIET, workers=()), before=None))

    assert (found.state, found.needs) == ("unknown", True)
    assert "this is the first look" in found.text


def test_a_cure_quotes_what_others_have_named() -> None:
    foreign = structs.replace(facts(events=WAITS, failure=failure(retrying=(BLOCKED,))), agent="x;rm -rf ~")
    foreign = structs.replace(foreign, before=foreign)

    assert "agents retry field/'x;rm -rf ~'" in judge(foreign).cure


VALUES: dict[str, list[Any]] = {
    "stream_info": [stream(), stream(), stream(), None, stream(created=50)],
    "events": [
        None,
        consumer(),
        QUIET,
        WAITS,
        consumer(num_pending=500, deliveries=30),
        consumer(num_ack_pending=4, num_redelivered=3, quiet=200),
        consumer(num_pending=9, paused=True),
        consumer(num_waiting=0),
    ],
    "retries": [None, consumer("RETRIES", deliveries=0), consumer("RETRIES", paused=True, deliveries=0)],
    "record": [None, record(), record(unfinished=LONG_AGO), record(removed=True), record(time=900)],
    "failure": [
        None,
        failure(),
        failure(until=100),
        failure(since=900, retrying=(retried(),)),
        failure(since=900, retrying=(BLOCKED,)),
        failure(handled=5),
    ],
    "workers": [
        (),
        (worker(),),
        (worker(oldest=12),),
        (worker(oldest=12, waits_for="a limit"),),
        (worker(hindered=(100, "its call is stuck")), worker("w2")),
        (worker(away="ConnectError: x", away_seconds=900), worker("w2")),
        (worker(shut_seconds=10),),
    ],
    "functions": [(), (), ("a.f", "b.f")],
}
ORDER = [each.name for each in CONDITIONS]


@pytest.mark.slow
def test_no_calm_word_hides_a_trouble_and_none_is_invented_where_facts_are_not_known() -> None:
    rng, seen = random.Random(20), set[str]()
    for _ in range(4_000):
        given = {name: rng.choice(values) for name, values in VALUES.items()}
        earlier = rng.choice([each for each in VALUES["events"] if each] + [given["events"] or consumer()] * 4)
        before = facts(**given | {"events": earlier, "functions": ()})
        whole = facts(before, **given)
        share = rng.choice((0.05, 0.2, 0.5))
        blind = {name: Unknown("x") for name in ("stream_info", "events", "retries", "record", "failure", "workers")}
        blinded = structs.replace(whole, **{name: each for name, each in blind.items() if rng.random() < share})
        truth, said = judge(whole), judge(blinded)
        seen.add(truth.state)
        if said.state in ("unknown", truth.state):
            continue
        assert said.state not in CALM, (truth.text, said.text)
        assert truth.state in BY_NAME, (truth.text, said.text)
        assert ORDER.index(said.state) > ORDER.index(truth.state), (truth.text, said.text)
    assert {*ORDER, *CALM} - seen <= {"unknown"}, "each state came"


def test_what_a_pause_that_is_not_known_may_explain_is_told() -> None:
    found = judge(facts(events=Unknown("our user may not ask"), failure=failure()))

    assert found.state == "unknown"
    assert [each.partition(":")[0] for each in found.also] == ["failing"]


def test_of_more_than_are_recorded_it_is_said_that_there_may_be_more() -> None:
    many = tuple(retried(sequence, blocked=True, attempts=None) for sequence in range(199, 99, -1))
    found = judge(facts(facts(**BUSY), **BUSY, failure=failure(retrying=many)))

    assert (found.state, found.why.partition(" (")[0].partition(":")[0]) == (
        "blocked",
        "at MARS@100 and at least 99 more",
    )


def test_times_are_by_the_servers_clock() -> None:
    found = judge(facts(events=WAITS, record=record(unfinished=900)))

    assert (found.state, found.since) == ("stuck", ago(600))
