"""Reconciliation of published Spark job events with what Spark's REST API says of its applications.

Called by `aviso-workers spark reconcile`. Spark is asked first: events in between are then published and not
missed. Streaming queries and executors are not compared, as Spark's REST API has no list of all that ever were.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable
from contextlib import aclosing
from datetime import datetime
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
from msgspec import Struct

from aviso_workers.aviso.notifications import Notification
from aviso_workers.config import Config
from aviso_workers.errors import InvalidNotificationError, SparkRestError
from aviso_workers.spark import job_events
from aviso_workers.spark.job_events import EVENT_TYPE, SparkApplication
from aviso_workers.spark.rest import ENDED, RUNNING, SparkRest, States

KINDS = ("application", "job", "stage", "sql")
LOST = "lost"
NOT_PUBLISHED = "not published"
MAX_SECONDS = 3600
"""After which no further application is compared."""


class StateDifference(Struct, frozen=True, kw_only=True):
    id: str
    spark: str
    """The state that Spark reports: `running`, `succeeded`, `failed` or `ended`."""
    published: str
    """The published state: one of the same, `lost`, or `not published`."""


class Comparison(Struct, frozen=True, kw_only=True):
    """The comparison of all things of one kind in one application."""

    application: str
    attempt: str
    kind: str
    spark: int
    """The number of things that Spark knows."""
    published: int
    differences: list[StateDifference]
    twice: list[str]
    """Ids of events that the stream holds more than once."""
    only_published: int
    """The number of published things that Spark does not know, which is not a mistake: it removes the oldest."""

    @property
    def agrees(self) -> bool:
        return not self.differences and not self.twice


Replay = Callable[..., AsyncGenerator[Notification[Any], None]]
"""`App.replay`."""


class Incomparable(Struct, frozen=True, kw_only=True):
    """An application that cannot be compared, because Spark's REST API fails for it."""

    application: str
    attempt: str
    problem: str


class PublishedStates(Struct, frozen=True):
    """The published events of one application."""

    states: States
    times: Counter[str]
    """How often it holds each event, by message id."""


async def reconcile(
    replay: Replay, config: Config, rest: SparkRest, *, only: Collection[str] = (), since: datetime | None = None
) -> AsyncIterator[Comparison | Incomparable]:
    """Yield the comparisons of all applications, or of `only` those ids. Raises `SparkRestError`, `BackendError`.

    An application that Spark cannot describe, as where its event log is damaged, stops no other, and neither does one
    whose id cannot be the id of an application.
    """
    ends = anyio.current_time() + MAX_SECONDS
    found = await anyio.to_thread.run_sync(lambda: rest.applications(since=since))
    if unknown := set(only) - {application_id for application_id, _, _ in found}:
        raise SparkRestError(f"Spark knows no application {', '.join(sorted(unknown))}")
    for application_id, attempt, ended in found:
        if only and application_id not in only:
            continue
        application = SparkApplication.of_run(application_id, attempt)
        try:
            if anyio.current_time() > ends:
                raise SparkRestError(
                    f"no time was left after {MAX_SECONDS} s: compare less, by --since or --application"
                )
            if not application_id.strip():
                raise SparkRestError("Spark gives an application without an id: see which server answers")
            spark = await anyio.to_thread.run_sync(partial(rest.states, application_id, attempt, ended=ended))
            ours = await published(replay, config, application)
        except (SparkRestError, InvalidNotificationError) as error:
            yield Incomparable(application=application.id, attempt=application.attempt, problem=str(error))
            continue
        for comparison in compare(application, spark, ours):
            yield comparison


async def published(replay: Replay, config: Config, application: SparkApplication) -> PublishedStates:
    """Return the published events of this attempt of an application."""
    cluster = job_events.cluster_of(config)
    ours = application.message_ids(cluster)
    states: dict[tuple[str, str], str] = {}
    times: Counter[str] = Counter()
    where = {"cluster": cluster, "application": application.id}
    async with aclosing(replay(EVENT_TYPE, where, from_id=1)) as notifications:
        async for notification in notifications:
            message_id = notification.headers.get("Nats-Msg-Id", "")
            if message_id.startswith(ours):
                times[message_id] += 1
                _follow(states, notification)
    return PublishedStates(states, times)


def _follow(states: dict[tuple[str, str], str], notification: Notification[dict[str, str]]) -> None:
    kind, event = notification.identifier["kind"], notification.identifier["event"]
    key = (kind, notification.identifier["id"])
    match event:
        case "end":
            states[key] = notification.payload.get("status", ENDED)
        case "lost":
            states[key] = LOST
        case "resumed":
            states.update({lost: RUNNING for lost, state in states.items() if state == LOST})
        case _:
            states.setdefault(key, RUNNING)


def compare(application: SparkApplication, spark: States, published: PublishedStates) -> Iterable[Comparison]:
    """Compare an application, and return a comparison for each kind."""
    for kind in KINDS:
        in_spark = {of: state for (kind_of, of), state in spark.items() if kind_of == kind}
        ours = {of: state for (kind_of, of), state in published.states.items() if kind_of == kind}
        twice = [message_id for message_id, times in published.times.items() if times > 1]
        yield Comparison(
            application=application.id,
            attempt=application.attempt,
            kind=kind,
            spark=len(in_spark),
            published=len(ours),
            differences=[
                StateDifference(id=of, spark=state, published=ours.get(of, NOT_PUBLISHED))
                for of, state in in_spark.items()
                if not _fits(state, ours.get(of, NOT_PUBLISHED))
            ],
            twice=[message_id for message_id in twice if message_id.split(":")[4].startswith(f"{kind}.")],
            only_published=len(ours.keys() - in_spark.keys()),
        )


def _fits(spark: str, published: str) -> bool:
    """Return whether both states agree. A history server lags behind, so what runs there may have ended in the
    stream.
    """
    return published != NOT_PUBLISHED if spark == RUNNING else published == spark
