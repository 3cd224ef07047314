"""The grammar of ``agent-shim``: every command explains itself, and its examples are true."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from agent_shim.cli import commands, probe
from agent_shim.core.paths import Paths


def examples() -> list[str]:
    """Every line of the examples that calls us, without what the shell does with it."""
    lines = [line.strip() for text in commands.EXAMPLES.values() for line in text.splitlines()]
    parts = [part.strip() for line in lines for part in re.split(r"\||&&|#| >", line)]
    return [part[part.index("agent-shim") :] for part in parts if "agent-shim " in part]


@pytest.mark.parametrize("line", examples())
def test_an_example_is_a_command_line(line: str) -> None:
    _, *words = shlex.split(line)

    assert commands.parser().parse_args(words).run


def test_every_command_has_an_example_in_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in commands.EXAMPLES:
        with pytest.raises(SystemExit) as ended:
            commands.parser().parse_args([name, "--help"])
        assert ended.value.code == 0
        assert f"examples:\n  agent-shim {name}" in capsys.readouterr().out.replace("sv exit agent && ", "")


def test_the_overview_names_every_command_that_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        commands.parser().parse_args(["--help"])
    listed = re.findall(r"^    (\w+)\b", capsys.readouterr().out, re.MULTILINE)

    assert sorted(listed) == sorted(commands.EXAMPLES)


def test_probe_knows_the_files_of_the_agent() -> None:
    paths = Paths(Path("/some/base"))
    assert Path("/some/base", probe.SOCKET) == paths.control_socket
    assert Path("/some/base", probe.LOCK) == paths.agent_lock


@pytest.mark.parametrize(
    ("words", "question"),
    [
        (["live"], ("live", "/var/vcap")),
        (["ready", "-b", "/x"], ("ready", "/x")),
        (["--help"], None),
        ([], None),
        (["live", "extra"], None),
    ],
)
def test_a_probe_keeps_its_level(words: list[str], question: tuple[str, str] | None) -> None:
    assert probe.read(words) == question


def test_without_arguments_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main([]) == 2
    assert "\n    status " in capsys.readouterr().err


def test_a_duration_that_is_no_number_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        commands.main(["drain", "--timeout", "soon"])
    assert "argument --timeout: 'soon' is no number of seconds" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--bogus"], ["--bogus", "status"], ["status", "--bogus"]])
def test_an_unknown_option_is_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        commands.main(words)
    assert capsys.readouterr().err.endswith("error: unrecognized arguments: --bogus\n")
