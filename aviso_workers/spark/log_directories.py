"""Directories of event logs, as `spark.eventLog.dir` names them: which can be read from here, and by which path.

Called by the agent that tails event logs.
"""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

__all__ = ["local_path"]


def local_path(name: str) -> str:
    """Return the path on this machine of a directory that is named by a path or a `file:` URL.

    Raises `ValueError` for any other URL, with what to do instead.
    """
    url = urlsplit(name)
    if not url.scheme:
        return name
    if url.scheme != "file":
        raise ValueError(
            f"{_without_secrets(name)}: event logs cannot be read there: mount the directory and give its path, or "
            "have the logs copied to a directory of this machine"
        )
    if url.netloc not in ("", "localhost") or not url.path.startswith("/"):
        raise ValueError(
            f"{_without_secrets(name)}: give an absolute path of this machine, such as file:///spark-events"
        )
    return unquote(url.path)


def _without_secrets(name: str) -> str:
    """The URL without what may hold credentials."""
    url = urlsplit(name)
    return url._replace(netloc=url.netloc.rpartition("@")[2], query="", fragment="").geturl()
