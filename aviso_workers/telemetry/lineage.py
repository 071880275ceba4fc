"""Run events of OpenLineage: of a worker, of its agents, of windows that are over, and of Spark: of commands, and of
what `spark-events` reads of applications and their jobs.

Each life of a worker is a run of the app's job, and each agent a streaming job with a run within it. They are told when
they begin, every five minutes, and when they end; a worker that is killed tells no end. An observer of the engine's
facts, which is imported only where `workers.lineage` is configured. Events are of the OpenLineage specification 2-0-2.

The messages in JetStream are one event each, as JSON, with `Nats-Msg-Id: {runId}:{eventType}:{SHA-256 of the message}`.
"""

from __future__ import annotations

import hashlib
import inspect
from collections import Counter, deque
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit
from uuid import NAMESPACE_URL, uuid5

import anyio
import anyio.to_thread

from aviso_workers import clocks
from aviso_workers.aviso.codec import Message
from aviso_workers.aviso.schema import topic_of
from aviso_workers.backends import Backend, open_backend
from aviso_workers.clocks import Clock
from aviso_workers.config import Config
from aviso_workers.config.settings import Lineage
from aviso_workers.declare import outputs
from aviso_workers.declare.agents import Agent
from aviso_workers.errors import ConfigError, text_of
from aviso_workers.events import Acked, AgentStarted, Event, Events, LineageTold, Published, SparkRunChanged, WindowDone
from aviso_workers.task_groups import task_group
from aviso_workers.version import __version__

try:
    from openlineage.client import facet_v2 as facets
    from openlineage.client.event_v2 import InputDataset, Job, OutputDataset, Run, RunEvent, RunState
    from openlineage.client.serde import Serde
    from openlineage.client.transport.http import ApiKeyTokenProvider, HttpConfig, HttpTransport, TokenProvider
    from openlineage.client.uuid import generate_new_uuid, generate_static_uuid
except ImportError as error:
    raise ConfigError(
        [f"workers.lineage needs the package openlineage-python: pip install 'aviso-workers[lineage]' ({error})"]
    ) from error

if TYPE_CHECKING:
    from aviso_workers.telemetry.metrics import RunningApp

PRODUCER = f"urn:aviso-workers:{__version__}"
INTEGRATION = "AVISO"
RUNNING_SECONDS = 300.0
"""How often a run that goes on is told."""
TIMEOUT_SECONDS = 5.0
"""Of one attempt to send an event."""
POSTING = 1
"""Threads that wait for an endpoint. One that has not answered in time may hold its thread for long."""
WAITS = (1.0, 2.0, 4.0)
"""Seconds before each further attempt. An event that fails after these is lost: each tells the whole of its run."""
LAST_SECONDS = 5.0
"""How long a worker that ends goes on sending."""
MOST_WAITING = 1000
"""Events that are waiting to be sent. Further ones are lost."""
WORKER = ""
"""The worker's own run, beside those of its agents by their names."""


class Send(Protocol):
    """Sends one event. Raises where that fails."""

    async def __call__(self, event: RunEvent, /) -> object: ...


