"""Logs: how they are written, and what the engine's facts look like in them.

A worker process configures them. Inside of another program they go where that has its logs: through structlog where it
has configured it, else through the logging of the standard library.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Iterable, MutableMapping
from datetime import UTC, datetime
from typing import Any, Literal, TextIO, get_args

import structlog

from aviso_workers.aviso.literals import Duration, printable, quoted
from aviso_workers.config import Logging
from aviso_workers.events import (
    AckWaitDiffers,
    AgentDisturbed,
    AgentMoved,
    AgentStarted,
    AgentStopped,
    CallOverdue,
    CallsAbandoned,
    CallsFreed,
    CallsStuck,
    ConnectionChanged,
    ConnectionSlow,
    ConsumerDiffers,
    ConsumerEdited,
    ConsumerNotRecorded,
    ConsumerResumed,
    Counted,
    DeadLettersRefused,
    DeadLettersStored,
    FailuresNotStored,
    FilterHides,
    FiltersDiffer,
    ForeignAnswer,
    FunctionsDiffer,
    LeadershipChanged,
    LeadershipHindered,
    LeadershipUnhindered,
    Logged,
    NotReadAgain,
    NotRemoved,
    OfReadiness,
    Overdue,
    PermissionDenied,
    ReadAgain,
    Skipped,
    StartNotReached,
    StreamGone,
    StreamMadeAgain,
    StreamNotRead,
    StreamProvisioned,
    TaskFailed,
    Ticked,
    TimerRescheduled,
    WindowDone,
    WindowFunctionsChanged,
    WindowsResized,
)
from aviso_workers.telemetry.tracebacks import loggable

__all__ = ["OBSERVED", "configure", "log", "observe"]

OBSERVED = get_args(OfReadiness | Counted | Logged)
"""The facts that `observe` is for. `failure_logs` has those of messages."""


class Log:
    """Where lines go: an event, and what there is to say of it, by name."""

    _structlog = structlog.get_logger("aviso_workers")
    _standard = logging.getLogger("aviso_workers")
    _least = logging.NOTSET

    def write_from(self, level: Literal["info", "warning"]) -> None:
        """Write lines of this level and above from now on, as far as structlog or the standard library take them."""
        self._least = logging.getLevelNamesMapping()[level.upper()]

    def info(self, event: str, **fields: Any) -> None:
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._write(logging.ERROR, event, fields)

    def _write(self, level: int, event: str, fields: dict[str, Any]) -> None:
        if level < self._least:
            return
        if isinstance(error := fields.get("exc_info"), BaseException):
            shown = loggable(error)
            fields["exc_info"] = type(shown), shown, shown.__traceback__
        if structlog.is_configured():
            getattr(self._structlog, logging.getLevelName(level).lower())(event, **fields)
        elif self._standard.isEnabledFor(level):
            raised = fields.pop("exc_info", None)
            said = "".join(f" {name}={value!r}" for name, value in fields.items())  # repr spells out what is invisible
            self._standard.log(level, "%s%s", event, said, exc_info=raised)


log = Log()


def configure(settings: Logging) -> None:
    """Write to standard error, as lines for people or as JSON for collectors.

    So goes what is logged by structlog, and by the standard library unless its root logger has handlers already.
    """
    render: list[structlog.typing.Processor]
    if settings.format == "json":
        render = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        console = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=_write_traceback)
        render = [_make_visible, console]
    before: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*before, *render],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, settings.level.upper())),
        # One write per line, so that the processes of a fleet do not tear each other's.
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )
    if not logging.root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(
            structlog.stdlib.ProcessorFormatter(
                foreign_pre_chain=[*before, structlog.stdlib.add_logger_name],
                processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
            )
        )
        logging.root.addHandler(handler)
        logging.root.setLevel(settings.level.upper())


def _make_visible(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Spell out what could steer a terminal or begin another line. (JSON has no such characters.)"""
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = printable(value)
        elif isinstance(value, list):
            event[name] = [printable(each) if isinstance(each, str) else each for each in value]
    return event


def _write_traceback(target: TextIO, raised: structlog.typing.ExcInfo) -> None:
    """Write the traceback, indented, so that no line of an exception's text looks like a line of the log.

    Without the values of local variables, which structlog's own choice shows, and which may be secrets.
    """
    for line in "".join(traceback.format_exception(*raised)).rstrip("\n").split("\n"):
        target.write(f"\n    {printable(line)}")


