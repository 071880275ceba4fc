"""Who a request comes from, and what that user may do.

A user shows a token: as a bearer token, or as the password of HTTP's Basic scheme (RFC 7617), for which browsers ask. A
proxy that has asked already names the user in a header. Without users and proxy, everybody who reaches the loopback has
all rights. A request that changes something must come from a page of our own: browsers say so in `Sec-Fetch-Site`
(Fetch Metadata, W3C).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from contextlib import suppress
from typing import get_args

from msgspec import Struct
from starlette.requests import HTTPConnection

from aviso_workers.config import Config
from aviso_workers.config.settings import Right, is_loopback
from aviso_workers.errors import AvisoWorkersError, ConfigError

ALL: frozenset[Right] = frozenset(get_args(Right))
EVERYBODY = "*"
HOST = re.compile(r"(\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[^\[\]:]*))(:[0-9]+)?")
"""The header `Host` (RFC 9110)."""


class ForbiddenError(AvisoWorkersError):
    """The user has no right to do this."""


class Visitor(Struct, frozen=True, kw_only=True):
    """The user whose request it is."""

    name: str
    rights: frozenset[Right]

    def may(self, right: Right) -> bool:
        return right in self.rights

    def require(self, right: Right) -> None:
        """Raise `ForbiddenError` where the user has no such right."""
        if right not in self.rights:
            raise ForbiddenError(f"{self.name} has no right to {right}")


class Access:
    """The users of a console and their rights."""

    def __init__(self, config: Config) -> None:
        """Read the section `workers.console`.

        Raises `ConfigError` where others than this machine would reach a console without users, or where two users
        have one token.
        """
        self._settings = settings = config.workers.console
        self._users = {name: (_digest(user.token.reveal()), user.rights) for name, user in settings.users.items()}
        if refusals := settings.refusals(settings.host):
            raise ConfigError(refusals)

    def visitor(self, request: HTTPConnection) -> Visitor | None:
        """Return the user of a request; None where it shows no user that we know."""
        if self._settings.proxy is not None and (named := self._named_by_proxy(request)) is not None:
            return named
        if self._users:
            return self._with_token(request)
        if self._settings.proxy is None and request.client is not None and is_loopback(request.client.host):
            return Visitor(name="somebody on this machine", rights=ALL)
        return None

    def is_host(self, name: str) -> bool:
        """Return whether browsers may reach us by this name: with another one, a foreign page has sent the request."""
        found = HOST.fullmatch(name.lower())
        host = (found["address"] or found["name"]) if found else ""
        known = {each.lower() for each in ("localhost", self._settings.host, *self._settings.names)}
        return host in known or is_loopback(host)

    def is_own_page(self, request: HTTPConnection, *, only_reads: bool) -> bool:
        """Return whether a request comes from a page of ours, or from no page at all. One that changes something has a
        bearer token then.
        """
        site = request.headers.get("sec-fetch-site")
        if site is not None:
            return site == "same-origin"
        # Browsers leave it out where a page came by HTTP and not from this machine; `Origin` they send all the same.
        origin, bearer = request.headers.get("origin"), request.headers.get("authorization", "").lower()
        if origin is not None:
            return origin.partition("://")[2] == request.headers.get("host")
        return only_reads or bearer.startswith("bearer ")

    def _named_by_proxy(self, request: HTTPConnection) -> Visitor | None:
        proxy = self._settings.proxy
        assert proxy is not None
        names = request.headers.getlist(proxy.header)
        if len(names) != 1:
            return None  # of two, one came from outside
        name = names[0].strip()
        if not name or request.client is None or request.client.host not in proxy.addresses:
            return None
        rights = proxy.rights.get(name, proxy.rights.get(EVERYBODY))
        return Visitor(name=name, rights=frozenset(rights)) if rights is not None else None

    def _with_token(self, request: HTTPConnection) -> Visitor | None:
        name, token = _credentials(request.headers.get("authorization", ""))
        found = None
        for known, (digest, rights) in self._users.items():  # all of them, so that it takes the same time for each
            if hmac.compare_digest(_digest(token), digest) and name in (None, known):
                found = Visitor(name=known, rights=frozenset(rights))
        return found


def _credentials(header: str) -> tuple[str | None, str]:
    """Return the name, or None for a bearer token, and the token of the header `Authorization`."""
    scheme, _, value = header.partition(" ")
    if scheme.lower() == "bearer":
        return None, value.strip()
    if scheme.lower() == "basic":
        with suppress(binascii.Error, UnicodeDecodeError):
            name, _, token = base64.b64decode(value, validate=True).decode().partition(":")
            return name, token
    return "", ""


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
