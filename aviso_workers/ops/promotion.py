"""Promotion of a mirror in its origin's place: the origin is fenced, the mirror catches up and takes publishes.

Called by `mirror promote`. Before anything is changed, the two are compared (see
`mirrors`): a mirror of an origin that was recreated has the numbers of its origin and other messages. The
fence comes before the rest, for two streams that both take publishes are two histories which cannot be joined. Where a
later step is refused, the origin is as it was. The consumers of the origin are made at the mirror before it takes
publishes, so that the agents of the second site go on where those of the first had come to.

`rehearse`, called by `mirror drill`, does this with a stream of its own while messages are published. Its result is
what the real one would cost: how far the mirror was behind, for how long no publish was stored, and whether every
message is stored exactly once after that.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
from msgspec import Struct

from aviso_workers.aviso.codec import Message
from aviso_workers.aviso.literals import quoted
from aviso_workers.backends import Admin, Backend, Management
from aviso_workers.errors import BackendError, NotFoundError, RefusedError, UnavailableError
from aviso_workers.jetstream.info import SourceConfig, StreamConfig
from aviso_workers.jetstream.metadata import FENCED
from aviso_workers.ops import mirrors
from aviso_workers.ops.mirrors import ORIGIN_SECONDS, PROMOTED, Carried, Fenced, StreamPlace
from aviso_workers.state.own_streams import DRILL as ORIGIN
from aviso_workers.state.own_streams import DRILL_MIRROR as MIRROR

ASK_AGAIN_SECONDS = 0.05
UNFENCE_SECONDS = 10.0
SUBJECT = "aviso_workers.drill"
PUBLISH_SECONDS = 1.0
AGAIN_SECONDS = 0.01


class Promotion(Struct, frozen=True, kw_only=True):
    """The result of a promotion: the subjects that the mirror takes now, and whether anything is missing in it."""

    stream: str
    origin: str
    subjects: tuple[str, ...]
    last_sequence: int
    gap: int | None
    """Messages that were still to come when the origin was fenced, and came; None where it is not known what is
    missing: the origin was lost, or it was recreated."""
    equal: int = 0
    """Messages that were compared in both and are the same."""
    seconds: float
    """Seconds from the fence, or from the beginning, until the mirror took publishes."""
    consumers: tuple[Carried, ...] | None
    """The origin's consumers as they were carried over; None where the origin could not be asked."""

    @property
    def proven(self) -> bool:
        """Whether the mirror has everything that the origin had, and all consumers go on at their positions."""
        return self.gap is not None and not any(each.refused for each in self.consumers or ())


async def promote(
    admin: Admin,
    stream: str,
    *,
    subjects: Sequence[str] = (),
    origin_is_lost: bool = False,
    origin_was_recreated: bool = False,
    patience_seconds: float = 30.0,
) -> Promotion:
    """Promote a mirror in its origin's place, with its subjects, and with its consumers at their positions.

    Where the origin does not answer it cannot be fenced: that is refused, unless it is said to be lost, and then the
    `subjects` have to be named. Where the origin was recreated, it has messages that the mirror lacks: that is refused
    as well, unless it is said. Raises `RefusedError` also where the stream is not a whole
    mirror or does not catch up in time; then the origin is as it was. Raises `UnavailableError`.
    """
    admin.connection.require_server(2, 12, to="promote a mirror")
    config = (await admin.stream_info(stream)).config
    started = _MirrorPromotion(admin, config, patience_seconds=patience_seconds)
    try:
        comparison = await started.compare()
    except (UnavailableError, NotFoundError) as error:
        if not origin_is_lost:
            raise RefusedError(
                f"{started.origin}, the origin of {stream}, cannot be fenced: {error}. It would take publishes when "
                "it comes back. Where it is lost, say --origin-is-lost, and fence it (`aviso-workers mirror fence`) "
                "before it is joined again"
            ) from error
        if not subjects:
            raise RefusedError(
                f"the subjects of {started.origin} cannot be read from its server: name them with --subject"
            ) from error
        return await started.become(subjects, gap=None, equal=0, consumers=None)
    if comparison.trouble and not origin_was_recreated:
        raise RefusedError(
            f"{comparison.trouble}. The mirror lacks messages that the origin has stored since. To promote it anyway, "
            f"add --origin-was-recreated; `aviso-workers mirror recover {quoted(stream)}` then lists the missing "
            "messages"
        )
    return await started.in_place_of_origin(subjects, comparison.equal, recreated=bool(comparison.trouble))


