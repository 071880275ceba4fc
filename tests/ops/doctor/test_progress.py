"""Consumers between two samples: work that comes, is done, fails or stands still."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec import structs

from aviso_workers import App, Notification, Notify
from aviso_workers.aviso.literals import time_text
from aviso_workers.backends import Administration
from aviso_workers.config import Config
from aviso_workers.events import AgentDisturbed
from aviso_workers.jetstream.info import ConsumerConfig, StreamConfig
from aviso_workers.ops.agent_inventory import RunAlone
from aviso_workers.ops.doctor import State
from aviso_workers.ops.doctor.facts import Facts
from aviso_workers.ops.doctor.monitoring_port import Advisory
from aviso_workers.sessions.worker_recorder import LOOK_SECONDS
from aviso_workers.state import delayed_messages
from aviso_workers.state.consumer_records import ConsumerRecord
from aviso_workers.state.failure_records import Retrying
from aviso_workers.state.timer_requests import Pause
from aviso_workers.state.worker_records import AppWorkers
from tests.failures import last_failure
from tests.ops import health_facts
from tests.ops.doctor.conftest import (
    MONITORED,
    SECOND,
    Seen,
    add_consumer,
    add_stream,
    between_samples,
    changed,
    examined,
    gathered,
    judged,
    publish,
    pull,
    served,
    write,
)
from tests.waits import PATIENCE_SECONDS

SHARED = "WORK"


async def set_up(server: Administration) -> None:
    await add_stream(server, SHARED)
    await add_stream(server, "FLOOD")
    await add_consumer(server, "FLOOD", "slow")
    await publish(server, SHARED, 40)
    await add_consumer(server, SHARED, "alone")
    await add_consumer(server, SHARED, "paused", pause_until="2200-01-01T00:00:00Z")
    await add_consumer(server, SHARED, "stalled", max_ack_pending=5)
    await pull(server, SHARED, "stalled", 5)
    await add_consumer(server, SHARED, "busy", max_ack_pending=50)
    await pull(server, SHARED, "busy", 5)
    await add_consumer(server, SHARED, "failing")
    for reply in await pull(server, SHARED, "failing", 30):
        await server.request(reply, b"-NAK", timeout_seconds=PATIENCE_SECONDS)  # else the next pull may overtake it
    await pull(server, SHARED, "failing", 30)
    await add_consumer(server, SHARED, "measured", ack_wait=SECOND // 200, sample_freq="100")
    await add_consumer(server, SHARED, "quick", ack_wait=600 * SECOND, sample_freq="100")


async def set_up_queues(server: Administration) -> None:
    """Of one, a message was given up after its only delivery; the other waits for its consumer."""
    for name in ("GIVEN_UP", "WAITING"):
        await add_stream(server, name, retention="workqueue")
        await add_consumer(server, name, "only", max_deliver=1, ack_wait=SECOND // 10)
        await publish(server, name, 2)
    async with server.listen("$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.GIVEN_UP.>") as given_up:
        await pull(server, "GIVEN_UP", "only", 1)
        with anyio.fail_after(PATIENCE_SECONDS):
            await given_up.receive()


async def work(server: Administration, slow: str, quick: str) -> None:
    """Between the samples."""
    await publish(server, "FLOOD", 50)
    for reply in (slow, quick):
        server.send(reply, b"+ACK")


async def gather_working(loaded: Config, monitor: str) -> Facts:
    async with App("working", config=loaded) as app:
        server = app.session.admin.administration()
        await set_up(server)
        await set_up_queues(server)
        await add_stream(server, "QUIET")
        (slow,), (quick,) = await pull(server, SHARED, "measured", 1), await pull(server, SHARED, "quick", 1)
        async with server.listen("answers.*"), between_samples(server, lambda: work(server, slow, quick)):
            ask(server, "FLOOD", "slow", 1)
            for name, requests in {"crowd": 10, "few": 1}.items():
                await add_consumer(server, "QUIET", name, max_waiting=10)
                ask(server, "QUIET", name, requests)
            return await gathered(loaded, monitors=(monitor,), seconds=1.5)


def ask(server: Administration, stream: str, consumer: str, requests: int) -> None:
    """Requests that wait for messages which do not come."""
    for i in range(requests):
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        server.send(subject, b'{"batch":1,"expires":30000000000}', reply=f"answers.{i}")


@pytest.fixture(scope="module")
def working(directory: Path) -> Iterator[Seen]:
    with served(directory) as (server, monitor):
        loaded = write(directory / "config.yaml", server.url)
        yield judged(anyio.run(gather_working, loaded, monitor))


@pytest.mark.covers("001-28")
def test_who_falls_behind(working: Seen) -> None:
    found = working.found("JS021")
    assert found.keys() == {"FLOOD > slow"}
    assert found["FLOOD > slow"].startswith("49 pending, ")
    assert working.findings("JS021")["FLOOD > slow"].cure.startswith("Let more clients read from the consumer")


@pytest.mark.covers("001-29")
def test_what_is_delivered_again_and_again(working: Seen) -> None:
    assert working.found("JS022") == {
        f"{SHARED} > failing": "30 of 60 deliveries are unsettled redeliveries",
    }


def test_acknowledgements_that_come_late(working: Seen) -> None:
    found = working.found("JS023")
    assert found.keys() == {f"{SHARED} > measured"}
    assert "with an ack_wait of 0.005 s" in found[f"{SHARED} > measured"]


def test_without_measured_acknowledgements_nothing_is_said_of_them(working: Seen) -> None:
    untold = judged(structs.replace(working.facts, advisories=()))
    assert untold.state("JS023") is State.SKIP
    (skipped,) = untold.results["JS023"].findings
    assert skipped.found.startswith("no consumer with sample_freq acknowledged anything")


def test_work_that_nobody_asks_for(working: Seen) -> None:
    found = working.found("JS030")
    assert found[f"{SHARED} > alone"] == "40 pending, and nobody pulls them"
    assert not {f"{SHARED} > paused", f"{SHARED} > busy"} & found.keys()


def test_requests_up_to_the_limit(working: Seen) -> None:
    assert working.found("JS030")["QUIET > crowd"] == "10 pull requests wait, of at most 10"
    assert working.findings("JS030")["QUIET > crowd"].state is State.WARN
    assert "QUIET > few" not in working.found("JS030")


def test_who_is_held_up_by_what_is_not_acknowledged(working: Seen) -> None:
    assert working.found("JS031") == {f"{SHARED} > stalled": "5 delivered and not acknowledged, of at most 5"}


def test_a_consumer_that_settles_what_it_has_is_not_held_up(working: Seen) -> None:
    """By hand: a later one than the oldest was acknowledged between the samples."""
    stalled = working.facts.consumers[SHARED, "stalled"]
    settling = structs.replace(stalled, last_settled=working.facts.now)
    after = structs.replace(working.facts.after, consumers={(SHARED, "stalled"): settling})
    assert judged(structs.replace(working.facts, after=after)).found("JS031") == {}


def test_a_singleton_at_work_is_not_held_up(working: Seen) -> None:
    """By hand: its limit is one, and its handler takes longer than the doctor looks."""
    stalled = working.facts.consumers[SHARED, "stalled"]
    config = ConsumerConfig({**stalled.config, "max_ack_pending": 1})
    singleton = {(SHARED, "stalled"): structs.replace(stalled, config=config, num_ack_pending=1)}
    before = structs.replace(working.facts.before, consumers=singleton)
    after = structs.replace(working.facts.after, consumers=singleton)
    assert judged(structs.replace(working.facts, before=before, after=after)).found("JS031") == {}


def test_an_agent_that_nobody_runs_any_more_can_be_removed(working: Seen) -> None:
    """By hand: the consumer is an agent's, and was last delivered something in another year."""
    alone = working.facts.consumers[SHARED, "alone"]
    config = ConsumerConfig({**alone.config, "metadata": {"aviso-workers-start": "all"}})
    last = datetime(2020, 1, 1, tzinfo=UTC)
    retired = structs.replace(alone, name="old__index", config=config, last_delivered=last, created=last)
    after = structs.replace(working.facts.after, consumers={(SHARED, "old__index"): retired})
    seen = judged(structs.replace(working.facts, after=after))

    finding = seen.findings("JS058")[f"{SHARED} > old__index"]
    assert finding.found.startswith("no worker: 40 wait, and no worker runs")
    assert "run `aviso-workers agents rm old/index`" in finding.cure
    assert "`aviso-workers agents rm old/index`" in seen.findings("JS035")[f"{SHARED} > old__index"].cure
    assert seen.found("JS021") == {}, "more workers of an app that has none is no cure"


