"""What a worker shows to Prometheus: the only module that knows its client.

An observer of the engine's facts that adds to plain numbers; Prometheus' objects are made when somebody scrapes.
Labels are names and small sets of words, never a subject. Every series of an agent exists at zero from the start.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from aviso_workers.events import AgentStarted, ConnectionChanged, Event, Published, Settled

__all__ = ["AgentGauges", "Metrics"]

OUTCOMES = ("acked", "retried", "dead_lettered")
PUBLISH_OUTCOMES = ("stored", "duplicate", "failed")
BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
    3600.0,
)


class AgentGauges:
    """What an agent's lag is, as last asked for. -1: not known yet."""

    def __init__(self) -> None:
        self.pending = -1
        self.ack_pending = -1


class _AgentCounts:
    def __init__(self) -> None:
        self.outcomes = Counter[str]()
        self.retries = Counter[str]()
        self.dead_letters = Counter[str]()
        self.redelivered = 0
        self.consumers = 0
        self.buckets = [0] * (len(BUCKETS) + 1)
        self.seconds = 0.0


class Metrics:
    """The numbers of one worker process. `observe` the app's events, `render` for a scrape.

    `bases` gives each agent's topic base, `held` the deliveries that it holds now.
    """

    def __init__(self, app: str, *, bases: Mapping[str, str], held: Callable[[str], int]) -> None:
        self.gauges = {agent: AgentGauges() for agent in bases}
        self._app = app
        self._bases = bases
        self._held = held
        self._agents = {agent: _AgentCounts() for agent in bases}
        self._published = Counter[tuple[str, str]]()
        self._publish_retries = Counter[str]()
        self._connected = False
        self._connections = 0
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def observe(self, event: Event) -> None:
        match event:
            case Settled():
                self._settled(event)
            case Published(event_type=event_type, outcome=outcome, attempts=attempts):
                self._published[event_type, outcome] += 1
                self._publish_retries[event_type] += attempts - 1
            case ConnectionChanged(connected=connected):
                self._connected = connected
                self._connections += connected
            case AgentStarted(agent=agent):
                self._agents[agent].consumers += 1

    def render(self) -> bytes:
        """The numbers in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield _gauge("build_info", "The package that runs.", {("version",): {(version("aviso-workers"),): 1}})
        yield _gauge("connected", "Whether the backend is connected.", {("app",): {(self._app,): self._connected}})
        yield _counter(
            "reconnects",
            "Connections made after the first.",
            {("app",): {(self._app,): max(0, self._connections - 1)}},
        )
        yield from self._publish_metrics()
        yield from self._agent_metrics()

    def _settled(self, event: Settled) -> None:
        counts = self._agents[event.agent]
        counts.outcomes[event.outcome] += 1
        counts.redelivered += event.num_delivered > 1
        counts.seconds += event.seconds
        counts.buckets[bisect_left(BUCKETS, event.seconds)] += 1
        if event.outcome == "retried":
            counts.retries[event.reason] += 1
        elif event.outcome == "dead_lettered":
            counts.dead_letters[event.reason] += 1

    def _publish_metrics(self) -> Iterator[Metric]:
        labels = ("app", "event_type")
        published = dict(self._published)  # the loop's thread may add to it meanwhile
        event_types = {event_type for event_type, _ in published}
        yield _counter(
            "published",
            "Notifications published, by what came of it.",
            {
                (*labels, "outcome"): {
                    (self._app, event_type, outcome): published.get((event_type, outcome), 0)
                    for event_type in event_types
                    for outcome in PUBLISH_OUTCOMES
                }
            },
        )
        yield _counter(
            "publish_retries",
            "Publish attempts after the first.",
            {labels: {(self._app, event_type): self._publish_retries[event_type] for event_type in event_types}},
        )

    def _agent_metrics(self) -> Iterator[Metric]:
        labels = ("app", "agent", "base")
        agents = {(self._app, agent, base): self._agents[agent] for agent, base in self._bases.items()}
        yield _counter(
            "notifications",
            "Deliveries settled, by outcome.",
            {(*labels, "outcome"): {(*key, o): counts.outcomes[o] for key, counts in agents.items() for o in OUTCOMES}},
        )
        yield _counter(
            "retries",
            "Deliveries given back to be tried again, by reason.",
            {
                (*labels, "reason"): {
                    (*key, r): n for key, counts in agents.items() for r, n in dict(counts.retries).items()
                }
            },
        )
        yield _counter(
            "dead_letters",
            "Notifications moved to the dead letters, by reason.",
            {
                (*labels, "reason"): {
                    (*key, r): n for key, counts in agents.items() for r, n in dict(counts.dead_letters).items()
                }
            },
        )
        yield _counter(
            "redelivered",
            "Deliveries that were not the first of their notification.",
            {labels: {key: counts.redelivered for key, counts in agents.items()}},
        )
        yield _counter(
            "consumers_opened",
            "How often the agent's consumer was opened; more than once means that it was lost.",
            {labels: {key: counts.consumers for key, counts in agents.items()}},
        )
        yield _gauge(
            "in_flight",
            "Deliveries that this worker holds.",
            {labels: {key: self._held(key[1]) for key in agents}},
        )
        yield _gauge(
            "pending",
            "Notifications never delivered yet, over all workers; -1: not known.",
            {labels: {key: self.gauges[key[1]].pending for key in agents}},
        )
        yield _gauge(
            "ack_pending",
            "Notifications delivered and not settled, over all workers; -1: not known.",
            {labels: {key: self.gauges[key[1]].ack_pending for key in agents}},
        )
        seconds = HistogramMetricFamily(
            "aviso_worker_handler_seconds", "Time from delivery to settlement in the handler.", labels=labels
        )
        for key, counts in agents.items():
            seconds.add_metric(key, buckets=_cumulative(counts.buckets), sum_value=counts.seconds)
        yield seconds


_Samples = Mapping[tuple[str, ...], Mapping[tuple[str, ...], float]]


def _counter(name: str, help: str, samples: _Samples) -> Metric:
    return _filled(CounterMetricFamily, name, help, samples)


def _gauge(name: str, help: str, samples: _Samples) -> Metric:
    return _filled(GaugeMetricFamily, name, help, samples)


def _filled(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily], name: str, help: str, samples: _Samples
) -> Metric:
    ((labels, values),) = samples.items()
    family = kind(f"aviso_worker_{name}", help, labels=labels)
    for key, value in values.items():
        family.add_metric(key, float(value))
    return family


def _cumulative(buckets: list[int]) -> list[tuple[str, float]]:
    total, result = 0, []
    for bound, count in zip((*map(str, BUCKETS), "+Inf"), buckets, strict=True):
        total += count
        result.append((bound, float(total)))
    return result
