"""How we tell a server who we are, and what makes us trust it: credentials, and TLS of the connection.

Credentials are a token, a user, an NKey, or a user JWT with its seed. The file of a JWT is read for each connection,
because who issues short ones replaces it. nats-py's own reading of it never returns where the JWT is missing, and what
it raises ends reconnecting for good.

A NATS server greets in plain text and says there whether it takes TLS, which version it has and how large a message
may be; nats-py believes that. So whoever can change the greeting could have the password, or stop a worker.
`CarefulClient` looks at the connection itself, before anything is sent on it, and believes what is said within TLS:
nats-server 2.12 and newer say everything again after the first PING.
`NatsConnection` is the only caller, but for the certificate, which an operator asks for.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import socket
import ssl
import time
from dataclasses import replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import ParseResult, unquote, urlsplit

import msgspec
import nats.errors
import nkeys
from msgspec import Struct
from nats.aio.client import DEFAULT_FLUSH_TIMEOUT, Client
from nats.aio.transport import TcpTransport

from aviso_workers import config
from aviso_workers.errors import RefusedError

JWT = "BEGIN NATS USER JWT"
SEED = "BEGIN USER NKEY SEED"
SCHEMES = ("tls://", "wss://")
HOOKS = ("_process_connect_init", "_process_info", "_connect_command", "_connect_to_server", "_close", "_host_is_ip")
"""The private methods of nats-py that `CarefulClient` relies on."""
ADDRESS_SECONDS = 5.0
"""An address of a name that has several may take so long to answer."""
OLDEST_SERVER = "2.11.0"
"""The version that is assumed of a server that does not repeat its greeting within TLS: 2.12 and newer do."""
SMALLEST_LIMIT, LARGEST_LIMIT = 1 << 20, 64 << 20
"""The smallest and the largest limit for a payload, in bytes, of such a server: at least the default of NATS."""


class UnusableFileError(nats.errors.Error, RefusedError):
    """A file that the settings name cannot be read, or holds something else. nats-py, which may raise it while it
    connects, goes on after errors of its own only."""


def options(settings: config.JetStream) -> dict[str, Any]:
    """Return what `nats.aio.client.Client.connect` takes. Raises `RefusedError` for a file that cannot be used."""
    found = _of_user(settings)
    if settings.tls:
        found["tls"] = tls_context(settings.tls)
        if settings.tls.server_hostname:
            found["tls_hostname"] = settings.tls.server_hostname
    return found


def _of_user(settings: config.JetStream) -> dict[str, Any]:
    if settings.token:
        return {"token": settings.token.reveal()}
    if settings.user:
        return {"user": settings.user, "password": settings.password.reveal() if settings.password else ""}
    if settings.nkey_seed_file:
        return {"nkeys_seed_str": seed_of(settings.nkey_seed_file)}
    return _of_credentials(settings.credentials_file) if settings.credentials_file else {}


def user(settings: config.JetStream) -> str:
    """Return the name that a server has for us: the user, or the public key of an NKey or a JWT. It is empty where the
    settings do not say it, as with a token or a certificate alone.

    Raises `UnusableFileError`.
    """
    if settings.token:
        return ""
    if settings.user:
        return settings.user
    if settings.nkey_seed_file:
        public_key: bytes = _key_pair_of(settings.nkey_seed_file).public_key
        return public_key.decode()
    if settings.credentials_file:
        return _subject_of_jwt(settings.credentials_file)
    urls = [urlsplit(url) for url in settings.servers]
    users = {unquote(url.username or "") for url in urls if url.password is not None}  # without one it is a token
    return users.pop() if len(users) == 1 else ""


class _Claims(msgspec.Struct):
    sub: str


def _subject_of_jwt(file: str) -> str:
    claims = _block(file, JWT).split(".")[1:2]
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(f"{claims[0]}=="), type=_Claims).sub
    except (IndexError, binascii.Error, msgspec.MsgspecError) as error:
        raise UnusableFileError(f"credentials_file {file}: holds no user JWT") from error


def _of_credentials(file: str) -> dict[str, Any]:
    def jwt() -> bytearray:
        return bytearray(_block(file, JWT).encode())

    def sign(nonce: str) -> bytes:
        return base64.b64encode(_key_pair(_block(file, SEED), f"credentials_file {file}").sign(nonce.encode()))

    jwt()
    sign("tried at the start")
    return {"user_jwt_cb": jwt, "signature_cb": sign}


def seed_of(file: str) -> str:
    """Return the seed in a file of an NKey. Raises `UnusableFileError`."""
    _key_pair_of(file)
    return _seed(file)


def _key_pair_of(file: str) -> nkeys.KeyPair:
    return _key_pair(_seed(file), f"nkey_seed_file {file}")


def _seed(file: str) -> str:
    return _text(file, f"nkey_seed_file {file}").strip()


def _block(file: str, title: str) -> str:
    """Return the line below the one that has the title."""
    what = f"credentials_file {file}"
    for line, following in pairwise(_text(file, what).splitlines()):
        if line.strip(" -") == title:
            return following.strip()
    raise UnusableFileError(f"{what}: has no line '-----{title}-----'")


def _key_pair(seed: str, what: str) -> nkeys.KeyPair:
    # Neither the seed nor a part of it is repeated.
    problem = f"{what}: holds no seed of a user's NKey, which begins with SU"
    if not seed.startswith("SU"):
        raise UnusableFileError(problem)
    try:
        return nkeys.from_seed(bytearray(seed.encode()))
    except (nkeys.NkeysError, ValueError) as error:
        raise UnusableFileError(problem) from error


def _text(file: str, what: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise UnusableFileError(f"{what}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UnusableFileError(f"{what}: is not UTF-8 text") from error


class _Greeting(Struct):
    """The fields from the greeting of a server that does not repeat it within TLS."""

    max_payload: int = SMALLEST_LIMIT
    connect_urls: list[str] | None = None


class NoTlsError(nats.errors.Error):
    """The server, or who answers in its place, offers no TLS."""


class CarefulClient(Client):
    """nats-py's client, which sends nothing without TLS where that is wanted.

    Each attempt to connect begins with another address of the server's name, because one that accepts connections may
    say nothing, and reads certificates and keys anew, because who issues short ones replaces them. What nats-py takes
    for the end of the connection for good makes it reconnect.
    """

    def __init__(self, settings: config.JetStream) -> None:
        """Raises `RefusedError` where this nats-py does not have the parts that are needed for that."""
        tls_wanted = wants_tls(settings)
        if missing := [name for name in HOOKS if tls_wanted and not hasattr(Client, name)]:
            raise RefusedError(
                f"nats-py {version('nats-py')} has no {missing[0]}, so that it could send credentials without TLS: "
                "install a version that was tested"
            )
        super().__init__()
        self._tls_wanted = tls_wanted
        self._settings = settings
        self._attempts = 0
        self._ended = False
        """Whether it was closed for good."""
        self._greeting: _Greeting | None = None
        """The greeting in plain text, as long as the server has not repeated it within TLS."""
        self._any_name_is_trusted = not (settings.tls and (settings.tls.ca_file or settings.tls.server_hostname))
        """The system's authorities sign for everybody, each for the name that is his."""

    async def _connect_to_server(self, s: Any) -> None:
        if self._ended:  # Python's `wait_for` can lose the cancellation by which nats-py ends reconnecting
            raise asyncio.CancelledError
        if self._attempts:
            self._renew()
        addresses = await _addresses(s.uri) if s.uri.scheme not in ("ws", "wss") else [s.uri]
        first, self._attempts = self._attempts % len(addresses), self._attempts + 1
        timeout = self._patience if len(addresses) == 1 else min(self._patience, ADDRESS_SECONDS)
        self.options["connect_timeout"] = timeout
        for number, address in enumerate((*addresses[first:], *addresses[:first]), start=1):
            try:
                await super()._connect_to_server(replace(s, uri=address))
            except (OSError, TimeoutError):
                if number == len(addresses):
                    raise
            else:
                s.last_attempt = time.monotonic()
                return

    def _renew(self) -> None:
        """Read the files again. What is raised for one that cannot be used is the error of this attempt."""
        if self._settings.tls:
            self.options["tls"] = tls_context(self._settings.tls)
        if self._settings.nkey_seed_file:
            self._nkeys_seed_str = seed_of(self._settings.nkey_seed_file)
            self._setup_nkeys_connect()

    async def _process_err(self, err_msg: str) -> None:
        if not self.is_connected or "permissions violation" in err_msg.lower():
            await super()._process_err(err_msg)
            return
        said = err_msg.strip("'")
        self._err = nats.errors.Error(f"nats: {said}")
        await self._error_cb(self._err)
        await self._process_op_err(self._err)

    async def connect(self, *args: Any, **kwargs: Any) -> None:
        self._patience: float = kwargs["connect_timeout"]
        await super().connect(*args, **kwargs)
        if self._greeting:
            await self.flush()

    async def flush(self, timeout: int = DEFAULT_FLUSH_TIMEOUT) -> None:  # noqa: ASYNC109, as nats-py has it
        """Return when the server has what was sent so far, and is known. nats-py flushes after each reconnect."""
        await super().flush(timeout)
        if greeting := self._greeting:  # the server has answered a PING, and said nothing of itself before
            limit = min(max(greeting.max_payload, SMALLEST_LIMIT), LARGEST_LIMIT)
            further = [url for url in greeting.connect_urls or () if self._may_lead_to(url)]
            await self._take({"version": OLDEST_SERVER, "max_payload": limit, "connect_urls": further})

    async def _process_connect_init(self) -> None:
        """Log in. Whatever is wrong with a greeting, nats-py goes on after an error of its own only."""
        try:
            await super()._process_connect_init()
        except OSError:
            raise
        except (ValueError, TypeError, AttributeError) as error:
            raise nats.errors.Error(f"nats: the greeting of the server cannot be read: {error}") from error

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        """Take what the server says. Of a greeting that anybody may have written, that is what logging in needs: the
        server compares the nonce with its own."""
        if not self._tls_wanted or is_encrypted(self):
            await self._take(info, initial_connection=initial_connection)
            return
        self._greeting = msgspec.convert(info, _Greeting)
        self._server_info = {"headers": True} | {key: info[key] for key in ("tls_required", "nonce") if key in info}
        self._auth_configured = True

    async def _take(self, info: dict[str, Any], *, initial_connection: bool = False) -> None:
        """Take what nats-py takes, and of every INFO what nats-py takes from the first one only."""
        self._greeting = None
        self._server_info = self._server_info | info
        self._max_payload = info.get("max_payload", self._max_payload)
        if self._current_server and "version" in info:
            self._current_server.server_version = info["version"]
        await super()._process_info(info, initial_connection)

    def _may_lead_to(self, url: str) -> bool:
        """Return whether a server that anybody may have named is used: none by its name where each name is trusted. For
        an address nats-py asks for a certificate of the name that is configured."""
        try:
            parts = urlsplit(f"//{url}")
            is_usable = bool(parts.hostname and parts.port)
        except ValueError:
            return False
        return is_usable and (not self._any_name_is_trusted or self._host_is_ip(parts.hostname))

    def _connect_command(self) -> bytes:
        """nats-py sends what this returns, which holds the credentials, before anything else."""
        if self._tls_wanted and not is_encrypted(self):
            server = self._current_server.uri if self._current_server else None
            name = f"{server.hostname}:{server.port}" if server else "the server"
            raise NoTlsError(f"{name} offers no TLS, which the configuration asks for: nothing was sent to it")
        if isinstance(self._transport, TcpTransport) and self._transport._io_writer and is_encrypted(self):
            # nats-py does not tell asyncio's protocol of the TLS beneath it, which then complains at the end. Its
            # `connection_made` would, and would also limit what is read ahead, which makes a replay slower.
            protocol: Any = self._transport._io_writer.transport.get_protocol()
            protocol._over_ssl = True
        command: bytes = super()._connect_command()
        return command

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        """nats-py sends what still waits before it closes, also in the middle of connecting, and to a socket that is
        closed, which Python 3.13.0 takes for an error; and after a handshake that failed it waits for an end that was
        there already."""
        self._ended = self._ended or status == Client.CLOSED
        is_forbidden = (self._tls_wanted or self._server_info.get("tls_required")) and not is_encrypted(self)
        if is_forbidden or self._is_cut():
            self._pending = []
            self._pending_data_size = 0
        if is_forbidden:
            self._drop()
        await super()._close(status, do_cbs)

    def _is_cut(self) -> bool:
        writer = self._transport._io_writer if isinstance(self._transport, TcpTransport) else None
        return writer is not None and writer.is_closing()

    def _drop(self) -> None:
        if isinstance(self._transport, TcpTransport) and self._transport._io_writer is not None:
            self._transport._io_writer.transport.abort()
            self._transport = None  # nats-py makes another one for the next server


