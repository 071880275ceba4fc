"""How agents and workers are: one judgement, which all that says it asks. It is pure: facts in, states and words out.

A condition is true, false, or not known. The state is the first of `CONDITIONS` that is true, in their order; where
none is true and one is not known, it is `unknown`; only then it is the first of `CALM` that is true. So a trouble that
is known beats what is not, and that beats every calm word. Times come from records and from the server, never from how
long somebody has looked. An agent needs somebody once its state is older than the patience with it.

Of workers and apps, their records say how they are. A worker says so when it ends in order. So one that says nothing
more was killed, or cut off from the servers. It is told for a day, and needs somebody until another worker of its app
has started in its place.

`agent_report` collects the facts of a server. `agents ls` and `show`, `consumers ls`, `top`, the console, the doctor's
checks of progress and the observer say these words; `/readyz` says of a worker what `hindered` says of its agents.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import TypeVar

from msgspec import Struct

from aviso_workers.aviso.literals import SECOND, printable, quoted, time_text
from aviso_workers.backends import ConsumerInfo
from aviso_workers.declare.agents import agent_of
from aviso_workers.jetstream.info import StreamInfo
from aviso_workers.ops.agent_control import SKEW_SECONDS, end_text
from aviso_workers.state import consumer_records, worker_records
from aviso_workers.state.consumer_records import ConsumerRecord
from aviso_workers.state.failure_records import MAX_RETRYING, WRITE_SECONDS, LastFailure, Retrying
from aviso_workers.state.timer_requests import Pause
from aviso_workers.state.worker_records import LIVES_SECONDS, AppWorkers, AtWork, WorkerRecord

T = TypeVar("T")
CATCHES_UP = 100
"""From so many notifications on that were never delivered, an agent is said to catch up, or to fall behind."""
SILENT = timedelta(seconds=60)
"""After so long without an acknowledgement, what is delivered again and again is stuck, whatever the policy."""
Consumers = Mapping[tuple[str, str], ConsumerInfo]
"""By stream and name."""
DEPLOY = timedelta(minutes=15)
"""For so long two versions may run, as in a deploy."""
COMES_BACK = timedelta(seconds=2 * LIVES_SECONDS)
"""A worker that has said nothing for so long does not say more soon, as it does when a server was away."""
MOST_TOLD = 5
"""How many versions are told."""
OF_LOST = (
    "Start as many workers of {app} as before. The end of its log and the kernel's log (`dmesg`, for memory) say why "
    "it ended. If fewer are meant to run, `nats kv del {app}__live {key}` forgets it."
)
OF_UNRECORDED = (
    "Give the workers' user the right to publish to `$KV.{app}__live.>` (`aviso-workers server render --role worker "
    "--app MODULE:APP`)."
)
OF_VERSIONS = (
    "Finish the deploy, or stop the workers of the version that is not meant to run; if they are two programs, give "
    "their apps two names."
)


class Unknown(Struct, frozen=True):
    """A fact that is not known."""

    why: str
    """In words that end a sentence."""


AllWorkers = Mapping[str, AppWorkers | Unknown] | Unknown
"""The workers that have recorded themselves, by app, as far as that is known."""


class NotKnownError(Exception):
    """A condition asks for a fact that is not known. Its text says why that is so."""


class AgentFacts(Struct, frozen=True, kw_only=True):
    """What is known of an agent on one event stream."""

    app: str
    agent: str
    stream: str
    now: datetime
    """By the server's clock."""
    stream_info: StreamInfo | Unknown | None
    """None where there is no such stream."""
    taken_by: str = ""
    """Another stream that has its subjects now; empty where its own has them, none has, or that is not known."""
    events: ConsumerInfo | Unknown | None
    """The consumer of its events; None where it has none."""
    retries: ConsumerInfo | Unknown | None = None
    """The consumer of what is handed back."""
    before: AgentFacts | None = None
    """An earlier look; None where this is the first: then what needs movement is not known."""
    record: ConsumerRecord | Unknown | None = None
    failure: LastFailure | Unknown | None = None
    """Its last failure."""
    workers: tuple[WorkerRecord, ...] | Unknown = ()
    """Those that live and have it, as far as they have recorded themselves."""
    functions: tuple[str, ...] = ()
    """The functions that its workers run, where these are several."""
    deployed: datetime | None = None
    """When a worker of its app last started with other code."""
    pause: Pause | None = None
    """The last pause of which it is recorded who has made it, and why."""
    oldest_pending: datetime | None = None
    """When the first notification was stored that was not delivered yet; None where that is not known."""
    dead_letters: int | None = 0
    """Dead letters that are kept, of all its streams; None where our user may not ask for them."""

    @property
    def consumers(self) -> list[ConsumerInfo]:
        """Those of its two consumers that are known."""
        return [each for each in (self.events, self.retries) if isinstance(each, ConsumerInfo)]

    @property
    def is_counted(self) -> bool:
        """Whether it is known how many notifications its consumers have."""
        return not isinstance(self.events, Unknown) and not isinstance(self.retries, Unknown)

    @property
    def pending(self) -> int:
        """The number of notifications that were never delivered yet."""
        return sum(each.num_pending for each in self.consumers)

    @property
    def ack_pending(self) -> int:
        """The number of notifications that are delivered and not settled."""
        return sum(each.num_ack_pending for each in self.consumers)

    @property
    def redelivered(self) -> int:
        """The number of notifications, of those not settled, that were delivered more than once."""
        return sum(each.num_redelivered for each in self.consumers)

    @property
    def deliveries(self) -> int:
        return sum(each.deliveries for each in self.consumers)

    @property
    def lag(self) -> int:
        """The number of notifications that are not settled yet."""
        return self.pending + self.ack_pending

    @property
    def retrying(self) -> list[Retrying]:
        """The notifications that are retried, as `retrying` returns them."""
        if not isinstance(self.failure, LastFailure):
            return []
        events, retries = (None if isinstance(each, Unknown) else each for each in (self.events, self.retries))
        return retrying(self.failure, self.stream, events, retries, now=self.now)

    @property
    def at_work(self) -> list[tuple[WorkerRecord, AtWork]]:
        """Its workers, each with what it handles of it."""
        found = self.workers if isinstance(self.workers, tuple) else ()
        return [(each, each.agents[self.agent]) for each in found if self.agent in each.agents]

    @property
    def consumer(self) -> ConsumerInfo | None:
        """The consumer of its events, as far as it is known."""
        return self.events if isinstance(self.events, ConsumerInfo) else None


