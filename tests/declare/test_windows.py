"""Which windows a time is in, and what becomes of a key's state."""

from __future__ import annotations

import itertools
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from aviso_workers import Notification, Windowing
from aviso_workers.declare import windows
from aviso_workers.declare.verdicts import FinalError
from aviso_workers.declare.windows import CountedPage, KeyState, SettledUpTo
from aviso_workers.errors import DeclarationError, LateError
from aviso_workers.jetstream.sequences import PAGE_SEQUENCES


def add(total: int, notification: Notification[int]) -> int:
    return total + notification.payload


async def add_later(total: int, notification: Notification[int]) -> int:
    return add(total, notification)


def windowing(**stated: Any) -> Windowing[int, int]:
    return Windowing(**{"size": "10s", "fold": add, "initial": 0, **stated})


def notification(sequence: int, *, payload: int = 1, stored: float | None = None) -> Notification[int]:
    time = datetime.fromtimestamp(sequence if stored is None else stored, UTC)
    return Notification(event_type="mars", identifier={}, payload=payload, sequence=sequence, time=time)


def begun(window: Windowing[Any, Any] | None = None) -> KeyState[Any]:
    """The state of a new key."""
    return KeyState(sizings=((window or windowing()).sizing,))


def counted(state: KeyState[int], *times: float, window: Windowing[int, int]) -> KeyState[int]:
    """The state after notifications of these times, of sequences that follow those before."""
    for time in times:
        state = windows.add(state, notification(max(state.counted, default=0) + 1), window, time=time)
    return state


