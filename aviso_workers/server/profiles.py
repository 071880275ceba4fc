"""Profiles of a server for production and for development: they fill in settings, and say which risks remain.

`choose` is called before `nats_conf` writes a nats-server.conf. A profile fills in what the configuration leaves open
and says what follows from it; settings that only the site can know are required in production. What is configured is
never changed.

The one choice that loses data is when files are flushed: a nats-server acknowledges a message before that. What is
in between survives the end of the process, but not a power cut; with several copies, not a cut that takes a majority
of them at once.

Mistakes in the section that its types do not show are looked for here, before a server is rendered or run; a worker
that shares the file does not look.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from typing import Literal

from msgspec import Struct, structs

from aviso_workers.aviso.literals import Duration, Size
from aviso_workers.config import Config, Server
from aviso_workers.config.nats_server import AccountJetStream, Cluster, Gateways, LeafNodes, ServerJetStream
from aviso_workers.config.settings import is_loopback
from aviso_workers.errors import ConfigError
from aviso_workers.server import accounts

Profile = Literal["production", "development"]

SERVER_SYNC_INTERVAL = Duration(120)
CLUSTER_SYNC_INTERVAL = Duration(10)
COPIES = 3
TEMPORARY = ("/tmp/", "/var/tmp/")
LARGEST_PAYLOAD = 64 * 2**20


def located(path: str, problem: str, *, origins: Mapping[str, str]) -> str:
    """Return a sentence on a mistake at a key path, with the place where the key, or the one around it, was set."""
    around = path
    while around and around not in origins:
        around = around.rpartition(".")[0]
    return f"{origins[around]}: {path} {problem}" if around else f"{path} {problem}"


def _mistakes_of(server: Server, given: Container[str]) -> Iterator[tuple[str, str]]:
    """Yield the mistakes as (key path, what is wrong). `given` holds the key paths that were written."""
    yield from _jetstream_mistakes(server)
    yield from _account_mistakes(server)
    yield from _user_mistakes(server)
    yield from _login_mistakes(server, given)
    yield from _gateway_mistakes(server)
    if not re.fullmatch(r"\w[\w.-]*", server.server_name):
        yield "server.server_name", "must be letters, digits, '_', '-' and '.'"
    if (server.max_payload or 0) > LARGEST_PAYLOAD:
        yield "server.max_payload", "must be <= 64Mi"
    duration, grace = server.lame_duck_duration, server.lame_duck_grace_period
    if grace is not None and grace >= (120 if duration is None else duration):
        yield "server.lame_duck_grace_period", "must be shorter than lame_duck_duration"
    addresses = (
        {f"server.cluster.routes[{i}]": url for i, url in enumerate(server.cluster.routes)} if server.cluster else {}
    )
    for name, urls in server.gateways.remotes.items() if server.gateways else ():
        addresses |= {f"server.gateways.remotes.{name}[{i}]": url for i, url in enumerate(urls)}
    for name, remote in server.leafnodes.remotes.items() if server.leafnodes else ():
        addresses |= {f"server.leafnodes.remotes.{name}.urls[{i}]": url for i, url in enumerate(remote.urls)}
    for path, address in addresses.items():
        if not _is_address(address):
            # It is not repeated: there may be a password in it.
            yield path, "must be host:port; user and password have keys of their own"


def _jetstream_mistakes(server: Server) -> Iterator[tuple[str, str]]:
    jetstream = server.jetstream
    path = "server.jetstream"
    if jetstream.sync_always and jetstream.sync_interval is not None:
        yield f"{path}.sync_interval", "must not be combined with sync_always: keep one"
    if jetstream.sync_interval == 0:
        yield f"{path}.sync_interval", "must be > 0; sync_always flushes every write"
    if jetstream.domain and set(jetstream.domain) & set(" .*>"):
        yield f"{path}.domain", "must be one token of a subject, without blanks, '.', '*' and '>'"
    if jetstream.limits.duplicate_window == 0:
        yield f"{path}.limits.duplicate_window", "must be > 0"
    tagged = [tag for tag in server.server_tags if jetstream.unique_tag and tag.startswith(jetstream.unique_tag)]
    if jetstream.unique_tag and len(tagged) != 1:
        yield f"{path}.unique_tag", f"must be the start of one entry of server.server_tags, found {len(tagged)}"
    if not (encryption := jetstream.encryption):
        return
    keys = [key for key in ("key", "key_file") if getattr(encryption, key) is not None]
    if not keys:
        yield f"{path}.encryption", "needs a key_file, or a key, which may stand in the environment"
    for key in keys[1:]:
        yield f"{path}.encryption.{key}", f"must not be combined with {keys[0]}: keep one"


def _account_mistakes(server: Server) -> Iterator[tuple[str, str]]:
    named = {"server.system_account": server.system_account}
    for name, remote in server.leafnodes.remotes.items() if server.leafnodes else ():
        named[f"server.leafnodes.remotes.{name}.account"] = remote.account
        if not remote.urls:
            yield f"server.leafnodes.remotes.{name}.urls", "must not be empty"
    for path, account in named.items():
        if account is not None and account not in server.accounts:
            yield path, f"names no account of server.accounts: {', '.join(server.accounts) or 'there is none'}"
    if server.system_account in server.accounts:
        use = server.accounts[server.system_account or ""].jetstream
        if use != AccountJetStream() and use != AccountJetStream(enabled=False):
            yield f"server.accounts.{server.system_account}.jetstream", "is not for the system account, which has none"


def _user_mistakes(server: Server) -> Iterator[tuple[str, str]]:
    owners: dict[str, str] = {}
    for account, settings in server.accounts.items():
        for name, user in settings.users.items():
            path = f"server.accounts.{account}.users.{name}"
            if (user.password is None) == (user.nkey is None):
                yield path, "needs either a password, which may stand in the environment, or an nkey"
            if user.nkey is None and name in owners:
                yield path, f"is a user of account {owners[name]} already"
            owners.setdefault(name, account)


def _login_mistakes(server: Server, given: Container[str]) -> Iterator[tuple[str, str]]:
    """Yield mistakes of logins between servers: a user without a password, or a password without a user."""
    places = ["server.cluster"] if server.cluster else []
    places += ["server.gateways"] if server.gateways else []
    places += [f"server.leafnodes.remotes.{name}" for name in server.leafnodes.remotes] if server.leafnodes else []
    for path in places:
        has_user, has_password = f"{path}.user" in given, f"{path}.password" in given
        if has_user and not has_password:
            yield f"{path}.user", "needs a password, which may stand in the environment"
        if has_password and not has_user:
            yield f"{path}.password", "needs a user"


def _gateway_mistakes(server: Server) -> Iterator[tuple[str, str]]:
    if server.gateways is None:
        return
    if server.cluster is None:
        yield "server.gateways", "needs server.cluster, whose name it has"
    if not server.gateways.remotes:
        yield "server.gateways.remotes", "must not be empty"
    for name, urls in server.gateways.remotes.items():
        if not urls:
            yield f"server.gateways.remotes.{name}", "must not be empty"


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and not set("@/ ") & set(text)


class Choice(Struct, frozen=True, kw_only=True):
    """A setting that decides about a risk, its value in force, and what follows."""

    key: str
    value: str
    why: str


def choose(config: Config, *, profile: Profile) -> tuple[Server, tuple[Choice, ...]]:
    """Return the server with all settings filled in, and the choices that were made.

    Raises ConfigError with all mistakes in the section, and where production requires more settings.
    """
    server = config.server
    found = [*_mistakes_of(server, config.origins), *accounts.mistakes(config)]
    if not found and profile == "production":
        found = list(_open(config))
    if found:
        raise ConfigError(located(path, problem, origins=config.origins) for path, problem in found)
    if profile == "production":
        chosen = _synced(server.jetstream, alone=server.cluster is None)
    else:
        chosen = structs.replace(
            server.jetstream,
            max_memory_store=server.jetstream.max_memory_store or Size.parse("256Mi"),
            max_file_store=server.jetstream.max_file_store or Size.parse("4Gi"),
            sync_interval=server.jetstream.sync_interval
            or (None if server.jetstream.sync_always else SERVER_SYNC_INTERVAL),
        )
    server = structs.replace(server, jetstream=chosen, accounts=accounts.connected(config))
    return server, (*_durability(config, server), *_open_ports(server))


def _open(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the settings that production requires and the configuration lacks, as (key path, what is wrong)."""
    jetstream, cluster = config.server.jetstream, config.server.cluster
    for key, what in {
        "store_dir": "where the streams are",
        "max_memory_store": "what they may take of the memory",
        "max_file_store": "what they may take of the disk",
    }.items():
        if getattr(jetstream, key) is None:
            yield f"server.jetstream.{key}", f"is missing: in production, say {what}"
    if cluster and "server.server_name" not in config.origins:
        yield "server.server_name", "is missing: in a cluster, each server has a name of its own"
    if cluster and not cluster.routes:
        yield "server.cluster.routes", "is missing: in production, say where the servers of the cluster are"
    if jetstream.store_dir and jetstream.store_dir.startswith(TEMPORARY):
        yield "server.jetstream.store_dir", "must not be in a directory for temporary files in production"


