"""Print the files of tests to run, none for all of them, and on standard error one line that says why."""

from __future__ import annotations

import subprocess
import sys

from _check import Modules, changed


def main() -> None:
    try:
        branch, files = changed()
    except (OSError, subprocess.CalledProcessError):
        tell("all tests: git does not say what differs from main")
        return
    tests = Modules().tests_of(files) if files else None
    named = f"{', '.join(files[:3])}{' ...' if len(files) > 3 else ''}" if files else "nothing"
    if tests is None:
        tell(f"all tests, any of which may depend on what differs from {branch}: {named}")
        return
    tell(f"the tests in {len(tests)} files, which depend on what differs from {branch}: {named}")
    print(*sorted(tests), sep="\n")


def tell(line: str) -> None:
    print(f"check: {line}", file=sys.stderr)


main()
