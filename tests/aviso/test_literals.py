"""Durations, sizes and numbers: what is read, what is refused and why, and how they are written."""

from __future__ import annotations

import math
from contextlib import suppress
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aviso_workers.aviso import literals
from aviso_workers.aviso.literals import Duration, Size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("50s", 50),
        ("10m", 600),
        ("1h", 3600),
        ("2d", 172_800),
        ("1w", 604_800),
        (" 10m ", 600),
        ("2H", 7200),
        ("007d", 604_800),
        ("0s", 0),
        ("9223372036s", 9_223_372_036),
        ("0" * 5000 + "1s", 1),
    ],
)
def test_a_duration_is_a_number_and_a_unit(text: str, seconds: int) -> None:
    assert Duration.parse(text) == seconds


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "duration must not be empty"),
        ("  ", "duration must not be empty"),
        ("10", "duration must include a unit suffix"),
        ("abc", "duration value must be an integer"),
        ("s", "duration value must be an integer"),
        ("-5s", "duration value must be an integer"),
        ("+5s", "duration value must be an integer"),
        ("18446744073709551616s", "duration value must be an integer"),
        ("9" * 5000 + "s", "duration value must be an integer"),
        ("٣s", "duration value must be an integer"),
        ("10x", "duration unit must be one of: s, m, h, d, w"),
        ("1mo", "duration unit must be one of: s, m, h, d, w"),
        ("1h30m", "duration unit must be one of: s, m, h, d, w"),
        ("1.5h", "duration unit must be one of: s, m, h, d, w"),
        ("10 m", "duration unit must be one of: s, m, h, d, w"),
        ("18446744073709551615w", "duration overflow"),
        ("9223372037s", "duration overflow"),
    ],
)
def test_anything_else_is_no_duration(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Duration.parse(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("100K", 100_000),
        ("100Ki", 102_400),
        ("2M", 2_000_000),
        ("2Mi", 2_097_152),
        ("1G", 1_000_000_000),
        (" 1Ti ", 1_099_511_627_776),
    ],
)
def test_a_size_is_a_number_and_a_unit(text: str, count: int) -> None:
    assert Size.parse(text) == count


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "size must not be empty"),
        ("10", "size must include a unit suffix"),
        ("abc", "size value must be an integer"),
        ("-1G", "size value must be an integer"),
        ("0Mi", "size value must be greater than zero"),
        ("10m", "size unit must be one of: K, M, G, T, Ki, Mi, Gi, Ti"),
        ("10k", "size unit must be one of"),
        ("10KB", "size unit must be one of"),
        ("10MiB", "size unit must be one of"),
        ("1.5G", "size unit must be one of"),
        ("10 G", "size unit must be one of"),
        ("9223372036854775807T", "size overflow"),
        ("8388608Ti", "size overflow"),
    ],
)
def test_anything_else_is_no_size(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Size.parse(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Duration(0), "0s"),
        (Duration(90), "90s"),
        (Duration(3600), "1h"),
        (Duration(604_800), "7d"),
        (Duration(1_209_600), "2w"),
        (Size(1000), "1K"),
        (Size(1_000_000), "1M"),
        (Size(2**31), "2Gi"),
        (Size(1_024_000), "1024K"),
        (Size(1234), "1234"),
    ],
)
def test_a_literal_is_the_shortest_text(value: Duration | Size, text: str) -> None:
    assert value.literal() == text
    assert f"{value}" == str(value) == text


@given(st.integers(min_value=0, max_value=9_223_372_036).map(Duration))
def test_a_duration_reads_back(duration: Duration) -> None:
    assert Duration.parse(duration.literal()) == duration


@given(st.integers(min_value=1, max_value=2**20), st.sampled_from(["K", "M", "G", "T", "Ki", "Mi", "Gi", "Ti"]))
def test_a_size_reads_back_no_longer_than_it_was(number: int, unit: str) -> None:
    size = Size.parse(f"{number}{unit}")
    assert Size.parse(size.literal()) == size
    assert len(size.literal()) <= len(f"{number}{unit}")


@pytest.mark.slow
@given(st.text())
def test_text_is_read_or_refused_with_value_error(text: str) -> None:
    for parse in (Duration.parse, Size.parse, literals.parse_float):
        with suppress(ValueError):
            parse(text)


