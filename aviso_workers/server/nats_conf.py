"""nats-server.conf, rendered from the section `server` of our configuration.

`render` is pure but for the files with keys; `write` has nats-server itself check the text (`-t`) before the file is
in place. Every line of the text knows the key path that it came from, so that what nats-server refuses is refused
with the place in our YAML. The file holds passwords and keys as they are: it is its owner's alone (0600), and none of
them is in a message.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from msgspec import Struct

from aviso_workers.aviso.literals import Duration
from aviso_workers.config import Secret, Server
from aviso_workers.config.nats_server import (
    Account,
    AccountJetStream,
    Cluster,
    Encryption,
    Gateways,
    LeafNodes,
    Permissions,
    Remote,
    ServerJetStream,
    ServerLimits,
    ServerTls,
    Subjects,
    User,
)
from aviso_workers.config.secrets import HIDDEN
from aviso_workers.errors import ConfigError
from aviso_workers.server import find_binary, profiles
from aviso_workers.server.accounts import Connected
from aviso_workers.server.profiles import Choice

T = TypeVar("T")

CHECK_SECONDS = 30
NO_POSITION = 1
"""The line that nats-server names where it knows none; ours is a comment."""


class Rendered(Struct, frozen=True, kw_only=True):
    """A rendered nats-server.conf."""

    lines: tuple[tuple[str, str], ...]
    """Each line with the key path that it came from."""
    secrets: tuple[str, ...]
    """Secrets in the lines, which must be nowhere else."""

    @property
    def text(self) -> str:
        return "".join(f"{line}\n" for line, _ in self.lines)

    def without_secrets(self, text: str) -> str:
        for secret in sorted(self.secrets, key=len, reverse=True):
            text = text.replace(secret, HIDDEN)
        return text


def render(
    server: Server,
    *,
    origins: Mapping[str, str],
    choices: tuple[Choice, ...] = (),
    run: Mapping[str, str] | None = None,
) -> Rendered:
    """Return the nats-server.conf of a configuration.

    `origins` has the place of each key path that was set, `choices` become comments at its head, `run` are further
    settings of the process, such as pid_file.

    Raises ConfigError where a file with a key cannot be read, or a text holds what no configuration can.
    """
    conf = _Conf()
    conf.comment("Written by aviso-workers from the section `server` of its configuration: change it there.")
    for choice in choices:
        conf.comment(f"{choice.key} {choice.value}: {choice.why}.")
    _server(conf, server)
    for key, value in (run or {}).items():
        conf.put(key, value, "server")
    if conf.mistakes:
        raise ConfigError(profiles.located(path, problem, origins=origins) for path, problem in conf.mistakes)
    return Rendered(lines=tuple(conf.lines), secrets=tuple(conf.secrets))


def accounts(server: Server) -> str:
    """Return the accounts alone, as they are in a nats-server.conf; `accounts.connected` has made them."""
    conf = _Conf()
    _accounts(conf, server)
    return "".join(f"{line}\n" for line, _ in conf.lines)


def write(rendered: Rendered, path: Path, *, origins: Mapping[str, str]) -> None:
    """Put the file in place, readable by its owner only, once nats-server has found nothing wrong with it.

    `origins` has the place of each key path that was set. Raises ConfigError with what nats-server refuses, and
    ServerProcessError where there is no nats-server to ask.
    """
    binary = find_binary()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # 0600 from its first byte
    except OSError as error:
        raise ConfigError([f"cannot write {path}: {error.strerror}"]) from error
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(rendered.text)
        checked = subprocess.run(
            [binary, "-t", "-c", name], capture_output=True, text=True, errors="replace", timeout=CHECK_SECONDS
        )
        if checked.returncode:
            raise ConfigError(_refusals(rendered, checked.stderr, file=name, origins=origins))
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _refusals(rendered: Rendered, said: str, *, file: str, origins: Mapping[str, str]) -> Iterator[str]:
    for line in said.strip().splitlines():
        found = re.fullmatch(rf"(?:nats-server: )?{re.escape(file)}:(\d+):\d+: (.*)", line)
        number, problem = (int(found[1]), found[2]) if found else (NO_POSITION, line)
        path = rendered.lines[number - 1][1] if number != NO_POSITION else _named_in(problem, origins)
        refused = f"is refused by nats-server: {rendered.without_secrets(problem)}"
        yield profiles.located(path, refused, origins=origins)


def _named_in(problem: str, paths: Mapping[str, str]) -> str:
    """Return the key path with the last name that nats-server mentions, for a mistake without a line."""
    named = [path for path in paths if path.startswith("server.") and path.rpartition(".")[2] in problem.split()]
    return max(named, key=len, default="server")


class _Conf:
    """The lines of a nats-server.conf, while it is rendered."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.secrets: list[str] = []
        self.mistakes: list[tuple[str, str]] = []
        self._indent = ""

    def comment(self, text: str) -> None:
        self.lines.append((f"# {text}", "server"))

    def put(self, key: str, value: Any, path: str) -> None:
        """Add one setting; None and an empty list are left out."""
        if isinstance(value, tuple):
            for i, each in self.each(f"{key}:", path, enumerate(value)):
                self._line(self._value(each, f"{path}[{i}]"), f"{path}[{i}]")
        elif value is not None:
            self._line(f"{key}: {self._value(value, path)}", path)

    def settings(self, struct: Struct, path: str, *names: str) -> None:
        """Add settings that have the same name in both configurations; all of the Struct where no names are given."""
        for name in names or struct.__struct_fields__:
            self.put(name, getattr(struct, name), f"{path}.{name}")

    @contextmanager
    def block(self, key: str, path: str, ends: str = "{}") -> Iterator[None]:
        self._line(f"{key} {ends[0]}".lstrip(), path)
        self._indent += "  "
        yield
        self._indent = self._indent[2:]
        self._line(ends[1], path)

    def each(self, key: str, path: str, items: Iterable[T]) -> Iterator[T]:
        """Yield what a list consists of, each to be added as a block of its own; nothing is added for no items."""
        if found := tuple(items):
            with self.block(key, path, "[]"):
                yield from found

    def file(self, key: str, name: str | None, path: str) -> None:
        """Add a file by its absolute path, so that nats-server finds it wherever it is started; None is left out."""
        if name is not None and not os.path.isfile(name):
            # The name is not repeated: a key may stand where its file should.
            self.mistakes.append((path, f"must name a file that exists, as seen from {os.getcwd()}"))
        self.put(key, name and os.path.abspath(name), path)

    def quoted(self, text: str, path: str) -> str:
        if not text.isprintable():
            # It is not repeated: it may be a password.
            self.mistakes.append((path, "must not have a line break or another control character in it"))
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

    def secret_in(self, name: str, path: str) -> Secret | None:
        """Return the content of a file as a secret, without the line break at its end."""
        try:
            return Secret(Path(name).read_text(encoding="utf-8").strip())
        except (OSError, ValueError):
            # The name is not repeated: a key may stand where its file should.
            self.mistakes.append((path, f"must name a file with a key that can be read, as seen from {os.getcwd()}"))
            return None

    def _line(self, text: str, path: str) -> None:
        self.lines.append((self._indent + text, path))

    def _value(self, value: Any, path: str) -> str:
        match value:
            case bool():
                return "true" if value else "false"
            case Duration():
                return f'"{int(value)}s"'
            case int():
                return f"{int(value)}"
            case Secret():
                self.secrets.append(value.reveal())
                return self.quoted(value.reveal(), path)
            case _:
                return self.quoted(value, path)