def observe(event: OfReadiness | Counted | Logged) -> None:
    """Log an event of the engine; the observer of those that are `OBSERVED`."""
    match event:
        case (
            ConsumerDiffers()
            | ConsumerEdited()
            | FiltersDiffer()
            | FilterHides()
            | FunctionsDiffer()
            | AckWaitDiffers()
        ):
            _observe_consumer(event)
        case ConsumerResumed() | ConsumerNotRecorded() | AgentMoved():
            _observe_record(event)
        case AgentStarted():
            log.info("agent.started", agent=event.agent, stream=event.stream, consumer=event.consumer)
        case AgentDisturbed():
            log.warning(
                "agent.disturbed",
                agent=event.agent,
                error=str(event.error),
                again_in_seconds=round(event.again_in_seconds, 1),
            )
        case AgentStopped():
            log.info("agent.stopped", agent=event.agent, finished=event.finished, returned=event.returned)
        case (
            LeadershipChanged()
            | LeadershipHindered()
            | LeadershipUnhindered()
            | TimerRescheduled()
            | WindowsResized()
            | WindowFunctionsChanged()
        ):
            _observe_leadership(event)
        case Skipped():
            log.warning(
                "notification.skipped",
                notification=f"{event.event_type}@{event.sequence}",
                error=str(event.error),
            )
        case StreamProvisioned() | StreamGone() | StreamMadeAgain() | StreamNotRead() | StartNotReached():
            _observe_stream(event)
        case ConnectionChanged() | ConnectionSlow() | PermissionDenied() | ForeignAnswer():
            _observe_connection(event)
        case _:
            _observe_beside(event)


def _observe_connection(event: ConnectionChanged | ConnectionSlow | PermissionDenied | ForeignAnswer) -> None:
    match event:
        case ConnectionChanged(connected=True):
            log.info("connection.up")
        case ConnectionChanged():
            log.warning("connection.down", reason=event.reason)
        case PermissionDenied():
            log.error(
                "permission.denied",
                denied=event.denied,
                cure="`aviso-workers server render --role` prints what each role needs",
            )
        case ForeignAnswer():
            if str(event.times).strip("0") == "1":  # the first, the tenth, the hundredth: there may be many
                log.warning(
                    "answer.foreign",
                    answer=event.answer,
                    times=event.times,
                    cure="it was ignored; docs/security.md says who can have such answers sent",
                )
        case ConnectionSlow():
            log.warning("connection.slow", reason=event.reason, cure="install the nats-py that aviso-workers asks for")


def _observe_stream(event: StreamProvisioned | StreamGone | StreamMadeAgain | StreamNotRead | StartNotReached) -> None:
    match event:
        case StreamGone():
            log.warning("stream.gone", stream=event.stream)
        case StartNotReached():
            log.warning(
                "stream.start_not_reached",
                stream=event.stream,
                sequence=event.sequence,
                last_sequence=event.last_sequence,
            )
        case StreamMadeAgain():
            log.warning(
                "stream.made_again",
                stream=event.stream,
                next_sequence=event.next_sequence,
                last_sequence=event.last_sequence,
            )
        case StreamNotRead():
            log.warning("stream.not_read", stream=event.stream, error=str(event.error))
        case StreamProvisioned(refused=""):
            log.info(f"stream.{event.action}", stream=event.stream, differences=list(event.differences))
        case StreamProvisioned():
            log.warning(
                "stream.update_refused",
                stream=event.stream,
                differences=list(event.differences),
                error=event.refused,
            )


def _observe_consumer(
    event: ConsumerDiffers | ConsumerEdited | FiltersDiffer | FilterHides | FunctionsDiffer | AckWaitDiffers,
) -> None:
    if isinstance(event, ConsumerDiffers):
        log.warning(
            "consumer.differs",
            stream=event.stream,
            consumer=event.consumer,
            differences=list(event.differences),
            cure=_cure_of(event),
        )
        return
    of = {"agent": event.agent, "stream": event.stream, "consumer": event.consumer}
    match event:
        case ConsumerEdited():
            log.warning(
                "consumer.edited",
                **of,
                differences=list(event.differences),
                cure="the worker has set these fields right; do not edit the consumer of an agent, but the agent",
            )
        case AckWaitDiffers():
            differs = event.own_seconds != event.in_effect_seconds
            (log.warning if differs else log.info)(
                "consumer.ack_wait_differs" if differs else "consumer.ack_wait_is_own",
                **of,
                own_seconds=event.own_seconds,
                in_effect_seconds=event.in_effect_seconds,
            )
        case FunctionsDiffer(others=()):
            log.info("consumer.functions_are_one", **of, own=event.own)
        case FunctionsDiffer():
            log.warning(
                "consumer.functions_differ",
                **of,
                own=event.own,
                others=list(event.others),
                cure="outside of a deploy, give one of the apps or agents another name: each of them handles only a "
                "part of the notifications",
            )
        case FilterHides():
            log.warning(
                "consumer.filter_hides",
                **of,
                found=" ".join(event.found),
                wanted=" ".join(event.wanted),
                cure="the consumer is recreated, and half a minute of notifications may be handled again; do not edit "
                "the filter of an agent's consumer, but the where of the agent",
            )
        case FiltersDiffer():
            of["own"] = " ".join(event.own)
            if event.others:
                log.warning("consumer.filters_differ", **of, others=_spelled(event.others))
            if event.gone or not event.others:
                log.warning("consumer.filter_narrowed", **of, gone=_spelled(event.gone))


