"""Messages that aviso-workers has not published, and which of them are a server's answers."""

from __future__ import annotations

import pytest

from aviso_workers.aviso.codec import Message
from aviso_workers.jetstream import answers

ANSWERS = (
    b'{"stream":"MARS","seq":12}',
    b'{"stream":"MARS", "seq":12,"duplicate": true}',
    b'{"stream":"MARS","domain":"hub","seq":12}',
    b'{"stream":"aviso_workers_counters","seq":12,"val":"7"}',
    b'{"stream":"MARS","seq":3,"batch":"x","count":3}',
    b'{"error":{"code":400,"err_code":10071,"description":"wrong last sequence: 3"},"stream":"MARS","seq":0}',
    b'{"error":{"code":503,"err_code":10039,"description":"not enabled"}}',
    b'{"type":"ack","seq":5,"msgs":10}',
    b'{"type":"gap","last_seq":5,"seq":10}',
    b'{"type":"err","seq":5,"error":{"code":400}}',
    b'{"type":"io.nats.jetstream.api.v1.stream_purge_response","success":true,"purged":3}',
)
OTHERS = (
    b"",
    b"null",
    b"12",
    b'{"location":"s3://x"}',
    b'{"stream":"oper","step":12}',
    b'{"stream":"MARS","seq":12,"class":"od"}',
    b'{"stream":"MARS"}',
    b'{"error":"too late"}',
    b'{"type":"ack"}',
    b'{"type":"ack","seq":5,"class":"od"}',
    b'{"type":"int.ecmwf.aviso.mars"}',
    b'{"type":["ack"],"seq":5}',
    b'{"type":"io.nats.jetstream.advisory.v1.max_deliver","stream":"MARS"}',
    b'{"stream":"MARS","seq":12',
    b'{"stream":' + b"[" * 100_000,
    b'{"stream":\xff}',
)


@pytest.mark.parametrize("data", ANSWERS)
@pytest.mark.parametrize("headers", [None, {}, {"Nats-Stream-Source": "MARS 12 > > mars"}])
def test_an_answer_of_a_server_without_headers_is_told(data: bytes, headers: dict[str, str] | None) -> None:
    message = Message(subject="$KV.app__table__newest.step", data=data, headers=headers)
    assert answers.is_stored_by_reply(message)
    assert "reply subject $KV.app__table__newest.step" in answers.why_foreign(message)


@pytest.mark.parametrize("data", OTHERS)
def test_what_is_no_answer_may_be_of_any_publisher_and_not_of_ours(data: bytes) -> None:
    message = Message(subject="mars.od", data=data)
    assert not answers.is_stored_by_reply(message)
    assert answers.why_foreign(message) == "it has no headers, so aviso-workers has not published it"


@pytest.mark.parametrize("data", ANSWERS + OTHERS)
def test_what_has_headers_is_not_known_to_be_foreign(data: bytes) -> None:
    message = Message(subject="mars.od", data=data, headers={"Nats-Msg-Id": "1"})
    assert not answers.is_stored_by_reply(message)
    assert answers.why_foreign(message) == ""
