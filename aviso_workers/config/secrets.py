"""Values that are never shown: not by repr(), not in an f-string, not in a message.

`reveal()` is the only way to the value; it is called where a connection is made and nowhere else.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

HIDDEN = "***"

_SCHEMES = ("nats", "tls", "ws", "wss")


class Secret:
    """A password or a token."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        """Keep a secret. Raises ValueError if it is blank."""
        if not value.strip():
            raise ValueError("must not be empty")
        self._value = value

    def reveal(self) -> str:
        return self._value

    def __repr__(self) -> str:
        return HIDDEN

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._value == self._value

    def __hash__(self) -> int:
        return hash(self._value)


class ServerUrls:
    """The URLs of NATS servers, of which scheme, host and port are shown."""

    __slots__ = ("_urls",)

    def __init__(self, *urls: str) -> None:
        """Keep the URLs. Raises ValueError for one that no NATS client can use, without repeating it."""
        self._urls = tuple(url.strip() for url in urls)
        if not any(self._urls):
            raise ValueError("must not be empty")
        for position, url in enumerate(self._urls, start=1):
            if not is_url(with_scheme(url), _SCHEMES):
                which = f": number {position} of {len(self._urls)} is not" if len(self._urls) > 1 else ""
                raise ValueError(f"must be a URL such as nats://host:4222 (or {', '.join(_SCHEMES[1:])}){which}")

    @property
    def have_user(self) -> bool:
        return any("@" in url for url in self._urls)

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """The host and the port of each; the port is 4222 where the URL has none, as for every NATS client."""
        parts = [urlsplit(with_scheme(url)) for url in self._urls]
        return tuple((each.hostname or "", each.port or 4222) for each in parts)

    def reveal(self) -> tuple[str, ...]:
        return self._urls

    def masked(self) -> tuple[str, ...]:
        return tuple(address_only(url) for url in self._urls)

    def __repr__(self) -> str:
        return ", ".join(self.masked())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ServerUrls) and other._urls == self._urls

    def __hash__(self) -> int:
        return hash(self._urls)


def is_url(text: str, schemes: tuple[str, ...]) -> bool:
    """Return whether it is a URL with one of these schemes and a host, and without blanks."""
    try:
        parts = urlsplit(text)
        return (
            text.isprintable()
            and " " not in text
            and parts.scheme in schemes
            and bool(parts.hostname and parts.port != 0)
        )
    except ValueError:
        return False


def with_scheme(url: str) -> str:
    """Return the URL of a server, with the scheme that NATS clients assume where it has none."""
    return url if "://" in url else f"nats://{url}"


def without_user(url: str) -> str:
    """Return the URL, or the host and port, with the user and the password before it and the query masked."""
    before, at, host = url.rpartition("@")
    host, query, _ = host.partition("?")
    host += f"?{HIDDEN}" if query else ""
    if not at:
        return host
    scheme, separator, _ = before.partition("://")
    return f"{scheme}{separator}{HIDDEN}@{host}" if separator else f"{HIDDEN}@{host}"


def address_only(url: str) -> str:
    """Return the URL of a server, or its host and port, with all else masked: the user, path, query and fragment."""
    scheme, separator, rest = url.partition("://") if "://" in url else ("", "", url)
    address = re.split("[/?#]", rest, maxsplit=1)[0]
    after = rest[len(address) :]
    if "@" in after:  # of a password with a character that ends the host
        return f"{scheme}{separator}{HIDDEN}"
    return without_user(f"{scheme}{separator}{address}") + (f"/{HIDDEN}" if after.strip("/") else "")
