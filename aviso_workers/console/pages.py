"""The pages: what each of them shows, made of what `overview` and `ops` report. Nothing is changed here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from msgspec import Struct, field, structs

from aviso_workers.aviso.codec import Message, NotificationReader, store_time
from aviso_workers.aviso.literals import time_text
from aviso_workers.aviso.notifications import Notification
from aviso_workers.aviso.positions import day_of, parse_moment
from aviso_workers.aviso.schema import topic_of
from aviso_workers.backends import Admin
from aviso_workers.config import Config, display
from aviso_workers.console import dead_letters
from aviso_workers.console.actions import Actions
from aviso_workers.console.dead_letters import Causes
from aviso_workers.console.overview import AgentView, Overview, Watcher, stale_text
from aviso_workers.console.shown import capital, part_of
from aviso_workers.errors import AvisoWorkersError, BackendError, InvalidPositionError, NotFoundError
from aviso_workers.ops import aviso_admin, health, inventory, story, stream_policy, timer_control
from aviso_workers.ops import doctor as doctor_
from aviso_workers.ops.audit import MOST_READ, Period
from aviso_workers.ops.doctor import output
from aviso_workers.ops.health import STATES, Judgement
from aviso_workers.ops.inventory import Denials, asked
from aviso_workers.ops.reports import StreamRow
from aviso_workers.ops.timer_control import paused_text, run_text
from aviso_workers.spark.job_events import EVENT_TYPE
from aviso_workers.state import asyncapi, lease_records, timer_records
from aviso_workers.state.audit_records import RecordedAction
from aviso_workers.state.lease_records import Leader
from aviso_workers.state.timer_requests import Run

SHOWN_ACTIONS = 200
A_MINUTE, A_DAY = timedelta(minutes=1), timedelta(days=1)
"""A minute is more than clocks differ by."""
MOST_CAUSES = 5
"""Of how many agents the page Now names the dead letters of the last day."""
SHOWN_JOBS = 10
MOST_COLUMNS = 8
ONE_CAUSE = {"app", "agent", "reason", "line"}
"""The filters that select one cause, where one is found."""
NEARLY_FULL = 0.9
DOCTOR_SECONDS = 1.0
SPARK_FIELDS = ("cluster", "application", "kind", "event")
SPARK_READ = 5000
"""The newest notifications of Spark's jobs that are read."""


class Page(Struct, frozen=True):
    """What a template is rendered with."""

    template: str
    """Empty where the values are the answer, as JSON."""
    title: str
    values: Mapping[str, Any]
    live: bool = False
    """Whether it is kept up to date while it is open."""
    status: int = 200


class Question(Struct, frozen=True, kw_only=True):
    """What somebody asks for."""

    watcher: Watcher
    actions: Actions
    path: Mapping[str, str]
    query: Mapping[str, str]

    def asked(self, name: str) -> str:
        """Return a filter of the address; empty where it is not given."""
        return self.query.get(name, "").strip()


def _of_now(question: Question, overview: Overview, *parts: str) -> dict[str, Any]:
    """Return what each page shows that is made of an overview; `parts` are what the server may deny of it."""
    return {
        "overview": overview,
        "stale": stale_text(overview, question.watcher),
        "denied": overview.snapshot.denied.text(*parts),
    }


async def now(question: Question) -> Page:
    """What needs somebody, and why."""
    try:
        overview = await question.watcher.newest()
    except BackendError as error:
        return Page("now.html", "Now", {"overview": None, "down": str(error), "stale": ""}, live=True, status=503)
    troubled = sorted((view for view in overview.agents if view.judgement.is_trouble), key=_by_state)
    streams = [(row.stream, why) for row in overview.streams if (why := row.trouble or _refuses(overview, row))]
    sentence, tone = _sentence(overview, troubled, len(streams))
    of_day = {(view.facts.app, view.facts.agent): view.dead_letters_of_a_day or 0 for view in overview.agents}
    most = sorted(((count, of) for of, count in of_day.items() if count), reverse=True)[:MOST_CAUSES]
    values = {
        **_of_now(question, overview),
        "down": "",
        "troubled": troubled,
        "paused": [view for view in overview.agents if view.state == "paused"],
        "streams": streams,
        "sentence": sentence,
        "tone": tone,
        "causes": ", ".join(f"{count:,} of {app}/{agent}" for count, (app, agent) in most),
        "lag": sum(view.facts.lag for view in overview.agents),
        "rate": sum(view.handled_rate for view in overview.agents),
        "workers": overview.workers_known,
        "lost": len([row for row in overview.workers_in_trouble if row.state == "lost"]),
    }
    return Page("now.html", "Now", values, live=True)


