"""The facts that the engine states.

The engine emits, observers listen: metrics, logs, readiness and the test harness. Nothing in the engine asks who
listens, and no observer can change what happens. Facts carry no subject and no payload.

The class of a fact says how it is told: its `lines` in the log, what `hindrance` it is to a worker's readiness, and the
`warning` to people where nobody listens. What is counted stands in the tables of `telemetry.metrics`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, ClassVar, Literal, NamedTuple

from msgspec import Struct

from aviso_workers.aviso.literals import printable, quoted
from aviso_workers.errors import line_of
from aviso_workers.jetstream.identities import Identity

log = logging.getLogger(__name__)

Level = Literal["info", "warning", "error"]


class LogLine:
    """A line of the log: its level, the name of its event, and its fields."""

    def __init__(self, level: Level, event: str, /, **fields: object) -> None:
        self.level = level
        self.event = event
        self.fields = {name: _shown(name, value) for name, value in fields.items()}


def _shown(name: str, value: object) -> object:
    """Return the value of a field as logs have it."""
    match value:
        case float() if name == "again_in_seconds":
            return round(value, 1)
        case Exception() if name == "error":
            return str(value)
        case tuple():
            return list(value)
    return value


class Many(NamedTuple):
    """How facts are logged of which there may be very many: `FailureLog` only counts most of those that are alike."""

    event: str
    """Of the line that says how many were only counted."""
    alike: tuple[str, ...]
    """The fields that are equal in those that are counted together."""


class Hindrance(NamedTuple):
    """What keeps a worker from being ready, or does so no more."""

    agent: str
    """Whose work it hinders; `WORKER` where it is not that of a single agent."""
    of: str
    """What is lacking: the name of a stream or a bucket, or one of the names below."""
    text: str | None = None
    """Why the worker is not ready; None where the hindrance is over."""
    is_ready: bool = False
    """Whether the worker is ready all the same: `/readyz` says the text, and answers yes."""
    since: datetime | None = None
    """Since when the worker is hindered by it, by its own clock; of a fact None."""


WORKER = ""
CONNECTION, DEAD_LETTERS, CALLS, BODIES = "connection", "dead letters", "calls", "bodies"
OUTAGE = "outage"
"""What a worker or an agent lacks beside a bucket or a stream; none of them has such a name."""


class Event(Struct, frozen=True):
    """A fact that the engine states. A class of facts says in its body how it is logged: `lines` has no default."""

    many: ClassVar[Many | None] = None
    """None where all are logged."""

    def lines(self) -> Iterable[LogLine]:
        """Return what the log says: `logged(...)`, `only_counted`, `unheard`, or a method where values decide."""
        raise NotImplementedError

    def hindrance(self) -> Hindrance | None:
        """Return what keeps the worker from being ready because of this fact, or that it does so no more."""
        return None

    def warning(self) -> str:
        """Return what people should hear of the fact where nobody listens to it; empty where it is not a warning."""
        return ""

    def line(self, level: Level, event: str, *names: str, **more: object) -> LogLine:
        """Return a line with the fields of these names, or all fields of the fact, and then with more."""
        return LogLine(level, event, **{name: getattr(self, name) for name in names or self.__struct_fields__}, **more)


def logged(level: Level, event: str, *names: str, cure: str = "") -> Callable[[Any], Iterable[LogLine]]:
    """Return the `lines` of facts that have one, with the fields of these names, or all, and with what to do."""
    more = {"cure": cure} if cure else {}
    return lambda fact: [fact.line(level, event, *names, **more)]


def only_counted(_: Event) -> Iterable[LogLine]:
    """Return the `lines` of a fact that is not logged: only the metrics listen to it."""
    return ()


def unheard(_: Event) -> Iterable[LogLine]:
    """Return the `lines` of a fact that no worker listens to, but the test harness does."""
    return ()


class _OfAgent(Event, frozen=True, kw_only=True):
    """A fact about an agent."""

    agent: str


class _OfConsumer(_OfAgent, frozen=True, kw_only=True):
    """A fact about the durable consumer of an agent."""

    stream: str
    consumer: str


PublishOutcome = Literal["stored", "duplicate", "scheduled", "failed"]


class Published(Event, frozen=True, kw_only=True):
    """Publishing `count` notifications ended: stored, found to be stored already, kept until they are due, or failed.

    What was kept is stated again when it is stored. Of many that are published together, those that were there already
    may count as stored: see `PubAck.sequence`.
    """

    lines = only_counted

    event_type: str
    outcome: PublishOutcome
    attempts: int
    count: int = 1


class Overdue(Event, frozen=True, kw_only=True):
    """A notification is due and could not be stored; it is tried again after a wait."""

    lines = logged("warning", "notification.overdue")

    stream: str
    message_id: str
    error: Exception
    again_in_seconds: float


class NotRemoved(Event, frozen=True, kw_only=True):
    """A notification that was due was stored, and could not be removed from the stream in which it waited."""

    stream: str
    """The one in which it waited."""
    message_id: str
    error: Exception

    def lines(self) -> Iterator[LogLine]:
        cure = f"it was delivered; allow workers to publish to $JS.API.STREAM.MSG.DELETE.{self.stream}"
        yield self.line("warning", "notification.not_removed", cure=cure)


SettledOutcome = Literal["acked", "retried", "dead_lettered"]


UNAVAILABLE = "unavailable"
"""The reason where a failure says that what the agent depends on is away, and counts as no attempt."""


class Settled(_OfAgent, frozen=True, kw_only=True):
    """A delivery was settled; `seconds` is the time the handling took.

    Of those that were handled well, each is stated only where somebody listens: `Acked` says the same of many.
    """

    lines = unheard

    event_type: str
    sequence: int
    outcome: SettledOutcome
    reason: str
    seconds: float
    waited_seconds: float
    """From its arrival here, or from when it was due again, until the handling began."""
    stored_to_settled_seconds: float
    """From the time at which the stream stored the notification."""
    num_delivered: int
    error: BaseException | None = None
    attempt: int = 0
    """Where handling it failed, how often it has failed with this one."""
    attempts: int | None = 0
    """After so many failures it becomes a dead letter."""
    again_in_seconds: float = 0.0
    """When it is retried."""

    @property
    def notification(self) -> str:
        """`<event type>@<sequence>`."""
        return f"{self.event_type}@{self.sequence}"


class Failed(Settled, frozen=True, kw_only=True):
    """A delivery was settled whose handling has failed, or which another worker may have been given meanwhile."""

    many = Many("notification.more_failures", alike=("agent", "outcome", "reason"))

    def lines(self) -> Iterator[LogLine]:
        """Yield the line without the error: `FailureLog` has the traceback of the first one only."""
        yield self.line(
            "error" if self.outcome == "dead_lettered" else "warning",
            f"notification.{self.outcome}",
            *("agent", "notification", "reason", "num_delivered"),
            seconds=round(self.seconds, 3),
            **({"attempt": self.attempt, "attempts": self.attempts} if self.attempt else {}),
            **({"again_in_seconds": self.again_in_seconds} if self.outcome == "retried" else {}),
        )


class Acked(_OfAgent, frozen=True, kw_only=True):
    """An agent has handled deliveries well, and acked them, in one turn of the event loop.

    The lists have a number for each, as the fields of `Settled` of the same names.
    """

    lines = only_counted

    event_type: str
    seconds: Sequence[float]
    waited_seconds: Sequence[float]
    stored_to_settled_seconds: Sequence[float]
    redelivered: int
    """How many of them had been delivered before."""


class Sampled(_OfAgent, frozen=True, kw_only=True):
    """A delivery was settled whose call has a sampled span, and took so many seconds; stated where traces are on."""

    lines = only_counted

    seconds: float
    trace_id: str
    span_id: str


class Passed(Struct, frozen=True):
    """How far a consumer that reads the whole of its stream has come."""

    consumer: Identity
    sequence: int
    """Of the stream: up to it, everything was delivered, or had left the stream."""
    filters: frozenset[str] = frozenset()
    """Those of the consumer; with others, as after an edit by hand, it passes over what is in the stream."""


class DeadLettersRefused(_OfAgent, frozen=True, kw_only=True):
    """An agent's dead letters cannot be stored. Their originals come again, and until then no other is tried."""

    lines = logged("error", "dead_letters.not_stored")

    error: Exception
    again_in_seconds: float

    def hindrance(self) -> Hindrance:
        return Hindrance(self.agent, DEAD_LETTERS, f"dead letters cannot be stored: {self.error}")


