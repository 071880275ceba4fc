"""Checks of the configuration of consumers. Those of our workers have attempts, delays and dead letters in the
worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from functools import partial

from aviso_workers.aviso import schema, topics
from aviso_workers.aviso.literals import SECOND
from aviso_workers.config.streams import event_streams
from aviso_workers.declare.agents import agent_of
from aviso_workers.declare.batches import Batch
from aviso_workers.jetstream import metadata, subjects
from aviso_workers.jetstream.info import ConsumerInfo, StreamInfo
from aviso_workers.ops import agent_report
from aviso_workers.ops.doctor.checks import streams
from aviso_workers.ops.doctor.facts import Facts
from aviso_workers.ops.doctor.judgements import (
    Declaration,
    Finding,
    Found,
    State,
    about,
    each_consumer,
    each_stream,
    quoted_in_cure,
)
from aviso_workers.ops.timer_control import paused_text

declare = partial(Declaration, needs=("consumers", "streams"))

MANY_FILTERS = 10
MANY_CONSUMERS, TOO_MANY_CONSUMERS = 800, 100_000
"""A server refuses the 1001st of a stream, unless its max_consumers says otherwise."""
UNUSED = timedelta(days=7)
LONG_PAUSE_SECONDS = 86_400
INFO_CALLS_PER_SECOND = 50
PINNED_AGAIN = 3
RETIRED = "If nobody needs the agent any more, run `aviso-workers agents rm {app}/{agent}`. Otherwise start a worker."
RESUME = "`nats consumer resume {stream} {consumer}` ends the pause."
UNNEEDED = "If nobody needs the consumer any more, run `aviso-workers consumers rm {stream} {consumer}`."
DECLARE = "Set streams.{stream}.consumers.{consumer}."
APPLY = f" in the configuration, {streams.APPLY}"
EXCEEDED = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES"
"""How the subjects of advisories begin of messages that exceed max_deliver."""


def _foreign(facts: Facts) -> Iterator[ConsumerInfo]:
    """Yield the durable consumers with acknowledgements that other programs than our workers made."""
    for consumer in facts.consumers.values():
        if consumer.durable and consumer.config.ack_policy != "none" and not metadata.is_of_agent(consumer.config):
            yield consumer


@declare("JS024", each=_foreign).says(
    "Consumers of other programs have a backoff",
    why="Without a backoff, the server delivers every message that was not acknowledged again after ack_wait, and all "
    "of them at the same time.",
    cure=DECLARE + "backoff" + APPLY + ". Or let the client nak with a delay.",
)
def no_backoff(consumer: ConsumerInfo, _: Facts) -> Iterator[Found]:
    """Consumers of agents are not checked here and in JS025, because their workers delay retries, with jitter."""
    if not consumer.config.backoff:
        ack_wait = consumer.config.ack_wait / SECOND
        yield f"no backoff: unacknowledged messages are delivered again after {ack_wait:g} s"


@declare("JS025", each=_foreign).says(
    "Consumers of other programs limit the deliveries of a message",
    why="Without max_deliver, a message that can never be handled is delivered for ever.",
    cure=DECLARE + "max_deliver" + APPLY + ". Also store the advisories of messages that exceed it (JS026).",
)
def unlimited_deliveries(consumer: ConsumerInfo, _: Facts) -> Iterator[Found]:
    if consumer.config.max_deliver <= 0:
        yield "max_deliver is unlimited"


@declare("JS026", each=_foreign).says(
    "A stream stores the advisories of messages that exceed max_deliver",
    why="The server announces such a message once, to the subscribers of that moment.",
    cure="Declare streams.NAME with the subjects `" + EXCEEDED + ".{stream}.{consumer}`" + APPLY + ".",
)
def exceeded_and_not_kept(consumer: ConsumerInfo, facts: Facts) -> Iterator[Found]:
    """Consumers of agents are not checked here: they have no max_deliver (JS059)."""
    advisories, most = f"{EXCEEDED}.{consumer.stream}.{consumer.name}", consumer.config.max_deliver
    kept = (subject for stream in facts.streams.values() for subject in stream.config.subjects)
    if most > 0 and not any(subjects.overlap(subject, advisories) for subject in kept):
        yield f"max_deliver {most}, and no stream stores advisories of messages beyond it"


@declare("JS027", each=each_consumer).says(
    "Every step of a backoff is used",
    why="The last steps of the backoff are never reached, because a message exceeds max_deliver before them.",
    cure=DECLARE + "max_deliver above the number of steps" + APPLY + ".",
)
def backoff_cut_short(consumer: ConsumerInfo, _: Facts) -> Iterator[Found]:
    """For example, a message that should be retried after an hour exceeds its deliveries after a minute. A server
    refuses more steps than deliveries, but accepts equal numbers.
    """
    steps, most = len(consumer.config.backoff), consumer.config.max_deliver
    if 0 < most <= steps:
        yield f"{steps} steps of backoff, and max_deliver {most}"


@declare("JS028", each=each_consumer).says(
    "Push consumers have flow control and heartbeats",
    why="Without flow control, the server floods a slow subscriber. Without heartbeats, a subscriber cannot tell a "
    "quiet stream from a broken one.",
    cure="Run `aviso-workers consumers rm {stream} {consumer}`, and declare streams.{stream}.consumers.{consumer} with "
    "deliver_subject, flow_control and idle_heartbeat" + APPLY + ". Or use a pull consumer.",
)
def push_without_flow_control(consumer: ConsumerInfo, _: Facts) -> Iterator[Found]:
    """The client has to watch for missing heartbeats."""
    config = consumer.config
    missing = [key for key in ("flow_control", "idle_heartbeat") if not getattr(config, key)]
    if not consumer.pulled and missing:
        yield f"pushes without {' and '.join(missing)}"


@declare("JS029", each=each_consumer).says(
    "Durable push consumers have a subscriber",
    why="No client receives the messages that this consumer pushes.",
    cure=f"Start the subscriber. {UNNEEDED}",
)
def push_without_subscriber(consumer: ConsumerInfo, _: Facts) -> Iterator[Found]:
    if not consumer.pulled and consumer.durable and not consumer.push_bound:
        yield f"no client subscribes to {consumer.config.deliver_subject}"


@declare("JS032", needs=("agents", "consumers", "streams")).says(
    "max_ack_pending is not below the concurrency of an agent",
    why="The server delivers no more than max_ack_pending unacknowledged messages to all workers together, so "
    "handlers of the agent stay idle.",
    cure="Restart a worker of {app} (`aviso-workers worker MODULE:APP`), which updates the consumer to match the "
    "code. If the account has a lower max_ack_pending, raise that limit.",
)
def held_back(facts: Facts) -> Iterator[Finding]:
    for agent in facts.scope.agents or ():
        policy = agent.policy
        wanted = policy.concurrency * (policy.batch.size if agent.form is Batch else 1)
        for consumer in facts.consumers.values():
            most = consumer.config.max_ack_pending
            if consumer.name == agent.durable_name(facts.scope.app) and 0 < most < wanted:
                yield about(consumer, f"max_ack_pending {most}, and one worker handles {wanted} at a time")


@declare("JS064", needs=("agents", "consumers", "streams")).says(
    "The consumer of an agent has the settings of the agent's code",
    why="Workers of another version share the consumer, or an operator changed it. With a shorter ack_wait, "
    "notifications are handled twice at the same time. With a narrower filter, the agent does not receive some "
    "notifications.",
    cure="During a deploy, wait until no worker of another version has run for five minutes. Otherwise restart a "
    "worker of {app} (`aviso-workers worker MODULE:APP`), which updates the consumer to match the code.",
)
def not_as_the_code_says(facts: Facts) -> Iterator[Finding]:
    """The check compares `ack_wait` and the filters. Workers of several versions share one consumer. While their
    filters differ, it lets through everything of the event type; its `ack_wait` is the longest. Workers update the
    consumer when no worker of another version has sent a heartbeat for 5 minutes. If somebody else changed the
    consumer, any running worker corrects it within half a minute, and logs `consumer.filter_hides` if the change hid
    notifications.
    """
    for agent in facts.scope.agents or ():
        topic = schema.topic_of(agent.event_type, facts.config.notification_schema[agent.event_type])
        consumer = facts.consumers.get((topics.stream_name(topic.base), agent.durable_name(facts.scope.app)))
        if consumer and (found := agent_report.differing(facts.config, agent, consumer.config)):
            yield about(consumer, found)


@declare("JS033", each=each_consumer).says(
    "No consumer has more than 10 filters",
    why="The server searches each block of the stream once for each filter.",
    cure="Use several consumers: agents with a narrower `where` each.",
)
def many_filters(consumer: ConsumerInfo, _: Facts) -> Iterator[Found]:
    if (count := len(consumer.config.filters)) > MANY_FILTERS:
        yield f"{count} filters"


@declare("JS034", each=each_stream, needs=("account", "streams")).says(
    "No stream has too many consumers",
    why="The server keeps state for each consumer, and listing all of them becomes slow. Unless max_consumers of the "
    "stream says otherwise, nats-server 2.15 refuses the 1001st.",
    cure="`aviso-workers consumers ls {stream}` lists the consumers, and `aviso-workers consumers rm {stream} "
    "CONSUMER` removes one. Or raise max_consumers of the stream or of the account. Give ephemeral consumers an "
    "inactive threshold, which ends them with their clients.",
)
def many_consumers(stream: StreamInfo, facts: Facts) -> Iterator[Found]:
    """The result is WARN from 800 consumers of one stream, and where a stream has as many as its `max_consumers` or
    that of the account allows, which the server keeps for each stream. The result is FAIL from 100,000, where listing
    the consumers takes minutes.
    """
    count, most = stream.consumers, facts.after.account.max_consumers(stream.config)
    if 0 < most <= count:
        yield f"{count} of {most} consumers: the server refuses the next one"
    elif count > MANY_CONSUMERS:
        state = State.FAIL if count > TOO_MANY_CONSUMERS else State.WARN
        yield about(stream, f"{count} consumers", state=state)


@declare("JS035", each=each_consumer).says(
    "Durable consumers are in use",
    why="A stream with retention interest or workqueue keeps messages for an unused consumer for ever, and reports "
    "show its lag.",
    cure=f"{UNNEEDED} Otherwise start a worker or the client that reads from it.",
)
def unused(consumer: ConsumerInfo, facts: Facts) -> Iterator[Found]:
    """The check finds a consumer from which no client pulls, and of which nothing was delivered for 7 days, or since
    the consumer was created.
    """
    in_use = consumer.num_waiting or consumer.push_bound or consumer.num_ack_pending
    since = consumer.last_delivered or consumer.created
    if consumer.durable and not in_use and since and facts.now - since > UNUSED:
        found = f"no client reads from the consumer, and no message was delivered since {since.date()}"
        yield about(consumer, found, cure=RETIRED if agent_of(consumer.name) else "")


@declare("JS036").says(
    "No consumer and no timer is paused for more than a day",
    why="The server delivers nothing to a paused consumer, and its lag grows. No worker runs a paused timer.",
    cure="`aviso-workers agents resume {app}/{agent}` ends the pause of an agent, and `aviso-workers timers resume "
    "MODULE:APP TIMER` that of a timer.",
)
def paused(facts: Facts) -> Iterator[Finding]:
    """A timer is found too that has been paused for more than a day."""
    for consumer in facts.consumers.values():
        pause = consumer.paused_until - consumer.time if consumer.paused_until else timedelta()
        if pause.total_seconds() > LONG_PAUSE_SECONDS:
            cure = "" if agent_of(consumer.name) else RESUME
            yield about(consumer, f"paused for another {pause.days} days", cure=cure)
    for (app, timer), made in facts.recorded.pauses.items():
        if max(made.until - facts.now, facts.now - made.since).total_seconds() > LONG_PAUSE_SECONDS:
            cure = (
                f"`aviso-workers timers resume MODULE:APP {quoted_in_cure(timer)}` ends it, with the app of {{place}}."
            )
            yield Finding(place=f"{app} > timer {timer}", found=paused_text(made), cure=cure)


@declare("JS037").says(
    "Every pinned consumer has a pinned client, which does not change",
    why="The server delivers to the pinned client only. Each change of the pinned client can break the order in which "
    "messages are handled.",
    cure="Start a client that pulls with the group. If the pinned client changes too often, raise priority_timeout "
    "above the handling time of one message. To pin another client, run `aviso-workers consumers unpin {stream} "
    "{consumer} GROUP`.",
)
def not_pinned(facts: Facts) -> Iterator[Finding]:
    """The check warns when messages are pending and no client is pinned, or when the server pinned a client three times
    between the samples.
    """
    pinned = Counter(
        (each.stream, each.consumer) for each in facts.advisories if each.kind.startswith("ADVISORY.CONSUMER.PINNED.")
    )
    for key, consumer in facts.consumers.items():
        if consumer.config.priority_policy != "pinned_client":
            continue
        free = [group.group for group in consumer.priority_groups if not group.pinned_client_id]
        if free and consumer.num_pending:
            yield about(consumer, f"{consumer.num_pending} pending, and no client pinned in {', '.join(free)}")
        elif pinned[key] >= PINNED_AGAIN:
            yield about(consumer, f"pinned {pinned[key]} times within {facts.elapsed_seconds:.0f} s")


@declare("JS063").says(
    "No notification is replaced before an agent handles it",
    why="With max_msgs_per_subject, a new notification replaces an older one of its subject, even if an agent has not "
    "handled the older one.",
    cure="If every notification counts, set notification_schema.{place}.storage_policy.allow_duplicates: true"
    + APPLY
    + ". If the newest is enough, set allow_duplicates: false, and this check passes.",
)
def replaced(facts: Facts) -> Iterator[Finding]:
    """The metric `aviso_worker_missed_total` counts the losses that a worker can see."""
    event_types = facts.config.notification_schema
    by_stream = event_streams(event_types)
    for consumer in facts.consumers.values():
        stream, event_type = facts.event_streams.get(consumer.stream), by_stream.get(consumer.stream, "")
        if (
            stream is None
            or not metadata.is_of_agent(consumer.config)
            or event_types[event_type].allow_duplicates is False
        ):
            continue
        if (kept := stream.config.max_msgs_per_subject) > 0:
            yield Finding(
                place=event_type, stream=stream.name, consumer=consumer.name, found=f"max_msgs_per_subject {kept}"
            )


@declare("JS051", needs=()).says(
    "Clients send few requests for CONSUMER.INFO",
    why="Each request is work for the leader of the consumer, and requests are slow in a stream with many consumers.",
    cure="`nats events --js-advisory` names the client. Let it read the number of pending messages from the metadata "
    "of each message, and create consumers idempotently without asking first.",
)
def many_info_calls(facts: Facts) -> Iterator[Finding]:
    """The check warns when clients sent more than 50 requests a second for CONSUMER.INFO between the samples. The
    observer lists 256 consumers at a time instead.
    """
    calls = sum(each.kind == "ADVISORY.API" and ".CONSUMER.INFO." in each.subject for each in facts.advisories)
    rate = calls / facts.elapsed_seconds
    if rate > INFO_CALLS_PER_SECOND:
        yield Finding(place="$JS.API.CONSUMER.INFO", found=f"{rate:.0f} calls a second")