def test_an_agent_that_feeds_itself_needs_no_more_workers(working: Seen) -> None:
    """By hand: its lag grows, and what it publishes comes back to it, here by way of another agent."""
    app = App("field")

    @app.agent("mars")
    async def index(notification: Notification[Any]) -> Notify:
        return Notify("derived", notification.identifier)

    @app.agent("derived")
    async def back(notification: Notification[Any]) -> Notify:
        return Notify("mars", notification.identifier)

    alone = working.facts.consumers[SHARED, "alone"]
    config = ConsumerConfig({**alone.config, "metadata": {"aviso-workers-start": "all"}})
    fed = structs.replace(alone, name="field__index", config=config, num_waiting=1)
    fed = structs.replace(fed, num_pending=140)
    before = {(SHARED, "field__index"): structs.replace(fed, num_pending=1)}
    facts = changed(
        working.facts,
        before=structs.replace(working.facts.before, consumers=before),
        after=structs.replace(working.facts.after, consumers={(SHARED, "field__index"): fed}),
        records={(SHARED, "field__index"): recorded(working, minutes=0)},
        workers={"field": AppWorkers((health_facts.worker(stream=SHARED),))},
        oldest_pending={(SHARED, "field__index"): working.facts.now - timedelta(hours=1)},
    )

    event_types = dict.fromkeys(("mars", "derived"), facts.config.notification_schema["mars"])
    known = structs.replace(facts.config, notification_schema=event_types)

    def cure(*agents: Any) -> str:
        scope = structs.replace(facts.scope, agents=agents, app="field")
        seen = judged(structs.replace(facts, config=known, scope=scope))
        return seen.findings("JS058")[f"{SHARED} > field__index"].cure

    assert cure(index, back).startswith("More workers do not help: the agent reads what it publishes")
    assert cure(index).startswith("Start more workers of field")


