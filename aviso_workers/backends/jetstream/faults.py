"""Errors of a server or of nats-py as errors of ours, decided by JetStream's `err_code` (`jetstream.error_codes`)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import nats.errors

from aviso_workers.errors import (
    BackendError,
    ConflictError,
    FullError,
    NotFoundError,
    OutcomeUnknownError,
    RefusedError,
    UnansweredError,
    UnavailableError,
)
from aviso_workers.jetstream import error_codes

PER_SUBJECT = "per subject"
"""In the description of STREAM_FULL: a stream refuses a second message of a subject, which no waiting cures."""
KINDS: tuple[tuple[Collection[int], type[BackendError]], ...] = (
    (error_codes.NOT_FOUND, NotFoundError),
    (error_codes.CONFLICT, ConflictError),
    ((error_codes.STREAM_FULL,), FullError),
    (error_codes.TRANSIENT, UnavailableError),
)
"""The error for each code of JetStream's; `RefusedError` for all others."""
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
    if code == error_codes.OFF_FOR_THE_ACCOUNT:
        message = f"{what}: JetStream is off for the account"
    if code:
        message = f"{message} (JetStream {code})"
    if code == error_codes.TEMPORARILY_UNAVAILABLE:  # which nobody leads
        message = f"{message}; more than half of the servers of a cluster must run"
    kind = next((kind for codes, kind in KINDS if code in codes), RefusedError)
    if kind is FullError and PER_SUBJECT in message:
        kind = RefusedError
    return kind(message, code=code)


@contextmanager
def translated(what: str, *, changes: bool = False) -> Iterator[None]:
    """Raise ours from nats-py's. A request without an answer counts as not done: use it for what may be repeated.

    `changes`: the request changes something, so that it may have been done, or may be once there is a leader again.
    """
    unknown = "; it may still be done: see what is there before you repeat it" if changes else ""
    try:
        yield
    except nats.errors.NoRespondersError as error:
        raise UnansweredError(
            f"{what}: nobody answers; is JetStream enabled for this account, or, where the stream is another "
            "account's, is this request imported?"
        ) from error
    except TimeoutError as error:
        raise UnavailableError(f"{what}: no answer in time{unknown}") from error
    except (nats.errors.Error, OSError) as error:
        raise UnavailableError(f"{what}: {error or type(error).__name__}{unknown}") from error


def outcome_unknown(what: str) -> OutcomeUnknownError:
    return OutcomeUnknownError(f"{what}: the acknowledgement is missing; it may be stored")