def _synced(jetstream: ServerJetStream, *, alone: bool) -> ServerJetStream:
    if jetstream.sync_always or jetstream.sync_interval is not None:
        return jetstream
    if alone:
        return structs.replace(jetstream, sync_always=True)
    return structs.replace(jetstream, sync_interval=CLUSTER_SYNC_INTERVAL)


def _open_ports(server: Server) -> Iterator[Choice]:
    """Yield the settings by which clients connect without authentication, or data can be read on the network."""
    if not server.accounts:
        yield Choice(key="server.accounts", value="none", why="whoever reaches the port may do everything")
    if server.tls is None and not is_loopback(server.host):
        yield Choice(key="server.tls", value="none", why="passwords and notifications can be read on the network")
    if not is_loopback(server.monitoring.host):
        yield Choice(
            key="server.monitoring.host",
            value=server.monitoring.host,
            why="whoever reaches the port reads the names of streams, consumers, accounts and clients",
        )
    if server.cluster is not None:
        yield from _open_to_servers(server.cluster, "server.cluster")
    if server.gateways is not None:
        yield from _open_to_servers(server.gateways, "server.gateways")
    if server.leafnodes is not None and server.leafnodes.port is not None:
        yield from _open_to_leaf_nodes(server, server.leafnodes)
    for name, remote in server.leafnodes.remotes.items() if server.leafnodes else ():
        if remote.ca_file is None:
            path = f"server.leafnodes.remotes.{name}.ca_file"
            yield Choice(key=path, value="none", why="the password and what passes can be read on the network")


