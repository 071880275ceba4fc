"""Checks of the nats-servers and their cluster: health, disks, settings, leaders, replicas, meta group and account.

A nats-server acknowledges before it flushes, unless `sync_always` is set. What is in between survives the end of the
process and not the end of the machine; how much that is, and how many machines it takes, follows from `sync_interval`
and the number of replicas: that is the durability of a stream, which accidents lose acknowledged messages.
"""

from __future__ import annotations

import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median_high, median_low

from msgspec import Struct

from aviso_workers.aviso.literals import SECOND, Duration
from aviso_workers.clocks import SKEW
from aviso_workers.config.streams import event_streams
from aviso_workers.jetstream import error_codes
from aviso_workers.jetstream.error_codes import NO_MESSAGE, STREAM_NOT_FOUND
from aviso_workers.jetstream.info import Cluster, ConsumerInfo, StreamInfo
from aviso_workers.jetstream.specs import BUCKET, OURS
from aviso_workers.ops.doctor import replicas
from aviso_workers.ops.doctor.checks.clients import has_user
from aviso_workers.ops.doctor.facts import Facts
from aviso_workers.ops.doctor.judgements import Declaration, Finding, Found, State, about, each_server, each_stream
from aviso_workers.ops.doctor.monitoring_port import LOOPBACK, OFF, Monitored
from aviso_workers.state import delayed_messages, own_buckets, own_streams
from aviso_workers.state.own_streams import DEAD_LETTERS, RETRIES

declare = partial(Declaration, needs=("monitoring",))

SHORT_INTERVAL = 10 * SECOND
HOT_PER_SECOND = 500
TEMPORARY = ("/tmp/", "/var/tmp/", "/dev/shm/")
NEARLY_ALL = 0.8
NEARLY_FULL = 0.95
CLOCK_SECONDS = 3
THIS_MACHINE = "this machine"
A_WHILE = timedelta(days=1)
LITTLE_FREE = 2**30
"""Bytes: of a disk that is nearly full, that is too little for large disks too."""
RUNBOOK = "docs/operations/disk-full.md#a-disk-is-full"
RESTART = (
    "Free space on the disk of {place} (`df -h` shows it), then restart that server. Until the restart, the server "
    f"refuses messages of these streams, even when the disk has space again ({RUNBOOK})."
)
RESTART_ALL = (
    "All servers are up, and streams have no leader, as after JetStream was turned off and on for the account: restart "
    "the servers one by one. Stop each (`kill` its process, or the site's supervisor), start it again, and go on with "
    "the next one without waiting for the streams, which have a leader again when most servers were restarted."
)
RECORDED = (
    "Read the log of the workers of the app that has recorded it. If none is to run any more, `aviso-workers agents rm "
    "APP` removes what the app has recorded."
)
MORE_SPACE = (
    "Raise server.jetstream.max_file_store in the configuration, run `aviso-workers server render` and restart the "
    "server {place}, or delete messages. Without max_file_store, the limit is three quarters of the space that was "
    f"free when the server started ({RUNBOOK})."
)
ENABLE = (
    "Set server.jetstream.store_dir in the configuration, then run `aviso-workers server render` and restart "
    "the server. In a cluster, at least one server needs JetStream."
)
ENABLE_ACCOUNT = (
    "Set server.accounts.NAME.jetstream.enabled: true for the account, run `aviso-workers server render` and reload "
    "the servers. If no stream has a leader afterwards, see JS017."
)
RENDER = "in the configuration, then run `aviso-workers server render` and restart the server"
RENDER_AND_RELOAD = "in the configuration, then run `aviso-workers server render` and reload the server"
NEVER = 0
NOT_KNOWN = -1
LEADERS_TO_COUNT, MAX_LEADERS = 12, 3 / 4
"""With fewer, so many are a matter of chance."""
USED, NEARLY_USED_UP = 0.80, 0.95
FAILING_SHARE, FEW_CALLS = 0.1, 10
COMFORTABLE = (2, 14)
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