class _MirrorPromotion:
    """The promotion of one mirror."""

    def __init__(self, admin: Admin, config: StreamConfig, *, patience_seconds: float) -> None:
        mirror = _whole_mirror(config)
        self.origin = mirror.name
        self._admin = admin
        self._there = admin.at(mirror.api)
        self._config = config
        self._stream = config.name
        self._api = mirror.api
        self._patience_seconds = patience_seconds
        self._began = anyio.current_time()

    async def compare(self) -> mirrors.HistoryComparison:
        return await mirrors.compare(
            self._admin, self._stream, self.origin, api=self._api, timeout_seconds=ORIGIN_SECONDS
        )

    async def in_place_of_origin(self, subjects: Sequence[str], equal: int, *, recreated: bool) -> Promotion:
        here = StreamPlace(streams=self._admin, stream=self._stream)
        there = StreamPlace(streams=self._there, stream=self.origin)
        self._began = anyio.current_time()
        async with self._fence() as fenced:
            gap = await self._catch_up(fenced.last_sequence, recreated=recreated)
            # A message that was under way to several replicas when the stream was fenced may be stored a moment later.
            gap += await self._catch_up((await self._there.stream_info(self.origin)).last_sequence, recreated=recreated)
            consumers = await mirrors.carry_consumers(there, here)
        try:
            if not await self._is_fenced():
                raise RefusedError(
                    f"{self.origin} takes publishes again: it was unfenced meanwhile, as by another promotion that "
                    f"failed. {self._stream} is a mirror still"
                )
            return await self.become(
                subjects or fenced.subjects, gap=None if recreated else gap, equal=equal, consumers=tuple(consumers)
            )
        except RefusedError:
            await mirrors.remove_carried(here, consumers)
            await self._unfence(fenced)
            raise
        except BackendError as error:
            raise UnavailableError(
                f"whether {self._stream} was promoted is not known: {error}. {self.origin} stays fenced: ask again by "
                f"`aviso-workers report mirrors`, and repeat this where {self._stream} is a mirror still"
            ) from error

    @asynccontextmanager
    async def _fence(self) -> AsyncIterator[Fenced]:
        """Fence the origin for the block, and lift the fence where the block fails, unless there was one before."""
        fenced = await mirrors.fence(self._there, self.origin)
        try:
            yield fenced
        except BaseException as failure:
            if not await self._is_unfenced_in_time(fenced) and isinstance(failure, BackendError):
                raise UnavailableError(
                    f"{failure}; nothing was promoted, and {self.origin} may be fenced still and take no publishes: "
                    f"when it answers, repeat this, or `aviso-workers mirror unfence {quoted(self.origin)}`"
                    + (f" --api {quoted(self._api)}" if self._api else "")
                ) from failure
            raise

    async def _is_unfenced_in_time(self, fenced: Fenced) -> bool:
        """Lift the fence, also while this task is cancelled, and return whether that succeeded in time."""
        with anyio.move_on_after(UNFENCE_SECONDS, shield=True), suppress(BackendError):
            await self._unfence(fenced)
            return True
        return False

    async def _unfence(self, fenced: Fenced) -> None:
        """Lift a fence that was not there before, unless another promotion of this mirror relies on it by now."""
        if fenced.already_fenced or not await self._is_fenced():
            return
        if (await self._admin.stream_info(self._stream)).config.mirror:
            await mirrors.unfence(self._there, self.origin)

    async def _is_fenced(self) -> bool:
        return FENCED in (await self._there.stream_info(self.origin)).config.metadata

    async def _catch_up(self, until: int, *, recreated: bool) -> int:
        """Wait until the mirror has caught up, and return how many messages were missing. Raises `RefusedError`."""
        missing: int | None = None
        with anyio.move_on_after(self._patience_seconds):
            while True:
                last = (await self._admin.stream_info(self._stream)).last_sequence
                # The newest messages of the origin may have been deleted.
                is_last = last >= until or not await self._there.message(self.origin, last + 1, next_by_subject=">")
                if missing is None:
                    missing = 0 if is_last else until - last
                if is_last:
                    return missing
                await anyio.sleep(ASK_AGAIN_SECONDS)
        if recreated and missing is not None:
            return missing
        raise RefusedError(
            f"{self._stream} did not catch up with {self.origin} within {self._patience_seconds:g} s: "
            f"{'all' if missing is None else missing} messages were missing at first; {self.origin} is as it was"
        )

    async def become(
        self, subjects: Sequence[str], *, gap: int | None, equal: int, consumers: tuple[Carried, ...] | None
    ) -> Promotion:
        """Turn the mirror into a stream of its own."""
        last = (await self._admin.stream_info(self._stream)).last_sequence
        config = {key: value for key, value in self._config.items() if key != "mirror"}
        promoted = f"{self._there.api_prefix} {self.origin} {last}"
        config["metadata"] = {**self._config.metadata, PROMOTED: promoted}
        config["subjects"] = list(subjects)
        await self._admin.update_stream(config)
        return Promotion(
            stream=self._stream,
            origin=self.origin,
            subjects=tuple(subjects),
            last_sequence=last,
            gap=gap,
            equal=equal,
            seconds=anyio.current_time() - self._began,
            consumers=consumers,
        )


