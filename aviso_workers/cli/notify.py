"""`notify`: publishes one notification, or those in a file."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import msgspec
import typer
from msgspec import Struct, structs

from aviso_workers.aviso.codec import Message
from aviso_workers.aviso.notifications import Notify, parse_pairs
from aviso_workers.aviso.positions import parse_date
from aviso_workers.cli import completion
from aviso_workers.cli.arguments import FileLine, LinesFile, lines_file, parse_duration, parse_payload
from aviso_workers.cli.options import argument, option
from aviso_workers.cli.output import echo, time_text
from aviso_workers.cli.progress import counted
from aviso_workers.cli.signals import until_signal
from aviso_workers.cli.targets import CONFIG, ConfigSource, connected_app
from aviso_workers.config import Config
from aviso_workers.engine.publisher import encode, size_of, too_large
from aviso_workers.errors import AvisoWorkersError, InvalidNotificationError
from aviso_workers.events import Published

MAY_BE_STORED = (
    "of {total} notifications the first {begun} were begun, and any of these may be stored; a file in which each line "
    'has an "id" can be published again within the duplicate window of the stream, and stores each once'
)


def notify(
    event: str | None = argument(
        "EVENT", "The event type, e.g. mars.", autocompletion=completion.event_types, default=None
    ),
    identifier: list[str] | None = argument("KEY=VALUE...", "A field of the identifier, e.g. class=od.", default=None),
    payload: str | None = option(
        "JSON", "Payload: JSON, @FILE with JSON, or - for standard input. Default: no payload."
    ),
    at: str | None = option(
        "TIME", "Deliver the notification at this time, e.g. 2026-11-21T06:00:00Z. Default: at once."
    ),
    after: str | None = option(
        "DURATION", "Deliver the notification after this time, e.g. 10m or 2h. Default: at once."
    ),
    file: Path | None = option(
        "FILE",
        "Publish the notifications of a file, one JSON document a line: "
        '{"event": ..., "identifier": {...}, "payload": ..., "id": ...}, or a CloudEvent as `replay` prints it. '
        "- is standard input.",
    ),
    config: ConfigSource | None = CONFIG,
) -> None:
    """Publish one notification, or those of a file, and wait until the server has stored them.

    Example: aviso-workers notify mars class=od date=20261120 time=0000 stream=oper step=12 --payload '{"size": 3}'
    """
    if (event is None) == (file is None) or (file is not None and (payload, at, after) != (None, None, None)):
        raise InvalidNotificationError("say what to publish: EVENT key=value... [--payload ...], or --file FILE")
    if file is not None:
        with lines_file(file) as lines:
            anyio.run(_notify_lines, lines, config)
        return
    assert event is not None
    if at is not None and after is not None:
        raise InvalidNotificationError("say --at or --after, and not both")
    wanted = Notify(
        event,
        parse_pairs(identifier or []),
        parse_payload(payload),
        due=parse_duration(after, name="--after") if after is not None else at and parse_date(at, name="--at"),
    )
    anyio.run(_notify_one, wanted, config)


async def _notify_one(wanted: Notify, config: ConfigSource | None) -> None:
    app = connected_app(config)
    app.check(wanted)
    async with app:
        receipt = await app.session.publisher.notify(wanted)
    if receipt.due:
        _tell(f"{wanted.event_type} {receipt.message_id} waits until {time_text(receipt.due)}")
    else:
        _tell(f"{receipt.id} stored in {receipt.stream}")


class _Checked(Struct, frozen=True):
    """The facts about a file whose lines can all be published."""

    total: int
    has_ids: bool
    largest: tuple[int, int, str]
    """The size of the largest notification, its line, and its event type."""


def _checked(lines: LinesFile, config: Config) -> _Checked:
    """Check all lines before any is sent. Raises `InvalidNotificationError` that names the file and the line."""
    total, has_ids, largest = 0, False, (0, 0, "")
    by_id: dict[str, tuple[int, bytes]] = {}
    for number, line, origin in lines.read():
        total += 1
        try:
            _, message = _encoded(config, line, origin)
        except InvalidNotificationError as error:
            raise InvalidNotificationError(f"{lines.name}:{number}: {error}") from error
        has_ids |= bool(line.id or origin)
        largest = max(largest, (size_of(message.data, message.headers), number, line.event))
        if line.id:
            content = hashlib.sha256(message.subject.encode() + b" " + message.data).digest()
            first, same = by_id.setdefault(line.id, (number, content))
            if content != same:
                raise InvalidNotificationError(
                    f"{lines.name}:{number}: its id {line.id!r} is that of line {first}, which says something else: "
                    "the stream would discard one of them as a repeat"
                )
    return _Checked(total, has_ids, largest)


async def _notify_lines(lines: LinesFile, config: ConfigSource | None) -> None:
    app = connected_app(config)
    checked = _checked(lines, app.config)
    if not checked.total:
        echo(f"{lines.name} has no notifications", err=True)
    begun = stored = known = signalled = 0
    try:
        with counted("publishing", checked.total) as advance:

            def notifications() -> Iterator[Notify]:
                nonlocal begun
                for _, line, origin in lines.read():
                    begun += 1
                    # Only the id of a CloudEvent takes its message to be known; the publisher encodes all of them.
                    yield _encoded(app.config, line, origin)[0] if origin else _notification(line)
                    advance()

            def count_known(event: Published) -> None:
                nonlocal known
                known += event.count if event.outcome == "duplicate" else 0

            async def publish() -> None:
                nonlocal stored
                async with app:
                    _require_fit(lines, checked, most=app.session.backend.connection.max_payload)
                    stored = await app.session.publisher.notify_many(notifications(), answered=checked.has_ids)

            app.events.listen(count_known, Published)
            signalled = await until_signal(publish)
    except AvisoWorkersError as error:
        if not begun:
            raise
        typer.echo(MAY_BE_STORED.format(begun=begun, total=checked.total), err=True)
        raise AvisoWorkersError(str(error)) from error  # whatever it is, something may have been done
    if signalled:
        if begun:
            typer.echo(MAY_BE_STORED.format(begun=begun, total=checked.total), err=True)
        raise typer.Exit(128 + signalled)
    _tell(f"{stored - known} notifications stored" + (f", {known} known already by their ids" if known else ""))


def _require_fit(lines: LinesFile, checked: _Checked, *, most: int) -> None:
    """Raise `InvalidNotificationError` where a notification of the file has more bytes than a server takes."""
    size, number, event = checked.largest
    if size > most:
        raise InvalidNotificationError(f"{lines.name}:{number}: {too_large(event, size, most=most)}")


def _notification(line: FileLine) -> Notify:
    return Notify(line.event, line.identifier, line.payload, message_id=line.id)


def _encoded(config: Config, line: FileLine, origin: str) -> tuple[Notify, Message]:
    """Return the notification of a line, and its message. That of a CloudEvent has a message id of its `origin` and of
    what is stored, since two streams may have the same ids, and a polygon two spellings. Raises
    `InvalidNotificationError`.
    """
    wanted = _notification(line)
    message = encode(config, wanted)
    if not origin:
        return wanted, message
    said = msgspec.json.encode((origin, message.subject, message.data, message.headers), order="deterministic")
    return structs.replace(wanted, message_id=f"cloud-event.{hashlib.sha256(said).hexdigest()[:32]}"), message


def _tell(outcome: str) -> None:
    """Print what was stored, to standard error where standard output cannot be written: who repeats it doubles it."""
    try:
        echo(outcome)
        sys.stdout.flush()
    except OSError:
        echo(outcome, err=True)
        raise
