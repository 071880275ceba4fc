"""`scripts/docs`: builds the site. Exits with 1 where a link leads nowhere, or where something would be loaded from
another host.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from _docs import built_site, command_line, configuration, llms_txt, pages, python_names
from aviso_workers import __version__

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
GENERATED = {
    "reference/configuration.md": configuration.page,
    "reference/command-line.md": command_line.page,
    "reference/python.md": python_names.page,
}


def build(target: Path) -> Path:
    """Build the site below `target`, and return its directory. Raises CalledProcessError where Zensical warns."""
    shutil.rmtree(target, ignore_errors=True)
    gathered = target / "pages"
    pages.gather(PROJECT, gathered)
    for name, page in GENERATED.items():
        path = gathered / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page())
    shutil.copy(HERE / "site.css", gathered)
    written = (HERE / "zensical.toml").read_text().replace("VERSION", __version__)
    (target / "zensical.toml").write_text(written)
    subprocess.run([sys.executable, "-m", "zensical", "build", "--strict", "--clean"], cwd=target, check=True)
    site = target / "site"
    llms_txt.write(gathered, site, tomllib.loads(written)["project"], __version__)
    return site


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/docs", description="Builds the documentation as a site.")
    parser.add_argument("--to", type=Path, default=PROJECT / "build" / "docs", help="where to build it")
    try:
        site = build(parser.parse_args().to.resolve())
    except subprocess.CalledProcessError:
        return 1  # it has said why
    found = list(built_site.problems(site))
    for problem in found:
        print(problem, file=sys.stderr)
    if not found:
        print(f"open {site / 'index.html'}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
