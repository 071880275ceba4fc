"""An agent's notifications counted in windows, and its function run for each window that is over.

What is known of a key is one value in a bucket, changed by compare-and-set, so that all workers count in the same
windows and none is lost with its worker. The value also lists which notifications it has counted. Older ones are on
pages of all keys (`features.seen`) until they are settled: so one that is delivered again counts once, and one that
stays unsettled for long costs one bit for each message that its stream stores meanwhile.

One worker, which holds a lease, closes windows. It takes the newest time that was counted, waits until the server knows
that everything up to that notification is settled, whichever worker had it, and closes what ends `lateness` before that
time. So a window lacks nothing because somebody was slow, died, or has to try again. A window that is closed changes no
more, and stays until the function has been run for it: whoever runs it again publishes the same under the same ids.
Where the function fails as often as its policy allows, the window becomes a dead letter. Tried again, it is put back
into the bucket, closed, and whoever closes windows runs the function for it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

import anyio
from msgspec import Struct, structs

from aviso_workers import clocks
from aviso_workers.aviso import payloads
from aviso_workers.aviso.codec import Message
from aviso_workers.aviso.literals import Duration, quoted
from aviso_workers.aviso.notifications import Notification
from aviso_workers.backends import Backend, ConsumerInfo
from aviso_workers.config import Config
from aviso_workers.declare import windows
from aviso_workers.declare.seen import NEVER, Stored
from aviso_workers.declare.verdicts import Ack, Again, DeadLetter, Failure, OtherVersionError, Verdict
from aviso_workers.declare.windows import KeyState, SettledUpTo, Window, Windowing, WindowProgress
from aviso_workers.engine import calls
from aviso_workers.engine.acknowledging import NO_ATTEMPT
from aviso_workers.engine.handlers import HandlerContext, NotificationHandler
from aviso_workers.engine.key_value import CachedKeyValue, RetryingKeyValue
from aviso_workers.engine.leases import OVERDUE_SECONDS, Lease, drained
from aviso_workers.errors import (
    BackendError,
    ConflictError,
    RefusedError,
    UndecodableError,
)
from aviso_workers.events import UNAVAILABLE, Unreadable, WindowDone, WindowFunctionsChanged
from aviso_workers.features.seen import SeenPages
from aviso_workers.jetstream import key_value
from aviso_workers.jetstream.key_value import Entry
from aviso_workers.state import window_records
from aviso_workers.state.dead_letter_records import RETRIED
from aviso_workers.state.window_records import PAGES, PROGRESS

_Change = Callable[[KeyState[Any], WindowProgress], Awaitable[KeyState[Any]]]

CHECK_SECONDS = 1.0
"""How often windows are checked for whether they are over."""
GIVEN_WAY_SECONDS = 2 * OVERDUE_SECONDS
"""For how long a worker leaves the lease to workers of another version, which count from now on."""
FORGOTTEN_AFTER_SECONDS = 86400.0
"""A key of which no window is open is forgotten after this: by then no counted notification is redelivered, and
a worker that was paused while it counted has lost its deliveries."""


class WindowHandler(Struct, eq=False, dict=True):
    """Runs `async def agent(window: Window[A])`."""

    context: HandlerContext
    windowing: Windowing[Any, Any]
    backend: Backend
    app: str
    config: Config

    def __post_init__(self) -> None:
        settler, agent = self.context.settler, self.context.agent
        self._stream, self._events = settler.stream, settler.events
        patience = self.config.notification_backend.jetstream.publish_deadline_seconds
        self._durable = agent.durable_name(self.app)
        self._functions = self.windowing.fingerprints
        self._states = window_records.WindowStates(agent, on_unreadable=self._report_unreadable)
        bucket = window_records.bucket_of(self.app, agent.name)
        self._bucket = CachedKeyValue(self.backend, bucket, patience_seconds=patience)
        self._from_server = RetryingKeyValue(self.backend, bucket, patience_seconds=patience)
        self._pages = SeenPages(
            bucket=self._from_server, backend=self.backend, prefix=PAGES, stream=self._stream, listed=windows.LISTED
        )
        self._lease = Lease(self.backend, self.app, of=f"windows/{agent.name}", events=self._events)
        self._counting = NotificationHandler(self.context, step=self._count)
        self._locks: WeakValueDictionary[str, anyio.Lock] = WeakValueDictionary()
        """By key, so that the calls of one worker do not get in each other's way."""
        self._contents: _Contents | None = None
        self._awaited: tuple[float, int] | None = None
        """A time that has come when everything up to this sequence is settled."""
        self._retries: dict[tuple[str, int], _Retry] = {}
        """By key and end of a window, for those for which the function has failed."""
        self._outage = settler.outage
        self._progress_known = WindowProgress()
        """What was read last of what is known for all keys. It counts while a foreign value is in its place."""
        self._refused = _set_event()
        """Set while this worker must not count, because the windows have another size, or values of another type, than
        its own, or `require_same` has not said yet that they have not."""
        self._gives_way = False
        """Whether that is because a worker of another version has begun since, which counts now."""

    async def require_same(self) -> None:
        """Require windows of this worker's size, which the first worker begins; and say for all workers that values are
        of this worker's type from now on, where those of open windows can be.

        Workers with another type cease to count, and begin again when no worker with this type closes windows any more.
        So while two versions run, the one counts that was started last, and the one that stays counts in the end.
        Raises `RefusedError` for another size, where a value would lose a part of itself, or where this worker has
        ceased so; `BackendError`.
        """
        if self._gives_way:
            raise RefusedError(self._states.other_type)
        try:
            for entry in await self._bucket.entries():
                if not (window_records.is_own(entry.key) or entry.foreign):
                    self._states.read_whole(entry)
        except UndecodableError as error:
            self._refused.set()
            raise RefusedError(str(error)) from error
        own = self._states.fingerprint
        await self._advance(lambda progress: structs.replace(self._begun(progress), values=own))
        self._refused = anyio.Event()

    async def until_refused(self) -> None:
        """Wait until the size or the values' type is another one, so that `require_same` has to be asked."""
        await self._refused.wait()

    async def work(self) -> None:
        """Count notifications in their windows; see `subscription.Handler`."""
        await self._counting.work()

    async def close(self, stop: anyio.Event) -> None:
        """Run the function for windows that are over, whenever this worker holds the lease, until `stop`."""
        in_time = drained(stop, clock=self.context.clock, timeout_seconds=self.config.workers.drain_timeout_seconds)
        async with in_time, anyio.create_task_group() as keeping:
            keeping.start_soon(self._bucket.keep_current)
            while not stop.is_set():
                if self._refused.is_set():
                    seconds = GIVEN_WAY_SECONDS if self._gives_way else CHECK_SECONDS
                    await clocks.sleep_until(self.context.clock, seconds, stop)
                    if not self._gives_way:
                        continue
                if await self._lease.take(stop):
                    self._gives_way = False  # else a worker of the other version would have it
                    async with self._lease.renewed():
                        await self._keep_closing(stop)
            keeping.cancel_scope.cancel()

    async def _count(self, notification: Notification[Any]) -> None:
        """Count a notification. Raises `FinalError` for a late one, and what the author's functions raise."""
        time, key = self.windowing.time_of(notification), self.windowing.key_of(notification)
        this = notification.sequence, notification.time.timestamp()
        retry = notification.headers.get(RETRIED, "")
        was_missed = False

        async def add(state: KeyState[Any], progress: WindowProgress) -> KeyState[Any]:
            nonlocal was_missed
            found = await self._find(state, this, retried=bool(retry))
            was_missed = found is True
            if found is not None:
                return state
            return windows.add(state, notification, self.windowing, time=time, passed=progress.closed, retry=retry)

        state = await self._change(window_records.bucket_key(key), add)
        if was_missed or this in state.counted.marked:
            raise windows.late("one of its windows had closed; it was counted in the others")

    async def _find(self, state: KeyState[Any], this: Stored, *, retried: bool) -> bool | None:
        """Return whether a counted notification was late for one of its windows; None where it was not counted.

        `retried`: it is a dead letter that is tried again, which was settled without being counted.
        """
        found = await self._pages.find(state.counted, this)
        if found is not None or retried or not state.counted.may_have_left_out(this):
            return found
        # After the page and from the server: a page is removed after the progress says that all on it is settled.
        settled = window_records.read_progress(await self._from_server.get(PROGRESS)).settled
        return False if settled.covers(*this) else None

    async def _shortened(self, state: KeyState[Any], settled: SettledUpTo) -> KeyState[Any]:
        """Return the state, which lists fewer than `windows.LISTED` as counted."""
        if len(state.counted.newest) < windows.LISTED:
            return state
        counted = state.counted.without({each for each in state.counted.newest if settled.covers(*each)})
        return structs.replace(state, counted=await self._pages.shortened(counted))

    async def _change(self, spelled: str, change: _Change) -> KeyState[Any]:
        """Change the state of a key by compare-and-set. Nothing is stored where `change` returns what it is given.

        Raises `OtherVersionError` where the windows have another size or values of another type.
        """
        async with self._locks.setdefault(spelled, anyio.Lock()):
            while True:
                entry = await self._bucket.get(spelled)
                progress = await self._progress()
                state = self._read_own(entry) if entry else KeyState()
                state = await self._shortened(state, progress.settled)
                changed = await change(state, progress)
                if changed is state:
                    return state
                try:
                    await self._bucket.put(
                        spelled,
                        self._states.spell(changed),
                        revision=entry.revision if entry else 0,
                        ttl_seconds=None if changed.open else FORGOTTEN_AFTER_SECONDS,
                    )
                except ConflictError:
                    continue  # somebody else's change went through instead
                return changed

    async def _update(self, key: str, change: Callable[[KeyState[Any]], KeyState[Any]]) -> KeyState[Any]:
        """Change a key's state as `_change` does, by what the state alone says."""

        async def changed(state: KeyState[Any], _: WindowProgress) -> KeyState[Any]:
            return change(state)

        return await self._change(window_records.bucket_key(key), changed)

    async def _progress(self) -> WindowProgress:
        """Return what is known for all keys; where the bucket was deleted meanwhile, it is begun anew. Raises as
        `_change`.
        """
        progress = self._read_progress(await self._bucket.get(PROGRESS))
        try:
            if self._begun(progress) != progress:
                progress = await self._advance(self._begun)
        except RefusedError as error:
            self._refused.set()
            raise OtherVersionError(error) from error
        if progress.values != self._states.fingerprint:
            self._gives_way = True
            self._refused.set()
            raise OtherVersionError(UndecodableError(self._states.other_type))
        return progress

    def _begun(self, progress: WindowProgress) -> WindowProgress:
        """Return what is known for all keys, with this worker's size and type where none are stored.

        Raises `RefusedError` where another size is stored.
        """
        size, every = self.windowing.size_seconds, self.windowing.every_seconds
        if not progress.size:
            return structs.replace(progress, size=size, every=every, values=self._states.fingerprint)
        if (progress.size, progress.every) != (size, every):
            raise RefusedError(
                f"agent {self.context.agent.name!r} has windows of {_spelled(progress.size, progress.every)}, and the "
                f"code states {_spelled(size, every)}: take the former ones back, or give the agent another name and a "
                "start. To begin anew under this name, let the former version close its windows, stop all workers and "
                f"run `aviso-workers agents rm {quoted(f'{self.app}/{self.context.agent.name}')}`"
            )
        return progress

    def _read_own(self, entry: Entry) -> KeyState[Any]:
        """Return the state of an entry. Raises `OtherVersionError` where its values are of another type, and
        `UndecodableError` for a foreign one: what was counted is gone, which the notifications of this key alone show.
        """
        try:
            return self._states.read(entry)
        except UndecodableError as error:
            if entry.foreign:
                raise
            self._refused.set()
            raise OtherVersionError(error) from error

    def _read_progress(self, entry: Entry | None) -> WindowProgress:
        if entry is None or not entry.foreign:
            self._progress_known = window_records.read_progress(entry)
        return self._progress_known

    async def _advance(self, change: Callable[[WindowProgress], WindowProgress]) -> WindowProgress:
        """Change what is known for all keys, as `_change` does."""
        _, changed = await key_value.compare_and_set(self._bucket, PROGRESS, read=self._read_progress, change=change)
        return changed

    async def _keep_closing(self, stop: anyio.Event) -> None:
        self._awaited = None
        self._retries.clear()
        while not (stop.is_set() or self._refused.is_set()):
            with suppress(BackendError, UndecodableError, OtherVersionError):  # who counts runs into them, and is heard
                await self._close_due(stop)
            await clocks.sleep_until(self.context.clock, CHECK_SECONDS, stop)

    async def _close_due(self, stop: anyio.Event) -> None:
        contents = await self._read()
        await self._note_functions(contents)
        if contents.first_end == math.inf:
            return
        info = await self.backend.consumer_info(self._stream, self._durable)
        progress = await self._settle(info, contents)
        passed = await self._pass(info, contents, progress)
        idle = self._is_idle(info, contents)
        if passed < contents.first_end and not idle:
            return
        keys = list(contents.states.items())
        if not self._outage.pace.free:
            random.shuffle(keys)  # or those that fail would keep the others from being tried
        for key, state in keys:
            until = max(state.open) if idle and state.open else passed
            if stop.is_set():
                return
            if windows.due(windows.close(state, until)):
                await self._close(key, until)

    async def _read(self) -> _Contents:
        """Return what the bucket holds. It is read again only where it has changed, because there may be many keys."""
        version = self._bucket.version
        if version is None or self._contents is None or version != self._contents.version:
            progress = await self._progress()
            entries = await self._bucket.entries()
            self._contents = _Contents(version, entries, self._states.by_key(entries), progress.functions)
        return self._contents

    async def _note_functions(self, contents: _Contents) -> None:
        """State which of the functions that make windows are others than those of the worker that closed them before.

        What they have made of the open windows stays, because only the code of an older version could make it anew.
        """
        before, own = contents.functions, self._functions
        if before == own:
            return
        await self._advance(lambda progress: structs.replace(progress, functions=own))
        if before:
            changed = tuple(name for name in own if own[name] != before.get(name))
            self._events.emit(WindowFunctionsChanged(agent=self.context.agent.name, functions=changed))

    def _report_unreadable(self, entry: Entry, error: UndecodableError) -> None:
        if entry.foreign:
            return  # the backend has told of it
        self._events.emit(Unreadable(stream=f"KV_{self._bucket.name}", sequence=entry.revision, error=error))

    async def _settle(self, info: ConsumerInfo, contents: _Contents) -> WindowProgress:
        """Note how far everything is settled, and remove the pages that nobody needs after that."""
        settled = SettledUpTo(sequence=info.ack_floor, time=info.time.timestamp())

        def advance(progress: WindowProgress) -> WindowProgress:
            # A stream that was recreated begins at 1 again; an agent that was reset has counted what it had counted.
            made_anew = max((page.created for *_, page in contents.pages), default=NEVER) > progress.settled.time
            if settled.sequence <= progress.settled.sequence and not made_anew:
                return progress
            return structs.replace(progress, settled=settled)

        progress = await self._advance(advance)
        for entry, last, page in contents.pages:
            if progress.settled.covers(last, page.latest):
                with suppress(ConflictError):  # written meanwhile: the next time
                    await self._from_server.delete(entry.key, revision=entry.revision)
        return progress

    async def _pass(self, info: ConsumerInfo, contents: _Contents, progress: WindowProgress) -> int:
        """Up to when windows are closed now. It is told to all before any window is."""
        known = progress.closed
        time, sequence = self._awaited = self._awaited or contents.newest
        if info.ack_floor < sequence and (info.num_pending or info.num_ack_pending):
            return known
        self._awaited = None
        passed = self.windowing.last_end(time - self.windowing.lateness_seconds)
        if passed > known:
            await self._advance(lambda progress: structs.replace(progress, closed=max(progress.closed, passed)))
        return max(passed, known)

    def _is_idle(self, info: ConsumerInfo, contents: _Contents) -> bool:
        """Return whether the agent was given nothing for long, by the server's clock: the worker's may be wrong."""
        if self.windowing.idle_seconds is None or info.num_pending or info.num_ack_pending:
            return False
        delivered = info.last_delivered.timestamp() if info.last_delivered else NEVER
        return info.time.timestamp() - max(contents.stored, delivered) >= self.windowing.idle_seconds

    async def _close(self, key: str, until: int) -> None:
        state = await self._update(key, lambda state: windows.close(state, until))
        for end in windows.due(state):
            known, now = self._retries.get((key, end)), self.context.clock.monotonic()
            if (known is None or known.again_at <= now) and self._outage.begins(again=known is not None):
                await self._finish(windows.window(state, key, end, size=self.windowing.size_seconds), end)

    async def _finish(self, window: Window[Any], end: int) -> None:
        """Run the function, publish, and forget the window; or see to it that it is run again."""
        context, place = self.context, (window.key, end)
        began = context.clock.monotonic()
        with context.outputs.keys() as keys:
            keys.begin_with(f"{window.start:%Y%m%dT%H%M%SZ}", of=f"{window.end.isoformat()} {window.key}")
            failure = await calls.attempt_apart(context.step, window)
        if failure is None:
            self._outage.succeeded()
        verdict = await self._judge(window, end, failure) if failure is not None else None
        again = self._again_in_seconds(place, verdict)
        if again is None:
            await self._update(window.key, lambda state: windows.without(state, end))
            self._retries.pop(place, None)
        self._events.emit(
            WindowDone(
                agent=self.context.agent.name,
                key=window.key,
                start=window.start,
                end=window.end,
                seconds=context.clock.monotonic() - began,
                error=failure.error if failure else None,
                again_in_seconds=again or 0.0,
                reason=verdict.reason if isinstance(verdict, Again) else "",
                dead_lettered=verdict.reason if isinstance(verdict, DeadLetter) else "",
            )
        )
        del failure  # the frames of its traceback lead to this one, and would keep it until the next collection

    async def _judge(self, window: Window[Any], end: int, failure: Failure) -> Ack | Verdict:
        """Return what becomes of a window for which the function has failed; its dead letter is stored."""
        start, known = end - self.windowing.size_seconds, self._retries.get((window.key, end), _Retry())
        bucket, spelled = self._bucket.name, window_records.bucket_key(window.key)
        kept = window_records.KeptWindow(start=start, end=end, value=window.value, values=self._states.fingerprint)
        message = Message(
            subject=f"$KV.{bucket}.{spelled}",
            data=payloads.to_json(kept),
            timestamp_ns=max(0, end) * 1_000_000_000,
        )
        return await self.context.settler.judge_window(
            message,
            failure,
            window=window,
            failures=known.failures,
            away_seconds=None if known.away_since is None else self.context.clock.monotonic() - known.away_since,
            stream=f"KV_{bucket}",
            part=f"{spelled}@{start}",
        )

    def _again_in_seconds(self, place: tuple[str, int], verdict: Ack | Verdict | None) -> float | None:
        """After how long the function is to be run again for a window; None where it is not."""
        if not isinstance(verdict, Again):
            return None
        now = self.context.clock.monotonic()
        known = self._retries.setdefault(place, _Retry())
        if verdict.reason not in NO_ATTEMPT:
            known.failures += 1
        elif verdict.reason == UNAVAILABLE and known.away_since is None:
            known.away_since = now
        known.again_at = now + verdict.after_seconds
        return verdict.after_seconds


class _Retry(Struct):
    """A window for which the function is run again."""

    failures: int = 0
    again_at: float = 0.0
    """On the agent's clock, as the next."""
    away_since: float | None = None
    """When it failed first because something is away."""


class _Contents:
    """What the bucket of an agent's windows holds, and what of it is asked again and again."""

    def __init__(
        self,
        version: int | None,
        entries: Sequence[Entry],
        states: Mapping[str, KeyState[Any]],
        functions: dict[str, str],
    ) -> None:
        self.version = version
        """See `CachedKeyValue.version`."""
        self.pages = list(window_records.pages(entries))
        self.states = states
        self.newest = windows.newest(states.values())
        self.stored = max((state.stored for state in states.values()), default=NEVER)
        """When the last was stored that was counted."""
        self.first_end = min(map(windows.first_end, states.values()), default=math.inf)
        self.functions = functions
        """As `WindowProgress.functions`."""


def _spelled(size: int, every: int) -> str:
    return f"size {Duration(size)} and every {Duration(every)}"


def _set_event() -> anyio.Event:
    event = anyio.Event()
    event.set()
    return event