class StreamDurability(Struct, frozen=True, kw_only=True):
    """The durability of one stream. As text it says which accidents lose acknowledged messages."""

    stream: str
    replicas: int
    in_memory: bool
    unflushed: int
    """Nanoseconds for which an acknowledged message may not be on the disk yet; `NEVER`, or `UNKNOWN`."""

    def __str__(self) -> str:
        return "in memory: lost when its servers stop" if self.in_memory else f"{self._on_loss}; {self._on_power_cut}"

    @property
    def _on_loss(self) -> str:
        if self.replicas == 1:
            return "all messages are lost if the server's disk fails"
        if (spare := (self.replicas - 1) // 2) == 0:
            return "unavailable without one of its 2 servers"
        return f"survives the loss of {spare} of its {self.replicas} servers"

    @property
    def _on_power_cut(self) -> str:
        if self.unflushed == NOT_KNOWN:
            return "sync_interval is not known (the server's own default is 2m)"
        if self.unflushed == NEVER:
            return "a power cut loses no acknowledged messages (sync_always)"
        machines = (
            "its server" if self.replicas == 1 else f"{self.replicas // 2 + 1} of its {self.replicas} servers at once"
        )
        interval = Duration(max(self.unflushed, SECOND) // SECOND).literal()
        return f"a power cut of {machines} loses up to {interval} of acknowledged messages"


def durabilities(facts: Facts) -> Iterator[StreamDurability]:
    """Yield the durability of every stream, in the order of their names."""
    for _, stream in sorted(facts.streams.items()):
        yield StreamDurability(
            stream=stream.name,
            replicas=stream.config.num_replicas,
            in_memory=stream.config.storage == "memory",
            unflushed=_unflushed(stream, facts),
        )


def _unflushed(stream: StreamInfo, facts: Facts) -> int:
    """Return for how many nanoseconds at most an acknowledged message may not be on the disk: the longest interval of
    the stream's servers, `UNKNOWN` unless all of them are monitored.
    """
    seen = {one.name: one.varz.jetstream.config for one in facts.monitored}
    keepers = stream.cluster.members or {facts.server.name}
    if not keepers <= seen.keys():
        return NOT_KNOWN
    return max(NEVER if seen[name].sync_always else seen[name].sync_interval for name in keepers)


@declare("JS042", State.FAIL, needs=("records", "streams")).says(
    "Every configured stream exists",
    why="A server with the wrong encryption key or an empty store_dir starts without its streams. If a program then "
    "creates such a stream, the server erases the files of the stream that it cannot read.",
    cure="Stop the server before a worker creates {stream}, and check its key, its store_dir and its log (`could not "
    "be recovered`). Only if the stream was removed on purpose, run `aviso-workers streams apply`.",
)
def missing_streams(facts: Facts) -> Iterator[Finding]:
    """A stream that was not created yet is no finding. The check fails only if something shows that the stream was
    there: an agent has read it, as workers record; a backup below `--backups` has it; or a server says that it cannot
    read it, on the monitoring port or by its store.

    Only `/healthz` and the log of the server say that streams are missing (JS044). With the right key they are
    there again, but **only as long as nobody has tried to create or restore them**. A nats-server 2.15.0 refuses to
    create a stream in place of a stream that it cannot read (10049, and 10062 for a restore), and erases the files of
    the unreadable stream while it refuses. The next attempt succeeds, with an empty stream.

    `aviso-workers` limits the damage:

    - A worker first creates the bucket `<app>__state`. The server refuses it and erases the old bucket,
      which workers can write again. The worker then ends with an error.
    - A publisher, `streams apply`, `streams copy` or `backup restore` may cost one stream if it comes first. The
      error names it. With the right key the other streams are there again, and this one needs its backup.
    - After a refusal, `aviso-workers` leaves an empty stream `aviso_workers_unreadable` in the memory of the
      server. While it exists, no program of `aviso-workers` creates or restores a stream. It disappears when the
      server restarts.
    - If the refusal had another cause, such as a full disk, and the server keeps running, remove the mark:
      `aviso-workers streams rm aviso_workers_unreadable`.

    To prevent it:

    - Let no client connect before `/healthz` says ok. `server start` waits for that. With systemd, use an
      `ExecStartPost` that stops the server again when `/healthz` does not say ok.
    - Create event streams with `streams apply` only, and set `stream_management: observe` for the workers. Workers
      still create streams of their own state, such as dead letters.

    The result is WARN for the stream of an event type that only workers have recorded: an app records what it likes.
    """
    recorded = facts.recorded_streams
    for configured, plan in facts.plans.items():
        if plan.exists or plan.stream in facts.after.unavailable or "streams" in facts.unknown:
            continue
        if not (trace := _trace_of(plan.stream, facts)):
            continue
        found = f"the stream of {configured} does not exist, and {trace}"
        state, cure = (State.WARN, RECORDED) if plan.stream in recorded else (None, "")
        yield Finding(stream=plan.stream, found=found, state=state, cure=cure)


def _trace_of(stream: str, facts: Facts) -> str:
    """Return what shows that a stream was there; empty where nothing does: then it was not created yet."""
    for (name, consumer), record in facts.recorded.consumers.items():
        if name == stream and not record.removed:
            return f"{consumer} has read it up to sequence {record.ack_floor}"
    if backup := facts.backups.get(stream):
        return f"{backup.directory} is a backup of it"
    # JetStream stream '$G > MARS' could not be recovered; not stream MARS
    unread = [one.name for one in facts.monitored if stream in f"{one.health} {one.unserved}".replace("'", " ").split()]
    return f"{', '.join(unread)} cannot read it" if unread else ""


@declare("JS069", State.FAIL, each=each_server).says(
    "Servers can read every stream and consumer in their stores",
    why="A server that cannot read a stream or consumer continues without it and says so only in its log. A program "
    "that creates the stream or consumer again destroys the data on the disk.",
    cure="Stop the server {place} before a program creates the stream or consumer again. Check its key, its accounts "
    "and its log.",
)
def unserved(one: Monitored, _: Facts) -> Iterator[Found]:
    """`server start` stops such a server at once, and `server status` reports it too. The result is SKIP for servers on
    other machines.
    """
    if one.unserved:
        yield one.unserved
    elif one.disk is None and not one.without_jetstream:
        found = f"its store_dir {one.varz.jetstream.config.store_dir} is not on this machine"
        yield about(one, found, state=State.SKIP)


@declare("JS043", needs=("monitoring", "streams")).says(
    "A power cut loses few acknowledged messages",
    why="A nats-server acknowledges a message before it flushes the message to the disk. A power cut loses the "
    "messages in between.",
    cure="Set server.jetstream.sync_always: true and remove sync_interval, or set three replicas and "
    f"server.jetstream.sync_interval: 10s, {RENDER}.",
)
def power_cut(facts: Facts) -> Iterator[Finding]:
    """The last lines of the report say what each stream survives, whatever the result.

    | stream | result |
    |---|---|
    | one replica, not flushed before each acknowledgement | WARN |
    | one replica, flushed less often than every 10 seconds, with `--production` | FAIL |
    | several replicas, flushed less often than every 10 seconds | WARN |
    | `sync_interval` is unknown, because no monitoring port is known | SKIP |

    See [What a power cut loses](power-cut.md).
    """
    for each in durabilities(facts):
        if each.in_memory or each.unflushed == NEVER:
            continue
        if each.unflushed == NOT_KNOWN:
            if "monitoring" not in facts.unknown:  # that is reported once
                yield Finding(
                    stream=each.stream,
                    found="no monitoring port of some servers of the stream is known",
                    state=State.SKIP,
                )
        elif each.replicas == 1 or each.unflushed > SHORT_INTERVAL:
            is_bad = facts.scope.production and each.replicas == 1 and each.unflushed > SHORT_INTERVAL
            yield Finding(stream=each.stream, found=str(each), state=State.FAIL if is_bad else None)


@declare("JS044", State.FAIL, needs=("account", "monitoring", "streams")).says(
    "Servers are healthy and have a meta leader",
    why="Without a leader of the meta group, no stream or consumer can be created, changed or listed.",
    cure="Read the server's log. Start the servers that are down (`aviso-workers server start --nodes COUNT`, with the "
    "number of all servers, or the site's supervisor), and restart one that has turned JetStream off, when its disk "
    "has space. Of three servers, two must run.",
)
def health(facts: Facts) -> Iterator[Finding]:
    """The check fails when one of these holds: `/healthz` reports an error; JetStream's API or a monitoring port that
    you named does not answer; the meta group has no leader, or a server is missing from it; no server of the cluster
    has JetStream enabled.

    If the log says `write error` or `no space left on device`, follow [A disk is full](disk-full.md).
    """
    without = [one for one in facts.monitored if one.without_jetstream]
    lacks_jetstream = bool(without) and len(without) == len(facts.monitored)
    for need in ("account", "streams"):
        if need in facts.unknown and need not in facts.denied:
            found = facts.unknown[need]
            cure = (
                ENABLE_ACCOUNT if str(error_codes.OFF_FOR_THE_ACCOUNT) in found else ENABLE if lacks_jetstream else ""
            )
            yield Finding(place="JetStream's API", found=found, cure=cure)
    for one in without if lacks_jetstream else ():
        yield Finding(place=one.name, found="runs without JetStream", cure=ENABLE)
    for url, why in facts.unreachable.items():
        yield Finding(place=url, found=why)
    for one in facts.monitored:
        if one.health != "ok":
            cure = RESTART_ALL if facts.without_leader and facts.all_run else RESTART if one.cannot_write else ""
            yield Finding(place=one.name, found=one.health + _disk_of(one, facts), cure=cure)
        if meta := one.varz.jetstream.meta:
            yield from _meta_group(one.name, meta, known=[one.name for one in facts.monitored if one.health == OFF])


def _disk_of(one: Monitored, facts: Facts) -> str:
    """Return what is free on the disk of a server that has turned JetStream off. It names its store_dir no more, so
    that of the configuration is looked at, where it is on this machine.
    """
    if one.health != OFF:
        return ""
    place = Path(facts.config.server.jetstream.store_dir or "")
    directory = next((each for each in (place / one.name, place) if each.is_absolute() and each.is_dir()), None)
    if directory is None or one.machine not in LOOPBACK:
        return "; its disk is not known from here"
    disk = shutil.disk_usage(directory)
    return f"; {disk.free} of {disk.total} bytes of its disk are free"


def _meta_group(server: str, meta: Cluster, *, known: list[str]) -> Iterator[Finding]:
    if not meta.leader:
        yield Finding(place=server, found="the meta group has no leader")
    for peer in meta.followers if meta.leader == server else ():  # only the leader knows of the others
        if (peer.offline or not peer.current) and peer.name not in known:
            yield Finding(place=peer.name, found="is offline or not current in the meta group")


@declare("JS071", State.FAIL, needs=()).says(
    "The doctor's user has the rights that the checks need",
    why="The server denies requests of the doctor's user, so the checks that need them are skipped.",
    cure="Run the doctor as a user with the rights that `aviso-workers server render --role operator` prints: put them "
    "in server.accounts.NAME.users.USER, run `aviso-workers server render` and reload the server.",
)
def rights(facts: Facts) -> Iterator[Finding]:
    for need, denied in facts.denied.items():
        yield Finding(place=need.replace("_", " "), found=denied)


@declare("JS073").says(
    "The clocks of all servers agree",
    why="A server deletes messages that reach their max_age by its own clock, and for good. So a server whose clock is "
    "ahead loses messages that the other replicas have (JS072). Replays by date allow for a difference of a minute.",
    cure="Set the clock of {place} and keep it right with NTP or chrony. Do not start a server before its clock is "
    "right.",
)
def clocks(facts: Facts) -> Iterator[Finding]:
    """The check compares the clocks of the servers of `--monitor` and of the machine of the doctor. The time that the
    answer took is allowed for. A difference of more than 3 seconds is a WARN, of more than a minute a FAIL.

    Let a server start only when its clock is right, for example with `After=time-sync.target` in its systemd unit.
    """
    ahead = sorted([0.0, *(one.ahead_seconds for one in facts.monitored)])
    usual = min(median_low(ahead), median_high(ahead), key=abs)  # of two clocks, ours counts as the right one
    than = "the other clocks" if usual else "the clock of this machine"
    measured = [(one.name, one.ahead_seconds, one.uncertain_seconds) for one in facts.monitored]
    measured.append((THIS_MACHINE, 0.0, max((uncertain for *_, uncertain in measured), default=0.0)))
    for place, ahead_seconds, uncertain_seconds in measured:
        off = ahead_seconds - usual
        if (surely := abs(off) - uncertain_seconds) > CLOCK_SECONDS:
            found = f"its clock is {abs(off):.0f} s {'ahead of' if off > 0 else 'behind'} {than}"
            state = State.FAIL if surely > SKEW.total_seconds() else State.WARN
            yield Finding(place=place, found=found, state=state)


@declare("JS045", State.FAIL, needs=("monitoring", "streams")).says(
    "Replicas of a stream are in different zones",
    why="Two replicas in one zone are lost together, and with them the majority of three.",
    cure="`aviso-workers streams remove-peer {stream} SERVER` moves one replica to a zone that has none.",
)
def same_place(facts: Facts) -> Iterator[Finding]:
    """A stream that is older than `unique_tag` may have replicas in one zone."""
    for key in {one.varz.jetstream.config.unique_tag for one in facts.monitored} - {""}:
        places = {one.name: [tag for tag in one.varz.tags if tag.startswith(key)] for one in facts.monitored}
        for stream in facts.streams.values():
            together = defaultdict[str, list[str]](list)
            for server in sorted(stream.cluster.members):
                for tag in places.get(server, ()):
                    together[tag].append(server)
            for tag, servers in together.items():
                if len(servers) > 1:
                    yield Finding(stream=stream.name, found=f"{' and '.join(servers)} are both {tag}")


@declare("JS049", State.FAIL).says(
    "Every server is connected to the others, and has its own store directory",
    why="A server without routes to the others does not count for a majority. Two servers with one store directory "
    "destroy each other's files.",
    cure="Start the servers that are down (JS044). If all servers run, compare their server.cluster.routes, user and "
    "password. Give each server its own jetstream.store_dir.",
)
def split(facts: Facts) -> Iterator[Finding]:
    """The check fails when a server has fewer routes than the meta group or `server.cluster.routes` has servers."""
    for one in facts.monitored:
        meta = one.varz.jetstream.meta
        size = meta.cluster_size if meta and not one.varz.gateway.name else 0  # through gateways there are others in it
        expected = max(size, len(facts.config.server.cluster.routes) if facts.config.server.cluster else 0)
        if len(one.routes) + 1 < expected:
            connected = ", ".join(sorted(one.routes)) or "no other server"
            yield Finding(place=one.name, found=f"connected to {connected}, in a cluster of {expected} servers")
    shared = defaultdict[tuple[str, str], list[str]](list)
    for one in facts.monitored:
        if one.disk or one.machine not in LOOPBACK:  # else the port was forwarded to here
            shared[one.machine, one.varz.jetstream.config.store_dir].append(one.name)
    for (_, directory), names in shared.items():
        if directory and len(names) > 1:
            yield Finding(place=" and ".join(names), found=f"have the same store_dir {directory}")


@declare("JS062").says(
    "The cluster has an odd number of servers",
    why="A cluster of four servers survives the loss of one, as a cluster of three does, because a majority of four "
    "is three. The fourth server only adds a machine that can fail.",
    cure="Add a server, or remove one from the cluster.",
)
def even_servers(facts: Facts) -> Iterator[Found]:
    for size in {meta.cluster_size for one in facts.monitored if (meta := one.varz.jetstream.meta)} - {0}:
        if size % 2 == 0:
            yield f"the meta group has {size} servers"


@declare("JS052", State.FAIL, each=each_server, production=True).says(
    "No server stores streams in a temporary directory",
    why="The operating system empties directories for temporary files when the machine starts, or when it needs space.",
    cure=f"Stop the server, move the directory, and set server.jetstream.store_dir {RENDER}.",
)
def temporary(one: Monitored, _: Facts) -> Iterator[Found]:
    if (directory := one.varz.jetstream.config.store_dir).startswith(TEMPORARY):
        yield f"store_dir {directory}"


@declare("JS053", each=each_server).says(
    "The disk has space for all messages that the server may store",
    why="A server that could not write a message refuses all further messages of that stream, even when the disk has "
    "space again.",
    cure=f"Use a disk of two to three times max_file_store, or lower server.jetstream.max_file_store {RENDER}.",
)
def small_disk(one: Monitored, _: Facts) -> Iterator[Found]:
    """`max_file_store` is the limit; if it is not set, the server took three quarters of the free space at its start.

    | result | when |
    |---|---|
    | WARN | the disk has less free space than the server may still store |
    | FAIL | less than a twentieth of the disk, and less than 1 GiB, is free |
    | FAIL | the server has stored 95 % of its limit |
    | SKIP | the free space of a server on another machine: monitor the disk there |
    """
    config, stored = one.varz.jetstream.config, one.varz.jetstream.stats.storage
    if config.max_storage and stored >= NEARLY_FULL * config.max_storage:
        found = f"{stored} of the {config.max_storage} bytes that the server may store are used"
        yield about(one, found, state=State.FAIL, cure=MORE_SPACE)
    if one.without_jetstream:
        return
    if one.disk is None:
        yield about(one, f"its store_dir {config.store_dir} is not on this machine", state=State.SKIP)
        return
    disk = shutil.disk_usage(one.disk)
    if disk.free <= (1 - NEARLY_FULL) * disk.total and disk.free < LITTLE_FREE:
        found = f"{disk.free} of {disk.total} bytes are free in {config.store_dir}"
        yield about(one, found, state=State.FAIL, cure=RESTART)
    elif disk.free < config.max_storage - stored:
        yield (
            f"the server may still store {config.max_storage - stored} bytes, and only "
            f"{disk.free} bytes are free in {config.store_dir}"
        )


@declare("JS054", each=each_stream, needs=("monitoring", "streams")).says(
    "No stream with many publishes waits for sync_always",
    why="With sync_always, every write waits for the disk, which allows some hundred to some thousand messages a "
    "second.",
    cure="Use three replicas with server.jetstream.sync_interval: 10s and without sync_always "
    f"{RENDER}. Or publish with app.notify_together, which waits for the disk once for all its notifications, and "
    "accept the finding. app.notify_many waits for each notification.",
)
def slow_disk(stream: StreamInfo, facts: Facts) -> Iterator[Found]:
    """The check warns from 500 messages a second."""
    flushing = {one.name for one in facts.monitored if one.varz.jetstream.config.sync_always}
    before = facts.before.streams.get(stream.name, stream)
    rate = (stream.last_sequence - before.last_sequence) / facts.elapsed_seconds
    keepers = stream.cluster.members or {facts.server.name}
    if keepers & flushing and stream.config.storage == "file" and rate > HOT_PER_SECOND:
        yield f"{rate:.0f} messages a second, each flushed before its acknowledgement"


@declare("JS055", State.FAIL, needs=("monitoring", "streams")).says(
    "Personal data is encrypted on the disk",
    why="A stream with the metadata pii=true is in plain text: everybody who has the disk, or a copy of it, can read "
    "its messages.",
    cure="Move the stream to a store that is encrypted from the start (docs/server.md#another-key, `aviso-workers "
    "server rotate-key`). Do not give a key to a server with an existing store: it loses consumers and streams.",
)
def not_encrypted(facts: Facts) -> Iterator[Finding]:
    """The result is SKIP for servers on other machines."""
    marked = [stream for stream in facts.streams.values() if stream.config.metadata.get("pii") == "true"]
    for stream in marked:
        for one in facts.monitored:
            described = list(one.disk.glob(f"*/streams/{stream.name}/meta.inf")) if one.disk else []
            if any(not file.with_name("meta.key").exists() for file in described):
                yield Finding(stream=stream.name, found=f"pii=true, in plain text on the disk of {one.name}")
            elif not described and one.name in (stream.cluster.members or {one.name}):
                found = f"pii=true, and the disk of {one.name} is not on this machine"
                yield Finding(stream=stream.name, found=found, state=State.SKIP)


@declare("JS056", each=each_server).says(
    "Clients read fast enough, and connections are left",
    why="The server cuts off a client that reads too slowly, and the client has to connect again. At max_connections, "
    "no further client can connect.",
    cure="The server's log names the slow client (`Slow Consumer Detected`): give it more processes or smaller pulls. "
    f"If connections run out, raise server.max_connections {RENDER_AND_RELOAD}.",
)
def slow_clients(one: Monitored, facts: Facts) -> Iterator[Found]:
    """The check warns when a server cut off slow clients within the last day, or uses four fifths of its
    `max_connections`. A server remembers only the last 10,000 ended connections.
    """
    varz = one.varz
    recent = [each for each in one.cut_off if each.stop and facts.now - each.stop < A_WHILE]
    if recent:
        last = recent[0]
        yield (
            f"{len(recent)} slow clients were cut off within a day, the last one "
            f"{last.name or 'without a name'} at {last.ip}"
        )
    if varz.max_connections and varz.connections > NEARLY_ALL * varz.max_connections:
        yield f"{varz.connections} of {varz.max_connections} connections are used"


@declare("JS075", needs=()).says(
    "JetStream's API is strict",
    why="A server that is not strict ignores unknown fields of a request. A user who may publish to one stream can "
    "then have the server purge other streams of the account, and delete their messages, by the reply subject of a "
    "publish.",
    cure="Set `strict: true` in the block jetstream of nats-server.conf, as `aviso-workers server render` does, and "
    "restart the server. nats-server 2.12 and newer are strict by default.",
)
def not_strict(facts: Facts) -> Iterator[Finding]:
    """The check sends a request for the names of streams with an unknown field, which changes nothing, and looks at
    `/varz` of each server of `--monitor`. It is silent where clients have no user: then JS047 counts
    ([Servers](../support.md#servers)).
    """
    settings = facts.config.notification_backend.jetstream
    if not any(has_user(settings, url) for url in settings.servers):
        return  # everybody may purge streams: JS047
    lax = [one.name for one in facts.monitored if not (one.without_jetstream or one.varz.jetstream.config.strict)]
    if facts.is_strict is False and not lax:
        lax = [facts.server.name]
    for name in lax:
        yield Finding(place=name, found="requests with unknown fields are answered")
    if facts.is_strict is None and not lax:
        yield Finding(found="the server does not answer a request for the names of streams", state=State.SKIP)


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
    for stream, found in replicas.diverged(facts.looks):
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
