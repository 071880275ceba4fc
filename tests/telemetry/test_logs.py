"""What the engine's facts look like in the logs."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, Literal

import anyio
import pytest
import structlog
from msgspec import structs

from aviso_workers.config import Logging
from aviso_workers.engine import calls
from aviso_workers.errors import RefusedError, UnavailableError, UndecodableError
from aviso_workers.events import (
    Acked,
    AckWaitDiffers,
    AgentDisturbed,
    CallOverdue,
    CallsAbandoned,
    CallsStuck,
    ConnectionChanged,
    ConsumerDiffers,
    ConsumerResumed,
    DeadLetterCallFailed,
    DeadLettersRefused,
    Failed,
    FiltersDiffer,
    NotRemoved,
    OutageBegan,
    OutageEnded,
    OutageGoesOn,
    Overdue,
    Settled,
    StartNotReached,
    StreamGone,
    StreamMadeAgain,
    StreamNotRead,
    StreamProvisioned,
    TaskFailed,
    TimerRescheduled,
    Unreadable,
    WindowDone,
    WindowFunctionsChanged,
)
from aviso_workers.telemetry import logs
from aviso_workers.telemetry.logs import COUNTED, LINES_PER_PERIOD, PERIOD_SECONDS, FailureLog
from tests.odd_errors import EndlessError, nested


def failure(text: str) -> Exception:
    """As the engine has it: raised in the author's function, which one of ours has called."""

    async def function_of_the_author(_: None) -> None:
        password = "hidden"  # noqa: F841
        raise ValueError(text)

    try:
        anyio.run(calls.call, function_of_the_author, None)
    except ValueError as error:
        frames = error.__traceback__
        while frames and frames.tb_frame.f_code.co_filename != calls.__file__:
            frames = frames.tb_next
        return error.with_traceback(frames)
    raise AssertionError


def raised(error: Exception) -> Exception:
    """The error with a traceback: it was raised here."""
    try:
        raise error
    except type(error) as caught:
        return caught


def settled(**stated: Any) -> Failed:
    return Failed(
        **{
            "agent": "index",
            "event_type": "mars",
            "sequence": 42,
            "outcome": "retried",
            "reason": "ValueError",
            "seconds": 0.12345,
            "waited_seconds": 0.0,
            "stored_to_settled_seconds": 1.0,
            "num_delivered": 2,
            "error": failure("boom"),
            **stated,
        }
    )


@pytest.fixture
def clock() -> SimpleNamespace:
    return SimpleNamespace(seconds=0.0)


@pytest.fixture
def failures(clock: SimpleNamespace) -> FailureLog:
    return FailureLog(lambda: clock.seconds)


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str], failures: FailureLog) -> Any:
    """`lines(event)`: what is logged as JSON for it."""

    def lines(event: Any) -> list[dict[str, Any]]:
        logs.configure(Logging(format="json"))
        for observe, kinds in ((failures.observe, COUNTED), (logs.observe, logs.OBSERVED)):
            if isinstance(event, kinds):
                observe(event)
        return [json.loads(line) for line in capsys.readouterr().err.splitlines()]

    return lines


def test_a_failure_is_told_with_the_authors_frames_and_not_with_ours(lines: Any) -> None:
    (line,) = lines(settled())
    assert (line["event"], line["level"]) == ("notification.retried", "warning")
    told = {key: line[key] for key in ("agent", "notification", "reason", "num_delivered", "seconds")}
    assert told == {
        "agent": "index",
        "notification": "mars@42",
        "reason": "ValueError",
        "num_delivered": 2,
        "seconds": 0.123,
    }
    assert "in function_of_the_author" in line["exception"]
    assert "in call" not in line["exception"]
    assert line["exception"].endswith("ValueError: boom")


def test_only_the_first_failure_of_a_kind_is_told_with_its_traceback(lines: Any) -> None:
    (first,) = lines(settled(attempt=2, attempts=6, again_in_seconds=2.512))
    (second,) = lines(settled(attempt=3, attempts=6, again_in_seconds=6.3))
    (other,) = lines(settled(agent="load"))

    assert "in function_of_the_author" in first["exception"]
    assert "exception" not in second
    assert {key: second[key] for key in ("error", "attempt", "attempts", "again_in_seconds")} == {
        "error": "ValueError: boom",
        "attempt": 3,
        "attempts": 6,
        "again_in_seconds": 6.3,
    }
    assert "in function_of_the_author" in other["exception"]


