"""Reviews dead letters by rules: hands back what may succeed now, drops what nobody needs, and lists the others."""

import argparse
import subprocess
from datetime import UTC, datetime, timedelta
from typing import Literal

import msgspec

Decision = Literal["retry", "drop", "keep"]


class Original(msgspec.Struct, frozen=True):
    subject: str
    headers: dict[str, str] | None = None


class DeadLetter(msgspec.Struct, frozen=True):
    """What the review needs of a document of `dead-letters ls --json`."""

    sequence: int
    time: datetime
    agent: str
    reason: str
    error: str
    original: Original


class Rule(msgspec.Struct, frozen=True):
    """What is to be done with dead letters to which all that it states applies."""

    decision: Decision
    reason: str = ""
    error: str = ""
    """What the error contains."""
    after: timedelta = timedelta(0)
    """How long ago it must have become a dead letter."""

    def applies_to(self, letter: DeadLetter) -> bool:
        return (
            self.reason in ("", letter.reason)
            and self.error in letter.error
            and datetime.now(UTC) - letter.time >= self.after
        )


KEEP = Rule("keep")
RULES = [
    # The database was away: hand back what failed, when it has had time to come back.
    Rule("retry", reason="attempts_exhausted", error="PoolTimeout", after=timedelta(minutes=10)),
    # What came after its window was closed is of no use a week later.
    Rule("drop", reason="late", after=timedelta(days=7)),
]
"""The first that applies decides; what none applies to is kept, for a person to look at."""


def decide(letter: DeadLetter) -> Decision:
    rule = next((rule for rule in RULES if rule.applies_to(letter)), KEEP)
    handed_back = "Aviso-Retried" in (letter.original.headers or {})
    return "keep" if rule.decision == "retry" and handed_back else rule.decision  # once is enough


def dead_letters(*arguments: str) -> str:
    """Return what a command of `aviso-workers dead-letters` prints. Raises `CalledProcessError` where it fails."""
    command = ["aviso-workers", "dead-letters", *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description="Review the dead letters by the rules of this file.")
    parser.add_argument("--yes", action="store_true", help="do it; without, only say what would be done")
    wanted = parser.parse_args()
    decided: dict[Decision, list[str]] = {"retry": [], "drop": [], "keep": []}
    for line in dead_letters("ls", "--json").splitlines():
        letter = msgspec.json.decode(line, type=DeadLetter)
        decision = decide(letter)
        decided[decision].append(str(letter.sequence))
        print(f"{decision:5}  {letter.sequence}  {letter.agent}  {letter.original.subject}  {letter.error}")
    for command in ("retry", "drop"):
        if wanted.yes and decided[command]:
            print(dead_letters(command, *decided[command], "--yes"), end="")


if __name__ == "__main__":
    main()