class DeadLettersStored(_OfAgent, frozen=True, kw_only=True):
    """After `DeadLettersRefused`: one was stored, or for some time none had to be."""

    lines = logged("info", "dead_letters.stored")

    def hindrance(self) -> Hindrance:
        return Hindrance(self.agent, DEAD_LETTERS)


class DeadLetterCallFailed(_OfAgent, frozen=True, kw_only=True):
    """An agent's function of `on_dead_letter` has failed for a notification whose dead letter is stored."""

    many = Many("dead_letter.more_call_failures", alike=("agent",))

    notification: str
    """`<event type>@<sequence>`."""
    error: BaseException
    again_in_seconds: float
    """When it is called again; 0 where it is not."""

    def lines(self) -> Iterator[LogLine]:
        level: Level = "warning" if self.again_in_seconds else "error"
        names = ("agent", "notification", "again_in_seconds")
        yield self.line(level, "dead_letter.call_failed", *names, exc_info=self.error)


class FailuresNotStored(_OfAgent, frozen=True, kw_only=True):
    """The bucket of an agent's failure counts cannot be used. Stated once, until it can be again."""

    lines = logged(
        "warning",
        "failures.not_stored",
        cure="let the worker's user read and write the bucket; until then each process counts by itself",
    )

    bucket: str
    error: Exception


