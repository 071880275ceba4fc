"""Settlements on their way: which are confirmed, and what happens to those that are not."""

from __future__ import annotations

import anyio
import pytest

from aviso_workers.backends.jetstream import consuming
from aviso_workers.backends.jetstream.consuming import Outbox

pytestmark = pytest.mark.anyio


@pytest.fixture
async def outbox(played) -> Outbox:
    outbox = Outbox(played)
    await outbox.open()
    return outbox


async def test_a_settlement_is_sent_and_not_waited_for(played, outbox):
    outbox.put(b"$JS.ACK.1", b"+ACK")
    await outbox.flush()

    assert played.sent == [("$JS.ACK.1", b"+ACK", "")]


async def test_a_settlement_that_is_to_be_confirmed_is_waited_for(played, outbox):
    outbox.put(b"$JS.ACK.1", b"+ACK", confirmed=True)
    outbox.put(b"$JS.ACK.2", b"-NAK", confirmed=True)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(outbox.flush)
        await anyio.wait_all_tasks_blocked()
        for _, _, answer in tuple(played.sent):
            assert tasks.cancel_scope.cancel_called is False
            played.say(answer)

    assert [sent[:2] for sent in played.sent] == [("$JS.ACK.1", b"+ACK"), ("$JS.ACK.2", b"-NAK")]


async def test_what_nobody_confirms_is_sent_again_until_somebody_does(played, outbox, monkeypatch):
    monkeypatch.setattr(consuming, "CONFIRM_SECONDS", 0.01)
    outbox.put(b"$JS.ACK.1", b"+ACK", confirmed=True)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(outbox.flush)
        while len(played.sent) < 3:
            await anyio.sleep(0.01)
            played.say(played.sent[0][2], status="503")
        played.say(played.sent[0][2])

    assert set(played.sent) == {("$JS.ACK.1", b"+ACK", played.sent[0][2])}
