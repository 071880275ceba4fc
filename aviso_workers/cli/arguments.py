"""Parsing of command-line arguments into the values that calls take."""

from __future__ import annotations

import re
import reprlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from aviso_workers.aviso.literals import Duration
from aviso_workers.errors import InvalidNotificationError, InvalidPositionError

__all__ = ["Line", "parse_duration", "parse_pairs", "parse_payload", "read_lines"]

NEXT_PAIR = re.compile(r",\s*\w+=")
"""What a value has when fields were separated by commas, as in listener files."""


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a notifications file."""

    event: str
    identifier: dict[str, Any]
    payload: Any = None
    id: str | None = None
    """A message id: a repeat within the duplicate window is stored once."""


def parse_pairs(pairs: Sequence[str]) -> dict[str, str]:
    """Parse pairs such as `["class=od", "step=12"]` into a mapping. Raises `InvalidNotificationError`."""
    found: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise InvalidNotificationError(f"{pair!r} is not key=value")
        if key in found:
            raise InvalidNotificationError(f"{key!r} is given twice")
        found[key] = value
    return found


def parse_where(pairs: Sequence[str]) -> dict[str, Any]:
    """Parse pairs as `parse_pairs` does; a value in JSON brackets is a list or a constraint:
    `stream=["oper","wave"]`.
    """
    return {key: _where(key, value) for key, value in parse_pairs(pairs).items()}


def parse_duration(text: str, *, name: str) -> Duration:
    """Parse a duration such as `10m`, which the option `name` was given. Raises `InvalidPositionError`."""
    try:
        return Duration.parse(text)
    except ValueError as error:
        raise InvalidPositionError(f"{name}: {error}") from error


def parse_payload(text: str | None) -> Any:
    """Parse a payload from JSON, `@FILE` with JSON, or `-` for standard input; None where nothing is given."""
    if text is None:
        return None
    if text == "-":
        return _json(sys.stdin.buffer.read())
    if text.startswith("@"):
        path = Path(text[1:])
        try:
            return _json(path.read_bytes())
        except OSError as error:
            raise InvalidNotificationError(f"cannot read the payload from {path}: {error.strerror}") from error
    return _json(text)


def read_lines(path: Path) -> Iterator[tuple[int, Line]]:
    """Yield the numbered lines of a notifications file. Raises `InvalidNotificationError` that names file and line."""
    if path.is_fifo():
        raise InvalidNotificationError(f"{path} is a pipe: give a file, because it is read twice")
    decoder = msgspec.json.Decoder(Line)
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                if not text.strip():
                    continue
                try:
                    yield number, decoder.decode(text)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    raise InvalidNotificationError(f"{path}:{number}: {error}") from error
    except OSError as error:
        raise InvalidNotificationError(f"cannot read {path}: {error.strerror}") from error


def _where(key: str, value: str) -> Any:
    if value[:1] in ("[", "{"):
        return _json(value)
    if next_pair := NEXT_PAIR.search(value):
        apart = f"{key}={value[: next_pair.start()]} {value[next_pair.start() + 1 :]}"
        whole = msgspec.json.encode([value]).decode()
        raise InvalidNotificationError(
            f"'{key}={value}' has several fields: put spaces between them: {apart}; or, where the value has a comma "
            f"and an equals sign, give it as JSON: {key}={whole}"
        )
    return value


def _json(text: str | bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidNotificationError(f"not JSON: {error}: {reprlib.repr(text)}") from error
