"""What belongs to an app belongs to it alone, on each nats-server that is supported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aviso_workers.server import BINARY_VARIABLE
from tests.interop import programs
from tests.security import apart
from tests.security.apart import Site
from tests.security.test_apps_apart import (
    test_each_request_about_what_belongs_to_others_is_denied,
    test_each_request_that_operators_alone_may_make_is_denied,
    test_no_id_that_another_app_has_used_makes_a_dead_letter_a_duplicate,
    test_no_message_erases_the_others_of_a_bucket,
    test_nobody_hears_what_others_publish_or_are_answered,
    test_nobody_reads_what_one_app_alone_has,
    test_who_may_read_it_hears_all_of_it_by_the_same_requests,
    test_workers_have_done_all_that_they_do_and_nothing_was_denied,
)

__all__ = [
    "test_each_request_about_what_belongs_to_others_is_denied",
    "test_each_request_that_operators_alone_may_make_is_denied",
    "test_no_id_that_another_app_has_used_makes_a_dead_letter_a_duplicate",
    "test_no_message_erases_the_others_of_a_bucket",
    "test_nobody_hears_what_others_publish_or_are_answered",
    "test_nobody_reads_what_one_app_alone_has",
    "test_who_may_read_it_hears_all_of_it_by_the_same_requests",
    "test_workers_have_done_all_that_they_do_and_nothing_was_denied",
]

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module", params=programs.NATS_SERVERS, ids=lambda version: f"nats-server-{version}")
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(BINARY_VARIABLE, str(programs.nats_server(request.param)))
        with apart.started(tmp_path_factory.mktemp("apart")) as found:
            yield found
