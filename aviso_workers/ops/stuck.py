"""The rule by which a consumer is stuck, used by `agents ls`, `consumers ls`, `top`, `doctor` and the observer.

The ack floor is before the oldest notification that is not finished. So notifications that are settled after it,
however many, do not hide it. The server does not say since when it is unchanged; the workers' records do
(`engine.consumer_records`), and say how long the agent's policy allows it. Without a record, such as for other clients'
consumers, the last delivery or acknowledgement is taken, which traffic can hide; also where an agent is blocked at a
notification, which is before everything else.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from aviso_workers.backends import ConsumerInfo
from aviso_workers.jetstream.fields import SECOND
from aviso_workers.state import consumer_records
from aviso_workers.state.consumer_records import ConsumerRecord
from aviso_workers.state.failure_records import Retrying

__all__ = ["is_abandoned", "unfinished_since", "why_stuck"]


def why_stuck(
    now: ConsumerInfo,
    before: ConsumerInfo | None,
    record: ConsumerRecord | None,
    blocked: Collection[Retrying] = (),
) -> str:
    """Return the reason why a consumer is stuck, as text; empty where it is not.

    `before` is an earlier state of it. Without one, only delivered notifications can be judged. Where the
    agent is `blocked`, those notifications and what waits behind them are unfinished for as long as they fail.
    """
    if now.paused or not now.lag or (before and (not before.lag or before.ack_floor != now.ack_floor)):
        return ""
    if not now.num_ack_pending:
        idle = before and not before.num_ack_pending and before.deliveries == now.deliveries
        return f"{now.num_pending} pending, and no worker pulls them" if idle else ""
    if before and is_abandoned(now, before, record):
        return f"{now.num_pending} pending and {now.num_ack_pending} not finished, and no worker pulls them"
    if blocked and now.num_ack_pending <= sum(1 + each.behind for each in blocked):
        return ""
    since = unfinished_since(now, None if blocked else record)
    seconds = (now.time - since).total_seconds() if since else 0.0
    if seconds <= (record.longest_seconds if record else _longest_seconds(now)):
        return ""
    return (
        f"{now.num_ack_pending} delivered and not finished; the oldest one, after sequence {now.ack_floor}, "
        f"for {seconds / 60:.0f} min"
    )


def is_abandoned(now: ConsumerInfo, before: ConsumerInfo, record: ConsumerRecord | None) -> bool:
    """Return whether nobody has asked for anything, and nothing was delivered or settled, for longer than an attempt
    may take. Workers that wait for retries ask for more meanwhile.
    """
    if record is None or record.attempt_seconds is None:
        return False
    known = [moment for moment in (now.last_delivered, now.last_settled) if moment]
    quiet = not before.num_waiting and not now.num_waiting and before.deliveries == now.deliveries
    return quiet and bool(known) and (now.time - max(known)).total_seconds() > record.attempt_seconds


def unfinished_since(consumer: ConsumerInfo, record: ConsumerRecord | None) -> datetime | None:
    """Return the time since which the oldest delivered notification is not finished, or a later one; None: not
    known.
    """
    if record and record.ack_floor == consumer.ack_floor and record.unfinished_since:
        return record.unfinished_since
    known = [moment for moment in (consumer.last_delivered, consumer.last_settled) if moment]
    return max(known, default=None)


def _longest_seconds(consumer: ConsumerInfo) -> float:
    """Return for how many seconds one notification may be unfinished, of a consumer without a record."""
    return max(consumer_records.STUCK_SECONDS, 2 * consumer.config.ack_wait / SECOND)
