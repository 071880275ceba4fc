"""What the workers of an app have leased of the limits that they keep together. `features.limits` writes it."""

from __future__ import annotations

import hashlib

from msgspec import Struct

from aviso_workers.errors import InvalidKeyError
from aviso_workers.jetstream.key_value import encode_key
from aviso_workers.state import bucket_names

KEPT_SECONDS = 2 * 86400
"""More than a token is leased ahead: what is forgotten has come to its end."""


class LeasedTokens(Struct, frozen=True, kw_only=True):
    """The lease of calls that some worker has taken last.

    Each call takes the time from one call to the next, so that versions with different limits share the time, and none
    begins more than its own limit lets.
    """

    until: float
    """Up to when the calls are leased: seconds since 1970 UTC, by the server's clock."""


def bucket_of(app: str) -> str:
    """Return the bucket of the app's limits."""
    return bucket_names.bucket_of(app, "limits")


def key_of(agent: str, fields: tuple[str, ...], values: tuple[str, ...]) -> str:
    """Return the key of an agent's limit for these values of identifier fields, as they are in a subject."""
    if not fields:
        return f"{agent}/all"
    try:
        return encode_key(f"{agent}/{'.'.join(fields)}/{'.'.join(values)}")
    except InvalidKeyError:  # it is too long
        return f"{agent}/{hashlib.blake2b(repr((fields, values)).encode()).hexdigest()}"
