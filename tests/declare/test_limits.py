"""What `Rate` and `Slots` take, and where a decorator takes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import aviso_workers
from aviso_workers import Batch, Notification, Rate, Router, Slots
from aviso_workers.errors import DeclarationError


@pytest.mark.parametrize("per", ["1m", 60, timedelta(minutes=1)])
def test_a_rate_keeps_its_time_and_fields(per: Any) -> None:
    rate = Rate(120, per, by=["tenant", "class"])
    assert (rate.count, rate.per, rate.by) == (120, timedelta(minutes=1), ("tenant", "class"))
    assert rate.interval_seconds == 0.5


def test_limits_say_for_people_what_they_let() -> None:
    assert str(Rate(600, per="1m", by=["tenant"])) == "600 in 1m for each tenant, across the fleet"
    assert str(Rate(10**7, per=0.5)) == "10000000 in 0.5s, across the fleet"
    assert str(Slots(2)) == "2 at once, across the fleet"
    assert repr(Slots(2, by=["a", "b"])) == "<Slots 2 at once for each a, b, across the fleet>"


@pytest.mark.parametrize("kind", [Rate, Slots])
def test_the_signature_says_what_may_be_given(kind: type[Any]) -> None:
    fields = inspect.signature(kind).parameters["by"]
    assert (fields.kind, fields.annotation) == (inspect.Parameter.KEYWORD_ONLY, "Sequence[str]")


@pytest.mark.parametrize(
    ("declare", "mistake"),
    [
        (lambda: Rate(0, per=1), "Rate: the count must be a whole number from 1 to 1000000000, found 0"),
        (lambda: Rate("1", per=1), "Rate: the count must be a whole number .* found '1'"),  # type: ignore[arg-type]
        (lambda: Rate(True, per=1), "Rate: the count must be a whole number .* found True"),
        (lambda: Rate(0.5, per="1d"), "Rate: the count must be a whole number .* found 0.5"),  # type: ignore[arg-type]
        (lambda: Rate(10**10, per=1), "Rate: the count must be a whole number"),
        (lambda: Rate(1, per=0), "Rate: per must be from 1 ms to a day, .* found 0"),
        (lambda: Rate(1, per="2d"), "Rate: per must be from 1 ms to a day, .* found '2d'"),
        (lambda: Rate(1, per="often"), "Rate: per: "),
        (lambda: Rate(1, per=1, by="tenant"), r"Rate: by must be a list of identifier fields, .* found 'tenant'"),
        (lambda: Slots(1, by=[1]), r"Slots: by must be a list of identifier fields, .* found \[1\]"),  # type: ignore[list-item]
        (lambda: Slots(0), "Slots: the count must be a whole number from 1 to 100, found 0"),
        (lambda: Slots(101), "Slots: the count must be a whole number from 1 to 100, found 101"),
        (lambda: Slots(1.5), "Slots: the count must be a whole number"),  # type: ignore[arg-type]
    ],
)
def test_anything_else_is_refused_with_the_cure(declare: Callable[[], object], mistake: str) -> None:
    with pytest.raises(DeclarationError, match=mistake):
        declare()


@pytest.mark.parametrize(
    ("given", "mistake"),
    [
        ({"limits": 10}, r'limits= takes a list, as in limits=\[Rate\(100, per="1m"\), Slots\(1\)\], found 10'),
        ({"limits": Slots(1)}, r"limits= takes a list, .* found <Slots 1 at once"),
        ({"limits": ["10/s"]}, r"limits= takes a list, .* found \['10/s'\]"),
        ({"limits": None}, r"limits= takes a list, .* found None"),
        ({"limits": [Slots(1), Slots(2)]}, "two of a kind by the same fields, of which the lower one .*2 at once"),
        ({"limits": [Rate(1, 1, by=["a", "b"]), Rate(9, "1m", by=["b", "a"])]}, "two of a kind by the same fields"),
        ({"limits": [Slots(1)], "singleton": True}, "Slots are for an agent without singleton="),
        ({"rate_limit": 10}, r'rate_limit= is gone: say limits=\[Rate\(100, per="1m"\)\], which all workers'),
        ({"limit": 10}, r"limit= is gone: say limits=\[Slots\(1\)\]"),
    ],
)
def test_a_decorator_names_the_mistake_and_the_cure(given: dict[str, Any], mistake: str) -> None:
    router = Router("router")

    with pytest.raises(DeclarationError, match=mistake):

        @router.agent("mars", **given)
        async def index(notification: Notification[Any]) -> None: ...


def test_an_argument_that_never_was_is_refused_as_by_python() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'rate'"):
        Router("router").agent("mars", rate=10)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["Limit", "Backoff"])
def test_a_name_of_the_package_that_is_gone_says_the_new_one(name: str) -> None:
    new = {"Limit": r'Rate\(100, per="1m"\) or Slots\(1\)', "Backoff": r"RetryPolicy\(...\)"}[name]
    with pytest.raises(ImportError, match=f"aviso_workers.{name} is gone: say {new}"):
        exec(f"from aviso_workers import {name}")
    with pytest.raises(ImportError, match=f"aviso_workers.{name} is gone: say {new}"):
        getattr(aviso_workers, name)


def test_they_are_for_a_function_of_a_notification() -> None:
    with pytest.raises(DeclarationError, match="limits= is for a function of a Notification"):

        @Router("router").agent("mars", limits=[Rate(1, per=1)])
        async def index(batch: Batch[Any]) -> None: ...


def test_all_are_kept_and_slots_are_asked_for_first() -> None:
    limits: list[Rate | Slots] = [Rate(1, per=1), Slots(9), Rate(9, per="1m", by=["class"]), Slots(1, by=["class"])]

    @Router("router").agent("mars", limits=limits)
    async def index(notification: Notification[Any]) -> None: ...

    assert index.policy.limits == (limits[1], limits[3], limits[0], limits[2])
    assert index.policy.interval_seconds == 60 / 9
