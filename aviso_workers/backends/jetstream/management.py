"""JetStream's management API at one prefix: a method for each request, over raw JSON, answered in typed classes.

`JetStreamBackend` is one at the prefix of its own settings, and `at` makes one for another domain or account. Requests
are raw JSON because nats-py's classes drop the fields that they do not know; `jetstream.info` reads what is answered.
What is asked for here is what operators ask for, what the engine needs of it, and what the other modules of this
package ask about streams and consumers. What only a server is asked for is in `admin`.

`create_stream` states what every server of the cluster knows, and nothing else. A stream that uses what a server does
not know is not served by it. While a cluster is upgraded, one server after the other is replaced. Where an old one
holds a copy, the stream has one copy less, and no leader where most servers are old: it takes no publishes until they
are upgraded. The server that a client is connected to says nothing of the others, and JetStream's API answers for its
leader alone; what all servers answer is a question for the account's connections.

No stream is created, or restored, where that could erase one that the server cannot read. A nats-server that was
started with the wrong encryption key goes on without the streams that it cannot read. It answers that they do not
exist, until one is to be created in the place of such a stream: it refuses that once, and erases the files of the old
one. The second attempt succeeds, with an empty stream. So the first refusal is the last attempt. It leaves a mark on
the server, which everybody asks for before a stream is created: an empty stream in memory. It is gone when the server
is restarted, as the right key needs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from typing import Any, Literal

import anyio
import msgspec
from msgspec import Struct

from aviso_workers._fast import Arrival
from aviso_workers.aviso.codec import Message
from aviso_workers.backends.jetstream import wire
from aviso_workers.backends.jetstream.connection import API_TIMEOUT_SECONDS, NatsConnection, ServerVersion
from aviso_workers.backends.jetstream.wire import Headers
from aviso_workers.errors import (
    BackendError,
    DeniedError,
    NotFoundError,
    RefusedError,
    UnavailableError,
    UnreadableStreamError,
)
from aviso_workers.jetstream import error_codes, fields, identities, info, metadata, specs
from aviso_workers.jetstream.info import ConsumerInfo, StreamInfo
from aviso_workers.jetstream.specs import UNREADABLE, StreamSpec

MAX_LISTINGS = 5
"""How often a listing is begun again, because it changed while it was read."""
MARK_SUBJECT = "aviso_workers.unreadable"
FILE_ERRORS = {error_codes.STREAM_NOT_CREATED: "store", error_codes.STREAM_NOT_RESTORED: "(10077)"}
"""By the code of a refusal, the text in its description if the files of a stream are the reason. The server gives the
same codes for other reasons too. 10077 is its code for an error of the store."""
ASK_SECONDS = 2.0
CURE = (
    "stop the server, and look at its encryption key, its store_dir and its log: with the right key the other streams "
    "are there again, and {lost} needs its backup (docs/operations/checks.md#js042)"
)
BATCHES = ("allow_atomic", "allow_batched")
PING = "$SYS.REQ.ACCOUNT.PING.CONNZ"
"""Each server of a cluster answers it to every user who may publish to it, whatever the account."""
ANSWER_SECONDS = 1.0
"""All answer within milliseconds. Where one does not, or we may not ask, it is done without."""


class _PingedServer(Struct, frozen=True):
    id: str
    ver: str


class _PingAnswer(Struct, frozen=True):
    server: _PingedServer


_decode = msgspec.json.Decoder(_PingAnswer).decode


class JetStreamManagement:
    """The management of streams and consumers through JetStream's API; see `backends.Management`."""

    def __init__(self, connection: NatsConnection, *, prefix: str = "") -> None:
        self._connection = connection
        self._prefix = prefix

    @property
    def api_prefix(self) -> str:
        return self._prefix or self._connection.api_prefix

    async def stream_names(self, *, subject: str = "") -> list[str]:
        pages = await self._listing("STREAM.NAMES", {"subject": subject} if subject else {})
        return [name for page in pages for name in page["streams"] or ()]

    async def streams(self) -> list[StreamInfo]:
        pages = await self._listing("STREAM.LIST", {})
        return [info.stream(found) for page in pages for found in page["streams"] or ()]

    async def stream_info(
        self, stream: str, *, deleted_details: bool = False, timeout_seconds: float = API_TIMEOUT_SECONDS
    ) -> StreamInfo:
        request = {"deleted_details": True} if deleted_details else None
        return self._stream(await self.api(f"STREAM.INFO.{stream}", request, timeout_seconds=timeout_seconds))

    async def create_stream(self, spec: StreamSpec) -> StreamInfo:
        """Create the stream, and return its configuration and state.

        Raises `UnreadableStreamError` where the server cannot read a stream that it has, this one or another one;
        `RefusedError` where the server is too old for what is stated, and `UnavailableError` where another one of its
        cluster is; `DeniedError` where our user may create none.
        """
        try:
            config, oldest = specs.stated(spec), await self._oldest_server()
            if spec.takes_batches:  # ours to say as long as nobody else has made the stream
                config = {each: True for each in BATCHES if fields.STREAM[each].since <= oldest} | config
            _require_known(config, oldest=oldest, connected=self._connection.server_version)
            return await self.add_stream(config)
        except DeniedError as error:
            raise DeniedError(
                f"stream {spec.name} is missing, and our user may not create it: {error}; an operator creates it, and "
                "what else the role needs, by `aviso-workers streams apply --role`"
            ) from error

    async def add_stream(self, config: Mapping[str, Any]) -> StreamInfo:
        async with self._guarding_unreadable(config["name"]):
            return self._stream(await self.api(f"STREAM.CREATE.{config['name']}", config))

    @asynccontextmanager
    async def _guarding_unreadable(self, stream: str) -> AsyncIterator[None]:
        """Create a stream in the block, if the server has no mark, and leave one where it cannot read the stream.

        Raises `UnreadableStreamError` where the server cannot read a stream that it has, this one or another one.
        """
        await self.require_readable(stream)
        try:
            yield
        except RefusedError as error:
            part = FILE_ERRORS.get(error.code or 0)
            if part is None or part not in str(error):
                raise
            with suppress(BackendError):
                await self._mark_unreadable(stream)
            raise UnreadableStreamError(
                f"stream {stream} is not created, because the server has files of a stream of that name and cannot use "
                f"them ({error}); it erases them when it refuses. Nothing else is created until it is restarted: "
                + CURE.format(lost="this one"),
                code=error_codes.STREAM_NOT_CREATED,
            ) from error

    async def require_readable(self, stream: str) -> None:
        try:
            found = await self.stream_info(UNREADABLE, timeout_seconds=ASK_SECONDS)
        except RefusedError:
            return  # the server has no mark, or we may not ask
        raise UnreadableStreamError(
            f"stream {stream} is not created, because the server cannot read one that it has "
            f"({found.config.description or ''}) and could erase others: {CURE.format(lost='that one')}. Where "
            f"everything is there, remove the mark: aviso-workers streams rm {UNREADABLE}",
            code=error_codes.STREAM_NOT_CREATED,
        )

    async def _mark_unreadable(self, stream: str) -> None:
        """Leave the mark, because the server cannot read the stream. Raises `BackendError`."""
        mark = {
            "name": UNREADABLE,
            "subjects": [MARK_SUBJECT],
            "storage": "memory",
            "max_msgs": 1,
            "description": f"the server could not read stream {stream}",
        }
        await self.api(f"STREAM.CREATE.{UNREADABLE}", mark)

    async def update_stream(self, config: Mapping[str, Any]) -> StreamInfo:
        return self._stream(await self.api(f"STREAM.UPDATE.{config['name']}", config))

    async def delete_stream(self, stream: str) -> None:
        await self.api(f"STREAM.DELETE.{stream}")

    async def purge_stream(self, stream: str, *, subject: str = "", keep: int = 0, before: int = 0) -> int:
        wanted = {"filter": subject, "keep": keep, "seq": before}
        request = {field: value for field, value in wanted.items() if value}
        return int((await self.api(f"STREAM.PURGE.{stream}", request))["purged"])

    async def subject_counts(self, stream: str, *, subject: str = ">") -> dict[str, int]:
        pages = await self._listing(f"STREAM.INFO.{stream}", {"subjects_filter": subject})
        counts = info.subject_counts(pages)
        if len(counts) != pages[0]["total"]:
            raise UnavailableError(f"{stream}: {len(counts)} of its {pages[0]['total']} subjects were listed")
        return counts

    async def message(
        self, stream: str, sequence: int = 0, *, next_by_subject: str = "", last_by_subject: str = ""
    ) -> Message | None:
        request: dict[str, Any] = {"last_by_subj": last_by_subject} if last_by_subject else {"seq": sequence}
        if next_by_subject:
            request["next_by_subj"] = next_by_subject
        try:
            return info.message(await self.api(f"STREAM.MSG.GET.{stream}", request), Headers)
        except NotFoundError as error:
            if error.code != error_codes.NO_MESSAGE:
                raise
            return None

    async def delete_message(self, stream: str, sequence: int, *, overwrite: bool = True) -> None:
        try:
            await self.api(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence, "no_erase": not overwrite})
        except RefusedError as error:
            if error.code != error_codes.MESSAGE_NOT_DELETED:
                raise
            # The server has one code for "no such message" and for what really failed: ask for the message itself.
            await self.api(f"STREAM.MSG.GET.{stream}", {"seq": sequence})
            raise

    async def consumer_names(self, stream: str) -> list[str]:
        pages = await self._listing(f"CONSUMER.NAMES.{stream}", {})
        return [name for page in pages for name in page["consumers"] or ()]

    async def consumers(self, stream: str) -> list[ConsumerInfo]:
        pages = await self._listing(f"CONSUMER.LIST.{stream}", {})
        return [info.consumer(found) for page in pages for found in page["consumers"] or ()]

    async def consumer_info(
        self, stream: str, consumer: str, *, timeout_seconds: float = API_TIMEOUT_SECONDS
    ) -> ConsumerInfo:
        answer = await self.api(f"CONSUMER.INFO.{stream}.{consumer}", timeout_seconds=timeout_seconds)
        return info.consumer(answer)

    async def put_consumer(
        self,
        stream: str,
        consumer: str,
        config: Mapping[str, Any],
        *,
        action: Literal["create", "update"],
        filter_in_subject: str = "",
        timeout_seconds: float = API_TIMEOUT_SECONDS,
    ) -> ConsumerInfo:
        subject = ".".join(filter(None, ("CONSUMER.CREATE", stream, consumer, filter_in_subject)))
        request = {"stream_name": stream, "config": config, "action": action}
        return info.consumer(await self.api(subject, request, timeout_seconds=timeout_seconds))

    async def add_unnamed_consumer(
        self, stream: str, config: Mapping[str, Any], *, timeout_seconds: float
    ) -> ConsumerInfo:
        """Create a consumer whose name is in its configuration alone, so that one right is enough for any name."""
        request = {"stream_name": stream, "config": config}
        return info.consumer(await self.api(f"CONSUMER.CREATE.{stream}", request, timeout_seconds=timeout_seconds))

    async def delete_consumer(self, stream: str, consumer: str) -> None:
        await self.api(f"CONSUMER.DELETE.{stream}.{consumer}")

    def delete_consumer_soon(self, stream: str, consumer: str) -> None:
        """Ask for a consumer to be deleted, and wait for no answer."""
        inbox = self._connection.new_inbox()
        self._connection.post(f"CONSUMER.DELETE.{stream}.{consumer}", b"", reply=inbox, prefix=self._prefix)

    async def unpin_consumer(self, stream: str, consumer: str, *, group: str) -> None:
        await self.api(f"CONSUMER.UNPIN.{stream}.{consumer}", {"group": group})

    async def pause_consumer(self, stream: str, consumer: str, *, until: datetime | None) -> float:
        self._connection.require_server(2, 11, to="pause a consumer")
        request = {"pause_until": until.isoformat()} if until else {}
        return info.pause_seconds(await self.api(f"CONSUMER.PAUSE.{stream}.{consumer}", request))

    async def reset_consumer(self, stream: str, consumer: str, *, sequence: int) -> ConsumerInfo:
        self._connection.require_server(2, 14, to="reset a consumer")
        found = await self.consumer_info(stream, consumer)  # a server does not answer about one that is missing
        noted = metadata.after_reset(found.config.metadata)
        config = {**found.config, "metadata": noted}
        # Before it is done: a worker that is given something again must find that it was meant to be.
        await self.put_consumer(stream, consumer, config, action="update")
        try:
            return info.consumer(await self.api(f"CONSUMER.RESET.{stream}.{consumer}", {"seq": sequence}))
        except RefusedError as error:
            if error.code != error_codes.INVALID_RESET:
                raise
        # It was made to begin later than that: one that begins there takes its place.
        await self.delete_consumer(stream, consumer)
        config |= {"deliver_policy": "by_start_sequence", "opt_start_seq": sequence}
        config |= {"metadata": identities.newly_marked(noted)}
        config.pop("opt_start_time", None)
        return await self.put_consumer(stream, consumer, config, action="create")

    def _stream(self, answer: Mapping[str, Any]) -> StreamInfo:
        return info.stream(answer)

    async def _oldest_server(self) -> ServerVersion:
        """Return the lowest version among the servers that answer; where there is one server only, its own."""
        connection, found = self._connection, dict[str, ServerVersion]()
        expected, all_answered = wire.cluster_size(connection.nc), anyio.Event()
        if not expected:
            return connection.server_version

        def listener(arrivals: Sequence[Arrival]) -> None:
            for _, _, _, data in arrivals:
                # What cannot be read is no answer of a server: nobody listens, or we are denied.
                with suppress(msgspec.MsgspecError, ValueError):
                    server = _decode(data).server
                    major, minor = server.ver.split(".")[:2]
                    found[server.id] = ServerVersion(int(major), int(minor))
            if len(found) >= expected:
                all_answered.set()

        inbox = connection.new_inbox()
        interest = await connection.listen(inbox, listener)
        try:
            connection.wire.send(PING.encode(), b'{"limit":1}', reply=inbox.encode())
            with anyio.move_on_after(ANSWER_SECONDS):
                await all_answered.wait()
        finally:
            with anyio.CancelScope(shield=True):
                await connection.leave(interest)
        return min([connection.server_version, *found.values()])

    async def _listing(self, subject: str, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return all pages of a listing, which is begun again where the number of entries changes meanwhile."""
        for _ in range(MAX_LISTINGS):
            pages: list[dict[str, Any]] = []
            offset = 0  # not by how many came: a cluster leaves out those that do not answer
            while not pages or pages[-1]["total"] == pages[0]["total"]:
                pages.append(await self.api(subject, {**request, "offset": offset}))
                offset += pages[-1]["limit"]
                if offset >= pages[-1]["total"] == pages[0]["total"]:
                    return pages
        raise UnavailableError(f"{subject}: entries come and go faster than they are listed")

    async def api(
        self, subject: str, request: Any = None, *, prefix: str = "", timeout_seconds: float = API_TIMEOUT_SECONDS
    ) -> dict[str, Any]:
        """Ask what no other method asks for, at this prefix or another one, as `backends.Administration.api` does."""
        whole = prefix or self._prefix
        return await self._connection.api(subject, request, prefix=whole, timeout_seconds=timeout_seconds)


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