def _refuses(overview: Overview, row: StreamRow) -> str:
    """Return that a stream is sealed and is not to be, or how full one is that refuses what is new when it is full;
    empty where there is room.
    """
    found = overview.snapshot.streams[row.stream]
    if stream_policy.sealed(overview.config, {row.stream: found}):
        return row.note
    if found.config.discard != "new" or row.used is None or row.used < NEARLY_FULL:
        return ""
    return f"{row.used:.0%} of its limit is used, and when it is full it refuses what is new"


def _sentence(overview: Overview, troubled: list[AgentView], streams: int) -> tuple[str, str]:
    """Return the health of everything in one sentence, and its tone."""
    denied = overview.snapshot.denied.subjects()
    if not overview.agents and not denied:
        return "No agent is known here.", ""
    needs = [
        _counted(sum(view.judgement.needs for view in troubled), "agent needs you", "agents need you"),
        _counted(len(overview.failing), "timer or task fails", "timers and tasks fail"),
        _counted(
            len([row for row in overview.workers_in_trouble if row.needs]),
            "worker or app needs you",
            "workers and apps need you",
        ),
        _counted(streams, "stream has trouble", "streams have trouble"),
        _counted(len(overview.snapshot.unavailable), "stream or consumer is away", "streams and consumers are away"),
        f"nothing is known of what {', '.join(denied)} would tell" if denied else "",
    ]
    waits = [
        _counted(
            sum(not view.judgement.needs for view in troubled),
            "agent is in trouble that may pass",
            "agents are in trouble that may pass",
        ),
        _counted(
            overview.new_dead_letters or 0, "dead letter of the last day waits", "dead letters of the last day wait"
        ),
    ]
    found = ", ".join(filter(None, needs + waits))
    if not found:
        return "Nothing needs you.", "good"
    return f"{capital(found)}.", "bad" if any(needs) else "warn"


def _counted(count: int, one: str, several: str) -> str:
    return f"{count:,} {one if count == 1 else several}" if count else ""


def _rank(state: str) -> int:
    return STATES.index(state) if state in STATES else len(STATES)


def _by_state(view: AgentView) -> tuple[bool, int, int]:
    return not view.judgement.needs, _rank(view.state), -view.facts.lag


ORDERS: dict[str, Callable[[AgentView], Any]] = {
    "state": _by_state,
    "agent": lambda view: (view.facts.app, view.facts.agent),
    "lag": lambda view: -view.facts.lag,
    "rate": lambda view: -view.handled_rate,
    "dead letters": lambda view: -(view.facts.dead_letters or 0),
}


SHOWN: dict[str, tuple[str, Callable[[AgentView], bool]]] = {
    "": ("All", lambda view: True),
    "needs": ("Need you", lambda view: view.judgement.needs),
    "trouble": ("In trouble", lambda view: view.judgement.is_trouble),
    "paused": ("Paused", lambda view: view.state == "paused"),
    "well": ("Well", lambda view: not view.judgement.is_trouble and view.state != "paused"),
}
"""What of the agents is shown: its name in the address, its label, and whether an agent belongs to it."""


