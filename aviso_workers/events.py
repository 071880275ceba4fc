"""The facts that the engine states.

The engine emits, observers listen: metrics, logs and the test harness. Nothing in the engine asks who listens, and
no observer can change what happens. Facts carry no subject and no payload.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Literal, get_args

from msgspec import Struct

from aviso_workers.aviso.literals import printable
from aviso_workers.jetstream.identities import Identity

__all__ = [
    "AckWaitDiffers",
    "Acked",
    "AgentDisturbed",
    "AgentMoved",
    "AgentStarted",
    "AgentStopped",
    "CallOverdue",
    "CallsAbandoned",
    "CallsFreed",
    "CallsStuck",
    "ConnectionChanged",
    "ConnectionSlow",
    "ConsumerDiffers",
    "ConsumerEdited",
    "Counted",
    "DeadLettersRefused",
    "DeadLettersStored",
    "Event",
    "Events",
    "Failed",
    "FailuresNotStored",
    "FilterHides",
    "FiltersDiffer",
    "ForeignAnswer",
    "FunctionsDiffer",
    "LeadershipChanged",
    "LeadershipHindered",
    "LeadershipUnhindered",
    "Logged",
    "Measured",
    "NotReadAgain",
    "NotRemoved",
    "OfReadiness",
    "Overdue",
    "Passed",
    "PermissionDenied",
    "PublishOutcome",
    "Published",
    "Settled",
    "SettledOutcome",
    "Skipped",
    "StartNotReached",
    "StreamGone",
    "StreamMadeAgain",
    "StreamNotRead",
    "StreamProvisioned",
    "TaskFailed",
    "Ticked",
    "TimerRescheduled",
    "Unreadable",
    "WindowDone",
    "WindowFunctionsChanged",
    "WindowsResized",
]


log = logging.getLogger(__name__)

PublishOutcome = Literal["stored", "duplicate", "scheduled", "failed"]


class Published(Struct, frozen=True, kw_only=True):
    """Publishing `count` notifications ended: stored, found to be stored already, kept until they are due, or failed.

    What was kept is stated again when it is stored. Of many that are published together, those that were there already
    may count as stored: see `PubAck.sequence`.
    """

    event_type: str
    outcome: PublishOutcome
    attempts: int
    count: int = 1


class Overdue(Struct, frozen=True, kw_only=True):
    """A notification is due and could not be stored; it is tried again after a wait."""

    stream: str
    message_id: str
    error: Exception
    again_in_seconds: float


class NotRemoved(Struct, frozen=True, kw_only=True):
    """A notification that was due was stored, and could not be removed from the stream in which it waited."""

    stream: str
    """The one in which it waited."""
    message_id: str
    error: Exception


SettledOutcome = Literal["acked", "retried", "dead_lettered"]


class Settled(Struct, frozen=True, kw_only=True):
    """A delivery was settled; `seconds` is the time the handling took.

    Of those that were handled well, each is stated only where somebody listens: `Acked` says the same of many.
    """

    agent: str
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
    attempts: float = 0
    """After so many failures it becomes a dead letter."""
    again_in_seconds: float = 0.0
    """When it is retried."""

    @property
    def notification(self) -> str:
        """`<event type>@<sequence>`."""
        return f"{self.event_type}@{self.sequence}"


class Failed(Settled, frozen=True, kw_only=True):
    """A delivery was settled whose handling has failed, or which another worker may have been given meanwhile."""


class Acked(Struct, frozen=True, kw_only=True):
    """An agent has handled deliveries well, and acked them, in one turn of the event loop.

    The lists have a number for each, as the fields of `Settled` of the same names.
    """

    agent: str
    event_type: str
    seconds: Sequence[float]
    waited_seconds: Sequence[float]
    stored_to_settled_seconds: Sequence[float]
    redelivered: int
    """How many of them had been delivered before."""


class Passed(Struct, frozen=True):
    """How far a consumer that reads the whole of its stream has come."""

    consumer: Identity
    sequence: int
    """Of the stream: up to it, everything was delivered, or had left the stream."""
    filters: frozenset[str] = frozenset()
    """Those of the consumer; with others, as after an edit by hand, it passes over what is in the stream."""


class DeadLettersRefused(Struct, frozen=True, kw_only=True):
    """An agent's dead letters cannot be stored. Their originals come again, and until then no other is tried."""

    agent: str
    error: Exception
    again_in_seconds: float


