"""Mistakes in the section `server` of a configuration that its types do not show.

`profiles` and `nats_conf` ask before a server is rendered or run; a worker that shares the file does not.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping

from aviso_workers.config import Server
from aviso_workers.config.nats_server import AccountJetStream

LARGEST_PAYLOAD = 64 * 2**20


def located(path: str, problem: str, *, origins: Mapping[str, str]) -> str:
    """Return a sentence on a mistake at a key path, with the place where the key, or the one around it, was set."""
    around = path
    while around and around not in origins:
        around = around.rpartition(".")[0]
    return f"{origins[around]}: {path} {problem}" if around else f"{path} {problem}"


def find(server: Server, given: Container[str]) -> Iterator[tuple[str, str]]:
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
