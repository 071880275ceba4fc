"""Parsing of command-line arguments into the values that calls take."""

from __future__ import annotations

import re
import reprlib
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from aviso_workers.aviso.literals import Duration
from aviso_workers.aviso.notifications import parse_pairs
from aviso_workers.errors import DeclarationError, InvalidNotificationError, InvalidPositionError

TYPE = "int.ecmwf.aviso."
"""The prefix of the types of Aviso's CloudEvents, before the event type."""
CLOUD_EVENT = "specversion"
"""The key of each CloudEvent that no line of ours has."""
NEXT_PAIR = re.compile(r",\s*\w+=")
"""The part of a value in which fields were separated by commas, as in listener files."""


class FileLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a notifications file."""

    event: str
    identifier: dict[str, Any]
    payload: Any = None
    id: str | None = None
    """A message id: a repeat within the duplicate window is stored once."""


class _Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    identifier: dict[str, Any]
    payload: Any = None
    payload_base64: bytes | None = None


class _CloudEvent(msgspec.Struct, frozen=True):
    """A notification as `watch` and `replay` print it, and as an aviso-server sends it."""

    type: str
    id: str
    data: _Data
    time: str = ""

    def line(self) -> FileLine:
        """Return it as a line of ours, without an id. Raises `ValidationError` where it is none of Aviso's."""
        if not self.type.startswith(TYPE):
            raise msgspec.ValidationError(f"its type must begin with {TYPE!r}, found {self.type!r}")
        data = self.data
        if data.payload is not None and data.payload_base64 is not None:
            raise msgspec.ValidationError("its data has a payload and a payload_base64: give one")
        body = data.payload if data.payload_base64 is None else data.payload_base64
        return FileLine(self.type.removeprefix(TYPE), data.identifier, body)


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


def parse_pause(text: str | None) -> Duration | None:
    """Parse the option `--for` of a pause; None is until it is resumed. Raises `InvalidPositionError`, and
    `DeclarationError` for no time at all.
    """
    seconds = parse_duration(text, name="--for") if text else None
    if seconds == 0:
        raise DeclarationError("--for 0s would pause nothing: say how long, or leave it out to pause it until resumed")
    return seconds


def parse_payload(text: str | None) -> Any:
    """Parse a payload from JSON, `@FILE` with JSON, or `-` for standard input; None where nothing is given."""
    if text is None:
        return None
    if text == "-":
        return _json(sys.stdin.buffer.read(), name="--payload, from standard input,")
    if text.startswith("@"):
        path = Path(text[1:])
        try:
            return _json(path.read_bytes(), name=f"--payload, from {path},")
        except OSError as error:
            raise InvalidNotificationError(f"cannot read the payload from {path}: {error.strerror}") from error
    return _json(text, name="--payload")


@contextmanager
def lines_file(given: Path) -> Iterator[LinesFile]:
    """Return a notifications file that can be read twice, for the block: of a pipe, or of standard input for `-`, that
    is a copy.

    Raises `InvalidNotificationError` where it cannot be read.
    """
    is_stdin = str(given) == "-"
    name = "standard input" if is_stdin else str(given)
    if not (is_stdin or given.is_fifo()):
        yield LinesFile(given, name)
        return
    with tempfile.TemporaryDirectory() as directory:
        copied = Path(directory) / "lines"
        try:
            with sys.stdin.buffer if is_stdin else given.open("rb") as source, copied.open("wb") as copy:
                shutil.copyfileobj(source, copy)
        except OSError as error:
            raise InvalidNotificationError(f"cannot read {name}: {error.strerror}") from error
        yield LinesFile(copied, name)


class LinesFile(msgspec.Struct, frozen=True):
    """A notifications file, of which each line is a `FileLine` or a CloudEvent."""

    path: Path
    name: str
    """For people."""

    def read(self) -> Iterator[tuple[int, FileLine, str]]:
        """Yield its lines with their numbers, and of a CloudEvent its id and time, which tell it from others of the
        same content. Raises `InvalidNotificationError` that names file and line.
        """
        ours, of_cloud_events = msgspec.json.Decoder(FileLine), msgspec.json.Decoder(_CloudEvent)
        keys = msgspec.json.Decoder(dict[str, msgspec.Raw])
        try:
            with self.path.open("rb") as file:
                for number, text in enumerate(file, start=1):
                    if not text.strip():
                        continue
                    try:
                        if CLOUD_EVENT.encode() in text and CLOUD_EVENT in keys.decode(text):
                            event = of_cloud_events.decode(text)
                            yield number, event.line(), f"{event.id} {event.time}"
                        else:
                            yield number, ours.decode(text), ""
                    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                        raise InvalidNotificationError(f"{self.name}:{number}: {error}") from error
        except OSError as error:
            raise InvalidNotificationError(f"cannot read {self.name}: {error.strerror}") from error


def _where(key: str, value: str) -> Any:
    if value[:1] in ("[", "{"):
        return _json(value, name=f"the value of {key}")
    if next_pair := NEXT_PAIR.search(value):
        apart = f"{key}={value[: next_pair.start()]} {value[next_pair.start() + 1 :]}"
        whole = msgspec.json.encode([value]).decode()
        raise InvalidNotificationError(
            f"'{key}={value}' has several fields: put spaces between them: {apart}; or, where the value has a comma "
            f"and an equals sign, give it as JSON: {key}={whole}"
        )
    return value


def _json(text: str | bytes, *, name: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        why = str(error).removeprefix("JSON is malformed: ")
        raise InvalidNotificationError(f"{name} is not JSON: {why}: {reprlib.repr(text)}") from error
