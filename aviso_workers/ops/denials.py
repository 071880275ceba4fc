"""What the server denies our user of a report: the rest is shown, and each place says of what is missing the same
sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from aviso_workers.errors import DeniedError

__all__ = ["Denials", "noted", "text_of"]

OWN_NAME = re.compile(r"(?<=\.CONSUMER\.MSG\.NEXT\.)([^.]+)\..+")
"""In the subject of a pull: the consumer, which a reader makes for itself."""
NO_ANSWERS = "violation for subscription to"


class Denials:
    """The subjects that were denied while a report was made, by the part of the report that each is needed for."""

    def __init__(self) -> None:
        self._subjects: dict[str, set[str]] = {}

    def add(self, part: str, error: DeniedError) -> None:
        """Note what was denied of a part."""
        self._subjects.setdefault(part, set()).add(_subject(error))

    def subjects(self, *parts: str) -> list[str]:
        """Return the subjects that were denied of these parts; without any, of all."""
        return sorted({subject for part in parts or self._subjects for subject in self._subjects.get(part, ())})

    def text(self, *parts: str) -> str:
        """Return in a sentence, without its full stop, what was denied of these parts or of all, and the cure; empty
        where nothing was.
        """
        subjects = self.subjects(*parts)
        return _sentence(subjects) if subjects else ""


def text_of(error: DeniedError) -> str:
    """Return the same sentence of one error."""
    return str(error) if NO_ANSWERS in str(error) else _sentence([_subject(error)])


def _sentence(subjects: list[str]) -> str:
    cure = "give it the role operator (`aviso-workers server render --role operator`)"
    return f"not known, since the server denies our user {', '.join(subjects)}: {cure}"


def _subject(error: DeniedError) -> str:
    return OWN_NAME.sub(r"\1.*", str(error).partition(": ")[0])


@contextmanager
def noted(denied: Denials | None, part: str) -> Iterator[None]:
    """Note what the server denies within the block, which ends there. It is raised where nobody notes it, and where no
    answer can be heard: each request would be waited for in vain.
    """
    try:
        yield
    except DeniedError as error:
        if denied is None or NO_ANSWERS in str(error):
            raise
        denied.add(part, error)
