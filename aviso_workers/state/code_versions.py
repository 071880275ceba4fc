"""Which code of an app runs: one answer, for workers' records and for whatever else names it."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from aviso_workers.aviso.literals import printable
from aviso_workers.jetstream.fields import LONGEST_SAID


def of_app(app: Any) -> str:
    """Return which code of an app this is: the version that it gives itself, else that of each distribution that its
    functions are of, else a digest of their modules; empty where these cannot be read.

    A distribution is found where its name is that of the package.
    """
    return printable(app.version or _of_modules(modules(*app.agents, *app.timers, *app.tasks)))[:LONGEST_SAID]


def _of_modules(names: Iterable[str]) -> str:
    from importlib import metadata  # which takes some milliseconds, and commands need it not

    packages = sorted({name.partition(".")[0] for name in names})
    with suppress(metadata.PackageNotFoundError):
        return ", ".join(f"{package} {metadata.version(package)}" for package in packages)
    found = digests(names)
    return digest(repr(found).encode()) if found else ""


def modules(*declarations: Any) -> list[str]:
    """Return the modules that the functions of agents, timers and tasks are in."""
    return sorted({str(getattr(each.function, "__module__", "")) for each in declarations} - {""})


def digests(names: Iterable[str]) -> dict[str, str]:
    """Return the digests of the files of these modules, but for those that cannot be read, as in an archive."""
    found = {}
    for name in names:
        with suppress(OSError):
            found[name] = digest(Path(getattr(sys.modules.get(name), "__file__", None) or "").read_bytes())
    return found


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