class Judgement(Struct, frozen=True, kw_only=True):
    """How an agent is."""

    state: str
    """One of the names of `CONDITIONS` or `CALM`, or `unknown`."""
    since: datetime | None = None
    """Since when, by the server's clock; None where that is not known."""
    why: str = ""
    """What is to be said of it, without the state; empty where that says all."""
    needs: bool = False
    """Whether somebody should look at the agent."""
    also: tuple[str, ...] = ()
    """What else is so, and what is not known."""
    cure: str = ""
    """What to do, as a command or a sentence; empty of a calm state."""

    @property
    def is_trouble(self) -> bool:
        """Whether it is a state that somebody may have to look at, now or later."""
        return bool(self.cure)

    @property
    def text(self) -> str:
        """The state with its sentence and all else that is so."""
        return "; ".join((f"{self.state}: {self.why}" if self.why else self.state, *self.also))


Found = tuple[datetime | None, str] | None
"""Since when a condition holds, None where that is not known, and what is to be said of it; None where it does not."""


class Condition(Struct, frozen=True, kw_only=True):
    """Something that may be wrong with an agent. The order in `CONDITIONS` says what counts where several are so."""

    name: str
    holds: Callable[[AgentFacts], Found]
    patience: float
    """Seconds for which it needs nobody."""
    masked: bool = False
    """Whether a pause explains it."""