class LineageReporter:
    """Tells the runs of one worker: `told` while it is connected and works."""

    def __init__(self, app: RunningApp, settings: Lineage) -> None:
        self._app = app
        self._settings = settings
        schema = app.config.notification_schema
        self._agents = {agent.name: agent for agent in app.agents}
        self._runs = {name: str(generate_new_uuid()) for name in (WORKER, *self._agents)}
        self._begun: list[str] = []
        """The runs that have begun."""
        self._written = {
            name: self._outputs(dict.fromkeys(_named(agent, schema))) for name, agent in self._agents.items()
        }
        """What each agent writes, as far as its code names it."""
        self._acked = Counter(dict.fromkeys(self._agents, 0))
        """Notifications by agent."""
        self._stored = Counter[str]()
        """Notifications by event type."""
        self._unsent = deque[RunEvent]()
        self._more = anyio.Event()
        """Set when there is another one to send, and when there will be no more."""
        self._ended = False
        self._failing = False
        self._clock: Clock = clocks.LoopClock()

    @asynccontextmanager
    async def told(self, backend: Backend) -> AsyncIterator[None]:
        """Tell the runs of the worker and its agents while the block runs, and how it ends. Raises what it raises."""
        self._clock = backend.clock
        state, error = RunState.ABORT, ""
        sent, sending = anyio.Event(), anyio.CancelScope(shield=True)
        async with task_group() as tasks:
            with self._app.events.heard_by(self.observe, AgentStarted, Acked, Published, SparkRunChanged, WindowDone):
                self._begin(WORKER)
                tasks.start_soon(self._tell_running)
                tasks.start_soon(self._send_all, _sender(self._settings, backend), sent, sending)
                try:
                    yield
                    state = RunState.COMPLETE
                except Exception as raised:
                    state, error = RunState.FAIL, text_of(raised)
                    raise
                finally:
                    for name in reversed(self._begun):
                        self._tell(name, state, error)
                    self._ended = True
                    self._more.set()
                    with clocks.move_on_after(self._clock, LAST_SECONDS) as last:
                        last.shield = True
                        await sent.wait()
                    sending.cancel()
                    tasks.cancel_scope.cancel()
                    for _ in self._unsent:
                        self._note(TimeoutError("the worker has ended"))

    def observe(self, event: Event) -> None:
        """Count what agents have done, and tell what begins and what is over."""
        match event:
            case Acked() if event.agent in self._agents:  # others are subscriptions of our own
                self._acked[event.agent] += len(event.seconds)
            case Published(outcome="stored"):
                self._stored[event.event_type] += event.count
            case AgentStarted() if event.agent in self._agents and event.agent not in self._begun:
                self._begin(event.agent)
            case WindowDone() if event.error is None or event.dead_lettered:
                self._tell_window(event)
            case SparkRunChanged():
                self._tell_spark(event)

    def _begin(self, name: str) -> None:
        self._begun.append(name)
        self._tell(name, RunState.START)

    async def _tell_running(self) -> None:
        while True:
            await self._clock.sleep(RUNNING_SECONDS)
            for name in self._begun:
                self._tell(name, RunState.RUNNING)

    def _tell(self, name: str, state: RunState, error: str = "") -> None:
        """Tell that the run of the worker or of an agent has come to a state."""
        agent = self._agents.get(name)
        job = self._job(agent, "WORKER" if agent is None else "AGENT")
        inputs = self._inputs(self._acked if agent is None else {name: self._acked[name]})
        written = self._outputs(self._stored) if agent is None else self._written[name]
        run = Run(self._runs[name], self._run_facets(of=None if agent is None else WORKER, error=error))
        self._put(_event(self._time(), state, run, job, inputs, written))

    def _tell_window(self, event: WindowDone) -> None:
        """Tell the run of a window. Where it is run again by another worker, that has the same run."""
        of = f"{self._app.name}.{event.agent}.{event.key}.{event.start.isoformat()}"
        failed = text_of(event.error) if event.error else ""
        nominal = facets.nominal_time_run.NominalTimeRunFacet(event.start.isoformat(), event.end.isoformat())
        run = Run(
            str(generate_static_uuid(event.end, of.encode())),
            {**self._run_facets(of=event.agent, error=failed), "nominalTime": nominal},
        )
        job, inputs = self._job(self._agents[event.agent], "WINDOW"), self._inputs({event.agent: None})
        began, state = self._time(before_seconds=event.seconds), RunState.FAIL if failed else RunState.COMPLETE
        for time, each in ((began, RunState.START), (self._time(), state)):
            self._put(_event(time, each, run, job, inputs, self._written[event.agent]))

    def _tell_spark(self, event: SparkRunChanged) -> None:
        """Tell the run of an application of Spark, or of a job within it. What is told twice is of the same run."""
        made: dict[str, Any] = {}
        if event.job:
            made["parent"] = facets.parent_run.ParentRunFacet(
                run=facets.parent_run.Run(_spark_run(event.run)),
                job=facets.parent_run.Job(self._settings.namespace, f"spark.{event.application}"),
            )
        if event.error:
            made["errorMessage"] = facets.error_message_run.ErrorMessageRunFacet(event.error, "SCALA")
        kind, name = ("JOB", ".job") if event.job else ("APPLICATION", "")
        of: dict[str, Any] = {"jobType": facets.job_type_job.JobTypeJobFacet("BATCH", "SPARK", kind)}
        job = Job(self._settings.namespace, f"spark.{event.application}{name}", of)
        time = event.time.isoformat() if event.time else self._time()
        run = Run(_spark_run(f"{event.run}{event.job}"), made)
        self._put(_event(time, RunState[event.state], run, job, [], []))

    def _time(self, *, before_seconds: float = 0.0) -> str:
        return (clocks.utc_now(self._clock) - timedelta(seconds=before_seconds)).isoformat()

    def _job(self, agent: Agent[Any, Any] | None, kind: str) -> Job:
        window = ".window" if kind == "WINDOW" else ""
        name = self._app.name if agent is None else f"{self._app.name}.{agent.name}{window}"
        processing = "BATCH" if window else "STREAMING"
        of: dict[str, Any] = {"jobType": facets.job_type_job.JobTypeJobFacet(processing, INTEGRATION, kind)}
        if agent is not None and inspect.isroutine(agent.function) and (text := inspect.getdoc(agent.function)):
            of["documentation"] = facets.documentation_job.DocumentationJobFacet(text)
        return Job(self._settings.namespace, name, of)

    def _run_facets(self, *, of: str | None, error: str) -> dict[str, Any]:
        """Return the facets of a run within the run `of` this name."""
        made = _engine_and_error(error)
        if of is not None:
            job = self._job(self._agents.get(of), "AGENT" if of else "WORKER")
            made["parent"] = facets.parent_run.ParentRunFacet(
                run=facets.parent_run.Run(self._runs[of]), job=facets.parent_run.Job(job.namespace, job.name)
            )
        return made

    def _inputs(self, counts: Mapping[str, int | None]) -> list[InputDataset]:
        """Return what agents read, with how many notifications each has acked, where that is known."""
        found: dict[str, int | None] = {}
        for agent, count in counts.items():
            event_type = self._agents[agent].event_type
            found[event_type] = None if count is None else (found.get(event_type) or 0) + count
        made = facets.input_statistics_input_dataset.InputStatisticsInputDatasetFacet
        return [
            InputDataset(
                **dataset(self._app.config, name), inputFacets={} if rows is None else {"inputStatistics": made(rows)}
            )
            for name, rows in sorted(found.items())
        ]

    def _outputs(self, counts: Mapping[str, int | None]) -> list[OutputDataset]:
        made = facets.output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet
        return [
            OutputDataset(
                **dataset(self._app.config, name), outputFacets={} if rows is None else {"outputStatistics": made(rows)}
            )
            for name, rows in sorted(counts.items())
        ]

    def _put(self, event: RunEvent) -> None:
        if len(self._unsent) >= MOST_WAITING:
            self._note(TimeoutError(f"{MOST_WAITING} run events are waiting"))
            return
        self._unsent.append(event)
        self._more.set()

    async def _send_all(self, send: Send, sent: anyio.Event, sending: anyio.CancelScope) -> None:
        with sending:  # also while the worker is cancelled
            while self._unsent or not self._ended:
                self._more = anyio.Event()
                while self._unsent:
                    await self._send(send, self._unsent[0])
                    self._unsent.popleft()
                if not self._ended:
                    await self._more.wait()
            sent.set()

    async def _send(self, send: Send, event: RunEvent) -> None:
        for wait in (*WAITS, None):
            try:
                await send(event)
            except Exception as error:  # whatever an endpoint does, agents go on
                if wait is None:
                    self._note(error)
                else:
                    await self._clock.sleep(wait)
            else:
                self._note(None)
                return

    def _note(self, error: Exception | None) -> None:
        changed, self._failing = self._failing is not (error is not None), error is not None
        self._app.events.emit(LineageTold(error=error, changed=changed))