class NotReadAgain(_OfAgent, frozen=True, kw_only=True):
    """A notification whose body was left out while it waited cannot be read from its stream.

    It is tried again after a wait, and what is behind it waits as well. Stated once, until `ReadAgain`.
    """

    stream: str
    sequence: int
    error: Exception

    def lines(self) -> Iterator[LogLine]:
        cure = (
            "it is tried again every second, and what is behind it waits; where a right is missing, let the worker's "
            f"user publish to $JS.API.STREAM.MSG.GET.{self.stream}"
        )
        yield self.line("warning", "notification.not_read_again", cure=cure)

    def hindrance(self) -> Hindrance:
        text = f"sequence {self.sequence}, which waits, cannot be read again: {self.error}"
        return Hindrance(self.agent, BODIES, text)


class ReadAgain(_OfAgent, frozen=True, kw_only=True):
    """After `NotReadAgain`: one could be read, or for some time none had to be."""

    lines = logged("info", "notification.read_again")

    stream: str

    def hindrance(self) -> Hindrance:
        return Hindrance(self.agent, BODIES)


def _call(*, in_thread: bool) -> tuple[str, str]:
    """Return what a call is named, and what to do about one that runs on."""
    if in_thread:
        return "thread", "give what the function waits for a timeout of its own"
    return "call", "let what the function awaits be cancelled: no shield, no loop that catches the cancellation"


class _OfDependency(Event, frozen=True, kw_only=True):
    """A fact about something that agents depend on."""

    dependency: str
    """Its name: that of the agent, where the agent has it for itself."""
    agents: tuple[str, ...]
    """The agents of this worker that depend on it."""

    def _away(self, text: str | None) -> Hindrance:
        said = text and f"{'agents' if len(self.agents) > 1 else 'agent'} {', '.join(self.agents)}: {text}"
        return Hindrance(WORKER, f"{OUTAGE} {self.dependency}", said, is_ready=True)


class OutageBegan(_OfDependency, frozen=True, kw_only=True):
    """Something that agents depend on is away in this worker. What fails because of that counts as no attempt, and is
    logged no more by itself.

    One fact tells of all agents that depend on it. Where it is away for one key of `by` alone, this is stated for the
    first key.
    """

    error: BaseException
    key: str = ""
    """The values of `by` for which it is away, such as `tenant=acme`; empty where it is away for all."""

    def lines(self) -> Iterator[LogLine]:
        yield LogLine(
            "warning",
            "dependency.away",
            dependency=self.dependency,
            agents=self.agents,
            **({"key": self.key} if self.key else {}),
            error=self.reason,
            cure="bring it back; no attempts are used meanwhile, and its agents go on by themselves",
        )

    @property
    def reason(self) -> str:
        """The error with its class, in a line."""
        return printable(f"{type(self.error).__name__}: {line_of(self.error)}")

    def hindrance(self) -> Hindrance:
        return self._away(f"waits for the end of an outage: {self.reason}")


class OutageGoesOn(_OfDependency, frozen=True, kw_only=True):
    """A minute after `OutageBegan`, or after the last of these: it is still away."""

    lines = logged("warning", "dependency.still_away")

    reason: str
    """The last error, with its class."""
    seconds: float
    """Since when it is away."""
    calls: int
    """How many calls were tried since this was last stated."""
    failures: int
    """How many of them have failed."""
    waiting: int
    """How many notifications wait in this worker."""


class OutageEnded(_OfDependency, frozen=True, kw_only=True):
    """After `OutageBegan`: everything begins again."""

    lines = logged("info", "dependency.back")

    seconds: float
    """How long it was away."""
    calls: int
    """How many calls were tried meanwhile."""
    failures: int
    """How many of them have failed."""

    def hindrance(self) -> Hindrance:
        return self._away(None)


class CallOverdue(_OfAgent, frozen=True, kw_only=True):
    """A call runs on 5 seconds after its timeout, while others of its agent can be made.

    Its notification, or its batch, is kept until it ends.
    """

    timeout_seconds: float
    in_thread: bool = True
    """Whether it is the call of a plain function. One of an async function runs on where it cannot be cancelled."""

    def lines(self) -> Iterator[LogLine]:
        what, cure = _call(in_thread=self.in_thread)
        cure = f"its notification is kept until it ends; {cure}"
        yield self.line("warning", f"{what}.overdue", "agent", "timeout_seconds", cure=cure)


