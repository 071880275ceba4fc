"""How workers and apps are: what their records say, as `health` says it of agents. It is pure.

A worker says so when it ends in order. So one that says nothing more was killed, or cut off from the servers. It is
told for a day, and needs somebody until another worker of its app has started in its place.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta

from aviso_workers.aviso.literals import quoted, time_text
from aviso_workers.ops.health import BY_NAME, Judgement, Unknown
from aviso_workers.state.worker_records import LIVES_SECONDS, AppWorkers, WorkerRecord

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
OF_VERSIONS = "Finish the deploy, or stop the workers of the version that is not meant to run."


def of_app(workers: AppWorkers, *, now: datetime) -> Judgement:
    """Return how an app is. `now` is by the server's clock."""
    running = defaultdict[str, list[WorkerRecord]](list)
    for each in sorted(workers.living, key=lambda each: each.started):
        if each.code:
            running[each.code].append(each)
    if len(running) < 2:
        return Judgement(state="runs" if workers.living else "at rest")
    since = [found[0].started for found in running.values()][1]
    told = [f"{code} on {_names(found)}" for code, found in [*running.items()][:MOST_TOLD]]
    text = f"{len(running)} versions run: {', '.join(told)}"
    if now - since <= DEPLOY:
        return Judgement(state="deploying", since=since, why=text)
    return Judgement(state="several versions", since=since, why=text, needs=True, cure=OF_VERSIONS)


def of_workers(app: str, workers: AppWorkers, *, now: datetime) -> list[tuple[WorkerRecord, Judgement]]:
    """Return how each worker of an app is, those that live first. `now` is by the server's clock."""
    found = [(each, of_living(each, now=now)) for each in workers.living]
    starts = deque(sorted(each.started for each in (*workers.living, *workers.lost, *workers.ended)))
    for each in sorted(workers.lost, key=lambda each: each.since(0)):
        heard = each.since(0)
        while starts and starts[0] <= heard:
            starts.popleft()
        why = f"killed or cut off at {time_text(heard)}, on {each.host}"
        if starts:  # each start is in the place of one
            why = f"{why}; another worker started at {time_text(starts.popleft())}"
            found.append((each, Judgement(state="replaced", since=heard, why=why)))
        else:
            cure = OF_LOST.format(app=quoted(app), key=quoted(each.key))
            needs = now - heard >= COMES_BACK
            found.append((each, Judgement(state="lost", since=heard, why=why, needs=needs, cure=cure)))
    return found


def of_living(worker: WorkerRecord, *, now: datetime) -> Judgement:
    """Return how a worker is that lives."""
    if not worker.hindrances:
        return Judgement(state="ready" if worker.hindrances is not None else "lives")
    first = max(worker.hindrances, key=lambda each: each.seconds)
    since = worker.since(first.seconds)
    needs = (now - since).total_seconds() >= HINDERED.patience
    also = tuple(each.text for each in worker.hindrances[:MOST_TOLD] if each is not first)
    return Judgement(state=HINDERED.name, since=since, why=first.text, needs=needs, also=also, cure=HINDERED.cure)


def troubles(apps: Mapping[str, AppWorkers] | Unknown, *, now: datetime) -> Iterator[tuple[str, str, Judgement]]:
    """Yield what is in trouble: its app, the name of the worker, or `all workers`, and how it is. A worker that hinders
    agents is left to these.
    """
    for app, workers in apps.items() if not isinstance(apps, Unknown) else ():
        if (judgement := of_app(workers, now=now)).is_trouble:
            yield app, "all workers", judgement
        for worker, judgement in of_workers(app, workers, now=now):
            if judgement.is_trouble and not (judgement.state == HINDERED.name and worker.agents):
                yield app, f"worker {worker.name}", judgement


def _names(workers: list[WorkerRecord]) -> str:
    more = f" and {len(workers) - 1} more" if len(workers) > 1 else ""
    return f"{workers[0].name}{more}"
