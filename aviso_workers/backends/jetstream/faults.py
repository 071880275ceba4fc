"""What a server's or nats-py's error means to us: one table, decided by JetStream's `err_code`.

nats-py's classes follow the HTTP-like code, and that says little: a full stream is a 503 that no retry cures, a
refused update a 500 that is final. Codes as listed in nats-server's errors.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import nats.errors
import nats.js.errors

from aviso_workers.errors import (
    BackendError,
    ConflictError,
    FullError,
    NotFoundError,
    OutcomeUnknownError,
    RefusedError,
    UnavailableError,
)

__all__ = ["from_api", "outcome_unknown", "refusal", "translated"]

NOT_FOUND = {
    10014,  # consumer not found
    10037,  # no message found
    10043,  # sequence to delete not found
    10059,  # stream not found
}
CONFLICT = {
    10071,  # wrong last sequence, and which one it is
    10164,  # wrong last sequence
}
FULL = 10077
PER_SUBJECT = "per subject"
"""In the description of 10077: a stream refuses a second message of a subject, which no waiting cures."""
TRANSIENT = {
    10004,  # peers are rebuilding
    10007,  # cluster no longer a member
    10008,  # JetStream system temporarily unavailable
    10009,  # no leader
    10023,  # insufficient resources
    10028,  # resource limits exceeded
    10047,  # insufficient storage
    10118,  # stream offline
    10119,  # consumer offline
    10158,  # a publish of this message id is in process
    10163,  # replication lag
    10167,  # too many requests
    10194,  # stream offline, reason given
    10195,  # consumer offline, reason given
    10210,  # too many in-flight batches
    10211,  # too many in-flight batch messages
}
REFUSALS = {
    "authorization violation": "refused the credentials",
    "authorization failed": "refused the credentials",  # nats-py's word for it
    "authentication expired": "refused the credentials",
    "authentication revoked": "refused the credentials",
    "alert certificate": "refused our certificate",
    "alert bad certificate": "refused our certificate",
    "alert unknown ca": "refused our certificate",
    "offers no tls": "cannot be trusted",
    "certificate verify failed": "cannot be trusted",
}
"""By a part of an error's text, what it says of a server with which no further attempt will succeed."""


def refusal(said: str) -> str | None:
    """Return what an error's text says of a server that refuses us or that we refuse; None where it says neither."""
    return next((meaning for part, meaning in REFUSALS.items() if part in said.lower()), None)


def from_api(what: str, error: Mapping[str, Any]) -> BackendError:
    """Our error for the `error` object in an answer of JetStream's API."""
    code = error.get("err_code")
    message = f"{what}: {error.get('description', 'no description')}"
    if code:
        message = f"{message} (JetStream {code})"
    if code in NOT_FOUND:
        return NotFoundError(message, code=code)
    if code in CONFLICT:
        return ConflictError(message, code=code)
    if code == FULL and PER_SUBJECT not in message:
        return FullError(message, code=code)
    if code in TRANSIENT:
        return UnavailableError(message, code=code)
    return RefusedError(message, code=code)


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Raise ours from nats-py's. A request without an answer counts as not done: use it for what may be repeated."""
    try:
        yield
    except nats.js.errors.NoStreamResponseError as error:
        raise UnavailableError(f"{what}: no stream answers") from error
    except nats.js.errors.APIError as error:
        if not error.err_code:
            raise UnavailableError(f"{what}: JetStream does not answer") from error
        raise from_api(what, {"err_code": error.err_code, "description": error.description}) from error
    except nats.errors.NoRespondersError as error:
        raise UnavailableError(f"{what}: nobody answers; is JetStream enabled for this account?") from error
    except (nats.errors.TimeoutError, TimeoutError) as error:
        raise UnavailableError(f"{what}: no answer in time") from error
    except (nats.errors.Error, OSError) as error:
        raise UnavailableError(f"{what}: {error or type(error).__name__}") from error


def outcome_unknown(what: str) -> OutcomeUnknownError:
    return OutcomeUnknownError(f"{what}: the acknowledgement is missing; it may be stored")
