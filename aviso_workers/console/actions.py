"""What a user may do from the console: shown first with its effect, done when that is confirmed, and recorded.

An action is planned twice: for the page that asks, and again when it is confirmed. It is carried out where both plans
say the same, so that what is done is what was shown. One on many dead letters is a job, which goes on in the background
and can be stopped; where the console ends before it, the record of it says so, and the rest is as it was.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any

import anyio
import structlog
from anyio.abc import TaskGroup
from msgspec import Struct, structs

from aviso_workers.aviso.literals import Duration, counted
from aviso_workers.aviso.positions import parse_position
from aviso_workers.backends import Admin
from aviso_workers.config import Config
from aviso_workers.config.settings import Right
from aviso_workers.console import dead_letters
from aviso_workers.console.access import Visitor
from aviso_workers.console.jobs import Job
from aviso_workers.declare.agents import check_name
from aviso_workers.errors import BackendError, DeclarationError, NotFoundError, describe
from aviso_workers.jetstream.plans import ConsumerPlan, Plan
from aviso_workers.ops import agent_control, aviso_admin, retried, stream_policy, timer_control
from aviso_workers.ops.agent_control import AgentConsumer, end_text
from aviso_workers.ops.audit import ActionResult, Audit
from aviso_workers.ops.doctor import Report, Scope, examine
from aviso_workers.ops.inventory import Denials, asked
from aviso_workers.state import declarations
from aviso_workers.state.dead_letter_records import LetterId
from aviso_workers.state.orders import Decides

MAX_FORMS = 1000
MAX_JOBS = 50
"""Jobs that are remembered; older ones are in the audit stream."""
RETRIED = (
    "What fails again becomes a dead letter again. The job tells how many are handled, and how many failed again.",
    "All other dead letters stay.",
)
ERASED = (
    "The agents that failed will never handle them.",
    "The notifications themselves stay in their streams, and other agents keep what they have.",
    "The audit keeps that you did it, which ones they were, and why.",
)
"""What is said of retries, and of what is erased."""
LONGEST_WHY = 500
MANY = 100
"""Where an agent that is reset never handles so many, their number has to be typed."""
DECIDED: dict[Decides, tuple[str, str]] = {
    "skip": ("becomes a dead letter", "become dead letters"),
    "retry": ("is tried again now", "are tried again now"),
}
"""What becomes of one notification, and of several."""
MAX_SAID = 5
"""Notifications of which it is said what became of each."""
CHANGED = "Something has changed since you were asked. This is what it would do now."

Form = Mapping[str, str]
STATED = ("app", "agent", "timer", "for", "to", "sequence")
"""The fields that state the plan of an action on an agent or a timer."""

log = structlog.get_logger("aviso_workers.console")


class BrokenOffError(BackendError):
    """An action had begun, and what of it is done is not known."""


class PlannedAction(Struct, frozen=True):
    """What an action would do."""

    of: str
    """What it is done to, for the record."""
    back: str
    """The page to return to."""
    fields: Mapping[str, str]
    """What states the plan: the fields that the confirmed form sends again, and that are recorded."""
    says: tuple[str, ...]
    """What is shown before it is confirmed, in sentences."""
    job: Callable[[Job], Awaitable[None]] | None = None
    """Carries it out in the background, if it is a job: then `Steps` ends with the plan."""
    letters: Collection[LetterId] = ()
    """The dead letters of a job."""
    created: Mapping[str, datetime | None] = {}
    """By app, when the stream of its dead letters was created."""
    asks: str = ""
    """The question, where the title of the action is none."""
    does: str = ""
    """What the button says, where that is not the title of the action."""
    name: str = ""
    """How the page to return to is called, where that is not `of`."""
    warns: tuple[str, ...] = ()
    """What may come of it that nobody wants, in sentences."""
    danger: bool = False
    """Whether it takes something away."""
    lost: int = 0
    """How many are lost for good: whoever confirms it types this number, and why. 0 where nothing has to be typed."""

    @property
    def fingerprint(self) -> str:
        """What is confirmed: the same plan has the same one."""
        plan = [self.of, *self.says, *self.warns, *map(str, self.fields.items()), str(self.created)]
        return hashlib.sha256("\n".join(plan).encode()).hexdigest()

    def refusal(self, form: Form) -> str:
        """Return in sentences why a form that confirms it is not enough; empty where it is."""
        typed = form.get("number", "").strip()
        if self.lost and typed.replace(",", "") != str(self.lost):
            number = f"You have typed {typed:.20}" if typed else "You have typed no number"
            return f"{number}, and {self.lost:,} would be lost. Nothing was done: type {self.lost:,} if you mean it."
        if self.lost and not _why(form):
            return "Nothing was done: say why, for the audit."
        if (length := len(_why(form))) > LONGEST_WHY:
            return f"Nothing was done: the reason has {length:,} characters. Say it in {LONGEST_WHY} at most."
        return ""


Steps = AsyncGenerator[PlannedAction, ActionResult]
"""An action: it yields its plan. Where it goes on, it was confirmed, and says what has come of it in the result."""
Begin = Callable[..., Steps]
"""A function that is called with `Actions`, the form and the visitor."""


class Action(Struct, frozen=True, kw_only=True):
    """An action that the console offers."""

    name: str
    title: str
    right: Right
    steps: Begin


class Confirmation(Struct, frozen=True, kw_only=True):
    """What is shown before an action is carried out."""

    action: Action
    plan: PlannedAction
    form: Form
    """What was filled in."""
    refusal: str = ""
    """Why it is not done although it was confirmed, in sentences."""

    @property
    def confirmed(self) -> str:
        """What the form says that confirms it: the plan, and which form it is of those that were shown."""
        return f"{self.plan.fingerprint}.{secrets.token_hex()}"


class Actions:
    """Carries out actions on a server."""

    def __init__(self, admin: Admin, config: Config, tasks: TaskGroup) -> None:
        self.admin = admin
        self.config = config
        self.audit = Audit(admin, config)
        self.dead_letters = dead_letters.DeadLetterLists(admin)
        self._tasks = tasks
        self._numbers = itertools.count(1)
        self._jobs: deque[Job] = deque(maxlen=MAX_JOBS)
        self._begun: dict[str, str] = {}
        """The forms that were confirmed last, with their pages to return to: sent again, one does nothing more."""
        self._examining = anyio.Lock()

    @property
    def jobs(self) -> list[Job]:
        """The jobs since the console was started, the newest first."""
        return [*reversed(self._jobs)]

    def job(self, number: int) -> Job:
        """Return a job. Raises `NotFoundError`."""
        for job in self._jobs:
            if job.number == number:
                return job
        raise NotFoundError(f"no job {number}: the console was started again since, or it is an old one; see Audit")

    async def examined(self, config: Config, scope: Scope) -> Report:
        """Return the doctor's report; one examination at a time. Raises what `doctor.examine` raises."""
        async with self._examining:
            return await examine(self.admin, config, scope)

    async def known(self) -> Config:
        """Return the configuration with the event types that workers have recorded."""
        return aviso_admin.with_declared(self.config, await declarations.stored(self.admin))[0]

    async def carry_out(self, action: Action, visitor: Visitor, form: Form) -> Confirmation | str:
        """Carry out an action that is confirmed, and return the page to go to; else return what is to be confirmed.

        Raises `AvisoWorkersError` where it cannot be done, or cannot be recorded, and `BrokenOffError` where it had
        begun.
        """
        confirmed, _, once = form.get("confirmed", "").partition(".")
        for job in self._jobs:  # the form was sent twice
            if confirmed == job.confirmed and (not job.ended or not job.left):
                return f"/jobs/{job.number}"
        if once and once in self._begun:
            return self._begun[once]
        async with aclosing(action.steps(self, form, visitor)) as steps:
            plan = await anext(steps)
            refusal = plan.refusal(form) if confirmed == plan.fingerprint else CHANGED if confirmed else ""
            if refusal or not confirmed:
                return Confirmation(action=action, plan=plan, form=form, refusal=refusal)
            if plan.job is not None:
                return self._begin(action, visitor, plan, form)
            with self._once(once, plan.back):
                selection = {**plan.fields, **dead_letters.given(form, "why")}
                async with self.audit.recorded(visitor.name, action.name, plan.of, selection) as result:
                    try:
                        with suppress(StopAsyncIteration):
                            await steps.asend(result)
                    except BackendError as error:
                        why = f"{describe(error)}. It had begun: look whether all of it, a part or nothing is done"
                        raise BrokenOffError(why) from error
        return plan.back

    @contextmanager
    def _once(self, form: str, back: str) -> Iterator[None]:
        """Remember a form that is carried out within the block, unless that fails: then it may be sent again."""
        self._begun[form] = back
        if len(self._begun) > MAX_FORMS:
            del self._begun[next(iter(self._begun))]
        try:
            yield
        except BaseException:
            self._begun.pop(form, None)
            raise

    def _begin(self, action: Action, visitor: Visitor, plan: PlannedAction, form: Form) -> str:
        job = Job(
            number=next(self._numbers),
            title=action.title,
            right=action.right,
            who=visitor.name,
            selection={**plan.fields, **dead_letters.given(form, "rate", "why")},
            confirmed=plan.fingerprint,
            letters=frozenset(plan.letters),
            total=len(plan.letters),
            left=set(plan.letters),
            created=dict(plan.created),
            rate=_rate(form),
        )
        self._jobs.append(job)
        self._tasks.start_soon(self._run, action, plan, job)
        return f"/jobs/{job.number}"

    async def _run(self, action: Action, plan: PlannedAction, job: Job) -> None:
        assert plan.job is not None
        with job.scope:
            try:
                async with self.audit.recorded(job.who, action.name, plan.of, job.selection) as result:
                    try:
                        await plan.job(job)
                        job.finished = True
                    finally:
                        result.text, result.affected = job.came_to, job.affected.records(job.does)
                        result.state = "failed" if job.failures else "done"
            except Exception as error:  # of any kind: the console goes on
                job.failures.append(describe(error))
                if not isinstance(error, BackendError):
                    log.exception("console.job_failed", job=job.number)
        job.state = "stopped" if job.scope.cancelled_caught else "failed" if job.failures else "done"


