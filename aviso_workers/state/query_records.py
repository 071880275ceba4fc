"""Where Spark's streaming queries record the stream that their batches were stored in (`spark.writers`).

Each stream has a bucket of its own, because a server's permissions bind whole names.
"""

from __future__ import annotations

from hashlib import blake2b

PREFIX = "aviso_workers_spark__"
KEY_BYTES = 16


def bucket_of(stream: str) -> str:
    """Return the name of the bucket with the records of the queries whose batches are stored in this stream."""
    return f"{PREFIX}{stream}"


def key_of(query: str) -> str:
    """Return the key of a query, whose id may have characters that a key cannot have."""
    return blake2b(query.encode(), digest_size=KEY_BYTES).hexdigest()
