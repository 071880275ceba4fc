"""Exceptions that cannot be looked at whole, as an author's code may raise them."""

from __future__ import annotations


class EndlessError(Exception):
    """Each has another one as its cause."""

    @property
    def __cause__(self) -> BaseException:  # type: ignore[override]
        return EndlessError()


def nested(depth: int) -> Exception:
    """Return an error inside of so many exception groups."""
    error: Exception = ValueError("no")
    for _ in range(depth):
        error = ExceptionGroup("all", [error])
    return error
