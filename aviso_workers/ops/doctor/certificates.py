"""The end of an X.509 certificate's validity (RFC 5280), read from its DER form."""

from __future__ import annotations

from datetime import UTC, datetime

UTC_TIME, GENERALIZED_TIME, VERSION = 0x17, 0x18, 0xA0
FORMATS = {UTC_TIME: "%y%m%d%H%M%SZ", GENERALIZED_TIME: "%Y%m%d%H%M%SZ"}
BEFORE_VALIDITY = 3
"""In a certificate's fields after its version: serial number, signature, issuer."""


def expires(der: bytes) -> datetime:
    """Return the time after which the certificate is not valid. Raises `ValueError` where it is not a certificate."""
    try:
        (_, certificate), *_ = _elements(der)
        (_, signed), *_ = _elements(certificate)
        fields = [(kind, content) for kind, content in _elements(signed) if kind != VERSION]
        kind, content = _elements(fields[BEFORE_VALIDITY][1])[1]
        return datetime.strptime(content.decode(), FORMATS[kind]).replace(tzinfo=UTC)
    except (IndexError, KeyError, ValueError) as error:
        raise ValueError("no X.509 certificate") from error


def _elements(data: bytes) -> list[tuple[int, bytes]]:
    """Return the DER elements that follow one another, each as its tag and its content."""
    found = []
    position = 0
    while position < len(data):
        kind, length = data[position], data[position + 1]
        position += 2
        if length & 0x80:
            size = length & 0x7F
            length = int.from_bytes(data[position : position + size], "big")
            position += size
        found.append((kind, data[position : position + length]))
        position += length
    return found
