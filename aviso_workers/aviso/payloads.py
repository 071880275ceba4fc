"""Payloads: the body of a message as the type that an agent asks for, and a payload as a body.

`codec` reads and writes messages by it; tables and windows keep their values by the same types. A body is JSON as a
rule, compact and with sorted keys. msgspec reads and writes it; what is a pydantic model is read and written by
pydantic, which is imported where an author's type is one and nowhere else. `bytes` are a body as it is.
"""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from aviso_workers.errors import InvalidPayloadError, UndecodableError, describe

__all__ = ["decoded_by", "decoder", "encode", "encode_texts", "is_json", "json_reader", "to_json", "value_of"]

MOST_EXTREME = 2000
"""Numbers of a payload with an exponent of three digits. To read one near the ends of what a float can be takes 12 us,
a hundred times as long as any other, and nothing else runs meanwhile.
"""
SURELY_FAST = MOST_EXTREME * len("1e308,")
"""Bytes of a payload in which there is no room for more of them."""
_EXPONENTS = bytes.maketrans(b"E123456789+", b"e000000000-")
"""Makes every exponent of three digits look like `e000` or `e-000`."""
_EXTREME = re.compile(rb"[\[,:\s]-?[0-9.]+[eE][+-]?[0-9]{3}")
RAW = (bytes, bytearray, memoryview)
MOST_NAMED = 3
"""So many mistakes of one payload are told; a dead letter has room for a line."""


def encode(name: str, payload: Any) -> bytes:
    """Return the body of a message: a payload of bytes as it is, any other as JSON. Raises `InvalidPayloadError`."""
    if isinstance(payload, RAW):
        return bytes(payload)
    try:
        data = _sorting.encode(payload)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidPayloadError(f"{name}: the payload is not JSON: {error}") from error
    # The encoder writes NaN and infinity as null; JSON has neither, and silence would change the value.
    if b"null" in data and _holds_non_finite(msgspec.to_builtins(payload, enc_hook=_plain)):
        raise InvalidPayloadError(f"{name}: the payload holds NaN or an infinity, which JSON cannot carry")
    return data


def encode_texts(name: str, texts: Iterable[str]) -> list[bytes]:
    """Return the bodies of payloads that are JSON already. Raises `InvalidPayloadError`."""
    decode, encode = _decode_json, _sorting.encode
    try:
        return [encode(decode(text)) for text in texts]
    except (ValueError, OverflowError, RecursionError) as error:
        raise InvalidPayloadError(f"{name}: a payload is not JSON: {error}") from error


def decoder(payload_type: Any) -> Callable[[bytes], Any]:
    """Return what reads bodies as payloads of this type; it raises `UndecodableError`, with the path of the mistake.

    `bytes` are the body itself. Any other type is read as an aviso-server reads a body: null where it is empty, its
    JSON, or else its text; without a type, what is no text either stays bytes. Raises TypeError for a type that cannot
    be read.
    """
    if payload_type is bytes:
        return bytes
    if bytes in typing.get_args(payload_type):
        raise TypeError("bytes are the body itself and stand alone; an empty body is b''")
    read = json_reader(payload_type)

    def decode(data: bytes) -> Any:
        if len(data) > SURELY_FAST:
            _refuse_slow(data)
        try:
            return read(data or b"null")
        except msgspec.ValidationError as error:
            raise UndecodableError(f"the payload does not fit: {error}") from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return decode_text(data)
        except Exception as error:  # the type's own, as from `__post_init__`
            raise UndecodableError(f"the payload does not fit: {describe(error)}") from error

    def decode_text(data: bytes) -> Any:
        text = data.decode("utf-8", "replace")
        try:
            return _read_text(read, text, otherwise=data if payload_type is Any and text.encode() != data else None)
        except msgspec.ValidationError as error:
            raise UndecodableError(f"the payload does not fit: {error}") from error
        except Exception as error:
            raise UndecodableError(f"the payload does not fit: {describe(error)}") from error

    return decode