def judge(facts: AgentFacts) -> Judgement:
    """Return how an agent is."""
    true: dict[str, tuple[datetime | None, str]] = {}
    not_known: dict[str, list[str]] = {}
    for name, holds in RULES.items():
        try:
            if (found := holds(facts)) is not None:
                true[name] = found
        except NotKnownError as error:
            not_known.setdefault(str(error), []).append(name)
    may_be_paused = PAUSED in true or any(PAUSED in names for names in not_known.values())
    state = next((name for name in true if not (may_be_paused and name in MASKED)), "")
    troubles = {name: f"{name}: {said}" for name, (_, said) in true.items() if name in BY_NAME or name == PAUSED}
    unknown = [
        f"not known, since {why}: whether it is {', '.join(of)}"
        for why, names in not_known.items()
        if (of := [name for name in names if name not in CALM or name == PAUSED])
    ]
    if unknown and state not in BY_NAME:
        seems = [f"it seems {state}"] if state else []
        why = "; ".join(seems + unknown)
        return Judgement(state=UNKNOWN, why=why, needs=True, also=tuple(troubles.values()), cure=CURES[UNKNOWN])
    since, why = true[state]
    also = [said for name, said in troubles.items() if name != state]
    if (condition := BY_NAME.get(state)) is None:
        return Judgement(state=state, since=since, why=why, also=tuple(also))
    needs = since is None or (facts.now - since).total_seconds() >= condition.patience
    names = {"app": quoted(facts.app), "agent": quoted(facts.agent), "stream": quoted(facts.stream)}
    return Judgement(
        state=state,
        since=since,
        why=why,
        needs=needs,
        also=(*also, *unknown),
        cure=CURES[state].format_map(names),
    )


def known(fact: T | Unknown) -> T:
    """Return a fact. Raises `NotKnownError` where it is not known."""
    if isinstance(fact, Unknown):
        raise NotKnownError(fact.why)
    return fact


class _Look(Struct, frozen=True):
    """The two consumers of an agent, now and in the earlier look."""

    now: list[ConsumerInfo]
    before: list[ConsumerInfo]

    @property
    def moves(self) -> bool:
        """Whether something was delivered in between."""
        return sum(each.deliveries for each in self.now) != sum(each.deliveries for each in self.before)

    @property
    def is_asked(self) -> bool:
        """Whether somebody asks, or has asked, for more."""
        return any(each.num_waiting for each in (*self.now, *self.before))


def _workers(a: AgentFacts) -> tuple[WorkerRecord, ...]:
    """Return the workers, which say what hinders them and what they hold."""
    workers = known(a.workers)
    if any(each.hindrances is None for each in workers):
        raise NotKnownError("a worker of it is of an older version, and does not record how it is")
    return workers


def _consumers(a: AgentFacts) -> list[ConsumerInfo]:
    return [each for each in (known(a.events), known(a.retries)) if each is not None]


def _look(a: AgentFacts) -> _Look:
    """Return both looks. A consumer that is new is compared with itself."""
    now = _consumers(a)
    if a.before is None:
        raise NotKnownError("this is the first look")
    pairs = ((a.events, a.before.events), (a.retries, a.before.retries))
    return _Look(
        now, [was if isinstance(was, ConsumerInfo) else each for each, was in pairs if isinstance(each, ConsumerInfo)]
    )


def _quiet_since(consumers: list[ConsumerInfo]) -> datetime | None:
    moments = [
        moment for each in consumers for moment in (each.last_delivered, each.last_settled, each.created) if moment
    ]
    return max(moments, default=None)


def _stream_gone(a: AgentFacts) -> Found:
    info, record = known(a.stream_info), known(a.record)
    if record is None or record.removed or (info is not None and not a.taken_by):
        return None
    gone = f"its stream {a.stream} is gone" if info is None else f"its stream {a.stream} lacks its subjects"
    taken = f"; its subjects are those of {a.taken_by} now" if a.taken_by else ""
    return None, f"{gone}{taken}; it was settled up to sequence {record.ack_floor}"


