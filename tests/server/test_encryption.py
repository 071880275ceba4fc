"""Encryption at rest: what is on the disk, and what a server is kept from doing to it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import nats
import pytest
from nats.js.api import AckPolicy, ConsumerConfig

from aviso_workers.errors import ServerProcessError
from aviso_workers.server import BINARY_VARIABLE, find_binary, processes
from aviso_workers.server.processes import Node
from tests.server.conftest import Load, Start, program

MARKER = "a-payload-that-nobody-may-read"
SUBJECT = "a-subject-that-nobody-may-read"
COUNT = 50


def server(encryption: str) -> str:
    return f"port: 0\nmonitoring: {{port: 0}}\njetstream: {{store_dir: streams, {encryption}}}"


def run_once(start: Start, load: Load, encryption: str, *, publish: int = 0) -> int:
    """Messages in the stream of a server with this encryption, which is ended again."""
    (node,) = start(load(server(encryption)))
    try:
        return asyncio.run(_messages(node, publish=publish))
    finally:
        processes.stop(node.directory.parent)


async def _messages(node: Node, *, publish: int) -> int:
    client = await nats.connect(node.url)
    try:
        context = client.jetstream()
        if publish:
            await context.add_stream(name="DATA", subjects=[f"{SUBJECT}.>"])
            await context.add_stream(name="EMPTY", subjects=["nothing"])
            await context.add_consumer("DATA", ConsumerConfig(durable_name="reader", ack_policy=AckPolicy.EXPLICIT))
            for i in range(publish):
                await context.publish(f"{SUBJECT}.{i}", f"{MARKER} {i}".encode())
        return int((await context.stream_info("DATA")).state.messages)
    finally:
        await client.close()


def files() -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path("streams").rglob("*") if path.is_file()}


def on_disk(text: str) -> int:
    """How often a text is in the files of the streams."""
    assert files()
    return sum(content.count(text.encode()) for content in files().values())


def test_without_encryption_everything_can_be_read_on_the_disk(load: Load, start: Start) -> None:
    assert run_once(start, load, "", publish=COUNT) == COUNT
    assert on_disk(MARKER) >= COUNT
    assert on_disk(SUBJECT) >= COUNT


@pytest.mark.covers("003-16")
@pytest.mark.parametrize("cipher", ["chacha", "aes"])
def test_with_encryption_nothing_can_be_read_on_the_disk(load: Load, start: Start, cipher: str) -> None:
    Path("key").write_text("the first key\n")
    assert run_once(start, load, f"encryption: {{cipher: {cipher}, key_file: key}}", publish=COUNT) == COUNT
    assert (on_disk(MARKER), on_disk(SUBJECT)) == (0, 0)
    assert run_once(start, load, f"encryption: {{cipher: {cipher}, key: the first key}}") == COUNT


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ("", "encryption: {key: a key}", "not encrypted"),
        ("encryption: {key: a key}", "encryption: {key: a key, cipher: aes}", "encrypted with chacha"),
        ("encryption: {key: a key, cipher: aes}", "encryption: {key: a key}", "encrypted with aes"),
    ],
)
def test_a_store_is_not_encrypted_anew_in_place(load: Load, start: Start, first: str, second: str, found: str) -> None:
    assert run_once(start, load, first, publish=COUNT) == COUNT
    before = files()
    with pytest.raises(ServerProcessError, match=rf"streams/jetstream is {found}, .*rotate-key"):
        run_once(start, load, second)
    assert files() == before
    assert run_once(start, load, first) == COUNT


def test_a_server_that_cannot_read_a_consumer_is_ended_before_anybody_makes_it_anew(load: Load, start: Start) -> None:
    encryption = "encryption: {key: a key}"
    assert run_once(start, load, encryption, publish=COUNT) == COUNT
    key = Path("streams/jetstream/$G/streams/DATA/obs/reader/meta.key")
    readable = key.read_bytes()
    key.write_bytes(bytes(len(readable)))
    told = r"2 of 2 streams and 0 of 1 consumers of the store are served; not consumer reader of DATA"
    with pytest.raises(ServerProcessError, match=told):
        run_once(start, load, encryption)
    key.write_bytes(readable)
    assert run_once(start, load, encryption) == COUNT


def test_a_stream_that_a_server_erases_when_it_starts_is_told(
    load: Load, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encryption = "encryption: {key: a key}"
    run_once(start, load, encryption, publish=COUNT)
    erasing = rf'[ "$1" = -c ] && rm -r "{tmp_path}/streams/jetstream/\$G/streams/EMPTY"'
    monkeypatch.setenv(BINARY_VARIABLE, program(tmp_path, f'{erasing}\nexec {find_binary()} "$@"'))
    with pytest.raises(ServerProcessError, match=r"1 of 2 streams .* are served; not stream EMPTY"):
        run_once(start, load, encryption)


def test_status_tells_what_is_in_the_store_and_not_served(load: Load, start: Start) -> None:
    (node,) = start(load(server("encryption: {key: a key}")))
    asyncio.run(_messages(node, publish=1))
    (state,) = processes.states(node.directory.parent)
    assert state.health == "ok"
    unread = Path("streams/jetstream/$G/streams/DATA/obs/unread/meta.inf")
    unread.parent.mkdir()
    unread.write_text("of another key")
    (state,) = processes.states(node.directory.parent)
    assert state.health.endswith("1 of 2 consumers of the store are served; not consumer unread of DATA")


@pytest.mark.parametrize("other", ["encryption: {key: another key}", ""])
def test_another_key_is_told_at_once_and_takes_nothing_away(load: Load, start: Start, other: str) -> None:
    assert run_once(start, load, "encryption: {key: the first key}", publish=COUNT) == COUNT
    told = r"JetStream stream '\$G > DATA' could not be recovered\. Check its encryption key"
    with pytest.raises(ServerProcessError, match=told):
        run_once(start, load, other)
    assert run_once(start, load, "encryption: {key: the first key}") == COUNT
