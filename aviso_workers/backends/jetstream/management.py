"""JetStream's management API at one prefix: a method for each request, over raw JSON, answered in typed classes.

`JetStreamBackend` is one at the prefix of its own settings, and `at` makes one for another domain or account. Requests
are raw JSON because nats-py's classes drop the fields that they do not know; `jetstream.info` reads what is answered.
What is asked for here is what operators ask for, what the engine needs of it, and what the other modules of this
package ask about streams and consumers. How none is erased where another one is created is in `unreadable`, and what
only a server is asked for in `admin`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal

from aviso_workers.aviso.codec import Message
from aviso_workers.backends.jetstream import unreadable
from aviso_workers.backends.jetstream.connection import API_TIMEOUT_SECONDS, NatsConnection
from aviso_workers.backends.jetstream.wire import Headers
from aviso_workers.errors import NotFoundError, RefusedError, UnavailableError
from aviso_workers.jetstream import error_codes, identities, info, metadata
from aviso_workers.jetstream.info import ConsumerInfo, StreamInfo

MAX_LISTINGS = 5
"""How often a listing is begun again, because it changed while it was read."""


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

    async def add_stream(self, config: Mapping[str, Any]) -> StreamInfo:
        async with unreadable.guarding_unreadable(self, config["name"]):
            return await self.add_unguarded(config)

    async def add_unguarded(self, config: Mapping[str, Any]) -> StreamInfo:
        """Create a stream that cannot be the one that the server cannot read; see `unreadable`."""
        return self._stream(await self.api(f"STREAM.CREATE.{config['name']}", config))

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