ACTIONS: dict[str, Action] = {}
"""By name, as `_action` collects them."""


def _action(name: str, title: str, right: Right, **settings: Any) -> Callable[[Begin], Begin]:
    """Return a decorator that makes an action of its steps; the settings are handed to them."""

    def add(steps: Begin) -> Begin:
        ACTIONS[name] = Action(name=name, title=title, right=right, steps=partial(steps, **settings))
        return steps

    return add


@_action("pause-agent", "Pause an agent", "pause")
async def _pause_agent(actions: Actions, form: Form, visitor: Visitor) -> Steps:
    agent, (seconds, how_long) = await _agent(actions, form), _pause(form)
    says = f"All workers of {_name(agent)} get no notifications {how_long}. What they have begun is finished."
    result = yield _on_agent(agent, form, says)
    until = await agent_control.pause(actions.admin, agent, seconds=seconds, by=_by(visitor), note=_why(form))
    result.text = f"paused until {end_text(until)}"


@_action("resume-agent", "Resume an agent", "pause")
async def _resume_agent(actions: Actions, form: Form, _visitor: Visitor) -> Steps:
    agent = await _agent(actions, form)
    result = yield _on_agent(agent, form, f"{_name(agent)} gets notifications again.")
    await agent_control.resume(actions.admin, agent)
    result.text = "resumed"