class DeadLettersStored(Struct, frozen=True, kw_only=True):
    """After `DeadLettersRefused`: one was stored, or for some time none had to be."""

    agent: str


class FailuresNotStored(Struct, frozen=True, kw_only=True):
    """The bucket of an agent's failure counts cannot be used. Stated once, until it can be again."""

    agent: str
    bucket: str
    error: Exception


class NotReadAgain(Struct, frozen=True, kw_only=True):
    """A notification whose body was left out while it waited cannot be read from its stream.

    It is tried again after a wait, and what is behind it waits as well. Stated once, until `ReadAgain`.
    """

    agent: str
    stream: str
    sequence: int
    error: Exception


class ReadAgain(Struct, frozen=True, kw_only=True):
    """After `NotReadAgain`: one could be read, or for some time none had to be."""

    agent: str
    stream: str


class CallOverdue(Struct, frozen=True, kw_only=True):
    """A call runs on 5 seconds after its timeout, while others of its agent can be made.

    Its notification, or its batch, is kept until it ends.
    """

    agent: str
    timeout_seconds: float
    in_thread: bool = True
    """Whether it is the call of a plain function. One of an async function runs on where it cannot be cancelled."""


class CallsStuck(Struct, frozen=True, kw_only=True):
    """All calls of an agent run on, 5 seconds after their timeout: it handles nothing until one of them ends.

    What waits is given back, so that other workers handle it.
    """

    agent: str
    calls: int
    in_thread: bool = True


class CallsAbandoned(Struct, frozen=True, kw_only=True):
    """Calls of an agent run on although its worker, which stops, has cancelled them. What they handle is given back.

    Another worker may handle it while they still run. A worker process ends itself soon after this.
    """

    agent: str
    sequences: Sequence[int]


class CallsFreed(Struct, frozen=True, kw_only=True):
    """After `CallsStuck`: a call has ended, and the agent goes on."""

    agent: str
    in_thread: bool = True


class AgentStarted(Struct, frozen=True, kw_only=True):
    """An agent begins to read a stream."""

    agent: str
    stream: str
    consumer: str
    passed: Passed | None = None
    """How far its consumer had come before; of a consumer that has delivered nothing yet, all that is stored counts as
    passed. None where the agent does not read the whole stream."""


class AgentDisturbed(Struct, frozen=True, kw_only=True):
    """An agent could not go on reading and tries again after a wait."""

    agent: str
    stream: str
    error: Exception
    again_in_seconds: float


class AgentStopped(Struct, frozen=True, kw_only=True):
    """An agent left in order: what it was working on is finished, and what it had not begun was given back, as was
    what was not done in time."""

    agent: str
    finished: int
    """Deliveries since it started."""
    returned: int


class TaskFailed(Struct, frozen=True, kw_only=True):
    """A long-running task of an app raised and is started again after a wait."""

    task: str
    error: BaseException
    again_in_seconds: float


class Ticked(Struct, frozen=True, kw_only=True):
    """A timer was run."""

    timer: str
    time: datetime
    """When it was due."""
    late_seconds: float
    """How much later it began."""
    seconds: float
    """How long it took."""
    error: BaseException | None = None


class TimerRescheduled(Struct, frozen=True, kw_only=True):
    """A timer with `leader=True` has another schedule than that by which its last tick was run, and begins by it."""

    timer: str
    schedule: str
    """As `Schedule.text`, and so is `before`."""
    before: str


class WindowDone(Struct, frozen=True, kw_only=True):
    """An agent was run for a window that is over, well or (with an error) ill.

    Then it is run again after a wait, or the window has become a dead letter.
    """

    agent: str
    key: str
    start: datetime
    end: datetime
    seconds: float
    """How long it took."""
    error: BaseException | None = None
    again_in_seconds: float = 0.0
    dead_lettered: str = ""
    """The reason of the dead letter; empty where there is none."""


