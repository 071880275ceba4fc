"""What a worker, or a fleet of them, shows to Prometheus.

An observer of the engine's facts that adds to plain numbers, which are written out when somebody scrapes, from the
tables below. Labels are names and small sets of words, never a subject. Every series that can be known exists at
zero from the start. docs/metrics.md lists them all.

Prometheus' text format and OpenMetrics 1.0 are written and put together here: the same bytes that Prometheus' own
client makes, in a tenth of the time. That client builds an object for each sample and escapes every label of it again
at each scrape, which takes 0.7 seconds for the 45,000 samples of 500 agents. Here what stands before a value is made
once (`_labelled`, `_heading`), and only the numbers are written by that client, as Go writes them.
"""

from __future__ import annotations

import math
import re
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import add, attrgetter
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from msgspec import Struct, structs
from prometheus_client.utils import floatToGoString

from aviso_workers.aviso import schema
from aviso_workers.backends import ConsumerInfo
from aviso_workers.config import Config
from aviso_workers.declare.agents import Agent, Task
from aviso_workers.declare.timers import Timer
from aviso_workers.engine.subscription import SubscriptionRun
from aviso_workers.errors import BackendError, NotFoundError
from aviso_workers.events import (
    Acked,
    AgentDisturbed,
    AgentStarted,
    CallsFreed,
    CallsStuck,
    ConnectionChanged,
    ConnectionSlow,
    ConsumerResumed,
    DeadLetterCallFailed,
    DeadLettersRefused,
    DeadLettersStored,
    Event,
    Events,
    Failed,
    ForeignAnswer,
    LeadershipHindered,
    LeadershipUnhindered,
    LineageTold,
    Measured,
    NotReadAgain,
    OutageBegan,
    OutageEnded,
    OutageGoesOn,
    Passed,
    Published,
    ReadAgain,
    Sampled,
    TaskFailed,
    Ticked,
    Unreadable,
    WindowDone,
)
from aviso_workers.jetstream import identities
from aviso_workers.version import __version__

Kind = Literal["counter", "gauge", "histogram"]
OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
HEADING = re.compile(r"^# HELP (\w+?)(_total)? (.*)\n# TYPE \S+ (\w+)$", re.MULTILINE)
END = "# EOF\n"
SAMPLE = re.compile(r"^(\w+)(?:\{|(?= ))", re.MULTILINE)
"""How the line of a sample begins, with labels or without."""
RUN_OUTCOMES = ("done", "failed")
"""Of a timer or a window."""
OUTCOMES = ("acked", "retried", "dead_lettered")
PUBLISH_OUTCOMES = ("stored", "duplicate", "scheduled", "failed")
LINEAGE_OUTCOMES = ("sent", "lost")
RETRY_REASONS = ("dead_letter_failed", "taken_over", "other_version", "unavailable", "uncounted")
"""Those that are not exceptions of an author's."""
DEAD_LETTER_REASONS = (
    *("attempts_exhausted", "invalid_notification", "late", "max_deliveries", "rejected", "skipped", "unavailable"),
    *("undecodable", "worker_died"),
)
ENDINGS = ("crashed", "in_order", "killed")
MAX_REASONS = 50
"""Reasons after these are counted as one, because authors may make up names of exceptions as they go."""
COUNTER: Kind = "counter"
GAUGE: Kind = "gauge"
HISTOGRAM: Kind = "histogram"
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)
"""Seconds: from a cached answer to an hour's backlog."""
BOUNDS = (*map(str, BUCKETS), "+Inf")


SORTED_TOGETHER = 512
"""So many times are sorted into the buckets of a histogram together: that costs a tenth of one after the other."""


class _Histogram(NamedTuple):
    """Times in seconds: how many took at most as long as each bound, their sum, and those not yet among these."""

    at_most: Sequence[int]
    sum: float
    new: list[float]

    def sorted(self) -> _Histogram:
        """Return the histogram in which all are counted."""
        new = sorted(self.new)  # its copy is made at once, because a scrape comes from a thread
        counts = [bisect_right(new, bound) for bound in (*BUCKETS, math.inf)]
        return _Histogram([*map(add, self.at_most, counts)], self.sum + sum(new), [])


