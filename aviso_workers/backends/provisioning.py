"""Streams and consumers as wanted: created or updated where that is needed, a stream looked at once per process.

A stream is shared, so an update that would remove stored messages is never made here: it is stated, and an operator
makes it with `streams apply --yes`. Who only reads changes no stream at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import anyio
from msgspec import UNSET, structs

from aviso_workers.aviso.literals import quoted
from aviso_workers.backends import Backend, ConsumerInfo, StreamInfo
from aviso_workers.errors import BackendError, NotFoundError, RefusedError, UnavailableError
from aviso_workers.events import ConsumerDiffers, Events, StreamProvisioned
from aviso_workers.jetstream import error_codes, plans
from aviso_workers.jetstream.plans import Difference, Plan, Stored
from aviso_workers.jetstream.specs import ConsumerSpec, StreamSpec


class Provisioner:
    """Sees to it that a stream exists before it is used.

    `management` says what may be done to streams, which others share: `reconcile` them with the configuration,
    only `create` what is missing, or `observe` and touch nothing. None of them removes what is stored. Without
    `removes_replicas`, a stream that has more replicas than wanted keeps them.
    """

    def __init__(self, backend: Backend, *, management: str, events: Events, removes_replicas: bool = True) -> None:
        self._backend = backend
        self._management = management
        self._removes_replicas = removes_replicas
        self._events = events
        self._known: set[str] = set()
        self._lock = anyio.Lock()

    async def ensure(self, spec: StreamSpec) -> None:
        """Create or reconcile a stream, once.

        Raises `NotFoundError` where it may only be observed and is missing, `RefusedError` where it cannot be used.
        """
        if spec.name in self._known:
            return
        async with self._lock:
            if spec.name not in self._known:
                await self._reconcile(spec)
                self._known.add(spec.name)

    async def require_usable(self, spec: StreamSpec) -> None:
        """Raise for a reader what `ensure` raises for a stream that cannot be used; nothing is created or changed.

        Raises `NotFoundError` where it does not exist.
        """
        if spec.name in self._known:
            return
        plan = await self.plan(spec)
        if not plan.exists:
            raise NotFoundError(
                f"stream {spec.name} does not exist: nothing was ever published, the server is another one, or it "
                "cannot read the stream (docs/operations/checks.md#js042)"
            )
        _require_usable(plan)

    async def ensure_consumer(self, stream: str, spec: ConsumerSpec) -> ConsumerInfo:
        """Create the durable consumer or bring it in line, and state what of it cannot be.

        Raises as `Backend.ensure_consumer` does.
        """
        info = await self._backend.ensure_consumer(stream, spec)
        if left := plans.consumer_differences(spec, info.config):
            self._events.emit(ConsumerDiffers(stream=stream, consumer=spec.durable_name, differences=_texts(left)))
        return info

    async def raise_replicas(self, stream: str, replicas: int) -> None:
        """Give a stream so many replicas where it exists and has fewer, and state what is refused.

        Raises `UnavailableError`.
        """
        await self._raise(StreamSpec(name=stream, num_replicas=replicas), f"num_replicas: not known -> {replicas}")

    async def raise_history(self, bucket: str, history: int) -> None:
        """Let a bucket keep so many values of each key where it exists and keeps fewer, and state what is refused.

        Raises `UnavailableError`.
        """
        spec = StreamSpec(name=f"KV_{bucket}", max_msgs_per_subject=history)
        await self._raise(spec, f"max_msgs_per_subject: not known -> {history}")

    async def _raise(self, spec: StreamSpec, wanted: str) -> None:
        try:
            plan = await self.plan(spec)
            if plan.exists and any(difference.found < difference.wanted for difference in plan.differences):
                await self._update(plan)
        except NotFoundError:
            return  # it was deleted meanwhile
        except RefusedError as error:  # the right to ask for the stream is denied
            self._events.emit(
                StreamProvisioned(stream=spec.name, action="kept", differences=(wanted,), refused=str(error))
            )

    def forget(self, stream: str) -> None:
        """Look at the stream again before its next use: it may have been deleted."""
        self._known.discard(stream)

    async def plan(self, spec: StreamSpec) -> Plan:
        """Return what `ensure` would do."""
        try:
            found = await self._backend.stream_info(spec.name)
        except NotFoundError:
            return plans.plan(spec, None, Stored())
        wanted = spec.num_replicas
        if not self._removes_replicas and wanted is not UNSET and found.config.num_replicas > wanted:
            spec = structs.replace(spec, num_replicas=UNSET)
        stored = Stored(
            messages=found.messages,
            bytes=found.bytes,
            subjects=found.subjects,
            consumers=found.consumers,
            older=await self._older(spec, found),
        )
        return plans.plan(spec, found.config, stored)

    async def carry_out(self, plan: Plan) -> None:
        """Create or update as planned, as far as that can be done.

        Raises `RefusedError` where the server refuses, the stream cannot be created, storage would change, or the
        stream is fenced; `UnavailableError` where it is being restored.
        """
        _require_usable(plan)
        if not plan.exists and plan.fixed:
            raise RefusedError(f"stream {plan.stream} cannot be created: {'; '.join(_texts(plan.fixed))}")
        if not plan.exists:
            await self._backend.create_stream(plan.wanted)
            self._events.emit(StreamProvisioned(stream=plan.stream, action="created"))
        elif plan.differences:
            await self._backend.update_stream(plan.config)
            self._events.emit(
                StreamProvisioned(stream=plan.stream, action="updated", differences=_texts(plan.differences))
            )

    async def _reconcile(self, spec: StreamSpec) -> None:
        plan = await self.plan(spec)
        if not plan.exists:
            if self._management == "observe":
                raise NotFoundError(
                    f"stream {spec.name} does not exist, and stream_management: observe creates none; "
                    "an operator creates it by `aviso-workers streams apply`; or set stream_management to create or "
                    "reconcile, where the user may create streams"
                )
            plan = await self._create(plan)
        _require_usable(plan)
        if self._management != "reconcile":
            return
        if plan.fixed:
            self._report_unchanged(plan.fixed, plan, refused="; ".join(difference.cure for difference in plan.fixed))
        if plan.removing:
            self._report_unchanged(plan.removing, plan, refused=_why_not_removed(plan))
        if plan.differences:
            await self._update(plan)

    async def _older(self, spec: StreamSpec, found: StreamInfo) -> int | None:
        """Return how many messages are older than the wanted age, asked only where that gets shorter."""
        max_age = plans.shorter_age(spec, found.config)
        if max_age is None:
            return None
        since = found.time - timedelta(microseconds=max_age / 1000)
        if found.first_time is None or found.first_time >= since:
            return 0
        try:
            return found.messages - await self._backend.count(spec.name, filter_subjects=(), start_time=since)
        except BackendError:
            return None  # such as a stream of jobs, or a user, that no further consumer is made for

    async def _create(self, plan: Plan) -> Plan:
        """Return the plan that is left after creating: none, unless somebody else was faster."""
        try:
            await self.carry_out(plan)
        except RefusedError as error:
            if error.code != error_codes.STREAM_NAME_IN_USE:
                raise
        return await self.plan(plan.wanted)

    async def _update(self, plan: Plan) -> None:
        """Aviso's rule: where the server refuses, warn and use the stream as it is. So it is where there is no room for
        what is wanted: the stream can be used meanwhile, and its next process tries again.
        """
        try:
            await self.carry_out(plan)
        except (RefusedError, UnavailableError) as error:
            if isinstance(error, UnavailableError) and error.code not in error_codes.NO_ROOM:
                raise
            self._report_unchanged(plan.differences, plan, refused=str(error))

    def _report_unchanged(self, differences: Iterable[Difference], plan: Plan, *, refused: str) -> None:
        self._events.emit(
            StreamProvisioned(stream=plan.stream, action="kept", differences=_texts(differences), refused=refused)
        )


def _why_not_removed(plan: Plan) -> str:
    keys = [plan.wanted.keys[each.field] for each in plan.removing if each.field in plan.wanted.keys]
    if not keys:
        return "it would remove stored messages of a stream of our own: change that by hand where it is wanted"
    return (
        f"it would remove stored messages: say in {' and '.join(keys)} what the stream has, "
        "or have them removed by `aviso-workers streams apply --yes`"
    )


def _texts(differences: Iterable[Difference]) -> tuple[str, ...]:
    return tuple(str(difference) for difference in differences)


def _require_usable(plan: Plan) -> None:
    if plan.unfinished:
        raise UnavailableError(
            f"stream {plan.stream} is being restored; if that was killed, `aviso-workers backup restore` does it again"
        )
    if plan.fenced:
        raise RefusedError(
            f"stream {plan.stream} is fenced, because its mirror was promoted or it moves: connect to where that is, "
            f"or take it back with `aviso-workers mirror unfence {quoted(plan.stream)}`"
        )
    if plan.storage_mismatch:
        (storage,) = (difference for difference in plan.fixed if difference.field == "storage")
        raise RefusedError(
            f"stream {plan.stream} storage mismatch: it has {storage.found}, the configuration says {storage.wanted}; "
            "storage cannot be changed: set storage_type to what the stream has, or delete the stream"
        )
