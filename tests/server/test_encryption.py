"""Encryption at rest: what is on the disk, and the way from one key to the next."""

from __future__ import annotations

import asyncio
from pathlib import Path

import nats
import pytest

from aviso_workers.errors import ServerProcessError
from aviso_workers.server import running
from aviso_workers.server.running import Node
from tests.server.conftest import Load, Start

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
        running.stop(node.directory.parent)


async def _messages(node: Node, *, publish: int) -> int:
    client = await nats.connect(node.url)
    try:
        context = client.jetstream()
        if publish:
            await context.add_stream(name="DATA", subjects=[f"{SUBJECT}.>"])
            for i in range(publish):
                await context.publish(f"{SUBJECT}.{i}", f"{MARKER} {i}".encode())
        return int((await context.stream_info("DATA")).state.messages)
    finally:
        await client.close()


def on_disk(text: str) -> int:
    """How often a text is in the files of the streams."""
    files = [file for file in Path("streams").rglob("*") if file.is_file()]
    assert files
    return sum(file.read_bytes().count(text.encode()) for file in files)


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


def test_a_key_is_replaced_by_the_next_and_not_needed_any_more(load: Load, start: Start) -> None:
    Path("key").write_text("the first key")
    Path("next").write_text("the second key")
    assert run_once(start, load, "encryption: {key_file: key}", publish=COUNT) == COUNT
    both = "encryption: {cipher: aes, key_file: next, previous_key_file: key}"
    assert run_once(start, load, both) == COUNT
    assert run_once(start, load, "encryption: {cipher: aes, key_file: next}") == COUNT
    assert (on_disk(MARKER), on_disk(SUBJECT)) == (0, 0)


@pytest.mark.parametrize("other", ["encryption: {key: another key}", ""])
def test_another_key_is_told_at_once_and_takes_nothing_away(load: Load, start: Start, other: str) -> None:
    assert run_once(start, load, "encryption: {key: the first key}", publish=COUNT) == COUNT
    with pytest.raises(ServerProcessError, match=r"JetStream stream '\$G > DATA' could not be recovered"):
        run_once(start, load, other)
    assert run_once(start, load, "encryption: {key: the first key}") == COUNT