class _Seconds:
    """A histogram of seconds."""

    def __init__(self) -> None:
        self._histogram = _Histogram([0] * len(BOUNDS), 0.0, [])
        self.exemplars: dict[int, str] = {}
        """The newest of each bucket, by its place, as it is written; empty unless there are traces."""

    def sampled(self, event: Sampled) -> None:
        """Note the span of one of these times."""
        labels = (("trace_id", event.trace_id), ("span_id", event.span_id))
        self.exemplars[bisect_left(BUCKETS, event.seconds)] = _exemplar(labels, event.seconds, time.time())

    def add(self, seconds: Sequence[float]) -> None:
        new = self._histogram.new
        new.extend(seconds)
        if len(new) >= SORTED_TOGETHER:
            self._histogram = self._histogram.sorted()

    def values(self) -> list[float]:
        """Return how many took at most as long as each bound, how many there were, and their sum."""
        histogram = self._histogram.sorted()
        return [*histogram.at_most, histogram.at_most[-1], histogram.sum]


class _Counts(dict[str, int]):
    """Numbers by a word, of which there are never too many."""

    def __init__(self, known: tuple[str, ...] = ()) -> None:
        super().__init__(dict.fromkeys(known, 0))

    def add(self, word: str, count: int = 1) -> None:
        known = word if word in self or len(self) < MAX_REASONS else "other"
        self[known] = self.get(known, 0) + count


class Missed(Struct, frozen=True, kw_only=True):
    """Notifications that an agent was not given: `count` of those between two sequences, both inclusive."""

    count: int
    first: int
    last: int


class _Agent:
    """The numbers of one agent, which `run` returns while it is at work."""

    def __init__(self, run: Callable[[], SubscriptionRun | None]) -> None:
        def of_run(read: Callable[[SubscriptionRun], float]) -> Callable[[], float]:
            return lambda: 0 if (found := run()) is None else read(found)

        live = {name: of_run(read) for name, read in OF_RUN.items()}
        unknown = dict.fromkeys(("pending", "ack_pending", "missed"), math.nan)
        self.numbers = _numbers(METRICS["app", "agent", "base"], **live, **unknown)
        self._outcomes = self.numbers["notifications"]
        self._waited = self.numbers["lane_wait_seconds"]
        self._handler = self.numbers["handler_seconds"]
        self._stored_to_settled = self.numbers["stored_to_settled_seconds"]
        self._passed: Passed | None = None

    def started(self, passed: Passed) -> None:
        """Begin to count what is missed, or go on where the consumer is the one that it was."""
        before = self._passed
        if before is None or not passed.consumer.goes_on(before.consumer):
            self._passed = passed
        elif passed.sequence <= before.sequence:  # else the next look counts what is between
            self._passed = structs.replace(before, consumer=passed.consumer)
        if math.isnan(self.numbers["missed"]):
            self.numbers["missed"] = 0

    def came_to(self, passed: Passed) -> Missed | None:
        """Count the sequences that the consumer has passed without a delivery: each but once, and those beyond doubt.

        A delivery that is a repeat hides a sequence that was missed meanwhile. Of a consumer that was recreated or
        reset, nothing is known before the first look: what it was taken past was passed over on purpose, and what it
        comes by again is counted already.
        """
        before, now = self._passed, passed.consumer
        if before is None or not passed.sequence:  # before its first delivery, a cluster may say that it is at 0
            return None
        if passed.filters != before.filters:  # what an edited filter hides is still there
            return None
        self._passed = structs.replace(passed, sequence=max(passed.sequence, before.sequence))
        deliveries = now.deliveries - before.consumer.deliveries
        count = passed.sequence - before.sequence - deliveries
        if not now.goes_on(before.consumer) or deliveries < 0 or count <= 0:
            return None
        self.numbers["missed"] += count
        return Missed(count=count, first=before.sequence + 1, last=passed.sequence)

    def settled(self, event: Acked | Failed) -> None:
        numbers = self.numbers
        if isinstance(event, Acked):
            self._outcomes["acked"] += len(event.seconds)
            numbers["redelivered"] += event.redelivered
            self._took(event.waited_seconds, event.seconds, event.stored_to_settled_seconds)
            return
        self._outcomes[event.outcome] += 1
        numbers["redelivered"] += event.num_delivered > 1
        self._took([event.waited_seconds], [event.seconds], [event.stored_to_settled_seconds])
        if event.outcome == "retried":
            numbers["retries"].add(event.reason)
        elif event.outcome == "dead_lettered":
            numbers["dead_letters"].add(event.reason)

    def _took(self, waited: Sequence[float], handling: Sequence[float], stored_to_settled: Sequence[float]) -> None:
        self.numbers["last_progress_timestamp_seconds"] = time.time()
        self._waited.add(waited)
        self._handler.add(handling)
        if min(stored_to_settled) < 0:  # two machines, two clocks
            stored_to_settled = [max(0.0, seconds) for seconds in stored_to_settled]
        self._stored_to_settled.add(stored_to_settled)


