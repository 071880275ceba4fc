"""NATS subjects: which ones a filter takes, and whether two filters can take the same."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import zip_longest

__all__ = ["overlap", "pattern"]

# A filter matches a narrower filter as it matches a subject; but `*` is not as wide as `>`.
_WILDCARDS = {"*": r"(?!>$)[^.]+", ">": ".+"}


def pattern(filters: Sequence[str]) -> re.Pattern[str]:
    """What `fullmatch`es each subject that one of the filters takes; all subjects where there is none."""
    return re.compile("|".join(_expression(subject) for subject in filters or (">",)), re.DOTALL)


def overlap(left: str, right: str) -> bool:
    """Whether a subject exists that both filters take."""
    for a, b in zip_longest(left.split("."), right.split(".")):
        if a is None or b is None:
            return False
        if ">" in (a, b):
            return True
        if a != b and "*" not in (a, b):
            return False
    return True


def _expression(subject: str) -> str:
    return r"\.".join(_WILDCARDS.get(token) or re.escape(token) for token in subject.split("."))