@_action("reset-agent", "Reset an agent", "reset")
async def _reset_agent(actions: Actions, form: Form, _visitor: Visitor) -> Steps:
    agent = await _agent(actions, form)
    to = form.get("to", "").strip()
    if not to:
        raise DeclarationError("say where the agent is to go on: a sequence, a date, all or new")
    plan = await agent_control.plan_reset(actions.admin, agent, parse_position(to, name="to", now=datetime.now(UTC)))
    planned = _on_agent(
        agent,
        form,
        f"{_name(agent)} goes on at sequence {plan.sequence} of {agent.stream}.",
        f"{plan.again} notifications that it has been given before would be given again.",
        f"{plan.passed_over} notifications that it would have been given would be passed over.",
        f"{plan.unsettled} that are in its hands now, or wait for their next attempt, would not be tried again.",
    )
    lost = plan.passed_over + plan.unsettled
    result = yield structs.replace(planned, danger=True, lost=lost if lost >= MANY else 0)
    left = await agent_control.reset(actions.admin, plan)
    result.text, result.affected = f"it goes on at {plan.sequence}, with {left} to settle", plan.affected


@_action("skip-notifications", "Skip notifications", "drop", decides="skip")
@_action("retry-notifications", "Try notifications again now", "retry", decides="retry")
async def _decide(actions: Actions, form: Form, visitor: Visitor, *, decides: Decides) -> Steps:
    agent = await _agent(actions, form)
    sequence = dead_letters.whole_number(form.get("sequence", ""))
    if form.get("sequence") and sequence is None:
        raise DeclarationError("sequence: it must be a number")
    chosen = () if sequence is None else (sequence,)
    found = await retried.plan(actions.admin, agent, chosen, decides, by=_by(visitor))
    one, several = DECIDED[decides]
    behind = sum(each.behind for each in found)
    planned = _on_agent(
        agent,
        form,
        f"{_named(found)} that {_name(agent)} retries {one if len(found) == 1 else several}.",
        f"{counted(behind, 'notification')} wait{'s' * (behind == 1)} behind, by their ordering key"
        + (", and will run without them." if decides == "skip" else "."),
    )
    result = yield structs.replace(planned, danger=decides == "skip")
    await retried.decide(actions.admin, agent, found)
    answers = await retried.wait(actions.admin, agent, found)
    result.text = "; ".join(f"{each.stream}@{each.sequence}: {each.text}" for each in answers[:MAX_SAID])
    if (more := len(answers) - MAX_SAID) > 0:
        carried_out = sum(each.carried_out for each in answers)
        result.text += f"; and {more} more, of all {carried_out} as decided"