class Metric(Struct, frozen=True):
    """A metric: its kind, and its help."""

    kind: Kind
    help: str
    by: str = ""
    """The label that the words of a `_Counts` are; empty for a single number."""
    known: tuple[str, ...] = ()
    """The words that are counted from the start."""

    def begin(self) -> float | _Counts | _Seconds:
        """Return its value before anything has happened."""
        if self.kind == HISTOGRAM:
            return _Seconds()
        return _Counts(self.known) if self.by else 0


counter, gauge, histogram = (partial(Metric, kind) for kind in (COUNTER, GAUGE, HISTOGRAM))

METRICS: Mapping[tuple[str, ...], Mapping[str, Metric]] = {
    ("version",): {
        "build_info": gauge("Always 1; the label is the version of aviso-workers that runs."),
    },
    ("app",): {
        "ready": gauge(
            "1 while the worker is ready, as /readyz says: it is connected, and no agent and no timer is kept "
            "from its work; else 0."
        ),
        "start_timestamp_seconds": gauge("Start time of the process, in seconds since 1970."),
        "connected": gauge("1 while the worker is connected to its backend, else 0."),
        "connection_slow": gauge(
            "1 if the worker reads and publishes more slowly, because aviso-workers was not tested with this "
            "version of nats-py; else 0."
        ),
        "leader_hindered": gauge(
            "1 while this worker cannot use the bucket of leases or the bucket of claims, so it runs no timer "
            "with singleton=True and closes no window; else 0."
        ),
        "unreadable": counter(
            "Unreadable messages in the streams of aviso-workers, which a worker skips, by stream.", by="stream"
        ),
        "lineage_events": counter("Run events of lineage, by outcome.", by="outcome", known=LINEAGE_OUTCOMES),
        "foreign_answers": counter("Answers that came for a request to which they do not belong, and were ignored."),
        "foreign": counter(
            # Not by stream: a series that is born at 1 has no increase.
            "Those of the unreadable messages that aviso-workers has not published, such as a server's "
            "acknowledgement that a publisher has had stored there."
        ),
        "reconnects": counter("Connections to the backend after the first."),
        "loop_lag_seconds": gauge(
            "Seconds by which the event loop was late at its last turn, or is late now if that is longer."
        ),
    },
    ("app", "base"): {
        "published": counter("Notifications published, by outcome.", by="outcome", known=PUBLISH_OUTCOMES),
        "publish_retries": counter("Attempts to publish a notification after the first attempt."),
    },
    ("app", "agent", "base"): {
        "pending": gauge(
            "Notifications not delivered yet, for all workers of the agent together; no series until the number "
            "is known."
        ),
        "ack_pending": gauge(
            "Notifications delivered and not settled yet, for all workers of the agent together; no series until "
            "the number is known."
        ),
        "oldest_unfinished_age_seconds": gauge(
            "Age of the oldest notification that this worker has received and not finished; 0 if there is none."
        ),
        "in_flight": gauge("Notifications that this worker is handling."),
        "waiting": gauge("Notifications that this worker has received and is not handling yet."),
        "notifications": counter("Deliveries settled by this worker, by outcome.", by="outcome", known=OUTCOMES),
        "retries": counter("Failed deliveries that are retried, by reason.", by="reason", known=RETRY_REASONS),
        "dead_letters": counter(
            "Notifications that became dead letters, by reason.", by="reason", known=DEAD_LETTER_REASONS
        ),
        "dead_letter_call_failures": counter(
            "Dead letters for which the agent's function of on_dead_letter has failed, and is called no more."
        ),
        "dead_letters_refused": gauge(
            "1 while dead letters of this agent cannot be stored, so their notifications stay in the stream and "
            "are redelivered; else 0."
        ),
        "outage": gauge(
            "1 while what this agent depends on is away, so that it tries one call a second and uses no "
            "attempts; else 0."
        ),
        "not_read_again": gauge(
            "1 while waiting notifications of this agent cannot be read from their stream, so later "
            "notifications of the same ordering keys wait too; else 0."
        ),
        "threads_overdue": gauge(
            "Calls of this agent that still run after their timeout: of a plain function, or of an async one "
            "that cannot be cancelled."
        ),
        "threads_stuck": gauge(
            "Calls of this agent that still run after their timeout, if no other call can be made and the agent "
            "so handles nothing; else 0."
        ),
        "redelivered": counter("Settled deliveries that were not the first delivery of their notification."),
        "missed": counter(
            "Notifications that left the stream before the agent received them, for all workers together; no "
            "series if the server filters for the agent."
        ),
        "pull_errors": counter(
            "Interruptions of reading the agent's stream, by JetStream's error code, or by exception if there is "
            "no code.",
            by="code",
        ),
        "consumer_recreations": counter(
            "How often the agent's consumer was recreated, because it or its stream was missing, or because its "
            "filter was edited and hid notifications."
        ),
        "last_progress_timestamp_seconds": gauge(
            "Time when this worker last settled a delivery, in seconds since 1970; 0 before the first."
        ),
        "lane_wait_seconds": histogram(
            "Time that a delivery waited in the worker for earlier notifications of its ordering key and for a "
            "free slot."
        ),
        "handler_seconds": histogram("Time from the start of handling a delivery to its outcome."),
        "stored_to_settled_seconds": histogram(
            "Time from storing a notification in the stream to settling its delivery."
        ),
    },
    ("app", "timer"): {
        "ticks": counter("Ticks that this worker ran, by outcome.", by="outcome", known=RUN_OUTCOMES),
        "last_tick_timestamp_seconds": gauge(
            "Time for which the last tick that this worker ran was due, in seconds since 1970; 0 before the first."
        ),
    },
    ("app", "task"): {
        "task_failures": counter("Failures of a task, which is started again after each."),
    },
    ("app", "agent"): {
        "windows": counter("Runs of an agent for a window that is over, by outcome.", by="outcome", known=RUN_OUTCOMES),
    },
}
"""All of a worker process, by the labels that they have in common and by their names: those of `full_name`."""
FLEET_METRICS: Mapping[tuple[str, ...], Mapping[str, Metric]] = {
    ("app", "process"): {
        "process_running": gauge(
            "1 while the process of a fleet runs, else 0; the other series of a process that does not run are missing."
        ),
        "process_exits": counter(
            "Exits of a process while its fleet continues, by ending: in_order, killed or crashed.",
            by="ending",
            known=ENDINGS,
        ),
    },
}
"""What a fleet's supervisor adds to those of its processes."""
OF_RUN: Mapping[str, Callable[[SubscriptionRun], float]] = {
    "oldest_unfinished_age_seconds": attrgetter("flow.oldest_age_seconds"),
    "in_flight": attrgetter("flow.running"),
    "waiting": attrgetter("flow.waiting"),
    "threads_overdue": attrgetter("overdue"),
}
"""What is read of an agent at work; 0 while it does not run."""

