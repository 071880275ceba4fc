"""How workers and apps are: what their records say, as `health` says it of agents. It is pure.

A worker says so when it ends in order. So one that says nothing more was killed, or cut off from the servers. It is
told for a day, and needs somebody until another worker of its app has started in its place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta

from aviso_workers.aviso.literals import quoted, time_text
from aviso_workers.backends import ConsumerInfo
from aviso_workers.ops import agent_inventory
from aviso_workers.ops.health import BY_NAME, CURES, UNKNOWN, Judgement, Unknown
from aviso_workers.ops.snapshots import AllWorkers
from aviso_workers.state.worker_records import LIVES_SECONDS, WRITE_SECONDS, AppWorkers, WorkerRecord

Consumers = Mapping[tuple[str, str], ConsumerInfo]
"""By stream and name."""
DEPLOY = timedelta(minutes=15)
"""For so long two versions may run, as in a deploy."""
COMES_BACK = timedelta(seconds=2 * LIVES_SECONDS)
"""A worker that has said nothing for so long does not say more soon, as it does when a server was away."""
MOST_TOLD = 5
"""How many versions are told."""
HINDERED = BY_NAME["hindered"]
OF_LOST = (
    "Start as many workers of {app} as before. The end of its log and the kernel's log (`dmesg`, for memory) say why "
    "it ended. If fewer are meant to run, `nats kv del {app}__live {key}` forgets it."
)
OF_UNRECORDED = (
    "Give the workers' user the right to publish to `$KV.{app}__live.>` (`aviso-workers server render --role worker "
    "--app MODULE:APP`)."
)
OF_VERSIONS = "Finish the deploy, or stop the workers of the version that is not meant to run."


def of_app(workers: AppWorkers | Unknown, *, now: datetime) -> Judgement:
    """Return how an app is. `now` is by the server's clock."""
    if isinstance(workers, Unknown):
        return Judgement(state=UNKNOWN, why=f"not known, since {workers.why}", needs=True, cure=CURES[UNKNOWN])
    running = by_version(workers)
    if len(running) < 2:
        return Judgement(state="runs" if workers.living else "at rest")
    since = [found[0].started for found in running.values()][1]
    told = [f"{code} on {_names(found)}" for code, found in [*running.items()][:MOST_TOLD]]
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


def of_workers(
    app: str, workers: AppWorkers, consumers: Consumers, *, now: datetime
) -> list[tuple[WorkerRecord, Judgement]]:
    """Return how each worker of an app is, those that live first. `now` is by the server's clock."""
    runs_unrecorded = _runs_unrecorded(app, workers, consumers)
    found = [(each, of_living(each, now=now)) for each in workers.living]
    starts = sorted((*workers.living, *workers.lost, *workers.ended), key=lambda each: each.started)
    for each in sorted(workers.lost, key=lambda each: each.since(0)):
        heard = each.since(0)
        needs = now - heard >= COMES_BACK
        why = f"killed or cut off within {WRITE_SECONDS:g} s after {time_text(heard)}, on {each.host}"
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
    until = max(each.since(-WRITE_SECONDS) for each in (*workers.lost, *workers.ended))
    return any(
        each.num_waiting or (each.last_settled is not None and each.last_settled > until)
        for (_, name), each in consumers.items()
        if (of := agent_inventory.agent_of(name)) and of[0] == app
    )


def _replaces(other: WorkerRecord, lost: WorkerRecord) -> bool:
    """Return whether another worker has started after one was lost. The lost one may have lived for `WRITE_SECONDS`
    after its last record: within these, only a start in the same place counts, as that of a supervisor is."""
    seconds = (other.started - lost.since(0)).total_seconds()
    return seconds > (0 if (other.host, other.member) == (lost.host, lost.member) else WRITE_SECONDS)


def of_living(worker: WorkerRecord, *, now: datetime) -> Judgement:
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


def troubles(apps: AllWorkers, consumers: Consumers, *, now: datetime) -> Iterator[tuple[str, str, Judgement]]:
    """Yield what is in trouble: its app, the name of the worker, or `all workers`, and how it is. A worker that hinders
    agents is left to these.
    """
    for app, workers in apps.items() if not isinstance(apps, Unknown) else ():
        if (judgement := of_app(workers, now=now)).is_trouble:
            yield app, "all workers", judgement
        for worker, judgement in () if isinstance(workers, Unknown) else of_workers(app, workers, consumers, now=now):
            if judgement.is_trouble and not (judgement.state == HINDERED.name and worker.agents):
                yield app, f"worker {worker.name}", judgement


def _names(workers: list[WorkerRecord]) -> str:
    more = f" and {len(workers) - 1} more" if len(workers) > 1 else ""
    return f"{workers[0].name}{more}"