def _consumer_gone(a: AgentFacts) -> Found:
    if known(a.events) is not None or (stream := known(a.stream_info)) is None:
        return None
    if (record := known(a.record)) is None or record.removed:
        return None
    if not record.holds_for(stream.created or stream.time):
        return (
            stream.created,
            f"its stream was made again; the former one was settled up to sequence {record.ack_floor}",
        )
    last = f"the last one of {a.stream} is {stream.last_sequence}"
    return record.time, f"a worker makes it again, after sequence {record.ack_floor}; {last}"


def _not_begun(a: AgentFacts) -> Found:
    if known(a.events) is not None or known(a.record) is not None:
        return None
    started = [each.started for each in known(a.workers)]
    return (min(started), "a worker of its app runs, and has not begun to read for it") if started else None


def _hindered(a: AgentFacts) -> Found:
    workers = _workers(a)
    found = [
        (worker.since(each.seconds), worker.name, each.text)
        for worker in workers
        for each in worker.hindrances or ()
        if each.agent in ("", a.agent)
    ]
    if not found:
        return None
    since, name, text = min(found)
    return since, f"{len({each[1] for each in found})} of {len(workers)} workers cannot go on; {name}: {text}"


def _half_paused(a: AgentFacts) -> Found:
    events, retries = known(a.events), known(a.retries)
    if events is None or retries is None or events.paused == retries.paused:
        return None
    return None, f"only its {'notifications' if events.paused else 'retries'} are paused"


def _no_worker(a: AgentFacts) -> Found:
    look = _look(a)
    if not a.lag or look.is_asked or look.moves:
        return None
    since = _quiet_since(look.now)
    if since is not None and a.oldest_pending is not None:
        since = max(since, a.oldest_pending)  # before that, it needed no worker
    if any(each.num_ack_pending for each in look.now):
        record = known(a.record)
        takes = _longest_seconds(look.now[0], record)
        if record is not None and record.attempt_seconds is not None:
            takes = record.attempt_seconds
        if since is None or (a.now - since).total_seconds() < takes:
            return None
    names = [worker.name for worker, _ in a.at_work]
    return since, f"{a.lag} wait, and {f'{names[0]} lives and asks for nothing' if names else 'no worker runs'}"


def _stuck(a: AgentFacts) -> Found:
    look, now = _look(a), known(a.events)
    if now is None or not now.num_ack_pending or now.ack_floor != look.before[0].ack_floor:
        return None
    record = known(a.record)
    silent = look.moves and now.num_redelivered and now.last_settled is not None and a.now - now.last_settled > SILENT
    settled, settled_before = ([each.last_settled for each in consumers] for consumers in (look.now, look.before))
    if silent and settled == settled_before and not _explained(a, now.ack_floor):
        return now.last_settled, f"{now.num_redelivered} are delivered again and again, and no acknowledgement comes"
    since, longest = unfinished_since(now, record), _longest_seconds(now, record)
    if since is None or (a.now - since).total_seconds() <= longest or _explained(a, now.ack_floor):
        return None
    text = f"{now.num_ack_pending} are delivered and not finished, the oldest after sequence {now.ack_floor}"
    return since + timedelta(seconds=longest), text


def _explained(a: AgentFacts, floor: int) -> bool:
    """Return whether the oldest notification above the ack floor has a reason not to be finished."""
    known(a.failure)
    _workers(a)
    held = {each.oldest: each for _, each in a.at_work if each.oldest is not None and each.oldest > floor}
    retried = [each.sequence for each in a.retrying if not each.handed_back]
    if not held or any(floor < each <= min(held) for each in retried):
        return bool(a.retrying)
    oldest = held[min(held)]
    return bool(oldest.waits_for or oldest.away or oldest.shut_seconds is not None)