def test_of_many_failures_of_a_kind_most_are_counted(
    lines: Any, failures: FailureLog, clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = settled()
    told = [line for _ in range(LINES_PER_PERIOD + 512) for line in lines(failed)]
    assert len(told) == LINES_PER_PERIOD
    assert len(lines(settled(reason="timeout", error=TimeoutError()))) == 1, "another kind has lines of its own"

    clock.seconds += PERIOD_SECONDS
    failures.tell_counted()
    failures.tell_counted()
    (more,) = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert {key: more[key] for key in ("event", "level", "agent", "outcome", "reason", "more", "in_seconds")} == {
        "event": "notification.more_failures",
        "level": "warning",
        "agent": "index",
        "outcome": "retried",
        "reason": "ValueError",
        "more": 512,
        "in_seconds": 10.0,
    }
    assert [line["event"] for line in lines(settled())] == ["notification.retried"]


def test_of_many_unreadable_messages_of_a_stream_most_are_counted(
    lines: Any, failures: FailureLog, capsys: pytest.CaptureFixture[str]
) -> None:
    error = UndecodableError("it has no headers")
    foreign = Unreadable(stream="KV_field__failures", sequence=7, error=error, reason="foreign")
    told = [line for _ in range(LINES_PER_PERIOD + 512) for line in lines(foreign)]
    assert len(told) == LINES_PER_PERIOD
    assert {key: told[0][key] for key in ("event", "level", "stream", "sequence", "reason", "error")} == {
        "event": "message.unreadable",
        "level": "warning",
        "stream": "KV_field__failures",
        "sequence": 7,
        "reason": "foreign",
        "error": "it has no headers",
    }
    failures.tell_counted()
    (more,) = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (more["event"], more["stream"], more["reason"], more["more"]) == (
        "message.more_unreadable",
        "KV_field__failures",
        "foreign",
        512,
    )


def test_kinds_with_the_same_reason_are_told_apart_where_they_are_counted(
    lines: Any, failures: FailureLog, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after the last attempt, where the reason is `attempts_exhausted` whatever was raised."""
    first = settled(outcome="dead_lettered", reason="attempts_exhausted")
    other = settled(outcome="dead_lettered", reason="attempts_exhausted", error=raised(OSError("disk full")))
    for failed in (first, other):
        for _ in range(LINES_PER_PERIOD + 1):
            lines(failed)

    failures.tell_counted()
    told = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["error"] for line in told] == ["ValueError", "OSError"]
    assert all(line["at"].startswith(f"{__file__}:") for line in told)
    assert told[0]["at"] != told[1]["at"]


def test_what_was_counted_is_told_when_the_worker_ends(
    lines: Any, failures: FailureLog, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = settled()
    for _ in range(LINES_PER_PERIOD + 1):
        lines(failed)

    async def end_at_once() -> None:
        with anyio.move_on_after(0):
            await failures.keep_counting()

    anyio.run(end_at_once)
    assert json.loads(capsys.readouterr().err)["more"] == 1


def test_one_of_our_errors_is_told_in_a_sentence(lines: Any) -> None:
    (line,) = lines(settled(outcome="dead_lettered", reason="undecodable", error=UndecodableError("no such field")))
    assert (line["event"], line["level"]) == ("notification.dead_lettered", "error")
    assert line["error"] == "no such field"
    assert "exception" not in line


def test_a_dead_letter_that_could_not_be_stored_is_an_error_of_its_own(lines: Any) -> None:
    refused = DeadLettersRefused(agent="index", error=RefusedError("the stream is full"), again_in_seconds=10.0)
    assert lines(settled(reason="dead_letter_failed", error=refused.error)) == []
    (line,) = lines(refused)
    assert (line["event"], line["level"], line["error"]) == (
        "dead_letters.not_stored",
        "error",
        "the stream is full",
    )


def test_a_function_of_on_dead_letter_that_fails_is_an_error_where_it_is_called_no_more(lines: Any) -> None:
    for again_in_seconds, level in ((2.0, "warning"), (0.0, "error")):
        error, told = failure("away"), {"agent": "index", "notification": "mars@7"}
        (line,) = lines(DeadLetterCallFailed(error=error, again_in_seconds=again_in_seconds, **told))
        assert (line["event"], line["level"]) == ("dead_letter.call_failed", level)
        assert {name: line[name] for name in told} == told
        assert line["exception"].endswith("ValueError: away")


def test_a_thread_that_runs_on_is_told_with_its_timeout(lines: Any) -> None:
    (line,) = lines(CallOverdue(agent="index", timeout_seconds=2.5))
    assert (line["event"], line["level"], line["timeout_seconds"]) == ("thread.overdue", "warning", 2.5)


def test_stuck_threads_are_an_error_that_says_what_to_do(lines: Any) -> None:
    (line,) = lines(CallOverdue(agent="index", timeout_seconds=2.5, in_thread=False))
    assert (line["event"], line["level"], line["timeout_seconds"]) == ("call.overdue", "warning", 2.5)
    (line,) = lines(CallsStuck(agent="index", calls=4, in_thread=False))
    assert (line["event"], line["level"], line["agent"], line["calls"]) == ("calls.stuck", "error", "index", 4)
    (line,) = lines(CallsStuck(agent="index", calls=4))
    assert (line["event"], line["level"], line["agent"], line["threads"]) == ("threads.stuck", "error", "index", 4)
    assert "start the worker again" in line["cure"]


def test_what_is_done_although_it_raised_is_told_with_the_exception(lines: Any) -> None:
    (line,) = lines(settled(outcome="acked", reason="on_error", error=failure("known already")))
    assert (line["event"], line["level"], line["reason"]) == ("notification.acked", "warning", "on_error")
    assert line["exception"].endswith("ValueError: known already")


def test_an_exception_without_a_text_is_told_all_the_same(lines: Any) -> None:
    class UnspeakableError(Exception):
        def __str__(self) -> str:
            raise KeyError("no text")

    (line,) = lines(settled(error=UnspeakableError()))
    assert line["event"] == "notification.retried"
    assert "UnspeakableError" in line["exception"]


def chained(length: int) -> Exception:
    error = ValueError("first")
    for _ in range(length):
        cause, error = error, ValueError("another")
        error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "last_line"),
    [
        (EndlessError("on and on"), "tests.odd_errors.EndlessError: on and on"),
        (nested(3000), "ExceptionGroup: all (1 sub-exception): ExceptionGroup: all (1 sub-exception): "),
        (chained(3000), "ValueError: another"),
        (ValueError("x" * 3_000_000), f"ValueError: {'x' * 4000}... (shortened)"),
    ],
    ids=["endless", "nested", "chained", "long"],
)
@pytest.mark.parametrize("configured", ["console", "json", None])
def test_an_exception_that_is_too_much_to_tell_is_told_in_short(
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    configured: Literal["console", "json"] | None,
    error: Exception,
    last_line: str,
) -> None:
    if configured:
        logs.configure(Logging(format=configured))
    FailureLog().observe(settled(error=error))
    logs.observe(TaskFailed(task="poll", error=error, again_in_seconds=1.0))
    written = capsys.readouterr().err if configured else caplog.text
    assert written.count(last_line) >= 2
    assert len(written) < 30_000


def test_an_exception_that_is_told_in_short_keeps_its_traceback_and_its_causes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = failure("x" * 3_000_000)
    error.__cause__ = OSError("the cause")
    logs.configure(Logging(format="console"))
    FailureLog().observe(settled(error=error))
    written = capsys.readouterr().err
    assert "OSError: the cause" in written
    assert "in function_of_the_author" in written


def test_a_success_is_not_worth_a_line() -> None:
    assert {Settled, Acked}.isdisjoint((*logs.OBSERVED, *COUNTED))


def differing(*, others: tuple[tuple[str, ...], ...] = (), gone: tuple[tuple[str, ...], ...] = ()) -> FiltersDiffer:
    return FiltersDiffer(
        agent="index", stream="MARS", consumer="app__index", own=("mars.od.>",), others=others, gone=gone
    )


def ack_wait_of(*, in_effect_seconds: float) -> AckWaitDiffers:
    return AckWaitDiffers(
        agent="index", stream="MARS", consumer="app__index", own_seconds=5.0, in_effect_seconds=in_effect_seconds
    )


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (ConnectionChanged(connected=True, reason=""), {"event": "connection.up", "level": "info"}),
        (
            TimerRescheduled(timer="look", schedule="every 60s", before="every 3600s"),
            {"event": "timer.rescheduled", "level": "warning", "schedule": "every 60s", "before": "every 3600s"},
        ),
        (
            WindowFunctionsChanged(agent="sums", functions=("fold", "key")),
            {"event": "windows.functions_changed", "level": "warning", "functions": ["fold", "key"]},
        ),
        (
            ConnectionChanged(connected=False, reason="gone"),
            {"event": "connection.down", "level": "warning", "reason": "gone"},
        ),
        (
            AgentDisturbed(agent="index", stream="MARS", error=UnavailableError("no answer"), again_in_seconds=0.25),
            {"event": "agent.disturbed", "level": "warning", "error": "no answer", "again_in_seconds": 0.2},
        ),
        (
            Overdue(stream="MARS", message_id="mine", error=UnavailableError("no answer"), again_in_seconds=1.94),
            {"event": "notification.overdue", "level": "warning", "message_id": "mine", "again_in_seconds": 1.9},
        ),
        (
            NotRemoved(stream="SCHEDULE", message_id="mine", error=RefusedError("denied")),
            {
                "event": "notification.not_removed",
                "level": "warning",
                "error": "denied",
                "cure": "it was delivered; allow workers to publish to $JS.API.STREAM.MSG.DELETE.SCHEDULE",
            },
        ),
        (StreamGone(stream="MARS"), {"event": "stream.gone", "level": "warning", "stream": "MARS"}),
        (
            StartNotReached(stream="MARS", sequence=43, last_sequence=7),
            {"event": "stream.start_not_reached", "level": "warning", "sequence": 43, "last_sequence": 7},
        ),
        (
            StreamMadeAgain(stream="MARS", next_sequence=43, last_sequence=7),
            {"event": "stream.made_again", "level": "warning", "next_sequence": 43, "last_sequence": 7},
        ),
        (
            StreamNotRead(stream="MARS", error=UnavailableError("no answer")),
            {"event": "stream.not_read", "level": "warning", "stream": "MARS", "error": "no answer"},
        ),
        (
            StreamProvisioned(stream="MARS", action="updated", differences=("max_msgs: 1 -> 2",)),
            {"event": "stream.updated", "level": "info", "differences": ["max_msgs: 1 -> 2"]},
        ),
        (
            StreamProvisioned(stream="MARS", action="kept", differences=("max_msgs: 1 -> 2",), refused="no"),
            {"event": "stream.update_refused", "level": "warning", "error": "no"},
        ),
        (
            ConsumerResumed(agent="index", stream="MARS", consumer="app__index", sequence=4, recorded=False),
            {
                "event": "consumer.resumed",
                "level": "warning",
                "sequence": 4,
                "cure": "its consumer and the record of it were removed while this worker ran: if `agents rm` was "
                "meant, stop this worker and repeat it; what others settled since this worker last read the consumer "
                "is handled again",
            },
        ),
        (
            ConsumerDiffers(stream="MARS", consumer="app__index", differences=("start: new -> all",)),
            {
                "event": "consumer.differs",
                "level": "warning",
                "differences": ["start: new -> all"],
                "cure": "an agent that has run goes on where it is; to take it to its new start: "
                "aviso-workers agents reset app/index --to all",
            },
        ),
        (
            ConsumerDiffers(stream="MARS", consumer="app__index", differences=("max_ack_pending: 500 -> 100000",)),
            {
                "event": "consumer.differs",
                "cure": "the server, the account or the stream allows no more, and while so many wait to be tried "
                "again, nothing new is handled: raise its max_ack_pending",
            },
        ),
        (
            differing(others=(("mars.od.>", "mars.rd.>"),)),
            {
                "event": "consumer.filters_differ",
                "level": "warning",
                "own": "mars.od.>",
                "others": ["mars.od.> mars.rd.>"],
            },
        ),
        (
            differing(gone=((),)),
            {"event": "consumer.filter_narrowed", "level": "warning", "consumer": "app__index", "gone": ["everything"]},
        ),
        (
            ack_wait_of(in_effect_seconds=60.0),
            {
                "event": "consumer.ack_wait_differs",
                "level": "warning",
                "agent": "index",
                "own_seconds": 5.0,
                "in_effect_seconds": 60.0,
            },
        ),
        (ack_wait_of(in_effect_seconds=5.0), {"event": "consumer.ack_wait_is_own", "level": "info"}),
        (
            CallsAbandoned(agent="index", sequences=[3, 4]),
            {"event": "calls.abandoned", "level": "error", "agent": "index", "sequences": [3, 4]},
        ),
        (
            TaskFailed(task="tail", error=ValueError("boom"), again_in_seconds=1.0),
            {"event": "task.failed", "level": "error", "exception": "ValueError: boom"},
        ),
    ],
)
def test_every_fact_has_its_line(lines: Any, event: Any, expected: dict[str, Any]) -> None:
    (line,) = lines(event)
    assert {key: line.get(key) for key in expected} == expected


def test_for_people_a_traceback_is_plain_and_shows_no_local_variables(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(Logging(format="console"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FailureLog().observe(settled())
    told = capsys.readouterr().err
    assert "notification.retried" in told
    assert "mars@42" in told
    assert "in function_of_the_author" in told
    assert "ValueError: boom" in told
    assert "hidden" not in told


class TestTheStandardLibrarysLogging:
    @pytest.fixture
    def bare_root(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
        """`bare_root()`: no handlers from now on, as in a process of its own. pytest has some while a test runs."""
        level = logging.root.level
        yield lambda: monkeypatch.setattr(logging.root, "handlers", [])
        logging.root.setLevel(level)
        logging.getLogger("httpx").setLevel(logging.NOTSET)

    @pytest.mark.parametrize("form", ["json", "console"])
    def test_is_written_as_the_other_lines_are(
        self, capsys: pytest.CaptureFixture[str], bare_root: Callable[[], None], form: Literal["json", "console"]
    ) -> None:
        bare_root()
        logs.configure(Logging(format=form))
        logs.configure(Logging(format=form))
        structlog.contextvars.bind_contextvars(process="2")
        logging.getLogger("fields").info("indexed %s", "mars@42")
        logging.getLogger("fields").debug("not told")
        (line,) = capsys.readouterr().err.splitlines()
        structlog.contextvars.clear_contextvars()
        if form == "json":
            told = json.loads(line)
            assert {key: told[key] for key in ("event", "level", "logger", "process")} == {
                "event": "indexed mars@42",
                "level": "info",
                "logger": "fields",
                "process": "2",
            }
        else:
            assert "[info     ] indexed mars@42" in line

    def test_is_left_to_an_author_who_has_configured_it(
        self, capsys: pytest.CaptureFixture[str], bare_root: Callable[[], None]
    ) -> None:
        bare_root()
        logging.root.addHandler(logging.NullHandler())
        logs.configure(Logging(format="console"))
        logging.getLogger("fields").warning("indexed")
        assert capsys.readouterr().err == ""

    @pytest.mark.parametrize(
        ("level", "own", "written"),
        [("info", logging.NOTSET, False), ("info", logging.INFO, True), ("debug", logging.NOTSET, True)],
    )
    def test_the_line_of_httpx_for_each_request_is_written_where_it_is_asked_for(
        self,
        capsys: pytest.CaptureFixture[str],
        bare_root: Callable[[], None],
        level: Literal["info", "debug"],
        own: int,
        written: bool,
    ) -> None:
        bare_root()
        httpx = logging.getLogger("httpx")
        httpx.setLevel(own)
        logs.configure(Logging(level=level))
        httpx.info("HTTP Request: GET")
        httpx.warning("retried")
        told = capsys.readouterr().err
        assert ("HTTP Request: GET" in told, "retried" in told) == (written, True)


def test_less_than_the_level_is_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(Logging(level="warning"))
    logs.observe(ConnectionChanged(connected=True, reason=""))
    logs.observe(ConnectionChanged(connected=False, reason="gone"))
    told = capsys.readouterr().err
    assert "connection.up" not in told
    assert "connection.down" in told


def test_a_window_that_fails_is_told_with_its_place_and_when_it_is_run_again(lines: Any) -> None:
    start, end = (datetime(2026, 11, 21, hour, tzinfo=UTC) for hour in (6, 7))
    done = WindowDone(agent="volume", key="od", start=start, end=end, seconds=0.1)
    assert lines(done) == []
    (line,) = lines(structs.replace(done, error=failure("no database"), again_in_seconds=1.04))
    told = {name: line[name] for name in ("event", "level", "agent", "key", "start", "again_in_seconds")}
    assert told == {
        "event": "window.failed",
        "level": "error",
        "agent": "volume",
        "key": "od",
        "start": "2026-11-21T06:00:00+00:00",
        "again_in_seconds": 1.0,
    }
    assert "no database" in line["exception"]


def window_failed(reason: str, error: Exception) -> WindowDone:
    start, end = (datetime(2026, 11, 21, hour, tzinfo=UTC) for hour in (6, 7))
    return WindowDone(agent="volume", key="od", start=start, end=end, seconds=0.1, error=error, reason=reason)


class TestAnOutage:
    """It has a line at its beginning, one a minute and one at its end, and no line for each failure."""

    AGENTS = ("index", "volume")
    BEGAN = OutageBegan(dependency="catalogue", agents=AGENTS, error=ConnectionRefusedError(111, "refused"))

    def test_it_is_told_at_its_beginning_each_minute_and_at_its_end(self, lines: Any) -> None:
        (began,) = lines(self.BEGAN)
        assert {name: began[name] for name in ("event", "level", "dependency", "agents", "error")} == {
            "event": "dependency.away",
            "level": "warning",
            "dependency": "catalogue",
            "agents": ["index", "volume"],
            "error": "ConnectionRefusedError: [Errno 111] refused",
        }
        assert "key" not in began
        assert lines(structs.replace(self.BEGAN, key="class=od"))[0]["key"] == "class=od"
        of: dict[str, Any] = {"dependency": "catalogue", "agents": ("index",)}
        (goes_on,) = lines(OutageGoesOn(**of, reason="OSError: no", seconds=60.0, calls=16, failures=15, waiting=250))
        assert (goes_on["event"], goes_on["level"]) == ("dependency.still_away", "warning")
        assert (goes_on["calls"], goes_on["failures"], goes_on["waiting"], goes_on["seconds"]) == (16, 15, 250, 60.0)
        (ended,) = lines(OutageEnded(**of, seconds=84.0, calls=23, failures=22))
        assert (ended["event"], ended["level"], ended["calls"]) == ("dependency.back", "info", 23)

    def test_failures_because_of_it_are_not_told_one_by_one(
        self, lines: Any, failures: FailureLog, capsys: pytest.CaptureFixture[str]
    ) -> None:
        away = settled(reason="unavailable", error=failure("away"))
        of_window = window_failed("unavailable", failure("away"))
        assert (len(lines(away)), len(lines(of_window))) == (1, 1), "before it is known to be an outage"
        lines(self.BEGAN)
        for _ in range(100):
            assert lines(away) == lines(of_window) == []
        other = settled(reason="unavailable", error=failure("away"), agent="other")
        assert len(lines(other)) == 1, "which does not depend on it"
        assert len(lines(settled(reason="retry"))) == 1, "which is wrong, and not away"
        failures.tell_counted()
        assert capsys.readouterr().err == "", "nor are they counted"
        lines(OutageEnded(dependency="catalogue", agents=self.AGENTS, seconds=84.0, calls=23, failures=22))
        assert len(lines(away)) == 1

    def test_of_many_windows_that_fail_most_are_counted(
        self, lines: Any, failures: FailureLog, capsys: pytest.CaptureFixture[str]
    ) -> None:
        told = [line for _ in range(600) for line in lines(window_failed("retry", failure("no field")))]
        assert len(told) == LINES_PER_PERIOD
        assert ["exception" in line for line in told] == [True] + [False] * (LINES_PER_PERIOD - 1)
        failures.tell_counted()
        (more,) = (json.loads(line) for line in capsys.readouterr().err.splitlines())
        assert (more["event"], more["agent"], more["more"]) == (
            "window.more_failures",
            "volume",
            600 - LINES_PER_PERIOD,
        )


FORGED = "gone\n2026-11-22T06:00:00Z [info     ] agent.stopped\r\x1b[2Jagent=index\u2028\x9b2J"


def test_nothing_that_others_have_written_begins_a_line_or_steers_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.configure(Logging(format="console"))
    logs.observe(AgentDisturbed(agent="index", stream="MARS", error=UnavailableError(FORGED), again_in_seconds=1))
    logs.observe(TaskFailed(task="tidy", error=raised(ValueError(FORGED)), again_in_seconds=1))
    differing = ("max_age: \x1b[31m",)
    logs.observe(StreamProvisioned(stream="MARS", action="kept", differences=differing, refused="\x1b]0;title"))
    FailureLog().observe(settled(error=raised(ValueError(FORGED))))

    written = capsys.readouterr().err
    assert [line for line in written.split("\n") if not (line.isprintable())] == []
    beginnings = [
        line.split("] ")[1].split()[0] for line in written.split("\n") if line and not line.startswith("    ")
    ]
    assert beginnings == ["agent.disturbed", "task.failed", "stream.update_refused", "notification.retried"]


def test_a_line_of_json_is_a_line_whatever_others_have_written(lines: Any) -> None:
    (line,) = lines(settled(error=raised(ValueError(FORGED))))
    assert FORGED in line["exception"]
