"""The pytest plugin, in runs of pytest of their own, and the documents' tests of agents with it."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from textwrap import dedent

import pytest

from aviso_workers.server import NatsServer

PLUGIN = "aviso_workers.pytest_plugin"
DOCS = Path(__file__).resolve().parent.parent / "docs"
Run = Callable[..., pytest.RunResult]


def blocks(document: str, language: str) -> list[str]:
    """The code blocks of a document."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / document).read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def run(pytester: pytest.Pytester) -> Run:
    """`run("--aviso-server", url)`: pytest in a directory that has the tutorial's app and the test's files."""
    config, agents = blocks("tutorial.md", "yaml")[0], blocks("tutorial.md", "python")[0]
    pytester.path.joinpath("aviso.yaml").write_text(config)
    pytester.makepyfile(fields=agents)
    by_itself = any(entry.value == PLUGIN for entry in entry_points(group="pytest11"))

    def run(*arguments: str) -> pytest.RunResult:
        plugin = () if by_itself else ("-p", PLUGIN)
        return pytester.runpytest_subprocess("-p", "no:cacheprovider", *plugin, *arguments)

    return run


class TestDocuments:
    @pytest.mark.slow
    def test_tutorial(self, pytester: pytest.Pytester, run: Run) -> None:
        pytester.makepyfile(test_tutorial=blocks("tutorial.md", "python")[-1])
        run().assert_outcomes(passed=2)

    @pytest.mark.slow
    @pytest.mark.parametrize("real", [False, True], ids=["in memory", "on a server"])
    def test_testing(self, pytester: pytest.Pytester, run: Run, nats_server: NatsServer, real: bool) -> None:
        tests = "\n\n".join(blocks("testing.md", "python"))
        pytester.makepyfile(test_fields=tests)
        count = tests.count("def test_")
        if real:
            skipped = tests.count("pytest.skip(")
            run("--aviso-server", nats_server.url).assert_outcomes(passed=count - skipped, skipped=skipped)
        else:
            run().assert_outcomes(passed=count)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "real", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["in memory", "on a server"]
    )
    def test_windows(self, pytester: pytest.Pytester, run: Run, nats_server: NatsServer, real: bool) -> None:
        agents, so_far, hopping, late, test = blocks("windows.md", "python")
        pytester.path.joinpath("aviso.yaml").write_text(blocks("windows.md", "yaml")[0])
        moving = """
            from moving import app, last_hour, print_volume

            async def test_moving(aviso_harness):
                async with aviso_harness(app, workers=2) as t:
                    for step, written in enumerate(["06:00", "06:30", "06:59", "07:00"]):
                        field = {"size": 3, "written": f"2026-11-20T{written}:00Z"}
                        await t.notify("mars", {"class": "od", "step": step}, field)
                        await t.settle()
                    sums = [one for one in t.published if len(one.identifier.get("hour", "")) == 13]
                    assert {one.identifier["hour"][9:]: one.payload["bytes"] for one in sums} == {
                        "0610": 3, "0620": 3, "0630": 3, "0640": 6, "0650": 6, "0700": 9
                    }
        """
        pytester.makepyfile(
            fields=f"{agents}\n{late}",
            moving=f"{agents}\n{so_far}\n{hopping}",
            test_windows=test,
            test_moving=moving,
        )
        run(*(("--aviso-server", nats_server.url) if real else ())).assert_outcomes(passed=2)


class TestPlugin:
    @pytest.mark.slow
    def test_imports_late(self, pytester: pytest.Pytester, run: Run) -> None:
        pytester.makepyfile("""
            import sys

            def test_what_is_loaded():
                assert "aviso_workers.pytest_plugin" in sys.modules
                late = {"aviso_workers.testing", "nats", "prometheus_client", "pyspark", "typer"}
                assert late & set(sys.modules) == set()
        """)
        run().assert_outcomes(passed=1)

    def test_runs_no_coroutine_of_others(self, pytester: pytest.Pytester, run: Run) -> None:
        pytester.makepyfile("""
            async def test_not_ours(): ...
        """)
        result = run("-p", "no:anyio")
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(["*async def functions are not natively supported*"])

    @pytest.mark.slow
    def test_a_failure_says_what_is_not_settled(self, pytester: pytest.Pytester, run: Run) -> None:
        pytester.makepyfile("""
            from fields import app, index_field

            class TestFields:
                async def test_settles(self, aviso_harness, tmp_path):
                    async with aviso_harness(app) as t:
                        identifier = {"class": "od", "date": "2026-11-20", "step": 12}
                        await t.notify("mars", identifier, {"location": str(tmp_path)})
                        await t.settle(within_seconds=30)
        """)
        result = run()
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(["E*not settled within 30 s:", "E*the last one was retried (*an empty field)"])

    @pytest.mark.slow
    def test_the_server_is_none_in_memory(self, pytester: pytest.Pytester, run: Run) -> None:
        pytester.makepyfile("""
            def test_server(aviso_server, pytestconfig):
                assert aviso_server == pytestconfig.getoption("--aviso-server")
        """)
        run().assert_outcomes(passed=1)
        run("--aviso-server", "nats://127.0.0.1:4222").assert_outcomes(passed=1)

    @pytest.mark.slow
    def test_time_begins_where_the_test_says(self, pytester: pytest.Pytester, run: Run) -> None:
        pytester.makepyfile("""
            from datetime import UTC, datetime
            from fields import app

            async def test_start(aviso_harness):
                async with aviso_harness(app, start=datetime(2026, 11, 20, tzinfo=UTC)) as t:
                    assert datetime.fromtimestamp(t.clock.time_ns() / 1e9, UTC) == datetime(2026, 11, 20, tzinfo=UTC)
        """)
        run().assert_outcomes(passed=1)


