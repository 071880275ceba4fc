"""What docs/architecture.md says of the code and import-linter cannot check: who calls what."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import aviso_workers
from aviso_workers.backends import Backend

PACKAGE = Path(aviso_workers.__file__).parent
ENGINE = sorted(path for name in ("engine", "features", "sessions") for path in (PACKAGE / name).rglob("*.py"))
"""The modules that a delivery goes through: those of the engine, of the features, and what puts them together."""
SETTLEMENTS = {"ack", "nak", "term", "dead_letter"}


def calls(path: Path) -> Iterator[tuple[str, int, str]]:
    """The method calls of a module: the function that makes them, their line, and the method's name."""
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    yield function.name, node.lineno, node.func.attr


def test_what_a_backend_must_have_is_what_the_engine_and_spark_ask_it_for() -> None:
    """What operators alone ask for belongs to `Management` or `Administration`. `state` and what is common to the
    backends ask for engine and spark.
    """
    asked = {
        node.attr
        for pattern in (
            "engine/**/*.py",
            "features/**/*.py",
            "sessions/*.py",
            "spark/*.py",
            "state/*.py",
            "backends/*.py",
        )
        for path in sorted(PACKAGE.glob(pattern))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("backend")
    }
    members = {name for kind in Backend.__mro__ for name in vars(kind) if kind.__module__ == Backend.__module__}
    promised = {name for name in members if not name.startswith("_")}
    assert promised - asked == set()


def test_one_module_of_the_engine_acks_naks_terminates_and_dead_letters() -> None:
    """A delivery that is made of another one hands its own settlement on."""
    others = [
        f"{path.name}:{line} calls {method}"
        for path in ENGINE
        if path.name != "acknowledging.py"
        for function, line, method in calls(path)
        if method in SETTLEMENTS and function != method
    ]
    assert others == []


def test_one_module_of_the_engine_decides_what_becomes_of_a_failure() -> None:
    deciding = {path.name for path in ENGINE for _, _, method in calls(path) if method == "decide"}
    assert deciding == {"acknowledging.py"}


def test_constructors_of_the_engine_change_nothing_but_what_they_make() -> None:
    """No callback is put into a collaborator, and no ContextVar is set: what is called comes as an argument."""
    changes = []
    for path in ENGINE:
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and function.name == "__init__":
                for node in ast.walk(function):
                    if isinstance(node, ast.Assign | ast.AnnAssign):
                        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                        others = [
                            ast.unparse(each)
                            for each in targets
                            if isinstance(each, ast.Attribute) and ast.unparse(each.value) != "self"
                        ]
                        changes += [f"{path.name}:{node.lineno} sets {other}" for other in others]
                    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "set":
                        changes.append(f"{path.name}:{node.lineno} calls {ast.unparse(node.func)}")
    assert changes == []


def misplaced(path: Path) -> Iterator[str]:
    """Yield the texts of a module that document no attribute: they stand behind something else than an assignment."""
    for node in ast.walk(ast.parse(path.read_text())):
        body = getattr(node, "body", None)
        for before, text in pairwise(body if isinstance(body, list) else ()):
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                is_behind = isinstance(before, ast.Assign | ast.AnnAssign) and before.end_lineno == text.lineno - 1
                if isinstance(text.value.value, str) and not is_behind:
                    yield f"{path.name}:{text.lineno}"


def test_a_text_stands_behind_the_attribute_of_which_it_speaks() -> None:
    package = PACKAGE
    modules = [*package.rglob("*.py"), *(package.parent / "agents").glob("*.py")]
    assert [each for path in sorted(modules) if "template" not in path.parts for each in misplaced(path)] == []


def test_a_text_that_documents_nothing_is_told(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text('one = 1\n"""Of one."""\ntwo = 2\n\n"""Apart."""\nprint()\n"""Of a call."""\n')

    assert list(misplaced(tmp_path / "module.py")) == ["module.py:5", "module.py:7"]
