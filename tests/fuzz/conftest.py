from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fuzz.mutations import Rounds


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> Callable[[int], Rounds]:
    """`rounds(500)`: so many rounds; with `--minutes`, as many as fit into them."""
    return lambda count: Rounds(count, minutes=request.config.getoption("--minutes"))
