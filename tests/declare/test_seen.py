"""The list of the newest messages that were seen, and the bits of the older ones."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aviso_workers.declare.seen import MAX_STREAMS, NEVER, PAGE_SEQUENCES, SeenList, SeenPage, last_of_page, page_of

EMPTY = SeenPage(())


def listed(*sequences: int) -> SeenList:
    """Messages that were stored at as many seconds as their sequences say."""
    found = SeenList()
    for sequence in sequences:
        found = found.plus((sequence, float(sequence)), marked=sequence % 2 == 0)
    return found


class TestAList:
    def test_says_which_may_have_been_left_out(self) -> None:
        left = listed(1, 2, 3, 4).without({(1, 1.0), (2, 2.0)})
        assert left.newest == ((3, 3.0), (4, 4.0))
        assert left.marked == ((4, 4.0),)
        assert [left.may_have_left_out((n, float(n))) for n in (1, 2, 3)] == [True, True, False]
        assert not left.may_have_left_out((1, 10.0)), "of a new stream"

    def test_that_leaves_out_nothing_is_as_it_was(self) -> None:
        assert listed(1, 2).without(set()) == listed(1, 2)

    def test_leaves_out_its_older_half(self) -> None:
        assert listed(4, 1, 3, 2).oldest() == {(1, 1.0), (2, 2.0)}

    def test_has_two_messages_of_one_sequence_after_its_stream_was_made_anew(self) -> None:
        assert SeenList().plus((7, 1.0)).plus((7, 2.0)).newest == ((7, 1.0), (7, 2.0))


class TestAPage:
    @given(st.lists(st.integers(0, PAGE_SEQUENCES - 1)), st.lists(st.integers(0, PAGE_SEQUENCES - 1)))
    def test_has_what_was_put_on_it(self, numbers: list[int], late: list[int]) -> None:
        marked = [(PAGE_SEQUENCES + each, 5.0) for each in late]
        page = EMPTY.plus([(PAGE_SEQUENCES + each, 5.0) for each in numbers], created=0.0)
        page = page.plus(marked, created=0.0, marked=marked)
        found = {each: page.find((PAGE_SEQUENCES + each, 5.0)) for each in {0, 77, *numbers, *late}}
        assert {each for each, mark in found.items() if mark is not None} == {*numbers, *late}
        assert {each for each, mark in found.items() if mark} == {*late}

    def test_has_nothing_of_a_stream_that_was_deleted_or_made_anew(self) -> None:
        page = EMPTY.plus([(7, 5.0)], created=3.0)
        assert [page.find((7, stored)) for stored in (2.0, 5.0, 6.0)] == [None, False, None]

    def test_keeps_the_messages_of_each_stream_that_had_the_name(self) -> None:
        page = EMPTY.plus([(7, 5.0)], created=3.0).plus([(7, 15.0), (9, 12.0)], created=10.0)
        assert [page.find((7, stored)) for stored in (5.0, 8.0, 15.0)] == [False, None, False]
        assert [page.find((9, stored)) for stored in (5.0, 12.0)] == [None, False]
        assert (page.created, page.latest) == (10.0, 15.0)

    def test_of_a_worker_that_knows_only_the_old_stream_says_nothing_of_the_new_one(self) -> None:
        page = EMPTY.plus([(7, 15.0)], created=10.0).plus([(8, 5.0)], created=3.0)
        assert [page.find((8, stored)) for stored in (5.0, 12.0)] == [False, None]

    def test_has_messages_that_are_older_than_their_stream(self) -> None:
        page = EMPTY.plus([(7, 5.0)], created=10.0)
        assert [page.find((7, stored)) for stored in (5.0, 12.0)] == [False, None]
        assert page.created == NEVER

    def test_keeps_the_newest_streams(self) -> None:
        page = EMPTY
        for created in range(MAX_STREAMS + 2):
            page = page.plus([(1, created + 0.5)], created=float(created))
        found = [page.find((1, created + 0.5)) for created in range(MAX_STREAMS + 2)]
        assert found == [None, None, *[False] * MAX_STREAMS]

    @pytest.mark.slow
    def test_is_small_whatever_it_has(self) -> None:
        chosen = [(each, 1.0) for each in range(PAGE_SEQUENCES) if random.Random(each).random() < 0.5]
        page = EMPTY.plus(chosen, created=0.0, marked=chosen)
        assert len(msgspec.json.encode(page)) < 6000

    @pytest.mark.parametrize("number", [0, 3])
    def test_has_the_sequences_up_to_its_last(self, number: int) -> None:
        assert (page_of(last_of_page(number)), page_of(last_of_page(number) + 1)) == (number, number + 1)
