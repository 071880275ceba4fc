"""Durations that authors give to declarations, in any spelling."""

from __future__ import annotations

from aviso_workers.aviso import literals
from aviso_workers.errors import DeclarationError


def seconds(where: str, duration: object) -> float:
    """Return the seconds of a duration, as `literals.seconds_of` does. Raises `DeclarationError`, which begins with
    `where` the duration was given.
    """
    try:
        return literals.seconds_of(duration)
    except ValueError as error:
        raise DeclarationError(f"{where}: {error}") from error