Numbers = dict[str, Any]
"""By the names of metrics, their values, or functions that return them."""


def full_name(name: str, metric: Metric) -> str:
    """Return the name of a metric as Prometheus has it."""
    return f"aviso_worker_{name}{'_total' if metric.kind == COUNTER else ''}"


def _numbers(metrics: Mapping[str, Metric], **values: Any) -> Numbers:
    """Return the numbers of these metrics before anything has happened, but for the `values`."""
    return {name: metric.begin() for name, metric in metrics.items()} | values


class RunningApp(Protocol):
    """An app that runs, as what listens to its events needs it."""

    name: str
    agents: list[Agent[Any, Any]]
    timers: list[Timer[Any, Any]]
    tasks: list[Task]
    events: Events

    @property
    def config(self) -> Config: ...

    @property
    def runs(self) -> Mapping[str, SubscriptionRun]: ...


class Metrics:
    """The numbers of one worker process. `observe` the app's events, `render` for a scrape, from any thread."""

    def __init__(self, app: RunningApp, *, ready: Callable[[], bool], loop_lag_seconds: Callable[[], float]) -> None:
        bases = {name: schema.topic_of(name, kind).base for name, kind in app.config.notification_schema.items()}
        self._connections = 0
        self._hindered: set[str] = set()
        """Buckets that keep this worker from leading."""
        self._own = _numbers(
            METRICS["app",],
            ready=ready,
            start_timestamp_seconds=time.time(),
            leader_hindered=lambda: bool(self._hindered),
            reconnects=lambda: max(0, self._connections - 1),
            loop_lag_seconds=loop_lag_seconds,
        )
        self._published = {name: _numbers(METRICS["app", "base"]) for name in bases}
        self._agents = {agent.name: _Agent(_run_of(app, agent.name)) for agent in app.agents}
        self._timers = {timer.name: _numbers(METRICS["app", "timer"]) for timer in app.timers}
        self._tasks = {task.name: _numbers(METRICS["app", "task"]) for task in app.tasks}
        self._windows = {agent.name: _numbers(METRICS["app", "agent"]) for agent in app.agents if agent.policy.window}
        self._rows: dict[tuple[str, ...], Rows] = {
            ("version",): {(__version__,): {"build_info": 1}},
            ("app",): {(app.name,): self._own},
            ("app", "base"): {(app.name, bases[name]): numbers for name, numbers in self._published.items()},
            ("app", "agent", "base"): {
                (app.name, agent.name, bases[agent.event_type]): self._agents[agent.name].numbers
                for agent in app.agents
            },
            **{
                ("app", label): {(app.name, name): numbers for name, numbers in rows.items()}
                for label, rows in (("timer", self._timers), ("task", self._tasks), ("agent", self._windows))
            },
        }
        self._measured: dict[str, Measured] = {}
        self._gone: set[tuple[str, str]] = set()
        """Agents and streams of which one or the other's consumer was not found."""
        self._traced = app.config.workers.traces.enabled
        self._table, self._open_table = _Table(), _Table(exemplars=True)

    def observe(self, event: Event) -> None:
        """Count an event of the engine; the observer of those that are `OBSERVED`."""
        self.COUNTED[type(event)](self, event)

    def lag(self, agent: str, consumer: ConsumerInfo) -> Missed | None:
        """Note what is left to do for an agent. Return what it has missed since that was last noted, where that is
        known.
        """
        self._agents[agent].numbers |= {"pending": consumer.num_pending, "ack_pending": consumer.num_ack_pending}
        filters = frozenset(consumer.config.filters)
        return self._agents[agent].came_to(Passed(identities.of(consumer), consumer.position, filters))

    def render(self) -> bytes:
        """Return the numbers in Prometheus' text format."""
        return self._table.render(METRICS, self._rows) + render_gauges(tuple(self._measured.values()))

    def answer(self, accept: str) -> tuple[bytes, str]:
        """Return the numbers in the format that a header Accept prefers, and its name: OpenMetrics only with traces."""
        return _answer(accept, self.render, self._render_open if self._traced else None)

    def _render_open(self) -> bytes:
        own = self._open_table.render(METRICS, self._rows) + render_gauges(tuple(self._measured.values()))
        return _open_metrics(own.decode()).encode()

    def _settled(self, event: Acked | Failed) -> None:
        if event.agent in self._agents:  # else it is a subscription of our own; so below
            self._agents[event.agent].settled(event)

    def _sampled(self, event: Sampled) -> None:
        if event.agent in self._agents:
            self._agents[event.agent].numbers["handler_seconds"].sampled(event)

    def _count_published(self, event: Published) -> None:
        numbers = self._published[event.event_type]
        numbers["published"].add(event.outcome, event.count)
        numbers["publish_retries"] += (event.attempts - 1) * event.count

    def _task_failed(self, event: TaskFailed) -> None:
        self._tasks[event.task]["task_failures"] += 1

    def _ticked(self, event: Ticked) -> None:
        self._timers[event.timer]["ticks"].add("failed" if event.error else "done")
        self._timers[event.timer]["last_tick_timestamp_seconds"] = event.time.timestamp()

    def _window_done(self, event: WindowDone) -> None:
        self._windows[event.agent]["windows"].add("failed" if event.error else "done")
        if event.dead_lettered:
            self._agents[event.agent].numbers["dead_letters"].add(event.dead_lettered)

    def _connection_changed(self, event: ConnectionChanged) -> None:
        self._own["connected"] = event.connected
        self._connections += event.connected

    def _connection_slow(self, _: ConnectionSlow) -> None:
        self._own["connection_slow"] = 1

    def _foreign_answer(self, _: ForeignAnswer) -> None:
        self._own["foreign_answers"] += 1

    def _lineage(self, event: LineageTold) -> None:
        self._own["lineage_events"].add("lost" if event.error else "sent")

    def _unreadable(self, event: Unreadable) -> None:
        self._own["unreadable"].add(event.stream)
        self._own["foreign"] += event.reason == "foreign"

    def _disturbed(self, event: AgentDisturbed) -> None:
        if event.agent in self._agents:
            self._agents[event.agent].numbers["pull_errors"].add(_code(event.error))
            if isinstance(event.error, NotFoundError):
                self._gone.add((event.agent, event.stream))

    def _resumed(self, event: ConsumerResumed) -> None:
        if event.agent in self._agents:
            self._gone.add((event.agent, event.stream))  # also where it was gone before this worker came

    def _started(self, event: AgentStarted) -> None:
        if event.agent not in self._agents:
            return
        if event.passed is not None:
            self._agents[event.agent].started(event.passed)
        if (event.agent, event.stream) in self._gone:
            self._gone.remove((event.agent, event.stream))
            self._agents[event.agent].numbers["consumer_recreations"] += 1

    def _dead_letters(self, event: DeadLettersRefused | DeadLettersStored) -> None:
        self._agents[event.agent].numbers["dead_letters_refused"] = isinstance(event, DeadLettersRefused)

    def _dead_letter_call_failed(self, event: DeadLetterCallFailed) -> None:
        self._agents[event.agent].numbers["dead_letter_call_failures"] += not event.again_in_seconds

    def _outage(self, event: OutageBegan | OutageGoesOn | OutageEnded) -> None:
        for agent in event.agents:
            self._agents[agent].numbers["outage"] = not isinstance(event, OutageEnded)

    def _read_again(self, event: NotReadAgain | ReadAgain) -> None:
        self._agents[event.agent].numbers["not_read_again"] = isinstance(event, NotReadAgain)

    def _calls(self, event: CallsStuck | CallsFreed) -> None:
        self._agents[event.agent].numbers["threads_stuck"] = event.calls if isinstance(event, CallsStuck) else 0

    def _leadership(self, event: LeadershipHindered | LeadershipUnhindered) -> None:
        (self._hindered.add if isinstance(event, LeadershipHindered) else self._hindered.discard)(event.bucket)

    def _note_measured(self, event: Measured) -> None:
        self._measured[event.name] = event

    COUNTED: ClassVar[Mapping[type[Event], Callable[[Metrics, Any], None]]] = {
        Acked: _settled,
        AgentDisturbed: _disturbed,
        AgentStarted: _started,
        CallsFreed: _calls,
        CallsStuck: _calls,
        ConnectionChanged: _connection_changed,
        ConnectionSlow: _connection_slow,
        ConsumerResumed: _resumed,
        DeadLetterCallFailed: _dead_letter_call_failed,
        DeadLettersRefused: _dead_letters,
        DeadLettersStored: _dead_letters,
        Failed: _settled,
        ForeignAnswer: _foreign_answer,
        LeadershipHindered: _leadership,
        LeadershipUnhindered: _leadership,
        LineageTold: _lineage,
        Measured: _note_measured,
        NotReadAgain: _read_again,
        OutageBegan: _outage,
        OutageEnded: _outage,
        OutageGoesOn: _outage,
        Published: _count_published,
        ReadAgain: _read_again,
        Sampled: _sampled,
        TaskFailed: _task_failed,
        Ticked: _ticked,
        Unreadable: _unreadable,
        WindowDone: _window_done,
    }


