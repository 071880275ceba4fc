"""Maintenance of streams and consumers: purge, seal, remove, step down a leader, remove a replica.

Called by `streams purge|seal|rm|step-down|remove-peer` and `consumers rm`. What cannot be taken back comes in
two: a plan that says what would be done, and refuses where the stream does, and the deed.
"""

from __future__ import annotations

import anyio
from msgspec import Struct

from aviso_workers.backends import Admin
from aviso_workers.declare.agents import agent_of
from aviso_workers.errors import BackendError, DeclarationError, NotFoundError, RefusedError, UnavailableError
from aviso_workers.jetstream import error_codes
from aviso_workers.jetstream.info import Cluster, StreamConfig
from aviso_workers.ops import inventory
from aviso_workers.state import consumer_records
from aviso_workers.state.audit_records import PURGED, Affected

ELECTION_SECONDS = 10.0
ASK_SECONDS = 5.0
ANSWER_SECONDS = 0.5
POLL_SECONDS = 0.05


class Purge(Struct, frozen=True, kw_only=True):
    """The plan of a purge: what is removed, and how many messages that are."""

    stream: str
    subject: str = ""
    keep: int = 0
    before: int = 0
    messages: int
    """How many would be removed, as of now, or a few less: with a subject and a sequence the server has no count of
    both."""
    first: int
    last: int
    """The first and the last sequence of the stream."""


async def plan_purge(admin: Admin, stream: str, *, subject: str = "", keep: int = 0, before: int = 0) -> Purge:
    """Return the plan of a purge: of all messages or those of a subject, without the newest `keep`, or only those
    `before` a sequence.

    Raises `NotFoundError`, `RefusedError` where the stream refuses purges, and `DeclarationError` for what a server
    does not do.
    """
    if keep and before:
        raise DeclarationError("say either how many to keep or before which sequence to remove, not both")
    found = await admin.stream_info(stream)
    check_purge_allowed(found.config)
    messages = found.messages
    if subject:
        messages = await inventory.count(admin, stream, subject)
    if before:
        gaps = await inventory.gaps(admin, stream)
        messages = min(messages, inventory.messages_before(gaps, before))
    return Purge(
        stream=stream,
        subject=subject,
        keep=keep,
        before=before,
        messages=max(0, messages - keep),
        first=found.first_sequence,
        last=found.last_sequence,
    )


def check_purge_allowed(config: StreamConfig) -> None:
    """Raise `RefusedError` where the stream of this configuration refuses purges."""
    for field, refuses in (("sealed", config.sealed), ("deny_purge", config.deny_purge)):
        if refuses:
            raise RefusedError(f"stream {config.name} cannot be purged: it has {field}, which cannot be taken back")


async def purge(admin: Admin, plan: Purge) -> int:
    """Purge as planned, and return how many messages were removed. Their bytes may stay on the disk for a while."""
    return await admin.purge_stream(plan.stream, subject=plan.subject, keep=plan.keep, before=plan.before)


async def purged(admin: Admin, plan: Purge) -> tuple[Affected, ...]:
    """Return what a purge has removed, as a record has it; with a subject, between which sequences. Raises
    `BackendError`.
    """
    last = plan.last if plan.subject else (await admin.stream_info(plan.stream)).first_sequence - 1
    how = f"{PURGED}, if its subject matches {plan.subject}," if plan.subject else PURGED
    if last < plan.first:
        return ()
    return (Affected(how=how, stream=plan.stream, ranges=((plan.first, last),)),)


async def seal(admin: Admin, stream: str) -> None:
    """Seal the stream: no message is added, deleted, purged or expires any more, for ever. Raises `BackendError`."""
    config = (await admin.stream_info(stream)).config
    await admin.update_stream({**config, "sealed": True})


async def remove_consumer(admin: Admin, stream: str, consumer: str) -> None:
    """Remove a consumer; an agent of ours that had it begins again where its `start` says. Raises `NotFoundError`."""
    of_agent = agent_of(consumer)
    found = await admin.consumer_info(stream, consumer)
    await admin.delete_consumer(stream, consumer)
    if of_agent is not None:
        owner, agent = of_agent
        await consumer_records.mark_removed(admin, app=owner, agent=agent, stream=stream, consumer=found)


async def step_down(admin: Admin, stream: str, *, consumer: str = "", prefer: str = "") -> str:
    """Have another server elected leader of the stream, or of one of its consumers, and return its name.

    Raises `NotFoundError`, `RefusedError` where it has no other server, `UnavailableError` where none is elected.
    """
    kind, what = ("CONSUMER", f"{stream}.{consumer}") if consumer else ("STREAM", stream)

    async def cluster(*, timeout_seconds: float = ASK_SECONDS) -> Cluster:
        if consumer:
            return (await admin.consumer_info(stream, consumer, timeout_seconds=timeout_seconds)).cluster
        return (await admin.stream_info(stream, timeout_seconds=timeout_seconds)).cluster

    before = await cluster()
    if not before.followers:
        raise RefusedError(f"{what} has one copy: there is no other server that could lead it")
    request = {"placement": {"preferred": prefer}} if prefer else {}
    await admin.administration().api(f"{kind}.LEADER.STEPDOWN.{what}", request)
    with anyio.move_on_after(ELECTION_SECONDS):
        while True:
            try:
                leader = (await cluster(timeout_seconds=ANSWER_SECONDS)).leader
            except UnavailableError:
                leader = ""  # only a leader answers
            if leader and (leader == prefer or leader != before.leader):
                return leader
            await anyio.sleep(POLL_SECONDS)
    raise UnavailableError(f"{what}: no other leader was elected within {ELECTION_SECONDS:.0f} s")


async def peers(admin: Admin, stream: str) -> dict[str, str]:
    """Return the state of each replica of a stream, by the name of its server. Raises `NotFoundError`."""
    cluster = (await admin.stream_info(stream)).cluster
    found = {cluster.leader: "leader"} if cluster.leader else {}
    for replica in cluster.followers:
        is_well = replica.current and not replica.offline
        found[replica.name] = "current" if is_well else f"behind by {replica.lag}"
    return found


async def remove_peer(admin: Admin, stream: str, peer: str) -> None:
    """Remove the replica that a server holds; another server that may hold one makes a new one.

    Raises `NotFoundError` where the server holds none, `RefusedError` where no other may.
    """
    found = await peers(admin, stream)
    if peer not in found:
        raise NotFoundError(f"{peer} holds no copy of {stream}; there are: {', '.join(found) or 'none in a cluster'}")
    try:
        await admin.administration().api(f"STREAM.PEER.REMOVE.{stream}", {"peer": peer})
    except BackendError as error:
        if error.code != error_codes.NO_OTHER_PEER:
            raise
        raise RefusedError(
            f"{peer} keeps its copy of {stream}, because no other server can have it ({error}). To copy it again, "
            f"check that all copies on the other servers are current, stop {peer}, empty its store directory, and "
            "start it again",
            code=error.code,
        ) from error