def _whole_mirror(config: StreamConfig) -> SourceConfig:
    mirror = config.mirror
    if mirror is None:
        promoted = config.metadata.get(PROMOTED)
        raise RefusedError(
            f"{config.name} is not a mirror" + (f": it was promoted from {promoted}" if promoted else "")
        )
    if mirror.left_out:
        raise RefusedError(
            f"{config.name} is not a complete mirror, because it has {mirror.left_out}, so it cannot replace its origin"
        )
    return mirror


class FailoverDrill(Struct, frozen=True, kw_only=True):
    """The result of a drill, which has passed where every message is stored once."""

    promotion: Promotion
    published: int
    """Messages that were acknowledged, before and after."""
    stored: int
    """Messages that the promoted mirror holds."""
    after_fence: int
    """Messages that the origin took after it was fenced."""
    interrupted_seconds: float
    """The longest time without an acknowledgement."""

    @property
    def passed(self) -> bool:
        return self.stored == self.published and self.after_fence == 0


async def rehearse(admin: Admin, *, origin_api: str = "", messages: int = 1000) -> FailoverDrill:
    """Fail over from a scratch stream at `origin_api` (a domain's, such as `$JS.hub.API`; empty: here) to one here.

    Both are removed again. Works inside of `async with app:`. Raises `BackendError`.
    """
    there = admin.at(origin_api)
    mirror, external = (ORIGIN, {"external": {"api": origin_api}}) if origin_api else (MIRROR, {})
    async with (
        _scratch(there, ORIGIN, {"subjects": [f"{SUBJECT}.>"]}),
        _scratch(admin, mirror, {"mirror": {"name": ORIGIN, **external}}),
    ):
        publisher = _Publisher(admin, (mirror, ORIGIN), messages)
        failure: BackendError | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(publisher.run)
            await publisher.half.wait()
            try:
                promoted = await promote(admin, mirror)
                fenced = await there.stream_info(ORIGIN)
            except BackendError as error:
                failure = error
                tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure
        left = await there.stream_info(ORIGIN)
        return FailoverDrill(
            promotion=promoted,
            published=messages,
            stored=(await admin.stream_info(mirror)).messages,
            after_fence=left.last_sequence - fenced.last_sequence,
            interrupted_seconds=publisher.longest_interruption,
        )


class _Publisher:
    """A publisher of one message after another, each until one of the streams has stored it."""

    def __init__(self, backend: Backend, streams: Iterable[str], messages: int) -> None:
        self.half = anyio.Event()
        self.longest_interruption = 0.0
        self._backend = backend
        self._streams = streams
        self._messages = messages

    async def run(self) -> None:
        last = anyio.current_time()
        for number in range(self._messages):
            if number == self._messages // 2:
                self.half.set()
            await self._publish(number)
            last, before = anyio.current_time(), last
            self.longest_interruption = max(self.longest_interruption, last - before)

    async def _publish(self, number: int) -> None:
        message = Message(subject=f"{SUBJECT}.{number}", data=b"")
        # Which stream takes publishes changes meanwhile, and each refuses those for the other one.
        for stream in itertools.cycle(self._streams):
            with suppress(BackendError):
                await self._backend.publish(
                    message, message_id=f"drill-{number}", stream=stream, timeout_seconds=PUBLISH_SECONDS
                )
                return
            await anyio.sleep(AGAIN_SECONDS)


@asynccontextmanager
async def _scratch(streams: Management, name: str, config: dict[str, Any]) -> AsyncIterator[None]:
    await streams.add_stream({"name": name, **config})
    try:
        yield
    finally:
        with anyio.CancelScope(shield=True), suppress(BackendError):
            await streams.delete_stream(name)
