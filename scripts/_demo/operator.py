"""What an operator does from the console: asks for an action, and confirms what is shown."""

from __future__ import annotations

import html
import re
import time
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

HIDDEN = re.compile(r'<input type="hidden" name="([^"]*)" value="([^"]*)">')
ANSWER_SECONDS = 20.0
PATIENCE_SECONDS = 60.0
AGAIN_SECONDS = 0.5


def act(console: str, action: str, **fields: str) -> None:
    """Carry out an action, as soon as there is something for it. Raises `HTTPError` where there is nothing."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            asked = _post(console, action, fields)
            break
        except HTTPError as error:
            error.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(AGAIN_SECONDS)
    _post(console, action, fields | {name: html.unescape(value) for name, value in HIDDEN.findall(asked)})


def _post(console: str, action: str, fields: dict[str, str]) -> str:
    headers = {"Origin": console.rstrip("/")}
    request = Request(f"{console}actions/{action}", urlencode(fields).encode(), headers)
    with urlopen(request, timeout=ANSWER_SECONDS) as answer:
        return str(answer.read().decode())
