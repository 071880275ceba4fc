"""Prometheus' text format and OpenMetrics 1.0, written and put together: the same bytes that Prometheus' own client
makes, in a tenth of the time.

That client builds an object for each sample and escapes every label of it again at each scrape, which takes 0.7 seconds
for the 45,000 samples of 500 agents. Here what stands before a value is made once (`labelled`, `heading`), and only the
numbers are written by that client, as Go writes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Literal

from prometheus_client.utils import floatToGoString

Kind = Literal["counter", "gauge", "histogram"]
OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
HEADING = re.compile(r"^# HELP (\w+?)(_total)? (.*)\n# TYPE \S+ (\w+)$", re.MULTILINE)
END = "# EOF\n"
SAMPLE = re.compile(r"^(\w+)(?:\{|(?= ))", re.MULTILINE)
"""How the line of a sample begins, with labels or without."""


def heading(name: str, text: str, kind: Kind) -> str:
    """Return the two lines before a metric's samples. A counter's name ends with `_total`."""
    escaped = text.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {name} {escaped}\n# TYPE {name} {kind}\n"


def labelled(name: str, labels: Iterable[tuple[str, str]]) -> str:
    """Return what stands before a sample's value: its name, its labels by their names, and a space."""
    text = ",".join(f'{label}="{_escaped(value)}"' for label, value in sorted(labels))
    return f"{name}{{{text}}} " if text else f"{name} "


def number(value: float) -> str:
    """Return the value as Go writes it, and so Prometheus' client."""
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text


def joined(texts: Mapping[str, str], *, label: str) -> str:
    """Return several expositions as one, in which each sample has the label `label` with the text's key.

    The samples of a metric stand together, as the format demands.
    """
    families: dict[str, list[str]] = {}
    for value, text in texts.items():
        added = f'{label}="{_escaped(value)}"'
        for family in text.removesuffix(END).split("# HELP ")[1:]:
            head, _, rest = family.partition("\n")
            type_line, _, samples = rest.partition("\n")
            whole = families.setdefault(head.split(" ", 1)[0], [f"# HELP {head}\n{type_line}\n"])
            whole.append(_with_label(samples, added))
    return "".join(part for whole in families.values() for part in whole)


def exemplar(labels: Iterable[tuple[str, str]], value: float, timestamp: float) -> str:
    """Return what stands behind a sample's value: one that it counts, with labels of at most 128 characters."""
    return f" # {labelled('', labels)}{number(value)} {timestamp:.3f}"


def open_metrics(text: str) -> str:
    """Return what is in Prometheus' text format in OpenMetrics 1.0; what is so already, as it is."""
    return text if text.endswith(END) else f"{HEADING.sub(_open_heading, text)}{END}"


def _open_heading(found: re.Match[str]) -> str:
    name, total, text, kind = found.groups("")
    name = name if kind == "counter" else f"{name}{total}"
    quoted = text.replace('"', r"\"")
    return f"# HELP {name} {quoted}\n# TYPE {name} {kind}"


def answer(accept: str, text: Callable[[], bytes], open_metrics: Callable[[], bytes] | None) -> tuple[bytes, str]:
    """Return the body and the Content-Type of what a header Accept prefers, of these two formats."""
    weights = {"application/openmetrics-text": 0.0, "text/plain": 0.0}
    for each in accept.split(","):
        kind, *given = (part.strip() for part in each.split(";"))
        parameters = {name: value for name, _, value in (part.partition("=") for part in given)}
        if kind in weights and (kind == "text/plain" or parameters.get("version", "1.0.0") == "1.0.0"):
            with suppress(ValueError):
                weights[kind] = max(weights[kind], float(parameters.get("q", "1")))
    if open_metrics and weights["application/openmetrics-text"] > weights["text/plain"]:
        return open_metrics(), OPEN_METRICS
    return text(), "text/plain; version=0.0.4; charset=utf-8"


def _with_label(samples: str, added: str) -> str:
    def begin(found: re.Match[str]) -> str:
        return f"{found[1]}{{{added}," if found[0].endswith("{") else f"{found[1]}{{{added}}}"

    return SAMPLE.sub(begin, samples)


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
