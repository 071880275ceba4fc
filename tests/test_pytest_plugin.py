"""The pytest plugin, in runs of pytest of their own, and the documents' tests of agents with it."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

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
    def test_tutorial(self, pytester: pytest.Pytester, run: Run) -> None:
        pytester.makepyfile(test_tutorial=blocks("tutorial.md", "python")[-1])
        run().assert_outcomes(passed=2)

    @pytest.mark.parametrize("real", [False, True], ids=["in memory", "on a server"])
    def test_testing(self, pytester: pytest.Pytester, run: Run, nats_server: NatsServer, real: bool) -> None:
        tests = "\n\n".join(blocks("testing.md", "python"))
        pytester.makepyfile(test_fields=tests)
        count = tests.count("def test_")
        if real:
            run("--aviso-server", nats_server.url).assert_outcomes(passed=count - 1, skipped=1)
        else:
            run().assert_outcomes(passed=count)

    @pytest.mark.parametrize("real", [False, True], ids=["in memory", "on a server"])
    def test_windows(self, pytester: pytest.Pytester, run: Run, nats_server: NatsServer, real: bool) -> None:
        agents, late, test = blocks("windows.md", "python")
        pytester.path.joinpath("aviso.yaml").write_text(blocks("windows.md", "yaml")[0])
        pytester.makepyfile(fields=f"{agents}\n{late}", test_windows=test)
        run(*(("--aviso-server", nats_server.url) if real else ())).assert_outcomes(passed=1)


class TestPlugin:
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

    def test_the_server_is_none_in_memory(self, pytester: pytest.Pytester, run: Run) -> None:
        pytester.makepyfile("""
            def test_server(aviso_server, pytestconfig):
                assert aviso_server == pytestconfig.getoption("--aviso-server")
        """)
        run().assert_outcomes(passed=1)
        run("--aviso-server", "nats://127.0.0.1:4222").assert_outcomes(passed=1)
