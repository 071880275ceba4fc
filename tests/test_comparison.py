"""docs/comparison.md and README.md: the figures are those of docs/performance.md, and the versions those that
tests/interop runs.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
PAGE = (PROJECT / "docs" / "comparison.md").read_text()
README = (PROJECT / "README.md").read_text()
PERFORMANCE = (PROJECT / "docs" / "performance.md").read_text()
INSTALLED = dict(line.split() for line in (PROJECT / "tests" / "interop" / "versions.txt").read_text().splitlines())


def test_the_figures_of_the_readme_were_measured() -> None:
    assert [rate for rate in re.findall(r"\d+,\d{3}", README) if rate not in PERFORMANCE] == []


@pytest.mark.parametrize("project", ["faust-streaming", "FastStream", "Celery", "Dramatiq", "pyaviso"])
def test_the_versions_are_those_that_are_run(project: str) -> None:
    assert f"{project} {INSTALLED[project.lower()]}" in PAGE


def test_what_is_said_of_others_leads_to_their_own_pages() -> None:
    table = PAGE[PAGE.index("## What each has") : PAGE.index("## When to take the other one")]
    hosts = set(re.findall(r"\]\(https://([^/]+)/", table))
    assert hosts == {
        "docs.celeryq.dev",
        "dramatiq.io",
        "faststream.ag2.ai",
        "faust-streaming.github.io",
        "flower.readthedocs.io",
        "github.com",
    }
    columns = {row.count("|") for row in table.splitlines() if row.startswith("|")}
    assert columns == {8}
