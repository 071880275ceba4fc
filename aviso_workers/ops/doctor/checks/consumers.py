"""Checks of the configuration of consumers. Those of our workers have attempts, delays and dead letters in the
worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from functools import partial

from aviso_workers.aviso import schema, topics
from aviso_workers.config.streams import event_streams
from aviso_workers.declare.batches import Batch
from aviso_workers.engine import max_deliveries
from aviso_workers.jetstream import metadata
from aviso_workers.jetstream.fields import SECOND
from aviso_workers.jetstream.info import ConsumerInfo
from aviso_workers.ops import agent_report
from aviso_workers.ops.doctor.checks.streams import overlap
from aviso_workers.ops.doctor.facts import Facts
from aviso_workers.ops.doctor.judgements import Check, Finding, State, about, check

__all__ = ["CHECKS"]

CHECKS: list[Check] = []
declare = partial(check, CHECKS, needs=("consumers", "streams"))

MANY_FILTERS = 10
MANY_CONSUMERS, TOO_MANY_CONSUMERS = 800, 100_000
"""A server refuses the 1001st of a stream, unless its max_consumers says otherwise."""
UNUSED = timedelta(days=7)
LONG_PAUSE_SECONDS = 86_400
INFO_CALLS_PER_SECOND = 50
PINNED_AGAIN = 3
DECLARE = "declare it: streams.{stream}.consumers.{consumer}."
APPLY = ", then `aviso-workers streams apply`"


@declare(
    "JS024",
    "Consumers wait longer between attempts",
    why="without a backoff what fails comes again every ack_wait, all of it at once",
    cure=DECLARE + "backoff" + APPLY + "; or let the client nak with a delay",
)
def no_backoff(facts: Facts) -> Iterator[Finding]:
    for consumer in _foreign(facts):
        if not consumer.config.backoff:
            ack_wait = consumer.config.ack_wait / SECOND
            yield about(consumer, f"no backoff: every {ack_wait:g} s again")


@declare(
    "JS025",
    "Consumers limit the deliveries of a message",
    why="a message that can never be handled is delivered for ever",
    cure=DECLARE + "max_deliver" + APPLY + "; and keep the messages that exceed it (JS026)",
)
def unlimited_deliveries(facts: Facts) -> Iterator[Finding]:
    for consumer in _foreign(facts):
        if consumer.config.max_deliver <= 0:
            yield about(consumer, "max_deliver is unlimited")


@declare(
    "JS026",
    "Messages that exceed max_deliver are kept",
    why="the server announces such a message once, to the subscribers of that moment",
    cure="declare a stream whose subjects are `"
    + max_deliveries.SUBJECT
    + ".{stream}.{consumer}`"
    + APPLY
    + "; our agents do it by themselves, and workers make dead letters of the messages",
)
def exceeded_and_not_kept(facts: Facts) -> Iterator[Finding]:
    kept = [subject for stream in facts.streams.values() for subject in stream.config.subjects]
    for consumer in facts.consumers.values():
        advisories = f"{max_deliveries.SUBJECT}.{consumer.stream}.{consumer.name}"
        if consumer.config.max_deliver > 0 and not any(overlap(subject, advisories) for subject in kept):
            yield about(consumer, f"max_deliver {consumer.config.max_deliver}, and no stream keeps what exceeds it")


@declare(
    "JS027",
    "Every step of a backoff is used",
    why="the steps after the last delivery are never waited for: a message that was meant to wait longer exceeds "
    "max_deliver",
    cure=DECLARE + "max_deliver, above the number of steps" + APPLY,
)
def backoff_cut_short(facts: Facts) -> Iterator[Finding]:
    for consumer in facts.consumers.values():
        steps, most = len(consumer.config.backoff), consumer.config.max_deliver
        if 0 < most <= steps:
            yield about(consumer, f"{steps} steps of backoff, and max_deliver {most}")


@declare(
    "JS028",
    "Push consumers have flow control and heartbeats",
    why="without them a slow subscriber is flooded, and one that receives nothing cannot tell why",
    cure="`aviso-workers consumers rm {stream} {consumer}`, and declare it with flow_control and idle_heartbeat"
    + APPLY
    + "; or pull",
)
def push_without_flow_control(facts: Facts) -> Iterator[Finding]:
    for consumer in facts.consumers.values():
        config = consumer.config
        missing = [key for key in ("flow_control", "idle_heartbeat") if not getattr(config, key)]
        if not consumer.pulled and missing:
            yield about(consumer, f"pushes without {' and '.join(missing)}")


@declare(
    "JS029",
    "Durable push consumers have a subscriber",
    why="no client receives what it pushes",
    cure="start the subscriber, or remove what is left of it: `aviso-workers consumers rm {stream} {consumer}`",
)
def push_without_subscriber(facts: Facts) -> Iterator[Finding]:
    for consumer in facts.consumers.values():
        if not consumer.pulled and consumer.durable and not consumer.push_bound:
            yield about(consumer, f"no client subscribes to {consumer.config.deliver_subject}")


@declare(
    "JS032",
    "An agent may hold as much as it handles at a time",
    why="calls above max_ack_pending wait for acknowledgements of others, however many workers there are",
    cure="restart a worker of {app}, which brings its consumer in line; if the account's max_ack_pending is lower, "
    "raise that",
    needs=("agents", "consumers", "streams"),
)
def held_back(facts: Facts) -> Iterator[Finding]:
    for agent in facts.scope.agents or ():
        policy = agent.policy
        wanted = policy.concurrency * (policy.batch.size if agent.form is Batch else 1)
        for consumer in facts.consumers.values():
            most = consumer.config.max_ack_pending
            if consumer.name == agent.durable_name(facts.scope.app) and 0 < most < wanted:
                yield about(consumer, f"max_ack_pending {most}, and one worker handles {wanted} at a time")


@declare(
    "JS064",
    "The server has in effect for an agent what its code says",
    why="workers of another version share the consumer, or an operator changed it: a shorter ack_wait has "
    "notifications handled twice at the same time, and a narrower filter hides some",
    cure="where no worker of another version runs any more, wait for five minutes; else restart a worker of {app}, "
    "which brings its consumer in line",
    needs=("agents", "consumers", "streams"),
)
def not_as_the_code_says(facts: Facts) -> Iterator[Finding]:
    for agent in facts.scope.agents or ():
        topic = schema.topic_of(agent.event_type, facts.config.notification_schema[agent.event_type])
        consumer = facts.consumers.get((topics.stream_name(topic.base), agent.durable_name(facts.scope.app)))
        if consumer and (found := agent_report.differing(facts.config, agent, consumer.config)):
            yield about(consumer, found)


@declare(
    "JS033",
    "Consumers have few filters",
    why="each of many disjoint filters is searched for in each block of the stream",
    cure="split it into several consumers: agents with a narrower `where` each",
)
def many_filters(facts: Facts) -> Iterator[Finding]:
    for consumer in facts.consumers.values():
        if (count := len(consumer.config.filters)) > MANY_FILTERS:
            yield about(consumer, f"{count} filters")


@declare(
    "JS034",
    "Streams have a bounded number of consumers",
    why="the server keeps state for each, and asking for all of them becomes slow",
    cure="`aviso-workers consumers ls {stream}` shows them; share durable consumers, and let ephemeral ones end with "
    "an inactive threshold",
    needs=("streams",),
)
def many_consumers(facts: Facts) -> Iterator[Finding]:
    for stream in facts.streams.values():
        if (count := stream.consumers) > MANY_CONSUMERS:
            state = State.FAIL if count > TOO_MANY_CONSUMERS else State.WARN
            yield Finding(stream=stream.name, found=f"{count} consumers", state=state)


@declare(
    "JS035",
    "Durable consumers are in use",
    why="a stream of interest or a work queue keeps messages for one without a reader for ever, and its lag is in "
    "every report",
    cure="if its agent is gone for good: `aviso-workers consumers rm {stream} {consumer}`; else start a worker",
)
def unused(facts: Facts) -> Iterator[Finding]:
    for consumer in facts.consumers.values():
        in_use = consumer.num_waiting or consumer.push_bound or consumer.num_ack_pending
        since = consumer.last_delivered or consumer.created
        if consumer.durable and not in_use and since and facts.now - since > UNUSED:
            yield about(consumer, f"no client reads it, and nothing was delivered since {since.date()}")


@declare(
    "JS036",
    "Nothing is paused and forgotten",
    why="a paused consumer is given nothing, and its lag grows",
    cure="`aviso-workers agents resume {agent} --app {app}`, or `nats consumer resume {stream} {consumer}` where it is "
    "no agent's",
)
def paused(facts: Facts) -> Iterator[Finding]:
    for consumer in facts.consumers.values():
        pause = consumer.paused_until - consumer.time if consumer.paused_until else timedelta()
        if pause.total_seconds() > LONG_PAUSE_SECONDS:
            yield about(consumer, f"paused for {pause.days} days more")


@declare(
    "JS037",
    "A pinned consumer has a pinned client, and keeps it",
    why="only the pinned client is given anything; one that changes again and again loses its place in the order",
    cure="start a client that pulls with the group; if it changes, raise priority_timeout above the time that one "
    "message takes, or pin anew: `aviso-workers consumers unpin {stream} {consumer} GROUP`",
)
def not_pinned(facts: Facts) -> Iterator[Finding]:
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


@declare(
    "JS063",
    "Agents are given every notification",
    why="with max_msgs_per_subject a newer notification replaces an older one, also before an agent has handled it",
    cure="set notification_schema.{place}.storage_policy.allow_duplicates: true where each one counts" + APPLY + "; "
    "where the newest is enough, set it to false, which says so",
)
def replaced(facts: Facts) -> Iterator[Finding]:
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


@declare(
    "JS051",
    "Consumers are not asked about too often",
    why="CONSUMER.INFO is work for the consumer's leader, and slow where there are many",
    cure="find the client in `nats events --js-advisory`; read what is left from the messages' metadata instead, and "
    "create consumers idempotently without asking first",
    needs=(),
)
def many_info_calls(facts: Facts) -> Iterator[Finding]:
    calls = sum(each.kind == "ADVISORY.API" and ".CONSUMER.INFO." in each.subject for each in facts.advisories)
    rate = calls / facts.elapsed_seconds
    if rate > INFO_CALLS_PER_SECOND:
        yield Finding(place="$JS.API.CONSUMER.INFO", found=f"{rate:.0f} calls a second")


def _foreign(facts: Facts) -> Iterator[ConsumerInfo]:
    """Yield the durable consumers with acknowledgements that other programs than our workers made."""
    for consumer in facts.consumers.values():
        if consumer.durable and consumer.config.ack_policy != "none" and not metadata.is_of_agent(consumer.config):
            yield consumer