class CallsStuck(_OfAgent, frozen=True, kw_only=True):
    """All calls of an agent run on, 5 seconds after their timeout: it handles nothing until one of them ends.

    What waits is given back, so that other workers handle it.
    """

    calls: int
    in_thread: bool = True

    def lines(self) -> Iterator[LogLine]:
        what, cure = _call(in_thread=self.in_thread)
        yield self.line(
            "error", f"{what}s.stuck", "agent", **{f"{what}s": self.calls}, cure=f"start the worker again, and {cure}"
        )

    def hindrance(self) -> Hindrance:
        what, _ = _call(in_thread=self.in_thread)
        text = f"{self.calls} {what}s are stuck" if self.calls > 1 else f"its {what} is stuck"
        return Hindrance(self.agent, CALLS, text)


class CallsAbandoned(_OfAgent, frozen=True, kw_only=True):
    """Calls of an agent run on although its worker, which stops, has cancelled them. What they handle is given back.

    Another worker may handle it while they still run. A worker process ends itself soon after this.
    """

    lines = logged(
        "error",
        "calls.abandoned",
        cure="they cannot be cancelled, and others may handle these notifications while they still run; give what "
        "they wait for a timeout that is shorter than workers.drain_timeout_seconds",
    )

    sequences: Sequence[int]


class CallsFreed(_OfAgent, frozen=True, kw_only=True):
    """After `CallsStuck`: a call has ended, and the agent goes on."""

    in_thread: bool = True

    def lines(self) -> Iterator[LogLine]:
        what, _ = _call(in_thread=self.in_thread)
        yield self.line("info", f"{what}s.freed", "agent")

    def hindrance(self) -> Hindrance:
        return Hindrance(self.agent, CALLS)


class AgentStarted(_OfAgent, frozen=True, kw_only=True):
    """An agent begins to read a stream."""

    lines = logged("info", "agent.started", "agent", "stream", "consumer")

    stream: str
    consumer: str
    passed: Passed | None = None
    """How far its consumer had come before; of a consumer that has delivered nothing yet, all that is stored counts as
    passed. None where the agent does not read the whole stream."""

    def hindrance(self) -> Hindrance:
        return Hindrance(self.agent, self.stream)


class AgentDisturbed(_OfAgent, frozen=True, kw_only=True):
    """An agent could not go on reading and tries again after a wait."""

    lines = logged("warning", "agent.disturbed", "agent", "error", "again_in_seconds")

    stream: str
    error: Exception
    again_in_seconds: float

    def hindrance(self) -> Hindrance:
        return Hindrance(self.agent, self.stream, str(self.error))


class AgentStopped(_OfAgent, frozen=True, kw_only=True):
    """An agent left in order: what it was working on is finished, and what it had not begun was given back, as was
    what was not done in time."""

    lines = logged("info", "agent.stopped")

    finished: int
    """Deliveries since it started."""
    returned: int


class TaskFailed(Event, frozen=True, kw_only=True):
    """A long-running task of an app raised and is started again after a wait."""

    task: str
    error: BaseException
    again_in_seconds: float

    def lines(self) -> Iterator[LogLine]:
        yield self.line("error", "task.failed", "task", "again_in_seconds", exc_info=self.error)


class Ticked(Event, frozen=True, kw_only=True):
    """A timer was run."""

    timer: str
    time: datetime
    """When it was due."""
    late_seconds: float
    """How much later it began."""
    seconds: float
    """How long it took."""
    error: BaseException | None = None

    def lines(self) -> Iterator[LogLine]:
        if self.error is not None:  # what went well is counted
            yield self.line("error", "timer.failed", "timer", tick=self.time.isoformat(), exc_info=self.error)


class TimerRescheduled(Event, frozen=True, kw_only=True):
    """A timer with `singleton=True` has another schedule than that by which its last tick was run, and begins by it."""

    lines = logged("warning", "timer.rescheduled")

    timer: str
    schedule: str
    """As `Schedule.text`, and so is `before`."""
    before: str


class WindowDone(_OfAgent, frozen=True, kw_only=True):
    """An agent was run for a window that is over, well or (with an error) ill.

    Then it is run again after a wait, or the window has become a dead letter.
    """

    many = Many("window.more_failures", alike=("agent", "reason"))

    key: str
    start: datetime
    end: datetime
    seconds: float
    """How long it took."""
    error: BaseException | None = None
    again_in_seconds: float = 0.0
    reason: str = ""
    """Why it is run again, as the reason of `Failed`; empty where it is not."""
    dead_lettered: str = ""
    """The reason of the dead letter; empty where there is none."""

    def lines(self) -> Iterator[LogLine]:
        """Yield the line without the error: `FailureLog` has the traceback of the first one only."""
        if self.error is None:
            return  # what went well is counted
        of = {"agent": self.agent, "key": self.key, "start": self.start.isoformat()}
        if self.dead_lettered:
            yield LogLine("error", "window.dead_lettered", **of, reason=self.dead_lettered)
        else:
            yield LogLine("error", "window.failed", **of, again_in_seconds=self.again_in_seconds)