def test_a_consumer_for_which_there_is_no_room(working: Seen) -> None:
    """By hand: the stream has as many consumers as it may have."""
    stream = working.facts.streams[SHARED]
    full = structs.replace(stream, config=StreamConfig({**stream.config, "max_consumers": stream.consumers}))
    after = structs.replace(working.facts.after, streams={SHARED: full})
    records = {(SHARED, "field__index"): recorded(working, minutes=2)}
    seen = judged(changed(working.facts, after=after, records=records))

    count = stream.consumers
    assert seen.found("JS034") == {SHARED: f"{count} of {count} consumers: the server refuses the next one"}
    cure = seen.findings("JS058")[f"{SHARED} > field__index"].cure
    assert cure.startswith(f"No worker can create the consumer, because {SHARED} has {count} consumers, of at most")


def test_what_a_work_queue_hides(working: Seen) -> None:
    assert working.found("JS038") == {
        "GIVEN_UP": "2 messages, and only 1 of them are pending or not acknowledged at a consumer"
    }


def test_who_gets_nothing_done(working: Seen) -> None:
    """Real consumers; only the time is moved."""
    assert working.found("JS058") == {}
    later = judged(changed(working.facts, now=working.facts.now + timedelta(minutes=6)))
    found = later.found("JS058")
    assert found[f"{SHARED} > busy"] == ("5 delivered and not finished; the oldest one, after sequence 0, for 6 min")
    assert later.findings("JS058")[f"{SHARED} > busy"].cure.startswith("Find out why the client")
    assert f"{SHARED} > alone" not in found  # nobody works on it, see JS030


def retrying(now: datetime, sequence: int, **stated: Any) -> Retrying:
    return Retrying(**{"again_at": now, "stream": SHARED, "sequence": sequence, "timestamp_ns": 1, **stated})


def recorded(working: Seen, *, minutes: float, longest_seconds: float = 300.0) -> ConsumerRecord:
    created = working.facts.streams[SHARED].created
    assert created is not None
    return ConsumerRecord(
        stream_created=created,
        ack_floor=0,
        filter_subjects=(),
        time=working.facts.now - timedelta(minutes=minutes),
        unfinished_since=working.facts.now - timedelta(minutes=minutes),
        longest_seconds=longest_seconds,
    )


