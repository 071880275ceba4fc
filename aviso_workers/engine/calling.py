"""Calling an author's code, so that only we can cancel it.

`handling` and `supervising` call agents and tasks by it. A cancellation that begins inside, such as that of a task
which the code awaits, would pass for one of ours: it would end the worker's tasks one by one, without a word.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

__all__ = ["call"]

A = TypeVar("A")
R = TypeVar("R")


async def call(function: Callable[[A], Awaitable[R]], argument: A) -> R:
    """What the function returns. A cancellation from within becomes a `RuntimeError`, so that it is a failure."""
    try:
        return await function(argument)
    except anyio.get_cancelled_exc_class() as error:
        if anyio.current_effective_deadline() == -math.inf:
            raise
        raise RuntimeError("cancelled from within: something that it awaited was cancelled") from error