class _Policy(msgspec.Struct):
    keep: Duration | None = None
    most: Size | None = None


def _policy(**values: Any) -> _Policy:
    return msgspec.convert(values, _Policy, dec_hook=literals.decode_hook)


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b'{"a":1, "b" :"x  y"}', '{\n  "a": 1,\n  "b": "x  y"\n}'),
        (b'{"a": 1e999}', '{"a": 1e999}'),
        (b'{"a":1,"a":2}', '{"a":1,"a":2}'),
        (b'{"a":1.50}', '{"a":1.50}'),
        (b"no JSON", "no JSON"),
        (b"\xff", None),
    ],
)
def test_a_body_is_shown_as_it_is_and_json_with_indents(body: bytes, shown: str | None) -> None:
    assert literals.body_text(body) == shown


@pytest.mark.slow
@pytest.mark.parametrize("depth", [10, 300, 900, 5000])
def test_nested_json_is_shown_without_indents_where_these_would_be_most_of_it(depth: int) -> None:
    """With indents, a megabyte that is nested 300 times is 300 MB."""
    body = b"[" + b",".join([b"[" * depth + b"]" * depth] * (literals.MAX_SHOWN // (2 * depth + 2))) + b"]"
    assert literals.body_text(body) == body.decode()


def test_of_a_large_body_the_beginning_is_shown() -> None:
    shown = literals.body_text("é".encode() * literals.MAX_SHOWN)
    assert shown is not None
    text, _, more = shown.partition("\n")
    assert (set(text), len(text)) == ({"é"}, literals.MAX_SHOWN // 2)
    assert more == f"… and {literals.MAX_SHOWN:,} bytes more"


def test_msgspec_reads_literals_as_fields() -> None:
    assert _policy(keep="7d", most="2Gi") == _Policy(keep=Duration(604_800), most=Size(2**31))
    assert _policy(keep=Duration(5), most=None) == _Policy(keep=Duration(5))


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"keep": "soon"}, r"duration value must be an integer .* at `\$\.keep`"),
        ({"keep": 7}, r"must be text with a unit, such as 7d, not 7 - at `\$\.keep`"),
        ({"most": True}, r"must be text with a unit, such as 2Gi, not True - at `\$\.most`"),
        ({"most": "2"}, r"size must include a unit suffix .* at `\$\.most`"),
    ],
)
def test_msgspec_says_where_a_literal_is_wrong(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=complaint):
        _policy(**values)


def test_the_hook_knows_literals_only() -> None:
    with pytest.raises(NotImplementedError):
        literals.decode_hook(complex, "1")


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (12.5, "12.5"),
        (5.0, "5"),
        (0.0, "0"),
        (-0.0, "-0"),
        (1e21, "1000000000000000000000"),
        (1e-7, "0.0000001"),
        (-1.5e-9, "-0.0000000015"),
        # As near to two shortest spellings: Rust takes the one that is farther from nought, Python the even one.
        (982318492793036.25, "982318492793036.3"),
        (-982318492793036.25, "-982318492793036.3"),
        (982318492793036.75, "982318492793036.8"),
        (2.0**-1074 * 2, "0." + "0" * 322 + "1"),
        (9007199254740993.0, "9007199254740992"),
    ],
)
def test_a_float_is_written_without_exponent(number: float, text: str) -> None:
    assert literals.float_text(number) == text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_reads_back_exactly(number: float) -> None:
    text = literals.float_text(number)
    assert set(text) <= set("-.0123456789")
    assert not text.endswith((".0", "."))
    assert literals.parse_float(text) == number
    assert len(text) == len(format(Decimal(repr(number)), "f").removesuffix(".0"))
    assert math.copysign(1, literals.parse_float(text)) == math.copysign(1, number)


@pytest.mark.parametrize("text", ["1", "1.", ".5", "+2.5", "-3e2", "1E+3", "1.e-2"])
def test_floats_are_read_in_rust_syntax(text: str) -> None:
    assert literals.parse_float(text) == float(text)


@pytest.mark.parametrize("text", ["", ".", "e5", "1e", "1_000", " 1", "1 ", "nan", "inf", "-inf", "1e400", "٣"])
def test_everything_else_is_no_float(text: str) -> None:
    with pytest.raises(ValueError, match="is not a finite number"):
        literals.parse_float(text)
