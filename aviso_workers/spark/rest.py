"""A client of the monitoring REST API that a Spark history server or a driver's UI has.

Called by the command that holds it against what was published (`ops.spark_reconciliation`). Everything here blocks on
the network. It answers with states, not events, and keeps the newest only (`spark.ui.retainedJobs` and others, 1000
each).
Followed: Spark's documentation, "Monitoring and Instrumentation", REST API.
"""

from __future__ import annotations

import http.client
import urllib.error
import urllib.parse
from collections.abc import Mapping
from datetime import datetime
from typing import TypeVar

import msgspec
from msgspec import Struct

from aviso_workers import http_answers
from aviso_workers.aviso.codec import UNREADABLE_JSON
from aviso_workers.errors import SparkRestError
from aviso_workers.spark.job_events import SparkApplication

T = TypeVar("T")

ANSWER_SECONDS = 60.0
"""How long a whole answer may take. A history server reads the whole log of an application when it is first asked for
it."""
MAX_BYTES = 64 << 20
"""Of one answer. A job, stage or execution has a few hundred bytes."""
MAX_EXECUTIONS = 1_000_000
RUNNING, SUCCEEDED, FAILED, ENDED = "running", "succeeded", "failed", "ended"
WORDS = {"SUCCEEDED": SUCCEEDED, "COMPLETE": SUCCEEDED, "COMPLETED": SUCCEEDED, "FAILED": FAILED}
"""What Spark calls the ends of jobs, stages and SQL executions. Its other words are not ends."""
NEVER_BEGUN = ("PENDING", "SKIPPED")
"""Stages that were planned, and for which Spark has no events."""

States = Mapping[tuple[str, str], str]
"""`running`, `succeeded`, `failed` or `ended`, by kind and id as in a notification."""


class _Attempt(Struct, rename="camel"):
    completed: bool
    attempt_id: str | None = None


class _RestApplication(Struct, rename="camel"):
    id: str
    attempts: list[_Attempt]


class _Job(Struct, rename="camel"):
    job_id: int
    status: str


class _Stage(Struct, rename="camel"):
    stage_id: int
    attempt_id: int
    status: str


class _Execution(Struct):
    id: int
    status: str


class SparkRest:
    """A client of the REST API at a URL such as `http://history:18080`. All its methods raise `SparkRestError`."""

    def __init__(self, url: str) -> None:
        try:
            parts = urllib.parse.urlsplit(url)
            is_known = parts.scheme in ("http", "https") and parts.port != 0
        except ValueError:  # as of brackets that are not closed, or a port that is not a number
            is_known = False
        if not is_known:
            raise SparkRestError(
                f"{url!r} is not a URL of a history server or a driver's UI, such as http://127.0.0.1:18080"
            )
        self._root = f"{url.rstrip('/')}/api/v1/applications"

    def applications(self, *, since: datetime | None = None) -> list[tuple[str, str | None, bool]]:
        """Return the attempts that began `since` then: id, attempt (None: there is but one), and whether it ended."""
        query = f"?minDate={since:%Y-%m-%dT%H:%M:%S.000}GMT" if since else ""
        found = self._get(query, list[_RestApplication])
        return [(each.id, attempt.attempt_id, attempt.completed) for each in found for attempt in each.attempts]

    def states(self, application_id: str, attempt: str | None, *, ended: bool) -> States:
        """Return the states of the application, its jobs, stages and SQL executions."""
        path = f"/{urllib.parse.quote(application_id)}" + (f"/{urllib.parse.quote(attempt)}" if attempt else "")
        application = SparkApplication.of_run(application_id, attempt)
        states = {("application", application.id): ENDED if ended else RUNNING}
        for job in self._get(f"{path}/jobs", list[_Job]):
            states["job", str(job.job_id)] = WORDS.get(job.status, RUNNING)
        for stage in self._get(f"{path}/stages", list[_Stage]):
            if stage.status not in NEVER_BEGUN:
                states["stage", f"{stage.stage_id}.{stage.attempt_id}"] = WORDS.get(stage.status, RUNNING)
        length = f"?details=false&planDescription=false&length={MAX_EXECUTIONS}"
        for execution in self._get(f"{path}/sql{length}", list[_Execution]):
            states["sql", str(execution.id)] = WORDS.get(execution.status, RUNNING)
        return states

    def _get(self, path: str, answer: type[T]) -> T:
        url = self._root + path
        try:
            body = http_answers.read(url, seconds=ANSWER_SECONDS, silent_seconds=ANSWER_SECONDS, max_bytes=MAX_BYTES)
            return msgspec.json.decode(body, type=answer)
        except urllib.error.HTTPError as error:
            raise SparkRestError(f"{url}: {error.code} {error.reason}") from error
        except http.client.HTTPException as error:
            raise SparkRestError(f"{url}: no whole answer of HTTP: {error!r}") from error
        except http_answers.TooLargeError as error:
            raise SparkRestError(f"{url}: {error}: lower what Spark retains, such as spark.ui.retainedJobs") from error
        except OSError as error:
            raise SparkRestError(f"{url}: no answer: {getattr(error, 'reason', error)}") from error
        except UNREADABLE_JSON as error:
            raise SparkRestError(f"{url}: not an answer of Spark's REST API: {error}") from error