async def agents(question: Question) -> Page:
    """All agents, with filters and orders that stand in the address."""
    overview = await question.watcher.newest()
    text, state, app = (question.asked(name) for name in ("q", "state", "app"))
    order = question.asked("order") or "state"
    found = [
        view
        for view in overview.agents
        if (not text or text.lower() in f"{view.facts.app}/{view.facts.agent} {view.facts.stream}".lower())
        and state in ("", view.state)
        and app in ("", view.facts.app)
    ]
    kinds = {name: [view for view in found if belongs(view)] for name, (_, belongs) in SHOWN.items()}
    values = {
        **_of_now(question, overview),
        "agents": sorted(kinds.get(question.asked("show"), found), key=ORDERS.get(order, _by_state)),
        "chips": [(name, label, len(kinds[name])) for name, (label, _) in SHOWN.items()],
        "failing": [row for row in overview.failing if app in ("", row.app)] if not text and not state else [],
        "order": order,
        "orders": list(ORDERS),
        "states": sorted({view.state for view in overview.agents} | ({state} if state else set()), key=_rank),
        "apps": sorted({view.facts.app for view in overview.agents} | ({app} if app else set())),
    }
    return Page("agents.html", "Agents", values, live=True)


async def agent(question: Question) -> Page:
    """One agent: its policy, what is tried again and why, which keys wait."""
    overview = await question.watcher.newest()
    app, name = question.path["app"], question.path["agent"]
    views = [view for view in overview.agents if (view.facts.app, view.facts.agent) == (app, name)]
    if not views and (said := overview.snapshot.denied.text()):
        return Page("error.html", f"{app}/{name}", {"text": said})
    if not views:
        raise NotFoundError(f"no agent {name} of app {app} reads one of the known streams")
    declared = overview.snapshot.recorded.apps.get(app)
    newest = await asked(denied := Denials(), "actions", question.actions.audit.newest(SHOWN_ACTIONS), [], away=True)
    values = {
        **_of_now(question, overview),
        "denied_actions": denied.text(),
        "app": app,
        "agent": name,
        "views": views,
        "policy": declared.policies.get(name, {}) if declared else {},
        "declared": declared,
        "workers": [
            (worker, [at_work], health.judge_worker(worker, now=overview.time))
            for view in views
            for worker, at_work in view.workers
        ],
        "consumers": [(view.facts.stream, view.facts.consumer, view.why) for view in views],
        "asked": any(view.facts.consumer and view.facts.consumer.num_waiting for view in views),
        "deploys": overview.snapshot.recorded.deploys.get(app, ()),
        "retrying": [each for view in views for each in view.facts.retrying],
        "versions": [
            (key[2], each)
            for key, registered in overview.snapshot.recorded.versions.items()
            if key[:2] == (app, name)
            for each in registered
        ],
        "actions": [each for each in newest if each.record.of == f"{app}/{name}"][:5],
    }
    return Page("agent.html", f"{app}/{name}", values, live=True)


async def all_dead_letters(question: Question) -> Page:
    """The dead letters that a filter selects: by cause, and the newest of them."""
    overview, actions = await question.watcher.newest(), question.actions
    found = await actions.dead_letters.of(question.query, overview.config, now=overview.time)
    filters = dead_letters.given(question.query, *dead_letters.FILTERS)
    newest, causes = part_of(found.newest, question.asked("page"), dead_letters.SHOWN), Causes(overview.config)
    rows = structs.replace(newest, rows=[(each, causes.identifier(each)) for each in newest.rows])
    jobs = actions.jobs[:SHOWN_JOBS]
    came_to = await dead_letters.came_to(actions.admin, *jobs)
    values = {
        "overview": overview,
        "found": structs.replace(found, newest=[]),
        "newest": rows,
        "columns": _columns([identifier for _, identifier in rows.rows]),
        "filters": filters,
        "jobs": [(job, job.told(came_to.get(job.number))) for job in jobs],
        "time": datetime.now(UTC),
    }
    if len(found.causes) == 1 and filters.keys() >= ONE_CAUSE:
        return Page("cause.html", f"{found.causes[0].error:.100}", {**values, "cause": found.causes[0]})
    return Page("dead_letters.html", "Dead letters", values)


def _columns(rows: Sequence[Mapping[str, str]]) -> list[tuple[str, bool]]:
    """Return the fields of the identifiers, as many as fit, and whether the values of a field differ."""
    names = dict.fromkeys(name for row in rows for name in row)
    found = [(name, len({row.get(name) for row in rows}) > 1) for name in names]
    return found[:MOST_COLUMNS]


