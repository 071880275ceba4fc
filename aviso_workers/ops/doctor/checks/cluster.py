"""Checks of clusters: leaders, replicas, the meta group, and the account that streams and consumers are in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from aviso_workers.config.streams import event_streams
from aviso_workers.jetstream.error_codes import NO_MESSAGE, STREAM_NOT_FOUND
from aviso_workers.jetstream.info import ConsumerInfo, StreamInfo
from aviso_workers.jetstream.specs import OURS
from aviso_workers.ops.doctor import divergence, replicas
from aviso_workers.ops.doctor.checks.servers import RESTART, RESTART_ALL
from aviso_workers.ops.doctor.facts import Facts
from aviso_workers.ops.doctor.judgements import Declaration, Finding, State, about
from aviso_workers.ops.doctor.monitoring_port import OFF
from aviso_workers.state import delayed_messages, own_buckets, own_streams
from aviso_workers.state.own_streams import DEAD_LETTERS, RETRIES

LEADERS_TO_COUNT, MAX_LEADERS = 12, 3 / 4
"""With fewer, so many are a matter of chance."""
USED, NEARLY_USED_UP = 0.80, 0.95
FAILING_SHARE, FEW_CALLS = 0.1, 10
COMFORTABLE = (2, 14)
BUCKET = "KV_"
LEVEL = "_nats.req.level"
COPY_ANEW = (
    "Then, one server with a wrong replica at a time: stop it, remove the directory jetstream/ACCOUNT/streams/{stream} "
    "from its store_dir, and start it. It copies the messages from the leader."
)
STATE_DIVERGED = (
    "Check the clocks of the servers first (JS073). The stream keeps state of workers, whose messages are replaced and "
    "removed all the time, so the number of messages does not say which replica is right. The one with the higher last "
    "sequence is; with the same last sequence, the leader's, which workers use. If it is another one than the "
    "leader's, run `aviso-workers streams step-down {stream} --prefer SERVER`. " + COPY_ANEW
)


@Declaration("JS017", State.FAIL, needs=("consumers", "streams")).says(
    "Every stream and consumer has a leader, and replicas that are current",
    why="A stream or consumer without a leader neither stores nor delivers. A replica that is offline or behind does "
    "not help when the next server is lost.",
    cure="`aviso-workers server status` or the site's supervisor says which server is down: start that server. Look at "
    "the disk of a server that runs (`df -h`): with a full disk it turns JetStream off until there is space and it is "
    "restarted. If all servers run and no stream has a leader, restart them one by one. If a replica stays behind, "
    "`aviso-workers streams remove-peer {stream} SERVER` moves it, if the cluster has one more server. If it has none, "
    "check that all replicas on the other servers are current, stop the server with the bad replica, empty its store "
    "directory, and start it.",
)
def useless_replicas(facts: Facts) -> Iterator[Finding]:
    """A replica counts as behind if it is not current, 1000 entries behind, or without contact for 10 seconds. After a
    server is killed, its replicas are still reported as current for up to 10 seconds. An advisory of a lost quorum
    between the two samples is a FAIL too. A replica of a busy stream is behind for moments, so only what is wrong in
    every sample counts; where replicas only seem to be behind, the doctor takes up to three more samples.

    An election takes 5 to 7 seconds, and a server that was down catches up without help. In a cluster of three with
    three replicas, JetStream refuses `remove-peer` (10075). A server with an empty store directory that starts under
    the same name copies all data from the others.
    """
    for name in sorted(facts.without_leader):
        if facts.all_run:
            yield Finding(stream=name, found="it has no leader, though all servers are up", cure=RESTART_ALL)
        else:
            yield Finding(stream=name, found="no server answers for it: it has no leader")
    asked = {one.name: one.health for one in facts.monitored}
    samples = [sample.groups for sample in (facts.before, facts.after, *facts.later)]
    for (stream, consumer), found in replicas.wrong_in_all(samples):
        server, _, what = found.partition(" ")
        why = asked.get(server, f"its disk is not known: no monitoring port of {server} answers")
        said = f"{found}; {why}" if what == "is not current" and why != "ok" else found
        cure = RESTART.format(place=server) if why == OFF else ""
        yield Finding(stream=stream, consumer=consumer, found=said, cure=cure)
    for advisory in facts.advisories:
        if ".QUORUM_LOST." in advisory.kind:
            yield Finding(stream=advisory.stream, consumer=advisory.consumer, found=f"received {advisory.kind}")


@Declaration("JS072", State.FAIL, needs=("monitoring",)).says(
    "Replicas of a stream have the messages of their leader",
    why="A replica that lost messages, or that a server with a wrong clock expired too early, stays different, and "
    "JetStream does not report that. Readers and consumers that it serves miss these messages.",
    cure="Decide which replica is right: the one with more messages, unless these were deleted or erased. Check the "
    "clocks of the servers first (JS073). If another replica than the leader's is right, run `aviso-workers streams "
    "step-down {stream} --prefer SERVER`. " + COPY_ANEW,
)
def diverged_replicas(facts: Facts) -> Iterator[Finding]:
    """Replicas differ after damage on a disk, and when a server runs with a wrong clock: it deletes messages that are
    older than `retention_time` by its own clock, and does not get them back when the clock is right again.

    The check compares what each server of `--monitor` says of its own replicas: the first and the last sequence and,
    while nothing changes, the number of messages. If they differ, it looks again after 3 seconds, and fails only if the
    difference is still there.

    A replica that is copied anew loses what only it had, so make a backup while the replica with the most messages
    leads (`aviso-workers backup create`). Without accounts, the directory of the account is `$G`. Continue
    with the next server when JS017 and JS072 pass.

    Consumers with replicas, as those of agents, keep their positions. A consumer with one replica on that server
    (`num_replicas: 1`) starts again at its first message. `streams remove-peer` does the same without a stop, if the
    cluster has one more server; in a cluster of three with three replicas JetStream refuses it (10075).
    """
    if facts.looks is None:
        yield Finding(found="the server does not tell which account is ours", state=State.SKIP)
        return
    for stream, found in divergence.diverged(facts.looks):
        is_of_state = stream.startswith((OURS, BUCKET))
        yield Finding(stream=stream, found=found, cure=STATE_DIVERGED if is_of_state else "")


@Declaration("JS018", needs=("consumers", "streams")).says(
    "No server leads most of the streams and consumers",
    why="The leader of a stream or consumer does its work. One server works for all others, and if it is lost, all "
    "its streams and consumers wait for an election.",
    cure="Run `aviso-workers streams step-down STREAM` for some streams of that server.",
)
def skewed_leaders(facts: Facts) -> Iterator[Finding]:
    """After an upgrade, many leaders are on the server that was restarted first. The check warns when there are twelve
    or more streams and consumers with replicas, and one server leads more than three quarters of them.
    """
    replicated = [one.cluster for one in _kept(facts) if one.cluster.followers]
    leaders = Counter(group.leader for group in replicated)
    is_whole = not any(peer.offline for group in replicated for peer in group.followers)
    if len(replicated) < LEADERS_TO_COUNT or not is_whole:
        return  # a server that is down leads nothing just now
    for server, count in leaders.items():
        if count > MAX_LEADERS * len(replicated):
            yield Finding(place=server, found=f"leads {count} of {len(replicated)} streams and consumers")


@Declaration("JS039", needs=("account",)).says(
    "The account is not near its limits",
    why="At its limits, the server refuses new streams and messages of the account.",
    cure="Raise max_storage, max_memory or max_streams in server.accounts.NAME.jetstream, run `aviso-workers server "
    "render` and reload the server, or remove unused streams (`aviso-workers streams rm STREAM`). `aviso-workers "
    "report account` shows the limits and the use.",
)
def account_use(facts: Facts) -> Iterator[Finding]:
    """The result is WARN from 80 % and FAIL from 95 % of a limit of storage, memory or streams, reservations included.
    The limit of consumers is one for each stream (JS034). The result is also WARN when a tenth of the API requests
    failed between the samples; the finding names the most frequent request and its error. Two answers are no failure:
    that there is no such message (10037), since workers that retry ask for counts which are not there; and that a
    stream or bucket of ours is not there (10059), since each is made when it is first needed.
    """
    account = facts.after.account
    limits = account.limits
    uses = {
        "storage": (max(account.storage, account.reserved_storage), limits.max_storage),
        "memory": (max(account.memory, account.reserved_memory), limits.max_memory),
        "streams": (account.streams, limits.max_streams),
    }
    for name, (used, limit) in uses.items():
        if limit > 0 and used >= USED * limit:
            state = State.FAIL if used >= NEARLY_USED_UP * limit else State.WARN
            yield Finding(place=f"account {name}", found=f"{used} of {limit} used", state=state)
    answered = [(each.subject.removeprefix("$JS.API."), each.error) for each in facts.advisories if each.error]
    refused = [(request, error) for request, error in answered if not _is_none_found(request, error.err_code)]
    failed = account.api.errors - facts.before.account.api.errors - (len(answered) - len(refused))
    asked = account.api.total - facts.before.account.api.total
    if asked >= FEW_CALLS and failed > FAILING_SHARE * asked:
        reasons = Counter(f"{request}: {error.description} ({error.err_code})" for request, error in refused)
        found = f"{failed} of {asked} requests within {facts.elapsed_seconds:.0f} s failed"
        yield Finding(
            place="account api",
            found="; most often ".join((found, *(reason for reason, _ in reasons.most_common(1)))),
            cure="`nats events --js-advisory` shows which requests fail, and which client sends them.",
        )


def _is_none_found(request: str, code: int) -> bool:
    """Return whether it is the answer to a question of our own programs, and nothing has failed."""
    stream = request.rpartition(".INFO.")[2]
    is_ours = stream.startswith(OURS) or own_buckets.kind_of(stream.removeprefix(BUCKET)) != "other"
    return code == NO_MESSAGE or (code == STREAM_NOT_FOUND and is_ours)


@Declaration("JS040", needs=("account", "monitoring"), production=True).says(
    "Accounts that share a server have limits",
    why="An account without limits can use up the disk and the memory of all accounts.",
    cure="Set max_storage and max_streams in server.accounts.NAME.jetstream, then run `aviso-workers server render` "
    "and reload the server.",
)
def unlimited_account(facts: Facts) -> Iterator[Finding]:
    """Do not set `max_bytes_required` (JS061)."""
    sharing = max((one.varz.jetstream.stats.accounts for one in facts.monitored), default=0)
    limits = facts.after.account.limits
    missing = [name for name in ("max_storage", "max_streams") if getattr(limits, name) <= 0]
    if sharing > 1 and missing:
        yield Finding(place="account", found=f"one of {sharing} accounts on this server, without {', '.join(missing)}")


@Declaration("JS061", State.FAIL, needs=("account", "streams")).says(
    "Workers can create the streams that they need",
    why="An account with max_bytes_required refuses streams without max_bytes, as those of retries and "
    "delayed notifications are. Without these streams, dead letters cannot be retried, notifications cannot be "
    "delayed, and notifications that exceed max_deliver are not recorded.",
    cure="Remove max_bytes_required from server.accounts.NAME.jetstream, run `aviso-workers server render` and reload "
    "the server, or create {stream} by hand with a max_bytes.",
)
def own_streams_refused(facts: Facts) -> Iterator[Finding]:
    """The stream of dead letters has a limit of bytes only if `workers.dead_letters.max_bytes` is set."""
    if not facts.after.account.limits.max_bytes_required:
        return
    kinds = [RETRIES] if facts.config.workers.dead_letters.max_bytes else [DEAD_LETTERS, RETRIES]
    missing = [kind for kind in kinds if not any(own_streams.app_of(kind, name) for name in facts.streams)]
    schedules = map(delayed_messages.stream_of, event_streams(facts.config.notification_schema))
    for name in (*(own_streams.of_app(kind, "<app>") for kind in missing), *schedules):
        if name not in facts.streams:
            yield Finding(stream=name, found="the account has max_bytes_required and refuses this stream")


@Declaration("JS041", needs=("account", "consumers", "monitoring", "streams")).says(
    "All servers have the same version, 2.14 or newer",
    why="A server before 2.14 has neither fast batches nor `agents reset`. A stream or consumer that "
    "uses a feature that its server does not know is offline.",
    cure="Upgrade one server at a time to 2.14 or newer, the oldest first: `nats-server --signal ldm`, replace the "
    "program, start it.",
)
def versions(facts: Facts) -> Iterator[Finding]:
    """Versions may differ only during an upgrade. The result is FAIL when a stream or consumer uses a feature that its
    server does not know, and is offline there. Wait for JS017 before the next server.
    """
    found = {one.name: one.varz.version for one in facts.monitored} | {facts.server.name: facts.server.ver}
    if len(set(found.values())) > 1:
        yield Finding(place="cluster", found=", ".join(f"{name} {version}" for name, version in sorted(found.items())))
    for server, version in found.items():
        if tuple(map(int, version.split("-")[0].split(".")[:2])) < COMFORTABLE:
            yield Finding(place=server, found=f"version {version} has neither fast batches nor `agents reset`")
    level = facts.after.account.api.level
    for one in () if "account" in facts.unknown else _kept(facts):
        needed = int(one.config.metadata.get(LEVEL, 0))
        if needed > level:
            yield about(one, f"needs API level {needed}, and the server has API level {level}", state=State.FAIL)


def _kept(facts: Facts) -> Iterator[StreamInfo | ConsumerInfo]:
    """Yield all streams and consumers, each of which a group of servers keeps."""
    yield from facts.streams.values()
    yield from facts.consumers.values()
