"""NATS subjects: which ones a filter takes, whether two filters can take the same, and where a user hears answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest

from aviso_workers.aviso.topics import LONGEST_SUBJECT

_BREAKS = re.compile(r"[ \t\r\n]")
_NO_NAME = re.compile(r"[^-_0-9a-zA-Z]")
# A filter matches a narrower filter as it matches a subject; but `*` is not as wide as `>`.
_WILDCARDS = {"*": r"(?!>$)[^.]+", ">": ".+"}


def why_refused(subject: str) -> str:
    """Return why a subject cannot be sent; empty where it can. A server would take one with a blank or a line break for
    further words of a line, or for commands of ours, and closes the connection on one that is too long.
    """
    if not subject or _BREAKS.search(subject):
        return f"{subject!r:.80} is not a subject"
    return f"a subject of more than {LONGEST_SUBJECT} bytes" if len(subject.encode()) > LONGEST_SUBJECT else ""


def inbox_prefix(user: str) -> str:
    """Return the prefix of the subjects on which a user hears answers, such as `_INBOX_mars`. Other characters than
    letters, digits, `-` and `_` are the hexadecimal numbers of their bytes, so that no two users have the same.
    """
    return f"_INBOX_{_NO_NAME.sub(lambda found: ''.join(f'={byte:02X}' for byte in found[0].encode()), user)}"


def pattern(filters: Sequence[str]) -> re.Pattern[str]:
    """Return what `fullmatch`es each subject that one of the filters takes; all subjects where there is none."""
    tokens = [[_WILDCARDS.get(token) or re.escape(token) for token in each.split(".")] for each in filters or (">",)]
    return re.compile("|".join(map(r"\.".join, tokens)), re.DOTALL)


def matcher(filters: Sequence[str]) -> Callable[[str], object]:
    """Return whether one of the filters takes a subject, as `pattern` says it; faster where none has a `*`."""
    if not filters or any("*" in each or not each.endswith(".>") for each in filters):
        return pattern(filters).fullmatch
    beginnings = tuple(each.removesuffix(">") for each in filters)
    return lambda subject: subject.startswith(beginnings)


def overlap(left: str, right: str) -> bool:
    """Return whether a subject exists that both filters take."""
    for a, b in zip_longest(left.split("."), right.split(".")):
        if a is None or b is None:
            return False
        if ">" in (a, b):
            return True
        if a != b and "*" not in (a, b):
            return False
    return True


def within(narrow: Iterable[str], wide: Sequence[str]) -> bool:
    """Return whether each subject that one of the `narrow` filters takes is taken by one of the `wide` ones."""
    return all(pattern(wide).fullmatch(each) for each in tuple(narrow) or (">",))
