"""The types of fields of settings: bounded numbers, text that says something, and a word on each.

`settings` and `nats_server` declare with these; `conversion` knows what they mean.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Seconds = Annotated[float, Meta(gt=0)]
Port = Annotated[int, Meta(ge=0, le=65535)]
"""A port; 0 is any free port."""


def about(description: str, *, ours: bool = False, **reasons: str) -> Meta:
    """Return what a field means, which is also shown in editors.

    A field is `ours` where aviso-server, whose section it stands in, does not know it.

    `reasons` belongs to a choice: why a value that one might expect is none, and `otherwise`, what to say of the rest.
    Of a number, `bounds` says what it is, where one that is out of bounds was meant as something else.
    """
    return Meta(description=description, extra={"reasons": reasons, "ours": ours})