class WindowFunctionsChanged(_OfAgent, frozen=True, kw_only=True):
    """The code of the worker that closes an agent's windows has other functions than that of the worker before.

    An open window keeps what was counted in it, and what comes is counted by the new functions.
    """

    lines = logged(
        "warning",
        "windows.functions_changed",
        cure="open windows keep what was counted in them by the earlier functions; to count everything anew, give the "
        "agent another name and a start",
    )

    functions: tuple[str, ...]
    """Which of `fold`, `key` and `time`."""


class LeadershipChanged(Event, frozen=True, kw_only=True):
    """This worker begins to run the timers of which one worker of the fleet runs all, or it ceases to."""

    leads: bool
    token: int

    def lines(self) -> Iterator[LogLine]:
        yield self.line("info", "leader.began" if self.leads else "leader.ceased", "token")


class LeadershipHindered(Event, frozen=True, kw_only=True):
    """The bucket of an app's leases, of its limits, or of its timers' claims, cannot be used.

    What one worker does for all, such as to run a timer or to close a window, this worker cannot do, nor begin what a
    limit across the fleet has to let begin. Stated once, until `LeadershipUnhindered`.
    """

    lines = logged(
        "error",
        "leader.hindered",
        cure="until it can be used, this worker runs no timer with singleton=True, closes no window, and begins no "
        "call for which a Rate or Slots have to be asked; "
        "where a right is missing, let the worker's user read and write it",
    )

    bucket: str
    error: Exception

    def hindrance(self) -> Hindrance:
        return Hindrance(WORKER, self.bucket, f"cannot lead, for lack of bucket {self.bucket}: {self.error}")


class LeadershipUnhindered(Event, frozen=True, kw_only=True):
    """After `LeadershipHindered`: the bucket can be used again, or this worker does not lead and needs it no more."""

    lines = logged("info", "leader.unhindered")

    bucket: str

    def hindrance(self) -> Hindrance:
        return Hindrance(WORKER, self.bucket)


class Skipped(Event, frozen=True, kw_only=True):
    """A replay or a watch left out a stored message that is not a notification of its event type."""

    event_type: str
    sequence: int
    error: Exception

    def lines(self) -> Iterator[LogLine]:
        yield LogLine(
            "warning", "notification.skipped", notification=f"{self.event_type}@{self.sequence}", error=self.error
        )

    def warning(self) -> str:
        return f"{self.event_type}@{self.sequence} is left out: {self.error}"


class Unreadable(Event, frozen=True, kw_only=True):
    """A message of one of our own streams is not what we write there: nothing comes of it, and it is not read again."""

    lines = logged(
        "warning",
        "message.unreadable",
        cure="nothing comes of it; find out who writes to the stream beside the workers",
    )
    many = Many("message.more_unreadable", alike=("stream", "reason"))

    stream: str
    sequence: int
    reason: Literal["content", "foreign"] = "content"
    """`foreign`: it is known that aviso-workers has not published it."""
    error: Exception


class StreamGone(Event, frozen=True, kw_only=True):
    """The stream that a watch reads does not exist, or was deleted. The watch waits for it to be made."""

    lines = logged("warning", "stream.gone")

    stream: str

    def warning(self) -> str:
        return f"there is no stream {self.stream}: waiting for it to be created"


class StartNotReached(Event, frozen=True, kw_only=True):
    """A watch was to begin at a sequence that its stream has never had, and begins at its first message instead."""

    lines = logged("warning", "stream.start_not_reached")

    stream: str
    sequence: int
    last_sequence: int
    """Of the stream."""

    def warning(self) -> str:
        return (
            f"there is no {self.sequence} to begin at: {self.stream} ends at {self.last_sequence}; either it was "
            "deleted and recreated, or the id is wrong; beginning at its first message"
        )


class StreamNotRead(Event, frozen=True, kw_only=True):
    """A replay or a watch gets nothing from its stream although there is a connection, and asks again."""

    lines = logged("warning", "stream.not_read")

    stream: str
    error: Exception

    def warning(self) -> str:
        return f"stream {self.stream} cannot be read for the moment, and is asked again: {self.error}"


class StreamMadeAgain(Event, frozen=True, kw_only=True):
    """A stream is not the one that a watch read, which goes on at its first message instead.

    It was deleted and recreated, restored, or set back: its sequences are those of other messages.
    """

    lines = logged("warning", "stream.made_again")

    stream: str
    next_sequence: int
    """Where reading was to go on."""
    last_sequence: int
    """Of the stream as it is now."""

    def warning(self) -> str:
        return (
            f"stream {self.stream} was deleted and recreated, or set back: its last sequence is {self.last_sequence}, "
            f"and {self.next_sequence} was to be read next; going on at its first message"
        )