OBSERVED = tuple(Metrics.COUNTED)
"""The facts that `Metrics.observe` is for."""


def render_gauges(measured: Iterable[Measured]) -> bytes:
    """Return these gauges, and nothing else, in Prometheus' text format."""
    return "".join(map(_gauge, measured)).encode()


class FleetMetrics:
    """The numbers of a fleet: those of its supervisor, and those of all its processes with the label `process`.

    They are not summed: a process that is replaced begins at zero, which Prometheus recognises only in a series of
    its own. `scrape` returns what the processes show to a header Accept, by name. Another process than these has no
    series: the console's.
    """

    def __init__(
        self, app: str, processes: Iterable[str], *, scrape: Callable[[str], Mapping[str, str]], traced: bool = False
    ) -> None:
        self._traced = traced
        (labels, metrics), *_ = FLEET_METRICS.items()
        self._processes = defaultdict(lambda: _numbers(metrics), {name: _numbers(metrics) for name in processes})
        self._rows: dict[tuple[str, ...], Rows] = {
            labels: {(app, name): numbers for name, numbers in self._processes.items()}
        }
        self._scrape = scrape
        self._table = _Table()

    def started(self, process: str) -> None:
        self._processes[process]["process_running"] = 1

    def ended(self, process: str) -> None:
        self._processes[process]["process_running"] = 0

    def exited(self, process: str, ending: str) -> None:
        """Note how a process ended: `ending` is one of `ENDINGS`."""
        self._processes[process]["process_exits"].add(ending)

    def render(self) -> bytes:
        """Return the numbers in Prometheus' text format."""
        return self._render_own() + _joined(self._scrape(""), label="process").encode()

    def answer(self, accept: str) -> tuple[bytes, str]:
        """Return the numbers as `Metrics.answer` does, with the exemplars of the processes."""
        return _answer(accept, self.render, self._render_open if self._traced else None)

    def _render_open(self) -> bytes:
        own = _open_metrics(self._render_own().decode())
        shown = {name: _open_metrics(text) for name, text in self._scrape(OPEN_METRICS).items()}
        return f"{own.removesuffix(END)}{_joined(shown, label='process')}{END}".encode()

    def _render_own(self) -> bytes:
        return self._table.render(FLEET_METRICS, self._rows)