async def dead_letter(question: Question) -> Page:
    """One dead letter."""
    sequence = _number(question, "sequence")
    found = await dead_letters.get(question.actions.admin, question.path["app"], sequence)
    return Page("dead_letter.html", f"Dead letter {found.sequence} of {found.app}", {"found": found})


async def job(question: Question) -> Page:
    """An action on many dead letters, as it goes on."""
    found = question.actions.job(_number(question, "number"))
    came = (await dead_letters.came_to(question.actions.admin, found)).get(found.number)
    _, tone, text = found.told(came)
    values = {"job": found, "came": came, "tone": tone, "text": text, "time": datetime.now(UTC)}
    return Page("job.html", f"{found.noun} of {found.total:,}", values, live=True)


async def notification(question: Question) -> Page:
    """One notification and what has become of it at each agent, or the newest ones with values of an identifier."""
    name, told, found, overview = question.asked("name"), None, None, None
    if name:
        admin, overview = question.actions.admin, await question.watcher.newest()
        if "@" in name.split()[0]:
            told = await story.of(admin, overview.config, name, overview.agents, overview.snapshot)
        else:
            found = await aviso_admin.search(admin, overview.config, name)
    values = {"story": told, "found": found, "now": overview.time if overview else None}
    return Page("notification.html", name or "Find a notification", values)


class _TimerRow(Struct, frozen=True, kw_only=True):
    app: str
    timer: str
    schedule: str
    leader: str
    last: datetime | None
    paused: str
    judgement: Judgement
    run: Run | None
    """The last run that somebody has asked for."""
    run_text: str
    denied: str
    """What the server denies our user of leader and last tick."""


async def timers(question: Question) -> Page:
    """The timers that the workers of all apps have recorded."""
    overview = await question.watcher.newest()
    admin = question.actions.admin
    rows = []
    for app, declared in sorted(overview.snapshot.recorded.apps.items()):
        if not declared.timers:
            continue
        leader = await asked(denied := Denials(), "leader", lease_records.leader(admin, app), Leader())
        claims = await asked(denied, "claims", timer_records.claims(admin, app), {})
        for name, schedule in declared.timers.items():
            claim, pause = claims.get(name), overview.snapshot.recorded.pauses.get((app, name))
            run = overview.snapshot.recorded.runs.get((app, name))
            rows.append(
                _TimerRow(
                    app=app,
                    timer=name,
                    schedule=schedule,
                    leader=leader.name,
                    last=claim.time if claim and claim.token else None,
                    paused=paused_text(pause) if pause else "",
                    judgement=timer_control.judge(
                        name,
                        leader=leader if claim is not None and claim.token and not denied.text() else None,
                        workers=overview.workers_of(app),
                        failure=overview.snapshot.recorded.failures.get((app, "timers", name)),
                        pause=pause,
                        now=overview.time,
                    ),
                    run=run,
                    run_text=run_text(run, void=not run.is_open(overview.time)) if run else "",
                    denied=denied.text(),
                )
            )
    values = {**_of_now(question, overview, "records"), "timers": rows}
    return Page("timers.html", "Timers", values, live=True)


async def streams(question: Question) -> Page:
    """All streams of the account."""
    overview = await question.watcher.newest()
    everything = question.asked("all") == "yes"
    shown = [row for row in overview.streams if everything or not row.stream.startswith("KV_")]
    known = bool(overview.streams) or not overview.snapshot.denied.subjects("streams")
    differing, declared = (
        stream_policy.differences(config, overview.snapshot.streams) if known else {}
        for config in (question.actions.config, overview.config)
    )
    values = {
        **_of_now(question, overview, "streams", "consumers"),
        "streams": shown,
        "left_out": len(overview.streams) - len(shown),
        "differing": differing,
        "declared": {name: texts for name, texts in declared.items() if name not in differing},
        "unavailable": overview.snapshot.unavailable,
    }
    return Page("streams.html", "Streams", values, live=True)


