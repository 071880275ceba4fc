"""What a `Limit` takes, and where a decorator takes one."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from aviso_workers import Batch, Limit, Notification, Router
from aviso_workers.errors import DeclarationError


def test_it_has_seconds_and_fields() -> None:
    for per in ("1m", 60, timedelta(minutes=1)):
        limit = Limit(120, per=per, key=["tenant", "class"])
        assert (limit.per, limit.key, limit.interval_seconds) == (60.0, ("tenant", "class"), 0.5)
    assert limit.text == "120 in 1m for each tenant, class, across the fleet"
    assert Limit(concurrent=2).text == "2 at once, across the fleet"


@pytest.mark.parametrize(
    ("given", "mistake"),
    [
        ({}, r'say either Limit\(100, per="1m"\) or Limit\(concurrent=1\)'),
        ({"number": 1, "per": 1, "concurrent": 1}, "say either"),
        ({"number": "1", "per": 1}, "say either"),
        ({"number": True, "per": 1}, "say either"),
        ({"number": 1}, "give a number above 0 .* and per above 0 s"),
        ({"number": -1, "per": 1}, "give a number above 0"),
        ({"number": 1, "per": "2d"}, "at most a day"),
        ({"number": 1, "per": "often"}, "Limit: per"),
        ({"number": 0.5, "per": "1d"}, "it must let one begin in a day"),
        ({"number": 1, "per": 1, "key": "tenant"}, r"key must be a list of identifier fields"),
        ({"number": 1, "per": 1, "key": [1]}, r"key must be a list of identifier fields"),
        ({"number": 1, "per": 1, "across": "worker"}, r'across must be "fleet", found \'worker\'; rate_limit=10'),
        ({"concurrent": 1.5}, "concurrent must be a whole number from 1 to 100"),
        ({"concurrent": -1}, "concurrent must be a whole number"),
        ({"concurrent": 1, "per": 1}, "without per"),
    ],
)
def test_anything_else_is_refused_with_the_cure(given: dict[str, Any], mistake: str) -> None:
    with pytest.raises(DeclarationError, match=mistake):
        Limit(**given)


@pytest.mark.parametrize(
    ("given", "mistake"),
    [
        ({"rate_limit": Limit(concurrent=1)}, r"give Limit\(concurrent=...\) as limit="),
        ({"limit": Limit(1, per=1)}, r'give Limit\(100, per="1m"\) as rate_limit='),
        ({"limit": 1}, r"limit= takes Limit\(concurrent=1, ...\)"),
        ({"rate_limit": "10/s"}, r"rate_limit= takes calls per second, or a Limit, found '10/s'"),
        ({"limit": Limit(concurrent=1), "singleton": True}, "limit= is for an agent without singleton="),
    ],
)
def test_a_decorator_names_the_mistake_and_the_cure(given: dict[str, Any], mistake: str) -> None:
    router = Router("router")

    with pytest.raises(DeclarationError, match=mistake):

        @router.agent("mars", **given)
        async def index(notification: Notification[Any]) -> None: ...


def test_it_is_for_a_function_of_a_notification() -> None:
    with pytest.raises(DeclarationError, match="a Limit is for a function of a Notification"):

        @Router("router").agent("mars", rate_limit=Limit(1, per=1))
        async def index(batch: Batch[Any]) -> None: ...


def test_both_are_kept_and_a_place_is_asked_for_first() -> None:
    @Router("router").agent("mars", rate_limit=Limit(1, per=1), limit=Limit(concurrent=1))
    async def index(notification: Notification[Any]) -> None: ...

    assert index.policy.limits == (Limit(concurrent=1), Limit(1, per=1))
    assert index.policy.rate_limit is None
