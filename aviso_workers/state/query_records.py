"""Where Spark's streaming queries record the stream that their batches were stored in (`spark.query_records`)."""

from __future__ import annotations

from hashlib import blake2b

from aviso_workers.state.kept import Kept

__all__ = ["BUCKET", "KEPT", "key_of"]

BUCKET = "aviso_workers_spark_queries"
KEPT = (
    Kept(
        bucket=BUCKET,
        key="<stream>/<digest of the query's id>",
        holds="when the stream was created in which the batches of a streaming query are stored",
        until="until somebody deletes it",
    ),
)
KEY_BYTES = 16


def key_of(stream: str, query: str) -> str:
    """Return the key of a query, whose id may have characters that a key cannot have."""
    return f"{stream}/{blake2b(query.encode(), digest_size=KEY_BYTES).hexdigest()}"
