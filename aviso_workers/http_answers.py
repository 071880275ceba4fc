"""Answers that other programs give over HTTP, with a bound in time and in bytes.

Called by `server.processes`, `ops.doctor.monitoring_port` and `spark.rest`. Everything here blocks.
"""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import Future, wait
from http.client import HTTPMessage, IncompleteRead
from typing import Any

PART_BYTES = 1 << 16


class TooLargeError(OSError):
    """The answer has more bytes than were asked for."""


class _SameServer(urllib.request.HTTPRedirectHandler):
    """Follows a redirect to the same server only: another one may be inside of a network, or not speak HTTP."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        asked, told = urllib.parse.urlsplit(req.full_url), urllib.parse.urlsplit(newurl)
        if (told.scheme, told.netloc) != (asked.scheme, asked.netloc):
            fp.close()
            raise urllib.error.URLError(f"redirects to {newurl!r}: give the URL of that server, if it is the right one")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


FAR = urllib.request.build_opener(_SameServer)
NEAR = urllib.request.build_opener(_SameServer, urllib.request.ProxyHandler({}))
"""Asks no proxy: one that the environment names is for the web."""


def read(
    url: str, *, seconds: float, silent_seconds: float, max_bytes: int, near: bool = False, failures: bool = False
) -> bytes:
    """Return the whole answer to a GET: it takes at most `seconds`, and is silent for at most `silent_seconds`.

    With `near`, no proxy is asked; with `failures`, the body of an answer with a status of 400 or more is returned too.
    Raises `TooLargeError`, other kinds of `OSError`, and `HTTPException`.
    """
    answer: Future[bytes] = Future()
    opener, ends = NEAR if near else FAR, time.monotonic() + seconds

    def receive() -> None:
        try:
            with _opened(opener, url, silent_seconds, failures=failures) as response:
                body = bytearray()
                while len(body) <= max_bytes and time.monotonic() < ends and (part := response.read1(PART_BYTES)):
                    body += part
                if time.monotonic() >= ends:
                    raise _late(seconds)
                if response.length and len(body) <= max_bytes:
                    raise IncompleteRead(bytes(body), response.length)
                answer.set_result(bytes(body))
        except Exception as error:
            answer.set_exception(error)

    # In a thread of its own, because the timeout of a socket begins anew with each byte, also of a head.
    threading.Thread(target=receive, daemon=True).start()  # it must not delay the end of the process
    wait([answer], seconds)
    if not answer.done():
        raise _late(seconds)
    body = answer.result()
    if len(body) > max_bytes:
        raise TooLargeError(f"it is larger than {max_bytes >> 20} MiB")
    return body


def _late(seconds: float) -> TimeoutError:
    return TimeoutError(f"it is not complete after {seconds:g} s: see whether the server is overloaded")


def _opened(opener: urllib.request.OpenerDirector, url: str, silent_seconds: float, *, failures: bool) -> Any:
    try:
        return opener.open(url, timeout=silent_seconds)
    except urllib.error.HTTPError as error:
        if failures:
            return error
        error.close()
        raise