class WindowFunctionsChanged(Struct, frozen=True, kw_only=True):
    """The code of the worker that closes an agent's windows has other functions than that of the worker before.

    An open window keeps what was counted in it, and what comes is counted by the new functions.
    """

    agent: str
    functions: tuple[str, ...]
    """Which of `fold`, `key` and `time`."""


class WindowsResized(Struct, frozen=True, kw_only=True):
    """The code of the worker that closes an agent's windows states another size than that by which they are opened.

    Windows that start at `since` or later have the new size. Those that start before keep the size that they have.
    """

    agent: str
    size_seconds: int
    every_seconds: int
    """How often windows begin, from `since` on."""
    before_size_seconds: int
    before_every_seconds: int
    since: int
    """In seconds since 1970 UTC: the first moment, after all that was counted, at which windows of both sizes begin."""


class LeadershipChanged(Struct, frozen=True, kw_only=True):
    """This worker begins to run the timers of which one worker of the fleet runs all, or it ceases to."""

    leads: bool
    token: int


class LeadershipHindered(Struct, frozen=True, kw_only=True):
    """The bucket of an app's leases, or that of its timers' claims, cannot be used.

    What one worker does for all, such as to run a timer or to close a window, this worker cannot do. Stated once, until
    `LeadershipUnhindered`.
    """

    bucket: str
    error: Exception


class LeadershipUnhindered(Struct, frozen=True, kw_only=True):
    """After `LeadershipHindered`: the bucket can be used again, or this worker does not lead and needs it no more."""

    bucket: str


class Skipped(Struct, frozen=True, kw_only=True):
    """A replay or a watch left out a stored message that is not a notification of its event type."""

    event_type: str
    sequence: int
    error: Exception


class Unreadable(Struct, frozen=True, kw_only=True):
    """A message of one of our own streams is not what we write there: nothing comes of it, and it is not read again."""

    stream: str
    sequence: int
    error: Exception
    reason: Literal["content", "foreign"] = "content"
    """`foreign`: it is known that aviso-workers has not published it."""


class Suspected(Struct, frozen=True, kw_only=True):
    """A notification has no headers and the body of a server's answer. It is handled: it may be genuine."""

    event_type: str
    sequence: int
    agent: str = ""
    """The agent that it was delivered to; empty for a replay or a watch."""


class StreamGone(Struct, frozen=True, kw_only=True):
    """The stream that a watch reads does not exist, or was deleted. The watch waits for it to be made."""

    stream: str


class StartNotReached(Struct, frozen=True, kw_only=True):
    """A watch was to begin at a sequence that its stream has never had, and begins at its first message instead."""

    stream: str
    sequence: int
    last_sequence: int
    """Of the stream."""


class StreamNotRead(Struct, frozen=True, kw_only=True):
    """A replay or a watch gets nothing from its stream although there is a connection, and asks again."""

    stream: str
    error: Exception


class StreamMadeAgain(Struct, frozen=True, kw_only=True):
    """A stream is not the one that a watch read, which goes on at its first message instead.

    It was deleted and recreated, restored, or set back: its sequences are those of other messages.
    """

    stream: str
    next_sequence: int
    """Where reading was to go on."""
    last_sequence: int
    """Of the stream as it is now."""


class StreamProvisioned(Struct, frozen=True, kw_only=True):
    """A stream was created or updated, or is used as it is: `refused` says why it was not updated."""

    stream: str
    action: Literal["created", "updated", "kept"]
    differences: tuple[str, ...] = ()
    refused: str = ""


class ConsumerDiffers(Struct, frozen=True, kw_only=True):
    """A durable consumer is used as it is, because these differences from what is wanted cannot be updated."""

    stream: str
    consumer: str
    differences: tuple[str, ...]


class ConsumerResumed(Struct, frozen=True, kw_only=True):
    """An agent's consumer was gone, and was recreated: it goes on after what was recorded as settled, or what this
    worker has last seen settled.
    """

    agent: str
    stream: str
    consumer: str
    sequence: int
    """The first one of the stream that it is given."""
    recorded: bool = True
    """Whether there was a record of it; `agents rm` removes it with the consumer."""
    why: Literal["lost", "filter", "max_deliver"] = "lost"
    """Why it was recreated: it was lost, or a worker removed it because its filter had hidden notifications, or its
    `max_deliver` may have had the server give some up."""


