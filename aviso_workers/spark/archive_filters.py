"""The record in an archive of which event type and filter it holds.

What a run leaves out is behind the checkpoint, and no later run archives it. So an archive takes one event type and one
filter: `archives` calls `check` before its query starts, and the command makes the `ArchiveSelection` of its arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from aviso_workers.aviso.schema import Condition, Span, Where
from aviso_workers.aviso.spatial import Containing, Filter
from aviso_workers.errors import PipelineError
from aviso_workers.spark import options, readers
from aviso_workers.spark.connections import load_config
from aviso_workers.spark.files import Files

RECORD = "_selection.json"


class ArchiveSelection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The event type and the filter of an archive in canonical form: two that let the same notifications through are
    equal.
    """

    event: str
    where: Mapping[str, Any] = {}
    """By field: a value, a list of values, or one operator."""

    def __str__(self) -> str:
        return " ".join([self.event, *(f"{field}={_spelled(wanted)}" for field, wanted in self.where.items())])


def selection(given: Mapping[str, Any]) -> ArchiveSelection:
    """Return the selection that a read with these options makes.

    Raises `InvalidOptionError`, `UnknownEventTypeError` and `InvalidIdentifierError`.
    """
    parsed = options.parse_read_options({name: str(value) for name, value in given.items()})
    plan = readers.plan(parsed, load_config(parsed.config))
    if plan.where is None:
        raise PipelineError("an archive is of an event type, not of a stream by its name")
    return ArchiveSelection(event=str(parsed.event), where=_canonical(plan.where))


def check(files: Files, wanted: ArchiveSelection | None, *, aside: str) -> None:
    """Check that an archive has the selection `wanted`; record it, by way of the file `aside`, where none is recorded
    yet.

    Raises `PipelineError` where the archive has something else, or where `wanted` is None though it has a record.
    """
    if not files.exists(RECORD):
        if wanted is None:
            return
        files.write_new(RECORD, msgspec.json.encode(wanted), aside=aside)
    known = _read(files)  # also after writing: another run may have been faster
    if known != wanted:
        this = f"is of {wanted}" if wanted else "does not say of what"
        raise PipelineError(
            f"{files.root} is an archive of {known}, and this run {this}: what one of them leaves out is never "
            "archived by the other. Archive to another directory"
        )


def _read(files: Files) -> ArchiveSelection:
    try:
        return msgspec.json.decode(files.read(RECORD), type=ArchiveSelection)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PipelineError(
            f"{files.root}/{RECORD} is damaged, so what the archive leaves out is not known: {error}. Put a good copy "
            "of it back, or archive to a new directory"
        ) from error


def _canonical(where: Where) -> dict[str, Any]:
    known = ("", *where.topic.key_order)
    found = {known[position]: _wanted(accepted) for position, accepted in where.conditions}
    return found | (_place(where.place) if where.place else {})


def _wanted(accepted: Condition) -> Any:
    if isinstance(accepted, Span):
        return {"between": [str(accepted.low), str(accepted.high)]}
    values = sorted(accepted)
    return values[0] if len(values) == 1 else values


def _place(place: Filter) -> dict[str, Any]:
    if isinstance(place, Containing):
        return {"point": [str(number) for number in place.point]}
    return {"polygon": [str(number) for point in place.area.ring for number in point]}


def _spelled(wanted: Any) -> str:
    return wanted if isinstance(wanted, str) else msgspec.json.encode(wanted).decode()
