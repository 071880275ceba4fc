"""The one connection of a backend: opened with retries, watched, asked, closed.

nats-py reconnects by itself; its tasks are outside of ours. So there is one owner here that hears of every change and
takes every decision: `ready` says whether requests can be sent now, `failed` that it is lost for good. What reads or
waits registers in `on_reconnect` or `on_disconnect`, because a server forgets pulls and a client forgets answers.

Every program reconnects without end, unless `max_reconnect_attempts` or `enable_auto_reconnect` say otherwise. It does
so too where a server refuses our credentials, because they can be replaced; only the first connection fails then.

Two things nats-py does not see, and its owner does: a server that does not answer any more is left (`watch`), and one
that is about to shut down is left for another one.

Where TLS is configured, nothing is sent without it (`credentials`).
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple

import anyio
import msgspec
import nats.errors
from nats.aio.client import Client

from aviso_workers import config
from aviso_workers.aviso.literals import counted
from aviso_workers.backends import ConnectionListener
from aviso_workers.backends.jetstream import credentials, faults, inboxes, wire
from aviso_workers.backends.jetstream.inboxes import Answer, Inbox, Requests, denies
from aviso_workers.errors import BackendError, DeniedError, RefusedError, UnavailableError
from aviso_workers.jetstream import answers, subjects

API_TIMEOUT_SECONDS = 5.0
TELL_AGAIN_SECONDS = 10.0
"""How often it is told at most that there is no connection yet, and why there is none now."""
SECONDS_PER_SERVER = 3
"""Where several servers are listed, one of them may take so long to answer at first, and twice and three times as long
in the second and third attempt: one that accepts connections and says nothing must not use up the time of all."""
CHECK_AGAIN_SECONDS = 1.0
"""A cluster never answers who asks about a stream or a consumer while it is being created. So the question is sent once
more after this time."""
PING_SECONDS = 5.0
SILENT_PINGS = 2
"""A server that leaves so many PINGs in a row unanswered is left. One may be our own fault: a loop that was stuck."""
MAX_DENIALS = 1000
"""How many denials are remembered: a request whose answer does not come is looked up among them."""
MAX_REPORTED = 100
"""How many kinds of denied subjects are told, each once."""
KINDS = {"$js.ack": 4, "$kv": 2, "$js.api": 5, "_inbox": 1}
"""By its first tokens, how many tokens of a subject are its kind. Later tokens belong to one message or one request."""
FLUSH_AGAIN_SECONDS = 0.1
CLOSE_SECONDS = 3.0
READING = re.compile(
    r"((STREAM|CONSUMER|META)\.)?(INFO|NAMES|LIST|MSG\.GET|SNAPSHOT)(\.|$)|CONSUMER\.CREATE\.[^.]+(\.[^.]+-r\d+)?$"
)
"""The subjects behind `$JS.API.` of requests that only read. A reader makes a consumer for itself, without a name or
with one of `jetstream.identities`."""


class ServerVersion(NamedTuple):
    """The version of a nats-server."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


