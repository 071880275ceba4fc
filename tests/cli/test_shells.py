"""bash, zsh and fish in a terminal, as somebody types in them: they run nothing of a name that they complete, nor of a
name that is quoted in a command that we print.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nats
import pexpect
import pytest

from aviso_workers.aviso.literals import quoted
from aviso_workers.server import NatsServer
from tests import programs
from tests.waits import PATIENCE_SECONDS

PROMPT = "next: "


SHELLS = {
    "bash": (".bashrc", "PS1={prompt}\n{completion}\n"),
    "zsh": (".zshrc", "PS1={prompt}; bindkey -e; autoload -Uz compinit; compinit -u\n{completion}\n"),
    "fish": (".config/fish/config.fish", "function fish_prompt; echo -n {prompt}; end\n{completion}\n"),
}
"""The file that an interactive shell reads when it starts, and the settings there."""
MAIN = (sys.executable, "-c", "from aviso_workers.cli import main; main()")
PROGRAM = """#!/bin/sh
[ -z "$_AVISO_WORKERS_COMPLETE" ] || exec {main}
printf '[words'; printf '\\037%s' "$@"; printf ']\\n'
"""
"""`aviso-workers` that completes as ever, and prints its words where it would run a command."""

RUNS = ("$(touch${IFS}RUN)", "`touch${IFS}RUN`", ";touch${IFS}RUN;", "'$(touch${IFS}RUN)'", '"$(touch${IFS}RUN)"')
AFTER_BACKSLASH = (r"\$(touch${IFS}RUN)", r"\`touch${IFS}RUN`", r"\'; touch RUN; echo \'", r"\"$(touch RUN)\"")
READ = ("~", "#a", "*", "{a,b}", "a b", "$HOME", "(touch RUN)", "<(touch RUN)", "|touch RUN", "&", "'!!'", "a\\", "")


class Terminal:
    """An interactive shell, in which `aviso-workers` completes and prints its words."""

    def __init__(self, name: str, home: Path) -> None:
        file, settings = SHELLS[name]
        self.home = home
        self._write("bin/aviso-workers", PROGRAM.format(main=shlex.join(MAIN))).chmod(0o755)
        environment = {"HOME": str(home), "PATH": f"{home / 'bin'}:{os.environ['PATH']}", "TERM": "xterm"}
        shown = subprocess.run(
            [*MAIN, "--show-completion", name],
            env=environment | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        self._write(file, settings.format(prompt=shlex.quote(PROMPT), completion=shown.stdout))
        # Without this directory a new user's fish reads all man pages in the background, and goes on when it has ended.
        (home / ".local/share/fish/generated_completions").mkdir(parents=True)
        self.process = pexpect.spawn(
            programs.find(name, package=name),
            ["-i"],
            env=environment | {"LC_ALL": "C.UTF-8"},
            cwd=home,
            dimensions=(50, 500),
            timeout=PATIENCE_SECONDS,
            encoding="utf-8",
        )
        self.process.expect_exact(PROMPT)

    def _write(self, name: str, text: str) -> Path:
        file = self.home / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def words(self, typed: str) -> list[str]:
        """Type the arguments of `aviso-workers`, then Enter, and return the words that it is given."""
        self.process.send(f"aviso-workers {typed}\r")
        self.process.expect(r"\[words(.*?)\]\r\n")
        return str(self.process.match[1]).split("\x1f")[1:]

    @property
    def has_run(self) -> bool:
        return any(path.name.startswith("RUN") for path in self.home.iterdir())


@pytest.fixture(params=["bash", *(pytest.param(name, marks=pytest.mark.slow) for name in ("zsh", "fish"))])
def terminal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Terminal]:
    made = Terminal(request.param, tmp_path)
    yield made
    made.process.close(force=True)


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_consumer_that_is_called_like_a_command(
    terminal: Terminal, config: Path, nats_server: NatsServer
) -> None:
    client = await nats.connect(nats_server.url)
    await client.request("$JS.API.STREAM.CREATE.MARS", json.dumps({"name": "MARS", "subjects": ["mars.>"]}).encode())
    for name in ("plain=1:2,3@4+5%6-7_8", "x$(touch${IFS}RUN)", "--all"):
        asked = {"stream_name": "MARS", "config": {"durable_name": name, "ack_policy": "explicit"}}
        answer = await client.request(f"$JS.API.CONSUMER.DURABLE.CREATE.MARS.{name}", json.dumps(asked).encode())
        assert b"error" not in answer.data, answer.data
    await client.close()

    show = ["consumers", "show", "--config", "config.yaml", "MARS"]
    assert terminal.words(f"{shlex.join(show)} pl\t") == [*show, "plain=1:2,3@4+5%6-7_8"]
    assert terminal.words(f"{shlex.join(show)} x\t") == [*show, "x"]
    assert terminal.words(f"{shlex.join(show)} -- --a\t") == [*show, "--", "--a"]
    assert not terminal.has_run


@pytest.mark.slow
def test_event_types_that_are_called_like_commands(terminal: Terminal, config: Path) -> None:
    document = json.loads(config.read_text())
    schema = document["notification_schema"]
    names = [f"{index}{each}" for index, each in enumerate((*RUNS, *AFTER_BACKSLASH))]
    for index, name in enumerate(names):
        schema[name] = schema["mars"] | {"topic": {"base": f"base{index}", "key_order": ["class", "step"]}}
    config.write_text(json.dumps(document))

    assert terminal.words("watch --config config.yaml ma\t") == ["watch", "--config", "config.yaml", "mars"]
    for index, _ in enumerate(names):
        assert terminal.words(f"watch --config config.yaml {index}\t") == [
            "watch",
            "--config",
            "config.yaml",
            str(index),
        ]
    assert not terminal.has_run


def test_a_quoted_name_is_one_word(terminal: Terminal) -> None:
    names = [*RUNS, *AFTER_BACKSLASH, *READ]
    assert terminal.words(" ".join(map(quoted, names))) == names
    assert not terminal.has_run