class ConsumerNotRecorded(Struct, frozen=True, kw_only=True):
    """How far an agent's consumer has come cannot be recorded. Stated once, until it can be again."""

    agent: str
    bucket: str
    error: Exception


class FiltersDiffer(Struct, frozen=True, kw_only=True):
    """Which other versions of an agent, with another filter, read its consumer is not what it was before.

    While there are some, each worker gives back what only others want. Where there is none any more, it passes over
    what only they wanted.
    """

    agent: str
    stream: str
    consumer: str
    own: tuple[str, ...]
    """Filter subjects of this worker's version."""
    others: tuple[tuple[str, ...], ...]
    """Filter subjects of each of the other versions."""
    gone: tuple[tuple[str, ...], ...]
    """Of those that were among them until now."""


class AgentMoved(Struct, frozen=True, kw_only=True):
    """An agent reads another stream than before, because the `topic.base` of its event type was changed."""

    agent: str
    stream: str
    before: str
    """The stream that it has read before."""
    consumer: str
    """The name of its consumer on either stream."""
    left: int
    """Notifications of the former stream that it has not settled."""


class FunctionsDiffer(Struct, frozen=True, kw_only=True):
    """Which other functions share the notifications of an agent is not what it was before.

    In a deploy that renames or moves the function, these are the old and the new one. Otherwise, two programs have an
    app and an agent of the same name, and each is given a part of the notifications.
    """

    agent: str
    stream: str
    consumer: str
    own: str
    """Module and qualified name of this worker's function."""
    others: tuple[str, ...]
    """Those of the other workers; empty where there are no others any more."""


class FilterHides(Struct, frozen=True, kw_only=True):
    """The filter of an agent's consumer hid notifications that a version of the agent wants, so it is recreated.

    Somebody has edited it, or an update of a worker came late. It begins after what was settled while its filter was
    complete.
    """

    agent: str
    stream: str
    consumer: str
    found: tuple[str, ...]
    """The filter subjects that it had."""
    wanted: tuple[str, ...]
    """The filter subjects that it has to have."""


class ConsumerEdited(Struct, frozen=True, kw_only=True):
    """Somebody has edited the consumer of an agent, and a worker has set these fields right."""

    agent: str
    stream: str
    consumer: str
    differences: tuple[str, ...]


class AckWaitDiffers(Struct, frozen=True, kw_only=True):
    """The server redelivers what a worker holds after another `ack_wait` than the agent's, or not any more.

    Workers of several versions share a consumer, and the longest `ack_wait` that one of them wants is in effect.
    """

    agent: str
    stream: str
    consumer: str
    own_seconds: float
    """What this worker's version wants."""
    in_effect_seconds: float


class ConnectionChanged(Struct, frozen=True, kw_only=True):
    connected: bool
    reason: str
    opened: bool = False
    """Whether there was a connection before."""


class ConnectionSlow(Struct, frozen=True, kw_only=True):
    """The connection was made, and works slower than it could."""

    reason: str


class PermissionDenied(Struct, frozen=True, kw_only=True):
    """The server denied us to publish or to subscribe to subjects of a kind; stated once for each kind."""

    denied: str
    """As `publish to $js.ack.mars.field__index.>`."""


class ForeignAnswer(Struct, frozen=True, kw_only=True):
    """An answer came that does not belong to the request for which it came. It was ignored.

    A user may have had it sent there to make us believe that something succeeded (docs/security.md).
    """

    answer: str
    """As `publish to stream MARS: an acknowledgement of stream OTHER came as its answer`."""
    times: int
    """How often this has come by now."""


class Measured(Struct, frozen=True, kw_only=True):
    """A router measured something that Prometheus is to see as a gauge, in place of what it was before."""

    name: str
    help: str
    labels: tuple[str, ...]
    values: Mapping[tuple[str, ...], float]
    """By the values of the labels."""