Rows = Mapping[tuple[str, ...], Numbers]
"""Numbers by the values of their labels."""


class _Table:
    """Writes out a table of metrics again and again. What stands before a number is made once."""

    def __init__(self, *, exemplars: bool = False) -> None:
        self._exemplars = exemplars
        self._known: dict[tuple[str, ...], list[str]] = {}
        """What stands before the numbers of a metric, by its name and the values of its labels."""

    def render(
        self, metrics: Mapping[tuple[str, ...], Mapping[str, Metric]], rows: Mapping[tuple[str, ...], Rows]
    ) -> bytes:
        return "".join(
            text
            for labels, named in metrics.items()
            for name, metric in named.items()
            for text in self._family(name, metric, labels, rows[labels])
        ).encode()

    def _family(self, name: str, metric: Metric, labels: tuple[str, ...], rows: Rows) -> Iterator[str]:
        name_shown = full_name(name, metric)
        yield _heading(name_shown, metric.help, metric.kind)
        for key, numbers in rows.items():
            value = numbers[name]
            match value() if callable(value) else value:
                case _Seconds() as seconds:
                    shown = dict(seconds.exemplars) if self._exemplars else {}  # at once, as below
                    parts = zip(self._before(name_shown, labels, key, metric.kind), seconds.values(), strict=True)
                    for place, (before, number) in enumerate(parts):
                        yield f"{before}{_number(number)}{shown.get(place, '')}\n"
                case _Counts() as counts:
                    for word, count in dict(counts).items():  # at once: the loop's thread may add to it meanwhile
                        (before,) = self._before(name_shown, (*labels, metric.by), (*key, word))
                        yield f"{before}{_number(count)}\n"
                case number:
                    if not math.isnan(number):  # one that is not known spoils each sum
                        (before,) = self._before(name_shown, labels, key)
                        yield f"{before}{_number(float(number))}\n"

    def _before(self, name: str, labels: tuple[str, ...], key: tuple[str, ...], kind: Kind | None = None) -> list[str]:
        """Return what stands before a number, or before each of those of a histogram."""
        known = self._known.get((name, *key))
        if known is None:
            of_row = tuple(zip(labels, key, strict=True))
            parts = [(name, of_row)]
            if kind == HISTOGRAM:
                parts = [(f"{name}_bucket", (*of_row, ("le", bound))) for bound in BOUNDS]
                parts += [(f"{name}_count", of_row), (f"{name}_sum", of_row)]
            known = self._known[name, *key] = [_labelled(part, of) for part, of in parts]
        return known