class TestStarts:
    @pytest.mark.parametrize(
        ("stated", "time", "starts"),
        [
            ({}, 0, [0]),
            ({}, 9.999, [0]),
            ({}, 10, [10]),
            ({}, -0.5, [-10]),
            ({"every": "5s"}, 12, [10, 5]),
            ({"every": "5s"}, 15, [15, 10]),
            ({"every": "4s"}, 9.5, [8, 4, 0]),
            ({"every": "4s"}, 10, [8, 4]),
            ({"size": "1d"}, 86_400 * 3 + 5, [86_400 * 3]),
        ],
    )
    def test_are_those_of_the_windows_that_a_time_is_in(
        self, stated: dict[str, str], time: float, starts: list[int]
    ) -> None:
        assert windows.starts((windowing(**stated).sizing,), time) == starts

    @given(
        st.floats(-1e10, 1e10),
        st.integers(1, 5000).flatmap(lambda size: st.tuples(st.just(size), st.integers(max(1, size // 50), size))),
    )
    def test_leave_no_window_out(self, time: float, lengths: tuple[int, int]) -> None:
        size, every = lengths
        starts = windows.starts((windowing(size=f"{size}s", every=f"{every}s").sizing,), time)
        assert starts, "it is in no window"
        assert all(start % every == 0 and start <= time < start + size for start in starts)
        assert not min(starts) - every <= time < min(starts) - every + size
        assert max(starts) + every > time


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
        state = counted(begun(), 1, 2, 11, window=windowing())
        assert (state.open, state.time) == ({0: 2, 10: 1}, 11)

    def test_counts_what_comes_again_once(self) -> None:
        one = notification(7)
        state = windows.add(begun(), one, windowing(), time=1)
        assert windows.add(state, one, windowing(), time=1) is state

    def test_counts_what_has_the_sequence_of_another_stream(self) -> None:
        state = windows.add(begun(), notification(7, stored=7), windowing(), time=1)
        assert windows.add(state, notification(7, stored=8), windowing(), time=1).open == {0: 2}

    def test_does_not_share_what_it_began_with(self) -> None:
        def gather(found: list[int], one: Notification[Any]) -> list[int]:
            found.append(one.payload)
            return found

        gathering: Windowing[list[int], int] = Windowing(size="10s", every="5s", fold=gather, initial=[])
        state: KeyState[list[int]] = windows.add(begun(gathering), notification(1), gathering, time=7)
        assert (state.open, gathering.initial) == ({5: [1], 0: [1]}, [])

    def test_closes_windows_that_are_over(self) -> None:
        state = counted(begun(), 1, 11, 21, window=windowing())
        closed = windows.close(state, 20.5)
        assert (windows.due(closed), closed.closed) == ([0, 10], 20)
        assert windows.close(closed, 20.5) is closed

    def test_closes_nothing_where_nothing_is_over(self) -> None:
        state = counted(begun(), 11, window=windowing())
        assert windows.close(state, 19.9) is state
        assert windows.close(begun(), 100) == begun()

    def test_takes_nothing_for_windows_that_have_closed(self) -> None:
        state = windows.close(counted(begun(), 1, 11, window=windowing()), 10)
        with pytest.raises(FinalError) as raised:
            windows.add(state, notification(9), windowing(), time=2)
        assert isinstance(raised.value.error, LateError)
        assert str(raised.value.error) == "all of its windows have closed, the last at 1970-01-01T00:00:10+00:00"
        gone = windows.without(state, 0)
        assert gone.open == {10: 1}
        assert windows.without(gone, 0) is gone
        with pytest.raises(FinalError):
            windows.add(gone, notification(9), windowing(), time=2)

    def test_remembers_who_was_late_for_some_of_its_windows(self) -> None:
        hopping = windowing(every="5s")
        state = windows.close(counted(begun(hopping), 1, window=hopping), 5)
        late = notification(9)
        state = windows.add(state, late, hopping, time=2)
        assert (state.open, windows.has_missed(state, late)) == ({-5: 1, 0: 2}, True)
        assert windows.add(state, late, hopping, time=2) is state
        assert not windows.has_missed(state, notification(9, stored=10))

    def test_leaves_out_what_is_settled(self) -> None:
        state = counted(begun(), 1, 2, 3, window=windowing())
        pruned = windows.prune(state, SettledUpTo(sequence=2, time=9))
        assert (set(pruned.counted), pruned.left_out) == ({3}, (2, 2.0))
        assert [windows.is_older(pruned, sequence, sequence) for sequence in (1, 2, 3, 4)] == [True, True, False, False]
        assert not windows.is_older(pruned, 1, 10), "of a new stream"

    def test_keeps_what_was_stored_after_the_server_said_what_is_settled(self) -> None:
        state = counted(begun(), 1, 2, 3, window=windowing())
        assert windows.prune(state, SettledUpTo(sequence=3, time=0.5)) is state, (
            "those sequences were of another stream"
        )

    def test_leaves_out_the_older_half_where_it_lists_too_many(self) -> None:
        state = counted(begun(), 1, 2, 3, 4, window=windowing())
        assert windows.oldest(state) == {1: 1.0, 2: 2.0}

    def test_counts_a_dead_letter_that_is_tried_again_once(self) -> None:
        state = windows.prune(counted(begun(), 1, 2, window=windowing()), SettledUpTo(sequence=2, time=9))
        late_letter = notification(1)
        state = windows.add(state, late_letter, windowing(), time=1, retry="letter")
        assert state.open == {0: 3}
        assert windows.add(state, late_letter, windowing(), time=1, retry="letter") is state

    def test_knows_which_notification_is_the_newest(self) -> None:
        window = windowing()
        states = [counted(begun(), 5, 31, 7, window=window), counted(begun(), 30, window=window)]
        assert windows.newest(states) == (31, 2)
        assert windows.newest([]) == (windows.NEVER, 0)


class TestAPage:
    @given(st.lists(st.integers(0, PAGE_SEQUENCES - 1)), st.lists(st.integers(0, PAGE_SEQUENCES - 1)))
    def test_has_what_was_put_on_it(self, numbers: list[int], late: list[int]) -> None:
        page = CountedPage(created=0.0).plus({PAGE_SEQUENCES + each: 5.0 for each in [*numbers, *late]}, [])
        page = page.plus({}, [PAGE_SEQUENCES + each for each in late])
        found = {each for each in range(PAGE_SEQUENCES) if page.has(PAGE_SEQUENCES + each, 5.0)}
        assert found == {*numbers, *late}
        assert {each for each in found if page.has_missed(PAGE_SEQUENCES + each)} == set(late)

    def test_has_nothing_of_a_stream_that_was_deleted_or_made_anew(self) -> None:
        page = CountedPage(created=3.0).plus({7: 5.0}, [])
        assert [page.has(7, stored) for stored in (2.0, 5.0, 6.0)] == [False, True, False]

    def test_is_small_whatever_it_has(self) -> None:
        page = CountedPage(created=0.0).plus(dict.fromkeys(range(PAGE_SEQUENCES), 1.0), range(PAGE_SEQUENCES))
        assert len(msgspec.json.encode(page)) < 6000

    def test_is_settled_when_its_last_sequence_is(self) -> None:
        page = CountedPage(created=0.0).plus({5: 5.0}, [])
        last = PAGE_SEQUENCES - 1
        settled = [
            SettledUpTo(sequence=last, time=5),
            SettledUpTo(sequence=last - 1, time=5),
            SettledUpTo(sequence=last, time=4),
        ]
        assert [page.is_settled(0, each) for each in settled] == [True, False, False]


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 60)), max_size=60), st.integers(0, 70))
def test_whatever_comes_again_every_window_has_what_was_counted_in_it(
    deliveries: list[tuple[int, int]], until: int
) -> None:
    """Deliveries in any order, some of them again, some after windows have closed."""
    window = windowing(every="5s")
    state = begun(window)
    happened = dict(deliveries)
    expected: dict[int, set[int]] = {}
    for turn, (sequence, _) in enumerate(deliveries):
        time = happened[sequence]
        known = {start for start, members in expected.items() if sequence in members}
        try:
            state = windows.add(state, notification(sequence), window, time=time)
        except FinalError:
            assert all(start + 10 <= state.closed for start in windows.starts(state.sizings, time))
        else:
            for start in windows.starts(state.sizings, time):
                if not known and start + 10 > state.closed:
                    expected.setdefault(start, set()).add(sequence)
        if turn == len(deliveries) // 2:
            state = windows.close(state, until)
    assert state.open == {start: len(members) for start, members in expected.items()}


