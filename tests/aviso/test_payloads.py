"""Payloads of other types than msgspec's: pydantic's models, bodies as they are, and an author's own decoder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from msgspec import Struct
from pydantic import BaseModel, Field, RootModel, field_validator

from aviso_workers.aviso import payloads
from aviso_workers.errors import InvalidPayloadError, UndecodableError


class Place(BaseModel):
    latitude: float = Field(ge=-90, le=90)
    name: str = Field(default="", alias="called")


class Ride(BaseModel):
    vendor: int
    begin: datetime
    fare: Decimal = Decimal(0)
    stops: list[Place] = []

    @field_validator("vendor")
    @classmethod
    def check(cls, vendor: int) -> int:
        if vendor == 13:
            raise ValueError("there is no such vendor")
        if vendor == 14:
            raise RuntimeError("out of order")
        return vendor


class Walk(BaseModel):
    steps: int


class Names(RootModel[list[str]]):
    pass


class Envelope(Struct):
    ride: Ride
    walks: list[Walk] = []
    size: float = 0


RIDE = Ride(vendor=1, begin=datetime(2026, 1, 1, tzinfo=UTC), stops=[Place(latitude=1, called="here")])
RIDE_JSON = b'{"begin":"2026-01-01T00:00:00Z","fare":"0","stops":[{"called":"here","latitude":1.0}],"vendor":1}'


class TestPydantic:
    @pytest.mark.parametrize(
        ("kind", "data", "payload"),
        [
            (Ride, RIDE_JSON, RIDE),
            (list[Walk], b'[{"steps":1},{"steps":2}]', [Walk(steps=1), Walk(steps=2)]),
            (Walk | None, b"", None),
            (Walk | Ride, RIDE_JSON, RIDE),
            (dict[str, Walk], b'{"a":{"steps":1}}', {"a": Walk(steps=1)}),
            (Names, b'["a"]', Names(["a"])),
            (Envelope, b'{"ride":%s,"walks":[{"steps":1}]}' % RIDE_JSON, Envelope(RIDE, [Walk(steps=1)])),
            (Walk | str, b"plain text", "plain text"),
        ],
    )
    def test_reads_its_models(self, kind: Any, data: bytes, payload: Any) -> None:
        assert payloads.decoder(kind)(data) == payload

    @pytest.mark.parametrize(
        ("kind", "data", "complaint"),
        [
            (
                Ride,
                b'{"vendor":"x","begin":"2026-01-01T00:00:00Z"}',
                r"Input should be a valid integer.* - at `\$.vendor`",
            ),
            (Ride, b'{"vendor":1}', r"the payload does not fit: Field required - at `\$.begin`"),
            (Ride, RIDE_JSON.replace(b"1.0", b"91"), r"less than or equal to 90 - at `\$.stops\[0\].latitude`"),
            (Ride, RIDE_JSON.replace(b":1}", b":13}"), r"there is no such vendor - at `\$.vendor`"),
            (Ride, RIDE_JSON.replace(b":1}", b":14}"), "the payload does not fit: RuntimeError: out of order"),
            (Ride, b"", r"the payload does not fit: Input should be an object - at `\$`"),
            (Ride, b"plain text", r"the payload does not fit: Input should be an object - at `\$`"),
            (Envelope, b'{"ride":%s,"walks":[{}]}' % RIDE_JSON, r"Field required - at `\$.steps` - at `\$.walks\[0\]`"),
            (
                list[Walk],
                b"[{},{},{},{},{}]",
                r"^the payload does not fit: (Field required - at `\$\[\d\].steps`; ){3}and 2 more$",
            ),
        ],
    )
    def test_says_where_a_payload_does_not_fit(self, kind: Any, data: bytes, complaint: str) -> None:
        with pytest.raises(UndecodableError, match=complaint):
            payloads.decoder(kind)(data)

    @pytest.mark.parametrize(
        ("payload", "data"),
        [
            (RIDE, RIDE_JSON),
            ({"b": [Walk(steps=1)], "a": None}, b'{"a":null,"b":[{"steps":1}]}'),
            (Envelope(RIDE), b'{"ride":%s,"size":0,"walks":[]}' % RIDE_JSON),
            (Names(["a"]), b'["a"]'),
        ],
    )
    def test_writes_its_models_wherever_they_are(self, payload: Any, data: bytes) -> None:
        assert payloads.encode("rides", payload) == data

    @pytest.mark.parametrize("payload", [Place(latitude=1).model_copy(update={"latitude": float("nan")})])
    def test_nan_in_a_model_is_refused(self, payload: Any) -> None:
        for each in (payload, [payload], {"place": payload}):
            with pytest.raises(InvalidPayloadError, match="rides: the payload holds NaN or an infinity"):
                payloads.encode("rides", each)

    def test_is_imported_only_where_a_type_is_its_model(self) -> None:
        code = (
            "import sys; from aviso_workers import App, Notification; from aviso_workers.aviso import payloads; "
            "payloads.decoder(dict[str, int])(b'{}'); print('pydantic' in sys.modules)"
        )
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert ended.stdout.strip() == "False"

    def test_a_type_of_both_libraries_says_so(self) -> None:
        with pytest.raises(TypeError, match="pydantic cannot read it: Unable to generate pydantic-core schema"):
            payloads.decoder(Walk | Envelope)

    def test_a_model_whose_fields_are_not_defined_says_so(self) -> None:
        class Unfinished(BaseModel):
            walk: Later  # type: ignore[name-defined]  # noqa: F821

        with pytest.raises(TypeError, match="pydantic cannot read it: a type of its fields is not defined yet"):
            payloads.decoder(Unfinished)


class TestBytes:
    @pytest.mark.parametrize("data", [b"", b"null", b"\x08\x96\x01\xff\x00", b'{"a": 1}'])
    def test_are_the_body_as_it_is(self, data: bytes) -> None:
        assert payloads.encode("mars", data) == data
        assert payloads.decoder(bytes)(data) == data

    @pytest.mark.parametrize("kind", [bytearray, memoryview])
    def test_may_be_of_another_kind(self, kind: Callable[[bytes], Any]) -> None:
        assert payloads.encode("mars", kind(b"\xff")) == b"\xff"

    def test_stand_alone(self) -> None:
        with pytest.raises(TypeError, match="bytes are the body itself and stand alone"):
            payloads.decoder(bytes | None)

    @pytest.mark.parametrize(
        ("data", "value"),
        [(b"", None), (b"1", 1), (b"one", "one"), (b"\xff", b"\xff"), (b'"\xff"', "\ufffd"), (b"1e400", b"1e400")],
    )
    def test_without_a_type_a_body_that_is_no_text_stays_as_it_is(self, data: bytes, value: Any) -> None:
        assert payloads.value_of(data) == value

    def test_in_a_struct_are_base64(self) -> None:
        class Holding(Struct):
            body: bytes

        assert payloads.encode("mars", Holding(b"\xff")) == b'{"body":"/w=="}'
        assert payloads.decoder(Holding)(b'{"body":"/w=="}') == Holding(b"\xff")


class TestAnAuthorsDecoder:
    def test_makes_the_payload_of_the_bodys_bytes(self) -> None:
        assert payloads.decoded_by(int.from_bytes)(b"\x01\x00") == 256

    def test_what_it_raises_is_why_the_body_is_undecodable(self) -> None:
        with pytest.raises(UndecodableError, match="the payload cannot be decoded: UnicodeDecodeError: 'ascii' codec"):
            payloads.decoded_by(lambda data: data.decode("ascii"))(b"\xff")


class TestFingerprint:
    def test_is_another_one_for_other_fields(self) -> None:
        one, two = msgspec.defstruct("Found", ["a"]), msgspec.defstruct("Found", ["a", ("b", int, 0)])
        kinds = [int, float, dict[str, int], one, two, list[one], list[two]]  # type: ignore[valid-type]
        assert len({payloads.fingerprint(kind) for kind in kinds}) == len(kinds)
        again = msgspec.defstruct("Found", ["a"])
        assert payloads.fingerprint(again) == payloads.fingerprint(one)

    def test_is_another_one_for_other_fields_of_a_pydantic_model(self) -> None:
        pydantic = pytest.importorskip("pydantic")
        one, two = pydantic.create_model("Found", a=(int, 0)), pydantic.create_model("Found", b=(int, 0))
        assert payloads.fingerprint(one) != payloads.fingerprint(two)
        assert payloads.fingerprint(one) == payloads.fingerprint(pydantic.create_model("Found", a=(int, 0)))

    def test_names_no_place_in_memory(self) -> None:
        class Odd:
            def __repr__(self) -> str:
                return f"<Odd at {id(self):#x}>"

        assert payloads.fingerprint(Odd()) == payloads.fingerprint(Odd())