def _blocked(a: AgentFacts) -> Found:
    failure = known(a.failure)
    if known(a.events) is None or failure is None or not (found := [each for each in a.retrying if each.blocked]):
        return None
    first = min(found, key=lambda each: (each.stream, each.sequence))
    key, behind = (f" (key {first.key})" if first.key else ""), sum(each.behind for each in found)
    waits = f", {behind} wait{'s' * (behind == 1)} behind {'it' if len(found) == 1 else 'them'}" if behind else ""
    at_least = "at least " if len(a.retrying) >= MAX_RETRYING else ""
    more = f" and {at_least}{len(found) - 1} more" if len(found) > 1 else ""
    return failure.since, f"at {first.stream}@{first.sequence}{key}{more}{waits}: {first.error}"


def _two_programs(a: AgentFacts) -> Found:
    return (a.deployed, f"its workers run {', '.join(a.functions)}") if a.functions else None


def _away(a: AgentFacts) -> Found:
    _workers(a)
    found = [(worker.since(each.away_seconds), each.away) for worker, each in a.at_work if each.away]
    if not found or not _consumers(a) or not a.lag:
        return None
    since, error = min(found)
    some = "" if len(found) == len(a.at_work) else f"in {len(found)} of {len(a.at_work)} workers, "
    return since, f"{some}{error}; {a.lag} wait, and no attempt is used"


def _failing(a: AgentFacts) -> Found:
    failure = known(a.failure)
    if failure is None or failure.until <= a.now:
        return None
    if any(each.away.partition(":")[0] == failure.error for _, each in a.at_work):
        return None  # the calls of the time before it was known to be away
    if not a.retrying and not failure.of and failure.handled is not None and failure.handled >= failure.last:
        return None
    if not (count := len(a.retrying)):
        return failure.since, failing_text(failure)
    how_many = f"{count}{' or more' if count >= MAX_RETRYING else ''} {'is' if count == 1 else 'are'}"
    return failure.since, f"{failing_text(failure)}; {how_many} tried again"


def _pacing(a: AgentFacts) -> Found:
    _workers(a)
    found = [worker.since(each.shut_seconds) for worker, each in a.at_work if each.shut_seconds is not None]
    return (min(found), "most of its calls fail, so it begins one now and then") if found else None


def _behind(a: AgentFacts) -> Found:
    look = _look(a)
    if a.pending < CATCHES_UP or a.lag <= sum(each.lag for each in look.before):
        return None
    known(a.workers)
    return a.oldest_pending or a.now, f"{a.lag} wait, more than before; {len(a.at_work)} workers run"


def _paused(a: AgentFacts) -> Found:
    events, pause = known(a.events), a.pause
    if events is None or events.paused_until is None:
        return None
    until = f"until {end_text(events.paused_until)}"
    if pause is None or abs((pause.until - events.paused_until).total_seconds()) > SKEW_SECONDS:
        return None, until  # by other means, or anew
    return pause.since, printable(f"by {pause.by} {until}" + (f": {pause.note}" if pause.note else ""))


def _removed(a: AgentFacts) -> Found:
    if known(a.events) is not None or (record := known(a.record)) is None or not record.removed:
        return None
    settled = f"when everything up to sequence {record.ack_floor} was settled"
    return record.time, f"its consumer was removed by an operator at {time_text(record.time)}, {settled}"


def _catching_up(a: AgentFacts) -> Found:
    return (None, "") if known(a.events) is not None and _consumers(a) and a.pending >= CATCHES_UP else None


def _working(a: AgentFacts) -> Found:
    return (None, "") if _consumers(a) and (a.lag or _look(a).moves) else None


def _at_rest(a: AgentFacts) -> Found:
    look = _look(a)
    if not look.now or look.is_asked or known(a.workers):
        return None
    return _quiet_since(look.now), "no worker runs, and nothing waits"


