from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest

from _chaos import postgres
from _chaos.postgres import Postgres
from tests import programs

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"

Load = Callable[[str], ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """`load("field-index")`: the program of that example, as a module that no other test has."""

    def load(name: str) -> ModuleType:
        program = EXAMPLES / name / f"{name.replace('-', '_')}.py"
        spec = importlib.util.spec_from_file_location(program.stem, program)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, program.stem, module)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Postgres]:
    for program, package in (("postgres", "postgresql"), ("initdb", "postgresql"), ("setpriv", "util-linux")):
        programs.find(program, package=package)
    with postgres.running() as server:
        yield server


@pytest.fixture
def database(postgres_server: Postgres, monkeypatch: pytest.MonkeyPatch) -> Iterator[psycopg.Connection[Any]]:
    """A connection to an empty database, which the programs find as well."""
    with psycopg.connect(postgres_server.conninfo, autocommit=True) as connection:
        connection.execute("drop schema public cascade")
        connection.execute("create schema public")
        for name, value in postgres_server.environment.items():
            monkeypatch.setenv(name, value)
        yield connection


def create_tables(connection: psycopg.Connection[Any], example: str) -> None:
    connection.execute((EXAMPLES / example / "schema.sql").read_bytes())
