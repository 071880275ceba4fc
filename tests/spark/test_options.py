"""What a query may ask for, and how it is told what it may not."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from aviso_workers.errors import InvalidOptionError
from aviso_workers.spark.options import parse_read_options, parse_write_options

SOUND = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_an_event_type_is_read_from_its_beginning_unless_more_is_said() -> None:
    reading = parse_read_options({"event": "mars"}, streaming=False)

    assert (reading.event, reading.start, reading.end, reading.fail_on_data_loss) == ("mars", None, "latest", True)


def test_names_are_found_in_any_case_as_spark_hands_them_over() -> None:
    reading = parse_read_options(
        {
            "event": "mars",
            "where.class": "od",
            "where.step": '{"gte": 6}',
            "startingoffsets": "17",
            "maxmessagespertrigger": "500",
            "minmessagespertrigger": "10",
            "maxtriggerdelay": "2m",
            "includeheaders": "TRUE",
        },
        streaming=True,
    )

    assert reading.where == {"class": "od", "step": {"gte": 6}}
    assert (reading.start, reading.most_per_trigger, reading.least_per_trigger) == (17, 500, 10)
    assert (reading.trigger_delay_seconds, reading.include_headers) == (120, True)


def test_times_are_read_as_a_replay_reads_them() -> None:
    reading = parse_read_options({"event": "mars", "startingtimestamp": "2026-11-20T06:00:00Z"})

    assert reading.start_time == datetime(2026, 11, 20, 6, tzinfo=UTC)


@pytest.mark.parametrize(
    ("options", "streaming", "said"),
    [
        ({}, False, "give one of the options event"),
        ({"event": "mars", "stream": "MARS"}, False, "give one of the options event"),
        ({"event": " "}, False, "option event must not be empty"),
        ({"event": "mars", "startingofset": "1"}, False, "did you mean 'startingOffsets'?"),
        ({"event": "mars", "maxmessagespertrigger": "5"}, False, "maxMessagesPerTrigger is for readStream only"),
        ({"event": "mars", "endingoffsets": "5"}, True, "endingOffsets is for read only"),
        ({"event": "mars", "endingoffsets": "earliest"}, False, "endingOffsets must be latest or a sequence"),
        ({"event": "mars", "startingoffsets": "-1"}, False, "startingOffsets must be earliest or latest or a sequence"),
        (
            {"event": "mars", "startingoffsets": "1", "startingtimestamp": "0"},
            False,
            "give one of the options starting",
        ),
        ({"event": "mars", "startingtimestamp": "yesterday"}, False, "startingTimestamp must be a date with a time"),
        ({"event": "mars", "numpartitions": "0"}, False, "numPartitions must be a whole number above 0"),
        ({"event": "mars", "failondataloss": "no"}, False, "failOnDataLoss must be true or false"),
        ({"event": "mars", "maxtriggerdelay": "5m"}, True, "limits the wait for minMessagesPerTrigger"),
        ({"event": "mars", "minmessagespertrigger": "1", "maxtriggerdelay": "5"}, True, "option maxTriggerDelay: "),
        (
            {"event": "mars", "minmessagespertrigger": "9", "maxmessagespertrigger": "5"},
            True,
            "minMessagesPerTrigger 9 is more than maxMessagesPerTrigger 5",
        ),
        ({"event": "mars", "mode": "FAILFAST"}, False, "needs payloadSchema"),
        ({"event": "mars", "payloadschema": "a INT", "mode": "DROPMALFORMED"}, False, "PERMISSIVE or FAILFAST"),
        ({"stream": "MARS", "where.class": "od"}, False, "need the option event"),
        ({"event": "mars", "where.class": "[od"}, False, "option where.class is not JSON"),
    ],
)
def test_what_means_nothing_is_refused_with_the_cure(options: dict[str, str], streaming: bool, said: str) -> None:
    with pytest.raises(InvalidOptionError, match=said.replace("?", r"\?")):
        parse_read_options(options, streaming=streaming)


@pytest.mark.parametrize("name", ["token", "password", "nats_url", "nkey_seed", "credentials"])
def test_a_secret_is_no_option_and_is_not_repeated(name: str) -> None:
    with pytest.raises(InvalidOptionError, match="configuration file or the environment") as refused:
        parse_read_options({"event": "mars", name: "hunter2"})

    assert "hunter2" not in str(refused.value)


def test_writing_needs_an_event_type_and_passes_over_what_is_for_spark() -> None:
    assert parse_write_options({"event": "mars", "checkpointlocation": "/tmp/x"}).event == "mars"
    with pytest.raises(InvalidOptionError, match="writing needs the option event"):
        parse_write_options({})


@pytest.mark.parametrize(
    ("options", "streaming", "said"),
    [
        ({"queryid": "copy"}, False, "options queryId and batchId say together which batch is written"),
        ({"queryid": "copy", "batchid": "one"}, False, "option batchId must be a whole number, not 'one'"),
        ({"queryid": "copy", "batchid": "1"}, True, "option queryId is for write only"),
        ({"onduplicate": "drop", "msgidcolumn": "id"}, False, "option onDuplicate must be count or fail, not 'drop'"),
        ({"onduplicate": "fail"}, False, "option onDuplicate needs msgIdColumn"),
        ({"deadletters": "bad"}, False, "option deadLetters must be a whole path or a URL"),
        ({"traceparent": SOUND[:-1]}, False, "option traceparent must be 00-, 32 hexadecimal digits of the trace"),
        ({"traceparent": SOUND.replace("4", "0").replace("00f0", "zzzz")}, True, "option traceparent must be 00-"),
        ({"traceparent": f"00-{'0' * 32}-{'1' * 16}-01"}, False, "option traceparent must be 00-"),
        ({"traceparent": SOUND, "tracestate": "é=1"}, False, "option tracestate must be up to 512 characters"),
        ({"traceparent": SOUND, "tracestate": "a" * 513}, False, "option tracestate must be up to 512 characters"),
        ({"tracestate": "a=1"}, False, "option tracestate must be up to 512 .* beside a traceparent"),
    ],
)
def test_what_a_write_cannot_mean_is_refused_too(options: dict[str, str], streaming: bool, said: str) -> None:
    with pytest.raises(InvalidOptionError, match=said):
        parse_write_options({"event": "mars", **options}, streaming=streaming)


def test_a_write_may_be_of_a_batch_of_a_query() -> None:
    writing = parse_write_options({"event": "mars", "queryid": "copy", "batchid": "0", "deadletters": "/bad"})

    assert (writing.query_id, writing.batch_id, writing.dead_letters) == ("copy", 0, "/bad")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_write_may_be_part_of_a_trace(streaming: bool) -> None:
    options = {"event": "mars", "traceparent": SOUND, "tracestate": "a=1,b=2"}
    assert parse_write_options(options, streaming=streaming).trace == {"traceparent": SOUND, "tracestate": "a=1,b=2"}
    assert parse_write_options({"event": "mars"}, streaming=streaming).trace == {}