class Versions:
    """One key that workers of several versions count, whose code states different sizes, and that know late of it."""

    def __init__(self, first: Windowing[Any, Any]) -> None:
        self.state: KeyState[Any] = KeyState()
        self.known = [windows.WindowProgress(sizings=(first.sizing,))]
        """What is known for all keys, as it was after each change of it."""
        self.closed: dict[tuple[int, int], int] = {}
        """The values of windows by their start and end, in the order in which they closed."""
        self.counted: list[float] = []
        self._sequence = 0

    def count(self, time: float, *, behind: int) -> None:
        """Count a notification of this time, by a worker that does not know of so many changes yet."""
        progress = self.known[max(0, len(self.known) - 1 - behind)]
        state = windows.sized(self.state, progress.sizings, passed=progress.closed)
        self._sequence += 1
        with suppress(FinalError):
            self.state = windows.add(
                state, notification(self._sequence), windowing(), time=time, passed=progress.closed
            )
            self.counted.append(time)

    def deploy(self, windowing: Windowing[Any, Any]) -> None:
        """Let a worker close windows whose code states these."""
        progress = self.known[-1]
        sizings = windows.resized(progress.sizings, windowing.sizing, counted=self.state.time, closed=progress.closed)
        self.known.append(structs.replace(progress, sizings=sizings))

    def close(self, until: float) -> None:
        progress = self.known[-1]
        passed = max(progress.closed, int(until))
        needed = windows.still_needed(progress.sizings, closed=passed)
        self.known.append(structs.replace(progress, closed=passed, sizings=needed))
        state = windows.close(windows.sized(self.state, needed, passed=passed), until)
        for start in windows.due(state):
            place = start, windows.end(state, start)
            assert place not in self.closed, "it was closed before"
            self.closed[place] = state.open[start]
            state = windows.without(state, start)
        self.state = state


SIZES = st.sampled_from([("4s", None), ("6s", None), ("12s", None), ("5s", None), ("12s", "3s"), ("6s", "4s")])
STEP = st.one_of(
    st.tuples(st.just("count"), st.floats(0, 9), st.integers(0, 3)),
    st.tuples(st.just("deploy"), SIZES, st.just(0)),
    st.tuples(st.just("close"), st.floats(0, 6), st.just(0)),
)


@given(SIZES, st.lists(STEP, max_size=60))
def test_each_window_has_all_of_its_time_whatever_sizes_are_deployed(
    first: tuple[str, str | None], steps: list[tuple[Any, Any, Any]]
) -> None:
    versions, now = Versions(windowing(size=first[0], every=first[1])), 1000.0
    for what, value, behind in steps:
        if what == "count":
            now += value
            versions.count(now, behind=behind)
        elif what == "deploy":
            versions.deploy(windowing(size=value[0], every=value[1]))
        else:
            versions.close(now - value)
    versions.close(windows.last_end(versions.state))
    assert not versions.state.open
    assert len(versions.counted) == sum(step[0] == "count" for step in steps), "none was late"
    for (start, end), value in versions.closed.items():
        assert value == sum(start <= time < end for time in versions.counted), f"{start} to {end}"
    for time in versions.counted:
        assert any(start <= time < end for start, end in versions.closed), f"{time} is in no window"


