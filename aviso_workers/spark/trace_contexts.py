"""The trace context (W3C Trace Context) that a Spark job was given, as headers of its notifications.

Pure. `options` reads it from the options of a write, `job_events` from the event log, `listeners` from the session.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

PARENT, STATE = "traceparent", "tracestate"
PROPERTIES = {PARENT: "spark.aviso.traceparent", STATE: "spark.aviso.tracestate"}
SOUND = {
    PARENT: re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"),
    STATE: re.compile(r"[!-~]([ -~]{0,510}[!-~])?"),
}
LIKE = {
    PARENT: "00-, 32 hexadecimal digits of the trace, 16 of the span, and 2 of the flags, with - between them",
    STATE: "up to 512 characters of printable ASCII, beside a traceparent",
}


def headers(given: Mapping[str, str]) -> dict[str, str]:
    """Return what is given under the names of the two headers. Raises `ValueError` where a value is not sound."""
    found = {name: given[name] for name in (PARENT, STATE) if name in given}
    for name, value in found.items():
        if not SOUND[name].fullmatch(value) or PARENT not in found:
            raise ValueError(f"{name} must be {LIKE[name]}, not {value!r:.100}")
    return found


def of_properties(get: Callable[[str], object]) -> dict[str, str]:
    """Return the headers that an application's properties say; none where a value is not sound."""
    given = {name: value for name, key in PROPERTIES.items() if isinstance(value := get(key), str)}
    try:
        return headers(given)
    except ValueError:
        return {}
