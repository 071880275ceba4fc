"""What JetStream's fields, answers and codes mean is written in `aviso_workers/jetstream`, and nowhere else."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import pytest

import aviso_workers
from aviso_workers.jetstream import error_codes
from aviso_workers.jetstream.fields import CONSUMER, STREAM, Field
from aviso_workers.jetstream.info import ConsumerConfig, StreamConfig

PACKAGE = Path(aviso_workers.__file__).parent
VOCABULARY = PACKAGE / "jetstream"
ROOT = PACKAGE.parent
FILES = [file for folder in (PACKAGE, ROOT / "agents") for file in sorted(folder.rglob("*.py"))]
CODES = range(10_001, 10_300)
"""Of JetStream's errors, as of nats-server 2.15."""


@cache
def expressions() -> list[tuple[str, ast.AST]]:
    """Every expression outside of the vocabulary, and the file in which it stands."""
    return [
        (str(file.relative_to(ROOT)), node)
        for file in FILES
        if VOCABULARY not in file.parents
        for node in ast.walk(ast.parse(file.read_text()))
    ]


def test_one_file_names_error_codes() -> None:
    named = [
        file
        for file, node in expressions()
        if isinstance(node, ast.Constant) and type(node.value) is int and node.value in CODES
    ]

    assert named == []


def test_each_code_has_one_name() -> None:
    codes = [value for name, value in vars(error_codes).items() if name.isupper() and isinstance(value, int)]

    assert len(codes) == len(set(codes))
    assert set(codes) <= set(CODES)


def test_what_a_field_excludes_or_needs_is_in_the_table() -> None:
    others = {other for field in STREAM.values() for other in field.excludes}
    needed = {other for field in CONSUMER.values() for other in field.needs}

    assert others <= STREAM.keys()
    assert needed <= CONSUMER.keys()


OF_ANSWERS = {
    *("ack_floor", "cluster", "consumer_count", "consumer_seq", "delivered", "first_seq", "first_ts", "last_seq"),
    *("last_ts", "num_ack_pending", "num_deleted", "num_pending", "num_redelivered", "num_waiting", "state"),
    "stream_seq",
}
OF_CONFIGURATIONS = {"durable_name", "filter_subject"} | STREAM.keys() | CONSUMER.keys()
SERVER_OF_ITS_OWN = "aviso_workers/backends/in_memory/"
"""What it indexes are its own configurations, and nobody's answers."""
STILL_INDEXED = {
    "aviso_workers/backends/jetstream/wire.py": 1,
    "aviso_workers/spark/job_events.py": 1,
}
"""What is left, and how often, and is no answer of JetStream's: the greeting of a server, and a setting of an agent."""


def indexed(node: ast.AST) -> tuple[ast.expr, object] | None:
    """What is indexed by a text, and by which, where the expression does that."""
    match node:
        case ast.Subscript(value=inside, slice=ast.Constant(value=key), ctx=ast.Load()):
            return inside, key
        case ast.Call(func=ast.Attribute(value=inside, attr="get"), args=[ast.Constant(value=key), *_]):
            return inside, key
    return None


def is_configuration(inside: ast.expr) -> bool:
    match inside:
        case ast.Name(id="config") | ast.Attribute(attr="config"):
            return True
        case ast.Subscript(slice=ast.Constant(value="config")) | ast.Subscript(value=ast.Name(id="configs")):
            return True
    return False


def test_nobody_else_indexes_answers() -> None:
    found = Counter(
        file
        for file, node in expressions()
        if not file.startswith(SERVER_OF_ITS_OWN)
        and (at := indexed(node))
        and (at[1] in OF_ANSWERS or (is_configuration(at[0]) and at[1] in OF_CONFIGURATIONS))
    )

    assert found == STILL_INDEXED


@pytest.mark.parametrize(("config", "table"), [(StreamConfig, STREAM), (ConsumerConfig, CONSUMER)])
def test_what_is_read_of_a_configuration_has_the_zero_value_of_the_table(
    config: type[StreamConfig | ConsumerConfig], table: dict[str, Field]
) -> None:
    read = [name for name in vars(config)["__annotations__"] if not name.startswith("_")]

    assert set(read) <= table.keys()
    assert {name: getattr(config(), name) for name in read} == {name: table[name].zero for name in read}


MANAGEMENT = "aviso_workers/backends/jetstream/management.py"
"""Where JetStream's API is asked about streams and consumers."""
ASKED_ELSEWHERE = {
    "aviso_workers/backends/jetstream/pull_requests.py": {"CONSUMER.MSG.NEXT"},
    "aviso_workers/backends/jetstream/admin.py": {"STREAM.RESTORE", "STREAM.SNAPSHOT"},
    "aviso_workers/ops/doctor/monitoring_port.py": {"STREAM.NAMES"},  # also in management; here with an unknown field
    "aviso_workers/ops/inventory.py": {"DIRECT.GET"},
    "aviso_workers/ops/maintenance.py": {"LEADER.STEPDOWN", "STREAM.PEER.REMOVE"},
}
"""The requests that are made in another module, each in that one alone."""
NOT_ASKED = {
    "aviso_workers/ops/doctor/checks/consumers.py",  # counts the requests of others
    "aviso_workers/ops/permissions.py",  # says who may ask
    "aviso_workers/server/accounts.py",  # says who may ask from another account
}
REQUEST = re.compile(r"[.]?((?:STREAM|CONSUMER|DIRECT|LEADER|META|SERVER|ACCOUNT)(?:[.][A-Z]+)+)[.]?")


def test_one_module_makes_each_request() -> None:
    made: defaultdict[str, set[str]] = defaultdict(set)
    for file, node in expressions():
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and file not in NOT_ASKED and (request := REQUEST.fullmatch(text)):
            made[file].add(request[1])

    managed = made.pop(MANAGEMENT)
    assert made == ASKED_ELSEWHERE
    assert managed & set().union(*ASKED_ELSEWHERE.values()) == {"STREAM.NAMES"}


ASKED_ONCE = {
    "aviso_workers/ops/doctor/monitoring_port.py": 2,  # $SYS.REQ.USER.INFO: which server answers; is it strict
    "aviso_workers/ops/inventory.py": 1,  # DIRECT.GET, which any copy of a stream answers
    "aviso_workers/ops/maintenance.py": 2,  # LEADER.STEPDOWN and STREAM.PEER.REMOVE
}
"""The requests that no method of `Admin` makes: each is made in one place. There may be fewer, and not more."""


def test_operators_tools_make_no_raw_request_but_those_that_are_asked_once() -> None:
    found = Counter(
        file
        for file, node in expressions()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("api", "request")
        if file.startswith(("aviso_workers/ops/", "aviso_workers/cli/"))
    )

    assert found == ASKED_ONCE
