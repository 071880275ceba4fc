"""Payloads as columns of a Spark schema: the option `payloadSchema`.

`schema` calls it for a batch of texts. A payload fits when it is a JSON object whose fields have the types that are
asked for; a field may be missing or null, and one that was not asked for is left out. What does not fit is null, and
its text is in the column `_corrupt_record`, or ends the query where mode is FAILFAST: the words of Spark's JSON reader.
"""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Sequence
from typing import Annotated, Any, TypedDict

import msgspec
import pyarrow as pa
from msgspec import Meta
from pyspark.sql import types

from aviso_workers.errors import InvalidOptionError, UndecodableError

CORRUPT = "_corrupt_record"

SIMPLE: dict[type[types.DataType], Any] = {
    types.StringType: str,
    types.BooleanType: bool,
    types.ByteType: Annotated[int, Meta(ge=-(2**7), lt=2**7)],
    types.ShortType: Annotated[int, Meta(ge=-(2**15), lt=2**15)],
    types.IntegerType: Annotated[int, Meta(ge=-(2**31), lt=2**31)],
    types.LongType: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)],
    types.FloatType: float,
    types.DoubleType: float,
    types.DecimalType: decimal.Decimal,
    types.DateType: datetime.date,
    types.TimestampType: datetime.datetime,
    types.TimestampNTZType: datetime.datetime,
}


class PayloadReader:
    """A parser of payloads into values of one Spark type. Made once in a task."""

    def __init__(self, kind: types.StructType, arrow: pa.DataType, *, mode: str) -> None:
        """Prepare the decoder. Raises `InvalidOptionError` for a type that JSON has no values of."""
        self._decode = msgspec.json.Decoder(_read_as(kind)).decode
        self._arrow = arrow
        self._fails_fast = mode == "FAILFAST"

    def read(self, texts: Sequence[str | None], sequences: Sequence[int]) -> tuple[pa.Array, list[str | None]]:
        """Parse payloads, and return the values and, where one does not fit, its text. Raises `UndecodableError` where
        mode is FAILFAST.
        """
        values: list[Any] = [None] * len(texts)
        corrupt: list[str | None] = [None] * len(texts)

        def misfit(index: int, error: Exception) -> None:
            if self._fails_fast:
                raise UndecodableError(
                    f"the payload of message {sequences[index]} does not fit payloadSchema: {error}; with mode "
                    f"PERMISSIVE it would be in {CORRUPT}"
                ) from error
            values[index], corrupt[index] = None, texts[index]

        for index, text in enumerate(texts):
            if text is None:
                continue
            try:
                values[index] = self._decode(text)
            except (msgspec.DecodeError, RecursionError) as error:
                misfit(index, error)
        try:
            return pa.array(values, self._arrow), corrupt
        except (pa.ArrowException, OverflowError):  # such as a decimal of too many digits: find out which
            for index, value in enumerate(values):
                try:
                    pa.array([value], self._arrow)
                except (pa.ArrowException, OverflowError) as error:
                    misfit(index, error)
        return pa.array(values, self._arrow), corrupt


def _read_as(kind: types.DataType) -> Any:
    match kind:
        case types.StructType():
            fields = {field.name: _read_as(field.dataType) | None for field in kind.fields}
            return TypedDict("Payload", fields, total=False)  # type: ignore[operator]
        case types.ArrayType():
            return list[_read_as(kind.elementType) | None]  # type: ignore[misc]
        case types.MapType(keyType=types.StringType()):
            return dict[str, _read_as(kind.valueType) | None]  # type: ignore[misc]
        case _ if type(kind) in SIMPLE:
            return SIMPLE[type(kind)]
        case _:
            raise InvalidOptionError(f"payloadSchema: {kind.simpleString()} has no values in JSON")
