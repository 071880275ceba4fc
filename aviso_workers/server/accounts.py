"""Accounts of publishers: what they reach of the account that has the streams.

`profiles` asks here before a server is rendered or run, and `nats_conf` writes what it gets. An account that
`publishes` event types has no JetStream. It imports, as services, the subjects of these event types and the requests
about their streams that a publisher makes. A server rewrites the reply subject of what passes a service import, so
an acknowledgement is published in the account of its publisher, whatever its subject is. Within one account it goes
to any stream that has the subject: no permission of a server concerns it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import UNSET, Struct, structs

from aviso_workers.config import Config, streams
from aviso_workers.config.nats_server import Account, AccountJetStream, Permissions, Subjects, User
from aviso_workers.jetstream.specs import StreamSpec
from aviso_workers.jetstream.subjects import inbox_prefix
from aviso_workers.state import delayed_messages

API = "$JS.API"
IMPORTED_API = "aviso_workers.api"
"""The start of the imported requests. Below `$JS.API`, an account without JetStream answers itself (10039)."""
NO_JETSTREAM = AccountJetStream(enabled=False)


class Service(Struct, frozen=True, kw_only=True):
    """A service that the account with the streams exports to an account of publishers."""

    subject: str
    imported: str
    """The subject in the account of publishers."""
    asked: tuple[str, ...] = ()
    """The subjects of clients' requests, which the server maps to `imported`."""


class Connected(Account, frozen=True, kw_only=True):
    """An account with what it exports to accounts of publishers, or imports as one of them."""

    exports: Mapping[str, tuple[str, ...]] = {}
    """The accounts that may import a service, by its subject."""
    imports: tuple[Service, ...] = ()


def mistakes(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the mistakes in accounts of publishers, as (key path, what is wrong)."""
    for name, account in config.server.accounts.items():
        path = f"server.accounts.{name}"
        if account.publishes:
            yield from _publisher_mistakes(name, account, path, config)
            continue
        for key in ("publishes_to", "delays"):
            if getattr(account, key):
                yield f"{path}.{key}", "needs publishes: the event types that the users of the account publish"


def _publisher_mistakes(name: str, account: Account, path: str, config: Config) -> Iterator[tuple[str, str]]:
    if account.jetstream not in (AccountJetStream(), NO_JETSTREAM):
        yield f"{path}.jetstream", "must not be combined with publishes: the streams are in another account"
    if name == config.server.system_account:
        yield f"{path}.publishes", "is not for the system account"
    for i, event_type in enumerate(account.publishes):
        if event_type not in config.notification_schema:
            known = ", ".join(config.notification_schema) or "there is none"
            yield f"{path}.publishes[{i}]", f"names no event type of notification_schema: {known}"
        elif _stream(event_type, config).subjects is UNSET:
            yield f"{path}.publishes[{i}]", "names an event type whose stream is a mirror: it takes no publishes"
    with_streams = _with_streams(config)
    if account.publishes_to is None and len(with_streams) != 1:
        found = f"say which of {', '.join(with_streams)} has the streams" if with_streams else "there is none"
        yield f"{path}.publishes_to", f"must name an account with JetStream: {found}"
    if account.publishes_to is not None and account.publishes_to not in with_streams:
        found = ", ".join(with_streams) or "there is none"
        yield f"{path}.publishes_to", f"names no account of server.accounts with JetStream: {found}"


def connected(config: Config) -> dict[str, Account]:
    """Return the accounts of the section `server`, with what those of publishers import and others export to them.

    A user of an account of publishers without permissions gets those of a publisher, with inboxes of its own. The
    configuration must have none of the `mistakes`.
    """
    accounts = config.server.accounts
    imports = {name: tuple(_services(account, config)) for name, account in accounts.items() if account.publishes}
    exports: dict[str, dict[str, tuple[str, ...]]] = {name: {} for name in accounts}
    for name, services in imports.items():
        source = exports[_source(accounts[name], config)]
        for service in services:
            source[service.subject] = (*source.get(service.subject, ()), name)
    return {
        name: _publishers(account, imports[name], config)
        if name in imports
        else Connected(**(structs.asdict(account) | {"exports": exports[name]}))
        for name, account in accounts.items()
    }


def _publishers(account: Account, services: tuple[Service, ...], config: Config) -> Connected:
    others = {
        "jetstream": NO_JETSTREAM,
        "publishes_to": _source(account, config),
        "users": {name: _allowed(user, name, services) for name, user in account.users.items()},
        "imports": services,
    }
    return Connected(**(structs.asdict(account) | others))


def _allowed(user: User, name: str, services: tuple[Service, ...]) -> User:
    if user.permissions != Permissions():
        return user
    publish = Subjects(allow=tuple(service.imported for service in services))
    subscribe = Subjects(allow=(f"{inbox_prefix(user.nkey or name)}.>",))
    return structs.replace(user, permissions=Permissions(publish=publish, subscribe=subscribe))


def _services(account: Account, config: Config) -> Iterator[Service]:
    for event_type in dict.fromkeys(account.publishes):
        stream = _stream(event_type, config)
        for subject in stream.subjects or ():
            yield Service(subject=subject, imported=subject)
        yield _request(f"STREAM.INFO.{stream.name}", config)
        if account.delays:
            subject, schedules = delayed_messages.all_waiting(stream.name), delayed_messages.stream_of(stream.name)
            yield Service(subject=subject, imported=subject)
            yield _request(f"STREAM.INFO.{schedules}", config)
            yield _request(f"STREAM.PURGE.{schedules}", config)  # `cancel`


def _request(request: str, config: Config) -> Service:
    prefixes = dict.fromkeys((API, config.notification_backend.jetstream.api))
    return Service(
        subject=f"{API}.{request}",
        imported=f"{IMPORTED_API}.{request}",
        asked=tuple(f"{prefix}.{request}" for prefix in prefixes),
    )


def _stream(event_type: str, config: Config) -> StreamSpec:
    return streams.event_stream(event_type, config.notification_schema[event_type], config)


def _with_streams(config: Config) -> list[str]:
    system = config.server.system_account
    return [
        name
        for name, account in config.server.accounts.items()
        if account.jetstream.enabled and not account.publishes and name != system
    ]


def _source(account: Account, config: Config) -> str:
    return account.publishes_to or _with_streams(config)[0]