class SparkRun(Struct, kw_only=True):
    """A Spark application, as far as the notifications that were read tell of it."""

    cluster: str
    application: str
    name: str = ""
    began: datetime | None = None
    heard: datetime
    """When the newest notification of it was stored."""
    state: str = "running"
    """`running`, `lost`, or how it has ended."""
    begun: Counter[str] = field(default_factory=Counter)
    """How many jobs, stages and so on have begun, by kind."""
    failed: Counter[str] = field(default_factory=Counter)
    """How many of them have failed."""
    notifications: int = 0
    first: int = 0
    """The sequence of its first notification."""
    last: int


async def newest_spark_runs(admin: Admin, config: Config) -> tuple[list[SparkRun], str]:
    """Return the applications in the newest notifications, the latest first, and their stream; no stream where the
    event type is not configured, or nothing was ever published.

    Raises `BackendError`.
    """
    if EVENT_TYPE not in config.notification_schema:
        return [], ""
    stream = aviso_admin.stream_of(config, EVENT_TYPE)
    info = await inventory.existing(admin.stream_info(stream))
    if info is None:
        return [], ""
    reader = NotificationReader(EVENT_TYPE, config.notification_schema[EVENT_TYPE])
    runs: dict[tuple[str, str], SparkRun] = {}
    first = max(info.first_sequence, info.last_sequence - SPARK_READ + 1)
    reading = admin.read(stream, filter_subjects=(), start_sequence=first, last_sequence=info.last_sequence)
    async with aclosing(reading):
        async for message in reading:
            with suppress(AvisoWorkersError):  # one that cannot be read is the dead letter of whoever reads it
                if (found := reader.notification(message)) is not None:
                    _add_to_run(runs, found, message)
    return sorted(runs.values(), key=lambda run: -run.last), stream


def _add_to_run(runs: dict[tuple[str, str], SparkRun], found: Notification[Any], message: Message) -> None:
    payload = found.payload if isinstance(found.payload, dict) else {}
    status, time, sequence = str(payload.get("status", "")), store_time(message), message.sequence
    cluster, application, kind, event = (found.identifier[field] for field in SPARK_FIELDS)
    new = SparkRun(cluster=cluster, application=application, heard=time, first=sequence, last=sequence)
    run = runs.setdefault((cluster, application), new)
    run.heard, run.last = time, sequence
    run.notifications += 1
    if kind == "application":
        if event == "start":
            run.name, run.began = str(payload.get("name", "")), time
        run.state = {"start": "running", "resumed": "running", "lost": "lost"}.get(event, status or "ended")
    elif event == "start":
        run.begun[kind] += 1
    elif event == "end" and status == "failed":
        run.failed[kind] += 1


async def spark(question: Question) -> Page:
    """The Spark applications that notifications tell of."""
    overview = await question.watcher.newest()
    runs, stream = await newest_spark_runs(question.actions.admin, overview.config)
    return Page("spark.html", "Spark", {"runs": runs, "stream": stream, "overview": overview})


async def apps(question: Question) -> Page:
    """What the apps have declared when a worker of them started last."""
    overview = await question.watcher.newest()
    values = {
        "apps": sorted(overview.snapshot.recorded.apps.items()),
        "overview": overview,
        "denied": overview.snapshot.denied.text("records"),
    }
    return Page("apps.html", "Apps", values)


async def app(question: Question) -> Page:
    """What an app has declared."""
    overview = await question.watcher.newest()
    name, admin, schema = question.path["app"], question.actions.admin, overview.config.notification_schema
    if (declared := overview.snapshot.recorded.apps.get(name)) is None:
        if said := overview.snapshot.denied.text("records"):
            return Page("error.html", f"App {name}", {"text": said})
        raise NotFoundError(f"no worker has recorded what an app {name} declares")
    found = await asked(denied := Denials(), "document", asyncapi.stored(admin, name), None)
    if found and asyncapi.LEFT_OUT not in found and question.asked("as") == "asyncapi":
        return Page("", "asyncapi.json", found)
    channels = (found or {}).get("channels", {}).values()
    names = {*declared.agents.values(), *(channel["title"] for channel in channels)} & schema.keys()
    values = {
        "app": name,
        "overview": overview,
        "declared": declared,
        "workers": [
            (each, [*each.agents.values()], judgement)
            for each, judgement in health.judge_workers(
                name, overview.workers_of(name), overview.snapshot.consumers, now=overview.time
            )
        ],
        "document": found,
        "denied": denied.text(),
        "event_types": [(each, topic_of(each, schema[each]), schema[each].identifier) for each in sorted(names)],
        "deploys": overview.snapshot.recorded.deploys.get(name, ()),
    }
    return Page("app.html", f"App {name}", values)


