"""Streams are created, unless that could erase one.

A nats-server that was started with the wrong encryption key goes on without the streams that it cannot read. It answers
that they do not exist, until one is to be created in the place of such a stream: it refuses that once, and
erases the files of the old one. The second attempt succeeds, with an empty stream.

So the first refusal is the last attempt. It leaves a mark on the server, which everybody asks for before a stream is
created: an empty stream in memory. It is gone when the server is restarted, as the right key needs.

A stream is created with what every server of the cluster knows, and with nothing else (`server_versions` says why).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from aviso_workers.backends.jetstream import server_versions
from aviso_workers.backends.jetstream.connection import Connection
from aviso_workers.backends.jetstream.management import Management
from aviso_workers.backends.jetstream.server_versions import Version
from aviso_workers.errors import BackendError, RefusedError, UnavailableError, UnreadableStreamError
from aviso_workers.jetstream import error_codes, fields, specs
from aviso_workers.jetstream.info import StreamInfo
from aviso_workers.jetstream.specs import UNREADABLE, StreamSpec

__all__ = ["create", "mark"]

MARK_SUBJECT = "aviso_workers.unreadable"
ABOUT_ITS_FILES = "store"
"""In the description of STREAM_NOT_CREATED, which has other reasons as well."""
ASK_SECONDS = 2.0
CURE = (
    "stop the server, and look at its encryption key, its store_dir and its log: with the right key the streams are "
    "there again (docs/operations.md#js042)"
)


BATCHES = ("allow_atomic", "allow_batched")


async def create(connection: Connection, spec: StreamSpec) -> StreamInfo:
    """Create the stream, and return its configuration and state.

    Raises `UnreadableStreamError` where the server cannot read a stream that it has, this one or another one;
    `RefusedError` where the server is too old for what is stated, and `UnavailableError` where another one of its
    cluster is.
    """
    name = spec.name
    oldest = await server_versions.oldest(connection)
    config = specs.stated(spec)
    if spec.takes_batches:  # ours to say as long as nobody else has made the stream
        config = {each: True for each in BATCHES if fields.STREAM[each].since <= oldest} | config
    _require_known(config, oldest=oldest, connected=Version(*connection.server_version))
    await _require_no_mark(connection, name)
    try:
        return await Management(connection).add_stream(config)
    except RefusedError as error:
        if error.code != error_codes.STREAM_NOT_CREATED or ABOUT_ITS_FILES not in str(error):
            raise
        with suppress(BackendError):
            await mark(connection, name)
        raise UnreadableStreamError(
            f"stream {name} is not created, because the server has files of a stream of that name and cannot use them "
            f"({error}); it erases them when it refuses. Nothing else is created until it is restarted: {CURE}",
            code=error_codes.STREAM_NOT_CREATED,
        ) from error


def _require_known(config: Mapping[str, Any], *, oldest: Version, connected: Version) -> None:
    used = (fields.STREAM[each] for each in config if each in fields.STREAM and fields.something(config[each]))
    unknown = [field for field in used if field.since > oldest and config[field.name] != field.zero]
    if not unknown:
        return
    newest = max(unknown, key=lambda field: field.since)
    since = Version(*newest.since)
    wanted = f"to create stream {config['name']} with {newest.name}, nats-server {since} or newer is needed"
    if since > connected:
        raise RefusedError(f"{wanted}; this one is {connected}")
    raise UnavailableError(f"{wanted}, and one of this cluster is {oldest}: upgrade it first")


async def _require_no_mark(connection: Connection, name: str) -> None:
    try:
        found = await Management(connection).stream_info(UNREADABLE, timeout_seconds=ASK_SECONDS)
    except RefusedError:
        return  # there is none, or we may not ask
    raise UnreadableStreamError(
        f"stream {name} is not created, because the server cannot read one that it has "
        f"({found.config.description or ''}) and could erase others: {CURE}. Where everything is there, remove "
        f"the mark: aviso-workers streams rm {UNREADABLE}",
        code=error_codes.STREAM_NOT_CREATED,
    )


async def mark(connection: Connection, name: str) -> None:
    """Leave the mark, because the server cannot read the stream `name`. Raises `BackendError`."""
    await Management(connection).add_stream(
        {
            "name": UNREADABLE,
            "subjects": [MARK_SUBJECT],
            "storage": "memory",
            "max_msgs": 1,
            "description": f"the server could not read stream {name}",
        }
    )
