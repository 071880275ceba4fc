"""The functions in C against those in Python: the same results for all that a server may send, and for all else."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aviso_workers import _fast
from tests.waits import PATIENCE_SECONDS


@pytest.fixture(scope="module")
def pure() -> ModuleType:
    """`_fast` as it is without the C file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AVISO_WORKERS_PURE", "1")
        spec = importlib.util.spec_from_file_location("pure", _fast.__file__)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


NUMBERS = st.sampled_from([b"0", b"1", b"5", b"12", b"007", b"-1", b"+5", b"1_0", b"", b" ", b"x", b"9" * 9, b"9" * 10])
WORDS = st.sampled_from([b"mars.od", b"$JS.ACK.MARS.c.1.2.3.4.5", b"a\x0bb", b"\xff", b"a\rb", b""]) | NUMBERS
LINES = st.lists(WORDS, min_size=1, max_size=6).map(b" ".join)
VERBS = st.sampled_from([b"MSG", b"HMSG", b"MSG ", b"msg", b"PING", b"+OK", b"-ERR 'x'", b""])


@st.composite
def plain(draw: st.DrawFn) -> bytes:
    """A message as a server sends it."""
    headers, data = draw(st.sampled_from([b"", b"NATS/1.0\r\n\r\n"])), draw(st.binary(max_size=20))
    reply = draw(st.sampled_from([b"", b" r", b" $JS.ACK.MARS.c.1.2.3.4.5"]))
    sid, size = draw(st.integers(1, 2)), len(headers) + len(data)
    if headers:
        return b"HMSG mars.od %d%b %d %d\r\n%b%b\r\n" % (sid, reply, len(headers), size, headers, data)
    return b"MSG mars.od %d%b %d\r\n%b\r\n" % (sid, reply, size, data)


@st.composite
def odd(draw: st.DrawFn) -> bytes:
    """A line of any words, and what may be its body."""
    return b"%b %b\r\n%b\r\n" % (draw(VERBS), draw(LINES), draw(st.binary(max_size=12)))


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """Messages of which some bytes are others, or missing."""
    data = bytearray(b"".join(draw(st.lists(plain(), min_size=1, max_size=4))))
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, len(data) - 1))
        data[place : place + draw(st.integers(0, 2))] = draw(st.sampled_from([b"", b" ", b"\r", b"\n", b"9", b"\xff"]))
        data = data or bytearray(b"\r")
    return bytes(data)


def test_the_functions_in_c_are_used_where_they_are_built(pure: ModuleType) -> None:
    assert _fast.COMPILED, "scripts/setup has built them"
    assert not pure.COMPILED
    for name in ("split", "stored", "identifier", "stored_at"):
        assert getattr(_fast, name) is not getattr(pure, name)
        assert getattr(pure, name).__module__ == "pure"


@pytest.mark.slow
@given(st.lists(plain() | odd() | mutated(), max_size=6).map(b"".join), st.integers(0, 3))
def test_a_read_is_split_alike(pure: ModuleType, data: bytes, begin: int) -> None:
    begin = min(begin, len(data))
    assert _fast.split(data, begin) == pure.split(data, begin)


def test_a_read_is_split_until_another_subscription(pure: ModuleType) -> None:
    first, second = b"MSG a 1 r 2\r\nxy\r\n", b"HMSG b 1 12 13\r\nNATS/1.0\r\n\r\nz\r\n"
    other = b"MSG a 02 1\r\nx\r\n"
    for module in (_fast, pure):
        found = module.split(first + second + other, 0)
        arrivals = [(b"a", b"r", b"", b"xy"), (b"b", b"", b"NATS/1.0\r\n\r\n", b"z")]
        assert found == (1, arrivals, len(first + second), 15)
        assert module.split(other, 0) == (2, [(b"a", b"", b"", b"x")], len(other), 1)
        assert module.split(other[:-1], 0) == (-1, [], 0, 0)


OWN = b"$JS.ACK.MARS.c."
REPLIES = st.one_of(
    st.lists(st.integers(0, 2**64).map(b"%d".__mod__) | NUMBERS, max_size=7).map(b".".join).map(OWN.__add__),
    st.sampled_from([b"", OWN, OWN[:-1], b"$JS.ACK.MARS.d.1.2.3.4.5", OWN + b"1" * 200 + b".2.3.4.5.x"]),
)
ARRIVALS = st.tuples(st.binary(max_size=8), REPLIES, st.binary(max_size=2), st.binary(max_size=4))


