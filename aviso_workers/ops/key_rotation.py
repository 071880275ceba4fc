"""Rotation of the encryption key of servers that `server start` runs: their streams are moved to new stores.

Called by `server rotate-key`, for servers that are stopped. nats-server loses data where it re-encrypts a store
(`server.store`), so two sets of servers are started on ports that no client knows: one on the stores as they are, with
the key that they have, and one on empty stores beside them, with the encryption of the configuration. Every stream of
every account is copied and compared (`server_copies`), both sets are stopped, and the new stores take the places of the
old ones (`server.store_swap`). The old ones stay on the disk under another name.

A command that is killed before that leaves the old stores as they were; what was begun beside them is removed the next
time.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import cast

import anyio
from msgspec import Struct, structs

from aviso_workers.backends import Admin, open_backend
from aviso_workers.config import Config, JetStream, NotificationBackend, Secret, Server, ServerUrls
from aviso_workers.config.nats_server import Account, Cipher, Cluster, Encryption, Monitoring, User
from aviso_workers.errors import BackupError, ServerProcessError
from aviso_workers.ops import server_copies
from aviso_workers.server import processes, profiles, store, store_swap
from aviso_workers.server.processes import Node
from aviso_workers.server.readiness import Tell
from aviso_workers.server.store import GLOBAL_ACCOUNT, Asset
from aviso_workers.server.store_swap import Replacement

NEW, PREVIOUS = "jetstream.new", "jetstream.previous"
"""Directories beside a store: the one that is filled, and the start of the name of the one that was replaced."""
USER = "aviso-workers-rotate-key"


class _User(Struct, frozen=True):
    """The user of an account with which its streams are moved."""

    account: str
    name: str | None = None
    password: Secret | None = None


def rotate(config: Config, *, previous_key_file: Path | None, directory: Path, nodes: int, tell: Tell) -> list[Path]:
    """Move the streams of stopped servers to stores with the encryption of the configuration, and start them. Return
    the stores as they were, which only the operator removes.

    `previous_key_file` has the key of the stores as they are; None where they are not encrypted. `tell` is called with
    a line for each stream, and while servers start. Where an earlier call was killed after it had decided for the new
    stores, that is finished and nothing is moved.

    Raises ServerProcessError where the servers run, a store is missing, or a server does not serve all that is in its
    store, `BackupError` and `BackendError` where a stream cannot be copied as it is, and ConfigError. The stores are as
    they were then.
    """
    server, _ = profiles.choose(config, profile="development")
    with processes.alone(directory):
        replaced = store_swap.finish(directory)
        if not replaced:
            stores = processes.stores(server, directory=directory, nodes=nodes)
            _require_stopped(directory, stores)
            store_swap.begin(
                directory, _move(config, server, stores, previous_key_file, directory=directory, tell=tell)
            )
            replaced = store_swap.finish(directory)
    for each in replaced:
        tell(f"{each.place} is the new store, {each.previous} the one before")
    processes.start(config, directory=directory, nodes=nodes, tell=tell)
    return [each.previous for each in replaced]


def _require_stopped(directory: Path, stores: Mapping[str, Path]) -> None:
    if names := [node.name for node in processes.recorded(directory) if processes.is_running(node)]:
        raise ServerProcessError(
            f"{', '.join(names)} in {directory}: stop workers and publishers, then the servers "
            "(`aviso-workers server stop`), so that nothing is stored while streams are moved"
        )
    for name, place in stores.items():
        if not store.within(place).is_dir():
            raise ServerProcessError(
                f"{name} has no store in {place}: say --directory and --nodes as for `server start`"
            )


def _move(
    config: Config,
    server: Server,
    stores: Mapping[str, Path],
    previous_key_file: Path | None,
    *,
    directory: Path,
    tell: Tell,
) -> list[Replacement]:
    """Fill new stores beside the old ones, and return how they are to be put in place."""
    work = directory / processes.MOVING
    new_stores = {name: place / NEW for name, place in stores.items()}
    _clear(work, new_stores)
    previous = _previous_encryption(stores.values(), previous_key_file)
    users = _users(server)
    apart = partial(_apart, config, server, users, tell=tell)
    try:
        with (
            apart(previous, stores=stores, directory=work / "old") as old,
            apart(server.jetstream.encryption, stores=new_stores, directory=work / "new") as new,
        ):
            moved = anyio.run(_move_accounts, old, new, users, tell)
        found = frozenset[Asset]().union(*(store.on_disk(store.within(place)) for place in new_stores.values()))
        if missing := moved - found:
            raise BackupError(f"the new stores lack what was copied: {store.describe(missing, of=moved)}")
    except BaseException:
        _clear(work, new_stores)
        raise
    shutil.rmtree(work)
    stamp = f"{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}"  # two of one second must not meet
    return [
        Replacement(place=store.within(place), new=store.within(place / NEW), previous=place / f"{PREVIOUS}-{stamp}")
        for place in stores.values()
    ]


def _clear(work: Path, new_stores: Mapping[str, Path]) -> None:
    for side in ("old", "new"):
        processes.stop(work / side)
    for place in new_stores.values():
        shutil.rmtree(place, ignore_errors=True)
    shutil.rmtree(work, ignore_errors=True)


def _previous_encryption(stores: Iterable[Path], key_file: Path | None) -> Encryption | None:
    """Return the encryption of the stores, None where they are not encrypted.

    Raises ServerProcessError where they are not all alike, or the key is not given.
    """
    found = {cipher for place in stores for cipher in store.ciphers(store.within(place))}
    if len(found) > 1:
        named = ", ".join(cipher or "no encryption" for cipher in sorted(found))
        raise ServerProcessError(f"the stores hold streams with {named}: a server would convert some of them")
    cipher = next(iter(found), "")
    if cipher and key_file is None:
        raise ServerProcessError(
            f"the stores are encrypted with {cipher}: name the file of their key, --previous-key-file"
        )
    if key_file is not None and not cipher:
        raise ServerProcessError("the stores are not encrypted, or empty: leave out --previous-key-file")
    return Encryption(cipher=cast("Cipher", cipher), key_file=str(key_file)) if cipher else None


def _users(server: Server) -> list[_User]:
    """Return a user for each account with JetStream; of a server without accounts, one without a name."""
    if not server.accounts:
        return [_User(GLOBAL_ACCOUNT)]
    named = [name for name, each in server.accounts.items() if each.jetstream.enabled and name != server.system_account]
    return [_User(name, f"{USER}-{i}", Secret(secrets.token_urlsafe())) for i, name in enumerate(named)]


@contextmanager
def _apart(
    config: Config,
    server: Server,
    users: Sequence[_User],
    encryption: Encryption | None,
    *,
    stores: Mapping[str, Path],
    directory: Path,
    tell: Tell,
) -> Iterator[tuple[Node, ...]]:
    """Run servers on these stores, on random ports, which only these users may connect to, and stop them at the end."""
    accounts = {
        user.account: Account(
            jetstream=server.accounts[user.account].jetstream, users={user.name: User(password=user.password)}
        )
        for user in users
        if user.name
    }
    others = {name: structs.replace(each, users={}) for name, each in server.accounts.items() if name not in accounts}
    apart = structs.replace(
        server,
        port=0,
        monitoring=Monitoring(port=0),
        max_connections=None,
        max_subscriptions=None,
        tls=None,
        accounts=accounts | others,
        cluster=structs.replace(server.cluster or Cluster(), port=0, tls=None),
        gateways=None,
        leafnodes=None,
        jetstream=structs.replace(server.jetstream, encryption=encryption),
    )
    nodes = processes.start(
        structs.replace(config, server=apart),
        directory=directory,
        nodes=len(stores),
        detached=False,
        tell=tell,
        in_stores=stores,
    )
    try:
        yield nodes
    finally:
        processes.stop(directory)


async def _move_accounts(
    old: Sequence[Node], new: Sequence[Node], users: Sequence[_User], tell: Tell
) -> frozenset[Asset]:
    """Copy the streams of all accounts, and return what has to be on the disk of the new servers."""
    moved = set[Asset]()
    for user in users:
        async with _opened(old, user) as source, _opened(new, user) as target:
            done = await server_copies.move_all(source, target, tell)
        for each in done:
            if each.on_disk:
                moved.add(Asset(user.account, each.stream))
                moved |= {Asset(user.account, each.stream, consumer) for consumer in each.consumers_on_disk}
    return frozenset(moved)


def _opened(nodes: Sequence[Node], user: _User) -> AbstractAsyncContextManager[Admin]:
    urls = ServerUrls(*(node.url for node in nodes))
    settings = JetStream(nats_url=urls, user=user.name, password=user.password)
    backend = NotificationBackend(kind="jetstream", jetstream=settings)
    return open_backend(Config(notification_backend=backend))
