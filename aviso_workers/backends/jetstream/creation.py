"""Streams are created with what every server of the cluster knows, and with nothing else.

`server_versions` says why, and `unreadable` how no stream is erased by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aviso_workers.backends.jetstream import server_versions
from aviso_workers.backends.jetstream.connection import NatsConnection
from aviso_workers.backends.jetstream.management import JetStreamManagement
from aviso_workers.backends.jetstream.server_versions import ServerVersion
from aviso_workers.errors import DeniedError, RefusedError, UnavailableError
from aviso_workers.jetstream import fields, specs
from aviso_workers.jetstream.info import StreamInfo
from aviso_workers.jetstream.specs import StreamSpec

BATCHES = ("allow_atomic", "allow_batched")


async def create(connection: NatsConnection, spec: StreamSpec) -> StreamInfo:
    """Create the stream, and return its configuration and state.

    Raises `UnreadableStreamError` where the server cannot read a stream that it has, this one or another one;
    `RefusedError` where the server is too old for what is stated, and `UnavailableError` where another one of its
    cluster is; `DeniedError` where our user may create none.
    """
    try:
        return await _create(connection, spec)
    except DeniedError as error:
        raise DeniedError(
            f"stream {spec.name} is missing, and our user may not create it: {error}; an operator creates it, and what "
            "else the role needs, by `aviso-workers streams apply --role`"
        ) from error


async def _create(connection: NatsConnection, spec: StreamSpec) -> StreamInfo:
    oldest = await server_versions.oldest(connection)
    config = specs.stated(spec)
    if spec.takes_batches:  # ours to say as long as nobody else has made the stream
        config = {each: True for each in BATCHES if fields.STREAM[each].since <= oldest} | config
    _require_known(config, oldest=oldest, connected=ServerVersion(*connection.server_version))
    return await JetStreamManagement(connection).add_stream(config)


def _require_known(config: Mapping[str, Any], *, oldest: ServerVersion, connected: ServerVersion) -> None:
    used = (fields.STREAM[each] for each in config if each in fields.STREAM and fields.something(config[each]))
    unknown = [field for field in used if field.since > oldest and config[field.name] != field.zero]
    if not unknown:
        return
    newest = max(unknown, key=lambda field: field.since)
    since = ServerVersion(*newest.since)
    wanted = f"to create stream {config['name']} with {newest.name}, nats-server {since} or newer is needed"
    if since > connected:
        raise RefusedError(f"{wanted}; this one is {connected}")
    raise UnavailableError(f"{wanted}, and one of this cluster is {oldest}: upgrade it first")
