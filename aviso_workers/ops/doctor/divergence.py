"""The state of each server's own replicas of streams, and which replicas have diverged from their leader's.

JetStream's API answers for the leader only, and the leader calls a replica current that has received its log, whatever
is left of the messages in its store. The monitoring port of each server counts the server's own replica. `facts` looks
at all of them twice, because replicas of a stream that is written to are never at the same sequence at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import anyio
from msgspec import Struct

from aviso_workers.errors import ServerProcessError
from aviso_workers.ops.doctor import monitoring_port
from aviso_workers.ops.doctor.answers import OwnReplica
from aviso_workers.task_groups import asked_of_each

LATER_SECONDS = 3.0
"""Between the two looks: replicas carry out the same log within milliseconds, and messages that reach their max_age
leave a replica by the clock of its server."""

Look = Mapping[str, Mapping[str, OwnReplica]]
"""The state of each server's own replicas, by the server's name and the stream's."""


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
