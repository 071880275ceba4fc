"""Which test functions touch public names only: `scripts/figures --tests` lists the others.

A test touches the names of `aviso_workers` and `aviso_agents` that stand in its body, its decorators and annotations,
and in what it reaches in `tests/`: its fixtures, also those that run without being asked for, and the functions,
classes and constants that it names, and what these name. A method of a test class reaches what stands in the class
beside its tests. Names in texts count where they are an import statement of a program, or a dotted name alone, as
`monkeypatch.setattr` takes it. An attribute with an underscore of anything but `self` counts as private, and so does
`session`, which leads from an `App` to the engine.

Public is what docs/public-names.md lists, the facts that a `Harness` hands out, the command line, for
which `cli.main` stands, and `PLUMBING`. Two things are not seen: other attributes of values whose type is private,
such as those of `App.config`, and the names in a program that a test starts as a file. Each function counts once,
however many cases it has.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

PROJECT = Path(__file__).parents[2]
TESTS = PROJECT / "tests"
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
PACKAGES = ("aviso_workers", "aviso_agents")
PUBLIC_BESIDE_TABLES = {
    *(f"aviso_workers.events.{fact}" for fact in ("Settled", "Ticked", "WindowDone")),
    "aviso_workers.cli.main",
    "aviso_workers.__file__",
}
PLUMBING = {
    "aviso_workers.server.NatsServer",
    "aviso_workers.server.start_tied",
    "aviso_workers.server.BINARY_VARIABLE",
    "aviso_workers.server.processes.free_ports",
}
"""Names that tests use to start a real nats-server, and that say nothing about what they test."""
PRIVATE_ATTRIBUTES = {"session"}
"""Attributes without an underscore that are not for users: `App.session` leads to the engine and to the backend."""
SECTIONS = {
    "`aviso_workers`\n": ("aviso_workers",),
    "`aviso_workers.errors`\n": ("aviso_workers.errors",),
    "`aviso_workers.testing` and": ("aviso_workers.testing", "aviso_workers.pytest_plugin"),
    "`aviso_workers.spark`\n": ("aviso_workers.spark",),
}
IMPORT = re.compile(r"^\s*from (aviso_(?:workers|agents)[\w.]*) import ([\w, ]+)|^\s*import (aviso_[\w.]+)", re.M)
DOTTED = re.compile(r"aviso_(?:workers|agents)(?:\.\w+)+")


class Place(NamedTuple):
    """A definition at the top of a file in tests/."""

    path: Path
    name: str


class Definition(NamedTuple):
    """What a definition names itself."""

    places: set[Place]
    fixtures: set[str]
    touched: frozenset[str]
    """The names that are not public."""


class File(NamedTuple):
    """A file of tests/, with what its top level defines."""

    imported: dict[str, str]
    """The full name of what is imported, by the name that it has here."""
    defined: dict[str, list[ast.AST]]
    fixtures: dict[str, str]
    """The name of the function, by the name of the fixture."""
    autouse: list[str]


def touched_by_test() -> dict[Place, frozenset[str]]:
    """Return the names that each test function touches and that are not public."""
    found = {}
    for path in sorted(TESTS.rglob("*.py")):
        if path.name.startswith("test_"):
            always = [*_autouse(path), *[Place(path, "pytestmark")] * ("pytestmark" in _file(path).defined)]
            for name, nodes in _file(path).defined.items():
                if name.rpartition(".")[2].startswith("test_") and isinstance(nodes[-1], FUNCTION):
                    reached = _reached([Place(path, name), *always], path)
                    touched = frozenset[str]().union(*(_read(place).touched for place in reached))
                    found[Place(path.relative_to(PROJECT), name)] = touched
    return found


def public(name: str) -> bool:
    """Return whether a full name is public, or a module that has only public names."""
    return name in _public_names()


@cache
def _public_names() -> frozenset[str]:
    page = (PROJECT / "docs" / "public-names.md").read_text()
    names = {*PUBLIC_BESIDE_TABLES, *PLUMBING}
    for part in page.split("\n## "):
        for title, modules in SECTIONS.items():
            if part.startswith(title):
                listed = re.findall(r"`(\w+)`", part.split("\n\n")[1])
                names |= {f"{module}.{name}" for module in modules for name in listed} | set(modules)
    return frozenset(names)


def _autouse(path: Path) -> list[Place]:
    return [Place(file, name) for file in _from_here_up(path) for name in _file(file).autouse]


@cache
def _from_here_up(path: Path) -> list[Path]:
    """Return the file, and the conftest files whose fixtures it has, nearest first."""
    folders = [folder for folder in path.parents if folder == TESTS or TESTS in folder.parents]
    return [path, *(conftest for folder in folders if (conftest := folder / "conftest.py").is_file())]


def _reached(begin: Iterable[Place], test_file: Path) -> set[Place]:
    """Return these definitions, and those that they name, or have as fixtures."""
    reached: set[Place] = set()
    waiting = list(begin)
    while waiting:
        if (place := waiting.pop()) not in reached:
            reached.add(place)
            waiting += _named_by(place, test_file)
    return reached


def _named_by(place: Place, test_file: Path) -> Iterator[Place]:
    yield from _read(place).places
    for fixture in _read(place).fixtures:
        for candidate in _from_here_up(test_file):
            function = _file(candidate).fixtures.get(fixture)
            if function and Place(candidate, function) != place:
                yield Place(candidate, function)
                break


@cache
def _read(place: Place) -> Definition:
    """Return what a definition names itself."""
    file = _file(place.path)
    places: set[Place] = set()
    touched: set[str] = set()
    fixtures: set[str] = set()
    for node in file.defined[place.name]:
        full_names = _full_names(node, file.imported)
        places |= {Place(place.path, name) for name in _names(node) if name in file.defined}
        places |= {found for full in full_names for found in _place_in_tests(full)}
        fixtures |= _fixtures_of(node)
        touched |= {full for full in full_names if full.split(".")[0] in PACKAGES}
        touched |= {*_in_texts(node), *_private_attributes(node)}
    return Definition(places, fixtures, frozenset(name for name in touched if not public(name)))


def _place_in_tests(full: str) -> Iterator[Place]:
    """Return the place of a full name such as `tests.waits.eventually`."""
    parts = full.split(".")
    if parts[0] != "tests":
        return
    for length in range(len(parts) - 1, 0, -1):
        base = PROJECT.joinpath(*parts[:length])
        path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
        if path.is_file():
            if parts[length] in _file(path).defined:
                yield Place(path, parts[length])
            elif parts[length] in _file(path).imported:
                yield from _place_in_tests(_file(path).imported[parts[length]])
            return


def _private_attributes(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute):
            own = isinstance(each.value, ast.Name) and each.value.id in ("self", "cls")
            if each.attr in PRIVATE_ATTRIBUTES or (re.match(r"_[^_]", each.attr) and not own):
                yield f".{each.attr}"


def _full_names(node: ast.AST, imported: dict[str, str]) -> set[str]:
    """Return the full names of what is named here and was imported, with the attributes of modules.

    Of `config.load.x` with `from aviso_workers import config`, this is `aviso_workers.config.load`.
    """
    imported = imported | _imports(node)
    found = set()
    bases = {id(each.value) for each in ast.walk(node) if isinstance(each, ast.Attribute)}
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute):
            chain = [each.attr]
            value = each.value
            while isinstance(value, ast.Attribute):
                chain.append(value.attr)
                value = value.value
            if isinstance(value, ast.Name) and value.id in imported and id(each) not in bases:
                found.add(_as_far_as_modules(imported[value.id], chain[::-1]))
        elif isinstance(each, ast.Name) and each.id in imported and id(each) not in bases:
            found.add(imported[each.id])
    return found


def _as_far_as_modules(full: str, attributes: list[str]) -> str:
    for attribute in attributes:
        if not _is_module(full):
            break
        full = f"{full}.{attribute}"
    return full


@cache
def _is_module(full: str) -> bool:
    root = PROJECT / "agents" if full.startswith("aviso_agents") else PROJECT
    base = root.joinpath(*full.split("."))
    return base.is_dir() or base.with_suffix(".py").is_file()


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _fixtures_of(node: ast.AST) -> set[str]:
    """Return the names of arguments, and those that stand in `usefixtures` and `getfixturevalue`."""
    names = set()
    if isinstance(node, FUNCTION):
        arguments = node.args
        names |= {each.arg for each in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]}
    for each in ast.walk(node):
        called = each.func if isinstance(each, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr in ("usefixtures", "getfixturevalue"):
            assert isinstance(each, ast.Call)
            names |= {a.value for a in each.args if isinstance(a, ast.Constant) and isinstance(a.value, str)}
    return names


def _in_texts(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            text = each.value
            if DOTTED.fullmatch(text) and _is_module(".".join(text.split(".")[:2])):
                yield text
            for module, names, whole in IMPORT.findall(text):
                yield from [f"{module}.{name.split()[0]}" for name in names.split(",") if name.strip()]
                if whole:
                    yield whole


@cache
def _file(path: Path) -> File:
    tree = ast.parse(path.read_text())
    found = File(_imports(tree, top=True), {}, {}, [])
    for node in _top(tree.body):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found.defined.setdefault(node.name, []).append(node)
                _note_fixture(node, found)
                if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
                    found.defined.update(_methods(node))
            case ast.Assign():
                for target in node.targets:
                    for each in ast.walk(target):
                        if isinstance(each, ast.Name):
                            found.defined.setdefault(each.id, []).append(node)
            case ast.AnnAssign() | ast.AugAssign() if isinstance(node.target, ast.Name):
                found.defined.setdefault(node.target.id, []).append(node)
    return found


def _methods(node: ast.ClassDef) -> Iterator[tuple[str, list[ast.AST]]]:
    """Return each test of a class by its full name, with what the class has beside its tests."""
    tests = [each for each in node.body if getattr(each, "name", "").startswith("test_")]
    beside = [each for each in node.body if each not in tests] + node.decorator_list
    for each in tests:
        yield f"{node.name}.{getattr(each, 'name', '')}", [*beside, each]


def _top(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        match node:
            case ast.If() | ast.Try() | ast.With():
                yield from _top(node.body)
                yield from _top(getattr(node, "orelse", []))
            case _:
                yield node


def _note_fixture(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, file: File) -> None:
    for decorator in node.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        if isinstance(called, ast.Attribute) and called.attr == "fixture":
            keywords = {each.arg: each.value for each in getattr(decorator, "keywords", [])}
            name = keywords.get("name")
            file.fixtures[name.value if isinstance(name, ast.Constant) else node.name] = node.name  # type: ignore[index]
            if "autouse" in keywords:
                file.autouse.append(node.name)


def _imports(node: ast.AST, *, top: bool = False) -> dict[str, str]:
    found: dict[str, str] = {}
    nodes = _top(node.body) if top and isinstance(node, ast.Module) else ast.walk(node)
    for each in nodes:
        if isinstance(each, ast.ImportFrom) and each.module:
            found |= {alias.asname or alias.name: f"{each.module}.{alias.name}" for alias in each.names}
        elif isinstance(each, ast.Import):
            for alias in each.names:
                name = alias.asname or alias.name.split(".")[0]
                found[name] = alias.name if alias.asname else name
    return found


def listing() -> Iterator[str]:
    """Return lines: per file, how many tests are public and what the others touch; then the same names together."""
    by_test = touched_by_test()
    yield f"{sum(not names for names in by_test.values())} of {len(by_test)} touch public names only"
    of_file: dict[Path, list[frozenset[str]]] = {}
    for place, names in by_test.items():
        of_file.setdefault(place.path, []).append(names)
    for path, several in sorted(of_file.items(), key=lambda each: each[1].count(frozenset()) - len(each[1])):
        counted = Counter(name for names in several for name in names)
        touched = ", ".join(f"{name} {count}" for name, count in counted.most_common(12))
        yield f"{path}: {several.count(frozenset())} of {len(several)}; {touched}"
    sets = Counter(names for names in by_test.values() if names)
    yield "\nwhat tests touch that is not public, by the number of the tests that touch just that:"
    yield from (f"{count:5} {', '.join(sorted(names))}" for names, count in sets.most_common(60))