def _server(conf: _Conf, server: Server) -> None:
    conf.settings(server, "server", "server_name", "server_tags", "host")
    conf.put("port", server.port or -1, "server.port")
    http = f"{server.monitoring.host}:{server.monitoring.port or -1}"
    conf.put("http", http, "server.monitoring")
    limits = ("max_connections", "max_subscriptions", "max_payload", "lame_duck_grace_period", "lame_duck_duration")
    conf.settings(server, "server", *limits)
    _jetstream(conf, server.jetstream)
    _optional(conf, server.tls, "server.tls", _tls)
    _accounts(conf, server)
    conf.put("system_account", server.system_account, "server.system_account")
    _optional(conf, server.cluster, "server.cluster", _cluster)
    if server.gateways is not None and server.cluster is not None:
        _gateways(conf, server.gateways, server.cluster)
    _optional(conf, server.leafnodes, "server.leafnodes", _leaf_nodes)


def _optional(conf: _Conf, section: Any, path: str, put: Callable[[_Conf, Any, str], None]) -> None:
    if section is not None:
        put(conf, section, path)


def _jetstream(conf: _Conf, jetstream: ServerJetStream) -> None:
    path = "server.jetstream"
    with conf.block("jetstream", path):
        store_dir = jetstream.store_dir
        conf.put("store_dir", store_dir and os.path.abspath(store_dir), f"{path}.store_dir")
        conf.put("strict", True, path)  # by default only from 2.12 on; see docs/support.md
        conf.settings(jetstream, path, "max_memory_store", "max_file_store", "domain")
        if jetstream.sync_always:
            conf.put("sync_interval", "always", f"{path}.sync_always")
        conf.settings(jetstream, path, "sync_interval", "unique_tag", "max_outstanding_catchup")
        if jetstream.limits != ServerLimits():
            with conf.block("limits", f"{path}.limits"):
                conf.settings(jetstream.limits, f"{path}.limits")
        _optional(conf, jetstream.encryption, f"{path}.encryption", _encryption)


