"""Checks of clusters: leaders, replicas, the meta group, and the account that streams and consumers are in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial

from aviso_workers.engine import dead_letter_store, delayed_messages, max_deliveries
from aviso_workers.jetstream.fields import SECOND
from aviso_workers.jetstream.info import Cluster, ConsumerInfo, StreamInfo
from aviso_workers.ops.doctor.facts import Facts
from aviso_workers.ops.doctor.judgements import Check, Finding, State, about, check

__all__ = ["CHECKS"]

CHECKS: list[Check] = []
declare = partial(check, CHECKS)

FAR_BEHIND = 1_000
INACTIVE_SECONDS = 10
LEADERS_TO_COUNT, MOST_LEADERS = 12, 3 / 4
"""With fewer, so many are a matter of chance."""
USED, NEARLY_USED_UP = 0.80, 0.95
FAILING_SHARE, FEW_CALLS = 0.1, 10
COMFORTABLE = (2, 14)
LEVEL = "_nats.req.level"


@declare(
    "JS017",
    "Streams and consumers have a leader, and replicas that are current",
    why="without a leader nothing is stored or delivered; a replica that is behind does not help when a server is lost",
    cure="`aviso-workers server status` or the site's supervisor says which server is down: start it. A replica that "
    "stays behind is moved by `aviso-workers streams remove-peer {stream} SERVER`, which needs one more server; "
    "else, while all replicas on the others are current, stop the server, empty its store directory and start it",
    severity=State.FAIL,
    needs=("consumers", "streams"),
)
def replicas(facts: Facts) -> Iterator[Finding]:
    # A stream that was just deleted is missing from one of the two listings.
    for name in sorted(facts.before.unavailable & facts.after.unavailable):
        yield Finding(stream=name, found="no server answers for it: it has no leader")
    for one in _kept(facts):
        for found in _wrong_with(one.cluster):
            yield about(one, found)
    for advisory in facts.advisories:
        if ".QUORUM_LOST." in advisory.kind:
            yield Finding(stream=advisory.stream, consumer=advisory.consumer, found=f"received {advisory.kind}")


@declare(
    "JS018",
    "Leaders are spread over the servers",
    why="leaders do the work: one server works for all, and its loss stops everything for an election",
    cure="`aviso-workers streams step-down STREAM` for some of its streams",
    needs=("consumers", "streams"),
)
def skewed_leaders(facts: Facts) -> Iterator[Finding]:
    replicated = [one.cluster for one in _kept(facts) if one.cluster.followers]
    leaders = Counter(group.leader for group in replicated)
    is_whole = not any(peer.offline for group in replicated for peer in group.followers)
    if len(replicated) < LEADERS_TO_COUNT or not is_whole:
        return  # a server that is down leads nothing just now
    for server, count in leaders.items():
        if count > MOST_LEADERS * len(replicated):
            yield Finding(place=server, found=f"leads {count} of {len(replicated)} streams and consumers")


@declare(
    "JS039",
    "The account is not full",
    why="over its limits new streams and consumers, and what is published, are refused",
    cure="raise the limit (`server.accounts` of our configuration, then `aviso-workers server render` and a reload), "
    "or remove what is not needed: `aviso-workers report account` shows both",
    needs=("account",),
)
def account_use(facts: Facts) -> Iterator[Finding]:
    account = facts.after.account
    limits = account.limits
    uses = {
        "storage": (max(account.storage, account.reserved_storage), limits.max_storage),
        "memory": (max(account.memory, account.reserved_memory), limits.max_memory),
        "streams": (account.streams, limits.max_streams),
        "consumers": (account.consumers, limits.max_consumers),
    }
    for name, (used, limit) in uses.items():
        if limit > 0 and used >= USED * limit:
            state = State.FAIL if used >= NEARLY_USED_UP * limit else State.WARN
            yield Finding(place=f"account {name}", found=f"{used} of {limit} used", state=state)
    failed = account.api.errors - facts.before.account.api.errors
    asked = account.api.total - facts.before.account.api.total
    if asked >= FEW_CALLS and failed > FAILING_SHARE * asked:
        yield Finding(
            place="account api",
            found=f"{failed} of {asked} requests within {facts.elapsed_seconds:.0f} s failed",
            cure="`nats events --js-advisory` shows which requests fail, and which client sends them",
        )


@declare(
    "JS040",
    "Accounts that share a server have limits",
    why="without them one account can take the disk, or the memory, of all",
    cure="set max_storage and max_streams under server.accounts.NAME.jetstream, then "
    "`aviso-workers server render` and a reload",
    needs=("account", "monitoring"),
    production=True,
)
def unlimited_account(facts: Facts) -> Iterator[Finding]:
    sharing = max((one.varz.jetstream.stats.accounts for one in facts.monitored), default=0)
    limits = facts.after.account.limits
    missing = [name for name in ("max_storage", "max_streams") if getattr(limits, name) <= 0]
    if sharing > 1 and missing:
        yield Finding(place="account", found=f"one of {sharing} accounts, without {', '.join(missing)}")


@declare(
    "JS061",
    "Workers may make the streams of their own",
    why="streams for retries, advisories and what is to be delivered later have no max_bytes: with max_bytes_required "
    "the account refuses them, and nothing of that can be done",
    cure="leave max_bytes_required out of server.accounts.NAME.jetstream, or let a user who may create streams make "
    "{stream}",
    severity=State.FAIL,
    needs=("account", "streams"),
)
def own_streams_refused(facts: Facts) -> Iterator[Finding]:
    if not facts.after.account.limits.max_bytes_required:
        return
    dead_letters = [] if facts.config.workers.dead_letters.max_bytes else [dead_letter_store.STREAM]
    for name in (*dead_letters, dead_letter_store.RETRIES, delayed_messages.STREAM, max_deliveries.STREAM):
        if name not in facts.streams:
            yield Finding(stream=name, found="the account has max_bytes_required, and refuses it")


@declare(
    "JS041",
    "Servers are new enough, and all of one version",
    why="an older server does not serve streams that use what it does not know, and lacks what makes workers fast",
    cure="upgrade the oldest server first to 2.14 or newer, one at a time: `nats-server --signal ldm`, replace, start",
    needs=("account", "consumers", "monitoring", "streams"),
)
def versions(facts: Facts) -> Iterator[Finding]:
    found = {one.name: one.varz.version for one in facts.monitored} | {facts.server.name: facts.server.ver}
    if len(set(found.values())) > 1:
        yield Finding(place="cluster", found=", ".join(f"{name} {version}" for name, version in sorted(found.items())))
    for server, version in found.items():
        if tuple(map(int, version.split("-")[0].split(".")[:2])) < COMFORTABLE:
            yield Finding(place=server, found=f"{version}: without fast batches and `aviso-workers agents reset`")
    level = facts.after.account.api.level
    for one in _kept(facts):
        needed = int(one.config.metadata.get(LEVEL, 0))
        if needed > level:
            yield about(one, f"needs API level {needed}, and the server has {level}", state=State.FAIL)


def _wrong_with(group: Cluster) -> Iterator[str]:
    if group.name and not group.leader:
        yield "it has no leader"
    for replica in group.followers:
        if replica.offline:
            yield f"{replica.name} is offline"
        elif not replica.current:
            yield f"{replica.name} is not current"
        elif replica.active > INACTIVE_SECONDS * SECOND:
            yield f"{replica.name} was last active {replica.active / SECOND:.0f} s ago"
        elif replica.lag > FAR_BEHIND:
            yield f"{replica.name} is {replica.lag} behind"


def _kept(facts: Facts) -> Iterator[StreamInfo | ConsumerInfo]:
    """Yield all streams and consumers, each of which a group of servers keeps."""
    yield from facts.streams.values()
    yield from facts.consumers.values()
