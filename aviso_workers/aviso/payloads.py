"""Payloads: read the body of a message as the type that an agent asks for, and write a payload as a body.

`codec` calls it for messages; tables and windows store values of the same types with it. A body is usually JSON,
compact and with sorted keys, which msgspec reads and writes. Models of pydantic are read and written by pydantic, which
is imported only when an author's type is such a model. A payload of `bytes` is the body itself, unchanged.
"""

from __future__ import annotations

import hashlib
import math
import re
import typing
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from aviso_workers.errors import InvalidPayloadError, UndecodableError, describe

MAX_EXTREME = 2000
"""A payload may have at most so many numbers with an exponent of three digits. To read a number near the limits of a
float takes 12 us, a hundred times as long as any other, and blocks the event loop meanwhile.
"""
SURELY_FAST = MAX_EXTREME * len("1e308,")
"""A payload of at most so many bytes has no room for more such numbers, so that they need not be counted."""
_EXPONENTS = bytes.maketrans(b"E123456789+", b"e000000000-")
"""Makes every exponent of three digits look like `e000` or `e-000`."""
_EXTREME = re.compile(rb"[\[,:\s]-?[0-9.]+[eE][+-]?[0-9]{3}")
RAW = (bytes, bytearray, memoryview)
MAX_NAMED = 3
"""An error lists at most so many mistakes of one payload, because a dead letter shows its error in one line."""


def encode(name: str, payload: Any) -> bytes:
    """Return the body of a message: a payload of bytes as it is, any other as JSON. Raises `InvalidPayloadError`."""
    if isinstance(payload, RAW):
        return bytes(payload)
    try:
        data = _sorting.encode(payload)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        problem = "the keys of a mapping must be text" if "str keys" in str(error) else error
        raise InvalidPayloadError(f"{name}: the payload is not JSON: {problem}") from error
    # The encoder writes NaN and infinity as null; JSON has neither, and null would be another value.
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
    """Return a function that reads a body as a payload of this type. It raises `UndecodableError`, which names the path
    of the mistake.

    A payload of `bytes` is the body itself. For any other type the body is read as an aviso-server reads it: an empty
    body as null, JSON as its value, and anything else as text. With the type `Any`, a body that is neither JSON nor
    UTF-8 stays bytes. Raises TypeError for a type that cannot be read.
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
            try:
                return read(data or b"null")
            except msgspec.ValidationError:
                raise
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                text = data.decode("utf-8", "replace")
                stays_bytes = payload_type is Any and text.encode() != data
                return _read_text(read, text, otherwise=data if stays_bytes else None)
        except msgspec.ValidationError as error:
            raise UndecodableError(f"the payload does not fit: {error}") from error
        except Exception as error:  # raised by the type itself, as in its `__post_init__`
            raise UndecodableError(f"the payload does not fit: {describe(error)}") from error

    return decode


def decoded_by(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return a function that reads a body by an author's function, and raises `UndecodableError` where that raises."""

    def read(data: bytes) -> Any:
        try:
            return decode(data)
        except Exception as error:
            raise UndecodableError(f"the payload cannot be decoded: {describe(error)}") from error

    return read


def value_of(data: bytes) -> Any:
    """Return the value of any body: of JSON its value, of other text the text, and of anything else the bytes."""
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
    """Return a function that reads JSON as a value of a type. It raises `msgspec.ValidationError`, which names the path
    of the mistake.

    Raises TypeError for a type that cannot be read.
    """
    if not _holds_pydantic(kind):
        _require_known(msgspec.inspect.type_info(kind), path="$", given=True, known=set())
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


def _require_known(found: Any, *, path: str, given: bool, known: set[tuple[int, bool]]) -> None:
    """Raise TypeError where a part of a type is a class that msgspec does not know, unless it is that of a field with a
    default, which bodies leave out. `object` is refused there as well.
    """
    match found:
        case msgspec.inspect.CustomType(cls=cls) if (given or cls is object) and not _holds_pydantic(cls):
            place = "" if path == "$" else f" - at `{path}`"
            raise TypeError(f"msgspec does not know {cls!r}{place}{': use Any' if cls is object else ''}")
        case msgspec.inspect.Field():
            path = f"{path}.{found.encode_name}"
            _require_known(found.type, path=path, given=given and found.required, known=known)
        case msgspec.inspect.Type() if (id(found), given) not in known:  # a type may hold itself
            known.add((id(found), given))
            _require_known(msgspec.structs.astuple(found), path=path, given=given, known=known)
        case tuple():
            for part in found:
                _require_known(part, path=path, given=given, known=known)