def _encryption(conf: _Conf, encryption: Encryption, path: str) -> None:
    conf.settings(encryption, path, "cipher")
    if encryption.key_file is not None:
        conf.put("key", conf.secret_in(encryption.key_file, f"{path}.key_file"), f"{path}.key_file")
    else:
        conf.put("key", encryption.key, f"{path}.key")


def _tls(conf: _Conf, tls: ServerTls, path: str) -> None:
    with conf.block("tls", path):
        for key in ("cert_file", "key_file", "ca_file"):
            conf.file(key, getattr(tls, key), f"{path}.{key}")
        conf.settings(tls, path, "verify")


def _accounts(conf: _Conf, server: Server) -> None:
    if server.accounts:
        with conf.block("accounts", "server.accounts"):
            for name, account in server.accounts.items():
                _account(conf, account, name=name, is_system=name == server.system_account)


def _account(conf: _Conf, account: Account, *, name: str, is_system: bool) -> None:
    path = f"server.accounts.{name}"
    with conf.block(conf.quoted(name, path), path):
        if not is_system:
            _account_jetstream(conf, account.jetstream, f"{path}.jetstream")
        if isinstance(account, Connected):
            for subject, importers in conf.each("exports:", path, account.exports.items()):
                with conf.block("", path):
                    conf.put("service", subject, path)
                    conf.put("accounts", importers, path)
            _imports(conf, account, path)
        with conf.block("users:", f"{path}.users", "[]"):
            for user_name, user in account.users.items():
                _user(conf, user, name=user_name, path=f"{path}.users.{user_name}")


def _imports(conf: _Conf, account: Connected, path: str) -> None:
    if not account.imports:
        return
    for service in conf.each("imports:", f"{path}.publishes", account.imports):
        with conf.block("", f"{path}.publishes"):
            with conf.block("service:", f"{path}.publishes"):
                conf.put("account", account.publishes_to, f"{path}.publishes_to")
                conf.put("subject", service.subject, f"{path}.publishes")
            conf.put("to", service.imported, f"{path}.publishes")
    with conf.block("mappings", f"{path}.publishes"):
        for service in account.imports:
            for asked in service.asked:
                conf.put(conf.quoted(asked, path), service.imported, f"{path}.publishes")


def _account_jetstream(conf: _Conf, limits: AccountJetStream, path: str) -> None:
    if not limits.enabled:
        conf.put("jetstream", False, f"{path}.enabled")
        return
    with conf.block("jetstream", path):
        conf.put("max_mem", limits.max_memory, f"{path}.max_memory")
        conf.put("max_file", limits.max_storage, f"{path}.max_storage")
        others = ("max_streams", "max_consumers", "max_ack_pending", "max_bytes_required")
        conf.settings(limits, path, *others, "memory_max_stream_bytes", "disk_max_stream_bytes")