def test_who_got_something_done_meanwhile_is_not_stuck(working: Seen) -> None:
    """By hand: a floor that rose."""
    consumers = working.facts.consumers
    busy = consumers[SHARED, "busy"]
    risen = structs.replace(busy, ack_floor=9)
    after = structs.replace(working.facts.after, consumers={(SHARED, "busy"): risen})
    later = changed(working.facts, after=after, now=working.facts.now + timedelta(minutes=6))
    assert judged(later).found("JS058") == {}


def test_an_agent_whose_consumer_is_gone(working: Seen) -> None:
    """By hand: workers recorded it, and it is not there."""
    record = recorded(working, minutes=2)
    gone = judged(changed(working.facts, records={(SHARED, "field__index"): record}))
    finding = gone.findings("JS058")[f"{SHARED} > field__index"]
    assert finding.found.startswith("consumer gone: a worker makes it again, after sequence 0")
    assert (finding.state, "aviso-workers agents rm field/index" in finding.cure) == (State.FAIL, True)
    lately = recorded(working, minutes=0)
    assert judged(changed(working.facts, records={(SHARED, "field__index"): lately})).found("JS058") == {}


def test_a_consumer_that_does_not_answer_is_not_gone(working: Seen) -> None:
    """By hand: it is among the names, and its leader does not answer."""
    names = {**working.facts.after.names, SHARED: working.facts.after.names[SHARED] | {"field__index"}}
    after = structs.replace(working.facts.after, names=names)
    records = {(SHARED, "field__index"): recorded(working, minutes=2)}
    found = judged(changed(working.facts, after=after, records=records)).findings("JS058")
    finding = found[f"{SHARED} > field__index"]
    assert (finding.state, finding.found.partition(":")[0]) == (State.WARN, "unknown")
    assert f"no server answers for its consumer on {SHARED}" in finding.found


def test_an_agent_that_goes_on_is_a_warning_and_one_that_does_not_a_failure(working: Seen) -> None:
    """By hand: its failures were recorded."""
    now, key = working.facts.now, (SHARED, "field__index")
    index = structs.replace(working.facts.consumers[SHARED, "busy"], name=key[1], num_waiting=1)
    failed = retrying(now, 1, attempt=6, attempts=None, blocked=True, error="KeyError: 'x'", key="od", behind=4)
    facts = changed(
        working.facts,
        before=structs.replace(working.facts.before, consumers={key: index}),
        after=structs.replace(working.facts.after, consumers={key: index}),
        records={key: recorded(working, minutes=10)},
        workers={"field": AppWorkers((health_facts.worker(stream=SHARED, oldest=1),))},
        failures={("field", "agents", "index"): last_failure(now, retrying=(failed,))},
    )
    finding = judged(facts).findings("JS058")[f"{SHARED} > field__index"]
    assert finding.found.startswith(f"blocked: at {SHARED}@1 (key od), 4 wait behind it: KeyError: 'x'")
    assert (finding.state, "agents retry field/index" in finding.cure) == (State.WARN, True)
    hangs = judged(changed(facts, failures={})).findings("JS058")[f"{SHARED} > field__index"]
    assert (hangs.state, hangs.found.partition(":")[0]) == (State.FAIL, "stuck")


DENIED = """
accounts {
  FIELD: {jetstream: enabled, users: [
    {user: operator, password: x}
    {user: reader, password: x, permissions: {publish: {deny: "$JS.API.STREAM.LIST"}}}
  ]}
}
"""


def test_a_right_that_is_denied_is_no_stream_without_a_leader(tmp_path: Path) -> None:
    async def make() -> None:
        async with App("operator", config=operator) as operating:
            await add_stream(operating.session.admin.administration(), "MARS", subjects=["mars.>"])

    with served(tmp_path / "server", MONITORED + DENIED) as (server, _):
        operator = write(tmp_path / "operator.yaml", server.url, user="operator", password="x")
        anyio.run(make)
        seen = examined(write(tmp_path / "reader.yaml", server.url, user="reader", password="x"))
    [(_, finding)] = seen.findings("JS017").items()
    assert finding.state is State.SKIP
    assert "$js.api.stream.list" in finding.found.lower()
    assert {where: "$js.api.stream.list" in found.lower() for where, found in seen.found("JS071").items()} == {
        "streams": True
    }
    assert "JetStream's API" not in seen.found("JS044"), "the server is up"


