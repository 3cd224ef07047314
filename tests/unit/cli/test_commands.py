"""Tests the command line of ``agent-shim``: help texts and their examples."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from agent_shim.cli import commands, probe
from agent_shim.core.paths import Paths


def examples() -> list[str]:
    """Return all example calls to ``agent-shim``, without shell syntax such as pipes."""
    lines = [line.strip() for text in commands.EXAMPLES.values() for line in text.splitlines()]
    parts = [part.strip() for line in lines for part in re.split(r"\||&&|#| >", line)]
    return [part[part.index("agent-shim") :] for part in parts if "agent-shim " in part]


@pytest.mark.parametrize("line", examples())
def test_each_help_example_is_a_valid_command_line(line: str) -> None:
    _, *words = shlex.split(line)

    assert commands.parser().parse_args(words).run


def test_every_command_has_an_example_in_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in commands.EXAMPLES:
        with pytest.raises(SystemExit) as ended:
            commands.parser().parse_args([name, "--help"])
        assert ended.value.code == 0
        assert f"examples:\n  agent-shim {name}" in capsys.readouterr().out.replace("sv exit agent && ", "")


def test_help_overview_lists_every_command_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        commands.parser().parse_args(["--help"])
    listed = re.findall(r"^    (\w+)\b", capsys.readouterr().out, re.MULTILINE)

    assert sorted(listed) == sorted(commands.EXAMPLES)


def test_probe_uses_the_same_socket_and_lock_as_the_agent() -> None:
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
def test_probe_arguments_select_the_level_and_base_directory(
    words: list[str], question: tuple[str, str] | None
) -> None:
    assert probe.read(words) == question


def test_command_line_without_arguments_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main([]) == 2
    assert "\n    status " in capsys.readouterr().err


def test_error_for_an_invalid_duration_names_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        commands.main(["drain", "--timeout", "soon"])
    assert "argument --timeout: 'soon' is not a number of seconds" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--bogus"], ["--bogus", "status"], ["status", "--bogus"]])
def test_command_line_error_names_the_unknown_option(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        commands.main(words)
    assert capsys.readouterr().err.endswith("error: unrecognized arguments: --bogus\n")