UNKNOWN, PAUSED = "unknown", "paused"
CONDITIONS = (
    Condition(name="stream gone", holds=_stream_gone, patience=0),
    Condition(name="consumer gone", holds=_consumer_gone, patience=60),
    Condition(name="not begun", holds=_not_begun, patience=60),
    Condition(name="hindered", holds=_hindered, patience=10),
    Condition(name="half paused", holds=_half_paused, patience=0),
    Condition(name="no worker", holds=_no_worker, patience=60, masked=True),
    Condition(name="stuck", holds=_stuck, patience=0, masked=True),
    Condition(name="blocked", holds=_blocked, patience=0),
    Condition(name="two programs", holds=_two_programs, patience=300),
    Condition(name="away", holds=_away, patience=300, masked=True),
    Condition(name="failing", holds=_failing, patience=300, masked=True),
    Condition(name="pacing", holds=_pacing, patience=900, masked=True),
    Condition(name="behind", holds=_behind, patience=900, masked=True),
)
"""In the order in which they count."""
CALM: dict[str, Callable[[AgentFacts], Found]] = {
    PAUSED: _paused,
    "removed": _removed,
    "never started": lambda a: (None, "no worker has ever created its consumer") if known(a.events) is None else None,
    "catching up": _catching_up,
    "working": _working,
    "at rest": _at_rest,
    "idle": lambda a: (None, "") if known(a.events) is not None else None,
}
"""What needs nobody, in the order in which it counts."""
STATES = (UNKNOWN, *(each.name for each in CONDITIONS), *CALM)
"""All states, the worst first."""
BY_NAME = {each.name: each for each in CONDITIONS}
HINDERED = BY_NAME["hindered"]
CURES = {
    UNKNOWN: (
        "Give our user the role operator (`aviso-workers server render --role operator`) where a right is missing; "
        "start the servers that do not answer. Where workers do not record themselves, give their user the right to "
        "(`aviso-workers server render --role worker --app MODULE:APP`)."
    ),
    "stream gone": (
        "If another stream has its subjects, take them from that one. Then `aviso-workers streams apply`, with `--app "
        "MODULE:APP` where its event type is declared in Python, makes the stream again with its subjects."
    ),
    "consumer gone": (
        "Start a worker of {app}, or read the log of the one that runs (`agent.disturbed`): the stream may be at its "
        "max_consumers. If nobody needs the agent any more, run `aviso-workers agents rm {app}/{agent}`."
    ),
    "not begun": (
        "Read the log of the worker (`agent.disturbed`) and its `/readyz`: they say why it cannot read {stream}."
    ),
    "hindered": (
        "Do what the sentence names: give the worker's user the right (`aviso-workers server render --role worker "
        "--app MODULE:APP`), or start that worker again where a call is stuck."
    ),
    "half paused": "`aviso-workers agents resume {app}/{agent}`, or pause it again.",
    "no worker": (
        "Start a worker of {app} (`aviso-workers worker MODULE:APP`), or start that one again that asks for nothing. "
        "If nobody needs the agent any more, run `aviso-workers agents rm {app}/{agent}`."
    ),
    "stuck": (
        "Read the workers' logs. `aviso-workers streams get {stream} SEQUENCE` shows the notification. If its handler "
        "may take so long, give the agent a longer `timeout`; else start the worker again that holds it."
    ),
    "blocked": (
        "Repair the cause of the error: it is tried again by itself, or at once by `aviso-workers agents retry "
        "{app}/{agent} --all`. `aviso-workers agents skip {app}/{agent} --all` makes a dead letter of it."
    ),
    "two programs": "Finish the deploy, or give one of the apps, or one of the agents, another name.",
    "away": "Bring back what the error names: the agent goes on by itself within seconds.",
    "failing": "`aviso-workers agents retrying {app}/{agent}` lists what is tried again and why.",
    "pacing": "`aviso-workers agents retrying {app}/{agent}` lists what is tried again and why.",
    "behind": "Start more workers of {app}, raise the agent's concurrency, or make its handler faster.",
}
"""What to do, by state, with `{app}`, `{agent}` and `{stream}`."""
MASKED = frozenset(each.name for each in CONDITIONS if each.masked)
RULES = {each.name: each.holds for each in CONDITIONS} | CALM