def test_what_is_not_known_since_a_right_is_denied_is_said_once(tmp_path: Path) -> None:
    subject = "$JS.API.STREAM.INFO.KV_field__live"

    async def make() -> None:
        async with App("operator", config=operator) as operating:
            server = operating.session.admin.administration()
            await add_stream(server, "KV_field__live", subjects=["$KV.field__live.>"])

    with served(tmp_path / "server", MONITORED + DENIED.replace("$JS.API.STREAM.LIST", subject)) as (server, _):
        operator = write(tmp_path / "operator.yaml", server.url, user="operator", password="x")
        anyio.run(make)
        seen = examined(write(tmp_path / "reader.yaml", server.url, user="reader", password="x"))
    gone = changed(seen.facts, records={("GONE", "field__index"): health_facts.record()})
    found = judged(gone).found("JS058")["GONE > field__index"]
    assert found.startswith("stream gone: ")
    assert f"; not known, since the server denies our user {subject}: give it the role operator" in found


USERS = """
accounts {
  FIELD: {jetstream: enabled, users: [
    {user: operator, password: x}
    {user: worker, password: x, permissions: {publish: {deny: "$JS.API.CONSUMER.CREATE.MARS.>"}}}
  ]}
}
"""


@pytest.mark.slow
@pytest.mark.parametrize("retention", ["limits", "workqueue"])
def test_a_worker_that_cannot_make_its_consumer_is_named(tmp_path: Path, retention: str) -> None:
    """It runs, and may not make it, or the stream is a work queue that another consumer takes everything from."""

    async def work_and_gather() -> Seen:
        app, stop, refused = App("field", config=workers), anyio.Event(), anyio.Event()

        @app.agent("mars")
        async def index(notification: Notification[Any]) -> None: ...

        async with App("operator", config=operator) as operating:
            server = operating.session.admin.administration()
            await add_stream(server, "MARS", subjects=["mars.>"], retention=retention)
            if retention == "workqueue":
                await add_consumer(server, "MARS", "another")
        with anyio.fail_after(PATIENCE_SECONDS):
            async with app, anyio.create_task_group() as tasks:
                app.events.listen(lambda _: refused.set(), AgentDisturbed)
                tasks.start_soon(partial(app.session.work, app, stop, agents=app.agents))
                await refused.wait()
                await anyio.sleep(2 * LOOK_SECONDS)  # and says so within this time
                found = await gathered(operator, agents=tuple(app.agents), app="field")
                stop.set()
        return judged(changed(found, now=found.now + timedelta(minutes=2)))

    with served(tmp_path / "server", MONITORED + USERS) as (server, _):
        operator = write(tmp_path / "operator.yaml", server.url, user="operator", password="x")
        who: dict[str, Any] = {"user": "operator"} if retention == "workqueue" else {"user": "worker"}
        workers = write(tmp_path / "workers.yaml", server.url, **who, password="x")
        seen = anyio.run(work_and_gather)
    finding = seen.findings("JS058")["MARS > field__index"]
    assert (finding.state, finding.found.partition(":")[0]) == (State.FAIL, "not begun")
    assert "1 of 1 workers cannot go on" in finding.found, "and why, as its /readyz says it"
    assert "`agent.disturbed`" in finding.cure


def test_notifications_that_are_due_and_that_no_stream_takes(working: Seen) -> None:
    """By hand: the consumer of what is due has tried again and again."""
    alone = working.facts.consumers[SHARED, "alone"]
    name = delayed_messages.DURABLE
    trying = {
        (stream, name): structs.replace(
            alone, stream=stream, name=name, num_pending=0, num_ack_pending=30, num_redelivered=30, deliveries=60
        )
        for stream in map(delayed_messages.stream_of, (SHARED, "QUIET", "NONE"))
    }
    shared = working.facts.streams[SHARED]
    full = structs.replace(shared, config=StreamConfig({**shared.config, "discard": "new", "max_msgs": 40}))
    facts = changed(
        working.facts,
        after=structs.replace(working.facts.after, streams={SHARED: full, "QUIET": shared}, consumers=trying),
        due={SHARED: 20, "QUIET": 7, "NONE": 3},
        now=working.facts.now + timedelta(minutes=6),
    )
    seen = judged(facts)

    assert seen.found("JS076") == {
        SHARED: "20 notifications are due and not stored: the stream is full",
        "QUIET": "7 notifications are due and not stored",
        "NONE": "3 notifications are due and not stored: the stream does not exist",
    }
    assert (seen.found("JS022"), seen.found("JS058")) == ({}, {}), "no handler of an agent fails or hangs"
    stored = {key: structs.replace(one, num_ack_pending=0, num_redelivered=0) for key, one in trying.items()}
    after = structs.replace(facts.after, consumers=stored)
    assert judged(structs.replace(facts, after=after)).state("JS076") is State.PASS