class PipelineRun:
    """The run of a command on Spark, which notes how many notifications it has written, if it knows."""

    written: int | None = None


@contextmanager
def pipeline(
    config: Config, settings: Lineage, name: str, *, reads: Mapping[str, Any], writes: Mapping[str, Any]
) -> Iterator[PipelineRun]:
    """Tell the run of a command on Spark while the block runs, and how it ends. The mappings are those of `dataset` and
    `place`. Raises what the block raises.
    """
    noted, run_id, state, error = PipelineRun(), str(generate_new_uuid()), RunState.ABORT, ""
    clock = clocks.LoopClock()

    def tell(state: RunState) -> None:
        statistics = facets.output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet(noted.written)
        output = OutputDataset(**writes, outputFacets={} if noted.written is None else {"outputStatistics": statistics})
        job = Job(settings.namespace, name, {"jobType": facets.job_type_job.JobTypeJobFacet("BATCH", "SPARK", "JOB")})
        run = Run(run_id, _engine_and_error(error))
        event = _event(clocks.utc_now(clock).isoformat(), state, run, job, [InputDataset(**reads)], [output])
        try:
            anyio.run(_connect_and_send, config, settings, event)
        except Exception as failure:  # whatever an endpoint does, the command goes on
            Events().emit(LineageTold(error=failure, changed=True))

    tell(RunState.START)
    try:
        yield noted
        state = RunState.COMPLETE
    except Exception as raised:
        state, error = RunState.FAIL, text_of(raised)
        raise
    finally:
        tell(state)