FIELD = """
    from fields import app, index_field

    OD = {"class": "od", "date": "2026-11-20", "step": 12}
"""
OWN_TEST = """
    {mark}
    async def test_in_the_test(aviso_harness):
        async with aviso_harness(app, workers=2) as t:
            await t.notify("mars", OD, {{"location": "/data/12", "size": 3}})
            await t.settle()
            assert t.outcomes(index_field) == ["acked"]
"""
FIXTURE = """
    {fixture}
    async def t(aviso_harness):
        async with aviso_harness(app) as t:
            yield t

    {mark}
    async def test_by_a_fixture(t):
        await t.notify("mars", OD, {{"location": "/data/12", "size": 3}})
        await t.crash()
        await t.settle()
        assert t.outcomes(index_field) == ["acked"]

    {mark}
    async def test_by_a_fixture_again(t):
        assert t.published == []
        with pytest.raises(AssertionError, match="not settled within 0.1 s"):
            await t.stop()
            await t.notify("mars", OD, {{"location": "/data/12", "size": 3}})
            await t.settle(within_seconds=0.1)
"""
NO_WARNING = ("-W", "error")
STRICT, AUTO = (
    (f"--asyncio-mode={mode}", "-o", "asyncio_default_fixture_loop_scope=function") for mode in ("strict", "auto")
)
ASYNCIO = "@pytest.mark.asyncio"
IN_STRICT_MODE = (STRICT, "@pytest_asyncio.fixture", ASYNCIO)
IN_AUTO_MODE = (AUTO, "@pytest.fixture", "")


class TestOtherPlugins:
    """Each in a run of pytest that has it and not the others, with what is left of them switched off."""

    def written(self, pytester: pytest.Pytester, *parts: str, fixture: str, mark: str) -> None:
        texts = [FIELD, *(part.format(fixture=fixture, mark=mark) for part in parts)]
        pytester.makepyfile(test_fields="\n".join(["import pytest", "import pytest_asyncio", *map(dedent, texts)]))

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("mode", "fixture", "mark", "real"),
        [
            pytest.param(*IN_STRICT_MODE, False, id="strict, in memory", marks=pytest.mark.slow),
            pytest.param(*IN_STRICT_MODE, True, id="strict, on a server"),
            pytest.param(*IN_AUTO_MODE, False, id="auto, in memory"),
            pytest.param(*IN_AUTO_MODE, True, id="auto, on a server", marks=pytest.mark.slow),
        ],
    )
    def test_pytest_asyncio(
        self,
        pytester: pytest.Pytester,
        run: Run,
        nats_server: NatsServer,
        mode: tuple[str, ...],
        fixture: str,
        mark: str,
        real: bool,
    ) -> None:
        self.written(pytester, OWN_TEST, FIXTURE, fixture=fixture, mark=mark)
        server = ("--aviso-server", nats_server.url) if real else ()
        run("-p", "no:anyio", *mode, *NO_WARNING, *server).assert_outcomes(passed=3)

    @pytest.mark.parametrize("options", [("-p", "no:asyncio"), STRICT], ids=["alone", "beside"])
    @pytest.mark.slow
    def test_anyio(self, pytester: pytest.Pytester, run: Run, options: tuple[str, ...]) -> None:
        pytester.makeconftest("""
            import pytest

            @pytest.fixture
            def anyio_backend():
                return "asyncio"
        """)
        self.written(pytester, OWN_TEST, FIXTURE, fixture="@pytest.fixture", mark="@pytest.mark.anyio")
        run(*NO_WARNING, *options).assert_outcomes(passed=3)

    @pytest.mark.slow
    def test_none(self, pytester: pytest.Pytester, run: Run) -> None:
        self.written(pytester, OWN_TEST, fixture="", mark="")
        run("-p", "no:anyio", "-p", "no:asyncio", "-W", "error").assert_outcomes(passed=1)

    @pytest.mark.slow
    def test_a_worker_that_ends_by_an_error_fails_the_test_that_has_it_by_a_fixture(
        self, pytester: pytest.Pytester, run: Run
    ) -> None:
        failing = """
            {mark}
            async def test_waits(t, monkeypatch):
                from aviso_workers.backends.in_memory.consumer import InMemoryConnection
                from aviso_workers.errors import BackendError

                async def failed(self):
                    raise BackendError("the server is gone")

                monkeypatch.setattr(InMemoryConnection, "failed", failed)
                await t.crash()
                await t.notify("mars", OD, {{"location": "/data/12", "size": 3}})
                await t.settle()
        """
        fixture, _, _ = FIXTURE.partition("    {mark}")
        self.written(pytester, fixture, failing, fixture="@pytest_asyncio.fixture", mark=ASYNCIO)
        result = run("-p", "no:anyio")
        result.assert_outcomes(failed=1, errors=1)
        result.stdout.fnmatch_lines(["E*BackendError: the server is gone"])