def decoded_by(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return what reads bodies as payloads by an author's function; what that raises becomes `UndecodableError`."""

    def read(data: bytes) -> Any:
        try:
            return decode(data)
        except Exception as error:
            raise UndecodableError(f"the payload cannot be decoded: {describe(error)}") from error

    return read


def value_of(data: bytes) -> Any:
    """Return the value of any body: its JSON or its text, and the bytes where it is neither."""
    try:
        return _decode_any(data)
    except UndecodableError:
        return data


def is_json(data: bytes) -> bool:
    """Return whether a body is JSON."""
    try:
        _decode_json(data)
    except (ValueError, RecursionError):
        return False
    return True


def json_reader(kind: Any) -> Callable[[bytes], Any]:
    """Return what reads JSON as values of a type; it raises `msgspec.ValidationError` with the path of the mistake.

    Raises TypeError for a type that cannot be read.
    """
    if not _holds_pydantic(kind):
        if isinstance(msgspec.inspect.type_info(kind), msgspec.inspect.CustomType):
            raise TypeError(f"msgspec does not know {kind!r}")
        return msgspec.json.Decoder(kind, dec_hook=_read_inner).decode
    import pydantic

    try:
        adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(kind)
    except (pydantic.PydanticUserError, NameError) as error:
        raise TypeError(f"pydantic cannot read it: {str(error).splitlines()[0]}") from error
    if not getattr(adapter, "pydantic_complete", True):  # from pydantic 2.10 on
        raise TypeError("pydantic cannot read it: a type of its fields is not defined yet")

    def read(data: bytes) -> Any:
        try:
            return adapter.validate_json(data)
        except pydantic.ValidationError as error:
            raise _as_msgspecs(error) from error

    return read


def _read_text(read: Callable[[bytes], Any], text: str, *, otherwise: bytes | None) -> Any:
    """Return the value of a text that is JSON perhaps; where it is not, `otherwise`, or the text as a value."""
    try:
        return read(text.encode())
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, RecursionError):
        return read(msgspec.json.encode(text)) if otherwise is None else otherwise


def _holds_pydantic(kind: Any) -> bool:
    """Return whether a type is a pydantic model, or made of one as `list[Model]` is.

    A Struct that has a model in a field is msgspec's.
    """
    origin = typing.get_origin(kind)
    if isinstance(origin, type) and issubclass(origin, msgspec.Struct):
        return False
    return hasattr(kind, "__pydantic_validator__") or any(map(_holds_pydantic, typing.get_args(kind)))


def _read_inner(kind: Any, value: Any) -> Any:
    """Return what msgspec asks for where a type that it reads has a field of another one."""
    if not _holds_pydantic(kind):
        raise TypeError(f"{kind!r} is no type that JSON is read as")
    try:
        return json_reader(kind)(msgspec.json.encode(value))
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error  # to which msgspec adds where the model is


def _as_msgspecs(error: Any) -> msgspec.DecodeError:
    """Return a `pydantic.ValidationError` as the error that msgspec raises."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    if found[0]["type"] == "json_invalid":
        return msgspec.DecodeError(found[0]["msg"])
    mistakes = [f"{each['msg']} - at `{_path(each['loc'])}`" for each in found[:MOST_NAMED]]
    more = [f"and {len(found) - MOST_NAMED} more"] if len(found) > MOST_NAMED else []
    return msgspec.ValidationError("; ".join([*mistakes, *more]))


def _path(place: Iterable[int | str]) -> str:
    return "$" + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place)


def _plain(value: Any) -> Any:
    """Return what msgspec can write in place of a value that it cannot. Raises TypeError where there is nothing."""
    if isinstance(value, type):  # which often stands where a value of it was meant
        raise TypeError(f"it holds the class {value.__name__}: give a value of it, such as {value.__name__}(...)")
    if hasattr(type(value), "__pydantic_validator__"):
        return value.model_dump(mode="json", by_alias=True)
    raise TypeError(f"a {type(value).__name__} is none of its types")


def _holds_non_finite(value: Any) -> bool:
    match value:
        case float():
            return not math.isfinite(value)
        case dict():
            return any(_holds_non_finite(item) for item in value.values())
        case list() | tuple() | set() | frozenset():
            return any(_holds_non_finite(item) for item in value)
        case _:
            return False


def _refuse_slow(data: bytes) -> None:
    """Raise UndecodableError for a payload of so many extreme numbers that to read it would stop the event loop."""
    # Looking at shapes takes an eighth of the time of looking at numbers, and misses none.
    shapes = data.translate(_EXPONENTS)
    if shapes.count(b"e000") + shapes.count(b"e-000") <= MOST_EXTREME:
        return
    if len(_EXTREME.findall(data)) > MOST_EXTREME:
        raise UndecodableError(f"the payload has more than {MOST_EXTREME} numbers with an exponent of three digits")


_decode_any = decoder(Any)
_sorting = msgspec.json.Encoder(order="sorted", enc_hook=_plain)
_decode_json = msgspec.json.Decoder().decode
to_json = msgspec.json.Encoder(enc_hook=_plain).encode
"""Writes a value as JSON. Raises TypeError and ValueError."""
