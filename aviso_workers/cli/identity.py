"""`--identity`: the secret keys that open encrypted backups."""

from __future__ import annotations

from pathlib import Path

from aviso_workers.cli.options import option
from aviso_workers.ops.backups import Identities

IDENTITY = option("FILE", "File with the secret keys of age that open encrypted backups.")


def identities_of(file: Path | None) -> Identities | None:
    """Return the keys in a file; None where no file is given. Raises `DeclarationError`."""
    return Identities.read(file) if file else None