async def doctor(question: Question) -> Page:
    """The results of the doctor's checks."""
    overview = await question.watcher.newest()
    scope = doctor_.Scope(seconds=DOCTOR_SECONDS)
    report = await question.actions.examined(overview.config, scope)
    return Page("doctor.html", "Doctor", {"report": report, "State": doctor_.State, "skipped": output.skipped(report)})


async def audit(question: Question) -> Page:
    """What users have done in a time, from consoles and by command."""
    now = datetime.now(UTC)
    since = parse_moment(question.asked("since") or "yesterday", name="from", now=now)
    until = parse_moment(question.asked("until"), name="to", now=now) if question.asked("until") else None
    if until is not None and until <= since:
        raise InvalidPositionError("the end must be later than the begin; a day is its beginning, 00:00 in UTC")
    records = question.actions.audit
    period = await asked(denied := Denials(), "actions", records.period(since, until or now + A_MINUTE), Period())
    actions, last = [each for each in period.actions if _is_asked(question, each)], None
    if period.first and not actions:
        newest = await asked(denied, "actions", records.newest(MOST_READ), [])
        last = next((each for each in newest if _is_asked(question, each)), None)
    values = {
        "actions": actions,
        "last": last,
        "said": _time_said(since, until),
        "today": now.date(),
        "of_time": len(period.actions),
        "users": sorted({each.record.who for each in period.actions} | {question.asked("who")} - {""}),
        "kinds": sorted({each.record.action for each in period.actions} | {question.asked("action")} - {""}),
        "is_cut": period.is_cut,
        "before": period.before,
        "first": period.first,
        "is_recorded": until is None or period.first is None or until > period.first,
        "denied": denied.text(),
    }
    return Page("audit.html", "Audit", values)


def _is_asked(question: Question, action: RecordedAction) -> bool:
    record, of = action.record, question.asked("of").lower()
    who, did = question.asked("who"), question.asked("action")
    return (
        who in ("", record.who)
        and did in ("", record.action)
        and (of in record.of.lower() or of in record.target.lower())
    )


def _time_said(since: datetime, until: datetime | None) -> str:
    """Return a time in words: days where it has whole ones."""
    first, last = (
        f"{each:%A %-d %B %Y}" if each == day_of(each) else time_text(each) for each in (since, until or since)
    )
    if until is None:
        return f"since {first}"
    return f"on {first}" if (since, until) == (day_of(since), day_of(since) + A_DAY) else f"from {first} to {last}"


async def settings(question: Question) -> Page:
    """The configuration in effect, with secrets masked."""
    rows = [
        (path, str(value), str(origin))
        for path, value, origin in display.effective(question.actions.config)
        if question.asked("q").lower() in path.lower()
    ]
    return Page("settings.html", "Settings", {"rows": rows})


def _number(question: Question, name: str) -> int:
    number = dead_letters.whole_number(question.path[name])
    if number is None:
        raise NotFoundError(f"{question.path[name]!r} is no number")
    return number


PAGES: dict[str, Callable[[Question], Awaitable[Page]]] = {
    "/": now,
    "/agents": agents,
    "/agents/{app}/{agent}": agent,
    "/dead-letters": all_dead_letters,
    "/dead-letters/{app}/{sequence}": dead_letter,
    "/jobs/{number}": job,
    "/notification": notification,
    "/timers": timers,
    "/streams": streams,
    "/spark": spark,
    "/apps": apps,
    "/apps/{app}": app,
    "/doctor": doctor,
    "/audit": audit,
    "/settings": settings,
}
