"""Checks of progress: whether messages are handled, by what has changed between the two samples."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta
from functools import partial

from msgspec import structs

from aviso_workers.aviso import schema, topics
from aviso_workers.declare import agents, outputs
from aviso_workers.errors import WorkerDiedError
from aviso_workers.jetstream import metadata
from aviso_workers.jetstream.fields import SECOND
from aviso_workers.jetstream.info import ConsumerInfo, StreamInfo
from aviso_workers.ops import agent_inventory, agent_report, retried, stuck
from aviso_workers.ops.doctor.facts import Facts
from aviso_workers.ops.doctor.judgements import Check, Finding, State, about, check
from aviso_workers.state import delayed_messages
from aviso_workers.state.own_streams import DELAYED, RETRIES

__all__ = ["CHECKS"]

CHECKS: list[Check] = []
declare = partial(check, CHECKS, needs=("consumers", "streams"))

MAX_REDELIVERED = 0.05
"""The share of the deliveries."""
FEW = 20
"""The share of fewer redeliveries is not judged."""
FULL = 0.95
SLOW_SHARE, SLOW_PERCENTILE = 0.5, 0.99
NEARLY_ALL_WAITING = 0.9
MAX_SHOWN = 5
NO_WORKER = (
    "Start a worker (`aviso-workers worker MODULE:APP`). If a worker runs, its log says why it does not pull "
    "(`agent.disturbed`). `aviso-workers agents ls` shows how many notifications are left for each agent. If nobody "
    "needs the agent any more, run `aviso-workers agents rm {app} --agent {agent}`."
)
NO_CLIENT = (
    "Start the client that reads from the consumer. If nobody needs the consumer any more, run `aviso-workers "
    "consumers rm {stream} {consumer}`."
)
ANY_WORKER = "Start a worker of any app (`aviso-workers worker MODULE:APP`): each of them reads from this consumer."
CLIENT_FAILS = "Find out why the client that reads from the consumer does not acknowledge, or raise its ack_wait."
MORE_CLIENTS = "Let more clients read from the consumer, or make them faster."
FEEDS_ITSELF = (
    "More workers do not help: the agent reads what it publishes, itself or through other agents. Let it publish "
    "another event type, or leave its own notifications out with `where`. `aviso-workers agents pause {agent} --app "
    "{app}` stops it meanwhile."
)
NO_ROOM = (
    "No worker can create the consumer, because {limit}. Remove consumers that nobody needs (`aviso-workers consumers "
    "ls {{stream}}`), or raise the limit."
)
LOOK_AT_HANDLERS = (
    "Read the workers' logs and `/readyz`. `aviso-workers streams get {stream} SEQUENCE` shows the notification. If "
    "its handler may take so long, give the agent a longer `timeout`."
)
A_WHILE = timedelta(hours=1)

CANNOT_MAKE = (
    "If a worker runs already, it cannot create the consumer, and its log says why (`agent.disturbed`): its user may "
    "not create consumers, the stream is a work queue with another consumer, or the server has a consumer of that name "
    "that it cannot read (JS069)."
)
"""Said besides, because the doctor cannot see whether a worker runs that fails to create it."""


@declare(
    "JS021",
    "No consumer falls behind",
    why="More messages arrive than are handled, so the lag grows.",
    cure="Start more workers of {app}, raise the agent's concurrency, or make its handler faster. `aviso-workers "
    "agents ls --watch` shows whether it helps. It does not if the agent publishes notifications of the event type "
    "that it reads.",
)
def falling_behind(facts: Facts) -> Iterator[Finding]:
    """One WARN can be a burst. A consumer that nobody reads from is left to JS030. With `--app`, the check finds an
    agent whose function publishes the event type that it reads, itself or through other agents of the app: more workers
    do not help there.

    [Fleets](../fleets.md) says how many workers you need.
    """
    for before, after in _samples(facts):
        growth = after.num_pending - before.num_pending
        if growth > 0 and not after.paused and not _is_idle(before, after):  # else JS030 says it
            rate = growth / facts.elapsed_seconds
            cure = ""
            if not metadata.is_of_agent(after.config):
                cure = MORE_CLIENTS
            elif _is_ours(after):
                cure = ANY_WORKER
            elif _feeds_itself(facts, after):
                cure = FEEDS_ITSELF
            yield about(after, f"{after.num_pending} pending, {rate:.1f} more every second", cure=cure)


@declare(
    "JS022",
    "Few messages are redelivered",
    why="Handlers fail, or take longer than ack_wait without reporting progress.",
    cure="`aviso-workers agents retrying {app} {agent}` shows which notifications are tried again and why, and "
    "`aviso-workers dead-letters ls` those that are not tried any more. If no handler fails, raise ack_wait.",
)
def redelivered(facts: Facts) -> Iterator[Finding]:
    """The check warns when more than 5 % of the deliveries, and at least 20, are unsettled redeliveries, or when there
    were 20 more between the samples. Agents always report progress.
    """
    for before, after in _samples(facts):
        if _delivers_due(after):
            continue  # JS076 says it
        delivered = after.deliveries
        share = after.num_redelivered / delivered if delivered else 0.0
        found = ""
        if after.num_redelivered >= FEW and share > MAX_REDELIVERED:
            found = f"{after.num_redelivered} of {delivered} deliveries are unsettled redeliveries"
        elif after.num_redelivered - before.num_redelivered >= FEW:
            found = f"{after.num_redelivered - before.num_redelivered} more redeliveries within {_elapsed(facts)}"
        if found:
            cure = "" if metadata.is_of_agent(after.config) else CLIENT_FAILS
            yield about(after, f"{found}{_last_failure(facts, after)}", cure=cure)


@declare(
    "JS023",
    "Acknowledgements take less than half of ack_wait",
    why="The server delivers a message again when ack_wait is over, even if a client is still handling it.",
    cure="Set a longer streams.{stream}.consumers.{consumer}.ack_wait in the configuration, then run `aviso-workers "
    "streams apply`. Or let the client report progress.",
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


@declare(
    "JS030",
    "Workers pull the pending messages",
    why="Without a worker, the lag grows. With too many pull requests, the server refuses the next ones.",
    cure=NO_WORKER,
    severity=State.FAIL,
)
def no_worker(facts: Facts) -> Iterator[Finding]:
    """The check finds a pull consumer that nobody reads from: in both samples it has no ack pending and no waiting pull
    request. The result is WARN when nine tenths of `max_waiting` pull requests are in use, because the server will
    refuse the next ones.
    """
    for before, after in _samples(facts):
        if not after.pulled or after.paused:
            continue
        if _is_idle(before, after):
            found = f"{after.num_pending} pending, and no worker pulls them"
            last = after.last_delivered
            since = f"; the last delivery was at {last:%Y-%m-%d %H:%M}" if last and after.time - last > A_WHILE else ""
            yield about(after, found + since, cure=_nobody_pulls(after))
        elif 0 < after.config.max_waiting * NEARLY_ALL_WAITING <= after.num_waiting:
            yield about(
                after,
                f"{after.num_waiting} pull requests wait, of at most {after.config.max_waiting}",
                state=State.WARN,
                cure="Let fewer clients pull at a time, or create the consumer again with a higher max_waiting.",
            )


@declare(
    "JS031",
    "No consumer is at its limit of unacknowledged messages",
    why="At max_ack_pending, the server delivers no message until one is acknowledged.",
    cure="Look for handlers that hang (a `timeout` of the agent ends them), for failed notifications that wait for "
    "their retry (the workers' logs say why they failed), and for clients that acknowledge nothing.",
    severity=State.FAIL,
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


@declare(
    "JS038",
    "Every message of a work queue can still be delivered",
    why="A message that exceeded max_deliver, or that no consumer's filter matches, stays in the work queue for ever, "
    "and no lag counts it.",
    cure="`aviso-workers streams get {stream} SEQUENCE` shows a message. Handle it by hand and remove it (`nats "
    "stream rmm {stream} SEQUENCE`), or declare a consumer for the subjects that have none.",
    severity=State.FAIL,
)
def hidden(facts: Facts) -> Iterator[Finding]:
    for stream in facts.streams.values():
        if stream.config.retention != "workqueue":
            continue
        theirs = [consumer for consumer in facts.consumers.values() if consumer.stream == stream.name]
        known = sum(consumer.lag for consumer in theirs)
        if stream.messages > known:
            found = (
                f"{stream.messages} messages, and only {known} of them are pending or not acknowledged at a consumer"
            )
            yield Finding(stream=stream.name, found=found)


@declare(
    "JS058",
    "Every delivered notification is finished in time",
    why="A handler or its worker hangs, or every attempt fails. Acknowledgements of later notifications do not change "
    "that.",
    cure=LOOK_AT_HANDLERS,
    severity=State.FAIL,
    needs=("consumers", "records", "streams"),
)
def unfinished(facts: Facts) -> Iterator[Finding]:
    """The check fails when the oldest delivered notification is unfinished for longer than the policy of its agent
    allows ([the rules](lag.md#when-a-consumer-is-stuck)), unless what the agent depends on is away (JS078), or
    the agent is blocked at what is unfinished (JS079).
    """
    waiting = {agents.durable_name(app, agent) for app, agent in _waiting(facts)}
    for key, after in facts.consumers.items():
        before = facts.before.consumers.get(key, after)
        record = facts.records.get(key)
        now = structs.replace(after, time=facts.now)
        why = stuck.why_stuck(now, before, record, retried.blocked(facts.failures, key[0], after))
        if not why or _delivers_due(after) or not (after.num_ack_pending or after.num_waiting):
            continue  # JS076 or JS030 says it
        if after.name in waiting:
            continue  # JS078 says it
        failure = _last_failure(facts, after)
        if before.num_waiting or after.num_waiting or not after.pulled:
            yield about(after, f"{why}{failure}")
        else:
            abandoned = stuck.is_abandoned(now, before, record)
            found = why if abandoned else f"{why}{failure}; no worker asks for more"
            yield about(after, found, cure=f"{_nobody_pulls(after)} {LOOK_AT_HANDLERS}")


@declare(
    "JS065",
    "Every agent has its consumer",
    why="Without its consumer, the agent receives nothing, and no lag counts new notifications.",
    cure="Start a worker of {app}: it creates the consumer again, after the last settled notification. "
    + CANNOT_MAKE
    + " If nobody needs the agent any more, run `aviso-workers agents rm {app} --agent {agent}`.",
    severity=State.FAIL,
    needs=("consumers", "records", "streams"),
)
def without_consumer(facts: Facts) -> Iterator[Finding]:
    """With `--app`, an agent is a WARN in three other cases: no worker ever created its consumer, an operator removed
    the consumer (`consumers rm`), or the stream was recreated since. `agents ls` and `agents show` say which case it
    is, and the last ack floor.

    A worker creates the consumer again at the recorded ack floor and says so (`consumer.resumed`,
    `aviso_worker_consumer_recreations_total`). Find out who deleted the consumer. If a worker cannot create it, its log
    has the server's code: 10099 to 10101 for a work queue, 10012 for a consumer that cannot be read, 10026 where the
    stream or the account has as many consumers as its `max_consumers` allows.
    """
    for (name, consumer), record in facts.records.items():
        stream = facts.streams.get(name)
        if stream is None or not record.holds_for(stream.created) or not facts.lacks(name, consumer):
            continue
        found = (
            f"its consumer is gone; all messages up to sequence {record.ack_floor} were settled, "
            f"and the last sequence of the stream is {stream.last_sequence}{_of_work_queue(stream)}"
        )
        yield Finding(stream=name, consumer=consumer, found=found, cure=_no_room(facts, stream))
    for agent in facts.scope.agents or ():
        topic = schema.topic_of(agent.event_type, facts.config.notification_schema[agent.event_type])
        key = (topics.stream_name(topic.base), agent.durable_name(facts.scope.app))
        if key[0] not in facts.streams or not facts.lacks(*key):
            continue
        known = facts.records.get(key)
        stream = facts.streams[key[0]]
        if known is None or not known.holds_for(stream.created):
            found = f"{agent_inventory.why_none(known)}; no lag counts its notifications{_of_work_queue(stream)}"
            cure = _no_room(facts, stream) or "Start a worker of {app}, if the agent is to run here. " + CANNOT_MAKE
            yield Finding(stream=key[0], consumer=key[1], found=found, state=State.WARN, cure=cure)


@declare(
    "JS076",
    "Due notifications are stored in their streams",
    why="Notifications with a deliver_at in the past wait, because their stream refuses them, or because no running "
    "worker has their event type. They are retried without end, and none is lost.",
    cure="Start a worker whose configuration has the event type of {place}. If one runs, its log says why the stream "
    "refuses the notifications (`notification.overdue`).",
    severity=State.FAIL,
)
def due(facts: Facts) -> Iterator[Finding]:
    """The attempts are up to a minute apart, and workers log `notification.overdue`. Such notifications are not counted
    in JS022 and JS058, because no handler of an agent fails.
    """
    consumer = facts.consumers.get((DELAYED, delayed_messages.DURABLE))
    if consumer is None or not consumer.num_redelivered:
        return  # a worker stores them now, or JS030 says that none runs
    for target, count in facts.due.items():
        found, stream = f"{count} notifications are due and not stored", facts.streams.get(target)
        if stream is None:
            cure = "Start a worker that has the event type of {place}, or run `aviso-workers streams apply`."
            yield Finding(place=target, found=f"{found}: the stream does not exist", cure=cure)
        elif stream.config.discard == "new" and (stream.part_used or 0) >= FULL:
            cure = "Raise the limit of the stream, or delete messages: see JS006."
            yield Finding(place=target, found=f"{found}: the stream is full", cure=cure)
        else:
            yield Finding(place=target, found=found)


@declare(
    "JS066",
    "No notification ends the worker that handles it",
    why="The handler crashes the process, or uses up its memory. After as many deaths as the agent has attempts, the "
    "notification becomes a dead letter; until then, each attempt ends a worker.",
    cure="`aviso-workers streams get {stream} SEQUENCE` shows the notification. The end of the workers' logs and the "
    "kernel's log (`dmesg`, for memory) say why the workers ended. `aviso-workers agents pause {agent} --app {app}` "
    "stops the deliveries meanwhile.",
    needs=("records", "streams"),
    severity=State.FAIL,
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


@declare(
    "JS077",
    "No timer, no task and no function of a window fails",
    why="The function of a timer or of a window, or a task, raises each time. Nothing else of the app stops for that.",
    cure="The workers' log has the traceback at `timer.failed`, `task.failed` or `window.failed`. When the cause is "
    "gone, `aviso-workers timers run MODULE:APP NAME` runs a timer again.",
    needs=("records",),
)
def failing_timers(facts: Facts) -> Iterator[Finding]:
    """The check warns of a timer whose last tick failed, and of a task or a function of a window that failed and has
    not run for a minute since. Workers record it in the bucket `aviso_workers_consumers`, and `agents ls` shows it too.
    """
    for (app, kind, name), failure in facts.failures.items():
        if (kind != "agents" or failure.of_window) and failure.until > facts.now:
            place = f"{app} > {'window of ' if failure.of_window else ''}{kind.removesuffix('s')} {name}"
            yield Finding(place=place, found=agent_report.failing_text(failure))


@declare(
    "JS078",
    "What agents depend on is there",
    why="What an agent depends on is away: the agent tries one call a second, and the others wait in the stream. No "
    "attempts are used.",
    cure="Bring back what the agent depends on, as the error says: it goes on by itself within seconds.",
    needs=("records",),
)
def waiting_for_an_outage(facts: Facts) -> Iterator[Finding]:
    """The check warns of an agent in one of whose workers [what it depends on](../agents/outages.md) is away. Workers
    record it in the bucket `aviso_workers_consumers`, and `agents ls` shows it too.
    """
    for (app, agent), away in _waiting(facts).items():
        yield Finding(place=f"{app} > agent {agent}", found=away)


@declare(
    "JS079",
    "No agent is blocked at a notification",
    why="A notification has failed as often as is usual, and its agent, which has no limit of attempts, tries it again "
    "until it succeeds or a person skips it. With `order_by`, later notifications of its key wait behind it.",
    cure="Repair the cause of the error: the notification is tried again by itself, or at once by `aviso-workers "
    "agents retry {agent} --app {app} --all`. `agents skip` makes a dead letter of it.",
    needs=("consumers", "records"),
)
def blocked(facts: Facts) -> Iterator[Finding]:
    """The check warns of each agent with `RetryPolicy(attempts=None)` that is
    [blocked at](../agents/retries.md#try-without-end) a notification, which has failed 6 times or more. `agents ls`
    says so too, and the observer counts them (`aviso_observer_blocked`).
    """
    for (stream, name), consumer in facts.consumers.items():
        if found := retried.blocked(facts.failures, stream, consumer):
            commands = retried.commands_text(*(agent_inventory.agent_of(name) or ("", "")))
            yield about(consumer, f"{retried.blocked_text(found)}; {commands}")


@declare(
    "JS074",
    "The workers of an agent run the same function",
    why="Two programs have an app and an agent of the same name: each of them is given a part of the notifications.",
    cure="During a deploy that renames or moves the function, wait five minutes after the last old worker has stopped. "
    "Otherwise give one of the apps, or one of the agents, another name.",
    needs=("records",),
)
def other_functions(facts: Facts) -> Iterator[Finding]:
    """Workers register the module and the name of the agent's function. The check warns when there were two in the last
    5 minutes. `agents ls` says so too, and the workers log `consumer.functions_differ`.
    """
    for (stream, consumer), functions in facts.functions.items():
        yield Finding(stream=stream, consumer=consumer, found=f"its workers run {', '.join(functions)}")


def _is_idle(before: ConsumerInfo, after: ConsumerInfo) -> bool:
    """Return whether there is something to pull, and nobody pulls it."""
    is_busy = before.num_waiting or after.num_waiting or after.num_ack_pending or after.deliveries != before.deliveries
    return bool(after.pulled and after.num_pending and not is_busy)


def _is_ours(consumer: ConsumerInfo) -> bool:
    """Return whether the workers of all apps read from the consumer, and no agent."""
    return consumer.name.startswith(f"{delayed_messages.DURABLE.partition('__')[0]}__")


def _delivers_due(consumer: ConsumerInfo) -> bool:
    return (consumer.stream, consumer.name) == (DELAYED, delayed_messages.DURABLE)


def _nobody_pulls(consumer: ConsumerInfo) -> str:
    """Return the cure for a consumer that nobody reads from."""
    if not metadata.is_of_agent(consumer.config):
        return NO_CLIENT
    return ANY_WORKER if _is_ours(consumer) else NO_WORKER


def _feeds_itself(facts: Facts, consumer: ConsumerInfo) -> bool:
    """Return whether the consumer's agent publishes notifications that it reads, itself or through other agents of the
    app, as far as their code names the event types.
    """
    agents = facts.scope.agents or ()
    own = next((agent for agent in agents if agent.durable_name(facts.scope.app) == consumer.name), None)
    if own is None:
        return False
    published, new = set[str](), outputs.named_event_types(own.function)
    while new:
        published |= new
        readers = [agent for agent in agents if agent.event_type in new]
        new = {name for reader in readers for name in outputs.named_event_types(reader.function)} - published
    return own.event_type in published


def _no_room(facts: Facts, stream: StreamInfo) -> str:
    """Return the cure where the stream or the account takes no further consumer; empty where it does."""
    account = facts.after.account
    if 0 < (most := stream.config.max_consumers) <= stream.consumers:
        return NO_ROOM.format(limit=f"{stream.name} has {stream.consumers} consumers, of at most {most}")
    if 0 < (most := account.limits.max_consumers) <= account.consumers:
        return NO_ROOM.format(limit=f"the account has {account.consumers} consumers, of at most {most}")
    return ""


def _of_work_queue(stream: StreamInfo) -> str:
    """Return the sentence that a work queue takes one consumer for each subject; empty where the stream is none."""
    if stream.config.retention != "workqueue":
        return ""
    return f"; {stream.name} is a work queue, which allows one consumer for each subject, starting at the first message"


def _samples(facts: Facts) -> Iterator[tuple[ConsumerInfo, ConsumerInfo]]:
    """Yield each consumer as it was in the first and in the second sample; a new one is taken to be unchanged."""
    for key, after in facts.consumers.items():
        yield facts.before.consumers.get(key, after), after


def _waiting(facts: Facts) -> dict[tuple[str, str], str]:
    """Return the agents of which what they depend on is away, by app and agent, with since when and the error."""
    return {
        (app, name): text
        for (app, kind, name), failure in facts.failures.items()
        if kind == "agents" and (text := agent_report.away_text(failure, now=facts.now))
    }


def _last_failure(facts: Facts, consumer: ConsumerInfo) -> str:
    """Return the last error of the agent that reads from a consumer, as the end of a sentence; empty where none is
    known.
    """
    app, agent = agent_inventory.agent_of(consumer.name) or ("", "")
    failure = facts.failures.get((app, "agents", agent))
    return f"; the last error: {failure.described}" if failure and failure.until > facts.now else ""


def _wait_after_a_death(facts: Facts) -> Iterator[tuple[tuple[str, str], int]]:
    """Yield the sequences that are tried again because a worker ended while it handled them, with their consumers."""
    for stream, consumer in facts.consumers:
        app, agent = agent_inventory.agent_of(consumer) or ("", "")
        failure = facts.failures.get((app, "agents", agent))
        if failure and failure.until > facts.now and stream != RETRIES:
            for each in failure.retrying:
                if each.error.partition(":")[0] == WorkerDiedError.__name__:
                    yield (stream, consumer), each.sequence


def _elapsed(facts: Facts) -> str:
    return f"{facts.elapsed_seconds:.1f} s"