def test_notifications_that_are_due_and_whose_event_type_no_worker_has(working: Seen) -> None:
    """By hand: the first worker that has it makes the consumer."""
    schedules = delayed_messages.stream_of("QUIET")
    after = structs.replace(working.facts.after, names={schedules: set()})
    facts = structs.replace(working.facts, after=after, due={"QUIET": 7, "UNKNOWN": 1})
    assert judged(facts).found("JS076") == {"QUIET": "7 notifications are due and not stored"}


def test_notifications_that_end_their_worker(working: Seen) -> None:
    one = RunAlone(app="field", agent="index", stream=SHARED, sequence=7)
    crashing = structs.replace(working.facts, run_alone=(one, structs.replace(one, sequence=5)))
    assert judged(crashing).found("JS066") == {
        f"{SHARED} > field__index": "a worker ended while it handled sequence 5, 7; "
        "workers now run each such notification alone (2 in all)"
    }


def test_a_notification_that_has_ended_its_worker_waits_for_its_next_attempt(working: Seen) -> None:
    """By hand: it does not run alone before that, and what waits for another reason ends no worker."""
    now, key = working.facts.now, (SHARED, "field__index")
    died, failed = (
        retrying(now, sequence, attempt=2, attempts=6, error=error)
        for sequence, error in ((7, "WorkerDiedError: it ended"), (8, "OSError"))
    )
    failure = last_failure(now, retrying=(died, failed))
    busy = structs.replace(working.facts.consumers[SHARED, "busy"], name=key[1])
    after = structs.replace(working.facts.after, consumers={key: busy})
    waiting = changed(working.facts, after=after, failures={("field", "agents", "index"): failure})
    assert judged(waiting).found("JS066") == {
        f"{SHARED} > field__index": "a worker ended while it handled sequence 7; "
        "workers now run each such notification alone (1 in all)"
    }
    over = structs.replace(failure, until=now)
    assert judged(changed(waiting, failures={("field", "agents", "index"): over})).found("JS066") == {}


def test_an_agents_slow_acknowledgements_are_its_heartbeats_business(working: Seen) -> None:
    """By hand: agents are not sampled."""
    measured = working.facts.consumers[SHARED, "measured"]
    config = ConsumerConfig({**measured.config, "metadata": {"aviso-workers-start": "all"}})
    after = structs.replace(
        working.facts.after, consumers={(SHARED, "measured"): structs.replace(measured, config=config)}
    )
    told = Advisory(kind="METRIC.CONSUMER.ACK.WORK.measured", stream=SHARED, consumer="measured", ack_time=SECOND)
    assert judged(structs.replace(working.facts, after=after, advisories=(told,))).state("JS023") is State.PASS


def test_a_timer_that_is_paused_for_long_is_named(working: Seen) -> None:
    now = working.facts.now
    pause = Pause(since=now - timedelta(days=2), until=now + timedelta(hours=1), by="me@here", note="for a test")
    facts = changed(working.facts, pauses={("field", "tidy"): pause})
    found = f"paused until {time_text(pause.until)}, since {time_text(pause.since)} by me@here: for a test"
    assert judged(facts).found("JS036")["field > timer tidy"] == found
    short = changed(facts, pauses={("field", "tidy"): structs.replace(pause, since=now)})
    assert "field > timer tidy" not in judged(short).found("JS036")


def test_a_function_of_a_window_that_fails_is_named(working: Seen) -> None:
    """By hand: that of an agent is named by its redeliveries and dead letters."""
    now = working.facts.now
    failure = last_failure(now)
    of_window = structs.replace(failure, of="a window")
    failures = {("field", "agents", "sums"): of_window, ("field", "agents", "index"): failure}
    assert judged(changed(working.facts, failures=failures)).found("JS077") == {
        "field > agent sums": f"since {time_text(now)}, 3 times in a window: OSError"
    }
