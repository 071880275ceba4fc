"""Checks of progress: whether messages are handled, by what has changed between the two samples."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta
from functools import partial

from msgspec import structs

from aviso_workers.aviso.literals import SECOND
from aviso_workers.declare import agents, outputs
from aviso_workers.declare.agents import agent_of
from aviso_workers.errors import WorkerDiedError
from aviso_workers.jetstream import metadata
from aviso_workers.jetstream.info import ConsumerInfo, StreamInfo
from aviso_workers.ops import agent_report, aviso_admin, health
from aviso_workers.ops.doctor.checks.consumers import APPLY, UNNEEDED
from aviso_workers.ops.doctor.facts import Facts, Need
from aviso_workers.ops.doctor.judgements import Declaration, Finding, Found, State, about, each_stream, quoted_in_cure
from aviso_workers.state import delayed_messages, own_streams
from aviso_workers.state.own_streams import RETRIES

declare = partial(Declaration, needs=("consumers", "streams"))

MAX_REDELIVERED = 0.05
"""The share of the deliveries."""
FEW = 20
"""The share of fewer redeliveries is not judged."""
FULL = 0.95
SLOW_SHARE, SLOW_PERCENTILE = 0.5, 0.99
NEARLY_ALL_WAITING = 0.9
MAX_SHOWN = 5
NO_CLIENT = f"Start the client that reads from the consumer. {UNNEEDED}"
ANY_WORKER = "Start a worker of any app (`aviso-workers worker MODULE:APP`): each of them reads from this consumer."
CLIENT_FAILS = "Find out why the client that reads from the consumer does not acknowledge, or raise its ack_wait."
MORE_CLIENTS = "Let more clients read from the consumer, or make them faster."
FEEDS_ITSELF = (
    "More workers do not help: the agent reads what it publishes, itself or through other agents. Let it publish "
    "another event type, or leave its own notifications out with `where`. `aviso-workers agents pause {app}/{agent}` "
    "stops it meanwhile."
)
NO_ROOM = (
    "No worker can create the consumer, because {limit}. Remove consumers that nobody needs (`aviso-workers consumers "
    "ls {{stream}}`), or raise the limit."
)
A_WHILE = timedelta(hours=1)
GOES_ON = frozenset(("blocked", "two programs", "away", "failing", "pacing", "behind", health.UNKNOWN))
"""The states of an agent that handles something still."""
OF_AGENTS: frozenset[Need] = frozenset(("consumers", "records", "streams"))
"""What has to be known of agents."""


@declare("JS021").says(
    "No client falls behind",
    why="More messages arrive than are handled, so the lag grows.",
    cure=MORE_CLIENTS,
)
def falling_behind(facts: Facts) -> Iterator[Finding]:
    """One WARN can be a burst. A consumer that nobody reads from is left to JS030, and an agent to JS058."""
    for before, after in _of_clients(facts):
        growth = after.num_pending - before.num_pending
        if growth > 0 and not after.paused and not _is_idle(before, after):  # else JS030 says it
            rate = growth / facts.elapsed_seconds
            cure = ANY_WORKER if _delivers_due(after) else ""
            yield about(after, f"{after.num_pending} pending, {rate:.1f} more every second", cure=cure)


@declare("JS022").says(
    "Few messages are redelivered to clients",
    why="The client fails, or takes longer than ack_wait without reporting progress.",
    cure=CLIENT_FAILS,
)
def redelivered(facts: Facts) -> Iterator[Finding]:
    """The check warns when more than 5 % of the deliveries, and at least 20, are unsettled redeliveries, or when there
    were 20 more between the samples. Of agents, JS058 says what is tried again.
    """
    for before, after in _of_clients(facts):
        if _delivers_due(after):
            continue  # JS076 says it
        delivered = after.deliveries
        share = after.num_redelivered / delivered if delivered else 0.0
        if after.num_redelivered >= FEW and share > MAX_REDELIVERED:
            yield about(after, f"{after.num_redelivered} of {delivered} deliveries are unsettled redeliveries")
        elif after.num_redelivered - before.num_redelivered >= FEW:
            more = after.num_redelivered - before.num_redelivered
            yield about(after, f"{more} more redeliveries within {_elapsed(facts)}")


@declare("JS023").says(
    "Acknowledgements take less than half of ack_wait",
    why="The server delivers a message again when ack_wait is over, even if a client is still handling it.",
    cure="Set a longer streams.{stream}.consumers.{consumer}.ack_wait" + APPLY + ". Or let the client report progress.",
)
def slow_acks(facts: Facts) -> Iterator[Finding]:
    """The server measures ack times of consumers with `sample_freq`. The check warns when 1 % of the acks take longer
    than half of `ack_wait`, because on a slow day such messages are delivered twice. Agents are not checked, because
    they report progress. The result is SKIP when no ack was measured between the samples.
    """
    times = defaultdict[tuple[str, str], list[int]](list)
    for metric in facts.advisories:
        if metric.kind.startswith("METRIC.CONSUMER.ACK."):
            times[metric.stream, metric.consumer].append(metric.ack_time)
    if not times:
        found = f"no consumer with sample_freq acknowledged anything within {_elapsed(facts)}"
        yield Finding(found=found, state=State.SKIP)
    for key, measured in times.items():
        slow = sorted(measured)[math.ceil(SLOW_PERCENTILE * len(measured)) - 1]
        consumer = facts.consumers.get(key)
        # An agent of ours reports progress while it works, so that its ack_wait starts again and again.
        if consumer and not metadata.is_of_agent(consumer.config) and slow > SLOW_SHARE * consumer.config.ack_wait:
            wait = consumer.config.ack_wait / SECOND
            yield about(
                consumer,
                f"1 % of the acknowledgements take {slow / SECOND:.2f} s or longer, with an ack_wait of {wait:g} s",
            )


@declare("JS030", State.FAIL).says(
    "Clients pull the pending messages",
    why="Without a reader, the lag grows. With too many pull requests, the server refuses the next ones.",
    cure=NO_CLIENT,
)
def no_client(facts: Facts) -> Iterator[Finding]:
    """The check finds a pull consumer that nobody reads from: in both samples it has no ack pending and no waiting pull
    request. The result is WARN when nine tenths of `max_waiting` pull requests are in use, because the server will
    refuse the next ones. Agents are left to JS058.
    """
    for before, after in _of_clients(facts):
        if not after.pulled or after.paused or after.ends_by_itself:
            continue
        if _is_idle(before, after):
            last = after.last_delivered
            since = f"; the last delivery was at {last:%Y-%m-%d %H:%M}" if last and after.time - last > A_WHILE else ""
            found = f"{after.num_pending} pending, and nobody pulls them{since}"
            yield about(after, found, cure=ANY_WORKER if _delivers_due(after) else "")
        elif 0 < after.config.max_waiting * NEARLY_ALL_WAITING <= after.num_waiting:
            yield about(
                after,
                f"{after.num_waiting} pull requests wait, of at most {after.config.max_waiting}",
                state=State.WARN,
                cure="Let fewer clients pull at a time, or create the consumer again with a higher max_waiting.",
            )


@declare("JS031", State.FAIL).says(
    "No consumer is at its limit of unacknowledged messages",
    why="At max_ack_pending, the server delivers no message until one is acknowledged.",
    cure="Look for handlers that hang (a `timeout` of the agent ends them), for failed notifications that wait for "
    "their retry (the workers' logs say why they failed), and for clients that acknowledge nothing.",
)
def stalled(facts: Facts) -> Iterator[Finding]:
    """The check finds a consumer that was at its limit in both samples, and settled nothing between them. A consumer
    with the limit 1, as of a singleton, is at its limit whenever its handler runs, and is not checked; JS058 says
    whether the handler runs too long.

    An agent can have 100,000 unsettled notifications, unless the account, the server or the stream allows fewer.
    Messages of a dead client come back after `ack_wait`. If all of them wait for their retry, a shorter `retry` makes
    dead letters sooner.
    """
    for before, after in _samples(facts):
        most = after.config.max_ack_pending
        has_settled = (before.ack_floor, before.last_settled) != (after.ack_floor, after.last_settled)
        # With a limit of 1, as of a singleton, a handler that runs reaches it. JS058 says whether it runs too long.
        if 1 < most <= min(before.num_ack_pending, after.num_ack_pending) and not has_settled:
            yield about(after, f"{after.num_ack_pending} delivered and not acknowledged, of at most {most}")


@declare("JS038", State.FAIL, each=each_stream).says(
    "Every message of a work queue can still be delivered",
    why="A message that exceeded max_deliver, or that no consumer's filter matches, stays in the work queue for ever, "
    "and no lag counts it.",
    cure="`aviso-workers streams get {stream} SEQUENCE` shows a message. Handle it by hand and remove it (`nats "
    "stream rmm {stream} SEQUENCE`), or declare streams.{stream}.consumers.NAME with the filter_subjects that no "
    "consumer has" + APPLY + ".",
)
def hidden(stream: StreamInfo, facts: Facts) -> Iterator[Found]:
    if stream.config.retention != "workqueue":
        return
    theirs = [consumer for consumer in facts.consumers.values() if consumer.stream == stream.name]
    known = sum(consumer.lag for consumer in theirs)
    if stream.messages > known:
        found = f"{stream.messages} messages, and only {known} of them are pending or not acknowledged at a consumer"
        yield found


@declare("JS058", State.FAIL, needs=tuple(sorted(OF_AGENTS))).says(
    "No agent needs somebody",
    why="The agent does not handle what it is there for, or not all of it.",
    cure="`aviso-workers agents show {app}` says more.",
)
def agents_need_somebody(facts: Facts) -> Iterator[Finding]:
    """The check says the [state of each agent](health.md) that has been so for longer than the patience with it, as
    `agents ls` and the console do, with the cure. A state in which the agent goes on, if slowly, is a WARN.

    A consumer of another client is stuck when its oldest delivered notification is not finished for longer than five
    minutes, or twice its `ack_wait`.
    """
    at = facts.elapsed_seconds
    now, before = facts.snapshot(facts.after, at), facts.snapshot(facts.before, 0.0)
    declared = agent_report.declared(facts.config, facts.recorded.apps)
    for agent in facts.scope.agents or ():
        declared.append((facts.scope.app, agent.name, aviso_admin.stream_of(facts.config, agent.event_type)))
    for (stream, consumer), found in agent_report.by_consumer(now, before, declared=declared).items():
        if not found.needs or (found.state == health.UNKNOWN and facts.unknown.keys() & OF_AGENTS):
            continue  # why it is not known is told once
        state = State.WARN if found.state in GOES_ON else State.FAIL
        cure = _cure(facts, stream, consumer, found.state) or health.CURES[found.state]
        yield Finding(stream=stream, consumer=consumer, found=found.text, state=state, cure=cure)
    for before_one, after in _of_clients(facts):
        why = health.why_stuck(structs.replace(after, time=facts.now), before_one)
        if why and not _delivers_due(after) and after.num_ack_pending:
            yield about(after, why, cure=CLIENT_FAILS)


def _cure(facts: Facts, stream: str, consumer: str, state: str) -> str:
    """Return what the facts say of the cure of an agent; empty where they say no more than its state does."""
    if state in ("consumer gone", "not begun") and (found := facts.streams.get(stream)) is not None:
        return _no_room(facts, found)
    if state == "behind" and _feeds_itself(facts, consumer):
        return FEEDS_ITSELF
    return ""


@declare("JS076", State.FAIL).says(
    "Due notifications are stored in their streams",
    why="Notifications that are due in the past wait, because their stream refuses them, or because no running "
    "worker has their event type. They are retried without end, and none is lost.",
    cure="Start a worker whose configuration has the event type of {place} (`aviso-workers worker MODULE:APP`). If "
    "one runs, its log says why the stream refuses the notifications (`notification.overdue`).",
)
def due(facts: Facts) -> Iterator[Finding]:
    """Workers try again, up to a minute apart, and log `notification.overdue`. Such notifications are not counted in
    JS022 and JS058, because no handler of an agent fails.
    """
    for target, count in facts.due.items():
        key = delayed_messages.stream_of(target), delayed_messages.DURABLE
        consumer = facts.consumers.get(key)
        if not (consumer.num_redelivered if consumer else facts.lacks(*key)):
            continue  # a worker stores them now, or JS030 says that none runs
        found, stream = f"{count} notifications are due and not stored", facts.streams.get(target)
        if stream is None:
            cure = "Start a worker that has the event type of {place}, or run `aviso-workers streams apply`."
            yield Finding(place=target, found=f"{found}: the stream does not exist", cure=cure)
        elif stream.config.discard == "new" and (stream.part_used or 0) >= FULL:
            cure = "Raise the limit of the stream, or delete messages: see JS006."
            yield Finding(place=target, found=f"{found}: the stream is full", cure=cure)
        else:
            yield Finding(place=target, found=found)


@declare("JS066", State.FAIL, needs=("records", "streams")).says(
    "No notification ends the worker that handles it",
    why="The handler crashes the process, or uses up its memory. After as many deaths as the agent has attempts, the "
    "notification becomes a dead letter; until then, each attempt ends a worker.",
    cure="`aviso-workers streams get {stream} SEQUENCE` shows the notification. The end of the workers' logs and the "
    "kernel's log (`dmesg`, for memory) say why the workers ended. `aviso-workers agents pause {app}/{agent}` "
    "stops the deliveries meanwhile.",
)
def ends_workers(facts: Facts) -> Iterator[Finding]:
    """The check finds notifications during which a worker process ended more than once. Workers run such a notification
    alone, to be sure that it is the cause. [A worker restarts in a loop](worker-restarts.md) has the steps.
    """
    by_agent = defaultdict[tuple[str, str], set[int]](set)
    for each in facts.run_alone:
        by_agent[each.stream, agents.durable_name(each.app, each.agent)].add(each.sequence)
    for key, waiting in _wait_after_a_death(facts):  # it does not run alone before its next attempt is due
        by_agent[key].add(waiting)
    for (stream, consumer), sequences in by_agent.items():
        shown = ", ".join(map(str, sorted(sequences)[:MAX_SHOWN]))
        found = (
            f"a worker ended while it handled sequence {shown}; workers now run each such notification alone "
            f"({len(sequences)} in all)"
        )
        yield Finding(stream=stream, consumer=consumer, found=found)


@declare("JS077", needs=("records",)).says(
    "No timer, no task and no function of a window or of on_dead_letter fails",
    why="The function of a timer, of a window or of on_dead_letter, or a task, raises each time. Nothing else of the "
    "app stops for that.",
    cure=agent_report.RUNS_AGAIN,
)
def failing_timers(facts: Facts) -> Iterator[Finding]:
    """The check warns of a timer whose last tick failed, and of a task or a function of a window or of `on_dead_letter`
    that failed less than a minute ago. Workers record it in the bucket `<app>__state`, and `agents ls` shows it too.
    """
    for (app, kind, name), failure in facts.recorded.failures.items():
        if (kind != "agents" or failure.of) and failure.until > facts.now:
            place = f"{app} > {kind.removesuffix('s')} {name}"
            cure = agent_report.RUN_TIMER.format(quoted_in_cure(name)) if kind == "timers" else ""
            yield Finding(place=place, found=health.failing_text(failure), cure=cure)


@declare("JS080", needs=("records",)).says(
    "No worker is lost, and each app runs one version",
    why="A worker that was killed or cut off no longer does its share. Workers of two versions handle notifications "
    "differently, and each notification goes to any of them.",
    cure="`aviso-workers agents ls {app}` says more.",
)
def workers_need_somebody(facts: Facts) -> Iterator[Finding]:
    """The check says the [state of each worker and app](health.md#workers-and-apps) that needs somebody. A worker that
    is hindered is left to its agents, of which JS058 says it.
    """
    for app, name, found in health.worker_troubles(facts.workers, facts.consumers, now=facts.now):
        if found.needs:
            yield Finding(place=f"{app} > {name}", found=found.text, cure=found.cure)


def _is_idle(before: ConsumerInfo, after: ConsumerInfo) -> bool:
    """Return whether there is something to pull, and nobody pulls it."""
    is_busy = before.num_waiting or after.num_waiting or after.num_ack_pending or after.deliveries != before.deliveries
    return bool(after.pulled and after.num_pending and not is_busy)


def _delivers_due(consumer: ConsumerInfo) -> bool:
    """Return whether the workers of all apps read from the consumer, and no agent."""
    return consumer.name == delayed_messages.DURABLE


def _feeds_itself(facts: Facts, consumer: str) -> bool:
    """Return whether the consumer's agent publishes notifications that it reads, itself or through other agents of the
    app, as far as their code names the event types.
    """
    agents = facts.scope.agents or ()
    own = next((agent for agent in agents if agent.durable_name(facts.scope.app) == consumer), None)
    if own is None:
        return False
    published, new = set[str](), outputs.named_event_types(own.function)
    while new:
        published |= new
        readers = [agent for agent in agents if agent.event_type in new]
        new = {name for reader in readers for name in outputs.named_event_types(reader.function)} - published
    return own.event_type in published


def _no_room(facts: Facts, stream: StreamInfo) -> str:
    """Return the cure where the stream takes no further consumer; empty where it does."""
    most = facts.after.account.max_consumers(stream.config)
    if 0 < most <= stream.consumers:
        return NO_ROOM.format(limit=f"{{stream}} has {stream.consumers} consumers, of at most {most}")
    return ""


def _of_clients(facts: Facts) -> Iterator[tuple[ConsumerInfo, ConsumerInfo]]:
    """Yield the samples of consumers that no agent reads from."""
    return (each for each in _samples(facts) if agent_of(each[1].name) is None)


def _samples(facts: Facts) -> Iterator[tuple[ConsumerInfo, ConsumerInfo]]:
    """Yield each consumer as it was in the first and in the second sample; a new one is taken to be unchanged."""
    for key, after in facts.consumers.items():
        yield facts.before.consumers.get(key, after), after


def _wait_after_a_death(facts: Facts) -> Iterator[tuple[tuple[str, str], int]]:
    """Yield the sequences that are tried again because a worker ended while it handled them, with their consumers."""
    for stream, consumer in facts.consumers:
        app, agent = agent_of(consumer) or ("", "")
        failure = facts.recorded.failures.get((app, "agents", agent))
        if failure and failure.until > facts.now and not own_streams.app_of(RETRIES, stream):
            for each in failure.retrying:
                if each.error.partition(":")[0] == WorkerDiedError.__name__:
                    yield (stream, consumer), each.sequence


def _elapsed(facts: Facts) -> str:
    return f"{facts.elapsed_seconds:.1f} s"