def _open_to_servers(section: Cluster | Gateways, path: str) -> Iterator[Choice]:
    if is_loopback(section.host):
        return
    if section.password is None and not (section.tls and section.tls.verify):
        why = f"whoever reaches port {section.port} joins as a server, and reads and writes in every account"
        yield Choice(key=f"{path}.password", value="none", why=why)
    if section.tls is None:
        yield Choice(key=f"{path}.tls", value="none", why="what servers send each other can be read on the network")


def _open_to_leaf_nodes(server: Server, leaf_nodes: LeafNodes) -> Iterator[Choice]:
    if is_loopback(leaf_nodes.host):
        return
    if not server.accounts:
        why = "whoever reaches the port joins as a leaf node, and may do everything"
        yield Choice(key="server.leafnodes.port", value=str(leaf_nodes.port), why=why)
    if leaf_nodes.tls is None:
        why = "passwords and notifications can be read on the network"
        yield Choice(key="server.leafnodes.tls", value="none", why=why)


def _durability(config: Config, server: Server) -> Iterator[Choice]:
    jetstream = server.jetstream
    alone = server.cluster is None
    if jetstream.sync_always:
        yield Choice(
            key="server.jetstream.sync_always",
            value="true",
            why="nothing that is acknowledged is lost in a power cut; every write waits for the disk",
        )
    else:
        where = "" if alone else " that takes a majority of a stream's copies at once"
        yield Choice(
            key="server.jetstream.sync_interval",
            value=str(jetstream.sync_interval),
            why=f"a power cut{where} loses up to {jetstream.sync_interval} of what is acknowledged",
        )
    replicas = config.notification_backend.jetstream.replicas or 1
    if alone:
        why = "one server: with its disk, the streams are gone"
    elif replicas < COPIES:
        why = f"a stream stands still with its server, and is gone with its disk: {COPIES} copies stand the loss of one"
    else:
        why = f"streams stand the loss of {(replicas - 1) // 2} of the servers that hold them"
    yield Choice(key="notification_backend.jetstream.replicas", value=str(replicas), why=why)
    yield Choice(
        key="server.jetstream.max_file_store",
        value=str(jetstream.max_file_store),
        why="what does not fit is refused; the disk should be two to three times as large",
    )
    yield Choice(
        key="server.jetstream.max_memory_store",
        value=str(jetstream.max_memory_store),
        why="of streams in memory; what does not fit is refused",
    )
