"""The files of tests that depend on a change, for `scripts/check`.

Nothing is stored: the imports are read anew each time, by grimp, within two seconds. What imports do not show is taken
from the text of the modules, and picks too much rather than too little.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import grimp

from aviso_workers.cli import COMMANDS

__all__ = ["PROJECT", "Modules", "changed"]

PROJECT = Path(__file__).parents[2]
PACKAGES = ("aviso_workers", "aviso_agents")
INSTALLED = ("aviso_workers/", "agents/", "config/")
CONCERNS_ALL = re.compile(
    r".*\.c|pyproject\.toml|setup\.py|\.ci/.*|\.github/.*|scripts/(setup|check|test|requirements\.lock|_check/.*)"
    r"|tests/(conftest|waits|__init__)\.py"
)
"""Files on which every test depends, or of which neither imports nor names show which do."""
READS_SOURCES = re.compile(r"__file__.*glob\(|ls-files", re.DOTALL)
"""A module that reads all files of a kind, such as a test of the words in them: its tests are always picked."""
RUNS_ANYTHING = re.compile(r"\bexec\(|\bpytester\b|texts\(|import_module\(")
"""A module that runs code from elsewhere, such as the examples of a page, which may import anything."""


class Modules:
    """The modules of the package, the tests and the scripts, and which of them need which."""

    def __init__(self) -> None:
        sys.path[:0] = [str(PROJECT), str(PROJECT / "agents"), str(PROJECT / "scripts")]
        scripts = [file.parent.name for file in PROJECT.glob("scripts/_*/__init__.py")]
        graph = grimp.build_graph(*PACKAGES, "tests", *scripts, cache_dir=None)
        self._files = {name: file for name in graph.modules if (file := _file(name))}
        self._texts = {name: (PROJECT / file).read_text() for name, file in self._files.items()}
        self._importers = {name: set(graph.find_modules_that_directly_import(name)) for name in self._files}
        for name in self._files:
            for needed in self._needed_by(name) & self._files.keys() - {name}:
                self._importers[needed].add(name)

    def tests_of(self, paths: Iterable[str]) -> set[str] | None:
        """Return the files of tests that depend on one of these files; None for all of them."""
        found = {name for name, text in self._texts.items() if not _is_package(name) and READS_SOURCES.search(text)}
        for path in paths:
            modules = self._modules_of(path)
            if modules is None:
                return None
            found |= modules
        waiting = [*found]
        while waiting:
            new = self._importers[waiting.pop()] - found
            found |= new
            waiting += new
        tests = {self._files[name] for name in found if name.rpartition(".")[2].startswith("test_")}
        return {file for file in tests if not file.startswith("tests/interop/")}  # scripts/interop runs these

    def _modules_of(self, path: str) -> set[str] | None:
        """Return the module that a file is, or else those that name it or its folder; None where that is not known."""
        if CONCERNS_ALL.fullmatch(path):
            return None
        if found := {module for module, file in self._files.items() if file == path}:
            return found
        *folders, name = Path(path).parts
        if not (PROJECT / path).exists():
            return set() if name.startswith("test_") else None
        readers = [each for each in self._texts.items() if path.startswith(INSTALLED) or not _is_package(each[0])]
        for words in ([f'"{name}"', f"/{name}"], [word for each in folders for word in (f'"{each}"', f"{each}/")]):
            if found := {module for module, text in readers if any(word in text for word in words)}:
                return found
        return None

    def _needed_by(self, name: str) -> set[str]:
        """Return the modules that a module needs, beside those that it imports."""
        text, folders = self._texts[name], name.split(".")[:-1]
        needed = {".".join(folders)}
        if _is_package(name):
            return needed
        needed |= {".".join([*folders[:depth], "conftest"]) for depth in range(2, len(folders) + 1)}
        needed |= set(re.findall(r"\baviso_(?:workers|agents)(?:\.\w+)*", text))
        for command, module in COMMANDS.items():
            if f'"{command}"' in text or f"aviso-workers {command}" in text:
                needed.add(f"aviso_workers.cli.{module}")
        return needed | set(filter(_is_package, self._files)) if RUNS_ANYTHING.search(text) else needed


def _file(module: str) -> str | None:
    inner = module.replace(".", "/").replace("aviso_agents", "agents", 1)
    places = [f"{place}{inner}{end}" for place in ("", "scripts/") for end in (".py", "/__init__.py")]
    return next((place for place in places if (PROJECT / place).is_file()), None)


def _is_package(module: str) -> bool:
    return module.startswith(PACKAGES)


def changed(root: Path = PROJECT) -> tuple[str, list[str]]:
    """Return the branch with which the working tree is compared, and the files that differ from where it left that.

    Raises CalledProcessError where git or the branch main is missing.
    """
    branch = "origin/main" if _git(root, "branch", "--remotes", "--list", "origin/main") else "main"
    (base,) = _git(root, "merge-base", "HEAD", branch)
    others = _git(root, "ls-files", "--others", "--exclude-standard")
    return branch, sorted({*_git(root, "diff", "--name-only", "--no-renames", base), *others})


def _git(root: Path, *arguments: str) -> list[str]:
    ran = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    return ran.stdout.splitlines()