def retrying(
    failure: LastFailure, stream: str, events: ConsumerInfo | None, retries: ConsumerInfo | None, *, now: datetime
) -> list[Retrying]:
    """Return the notifications of a stream that an agent retries, as far as they are recorded: first those at which it
    is blocked, then those due first. One that was due and has not failed again since is handled by now, or runs. One
    that has left its stream is settled by the server."""
    recently = now - timedelta(seconds=2 * WRITE_SECONDS)

    def is_settled(each: Retrying) -> bool:
        if (consumer := retries if each.handed_back else events) is None:
            return False
        return not consumer.num_ack_pending or (not each.handed_back and each.sequence <= consumer.ack_floor)

    return [
        each
        for each in failure.retrying
        if each.stream == stream
        and (each.blocked or (each.again_at > recently and failure.until > now))
        and not is_settled(each)
    ]


def failing_text(failure: LastFailure) -> str:
    """Return since when, how often and how something fails."""
    times = "once" if failure.times == 1 else f"{failure.times} times"
    part = f" in {failure.of}" if failure.of else ""
    return f"since {time_text(failure.since)}, {times}{part}: {failure.described}"


def why_stuck(now: ConsumerInfo, before: ConsumerInfo) -> str:
    """Return the reason why a consumer of another client is stuck, as text; empty where it is not. Nothing is recorded
    of it, so the last delivery or acknowledgement is taken, which traffic can hide."""
    if now.paused or not now.lag or not before.lag or before.ack_floor != now.ack_floor:
        return ""
    if not now.num_ack_pending:
        idle = not before.num_ack_pending and before.deliveries == now.deliveries
        return f"{now.num_pending} pending, and no client pulls them" if idle else ""
    since = unfinished_since(now, None)
    if since is None or (now.time - since).total_seconds() <= _longest_seconds(now, None):
        return ""
    minutes = (now.time - since).total_seconds() / 60
    return (
        f"{now.num_ack_pending} delivered and not finished; the oldest one, after sequence {now.ack_floor}, "
        f"for {minutes:.0f} min"
    )


def unfinished_since(consumer: ConsumerInfo, record: ConsumerRecord | None) -> datetime | None:
    """Return the time since which the oldest delivered notification is not finished, or a later one; None: not
    known."""
    if record and record.ack_floor == consumer.ack_floor and record.unfinished_since:
        return record.unfinished_since
    moments = [moment for moment in (consumer.last_delivered, consumer.last_settled) if moment]
    return max(moments, default=None)


def _longest_seconds(consumer: ConsumerInfo, record: ConsumerRecord | None) -> float:
    """Return for how many seconds one notification may be unfinished."""
    if record is not None:
        return record.longest_seconds
    return max(consumer_records.STUCK_SECONDS, 2 * consumer.config.ack_wait / SECOND)


def judge_app(workers: AppWorkers | Unknown, *, now: datetime) -> Judgement:
    """Return how an app is. `now` is by the server's clock."""
    if isinstance(workers, Unknown):
        return Judgement(state=UNKNOWN, why=f"not known, since {workers.why}", needs=True, cure=CURES[UNKNOWN])
    running = by_version(workers)
    if len(running) < 2:
        return Judgement(state="runs" if workers.living else "at rest")
    since = [found[0].started for found in running.values()][1]
    told = [f"{code} on {_named_workers(found)}" for code, found in [*running.items()][:MOST_TOLD]]
    text = f"{len(running)} versions run: {', '.join(told)}"
    if now - since <= DEPLOY:
        return Judgement(state="deploying", since=since, why=text)
    return Judgement(state="several versions", since=since, why=text, needs=True, cure=OF_VERSIONS)


def by_version(workers: AppWorkers) -> dict[str, list[WorkerRecord]]:
    """Return the workers that live by the version of their code, as far as they have recorded it, the first to start
    first.
    """
    running = defaultdict[str, list[WorkerRecord]](list)
    for each in sorted((each for each in workers.living if each.code), key=lambda each: each.started):
        running[each.code].append(each)
    return running