WITHHELD = {"filter": "filter_hides", "max_deliver": "edited"}
"""Which entry says why a worker has removed a consumer."""


def _observe_record(event: ConsumerResumed | ConsumerNotRecorded | AgentMoved) -> None:
    if isinstance(event, AgentMoved):
        log.warning(
            "agent.moved",
            agent=event.agent,
            stream=event.stream,
            before=event.before,
            left=event.left,
            cure="to handle what is left, run a worker with the former topic.base; else remove the consumer: "
            f"`aviso-workers consumers rm {quoted(event.before)} {quoted(event.consumer)}`",
        )
        return
    if isinstance(event, ConsumerResumed):
        log.warning(
            "consumer.resumed",
            agent=event.agent,
            stream=event.stream,
            consumer=event.consumer,
            sequence=event.sequence,
            cure=(
                f"see consumer.{WITHHELD[event.why]}, which says why the worker has recreated it"
                if event.why in WITHHELD
                else "find out who deleted the consumer; half a minute of notifications may be handled again, and what "
                "was settled behind an unfinished one"
                if event.recorded
                else "its consumer and the record of it were removed while this worker ran: if `agents rm` was meant, "
                "stop this worker and repeat it; what others settled since this worker last read the consumer is "
                "handled again"
            ),
        )
        return
    log.warning(
        "consumer.not_recorded",
        agent=event.agent,
        bucket=event.bucket,
        error=str(event.error),
        cure="it is tried again; where a right is missing, let the worker's user read and write the bucket: it says "
        "where an agent goes on whose consumer is lost",
    )


def _spelled(versions: Iterable[tuple[str, ...]]) -> list[str]:
    return [" ".join(version) or "everything" for version in versions]


def _cure_of(event: ConsumerDiffers) -> str:
    if all(difference.startswith("max_ack_pending: ") for difference in event.differences):
        return (
            "the server, the account or the stream allows no more, and while so many wait to be tried again, nothing "
            "new is handled: raise its max_ack_pending"
        )
    if all(difference.startswith("start: ") for difference in event.differences):
        app, _, agent = event.consumer.partition("__")
        to = event.differences[0].rpartition(" -> ")[2]
        return (
            "an agent that has run goes on where it is; to take it to its new start: "
            f"aviso-workers agents reset {quoted(agent)} --app {quoted(app)} --to {quoted(to)}"
        )
    return (
        "these cannot be updated: stop the agent's workers and delete the consumer; it is recreated, "
        "and `aviso-workers agents reset` then takes it to where it shall go on"
    )


def _observe_calls(event: CallOverdue | CallsStuck | CallsFreed | CallsAbandoned) -> None:
    if isinstance(event, CallsAbandoned):
        log.error(
            "calls.abandoned",
            agent=event.agent,
            sequences=list(event.sequences),
            cure="they cannot be cancelled, and others may handle these notifications while they still run; give what "
            "they wait for a timeout that is shorter than workers.drain_timeout_seconds",
        )
        return
    what, cure = (
        ("thread", "give what the function waits for a timeout of its own")
        if event.in_thread
        else ("call", "let what the function awaits be cancelled: no shield, no loop that catches the cancellation")
    )
    match event:
        case CallOverdue():
            log.warning(
                f"{what}.overdue",
                agent=event.agent,
                timeout_seconds=event.timeout_seconds,
                cure=f"its notification is kept until it ends; {cure}",
            )
        case CallsStuck():
            log.error(
                f"{what}s.stuck",
                agent=event.agent,
                **{f"{what}s": event.calls},
                cure=f"start the worker again, and {cure}",
            )
        case CallsFreed():
            log.info(f"{what}s.freed", agent=event.agent)