def _gauge(measured: Measured) -> str:
    lines = [_heading(measured.name, measured.help, GAUGE)]
    for key, value in measured.values.items():
        before = _labelled(measured.name, zip(measured.labels, key, strict=True))
        lines.append(f"{before}{_number(value)}\n")
    return "".join(lines)


def _run_of(app: RunningApp, agent: str) -> Callable[[], SubscriptionRun | None]:
    return lambda: app.runs.get(agent)


def _code(error: Exception) -> str:
    code = error.code if isinstance(error, BackendError) else None
    return str(code or type(error).__name__)


def _heading(name: str, text: str, kind: Kind) -> str:
    """Return the two lines before a metric's samples. A counter's name ends with `_total`."""
    escaped = text.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {name} {escaped}\n# TYPE {name} {kind}\n"


def _labelled(name: str, labels: Iterable[tuple[str, str]]) -> str:
    """Return what stands before a sample's value: its name, its labels by their names, and a space."""
    text = ",".join(f'{label}="{_escaped(value)}"' for label, value in sorted(labels))
    return f"{name}{{{text}}} " if text else f"{name} "


def _number(value: float) -> str:
    """Return the value as Go writes it, and so Prometheus' client."""
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


def _joined(texts: Mapping[str, str], *, label: str) -> str:
    """Return several expositions as one, in which each sample has the label `label` with the text's key.

    The samples of a metric stand together, as the format demands.
    """
    families: dict[str, list[str]] = {}
    for value, text in texts.items():
        added = f'{label}="{_escaped(value)}"'
        for family in text.removesuffix(END).split("# HELP ")[1:]:
            head, _, rest = family.partition("\n")
            type_line, _, samples = rest.partition("\n")
            whole = families.setdefault(head.split(" ", 1)[0], [f"# HELP {head}\n{type_line}\n"])
            whole.append(_with_label(samples, added))
    return "".join(part for whole in families.values() for part in whole)


