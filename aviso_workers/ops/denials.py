"""What the server denies our user of a report: the rest is shown, and each place says the same of what is missing."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from aviso_workers.errors import DeniedError, UnavailableError, describe

T = TypeVar("T")
OWN_NAME = re.compile(r"(?<=\.CONSUMER\.MSG\.NEXT\.)([^.]+)\..+")
"""In the subject of a pull: the consumer, which a reader makes for itself."""
NOT_KNOWN = "not known, since "
NO_ANSWERS = "violation for subscription to"


class Denials:
    """What was denied while a report was made, by the part of the report and the subject; and what nobody answered."""

    def __init__(self) -> None:
        self.found: set[tuple[str, str]] = set()
        self.away: set[tuple[str, str]] = set()
        """The same of what no server has answered, with the error."""

    def subjects(self, *parts: str) -> list[str]:
        """Return the subjects that were denied of these parts; without any, of all."""
        return sorted({subject for part, subject in self.found if not parts or part in parts})

    def text(self, *parts: str) -> str:
        """Return in a sentence without its full stop what was denied of these parts, and the cure; else nothing."""
        return f"{NOT_KNOWN}{reason}" if (reason := self.reason(*parts)) else ""

    def reason(self, *parts: str) -> str:
        """Return the same as the end of a sentence, without that it is not known."""
        away = sorted({error for part, error in self.away if not parts or part in parts})
        subjects = self.subjects(*parts)
        return "; ".join([*([_reason(subjects)] if subjects else []), *away])


def text_of(error: DeniedError) -> str:
    """Return the same sentence of one error."""
    return str(error) if NO_ANSWERS in str(error) else f"{NOT_KNOWN}{_reason([_subject(error)])}"


def _reason(subjects: list[str]) -> str:
    cure = "give it the role operator (`aviso-workers server render --role operator`)"
    return f"the server denies our user {', '.join(subjects)}: {cure}"


def _subject(error: DeniedError) -> str:
    return OWN_NAME.sub(r"\1.*", str(error).partition(": ")[0])


@contextmanager
def noted(denied: Denials | None, part: str, *, away: bool = False) -> Iterator[None]:
    """Note what the server denies within the block, which ends there; and, if `away`, what no server answers. It is
    raised where nobody notes it, and where no answer can be heard: each request would be waited for in vain.
    """
    try:
        yield
    except DeniedError as error:
        if denied is None or NO_ANSWERS in str(error):
            raise
        denied.found.add((part, _subject(error)))
    except UnavailableError as error:
        if denied is None or not away:
            raise
        denied.away.add((part, describe(error)))


async def asked(denied: Denials | None, part: str, request: Awaitable[T], otherwise: T, *, away: bool = False) -> T:
    """Return the answer to a request, or what is said `otherwise` where the server denies it, or no server answers;
    which is `noted`."""
    with noted(denied, part, away=away):
        return await request
    return otherwise