def judge_workers(
    app: str, workers: AppWorkers, consumers: Consumers, *, now: datetime
) -> list[tuple[WorkerRecord, Judgement]]:
    """Return how each worker of an app is, those that live first. `now` is by the server's clock."""
    runs_unrecorded = _runs_unrecorded(app, workers, consumers)
    found = [(each, judge_worker(each, now=now)) for each in workers.living]
    starts = sorted((*workers.living, *workers.lost, *workers.ended), key=lambda each: each.started)
    for each in sorted(workers.lost, key=lambda each: each.since(0)):
        heard = each.since(0)
        needs = now - heard >= COMES_BACK
        why = f"killed or cut off within {worker_records.WRITE_SECONDS:g} s after {time_text(heard)}, on {each.host}"
        other = next((other for other in starts if _replaces(other, each)), None)
        if other is not None:
            starts.remove(other)  # each start is in the place of one
            why = f"{why}; another worker started at {time_text(other.started)}"
            found.append((each, Judgement(state="replaced", since=heard, why=why)))
        elif runs_unrecorded:
            why = f"no record since {time_text(heard)}, on {each.host}; a worker of {app} runs, and none records itself"
            cure = OF_UNRECORDED.format(app=quoted(app))
            found.append((each, Judgement(state=UNKNOWN, since=heard, why=why, needs=needs, cure=cure)))
        else:
            cure = OF_LOST.format(app=quoted(app), key=quoted(each.key))
            found.append((each, Judgement(state="lost", since=heard, why=why, needs=needs, cure=cure)))
    return found


def _runs_unrecorded(app: str, workers: AppWorkers, consumers: Consumers) -> bool:
    """Return whether a worker of an app asks for notifications, or has settled some, after all records have ended."""
    if workers.living or not workers.lost:
        return False
    until = max(each.since(-worker_records.WRITE_SECONDS) for each in (*workers.lost, *workers.ended))
    return any(
        each.num_waiting or (each.last_settled is not None and each.last_settled > until)
        for (_, name), each in consumers.items()
        if (of := agent_of(name)) and of[0] == app
    )


def _replaces(other: WorkerRecord, lost: WorkerRecord) -> bool:
    """Return whether another worker has started after one was lost. The lost one may have lived for
    `worker_records.WRITE_SECONDS` after its last record: within these, only a start in the same place counts, as that
    of a supervisor is."""
    seconds = (other.started - lost.since(0)).total_seconds()
    return seconds > (0 if (other.host, other.member) == (lost.host, lost.member) else worker_records.WRITE_SECONDS)


def judge_worker(worker: WorkerRecord, *, now: datetime) -> Judgement:
    """Return how a worker is that lives."""
    if not worker.hindrances:
        return Judgement(state="ready" if worker.hindrances is not None else "lives")
    first = max(worker.hindrances, key=lambda each: each.seconds)
    since = worker.since(first.seconds)
    needs = (now - since).total_seconds() >= HINDERED.patience
    also = tuple(each.text for each in worker.hindrances[:MOST_TOLD] if each is not first)
    return Judgement(
        state=HINDERED.name, since=since, why=first.text, needs=needs, also=also, cure=CURES[HINDERED.name]
    )


def worker_troubles(apps: AllWorkers, consumers: Consumers, *, now: datetime) -> Iterator[tuple[str, str, Judgement]]:
    """Yield what is in trouble: its app, the name of the worker, or `all workers`, and how it is. A worker that hinders
    agents is left to these.
    """
    for app, workers in apps.items() if not isinstance(apps, Unknown) else ():
        if (judgement := judge_app(workers, now=now)).is_trouble:
            yield app, "all workers", judgement
        for worker, judgement in (
            () if isinstance(workers, Unknown) else judge_workers(app, workers, consumers, now=now)
        ):
            if judgement.is_trouble and not (judgement.state == HINDERED.name and worker.agents):
                yield app, f"worker {worker.name}", judgement


def _named_workers(workers: list[WorkerRecord]) -> str:
    more = f" and {len(workers) - 1} more" if len(workers) > 1 else ""
    return f"{workers[0].name}{more}"