def _exemplar(labels: Iterable[tuple[str, str]], value: float, timestamp: float) -> str:
    """Return what stands behind a sample's value: one that it counts, with labels of at most 128 characters."""
    return f" # {_labelled('', labels)}{_number(value)} {timestamp:.3f}"


def _open_metrics(text: str) -> str:
    """Return what is in Prometheus' text format in OpenMetrics 1.0; what is so already, as it is."""
    return text if text.endswith(END) else f"{HEADING.sub(_open_heading, text)}{END}"


def _open_heading(found: re.Match[str]) -> str:
    name, total, text, kind = found.groups("")
    name = name if kind == "counter" else f"{name}{total}"
    quoted = text.replace('"', r"\"")
    return f"# HELP {name} {quoted}\n# TYPE {name} {kind}"


def _answer(accept: str, text: Callable[[], bytes], open_metrics: Callable[[], bytes] | None) -> tuple[bytes, str]:
    """Return the body and the Content-Type of what a header Accept prefers, of these two formats."""
    weights = {"application/openmetrics-text": 0.0, "text/plain": 0.0}
    for each in accept.split(","):
        kind, *given = (part.strip() for part in each.split(";"))
        parameters = {name: value for name, _, value in (part.partition("=") for part in given)}
        if kind in weights and (kind == "text/plain" or parameters.get("version", "1.0.0") == "1.0.0"):
            with suppress(ValueError):
                weights[kind] = max(weights[kind], float(parameters.get("q", "1")))
    if open_metrics and weights["application/openmetrics-text"] > weights["text/plain"]:
        return open_metrics(), OPEN_METRICS
    return text(), "text/plain; version=0.0.4; charset=utf-8"


def _with_label(samples: str, added: str) -> str:
    def begin(found: re.Match[str]) -> str:
        return f"{found[1]}{{{added}," if found[0].endswith("{") else f"{found[1]}{{{added}}}"

    return SAMPLE.sub(begin, samples)


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