def fingerprint(kind: Any) -> str:
    """Return a text that is the same in all processes for a type, and another one where its fields are others."""
    schema: object
    try:
        schema = _schema(kind)
    except (TypeError, ValueError, NameError):  # of a type that has none, such as one that decodes in its own way
        schema = re.sub(" at 0x[0-9a-f]+", "", repr(kind))
    return hashlib.sha256(msgspec.json.encode(schema, order="deterministic")).hexdigest()[:16]


def json_schema(kind: Any, refs: str) -> dict[str, Any] | None:
    """Return the JSON Schema (draft 2020-12) of the bodies that are read as a type; None where there is none.

    `refs` is a reference to a definition of its `$defs`, such as `#/$defs/{name}`.
    """
    definitions: dict[str, Any] = {}

    def inner(field: Any) -> dict[str, Any]:
        if not _holds_pydantic(field):
            return {}
        found = _schema(field, refs=refs)
        definitions.update(found.pop("$defs", {}))
        return found

    try:
        found = _schema(kind, refs=refs, inner=inner)
    except (TypeError, ValueError, NameError):
        return None
    definitions |= found.pop("$defs", {})
    return {**found, "$defs": definitions} if definitions else found


def _schema(
    kind: Any, *, refs: str = "#/$defs/{name}", inner: Callable[[Any], dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Return the JSON Schema of a type. Raises TypeError, ValueError, NameError where there is none."""
    if not _holds_pydantic(kind):
        (found,), definitions = msgspec.json.schema_components((kind,), schema_hook=inner, ref_template=refs)
        return {**found, "$defs": definitions} if definitions else found
    import pydantic

    try:
        adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(kind)
        return adapter.json_schema(ref_template=refs.replace("{name}", "{model}"))
    except pydantic.PydanticUserError as error:
        raise TypeError(str(error)) from error


def _read_text(read: Callable[[bytes], Any], text: str, *, otherwise: bytes | None) -> Any:
    """Return the value of a text that may be JSON. If it is not, return `otherwise`, or read the text itself as a value
    of the type where that is None.
    """
    try:
        return read(text.encode())
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, RecursionError):
        return read(msgspec.json.encode(text)) if otherwise is None else otherwise


def _holds_pydantic(kind: Any) -> bool:
    """Return whether a type is a pydantic model, or made of one as `list[Model]` is.

    A Struct with a model in a field is none: msgspec reads it, and calls `_read_inner` for the field.
    """
    origin = typing.get_origin(kind)
    if isinstance(origin, type) and issubclass(origin, msgspec.Struct):
        return False
    return hasattr(kind, "__pydantic_validator__") or any(map(_holds_pydantic, typing.get_args(kind)))


def _read_inner(kind: Any, value: Any) -> Any:
    """Return the value of a field whose type msgspec does not know; it is read if the type is made of models."""
    if not _holds_pydantic(kind):
        raise TypeError(f"{kind!r} is not a type that JSON is read as")
    try:
        return json_reader(kind)(msgspec.json.encode(value))
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error  # msgspec adds the path of the field


def _as_msgspecs(error: Any) -> msgspec.DecodeError:
    """Return a `pydantic.ValidationError` as the error that msgspec raises."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    if found[0]["type"] == "json_invalid":
        return msgspec.DecodeError(found[0]["msg"])
    mistakes = [f"{each['msg']} - at `{_path(each['loc'])}`" for each in found[:MAX_NAMED]]
    more = [f"and {len(found) - MAX_NAMED} more"] if len(found) > MAX_NAMED else []
    return msgspec.ValidationError("; ".join([*mistakes, *more]))


def _path(place: Iterable[int | str]) -> str:
    return "$" + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place)


def _plain(value: Any) -> Any:
    """Return a value that msgspec can write in place of one that it cannot. Raises TypeError where there is none."""
    if isinstance(value, type):  # authors often give the class where they mean a value of it
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
    """Raise UndecodableError for a payload with so many extreme numbers that to read it would block the event loop."""
    # To count the shape `e000` takes an eighth of the time of the pattern, and misses no number.
    shapes = data.translate(_EXPONENTS)
    if shapes.count(b"e000") + shapes.count(b"e-000") <= MAX_EXTREME:
        return
    if len(_EXTREME.findall(data)) > MAX_EXTREME:
        raise UndecodableError(f"the payload has more than {MAX_EXTREME} numbers with an exponent of three digits")


_decode_any = decoder(Any)
_sorting = msgspec.json.Encoder(order="sorted", enc_hook=_plain)
_decode_json = msgspec.json.Decoder().decode
to_json = msgspec.json.Encoder(enc_hook=_plain).encode
"""Returns a value as JSON. Raises TypeError and ValueError."""
