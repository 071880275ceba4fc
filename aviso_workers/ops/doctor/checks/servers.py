"""Checks of the nats-servers: their health, their disks, and the settings with which they were started."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta
from functools import partial

from aviso_workers.jetstream.fields import SECOND
from aviso_workers.ops.doctor import durability
from aviso_workers.ops.doctor.facts import Facts
from aviso_workers.ops.doctor.judgements import Check, Finding, State, check
from aviso_workers.ops.doctor.monitoring_port import LOOPBACK

__all__ = ["CHECKS"]

CHECKS: list[Check] = []
declare = partial(check, CHECKS, needs=("monitoring",))

SHORT_INTERVAL = 10 * SECOND
HOT_PER_SECOND = 500
TEMPORARY = ("/tmp/", "/var/tmp/", "/dev/shm/")
NEARLY_ALL = 0.8
NEARLY_FULL = 0.95
A_WHILE = timedelta(days=1)
LITTLE_FREE = 2**30
"""Bytes: of a disk that is nearly full, that is too little for large disks too."""
RUNBOOK = "docs/operations.md#a-disk-is-full"
RESTART = (
    "free space on the disk of {place}, then restart that server: it does not try again by itself, and until then it "
    f"stores nothing in these streams ({RUNBOOK})"
)
MORE_SPACE = (
    "raise jetstream.max_file_store (where it is not set, the server took three quarters of what was free when it "
    f"started) and restart the server {{place}}, or free space in streams ({RUNBOOK})"
)
SYNC = "in the section `server`, then `aviso-workers server render --profile production` and a restart"


@declare(
    "JS042",
    "All configured streams are there",
    why="a server that was started with the wrong encryption key, or on another store_dir, has none and goes on; to "
    "make a stream anew then erases the one that cannot be read",
    cure="stop the server before a worker makes {stream}, and check its key, its store_dir and its log (`could not "
    "be recovered`). Only if the stream was never there: `aviso-workers streams apply`",
    severity=State.FAIL,
    needs=("streams",),
)
def missing_streams(facts: Facts) -> Iterator[Finding]:
    for configured, plan in facts.plans.items():
        if not plan.exists and plan.stream not in facts.after.unavailable and "streams" not in facts.unknown:
            yield Finding(stream=plan.stream, found=f"the stream of {configured} does not exist")


@declare(
    "JS069",
    "Servers serve all that is in their stores",
    why="a server that cannot read a stream or a consumer goes on without it and says so in its log only; to make one "
    "anew destroys it",
    cure="stop the server {place} before it is made anew, and check its key, its accounts and its log",
    severity=State.FAIL,
)
def unserved(facts: Facts) -> Iterator[Finding]:
    for one in facts.monitored:
        if one.unserved:
            yield Finding(place=one.name, found=one.unserved)
        elif one.disk is None:
            found = f"its {one.varz.jetstream.config.store_dir} is not on this machine"
            yield Finding(place=one.name, found=found, state=State.SKIP)


@declare(
    "JS043",
    "A power cut loses little",
    why="a nats-server acknowledges before it flushes: what is in between is gone with the machine",
    cure="set jetstream.sync_always: true, or three replicas and sync_interval: 10s, " + SYNC,
    needs=("monitoring", "streams"),
)
def power_cut(facts: Facts) -> Iterator[Finding]:
    for each in durability.of_streams(facts):
        if each.in_memory or each.unflushed == durability.NEVER:
            continue
        if each.unflushed == durability.UNKNOWN:
            if "monitoring" not in facts.unknown:  # that is reported once
                yield Finding(stream=each.stream, found="not all servers that keep it are seen", state=State.SKIP)
        elif each.replicas == 1 or each.unflushed > SHORT_INTERVAL:
            is_bad = facts.scope.production and each.replicas == 1 and each.unflushed > SHORT_INTERVAL
            yield Finding(stream=each.stream, found=str(each), state=State.FAIL if is_bad else None)


@declare(
    "JS044",
    "Servers are healthy, and agree on a leader",
    why="without a leader of the meta group no stream and no consumer can be made, changed or listed",
    cure="the server's log says why; start what is down (`aviso-workers server start`, or the site's supervisor): "
    "of three servers, two are needed",
    severity=State.FAIL,
    needs=("account", "monitoring", "streams"),
)
def health(facts: Facts) -> Iterator[Finding]:
    for need in ("account", "streams"):
        if need in facts.unknown and need not in facts.denied:
            yield Finding(place="JetStream's API", found=facts.unknown[need])
    for url, why in facts.unreachable.items():
        yield Finding(place=url, found=why)
    for one in facts.monitored:
        meta = one.varz.jetstream.meta
        if one.health != "ok":
            yield Finding(place=one.name, found=one.health, cure=RESTART if one.cannot_write else "")
        if meta is None:
            continue
        if not meta.leader:
            yield Finding(place=one.name, found="the meta group has no leader")
        for peer in meta.followers if meta.leader == one.name else ():  # only the leader knows of the others
            if peer.offline or not peer.current:
                yield Finding(place=peer.name, found="is down, or behind in the meta group")


@declare(
    "JS071",
    "The doctor may ask for what it judges",
    why="what the server denies to the doctor's user is not examined: the checks that need it are skipped",
    cure="run the doctor as a user with the rights that `aviso-workers server render --role operator` prints",
    severity=State.FAIL,
    needs=(),
)
def rights(facts: Facts) -> Iterator[Finding]:
    for need, denied in facts.denied.items():
        yield Finding(place=need.replace("_", " "), found=denied)


@declare(
    "JS045",
    "Replicas are in different places",
    why="two replicas in one zone are lost together, and take the majority of three with them",
    cure="`aviso-workers streams remove-peer {stream} SERVER` moves one replica to a zone that has none",
    severity=State.FAIL,
    needs=("monitoring", "streams"),
)
def same_place(facts: Facts) -> Iterator[Finding]:
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


@declare(
    "JS049",
    "The cluster is whole, and every server has a directory of its own",
    why="a server without routes to the others counts for nothing, and two on one directory destroy each other's files",
    cure="start what is down (JS044). Where all servers run, compare their server.cluster.routes, user and password; "
    "give each its own jetstream.store_dir",
    severity=State.FAIL,
)
def split(facts: Facts) -> Iterator[Finding]:
    for one in facts.monitored:
        meta = one.varz.jetstream.meta
        size = meta.cluster_size if meta and not one.varz.gateway.name else 0  # through gateways there are others in it
        expected = max(size, len(facts.config.server.cluster.routes) if facts.config.server.cluster else 0)
        if len(one.routes) + 1 < expected:
            connected = ", ".join(sorted(one.routes)) or "no other server"
            yield Finding(place=one.name, found=f"connected to {connected}, in a cluster of {expected}")
    shared = defaultdict[tuple[str, str], list[str]](list)
    for one in facts.monitored:
        if one.disk or one.machine not in LOOPBACK:  # else the port was forwarded to here
            shared[one.machine, one.varz.jetstream.config.store_dir].append(one.name)
    for (_, directory), names in shared.items():
        if directory and len(names) > 1:
            yield Finding(place=" and ".join(names), found=f"share {directory}")


@declare(
    "JS062",
    "Servers are an odd number",
    why="a majority of four is three, so a fourth server is one more that can fail, and the cluster withstands the "
    "loss of one, as three do",
    cure="add a server, or take one out of the cluster",
)
def even_servers(facts: Facts) -> Iterator[Finding]:
    sizes = {meta.cluster_size for one in facts.monitored if (meta := one.varz.jetstream.meta)}
    for size in sizes:
        if size and size % 2 == 0:
            yield Finding(found=f"{size} servers agree on streams and consumers")


@declare(
    "JS052",
    "Streams are in a directory that stays",
    why="directories for temporary files are emptied when a machine starts, or when it needs space",
    cure="stop the server, move the directory, and set jetstream.store_dir " + SYNC,
    severity=State.FAIL,
    production=True,
)
def temporary(facts: Facts) -> Iterator[Finding]:
    for one in facts.monitored:
        if (directory := one.varz.jetstream.config.store_dir).startswith(TEMPORARY):
            yield Finding(place=one.name, found=f"store_dir {directory}")


@declare(
    "JS053",
    "The disk has space for what may be stored",
    why="a server that cannot write a message stores nothing more in that stream, also after there is space again",
    cure="a larger disk, two to three times max_file_store, or a lower jetstream.max_file_store " + SYNC,
)
def small_disk(facts: Facts) -> Iterator[Finding]:
    for one in facts.monitored:
        config, stored = one.varz.jetstream.config, one.varz.jetstream.stats.storage
        if config.max_storage and stored >= NEARLY_FULL * config.max_storage:
            found = f"{stored} of {config.max_storage} bytes that the server may store are stored"
            yield Finding(place=one.name, found=found, state=State.FAIL, cure=MORE_SPACE)
        if one.disk is None:
            yield Finding(place=one.name, found=f"its {config.store_dir} is not on this machine", state=State.SKIP)
            continue
        disk = shutil.disk_usage(one.disk)
        if disk.free <= (1 - NEARLY_FULL) * disk.total and disk.free < LITTLE_FREE:
            found = f"{disk.free} of {disk.total} bytes are free in {config.store_dir}"
            yield Finding(place=one.name, found=found, state=State.FAIL, cure=RESTART)
        elif disk.free < config.max_storage - stored:
            found = (
                f"{config.max_storage - stored} bytes may still come, and {disk.free} are free in {config.store_dir}"
            )
            yield Finding(place=one.name, found=found)


@declare(
    "JS054",
    "Flushing every write does not hold up hot streams",
    why="with sync_always every write waits for the disk: some hundred to some thousand messages a second",
    cure="publish in batches (app.notify_many), or use three replicas with sync_interval: 10s " + SYNC,
    needs=("monitoring", "streams"),
)
def slow_disk(facts: Facts) -> Iterator[Finding]:
    flushing = {one.name for one in facts.monitored if one.varz.jetstream.config.sync_always}
    for name, stream in facts.streams.items():
        before = facts.before.streams.get(name, stream)
        rate = (stream.last_sequence - before.last_sequence) / facts.elapsed_seconds
        keepers = stream.cluster.members or {facts.server.name}
        if keepers & flushing and stream.config.storage == "file" and rate > HOT_PER_SECOND:
            yield Finding(stream=name, found=f"{rate:.0f} messages a second, each flushed")


@declare(
    "JS055",
    "Personal data is encrypted on the disk",
    why="whoever has the disk, or a copy of it, can read what metadata pii=true marks",
    cure="move its streams to a store that is encrypted from the start (docs/server.md#another-key, `aviso-workers "
    "server rotate-key`): a server that encrypts the store that it has loses consumers and streams",
    severity=State.FAIL,
    needs=("monitoring", "streams"),
)
def not_encrypted(facts: Facts) -> Iterator[Finding]:
    marked = [stream for stream in facts.streams.values() if stream.config.metadata.get("pii") == "true"]
    for stream in marked:
        for one in facts.monitored:
            described = list(one.disk.glob(f"*/streams/{stream.name}/meta.inf")) if one.disk else []
            if any(not file.with_name("meta.key").exists() for file in described):
                yield Finding(stream=stream.name, found=f"pii=true, in plain text on the disk of {one.name}")
            elif not described and one.name in (stream.cluster.members or {one.name}):
                found = f"pii=true, and the disk of {one.name} is not on this machine"
                yield Finding(stream=stream.name, found=found, state=State.SKIP)


@declare(
    "JS056",
    "Servers keep up with their clients",
    why="a slow consumer was cut off and has to connect again; at max_connections no client can connect",
    cure="the server's log names the slow client (`Slow Consumer Detected`): give it more processes or smaller pulls. "
    "Raise server.max_connections where that is what runs out",
)
def slow_clients(facts: Facts) -> Iterator[Finding]:
    for one in facts.monitored:
        varz = one.varz
        recent = [each for each in one.cut_off if each.stop and facts.now - each.stop < A_WHILE]
        if recent:
            last = recent[0]
            found = (
                f"{len(recent)} slow clients cut off within a day, the last one {last.name or 'nameless'} at {last.ip}"
            )
            yield Finding(place=one.name, found=found)
        if varz.max_connections and varz.connections > NEARLY_ALL * varz.max_connections:
            yield Finding(place=one.name, found=f"{varz.connections} of {varz.max_connections} connections")
