"""Which windows a time is in, and what becomes of a key's state."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from aviso_workers import Notification, Windowing
from aviso_workers.declare import windows
from aviso_workers.declare.seen import NEVER
from aviso_workers.declare.verdicts import FinalError
from aviso_workers.declare.windows import KeyState, SettledUpTo
from aviso_workers.errors import DeclarationError, LateError


def add(total: int, notification: Notification[int]) -> int:
    return total + notification.payload


async def add_later(total: int, notification: Notification[int]) -> int:
    return add(total, notification)


def windowing(**stated: Any) -> Windowing[int, int]:
    return Windowing(**{"size": "10s", "fold": add, "initial": 0, **stated})


def notification(sequence: int, *, payload: int = 1, stored: float | None = None) -> Notification[int]:
    time = datetime.fromtimestamp(sequence if stored is None else stored, UTC)
    return Notification(event_type="mars", identifier={}, payload=payload, sequence=sequence, time=time)


def counted(state: KeyState[int], *times: float, window: Windowing[int, int]) -> KeyState[int]:
    """The state after notifications of these times, of sequences that follow those before."""
    for time in times:
        state = windows.add(state, notification(max(state.counted.newest, default=(0, 0))[0] + 1), window, time=time)
    return state


class TestEnds:
    @pytest.mark.parametrize(
        ("stated", "time", "ends"),
        [
            ({}, 0, [10]),
            ({}, 9.999, [10]),
            ({}, 10, [20]),
            ({}, -0.5, [0]),
            ({"every": "5s"}, 12, [20, 15]),
            ({"every": "5s"}, 15, [25, 20]),
            ({"every": "4s"}, 9.5, [18, 14, 10]),
            ({"every": "4s"}, 10, [18, 14]),
            ({"size": "1d"}, 86_400 * 3 + 5, [86_400 * 4]),
        ],
    )
    def test_are_those_of_the_windows_that_a_time_is_in(
        self, stated: dict[str, str], time: float, ends: list[int]
    ) -> None:
        assert windowing(**stated).ends(time) == ends

    @pytest.mark.slow
    @given(
        st.floats(-1e10, 1e10),
        st.integers(1, 5000).flatmap(lambda size: st.tuples(st.just(size), st.integers(max(1, size // 50), size))),
    )
    def test_leave_no_window_out(self, time: float, lengths: tuple[int, int]) -> None:
        size, every = lengths
        hopping = windowing(size=f"{size}s", every=f"{every}s")
        starts = [end - size for end in hopping.ends(time)]
        assert starts, "it is in no window"
        assert all(start % every == 0 and start <= time < start + size for start in starts)
        assert not min(starts) - every <= time < min(starts) - every + size
        assert max(starts) + every > time
        over = hopping.last_end(time)
        assert over <= time < over + every, "one that has ended later is left out"
        assert over not in hopping.ends(time)
        assert over + every in hopping.ends(time)


@pytest.mark.parametrize(
    ("stated", "complaint"),
    [
        ({"size": "an hour"}, "Windowing: size: .*'an hour'"),
        ({"size": "0s"}, "Windowing: size must be longer than 0 seconds"),
        ({"size": 0.5}, "Windowing: size must be whole seconds, found 0.5"),
        ({"size": True}, "Windowing: size: a duration is a number of seconds, .* found True"),
        ({"lateness": -1}, "Windowing: lateness must be longer than 0 seconds"),
        ({"lateness": None}, "Windowing: lateness: a duration is .* found None"),
        ({"every": "11s"}, "Windowing: every must be at most size, or some notifications are in no window, found 11s"),
        ({"lateness": "-1s"}, "Windowing: lateness: "),
        ({"idle": "0s"}, "Windowing: idle must be longer than 0 seconds"),
        ({"fold": add_later}, "Windowing: fold must not be async"),
        ({"fold": None}, "Windowing: fold must be a function, found None"),
        ({"key": "class"}, "Windowing: key must be a function, found 'class'"),
        ({"time": "written"}, "Windowing: time must be a function, found 'written'"),
        ({"key": add_later}, "Windowing: key must not be async"),
    ],
)
def test_windows_that_make_no_sense_are_refused(stated: dict[str, Any], complaint: str) -> None:
    with pytest.raises(DeclarationError, match=complaint):
        windowing(**stated)


class TestAState:
    def test_has_a_value_for_each_open_window(self) -> None:
        state = counted(KeyState(), 1, 2, 11, window=windowing())
        assert (state.open, state.time) == ({10: 2, 20: 1}, 11)

    def test_counts_what_comes_again_once(self) -> None:
        one = notification(7)
        state = windows.add(KeyState(), one, windowing(), time=1)
        assert windows.add(state, one, windowing(), time=1) is state

    def test_counts_what_has_the_sequence_of_another_stream(self) -> None:
        state = windows.add(KeyState(), notification(7, stored=7), windowing(), time=1)
        assert windows.add(state, notification(7, stored=8), windowing(), time=1).open == {10: 2}

    def test_does_not_share_what_it_began_with(self) -> None:
        def gather(found: list[int], one: Notification[Any]) -> list[int]:
            found.append(one.payload)
            return found

        gathering: Windowing[list[int], int] = Windowing(size="10s", every="5s", fold=gather, initial=[])
        state: KeyState[list[int]] = windows.add(KeyState(), notification(1), gathering, time=7)
        assert (state.open, gathering.initial) == ({15: [1], 10: [1]}, [])

    def test_closes_windows_that_are_over(self) -> None:
        state = counted(KeyState(), 1, 11, 21, window=windowing())
        closed = windows.close(state, 20)
        assert (windows.due(closed), closed.closed) == ([10, 20], 20)
        assert windows.close(closed, 20) is closed

    def test_closes_nothing_where_nothing_is_over(self) -> None:
        state = counted(KeyState(), 11, window=windowing())
        assert windows.close(state, 19) is state
        assert windows.close(KeyState(), 100) == KeyState()

    def test_takes_nothing_for_windows_that_have_closed(self) -> None:
        state = windows.close(counted(KeyState(), 1, 11, window=windowing()), 10)
        with pytest.raises(FinalError) as raised:
            windows.add(state, notification(9), windowing(), time=2)
        assert isinstance(raised.value.error, LateError)
        assert str(raised.value.error) == "all of its windows have closed, the last at 1970-01-01T00:00:10+00:00"
        gone = windows.without(state, 10)
        assert gone.open == {20: 1}
        assert windows.without(gone, 10) is gone
        with pytest.raises(FinalError):
            windows.add(gone, notification(9), windowing(), time=2)

    def test_remembers_who_was_late_for_some_of_its_windows(self) -> None:
        hopping = windowing(every="5s")
        state = windows.close(counted(KeyState(), 1, window=hopping), 5)
        late = notification(9)
        state = windows.add(state, late, hopping, time=2)
        assert (state.open, state.counted.marked) == ({5: 1, 10: 2}, ((9, 9.0),))
        assert windows.add(state, late, hopping, time=2) is state

    def test_counts_a_dead_letter_that_is_tried_again_once(self) -> None:
        state = counted(KeyState(), 1, 2, window=windowing())
        state = structs.replace(state, counted=state.counted.without({*state.counted.newest}))
        late_letter = notification(1)
        state = windows.add(state, late_letter, windowing(), time=1, retry="letter")
        assert state.open == {10: 3}
        assert windows.add(state, late_letter, windowing(), time=1, retry="letter") is state

    def test_knows_which_notification_is_the_newest(self) -> None:
        window = windowing()
        states = [counted(KeyState(), 5, 31, 7, window=window), counted(KeyState(), 30, window=window)]
        assert windows.newest(states) == (31, 2)
        assert windows.newest([]) == (NEVER, 0)


@pytest.mark.parametrize(
    ("sequence", "stored", "covered"),
    [(3, 9.0, True), (4, 9.0, False), pytest.param(2, 9.5, False, id="of a stream that was recreated since")],
)
def test_what_the_server_says_is_settled_covers(sequence: int, stored: float, covered: bool) -> None:
    assert SettledUpTo(sequence=3, time=9.0).covers(sequence, stored) is covered


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 60)), max_size=60), st.integers(0, 70))
def test_whatever_comes_again_every_window_has_what_was_counted_in_it(
    deliveries: list[tuple[int, int]], until: int
) -> None:
    """Deliveries in any order, some of them again, some after windows have closed."""
    window = windowing(every="5s")
    state = KeyState()
    happened = dict(deliveries)
    expected: dict[int, set[int]] = {}
    for turn, (sequence, _) in enumerate(deliveries):
        time = happened[sequence]
        known = {end for end, members in expected.items() if sequence in members}
        try:
            state = windows.add(state, notification(sequence), window, time=time)
        except FinalError:
            assert all(end <= state.closed for end in window.ends(time))
        else:
            for end in window.ends(time):
                if not known and end > state.closed:
                    expected.setdefault(end, set()).add(sequence)
        if turn == len(deliveries) // 2:
            state = windows.close(state, until)
    assert state.open == {end: len(members) for end, members in expected.items()}


class TestFingerprints:
    def test_tell_another_function(self) -> None:
        one = windowing(key=lambda found: found.identifier["a"])
        other = windowing(key=lambda found: found.identifier["b"])
        none = windowing()
        assert len({each.fingerprints["key"] for each in (one, other, none)}) == 3
        assert one.fingerprints["fold"] == other.fingerprints["fold"]

    def test_are_the_same_in_another_process(self) -> None:
        """Where a set is spelled in another order."""
        code = (
            "from aviso_workers import Windowing\n"
            "key = lambda found: 'x' if found.identifier['a'] in {'b', 'c', 'd'} else 'y'\n"
            "print(Windowing(size='1h', fold=min, initial=0, key=key).fingerprints)\n"
        )
        said = {
            subprocess.run(
                [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
            ).stdout
            for seed in "123"
        }
        assert len(said) == 1