OfReadiness = (
    ConnectionChanged
    | AgentStarted
    | AgentDisturbed
    | DeadLettersRefused
    | DeadLettersStored
    | CallsStuck
    | CallsFreed
    | NotReadAgain
    | ReadAgain
    | LeadershipHindered
    | LeadershipUnhindered
)
"""Facts that say whether a worker is ready. They are counted and logged as well."""
Counted = ConnectionSlow | ForeignAnswer | ConsumerResumed | TaskFailed | Ticked | WindowDone
"""Facts that are counted and logged."""
Logged = (
    Overdue
    | NotRemoved
    | FailuresNotStored
    | CallOverdue
    | CallsAbandoned
    | AgentStopped
    | TimerRescheduled
    | LeadershipChanged
    | Skipped
    | StartNotReached
    | StreamGone
    | StreamMadeAgain
    | StreamNotRead
    | StreamProvisioned
    | ConsumerDiffers
    | ConsumerEdited
    | ConsumerNotRecorded
    | FiltersDiffer
    | FilterHides
    | FunctionsDiffer
    | AgentMoved
    | AckWaitDiffers
    | PermissionDenied
    | WindowFunctionsChanged
    | WindowsResized
)
"""Facts that are logged."""
OfMessages = Failed | Unreadable | Suspected
"""Facts of single messages, of which there may be very many. They are counted, and `failure_logs` logs them."""
OnlyCounted = Acked | Published | Measured
"""Facts that only the metrics listen to."""
Event = OfReadiness | Counted | Logged | OfMessages | OnlyCounted | Settled
"""A fact that the engine states. The union that a class is in says who listens to it, and mypy names those who do not
handle it. A worker has nobody who listens to `Settled`.
"""

WARNINGS: frozenset[type] = frozenset(
    (
        StreamProvisioned,
        ConsumerDiffers,
        Skipped,
        Suspected,
        ConnectionChanged,
        PermissionDenied,
        ForeignAnswer,
        StartNotReached,
        StreamGone,
        StreamMadeAgain,
        StreamNotRead,
    )
)
"""Events of which `warning` may have something to say."""


def warning(event: Event) -> str:
    """Return what people should hear of the event where nobody listens to it; empty where it is not a warning."""
    match event:
        case StreamProvisioned(refused=refused) if refused:
            return f"stream {event.stream} is used as it is ({'; '.join(event.differences)}): {refused}"
        case ConsumerDiffers():
            return f"consumer {event.consumer} is used as it is ({'; '.join(event.differences)})"
        case Skipped():
            return f"{event.event_type}@{event.sequence} is left out: {event.error}"
        case Suspected():
            return (
                f"{event.event_type}@{event.sequence} has no headers and the body of a server's answer: its publisher "
                "may be somebody who has no right to publish it (docs/security.md)"
            )
        case ConnectionChanged(opened=True, connected=False):
            return f"the connection was lost, and is tried again: {event.reason}"
        case ConnectionChanged(opened=True):
            return "connected again"
        case ConnectionChanged(connected=False):
            return f"there is no connection yet, and it is tried again: {event.reason}"
        case PermissionDenied():
            return f"the server denies this user to {event.denied}"
        case ForeignAnswer(times=1):
            return f"{event.answer}, and was ignored"
        case StreamGone():
            return f"there is no stream {event.stream}: waiting for it to be created"
        case StartNotReached():
            return (
                f"there is no {event.sequence} to begin at: {event.stream} ends at {event.last_sequence}; either it "
                "was deleted and recreated, or the id is wrong; beginning at its first message"
            )
        case StreamMadeAgain():
            return (
                f"stream {event.stream} was deleted and recreated, or set back: its last sequence is "
                f"{event.last_sequence}, and {event.next_sequence} was to be read next; going on at its first message"
            )
        case StreamNotRead():
            return f"stream {event.stream} cannot be read for the moment, and is asked again: {event.error}"
    return ""


class Events:
    """Where facts are stated and listened to. Listeners are called at once, in the order they came.

    One that raises is logged, and the others are called all the same. A warning that nobody listens to, as in a script
    or a command, goes to the standard library's logging, which writes it to standard error unless told otherwise.
    """

    def __init__(self) -> None:
        self._listeners: dict[type, list[Callable[[Any], None]]] = {kind: [] for kind in get_args(Event)}

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
        if not listeners and type(event) in WARNINGS and (text := warning(event)):
            log.warning("%s", printable(text))
        for listener in listeners:
            try:
                listener(event)
            except Exception:
                log.exception("a listener failed")