class StreamProvisioned(Event, frozen=True, kw_only=True):
    """A stream was created or updated, or is used as it is: `refused` says why it was not updated."""

    stream: str
    action: Literal["created", "updated", "kept"]
    differences: tuple[str, ...] = ()
    refused: str = ""

    def lines(self) -> Iterator[LogLine]:
        if self.refused:
            yield self.line("warning", "stream.update_refused", "stream", "differences", error=self.refused)
        else:
            yield self.line("info", f"stream.{self.action}", "stream", "differences")

    def warning(self) -> str:
        if not self.refused:
            return ""
        return f"stream {self.stream} is used as it is ({'; '.join(self.differences)}): {self.refused}"


class ConsumerDiffers(Event, frozen=True, kw_only=True):
    """A durable consumer is used as it is, because these differences from what is wanted cannot be updated."""

    stream: str
    consumer: str
    differences: tuple[str, ...]

    def lines(self) -> Iterator[LogLine]:
        yield self.line("warning", "consumer.differs", cure=self._cure())

    def warning(self) -> str:
        return f"consumer {self.consumer} is used as it is ({'; '.join(self.differences)})"

    def _cure(self) -> str:
        if all(difference.startswith("max_ack_pending: ") for difference in self.differences):
            return (
                "the server, the account or the stream allows no more, and while so many wait to be tried again, "
                "nothing new is handled: raise its max_ack_pending"
            )
        if all(difference.startswith("start: ") for difference in self.differences):
            app, _, agent = self.consumer.partition("__")
            to = self.differences[0].rpartition(" -> ")[2]
            return (
                "an agent that has run goes on where it is; to take it to its new start: "
                f"aviso-workers agents reset {quoted(f'{app}/{agent}')} --to {quoted(to)}"
            )
        return (
            "these cannot be updated: stop the agent's workers and delete the consumer; it is recreated, "
            "and `aviso-workers agents reset` then takes it to where it shall go on"
        )


class ConsumerResumed(_OfConsumer, frozen=True, kw_only=True):
    """An agent's consumer was gone, and was recreated: it goes on after what was recorded as settled, or what this
    worker has last seen settled.
    """

    sequence: int
    """The first one of the stream that it is given."""
    recorded: bool = True
    """Whether there was a record of it; `agents rm` removes it with the consumer."""
    why: Literal["lost", "filter", "max_deliver"] = "lost"
    """Why it was recreated: it was lost, or a worker removed it because its filter had hidden notifications, or its
    `max_deliver` may have had the server give some up."""

    def lines(self) -> Iterator[LogLine]:
        told = ("agent", "stream", "consumer", "sequence")
        yield self.line("warning", "consumer.resumed", *told, cure=self._cure())

    def _cure(self) -> str:
        if self.why != "lost":
            line = "consumer.filter_hides" if self.why == "filter" else "consumer.edited"
            return f"see {line}, which says why the worker has recreated it"
        if self.recorded:
            return (
                "find out who deleted the consumer; half a minute of notifications may be handled again, and what was "
                "settled behind an unfinished one"
            )
        return (
            "its consumer and the record of it were removed while this worker ran: if `agents rm` was meant, stop this "
            "worker and repeat it; what others settled since this worker last read the consumer is handled again"
        )


class ConsumerNotRecorded(_OfAgent, frozen=True, kw_only=True):
    """How far an agent's consumer has come cannot be recorded. Stated once, until it can be again."""

    lines = logged(
        "warning",
        "consumer.not_recorded",
        cure="it is tried again; where a right is missing, let the worker's user read and write the bucket: it says "
        "where an agent goes on whose consumer is lost",
    )

    bucket: str
    error: Exception


def _spelled(versions: Iterable[tuple[str, ...]]) -> list[str]:
    """Return the filter of each version of an agent."""
    return [" ".join(version) or "everything" for version in versions]


class FiltersDiffer(_OfConsumer, frozen=True, kw_only=True):
    """Which other versions of an agent, with another filter, read its consumer is not what it was before.

    While there are some, each worker gives back what only others want. Where there is none any more, it passes over
    what only they wanted.
    """

    own: tuple[str, ...]
    """Filter subjects of this worker's version."""
    others: tuple[tuple[str, ...], ...]
    """Filter subjects of each of the other versions."""
    gone: tuple[tuple[str, ...], ...]
    """Of those that were among them until now."""

    def lines(self) -> Iterator[LogLine]:
        of, own = ("agent", "stream", "consumer"), " ".join(self.own)
        if self.others:
            yield self.line("warning", "consumer.filters_differ", *of, own=own, others=_spelled(self.others))
        if self.gone or not self.others:
            yield self.line("warning", "consumer.filter_narrowed", *of, own=own, gone=_spelled(self.gone))


