"""The replicas of streams and consumers that do not help when the next server is lost, and those that have diverged.

JetStream's API answers for the leader only, and the leader calls a replica current that has received its log, whatever
is left of the messages in its store. The monitoring port of each server counts the server's own replica. `facts` looks
at all of them twice, because replicas of a stream that is written to are never at the same sequence at the same time.

A replica of a stream with many publishes is behind its leader for moments, and current again before anybody looks. So
only what is wrong in every sample counts, and `facts` takes some more where that would be a matter of chance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import anyio
from msgspec import Struct

from aviso_workers.aviso.literals import SECOND
from aviso_workers.errors import ServerProcessError
from aviso_workers.jetstream.info import Cluster
from aviso_workers.jetstream.specs import FAR_BEHIND, INACTIVE_SECONDS
from aviso_workers.ops.doctor import monitoring_port
from aviso_workers.ops.doctor.monitoring_port import OwnReplica
from aviso_workers.task_groups import asked_of_each

Groups = Mapping[tuple[str, str], Cluster]
"""The servers that keep each stream and each consumer, by stream and consumer; the consumer of a stream is empty."""
CERTAIN = ("it has no leader", "is offline")
"""Nobody has to look at these once more."""
LATER_SECONDS = 3.0
"""Between the two looks: replicas carry out the same log within milliseconds, and messages that reach their max_age
leave a replica by the clock of its server."""

Look = Mapping[str, Mapping[str, OwnReplica]]
"""The state of each server's own replicas, by the server's name and the stream's."""


def wrong_in_all(samples: Sequence[Groups]) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield each stream and consumer that has no leader, or a replica that does not help, in all samples; and what is
    wrong with it in the last one.
    """
    *earlier, last = samples
    for key, group in last.items():
        wrong = dict(_wrong_with(group))
        for sample in earlier:
            before = dict(_wrong_with(sample.get(key, Cluster())))
            wrong = {server: found for server, found in wrong.items() if server in before}
        yield from ((key, found) for found in wrong.values())


def is_doubtful(samples: Sequence[Groups]) -> bool:
    """Return whether replicas seem to be behind in all samples, and nothing worse is wrong."""
    found = [text for _, text in wrong_in_all(samples)]
    return bool(found) and not any(text.endswith(CERTAIN) for text in found)


def _wrong_with(group: Cluster) -> Iterator[tuple[str, str]]:
    """Yield each server whose replica does not help, and why; an empty name where the leader is missing."""
    if group.name and not group.leader:
        yield "", "it has no leader"
    for replica in group.followers:
        if replica.offline:
            yield replica.name, f"{replica.name} is offline"
        elif not replica.current:
            yield replica.name, f"{replica.name} is not current"
        elif replica.active > INACTIVE_SECONDS * SECOND:
            yield replica.name, f"{replica.name} was last active {replica.active / SECOND:.0f} s ago"
        elif replica.lag > FAR_BEHIND:
            yield replica.name, f"{replica.name} is {replica.lag} entries behind"


class Looks(Struct, frozen=True, kw_only=True):
    """Two looks at the same servers, some seconds apart. They are equal where the first one showed no difference."""

    before: Look = {}
    after: Look = {}


async def look_twice(monitors: Mapping[str, str], account: str) -> Looks:
    """Look at the replicas of an account's streams, again only if some of them differ. `monitors` has the URL of each
    server's monitoring port by the server's name.
    """
    before = await _look(monitors, account)
    if not any(diverged(Looks(before=before, after=before))):
        return Looks(before=before, after=before)
    await anyio.sleep(LATER_SECONDS)
    return Looks(before=before, after=await _look(monitors, account))


async def _look(monitors: Mapping[str, str], account: str) -> Look:
    async def ask(server: str) -> Mapping[str, OwnReplica]:
        with suppress(ServerProcessError):  # it has just stopped
            return await anyio.to_thread.run_sync(monitoring_port.own_replicas, monitors[server], account)
        return {}

    return await asked_of_each(monitors, ask)


def diverged(looks: Looks) -> Iterator[tuple[str, str]]:
    """Yield each stream of which a current replica differs from the leader's in both looks, and how it differs."""
    for stream in sorted({name for replicas in looks.after.values() for name in replicas}):
        replicas = _seen_twice(looks, stream)
        leader = next((name for name, (_, after) in replicas.items() if after.cluster.leader == name), None)
        if leader is None:
            continue
        current = {replica.name for replica in replicas[leader][1].cluster.followers if replica.current}
        followers = [name for name in sorted(replicas) if name in current]
        if any(_differ(replicas[leader], replicas[name]) for name in followers):
            shown = [f"{name} has {replicas[name][1]}" for name in followers]
            yield stream, f"{leader}, the leader, has {replicas[leader][1]}; {'; '.join(shown)}"


def _seen_twice(looks: Looks, stream: str) -> Mapping[str, Sequence[OwnReplica]]:
    """Return the replica of each server in both looks, unless the stream was recreated in between."""
    found: dict[str, Sequence[OwnReplica]] = {}
    for server, replicas in looks.after.items():
        after, before = replicas.get(stream), looks.before.get(server, {}).get(stream)
        if before and after and before.created == after.created:
            found[server] = before, after
    return found


def _differ(leader: Sequence[OwnReplica], follower: Sequence[OwnReplica]) -> bool:
    is_at_rest = leader[0].state == leader[1].state and follower[0].state == follower[1].state
    if is_at_rest and leader[0].state.messages != follower[0].state.messages:
        return True
    is_behind = follower[1].state.last_seq < leader[0].state.last_seq
    return is_behind or _had_lost(leader, follower) or _had_lost(follower, leader)


def _had_lost(one: Sequence[OwnReplica], other: Sequence[OwnReplica]) -> bool:
    """Return whether one replica no longer had a message in the first look that the other still has in the second."""
    first = min(look.state.first_seq for look in one)  # a replica that is copied anew gets its messages back
    return bool(other[1].state.messages) and first > other[1].state.first_seq