def _observe_beside(
    event: DeadLettersRefused
    | DeadLettersStored
    | FailuresNotStored
    | NotReadAgain
    | ReadAgain
    | CallOverdue
    | CallsStuck
    | CallsFreed
    | CallsAbandoned
    | Overdue
    | NotRemoved
    | TaskFailed
    | Ticked
    | WindowDone,
) -> None:
    match event:
        case DeadLettersRefused():
            log.error(
                "dead_letters.not_stored",
                agent=event.agent,
                error=str(event.error),
                again_in_seconds=round(event.again_in_seconds, 1),
            )
        case DeadLettersStored():
            log.info("dead_letters.stored", agent=event.agent)
        case FailuresNotStored():
            log.warning(
                "failures.not_stored",
                agent=event.agent,
                bucket=event.bucket,
                error=str(event.error),
                cure="let the worker's user read and write the bucket; until then each process counts by itself",
            )
        case NotReadAgain():
            log.warning(
                "notification.not_read_again",
                agent=event.agent,
                stream=event.stream,
                sequence=event.sequence,
                error=str(event.error),
                cure="it is tried again every second, and what is behind it waits; where a right is missing, let the "
                f"worker's user publish to $JS.API.STREAM.MSG.GET.{event.stream}",
            )
        case ReadAgain():
            log.info("notification.read_again", agent=event.agent, stream=event.stream)
        case CallOverdue() | CallsStuck() | CallsFreed() | CallsAbandoned():
            _observe_calls(event)
        case Overdue():
            log.warning(
                "notification.overdue",
                stream=event.stream,
                message_id=event.message_id,
                error=str(event.error),
                again_in_seconds=round(event.again_in_seconds, 1),
            )
        case NotRemoved():
            log.warning(
                "notification.not_removed",
                stream=event.stream,
                message_id=event.message_id,
                error=str(event.error),
                cure=f"it was delivered; allow workers to publish to $JS.API.STREAM.MSG.DELETE.{event.stream}",
            )
        case TaskFailed():
            log.error(
                "task.failed",
                task=event.task,
                again_in_seconds=round(event.again_in_seconds, 1),
                exc_info=event.error,
            )
        case Ticked(error=BaseException() as error):
            log.error("timer.failed", timer=event.timer, tick=event.time.isoformat(), exc_info=error)
        case WindowDone(error=BaseException() as error):
            becomes: dict[str, object] = {"again_in_seconds": round(event.again_in_seconds, 1)}
            log.error(
                "window.dead_lettered" if event.dead_lettered else "window.failed",
                agent=event.agent,
                key=event.key,
                start=event.start.isoformat(),
                **({"reason": event.dead_lettered} if event.dead_lettered else becomes),
                exc_info=error,
            )
        case Ticked() | WindowDone():
            pass  # what went well is counted


def _lengths(size_seconds: int, every_seconds: int, *, prefix: str = "") -> dict[str, str]:
    """Return the size of windows, and how often they begin where they overlap."""
    lengths = {f"{prefix}size": str(Duration(size_seconds))}
    return lengths if every_seconds == size_seconds else lengths | {f"{prefix}every": str(Duration(every_seconds))}


def _day(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _observe_leadership(
    event: LeadershipChanged
    | LeadershipHindered
    | LeadershipUnhindered
    | TimerRescheduled
    | WindowsResized
    | WindowFunctionsChanged,
) -> None:
    match event:
        case LeadershipChanged():
            log.info("leader.began" if event.leads else "leader.ceased", token=event.token)
        case LeadershipHindered():
            log.error(
                "leader.hindered",
                bucket=event.bucket,
                error=str(event.error),
                cure="until it can be used, this worker runs no timer with leader=True and closes no window; where a "
                "right is missing, let the worker's user read and write it",
            )
        case LeadershipUnhindered():
            log.info("leader.unhindered", bucket=event.bucket)
        case TimerRescheduled():
            log.warning("timer.rescheduled", timer=event.timer, schedule=event.schedule, before=event.before)
        case WindowFunctionsChanged():
            log.warning(
                "windows.functions_changed",
                agent=event.agent,
                functions=list(event.functions),
                cure="open windows keep what was counted in them by the earlier functions; to count everything anew, "
                "give the agent another name and a start",
            )
        case WindowsResized():
            log.warning(
                "windows.resized",
                agent=event.agent,
                **_lengths(event.size_seconds, event.every_seconds),
                **_lengths(event.before_size_seconds, event.before_every_seconds, prefix="before_"),
                since=_day(event.since),
                cure="windows that start before keep their size; to have the new size at once, give the agent another "
                "name and a start",
            )