@_action("drop-dead-letters", "Erase dead letters", "drop", drops=True)
@_action("retry-dead-letters", "Retry dead letters", "retry", drops=False)
async def _on_dead_letters(actions: Actions, form: Form, _visitor: Visitor, *, drops: bool) -> Steps:
    last = dead_letters.whole_number(form.get("last", ""))
    if form.get("last") and last is None:
        raise DeclarationError("last: it must be a time in nanoseconds")
    config = await asked(Denials(), "records", actions.known(), actions.config)
    chosen = await dead_letters.selected(actions.admin, form, config, until_ns=last)
    if not chosen.times:
        raise NotFoundError("no dead letter matches: somebody else has retried or dropped them")
    _rate(form)  # refuses one that is none, before anything begins
    fields, count = dead_letters.given(form, *dead_letters.FILTERS), len(chosen.times)
    them = dead_letters.told(chosen, fields)
    planned = PlannedAction(
        "dead letters",
        dead_letters.address(fields),
        fields={**fields, "last": str(max(chosen.times.values()))},
        says=(f"{them} handed back to the agents that failed, as new notifications.", *RETRIED),
        asks=f"Retry {counted(count, 'dead letter')}?",
        does=f"Retry {count:,}",
        name=chosen.causes[0].error if len(chosen.causes) == 1 else ", ".join(chosen.agents[:MAX_SAID]),
        job=partial(dead_letters.act, actions.admin, actions.audit),
        letters=chosen.times,
        created=chosen.created,
    )
    if not drops:
        yield structs.replace(planned, warns=tuple(await dead_letters.hindrances(actions.admin, chosen)))
        return
    erased = f"{them} erased. Nobody can bring back or retry what is erased."
    yield structs.replace(
        planned,
        says=(erased, *dead_letters.which(chosen), *ERASED),
        asks=f"Erase {counted(count, 'dead letter')} for good?",
        does=f"Erase {count:,} for good",
        danger=True,
        lost=count,
    )


@_action("stop-job", "Stop a job", "read")
async def _stop_job(actions: Actions, form: Form, visitor: Visitor) -> Steps:
    job = actions.job(dead_letters.whole_number(form.get("number", "")) or 0)
    visitor.require(job.right)
    says = f"Job {job.number} ({job.title}) stops. What it has done stays done; the others stay as they are."
    fields = dead_letters.given(form, "number")
    result = yield PlannedAction(f"job {job.number}", f"/jobs/{job.number}", fields, (says,))
    job.scope.cancel()
    result.text = job.came_to


@_action("apply-streams", "Apply the configuration to streams", "apply")
async def _apply_streams(actions: Actions, _form: Form, _visitor: Visitor) -> Steps:
    config = actions.config  # what workers have declared is shown, and never applied: anybody's may say so
    plans = [plan for plan in await stream_policy.plans(actions.admin, config) if plan.needed]
    if not plans:
        raise NotFoundError("all streams are as configured, or differ in what cannot be changed")
    fields = {"streams": ", ".join(dict.fromkeys(plan.stream for plan in plans))}
    result = yield PlannedAction("streams", "/streams", fields, tuple(map(_said, plans)))
    for plan in plans:
        await stream_policy.carry_out(actions.admin, config, plan, removals=True)
        result.text = f"{result.text}, {plan.stream}".removeprefix(", ")


def _said(plan: Plan | ConsumerPlan) -> str:
    """Return what applying a plan does, with the stored messages that it removes."""
    what = plan.stream if isinstance(plan, Plan) else f"{plan.stream} > {plan.consumer}"
    return (
        f"{what}: "
        + ("; ".join(map(str, (*plan.differences, *plan.removing))) if plan.exists else "it is created")
        + "."
    )