async def _addresses(url: ParseResult) -> list[ParseResult]:
    """Return the URL with each address of its name. Raises `OSError` where it has none."""
    found = await asyncio.get_running_loop().getaddrinfo(url.hostname, url.port, type=socket.SOCK_STREAM)
    hosts = dict.fromkeys(f"[{host}]" if family == socket.AF_INET6 else host for family, *_, (host, *_) in found)
    return [url._replace(netloc=f"{host}:{url.port}") for host in hosts]


def wants_tls(settings: config.JetStream) -> bool:
    """Return whether any part of the settings asks for TLS. Then every server must have it, discovered ones too."""
    return settings.tls is not None or any(url.startswith(SCHEMES) for url in settings.servers)


def tls_context(tls: config.Tls) -> ssl.SSLContext:
    """Return what to trust, and the certificate to show. Raises `RefusedError` for a file that cannot be used."""
    try:
        trusting = ssl.create_default_context(cafile=tls.ca_file)
    except OSError as error:
        raise RefusedError(f"tls.ca_file {tls.ca_file}: {_reason(error)}") from error
    if tls.cert_file:
        try:
            trusting.load_cert_chain(tls.cert_file, tls.key_file, password=_no_password)
        except (OSError, ValueError) as error:
            key = f" with tls.key_file {tls.key_file}" if tls.key_file else ""
            raise RefusedError(f"tls.cert_file {tls.cert_file}{key}: {_reason(error)}") from error
    return trusting


def is_encrypted(nc: Client) -> bool:
    transport = nc._transport
    return _tls_object(transport) is not None or bool(getattr(transport, "_using_tls", False))  # of a WebSocket


def certificate(nc: Client) -> bytes | None:
    """Return the server's certificate as it was seen when the connection was made, in DER form; None without TLS."""
    tls = _tls_object(getattr(nc, "_transport", None))
    return tls.getpeercert(binary_form=True) if tls is not None else None


def _tls_object(transport: Any) -> Any:
    writer = getattr(transport, "_io_writer", None)
    try:
        return writer.get_extra_info("ssl_object") if writer is not None else None
    except AttributeError:  # so says Python's transport where it was closed
        return None


def _no_password() -> str:
    """Refuse to give a passphrase, for which OpenSSL would ask at the terminal. Raises ValueError."""
    raise ValueError("the private key is encrypted with a passphrase, which cannot be given: store it without one")


def _reason(error: Exception) -> str:
    match error:
        case ssl.SSLError(reason=str(reason)):
            return f"cannot be used ({reason.lower().replace('_', ' ')})"
        case OSError(strerror=str(said)):
            return f"cannot be read: {said}"
        case _:
            return str(error)