@pytest.mark.slow
@given(st.lists(ARRIVALS, max_size=5))
def test_replies_are_read_alike(pure: ModuleType, arrivals: list[_fast.Arrival]) -> None:
    assert _fast.stored(arrivals, OWN) == pure.stored(arrivals, OWN)


def test_a_reply_says_what_the_consumer_has_delivered(pure: ModuleType) -> None:
    arrival = (b"mars.\xff", OWN + b"2.41.7.1764201600000000001.9.token", b"h", b"d")
    foreign = (b"mars.od", OWN + b"2.41.7.x.9", b"", b"")
    for module in (_fast, pure):
        (found,) = module.stored((arrival, foreign), OWN)
        assert found == ("mars.\ufffd", arrival[1], b"h", b"d", 2, 41, 7, 1764201600000000001, 9)


TOKENS = st.sampled_from(["od", "", "*", "a%2Eb", "%", "ü", "\U0001f30d", "\ud800", "mars", "*x"])


@given(st.lists(TOKENS, max_size=5).map(".".join), st.sampled_from(["mars", "ü", "od"]), st.integers(0, 4))
def test_identifiers_are_read_alike(pure: ModuleType, subject: str, base: str, count: int) -> None:
    keys = ("class", "date", "time", "step")[:count]
    assert _fast.identifier(subject, base, keys) == pure.identifier(subject, base, keys)
    whole = f"{base}.{subject}"
    assert _fast.identifier(whole, base, keys) == pure.identifier(whole, base, keys)


def test_an_identifier_is_read_where_it_is_plain(pure: ModuleType) -> None:
    for module in (_fast, pure):
        assert module.identifier("mars.od.ü", "mars", ("class", "date")) == {"class": "od", "date": "ü"}
        for subject in ("mars.od", "mars.od.1.2", "mars.od.", "mars.*.1", "mars.od.a%2Eb", "marsx.od.1"):
            assert module.identifier(subject, "mars", ("class", "date")) is None, subject


@given(st.integers(-(2**63), 2**63 - 1))
def test_times_are_read_alike(pure: ModuleType, nanoseconds: int) -> None:
    assert _fast.stored_at(nanoseconds) == pure.stored_at(nanoseconds)
    assert _fast.stored_at(nanoseconds).tzinfo is UTC


def test_a_time_is_cut_to_microseconds(pure: ModuleType) -> None:
    for module in (_fast, pure):
        assert module.stored_at(1_764_201_600_123_456_999) == datetime(2025, 11, 27, 0, 0, 0, 123456, UTC)
        assert module.stored_at(951_782_400_000_000_000) == datetime(2000, 2, 29, tzinfo=UTC)
        assert module.stored_at(-1) == datetime(1969, 12, 31, 23, 59, 59, 999999, UTC)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("split", ("MSG", 0)),
        ("split", (b"MSG", None)),
        ("split", (b"MSG", 4)),
        ("split", (b"MSG", -1)),
        ("split", (b"MSG",)),
        ("stored", ([("subject", b"r", b"", b"")], OWN)),
        ("stored", ([(b"s", b"r")], OWN)),
        ("stored", (5, OWN)),
        ("stored", ([], "own")),
        ("identifier", (b"mars.od", "mars", ("class",))),
        ("identifier", ("mars.od", "mars", ["class"])),
        ("identifier", ("mars.od", "mars", ([],))),
        ("stored_at", ("now",)),
        ("stored_at", (2**70,)),
    ],
)
def test_what_is_of_no_use_is_an_error(name: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises((TypeError, ValueError, OverflowError)):
        getattr(_fast, name)(*arguments)


@pytest.mark.parametrize(("environment", "said"), [({}, "compiled"), ({"AVISO_WORKERS_PURE": "1"}, "pure Python")])
def test_the_version_says_which_are_used(environment: dict[str, str], said: str) -> None:
    command = (sys.executable, "-m", "aviso_workers", "--version")
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
    assert said in done.stdout


@pytest.mark.slow
def test_what_reads_messages_does_so_without_the_functions_in_c() -> None:
    files = [
        *("fuzz/test_messages.py", "aviso/test_codec.py", "contract/test_wire.py", "contract/test_outcomes.py"),
        *(f"jetstream/test_{name}.py" for name in ("wire", "pull_requests", "consumer")),
    ]
    command = (sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist")
    done = subprocess.run(
        (*command, *(str(Path(__file__).parent / file) for file in files)),
        env=os.environ | {"AVISO_WORKERS_PURE": "1"},
        capture_output=True,
        text=True,
        timeout=10 * PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stdout[-5000:]