class AgentMoved(_OfAgent, frozen=True, kw_only=True):
    """An agent reads another stream than before, because the `topic.base` of its event type was changed; or another
    program has an app and an agent of these names."""

    stream: str
    before: str
    """The stream that it has read before."""
    consumer: str
    """The name of its consumer on either stream."""
    left: int
    """Notifications of the former stream that it has not settled."""
    is_read: bool = False
    """Whether a worker may read the former stream now."""

    def lines(self) -> Iterator[LogLine]:
        removal = (
            f"else remove the consumer: `aviso-workers consumers rm {quoted(self.before)} {quoted(self.consumer)}`"
        )
        other = "if another program reads it, give its app or agent another name"
        yield self.line(
            "warning",
            "agent.moved",
            *("agent", "stream", "before", "left"),
            cure="to handle what is left, run a worker with the former topic.base; "
            + (other if self.is_read else removal),
        )


class FunctionsDiffer(_OfConsumer, frozen=True, kw_only=True):
    """Which other functions share the notifications of an agent is not what it was before.

    In a deploy that renames or moves the function, these are the old and the new one. Otherwise, two programs have an
    app and an agent of the same name, and each is given a part of the notifications.
    """

    own: str
    """Module and qualified name of this worker's function."""
    others: tuple[str, ...]
    """Those of the other workers; empty where there are no others any more."""

    def lines(self) -> Iterator[LogLine]:
        if not self.others:
            yield self.line("info", "consumer.functions_are_one", "agent", "stream", "consumer", "own")
            return
        yield self.line(
            "warning",
            "consumer.functions_differ",
            cure="outside of a deploy, give one of the apps or agents another name: each of them handles only a part "
            "of the notifications",
        )


class FilterHides(_OfConsumer, frozen=True, kw_only=True):
    """The filter of an agent's consumer hid notifications that a version of the agent wants, so it is recreated.

    Somebody has edited it, or an update of a worker came late. It begins after what was settled while its filter was
    complete.
    """

    found: tuple[str, ...]
    """The filter subjects that it had."""
    wanted: tuple[str, ...]
    """The filter subjects that it has to have."""

    def lines(self) -> Iterator[LogLine]:
        yield self.line(
            "warning",
            "consumer.filter_hides",
            *("agent", "stream", "consumer"),
            found=" ".join(self.found),
            wanted=" ".join(self.wanted),
            cure="the consumer is recreated, and half a minute of notifications may be handled again; do not edit the "
            "filter of an agent's consumer, but the where of the agent",
        )


class ConsumerEdited(_OfConsumer, frozen=True, kw_only=True):
    """Somebody has edited the consumer of an agent, and a worker has set these fields right."""

    lines = logged(
        "warning",
        "consumer.edited",
        cure="the worker has set these fields right; do not edit the consumer of an agent, but the agent",
    )

    differences: tuple[str, ...]


class ConsumerTakenBack(_OfConsumer, frozen=True, kw_only=True):
    """The consumer of an agent has settled less than workers have recorded, and no operator's command has recorded that
    it was reset. So somebody else has reset it, or a server has lost acks.
    """

    lines = logged(
        "warning",
        "consumer.taken_back",
        cure="what was settled is handled again; `aviso-workers agents reset` is the reset that is recorded, and who "
        "else may do it is in docs/security.md",
    )

    recorded: int
    """The sequence up to which everything was settled, as workers have recorded."""
    settled: int
    """That up to which everything is settled now."""


class AckWaitDiffers(_OfConsumer, frozen=True, kw_only=True):
    """The server redelivers what a worker holds after another `ack_wait` than the agent's, or not any more.

    Workers of several versions share a consumer, and the longest `ack_wait` that one of them wants is in effect.
    """

    own_seconds: float
    """What this worker's version wants."""
    in_effect_seconds: float

    def lines(self) -> Iterator[LogLine]:
        if self.own_seconds == self.in_effect_seconds:
            yield self.line("info", "consumer.ack_wait_is_own")
        else:
            yield self.line("warning", "consumer.ack_wait_differs")


class ConnectionChanged(Event, frozen=True, kw_only=True):
    connected: bool
    reason: str
    opened: bool = False
    """Whether there was a connection before."""

    def lines(self) -> Iterator[LogLine]:
        if self.connected:
            yield LogLine("info", "connection.up")
        else:
            yield self.line("warning", "connection.down", "reason")

    def hindrance(self) -> Hindrance:
        return Hindrance(WORKER, CONNECTION, None if self.connected else f"not connected: {self.reason}")

    def warning(self) -> str:
        if self.connected:
            return "connected again" if self.opened else ""
        what = "the connection was lost, and" if self.opened else "there is no connection yet, and it"
        return f"{what} is tried again: {self.reason}"


class ConnectionSlow(Event, frozen=True, kw_only=True):
    """The connection was made, and works slower than it could."""

    lines = logged("warning", "connection.slow", cure="install the nats-py that aviso-workers asks for")

    reason: str


