"""Facts on an agent, as tests of its health give them: times are seconds before now."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from aviso_workers.jetstream.info import ConsumerConfig, ConsumerInfo, StreamConfig, StreamInfo
from aviso_workers.ops.health import AgentFacts
from aviso_workers.state.consumer_records import ConsumerRecord
from aviso_workers.state.failure_records import LastFailure, Retrying
from aviso_workers.state.worker_records import AtWork, Hindered, WorkerRecord

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
CREATED = NOW - timedelta(days=30)
LONG_AGO = 86_400.0


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def stream(*, created: float | None = None, last: int = 1000) -> StreamInfo:
    """A stream, created so many seconds ago; else at the time of the records."""
    return StreamInfo(
        config=StreamConfig({"name": "MARS", "subjects": ["mars.>"]}),
        time=NOW,
        created=CREATED if created is None else ago(created),
        last_sequence=last,
    )


def consumer(stream: str = "MARS", **given: Any) -> ConsumerInfo:
    """A consumer from which a worker pulls; `paused` until a time, `quiet` for so many seconds."""
    quiet = given.pop("quiet", 1.0)
    known: dict[str, Any] = {"num_waiting": 1, "deliveries": 20, "ack_floor": 9, "position": 20, "created": CREATED}
    known |= {"last_delivered": ago(quiet), "last_settled": ago(quiet)} | given
    if known.pop("paused", False):
        known["paused_until"] = NOW + timedelta(hours=1)
    return ConsumerInfo(name="field__index", config=ConsumerConfig(), time=NOW, stream=stream, **known)


def record(**given: Any) -> ConsumerRecord:
    """How far a worker has recorded that the consumer has come; `unfinished` for so many seconds."""
    unfinished, time = given.pop("unfinished", None), given.pop("time", 10.0)
    known: dict[str, Any] = {"stream_created": CREATED, "ack_floor": 9, "filter_subjects": ("mars.>",)}
    known |= {"unfinished_since": None if unfinished is None else ago(unfinished), "attempt_seconds": 300.0} | given
    return ConsumerRecord(time=ago(time), **known)


def failure(since: float = 60.0, last: float = 10.0, **given: Any) -> LastFailure:
    """A failure that is not over yet, unless `until` says so; what is `retrying`, and `handled` since."""
    handled, until = given.pop("handled", None), given.pop("until", -60.0)
    known: dict[str, Any] = {"error": "ValueError", "text": "no such field", "at": "", "times": 3} | given
    return LastFailure(
        since=ago(since),
        last=ago(last),
        until=ago(until),
        written=NOW,
        handled=None if handled is None else ago(handled),
        **known,
    )


def retried(sequence: int = 12, **given: Any) -> Retrying:
    known: dict[str, Any] = {"attempt": 2, "attempts": 6, "error": "ValueError: no such field"} | given
    return Retrying(again_at=NOW + timedelta(seconds=5), stream="MARS", sequence=sequence, timestamp_ns=1, **known)


def worker(
    name: str = "w1", *, hindered: tuple[float, str] | None = None, started: float = 3600, **work: Any
) -> WorkerRecord:
    """A worker that is hindered for so many seconds by something; the rest is what it handles of the agent."""
    found = (Hindered(agent="index", text=hindered[1], seconds=hindered[0]),) if hindered else ()
    known: dict[str, Any] = {"stream": "MARS", "in_flight": 0, "at_once": 1} | work
    at_work = AtWork(**known)
    return WorkerRecord(
        host="host",
        process=1,
        member=name,
        version="1",
        started=ago(started),
        age_seconds=started,
        said=NOW,
        agents={"index": at_work},
        hindrances=found,
    )


def facts(before: AgentFacts | None = None, **given: Any) -> AgentFacts:
    """An agent that is idle, but for what is given. The earlier look is the same, unless another one is given."""
    known: dict[str, Any] = {
        "stream_info": stream(),
        "events": consumer(),
        "retries": consumer("RETRIES", deliveries=0, ack_floor=0),
        "record": record(),
        "workers": (worker(),),
    }
    found = AgentFacts(app="field", agent="index", stream="MARS", now=NOW, **(known | given))
    return AgentFacts(**{name: getattr(found, name) for name in found.__struct_fields__} | {"before": before or found})