@given(
    st.lists(st.sampled_from(["4s", "6s", "12s", "5s"]), min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 3), st.integers(0, 9)), max_size=60),
)
def test_each_notification_is_in_one_tumbling_window_whatever_sizes_are_deployed(
    sizes: list[str], steps: list[tuple[int, int, int]]
) -> None:
    """In any order, so that some are late."""
    versions, deployed = Versions(windowing(size=sizes[0])), iter(sizes)
    for time, behind, what in steps:
        versions.count(time, behind=behind)
        if what == 0:
            versions.deploy(windowing(size=next(deployed, sizes[-1])))
        elif what < 3:
            versions.close(versions.state.time - time / 10)
    versions.close(windows.last_end(versions.state))
    places = sorted(versions.closed)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(places)), f"they overlap: {places}"
    assert sum(versions.closed.values()) == len(versions.counted)
    for (start, end), value in versions.closed.items():
        assert value == sum(start <= time < end for time in versions.counted), f"{start} to {end}"


def test_a_window_that_was_a_dead_letter_has_the_end_that_it_had() -> None:
    state = begun(windowing(size="60s"))
    back = structs.replace(state, open={0: 7}, ends={0: 10}, closed=10)
    assert (windows.due(back), windows.window(back, "", 0).end) == ([0], datetime.fromtimestamp(10, UTC))
    assert windows.without(back, 0) == structs.replace(state, closed=10)


@pytest.mark.parametrize(
    ("before", "after", "counted", "closed", "since"),
    [
        ("10m", "1h", 25 * 60, 20 * 60, 3600),
        ("1h", "10m", 3599.9, 0, 3600),
        ("1h", "10m", 3600, 0, 7200),
        ("1h", "10m", 3599, 3600, 3600),
        ("1h", "1d", 3600, 0, 86400),
        ("4s", "6s", 13, 0, 24),
        ("9000000000s", "8999999999s", 0, 0, windows.LAST_SINCE),
    ],
)
def test_a_new_size_holds_when_windows_of_both_begin(
    before: str, after: str, counted: float, closed: int, since: int
) -> None:
    sizings = (windowing(size=before).sizing,)
    resized = windows.resized(sizings, windowing(size=after).sizing, counted=counted, closed=closed)
    assert [each.since for each in resized] == [windows.NEVER, since]
    back = windows.resized(resized, windowing(size=before).sizing, counted=counted, closed=closed)
    assert back == sizings, "it was taken back before it held"


HOUR, DAY = 3600, 86_400


def sizing(size: int, every: int = 0, *, since: int = windows.NEVER) -> windows.Sizing:
    return windows.Sizing(since, size, every or size)


@pytest.mark.parametrize(
    ("sizings", "first_closed"),
    [
        ((sizing(60), sizing(10, since=600)), 600),
        ((sizing(60, 20), sizing(10, since=600)), 640),
        ((sizing(10), sizing(60, 20, since=600)), 640),
    ],
)
def test_a_sizing_is_needed_until_no_window_of_before_the_next_takes_anything(
    sizings: windows.Sizings, first_closed: int
) -> None:
    """No window of the old size, and none of the new size that would have begun too early to have all of its time."""
    assert windows.still_needed(sizings, closed=first_closed - 1) == sizings
    assert windows.still_needed(sizings, closed=first_closed) == (structs.replace(sizings[1], since=windows.NEVER),)
    assert windows.still_needed(sizings, closed=first_closed, first_start=599) == sizings


@pytest.mark.parametrize(
    ("state", "passed", "of_all", "since"),
    [
        pytest.param({}, 0, DAY, DAY, id="a quiet key changes with all"),
        pytest.param({"time": DAY + 1.0}, 0, DAY, 2 * DAY, id="what was counted by the old size stays so"),
        pytest.param({"closed": DAY + 1}, 0, DAY, 2 * DAY, id="nothing begins before what is closed"),
        pytest.param({}, DAY + 1, DAY, 2 * DAY, id="nor before what is closed for all keys"),
        pytest.param({}, 1, HOUR + 1, DAY, id="of a key whose windows begin at other moments"),
    ],
)
def test_a_key_takes_the_new_size_when_that_changes_none_of_its_windows(
    state: dict[str, float], passed: int, of_all: int, since: int
) -> None:
    counted = KeyState(sizings=(sizing(HOUR),), **state)  # type: ignore[arg-type]
    found = windows.sized(counted, (sizing(HOUR), sizing(DAY, since=of_all)), passed=passed)
    assert found.sizings == (sizing(HOUR), sizing(DAY, since=since))


def test_windows_of_each_size_are_looked_for() -> None:
    sizings = (sizing(10), sizing(60, since=600))
    assert [windows.ended(sizings, time) > windows.ended(sizings, time - 1) for time in (570, 575, 600, 660)] == [
        True,
        False,
        True,
        True,
    ]


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
