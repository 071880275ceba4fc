"""Tables as they are declared, and how keys are spelled. How they behave on a backend is in tests/contract."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aviso_workers import App, Router
from aviso_workers.backends.buckets import KEY
from aviso_workers.errors import DeclarationError
from aviso_workers.jetstream.key_value import decode_key, encode_key


@given(st.text(min_size=1, max_size=50))
def test_any_text_survives_as_a_key(key: str) -> None:
    spelled = encode_key(key)
    assert KEY.fullmatch(spelled)
    assert ".." not in spelled
    assert decode_key(spelled) == key


@pytest.mark.parametrize(
    ("key", "spelled"),
    [("od/0001-x_Y.7", "od/0001-x_Y.7"), ("a=b", "a=3Db"), ("ö", "=C3=B6"), ("a..b", "a=2E=2Eb"), (".", "=2E")],
)
def test_what_a_bucket_takes_is_left_as_it_is(key: str, spelled: str) -> None:
    assert encode_key(key) == spelled


@pytest.mark.parametrize(
    ("stated", "problem"),
    [
        ({"name": "a.b", "type": int}, "table name 'a.b': use 1 to 64 letters"),
        ({"name": "t", "type": int, "history": "3"}, "table 't': history must be from 1 to 64, found '3'"),
        ({"name": "t", "type": int, "default": "x"}, "table 't': 'x' does not fit: Expected `int`, got `str`"),
        ({"name": "t", "type": object()}, "table 't': "),
        ({"name": "t", "type": App}, "table 't': msgspec does not know <class 'aviso_workers.app.App'>"),
        ({"name": "t", "type": int, "history": 65}, "table 't': history must be from 1 to 64, found 65"),
    ],
)
def test_nonsense_is_refused_where_it_is_declared(stated: dict[str, Any], problem: str) -> None:
    with pytest.raises(DeclarationError, match=problem):
        Router("r").table(**stated)


def test_a_name_is_for_one_table_or_counter() -> None:
    router = Router("r")
    router.table("t", int)
    with pytest.raises(DeclarationError, match="table 't' is declared twice in 'r'"):
        router.counter("t")


def test_an_app_has_the_tables_of_what_it_includes() -> None:
    router, app = Router("r"), App("a")
    table = router.table("t", int)
    app.include(router)
    assert app.tables == {"t": table}
