"""What servers answer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

__all__ = ["filters_of", "part_used", "reads_all"]


def filters_of(consumer: Mapping[str, Any]) -> list[str]:
    """The filters of a consumer as a server reports it: a single one may be under another name than several."""
    single = consumer.get("filter_subject")
    return [single] if single else list(consumer.get("filter_subjects") or ())


def part_used(config: Mapping[str, Any], *, messages: int, bytes: int) -> float | None:
    """How much of the nearest of its limits of messages and bytes a stream uses; None where it has none."""
    parts = [
        counted / config[limit]
        for counted, limit in ((messages, "max_msgs"), (bytes, "max_bytes"))
        if config.get(limit, -1) > 0
    ]
    return max(parts, default=None)


def reads_all(consumer: Mapping[str, Any], subjects: Collection[str]) -> bool:
    """Whether a consumer's filters leave out nothing of a stream of these subjects."""
    filters = filters_of(consumer)
    return not filters or set(subjects) <= set(filters)
