"""Work that a signal ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import anyio
import pytest

from aviso_workers.cli.signals import until_signal

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def python_s_own() -> Iterator[None]:
    """The handlers that Python begins with: Spark, in another test of this process, sets others."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class TestUntilSignal:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    async def test_one_that_comes_at_the_first_step_of_the_work_ends_it(self, number: signal.Signals) -> None:
        default = signal.getsignal(number)

        async def work() -> None:
            assert signal.getsignal(number) is not default, "nobody heeds the signal yet"
            os.kill(os.getpid(), number)
            await anyio.sleep_forever()

        assert await until_signal(work) == number
        assert signal.getsignal(number) is default
