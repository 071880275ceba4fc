"""The one connection of a backend: opened with retries, watched, asked, closed.

nats-py reconnects by itself; its tasks are outside of ours. So there is one owner here that hears of every change:
`ready` says whether requests can be sent now, `closed` that nats-py has given up for good. What reads or waits
registers in `on_reconnect` or `on_disconnect`, because a server forgets pulls and a client forgets answers.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
import msgspec
import nats.errors
from nats.aio.client import Client

from aviso_workers import config
from aviso_workers.backends import ConnectionListener
from aviso_workers.backends.jetstream import faults
from aviso_workers.errors import RefusedError, UnavailableError

__all__ = ["Connection"]

API_TIMEOUT_SECONDS = 5.0
FLUSH_TIMEOUT_SECONDS = 10


class Connection:
    """A connection to the servers of `settings`. `open` it before use and `close` it after."""

    def __init__(self, settings: config.JetStream, *, on_connection: ConnectionListener | None) -> None:
        self.nc = Client()
        self.on_reconnect: set[Callable[[], None]] = set()
        self.on_disconnect: set[Callable[[], None]] = set()
        self.closed = anyio.Event()
        self.closed_reason = ""
        self._settings = settings
        self._listener = on_connection
        self._api_prefix = f"$JS.{settings.domain}.API" if settings.domain else "$JS.API"
        self._last_error = ""
        self._opened = False
        self._closing = False

    @property
    def ready(self) -> bool:
        return bool(self.nc.is_connected)

    async def open(self) -> None:
        """Connect, `retry_attempts` times at most, each within `timeout_seconds`.

        Raises `UnavailableError` with the URLs and the number of attempts, `RefusedError` where the server turns
        us away, which no further attempt would cure.
        """
        settings = self._settings
        urls = ", ".join(settings.masked_servers)
        for attempt in range(1, settings.retry_attempts + 1):
            if attempt > 1:
                await anyio.sleep(settings.reconnect_delay_ms / 1000)
            try:
                with anyio.fail_after(settings.timeout_seconds):
                    await self._connect()
            except (nats.errors.Error, OSError, ValueError) as error:
                await self.nc.close()
                self._last_error = self._last_error or str(error) or type(error).__name__
            else:
                self._opened = True
                self._tell(connected=True, reason="")
                return
            if "authorization violation" in self._last_error.lower():
                raise RefusedError(f"{urls} refused the credentials: {self._last_error}")
        raise UnavailableError(f"no NATS server at {urls} after {settings.retry_attempts} attempts: {self._last_error}")

    async def close(self) -> None:
        self._closing = True
        # nats-py first sends what it has buffered, which fails where the connection is down: it is delivered again.
        with anyio.CancelScope(shield=True), suppress(nats.errors.Error, OSError):
            await self.nc.close()

    async def api(self, subject: str, request: Any = None) -> dict[str, Any]:
        """Ask JetStream's API over raw JSON, so that no field is lost on the way.

        `subject` is what follows `$JS.API.`. Raises `UnavailableError`, `RefusedError` or `NotFoundError`.
        """
        if not self.ready:
            raise UnavailableError(f"{subject}: not connected")
        body = b"" if request is None else msgspec.json.encode(request)
        with faults.translated(subject):
            answer = await self.nc.request(f"{self._api_prefix}.{subject}", body, timeout=API_TIMEOUT_SECONDS)
        decoded: dict[str, Any] = msgspec.json.decode(answer.data)
        if "error" in decoded:
            raise faults.from_api(subject, decoded["error"])
        return decoded

    async def post(self, subject: str, body: bytes, *, reply: str) -> None:
        """Send a request of JetStream's API whose answers come to the inbox `reply`, as pulls do."""
        with faults.translated(subject):
            await self.nc.publish(f"{self._api_prefix}.{subject}", body, reply=reply)

    async def flush(self) -> None:
        """Return when the server has taken what was sent so far. Raises `UnavailableError`."""
        if not self.ready:
            raise UnavailableError("flush: not connected")
        with faults.translated("flush"):
            await self.nc.flush(timeout=FLUSH_TIMEOUT_SECONDS)

    async def _connect(self) -> None:
        settings = self._settings
        self.nc = Client()
        await self.nc.connect(
            list(settings.servers),
            name="aviso-workers",
            connect_timeout=settings.timeout_seconds,
            allow_reconnect=settings.enable_auto_reconnect,
            # nats-py uses these two for the first connection as well: there, the attempts are counted by `open`.
            max_reconnect_attempts=1,
            reconnect_time_wait=0,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_reconnected,
            closed_cb=self._on_closed,
            **_credentials(settings),
        )
        # Aviso's 0 means without end, which nats-py spells -1.
        self.nc.options["max_reconnect_attempts"] = settings.max_reconnect_attempts or -1
        self.nc.options["reconnect_time_wait"] = settings.reconnect_delay_ms / 1000
        self._last_error = ""

    async def _on_error(self, error: Exception) -> None:
        self._last_error = str(error) or type(error).__name__

    async def _on_disconnected(self) -> None:
        for act in tuple(self.on_disconnect):
            act()
        if self._opened and not self._closing:
            self._tell(connected=False, reason=self._last_error or "the connection was lost")

    async def _on_reconnected(self) -> None:
        self._last_error = ""
        for act in tuple(self.on_reconnect):
            act()
        self._tell(connected=True, reason="")

    async def _on_closed(self) -> None:
        if not self._opened:
            return  # a failed attempt to connect, which `open` reports
        self.closed_reason = str(self.nc.last_error or "") or self._last_error or "reconnecting was given up"
        self.closed.set()

    def _tell(self, *, connected: bool, reason: str) -> None:
        if self._listener:
            self._listener(connected=connected, reason=reason)


def _credentials(settings: config.JetStream) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if settings.token:
        options["token"] = settings.token.reveal()
    if settings.user:
        options |= {
            "user": settings.user,
            "password": settings.password.reveal() if settings.password else "",
        }
    if settings.nkey_seed_file:
        options["nkeys_seed"] = settings.nkey_seed_file
    if settings.credentials_file:
        options["user_credentials"] = settings.credentials_file
    if settings.tls:
        context = ssl.create_default_context(cafile=settings.tls.ca_file)
        if settings.tls.cert_file:
            context.load_cert_chain(settings.tls.cert_file, settings.tls.key_file)
        options["tls"] = context
        if settings.tls.server_hostname:
            options["tls_hostname"] = settings.tls.server_hostname
    return options