def _user(conf: _Conf, user: User, *, name: str, path: str) -> None:
    with conf.block("", path):
        if user.nkey is not None:
            conf.put("nkey", user.nkey, f"{path}.nkey")
        else:
            conf.put("user", name, path)
            conf.put("password", user.password, f"{path}.password")
        if user.permissions != Permissions():
            _permissions(conf, user.permissions, f"{path}.permissions")


def _permissions(conf: _Conf, permissions: Permissions, path: str) -> None:
    with conf.block("permissions", path):
        for side in ("publish", "subscribe"):
            subjects: Subjects = getattr(permissions, side)
            if subjects != Subjects():
                with conf.block(side, f"{path}.{side}"):
                    conf.settings(subjects, f"{path}.{side}")
        if permissions.allow_responses:
            conf.put("allow_responses", True, f"{path}.allow_responses")


def _cluster(conf: _Conf, cluster: Cluster, path: str) -> None:
    with conf.block("cluster", path):
        conf.settings(cluster, path, "name", "host", "compression")
        conf.put("port", cluster.port or -1, f"{path}.port")
        login = _shared_login(conf, cluster, path)
        conf.put("routes", tuple(f"nats-route://{login}{route}" for route in cluster.routes), f"{path}.routes")
        _optional(conf, cluster.tls, f"{path}.tls", _tls)


def _gateways(conf: _Conf, gateways: Gateways, cluster: Cluster) -> None:
    path = "server.gateways"
    with conf.block("gateway", path):
        conf.put("name", cluster.name, "server.cluster.name")
        conf.settings(gateways, path, "host")
        conf.put("port", gateways.port or -1, f"{path}.port")
        login = _shared_login(conf, gateways, path)
        conf.put("reject_unknown_cluster", True, path)
        for name, urls in conf.each("gateways:", f"{path}.remotes", gateways.remotes.items()):
            remote = f"{path}.remotes.{name}"
            with conf.block("", remote):
                conf.put("name", name, remote)
                conf.put("urls", tuple(f"nats://{login}{url}" for url in urls), remote)
        _optional(conf, gateways.tls, f"{path}.tls", _tls)


def _shared_login(conf: _Conf, section: Cluster | Gateways, path: str) -> str:
    """Add the login of a section where it has one, and return what precedes the host in the URLs of other servers."""
    if section.user is None or section.password is None:
        return ""
    with conf.block("authorization", path):
        conf.settings(section, path, "user", "password")
    return _login(conf, section.user, section.password)


def _leaf_nodes(conf: _Conf, leaf_nodes: LeafNodes, path: str) -> None:
    with conf.block("leafnodes", path):
        if leaf_nodes.port is not None:
            conf.settings(leaf_nodes, path, "host", "compression")
            conf.put("port", leaf_nodes.port or -1, f"{path}.port")
            _optional(conf, leaf_nodes.tls, f"{path}.tls", _tls)
        for name, remote in conf.each("remotes:", f"{path}.remotes", leaf_nodes.remotes.items()):
            _remote(conf, remote, f"{path}.remotes.{name}")


def _remote(conf: _Conf, remote: Remote, path: str) -> None:
    with conf.block("", path):
        login = ""
        if remote.user is not None and remote.password is not None:
            login = _login(conf, remote.user, remote.password)
        scheme = "nats-leaf" if remote.ca_file is None else "tls"
        conf.put("urls", tuple(f"{scheme}://{login}{url}" for url in remote.urls), f"{path}.urls")
        conf.settings(remote, path, "account")
        if remote.ca_file is not None:
            with conf.block("tls", path):
                conf.file("ca_file", remote.ca_file, f"{path}.ca_file")


def _login(conf: _Conf, user: str, password: Secret) -> str:
    """Return a login as it precedes the host in a URL; nats-server has no other place for it."""
    escaped = quote(password.reveal(), safe="")
    conf.secrets += [password.reveal(), escaped]
    return f"{quote(user, safe='')}:{escaped}@"