class NatsConnection:
    """A connection to the servers of `settings`. `open` it before use, `watch` it meanwhile, `close` it after."""

    def __init__(
        self, settings: config.JetStream, *, on_connection: ConnectionListener | None, owner: str = ""
    ) -> None:
        self.nc = Client()
        self.wire: wire.Wire
        self.owner = owner
        """Whose names readers have (`jetstream.identities`)."""
        self.on_reconnect: set[Callable[[], None]] = set()
        self.on_disconnect: set[Callable[[], None]] = set()
        self._settings = settings
        self._listener = on_connection
        self.api_prefix = settings.api
        self.inbox_prefix = inboxes.SHARED
        """The prefix of the subjects on which we listen to answers."""
        self._inboxes: set[Inbox] = set()
        self.settled_below = b"$JS.ACK."
        """The beginning of the subjects by which the latest messages were settled: a server may use a longer form."""
        self._moved = False
        """Whether the prefix has changed since the connection was made."""
        self._user = ""
        self._requests: Requests
        self._foreign: Counter[str] = Counter()
        """How many answers came that do not belong to a request, by what there is to say of them."""
        self._last_error = ""
        self._since: datetime | None = None
        """Since when there is no connection, after the first one."""
        self._told = ("", -math.inf)
        """The reason that the listener was last told, and when, on the event loop's clock."""
        self._denials: dict[str, float] = {}
        """By what the server said, when it last denied us a subject; the oldest first."""
        self._reported: set[str] = set()
        """Denied subjects, by kind."""
        self._pongs: set[asyncio.Future[bool]] = set()
        self._server_version = ServerVersion(0, 0)
        self._lost = anyio.Event()
        self._reason: BackendError = UnavailableError("the connection was closed")
        self._opened = False
        self._closing = False

    @property
    def ready(self) -> bool:
        return bool(self.nc.is_connected)

    @property
    def unconnected(self) -> str:
        """The text of the error of what needs a connection while there is none: since when, and why."""
        since = f" since {self._since:%Y-%m-%d %H:%M:%S} UTC" if self._since else ""
        return f"not connected to {self._urls}{since}: {self._last_error or 'the connection was closed'}"

    @property
    def shares_inbox(self) -> bool:
        """Whether our user has a name, and listens to answers where other users can hear them too."""
        return bool(self._user) and self.inbox_prefix == inboxes.SHARED

    @property
    def slow_because(self) -> str:
        return self.wire.slow_because

    @property
    def max_payload(self) -> int:
        return self.nc.max_payload

    @property
    def server_version(self) -> ServerVersion:
        """Of the server, or of the last one: nats-py knows none while it connects to a server that is new to it."""
        found = self.nc.connected_server_version
        if found.major:
            self._server_version = ServerVersion(found.major, found.minor)
        return self._server_version

    def require_server(self, major: int, minor: int, *, to: str) -> None:
        """Raise `RefusedError` where the server is older than is needed `to` do this."""
        # An older server does not answer at all to what it does not know, or passes it over.
        if (found := self.server_version) < (major, minor):
            raise RefusedError(f"to {to}, nats-server {major}.{minor} or newer is needed; this one is {found}")

    async def open(self) -> None:
        """Connect, `retry_attempts` times at most, each within `timeout_seconds`.

        Raises `UnavailableError` with the URLs and the number of attempts, `RefusedError` where no further attempt
        would help: the server turns us away, it cannot be trusted, or a file that the settings name cannot be used.
        """
        settings = self._settings
        options = credentials.options(settings)
        self._user = credentials.user(settings)
        told = -math.inf
        for attempt in range(1, settings.retry_attempts + 1):
            if attempt > 1:
                await anyio.sleep(settings.reconnect_delay_ms / 1000)
            try:
                with anyio.fail_after(settings.timeout_seconds):
                    await self._connect(attempt, options)
                    self.wire = wire.attach(self.nc)
                    await self._open_requests()
            except (nats.errors.Error, OSError, ValueError) as error:
                await self._close_client()
                self._last_error = self._last_error or self._said(error)
            else:
                self._server_version = self.server_version  # before anything can be lost
                self._opened = True
                self._tell(connected=True, reason="")
                return
            if refusal := faults.refusal(self._last_error):
                raise self._refused(refusal)
            is_last = attempt == settings.retry_attempts
            if not is_last and anyio.current_time() - told >= TELL_AGAIN_SECONDS:  # the attempts may be many
                told = anyio.current_time()
                self._tell(connected=False, reason=self._last_error)
        attempts = counted(settings.retry_attempts, "attempt")
        raise UnavailableError(
            f"no NATS server at {self._urls} after {attempts}: {self._last_error}; start one, for example by "
            "`aviso-workers server start`, or correct nats_url"
        )

    def _said(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"no answer within {self._settings.timeout_seconds:g} s"
        return str(error) or type(error).__name__

    async def watch(self) -> None:
        """Leave a server that does not answer any more: nats-py would believe in it for minutes. Never returns."""
        unanswered = 0
        while True:
            if not self.ready or await self.answers():
                unanswered = 0
                await anyio.sleep(PING_SECONDS)
                continue
            unanswered += 1
            if unanswered == SILENT_PINGS:
                self._last_error = "the server is silent"
                await self._leave()

    async def failed(self) -> None:
        """Wait until the connection is lost for good, then raise the `BackendError` that says why."""
        await self._lost.wait()
        raise self._reason

    async def close(self) -> None:
        self._closing = True
        # nats-py first sends what it has buffered, which fails where the connection is down, and waits until the server
        # has taken it, which a silent one never does. What is not taken is delivered again.
        with anyio.move_on_after(CLOSE_SECONDS, shield=True), suppress(nats.errors.Error, OSError):
            await self._close_client()
        if self._opened:
            self.wire.abort()  # nats-py goes on until its buffer is taken, and a silent server never takes it

    async def _close_client(self) -> None:
        """Close nats-py's client. Raises what it raises, but no cancellation that is not ours.

        nats-py that is closed while it begins to reconnect cancels the future that its closing waits for next. That
        cancellation would end the caller's task without a word: so the client is closed in a task of its own.
        """
        closing = asyncio.ensure_future(self.nc.close())
        try:
            await asyncio.wait({closing})
        finally:
            closing.cancel()
        if not closing.cancelled():
            closing.result()

    async def api(
        self, subject: str, request: Any = None, *, prefix: str = "", timeout_seconds: float = API_TIMEOUT_SECONDS
    ) -> dict[str, Any]:
        """Ask JetStream's API over raw JSON, so that no field is lost on the way.

        `subject` is what follows `$JS.API.`, or another `prefix`. Raises `UnavailableError`, `RefusedError` or
        `NotFoundError`.
        """
        body = b"" if request is None else msgspec.json.encode(request)
        self._require_ready(subject, body)
        whole, sent = f"{prefix or self.api_prefix}.{subject}", anyio.current_time()
        try:
            with faults.translated(subject, changes=not READING.match(subject)):
                answer = await self._request(whole, body, asked=subject, timeout_seconds=timeout_seconds)
        except UnavailableError:
            self.check_allowed(whole, since=sent)
            raise
        decoded: dict[str, Any] = msgspec.json.decode(answer)
        if "error" in decoded:
            raise faults.from_api(subject, decoded["error"])
        return decoded

    async def _request(self, subject: str, body: bytes, *, asked: str, timeout_seconds: float) -> bytes:
        ask = partial(self._requests.ask, subject, body, is_answer=partial(answers.belongs_to, asked))
        if ".INFO." not in subject or timeout_seconds <= CHECK_AGAIN_SECONDS:
            return (await ask(timeout_seconds=timeout_seconds)).data
        try:
            return (await ask(timeout_seconds=CHECK_AGAIN_SECONDS)).data
        except TimeoutError:
            return (await ask(timeout_seconds=timeout_seconds - CHECK_AGAIN_SECONDS)).data

    async def request(self, subject: str, body: bytes, *, timeout_seconds: float) -> Answer:
        """Return what is answered to any request, by whomever.

        Raises `UnavailableError`, and `DeniedError` where the server has denied it.
        """
        self._require_ready(subject, body)
        sent = anyio.current_time()
        try:
            with faults.translated(subject):
                return await self._requests.ask(subject, body, timeout_seconds=timeout_seconds)
        except UnavailableError:
            self.check_allowed(subject, since=sent)
            raise

    def _require_ready(self, subject: str, body: bytes) -> None:
        """Raise `UnavailableError` without a connection, and `RefusedError` where the server takes no such subject, or
        no such body: it would close the connection.
        """
        require_subject(subject)
        if not self.ready:
            raise UnavailableError(f"{subject}: {self.unconnected}")
        if len(body) > self.max_payload:
            raise RefusedError(f"{subject}: {len(body)} bytes, the server takes {self.max_payload}")

    def post(self, subject: str, body: bytes, *, reply: str, prefix: str = "") -> None:
        """Send a request of JetStream's API whose answers come to the inbox `reply`, as pulls do. Raises `RefusedError`
        where a server takes no such subject.
        """
        require_subject(subject)
        self.wire.send(f"{prefix or self.api_prefix}.{subject}".encode(), body, reply=reply.encode())

    def new_inbox(self) -> str:
        """Return a subject for answers that nobody can guess."""
        return inboxes.new_inbox(self.inbox_prefix)

    async def open_inbox(self, inbox: Inbox) -> Inbox:
        """Listen to the answers that come to an inbox, also after a reconnect. Raises `UnavailableError`."""
        with faults.translated("listen to answers"):
            await inbox.open(self.wire, self.inbox_prefix)
        self._inboxes.add(inbox)
        return inbox

    async def close_inbox(self, inbox: Inbox) -> None:
        """Listen no more; return when nothing more can arrive. What is on its way still does."""
        if inbox in self._inboxes:
            self._inboxes.discard(inbox)
            await self.leave(inbox.interest)

    def is_own(self, domain: str) -> bool:
        """Return whether an answer from a JetStream domain is from the one that is asked; empty means any."""
        return not self._settings.domain or domain in ("", self._settings.domain)

    def tell_foreign(self, request: str, body: bytes) -> None:
        """State that this body came as an answer to a request to which it does not belong."""
        what = f"{request}: {answers.described(body)} came as its answer"
        if what not in self._foreign and len(self._foreign) >= MAX_REPORTED:
            what = "one request of many: an answer came that does not belong to it"
        self._foreign[what] += 1
        if self._listener:
            self._listener(connected=self.ready, reason="", foreign=what, times=self._foreign[what])

    async def listen(self, subject: str, listener: wire.Listener) -> wire.Interest:
        """Call the listener with what comes for the subject, also after a reconnect. Raises `UnavailableError`, and
        `RefusedError` where a server takes no such subject.
        """
        require_subject(subject)
        with faults.translated(f"listen to {subject}"):
            return await self.wire.listen(subject, listener)

    async def leave(self, interest: wire.Interest) -> None:
        """Listen no more; return when nothing more can arrive. What is on its way still does."""
        with anyio.move_on_after(CLOSE_SECONDS):
            self.wire.mute(interest)
            await self.answers()
        await self.wire.forget(interest)

    async def answers(self) -> bool:
        """Return whether the server answers a PING; then it has what was sent so far.

        Not by nats-py's own flush: its PING overtakes what waits to be written, and when it is cancelled or takes too
        long, a PONG that comes later ends nats-py's reader.
        """
        pong: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._pongs.add(pong)
        try:
            with anyio.move_on_after(PING_SECONDS), suppress(nats.errors.Error, OSError):
                if self.ready:
                    await self.wire.ping(pong)
                    return self.ready and await asyncio.shield(pong)
            return False
        finally:
            self._pongs.discard(pong)

    async def flush(self) -> None:
        """Return when the server has what was sent so far, after a reconnect if need be.

        Raises `UnavailableError` where there will be none.
        """
        while not self.nc.is_closed:
            if await self.answers():
                return
            await anyio.sleep(FLUSH_AGAIN_SECONDS)
        raise UnavailableError("flush: the connection is closed")

    def check_allowed(self, subject: str, *, since: float, answers: bool = True) -> None:
        """Raise `DeniedError` where the server has denied us to publish to the subject, or to hear `answers`.

        It says so beside the request, which nobody answers then. `since` is a time of the event loop. A request whose
        answer we may not hear is done all the same.
        """
        for said, when in self._denials.items():
            if when >= since and (denies(said, subject) or (answers and _denies_answers(said, self.inbox_prefix))):
                raise DeniedError(f"{subject}: {said.removeprefix('nats: ')}")

    def check_allowed_below(self, prefix: str, *, since: float) -> None:
        """Raise `DeniedError` where the server has denied us to publish to a subject that begins so."""
        for said, when in self._denials.items():
            if when >= since and f'publish to "{prefix.lower()}' in said:
                raise DeniedError(f"{prefix}>: {said.removeprefix('nats: ')}")

    @property
    def _urls(self) -> str:
        return ", ".join(self._settings.masked_servers)

    async def _connect(self, attempt: int, options: dict[str, Any]) -> None:
        settings = self._settings
        alone = len(settings.servers) == 1
        patience = settings.timeout_seconds if alone else min(settings.timeout_seconds, attempt * SECONDS_PER_SERVER)
        self.nc = credentials.CarefulClient(settings)
        await self.nc.connect(
            list(settings.servers),
            name="aviso-workers",
            connect_timeout=patience,
            allow_reconnect=settings.enable_auto_reconnect,
            # nats-py uses these two for the first connection as well: there, the attempts are counted by `open`.
            max_reconnect_attempts=1,
            reconnect_time_wait=0,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_reconnected,
            closed_cb=self._on_closed,
            lame_duck_mode_cb=self._on_lame_duck,
            **options,
        )
        # Aviso's 0 means without end, which nats-py spells -1.
        self.nc.options["max_reconnect_attempts"] = settings.max_reconnect_attempts or -1
        self.nc.options["reconnect_time_wait"] = settings.reconnect_delay_ms / 1000
        self._last_error = ""

    async def _open_requests(self) -> None:
        """Listen to answers below the prefix of the settings, or below the other one where the server denies it."""
        self._inboxes.clear()
        self._moved = False
        self._requests = Requests(self.wire, on_foreign=self.tell_foreign)
        self.inbox_prefix = inboxes.prefix(self._settings, self._user)
        await self.open_inbox(self._requests.inbox)
        if self._may_move and not await self.answers():
            raise TimeoutError

    @property
    def _may_move(self) -> bool:
        return bool(self._user) and not self._settings.inbox_prefix

    @property
    def _other_prefix(self) -> str:
        return inboxes.SHARED if not self.shares_inbox else inboxes.prefix(self._settings, self._user)

    async def _move_inboxes(self) -> None:
        """Change between the user's own prefix and the one that all users share, because the server denies the present
        one: its permissions were written for the other, at the start or since the last connection.
        """
        self._moved = True
        self.inbox_prefix = self._other_prefix
        for inbox in tuple(self._inboxes):
            await self.wire.forget(inbox.interest)
            await inbox.open(self.wire, self.inbox_prefix)
            if inbox not in self._inboxes:  # it was closed meanwhile
                await self.wire.forget(inbox.interest)
        for act in (*self.on_disconnect, *self.on_reconnect):
            act()  # answers to what was requested before do not come any more

    async def _leave(self) -> None:
        """Reconnect, to another server where there is one."""
        self.wire.abort()
        if self._settings.enable_auto_reconnect:
            await self.nc.force_reconnect()
        else:
            await self._close_client()

    async def _on_error(self, error: Exception) -> None:
        self._last_error = str(error) or type(error).__name__
        if "permissions violation" in self._last_error:
            if self._may_move and _denies_answers(self._last_error, self._other_prefix):
                return  # said of what was left meanwhile
            if self._may_move and not self._moved and _denies_answers(self._last_error, self.inbox_prefix):
                await self._move_inboxes()
                return
            self._note_denial(self._last_error)
        told, at = self._told
        if self._since and self._last_error != told and anyio.current_time() - at >= TELL_AGAIN_SECONDS:
            self._tell(connected=False, reason=self._last_error)

    def _note_denial(self, said: str) -> None:
        self._denials.pop(said, None)
        self._denials[said] = anyio.current_time()
        if len(self._denials) > MAX_DENIALS:
            del self._denials[next(iter(self._denials))]
        self._requests.end_denied(said)
        kind = _kind(said)
        if self._opened and kind not in self._reported and len(self._reported) < MAX_REPORTED:
            self._reported.add(kind)
            if self._listener:
                self._listener(connected=self.ready, reason="", denied=kind)

    async def _on_disconnected(self) -> None:
        self._moved = False
        for pong in self._pongs:
            if not pong.done():
                pong.set_result(False)
        for act in tuple(self.on_disconnect):
            act()
        if self._opened and not self._closing and self._since is None:  # a client that gives up says it once more
            self._since = datetime.now(UTC)
            self._tell(connected=False, reason=self._why("the connection was lost"))

    async def _on_reconnected(self) -> None:
        self._last_error, self._since = "", None
        self._denials.clear()
        for act in tuple(self.on_reconnect):
            act()
        self._tell(connected=True, reason="")

    async def _on_lame_duck(self) -> None:
        """Leave a server that is about to shut down while there is time, unless no other one is known."""
        if len(self.nc.servers) > 1:
            self._last_error = "the server is shutting down"
            await self.nc.force_reconnect()

    async def _on_closed(self) -> None:
        if not self._opened or self._lost.is_set():
            return  # a failed attempt to connect, which `open` reports, or said before
        reason = self._why("no server answered")
        if refusal := faults.refusal(reason):
            self._reason = self._refused(refusal)
        else:
            self._reason = UnavailableError(f"the connection to {self._urls} is lost for good: {reason}")
        self._lost.set()

    def _refused(self, refusal: str) -> RefusedError:
        return RefusedError(f"{self._urls} {refusal}: {self._last_error}")

    def _why(self, otherwise: str) -> str:
        """Return what the server said when it ended the connection, else the last error on the way."""
        last = self.nc.last_error
        if last is not None and not isinstance(last, nats.errors.NoServersError):
            self._last_error = str(last) or type(last).__name__
        return self._last_error or otherwise

    def _tell(self, *, connected: bool, reason: str) -> None:
        self._told = (reason, anyio.current_time())
        if self._listener:
            self._listener(connected=connected, reason=reason)


def require_subject(subject: str) -> None:
    """Raise `RefusedError` for what a server does not take as a subject: names in it may be foreign."""
    if why := subjects.why_refused(subject):
        raise RefusedError(why)


def _denies_answers(said: str, prefix: str) -> bool:
    """Return whether a server denies with these words to listen to answers below the prefix."""
    return f'subscription to "{prefix.lower()}.' in said


def _kind(said: str) -> str:
    """Return what a server has denied, without the tokens of the subject that belong to one message or one request."""
    denied, _, rest = said.removeprefix("nats: ").strip("'").removeprefix("permissions violation for ").partition('"')
    subject = rest.partition('"')[0]
    tokens = subject.split(".")
    length = next((length for begin, length in KINDS.items() if f"{subject}.".startswith(f"{begin}.")), 1)
    cut = ".".join(tokens[:length]) + (".>" if len(tokens) > length else "")
    return f"{denied.strip()} {cut}"