def dataset(config: Config, event_type: str) -> dict[str, Any]:
    """Return the dataset of an event type: its namespace, its name and its schema."""
    backend, known = config.notification_backend, config.event_type(event_type)
    of = facets.schema_dataset
    fields = [
        of.SchemaDatasetFacetFields(name, type(rule).__name__.removesuffix("Handler"))
        for name, rule in known.identifier.items()
    ]
    return {
        "namespace": backend.jetstream.masked_servers[0] if backend.kind == "jetstream" else "memory",
        "name": topic_of(event_type, known).base,
        "facets": {"schema": of.SchemaDatasetFacet(fields)},
    }


def place(path: str) -> dict[str, Any]:
    """Return the dataset of a directory, which may be a URL of Spark's: its namespace and its name."""
    parts = urlsplit(path)
    if parts.scheme in ("", "file"):
        return {"namespace": "file", "name": parts.path}
    return {"namespace": f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}", "name": parts.path.strip("/")}


async def _connect_and_send(config: Config, settings: Lineage, event: RunEvent) -> None:
    with anyio.fail_after(LAST_SECONDS):
        if settings.subject is None:
            await _sender(settings, None)(event)
            return
        async with open_backend(config) as backend:
            await _sender(settings, backend)(event)


def _sender(settings: Lineage, backend: Backend | None) -> Send:
    if settings.subject is not None and backend is not None:
        return partial(_publish, backend, settings.subject, settings.stream)
    key = settings.api_key
    transport = HttpTransport(
        HttpConfig(
            url=settings.url or "",
            timeout=TIMEOUT_SECONDS,
            auth=ApiKeyTokenProvider({"apiKey": key.reveal()}) if key else TokenProvider({}),
            retry={"total": 0},
        )
    )
    transport.session.stream = True  # the body of an answer is not read: it may have any size
    transport.session.hooks["response"].append(_refuse_redirect)
    return partial(_post, transport, anyio.CapacityLimiter(POSTING))


def _engine_and_error(error: str) -> dict[str, Any]:
    """Return the facets that every run has."""
    made: dict[str, Any] = {
        "processing_engine": facets.processing_engine_run.ProcessingEngineRunFacet(__version__, "aviso-workers")
    }
    if error:
        made["errorMessage"] = facets.error_message_run.ErrorMessageRunFacet(error, "PYTHON")
    return made


def _spark_run(of: str) -> str:
    """Return the id of a run, the same from every worker and on every repeat: `of` has application, attempt and job."""
    return str(uuid5(NAMESPACE_URL, of))


def _named(agent: Agent[Any, Any], known: Collection[str]) -> list[str]:
    """Return those of the known event types that the code of an agent names where it publishes."""
    functions = (agent.function, *agent.dead_letter_functions)
    named = set[str]().union(*(outputs.named_event_types(each, methods=outputs.PUBLISHING) for each in functions))
    return sorted(named.intersection(known))


async def _post(transport: HttpTransport, limiter: anyio.CapacityLimiter, event: RunEvent) -> None:
    with anyio.fail_after(TIMEOUT_SECONDS):  # that of the transport begins anew with each byte
        await anyio.to_thread.run_sync(transport.emit, event, abandon_on_cancel=True, limiter=limiter)


def _refuse_redirect(response: Any, **_: object) -> None:
    """Raise `OSError` for a redirect: to follow it, its whole body would be read, and the event may not be sent on."""
    if response.is_redirect:
        response.close()
        raise OSError(f"{response.url} redirects to {response.headers['location']!r}: give that URL, if it is right")


def _event(
    time: str, state: RunState, run: Run, job: Job, inputs: list[InputDataset], outputs: list[OutputDataset]
) -> RunEvent:
    return RunEvent(
        eventTime=time, producer=PRODUCER, eventType=state, run=run, job=job, inputs=inputs, outputs=outputs
    )


async def _publish(backend: Backend, subject: str, stream: str, event: RunEvent) -> None:
    data = Serde.to_json(event).encode()
    assert event.eventType is not None
    message_id = f"{event.run.runId}:{event.eventType.value}:{hashlib.sha256(data).hexdigest()}"
    message = Message(subject=subject, data=data)
    await backend.publish(message, message_id=message_id, stream=stream, timeout_seconds=TIMEOUT_SECONDS)