@_action("pause-timer", "Pause a timer", "pause")
async def _pause_timer(actions: Actions, form: Form, visitor: Visitor) -> Steps:
    (app, timer), (seconds, how_long) = await _timer(actions, form), _pause(form)
    says = f"No worker runs the timer {timer} of {app} {how_long}. A tick that runs is finished."
    result = yield _on_timer(form, says)
    made = await timer_control.pause(actions.admin, app, timer, seconds=seconds, by=_by(visitor), note=_why(form))
    result.text = f"paused until {end_text(made.until)}"


@_action("resume-timer", "Resume a timer", "pause")
async def _resume_timer(actions: Actions, form: Form, _visitor: Visitor) -> Steps:
    app, timer = await _timer(actions, form)
    says = f"Workers run the timer {timer} of {app} again. What it missed is treated as if no worker had run."
    result = yield _on_timer(form, says)
    await timer_control.resume(actions.admin, app, timer)
    result.text = "resumed"


@_action("run-timer", "Run a timer now", "run")
async def _run_timer(actions: Actions, form: Form, visitor: Visitor) -> Steps:
    app, timer = await _timer(actions, form)
    says = f"A worker runs the timer {timer} of {app} once, within about 5 seconds, also while it is paused."
    result = yield _on_timer(
        form, says, "If no worker takes it within 60 seconds, none runs it later. Ticks stay as they are."
    )
    await timer_control.ask(actions.admin, app, timer, by=visitor.name)
    result.text = "asked for"


def _named(found: Sequence[retried.Asked]) -> str:
    """Return which notifications are decided on, such as `2 notifications (MARS@3, MARS@7)`."""
    names = ", ".join(f"{each.stream}@{each.sequence}" for each in found[:MAX_SAID])
    more = f" and {len(found) - MAX_SAID} more" if len(found) > MAX_SAID else ""
    return f"{counted(len(found), 'notification')} ({names}{more})"


def _on_timer(form: Form, *says: str) -> PlannedAction:
    fields = dead_letters.given(form, *STATED)
    return PlannedAction(f"{fields['app']}/{fields['timer']}", "/timers", fields, says)


def _on_agent(agent: AgentConsumer, form: Form, *says: str) -> PlannedAction:
    return PlannedAction(_name(agent), f"/agents/{_name(agent)}", dead_letters.given(form, *STATED), says)


async def _timer(actions: Actions, form: Form) -> tuple[str, str]:
    """Return the app and the timer. Raises `NotFoundError` where no worker has recorded such a timer."""
    app, timer = form.get("app", ""), form.get("timer", "")
    declared = (await declarations.stored(actions.admin)).get(app)
    if declared is None or timer not in declared.timers:
        raise NotFoundError(f"no worker has recorded a timer {timer} of an app {app}")
    return app, timer


async def _agent(actions: Actions, form: Form) -> AgentConsumer:
    app, agent = form.get("app", ""), form.get("agent", "")
    check_name("app", app)
    check_name("agent", agent)
    return await agent_control.find(actions.admin, await actions.known(), app, agent, several=True)


def _why(form: Form) -> str:
    """Return the reason that somebody gives; empty where none is given."""
    return form.get("why", "").strip()


def _by(visitor: Visitor) -> str:
    return f"{visitor.name}, console"


def _name(agent: AgentConsumer) -> str:
    return f"{agent.app}/{agent.agent}"


def _pause(form: Form) -> tuple[float | None, str]:
    """Return the seconds of the field `for`, None where it is empty, and the same in words. Raises
    `DeclarationError`.
    """
    text = form.get("for", "").strip()
    if not text:
        return None, "until somebody resumes it"
    try:
        seconds = Duration.parse(text)
    except ValueError as error:
        raise DeclarationError(f"for how long: {error}; say a number and s, m, h, d or w, such as 2h") from error
    if not seconds:
        raise DeclarationError("0s would pause nothing: say how long, or nothing to pause it until it is resumed")
    return float(seconds), f"for {form['for']}"


def _rate(form: Form) -> float | None:
    """Return the field `rate`; None where it is empty. Raises `DeclarationError`."""
    text = form.get("rate", "").strip()
    if not text:
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0.001 <= rate <= 1e6:
        raise DeclarationError(f"at most so many a second: {text!r} is no number between 0.001 and 1,000,000")
    return rate