class PermissionDenied(Event, frozen=True, kw_only=True):
    """The server denied us to publish or to subscribe to subjects of a kind; stated once for each kind."""

    lines = logged(
        "error", "permission.denied", cure="`aviso-workers server render --role` prints what each role needs"
    )

    denied: str
    """As `publish to $js.ack.mars.field__index.>`."""

    def warning(self) -> str:
        return f"the server denies this user to {self.denied}"


class ForeignAnswer(Event, frozen=True, kw_only=True):
    """An answer came that does not belong to the request for which it came. It was ignored.

    A user may have had it sent there to make us believe that something succeeded (docs/security.md).
    """

    answer: str
    """As `publish to stream MARS: an acknowledgement of stream OTHER came as its answer`."""
    times: int
    """How often this has come by now."""

    def lines(self) -> Iterator[LogLine]:
        if str(self.times).strip("0") == "1":  # the first, the tenth, the hundredth: there may be many
            cure = "it was ignored; docs/security.md says who can have such answers sent"
            yield self.line("warning", "answer.foreign", cure=cure)

    def warning(self) -> str:
        return f"{self.answer}, and was ignored" if self.times == 1 else ""


class SparkRunChanged(Event, frozen=True, kw_only=True):
    """An application of Spark, or a job of one, has begun, goes on or has ended, as its event log says."""

    lines = unheard

    run: str
    """What identifies the run of the application: the same from every publisher, and on every repeat."""
    application: str
    """The application's name; its id where the log does not say the name."""
    job: str
    """The id of the job; empty for the application itself."""
    state: Literal["START", "RUNNING", "COMPLETE", "FAIL", "ABORT"]
    time: datetime | None
    """When that was, by Spark's clock; None where Spark does not say it."""
    error: str = ""
    """Why it has failed."""


class LineageTold(Event, frozen=True, kw_only=True):
    """A run event of lineage was sent, or (with an error) is lost."""

    error: Exception | None
    changed: bool
    """Whether the event before ended otherwise: one of the two was sent, and the other is lost."""

    def lines(self) -> Iterator[LogLine]:
        if not self.changed:
            return
        if self.error is None:
            yield LogLine("info", "lineage.sent_again")
        else:
            cure = "agents go on, and run events are lost until workers.lineage can be reached; see docs/lineage.md"
            yield self.line("warning", "lineage.not_sent", "error", cure=cure)

    def warning(self) -> str:
        return f"a run event of lineage is lost: {self.error}" if self.error and self.changed else ""


class Measured(Event, frozen=True, kw_only=True):
    """A router measured something that Prometheus is to see as a gauge, in place of what it was before."""

    lines = only_counted

    name: str
    help: str
    labels: tuple[str, ...]
    values: Mapping[tuple[str, ...], float]
    """By the values of the labels."""


def all_kinds(of: type[Event] = Event) -> list[type[Event]]:
    """Return the classes of facts that the engine states."""
    found = [each for kind in of.__subclasses__() for each in (kind, *all_kinds(kind))]
    return [kind for kind in found if not kind.__name__.startswith("_")]


class Events:
    """Where facts are stated and listened to. Listeners are called at once, in the order they came.

    One that raises is logged, and the others are called all the same. A warning that nobody listens to, as in a script
    or a command, goes to the standard library's logging, which writes it to standard error unless told otherwise.
    """

    def __init__(self) -> None:
        self._listeners: dict[type, list[Callable[[Any], None]]] = {kind: [] for kind in all_kinds()}

    def listen(self, listener: Callable[[Any], None], *kinds: type[Event]) -> None:
        """Call the listener with facts of these kinds, or of all."""
        for listeners in self._listening(kinds):
            listeners.append(listener)

    @contextmanager
    def heard_by(self, listener: Callable[[Any], None], *kinds: type[Event]) -> Iterator[None]:
        """Call the listener with facts of these kinds, or of all, while the block runs."""
        self.listen(listener, *kinds)
        try:
            yield
        finally:
            for listeners in self._listening(kinds):
                listeners.remove(listener)

    def listeners(self, kind: type[Event]) -> Collection[Callable[[Any], None]]:
        """Return who listens to facts of this kind, now and later: for what is too dear to be made for nobody."""
        return self._listeners[kind]

    def _listening(self, kinds: tuple[type[Event], ...]) -> Iterator[list[Callable[[Any], None]]]:
        """Return who listens to these kinds, or to all. Who listens to `Settled` hears what is `Failed`."""
        return (found for kind, found in self._listeners.items() if not kinds or issubclass(kind, kinds))

    def emit(self, event: Event) -> None:
        listeners = self._listeners[type(event)]
        if not listeners and (text := event.warning()):
            log.warning("%s", printable(text))
        for listener in listeners:
            try:
                listener(event)
            except Exception:
                log.exception("a listener failed")
