"""The documentation as a site: `scripts/docs` builds it strictly, its links lead somewhere, and it loads nothing from
other hosts.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Any

import pytest

from _docs import __main__ as site
from _docs import built_site, command_line, configuration, llms_txt, pages, python_names
from aviso_workers import __version__
from aviso_workers.config import settings
from tests.cli.command_line import contexts
from tests.waits import PATIENCE_SECONDS

PROJECT = Path(__file__).parents[1]
NAVIGATION = tomllib.loads((PROJECT / "scripts" / "_docs" / "zensical.toml").read_text())["project"]["nav"]


def in_navigation(entries: list[dict[str, Any]]) -> Iterator[str]:
    for entry in entries:
        for target in entry.values():
            yield from in_navigation(target) if isinstance(target, list) else [target]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site that the script builds."""
    target = tmp_path_factory.mktemp("docs")
    ran = subprocess.run(
        [sys.executable, "-m", "_docs", "--to", target],
        cwd=PROJECT / "scripts",
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.endswith(f"open {target / 'site' / 'index.html'}\n")
    return target / "site"


def html(site: Path, page: str) -> str:
    """The HTML that the site has of a page."""
    return (site / llms_txt.twin(PurePath(page)).with_suffix("")).read_text()


@pytest.mark.slow
def test_the_script_builds_a_site_that_lacks_nothing_and_asks_no_other_host(built: Path) -> None:
    assert (built / "search.json").exists()
    assert 'href="../site.css"' in html(built, "metrics.md")


@pytest.mark.slow
def test_every_page_leads_to_the_ones_before_and_after_it(built: Path) -> None:
    order = [*in_navigation(NAVIGATION)]
    for before, after in pairwise(order):
        for page, other, direction in ((before, after, "next"), (after, before, "prev")):
            (target,) = re.findall(rf'<a href="([^"]+)" class="[^"]*md-footer__link--{direction}"', html(built, page))
            here = llms_txt.twin(PurePath(page)).parent
            assert os.path.normpath(here / target) == str(llms_txt.twin(PurePath(other)).parent), (page, direction)


@pytest.mark.slow
def test_every_page_names_the_version(built: Path) -> None:
    assert [page for page in in_navigation(NAVIGATION) if f"Version {__version__}\n" not in html(built, page)] == []


@pytest.mark.slow
def test_every_page_is_there_as_markdown_whose_links_lead_somewhere(built: Path) -> None:
    for page in in_navigation(NAVIGATION):
        markdown = built / llms_txt.twin(PurePath(page))
        assert markdown.read_text().startswith("# ")
        linked = pages.LINK.findall("".join(pages.CODE.split(markdown.read_text())[::2]))
        assert [link for link in linked if not (markdown.parent / link).exists()] == [], page


@pytest.mark.slow
def test_llms_txt_lists_the_markdown_of_every_page(built: Path) -> None:
    head, *parts = (built / "llms.txt").read_text().split("\n## ")
    title, summary, version = head.strip().split("\n\n")
    assert (title, version) == ("# aviso-workers", f"This is version {__version__}.")
    assert summary.startswith("> Event-driven workers")
    assert [part.partition("\n")[0] for part in parts][:3] == ["Begin", "Guides", "Examples"]
    entries = [line for part in parts for line in part.splitlines()[1:] if line]
    listed = [found[1] for entry in entries if (found := re.fullmatch(r"- \[[^\]]+\]\(([^)]+)\)", entry))]
    assert len(listed) == len(entries)
    assert listed == [str(llms_txt.twin(PurePath(page))) for page in in_navigation(NAVIGATION)]


def test_every_page_is_in_the_navigation_once(tmp_path: Path) -> None:
    pages.gather(PROJECT, tmp_path)
    written = [str(page.relative_to(tmp_path)) for page in tmp_path.rglob("*.md")]
    assert sorted(in_navigation(NAVIGATION)) == sorted([*written, *site.GENERATED])


def test_a_page_that_links_to_nothing_is_refused(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text("# Start\n\n[gone](gone.md)\n")
    with pytest.raises(FileNotFoundError, match=re.escape("gone.md")):
        pages.gather(tmp_path, tmp_path / "pages")


def test_links_between_what_was_in_docs_and_what_was_not_still_hold(tmp_path: Path) -> None:
    (tmp_path / "docs" / "more").mkdir(parents=True)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "example.yaml").write_text("a: 1\n")
    (tmp_path / "CHANGELOG.md").write_text("[b](docs/more/b.md#here)\n")
    (tmp_path / "docs" / "more" / "b.md").write_text(
        "[c](../../CHANGELOG.md), [e](../../config/example.yaml), [n](https://nats.io), [h](#here)\n"
        "```\n[not](a-link.md)\n```\n"
    )
    pages.gather(tmp_path, tmp_path / "pages")
    assert (tmp_path / "pages" / "CHANGELOG.md").read_text() == "[b](more/b.md#here)\n"
    assert (tmp_path / "pages" / "more" / "b.md").read_text() == (
        "[c](../CHANGELOG.md), [e](../config/example.yaml), [n](https://nats.io), [h](#here)\n"
        "```\n[not](a-link.md)\n```\n"
    )
    assert (tmp_path / "pages" / "config" / "example.yaml").read_text() == "a: 1\n"


@pytest.mark.parametrize(
    ("html", "problem"),
    [
        ('<script src="https://cdn.example.org/a.js">', "index.html loads https://cdn.example.org/a.js"),
        ('<link rel="stylesheet" href="//fonts.example.org/a.css">', "index.html loads //fonts.example.org/a.css"),
        ('<pre class="mermaid">', "index.html has a drawing of Mermaid, whose script would come from another host"),
        ('<a href="gone/">', "index.html links to gone/: there is no such file"),
        ('<a href="#gone">', "index.html links to #gone: it has no such anchor"),
    ],
)
def test_what_is_wrong_with_a_site_is_told(tmp_path: Path, html: str, problem: str) -> None:
    (tmp_path / "index.html").write_text(f'<p id="here">{html}<a href="#here"><a href="https://nats.io">')
    assert list(built_site.problems(tmp_path)) == [problem]


def test_a_style_that_loads_a_font_from_elsewhere_is_told(tmp_path: Path) -> None:
    (tmp_path / "main.css").write_text("@font-face{src:url(https://fonts.example.org/a.woff2)}")
    assert list(built_site.problems(tmp_path)) == ["main.css loads https://fonts.example.org/a.woff2"]


def test_the_reference_has_every_command_that_is_shown() -> None:
    shown = [context.command_path for context in contexts()][1:]
    assert re.findall(r"^### (.+)$", command_line.page(), re.MULTILINE) == shown


def test_the_reference_has_every_key_with_its_meaning() -> None:
    page = configuration.page()
    assert re.findall(r"^\|.*\|  \|$", page, re.MULTILINE) == []
    for section in (settings.Workers, settings.JetStream, settings.NotificationBackend):
        assert [name for name in section.__struct_fields__ if f"| `{name}` |" not in page] == []


def test_the_reference_has_every_public_name() -> None:
    page = python_names.page()
    names = {name for module in python_names.MODULES for name in module.__all__} - {"__version__"}
    assert [name for name in sorted(names) if f"### {name}\n" not in page] == []
    assert "on_error(*kinds: type[Exception])" in page
